//! The tree as stacks of functions, and its timeline by threads, for the formats that have both.
//!
//! Processes and threads are not functions here: such formats represent them otherwise. Samples without any frame have
//! the stack [`NO_STACK`], and stacks deeper than [`MAX_DEPTH`] end in [`DEEPER`] where they are written out frame by
//! frame.

use std::borrow::Cow;

use rustc_hash::FxHashMap;

use super::collapsed::NO_STACK;
use crate::model::{Frame, FrameKind, Profile};
pub use crate::stacks_by_line::NONE;
use crate::stacks_by_line::StacksByLine;
use crate::values::Unit;
use crate::view::is_group;
use crate::view::{View, shown_name};

/// Frames of one stack that are written out: viewers fail at some ten thousand, and a thousand is more than can be
/// seen.
pub const MAX_DEPTH: u32 = 1000;
const DEEPER: &str = "[truncated]";

/// A function; all parts as the profile has them, unescaped.
pub struct TrackFunction<'a> {
    pub name: Cow<'a, str>,
    /// Python: the file; else the source file or, without one, the module. May be empty.
    pub file: &'a str,
    /// Python: where it is defined; else 0.
    pub first_line: u32,
    /// `None` for rows that represent no frame.
    pub frame: Option<&'a Frame>,
}

/// Stacks that share their outer parts: each row is the end of a stack.
pub struct StackRows<'a> {
    pub functions: Vec<TrackFunction<'a>>,
    /// By row, the index of its function.
    pub function: Vec<u32>,
    /// By row, the line; 0 if unknown, and where rows are functions.
    pub line: Vec<u32>,
    /// By row, its item in the view.
    pub item: Vec<u32>,
    /// By row, the row that called it, or [`NONE`]; always a lower index.
    pub caller: Vec<u32>,
    /// Samples that ended in each row.
    pub self_counts: Vec<u64>,
    /// By row, the functions of its stack, [`MAX_DEPTH`] at most.
    pub depth: Vec<u32>,
    /// By row, the row at which its stack is truncated: itself if it is not too deep.
    shown: Vec<u32>,
    /// Function that represents deeper frames.
    deeper: u32,
}

impl<'a> StackRows<'a> {
    /// A row for each item of the view.
    pub fn by_function(view: &View<'a>) -> Self {
        let rows = view.items.iter().enumerate();
        let rows = rows.map(|(at, item)| (item.parent, at as u32, 0));
        StackRows::new(view, rows, view.self_counts())
    }

    /// A row for each entry, with its line.
    pub fn by_line(profile: &Profile, view: &View<'a>, entries: &StacksByLine) -> Self {
        let rows = entries.all.iter().map(|entry| (entry.parent, entry.item, entry.line));
        StackRows::new(view, rows, entries.self_amounts(profile, 0))
    }

    /// Rows are (row of the caller, item, line).
    fn new(view: &View<'a>, rows: impl ExactSizeIterator<Item = (u32, u32, u32)>, self_counts: Vec<u64>) -> Self {
        // In the order in which stacks come to them, outermost first.
        let mut functions = vec![TrackFunction::named(NO_STACK)];
        let mut of_identifier = vec![NONE; view.identifiers.len()];
        let count = rows.len();
        let (mut function, mut caller) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let (mut line, mut items) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let (mut shown, mut depth) = (Vec::with_capacity(count), Vec::<u32>::with_capacity(count));
        let group = |item: u32| view.frame(item).is_none_or(is_group);
        for (at, (parent, item, at_line)) in (0u32..).zip(rows) {
            let identifier = view.items[item as usize].identifier;
            // A thread below functions is invalid; in such a file it gets a stack of its own.
            let up = if group(item) || group(view.items[item as usize].parent) {
                NONE
            } else {
                parent
            };
            let here = if up == NONE { 1 } else { depth[up as usize] + 1 };
            function.push(match view.function(identifier) {
                Some(frame) if !group(item) => {
                    let known = &mut of_identifier[identifier as usize];
                    if *known == NONE {
                        *known = functions.len() as u32;
                        functions.push(describe(frame));
                    }
                    *known
                }
                _ => 0,
            });
            line.push(at_line);
            items.push(item);
            caller.push(up);
            shown.push(if here < MAX_DEPTH { at } else { shown[up as usize] });
            depth.push(here.min(MAX_DEPTH));
        }
        let deeper = functions.len() as u32;
        functions.push(TrackFunction::named(DEEPER));
        StackRows {
            functions,
            function,
            line,
            item: items,
            caller,
            self_counts,
            depth,
            shown,
            deeper,
        }
    }

    /// The rows of a stack, innermost first, and whether it goes deeper than they do.
    pub fn path(&self, row: u32) -> (impl Iterator<Item = u32>, bool) {
        let shown = self.shown[row as usize];
        let up = |row: &u32| Some(self.caller[*row as usize]).filter(|up| *up != NONE);
        (std::iter::successors(Some(shown), up), shown != row)
    }

    /// By row, the state that its stack is in; `None`: running. (Stacks of wakers are below states.)
    pub fn states(&self, view: &View<'a>) -> Vec<Option<&'a Frame>> {
        let mut states: Vec<Option<&'a Frame>> = Vec::with_capacity(self.item.len());
        for (item, caller) in self.item.iter().zip(&self.caller) {
            let above = states.get(*caller as usize).copied().flatten();
            let here = view.frame(*item).filter(|frame| frame.kind == FrameKind::State);
            states.push(above.or(here));
        }
        states
    }

    /// Index of the function at the end of a stack that is too deep.
    pub fn deeper(&self) -> u32 {
        self.deeper
    }
}

impl TrackFunction<'static> {
    /// One that is no function of the program.
    fn named(name: &'static str) -> TrackFunction<'static> {
        TrackFunction {
            name: Cow::Borrowed(name),
            file: "",
            first_line: 0,
            frame: None,
        }
    }
}

fn describe(frame: &Frame) -> TrackFunction<'_> {
    let python = frame.kind == FrameKind::Python;
    let name = match shown_name(frame) {
        _ if python && !frame.qualname.is_empty() => Cow::Borrowed(frame.qualname.as_str()),
        name if name.is_empty() => Cow::Borrowed("[unnamed]"),
        name => name,
    };
    let file = match () {
        _ if python => &frame.filename,
        _ if !frame.source.is_empty() => &frame.source,
        _ => &frame.module,
    };
    TrackFunction {
        name,
        file,
        first_line: frame.first_line,
        frame: Some(frame),
    }
}

/// The samples of one thread in chronological order.
pub struct Track {
    pub pid: u32,
    pub tid: u32,
    /// Name of the thread; may be empty.
    pub name: String,
    /// (ns since the start of the profile, row of the stacks, index in the timeline).
    pub samples: Vec<(u64, u32, usize)>,
}

/// Times of the samples.
pub struct Timeline {
    /// By process and thread.
    pub tracks: Vec<Track>,
    /// Samples without a time: the row of the stacks, and self amounts by value type.
    pub untimed: Vec<(u32, Vec<u64>)>,
}

impl Timeline {
    /// Of the stacks that [`StackRows::by_line`] makes of the entries.
    pub fn new(profile: &Profile, entries: &StacksByLine) -> Self {
        let mut tracks: Vec<Track> = Vec::new();
        let mut known: FxHashMap<(u32, u32), usize> = FxHashMap::default();
        for (at, (sample, row)) in profile.timeline.iter().zip(&entries.of_sample).enumerate() {
            if *row == NONE {
                continue;
            }
            let track = *known.entry((sample.pid, sample.tid)).or_insert_with(|| {
                tracks.push(Track {
                    pid: sample.pid,
                    tid: sample.tid,
                    name: String::new(),
                    samples: Vec::new(),
                });
                tracks.len() - 1
            });
            tracks[track].samples.push((sample.time, *row, at));
        }
        for (pid, tid, name) in &profile.meta.threads {
            if let Some(at) = known.get(&(*pid, *tid)) {
                tracks[*at].name.clone_from(name);
            }
        }
        for track in &mut tracks {
            // Samples of several CPUs may come a little out of order.
            if !track.samples.is_sorted_by_key(|(time, ..)| *time) {
                track.samples.sort_by_key(|(time, ..)| *time);
            }
        }
        tracks.sort_by_key(|track| (track.pid, track.pid != track.tid, track.tid));
        Timeline {
            tracks,
            untimed: entries.rest.clone(),
        }
    }
}

impl Track {
    /// `MainThread (tid 4242)`
    pub fn title(&self) -> String {
        match self.name.as_str() {
            "" => format!("tid {}", self.tid),
            name => format!("{name} (tid {})", self.tid),
        }
    }
}

/// ns of CPU time that a sample represents; `None` if unknown.
pub fn period(profile: &Profile) -> Option<u64> {
    1_000_000_000u64.checked_div(profile.meta.rate)
}

/// ns that an amount of the profile's first value takes where samples without a time follow each other; `period` of one count.
pub fn length_of(profile: &Profile, period: u64, amount: u64) -> u64 {
    match profile.count_type().unit {
        Unit::Nanoseconds => amount,
        Unit::Count | Unit::Bytes => period.saturating_mul(amount),
    }
}

/// A stretch of time that a thread spent in one stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackSpan {
    /// ns since the start of the profile.
    pub start: u64,
    pub end: u64,
    /// Row of the stacks.
    pub item: u32,
}

/// The time that each sample represents, in order: it ends at the sample and has the length of the sampling period or,
/// where that is longer, of the interval off the CPU (a shorter one represents others like it). They may overlap.
///
/// A wait and the time without a CPU after it are one sample, with two entries in the timeline at the same time, the wait
/// last: it ends where the other one begins.
pub fn sampled_times(profile: &Profile, track: &Track, period: u64) -> Vec<StackSpan> {
    let known_length = |sample: usize| profile.waits.lengths.get(sample).copied().unwrap_or(0);
    let mut times: Vec<StackSpan> = Vec::with_capacity(track.samples.len());
    let groups = track
        .samples
        .chunk_by(|(time, ..), (next, _, sample)| time == next && known_length(*sample) > 0);
    for parts in groups {
        let first = times.len();
        let mut end = parts[0].0;
        for (at, (_, row, sample)) in parts.iter().enumerate() {
            let length = if at + 1 == parts.len() {
                known_length(*sample).max(period)
            } else {
                // Not longer than it was: the wait before it would be moved.
                known_length(*sample)
            };
            let start = end.saturating_sub(length);
            times.push(StackSpan { start, end, item: *row });
            end = start;
        }
        times[first..].reverse();
    }
    times
}

/// The time spans of the samples: those of [`sampled_times`], but none begins before the end of the one before. In
/// between the thread was not running, or what it did was not sampled.
pub fn spans(profile: &Profile, track: &Track, period: u64) -> Vec<StackSpan> {
    let mut spans: Vec<StackSpan> = Vec::with_capacity(track.samples.len());
    for time in sampled_times(profile, track, period) {
        let before = spans.last().map_or(0, |span| span.end);
        // A timer is never quite on time: what is nearly a period is one.
        let start = if !spans.is_empty() && time.start < before.saturating_add(period / 2) {
            before
        } else {
            time.start
        };
        let end = time.end.max(before);
        spans.push(StackSpan { start, end, ..time });
    }
    spans
}

/// The same with adjacent samples of one stack combined.
pub fn joined(mut spans: Vec<StackSpan>) -> Vec<StackSpan> {
    spans.dedup_by(|next, span| {
        let same = next.item == span.item && next.start == span.end;
        if same {
            span.end = next.end;
        }
        same
    });
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::model::Meta;
    use crate::values::ValueType;
    use crate::waits::Waits;

    /// `samples`: time, row, length of the interval off the CPU; the period is 10.
    #[track_caller]
    fn check(samples: &[(u64, u32, u64)], expected: &[(u64, u64, u32)]) {
        let profile = Profile {
            waits: Waits {
                lengths: samples.iter().map(|(.., length)| *length).collect(),
                ..Waits::default()
            },
            ..Profile::default()
        };
        let rows = samples.iter().enumerate();
        let track = Track {
            pid: 1,
            tid: 1,
            name: String::new(),
            samples: rows.map(|(sample, (time, row, _))| (*time, *row, sample)).collect(),
        };
        let found: Vec<_> = joined(spans(&profile, &track, 10))
            .iter()
            .map(|span| (span.start, span.end, span.item))
            .collect();
        assert_eq!(found, expected, "{samples:?}");
    }

    #[test]
    fn spans_fill_what_was_run() {
        check(&[], &[]);
        check(&[(3, 1, 0)], &[(0, 3, 1)]);
        check(
            &[(50, 1, 0), (60, 1, 0), (71, 2, 0), (80, 2, 0)],
            &[(40, 60, 1), (60, 80, 2)],
        );
        // A pause, and two samples at once.
        check(
            &[(50, 1, 0), (90, 1, 0), (90, 2, 0)],
            &[(40, 50, 1), (80, 90, 1), (90, 90, 2)],
        );
    }

    #[test]
    fn spans_off_the_cpu_have_the_length_of_their_interval() {
        check(
            &[(50, 1, 0), (5000, 2, 4900), (5010, 1, 0)],
            &[(40, 50, 1), (100, 5000, 2), (5000, 5010, 1)],
        );
        // One that began before the recording, one of many short ones, one that overlaps the sample before.
        check(&[(50, 2, 80)], &[(0, 50, 2)]);
        check(&[(50, 1, 0), (100, 2, 3)], &[(40, 50, 1), (90, 100, 2)]);
        check(&[(50, 1, 0), (100, 2, 80)], &[(40, 50, 1), (50, 100, 2)]);
    }

    #[test]
    fn waits_end_where_a_thread_becomes_runnable() {
        check(
            &[(50, 1, 0), (5000, 3, 40), (5000, 2, 4800), (5010, 1, 0)],
            &[(40, 50, 1), (160, 4960, 2), (4960, 5000, 3), (5000, 5010, 1)],
        );
        // For a short time; while it still waits, and was runnable before; for all of the time since it ran.
        check(&[(100, 3, 2), (100, 2, 50)], &[(48, 98, 2), (98, 100, 3)]);
        check(&[(100, 3, 0), (100, 2, 50)], &[(50, 100, 2), (100, 100, 3)]);
        check(
            &[(50, 1, 0), (100, 3, 70), (100, 2, 20)],
            &[(40, 50, 1), (50, 50, 2), (50, 100, 3)],
        );
    }

    #[test]
    fn stacks_of_wakers_are_in_the_state_of_the_waiter() {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        let function = builder.frame(Frame::new(FrameKind::Native, "f"));
        let wait = builder.frame(Frame::new(FrameKind::State, "[waiting: gil]"));
        builder.sample(1, (1, 1), &[(function, 0), (wait, 0), (function, 0)], &[1]);
        let profile = builder.finish(Meta::default());
        let view = View::new(&profile);
        let stacks = StackRows::by_function(&view);
        let states: Vec<_> = stacks
            .states(&view)
            .iter()
            .map(|state| state.map(|frame| frame.name.as_str()))
            .collect();
        let gil = Some("[waiting: gil]");
        assert_eq!(states, [None, None, gil, gil]);
    }
}

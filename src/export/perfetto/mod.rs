//! A profile as a Perfetto trace: a stack sample for each sample of the timeline, with all values, frame kinds, mappings and
//! build IDs; asyncio tasks as asynchronous contexts; and, of profiles that have states of threads, a track of them below each
//! thread.
//!
//! What samples share (frames, call stacks, tasks) is written once, in the packet of the first sample that uses it. Times are
//! ns since the start of the profile. Samples without a time have that of the start.
//!
//! The messages are written by hand, as in [`super::pprof`]: a few fields each, no compiler of protocol buffers.

mod interner;
mod messages;

use std::collections::BTreeSet;
use std::io::{self, BufWriter, Write};

use prost::Message;

use super::thread_tracks::{StackRows, Timeline, Track, period};
use crate::escape;
use crate::profile::model::{FrameKind, Profile};
use crate::profile::stacks_by_line::StacksByLine;
use crate::profile::values::{Unit, ValueType};
use crate::profile::view::View;
use interner::Interner;
use messages::{
    CounterDescriptor, CounterUnit, EventType, ProcessDescriptor, StackSampleDefaults, TracePacket,
    TracePacketDefaults, TrackDescriptor, TrackEvent, TrackThread,
};

/// All packets are of one writer.
const SEQUENCE: u32 = 1;
/// `SEQ_INCREMENTAL_STATE_CLEARED` and `SEQ_NEEDS_INCREMENTAL_STATE`: what was written once begins here, and is needed here.
const SEQUENCE_BEGINS: u32 = 1;
const SEQUENCE_CONTINUES: u32 = 2;
/// Field of the packets in the trace, of type message.
const PACKET: u8 = 1 << 3 | 2;

/// Writes the profile as a trace.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let entries = StacksByLine::new(profile, &view);
    let stacks = StackRows::by_line(profile, &view, &entries);
    let timeline = Timeline::new(profile, &entries);
    let values = TraceValues::of(profile);
    let mut trace = Trace::new(BufWriter::with_capacity(64 << 10, out));
    trace.packet(TracePacket {
        sequence_flags: SEQUENCE_BEGINS,
        trace_packet_defaults: Some(values.defaults()),
        ..TracePacket::default()
    })?;
    for pid in timeline.tracks.iter().map(|track| track.pid).collect::<BTreeSet<_>>() {
        trace.process(pid, profile)?;
    }
    let mut interner = Interner::new(profile, &view, &stacks);
    for track in &timeline.tracks {
        trace.thread(track)?;
        for (time, row, tick) in &track.ticks {
            let amounts = values.order.iter().map(|value| profile.tick_amount(*value, *tick));
            let packet = interner.sample(*row, (track.pid, track.tid), amounts.collect());
            trace.packet(TracePacket {
                timestamp: Some(*time),
                ..packet
            })?;
        }
        if !profile.waits.is_empty() {
            trace.states(track, &state_spans(profile, &view, &stacks, track))?;
        }
    }
    for (row, amounts) in &timeline.untimed {
        let amounts = values
            .order
            .iter()
            .map(|value| amounts.get(*value).copied().unwrap_or(0));
        let packet = interner.sample(*row, (profile.meta.pid, 0), amounts.collect());
        trace.packet(TracePacket {
            timestamp: Some(0),
            ..packet
        })?;
    }
    trace.out.flush()
}

/// The value types in the order of the trace: a time first, which viewers show at first.
struct TraceValues {
    /// Indexes in the profile.
    order: Vec<usize>,
    descriptors: Vec<CounterDescriptor>,
}

impl TraceValues {
    fn of(profile: &Profile) -> TraceValues {
        let kinds: Vec<&ValueType> = profile.value_types().iter().map(|value| &value.kind).collect();
        let mut order: Vec<usize> = (0..kinds.len()).collect();
        order.sort_by_key(|value| kinds[*value].unit != Unit::Nanoseconds); // stable
        let describe = |value: &usize| CounterDescriptor {
            name: escape::line(&kinds[*value].name).into_owned(),
            unit: match kinds[*value].unit {
                Unit::Count => CounterUnit::Count,
                Unit::Nanoseconds => CounterUnit::Nanoseconds,
                Unit::Bytes => CounterUnit::Bytes,
            }
            .into(),
        };
        let descriptors = order.iter().map(describe).collect();
        TraceValues { order, descriptors }
    }

    fn defaults(&self) -> TracePacketDefaults {
        TracePacketDefaults {
            stack_sample_defaults: Some(StackSampleDefaults {
                source: "nativeprof".into(),
                primary_descriptor: self.descriptors.first().cloned(),
                follower_descriptors: self.descriptors.iter().skip(1).cloned().collect(),
            }),
        }
    }
}

/// Writes packets.
struct Trace<W> {
    out: W,
    buffer: Vec<u8>,
}

impl<W: Write> Trace<W> {
    fn new(out: W) -> Self {
        Trace {
            out,
            buffer: Vec::new(),
        }
    }

    /// `sequence_flags`: 0 for a packet that is not the first one.
    fn packet(&mut self, mut packet: TracePacket) -> io::Result<()> {
        packet.trusted_packet_sequence_id = SEQUENCE;
        if packet.sequence_flags == 0 {
            packet.sequence_flags = SEQUENCE_CONTINUES;
        }
        self.buffer.clear();
        self.buffer.push(PACKET);
        packet
            .encode_length_delimited(&mut self.buffer)
            .map_err(io::Error::other)?;
        self.out.write_all(&self.buffer)
    }

    fn process(&mut self, pid: u32, profile: &Profile) -> io::Result<()> {
        let command = if pid == profile.meta.pid {
            &profile.meta.command
        } else {
            ""
        };
        self.packet(TracePacket {
            track_descriptor: Some(TrackDescriptor {
                uuid: process_track(pid),
                process: Some(ProcessDescriptor {
                    pid: pid.cast_signed(),
                    process_name: escape::line(command).into_owned(),
                }),
                ..TrackDescriptor::default()
            }),
            ..TracePacket::default()
        })
    }

    fn thread(&mut self, Track { pid, tid, name, .. }: &Track) -> io::Result<()> {
        self.packet(TracePacket {
            track_descriptor: Some(TrackDescriptor {
                uuid: thread_track(*tid),
                parent_uuid: process_track(*pid),
                thread: Some(TrackThread {
                    pid: pid.cast_signed(),
                    tid: (*tid).into(),
                    thread_name: escape::line(name).into_owned(),
                }),
                ..TrackDescriptor::default()
            }),
            ..TracePacket::default()
        })
    }

    /// A track of the thread's states.
    fn states(&mut self, track: &Track, spans: &[StateSpan<'_>]) -> io::Result<()> {
        let uuid = state_track(track.tid);
        self.packet(TracePacket {
            track_descriptor: Some(TrackDescriptor {
                uuid,
                parent_uuid: thread_track(track.tid),
                name: "state".into(),
                ..TrackDescriptor::default()
            }),
            ..TracePacket::default()
        })?;
        for span in spans {
            for (time, kind, name) in [
                (span.start, EventType::SliceBegin, span.state),
                (span.end, EventType::SliceEnd, ""),
            ] {
                self.packet(TracePacket {
                    timestamp: Some(time),
                    track_event: Some(TrackEvent {
                        r#type: kind.into(),
                        track_uuid: uuid,
                        name: escape::line(name).into_owned(),
                    }),
                    ..TracePacket::default()
                })?;
            }
        }
        Ok(())
    }
}

/// Numbers of tracks: any, but different.
fn process_track(pid: u32) -> u64 {
    1 << 32 | u64::from(pid)
}

fn thread_track(tid: u32) -> u64 {
    2 << 32 | u64::from(tid)
}

fn state_track(tid: u32) -> u64 {
    3 << 32 | u64::from(tid)
}

/// A stretch of time in one state; ns since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StateSpan<'a> {
    start: u64,
    end: u64,
    /// `running`, or as in the name of its frame: `runnable`, `waiting: read pipe`.
    state: &'a str,
}

/// The states of a thread as its samples have them: an interval off the CPU has its length, other samples that of the sampling
/// period; none begins before the end of the one before. Time between them was not sampled. The time in which an event loop
/// polls for suspended tasks is left out: it is known in sums only.
fn state_spans<'a>(profile: &'a Profile, view: &View<'a>, stacks: &StackRows<'_>, track: &Track) -> Vec<StateSpan<'a>> {
    let period = period(profile).unwrap_or(0);
    let mut spans: Vec<StateSpan<'a>> = Vec::with_capacity(track.ticks.len());
    for (time, row, tick) in &track.ticks {
        let frame = view.frame(stacks.item[*row as usize]);
        let state = match frame.filter(|frame| frame.kind == FrameKind::State) {
            None => "running",
            Some(frame) => frame.name.trim_matches(['[', ']']),
        };
        if state.starts_with("awaiting ") {
            continue;
        }
        let length = profile.waits.lengths.get(*tick).copied().unwrap_or(0).max(period);
        let before = spans.last().map_or(0, |span| span.end);
        let start = time.saturating_sub(length).max(before);
        match spans.last_mut() {
            Some(last) if last.state == state && start <= last.end + period / 2 => last.end = (*time).max(last.end),
            _ if start < *time => spans.push(StateSpan {
                start,
                end: *time,
                state,
            }),
            _ => {}
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::build::Builder;
    use crate::profile::model::{Frame, Meta};

    #[test]
    fn states_of_a_thread() {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        let function = builder.frame(Frame::new(FrameKind::Native, "f"));
        let mut lengths = Vec::new();
        for (time, state, length) in [
            (10, "", 0),
            (20, "", 0),
            (50, "[waiting: gil]", 25),
            (60, "[awaiting sleep]", 0),
            (100, "", 0),
        ] {
            let mut stack = vec![(function, 0)];
            if !state.is_empty() {
                stack.push((builder.frame(Frame::new(FrameKind::State, state)), 0));
            }
            builder.sample(time, (7, 8), &stack, &[1]);
            lengths.push(length);
        }
        let mut profile = builder.finish(Meta {
            rate: 100_000_000, // a period of 10 ns
            ..Meta::default()
        });
        profile.waits.lengths = lengths;
        let view = View::new(&profile);
        let entries = StacksByLine::new(&profile, &view);
        let timeline = Timeline::new(&profile, &entries);
        let stacks = StackRows::by_line(&profile, &view, &entries);
        let spans = state_spans(&profile, &view, &stacks, &timeline.tracks[0]);
        let spans: Vec<_> = spans.iter().map(|span| (span.start, span.end, span.state)).collect();
        assert_eq!(
            spans,
            [(0, 20, "running"), (25, 50, "waiting: gil"), (90, 100, "running")]
        );
    }
}

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

use super::thread_tracks::{StackRows, Timeline, Track, period, sampled_times};
use crate::escape;
use crate::model::{Frame, Profile};
use crate::stacks_by_line::StacksByLine;
use crate::values::{Unit, ValueType};
use crate::view::View;
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
    let states = stacks.states(&view);
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
    for (at, track) in timeline.tracks.iter().enumerate() {
        trace.thread(at, track)?;
        for (time, row, sample) in &track.samples {
            let amounts = values.order.iter().map(|value| profile.sample_amount(*value, *sample));
            let packet = interner.sample(*row, (track.pid, track.tid), amounts.collect());
            trace.packet(TracePacket {
                timestamp: Some(*time),
                ..packet
            })?;
        }
        if !profile.waits.is_empty() {
            trace.states(at, &state_spans(profile, &states, track))?;
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

/// The value types in the order of the trace: times first, and of these the one that viewers show at first.
struct TraceValues {
    /// Indexes in the profile.
    order: Vec<usize>,
    descriptors: Vec<CounterDescriptor>,
}

impl TraceValues {
    fn of(profile: &Profile) -> TraceValues {
        let kinds: Vec<&ValueType> = profile.value_types().iter().map(|value| &value.kind).collect();
        let mut order: Vec<usize> = (0..kinds.len()).collect();
        let time = profile.default_time();
        order.sort_by_key(|value| (Some(*value) != time, kinds[*value].unit != Unit::Nanoseconds)); // stable
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

    /// `at`: index of the thread in the timeline.
    fn thread(&mut self, at: usize, Track { pid, tid, name, .. }: &Track) -> io::Result<()> {
        self.packet(TracePacket {
            track_descriptor: Some(TrackDescriptor {
                uuid: thread_track(at),
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

    /// A track of a thread's states. `at`: index of the thread in the timeline.
    fn states(&mut self, at: usize, spans: &[StateSpan<'_>]) -> io::Result<()> {
        let uuid = state_track(at);
        self.packet(TracePacket {
            track_descriptor: Some(TrackDescriptor {
                uuid,
                parent_uuid: thread_track(at),
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

/// Numbers of tracks: any, but different. Threads have that of their index in the timeline: merged profiles of several
/// containers or machines may have a TID in several processes.
fn process_track(pid: u32) -> u64 {
    1 << 32 | u64::from(pid)
}

fn thread_track(at: usize) -> u64 {
    2 << 32 | at as u64
}

fn state_track(at: usize) -> u64 {
    3 << 32 | at as u64
}

/// A stretch of time in one state; ns since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StateSpan<'a> {
    start: u64,
    end: u64,
    /// `running`, or as in the name of its frame: `runnable`, `waiting: read pipe`.
    state: &'a str,
}

/// The states of a thread (`states`: of rows), for the times that its samples represent; none begins before the end of
/// the one before. Time between them was not sampled. The time in which an event loop polls for suspended tasks is left
/// out: it is known in sums only.
fn state_spans<'a>(profile: &Profile, states: &[Option<&'a Frame>], track: &Track) -> Vec<StateSpan<'a>> {
    let period = period(profile).unwrap_or(0);
    let mut spans: Vec<StateSpan<'a>> = Vec::with_capacity(track.samples.len());
    for time in sampled_times(profile, track, period) {
        let state = match states[time.item as usize] {
            None => "running",
            Some(frame) => frame.name.trim_matches(['[', ']']),
        };
        if state.starts_with("awaiting ") {
            continue;
        }
        let before = spans.last().map_or(0, |span| span.end);
        let (start, end) = (time.start.max(before), time.end.max(before));
        match spans.last_mut() {
            Some(last) if last.state == state && start <= last.end.saturating_add(period / 2) => last.end = end,
            _ if start < end => spans.push(StateSpan { start, end, state }),
            _ => {}
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::model::{FrameKind, Meta};

    /// `samples`: time, (pid, tid), state (empty: running), length of the interval off the CPU; the period is 10 ns.
    fn profile(samples: &[(u64, (u32, u32), &str, u64)]) -> Profile {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        let function = builder.frame(Frame::new(FrameKind::Native, "f"));
        for (time, thread, state, _) in samples {
            let mut stack = vec![(function, 0)];
            if !state.is_empty() {
                stack.push((builder.frame(Frame::new(FrameKind::State, *state)), 0));
            }
            builder.sample(*time, *thread, &stack, &[1]);
        }
        let mut profile = builder.finish(Meta {
            rate: 100_000_000,
            ..Meta::default()
        });
        profile.waits.lengths = samples.iter().map(|(.., length)| *length).collect();
        profile
    }

    /// `samples`: time, state, length.
    #[track_caller]
    fn check_states(samples: &[(u64, &str, u64)], expected: &[(u64, u64, &str)]) {
        let samples: Vec<_> = samples
            .iter()
            .map(|(time, state, length)| (*time, (7, 8), *state, *length))
            .collect();
        let profile = profile(&samples);
        let view = View::new(&profile);
        let entries = StacksByLine::new(&profile, &view);
        let timeline = Timeline::new(&profile, &entries);
        let stacks = StackRows::by_line(&profile, &view, &entries);
        let states = stacks.states(&view);
        let spans = state_spans(&profile, &states, &timeline.tracks[0]);
        let spans: Vec<_> = spans.iter().map(|span| (span.start, span.end, span.state)).collect();
        assert_eq!(spans, expected);
    }

    #[test]
    fn states_of_a_thread() {
        check_states(
            &[
                (10, "", 0),
                (20, "", 0),
                (50, "[waiting: gil]", 25),
                (60, "[awaiting sleep]", 0),
                (100, "", 0),
            ],
            &[(0, 20, "running"), (25, 50, "waiting: gil"), (90, 100, "running")],
        );
    }

    #[test]
    fn waits_end_where_a_thread_becomes_runnable() {
        check_states(
            &[
                (100, "", 0),
                (200, "[runnable]", 15),
                (200, "[waiting: read pipe]", 80),
                (210, "", 0),
            ],
            &[
                (90, 100, "running"),
                (105, 185, "waiting: read pipe"),
                (185, 200, "runnable"),
                (200, 210, "running"),
            ],
        );
    }

    #[test]
    fn threads_with_one_tid_have_tracks_of_their_own() {
        let profile = profile(&[(10, (7, 8), "", 0), (20, (9, 8), "[waiting: gil]", 10)]);
        let mut out = Vec::new();
        write(&profile, &mut out).unwrap();
        let mut bytes = &out[..];
        let mut tracks = Vec::new();
        while let [PACKET, rest @ ..] = bytes {
            bytes = rest;
            let packet = TracePacket::decode_length_delimited(&mut bytes).unwrap();
            tracks.extend(packet.track_descriptor);
        }
        assert!(bytes.is_empty());
        let numbers: BTreeSet<u64> = tracks.iter().map(|track| track.uuid).collect();
        assert_eq!(
            (tracks.len(), numbers.len()),
            (6, 6),
            "of each process, thread and its states"
        );
        for track in tracks.iter().filter(|track| track.name == "state") {
            let thread = tracks.iter().find(|thread| thread.uuid == track.parent_uuid).unwrap();
            assert!(thread.thread.is_some(), "states are below their thread");
        }
        let pids: Vec<i32> = tracks
            .iter()
            .filter_map(|track| Some(track.thread.as_ref()?.pid))
            .collect();
        assert_eq!(pids, [7, 9]);
    }
}

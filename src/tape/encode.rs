//! Tapes to bytes; `decode` is the reverse.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use rustc_hash::FxHashMap;

use super::responses::{Mapped, MemoryRange, Response, SystemResponses, When};
use super::{MAX_BYTES, Mark, Tape, TapeHeader, TapeOptions, VERSION};
use crate::arch::{GPRS, TAPE_CPU};
use crate::codec::Encoder;
use crate::event::{Event, Holder, Part, Pid, Sample, SpanRecords, StackBytes, Suspension, Tid, TimeSpent, WakeUp};
use crate::process::file_content::{Content, Sparse};

pub use super::decode::{parse, read};

pub(super) const MAGIC: &[u8] = b"nativeprof tape\n";
/// Shorter runs that equal the previous stack are stored again: a reference would take as much.
const MIN_REPEAT: usize = 16;
/// Bytes of an event without its lists, at most: of a sample, with the lengths of what repeats the previous stack.
const EVENT_HEADER_SIZE: usize = 8 * GPRS + 294;

/// Parts that a sample has.
pub(super) const HAS_TIME_SPENT: u8 = 1;
pub(super) const HAS_WAKE_UP: u8 = 1 << 1;
pub(super) const HAS_DISPATCHER: u8 = 1 << 2;
pub(super) const HOLDS_LOCK: u8 = 1 << 3;
pub(super) const HAS_SYSTEM_CALL: u8 = 1 << 4;
/// With the number of a system call, which is less: what it polls follows.
pub(super) const HAS_POLLED: u16 = 1 << 15;
pub(super) const HAS_SUSPENSION: u8 = 1 << 5;
pub(super) const HAS_SPANS: u8 = 1 << 6;
pub(super) const HAS_TASKS: u8 = 1 << 7;
/// Bytes of a file or a piece of one, besides its content.
const FILE_HEADER_SIZE: u64 = 12;

/// Do these unpacked bytes begin like a tape?
pub fn is_tape(raw: &[u8]) -> bool {
    raw.starts_with(MAGIC)
}

/// Packs a tape.
pub fn write(tape: &Tape) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to memory does not fail.
    let _ = gzip.write_all(&unpacked(tape));
    gzip.finish().unwrap_or_default()
}

/// The same, not compressed.
pub(super) fn unpacked(tape: &Tape) -> Vec<u8> {
    let mut w = TapeWriter::default();
    w.out.0.extend(MAGIC);
    w.out.u32(VERSION | u32::from(TAPE_CPU) << 16);
    w.header(&tape.header);
    let mut before: FxHashMap<(Pid, Tid), &StackBytes> = FxHashMap::default();
    w.out.count(tape.events.len());
    for event in &tape.events {
        w.event(event, &mut before);
    }
    w.marks(&tape.marks);
    w.responses(&tape.responses);
    w.out.option(tape.kernel.as_deref().map(str::as_bytes));
    w.out.count(tape.files.len());
    let missing = Sparse::default();
    for (file, left) in tape.files.iter().zip((1..=tape.files.len() as u64).rev()) {
        // Stacks are worse without a file; a tape that is too long to be read is lost as a whole.
        let room = MAX_BYTES.saturating_sub(w.out.0.len() as u64 + FILE_HEADER_SIZE * left);
        let file: &Sparse = match file {
            Content::Bytes(b) if size_of_pieces(b) <= room => b,
            _ => &missing,
        };
        w.out.u64(file.len());
        w.out.count(file.pieces().len());
        for (at, bytes) in file.pieces() {
            w.out.u64(*at);
            w.out.bytes(bytes);
        }
    }
    w.out.0
}

fn size_of_pieces(file: &Sparse) -> u64 {
    let pieces = file.pieces().iter();
    pieces.map(|(_, bytes)| FILE_HEADER_SIZE + bytes.len() as u64).sum()
}

/// Bytes of an event on a tape, at most: with its whole stack, as the reader counts them.
pub(super) fn max_size(event: &Event) -> u64 {
    let lists: usize = match event {
        Event::Sample(s) => {
            let words = s.kernel.len() + s.stack.holes.len();
            let frames = s.python.len() + s.anchors.len();
            let awaiters = s.tasks.iter().flat_map(|task| &task.awaiters);
            let awaiters: usize = awaiters.map(|(_, name)| 20 + name.bytes.len()).sum();
            let tasks: usize = s.tasks.iter().map(|task| 32 + task.name.bytes.len()).sum();
            let activity = 17 * s.wake_up.holders.len() + s.spans.package.len() + s.spans.context.len();
            s.stack.bytes.len() + 8 * words + 30 * frames + activity + tasks + awaiters
        }
        Event::Mmap { path, .. } => path.len(),
        Event::Exec { comm, .. } | Event::Comm { comm, .. } => comm.len(),
        Event::Code { copy, .. } => copy.parts.iter().map(|part| 12 + part.bytes.len()).sum(),
        Event::Fork { .. }
        | Event::Thread { .. }
        | Event::Exit { .. }
        | Event::Lost(_)
        | Event::MemoryRange(_)
        | Event::Free(_) => 0,
    };
    (EVENT_HEADER_SIZE + lists) as u64
}

#[derive(Default)]
struct TapeWriter {
    out: Encoder,
}

impl TapeWriter {
    fn header(&mut self, h: &TapeHeader) {
        self.out.u32(h.pid);
        self.out.u8(h.attached.into());
        self.out.u64(h.rate);
        self.out.u64(h.began);
        self.out.u64(h.start.to_bits());
        self.out.u64(h.duration.to_bits());
        for text in [&h.event, &h.backend, &h.command] {
            self.out.bytes(text.as_bytes());
        }
        self.options(&h.options);
    }

    fn options(&mut self, options: &TapeOptions) {
        for time in [options.weighted, options.lag] {
            self.optional(time);
        }
        let flags = [
            options.gil_only,
            options.tasks,
            options.workers,
            options.spans,
            options.thread_context,
        ];
        flags.into_iter().for_each(|flag| self.out.u8(flag.into()));
        self.out.u8(options.wakers.is_some().into());
        self.out.u8(options.wakers.unwrap_or(false).into());
    }

    fn optional(&mut self, number: Option<u64>) {
        self.out.u8(number.is_some().into());
        self.out.u64(number.unwrap_or(0));
    }

    fn marks(&mut self, marks: &[(u32, Mark)]) {
        self.out.count(marks.len());
        let mut before = 0;
        for (at, mark) in marks {
            self.out.u32(at.saturating_sub(before));
            self.out.u8(match mark {
                Mark::Turn => 0,
                Mark::End => 1,
            });
            before = *at;
        }
    }

    fn event<'a>(&mut self, event: &'a Event, before: &mut FxHashMap<(Pid, Tid), &'a StackBytes>) {
        match event {
            Event::Sample(s) => {
                self.out.u8(0);
                self.sample(s, before.get(&(s.pid, s.tid)).copied());
                before.insert((s.pid, s.tid), &s.stack);
            }
            Event::Mmap {
                pid,
                start,
                end,
                offset,
                path,
            } => {
                self.out.u8(1);
                self.out.u32(*pid);
                [start, end, offset].into_iter().for_each(|w| self.out.u64(*w));
                self.out.bytes(path);
            }
            Event::Exec { pid, comm } => {
                self.out.u8(2);
                self.out.u32(*pid);
                self.out.bytes(comm);
            }
            Event::Fork { pid, parent } => {
                self.out.u8(3);
                self.out.u32(*pid);
                self.out.u32(*parent);
            }
            Event::Thread { pid, tid } => {
                self.out.u8(4);
                self.out.u32(*pid);
                self.out.u32(*tid);
            }
            Event::Comm { pid, tid, comm } => {
                self.out.u8(5);
                self.out.u32(*pid);
                self.out.u32(*tid);
                self.out.bytes(comm);
            }
            Event::Exit { pid, tid } => {
                self.out.u8(6);
                self.out.u32(*pid);
                self.out.u32(*tid);
            }
            // Recordings of memory have no tape.
            Event::MemoryRange(_) | Event::Free(_) => {
                self.out.u8(7);
                self.out.u64(0);
            }
            Event::Lost(n) => {
                self.out.u8(7);
                self.out.u64(*n);
            }
            // Not recorded.
            Event::Code { pid, copy } => {
                self.out.u8(8);
                self.out.u32(*pid);
                self.out.u64(copy.code);
                self.out.u32(copy.fingerprint);
                self.out.count(copy.parts.len());
                copy.parts.iter().for_each(|part| self.part(part));
            }
        }
    }

    fn sample(&mut self, s: &Sample, before: Option<&StackBytes>) {
        self.pair((s.pid, s.tid));
        self.sample_content(s, before);
    }

    /// A sample without its thread.
    fn sample_content(&mut self, s: &Sample, before: Option<&StackBytes>) {
        self.out.u64(s.time);
        self.out.u8(s.regs.is_some().into());
        if let Some(r) = &s.regs {
            r.gpr.iter().for_each(|g| self.out.u64(*g));
            self.out.u64(r.ip);
            self.out.u32(r.known);
        }
        self.out.u8(s.walk as u8);
        self.out.words(&s.kernel);
        for refs in [&s.python, &s.anchors] {
            self.out.count(refs.len());
            for f in refs {
                [f.frame, f.code, f.instr].into_iter().for_each(|w| self.out.u64(w));
                self.out.u32(f.fingerprint);
                self.out.u8(f.owner);
                self.out.u8(f.entry.into());
            }
        }
        self.out.words(&s.stack.holes);
        self.out.u64(s.stack.base);
        self.out.count(s.stack.bytes.len());
        let bytes = &s.stack.bytes;
        let same = |at: usize| before.is_some_and(|b| old_byte(b, s.stack.base, at) == Some(bytes[at]));
        self.repeating(bytes, &same);
        self.activity(s);
    }

    /// Alternately: the number of bytes that equal older ones, and new bytes; `same`: whether the byte there does.
    fn repeating(&mut self, bytes: &[u8], same: &dyn Fn(usize) -> bool) {
        let run = |from: usize| (from..bytes.len()).take_while(|at| same(*at)).count();
        let mut at = 0;
        while at < bytes.len() {
            let repeated = run(at);
            let new_from = at + repeated;
            let mut end = new_from;
            while end < bytes.len() {
                let n = run(end);
                if n >= MIN_REPEAT || end + n == bytes.len() && n > 0 {
                    break;
                }
                end += n.max(1);
            }
            self.out.count(repeated);
            self.out.bytes(&bytes[new_from..end]);
            at = end;
        }
    }

    /// What a sample says of more than its stack.
    fn activity(&mut self, s: &Sample) {
        let parts = [
            (HAS_TIME_SPENT, s.time_spent != TimeSpent::default()),
            (HAS_WAKE_UP, s.wake_up != WakeUp::default()),
            (HAS_DISPATCHER, s.dispatcher.is_some()),
            (HOLDS_LOCK, s.holds_lock),
            (HAS_SYSTEM_CALL, s.system_call.is_some()),
            (HAS_SUSPENSION, s.suspended.is_some()),
            (HAS_SPANS, !s.spans.is_empty()),
            (HAS_TASKS, !s.tasks.is_empty()),
        ];
        let known = parts
            .into_iter()
            .filter(|(_, has)| *has)
            .fold(0, |known, (bit, _)| known | bit);
        self.out.u8(known);
        if known & HAS_TIME_SPENT != 0 {
            let t = &s.time_spent;
            let lengths = [t.runnable_length, t.throttled_length, t.blocked_length];
            let times = [t.cpu, t.runnable, t.throttled, t.blocked].into_iter().chain(lengths);
            times.for_each(|time| self.out.u64(time));
        }
        if known & HAS_WAKE_UP != 0 {
            self.wake_up(&s.wake_up);
        }
        if let Some(dispatcher) = &s.dispatcher {
            self.out.u32(dispatcher.tid);
            self.out.u8(dispatcher.is_unchanged.into());
        }
        if let Some(call) = s.system_call {
            self.out.u16(call | if s.polled.is_some() { HAS_POLLED } else { 0 });
            if let Some(polled) = s.polled {
                self.out.u32(polled.descriptor);
                self.out.u16(polled.events);
            }
        }
        if let Some(suspended) = s.suspended {
            self.out.u8(match suspended {
                Suspension::Stopped => 0,
                Suspension::Frozen => 1,
            });
        }
        if known & HAS_SPANS != 0 {
            let SpanRecords { package, context } = &s.spans;
            [package, context].into_iter().for_each(|record| self.out.bytes(record));
        }
        if known & HAS_TASKS != 0 {
            self.out.count(s.tasks.len());
            for task in &s.tasks {
                self.out.u64(task.task);
                self.out.u64(task.frame);
                self.part(&task.name);
                self.out.count(task.awaiters.len());
                for (awaiter, name) in &task.awaiters {
                    self.out.u64(*awaiter);
                    self.part(name);
                }
            }
        }
    }

    fn wake_up(&mut self, wake_up: &WakeUp) {
        self.out.u64(wake_up.time);
        let (pid, tid) = wake_up.waker.unwrap_or_default();
        self.out.u8(wake_up.waker.is_some().into());
        self.out.u32(pid);
        self.out.u32(tid);
        self.out.u64(wake_up.holder);
        self.out.count(wake_up.holders.len());
        for (holder, time) in &wake_up.holders {
            let (is_thread, number) = match holder {
                Holder::Thread(tid) => (true, (*tid).into()),
                Holder::State(state) => (false, *state),
            };
            self.out.u8(is_thread.into());
            self.out.u64(number);
            self.out.u64(*time);
        }
        self.out.u8(wake_up.wakes.is_some().into());
        self.out.u32(wake_up.wakes.unwrap_or(0));
    }

    fn part(&mut self, part: &Part) {
        self.out.u64(part.avma);
        self.out.bytes(&part.bytes);
    }

    fn pair(&mut self, (a, b): (u32, u32)) {
        self.out.u32(a);
        self.out.u32(b);
    }

    fn text(&mut self, text: Option<&str>) {
        self.out.option(text.map(str::as_bytes));
    }

    /// A list of responses; `value` also has the last response to the same call.
    fn list<K: PartialEq, V>(
        &mut self,
        all: &[Response<K, V>],
        key: impl Fn(&mut Self, &K),
        value: impl Fn(&mut Self, &V, Option<&V>),
    ) {
        self.out.count(all.len());
        let mut last: Option<&Response<K, V>> = None;
        for response in all {
            key(self, &response.key);
            let When { after, call } = response.when;
            self.pair((after, call));
            let old = last.filter(|last| last.key == response.key).map(|last| &last.value);
            value(self, &response.value, old);
            last = Some(response);
        }
    }

    fn responses(&mut self, a: &SystemResponses) {
        let number = |w: &mut Self, n: &u32| w.out.u32(*n);
        let pair = |w: &mut Self, ids: &(u32, u32)| w.pair(*ids);
        self.list(&a.maps, number, |w, text, _| w.out.option(text.as_deref()));
        self.list(&a.stack_ends, number, |w, end, _| w.out.u64(*end));
        self.list(&a.threads, number, |w, tids, _| {
            w.out.count(tids.len());
            tids.iter().for_each(|tid| w.out.u32(*tid));
        });
        self.list(&a.names, pair, |w, name, _| w.text(name.as_deref()));
        let mapped = |w: &mut Self, (pid, start, path): &Mapped| {
            w.out.u32(*pid);
            w.out.u64(*start);
            w.out.bytes(path);
        };
        self.list(&a.opened, mapped, |w, file, _| w.out.u32(file.unwrap_or(u32::MAX)));
        let range = |w: &mut Self, (pid, at, len): &MemoryRange| {
            w.out.u32(*pid);
            w.out.u64(*at);
            w.out.u32(*len);
        };
        self.list(&a.reads, range, |w, bytes, old| {
            w.out.count(bytes.len());
            let same = |at: usize| old.is_some_and(|old| old.get(at) == bytes.get(at));
            w.repeating(bytes, &same);
        });
        self.list(&a.clocks, |w, clock| w.out.u8(*clock), |w, time, _| w.out.u64(*time));
        self.list(&a.calls, pair, |w, call, _| w.optional(*call));
        self.list(&a.sleeping, pair, |w, sample, _| {
            w.out.u8(sample.is_some().into());
            if let Some(sample) = sample {
                w.sample_content(sample, None);
            }
        });
        self.list(&a.descriptors, pair, |w, name, _| w.text(name.as_deref()));
        let table = |w: &mut Self, (pid, name): &(Pid, String)| {
            w.out.u32(*pid);
            w.out.bytes(name.as_bytes());
        };
        self.list(&a.networks, table, |w, text, _| w.text(text.as_deref()));
    }
}

/// The byte of `old` at the address `base + at`.
fn old_byte(old: &StackBytes, base: u64, at: usize) -> Option<u8> {
    let at = base.checked_add(at as u64)?.checked_sub(old.base)?;
    old.bytes.get(usize::try_from(at).ok()?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{ALL, Regs};
    use crate::event::{CodeCopy, Dispatcher, Polled, RawPyFrame, RunningTask};

    /// A sample with all that one can have besides a stack.
    fn with_activity() -> Sample {
        let name = |avma| Part {
            avma,
            bytes: vec![7; 48],
        };
        Sample {
            pid: 1,
            tid: 2,
            time: 3,
            time_spent: TimeSpent {
                cpu: 1,
                runnable: 2,
                throttled: 3,
                blocked: 4,
                runnable_length: 5,
                throttled_length: 6,
                blocked_length: 7,
            },
            wake_up: WakeUp {
                time: 9,
                waker: Some((4, 5)),
                holder: 6,
                holders: vec![(Holder::Thread(7), 8), (Holder::State(u64::MAX), 9)],
                wakes: Some(10),
            },
            dispatcher: Some(Dispatcher {
                tid: 11,
                is_unchanged: true,
            }),
            holds_lock: true,
            system_call: Some(202),
            polled: Some(Polled {
                descriptor: 18,
                events: 19,
            }),
            suspended: Some(Suspension::Frozen),
            spans: SpanRecords {
                package: vec![1; 60],
                context: vec![2; 70],
            },
            tasks: vec![
                RunningTask {
                    task: 12,
                    frame: 13,
                    name: name(14),
                    awaiters: vec![(15, name(16)), (17, Part::default())],
                };
                2
            ],
            ..Sample::default()
        }
    }

    #[test]
    fn a_tape_has_all_of_its_recording() {
        let (full, plain) = (with_activity(), Sample::default());
        let suspended = Sample {
            suspended: Some(Suspension::Stopped),
            system_call: Some(0),
            ..Sample::default()
        };
        let response = |after, call, value: &[u8]| Response {
            key: (1, 0x1000, 32),
            when: When { after, call },
            value: value.to_vec(),
        };
        let mut changed = [5; 32];
        changed[7] = 6;
        let tape = Tape {
            header: TapeHeader {
                options: TapeOptions {
                    weighted: Some(5),
                    lag: Some(6),
                    tasks: true,
                    wakers: Some(false),
                    ..TapeOptions::default()
                },
                ..TapeHeader::default()
            },
            events: [&full, &plain, &suspended]
                .map(|s| Event::Sample(Box::new(s.clone())))
                .to_vec(),
            marks: vec![(1, Mark::Turn), (1, Mark::Turn), (3, Mark::End)],
            responses: SystemResponses {
                reads: vec![
                    response(0, 0, &[5; 32]),
                    response(2, 1, &changed),
                    response(3, 0, &changed[..9]),
                ],
                clocks: vec![Response {
                    key: 0,
                    when: When { after: 1, call: 2 },
                    value: 3,
                }],
                sleeping: vec![Response {
                    key: (full.pid, full.tid),
                    when: When::default(),
                    value: Some(Box::new(full.clone())),
                }],
                ..SystemResponses::default()
            },
            ..Tape::default()
        };
        let raw = unpacked(&tape);
        let read = parse(&raw).expect("a good tape");
        assert_eq!(read.header, tape.header);
        assert!(read.events == tape.events && read.marks == tape.marks);
        assert_eq!(read.responses.reads, tape.responses.reads);
        assert_eq!(read.responses.clocks, tape.responses.clocks);
        assert_eq!(read.responses.sleeping, tape.responses.sleeping);
        for len in 0..raw.len() {
            assert!(parse(&raw[..len]).is_err(), "{len} bytes");
        }
    }

    /// Stacks that repeat the previous one in parts need the most lengths in addition.
    #[test]
    fn events_are_not_larger_than_their_maximum() {
        let sample = |bytes: Vec<u8>| {
            Event::Sample(Box::new(Sample {
                pid: 1,
                tid: 1,
                regs: Some(Regs {
                    gpr: [1; GPRS],
                    ip: 2,
                    known: ALL,
                }),
                stack: StackBytes {
                    base: 0x1000,
                    bytes,
                    holes: vec![1],
                },
                kernel: vec![3; 5],
                python: vec![RawPyFrame::default(); 6],
                anchors: vec![RawPyFrame::default(); 7],
                ..Sample::default()
            }))
        };
        let stripes = |period: usize| sample((0..4096usize).map(|i| u8::from(i.is_multiple_of(period))).collect());
        let copy = CodeCopy {
            code: 1,
            fingerprint: 2,
            parts: vec![
                Part {
                    avma: 1,
                    bytes: vec![2; 40],
                };
                5
            ],
        };
        let events = [
            sample(vec![0; 4096]),
            stripes(MIN_REPEAT + 1),
            sample(vec![0; 4096]),
            stripes(MIN_REPEAT),
            sample(Vec::new()),
            Event::Sample(Box::new(with_activity())),
            Event::Code {
                pid: 1,
                copy: Box::new(copy),
            },
            Event::Mmap {
                pid: 1,
                start: 2,
                end: 3,
                offset: 4,
                path: b"/usr/lib/libc.so.6".to_vec(),
            },
            Event::Comm {
                pid: 1,
                tid: 2,
                comm: b"name".to_vec(),
            },
            Event::Lost(1),
        ];
        let mut before = FxHashMap::default();
        for event in &events {
            let mut w = TapeWriter::default();
            w.event(event, &mut before);
            assert!(
                w.out.0.len() as u64 <= max_size(event),
                "{} bytes: {event:?}",
                w.out.0.len()
            );
        }
    }
}

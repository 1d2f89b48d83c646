//! Bytes to tapes. The input is untrusted: every length is bounded by what is left of the input, and everything that
//! expands (gzip, stacks that repeat their predecessor, zeros of files) by fixed limits.

use std::hash::Hash;
use std::io::Read;
use std::sync::Arc;

use flate2::read::GzDecoder;
use rustc_hash::FxHashMap;

use super::encode::MAGIC;
use super::encode::{
    HAS_DISPATCHER, HAS_POLLED, HAS_SPANS, HAS_SUSPENSION, HAS_SYSTEM_CALL, HAS_TASKS, HAS_TIME_SPENT, HAS_WAKE_UP,
    HOLDS_LOCK,
};
use super::responses::{Response, SystemResponses, When};
use super::{FIRST_VERSION, MAX_BYTES, MAX_FILE, Mark, Tape, TapeHeader, TapeOptions, VERSION};
use crate::arch::{GPRS, Regs, TAPE_CPU};
use crate::codec::Decoder;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{
    CodeCopy, Dispatcher, Event, Holder, Part, Pid, Polled, RawPyFrame, RunningTask, Sample, SpanRecords, StackBytes,
    Suspension, Tid, TimeSpent, WakeUp, WalkStatus,
};
use crate::limits::{MAX_CONTEXT, MAX_SPAN};
use crate::process::file_content::{Content, Sparse};

/// Unpacks a tape.
///
/// # Errors
/// `Data`, for anything but a complete tape of a supported version.
pub fn read(packed: &[u8]) -> Result<Tape> {
    if !packed.starts_with(&[0x1f, 0x8b]) {
        return Err(no_tape());
    }
    let mut raw = Vec::new();
    let unpacked = GzDecoder::new(packed).take(MAX_BYTES + 1).read_to_end(&mut raw);
    unpacked.map_err(|e| damaged("decompression failed").why(e.to_string()))?;
    if raw.len() as u64 > MAX_BYTES {
        return Err(damaged("it decompresses to more than the maximum tape size"));
    }
    parse(&raw)
}

/// Decodes a tape that is already unpacked.
///
/// # Errors
/// As [`read`].
pub fn parse(raw: &[u8]) -> Result<Tape> {
    parse_within(raw, MAX_BYTES)
}

/// The same of a tape whose stacks may have so many bytes together.
pub(super) fn parse_within(raw: &[u8], stacks: u64) -> Result<Tape> {
    let mut r = TapeReader {
        input: Decoder(raw),
        stacks,
        times: MAX_TIME,
        version: VERSION,
    };
    if r.input.take(MAGIC.len()) != Some(MAGIC) {
        return Err(no_tape());
    }
    let version = r.input.u32();
    if let Some(cpu) = version.map(|v| (v >> 16) as u16).filter(|cpu| *cpu != TAPE_CPU)
        && let Some(name) = match cpu {
            0 => Some("x86-64"),
            183 => Some("aarch64"),
            _ => None,
        }
    {
        return Err(Error::new(ErrorKind::Data, "this tape cannot be read")
            .why(format!(
                "it was recorded on {name}, whose registers and instructions this CPU does not have"
            ))
            .hint(format!("use a build of nativeprof for {name}")));
    }
    match version.map(|v| v & 0xffff) {
        Some(version @ FIRST_VERSION..=VERSION) => r.version = version,
        version => {
            return Err(Error::new(ErrorKind::Data, "this tape cannot be read")
                .why(format!(
                    "its format version is {}; supported versions are {FIRST_VERSION} to {VERSION}",
                    version.unwrap_or(0)
                ))
                .hint("use the version of nativeprof that wrote it"));
        }
    }
    r.tape().ok_or_else(|| damaged("it is truncated or inconsistent"))
}

fn no_tape() -> Error {
    Error::new(ErrorKind::Data, "this is not a tape")
        .why("it does not start with the header of a tape")
        .hint("record one with `nativeprof record --save-tape FILE ...`; for a profile, use `nativeprof export` or `report`")
}

fn damaged(why: &str) -> Error {
    Error::new(ErrorKind::Data, "the tape is damaged")
        .why(why)
        .hint("copy the tape again, or record another one with `nativeprof record --save-tape FILE ...`")
}

struct TapeReader<'a> {
    input: Decoder<'a>,
    /// Bytes that stacks and memory may still take.
    stacks: u64,
    /// What the times that samples represent may still amount to, ns.
    times: u64,
    version: u32,
}

/// Times of clocks, and all times that samples represent together, ns, at most: there is room to add some.
const MAX_TIME: u64 = 1 << 61;
/// The first version with marks, and what goes with them.
const MARKS: u32 = 4;

impl TapeReader<'_> {
    fn tape(mut self) -> Option<Tape> {
        let header = self.header()?;
        let mut before: FxHashMap<(Pid, Tid), usize> = FxHashMap::default();
        let mut events: Vec<Event> = Vec::new();
        for _ in 0..self.input.u32()? {
            let event = self.event(&events, &before)?;
            if let Event::Sample(s) = &event {
                before.insert((s.pid, s.tid), events.len());
            }
            events.push(event);
        }
        let mut marks = Vec::new();
        if self.version >= MARKS {
            let mut at = 0u32;
            marks = self.input.list(5, |r| {
                at = at.checked_add(r.u32()?)?;
                let mark = match r.u8()? {
                    0 => Mark::Turn,
                    1 => Mark::End,
                    _ => return None,
                };
                Some((at, mark))
            })?;
        }
        let responses = self.responses()?;
        let kernel = self.input.option()?.map(|b| String::from_utf8_lossy(b).into_owned());
        let files = self.input.list(12, file)?;
        self.input.is_empty().then_some(Tape {
            header,
            events,
            marks,
            responses,
            kernel,
            files,
        })
    }

    fn header(&mut self) -> Option<TapeHeader> {
        Some(TapeHeader {
            pid: self.input.u32()?,
            attached: self.input.flag()?,
            rate: self.input.u64()?,
            began: self.time()?,
            start: f64::from_bits(self.input.u64()?),
            duration: f64::from_bits(self.input.u64()?),
            event: self.input.text()?,
            backend: self.input.text()?,
            command: self.input.text()?,
            options: if self.version >= MARKS {
                self.options()?
            } else {
                TapeOptions::default()
            },
        })
    }

    fn options(&mut self) -> Option<TapeOptions> {
        let r = &mut self.input;
        let mut time = || Some(r.flag()?.then_some(r.u64().filter(|time| *time <= MAX_TIME)?));
        let (weighted, lag) = (time()?, time()?);
        Some(TapeOptions {
            weighted,
            lag,
            gil_only: r.flag()?,
            tasks: r.flag()?,
            workers: r.flag()?,
            spans: r.flag()?,
            thread_context: r.flag()?,
            wakers: r.flag()?.then_some(r.flag()?),
        })
    }

    fn event(&mut self, events: &[Event], before: &FxHashMap<(Pid, Tid), usize>) -> Option<Event> {
        let kind = self.input.u8()?;
        if kind == 7 {
            return Some(Event::Lost(self.input.u64()?));
        }
        let pid = self.input.u32()?;
        Some(match kind {
            0 => {
                let tid = self.input.u32()?;
                let old = before.get(&(pid, tid)).and_then(|i| match events.get(*i)? {
                    Event::Sample(s) => Some(&s.stack),
                    _ => None,
                });
                Event::Sample(Box::new(self.sample(pid, tid, old)?))
            }
            1 => Event::Mmap {
                pid,
                start: self.input.u64()?,
                end: self.input.u64()?,
                offset: self.input.u64()?,
                path: self.input.bytes()?.to_vec(),
            },
            2 => Event::Exec {
                pid,
                comm: self.input.bytes()?.to_vec(),
            },
            3 => Event::Fork {
                pid,
                parent: self.input.u32()?,
            },
            4 => Event::Thread {
                pid,
                tid: self.input.u32()?,
            },
            5 => Event::Comm {
                pid,
                tid: self.input.u32()?,
                comm: self.input.bytes()?.to_vec(),
            },
            6 => Event::Exit {
                pid,
                tid: self.input.u32()?,
            },
            8 => {
                let copy = CodeCopy {
                    code: self.input.u64()?,
                    fingerprint: self.input.u32()?,
                    parts: self.input.list(12, part)?,
                };
                Event::Code {
                    pid,
                    copy: Box::new(copy),
                }
            }
            _ => return None,
        })
    }

    fn sample(&mut self, pid: Pid, tid: Tid, old: Option<&StackBytes>) -> Option<Sample> {
        let time = self.time()?;
        let regs = if self.input.flag()? {
            let mut gpr = [0; GPRS];
            for g in &mut gpr {
                *g = self.input.u64()?;
            }
            let (ip, known) = (self.input.u64()?, self.input.u32()?);
            Some(Regs { gpr, ip, known })
        } else {
            None
        };
        let walk = match self.input.u8()? {
            0 => WalkStatus::NoPython,
            1 => WalkStatus::Complete,
            2 => WalkStatus::Fault,
            3 => WalkStatus::TooDeep,
            4 => WalkStatus::Detached,
            _ => return None,
        };
        let mut sample = Sample {
            pid,
            tid,
            time,
            regs,
            walk,
            kernel: self.input.list(8, Decoder::u64)?,
            python: self.input.list(30, py_ref)?,
            anchors: self.input.list(30, py_ref)?,
            stack: self.stack(old)?,
            ..Sample::default()
        };
        if self.version >= MARKS {
            self.activity(&mut sample)?;
        }
        Some(sample)
    }

    /// The time of a clock, ns.
    fn time(&mut self) -> Option<u64> {
        self.input.u64().filter(|time| *time <= MAX_TIME)
    }

    /// What a sample says of more than its stack.
    fn activity(&mut self, s: &mut Sample) -> Option<()> {
        add_activity(&mut self.input, s)?;
        let t = &s.time_spent;
        let held = s.wake_up.holders.iter().map(|(_, time)| *time);
        let lengths = [t.runnable_length, t.throttled_length, t.blocked_length];
        let times = [
            t.cpu,
            t.runnable,
            t.throttled,
            t.blocked,
            s.wake_up.time.saturating_sub(s.time),
        ];
        let mut times = times.into_iter().chain(lengths).chain(held);
        let left = times.try_fold(self.times, |left, time| left.checked_sub(time));
        self.times = left?;
        Some(())
    }

    fn stack(&mut self, old: Option<&StackBytes>) -> Option<StackBytes> {
        let holes = self.input.list(8, Decoder::u64)?;
        let (base, len) = (self.input.u64()?, self.input.u32()? as usize);
        base.checked_add(len as u64)?;
        let bytes = self.repeating(len, &|done, repeated| {
            let old = old?;
            let from = usize::try_from(base.checked_add(done as u64)?.checked_sub(old.base)?).ok()?;
            old.bytes.get(from..from.checked_add(repeated)?)
        })?;
        Some(StackBytes { base, bytes, holes })
    }

    /// Bytes some of which repeat older ones: `old` has so many from there on.
    fn repeating<'a>(&mut self, len: usize, old: &dyn Fn(usize, usize) -> Option<&'a [u8]>) -> Option<Vec<u8>> {
        self.stacks = self.stacks.checked_sub(len as u64)?;
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let repeated = self.input.u32()? as usize;
            if repeated > 0 {
                bytes.extend_from_slice(old(bytes.len(), repeated)?);
            }
            let new = self.input.bytes()?;
            (repeated + new.len() > 0).then_some(())?;
            bytes.extend_from_slice(new);
            (bytes.len() <= len).then_some(())?;
        }
        Some(bytes)
    }

    fn responses(&mut self) -> Option<SystemResponses> {
        let is_old = self.version < MARKS;
        let mut a = SystemResponses {
            maps: self.list(9, |r| r.u32(), |r, _, _| Some(r.input.option()?.map(<[u8]>::to_vec)))?,
            stack_ends: self.list(12, |r| r.u32(), |r, _, _| r.input.u64())?,
            threads: self.list(8, |r| r.u32(), |r, _, _| r.input.list(4, Decoder::u32))?,
            names: self.list(13, pair, |r, _, _| r.text())?,
            opened: self.list(
                20,
                |r| Some((r.u32()?, r.u64()?, r.bytes()?.to_vec())),
                |r, _, _| Some(Some(r.input.u32()?).filter(|n| *n != u32::MAX)),
            )?,
            reads: self.list(20, |r| Some((r.u32()?, r.u64()?, r.u32()?)), |r, _, old| r.memory(old))?,
            ..SystemResponses::default()
        };
        if is_old {
            return Some(a);
        }
        a.clocks = self.list(17, |r| r.u8(), |r, _, _| r.time())?;
        a.calls = self.list(17, pair, |r, _, _| Some(r.input.flag()?.then_some(r.input.u64()?)))?;
        a.sleeping = self.list(17, pair, |r, (pid, tid), _| {
            if !r.input.flag()? {
                return Some(None);
            }
            Some(Some(Box::new(r.sample(*pid, *tid, None)?)))
        })?;
        a.descriptors = self.list(21, pair, |r, _, _| r.text())?;
        a.networks = self.list(21, |r| Some((r.u32()?, r.text()?)), |r, _, _| r.text())?;
        Some(a)
    }

    fn text(&mut self) -> Option<Option<String>> {
        let text = self.input.option()?;
        Some(text.map(|text| String::from_utf8_lossy(text).into_owned()))
    }

    /// A list of responses of at least `min_size` bytes each; `value` also has the key, and the last response to the same call.
    fn list<K: Hash + Eq + Clone, V>(
        &mut self,
        min_size: usize,
        key: impl Fn(&mut Decoder) -> Option<K>,
        value: impl Fn(&mut Self, &K, Option<&V>) -> Option<V>,
    ) -> Option<Vec<Response<K, V>>> {
        let count = self.input.u32()? as usize;
        if count.checked_mul(min_size)? > self.input.0.len() {
            return None;
        }
        let mut all: Vec<Response<K, V>> = Vec::new();
        // Of older versions, whose responses are in the order of the calls.
        let mut calls: FxHashMap<K, u32> = FxHashMap::default();
        for _ in 0..count {
            let key = key(&mut self.input)?;
            let when = if self.version >= MARKS {
                When {
                    after: self.input.u32()?,
                    call: self.input.u32()?,
                }
            } else {
                let next = calls.entry(key.clone()).or_default();
                *next += 1;
                When {
                    after: 0,
                    call: *next - 1,
                }
            };
            let last = all.last().filter(|last| last.key == key).map(|last| &last.value);
            let value = value(self, &key, last)?;
            all.push(Response { key, when, value });
        }
        Some(all)
    }

    fn memory(&mut self, old: Option<&Vec<u8>>) -> Option<Vec<u8>> {
        if self.version < MARKS {
            return Some(self.input.bytes()?.to_vec());
        }
        let len = self.input.u32()? as usize;
        self.repeating(len, &|done, repeated| old?.get(done..done.checked_add(repeated)?))
    }
}

fn pair(r: &mut Decoder) -> Option<(u32, u32)> {
    Some((r.u32()?, r.u32()?))
}

/// What a sample says of more than its stack.
fn add_activity(r: &mut Decoder, s: &mut Sample) -> Option<()> {
    let known = r.u8()?;
    let has = |bit: u8| known & bit != 0;
    if has(HAS_TIME_SPENT) {
        s.time_spent = TimeSpent {
            cpu: r.u64()?,
            runnable: r.u64()?,
            throttled: r.u64()?,
            blocked: r.u64()?,
            runnable_length: r.u64()?,
            throttled_length: r.u64()?,
            blocked_length: r.u64()?,
        };
    }
    if has(HAS_WAKE_UP) {
        s.wake_up = WakeUp {
            time: r.u64()?,
            waker: r.flag()?.then_some(pair(r)?),
            holder: r.u64()?,
            holders: r.list(17, |r| {
                let (is_thread, number) = (r.flag()?, r.u64()?);
                let holder = if is_thread {
                    Holder::Thread(u32::try_from(number).ok()?)
                } else {
                    Holder::State(number)
                };
                Some((holder, r.u64()?))
            })?,
            wakes: r.flag()?.then_some(r.u32()?),
        };
    }
    if has(HAS_DISPATCHER) {
        s.dispatcher = Some(Dispatcher {
            tid: r.u32()?,
            is_unchanged: r.flag()?,
        });
    }
    s.holds_lock = has(HOLDS_LOCK);
    if has(HAS_SYSTEM_CALL) {
        let call = r.u16()?;
        s.system_call = Some(call & !HAS_POLLED);
        if call & HAS_POLLED != 0 {
            s.polled = Some(Polled {
                descriptor: r.u32()?,
                events: r.u16()?,
            });
        }
    }
    if has(HAS_SUSPENSION) {
        s.suspended = Some(match r.u8()? {
            0 => Suspension::Stopped,
            1 => Suspension::Frozen,
            _ => return None,
        });
    }
    if has(HAS_SPANS) {
        s.spans = SpanRecords {
            package: r.bytes_within(MAX_SPAN)?.to_vec(),
            context: r.bytes_within(MAX_CONTEXT)?.to_vec(),
        };
    }
    if has(HAS_TASKS) {
        s.tasks = r.list(32, |r| {
            Some(RunningTask {
                task: r.u64()?,
                frame: r.u64()?,
                name: part(r)?,
                awaiters: r.list(20, |r| Some((r.u64()?, part(r)?)))?,
            })
        })?;
    }
    Some(())
}

fn part(r: &mut Decoder) -> Option<Part> {
    Some(Part {
        avma: r.u64()?,
        bytes: r.bytes()?.to_vec(),
    })
}

fn py_ref(r: &mut Decoder) -> Option<RawPyFrame> {
    Some(RawPyFrame {
        frame: r.u64()?,
        code: r.u64()?,
        instr: r.u64()?,
        fingerprint: r.u32()?,
        owner: r.u8()?,
        entry: r.flag()?,
    })
}

fn file(r: &mut Decoder) -> Option<Content> {
    let len = r.u64().filter(|n| *n <= MAX_FILE)?;
    let pieces = r.list(12, |r| Some((r.u64()?, r.bytes()?.to_vec())))?;
    Some(match len {
        0 => Content::Missing,
        _ => Content::Bytes(Arc::new(Sparse::new(len, pieces)?)),
    })
}

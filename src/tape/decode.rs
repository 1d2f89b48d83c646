//! Bytes to tapes. The input is untrusted: every length is bounded by what is left of the input, and everything that
//! expands (gzip, stacks that repeat their predecessor, zeros of files) by fixed limits.

use std::io::Read;
use std::sync::Arc;

use flate2::read::GzDecoder;
use rustc_hash::FxHashMap;

use super::encode::MAGIC;
use super::{FIRST_VERSION, MAX_BYTES, MAX_FILE, SystemResponses, Tape, TapeHeader, VERSION};
use crate::arch::{GPRS, Regs, TAPE_CPU};
use crate::error::{Error, ErrorKind, Result};
use crate::event::{
    CodeCopy, Event, Part, Pid, RawPyFrame, Sample, SpanRecords, StackBytes, Tid, TimeSpent, WakeUp, WalkStatus,
};
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
    let mut r = TapeReader { rest: raw, stacks };
    if r.read_bytes(MAGIC.len()) != Some(MAGIC) {
        return Err(no_tape());
    }
    let version = r.u32();
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
        Some(FIRST_VERSION..=VERSION) => {}
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
    rest: &'a [u8],
    /// Bytes that stacks may still take.
    stacks: u64,
}

impl<'a> TapeReader<'a> {
    fn read_bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(n)?;
        self.rest = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        Some(self.read_bytes(1)?[0])
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.read_bytes(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.read_bytes(8)?.try_into().ok()?))
    }

    fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = self.u32()?;
        self.read_bytes(n as usize)
    }

    fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(self.bytes()?).into_owned())
    }

    fn option(&mut self) -> Option<Option<&'a [u8]>> {
        let there = self.flag()?;
        let bytes = self.bytes()?;
        Some(there.then_some(bytes))
    }

    /// A list whose items take at least `min_size` bytes each, so that a count cannot allocate more memory than the
    /// input justifies.
    fn list<T>(&mut self, min_size: usize, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let n = self.u32()? as usize;
        (n.checked_mul(min_size)? <= self.rest.len()).then_some(())?;
        (0..n).map(|_| item(self)).collect()
    }

    fn tape(mut self) -> Option<Tape> {
        let header = self.header()?;
        let mut before: FxHashMap<(Pid, Tid), usize> = FxHashMap::default();
        let mut events: Vec<Event> = Vec::new();
        for _ in 0..self.u32()? {
            let event = self.event(&events, &before)?;
            if let Event::Sample(s) = &event {
                before.insert((s.pid, s.tid), events.len());
            }
            events.push(event);
        }
        let responses = self.responses()?;
        let kernel = self.option()?.map(|b| String::from_utf8_lossy(b).into_owned());
        let files = self.list(12, TapeReader::file)?;
        self.rest.is_empty().then_some(Tape {
            header,
            events,
            responses,
            kernel,
            files,
        })
    }

    fn header(&mut self) -> Option<TapeHeader> {
        Some(TapeHeader {
            pid: self.u32()?,
            attached: self.flag()?,
            rate: self.u64()?,
            began: self.u64()?,
            start: f64::from_bits(self.u64()?),
            duration: f64::from_bits(self.u64()?),
            event: self.text()?,
            backend: self.text()?,
            command: self.text()?,
        })
    }

    fn event(&mut self, events: &[Event], before: &FxHashMap<(Pid, Tid), usize>) -> Option<Event> {
        let kind = self.u8()?;
        if kind == 7 {
            return Some(Event::Lost(self.u64()?));
        }
        let pid = self.u32()?;
        Some(match kind {
            0 => {
                let tid = self.u32()?;
                let old = before.get(&(pid, tid)).and_then(|i| match events.get(*i)? {
                    Event::Sample(s) => Some(&s.stack),
                    _ => None,
                });
                Event::Sample(Box::new(self.sample(pid, tid, old)?))
            }
            1 => Event::Mmap {
                pid,
                start: self.u64()?,
                end: self.u64()?,
                offset: self.u64()?,
                path: self.bytes()?.to_vec(),
            },
            2 => Event::Exec {
                pid,
                comm: self.bytes()?.to_vec(),
            },
            3 => Event::Fork {
                pid,
                parent: self.u32()?,
            },
            4 => Event::Thread { pid, tid: self.u32()? },
            5 => Event::Comm {
                pid,
                tid: self.u32()?,
                comm: self.bytes()?.to_vec(),
            },
            6 => Event::Exit { pid, tid: self.u32()? },
            8 => {
                let copy = CodeCopy {
                    code: self.u64()?,
                    fingerprint: self.u32()?,
                    parts: self.list(12, |r| {
                        Some(Part {
                            avma: r.u64()?,
                            bytes: r.bytes()?.to_vec(),
                        })
                    })?,
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
        let time = self.u64()?;
        let regs = if self.flag()? {
            let mut gpr = [0; GPRS];
            for g in &mut gpr {
                *g = self.u64()?;
            }
            let (ip, known) = (self.u64()?, self.u32()?);
            Some(Regs { gpr, ip, known })
        } else {
            None
        };
        let walk = match self.u8()? {
            0 => WalkStatus::NoPython,
            1 => WalkStatus::Complete,
            2 => WalkStatus::Fault,
            3 => WalkStatus::TooDeep,
            4 => WalkStatus::Detached,
            _ => return None,
        };
        Some(Sample {
            pid,
            tid,
            time,
            regs,
            walk,
            kernel: self.list(8, TapeReader::u64)?,
            python: self.list(30, TapeReader::py_ref)?,
            anchors: self.list(30, TapeReader::py_ref)?,
            stack: self.stack(old)?,
            time_spent: TimeSpent::default(),
            wake_up: WakeUp::default(),
            dispatcher: None,
            holds_lock: false,
            system_call: None,
            suspended: None,
            spans: SpanRecords::default(),
            // Replays show none.
            tasks: Vec::new(),
        })
    }

    fn py_ref(&mut self) -> Option<RawPyFrame> {
        Some(RawPyFrame {
            frame: self.u64()?,
            code: self.u64()?,
            instr: self.u64()?,
            fingerprint: self.u32()?,
            owner: self.u8()?,
            entry: self.flag()?,
        })
    }

    fn stack(&mut self, old: Option<&StackBytes>) -> Option<StackBytes> {
        let holes = self.list(8, TapeReader::u64)?;
        let (base, len) = (self.u64()?, self.u32()? as usize);
        base.checked_add(len as u64)?;
        self.stacks = self.stacks.checked_sub(len as u64)?;
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let repeated = self.u32()? as usize;
            if repeated > 0 {
                let old = old?;
                let from = usize::try_from(base.checked_add(bytes.len() as u64)?.checked_sub(old.base)?).ok()?;
                bytes.extend_from_slice(old.bytes.get(from..from.checked_add(repeated)?)?);
            }
            let new = self.bytes()?;
            (repeated + new.len() > 0).then_some(())?;
            bytes.extend_from_slice(new);
            (bytes.len() <= len).then_some(())?;
        }
        Some(StackBytes { base, bytes, holes })
    }

    fn responses(&mut self) -> Option<SystemResponses> {
        Some(SystemResponses {
            maps: self.list(9, |r| Some((r.u32()?, r.option()?.map(<[u8]>::to_vec))))?,
            stack_ends: self.list(12, |r| Some((r.u32()?, r.u64()?)))?,
            threads: self.list(8, |r| Some((r.u32()?, r.list(4, TapeReader::u32)?)))?,
            names: self.list(13, |r| {
                let id = (r.u32()?, r.u32()?);
                Some((id, r.option()?.map(|b| String::from_utf8_lossy(b).into_owned())))
            })?,
            opened: self.list(20, |r| {
                let key = (r.u32()?, r.u64()?, r.bytes()?.to_vec());
                Some((key, Some(r.u32()?).filter(|n| *n != u32::MAX)))
            })?,
            reads: self.list(20, |r| {
                let key = (r.u32()?, r.u64()?, r.u32()?);
                Some((key, r.bytes()?.to_vec()))
            })?,
        })
    }

    fn file(&mut self) -> Option<Content> {
        let len = self.u64().filter(|n| *n <= MAX_FILE)?;
        let pieces = self.list(12, |r| Some((r.u64()?, r.bytes()?.to_vec())))?;
        Some(match len {
            0 => Content::Missing,
            _ => Content::Bytes(Arc::new(Sparse::new(len, pieces)?)),
        })
    }
}

//! Bytes to tapes. The input is untrusted: every length is bounded by what is left of the input, and everything that
//! expands (gzip, stacks that repeat their predecessor, zeros of files) by fixed limits.

use std::io::Read;
use std::sync::Arc;

use flate2::read::GzDecoder;
use rustc_hash::FxHashMap;

use super::encode::MAGIC;
use super::{FIRST_VERSION, MAX_BYTES, MAX_FILE, SystemResponses, Tape, TapeHeader, VERSION};
use crate::arch::{GPRS, Regs, TAPE_CPU};
use crate::codec::Decoder;
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
    let mut r = TapeReader {
        input: Decoder(raw),
        stacks,
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
    input: Decoder<'a>,
    /// Bytes that stacks may still take.
    stacks: u64,
}

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
        let responses = responses(&mut self.input)?;
        let kernel = self.input.option()?.map(|b| String::from_utf8_lossy(b).into_owned());
        let files = self.input.list(12, file)?;
        self.input.is_empty().then_some(Tape {
            header,
            events,
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
            began: self.input.u64()?,
            start: f64::from_bits(self.input.u64()?),
            duration: f64::from_bits(self.input.u64()?),
            event: self.input.text()?,
            backend: self.input.text()?,
            command: self.input.text()?,
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
                    parts: self.input.list(12, |r| {
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
        let time = self.input.u64()?;
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
        Some(Sample {
            pid,
            tid,
            time,
            regs,
            walk,
            kernel: self.input.list(8, Decoder::u64)?,
            python: self.input.list(30, py_ref)?,
            anchors: self.input.list(30, py_ref)?,
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

    fn stack(&mut self, old: Option<&StackBytes>) -> Option<StackBytes> {
        let holes = self.input.list(8, Decoder::u64)?;
        let (base, len) = (self.input.u64()?, self.input.u32()? as usize);
        base.checked_add(len as u64)?;
        self.stacks = self.stacks.checked_sub(len as u64)?;
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let repeated = self.input.u32()? as usize;
            if repeated > 0 {
                let old = old?;
                let from = usize::try_from(base.checked_add(bytes.len() as u64)?.checked_sub(old.base)?).ok()?;
                bytes.extend_from_slice(old.bytes.get(from..from.checked_add(repeated)?)?);
            }
            let new = self.input.bytes()?;
            (repeated + new.len() > 0).then_some(())?;
            bytes.extend_from_slice(new);
            (bytes.len() <= len).then_some(())?;
        }
        Some(StackBytes { base, bytes, holes })
    }
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

fn responses(r: &mut Decoder) -> Option<SystemResponses> {
    Some(SystemResponses {
        maps: r.list(9, |r| Some((r.u32()?, r.option()?.map(<[u8]>::to_vec))))?,
        stack_ends: r.list(12, |r| Some((r.u32()?, r.u64()?)))?,
        threads: r.list(8, |r| Some((r.u32()?, r.list(4, Decoder::u32)?)))?,
        names: r.list(13, |r| {
            let id = (r.u32()?, r.u32()?);
            Some((id, r.option()?.map(|b| String::from_utf8_lossy(b).into_owned())))
        })?,
        opened: r.list(20, |r| {
            let key = (r.u32()?, r.u64()?, r.bytes()?.to_vec());
            Some((key, Some(r.u32()?).filter(|n| *n != u32::MAX)))
        })?,
        reads: r.list(20, |r| {
            let key = (r.u32()?, r.u64()?, r.u32()?);
            Some((key, r.bytes()?.to_vec()))
        })?,
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

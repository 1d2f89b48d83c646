//! Tapes to bytes; `decode` is the reverse.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use rustc_hash::FxHashMap;

use super::{MAX_BYTES, SystemResponses, Tape, TapeHeader, VERSION};
use crate::arch::{GPRS, TAPE_CPU};
use crate::codec::Encoder;
use crate::event::{Event, Pid, Sample, StackBytes, Tid};
use crate::process::file_content::{Content, Sparse};

pub use super::decode::{parse, read};

pub(super) const MAGIC: &[u8] = b"nativeprof tape\n";
/// Shorter runs that equal the previous stack are stored again: a reference would take as much.
const MIN_REPEAT: usize = 16;
/// Bytes of an event without its lists, at most: of a sample, with the lengths of what repeats the previous stack.
const EVENT_HEADER_SIZE: usize = 8 * GPRS + 128;
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
            s.stack.bytes.len() + 8 * words + 30 * frames
        }
        Event::Mmap { path, .. } => path.len(),
        Event::Exec { comm, .. } | Event::Comm { comm, .. } => comm.len(),
        Event::Code { copy, .. } => copy.parts.iter().map(|part| 12 + part.bytes.len()).sum(),
        Event::Fork { .. } | Event::Thread { .. } | Event::Exit { .. } | Event::Lost(_) => 0,
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
                for part in &copy.parts {
                    self.out.u64(part.avma);
                    self.out.bytes(&part.bytes);
                }
            }
        }
    }

    fn sample(&mut self, s: &Sample, before: Option<&StackBytes>) {
        self.out.u32(s.pid);
        self.out.u32(s.tid);
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
        // Alternately: the number of bytes that equal the previous stack at the same addresses, and new bytes.
        let bytes = &s.stack.bytes;
        let same = |at: usize| before.is_some_and(|b| old_byte(b, s.stack.base, at) == Some(bytes[at]));
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

    fn responses(&mut self, a: &SystemResponses) {
        self.out.count(a.maps.len());
        for (pid, text) in &a.maps {
            self.out.u32(*pid);
            self.out.option(text.as_deref());
        }
        self.out.count(a.stack_ends.len());
        for (pid, end) in &a.stack_ends {
            self.out.u32(*pid);
            self.out.u64(*end);
        }
        self.out.count(a.threads.len());
        for (pid, tids) in &a.threads {
            self.out.u32(*pid);
            self.out.count(tids.len());
            tids.iter().for_each(|t| self.out.u32(*t));
        }
        self.out.count(a.names.len());
        for ((pid, tid), name) in &a.names {
            self.out.u32(*pid);
            self.out.u32(*tid);
            self.out.option(name.as_deref().map(str::as_bytes));
        }
        self.out.count(a.opened.len());
        for ((pid, start, path), file) in &a.opened {
            self.out.u32(*pid);
            self.out.u64(*start);
            self.out.bytes(path);
            self.out.u32(file.unwrap_or(u32::MAX));
        }
        self.out.count(a.reads.len());
        for ((pid, at, len), bytes) in &a.reads {
            self.out.u32(*pid);
            self.out.u64(*at);
            self.out.u32(*len);
            self.out.bytes(bytes);
        }
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
    use crate::event::{CodeCopy, Part, RawPyFrame};

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

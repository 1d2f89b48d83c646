//! Tapes to bytes; `decode` is the reverse.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use rustc_hash::FxHashMap;

use super::{SystemResponses, Tape, TapeHeader, VERSION};
use crate::arch::TAPE_CPU;
use crate::event::{Event, Pid, Sample, StackBytes, Tid};
use crate::target::file_content::{Content, Sparse};

pub use super::decode::{parse, read};

pub(super) const MAGIC: &[u8] = b"nativeprof tape\n";
/// Shorter runs that equal the previous stack are stored again: a reference would take as much.
const MIN_REPEAT: usize = 16;

/// Do these unpacked bytes begin like a tape?
pub fn is_tape(raw: &[u8]) -> bool {
    raw.starts_with(MAGIC)
}

/// Packs a tape.
pub fn write(tape: &Tape) -> Vec<u8> {
    let mut w = TapeWriter(Vec::new());
    w.0.extend(MAGIC);
    w.u32(VERSION | u32::from(TAPE_CPU) << 16);
    w.head(&tape.head);
    let mut before: FxHashMap<(Pid, Tid), &StackBytes> = FxHashMap::default();
    w.count(tape.events.len());
    for event in &tape.events {
        w.event(event, &mut before);
    }
    w.answers(&tape.answers);
    w.option(tape.kernel.as_deref().map(str::as_bytes));
    w.count(tape.files.len());
    for file in &tape.files {
        let empty = Sparse::default();
        let file = if let Content::Bytes(b) = file { b } else { &empty };
        w.u64(file.len());
        w.count(file.pieces().len());
        for (at, bytes) in file.pieces() {
            w.u64(*at);
            w.bytes(bytes);
        }
    }
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    // Writing to memory does not fail.
    let _ = gzip.write_all(&w.0);
    gzip.finish().unwrap_or_default()
}

struct TapeWriter(Vec<u8>);

impl TapeWriter {
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }

    fn u32(&mut self, v: u32) {
        self.0.extend(v.to_le_bytes());
    }

    fn u64(&mut self, v: u64) {
        self.0.extend(v.to_le_bytes());
    }

    fn count(&mut self, n: usize) {
        self.u32(u32::try_from(n).unwrap_or(u32::MAX));
    }

    fn bytes(&mut self, b: &[u8]) {
        self.count(b.len());
        self.0.extend(b);
    }

    fn option(&mut self, b: Option<&[u8]>) {
        self.u8(b.is_some().into());
        self.bytes(b.unwrap_or_default());
    }

    fn words(&mut self, words: &[u64]) {
        self.count(words.len());
        words.iter().for_each(|w| self.u64(*w));
    }

    fn head(&mut self, h: &TapeHeader) {
        self.u32(h.pid);
        self.u8(h.attached.into());
        self.u64(h.rate);
        self.u64(h.began);
        self.u64(h.start.to_bits());
        self.u64(h.duration.to_bits());
        for text in [&h.clock, &h.backend, &h.command] {
            self.bytes(text.as_bytes());
        }
    }

    fn event<'a>(&mut self, event: &'a Event, before: &mut FxHashMap<(Pid, Tid), &'a StackBytes>) {
        match event {
            Event::Sample(s) => {
                self.u8(0);
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
                self.u8(1);
                self.u32(*pid);
                [start, end, offset].into_iter().for_each(|w| self.u64(*w));
                self.bytes(path);
            }
            Event::Exec { pid, comm } => {
                self.u8(2);
                self.u32(*pid);
                self.bytes(comm);
            }
            Event::Fork { pid, parent } => {
                self.u8(3);
                self.u32(*pid);
                self.u32(*parent);
            }
            Event::Thread { pid, tid } => {
                self.u8(4);
                self.u32(*pid);
                self.u32(*tid);
            }
            Event::Comm { pid, tid, comm } => {
                self.u8(5);
                self.u32(*pid);
                self.u32(*tid);
                self.bytes(comm);
            }
            Event::Exit { pid, tid } => {
                self.u8(6);
                self.u32(*pid);
                self.u32(*tid);
            }
            Event::Lost(n) => {
                self.u8(7);
                self.u64(*n);
            }
            // Not recorded.
            Event::RunningTask { .. } => {}
            Event::Code { pid, copy } => {
                self.u8(8);
                self.u32(*pid);
                self.u64(copy.code);
                self.u32(copy.fingerprint);
                self.count(copy.parts.len());
                for part in &copy.parts {
                    self.u64(part.avma);
                    self.bytes(&part.bytes);
                }
            }
        }
    }

    fn sample(&mut self, s: &Sample, before: Option<&StackBytes>) {
        self.u32(s.pid);
        self.u32(s.tid);
        self.u64(s.time);
        self.u8(s.regs.is_some().into());
        if let Some(r) = &s.regs {
            r.gpr.iter().for_each(|g| self.u64(*g));
            self.u64(r.ip);
            self.u32(r.known);
        }
        self.u8(s.walk as u8);
        self.words(&s.kernel);
        for refs in [&s.python, &s.anchors] {
            self.count(refs.len());
            for f in refs {
                [f.frame, f.code, f.instr].into_iter().for_each(|w| self.u64(w));
                self.u32(f.fingerprint);
                self.u8(f.owner);
                self.u8(f.entry.into());
            }
        }
        self.words(&s.stack.holes);
        self.u64(s.stack.base);
        self.count(s.stack.bytes.len());
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
            self.count(repeated);
            self.bytes(&bytes[new_from..end]);
            at = end;
        }
    }

    fn answers(&mut self, a: &SystemResponses) {
        self.count(a.maps.len());
        for (pid, text) in &a.maps {
            self.u32(*pid);
            self.option(text.as_deref());
        }
        self.count(a.stack_ends.len());
        for (pid, end) in &a.stack_ends {
            self.u32(*pid);
            self.u64(*end);
        }
        self.count(a.threads.len());
        for (pid, tids) in &a.threads {
            self.u32(*pid);
            self.count(tids.len());
            tids.iter().for_each(|t| self.u32(*t));
        }
        self.count(a.names.len());
        for ((pid, tid), name) in &a.names {
            self.u32(*pid);
            self.u32(*tid);
            self.option(name.as_deref().map(str::as_bytes));
        }
        self.count(a.opened.len());
        for ((pid, start, path), file) in &a.opened {
            self.u32(*pid);
            self.u64(*start);
            self.bytes(path);
            self.u32(file.unwrap_or(u32::MAX));
        }
        self.count(a.reads.len());
        for ((pid, at, len), bytes) in &a.reads {
            self.u32(*pid);
            self.u64(*at);
            self.u32(*len);
            self.bytes(bytes);
        }
    }
}

/// The byte of `old` at the address `base + at`.
fn old_byte(old: &StackBytes, base: u64, at: usize) -> Option<u8> {
    let at = base.checked_add(at as u64)?.checked_sub(old.base)?;
    old.bytes.get(usize::try_from(at).ok()?).copied()
}

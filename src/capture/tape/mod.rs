//! Tapes: a recorded stream of events, and the answers that the machine gave while it was taken, which replay without
//! any privilege, on any machine. The main test suite is made of them, and a user attaches one to a bug report.
//!
//! # The file
//!
//! One gzip stream. Inside, little-endian, no alignment; `bytes` is a `u32` length and that many bytes; a list is a
//! `u32` count and the items. Nothing follows the last list. The reader trusts nothing.
//!
//! | what | content |
//! |---|---|
//! | magic | `nativeprof tape\n` |
//! | version | `u32`, [`VERSION`] |
//! | head | how it was recorded: [`Head`] |
//! | events | list of [`Event`]s in order, samples whole: registers, stack with its holes, Python frames, marks, kernel addresses; and the code objects that were copied with them. A stack states only where it differs from the thread's previous one |
//! | answers | what the [`Host`] said, in the order in which it was asked: memory maps (executable lines), stack ends, threads, names, files opened, memory read (address and bytes) |
//! | kernel | the lines of `/proc/kallsyms` that name the kernel addresses above |
//! | files | list of ELF files, each a length and the pieces of it that are not zero |
//!
//! Files are pruned (see [`prune`]) to what the replay needs: headers, the unwind tables, symbols and instructions of
//! functions on some stack, and what the interpreter's description is read from. They stay valid ELF files; DWARF is
//! gone, and with it inlined functions and line numbers of native code. No source file is on a tape. Stacks are: a tape
//! holds what the program had on its stacks, and says so where it is made.

use std::cell::Cell;
use std::hash::Hash;
use std::rc::Rc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::{Counts, Source};
use crate::error::{Error, Kind, Result};
use crate::layout::Space;
use crate::process::content::Content;
use crate::process::host::{FileKey, Host};
use crate::process::root::Root;
use crate::sample::{Event, Pid, Tid};

pub mod format;
pub mod prune;
mod read;
pub mod record;

/// Of the file's format. Since 2 there are copies of code objects among the events.
pub const VERSION: u32 = 2;
/// The oldest that is still read.
pub const FIRST_VERSION: u32 = 1;

/// How the recording was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Head {
    pub pid: Pid,
    /// The process ran already (`attach`); else it was started and its mappings came as events.
    pub attached: bool,
    pub rate: u64,
    pub clock: String,
    pub backend: String,
    /// CLOCK_MONOTONIC at the start, ns.
    pub began: u64,
    /// Seconds since 1970.
    pub start: f64,
    pub duration: f64,
    pub command: String,
}

/// Process, address and path of a mapping.
pub type Mapped = (Pid, u64, Vec<u8>);

/// What the machine answered, in the order in which it was asked.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    pub maps: Vec<(Pid, Option<Vec<u8>>)>,
    pub stack_ends: Vec<(Pid, u64)>,
    pub threads: Vec<(Pid, Vec<Tid>)>,
    pub names: Vec<((Pid, Tid), Option<String>)>,
    /// Index of the file.
    pub opened: Vec<(Mapped, Option<u32>)>,
    /// Process, address and length; what could be read.
    pub reads: Vec<((Pid, u64, u32), Vec<u8>)>,
}

/// A tape in memory.
#[derive(Clone, Debug, Default)]
pub struct Tape {
    pub head: Head,
    pub events: Vec<Event>,
    pub answers: Answers,
    pub kernel: Option<String>,
    pub files: Vec<Content>,
}

/// The events of a tape as a backend.
pub struct TapeSource {
    tape: Rc<Tape>,
    next: usize,
}

/// Events handed on at once.
const BATCH: usize = 256;

impl TapeSource {
    pub fn new(tape: Rc<Tape>) -> TapeSource {
        TapeSource { tape, next: 0 }
    }

    fn ended(&self) -> bool {
        self.next >= self.tape.events.len()
    }
}

impl Source for TapeSource {
    fn backend(&self) -> &'static str {
        "tape"
    }

    fn event(&self) -> &str {
        &self.tape.head.clock
    }

    fn attach(&mut self, _: Pid) -> Result<()> {
        Ok(())
    }

    fn attach_at_exec(&mut self, _: Pid) -> Result<()> {
        Ok(())
    }

    fn learn(&mut self, _: Pid, _: &Space) -> Result<()> {
        Ok(())
    }

    fn forget(&mut self, _: Pid) {}

    fn start(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, _: Duration, out: &mut Vec<Event>) -> Result<bool> {
        let rest = self.tape.events.get(self.next..).unwrap_or_default();
        out.extend(rest.iter().take(BATCH).cloned());
        self.next += rest.len().min(BATCH);
        Ok(!self.ended())
    }

    fn stop(&mut self) {}

    fn counts(&self) -> Counts {
        let samples = self.tape.events.iter().filter(|e| matches!(e, Event::Sample(_)));
        let lost = self
            .tape
            .events
            .iter()
            .map(|e| if let Event::Lost(n) = e { *n } else { 0 });
        Counts {
            cpu_time: 0,
            delivered: samples.count() as u64,
            lost: lost.fold(0, u64::saturating_add),
            held: None,
        }
    }
}

/// Answers by question. The same question may have had different answers over time: they come in order, and the last
/// one stays.
struct Replies<K, V>(FxHashMap<K, (Vec<V>, Cell<usize>)>);

impl<K: Hash + Eq + Clone, V: Clone> Replies<K, V> {
    fn new(all: &[(K, V)]) -> Replies<K, V> {
        let mut map: FxHashMap<K, (Vec<V>, Cell<usize>)> = FxHashMap::default();
        for (k, v) in all {
            map.entry(k.clone()).or_default().0.push(v.clone());
        }
        Replies(map)
    }

    fn next(&self, question: &K) -> Option<&V> {
        let (answers, at) = self.0.get(question)?;
        let i = at.get();
        at.set((i + 1).min(answers.len().saturating_sub(1)));
        answers.get(i)
    }
}

/// Answers from a tape; the machine is not asked.
pub struct TapeHost {
    maps: Replies<Pid, Option<Vec<u8>>>,
    stack_ends: Replies<Pid, u64>,
    threads: Replies<Pid, Vec<Tid>>,
    names: Replies<(Pid, Tid), Option<String>>,
    opened: Replies<Mapped, Option<u32>>,
    reads: Replies<(Pid, u64, u32), Vec<u8>>,
    kernel: Option<String>,
    files: Vec<Content>,
}

impl TapeHost {
    pub fn new(tape: &Tape) -> TapeHost {
        let a = &tape.answers;
        TapeHost {
            maps: Replies::new(&a.maps),
            stack_ends: Replies::new(&a.stack_ends),
            threads: Replies::new(&a.threads),
            names: Replies::new(&a.names),
            opened: Replies::new(&a.opened),
            reads: Replies::new(&a.reads),
            kernel: tape.kernel.clone(),
            files: tape.files.clone(),
        }
    }
}

impl Host for TapeHost {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        let gone = || Error::new(Kind::NoSuchProcess, format!("no process {pid} on the tape"));
        self.maps.next(&pid).cloned().flatten().ok_or_else(gone)
    }

    fn stack_end(&self, pid: Pid) -> u64 {
        self.stack_ends.next(&pid).copied().unwrap_or(0)
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        self.threads.next(&pid).cloned().unwrap_or_default()
    }

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String> {
        self.names.next(&(pid, tid)).cloned().flatten()
    }

    fn open(&self, pid: Pid, start: u64, _: u64, path: &[u8], _: Option<&Root>) -> Option<(Content, FileKey)> {
        let index = (*self.opened.next(&(pid, start, path.to_vec()))?)?;
        let file = self.files.get(index as usize)?;
        Some((file.clone(), (0, index.into())))
    }

    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize {
        let Ok(len) = u32::try_from(buf.len()) else { return 0 };
        let Some(bytes) = self.reads.next(&(pid, avma, len)) else {
            return 0;
        };
        let n = bytes.len().min(buf.len());
        buf[..n].copy_from_slice(&bytes[..n]);
        n
    }

    fn root(&self, _: Pid) -> Option<Root> {
        None
    }

    fn kernel_symbols(&self) -> Option<String> {
        self.kernel.clone()
    }
}

//! Tapes: a recorded stream of events, and the responses of the machine during the recording, which replay without
//! privileges on any machine with the same CPU. The main test suite consists of them, and a user attaches one to a bug report.
//!
//! # The file
//!
//! One gzip stream. Inside, little-endian, no alignment; `bytes` is a `u32` length and that many bytes; a list is a
//! `u32` count and the items. Nothing follows the last list. The reader trusts nothing, and refuses what is too long; a
//! recording ends before that.
//!
//! | what | content |
//! |---|---|
//! | magic | `nativeprof tape\n` |
//! | version | `u32`: [`VERSION`]; in the upper half the CPU, 0 for x86-64, 183 for aarch64 |
//! | header | how it was recorded: [`TapeHeader`] |
//! | events | list of [`Event`]s in order, with complete samples: registers, stack with its holes, Python frames, anchors, kernel addresses; and the code objects that were copied with them. A stack is stored as its difference from the thread's previous one |
//! | responses | results of the [`System`], in the order of the calls: memory maps (executable lines), stack ends, threads, names, files opened, memory read (address and bytes) |
//! | kernel | the lines of `/proc/kallsyms` that name the kernel addresses above |
//! | files | list of ELF files, each a length and the pieces of it that are not zero |
//!
//! Files are pruned (see [`prune`]) to what the replay needs: headers, the unwind tables, symbols and instructions of
//! functions on some stack, and what the interpreter's layout is read from. They stay valid ELF files; DWARF is
//! gone, and with it inlined functions and line numbers of native code. No source file is on a tape. Stacks are: a tape
//! contains what the program had on its stacks, and the command that records it says so.

use std::cell::Cell;
use std::hash::Hash;
use std::rc::Rc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::capture::{Backend, SampleCounts};
use crate::cpython_layout::TargetLayout;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, Pid, Tid};
use crate::process::file_content::Content;
use crate::process::root::Root;
use crate::process::system::{FileKey, System};

mod decode;
pub mod encode;
pub mod prune;
pub mod recorder;

/// Version of the file format. Since 2 there are copies of code objects among the events, and since 3
/// walks can be [`WalkStatus::Detached`](crate::event::WalkStatus::Detached).
pub const VERSION: u32 = 3;
/// The oldest version that can be read.
pub const FIRST_VERSION: u32 = 1;

/// Bytes of an unpacked tape, and of all its stacks together, at most.
const MAX_BYTES: u64 = 512 << 20;
/// Length of one file on a tape, zeros included, at most.
const MAX_FILE: u64 = 1 << 30;

/// How the recording was made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TapeHeader {
    pub pid: Pid,
    /// The process was already running (`attach`); else it was started and its mappings came as events.
    pub attached: bool,
    pub rate: u64,
    pub event: String,
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

/// The machine's responses, in the order of the calls.
#[derive(Clone, Debug, Default)]
pub struct SystemResponses {
    pub maps: Vec<(Pid, Option<Vec<u8>>)>,
    pub stack_ends: Vec<(Pid, u64)>,
    pub threads: Vec<(Pid, Vec<Tid>)>,
    pub names: Vec<((Pid, Tid), Option<String>)>,
    /// Index of the file.
    pub opened: Vec<(Mapped, Option<u32>)>,
    /// Process, address and length; the bytes that could be read.
    pub reads: Vec<((Pid, u64, u32), Vec<u8>)>,
}

/// A tape in memory.
#[derive(Clone, Debug, Default)]
pub struct Tape {
    pub header: TapeHeader,
    pub events: Vec<Event>,
    pub responses: SystemResponses,
    pub kernel: Option<String>,
    pub files: Vec<Content>,
}

/// The events of a tape as a backend.
pub struct TapeBackend {
    tape: Rc<Tape>,
    next: usize,
}

/// Events returned at once.
const BATCH: usize = 256;

impl TapeBackend {
    pub fn new(tape: Rc<Tape>) -> TapeBackend {
        TapeBackend { tape, next: 0 }
    }

    fn ended(&self) -> bool {
        self.next >= self.tape.events.len()
    }
}

impl Backend for TapeBackend {
    fn backend(&self) -> &'static str {
        "tape"
    }

    fn event(&self) -> &str {
        &self.tape.header.event
    }

    fn attach(&mut self, _: Pid) -> Result<()> {
        Ok(())
    }

    fn attach_at_exec(&mut self, _: Pid) -> Result<()> {
        Ok(())
    }

    fn update_process(&mut self, _: Pid, _: &TargetLayout) -> Result<()> {
        Ok(())
    }

    fn remove_process(&mut self, _: Pid) {}

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

    fn counts(&self) -> SampleCounts {
        let samples = self.tape.events.iter().filter(|e| matches!(e, Event::Sample(_)));
        let lost = self
            .tape
            .events
            .iter()
            .map(|e| if let Event::Lost(n) = e { *n } else { 0 });
        SampleCounts {
            cpu_time: 0,
            delivered: samples.count() as u64,
            lost: lost.fold(0, u64::saturating_add),
            stopped: None,
        }
    }
}

/// Responses by call. The same call may have had different responses over time: they come in order, and the last one is
/// repeated.
struct ResponseQueues<K, V>(FxHashMap<K, (Vec<V>, Cell<usize>)>);

impl<K: Hash + Eq + Clone, V: Clone> ResponseQueues<K, V> {
    fn new(all: &[(K, V)]) -> ResponseQueues<K, V> {
        let mut map: FxHashMap<K, (Vec<V>, Cell<usize>)> = FxHashMap::default();
        for (k, v) in all {
            map.entry(k.clone()).or_default().0.push(v.clone());
        }
        ResponseQueues(map)
    }

    fn next(&self, question: &K) -> Option<&V> {
        let (responses, at) = self.0.get(question)?;
        let i = at.get();
        at.set((i + 1).min(responses.len().saturating_sub(1)));
        responses.get(i)
    }
}

/// Responses from a tape instead of the machine.
pub struct TapeSystem {
    maps: ResponseQueues<Pid, Option<Vec<u8>>>,
    stack_ends: ResponseQueues<Pid, u64>,
    threads: ResponseQueues<Pid, Vec<Tid>>,
    names: ResponseQueues<(Pid, Tid), Option<String>>,
    opened: ResponseQueues<Mapped, Option<u32>>,
    reads: ResponseQueues<(Pid, u64, u32), Vec<u8>>,
    kernel: Option<String>,
    files: Vec<Content>,
}

impl TapeSystem {
    pub fn new(tape: &Tape) -> TapeSystem {
        let a = &tape.responses;
        TapeSystem {
            maps: ResponseQueues::new(&a.maps),
            stack_ends: ResponseQueues::new(&a.stack_ends),
            threads: ResponseQueues::new(&a.threads),
            names: ResponseQueues::new(&a.names),
            opened: ResponseQueues::new(&a.opened),
            reads: ResponseQueues::new(&a.reads),
            kernel: tape.kernel.clone(),
            files: tape.files.clone(),
        }
    }
}

impl System for TapeSystem {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        let gone = || Error::new(ErrorKind::NoSuchProcess, format!("no process {pid} in the tape"));
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

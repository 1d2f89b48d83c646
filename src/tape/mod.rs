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
//! | events | list of [`Event`]s in order, with complete samples; and the code objects that were copied with them. A stack is stored as its difference from the thread's previous one |
//! | marks | list of [`Mark`]s: how many events there are since the one before (`u32`), and which one (`u8`) |
//! | responses | results of the [`System`], by call: memory maps (executable lines), stack ends, threads, names, files opened, memory read (its difference from what was read there before), clocks, system calls that threads sleep in, what their stacks are then, descriptors, tables of sockets (the lines of sockets that threads wait for). Each with the number of events and marks before it, and how often the same call had been made since the last one of these (both `u32`) |
//! | kernel | the lines of `/proc/kallsyms` that name the kernel addresses above |
//! | files | list of ELF files, each a length and the pieces of it that are not zero |
//!
//! Files are pruned (see [`prune`]) to what the replay needs: headers, the unwind tables, symbols and instructions of
//! functions on some stack, and what the interpreter's layout is read from. They stay valid ELF files; DWARF is
//! gone, and with it inlined functions and line numbers of native code. No source file is on a tape. Stacks are: a tape
//! contains what the program had on its stacks, and the command that records it says so.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::capture::{Backend, SampleCounts};
use crate::cpython_layout::TargetLayout;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, Pid, Sample, Tid};
use crate::process::file_content::Content;
use crate::process::memory::UsedMemory;
use crate::process::root::Root;
use crate::process::system::{FileKey, System};
use crate::sys;

mod decode;
pub mod encode;
pub mod prune;
pub mod recorder;
pub mod responses;

use responses::{Mapped, MemoryRange, Response, ResponseQueues, SleepingThread, SystemResponses};

/// Version of the file format. Since 2 there are copies of code objects among the events, and since 3
/// walks can be [`WalkStatus::Detached`](crate::event::WalkStatus::Detached). Since 4 a tape has the options of its recording,
/// samples have all fields, marks divide the events, and responses have times.
pub const VERSION: u32 = 4;
/// The oldest version that can be read.
pub const FIRST_VERSION: u32 = 1;

/// Bytes of an unpacked tape, and of all its stacks together, at most.
const MAX_BYTES: u64 = 512 << 20;
/// Length of one file on a tape, zeros included, at most.
const MAX_FILE: u64 = 1 << 30;

/// Keys of clocks among the responses.
const MONOTONIC: u8 = 0;
const OWN_CPU: u8 = 1;

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
    pub options: TapeOptions,
}

/// What of the session's options a recording was made with. What only the profile shows of it (processes, threads) is no part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapeOptions {
    /// The sampling period, ns, if time off the CPU was sampled.
    pub weighted: Option<u64>,
    pub gil_only: bool,
    pub tasks: bool,
    /// Shortest time of a callback that is listed, ns.
    pub lag: Option<u64>,
    pub workers: bool,
    pub spans: bool,
    pub thread_context: bool,
    /// The stacks of wakers are shown; with the kernel's functions.
    pub wakers: Option<bool>,
}

/// What was done at a place between the events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// All events that the backend had were handled, and then what was due.
    Turn,
    /// Sampling had ended, and what was observed was ended, too.
    End,
}

/// A tape in memory.
#[derive(Clone, Debug, Default)]
pub struct Tape {
    pub header: TapeHeader,
    pub events: Vec<Event>,
    /// Each with the number of events before it, ascending. Tapes of versions before 4 have none.
    pub marks: Vec<(u32, Mark)>,
    pub responses: SystemResponses,
    pub kernel: Option<String>,
    pub files: Vec<Content>,
}

/// The events of a tape as a backend: those of a turn at once.
pub struct TapeBackend {
    tape: Rc<Tape>,
    next: usize,
    next_mark: usize,
}

/// Events returned at once, of a tape without marks.
const BATCH: usize = 256;

impl TapeBackend {
    pub fn new(tape: Rc<Tape>) -> TapeBackend {
        TapeBackend {
            tape,
            next: 0,
            next_mark: 0,
        }
    }

    /// What comes next; `None` after the last event and mark.
    pub fn next_mark(&self) -> Option<Mark> {
        match self.tape.marks.get(self.next_mark) {
            Some((_, mark)) => Some(*mark),
            None => (self.next < self.tape.events.len()).then_some(Mark::Turn),
        }
    }

    /// The events before the next mark, which is passed.
    pub fn take(&mut self) -> Vec<Event> {
        let events = &self.tape.events;
        let end = match self.tape.marks.get(self.next_mark) {
            Some((at, _)) => *at as usize,
            None if self.tape.marks.is_empty() => self.next.saturating_add(BATCH),
            None => events.len(),
        };
        self.next_mark += 1;
        let end = end.clamp(self.next, events.len());
        let taken = events.get(self.next..end).unwrap_or_default().to_vec();
        self.next = end;
        taken
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
        out.extend(self.take());
        Ok(self.next_mark().is_some())
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
            skipped: 0,
            stopped: None,
        }
    }
}

/// How far a replay has come: the number of events and marks that were handled. On tapes without marks, responses have no times.
#[derive(Clone, Default)]
pub struct TapePosition(Option<Rc<Cell<u32>>>);

impl TapePosition {
    pub fn advance(&self) {
        if let Some(position) = &self.0 {
            position.set(position.get().saturating_add(1));
        }
    }

    fn get(&self) -> u32 {
        self.0.as_ref().map_or(0, |position| position.get())
    }
}

/// What a replay has used of the memory on its tape.
#[derive(Default)]
pub struct TapeUse {
    memory: RefCell<UsedMemory>,
    reads: RefCell<FxHashMap<MemoryRange, u32>>,
}

impl TapeUse {
    /// Clears what was read as part of whole pages and not used: it is of no use for a replay, and may be anything.
    pub fn clear_unused(&self, reads: &mut Vec<Response<MemoryRange, Vec<u8>>>) {
        let (used, made) = (self.memory.borrow(), self.reads.borrow());
        for Response { key, value, .. } in reads.iter_mut() {
            let (pid, avma, len) = *key;
            let whole = used.whole_reads(pid, avma, len as usize);
            if whole > 0 && made.get(key) == Some(&whole) {
                used.clear_unused(pid, avma, value);
            }
        }
        // What differed from the response before may not do so any more.
        reads.dedup_by(|next, before| next.key == before.key && next.value == before.value);
    }
}

/// Responses from a tape instead of the machine.
pub struct TapeSystem {
    position: TapePosition,
    maps: ResponseQueues<Pid, Option<Vec<u8>>>,
    stack_ends: ResponseQueues<Pid, u64>,
    threads: ResponseQueues<Pid, Vec<Tid>>,
    names: ResponseQueues<(Pid, Tid), Option<String>>,
    opened: ResponseQueues<Mapped, Option<u32>>,
    reads: ResponseQueues<MemoryRange, Vec<u8>>,
    clocks: ResponseQueues<u8, u64>,
    calls: ResponseQueues<(Pid, Tid), Option<u64>>,
    sleeping: ResponseQueues<(Pid, Tid), SleepingThread>,
    descriptors: ResponseQueues<(Pid, u32), Option<String>>,
    networks: ResponseQueues<(Pid, String), Option<String>>,
    kernel: Option<String>,
    files: Vec<Content>,
    used: Option<Rc<TapeUse>>,
}

impl TapeSystem {
    pub fn new(tape: &Tape) -> TapeSystem {
        let a = &tape.responses;
        TapeSystem {
            position: TapePosition((!tape.marks.is_empty()).then(Rc::default)),
            maps: ResponseQueues::new(&a.maps),
            stack_ends: ResponseQueues::new(&a.stack_ends),
            threads: ResponseQueues::new(&a.threads),
            names: ResponseQueues::new(&a.names),
            opened: ResponseQueues::new(&a.opened),
            reads: ResponseQueues::new(&a.reads),
            clocks: ResponseQueues::new(&a.clocks),
            calls: ResponseQueues::new(&a.calls),
            sleeping: ResponseQueues::new(&a.sleeping),
            descriptors: ResponseQueues::new(&a.descriptors),
            networks: ResponseQueues::new(&a.networks),
            kernel: tape.kernel.clone(),
            files: tape.files.clone(),
            used: None,
        }
    }

    /// Notes which parts of the memory are used.
    pub fn log_use(&mut self, used: Rc<TapeUse>) {
        self.used = Some(used);
    }

    /// What is to be advanced with each event that is passed to the session.
    pub fn position(&self) -> TapePosition {
        self.position.clone()
    }

    fn after(&self) -> u32 {
        self.position.get()
    }
}

impl System for TapeSystem {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        let gone = || Error::new(ErrorKind::NoSuchProcess, format!("no process {pid} in the tape"));
        self.maps.next(&pid, self.after()).cloned().flatten().ok_or_else(gone)
    }

    fn stack_end(&self, pid: Pid) -> u64 {
        self.stack_ends.next(&pid, self.after()).copied().unwrap_or(0)
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        self.threads.next(&pid, self.after()).cloned().unwrap_or_default()
    }

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String> {
        self.names.next(&(pid, tid), self.after()).cloned().flatten()
    }

    fn open(&self, pid: Pid, start: u64, _: u64, path: &[u8], _: Option<&Root>) -> Option<(Content, FileKey)> {
        let index = (*self.opened.next(&(pid, start, path.to_vec()), self.after())?)?;
        let file = self.files.get(index as usize)?;
        Some((file.clone(), (0, index.into())))
    }

    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize {
        let Ok(len) = u32::try_from(buf.len()) else { return 0 };
        if let Some(used) = &self.used {
            *used.reads.borrow_mut().entry((pid, avma, len)).or_default() += 1;
        }
        let Some(bytes) = self.reads.next(&(pid, avma, len), self.after()) else {
            return 0;
        };
        let n = bytes.len().min(buf.len());
        buf[..n].copy_from_slice(&bytes[..n]);
        n
    }

    fn used_memory(&self) -> Option<&RefCell<UsedMemory>> {
        self.used.as_ref().map(|used| &used.memory)
    }

    fn root(&self, _: Pid) -> Option<Root> {
        None
    }

    fn kernel_symbols(&self) -> Option<String> {
        self.kernel.clone()
    }

    fn now(&self) -> u64 {
        let now = self.clocks.next(&MONOTONIC, self.after());
        now.copied().unwrap_or_else(sys::clock::now)
    }

    fn own_cpu_time(&self) -> u64 {
        self.clocks.next(&OWN_CPU, self.after()).copied().unwrap_or(0)
    }

    fn blocked_call(&self, pid: Pid, tid: Tid) -> Option<u64> {
        self.calls.next(&(pid, tid), self.after()).copied().flatten()
    }

    fn sleeping_thread(&self, pid: Pid, tid: Tid, _: &mut dyn FnMut() -> Option<Sample>) -> Option<Sample> {
        let sample = self.sleeping.next(&(pid, tid), self.after())?.as_ref()?;
        Some((**sample).clone())
    }

    fn end_turn(&self) {
        self.position.advance();
    }

    fn end_sampling(&self) {
        self.position.advance();
    }

    fn descriptor(&self, pid: Pid, fd: u32) -> Option<String> {
        self.descriptors.next(&(pid, fd), self.after()).cloned().flatten()
    }

    fn network_table(&self, pid: Pid, name: &str) -> Option<String> {
        self.networks.next(&(pid, name.into()), self.after()).cloned().flatten()
    }
}

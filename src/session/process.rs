//! The owner of what is known of one process: dropping it forgets the process.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::code_copies::CodeCopies;
use super::files::Files;
use super::jit::Jit;
use super::sockets::ProcessSockets;
use super::thread_ids::ThreadIds;
use super::thread_names::ThreadNameSchedule;
use crate::cpython::{self, Runtime, gil, thread_states};
use crate::cpython_layout::{Interpreter, InterpreterLocks, ThreadDescriptor};
use crate::event::probes::{AllocationProbe, MAX_PROBES, ProbedFile};
use crate::event::{Pid, Tid};
use crate::frame::ModuleId;
use crate::limits::MAX_NESTED;
use crate::process::AddressSpace;
use crate::process::file_content::Content;
use crate::process::memory::Memory;
use crate::process::system::{ProcessMemory, System};

/// Said of an interpreter whose frames are not read.
const UNKNOWN: &str = ": unsupported version, so Python frames are not available";
/// Thread states whose thread is kept.
const MAX_STATES: usize = 4096;

/// Shortest time between two readings of where a process keeps its interpreter locks, ns of the samples' clock.
const READ_AGAIN: u64 = 50_000_000;

/// What is known of one run of a process: from its start, or the program that it executed last, to its end.
pub(super) struct Process {
    pub(super) space: AddressSpace,
    /// When it was started, ticks since the machine was; a number may belong to another process later.
    pub(super) started: Option<u64>,
    /// The process it was forked from: it started with a copy of that one's memory.
    pub(super) parent: Option<Pid>,
    pub(super) python: Option<PythonState>,
    pub(super) descriptor: Option<ThreadDescriptor>,
    pub(super) states: KnownStates,
    pub(super) locks: ProcessLocks,
    pub(super) jit: Jit,
    pub(super) code_copies: CodeCopies,
    pub(super) sockets: ProcessSockets,
    pub(super) thread_ids: ThreadIds,
    pub(super) thread_names: ThreadNameSchedule,
}

/// Python thread states of a process.
#[derive(Default)]
pub(super) struct KnownStates {
    /// All of them, where the process had more than one interpreter when they were read last.
    pub(super) several: FxHashSet<u64>,
    /// As in [`crate::cpython_layout::TargetLayout`].
    pub(super) lent: Vec<u64>,
    /// Time of the last search for subinterpreters, ns of the samples' clock.
    pub(super) searched: u64,
    /// The threads of those that held an interpreter lock.
    threads: FxHashMap<u64, Tid>,
}

impl KnownStates {
    /// Adds a thread state to those that have run in another thread than their own.
    pub(super) fn add_lent(&mut self, state: u64) {
        if self.lent.len() < MAX_NESTED && !self.lent.contains(&state) {
            self.lent.push(state);
        }
    }
}

/// Addresses of the interpreter locks of a process, as far as they have been found.
#[derive(Default)]
pub(super) struct ProcessLocks {
    pub(super) found: InterpreterLocks,
    /// Time of the last reading, 0: none.
    read: u64,
    /// The backend does not know them yet.
    changed: bool,
}

impl ProcessLocks {
    /// Whether the backend is to be notified of them; it is taken to be.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}

/// The interpreter of a process.
#[derive(Clone)]
pub(super) struct PythonState {
    pub(super) runtime: Arc<Runtime>,
    pub(super) module: ModuleId,
    pub(super) interpreter: Option<Interpreter>,
    /// Whether the layout still has to be validated.
    pub(super) unvalidated: bool,
}

/// Memory of a process; after it has exited, the memory of its parent at the same address. Code objects have
/// fingerprints, so differences between the two are noticed.
pub(super) struct ForkMemory<'a> {
    system: &'a dyn System,
    pid: Pid,
    parent: Option<Pid>,
}

impl Memory for ForkMemory<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut from = |pid| ProcessMemory(self.system, pid).read(avma, buf);
        from(self.pid) || self.parent.is_some_and(from)
    }
}

impl Process {
    /// A process of which nothing but its mappings is known.
    pub(super) fn new(space: AddressSpace, started: Option<u64>) -> Process {
        Process {
            space,
            started,
            parent: None,
            python: None,
            descriptor: None,
            states: KnownStates::default(),
            locks: ProcessLocks::default(),
            jit: Jit::default(),
            code_copies: CodeCopies::default(),
            sockets: ProcessSockets::default(),
            thread_ids: ThreadIds::default(),
            thread_names: ThreadNameSchedule::default(),
        }
    }

    /// A child right after `fork`: it has the same memory, but other threads, locks and descriptors of its own.
    pub(super) fn fork(&self, space: AddressSpace, started: Option<u64>) -> Process {
        Process {
            parent: Some(self.pid()),
            python: self.python.clone(),
            descriptor: self.descriptor,
            jit: self.jit.clone(),
            ..Process::new(space, started)
        }
    }

    pub(super) fn pid(&self) -> Pid {
        self.space.pid
    }

    /// Its memory, or after it has exited its parent's.
    pub(super) fn memory<'a>(&self, system: &'a dyn System) -> ForkMemory<'a> {
        ForkMemory {
            system,
            pid: self.pid(),
            parent: self.parent,
        }
    }

    /// Its memory as it is now.
    pub(super) fn live_memory<'a>(&self, system: &'a dyn System) -> ProcessMemory<'a> {
        ProcessMemory(system, self.pid())
    }

    /// The interpreter, if its version is supported.
    pub(super) fn interpreter(&self) -> Option<&Interpreter> {
        self.python.as_ref()?.interpreter.as_ref()
    }

    /// The interpreter with what its file says, if its version is supported.
    pub(super) fn runtime(&self) -> Option<(&Runtime, &Interpreter)> {
        let python = self.python.as_ref()?;
        Some((&python.runtime, python.interpreter.as_ref()?))
    }

    /// The interpreter as text: `CPython 3.11.7 (libpython3.11.so.1.0)`.
    pub(super) fn python_text(&self, files: &Files) -> Option<String> {
        let python = self.python.as_ref()?;
        let module = files.modules.get(python.module).name();
        let unknown = if python.interpreter.is_none() { UNKNOWN } else { "" };
        Some(format!("CPython {} ({module}){unknown}", python.runtime.version_text()))
    }

    /// Whether it had more than one interpreter when its thread states were read last.
    pub(super) fn has_several_interpreters(&self) -> bool {
        !self.states.several.is_empty()
    }

    /// Checks whether the process maps an interpreter; true if one was found that was not known before, or where it keeps
    /// the states of threads.
    pub(super) fn detect_python(&mut self, files: &Files) -> bool {
        let had_descriptor = self.descriptor.is_some();
        if !had_descriptor {
            let mut mapped = self.space.code().iter().filter_map(|c| c.file);
            self.descriptor = mapped.find_map(|(id, _)| files.descriptor(id));
        }
        if let Some(python) = &mut self.python {
            // An interpreter within the program is mapped before the C library.
            return match (&mut python.interpreter, self.descriptor) {
                (Some(interpreter), Some(descriptor)) if !had_descriptor => {
                    let known = std::mem::replace(&mut interpreter.descriptor, descriptor);
                    known != descriptor
                }
                _ => false,
            };
        }
        let mut mapped = self.space.code().iter().filter_map(|c| c.file);
        let Some((id, bias, runtime)) = mapped.find_map(|(id, bias)| Some((id, bias, files.runtime(id)?))) else {
            return false;
        };
        let interpreter = runtime.in_process(bias, self.descriptor.unwrap_or(cpython::DEFAULT_DESCRIPTOR));
        self.python = Some(PythonState {
            runtime: runtime.clone(),
            module: id,
            interpreter,
            unvalidated: runtime.newer_than_known && interpreter.is_some(),
        });
        self.validate_python(&*files.system);
        true
    }

    /// Keeps the interpreter of a version newer than all known ones if its layout is valid, as far as can be seen now.
    pub(super) fn validate_python(&mut self, system: &dyn System) {
        let memory = self.live_memory(system);
        let python = self.python.as_mut().filter(|p| p.unvalidated);
        let Some((python, interpreter)) = python.and_then(|p| p.interpreter.map(|i| (p, i))) else {
            return;
        };
        let fits = cpython::validate::validate(&memory, &interpreter);
        python.unvalidated = fits.is_none();
        if fits == Some(false) {
            python.interpreter = None;
        }
    }

    /// Reads the thread states; returns those of each thread, as [`thread_states::states_by_thread`] has them.
    pub(super) fn read_states(&mut self, system: &dyn System) -> Vec<(u64, Vec<u64>)> {
        let Some(python) = self.interpreter().copied() else {
            return Vec::new();
        };
        let memory = self.live_memory(system);
        let states = thread_states::states(&memory, &python);
        let has_several = states.iter().any(|s| s.interpreter != states[0].interpreter);
        let kept = states.iter().filter(|_| has_several).map(|s| s.state);
        self.states.several = kept.collect();
        // One that was lent once is lent again.
        let known = &self.states.several;
        self.states.lent.retain(|lent| known.contains(lent));
        let lent = thread_states::lent_states(&memory, &python, &states, self.space.stack_end);
        for lent in lent.into_iter().filter(|_| has_several) {
            self.states.add_lent(lent);
        }
        thread_states::states_by_thread(&python, &states, !self.states.lent.is_empty())
    }

    /// The thread that the Python thread state `state` belongs to. The cost does not depend on how many threads there
    /// are: each wait for the GIL asks for one.
    fn thread_of_state(&self, system: &dyn System, state: u64) -> Option<Tid> {
        let python = self.interpreter()?;
        let memory = self.live_memory(system);
        let thread_pointer = thread_states::thread_of(&memory, python, state)?;
        let inside = thread_states::thread_id(&memory, python, thread_pointer)?;
        self.host_thread(system, inside)
    }

    /// The same; if the thread has ended meanwhile, the one that the state belonged to when it was last seen.
    pub(super) fn known_thread_of_state(&mut self, system: &dyn System, state: u64) -> Option<Tid> {
        let Some(tid) = self.thread_of_state(system, state) else {
            return self.states.threads.get(&state).copied();
        };
        if self.states.threads.len() >= MAX_STATES {
            self.states.threads.clear();
        }
        self.states.threads.insert(state, tid);
        Some(tid)
    }

    /// Reads where the locks are if that is not known; `time`: of a sample, ns.
    pub(super) fn find_locks(&mut self, system: &dyn System, time: u64) {
        if self.locks.found.at.is_empty() {
            self.read_locks(system, time);
        }
    }

    /// Whether an address lies in a lock of the process's interpreters; `time`: of the sample that asks, ns.
    pub(super) fn is_in_lock(&mut self, system: &dyn System, time: u64, address: u64) -> bool {
        if !self.locks.found.contain(address) {
            self.read_locks(system, time);
        }
        self.locks.found.contain(address)
    }

    /// Reads the locks again, not too often: the interpreter may have been starting, or there is a new subinterpreter.
    fn read_locks(&mut self, system: &dyn System, time: u64) {
        let is_recent = self.locks.read != 0 && time.saturating_sub(self.locks.read) < READ_AGAIN;
        let Some((runtime, interpreter)) = self.runtime().filter(|_| !is_recent) else {
            return;
        };
        let found = gil::locks(&self.memory(system), runtime, interpreter);
        let known = &mut self.locks;
        known.read = time.max(1);
        known.changed |= found != known.found;
        known.found = found;
    }

    /// Threads that hold the global lock of an interpreter now.
    pub(super) fn gil_holders(&self, system: &dyn System) -> Vec<Tid> {
        let Some((runtime, interpreter)) = self.runtime() else {
            return Vec::new();
        };
        let states = gil::holders(&self.live_memory(system), runtime, interpreter);
        states
            .into_iter()
            .filter_map(|state| self.thread_of_state(system, state))
            .collect()
    }

    /// Where it publishes the allocations that it samples.
    pub(super) fn allocation_probes(&self, files: &Files) -> Vec<AllocationProbe> {
        let mut found = Vec::new();
        for code in self.space.code() {
            let Some((id, bias)) = code.file else { continue };
            let Content::File(file) = &files.modules.get(id).content else {
                continue;
            };
            for probe in files.allocation_probes(id) {
                let avma = probe.svma.wrapping_add(bias);
                // (One more than are used: then it is known that there are too many.)
                if (code.start..code.end).contains(&avma) && found.len() <= MAX_PROBES {
                    found.push(AllocationProbe {
                        event: probe.event,
                        avma,
                        offset: probe.offset,
                        semaphore: probe.semaphore,
                        file: ProbedFile(file.clone()),
                    });
                }
            }
        }
        found
    }

    /// Whether what it has mapped at this address (avma) publishes allocations.
    pub(super) fn has_allocation_probes(&self, files: &Files, start: u64) -> bool {
        let mut mapped = self.space.code().iter().filter(|code| code.start == start);
        mapped.any(|code| code.file.is_some_and(|(id, _)| !files.allocation_probes(id).is_empty()))
    }

    /// The thread that has this ID in the process's own PID namespace.
    pub(super) fn host_thread(&self, system: &dyn System, inside: Tid) -> Option<Tid> {
        self.thread_ids.host(system, self.pid(), inside, system.now())
    }

    /// The threads with a Python thread state, by their `pthread_self`.
    pub(super) fn python_threads(&self, system: &dyn System) -> Vec<(Tid, u64)> {
        let Some(python) = self.interpreter() else {
            return Vec::new();
        };
        let memory = self.live_memory(system);
        let thread_pointers = thread_states::thread_pointers(&memory, python, &thread_states::states(&memory, python));
        let threads = system.threads(self.pid()).into_iter();
        threads
            .filter_map(|tid| {
                let inside = self.thread_ids.inside(system, self.pid(), tid)?;
                Some((tid, *thread_pointers.get(&inside)?))
            })
            .collect()
    }
}

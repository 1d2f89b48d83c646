//! The processes of a session: added, announced to the backend, removed.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::sync::Arc;

use rustc_hash::FxHashSet;

use super::code_copies::CodeCopies;
use super::eval_calls::add_lent;
use super::jit::Jit;
use super::{Session, TargetUpdate};
use crate::cpython;
use crate::cpython::{Runtime, frame_groups, thread_states};
use crate::cpython_layout::{Interpreter, TargetLayout, ThreadDescriptor};
use crate::error::Result;
use crate::event::{Event, Pid, Tid};
use crate::frame::{ModuleId, NativeFrame, UnwindMethod};
use crate::process::AddressSpace;
use crate::process::command;
use crate::process::landmarks;
use crate::process::memory::Memory;
use crate::process::modules::ModuleSections;
use crate::process::system::{ProcessMemory, System};
use crate::sys;

/// Said of an interpreter whose frames are not read.
const UNKNOWN: &str = ": unsupported version, so Python frames are not available";

/// Processes that exited last of which everything is kept: their samples may come later than their exit.
const MAX_DEPARTED: usize = 16;
/// Maximum number of recently exited threads that are remembered.
const MAX_EXITED: usize = 4096;

/// What a file contains of Python and of the C library: searched once, since some files have very many symbols.
pub(super) struct ModuleInfo {
    /// The interpreter in it.
    pub(super) runtime: Option<Arc<Runtime>>,
    /// How the C library finds thread-specific values; not searched yet in most files.
    pub(super) descriptor: OnceCell<Option<ThreadDescriptor>>,
}

/// A process of the session.
pub(super) struct TargetProcess {
    pub(super) process: AddressSpace,
    /// The process it was forked from: it started with a copy of that one's memory.
    pub(super) parent: Option<Pid>,
    pub(super) python: Option<PythonState>,
    pub(super) descriptor: Option<ThreadDescriptor>,
    /// The thread states, where it had more than one interpreter when they were read last.
    pub(super) states: FxHashSet<u64>,
    /// As in [`TargetLayout`].
    pub(super) lent_states: Vec<u64>,
    /// Time of the last search for subinterpreters.
    pub(super) rescanned: u64,
    pub(super) jit: Jit,
    pub(super) code_copies: CodeCopies,
}

impl TargetProcess {
    pub(super) fn new(process: AddressSpace) -> TargetProcess {
        TargetProcess {
            process,
            parent: None,
            python: None,
            descriptor: None,
            states: FxHashSet::default(),
            lent_states: Vec::new(),
            rescanned: 0,
            jit: Jit::default(),
            code_copies: CodeCopies::default(),
        }
    }

    pub(super) fn has_several_interpreters(&self) -> bool {
        !self.states.is_empty()
    }
}

/// Memory of a process; after it has exited, the memory of its parent at the same address. Code objects have
/// fingerprints, so differences between the two are noticed.
pub(super) struct ForkMemory<'a> {
    pub(super) system: &'a dyn System,
    pub(super) pid: Pid,
    pub(super) parent: Option<Pid>,
}

impl Memory for ForkMemory<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut from = |pid| ProcessMemory(self.system, pid).read(avma, buf);
        from(self.pid) || self.parent.is_some_and(from)
    }
}

#[derive(Clone)]
pub(super) struct PythonState {
    pub(super) runtime: Arc<Runtime>,
    pub(super) module: ModuleId,
    pub(super) interpreter: Option<Interpreter>,
    /// Whether the layout still has to be validated.
    pub(super) unvalidated: bool,
}

impl Session {
    /// Adds a process: reads what it maps, and whether it runs Python.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn open(&mut self, pid: Pid, update: &mut TargetUpdate<'_>) -> Result<()> {
        let mut new = Vec::new();
        let process = AddressSpace::open(&*self.system, pid, &mut self.modules, &mut |id| new.push(id))?;
        for id in new {
            self.add_module(id);
        }
        if self.open_files.root.is_none() {
            self.open_files.root = self.system.root(pid);
        }
        if let Some(root) = process.root.as_ref().filter(|_| !process.regions().is_empty()) {
            self.open_files.open_perf_map(pid, root);
        }
        self.targets.insert(pid, TargetProcess::new(process));
        for tid in self.system.threads(pid) {
            if let Some(name) = self.system.thread_name(pid, tid) {
                self.threads.insert((pid, tid), name);
            }
        }
        self.detect_python(pid);
        self.notify_backend(pid, update)
    }

    /// Copies the code objects that these events name, before anything slower is done: they may be about to be freed.
    pub fn capture_code_objects(&mut self, events: &[Event]) {
        for event in events {
            let pid = match event {
                Event::Sample(s) => &s.pid,
                Event::Code { pid, .. } => pid,
                _ => continue,
            };
            let Some(m) = self.targets.get(pid) else { continue };
            let Some(i) = m.python.as_ref().and_then(|p| p.interpreter) else {
                continue;
            };
            let memory = ForkMemory {
                system: &*self.system,
                pid: *pid,
                parent: m.parent,
            };
            match event {
                Event::Sample(s) => {
                    let last = self.last_stacks.get(&s.tid).map(|last| &last.python);
                    frame_groups::capture_code_objects(s, &i.layout, &mut self.codes, &memory, last);
                }
                Event::Code { copy, .. } => self.codes.update_process(*pid, &memory, &i.layout, copy),
                _ => {}
            }
        }
    }

    /// The interpreter of a process: what its file says, and where it is if its version is supported.
    pub fn python(&self, pid: Pid) -> Option<(Arc<Runtime>, Option<Interpreter>)> {
        let python = self.targets.get(&pid)?.python.as_ref()?;
        Some((python.runtime.clone(), python.interpreter))
    }

    /// Keeps of an exited thread or process only what its samples need: some programs create them by the million.
    pub(super) fn exit(&mut self, pid: Pid, tid: Tid, update: &mut TargetUpdate<'_>) -> Result<()> {
        if let Some(last) = self.last_stacks.remove(&tid) {
            self.last_bytes -= last.bytes();
        }
        let is_sampled = self.sampled.contains(&(pid, tid));
        if !is_sampled {
            self.threads.remove(&(pid, tid));
        }
        self.thread_ids.forget_thread(pid, tid);
        self.thread_names.forget_thread(pid, tid, is_sampled);
        if self.exited.len() >= MAX_EXITED {
            self.exited.clear();
        }
        self.exited.insert(tid);
        if pid != tid && !self.leaderless.contains(&pid) {
            return Ok(());
        }
        // The first thread may exit before the others. Those that are still listed may have exited, too.
        if self
            .system
            .threads(pid)
            .iter()
            .any(|other| !self.exited.contains(other))
        {
            self.leaderless.insert(pid);
            return Ok(());
        }
        self.leaderless.remove(&pid);
        update(pid, None)?;
        if self.with_anonymous_code.contains(&pid) {
            self.scan_jit_code(pid, None);
        }
        // Samples of its other threads may follow: those that were blocked are woken to exit, after the first one has.
        self.departed.push_back(pid);
        self.end_awaits(pid);
        if self.departed.len() > MAX_DEPARTED
            && let Some(oldest) = self.departed.pop_front()
        {
            self.forget_process(oldest);
        }
        Ok(())
    }

    /// A process executes a program: by one of its threads, which has the number of the first one from then on. That one has exited,
    /// but its process has not.
    pub(super) fn notice_exec(&mut self, pid: Pid) {
        self.exited.remove(&pid);
        self.leaderless.remove(&pid);
        self.departed.retain(|departed| *departed != pid);
    }

    /// Drops what is known of a process that has exited.
    fn forget_process(&mut self, pid: Pid) {
        // JIT code is named at the end.
        if !self.with_anonymous_code.contains(&pid) {
            self.targets.remove(&pid);
            if let Some(edges) = &mut self.edges {
                edges.forget_processes();
            }
            self.open_files.perf_maps.remove(&pid);
        }
        self.codes.remove_process(pid);
        self.thread_ids.forget_process(pid);
        self.thread_names.forget_process(pid, true);
        self.forget_tasks(pid);
        self.forget_spans(pid);
        if !self.sampled.contains(&(pid, pid)) {
            self.pythons.remove(&pid);
        }
    }

    /// The number of a process that has exited is in use again.
    fn forget_predecessor(&mut self, pid: Pid) {
        if let Some(at) = self.departed.iter().position(|departed| *departed == pid) {
            self.departed.remove(at);
            self.forget_process(pid);
        }
    }

    pub(super) fn add_module(&mut self, id: ModuleId) {
        let module = self.modules.get(id);
        self.unwinder.add(id, Box::new(ModuleSections(module.clone())));
        let runtime = cpython::find_runtime(module);
        let mut landmarks = landmarks::find(module);
        landmarks.eval = runtime.as_ref().map_or(Vec::new(), |r| r.eval.clone());
        self.unwinder.add_landmarks(id, landmarks);
        let known = ModuleInfo {
            runtime: runtime.map(Arc::new),
            descriptor: OnceCell::new(),
        };
        self.module_info.insert(id, known);
    }

    /// Adds a process that is about to execute its program. If it has exited by the time its mappings are handled, its
    /// files are still found.
    pub fn add_before_exec(&mut self, pid: Pid) {
        let root = self.modules.root(&*self.system, pid);
        let mut process = AddressSpace::exited(pid);
        process.root = root;
        self.targets.insert(pid, TargetProcess::new(process));
    }

    /// Reads the files of an interpreter that a process is about to run. Later, it would run Python code before they are
    /// read, of which nothing would be known.
    pub fn prepare(&mut self, pid: Pid, program: PathBuf) {
        let program = self.prepare_file(pid, program);
        let module = self.modules.get(program).clone();
        let names = module.libraries();
        let is_python = |name: &str| name.starts_with("libpython");
        let has_runtime = |info: &ModuleInfo| info.runtime.is_some();
        let holds_python = self.module_info.get(&program).is_some_and(has_runtime);
        if !holds_python && !names.iter().any(|name| is_python(name)) {
            return;
        }
        // The C library holds the threads' variables.
        for name in names.iter().filter(|name| is_python(name) || name.starts_with("libc.")) {
            if let Some(path) = command::library(&module, name) {
                self.prepare_file(pid, path);
            }
        }
    }

    fn prepare_file(&mut self, pid: Pid, path: PathBuf) -> ModuleId {
        let (id, new) = self.modules.open(&*self.system, pid, 0, 0, &command::bytes(path), None);
        if new {
            self.add_module(id);
        }
        if let Some(info) = self.module_info.get(&id) {
            info.descriptor
                .get_or_init(|| cpython::find_descriptor(self.modules.get(id)));
        }
        id
    }

    /// A process executes another program.
    pub(super) fn exec(&mut self, pid: Pid, update: &mut TargetUpdate<'_>) {
        // Mappings of the new program follow as separate events, except for the vDSO.
        let before = self.targets.remove(&pid);
        if let Some(edges) = &mut self.edges {
            edges.forget_processes();
        }
        self.gil_locks.forget(pid);
        self.sockets.forget(pid);
        if self.open(pid, update).is_err()
            && let Some(before) = before
        {
            // It has exited already. Its mappings still follow.
            let mut process = AddressSpace::exited(pid);
            process.root = before.process.root;
            self.targets.insert(pid, TargetProcess::new(process));
        }
    }

    /// A process has forked.
    pub(super) fn fork(&mut self, pid: Pid, parent: Pid, update: &mut TargetUpdate<'_>) -> Result<()> {
        self.exited.remove(&pid);
        self.forget_predecessor(pid);
        let Some(m) = self.targets.get(&parent) else {
            return Ok(());
        };
        let mut process = m.process.clone_for_child(pid);
        // The same files, but another number; if the child has exited already, its parent's.
        process.root = self.modules.root(&*self.system, pid).or(process.root);
        let child = TargetProcess {
            parent: Some(parent),
            python: m.python.clone(),
            descriptor: m.descriptor,
            jit: m.jit.clone(),
            ..TargetProcess::new(process)
        };
        self.targets.insert(pid, child);
        self.codes.on_fork(pid, parent);
        if let Some(p) = self.pythons.get(&parent).cloned() {
            self.pythons.insert(pid, p);
        }
        let name = self.threads.get(&(parent, parent)).cloned().unwrap_or_default();
        self.threads.insert((pid, pid), name);
        self.notify_backend(pid, update)
    }

    /// Checks whether a process maps an interpreter; true if one was found that was not known before, or where it keeps
    /// the states of threads.
    pub(super) fn detect_python(&mut self, pid: Pid) -> bool {
        let Some(m) = self.targets.get_mut(&pid) else {
            return false;
        };
        let had_descriptor = m.descriptor.is_some();
        if !had_descriptor {
            let files = m.process.code().iter().filter_map(|c| c.file);
            let descriptor = |id| {
                *self
                    .module_info
                    .get(&id)?
                    .descriptor
                    .get_or_init(|| cpython::find_descriptor(self.modules.get(id)))
            };
            m.descriptor = files.map(|(id, _)| id).find_map(descriptor);
        }
        if let Some(python) = &mut m.python {
            // An interpreter within the program is mapped before the C library.
            return match (&mut python.interpreter, m.descriptor) {
                (Some(interpreter), Some(descriptor)) if !had_descriptor => {
                    let known = std::mem::replace(&mut interpreter.descriptor, descriptor);
                    known != descriptor
                }
                _ => false,
            };
        }
        for (id, bias) in m.process.code().iter().filter_map(|c| c.file) {
            let Some(runtime) = self.module_info.get(&id).and_then(|known| known.runtime.as_ref()) else {
                continue;
            };
            let interpreter = runtime.in_process(bias, m.descriptor.unwrap_or(cpython::DEFAULT_DESCRIPTOR));
            let module = self.modules.get(id).name();
            let mut text = format!("CPython {} ({module})", runtime.version_text());
            if interpreter.is_none() {
                text += UNKNOWN;
            }
            self.pythons.insert(pid, text);
            m.python = Some(PythonState {
                runtime: runtime.clone(),
                module: id,
                interpreter,
                unvalidated: runtime.newer_than_known && interpreter.is_some(),
            });
            self.validate_python(pid);
            return true;
        }
        false
    }

    /// For a version newer than all known ones: keeps the interpreter if its layout is valid, as far as can be seen
    /// now.
    pub(super) fn validate_python(&mut self, pid: Pid) {
        let python = self.targets.get_mut(&pid).and_then(|m| m.python.as_mut());
        let Some((p, i)) = python
            .filter(|p| p.unvalidated)
            .and_then(|p| p.interpreter.map(|i| (p, i)))
        else {
            return;
        };
        let fits = cpython::validate::validate(&ProcessMemory(&*self.system, pid), &i);
        p.unvalidated = fits.is_none();
        if fits == Some(false) {
            p.interpreter = None;
            *self.pythons.entry(pid).or_default() += UNKNOWN;
        }
    }

    pub(super) fn notify_backend(&mut self, pid: Pid, update: &mut TargetUpdate<'_>) -> Result<()> {
        if self.departed.contains(&pid) {
            return Ok(());
        }
        let now = sys::clock::now();
        self.find_gil_locks(pid, now);
        self.search_asyncio_in(pid, now);
        let Some(m) = self.targets.get_mut(&pid) else {
            return Ok(());
        };
        let python = m.python.as_ref().and_then(|p| p.interpreter);
        let states_by_thread = python.map_or(Vec::new(), |p| {
            let memory = ProcessMemory(&*self.system, pid);
            let states = thread_states::states(&memory, &p);
            let has_several = states.iter().any(|s| s.interpreter != states[0].interpreter);
            let kept = states.iter().filter(|_| has_several).map(|s| s.state);
            m.states = kept.collect();
            // One that was lent once is lent again.
            m.lent_states.retain(|lent| m.states.contains(lent));
            let lent = thread_states::lent_states(&memory, &p, &states, m.process.stack_end);
            for lent in lent.into_iter().filter(|_| has_several) {
                add_lent(&mut m.lent_states, lent);
            }
            thread_states::states_by_thread(&p, &states, !m.lent_states.is_empty())
        });
        let m = &self.targets[&pid];
        let locks = self.gil_locks.of(pid);
        update(
            pid,
            Some(&TargetLayout {
                stack_end: m.process.stack_end,
                python,
                locks,
                states_by_thread,
                lent_states: m.lent_states.clone(),
                running_tasks: self.running_tasks(pid),
                spans: self.span_location(pid),
                thread_context: self.thread_context(pid),
                python_threads: self.python_threads(pid),
                inherited: self.inherited(pid),
            }),
        )?;
        self.inherited_known(pid);
        Ok(())
    }
}

/// Whether the outermost frame is where the kernel started the program, by its place on the stack; marks it as the end if so.
pub(super) fn is_process_entry(native: &mut [NativeFrame], stack_end: u64) -> bool {
    let Some(last) = native.last_mut() else { return false };
    let begins = stack_end != 0 && last.sp == stack_end;
    if begins {
        last.method = UnwindMethod::StackEnd;
    }
    begins
}

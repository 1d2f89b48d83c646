//! The processes of a session: taken in, told to the source, let go.

use std::cell::OnceCell;
use std::sync::Arc;

use super::jit::Jit;
use super::{Learn, Session};
use crate::error::Result;
use crate::interp::{self, Runtime, frames};
use crate::layout::{Interpreter, Space, Tls};
use crate::process::Process;
use crate::process::host::{Host, MemoryOf};
use crate::process::landmarks;
use crate::process::memory::Memory;
use crate::process::modules::{ModuleSections, Modules};
use crate::sample::{Event, How, ModuleId, NativeFrame, Pid, Tid};

/// Said of an interpreter whose frames are not read.
const UNKNOWN: &str = ": this version is not known, so its frames are left out";

/// Threads that ended lately: no more are kept in mind.
const MANY_ENDED: usize = 4096;

/// What a file is to interpreters: searched once, since some have very many symbols.
pub(super) struct Known {
    /// The interpreter in it.
    pub(super) runtime: Option<Arc<Runtime>>,
    /// The C library's way to thread-specific values; not yet searched in most files.
    pub(super) tls: OnceCell<Option<Tls>>,
}

/// A process of the session.
pub(super) struct Member {
    pub(super) process: Process,
    /// Whose memory it had a copy of when it was forked.
    pub(super) parent: Option<Pid>,
    pub(super) python: Option<Python>,
    pub(super) tls: Option<Tls>,
    /// Time of the last look for subinterpreters.
    pub(super) looked: u64,
    pub(super) jit: Jit,
}

impl Member {
    pub(super) fn new(process: Process) -> Member {
        Member {
            process,
            parent: None,
            python: None,
            tls: None,
            looked: 0,
            jit: Jit::default(),
        }
    }
}

/// Memory of a process; when it has ended, what its parent has at the same address. Code objects carry fingerprints,
/// so what the two do not share is noticed.
pub(super) struct Family<'a> {
    pub(super) host: &'a dyn Host,
    pub(super) pid: Pid,
    pub(super) parent: Option<Pid>,
}

impl Memory for Family<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut from = |pid| MemoryOf(self.host, pid).read(avma, buf);
        from(self.pid) || self.parent.is_some_and(from)
    }
}

#[derive(Clone)]
pub(super) struct Python {
    pub(super) runtime: Arc<Runtime>,
    pub(super) module: ModuleId,
    pub(super) interpreter: Option<Interpreter>,
    /// Whether the interpreter's frames are where we look has still to be tried.
    pub(super) on_trial: bool,
}

impl Session {
    /// Takes a process in: what it maps, whether it runs Python.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn open(&mut self, pid: Pid, learn: &mut Learn<'_>) -> Result<()> {
        let mut new = Vec::new();
        let process = Process::open(&*self.host, pid, &mut self.modules, &mut |id| new.push(id))?;
        for id in new {
            self.learn_module(id);
        }
        if self.opened.root.is_none() {
            self.opened.root = self.host.root(pid);
        }
        if let Some(root) = process.root.as_ref().filter(|_| !process.regions().is_empty()) {
            self.opened.open_perf_map(pid, root);
        }
        self.members.insert(pid, Member::new(process));
        for tid in self.host.threads(pid) {
            if let Some(name) = self.host.thread_name(pid, tid) {
                self.threads.insert((pid, tid), name);
            }
        }
        self.look_for_python(pid);
        self.tell(pid, learn)
    }

    /// Copies the code objects that these events speak of, before anything slower is done: they may be about to die.
    pub fn see_codes(&mut self, events: &[Event]) {
        for event in events {
            let pid = match event {
                Event::Sample(s) => &s.pid,
                Event::Code { pid, .. } => pid,
                _ => continue,
            };
            let Some(m) = self.members.get(pid) else { continue };
            let Some(i) = m.python.as_ref().and_then(|p| p.interpreter) else {
                continue;
            };
            let memory = Family {
                host: &*self.host,
                pid: *pid,
                parent: m.parent,
            };
            match event {
                Event::Sample(s) => {
                    let last = self.last.get(&s.tid).map(|last| &last.python);
                    frames::see_codes(s, &i.layout, &mut self.codes, &memory, last);
                }
                Event::Code { copy, .. } => self.codes.learn(*pid, &memory, &i.layout, copy),
                _ => {}
            }
        }
    }

    /// The interpreter of a process: what its file says, and where it is if its version is known.
    pub fn python(&self, pid: Pid) -> Option<(Arc<Runtime>, Option<Interpreter>)> {
        let python = self.members.get(&pid)?.python.as_ref()?;
        Some((python.runtime.clone(), python.interpreter))
    }

    /// Keeps of a thread or process that has ended only what its samples need: some programs make them by the million.
    pub(super) fn exit(&mut self, pid: Pid, tid: Tid, learn: &mut Learn<'_>) -> Result<()> {
        if let Some(last) = self.last.remove(&tid) {
            self.last_bytes -= last.bytes();
        }
        if !self.sampled.contains(&(pid, tid)) {
            self.threads.remove(&(pid, tid));
        }
        if self.ended.len() >= MANY_ENDED {
            self.ended.clear();
        }
        self.ended.insert(tid);
        if pid != tid && !self.headless.contains(&pid) {
            return Ok(());
        }
        // The first thread may end before the others. Those that are still listed may have ended, too.
        if self.host.threads(pid).iter().any(|other| !self.ended.contains(other)) {
            self.headless.insert(pid);
            return Ok(());
        }
        self.headless.remove(&pid);
        learn(pid, None)?;
        // Code that is in no file gets its name later.
        if self.unfiled.contains(&pid) {
            self.look_at_made_code(pid, None);
        } else {
            self.members.remove(&pid);
            self.opened.perf_maps.remove(&pid);
        }
        self.codes.forget(pid);
        if !self.sampled.contains(&(pid, pid)) {
            self.pythons.remove(&pid);
        }
        Ok(())
    }

    pub(super) fn learn_module(&mut self, id: ModuleId) {
        let module = self.modules.get(id);
        self.unwinder.add(id, Box::new(ModuleSections(module.clone())));
        let runtime = interp::find_runtime(module);
        let mut landmarks = landmarks::find(module);
        landmarks.eval = runtime.as_ref().map_or(Vec::new(), |r| r.eval.clone());
        self.unwinder.add_landmarks(id, landmarks);
        let known = Known {
            runtime: runtime.map(Arc::new),
            tls: OnceCell::new(),
        };
        self.known.insert(id, known);
    }

    /// Takes in a process that is about to run its program. If it has ended by the time that its mappings are handled,
    /// its files are still found.
    pub fn expect(&mut self, pid: Pid) {
        let root = self.modules.root(&*self.host, pid);
        let mut process = Process::gone(pid);
        process.root = root;
        self.members.insert(pid, Member::new(process));
    }

    /// A process runs another program.
    pub(super) fn exec(&mut self, pid: Pid, learn: &mut Learn<'_>) {
        // Mappings of the new program follow as events of their own; the vDSO is never told of.
        let before = self.members.remove(&pid);
        if self.open(pid, learn).is_err()
            && let Some(before) = before
        {
            // It has ended already. Its mappings will say where its samples were.
            let mut process = Process::gone(pid);
            process.root = before.process.root;
            self.members.insert(pid, Member::new(process));
        }
    }

    /// A process has forked.
    pub(super) fn fork(&mut self, pid: Pid, parent: Pid, learn: &mut Learn<'_>) -> Result<()> {
        self.ended.remove(&pid);
        let Some(m) = self.members.get(&parent) else {
            return Ok(());
        };
        let mut process = m.process.forked(pid);
        // The same files, but another number; gone already, and its parent's must do.
        process.root = self.modules.root(&*self.host, pid).or(process.root);
        let child = Member {
            parent: Some(parent),
            python: m.python.clone(),
            tls: m.tls,
            jit: m.jit.clone(),
            ..Member::new(process)
        };
        self.members.insert(pid, child);
        self.codes.forked(pid, parent);
        if let Some(p) = self.pythons.get(&parent).cloned() {
            self.pythons.insert(pid, p);
        }
        let name = self.threads.get(&(parent, parent)).cloned().unwrap_or_default();
        self.threads.insert((pid, pid), name);
        self.tell(pid, learn)
    }

    /// Looks whether a process maps an interpreter; true if that is news.
    pub(super) fn look_for_python(&mut self, pid: Pid) -> bool {
        let Some(m) = self.members.get_mut(&pid) else {
            return false;
        };
        if m.python.is_some() {
            return false;
        }
        if m.tls.is_none() {
            let files = m.process.code().iter().filter_map(|c| c.file);
            let tls = |id| {
                *self
                    .known
                    .get(&id)?
                    .tls
                    .get_or_init(|| interp::find_tls(self.modules.get(id)))
            };
            m.tls = files.map(|(id, _)| id).find_map(tls);
        }
        for (id, bias) in m.process.code().iter().filter_map(|c| c.file) {
            let Some(runtime) = self.known.get(&id).and_then(|known| known.runtime.as_ref()) else {
                continue;
            };
            let interpreter = runtime.in_process(bias, m.tls.unwrap_or(interp::DEFAULT_TLS));
            let module = self.modules.get(id).name();
            let mut text = format!("CPython {} ({module})", runtime.version_text());
            if interpreter.is_none() {
                text += UNKNOWN;
            }
            self.pythons.insert(pid, text);
            m.python = Some(Python {
                runtime: runtime.clone(),
                module: id,
                interpreter,
                on_trial: runtime.unknown && interpreter.is_some(),
            });
            self.try_python(pid);
            return true;
        }
        false
    }

    /// Where the version is one that we do not know: keeps the interpreter if its frames are where we look, as far as
    /// can be told now.
    pub(super) fn try_python(&mut self, pid: Pid) {
        let python = self.members.get_mut(&pid).and_then(|m| m.python.as_mut());
        let Some((p, i)) = python
            .filter(|p| p.on_trial)
            .and_then(|p| p.interpreter.map(|i| (p, i)))
        else {
            return;
        };
        let fits = interp::trial::fits(&MemoryOf(&*self.host, pid), &i);
        p.on_trial = fits.is_none();
        if fits == Some(false) {
            p.interpreter = None;
            *self.pythons.entry(pid).or_default() += UNKNOWN;
        }
    }

    pub(super) fn tell(&self, pid: Pid, learn: &mut Learn<'_>) -> Result<()> {
        let Some(m) = self.members.get(&pid) else { return Ok(()) };
        let python = m.python.as_ref().and_then(|p| p.interpreter);
        let nested = python.map_or(Vec::new(), |p| interp::threads::nested(&MemoryOf(&*self.host, pid), &p));
        learn(
            pid,
            Some(&Space {
                stack_end: m.process.stack_end,
                python,
                nested,
            }),
        )
    }
}

/// Bytes that the code at a program's entry point has, at most, up to its call.
const ENTRY: u64 = 64;

/// Does the outermost frame stand where the kernel started the program, by its place on the stack or by its code? Entry
/// points of programs and loaders written in assembler often have no tables to say so. Marks it as the end.
pub(super) fn begins_process(native: &mut [NativeFrame], stack_end: u64, modules: &Modules) -> bool {
    let Some(last) = native.last_mut() else { return false };
    let at_entry = |(module, svma): (ModuleId, u64)| {
        let entry = modules.get(module).entry;
        entry.is_some_and(|entry| svma >= entry && svma - entry < ENTRY)
    };
    let begins = (stack_end != 0 && last.sp == stack_end) || last.place.is_some_and(at_entry);
    if begins {
        last.how = How::End;
    }
    begins
}

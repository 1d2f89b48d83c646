//! The processes of a session: opened, forked, and forgotten.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use super::activities::ProcessActivities;
use super::files::Files;
use super::jit::Jit;
use super::process::Process;
use crate::code_map::CodeMap;
use crate::cpython::frame_groups;
use crate::event::{Event, Pid, Tid};
use crate::frame::ModuleId;
use crate::process::system::System;
use crate::process::{AddressSpace, is_file_path};
use crate::resolve::{JitSources, Owner};

/// Processes that exited last of which everything is kept: their samples may come later than their exit.
const MAX_DEPARTED: usize = 16;
/// Maximum number of recently exited threads that are remembered.
const MAX_EXITED: usize = 4096;

/// A process, and what the activities know of it.
pub(super) struct KnownProcess {
    pub(super) process: Process,
    pub(super) activities: ProcessActivities,
    /// The segment of a recording of a host, by number, in which it last had a sample, or which was the first to end.
    pub(super) last_used: Option<u32>,
    /// As [`Processes::run`].
    run: u64,
    /// Its first thread has exited while others still run.
    is_leaderless: bool,
    /// All threads have exited.
    has_exited: bool,
}

impl KnownProcess {
    fn new(process: Process, run: u64) -> KnownProcess {
        KnownProcess {
            process,
            run,
            activities: ProcessActivities::default(),
            last_used: None,
            is_leaderless: false,
            has_exited: false,
        }
    }
}

/// JIT code of a process that is forgotten otherwise: it is named at the end.
struct EndedCode {
    space: AddressSpace,
    jit: Jit,
    parent: Option<Pid>,
}

/// Processes by their numbers. What is known of one is dropped with its entry.
#[derive(Default)]
pub(super) struct Processes {
    known: FxHashMap<Pid, KnownProcess>,
    /// Number of those that were added so far.
    added: u64,
    /// Threads that exited recently.
    exited: FxHashSet<Tid>,
    /// Processes that exited last, the latest one at the end.
    departed: VecDeque<Pid>,
    ended_code: FxHashMap<Pid, EndedCode>,
}

impl Processes {
    pub(super) fn get(&self, pid: Pid) -> Option<&Process> {
        self.known.get(&pid).map(|known| &known.process)
    }

    /// What the activities know of a process.
    pub(super) fn activities(&self, pid: Pid) -> Option<&ProcessActivities> {
        self.known.get(&pid).map(|known| &known.activities)
    }

    pub(super) fn get_mut(&mut self, pid: Pid) -> Option<&mut KnownProcess> {
        self.known.get_mut(&pid)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut KnownProcess> {
        self.known.values_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &KnownProcess> {
        self.known.values()
    }

    /// Number of the run of a program that is known by this process's number: another program of the process, or another process,
    /// has another one. 0 if it is not open.
    pub(super) fn run(&self, pid: Pid) -> u64 {
        self.known.get(&pid).map_or(0, |known| known.run)
    }

    /// Adds a process of which nothing is known by its number.
    pub(super) fn add(&mut self, process: Process) -> &mut KnownProcess {
        let pid = process.pid();
        self.added += 1;
        self.known
            .entry(pid)
            .insert_entry(KnownProcess::new(process, self.added))
            .into_mut()
    }

    /// The process of a sample; if it is not known, one that has exited: without its mappings the stack is only addresses.
    pub(super) fn ensure(&mut self, pid: Pid) -> &mut KnownProcess {
        let gone = || KnownProcess::new(Process::new(AddressSpace::exited(pid), None), 0);
        self.known.entry(pid).or_insert_with(gone)
    }

    /// Whether a process has exited of which samples may still come.
    pub(super) fn has_exited(&self, pid: Pid) -> bool {
        self.known.get(&pid).is_some_and(|known| known.has_exited)
    }

    /// Whether the number of a process that has exited belongs to another one now.
    pub(super) fn is_other(&self, system: &dyn System, pid: Pid) -> bool {
        let known = self.known.get(&pid).filter(|known| known.has_exited);
        let started = known.and_then(|known| known.process.started);
        started.is_some_and(|started| system.start_time(pid).is_some_and(|now| now != started))
    }

    /// A thread runs.
    pub(super) fn begin_thread(&mut self, tid: Tid) {
        self.exited.remove(&tid);
    }

    /// A thread has exited; true if its process has with it.
    pub(super) fn end_thread(&mut self, system: &dyn System, pid: Pid, tid: Tid) -> bool {
        if self.exited.len() >= MAX_EXITED {
            self.exited.clear();
        }
        self.exited.insert(tid);
        let known = self.known.get_mut(&pid);
        let (is_leaderless, has_exited) = known.map_or((false, false), |known| {
            known.process.thread_ids.forget_thread(tid);
            known.process.thread_names.forget_thread(tid);
            (known.is_leaderless, known.has_exited)
        });
        if pid != tid && !is_leaderless || has_exited {
            return false;
        }
        // The first thread may exit before the others. Those that are still listed may have exited, too.
        let others = system.threads(pid);
        let runs = others.iter().any(|other| !self.exited.contains(other));
        if let Some(known) = self.known.get_mut(&pid) {
            known.is_leaderless = runs;
        }
        !runs
    }

    /// A process has exited. Samples of its other threads may follow: those that were blocked are woken to exit, after the
    /// first one has. Returns the process that is to be forgotten now.
    pub(super) fn depart(&mut self, pid: Pid) -> Option<Pid> {
        let known = self.known.get_mut(&pid)?;
        known.has_exited = true;
        self.departed.push_back(pid);
        (self.departed.len() > MAX_DEPARTED)
            .then(|| self.departed.pop_front())
            .flatten()
    }

    /// Forgets a process, but for what names its JIT code if samples have such. Returns what the activities knew of it,
    /// and whether its code is kept.
    pub(super) fn forget(&mut self, pid: Pid) -> Option<(ProcessActivities, bool)> {
        self.departed.retain(|departed| *departed != pid);
        let KnownProcess {
            process, activities, ..
        } = self.known.remove(&pid)?;
        let Process { space, jit, parent, .. } = process;
        let is_kept = jit.is_sampled;
        if is_kept {
            self.ended_code.insert(pid, EndedCode { space, jit, parent });
        }
        Some((activities, is_kept))
    }

    /// Copies the code objects that an event names, before anything slower is done: they may be about to be freed. `last`: the
    /// last frames of the sample's thread.
    pub(super) fn capture_code_objects(
        &self,
        files: &mut Files,
        event: &Event,
        last: Option<&frame_groups::LastFrames>,
    ) {
        let pid = match event {
            Event::Sample(s) => s.pid,
            Event::Code { pid, .. } => *pid,
            _ => return,
        };
        let Some(process) = self.get(pid) else { return };
        let Some(i) = process.interpreter() else { return };
        let memory = process.memory(&*files.system);
        match event {
            Event::Sample(s) => frame_groups::capture_code_objects(s, &i.layout, &mut files.codes, &memory, last),
            Event::Code { copy, .. } => files.codes.update_process(pid, &memory, &i.layout, copy),
            _ => {}
        }
    }

    /// Opens the files that these events name, before anything slower is done: the processes may be about to exit.
    pub(super) fn open_mapped_files(&self, files: &mut Files, events: &[Event]) {
        files.modules.forget_ahead();
        for event in events {
            let Event::Mmap {
                pid, start, end, path, ..
            } = event
            else {
                continue;
            };
            let Some(process) = self.get(*pid) else { continue };
            let root = process.space.root.as_deref();
            if is_file_path(path) {
                files.modules.open_ahead(&*files.system, *pid, *start, *end, path, root);
            } else if let Some(root) = root {
                files.open.open_perf_map(*pid, root);
            }
        }
    }

    /// The last scan of processes that have samples in JIT code, and of those that they were forked from.
    pub(super) fn scan_all_jit_code(&mut self, files: &mut Files) {
        let sampled = self.known.values().filter(|known| known.process.jit.is_sampled);
        let mut pids: FxHashSet<Pid> = sampled.map(|known| known.process.pid()).collect();
        for pid in pids.clone() {
            let parent = |pid| self.get(pid).and_then(|process| process.parent);
            let mut next = parent(pid);
            while let Some(above) = next.filter(|above| pids.insert(*above)) {
                next = parent(above);
            }
        }
        for pid in pids {
            if let Some(known) = self.known.get_mut(&pid) {
                known.process.scan_jit_code(files, None);
            }
        }
    }

    /// Drops what names JIT code of processes that are forgotten: no sample has any.
    pub(super) fn forget_ended_code(&mut self) {
        self.ended_code.clear();
    }

    /// Files that known processes have mapped, or whose code names JIT code of ended ones.
    pub(super) fn files(&self) -> impl Iterator<Item = ModuleId> + '_ {
        let now = self.iter().flat_map(|known| {
            let Process { space, python, jit, .. } = &known.process;
            let interpreter = python.iter().map(|python| python.module);
            space.files().chain(jit.modules()).chain(interpreter)
        });
        now.chain(self.ended_code.values().flat_map(|code| code.space.files()))
    }

    /// The code that a process runs, or ran when it ended.
    fn space(&self, pid: Pid) -> Option<(&AddressSpace, &Jit, Option<Pid>)> {
        let ended = self
            .ended_code
            .get(&pid)
            .map(|code| (&code.space, &code.jit, code.parent));
        let now = self
            .get(pid)
            .map(|process| (&process.space, &process.jit, process.parent));
        match (now, ended) {
            (Some(now), Some(_)) if now.1.is_sampled => Some(now),
            (_, Some(ended)) => Some(ended),
            (now, None) => now,
        }
    }

    /// What names JIT code of a process.
    pub(super) fn jit_sources(&self, pid: Pid) -> Option<JitSources> {
        let (space, jit, parent) = self.space(pid)?;
        Some(jit.sources(space, parent))
    }

    /// The module with the unwind rules of an address of `owner`, the svma there, and the load bias.
    pub(super) fn place_of_code(&self, owner: Owner, at: u64) -> Option<(ModuleId, u64, u64)> {
        match owner {
            Owner::File(module) => Some((module, at, 0)),
            Owner::Anonymous(pid) => {
                let (module, bias) = self.space(pid)?.0.find(at)?;
                Some((module, at.wrapping_sub(bias), bias))
            }
        }
    }
}

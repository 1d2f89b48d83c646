//! Named native stacks of single threads, for the `stacktrace` module.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::capture::signal::on_demand::{Response, StackRequester};
use crate::cpython;
use crate::cpython::Runtime;
use crate::error::Result;
use crate::event::{Pid, Sample, Tid};
use crate::frame::{ModuleId, NativeFrame};
use crate::process::file_content::Content;
use crate::process::modules::{ModuleSections, Modules};
use crate::process::system::LiveSystem;
use crate::process::{AddressSpace, landmarks};
use crate::sys::threads;
use crate::unwind::Unwinder;

/// Maximum time to wait for a thread while the caller may hold a lock that others need (the GIL).
pub const GIL_HELD_TIMEOUT: Duration = Duration::from_micros(500);
/// Maximum total time to wait, without the lock: as long as it may take until a thread gets a CPU that many others
/// want.
pub const TIMEOUT: Duration = Duration::from_millis(250);

/// One native frame. Addresses are those of its file, so that they are the same in all processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackEntry {
    /// The instruction, or the return address of a caller.
    pub address: u64,
    /// Start of the function.
    pub start: u64,
    /// For display; `[libfoo.so]` where the file has no name for it.
    pub name: Arc<str>,
    /// Whether this is the interpreter running bytecode.
    pub is_eval: bool,
    /// Whether it is part of the interpreter.
    pub is_interpreter: bool,
}

/// Takes and names stacks of threads of this process.
pub struct StackSampler {
    requester: StackRequester,
    symbolizer: Mutex<Symbolizer>,
}

/// Result of requesting a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThreadStack {
    /// Innermost first. Empty: there is no such thread.
    Stack(Vec<StackEntry>),
    /// The thread has not responded yet: call [`StackSampler::later`].
    Late(Tid),
}

impl StackSampler {
    /// # Errors
    /// `Unsupported`: this process cannot sample itself.
    pub fn new() -> Result<StackSampler> {
        Ok(StackSampler {
            requester: StackRequester::new(cpython::frame_walk::walk)?,
            symbolizer: Mutex::default(),
        })
    }

    /// Whether it was created in this process and not in one that this was forked from.
    pub fn is_current_process(&self) -> bool {
        self.requester.is_current_process()
    }

    /// The stack of the thread with this `pthread_self` (Python's ident), at most `max` entries.
    #[inline(never)]
    pub fn get(&self, thread_pointer: u64, max: usize) -> ThreadStack {
        match self.requester.request(thread_pointer, GIL_HELD_TIMEOUT) {
            Response::Sample(sample) => ThreadStack::Stack(self.name(&sample, max)),
            Response::Gone => ThreadStack::Stack(Vec::new()),
            Response::Late(tid) => ThreadStack::Late(tid),
        }
    }

    fn name(&self, sample: &Sample, max: usize) -> Vec<StackEntry> {
        let mut symbolizer = self.symbolizer.lock().unwrap_or_else(PoisonError::into_inner);
        symbolizer.stack(sample, max)
    }

    /// The stack of a thread that was late, waiting until `wait` after the request; empty if it is still late.
    pub fn later(&self, tid: Tid, max: usize, wait: Duration) -> Vec<StackEntry> {
        let sample = self.requester.wait(tid, wait);
        sample.map_or(Vec::new(), |s| self.name(&s, max))
    }
}

/// Unwinds and names, with a cache of the names.
struct Symbolizer {
    pid: Pid,
    process: AddressSpace,
    modules: Modules,
    runtimes: FxHashMap<ModuleId, Option<Arc<Runtime>>>,
    unwinder: Unwinder,
    symbols: FxHashMap<ModuleId, Option<symbolize::Module>>,
    known: FxHashMap<(ModuleId, u64), (u64, Arc<str>, bool)>,
    /// `threads::library_load_count` when the mappings were read.
    load_count: Option<u64>,
    native: Vec<NativeFrame>,
}

/// Maximum number of cached names.
const MAX_KNOWN: usize = 1 << 16;

impl Default for Symbolizer {
    fn default() -> Symbolizer {
        let pid = std::process::id();
        Symbolizer {
            pid,
            process: AddressSpace::exited(pid),
            modules: Modules::default(),
            runtimes: FxHashMap::default(),
            unwinder: Unwinder::default(),
            symbols: FxHashMap::default(),
            known: FxHashMap::default(),
            load_count: None,
            native: Vec::new(),
        }
    }
}

impl Symbolizer {
    /// The frames of a sample, innermost first.
    fn stack(&mut self, sample: &Sample, max: usize) -> Vec<StackEntry> {
        let Some(regs) = &sample.regs else { return Vec::new() };
        self.refresh_mappings();
        self.native.clear();
        // A stack that ends early is returned as far as it goes.
        let _ = self
            .unwinder
            .unwind(&self.process, regs, &sample.stack, &mut self.native);
        let native = std::mem::take(&mut self.native);
        let entries = native.iter().take(max).enumerate();
        let entries = entries.map(|(i, f)| self.entry(f, i == 0)).collect();
        self.native = native;
        entries
    }

    /// Reads the mappings if a library was loaded or unloaded since the last time.
    fn refresh_mappings(&mut self) {
        let load_count = threads::library_load_count();
        if self.load_count == Some(load_count) {
            return;
        }
        self.load_count = Some(load_count);
        let mut new = Vec::new();
        if let Ok(process) = AddressSpace::open(&LiveSystem, self.pid, &mut self.modules, &mut |id| new.push(id)) {
            self.process = process;
        }
        for id in new {
            let module = self.modules.get(id);
            self.unwinder.add(id, Box::new(ModuleSections(module.clone())));
            self.unwinder.add_landmarks(id, landmarks::find(module));
            self.runtimes.insert(id, cpython::find_runtime(module).map(Arc::new));
        }
    }

    fn entry(&mut self, f: &NativeFrame, innermost: bool) -> StackEntry {
        let after = u64::from(!innermost);
        let Some((module, svma)) = f.location else {
            return StackEntry {
                address: f.lookup + after,
                start: f.lookup,
                name: "[anonymous code]".into(),
                is_eval: false,
                is_interpreter: false,
            };
        };
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        if !self.known.contains_key(&(module, svma)) {
            let named = self.name(module, svma);
            self.known.insert((module, svma), named);
        }
        let (start, name, is_eval) = &self.known[&(module, svma)];
        let is_interpreter = self.runtimes.get(&module).is_some_and(Option::is_some);
        StackEntry {
            address: svma + after,
            start: *start,
            name: name.clone(),
            is_eval: *is_eval,
            is_interpreter,
        }
    }

    /// Start and name of the function at a place, and whether it is the bytecode loop.
    fn name(&mut self, id: ModuleId, svma: u64) -> (u64, Arc<str>, bool) {
        let module = self.modules.get(id).clone();
        let is_eval = self
            .runtimes
            .get(&id)
            .and_then(Option::as_ref)
            .is_some_and(|r| r.is_eval(svma));
        let symbols = self.symbols.entry(id).or_insert_with(|| open(&module.content));
        // From the symbol tables only: reading all DWARF could take a second, and the caller may not have that long.
        if let Some(f) = symbols.as_mut().and_then(|m| m.symbol_at(svma)) {
            return (f.start, symbolize::demangle(&f.raw).into(), is_eval);
        }
        let start = self.unwinder.function_start(id, svma).unwrap_or(svma);
        (start, format!("[{}]", module.name()).into(), is_eval)
    }
}

fn open(content: &Content) -> Option<symbolize::Module> {
    let module = match content {
        Content::File(file) => symbolize::Module::from_file(file.try_clone().ok()?),
        Content::Bytes(bytes) => symbolize::Module::from_bytes(bytes.to_vec()),
        Content::Missing => return None,
    };
    module.ok()
}

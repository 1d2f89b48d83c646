//! Native stacks of single threads, named: what the `stacktrace` module gives.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::capture::signal::ask::{Answer, Asker};
use crate::error::Result;
use crate::interp::{self, Runtime};
use crate::process::content::Content;
use crate::process::host::Live;
use crate::process::modules::{ModuleSections, Modules};
use crate::process::{Process, landmarks, own};
use crate::sample::{ModuleId, NativeFrame, Pid, Sample, Tid};
use crate::unwind::Unwinder;

/// How long a thread is waited for while its caller may hold a lock that others want (the interpreter's).
pub const SHORT: Duration = Duration::from_micros(500);
/// How long it is waited for in all, without the lock: as long as it may take until a thread is given a CPU that many
/// others want.
pub const LONG: Duration = Duration::from_millis(250);

/// One native frame. Addresses are those of its file, so that they are the same in all processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The instruction, or the return address of a caller.
    pub address: u64,
    /// Start of the function.
    pub start: u64,
    /// For people; `[libfoo.so]` where the file has no name for it.
    pub name: Arc<str>,
    /// Is this the interpreter running bytecode?
    pub is_eval: bool,
    /// Is it part of the interpreter at all?
    pub is_interpreter: bool,
}

/// Takes and names stacks of threads of this process.
pub struct Stacks {
    asker: Asker,
    namer: Mutex<Namer>,
}

/// What came of asking for a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Innermost first. Empty: there is no such thread.
    Stack(Vec<Entry>),
    /// The thread has not answered: ask [`Stacks::later`].
    Late(Tid),
}

impl Stacks {
    /// # Errors
    /// `Unsupported`: this process cannot sample itself.
    pub fn new() -> Result<Stacks> {
        Ok(Stacks {
            asker: Asker::new(interp::walk::walk)?,
            namer: Mutex::default(),
        })
    }

    /// Was it made in this process, not in one that this was forked from?
    pub fn is_own(&self) -> bool {
        self.asker.is_own()
    }

    /// The stack of the thread with this pointer (`pthread_t`, Python's ident), at most so many entries.
    #[inline(never)]
    pub fn get(&self, pointer: u64, most: usize) -> Found {
        match self.asker.ask(pointer, SHORT) {
            Answer::Sample(sample) => Found::Stack(self.name(&sample, most)),
            Answer::Gone => Found::Stack(Vec::new()),
            Answer::Late(tid) => Found::Late(tid),
        }
    }

    fn name(&self, sample: &Sample, most: usize) -> Vec<Entry> {
        let mut namer = self.namer.lock().unwrap_or_else(PoisonError::into_inner);
        namer.stack(sample, most)
    }

    /// The stack of a thread that was late, waited for until so long after it was asked; empty if it still is.
    pub fn later(&self, tid: Tid, most: usize, wait: Duration) -> Vec<Entry> {
        let sample = self.asker.wait(tid, wait);
        sample.map_or(Vec::new(), |s| self.name(&s, most))
    }
}

/// Unwinds and names, and remembers each place.
struct Namer {
    pid: Pid,
    process: Process,
    modules: Modules,
    runtimes: FxHashMap<ModuleId, Option<Arc<Runtime>>>,
    unwinder: Unwinder,
    symbols: FxHashMap<ModuleId, Option<symbolize::Module>>,
    known: FxHashMap<(ModuleId, u64), (u64, Arc<str>, bool)>,
    /// `own::loads` when the mappings were read.
    loads: Option<u64>,
    native: Vec<NativeFrame>,
}

/// Places that are remembered.
const MOST_KNOWN: usize = 1 << 16;

impl Default for Namer {
    fn default() -> Namer {
        let pid = std::process::id();
        Namer {
            pid,
            process: Process::gone(pid),
            modules: Modules::default(),
            runtimes: FxHashMap::default(),
            unwinder: Unwinder::default(),
            symbols: FxHashMap::default(),
            known: FxHashMap::default(),
            loads: None,
            native: Vec::new(),
        }
    }
}

impl Namer {
    /// The frames of a sample, innermost first.
    fn stack(&mut self, sample: &Sample, most: usize) -> Vec<Entry> {
        let Some(regs) = &sample.regs else { return Vec::new() };
        self.look();
        self.native.clear();
        // A stack that ends early is shown as far as it goes.
        let _ = self
            .unwinder
            .unwind(&self.process, regs, &sample.stack, &mut self.native);
        let native = std::mem::take(&mut self.native);
        let entries = native.iter().take(most).enumerate();
        let entries = entries.map(|(i, f)| self.entry(f, i == 0)).collect();
        self.native = native;
        entries
    }

    /// Reads the mappings if a library was loaded or unloaded since.
    fn look(&mut self) {
        let loads = own::loads();
        if self.loads == Some(loads) {
            return;
        }
        self.loads = Some(loads);
        let mut new = Vec::new();
        if let Ok(process) = Process::open(&Live, self.pid, &mut self.modules, &mut |id| new.push(id)) {
            self.process = process;
        }
        for id in new {
            let module = self.modules.get(id);
            self.unwinder.add(id, Box::new(ModuleSections(module.clone())));
            self.unwinder.add_landmarks(id, landmarks::find(module));
            self.runtimes.insert(id, interp::find_runtime(module).map(Arc::new));
        }
    }

    fn entry(&mut self, f: &NativeFrame, innermost: bool) -> Entry {
        let after = u64::from(!innermost);
        let Some((module, svma)) = f.place else {
            return Entry {
                address: f.lookup + after,
                start: f.lookup,
                name: "[code without a file]".into(),
                is_eval: false,
                is_interpreter: false,
            };
        };
        if self.known.len() >= MOST_KNOWN {
            self.known.clear();
        }
        if !self.known.contains_key(&(module, svma)) {
            let named = self.name(module, svma);
            self.known.insert((module, svma), named);
        }
        let (start, name, is_eval) = &self.known[&(module, svma)];
        let is_interpreter = self.runtimes.get(&module).is_some_and(Option::is_some);
        Entry {
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
        // From the symbol tables alone: reading all that DWARF tells could take a second, and who asks may be in a hurry.
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

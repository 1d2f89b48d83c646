//! Native workers below the code that they work for.
//!
//! A worker runs no Python. The backend finds its dispatcher, the thread with Python frames that gave it work, and puts that
//! thread's Python frames, of the same instant, into the worker's sample (dispatchers.h of the BPF program says how, and
//! why it is right). They come without the native frames between them: the dispatcher may run on another CPU, where its
//! registers are. But the dispatcher is sampled too, and where its Python frames were the same, so were the native frames
//! around them. Below the innermost Python frame that holds as far as the call into the library that the worker belongs to.
//!
//! Some pools spin for a while when a job is done, and what is left on the worker's stack may still point to the thread that gave
//! it. If samples of that thread show that it is not in the worker's library, the time belongs to the worker's last job. So it
//! does if nothing is known of where that thread is, and the worker is where others without a job have been ([`WorkerCode`]).

use std::hash::BuildHasher;
use std::rc::Rc;

use rustc_hash::{FxBuildHasher, FxHashMap};

use super::stacks::TruncationReason;
use crate::event::{PAGE, Sample, StackBytes, Tid};
use crate::frame::{CodeId, EvalGroups, ModuleId, NativeFrame, RawFrame};
use crate::interleave::{self, StackQuality};
use crate::process::modules::Modules;

/// Stacks of dispatchers that are known, at most, and frames of one of them.
const MAX_STACKS: usize = 4096;
const MAX_FRAMES: usize = 1024;
/// So many samples of a dispatcher in one place, or function, none of them in a library, show that it does not call that library
/// there.
const MIN_SAMPLES: u32 = 5;
/// So many samples of workers without a job show where workers wait.
const MIN_WITHOUT_JOB: u64 = 8;
/// Libraries below one innermost Python frame of which the call is known.
const MAX_CALLS: usize = 16;
/// Words of a frame, at most, that are taken as registers: as many as there are on any architecture that functions must keep.
const MAX_INHERITED: usize = 11;
/// Bytes of the outermost C function's frame, at most.
const MAX_START_FRAME: u64 = 1024;
/// Bytes above it, at most, that belong to the same stack: the thread descriptor and thread-local variables.
const DESCRIPTOR: u64 = 65536;
/// Names of libraries begin so whose functions start threads for other libraries.
const THREAD_LIBRARIES: &[&str] = &["libc.", "libc-", "libpthread", "ld-", "libstdc++", "libc++"];

/// The attribution of native workers to the threads that they work for.
#[derive(Default)]
pub(super) struct Workers {
    is_enabled: bool,
    /// By innermost Python function, in all threads.
    functions: FxHashMap<CodeId, FunctionCalls>,
    /// By hash of a worker's callers.
    places: FxHashMap<u64, WorkerCode>,
}

/// Workers and dispatchers of one process.
#[derive(Default)]
pub(super) struct ProcessWorkers {
    /// Stacks of threads with Python frames, by thread and Python frames.
    known: FxHashMap<(Tid, Rc<[RawFrame]>), DispatcherStack>,
    /// The last one of each thread, as its key in `known`.
    last: FxHashMap<Tid, Rc<[RawFrame]>>,
    /// By worker.
    last_jobs: FxHashMap<Tid, Job>,
    /// Registers that workers started with, by worker.
    inherited: FxHashMap<Tid, Inherited>,
}

struct Inherited {
    words: Vec<u64>,
    /// From then on the backend knows them, `CLOCK_MONOTONIC`, ns; `u64::MAX`: it does not yet.
    known_since: u64,
}

/// Samples of a Python function, and libraries that it called in them.
#[derive(Default)]
struct FunctionCalls {
    samples: u32,
    libraries: Vec<ModuleId>,
}

impl FunctionCalls {
    fn add_sample(&mut self, inner: &[RawFrame]) {
        self.samples = self.samples.saturating_add(1);
        for library in inner.iter().filter_map(module) {
            if self.libraries.len() < MAX_CALLS && !self.libraries.contains(&library) {
                self.libraries.push(library);
            }
        }
    }

    fn never_calls(&self, library: ModuleId) -> bool {
        self.samples >= MIN_SAMPLES && self.libraries.len() < MAX_CALLS && !self.libraries.contains(&library)
    }
}

/// A place in the code of workers, where they work or wait for work.
#[derive(Default)]
struct WorkerCode {
    /// Samples with a dispatcher that was in the worker's library, and with one that was not.
    with_job: u64,
    without_job: u64,
}

impl WorkerCode {
    fn is_for_waiting(&self) -> bool {
        // Workers also wait for parts of the call that have no work for them.
        self.without_job >= MIN_WITHOUT_JOB && self.without_job > self.with_job / 16
    }
}

/// What a worker does, and for which thread.
#[derive(Clone)]
pub(super) struct Job {
    pub(super) dispatcher: Tid,
    /// The dispatcher's stack, outermost frame first, and why it is incomplete.
    pub(super) frames: Vec<RawFrame>,
    pub(super) truncation: TruncationReason,
}

/// A stack, outermost frame first.
struct DispatcherStack {
    /// Up to the innermost Python frame.
    outer: Vec<RawFrame>,
    /// The native frames below that, up to the first one of a library.
    calls: Vec<(ModuleId, Vec<RawFrame>)>,
    samples: u32,
}

/// What the backend says of a worker's job.
pub(super) struct DispatcherFrames {
    tid: Tid,
    is_unchanged: bool,
    /// Python frames, outermost first, and why they are incomplete. `None`: nothing, so it is the last job.
    python: Option<(Vec<RawFrame>, TruncationReason)>,
}

fn is_python(frame: &RawFrame) -> bool {
    matches!(frame, RawFrame::Python { .. })
}

fn innermost_code(python: &[RawFrame]) -> Option<CodeId> {
    match python.last()? {
        RawFrame::Python { code, .. } => Some(*code),
        _ => None,
    }
}

fn module(frame: &RawFrame) -> Option<ModuleId> {
    match frame {
        RawFrame::Native { module, .. } => Some(*module),
        _ => None,
    }
}

impl DispatcherStack {
    fn new(stack: &[RawFrame]) -> DispatcherStack {
        let inner = stack.iter().rposition(is_python).map_or(0, |at| at + 1);
        let mut new = DispatcherStack {
            outer: stack[..inner].to_vec(),
            calls: Vec::new(),
            samples: 0,
        };
        new.add_sample(&stack[inner..]);
        new
    }

    /// Adds the calls into libraries that are not known yet; `inner`: frames below the innermost Python frame.
    fn add_sample(&mut self, inner: &[RawFrame]) {
        self.samples = self.samples.saturating_add(1);
        for (at, frame) in inner.iter().enumerate() {
            let Some(library) = module(frame) else { continue };
            if self.calls.len() < MAX_CALLS && self.calls.iter().all(|(known, _)| *known != library) {
                self.calls.push((library, inner[..=at].to_vec()));
            }
        }
    }

    /// The native frames down to the call into a library.
    fn call(&self, library: ModuleId) -> Option<&[RawFrame]> {
        let call = self.calls.iter().find(|(known, _)| *known == library);
        call.map(|(_, frames)| &frames[..])
    }

    /// Where the Python frames begin like these: those frames with the native ones between them, then the rest of `python`.
    fn joined_with(&self, python: &[RawFrame]) -> Vec<RawFrame> {
        let (mut at, mut end) = (0, 0);
        for (i, frame) in self.outer.iter().enumerate() {
            if is_python(frame) {
                if python.get(at) != Some(frame) {
                    break;
                }
                (at, end) = (at + 1, i + 1);
            }
        }
        [&self.outer[..end], &python[at..]].concat()
    }
}

/// The different words in a frame that may be pointers, to other things than that stack. The outermost first, where functions
/// save registers.
fn saved_pointers(frame: &NativeFrame, stack: &StackBytes) -> Vec<u64> {
    let mut words = Vec::new();
    let own = stack.base..frame.cfa.saturating_add(DESCRIPTOR);
    let len = frame.cfa.saturating_sub(frame.sp).min(MAX_START_FRAME);
    let places = (1..=len / 8).map(|n| frame.cfa - 8 * n);
    for word in places.filter_map(|at| stack.word(at)) {
        let is_pointer = word % 8 == 0 && word >= PAGE && word >> 48 == 0 && !own.contains(&word);
        if is_pointer && !words.contains(&word) && words.len() < MAX_INHERITED {
            words.push(word);
        }
    }
    words
}

impl ProcessWorkers {
    /// A thread has ended.
    pub(super) fn forget_thread(&mut self, tid: Tid) {
        self.last_jobs.remove(&tid);
        self.inherited.remove(&tid);
    }

    /// The backend knows the registers that the workers of the process started with; `now`: CLOCK_MONOTONIC, ns.
    pub(super) fn inherited_known(&mut self, now: u64) {
        for inherited in self.inherited.values_mut() {
            if inherited.known_since == u64::MAX {
                inherited.known_since = now;
            }
        }
    }

    /// The registers that the workers of the process started with.
    pub(super) fn inherited(&self) -> Vec<(Tid, Vec<u64>)> {
        let all = self.inherited.iter();
        all.filter(|(_, inherited)| !inherited.words.is_empty())
            .map(|(tid, inherited)| (*tid, inherited.words.clone()))
            .collect()
    }
}

/// What a sample is below if it is one of a worker: takes the dispatcher's Python frames out of `groups`.
pub(super) fn take_dispatcher(own: &ProcessWorkers, s: &Sample, groups: &mut EvalGroups) -> Option<DispatcherFrames> {
    let Some(dispatcher) = s.dispatcher else {
        let last = own.last_jobs.get(&s.tid)?;
        // A worker that waits may wait for its next job.
        let is_active = s.python.is_empty() && s.wake_up.wakes.is_none() && s.time_spent.blocked == 0;
        return is_active.then_some(DispatcherFrames {
            tid: last.dispatcher,
            is_unchanged: false,
            python: None,
        });
    };
    let mut frames = Vec::new();
    let truncation = match interleave::python_only(groups, None, &mut frames) {
        StackQuality::Partial(why) => Some(why),
        _ => None,
    };
    groups.clear();
    Some(DispatcherFrames {
        tid: dispatcher.tid,
        is_unchanged: dispatcher.is_unchanged,
        python: (!frames.is_empty()).then_some((frames, truncation)),
    })
}

impl Workers {
    pub(super) fn new(is_enabled: bool) -> Workers {
        Workers {
            is_enabled,
            ..Workers::default()
        }
    }

    pub(super) fn are_attributed(&self) -> bool {
        self.is_enabled
    }

    /// The job that a worker's sample belongs to. `None`: it is not known. `native`: the sample's frames.
    pub(super) fn find_job(
        &mut self,
        own: &mut ProcessWorkers,
        s: &Sample,
        new: DispatcherFrames,
        native: &[NativeFrame],
        modules: &Modules,
    ) -> Option<Job> {
        let inherited = own.inherited.get(&s.tid);
        let is_certain = inherited.is_none_or(|inherited| s.time >= inherited.known_since);
        let found = new.python.and_then(|(python, truncation)| {
            let worker = WorkerPlace::of(native, modules);
            Some(Job {
                dispatcher: new.tid,
                frames: self.dispatcher_stack(own, new.tid, new.is_unchanged, python.into(), worker)?,
                truncation,
            })
        });
        let last_jobs = &mut own.last_jobs;
        let Some(job) = found else {
            return last_jobs.get(&s.tid).cloned();
        };
        if last_jobs.len() >= MAX_STACKS {
            last_jobs.clear();
        }
        if is_certain {
            last_jobs.insert(s.tid, job.clone());
        }
        Some(job)
    }

    /// A thread has begun. The backend has seen with which registers.
    pub(super) fn add_thread(&self, own: &mut ProcessWorkers, tid: Tid) {
        if self.is_enabled && own.inherited.len() < MAX_STACKS {
            let seen = Inherited {
                words: Vec::new(),
                known_since: 0,
            };
            own.inherited.insert(tid, seen);
        }
    }

    /// Notes, once for each worker that there was before sampling began, the registers that it started with: its outermost C
    /// function has saved them. True if they are new. `native`: the frames of the sample.
    pub(super) fn find_inherited(
        &self,
        own: &mut ProcessWorkers,
        s: &Sample,
        quality: StackQuality,
        native: &[NativeFrame],
    ) -> bool {
        let inherited = &mut own.inherited;
        let is_worker = self.is_enabled && (s.python.is_empty() || s.dispatcher.is_some());
        let is_complete = !matches!(quality, StackQuality::Partial(_));
        // The outermost frame is the assembler function that the kernel starts threads in; main threads were not created.
        let [.., start, _] = native else { return false };
        if !is_worker
            || !is_complete
            || s.pid == s.tid
            || inherited.contains_key(&s.tid)
            || inherited.len() >= MAX_STACKS
        {
            return false;
        }
        let words = saved_pointers(start, &s.stack);
        let is_new = !words.is_empty();
        let known_since = if is_new { u64::MAX } else { 0 };
        inherited.insert(s.tid, Inherited { words, known_since });
        if is_new {
            // It was perhaps found by these registers.
            own.last_jobs.remove(&s.tid);
        }
        is_new
    }

    /// The stack of a thread with these Python frames, down to the call into the library of the worker. `None`: it is not in that
    /// library.
    fn dispatcher_stack(
        &mut self,
        own: &ProcessWorkers,
        tid: Tid,
        is_unchanged: bool,
        python: Rc<[RawFrame]>,
        worker: WorkerPlace,
    ) -> Option<Vec<RawFrame>> {
        let library = worker.library;
        if self.places.len() >= MAX_STACKS {
            self.places.clear();
        }
        let place = self.places.entry(worker.callers).or_default();
        let same = own.known.get(&(tid, python.clone()));
        let call = same.and_then(|same| same.call(library?));
        if let (Some(library), None, false) = (library, call, is_unchanged) {
            let function = innermost_code(&python).and_then(|code| self.functions.get(&code));
            if same.is_some_and(|same| same.samples >= MIN_SAMPLES) || function.is_some_and(|f| f.never_calls(library))
            {
                place.without_job += 1;
                return None;
            }
            if place.is_for_waiting() {
                return None;
            }
        }
        place.with_job += u64::from(call.is_some());
        if let Some(same) = same {
            return Some([&same.outer, call.unwrap_or_default()].concat());
        }
        let last = own.last.get(&tid);
        Some(match last.and_then(|key| own.known.get(&(tid, key.clone()))) {
            Some(last) => last.joined_with(&python),
            None => python.to_vec(),
        })
    }

    /// Notes the stack of a sample with Python frames: it may be a dispatcher's.
    pub(super) fn remember_dispatcher(
        &mut self,
        own: &mut ProcessWorkers,
        s: &Sample,
        stack: &[RawFrame],
        quality: StackQuality,
    ) {
        let is_known = !matches!(quality, StackQuality::Partial(_));
        if !self.is_enabled || s.dispatcher.is_some() || s.python.is_empty() || !is_known || stack.len() > MAX_FRAMES {
            return;
        }
        let python: Rc<[RawFrame]> = stack.iter().copied().filter(is_python).collect();
        if own.known.len() >= MAX_STACKS {
            (own.known, own.last) = Default::default();
        }
        own.last.insert(s.tid, python.clone());
        let inner = stack.iter().rposition(is_python).map_or(0, |at| at + 1);
        if self.functions.len() >= MAX_STACKS {
            self.functions.clear();
        }
        if let Some(code) = innermost_code(&python) {
            let function = self.functions.entry(code).or_default();
            function.add_sample(&stack[inner..]);
        }
        let known = own.known.entry((s.tid, python));
        known
            .and_modify(|known| known.add_sample(&stack[inner..]))
            .or_insert_with(|| DispatcherStack::new(stack));
    }
}

/// Where a worker is.
struct WorkerPlace {
    /// The library that it belongs to: the outermost one that is not for starting threads.
    library: Option<ModuleId>,
    /// Hash of the callers of its innermost frame.
    callers: u64,
}

impl WorkerPlace {
    fn of(native: &[NativeFrame], modules: &Modules) -> WorkerPlace {
        let mut libraries = native.iter().rev().filter_map(|f| Some(f.location?.0));
        let library = libraries.find(|id| {
            let name = modules.get(*id).name();
            !THREAD_LIBRARIES.iter().any(|library| name.starts_with(library))
        });
        let callers = native.iter().skip(1).map(|f| f.location);
        let callers = FxBuildHasher.hash_one(callers.collect::<Vec<_>>());
        WorkerPlace { library, callers }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::UnwindMethod;

    /// Letters are Python functions, digits native functions of the library with that number.
    fn stack(text: &str) -> Vec<RawFrame> {
        let frame = |c: char| match c.to_digit(10) {
            Some(module) => RawFrame::Native {
                module: ModuleId(module),
                svma: module.into(),
            },
            None => RawFrame::Python {
                code: CodeId(c.into()),
                instr: 0,
            },
        };
        text.chars().map(frame).collect()
    }

    #[test]
    fn calls_into_libraries() {
        let mut known = DispatcherStack::new(&stack("1a2b34"));
        known.add_sample(&stack("353"));
        for (library, expected) in [(3, Some("3")), (4, Some("34")), (5, Some("35")), (2, None), (1, None)] {
            let expected = expected.map(stack);
            assert_eq!(known.call(ModuleId(library)), expected.as_deref(), "{library}");
        }
        assert_eq!((known.outer, known.samples), (stack("1a2b"), 2));
    }

    #[test]
    fn pointers_that_a_frame_has_saved() {
        const SP: u64 = 0x7000_0000_1000;
        let other = 0x7fff_0000_2468 & !7;
        // Not aligned, no address, of the same stack.
        let others = [other + 1, 1 << 48 | 8, 0, SP + 16, SP + 0x800];
        let words = [&[other, other + 8, other][..], &others].concat();
        let frame = NativeFrame {
            lookup: 0,
            sp: SP,
            cfa: SP + 8 * words.len() as u64,
            location: None,
            method: UnwindMethod::StackEnd,
        };
        let stack = StackBytes {
            base: SP,
            bytes: words.iter().flat_map(|word| word.to_le_bytes()).collect(),
            holes: Vec::new(),
        };
        let saved = |sp, cfa| saved_pointers(&NativeFrame { sp, cfa, ..frame }, &stack);
        assert_eq!(saved(frame.sp, frame.cfa), vec![other, other + 8]);
        for (sp, cfa) in [
            (SP + 24, frame.cfa),
            (SP, SP),
            (u64::MAX - 8, u64::MAX),
            (8, 0),
            (0, u64::MAX),
        ] {
            assert_eq!(saved(sp, cfa), Vec::<u64>::new(), "{sp:#x}..{cfa:#x}");
        }
    }

    #[test]
    fn native_frames_between_the_same_python_frames() {
        let known = DispatcherStack::new(&stack("1a2b3c4"));
        for (python, expected) in [
            ("abc", "1a2b3c"),
            ("ab", "1a2b"),
            ("abx", "1a2bx"),
            ("axc", "1axc"),
            ("x", "x"),
            ("", ""),
            ("abcd", "1a2b3cd"),
        ] {
            assert_eq!(known.joined_with(&stack(python)), stack(expected), "{python}");
        }
    }
}

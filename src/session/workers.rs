//! Native workers below the code that they work for.
//!
//! A worker runs no Python. The backend finds its dispatcher, the thread with Python frames that gave it work, and puts that
//! thread's Python frames, of the same instant, into the worker's sample (sample.bpf.c says how, and why they are right). They
//! come without the native frames between them: the dispatcher may run on another CPU, where its registers are. But the
//! dispatcher is sampled too, and where its Python frames were the same, so were the native frames around them. Below the
//! innermost Python frame that holds as far as the call into the library that the worker belongs to.

use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::Session;
use super::sample::Cut;
use crate::event::{Sample, Tid};
use crate::frame::{ModuleId, RawFrame};
use crate::interleave::{self, StackQuality};

/// Stacks of dispatchers that are known, at most, and frames of one of them.
const MAX_STACKS: usize = 4096;
const MAX_FRAMES: usize = 1024;
/// Libraries below one innermost Python frame of which the call is known.
const MAX_CALLS: usize = 16;
/// Names of libraries begin so whose functions start threads for other libraries.
const THREAD_LIBRARIES: &[&str] = &["libc.", "libc-", "libpthread", "ld-", "libstdc++", "libc++"];

/// Stacks of threads with Python frames.
#[derive(Default)]
pub(super) struct Dispatchers {
    /// By thread and Python frames.
    known: FxHashMap<(Tid, Rc<[RawFrame]>), DispatcherStack>,
    /// The last one of each thread, as its key in `known`.
    last: FxHashMap<Tid, Rc<[RawFrame]>>,
}

/// A stack, outermost frame first.
struct DispatcherStack {
    /// Up to the innermost Python frame.
    outer: Vec<RawFrame>,
    /// The native frames below that, up to the first one of a library.
    calls: Vec<(ModuleId, Vec<RawFrame>)>,
}

/// The Python frames of a worker's dispatcher, outermost first, and why they are incomplete.
pub(super) struct DispatcherFrames(Vec<RawFrame>, Cut);

fn is_python(frame: &RawFrame) -> bool {
    matches!(frame, RawFrame::Python { .. })
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
        };
        new.add_calls(&stack[inner..]);
        new
    }

    /// Adds the calls into libraries that are not known yet; `inner`: frames below the innermost Python frame.
    fn add_calls(&mut self, inner: &[RawFrame]) {
        for (at, frame) in inner.iter().enumerate() {
            let Some(library) = module(frame) else { continue };
            if self.calls.len() < MAX_CALLS && self.calls.iter().all(|(known, _)| *known != library) {
                self.calls.push((library, inner[..=at].to_vec()));
            }
        }
    }

    /// The frames down to the call into the library, as far as they are known.
    fn down_to(&self, library: Option<ModuleId>) -> Vec<RawFrame> {
        let call = self.calls.iter().find(|(known, _)| Some(*known) == library);
        let call = call.map_or(&[][..], |(_, frames)| frames);
        [&self.outer, call].concat()
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

impl Session {
    /// Takes the Python frames of a worker's dispatcher out of `self.groups`; `None` for all other samples.
    pub(super) fn take_dispatcher(&mut self, s: &Sample) -> Option<DispatcherFrames> {
        s.dispatcher?;
        let mut frames = Vec::new();
        let cut = match interleave::python_only(&self.groups, None, &mut frames) {
            StackQuality::Partial(why) => Some(why),
            _ => None,
        };
        self.groups.clear();
        Some(DispatcherFrames(frames, cut))
    }

    /// Appends the stack of a worker's dispatcher to `self.stack`, and the frame that separates the two. Returns why it is
    /// incomplete.
    pub(super) fn add_dispatcher(&mut self, s: &Sample, DispatcherFrames(python, cut): DispatcherFrames) -> Cut {
        let dispatcher = s.dispatcher?;
        let library = self.native.iter().rev().filter_map(|f| Some(f.location?.0)).find(|id| {
            let name = self.modules.get(*id).name();
            !THREAD_LIBRARIES.iter().any(|library| name.starts_with(library))
        });
        let python: Rc<[RawFrame]> = python.into();
        let dispatchers = &self.dispatchers;
        let same = dispatchers.known.get(&(dispatcher, python.clone()));
        let last = dispatchers.last.get(&dispatcher);
        let last = last.and_then(|key| dispatchers.known.get(&(dispatcher, key.clone())));
        let frames = match (same, last) {
            (Some(same), _) => same.down_to(library),
            (None, Some(last)) => last.joined_with(&python),
            (None, None) => python.to_vec(),
        };
        self.stack.extend(frames);
        self.stack.push(RawFrame::Worker(s.tid));
        cut
    }

    /// Notes the stack of a sample with Python frames, `self.stack` from `start` on: it may be a dispatcher's.
    pub(super) fn remember_dispatcher(&mut self, s: &Sample, start: usize, quality: StackQuality) {
        let stack = &self.stack[start..];
        let is_known = !matches!(quality, StackQuality::Partial(_));
        if !self.options.workers
            || s.dispatcher.is_some()
            || s.python.is_empty()
            || !is_known
            || stack.len() > MAX_FRAMES
        {
            return;
        }
        let python: Rc<[RawFrame]> = stack.iter().copied().filter(is_python).collect();
        let dispatchers = &mut self.dispatchers;
        if dispatchers.known.len() >= MAX_STACKS {
            (dispatchers.known, dispatchers.last) = Default::default();
        }
        dispatchers.last.insert(s.tid, python.clone());
        let inner = stack.iter().rposition(is_python).map_or(0, |at| at + 1);
        let known = dispatchers.known.entry((s.tid, python));
        known
            .and_modify(|known| known.add_calls(&stack[inner..]))
            .or_insert_with(|| DispatcherStack::new(stack));
    }
}

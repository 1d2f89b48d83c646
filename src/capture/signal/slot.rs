//! Buffers of one sample in progress, allocated in advance, and the copying into them. For the signal handler:
//! functions that allocate say so.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::arch::{RED_ZONE, Regs};
use crate::capture::WalkFn;
use crate::capture::common::block_cache::{BlockCache, MAX_PREFETCH};
use crate::capture::common::seen_code::SeenCode;
use crate::capture::common::stack_copy;
use crate::capture::common::stack_copy::HOLES;
use crate::cpython_layout::TargetLayout;
use crate::event::{CodeCopy, Pid, PythonWalk, Sample, StackBytes, StoppedThread, Tid, TimeSpent, WakeUp};
use crate::limits::{DEEP_FRAMES, MAX_FRAMES};
use crate::sys;
use crate::sys::threads;

/// Bytes of the stack that the handler works on. It uses some 12 KB.
const HANDLER_STACK: usize = 64 << 10;
/// A slot may keep so many bytes of memory.
const MAX_RESIDENT: usize = 256 << 10;
/// Threads whose last walk is remembered, so that the next one reads its memory in one go.
const PREFETCH_LISTS: usize = 64;

/// What to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    pub stack: bool,
    pub python: bool,
}

/// The thread that is copied.
pub struct ThreadLocation {
    pub pid: Pid,
    pub tid: Tid,
    pub thread_pointer: u64,
    /// End of the main thread's stack.
    pub main: u64,
}

/// A sample in progress.
pub struct SlotData {
    pub copy: CopyOptions,
    tid: Tid,
    time: u64,
    regs: Regs,
    base: u64,
    len: usize,
    /// The stack was longer than the buffer.
    truncated: bool,
    holes: [u64; HOLES],
    stack: Vec<u8>,
    python_walk: PythonWalk,
    block_cache: BlockCache,
    handler_stack: Vec<u8>,
}

impl SlotData {
    /// With a stack buffer of so many bytes; memory that is not used costs only address space. Allocates.
    pub fn new(stack_capacity: usize) -> SlotData {
        SlotData {
            copy: CopyOptions {
                stack: true,
                python: true,
            },
            tid: 0,
            time: 0,
            regs: Regs::from_ip_sp_fp(0, 0, 0),
            base: 0,
            len: 0,
            truncated: false,
            holes: [0; HOLES],
            stack: vec![0; stack_capacity],
            python_walk: PythonWalk::with_capacity(MAX_FRAMES),
            block_cache: BlockCache::default(),
            handler_stack: vec![0; HANDLER_STACK],
        }
    }

    /// Grows the stack buffer to so many bytes. Allocates if it is smaller.
    pub fn reserve_stack(&mut self, stack_capacity: usize) {
        if self.stack.len() < stack_capacity {
            self.stack = vec![0; stack_capacity];
        }
    }

    /// Was the stack longer than the buffer?
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// When the sample was taken, ns.
    pub fn time(&self) -> u64 {
        self.time
    }

    pub fn take_handler_stack(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.handler_stack)
    }

    pub fn return_handler_stack(&mut self, stack: Vec<u8>) {
        self.handler_stack = stack;
    }

    /// The code objects that were copied. Allocates.
    pub fn codes(&self) -> Vec<CodeCopy> {
        self.python_walk.codes.list()
    }

    /// Was a code object not copied although it is new?
    pub fn missed_code(&self) -> bool {
        self.python_walk.codes.missed
    }

    /// The sample that was copied. Allocates.
    pub fn sample(&mut self, pid: Pid) -> Sample {
        let sample = Sample {
            pid,
            tid: self.tid,
            time: self.time,
            regs: Some(self.regs),
            stack: StackBytes {
                base: self.base,
                bytes: self.stack[..self.len].to_vec(),
                holes: stack_copy::trimmed(&self.holes),
            },
            kernel: Vec::new(),
            python: self.python_walk.python.clone(),
            anchors: self.python_walk.anchors.clone(),
            walk: self.python_walk.walk,
            time_spent: TimeSpent::default(),
            wake_up: WakeUp::default(),
            dispatcher: None,
            holds_lock: self.python_walk.holds_lock,
            system_call: None,
            polled: None,
            tasks: Vec::new(),
            memory: None,
            allocation: None,
            host: None,
            suspended: None,
            spans: self.python_walk.spans.clone(),
        };
        if self.len > MAX_RESIDENT {
            threads::release_pages(&mut self.stack);
        }
        sample
    }

    /// Copies the interpreter's frames, if requested, of a stopped thread.
    pub fn copy_python(
        &mut self,
        at: &ThreadLocation,
        regs: Regs,
        layout: Option<&TargetLayout>,
        walk: WalkFn,
        prefetch: &PrefetchLists,
        seen_code: &SeenCode,
    ) {
        (self.tid, self.time, self.regs) = (at.tid, sys::clock::now(), regs);
        self.python_walk.clear();
        if let Some(layout) = layout.filter(|_| self.copy.python) {
            let thread = StoppedThread {
                stack_pointer: regs.sp(),
                thread_pointer: at.thread_pointer,
                registers: regs.gpr,
            };
            prefetch.with(at.tid, &mut |known| {
                self.block_cache.begin(at.pid, known);
                let is_new = |code, fingerprint| seen_code.is_new(0, code, fingerprint);
                walk(&self.block_cache, layout, &thread, &is_new, &mut self.python_walk);
                self.block_cache.touched(known); // within its capacity
            });
        }
    }

    /// Copies the stack, if requested, of the same thread.
    pub fn copy_stack(&mut self, at: &ThreadLocation) {
        (self.base, self.len, self.truncated) = (self.regs.sp().wrapping_sub(RED_ZONE), 0, false);
        if self.copy.stack {
            let deep = self.python_walk.python.len() > DEEP_FRAMES;
            let read = |from: u64, out: &mut [u8]| sys::memory::read_memory(at.pid, from, out);
            let end = stack_copy::end(&read, &self.regs, at.thread_pointer, at.main, deep);
            self.truncated = end.avma.saturating_sub(self.base) > self.stack.len() as u64;
            self.len = stack_copy::copy(&read, self.base, end, &mut self.stack, &mut self.holes);
        }
    }
}

/// The blocks of memory that the last walks read, by thread.
pub struct PrefetchLists(Vec<PrefetchList>);

struct PrefetchList {
    busy: AtomicBool,
    last: UnsafeCell<(Tid, Vec<u64>)>,
}

// SAFETY: the contents of a cell are accessed by the thread that has set `busy`, and by no other until it is cleared.
unsafe impl Sync for PrefetchList {}

impl Default for PrefetchLists {
    /// Allocates.
    fn default() -> PrefetchLists {
        let list = |_| PrefetchList {
            busy: AtomicBool::new(false),
            last: UnsafeCell::new((0, Vec::with_capacity(MAX_PREFETCH))),
        };
        PrefetchLists((0..PREFETCH_LISTS).map(list).collect())
    }
}

impl PrefetchLists {
    /// Calls `then` with the list of a thread, to be changed within its capacity; with an empty list if another thread
    /// uses it.
    fn with(&self, tid: Tid, then: &mut dyn FnMut(&mut Vec<u64>)) {
        let list = &self.0[tid as usize % PREFETCH_LISTS];
        if list.busy.swap(true, Ordering::Acquire) {
            return then(&mut Vec::new());
        }
        // SAFETY: `busy` was not set and is now: it is ours until it is cleared.
        let last = unsafe { &mut *list.last.get() };
        if last.0 != tid {
            last.0 = tid;
            last.1.clear();
        }
        then(&mut last.1);
        list.busy.store(false, Ordering::Release);
    }
}

//! What one sample under way needs, made in advance, and the copying into it. For the handler: nothing here allocates
//! but what says so.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::arch::Regs;
use crate::capture::Walk;
use crate::capture::blocks::{Blocks, MAX_AHEAD};
use crate::capture::met::Met;
use crate::capture::stack::{self, DEEP_FRAMES, HOLES, RED_ZONE};
use crate::layout::Space;
use crate::process::{own, sys};
use crate::sample::{CodeCopy, Pid, Sample, StackBytes, Standing, Tid, TimeSpent, Walked};

/// Of all frames that walks follow.
const MAX_FRAMES: usize = 16384;
/// Bytes of the stack that the handler works on. It uses some 12 KB.
const OWN_STACK: usize = 64 << 10;
/// A slot may keep so many bytes of memory.
const KEPT: usize = 256 << 10;
/// Threads whose last walk is remembered, so that the next one reads its memory in one go.
const REMEMBERED: usize = 64;

/// What to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wants {
    pub stack: bool,
    pub python: bool,
}

/// The thread that is copied.
pub struct Place {
    pub pid: Pid,
    pub tid: Tid,
    pub pointer: u64,
    /// Where the main thread's stack ends.
    pub main: u64,
}

/// A sample under way.
pub struct Data {
    pub wants: Wants,
    tid: Tid,
    time: u64,
    regs: Regs,
    base: u64,
    len: usize,
    /// There was more stack than room.
    short: bool,
    holes: [u64; HOLES],
    stack: Vec<u8>,
    walked: Walked,
    blocks: Blocks,
    own_stack: Vec<u8>,
}

impl Data {
    /// With so many bytes of room for a stack; memory that is not used costs nothing but addresses. Allocates.
    pub fn new(room: usize) -> Data {
        Data {
            wants: Wants {
                stack: true,
                python: true,
            },
            tid: 0,
            time: 0,
            regs: Regs::from_ip_sp_fp(0, 0, 0),
            base: 0,
            len: 0,
            short: false,
            holes: [0; HOLES],
            stack: vec![0; room],
            walked: Walked::with_room(MAX_FRAMES),
            blocks: Blocks::default(),
            own_stack: vec![0; OWN_STACK],
        }
    }

    /// Allocates if there is less than that.
    pub fn make_room(&mut self, room: usize) {
        if self.stack.len() < room {
            self.stack = vec![0; room];
        }
    }

    /// Was there more stack than room?
    pub fn is_short(&self) -> bool {
        self.short
    }

    pub fn take_own_stack(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.own_stack)
    }

    pub fn give_own_stack(&mut self, stack: Vec<u8>) {
        self.own_stack = stack;
    }

    /// The code objects that were copied. Allocates.
    pub fn codes(&self) -> Vec<CodeCopy> {
        self.walked.codes.list()
    }

    /// Was a code object not copied that was not met before?
    pub fn missed_code(&self) -> bool {
        self.walked.codes.missed
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
                holes: stack::trimmed(&self.holes),
            },
            kernel: Vec::new(),
            python: self.walked.python.clone(),
            marks: self.walked.marks.clone(),
            walk: self.walked.walk,
            time_spent: TimeSpent::default(),
            system_call: None,
        };
        if self.len > KEPT {
            own::give_back(&mut self.stack);
        }
        sample
    }

    /// Copies the interpreter's frames, if they are wanted, of a thread that stands still.
    pub fn copy_python(
        &mut self,
        at: &Place,
        regs: Regs,
        space: Option<&Space>,
        walk: Walk,
        aheads: &Aheads,
        met: &Met,
    ) {
        (self.tid, self.time, self.regs) = (at.tid, sys::now(), regs);
        self.walked.clear();
        if let Some(space) = space.filter(|_| self.wants.python) {
            let thread = Standing {
                pointer: at.pointer,
                registers: regs.gpr,
            };
            aheads.with(at.tid, &mut |known| {
                self.blocks.begin(at.pid, known);
                let is_new = |code, fingerprint| met.is_new(code, fingerprint);
                walk(&self.blocks, space, &thread, &is_new, &mut self.walked);
                self.blocks.touched(known); // within the room that it has
            });
        }
    }

    /// Copies the stack, if it is wanted, of the same thread.
    pub fn copy_stack(&mut self, at: &Place) {
        (self.base, self.len, self.short) = (self.regs.sp().wrapping_sub(RED_ZONE), 0, false);
        if self.wants.stack {
            let deep = self.walked.python.len() > DEEP_FRAMES;
            let end = stack::end(self.base, at.pointer, at.main, deep);
            let read = |from: u64, out: &mut [u8]| sys::read_memory(at.pid, from, out);
            self.short = end.saturating_sub(self.base) > self.stack.len() as u64;
            self.len = stack::copy(&read, self.base, end, &mut self.stack, &mut self.holes);
        }
    }
}

/// The blocks of memory that the last walks read, by thread.
pub struct Aheads(Vec<Ahead>);

struct Ahead {
    busy: AtomicBool,
    last: UnsafeCell<(Tid, Vec<u64>)>,
}

// SAFETY: what a cell holds is touched by whoever has set `busy`, and by nobody else until it is cleared.
unsafe impl Sync for Ahead {}

impl Default for Aheads {
    /// Allocates.
    fn default() -> Aheads {
        let ahead = |_| Ahead {
            busy: AtomicBool::new(false),
            last: UnsafeCell::new((0, Vec::with_capacity(MAX_AHEAD))),
        };
        Aheads((0..REMEMBERED).map(ahead).collect())
    }
}

impl Aheads {
    /// Calls `use` with what is known of a thread, to be changed within its room; with nothing if another thread is at
    /// that just now.
    fn with(&self, tid: Tid, then: &mut dyn FnMut(&mut Vec<u64>)) {
        let ahead = &self.0[tid as usize % REMEMBERED];
        if ahead.busy.swap(true, Ordering::Acquire) {
            return then(&mut Vec::new());
        }
        // SAFETY: `busy` was not set and is now: it is ours until it is cleared.
        let last = unsafe { &mut *ahead.last.get() };
        if last.0 != tid {
            last.0 = tid;
            last.1.clear();
        }
        then(&mut last.1);
        ahead.busy.store(false, Ordering::Release);
    }
}

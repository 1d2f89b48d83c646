//! The memory that the handler shares with those who ask: slots made in advance, one for each sample under way.
//!
//! The thread that is interrupted claims a slot, or was given one by who asks, and copies into it registers, stack and the
//! interpreter's frames. What it calls here allocates nothing, takes no lock, waits for nobody, and makes only system
//! calls that a handler may (signal-safety(7)); functions for it say so. Memory is read by the kernel for us
//! (process_vm_readv on ourselves): a wild pointer is an error, not a fault.

use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::handler;
use super::slot::{Aheads, Data, Place, Wants};
use crate::arch::Regs;
use crate::capture::Walk;
use crate::capture::met::Met;
use crate::capture::stack::{MAX_STACK, MAX_STACKS};
use crate::layout::Space;
use crate::process::{self, own, sys};
use crate::sample::{CodeCopy, Pid, Sample, Tid};

/// Slots: bits of one word.
const SLOTS: usize = 64;

/// What a slot is doing: the low bits of its state; the others tell its askers apart.
mod state {
    pub const FREE: u64 = 0;
    /// A thread has been asked.
    pub const ASKED: u64 = 1;
    pub const FILLING: u64 = 2;
    /// Holds the answer to who asked.
    pub const ANSWERED: u64 = 3;
    /// Who asked has left; whoever fills it frees it.
    pub const LEFT: u64 = 4;
    /// Holds a sample that nobody waits for.
    pub const SAMPLED: u64 = 5;
    pub const BITS: u32 = 3;
}

struct Slot {
    state: AtomicU64,
    /// Changes with each answer.
    answers: AtomicU32,
    data: UnsafeCell<Data>,
}

/// Everything that the handler needs; made once for a process and never freed.
pub struct Pool {
    pid: Pid,
    generation: u32,
    signal: i32,
    walk: Walk,
    slots: Vec<Slot>,
    /// Bit `i`: slot `i` is free.
    free: AtomicU64,
    asks: AtomicU64,
    /// Bytes of stack that slots get when they are next used.
    room: AtomicUsize,
    space: AtomicPtr<Space>,
    /// Handlers at work.
    inside: AtomicU32,
    /// The recording that samples are taken for; 0: none.
    recording: AtomicU64,
    /// What it wants copied.
    with_stack: AtomicBool,
    /// Samples that found no free slot, and ticks that came too fast to be told apart.
    lost: AtomicU64,
    /// Changes when a sample should be fetched now.
    pub ready: AtomicU32,
    aheads: Aheads,
    met: Met,
    /// Where the main thread's stack ends, before more is known.
    main: u64,
    /// Pointer of the main thread; 0: not known.
    main_pointer: AtomicU64,
}

// SAFETY: the data of a slot is touched by one thread at a time, told by its state: by the handler between FILLING and
// the state after it, by who asked before ASKED and after ANSWERED or SAMPLED. The
// space is only read; it is freed when no handler is at work.
unsafe impl Sync for Pool {}

static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

/// Marks the value of an ask among those of timers.
const IS_ASK: u64 = 1 << 63;

impl Pool {
    /// The pool of this process, with the handler installed.
    ///
    /// # Errors
    /// No signal is free.
    pub fn get(walk: Walk) -> io::Result<&'static Pool> {
        static MAKING: AtomicBool = AtomicBool::new(false);
        let generation = own::generation();
        loop {
            if let Some(pool) = Pool::current().filter(|p| p.generation == generation) {
                return Ok(pool);
            }
            // A forked child makes its own: what its parent's threads were doing with theirs never ends here.
            if !MAKING.swap(true, Ordering::Acquire) {
                let made = Pool::new(walk, generation);
                let made = made.map(|pool| &*Box::leak(Box::new(pool)));
                if let Ok(pool) = made {
                    POOL.store(std::ptr::from_ref(pool).cast_mut(), Ordering::Release);
                }
                MAKING.store(false, Ordering::Release);
                return made;
            }
            std::thread::yield_now();
        }
    }

    fn new(walk: Walk, generation: u32) -> io::Result<Pool> {
        let signal = handler::install()?;
        let room = MAX_STACK as usize;
        let slot = |_| Slot {
            state: AtomicU64::new(state::FREE),
            answers: AtomicU32::new(0),
            data: UnsafeCell::new(Data::new(room)),
        };
        Ok(Pool {
            pid: std::process::id(),
            generation,
            signal,
            walk,
            slots: (0..SLOTS).map(slot).collect(),
            free: AtomicU64::new(u64::MAX),
            asks: AtomicU64::new(0),
            room: AtomicUsize::new(room),
            space: AtomicPtr::new(std::ptr::null_mut()),
            inside: AtomicU32::new(0),
            recording: AtomicU64::new(0),
            with_stack: AtomicBool::new(true),
            lost: AtomicU64::new(0),
            ready: AtomicU32::new(0),
            aheads: Aheads::default(),
            met: Met::default(),
            main: process::stack_end(std::process::id()),
            main_pointer: AtomicU64::new(0),
        })
    }

    /// The one made last. For the handler.
    pub fn current() -> Option<&'static Pool> {
        // SAFETY: pools are never freed.
        unsafe { POOL.load(Ordering::Acquire).as_ref() }
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    pub fn signal(&self) -> i32 {
        self.signal
    }

    /// Is this still the process that the pool was made in?
    pub fn is_own(&self) -> bool {
        self.generation == own::generation()
    }

    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Where the interpreter is, from now on.
    pub fn learn(&self, space: Option<Space>) {
        let new = space.map_or(std::ptr::null_mut(), |s| Box::into_raw(Box::new(s)));
        let old = self.space.swap(new, Ordering::SeqCst);
        // A handler that began later sees the new one.
        for _ in 0..100 {
            if self.inside.load(Ordering::SeqCst) == 0 {
                // SAFETY: made by `Box::into_raw` above; out of reach, and no handler is at work that may have seen it.
                drop((!old.is_null()).then(|| unsafe { Box::from_raw(old) }));
                return;
            }
            std::thread::yield_now();
        }
        // Some thread does not get on: a few hundred bytes are left behind rather than waited for.
    }

    /// Begins a recording: signals with the number that is returned make samples from now on. `None`: there is one.
    pub fn begin(&self, stack: bool) -> Option<u64> {
        let number = self.asks.fetch_add(1, Ordering::Relaxed) + 1;
        self.with_stack.store(stack, Ordering::Relaxed);
        self.lost.store(0, Ordering::Relaxed);
        let begun = self
            .recording
            .compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
        if begun.is_ok() {
            // What was copied for the last recording is not known to this one.
            self.met.clear();
        }
        begun.is_ok().then_some(number)
    }

    /// No signal makes a sample any more once this returns, save of threads that do not get on.
    pub fn end(&self) {
        self.recording.store(0, Ordering::SeqCst);
        for _ in 0..100 {
            if self.inside.load(Ordering::SeqCst) == 0 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Hands out the samples that wait, in order of time, each with the code objects that were copied.
    pub fn drain(&self, out: &mut Vec<(Sample, Vec<CodeCopy>)>) {
        let first = out.len();
        for (i, slot) in self.slots.iter().enumerate() {
            if slot.state.load(Ordering::Acquire) == state::SAMPLED {
                out.push(self.take(i));
            }
        }
        out[first..].sort_by_key(|(s, _)| s.time);
    }

    /// Copies a slot's sample and code objects out and frees the slot, which must be ours.
    fn take(&self, i: usize) -> (Sample, Vec<CodeCopy>) {
        // SAFETY: the state says that the handler is done, and we are the one who fetches.
        let data = unsafe { &mut *self.slots[i].data.get() };
        let (sample, codes) = (data.sample(self.pid), data.codes());
        let deeper = data.is_short()
            && self.room.swap((MAX_STACKS * MAX_STACK) as usize, Ordering::Relaxed) == MAX_STACK as usize;
        self.release(i);
        if deeper {
            // Stacks are deep here: all slots get room for them, those in use when they are freed.
            let mut claimed: Vec<usize> = std::iter::from_fn(|| self.claim()).collect();
            claimed.drain(..).for_each(|i| self.release(i));
        }
        (sample, codes)
    }

    /// Takes a free slot. For the handler too.
    fn claim(&self) -> Option<usize> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            if free == 0 {
                return None;
            }
            let i = free.trailing_zeros() as usize;
            let taken = free & !(1 << i);
            match self
                .free
                .compare_exchange_weak(free, taken, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Some(i),
                Err(now) => free = now,
            }
        }
    }

    /// Frees a slot that is ours, with more room if that has been found too small.
    fn release(&self, i: usize) {
        let slot = &self.slots[i];
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *slot.data.get() };
        data.make_room(self.room.load(Ordering::Relaxed));
        slot.state.store(state::FREE, Ordering::Relaxed);
        self.free.fetch_or(1 << i, Ordering::Release);
    }

    /// Asks a thread for a sample by a signal.
    ///
    /// # Errors
    /// ESRCH: it has ended. EAGAIN: no slot is free, or too many signals wait.
    pub fn ask(&'static self, tid: Tid, wants: Wants) -> io::Result<Ask> {
        let i = self.claim().ok_or(io::ErrorKind::WouldBlock)?;
        let slot = &self.slots[i];
        // SAFETY: the slot is ours.
        unsafe { (*slot.data.get()).wants = wants };
        let number = self.asks.fetch_add(1, Ordering::Relaxed) & ((IS_ASK >> 8) - 1);
        slot.state
            .store(number << state::BITS | state::ASKED, Ordering::Release);
        let ask = Ask {
            pool: self,
            slot: i,
            number,
            done: AtomicU32::new(0),
        };
        match own::send(self.pid, tid, self.signal, IS_ASK | number << 6 | i as u64) {
            Ok(()) => Ok(ask),
            Err(e) => Err(e), // dropping `ask` frees the slot
        }
    }

    /// A sample of the calling thread as it stands in this call.
    #[inline(never)]
    pub fn here(&self, wants: Wants) -> Option<Sample> {
        let i = self.claim()?;
        let regs = handler::own_registers();
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *self.slots[i].data.get() };
        data.wants = wants;
        self.fill(data, regs);
        Some(self.take(i).0)
    }

    /// A sample of a thread that does not run: `regs` are those that are known. False: it could not be copied.
    pub fn read(
        &self,
        regs: Regs,
        tid: Tid,
        pointer: u64,
        wants: Wants,
        unchanged: &dyn Fn() -> bool,
    ) -> Option<(Sample, Vec<CodeCopy>)> {
        let i = self.claim()?;
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *self.slots[i].data.get() };
        data.wants = wants;
        self.copy(data, regs, tid, pointer);
        if unchanged() {
            return Some(self.take(i));
        }
        self.release(i);
        None
    }

    /// Copies the calling thread. For the handler.
    fn fill(&self, data: &mut Data, regs: Regs) {
        let (tid, pointer) = (sys::own_tid() as Tid, own::thread_pointer());
        if tid == self.pid {
            self.main_pointer.store(pointer, Ordering::Relaxed);
        }
        self.copy(data, regs, tid, pointer);
    }

    /// Pointer of the main thread, once it has been seen.
    pub fn main_pointer(&self) -> Option<u64> {
        Some(self.main_pointer.load(Ordering::Relaxed)).filter(|p| *p != 0)
    }

    /// Copies a thread that stands still. For the handler too.
    fn copy(&self, data: &mut Data, regs: Regs, tid: Tid, pointer: u64) {
        self.inside.fetch_add(1, Ordering::SeqCst);
        // SAFETY: null, or made by `learn`, which frees it when no handler is at work; we have said that we are.
        let space = unsafe { self.space.load(Ordering::SeqCst).as_ref() };
        let place = Place {
            pid: self.pid,
            tid,
            pointer,
            main: space.map_or(self.main, |s| s.stack_end),
        };
        data.copy_python(&place, regs, space, self.walk, &self.aheads, &self.met);
        self.inside.fetch_sub(1, Ordering::SeqCst);
        data.copy_stack(&place);
    }

    /// The work of the handler: finds a slot and has it filled.
    pub fn handle(&self, value: u64, overrun: u64, regs: Regs) {
        let asked = value & IS_ASK != 0;
        let (i, number) = if asked {
            let (i, number) = ((value & 63) as usize, (value & !IS_ASK) >> 6);
            let (from, to) = (
                number << state::BITS | state::ASKED,
                number << state::BITS | state::FILLING,
            );
            let slot = &self.slots[i].state;
            // Who asked may have given up.
            let ours = slot.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed);
            if ours.is_err() {
                return;
            }
            (i, number)
        } else {
            if self.recording.load(Ordering::SeqCst) != value {
                return;
            }
            self.lost.fetch_add(overrun, Ordering::Relaxed);
            let Some(i) = self.claim() else {
                self.lost.fetch_add(1, Ordering::Relaxed);
                self.tell();
                return;
            };
            self.slots[i].state.store(state::FILLING, Ordering::Relaxed);
            // SAFETY: the slot is ours.
            let data = unsafe { &mut *self.slots[i].data.get() };
            data.wants = Wants {
                stack: self.with_stack.load(Ordering::Relaxed),
                python: true,
            };
            (i, 0)
        };
        let slot = &self.slots[i];
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *slot.data.get() };
        let mut own_stack = data.take_own_stack();
        handler::on_stack(&mut own_stack, &mut || self.fill(data, regs));
        data.give_own_stack(own_stack);
        if !asked {
            let missed = data.missed_code();
            slot.state.store(state::SAMPLED, Ordering::Release);
            if missed || self.free.load(Ordering::Relaxed).count_ones() < SLOTS as u32 / 2 {
                self.tell();
            }
            return;
        }
        let (from, to) = (
            number << state::BITS | state::FILLING,
            number << state::BITS | state::ANSWERED,
        );
        if slot
            .state
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            slot.state.store(state::FREE, Ordering::Relaxed);
            self.free.fetch_or(1 << i, Ordering::Release);
        }
        slot.answers.fetch_add(1, Ordering::Release);
        own::wake(&slot.answers);
    }

    /// Wakes who waits for samples. For the handler.
    fn tell(&self) {
        self.ready.fetch_add(1, Ordering::Release);
        own::wake(&self.ready);
    }
}

/// A thread that has been asked.
pub struct Ask {
    pool: &'static Pool,
    slot: usize,
    number: u64,
    done: AtomicU32,
}

impl Ask {
    /// The sample, if it has been taken, or is within this time.
    pub fn wait(&self, most: std::time::Duration) -> Option<Sample> {
        let began = std::time::Instant::now();
        let answered = self.number << state::BITS | state::ANSWERED;
        loop {
            if self.done.load(Ordering::Relaxed) != 0 {
                return None;
            }
            let slot = &self.pool.slots[self.slot];
            let answers = slot.answers.load(Ordering::Acquire);
            if slot.state.load(Ordering::Acquire) == answered {
                self.done.store(1, Ordering::Relaxed);
                return Some(self.pool.take(self.slot).0);
            }
            let left = most.saturating_sub(began.elapsed());
            if left.is_zero() {
                return None;
            }
            own::wait_while(&slot.answers, answers, left);
        }
    }

    /// The same without sleep.
    pub fn spin(&self, most: std::time::Duration) -> Option<Sample> {
        let began = std::time::Instant::now();
        loop {
            let sample = self.wait(std::time::Duration::ZERO);
            if sample.is_some() || began.elapsed() >= most {
                return sample;
            }
            std::hint::spin_loop();
        }
    }
}

impl Drop for Ask {
    /// Gives up: the slot is freed now or when the thread is done with it.
    fn drop(&mut self) {
        if self.done.load(Ordering::Relaxed) != 0 || !self.pool.is_own() {
            return;
        }
        let slot = &self.pool.slots[self.slot].state;
        let is = |state| self.number << state::BITS | state;
        let give_up = |from, to| {
            slot.compare_exchange(is(from), is(to), Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
        };
        // In this order: it may go from one to the next meanwhile.
        if give_up(state::ASKED, state::FILLING) {
            self.pool.release(self.slot);
        } else if !give_up(state::FILLING, state::LEFT) {
            self.pool.release(self.slot); // answered
        }
    }
}

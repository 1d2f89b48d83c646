//! Memory shared by the signal handler and the requesters: slots allocated in advance, one for each sample in progress.
//!
//! The interrupted thread claims a slot, or was assigned one by the requester, and copies registers, stack and
//! interpreter frames into it. The code it runs here allocates nothing, takes no lock, waits for nothing, and makes
//! only system calls that a handler may make (signal-safety(7)); functions for the handler say so. Memory is read
//! through the kernel (process_vm_readv on ourselves): a wild pointer is an error, not a fault.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::handler;
use super::slot::{CopyOptions, PrefetchLists, SlotData, ThreadLocation};
use crate::arch::Regs;
use crate::capture::WalkFn;
use crate::capture::common::seen_code::SeenCode;
use crate::cpython_layout::TargetLayout;
use crate::event::{CodeCopy, Pid, Sample, Tid};
use crate::limits::{MAX_STACK, MAX_STACKS};
use crate::sys;
use crate::sys::perf::{perf_enable, perf_set_period};
use crate::sys::procfs;
use crate::sys::threads;

/// Slots: bits of one word.
const SLOTS: usize = 64;

/// How often a thread that samples itself tries to get a slot, and the time in between.
const CLAIM_ATTEMPTS: usize = 20;
const CLAIM_INTERVAL: Duration = Duration::from_micros(100);

/// State of a slot: the low bits of a word; the other bits identify its request.
mod state {
    pub const FREE: u64 = 0;
    /// A thread has been requested.
    pub const REQUESTED: u64 = 1;
    pub const FILLING: u64 = 2;
    /// Holds the response to a request.
    pub const RESPONDED: u64 = 3;
    /// The requester has given up; the thread that fills the slot frees it.
    pub const ABANDONED: u64 = 4;
    /// Holds a sample that no requester waits for.
    pub const SAMPLED: u64 = 5;
    pub const BITS: u32 = 3;
}

struct PoolSlot {
    state: AtomicU64,
    /// Changes with each response.
    responses: AtomicU32,
    data: UnsafeCell<SlotData>,
}

/// State for the handler; created once per process and never freed.
pub struct SlotPool {
    pid: Pid,
    generation: u32,
    signal: i32,
    walk: WalkFn,
    slots: Vec<PoolSlot>,
    /// Bit `i`: slot `i` is free.
    free: AtomicU64,
    requests: AtomicU64,
    /// Size of the stack buffer that slots get when they are released.
    stack_capacity: AtomicUsize,
    layout: AtomicPtr<TargetLayout>,
    /// Handlers running.
    active_handlers: AtomicU32,
    /// The recording that takes samples; 0: none.
    recording: AtomicU64,
    /// Whether it copies stacks.
    with_stack: AtomicBool,
    /// CPU time between two ticks of its perf events, ns.
    tick_period: AtomicU64,
    /// Samples that found no free slot, and timer overruns.
    lost: AtomicU64,
    /// Changes when a sample should be fetched now.
    pub ready: AtomicU32,
    prefetch: PrefetchLists,
    seen_code: SeenCode,
    /// End of the main thread's stack, until the target layout is known.
    main: u64,
    /// Thread pointer of the main thread; 0: not known.
    main_thread_pointer: AtomicU64,
}

// SAFETY: the data of a slot is accessed by one thread at a time, according to its state: by the handler between
// FILLING and the state after it, by the requester before REQUESTED and after RESPONDED or SAMPLED. The layout is only
// read; it is freed when no handler runs.
unsafe impl Sync for SlotPool {}

static POOL: AtomicPtr<SlotPool> = AtomicPtr::new(std::ptr::null_mut());

/// Distinguishes the signal value of a request from that of a timer.
const IS_REQUEST: u64 = 1 << 63;

impl SlotPool {
    /// The pool of this process, with the handler installed.
    ///
    /// # Errors
    /// No signal is free.
    pub fn get(walk: WalkFn) -> io::Result<&'static SlotPool> {
        static MAKING: AtomicBool = AtomicBool::new(false);
        let generation = threads::generation();
        loop {
            if let Some(pool) = SlotPool::current().filter(|p| p.generation == generation) {
                return Ok(pool);
            }
            // A forked child creates its own: what its parent's threads were doing with theirs never finishes here.
            if !MAKING.swap(true, Ordering::Acquire) {
                let made = SlotPool::new(walk, generation);
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

    fn new(walk: WalkFn, generation: u32) -> io::Result<SlotPool> {
        let signal = handler::install()?;
        let stack_capacity = MAX_STACK as usize;
        let slot = |_| PoolSlot {
            state: AtomicU64::new(state::FREE),
            responses: AtomicU32::new(0),
            data: UnsafeCell::new(SlotData::new(stack_capacity)),
        };
        Ok(SlotPool {
            pid: std::process::id(),
            generation,
            signal,
            walk,
            slots: (0..SLOTS).map(slot).collect(),
            free: AtomicU64::new(u64::MAX),
            requests: AtomicU64::new(0),
            stack_capacity: AtomicUsize::new(stack_capacity),
            layout: AtomicPtr::new(std::ptr::null_mut()),
            active_handlers: AtomicU32::new(0),
            recording: AtomicU64::new(0),
            with_stack: AtomicBool::new(true),
            tick_period: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            ready: AtomicU32::new(0),
            prefetch: PrefetchLists::default(),
            seen_code: SeenCode::default(),
            main: procfs::stack_end(std::process::id()),
            main_thread_pointer: AtomicU64::new(0),
        })
    }

    /// The pool created last. For the handler.
    pub fn current() -> Option<&'static SlotPool> {
        // SAFETY: pools are never freed.
        unsafe { POOL.load(Ordering::Acquire).as_ref() }
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    pub fn signal(&self) -> i32 {
        self.signal
    }

    /// Is this still the process that created the pool?
    pub fn is_current_process(&self) -> bool {
        self.generation == threads::generation()
    }

    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Sets where the interpreter is.
    pub fn update_process(&self, layout: Option<TargetLayout>) {
        let new = layout.map_or(std::ptr::null_mut(), |s| Box::into_raw(Box::new(s)));
        let old = self.layout.swap(new, Ordering::SeqCst);
        // A handler that starts later sees the new one.
        for _ in 0..100 {
            if self.active_handlers.load(Ordering::SeqCst) == 0 {
                // SAFETY: made by `Box::into_raw` above; out of reach, and no handler is at work that may have seen it.
                drop((!old.is_null()).then(|| unsafe { Box::from_raw(old) }));
                return;
            }
            std::thread::yield_now();
        }
        // Some thread makes no progress: leak a few hundred bytes rather than wait for it.
    }

    /// The recording that takes samples; 0: none. For the handler too.
    pub fn recording(&self) -> u64 {
        self.recording.load(Ordering::SeqCst)
    }

    /// Makes a perf event that has ticked for the first time tick in each period. For the handler.
    pub fn tick_on(&self, event: BorrowedFd<'_>) {
        // If it fails no tick comes, and the recorder arms it again.
        let _ = perf_set_period(event, self.tick_period.load(Ordering::Relaxed));
        let _ = perf_enable(event);
    }

    /// Starts a recording: signals with the returned number make samples from now on. `period`: CPU time between two ticks of
    /// perf events, ns. `None`: one is running.
    pub fn begin(&self, stack: bool, period: u64) -> Option<u64> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        self.with_stack.store(stack, Ordering::Relaxed);
        self.tick_period.store(period, Ordering::Relaxed);
        self.lost.store(0, Ordering::Relaxed);
        let begun = self
            .recording
            .compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
        if begun.is_ok() {
            // This recording does not have the code objects that were copied for the last one.
            self.seen_code.clear();
        }
        begun.is_ok().then_some(number)
    }

    /// Stops the recording. No signal makes a sample once this returns, except in threads that make no progress.
    pub fn end(&self) {
        self.recording.store(0, Ordering::SeqCst);
        for _ in 0..100 {
            if self.active_handlers.load(Ordering::SeqCst) == 0 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Returns the waiting samples in chronological order, each with the code objects copied with it.
    pub fn drain(&self, out: &mut Vec<(Sample, Vec<CodeCopy>)>) {
        let first = out.len();
        for (i, slot) in self.slots.iter().enumerate() {
            if slot.state.load(Ordering::Acquire) == state::SAMPLED {
                out.push(self.copy_out(i));
            }
        }
        out[first..].sort_by_key(|(s, _)| s.time);
    }

    /// Copies out a slot's sample and code objects and frees the slot, which must be ours.
    fn copy_out(&self, i: usize) -> (Sample, Vec<CodeCopy>) {
        // SAFETY: by its state the handler is done with the slot, and only we fetch it.
        let data = unsafe { &mut *self.slots[i].data.get() };
        let (sample, codes) = (data.sample(self.pid), data.codes());
        let deeper = data.is_truncated()
            && self
                .stack_capacity
                .swap((MAX_STACKS * MAX_STACK) as usize, Ordering::Relaxed)
                == MAX_STACK as usize;
        self.release(i);
        if deeper {
            // Stacks are deep here: all slots get larger buffers, those in use when they are released.
            let mut claimed: Vec<usize> = std::iter::from_fn(|| self.claim()).collect();
            claimed.drain(..).for_each(|i| self.release(i));
        }
        (sample, codes)
    }

    /// Claims a free slot. For the handler too.
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

    /// Frees a slot that is ours, with a larger buffer if it was found too small.
    fn release(&self, i: usize) {
        let slot = &self.slots[i];
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *slot.data.get() };
        data.reserve_stack(self.stack_capacity.load(Ordering::Relaxed));
        slot.state.store(state::FREE, Ordering::Relaxed);
        self.free.fetch_or(1 << i, Ordering::Release);
    }

    /// Requests a sample from a thread by a signal.
    ///
    /// # Errors
    /// ESRCH: it has exited. EAGAIN: no slot is free, or too many signals are queued.
    pub fn request(&'static self, tid: Tid, copy: CopyOptions) -> io::Result<Request> {
        let i = self.claim().ok_or(io::ErrorKind::WouldBlock)?;
        let slot = &self.slots[i];
        // SAFETY: the slot is ours.
        unsafe { (*slot.data.get()).copy = copy };
        let number = self.requests.fetch_add(1, Ordering::Relaxed) & ((IS_REQUEST >> 8) - 1);
        slot.state
            .store(number << state::BITS | state::REQUESTED, Ordering::Release);
        let request = Request {
            pool: self,
            slot: i,
            number,
            done: AtomicU32::new(0),
        };
        match threads::send(self.pid, tid, self.signal, IS_REQUEST | number << 6 | i as u64) {
            Ok(()) => Ok(request),
            Err(e) => Err(e), // dropping `request` frees the slot
        }
    }

    /// A sample of the calling thread in this call.
    #[inline(never)]
    pub fn sample_current_thread(&self, copy: CopyOptions) -> Option<Sample> {
        let i = self.claim()?;
        let regs = handler::current_registers();
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *self.slots[i].data.get() };
        data.copy = copy;
        self.fill_slot(data, regs);
        Some(self.copy_out(i).0)
    }

    /// Takes a sample of the calling thread for the recording that runs, and returns its time. Waits a little where there is no
    /// room.
    #[inline(never)]
    pub fn sample_here(&self) -> Option<u64> {
        if self.recording() == 0 {
            return None;
        }
        let Some(i) = self.claim().or_else(|| self.claim_later()) else {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let regs = handler::current_registers();
        let slot = &self.slots[i];
        slot.state.store(state::FILLING, Ordering::Relaxed);
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *slot.data.get() };
        data.copy = CopyOptions {
            stack: self.with_stack.load(Ordering::Relaxed),
            python: true,
        };
        let mut handler_stack = data.take_handler_stack();
        handler::on_stack(&mut handler_stack, &mut || self.fill_slot(data, regs));
        data.return_handler_stack(handler_stack);
        let time = data.time();
        self.hand_over(i);
        Some(time)
    }

    /// Claims a slot that the recorder frees soon.
    #[cold]
    fn claim_later(&self) -> Option<usize> {
        (0..CLAIM_ATTEMPTS).find_map(|_| {
            self.publish();
            std::thread::sleep(CLAIM_INTERVAL);
            self.claim()
        })
    }

    /// Leaves a filled slot to the recording.
    fn hand_over(&self, i: usize) {
        let slot = &self.slots[i];
        // SAFETY: the slot is ours.
        let missed = unsafe { (*slot.data.get()).missed_code() };
        slot.state.store(state::SAMPLED, Ordering::Release);
        if missed || self.free.load(Ordering::Relaxed).count_ones() < SLOTS as u32 / 2 {
            self.publish();
        }
    }

    /// A sample of a thread that does not run: only `regs` are known of its registers. `None`: no slot is free, or the
    /// thread has run meanwhile.
    pub fn read(
        &self,
        regs: Regs,
        tid: Tid,
        thread_pointer: u64,
        copy: CopyOptions,
        unchanged: &dyn Fn() -> bool,
    ) -> Option<(Sample, Vec<CodeCopy>)> {
        let i = self.claim()?;
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *self.slots[i].data.get() };
        data.copy = copy;
        self.copy_thread(data, regs, tid, thread_pointer);
        if unchanged() {
            return Some(self.copy_out(i));
        }
        self.release(i);
        None
    }

    /// Copies the calling thread. For the handler.
    fn fill_slot(&self, data: &mut SlotData, regs: Regs) {
        let (tid, thread_pointer) = (sys::process::current_tid() as Tid, threads::thread_pointer());
        if tid == self.pid {
            self.main_thread_pointer.store(thread_pointer, Ordering::Relaxed);
        }
        self.copy_thread(data, regs, tid, thread_pointer);
    }

    /// Thread pointer of the main thread, once it has been sampled.
    pub fn main_thread_pointer(&self) -> Option<u64> {
        Some(self.main_thread_pointer.load(Ordering::Relaxed)).filter(|p| *p != 0)
    }

    /// Copies a stopped thread. For the handler too.
    fn copy_thread(&self, data: &mut SlotData, regs: Regs, tid: Tid, thread_pointer: u64) {
        self.active_handlers.fetch_add(1, Ordering::SeqCst);
        // SAFETY: null, or made by `update_process`, which frees it when no handler is active; we count as active here.
        let layout = unsafe { self.layout.load(Ordering::SeqCst).as_ref() };
        let location = ThreadLocation {
            pid: self.pid,
            tid,
            thread_pointer,
            main: layout.map_or(self.main, |s| s.stack_end),
        };
        data.copy_python(&location, regs, layout, self.walk, &self.prefetch, &self.seen_code);
        self.active_handlers.fetch_sub(1, Ordering::SeqCst);
        data.copy_stack(&location);
    }

    /// The body of the handler: finds a slot and fills it.
    pub fn handle(&self, value: u64, overrun: u64, regs: Regs) {
        let pending = value & IS_REQUEST != 0;
        let (i, number) = if pending {
            let (i, number) = ((value & 63) as usize, (value & !IS_REQUEST) >> 6);
            let (from, to) = (
                number << state::BITS | state::REQUESTED,
                number << state::BITS | state::FILLING,
            );
            let slot = &self.slots[i].state;
            // The requester may have given up.
            let ours = slot.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed);
            if ours.is_err() {
                return;
            }
            (i, number)
        } else {
            if value == 0 || self.recording() != value {
                return;
            }
            self.lost.fetch_add(overrun, Ordering::Relaxed);
            let Some(i) = self.claim() else {
                self.lost.fetch_add(1, Ordering::Relaxed);
                self.publish();
                return;
            };
            self.slots[i].state.store(state::FILLING, Ordering::Relaxed);
            // SAFETY: the slot is ours.
            let data = unsafe { &mut *self.slots[i].data.get() };
            data.copy = CopyOptions {
                stack: self.with_stack.load(Ordering::Relaxed),
                python: true,
            };
            (i, 0)
        };
        let slot = &self.slots[i];
        // SAFETY: the slot is ours.
        let data = unsafe { &mut *slot.data.get() };
        let mut handler_stack = data.take_handler_stack();
        handler::on_stack(&mut handler_stack, &mut || self.fill_slot(data, regs));
        data.return_handler_stack(handler_stack);
        if !pending {
            self.hand_over(i);
            return;
        }
        let (from, to) = (
            number << state::BITS | state::FILLING,
            number << state::BITS | state::RESPONDED,
        );
        if slot
            .state
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            slot.state.store(state::FREE, Ordering::Relaxed);
            self.free.fetch_or(1 << i, Ordering::Release);
        }
        slot.responses.fetch_add(1, Ordering::Release);
        threads::wake(&slot.responses);
    }

    /// Wakes the thread that waits for samples. For the handler too.
    pub fn publish(&self) {
        self.ready.fetch_add(1, Ordering::Release);
        threads::wake(&self.ready);
    }
}

/// A thread whose sample has been requested.
pub struct Request {
    pool: &'static SlotPool,
    slot: usize,
    number: u64,
    done: AtomicU32,
}

impl Request {
    /// The sample, if it is ready within this time.
    pub fn wait(&self, timeout: std::time::Duration) -> Option<Sample> {
        let began = std::time::Instant::now();
        let on_response = self.number << state::BITS | state::RESPONDED;
        loop {
            if self.done.load(Ordering::Relaxed) != 0 {
                return None;
            }
            let slot = &self.pool.slots[self.slot];
            let responses = slot.responses.load(Ordering::Acquire);
            if slot.state.load(Ordering::Acquire) == on_response {
                self.done.store(1, Ordering::Relaxed);
                return Some(self.pool.copy_out(self.slot).0);
            }
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return None;
            }
            threads::wait_while(&slot.responses, responses, left);
        }
    }

    /// The same, spinning instead of sleeping.
    pub fn spin(&self, timeout: std::time::Duration) -> Option<Sample> {
        let began = std::time::Instant::now();
        loop {
            let sample = self.wait(std::time::Duration::ZERO);
            if sample.is_some() || began.elapsed() >= timeout {
                return sample;
            }
            std::hint::spin_loop();
        }
    }
}

impl Drop for Request {
    /// Gives up: the slot is freed now, or when the thread is done with it.
    fn drop(&mut self) {
        if self.done.load(Ordering::Relaxed) != 0 || !self.pool.is_current_process() {
            return;
        }
        let slot = &self.pool.slots[self.slot].state;
        let is = |state| self.number << state::BITS | state;
        let give_up = |from, to| {
            slot.compare_exchange(is(from), is(to), Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
        };
        // In this order: the slot may go from one state to the next meanwhile.
        if give_up(state::REQUESTED, state::FILLING) {
            self.pool.release(self.slot);
        } else if !give_up(state::FILLING, state::ABANDONED) {
            self.pool.release(self.slot); // has responded
        }
    }
}

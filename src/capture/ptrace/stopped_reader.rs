//! Reads a stopped thread: registers, interpreter frames, stack. Kept minimal: the thread is stopped meanwhile.

use std::io;
use std::sync::Arc;

use super::timer::{ThreadTimer, Tick};
use crate::arch::{GPRS, PerfRegs, RED_ZONE, Regs, UserRegs};
use crate::capture::WalkFn;
use crate::capture::common::block_cache::BlockCache;
use crate::capture::common::seen_code::SeenCode;
use crate::capture::common::stack_copy;
use crate::capture::common::stack_copy::HOLES;
use crate::cpython_layout::TargetLayout;
use crate::event::{
    CodeCopy, Part, Pid, PythonWalk, RUNNING_TASK, Sample, SpanRecords, StackBytes, StoppedThread, Tid, TimeSpent,
    WakeUp, WalkStatus,
};
use crate::limits::{DEEP_FRAMES, MAX_FRAMES, MAX_STACK, MAX_STACKS};
use crate::sys;
use crate::sys::ptrace::Stopped;

/// Approximate number of code objects that are copied before a sample.
const MAX_AHEAD_CODES: usize = 256;

/// Buffers that every sample needs, allocated once.
pub struct StoppedReader {
    walk: WalkFn,
    block_cache: BlockCache,
    python_walk: PythonWalk,
    seen_code: Arc<SeenCode>,
    /// Code objects copied ahead of the next sample, while its thread ran.
    early_codes: Vec<CodeCopy>,
    stack: Vec<u8>,
    /// Registers of the thread sampled last.
    last: Option<(Pid, Tid, UserRegs)>,
}

impl StoppedReader {
    /// `seen_code`: the code objects that need not be copied.
    pub fn new(walk: WalkFn, seen_code: Arc<SeenCode>) -> StoppedReader {
        StoppedReader {
            walk,
            block_cache: BlockCache::default(),
            python_walk: PythonWalk::with_capacity(MAX_FRAMES),
            seen_code,
            early_codes: Vec::new(),
            stack: vec![0; (MAX_STACKS * MAX_STACK) as usize],
            last: None,
        }
    }

    /// Does what a sample takes while the thread runs, and discards the result: this brings the code and memory that
    /// are needed soon into the caches. `prefetch` as for [`StoppedReader::take_sample`].
    pub fn warm_up(&mut self, tid: Tid, layout: Option<&TargetLayout>, prefetch: &[u64]) {
        match self.last {
            Some((pid, last, words)) if last == tid => {
                let thread = thread(&words, layout);
                self.read((pid, tid), &words.regs(), &thread, None, layout, prefetch);
                // Bounded: if no sample follows for long, further code objects are read when their samples come.
                if self.early_codes.len() < MAX_AHEAD_CODES {
                    self.keep_early_codes(pid, tid);
                }
            }
            _ => self.block_cache.begin(tid, prefetch),
        }
    }

    /// Takes a sample of a thread and resumes it. Its interpreter frames are added by [`StoppedReader::finish`].
    /// `prefetch`: the blocks that its last walk read. Also returns its thread pointer and the number of samples that
    /// fell due unseen.
    ///
    /// # Errors
    /// The thread was killed while it was stopped.
    pub fn take_sample(
        &mut self,
        stop: Stopped,
        pid: Pid,
        layout: Option<&TargetLayout>,
        prefetch: &[u64],
        timer: &mut Option<ThreadTimer>,
        tick: Option<Tick>,
    ) -> io::Result<(Sample, u64, u64)> {
        let (tid, time) = (stop.tid, sys::clock::now());
        let words = restart_interrupted_syscall(&stop)?;
        let regs = words.regs();
        let thread = thread(&words, layout);
        let stack = self.read((pid, tid), &regs, &thread, None, layout, prefetch);
        // Its timer is stopped too while the thread is, and is cheap to set.
        let past = match (timer, tick) {
            (Some(timer), Some(tick)) => timer.next(tick),
            _ => 0,
        };
        drop(stop);
        self.last = Some((pid, tid, words));
        Ok((self.sample((pid, tid, time), regs, stack), thread.thread_pointer, past))
    }

    /// Takes a sample of a thread, calls `during` with its interpreter frames, and detaches from it.
    ///
    /// # Errors
    /// The thread was killed while it was stopped.
    pub fn take_and_detach(
        &mut self,
        stop: Stopped,
        pid: Pid,
        layout: &TargetLayout,
        during: &mut dyn FnMut(&PythonWalk, u64),
    ) -> io::Result<Sample> {
        let (tid, time) = (stop.tid, sys::clock::now());
        let words = restart_interrupted_syscall(&stop)?;
        let regs = words.regs();
        let thread = thread(&words, Some(layout));
        let stack = self.read((pid, tid), &regs, &thread, None, Some(layout), &[]);
        during(&self.python_walk, thread.thread_pointer);
        stop.detach();
        let mut sample = self.sample((pid, tid, time), regs, stack);
        self.finish(&mut sample, &mut Vec::new());
        Ok(sample)
    }

    /// Samples a thread that does not run, without stopping it: only `regs` are known of its registers.
    /// `thread_pointer`: if known; `end`: end of the memory that holds its stack.
    pub fn read_thread(
        &mut self,
        (pid, tid): (Pid, Tid),
        regs: Regs,
        thread_pointer: Option<u64>,
        end: u64,
        layout: &TargetLayout,
    ) -> (Sample, &PythonWalk) {
        let time = sys::clock::now();
        let thread = StoppedThread {
            stack_pointer: regs.sp(),
            thread_pointer: thread_pointer.unwrap_or(0),
            registers: [0; GPRS],
        };
        // Without a thread pointer no thread state can be matched to this thread.
        let end = Some(end).filter(|end| *end != 0 && thread_pointer.is_none());
        let stack = self.read((pid, tid), &regs, &thread, end, Some(layout), &[]);
        let mut sample = self.sample((pid, tid, time), regs, stack);
        self.finish(&mut sample, &mut Vec::new());
        (sample, &self.python_walk)
    }

    /// Samples a thread that sleeps in a system call, without stopping it, with the registers it had when it made the
    /// call. Its interpreter frames are added by [`StoppedReader::finish`].
    pub fn read_sleeping(
        &mut self,
        pid: Pid,
        tid: Tid,
        regs: &PerfRegs,
        thread_pointer: u64,
        layout: Option<&TargetLayout>,
    ) -> Sample {
        let time = sys::clock::now();
        let thread = StoppedThread {
            stack_pointer: regs.regs().sp(),
            thread_pointer,
            registers: regs.general(),
        };
        let regs = regs.regs();
        let stack = self.read((pid, tid), &regs, &thread, None, layout, &[]);
        self.sample((pid, tid, time), regs, stack)
    }

    /// Reads interpreter frames and stack into our buffers; returns the stack's base, length and holes. `end`: of the memory that
    /// holds the stack, where nothing else says where it ends. Memory is read
    /// by the ID of this thread: the first thread of its process may have exited, and has no memory then.
    fn read(
        &mut self,
        (pid, tid): (Pid, Tid),
        regs: &Regs,
        thread: &StoppedThread,
        end: Option<u64>,
        layout: Option<&TargetLayout>,
        prefetch: &[u64],
    ) -> (u64, usize, Vec<u64>) {
        self.python_walk.clear();
        if let Some(layout) = layout {
            self.block_cache.begin(tid, prefetch);
            let is_new = |code, fingerprint| self.seen_code.is_new(pid, code, fingerprint);
            (self.walk)(&self.block_cache, layout, thread, &is_new, &mut self.python_walk);
        }
        let base = regs.sp().wrapping_sub(RED_ZONE);
        let deep = layout.is_some() && self.python_walk.python.len() > DEEP_FRAMES;
        let (read, mut holes) = (
            |at: u64, out: &mut [u8]| sys::memory::read_memory(tid, at, out),
            [0; HOLES],
        );
        let main = layout.map_or(0, |s| s.stack_end);
        let end = match end {
            Some(end) if !(base..end).contains(&main) => end.saturating_sub(8),
            _ => main,
        };
        let end = stack_copy::end(&read, regs, thread.thread_pointer, end, deep);
        let len = stack_copy::copy(&read, base, end, &mut self.stack, &mut holes);
        (base, len, stack_copy::trimmed(&holes))
    }

    /// Without interpreter frames.
    fn sample(
        &self,
        (pid, tid, time): (Pid, Tid, u64),
        regs: Regs,
        (base, len, holes): (u64, usize, Vec<u64>),
    ) -> Sample {
        Sample {
            pid,
            tid,
            time,
            regs: Some(regs),
            stack: StackBytes {
                base,
                bytes: self.stack[..len].to_vec(),
                holes,
            },
            kernel: Vec::new(),
            python: Vec::new(),
            anchors: Vec::new(),
            walk: WalkStatus::NoPython,
            time_spent: TimeSpent::default(),
            wake_up: WakeUp::default(),
            dispatcher: None,
            holds_lock: false,
            system_call: None,
            polled: None,
            suspended: None,
            spans: SpanRecords::default(),
            tasks: Vec::new(),
            memory: None,
            allocation: None,
            host: None,
        }
    }

    /// Copies the new code objects of a running thread that is about to be stopped, which shortens the stop. It will
    /// mostly still run them then; copies of other code objects have no effect, since their fingerprints are not compared
    /// up.
    pub fn copy_code_early(&mut self, pid: Pid, tid: Tid, thread_pointer: u64, layout: &TargetLayout) {
        let thread = StoppedThread {
            stack_pointer: 0,
            thread_pointer,
            registers: [0; GPRS],
        };
        self.block_cache.begin(tid, &[]);
        let is_new = |code, fingerprint| self.seen_code.is_new(pid, code, fingerprint);
        (self.walk)(&self.block_cache, layout, &thread, &is_new, &mut self.python_walk);
        self.keep_early_codes(pid, tid);
    }

    /// Keeps the code objects of the walk that was just done for the next sample, unless another one has taken the place of one
    /// since. Not the task that ran: it may have ended by then.
    fn keep_early_codes(&mut self, pid: Pid, tid: Tid) {
        for copy in self.python_walk.codes.list() {
            if copy.fingerprint != RUNNING_TASK && is_unchanged(tid, &copy) {
                self.early_codes.push(copy);
            } else {
                self.seen_code.forget(pid, copy.code, copy.fingerprint);
            }
        }
        self.python_walk.codes.clear();
    }

    /// The code objects copied since the last call.
    pub fn codes(&mut self) -> Vec<CodeCopy> {
        let mut codes = std::mem::take(&mut self.early_codes);
        codes.extend(self.python_walk.codes.list());
        self.python_walk.codes.clear();
        codes
    }

    /// Was a code object not copied although it is new?
    pub fn missed_code(&self) -> bool {
        self.python_walk.codes.missed
    }

    /// Adds the interpreter frames of the sample just taken. `prefetch` becomes the list of blocks that the walk read.
    pub fn finish(&mut self, sample: &mut Sample, prefetch: &mut Vec<u64>) {
        self.block_cache.touched(prefetch);
        sample.python.clone_from(&self.python_walk.python);
        sample.anchors.clone_from(&self.python_walk.anchors);
        sample.walk = self.python_walk.walk;
        sample.holds_lock = self.python_walk.holds_lock;
        sample.spans.clone_from(&self.python_walk.spans);
    }
}

/// Is what was copied of a code object, while its thread ran, all of this object? Its strings may have been read before it was
/// put where another one was. They are read again, and then the object: if nothing has changed, it was there all the time.
fn is_unchanged(tid: Tid, copy: &CodeCopy) -> bool {
    /// Reference count and type at the beginning of each part.
    const HEADER: usize = 16;
    let pieces = |part: &Part| (part.avma, part.bytes.len());
    // The object is the first part.
    let pieces: Vec<(u64, usize)> = copy.parts.iter().rev().map(pieces).collect();
    let mut now = vec![0; pieces.iter().map(|(_, length)| length).sum()];
    if sys::memory::read_memory_pieces(tid, &pieces, &mut now) < now.len() {
        return false;
    }
    let mut now = &now[..];
    copy.parts.iter().rev().all(|part| {
        let (of_part, rest) = now.split_at(part.bytes.len());
        now = rest;
        of_part.get(HEADER..) == part.bytes.get(HEADER..)
    })
}

fn thread(words: &UserRegs, layout: Option<&TargetLayout>) -> StoppedThread {
    let python = layout.and_then(|layout| layout.python.as_ref());
    let size = python.map_or(0, |python| python.descriptor.size);
    StoppedThread {
        stack_pointer: words.regs().sp(),
        thread_pointer: words.thread_pointer().wrapping_sub(size.into()),
        registers: words.general(),
    }
}

/// The thread's registers; restarts a system call that the stop has interrupted.
pub fn restart_interrupted_syscall(stop: &Stopped) -> io::Result<UserRegs> {
    let regs = stop.registers()?;
    let mut again = regs;
    if again.restart_syscall() {
        stop.set_registers(&again)?;
    }
    Ok(regs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::common::seen_code::SeenCode;
    use crate::process::memory::Memory;

    static CODE: [u8; 32] = [1; 32];
    static NAME: [u8; 24] = [2; 24];

    /// Finds code objects and a running task: what was read of their names is what is there, or was before.
    fn walk(
        _: &dyn Memory,
        _: &TargetLayout,
        _: &StoppedThread,
        is_new: &dyn Fn(u64, u32) -> bool,
        python_walk: &mut PythonWalk,
    ) {
        python_walk.codes.clear();
        let (code, name) = (CODE.as_ptr() as u64, NAME.as_ptr() as u64);
        for (fingerprint, byte, at) in [(7, 2, 20), (8, 3, 20), (9, 3, 4), (RUNNING_TASK, 2, 20)] {
            if !is_new(code, fingerprint) {
                continue;
            }
            let fill = |to: &mut [u8], value, changed: Option<(usize, u8)>| {
                to.fill(value);
                if let Some((at, byte)) = changed {
                    to[at] = byte;
                }
                true
            };
            python_walk.codes.part(code, CODE.len(), |to| fill(to, 1, None));
            python_walk
                .codes
                .part(name, NAME.len(), |to| fill(to, 2, Some((at, byte))));
            python_walk.codes.end(code, fingerprint);
        }
    }

    #[test]
    fn copies_of_earlier_instants_are_kept_if_nothing_has_changed() {
        let mut reader = StoppedReader::new(walk, Arc::new(SeenCode::default()));
        let pid = std::process::id();
        let mut kept = || {
            reader.copy_code_early(pid, pid, 0, &TargetLayout::default());
            let copies = reader.codes();
            copies.iter().map(|copy| copy.fingerprint).collect::<Vec<u32>>()
        };
        // Of 9 only the reference count has changed. What was not kept is found again.
        assert_eq!(kept(), [7, 9]);
        assert_eq!(kept(), [0; 0]);
        assert!(reader.seen_code.is_new(pid, CODE.as_ptr() as u64, 8));
    }
}

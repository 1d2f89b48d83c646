//! What is done while a thread is held: registers, interpreter frames, stack. It is short.

use std::io;

use super::Walk;
use super::memory::Blocks;
use super::timer::Timer;
use crate::arch::UserRegs;
use crate::layout::Space;
use crate::process::sys;
use crate::process::trace::Stopped;
use crate::sample::{Pid, PyWalk, Sample, StackBytes, Standing, Walked};

/// As in sample.bpf.c.
const MAX_STACK: u64 = 1 << 20;
const MAX_STACKS: u64 = 8;
const DEEP_FRAMES: usize = 1000;
const MAX_FAULTS: usize = 64;
const MAX_FRAMES: usize = 16384;
const RED_ZONE: u64 = 128;
const PAGE: u64 = 4096;

/// Room that each sample needs, made once.
pub struct Holder {
    walk: Walk,
    blocks: Blocks,
    walked: Walked,
    stack: Vec<u8>,
}

impl Holder {
    pub fn new(walk: Walk) -> Holder {
        Holder {
            walk,
            blocks: Blocks::default(),
            walked: Walked::with_room(MAX_FRAMES),
            stack: vec![0; (MAX_STACKS * MAX_STACK) as usize],
        }
    }

    /// Takes a sample of a thread and lets it go on. Its interpreter frames are added by [`Holder::finish`]. `ahead`:
    /// what its last walk read. Also returns the samples that fell due unseen.
    ///
    /// # Errors
    /// It was killed while it stood.
    pub fn take(
        &mut self,
        stop: Stopped,
        pid: Pid,
        space: Option<&Space>,
        ahead: &[u64],
        timer: &mut Option<Timer>,
    ) -> io::Result<(Sample, u64)> {
        let (tid, time) = (stop.tid, sys::now());
        let words = begin_again(&stop)?;
        let regs = words.regs();
        let standing = Standing {
            pointer: words.thread_pointer(),
            registers: words.general(),
        };
        if let Some(space) = space {
            self.blocks.begin(pid, ahead);
            (self.walk)(&self.blocks, space, &standing, &mut self.walked);
        }
        let base = regs.sp().wrapping_sub(RED_ZONE);
        let deep = space.is_some() && self.walked.python.len() > DEEP_FRAMES;
        let end = stack_end(base, standing.pointer, space.map_or(0, |s| s.stack_end), deep);
        let (len, holes) = copy_stack(pid, base, end, &mut self.stack);
        // While it stands still its timer does too, and is cheap to set.
        let past = timer.as_mut().map_or(0, Timer::next);
        drop(stop);
        let stack = StackBytes {
            base,
            bytes: self.stack[..len].to_vec(),
            holes,
        };
        let sample = Sample {
            pid,
            tid,
            time,
            regs: Some(regs),
            stack,
            kernel: Vec::new(),
            python: Vec::new(),
            marks: Vec::new(),
            walk: PyWalk::NoPython,
        };
        Ok((sample, past))
    }

    /// Adds the interpreter frames of the sample just taken. `ahead` becomes what the walk has read.
    pub fn finish(&mut self, sample: &mut Sample, ahead: &mut Vec<u64>) {
        self.blocks.touched(ahead);
        sample.python.clone_from(&self.walked.python);
        sample.marks.clone_from(&self.walked.marks);
        sample.walk = self.walked.walk;
    }
}

/// The thread's registers; a system call that the stop has ended will begin again.
pub fn begin_again(stop: &Stopped) -> io::Result<UserRegs> {
    let regs = stop.registers()?;
    let mut again = regs;
    if again.begin_again() {
        stop.set_registers(&again)?;
    }
    Ok(regs)
}

/// Where a stack that begins at `sp` ends: `argc` in the main thread, the thread descriptor in the others (glibc and
/// musl put it above the stack); anywhere else (signal stacks, coroutines) a guess. As in sample.bpf.c.
fn stack_end(sp: u64, thread_pointer: u64, main: u64, deep: bool) -> u64 {
    let is_main = main >= sp && main - sp < 64 << 20;
    let end = if is_main {
        main + 8
    } else if thread_pointer > sp && thread_pointer - sp < 1 << 30 {
        thread_pointer
    } else {
        sp.saturating_add(65536)
    };
    // Only where that is sure, or the depth of Python says so, more than this.
    let most = MAX_STACK * if is_main || deep { MAX_STACKS } else { 1 };
    end.min(sp.saturating_add(most))
}

/// Copies a stack into `out`, over pages that cannot be read; returns its length and the bits of such pages.
fn copy_stack(pid: Pid, base: u64, end: u64, out: &mut [u8]) -> (usize, Vec<u64>) {
    let len = usize::try_from(end.saturating_sub(base)).map_or(out.len(), |n| n.min(out.len()));
    let (mut at, mut faults, mut holes) = (0, 0, Vec::new());
    while at < len && faults <= MAX_FAULTS {
        at += sys::read_memory(pid, base + at as u64, &mut out[at..len]);
        if at < len {
            let avma = base + at as u64;
            let page = (avma / PAGE - base / PAGE) as usize;
            holes.resize(holes.len().max(page / 64 + 1), 0);
            holes[page / 64] |= 1 << (page % 64);
            let next = (((avma / PAGE + 1) * PAGE - base) as usize).min(len);
            out[at..next].fill(0);
            (at, faults) = (next, faults + 1);
        }
    }
    (at, holes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_end_where_the_program_says() {
        const SP: u64 = 0x7000_0000;
        let check = |pointer: u64, main: u64, expected: u64| assert_eq!(stack_end(SP, pointer, main, false), expected);
        check(0x6000_0000, SP + 0x3000, SP + 0x3008); // main thread
        check(SP + 0x9000, 0x7fff_0000_0000, SP + 0x9000); // another
        check(0x6000_0000, 0x6000_0000, SP + 65536); // neither
        check(SP + 0x900_0000, 0, SP + MAX_STACK);
        check(0, SP + 0x90_0000, SP + MAX_STACKS * MAX_STACK);
        assert_eq!(stack_end(SP, SP + 0x20_0000, 0, true), SP + 0x20_0000);
        assert_eq!(stack_end(u64::MAX - 8, 0, 0, false), u64::MAX);
    }

    #[test]
    fn stacks_are_copied_over_holes() {
        // A page that cannot be read is not to be had without unsafe code: the first page of memory stands for it.
        let own = [7u8; 64];
        let at = own.as_ptr() as u64;
        let mut out = [1; 64];
        assert_eq!(copy_stack(std::process::id(), at, at + 64, &mut out), (64, Vec::new()));
        assert_eq!(out, own);
        let mut out = [1; 6000];
        let (len, holes) = copy_stack(std::process::id(), 8, 5008, &mut out);
        assert_eq!((len, holes), (5000, vec![0b11]));
        assert!(out[..5000].iter().all(|b| *b == 0));
        let mut out = vec![1; 1 << 20];
        let (len, holes) = copy_stack(std::process::id(), 0, 1 << 20, &mut out);
        assert_eq!(len, (MAX_FAULTS + 1) * PAGE as usize, "no more faults than these");
        assert_eq!(holes, [u64::MAX, 1]);
    }
}

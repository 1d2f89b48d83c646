//! What is done while a thread is held: registers, interpreter frames, stack. It is short.

use std::io;
use std::sync::Arc;

use super::timer::{Tick, Timer};
use crate::arch::{GPRS, PerfRegs, Regs, UserRegs};
use crate::capture::Walk;
use crate::capture::blocks::Blocks;
use crate::capture::met::Met;
use crate::capture::stack::{self, DEEP_FRAMES, HOLES, MAX_STACK, MAX_STACKS, RED_ZONE};
use crate::layout::Space;
use crate::process::sys;
use crate::process::trace::Stopped;
use crate::sample::{CodeCopy, Pid, PyWalk, Sample, StackBytes, Standing, Tid, TimeSpent, Walked};

/// As in sample.bpf.c.
const MAX_FRAMES: usize = 16384;
/// Code objects that are copied before a sample, more or less.
const MAX_AHEAD_CODES: usize = 256;

/// Room that each sample needs, made once.
pub struct Holder {
    walk: Walk,
    blocks: Blocks,
    walked: Walked,
    met: Arc<Met>,
    /// Code objects that were copied before the next sample, while its thread ran.
    ahead: Vec<CodeCopy>,
    stack: Vec<u8>,
    /// Registers of the last sample's thread.
    last: Option<(Tid, UserRegs)>,
}

impl Holder {
    /// `met`: the code objects that need not be copied.
    pub fn new(walk: Walk, met: Arc<Met>) -> Holder {
        Holder {
            walk,
            blocks: Blocks::default(),
            walked: Walked::with_room(MAX_FRAMES),
            met,
            ahead: Vec::new(),
            stack: vec![0; (MAX_STACKS * MAX_STACK) as usize],
            last: None,
        }
    }

    /// Does what a sample takes while the thread runs, and forgets what came of it: code and memory that are soon needed
    /// are near then. `ahead` as for [`Holder::take`].
    pub fn rehearse(&mut self, tid: Tid, space: Option<&Space>, ahead: &[u64]) {
        match self.last {
            Some((last, words)) if last == tid => {
                let standing = standing(&words);
                self.read(tid, &words.regs(), &standing, standing.pointer, space, ahead);
                // Should no sample come for long, those that came last are read when their samples do.
                if self.ahead.len() < MAX_AHEAD_CODES {
                    self.ahead.extend(self.walked.codes.list());
                }
            }
            _ => self.blocks.begin(tid, ahead),
        }
    }

    /// Takes a sample of a thread and lets it go on. Its interpreter frames are added by [`Holder::finish`]. `ahead`:
    /// what its last walk read. Also returns its thread pointer and the samples that fell due unseen.
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
        tick: Option<Tick>,
    ) -> io::Result<(Sample, u64, u64)> {
        let (tid, time) = (stop.tid, sys::now());
        let words = begin_again(&stop)?;
        let regs = words.regs();
        let standing = standing(&words);
        let stack = self.read(tid, &regs, &standing, standing.pointer, space, ahead);
        // While it stands still its timer does too, and is cheap to set.
        let past = match (timer, tick) {
            (Some(timer), Some(tick)) => timer.next(tick),
            _ => 0,
        };
        drop(stop);
        self.last = Some((tid, words));
        Ok((self.sample((pid, tid, time), regs, stack), standing.pointer, past))
    }

    /// Takes a sample of a thread, calls `during` with its interpreter frames, and lets it go for good.
    ///
    /// # Errors
    /// It was killed while it stood.
    pub fn take_once(
        &mut self,
        stop: Stopped,
        pid: Pid,
        space: &Space,
        during: &mut dyn FnMut(&Walked, u64),
    ) -> io::Result<Sample> {
        let (tid, time) = (stop.tid, sys::now());
        let words = begin_again(&stop)?;
        let regs = words.regs();
        let standing = standing(&words);
        let stack = self.read(tid, &regs, &standing, standing.pointer, Some(space), &[]);
        during(&self.walked, standing.pointer);
        stop.detach();
        let mut sample = self.sample((pid, tid, time), regs, stack);
        self.finish(&mut sample, &mut Vec::new());
        Ok(sample)
    }

    /// The sample of a thread that does not run and is left alone: of its registers only these are known. `pointer`: its
    /// thread pointer, if known; `end`: where the memory ends that its stack lies in.
    pub fn look(
        &mut self,
        (pid, tid): (Pid, Tid),
        regs: Regs,
        pointer: Option<u64>,
        end: u64,
        space: &Space,
    ) -> (Sample, &Walked) {
        let time = sys::now();
        let standing = Standing {
            pointer: pointer.unwrap_or(0),
            registers: [0; GPRS],
        };
        // Without its pointer no thread state is this thread's.
        let stack = self.read(tid, &regs, &standing, pointer.unwrap_or(end), Some(space), &[]);
        let mut sample = self.sample((pid, tid, time), regs, stack);
        self.finish(&mut sample, &mut Vec::new());
        (sample, &self.walked)
    }

    /// The sample of a thread that sleeps in a system call and is left alone, with the registers that it had when it made
    /// the call. Its interpreter frames are added by [`Holder::finish`].
    pub fn asleep(&mut self, pid: Pid, tid: Tid, regs: &PerfRegs, pointer: u64, space: Option<&Space>) -> Sample {
        let time = sys::now();
        let standing = Standing {
            pointer,
            registers: regs.general(),
        };
        let regs = regs.regs();
        let stack = self.read(tid, &regs, &standing, pointer, space, &[]);
        self.sample((pid, tid, time), regs, stack)
    }

    /// Reads interpreter frames and stack, both into room of our own; the stack's base, length and holes. All through the
    /// thread: the first one of its process may have ended, and has no memory then.
    fn read(
        &mut self,
        tid: Tid,
        regs: &Regs,
        standing: &Standing,
        descriptor: u64,
        space: Option<&Space>,
        ahead: &[u64],
    ) -> (u64, usize, Vec<u64>) {
        self.walked.clear();
        if let Some(space) = space {
            self.blocks.begin(tid, ahead);
            let is_new = |code, fingerprint| self.met.is_new(code, fingerprint);
            (self.walk)(&self.blocks, space, standing, &is_new, &mut self.walked);
        }
        let base = regs.sp().wrapping_sub(RED_ZONE);
        let deep = space.is_some() && self.walked.python.len() > DEEP_FRAMES;
        let end = stack::end(base, descriptor, space.map_or(0, |s| s.stack_end), deep);
        let (read, mut holes) = (|at: u64, out: &mut [u8]| sys::read_memory(tid, at, out), [0; HOLES]);
        let len = stack::copy(&read, base, end, &mut self.stack, &mut holes);
        (base, len, stack::trimmed(&holes))
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
            marks: Vec::new(),
            walk: PyWalk::NoPython,
            time_spent: TimeSpent::default(),
            system_call: None,
        }
    }

    /// Copies the new code objects of a thread that runs and is about to be held, so that it is held for less time. Most
    /// of them it will still run then; copies of others are of no effect, since their fingerprints do not come.
    pub fn copy_ahead(&mut self, tid: Tid, pointer: u64, space: &Space) {
        let standing = Standing {
            pointer,
            registers: [0; GPRS],
        };
        self.blocks.begin(tid, &[]);
        let is_new = |code, fingerprint| self.met.is_new(code, fingerprint);
        (self.walk)(&self.blocks, space, &standing, &is_new, &mut self.walked);
        self.ahead.extend(self.walked.codes.list());
    }

    /// The code objects that were copied since the last call.
    pub fn codes(&mut self) -> Vec<CodeCopy> {
        let mut codes = std::mem::take(&mut self.ahead);
        codes.extend(self.walked.codes.list());
        self.walked.codes.clear();
        codes
    }

    /// Was a code object not copied that was not met before?
    pub fn missed_code(&self) -> bool {
        self.walked.codes.missed
    }

    /// Adds the interpreter frames of the sample just taken. `ahead` becomes what the walk has read.
    pub fn finish(&mut self, sample: &mut Sample, ahead: &mut Vec<u64>) {
        self.blocks.touched(ahead);
        sample.python.clone_from(&self.walked.python);
        sample.marks.clone_from(&self.walked.marks);
        sample.walk = self.walked.walk;
    }
}

fn standing(words: &UserRegs) -> Standing {
    Standing {
        pointer: words.thread_pointer(),
        registers: words.general(),
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

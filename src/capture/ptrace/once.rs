//! One sample of a thread, for those who look once. A thread that sleeps is not stopped: where it stands does not change
//! while it does not run, and that it did not run is checked. A thread that runs is held.

use std::sync::Arc;
use std::time::Duration;

use super::hold::Holder;
use crate::arch::Regs;
use crate::capture::Walk;
use crate::capture::met::Met;
use crate::layout::Space;
use crate::process::sys;
use crate::process::task::{self, Blocked, Still};
use crate::process::trace::{self, News, Stopped};
use crate::sample::{CodeCopy, Pid, Sample, Tid, Walked};

/// Looks at a thread that moves on meanwhile.
const TRIES: usize = 8;
/// How long a thread that was asked to stop is waited for: it may wait for a CPU.
const LONGEST: u64 = 2_000_000_000;
/// How long it is waited for without giving up our CPU. Whoever does that for long is not let go on when it matters.
const AT_ONCE: u64 = 200_000;

/// How a thread was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It did not run, and was left alone.
    Asleep,
    /// It was held, for at most so many ns.
    Held(u64),
}

/// Why a thread was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// It has ended.
    Gone,
    /// It may not be traced: no right, or another tracer has it.
    Refused,
    /// It moved on whenever it was looked at.
    Restless,
    /// It did not stop when asked to: it waits for a CPU, or in the kernel for what cannot be interrupted.
    Late,
}

/// A thread as it was at one instant.
#[derive(Clone, Debug)]
pub struct Seen<T> {
    pub sample: Sample,
    /// Code objects that were copied.
    pub codes: Vec<CodeCopy>,
    pub how: How,
    /// As in [`Still`]; `R` for one that was held.
    pub state: char,
    pub blocked: Option<Blocked>,
    /// In the kernel, innermost first; if asked for and permitted.
    pub kernel: Option<Vec<String>>,
    /// What `during` found.
    pub found: T,
}

/// Whom to look at, and how.
pub struct Once<'a, T> {
    pub pid: Pid,
    pub space: &'a Space,
    pub walk: Walk,
    /// Code objects that need not be copied any more.
    pub met: Arc<Met>,
    /// Memory that stacks may lie in (start and end), ascending.
    pub writable: &'a [(u64, u64)],
    /// Names of kernel functions too.
    pub kernel: bool,
    /// Threads that run are left alone: they count as `Restless`.
    pub never_stop: bool,
    /// Called while the thread still stands where it was read, with its interpreter frames, its thread pointer (0: not
    /// known), and whether it is held: then it must be quick.
    pub during: &'a (dyn Fn(&Walked, u64, bool) -> T + Sync),
}

/// A thread to look at.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub tid: Tid,
    /// Its thread pointer, where that is known otherwise.
    pub pointer: Option<u64>,
    /// Hold it, even if it sleeps.
    pub hold: bool,
}

impl<T: Send> Once<'_, T> {
    /// Looks at each thread, one after the other. At the end no thread is traced any more, whatever happened.
    pub fn look(&self, targets: &[Target]) -> Vec<(Tid, Result<Seen<T>, Lack>)> {
        // A thread of its own: when it ends, the kernel lets go of all that it traced.
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| {
                // So that nobody is held for longer than it takes. Where that is not permitted, it is as it is.
                sys::go_first();
                let (mut holder, mut late) = (Holder::new(self.walk, self.met.clone()), Vec::new());
                let one = |t: &Target| (t.tid, self.one(&mut holder, &mut late, t));
                targets.iter().map(one).collect::<Vec<_>>()
            });
            looking.join().unwrap_or_default()
        })
    }

    fn one(&self, holder: &mut Holder, late: &mut Vec<Tid>, target: &Target) -> Result<Seen<T>, Lack> {
        // Those of tries in vain count too: they are not copied again.
        let mut codes = Vec::new();
        for _ in 0..TRIES {
            let before = Still::read(self.pid, target.tid).ok_or(Lack::Gone)?;
            if before.runs() && self.never_stop {
                return Err(Lack::Restless);
            }
            let seen = if before.runs() || target.hold {
                self.held(holder, late, target, before.state)
            } else {
                self.asleep(holder, target, before)
            };
            codes.extend(holder.codes());
            match seen {
                Ok(seen) => return Ok(Seen { codes, ..seen }),
                Err(Lack::Restless) => {}
                Err(lack) => return Err(lack),
            }
        }
        Err(Lack::Restless)
    }

    /// A thread that does not run. `Restless` if it has run meanwhile.
    fn asleep(&self, holder: &mut Holder, target: &Target, before: Still) -> Result<Seen<T>, Lack> {
        let (pid, tid) = (self.pid, target.tid);
        let blocked = task::blocked(pid, tid).map_err(|_| Lack::Refused)?;
        let blocked = blocked.ok_or(Lack::Restless)?;
        let regs = Regs::from_ip_sp(blocked.ip, blocked.sp);
        let at = self.writable.partition_point(|(_, end)| *end <= blocked.sp);
        let memory = self.writable.get(at).filter(|(start, _)| *start <= blocked.sp);
        let end = memory.map_or(0, |(_, end)| *end);
        let (sample, walked) = holder.look((pid, tid), regs, target.pointer, end, self.space);
        let found = (self.during)(walked, target.pointer.unwrap_or(0), false);
        let kernel = self.kernel.then(|| task::kernel_stack(pid, tid)).flatten();
        let after = Still::read(pid, tid).ok_or(Lack::Gone)?;
        if after != before {
            return Err(Lack::Restless);
        }
        Ok(Seen {
            sample,
            codes: Vec::new(),
            how: How::Asleep,
            state: before.state,
            blocked: Some(blocked),
            kernel,
            found,
        })
    }

    /// Holds a thread.
    fn held(&self, holder: &mut Holder, late: &mut Vec<Tid>, target: &Target, state: char) -> Result<Seen<T>, Lack> {
        let (pid, tid) = (self.pid, target.tid);
        let blocked = task::blocked(pid, tid).ok().flatten().filter(|_| state != 'R');
        if let Some(pointer) = target.pointer {
            holder.copy_ahead(tid, pointer, self.space);
        }
        trace::seize_alone(tid).map_err(|_| Lack::Refused)?;
        trace::interrupt(tid).map_err(|_| Lack::Gone)?;
        let (stop, since) = wait(tid, late)?;
        let mut found = None;
        let mut during = |walked: &Walked, pointer| found = Some((self.during)(walked, pointer, true));
        let taken = holder.take_once(stop, pid, self.space, &mut during);
        let held = sys::now() - since;
        match (taken, found) {
            (Ok(sample), Some(found)) => Ok(Seen {
                sample,
                codes: Vec::new(),
                how: How::Held(held),
                state,
                blocked,
                kernel: None,
                found,
            }),
            _ => Err(Lack::Gone),
        }
    }
}

/// Waits until a thread has stopped; also tells a time at which it had not. `late`: threads that were waited for in vain
/// go on when they stop.
fn wait(tid: Tid, late: &mut Vec<Tid>) -> Result<(Stopped, u64), Lack> {
    let begun = sys::now();
    loop {
        late.retain(|tid| trace::next(Some(*tid)).is_none());
        let since = sys::now();
        match trace::next(Some(tid)) {
            Some(News::Stopped(stop)) => return Ok((stop, since)),
            Some(News::Ended(_)) => return Err(Lack::Gone),
            None if since - begun > LONGEST => {
                late.push(tid);
                return Err(Lack::Late);
            }
            // With one CPU it cannot stop before we let it run.
            None if since - begun > AT_ONCE || sys::cpu_count() == 1 => std::thread::sleep(Duration::from_micros(50)),
            None => std::hint::spin_loop(),
        }
    }
}

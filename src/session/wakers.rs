//! Threads that end waits of others: their stacks at that moment.

use rustc_hash::FxHashMap;
use symbolize::Kernel;

use super::Session;
use super::targets::ForkMemory;
use crate::arch::INTERRUPT_ENTRIES;
use crate::cpython::{gil, thread_states};
use crate::event::{Holder, InterruptKind, Pid, Sample, Tid};
use crate::frame::RawFrame;
use crate::process::system::ProcessMemory;
use crate::profile::count_tree::RawNode;
use crate::profile::waits::RawWaker;
use crate::sys;

/// Distinct stacks of wakers that are kept.
const MAX_WAKERS: usize = 1 << 16;
/// Thread states whose thread is kept.
const MAX_STATES: usize = 4096;

/// Stacks of wakers of which the woken thread's sample has not come yet, and those that are kept.
#[derive(Default)]
pub(super) struct Wakers {
    /// By woken thread, with the time at which it was woken.
    pending: FxHashMap<Tid, (u64, PendingWaker)>,
    known: FxHashMap<RawWaker, u32>,
    /// Each once. The nodes are those of [`Session::tree`], where they count nothing.
    pub(super) all: Vec<RawWaker>,
    /// The threads of Python thread states that held an interpreter lock.
    of_states: FxHashMap<(Pid, u64), Tid>,
}

#[derive(Clone, Default)]
pub(super) struct PendingWaker {
    pub(super) waker: RawWaker,
    /// What is between the wait and the waker's stack.
    pub(super) by: Option<RawFrame>,
    pub(super) frames: Vec<RawFrame>,
}

impl Wakers {
    /// Keeps the stack of the waker of `woken` until the sample of that thread comes.
    pub(super) fn add(&mut self, woken: Tid, s: &Sample, node: RawNode, frames: &[RawFrame]) {
        let waker = RawWaker {
            pid: s.pid,
            tid: s.tid,
            node,
        };
        let pending = PendingWaker {
            waker,
            by: Some(RawFrame::WokenBy(s.pid, s.tid)),
            frames: frames.to_vec(),
        };
        self.pending.insert(woken, (s.time, pending));
    }

    /// The same of an interrupt; the waker is not known as a thread.
    fn add_interrupt(&mut self, woken: Tid, s: &Sample, kind: InterruptKind, frames: Vec<RawFrame>) {
        let pending = PendingWaker {
            waker: RawWaker::default(),
            by: Some(RawFrame::Interrupt(kind)),
            frames,
        };
        self.pending.insert(woken, (s.time, pending));
    }

    /// The waker that ended the interval of this sample, if it was captured.
    pub(super) fn take_waker(&mut self, s: &Sample) -> Option<PendingWaker> {
        let (time, _) = self.pending.get(&s.tid)?;
        if *time == 0 || *time != s.wake_up.time {
            return None;
        }
        self.pending.remove(&s.tid).map(|(_, waker)| waker)
    }

    /// The number of a waker in [`Wakers::all`] plus 1; 0 if there is no room for more.
    pub(super) fn number(&mut self, waker: RawWaker) -> u32 {
        if let Some(number) = self.known.get(&waker) {
            return *number;
        }
        if waker == RawWaker::default() {
            return 0;
        }
        if self.all.len() >= MAX_WAKERS {
            return 0;
        }
        self.all.push(waker);
        let number = self.all.len() as u32;
        self.known.insert(waker, number);
        number
    }
}

/// The function in which a kernel thread does what an interrupt has left to do.
const SOFTIRQ_THREAD: &str = "run_ksoftirqd";
/// Functions between such an entry and the wake-up that say what the interrupt was about, as their names begin.
const KINDS: &[(&str, InterruptKind)] = &[
    ("hrtimer_", InterruptKind::Timer),
    ("__hrtimer_", InterruptKind::Timer),
    ("process_timeout", InterruptKind::Timer),
    ("run_timer_softirq", InterruptKind::Timer),
    ("net_rx_action", InterruptKind::Network),
    ("__napi_poll", InterruptKind::Network),
    ("sock_def_", InterruptKind::Network),
    ("blk_", InterruptKind::Disk),
    ("bio_endio", InterruptKind::Disk),
    ("nvme_", InterruptKind::Disk),
    ("scsi_", InterruptKind::Disk),
    ("virtblk_", InterruptKind::Disk),
];

/// How many of these kernel functions, innermost first, belong to an interrupt, and what it was about; `None`: the
/// thread itself called them. `is_idle`: there is no thread.
fn interrupt(names: &[&str], is_idle: bool) -> Option<(usize, InterruptKind)> {
    let begins = |name: &str, begin: &str| name.starts_with(begin);
    let is_entry = |name: &&str| {
        let mut entries = INTERRUPT_ENTRIES.iter().chain(&[SOFTIRQ_THREAD]);
        entries.any(|begin| begins(name, begin))
    };
    // The innermost one: an interrupt may interrupt another one.
    let entry = names.iter().position(is_entry);
    let inner = match entry {
        Some(entry) => entry + 1,
        None if is_idle => names.len(),
        None => return None,
    };
    let kind = names.iter().take(inner).find_map(|name| {
        let kind = KINDS.iter().find(|(begin, _)| begins(name, begin));
        kind.map(|(_, kind)| *kind)
    });
    Some((inner, kind.unwrap_or(InterruptKind::Other)))
}

/// Kernel functions on the stacks of wakers.
pub(super) struct WakerOptions {
    /// `None`: not readable.
    symbols: Option<Kernel>,
    /// Keep them for threads too.
    pub(super) kernel: bool,
}

impl Session {
    /// Puts the stacks of wakers below the waits that they ended; `kernel`: with the kernel's functions.
    pub fn show_wakers(&mut self, kernel: bool) {
        let symbols = self.system.kernel_symbols().and_then(|text| Kernel::parse(&text).ok());
        self.shown_wakers = Some(WakerOptions { symbols, kernel });
    }

    /// Takes in the waker of thread `woken` if it has no user stack to be shown: an interrupt, a process that is not sampled. False
    /// if it has.
    pub(super) fn foreign_waker(&mut self, woken: Tid, s: &Sample) -> bool {
        let symbols = self.shown_wakers.as_ref().and_then(|shown| shown.symbols.as_ref());
        let names: Vec<&str> = s
            .kernel
            .iter()
            .map(|address| {
                symbols
                    .and_then(|k| k.lookup(*address))
                    .map_or("", |symbol| symbol.name)
            })
            .collect();
        if let Some((inner, kind)) = interrupt(&names, s.tid == 0) {
            let frames = s.kernel[..inner]
                .iter()
                .rev()
                .map(|address| RawFrame::Kernel(*address))
                .collect();
            self.wakers.add_interrupt(woken, s, kind, frames);
            return true;
        }
        if self.targets.contains_key(&s.pid) {
            return false;
        }
        if let Some(name) = self.system.thread_name(s.pid, s.tid) {
            self.threads.entry((s.pid, s.tid)).or_insert(name);
        }
        self.wakers.add(woken, s, 0, &[]);
        true
    }

    /// Divides the wait of the sample that was added last among the threads that held the interpreter lock, if there were
    /// several. `last`: the number of the one that ended it.
    pub(super) fn add_holders(&mut self, s: &Sample, last: u32) {
        let holders = &s.wake_up.holders;
        let (Some(at), true) = (self.waits.lengths.len().checked_sub(1), !holders.is_empty()) else {
            return;
        };
        let ended = self
            .wakers
            .all
            .get((last as usize).wrapping_sub(1))
            .map(|waker| waker.tid);
        // The number of the thread that held it next.
        let mut next = last;
        for (i, (holder, time)) in holders.iter().enumerate() {
            let tid = match holder {
                Holder::Thread(tid) => Some(*tid),
                Holder::State(state) => self.known_thread_of_state(s.pid, *state),
            };
            let number = match tid {
                None => 0,
                // It gave the lock up itself, and until another thread had a CPU to take it, no thread held it.
                Some(tid) if tid == s.tid => next,
                Some(_) if i == 0 && tid == ended => last,
                Some(tid) => self.wakers.number(RawWaker {
                    pid: s.pid,
                    tid,
                    node: 0,
                }),
            };
            next = number;
            // One thread that ended it, and held the lock all the time, is known by the waker alone.
            if holders.len() > 1 || number != last {
                self.waits.shares.push((at as u32, number, *time));
            }
        }
    }

    /// Threads of a process that hold the global lock of an interpreter now.
    pub fn gil_holders(&self, pid: Pid) -> Vec<Tid> {
        let python = self.targets.get(&pid).and_then(|target| target.python.as_ref());
        let Some((python, interpreter)) = python.and_then(|p| Some((p, p.interpreter.as_ref()?))) else {
            return Vec::new();
        };
        let memory = ForkMemory {
            system: &*self.system,
            pid,
            parent: None,
        };
        let states = gil::holders(&memory, &python.runtime, interpreter);
        states
            .into_iter()
            .filter_map(|state| self.thread_of_state(pid, state))
            .collect()
    }

    /// As [`Session::thread_of_state`]; if the thread has ended meanwhile, the one that it belonged to when it was last seen.
    pub(super) fn known_thread_of_state(&mut self, pid: Pid, state: u64) -> Option<Tid> {
        if let Some(tid) = self.thread_of_state(pid, state) {
            if self.wakers.of_states.len() >= MAX_STATES {
                self.wakers.of_states.clear();
            }
            self.wakers.of_states.insert((pid, state), tid);
            return Some(tid);
        }
        self.wakers.of_states.get(&(pid, state)).copied()
    }

    /// The thread that the Python thread state `state` of a process belongs to. What it costs does not depend on how many
    /// threads there are: each wait for the GIL asks for one.
    pub(super) fn thread_of_state(&self, pid: Pid, state: u64) -> Option<Tid> {
        let python = self.targets.get(&pid)?.python.as_ref()?.interpreter?;
        let memory = ProcessMemory(&*self.system, pid);
        let thread_pointer = thread_states::thread_of(&memory, &python, state)?;
        let inside = thread_states::thread_id(&memory, &python, thread_pointer)?;
        self.thread_ids.host(&*self.system, pid, inside, sys::clock::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_distinguished_from_threads() {
        let timer = ["try_to_wake_up", "hrtimer_wakeup", "hrtimer_interrupt"];
        // What surrounds them: the innermost function of the entry comes first, then what was interrupted.
        let (entries, softirqs): (&[&[&str]], &[&str]) = match cfg!(target_arch = "x86_64") {
            true => (
                &[
                    &["asm_sysvec_apic_timer_interrupt", "do_idle"],
                    &["asm_common_interrupt", "asm_sysvec_apic_timer_interrupt"],
                ],
                &["do_softirq"],
            ),
            false => (
                &[
                    &["el1h_64_irq_handler", "el1h_64_irq", "default_idle_call"],
                    &["el0t_64_irq_handler", "el0t_64_irq"],
                    &["el1_irq", "arch_cpu_idle"],
                ],
                &["call_on_irq_stack", "do_softirq_own_stack", "do_softirq"],
            ),
        };
        for entry in entries {
            let stack = [&timer[..], *entry].concat();
            assert_eq!(interrupt(&stack, false), Some((4, InterruptKind::Timer)), "{stack:?}");
        }
        // Packets to the same machine are delivered by the thread that sends them.
        let delivery = ["try_to_wake_up", "sock_def_readable", "net_rx_action"];
        let sender = [&delivery[..], softirqs, &["__local_bh_enable_ip", "tcp_sendmsg"]].concat();
        assert_eq!(interrupt(&sender, false), None);
        let later = [&delivery[..], &["run_ksoftirqd", "kthread"]].concat();
        assert_eq!(interrupt(&later, false), Some((4, InterruptKind::Network)));
        assert_eq!(interrupt(&["try_to_wake_up"], true), Some((1, InterruptKind::Other)));
        assert_eq!(interrupt(&[], false), None);
    }
}

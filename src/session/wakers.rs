//! Threads that end waits of others: their stacks at that moment.

use rustc_hash::FxHashMap;
use symbolize::Kernel;

use super::files::Files;
use super::names::Names;
use super::process::Process;
use super::segment::Segment;
use crate::arch::INTERRUPT_ENTRIES;
use crate::counts::RawNode;
use crate::counts::RawWaker;
use crate::event::{Holder, InterruptKind, Sample, ThreadState, Tid, WaitKind, WakeUp};
use crate::frame::RawFrame;
use crate::process::system::System;

/// Woken threads whose sample has not come yet, at most.
const MAX_PENDING: usize = 1 << 16;

/// Stacks of wakers of which the woken thread's sample has not come yet.
#[derive(Default)]
pub(super) struct Wakers {
    /// By woken thread, with the time at which it was woken.
    pending: FxHashMap<Tid, (u64, PendingWaker)>,
    /// If set: their stacks are shown below the waits that they ended.
    shown: Option<WakerOptions>,
}

/// A thread that ended a wait.
#[derive(Clone, Default)]
pub(super) struct PendingWaker {
    pub(super) waker: RawWaker,
    /// What is between the wait and the waker's stack.
    pub(super) by: Option<RawFrame>,
    pub(super) frames: Vec<RawFrame>,
}

impl Wakers {
    /// Puts the stacks of wakers below the waits that they ended; `kernel`: with the kernel's functions.
    pub(super) fn show(&mut self, system: &dyn System, kernel: bool) {
        let symbols = system.kernel_symbols().and_then(|text| Kernel::parse(&text).ok());
        self.shown = Some(WakerOptions { symbols, kernel });
    }

    pub(super) fn are_shown(&self) -> bool {
        self.shown.is_some()
    }

    /// Whether they are shown with the kernel's functions.
    pub(super) fn have_kernel_frames(&self) -> bool {
        self.shown.as_ref().is_some_and(|shown| shown.kernel)
    }

    /// Keeps the stack of the waker of `woken` until the sample of that thread comes.
    pub(super) fn add(&mut self, woken: Tid, s: &Sample, node: RawNode, frames: &[RawFrame]) {
        let waker = RawWaker {
            pid: s.pid,
            tid: s.tid,
            node,
        };
        let by = RawFrame::WokenBy(s.pid, s.tid);
        self.keep(woken, s.time, waker, by, frames.to_vec());
    }

    fn keep(&mut self, woken: Tid, time: u64, waker: RawWaker, by: RawFrame, frames: Vec<RawFrame>) {
        if self.pending.len() >= MAX_PENDING {
            self.pending.clear();
        }
        let by = Some(by);
        self.pending.insert(woken, (time, PendingWaker { waker, by, frames }));
    }

    /// The nodes of their stacks have gone with their segment.
    pub(super) fn forget_nodes(&mut self) {
        self.pending.clear();
    }

    /// Takes in the waker of thread `woken` if it has no user stack to be shown: an interrupt, a process that is not
    /// sampled. False if it has. `is_sampled`: its process is.
    pub(super) fn add_foreign(
        &mut self,
        woken: Tid,
        s: &Sample,
        is_sampled: bool,
        system: &dyn System,
        names: &mut Names,
    ) -> bool {
        let symbols = self.shown.as_ref().and_then(|shown| shown.symbols.as_ref());
        let functions: Vec<&str> = s
            .kernel
            .iter()
            .map(|address| {
                symbols
                    .and_then(|k| k.lookup(*address))
                    .map_or("", |symbol| symbol.name)
            })
            .collect();
        if let Some((inner, kind)) = interrupt(&functions, s.tid == 0) {
            let frames = s.kernel[..inner]
                .iter()
                .rev()
                .map(|address| RawFrame::Kernel(*address))
                .collect();
            // The waker is not known as a thread.
            self.keep(woken, s.time, RawWaker::default(), RawFrame::Interrupt(kind), frames);
            return true;
        }
        if is_sampled {
            return false;
        }
        if let Some(name) = system.thread_name(s.pid, s.tid) {
            names.threads.entry((s.pid, s.tid)).or_insert(name);
        }
        self.add(woken, s, 0, &[]);
        true
    }

    /// The waker that ended the interval of this sample, if it was captured.
    fn take_waker(&mut self, s: &Sample) -> Option<PendingWaker> {
        let (time, _) = self.pending.get(&s.tid)?;
        if *time == 0 || *time != s.wake_up.time {
            return None;
        }
        self.pending.remove(&s.tid).map(|(_, waker)| waker)
    }

    /// The thread that ended a wait of a sample, in which it was in `state`, with its stack if that was captured.
    pub(super) fn waker(
        &mut self,
        s: &Sample,
        state: ThreadState,
        process: &mut Process,
        files: &Files,
    ) -> Option<PendingWaker> {
        if let Some(waker) = self.take_waker(s) {
            return Some(waker);
        }
        // Without a stack, the thread: the one that released the lock, or had it last.
        let (pid, tid) = match &s.wake_up {
            WakeUp { holder, .. } if *holder != 0 => (s.pid, process.known_thread_of_state(&*files.system, *holder)?),
            WakeUp { waker: Some(waker), .. } if state == ThreadState::Waiting(WaitKind::Gil) => *waker,
            _ => return None,
        };
        Some(PendingWaker {
            waker: RawWaker { pid, tid, node: 0 },
            by: None,
            frames: Vec::new(),
        })
    }
}

/// Divides the wait of the sample that was added to the segment last among the threads that held the interpreter lock, if there
/// were several. `last`: the number of the one that ended it.
pub(super) fn add_holders(s: &Sample, last: u32, process: &mut Process, files: &Files, segment: &mut Segment) {
    let holders = &s.wake_up.holders;
    let (Some(at), true) = (segment.waits.lengths.len().checked_sub(1), !holders.is_empty()) else {
        return;
    };
    let ended = segment.wakers.all().get((last as usize).wrapping_sub(1));
    let ended = ended.map(|waker| waker.tid);
    // The number of the thread that held it next.
    let mut next = last;
    for (i, (holder, time)) in holders.iter().enumerate() {
        let tid = match holder {
            Holder::Thread(tid) => Some(*tid),
            Holder::State(state) => process.known_thread_of_state(&*files.system, *state),
        };
        let number = match tid {
            None => 0,
            // It gave the lock up itself, and until another thread had a CPU to take it, no thread held it.
            Some(tid) if tid == s.tid => next,
            Some(_) if i == 0 && tid == ended => last,
            Some(tid) => segment.wakers.number(RawWaker {
                pid: s.pid,
                tid,
                node: 0,
            }),
        };
        next = number;
        // One thread that ended it, and held the lock all the time, is known by the waker alone.
        if holders.len() > 1 || number != last {
            segment.waits.shares.push((at as u32, number, *time));
        }
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
struct WakerOptions {
    /// `None`: not readable.
    symbols: Option<Kernel>,
    /// Keep them for threads too.
    kernel: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_distinguished_from_threads() {
        let timer = ["try_to_wake_up", "hrtimer_wakeup", "hrtimer_interrupt"];
        // What surrounds them: the innermost function of the entry comes first, then what was interrupted.
        let (entries, softirqs): (&[&[&str]], &[&str]) = if cfg!(target_arch = "x86_64") {
            (
                &[
                    &["asm_sysvec_apic_timer_interrupt", "do_idle"],
                    &["asm_common_interrupt", "asm_sysvec_apic_timer_interrupt"],
                ],
                &["do_softirq"],
            )
        } else {
            (
                &[
                    &["el1h_64_irq_handler", "el1h_64_irq", "default_idle_call"],
                    &["el0t_64_irq_handler", "el0t_64_irq"],
                    &["el1_irq", "arch_cpu_idle"],
                ],
                &["call_on_irq_stack", "do_softirq_own_stack", "do_softirq"],
            )
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

//! When processes were stopped or frozen, as seen from outside: for waits whose own record does not say it. The older BPF program
//! sees no state of a thread, and the freezer of cgroup version 1 leaves threads that sleep where they are.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::event::{Pid, Suspension};
use crate::sys;

/// Processes that are examined each time, some 20 us each, and the time between, ns: 0.4 % of a CPU at most.
const AT_A_TIME: usize = 4;
const INTERVAL: u64 = 20_000_000;
/// Times that are kept of a process.
const MAX_SPANS: usize = 64;

/// The processes, and when each was seen to be stopped or frozen.
#[derive(Debug, Default)]
pub struct Suspensions {
    /// Those to examine, the next one first.
    turns: VecDeque<Pid>,
    /// When some of them are due; ns on CLOCK_MONOTONIC.
    due: u64,
    processes: FxHashMap<Pid, Spans>,
}

/// The times of one process, the latest one last.
#[derive(Debug, Default)]
struct Spans {
    all: VecDeque<Span>,
    /// Whether it was in the last of them when it was last examined.
    is_open: bool,
}

/// From the first time that it was seen to the last one: no more than is known. ns on CLOCK_MONOTONIC.
#[derive(Debug)]
struct Span {
    kind: Suspension,
    from: u64,
    to: u64,
}

impl Spans {
    fn add(&mut self, time: u64, seen: Option<Suspension>) {
        let last = self.all.back_mut().filter(|_| self.is_open);
        self.is_open = seen.is_some();
        match (seen, last) {
            (Some(kind), Some(last)) if last.kind == kind => last.to = time,
            (Some(kind), _) => {
                if self.all.len() >= MAX_SPANS {
                    self.all.pop_front();
                }
                let (from, to) = (time, time);
                self.all.push_back(Span { kind, from, to });
            }
            (None, _) => {}
        }
    }

    fn most_of(&self, from: u64, to: u64) -> Option<Suspension> {
        let within = |kind| -> u64 {
            let spans = self.all.iter().filter(|span| span.kind == kind);
            spans
                .map(|span| span.to.min(to).saturating_sub(span.from.max(from)))
                .sum()
        };
        let most = |kind: &Suspension| within(*kind) > to.saturating_sub(from) / 2;
        [Suspension::Stopped, Suspension::Frozen].into_iter().find(most)
    }
}

impl Suspensions {
    pub fn add_process(&mut self, pid: Pid) {
        if self.processes.insert(pid, Spans::default()).is_none() {
            self.turns.push_front(pid);
        }
    }

    /// Removes a process that has exited.
    pub fn remove_process(&mut self, pid: Pid) {
        self.processes.remove(&pid);
    }

    /// Examines some of the processes, in turn, when it is time. Returns which.
    pub fn examine(&mut self, now: u64) -> Vec<Pid> {
        if now < self.due {
            return Vec::new();
        }
        self.due = now + INTERVAL;
        let number = AT_A_TIME.min(self.turns.len());
        let mut examined: Vec<Pid> = self.turns.drain(..number).collect();
        examined.retain(|pid| self.processes.contains_key(pid));
        for pid in &examined {
            if let Some(spans) = self.processes.get_mut(pid) {
                spans.add(now, sys::cgroup::suspension(*pid));
                self.turns.push_back(*pid);
            }
        }
        examined
    }

    /// Whether the process was stopped, or frozen, for more than half of this time.
    pub fn most_of(&self, pid: Pid, from: u64, to: u64) -> Option<Suspension> {
        self.processes.get(&pid)?.most_of(from, to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_seen_counts() {
        let (stopped, frozen) = (Some(Suspension::Stopped), Some(Suspension::Frozen));
        let mut spans = Spans::default();
        for (time, seen) in [
            (100, None),
            (200, frozen),
            (300, frozen),
            (400, frozen),
            (500, None),
            (600, stopped),
            (700, None),
            (800, stopped),
            (900, frozen),
            (1000, frozen),
        ] {
            spans.add(time, seen);
        }
        for (from, to, expected) in [
            (100, 500, None), // half of it
            (110, 500, frozen),
            (250, 300, frozen),
            (400, 500, None),
            (550, 650, None), // seen once only
            (750, 850, None),
            (850, 1000, frozen),
            (300, 300, None),
            (500, 300, None),
        ] {
            assert_eq!(spans.most_of(from, to), expected, "{from} to {to}");
        }
        for time in 0..1000 {
            spans.add(2000 + time, if time % 2 == 0 { frozen } else { None });
        }
        assert_eq!(spans.all.len(), MAX_SPANS);
    }

    #[test]
    fn a_process_that_is_removed_has_no_turn() {
        let mut all = Suspensions::default();
        let own = std::process::id();
        all.add_process(own);
        all.add_process(own);
        all.examine(1);
        assert_eq!((all.turns.len(), all.most_of(own, 0, 100)), (1, None));
        all.remove_process(own);
        all.examine(2);
        assert_eq!(all.turns.len(), 1, "not yet due");
        all.examine(1 + INTERVAL);
        assert!(all.turns.is_empty() && all.processes.is_empty());
    }
}

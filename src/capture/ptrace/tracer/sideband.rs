//! Sideband records of timers, mappings and names: emitted in order with the samples.

use super::{Tracer, TracerEvent};
use crate::capture::common::sideband::SidebandRecord;
use crate::capture::ptrace::timer::TimerEvents;
use crate::event::{Event, Pid};

/// Where nothing reports mappings: longest time between two scans, ns of the samples' clock.
const RESCAN_INTERVAL: u64 = 20_000_000;

impl Tracer {
    /// Queues the sideband records of a timer, in chronological order.
    pub(super) fn drain_events(&mut self, pid: Pid, events: TimerEvents) {
        if events.lost {
            self.push(TracerEvent::Remapped(pid));
        }
        let Some(m) = self.processes.get_mut(&pid) else { return };
        // Threads and execs are reported by ptrace.
        let wanted = |t: &SidebandRecord| matches!(t.event, Event::Mmap { .. } | Event::Comm { .. });
        let before = m.records.len();
        m.records.extend(events.records.into_iter().filter(wanted));
        if m.records.len() > before {
            m.records.make_contiguous().sort_by_key(|t| t.time);
        }
    }

    /// Emits what was mapped up to this time.
    pub(super) fn emit_mappings(&mut self, pid: Pid, time: u64) {
        let (mut silent, mut ticked) = (false, Vec::new());
        let mut events = TimerEvents::default();
        for (tid, t) in self.threads.iter_mut().filter(|(_, t)| t.pid == pid) {
            match &mut t.timer {
                Some(timer) if timer.event().is_some() => timer.drain_events(&mut events),
                _ => silent = true,
            }
            if events.stops + events.ticks > 0 {
                let (stops, ticks) = (std::mem::take(&mut events.stops), std::mem::take(&mut events.ticks));
                ticked.push((*tid, stops, ticks, events.regs.take()));
            }
        }
        for (tid, stops, ticks, regs) in ticked {
            self.ticked(tid, stops, ticks, regs);
        }
        self.drain_events(pid, events);
        let Some(m) = self.processes.get_mut(&pid) else { return };
        let mut queued = Vec::new();
        if silent && time.saturating_sub(m.scanned) > RESCAN_INTERVAL {
            m.scanned = time;
            queued.push(TracerEvent::Remapped(pid));
        }
        while m.records.front().is_some_and(|t| t.time <= time) {
            queued.extend(m.records.pop_front().map(|t| TracerEvent::Event(t.event)));
        }
        queued.into_iter().for_each(|event| self.push(event));
    }
}

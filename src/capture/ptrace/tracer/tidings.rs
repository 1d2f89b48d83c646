//! What timers tell beside ticks: mappings and names, handed on in order with the samples.

use super::{Note, Tracer};
use crate::capture::ptrace::timer::Told;
use crate::capture::tidings::Tiding;
use crate::sample::{Event, Pid};

/// Where nothing tells of mappings: longest time between two looks, ns of the samples' clock.
const LOOK_AGAIN: u64 = 20_000_000;

impl Tracer {
    /// Keeps what a timer told beside ticks, in order of time.
    pub(super) fn told(&mut self, pid: Pid, told: Told) {
        if told.lost {
            self.push(Note::Remapped(pid));
        }
        let Some(m) = self.members.get_mut(&pid) else { return };
        // Threads and programs are told by ptrace.
        let wanted = |t: &Tiding| matches!(t.event, Event::Mmap { .. } | Event::Comm { .. });
        let before = m.tidings.len();
        m.tidings.extend(told.tidings.into_iter().filter(wanted));
        if m.tidings.len() > before {
            m.tidings.make_contiguous().sort_by_key(|t| t.time);
        }
    }

    /// Tells what was mapped up to this time.
    pub(super) fn tell_mappings(&mut self, pid: Pid, time: u64) {
        let (mut silent, mut ticked) = (false, Vec::new());
        let mut told = Told::default();
        for (tid, t) in self.threads.iter_mut().filter(|(_, t)| t.pid == pid) {
            match &mut t.timer {
                Some(timer) if timer.event().is_some() => timer.told(&mut told),
                _ => silent = true,
            }
            if told.stops + told.ticks > 0 {
                let (stops, ticks) = (std::mem::take(&mut told.stops), std::mem::take(&mut told.ticks));
                ticked.push((*tid, stops, ticks, told.regs.take()));
            }
        }
        for (tid, stops, ticks, regs) in ticked {
            self.ticked(tid, stops, ticks, regs);
        }
        self.told(pid, told);
        let Some(m) = self.members.get_mut(&pid) else { return };
        let mut notes = Vec::new();
        if silent && time.saturating_sub(m.looked) > LOOK_AGAIN {
            m.looked = time;
            notes.push(Note::Remapped(pid));
        }
        while m.tidings.front().is_some_and(|t| t.time <= time) {
            notes.extend(m.tidings.pop_front().map(|t| Note::Event(t.event)));
        }
        notes.into_iter().for_each(|note| self.push(note));
    }
}

//! Intervals off the CPU before the threads that ended them are named.

use super::RawNode;
use crate::event::{Pid, Tid};

/// A thread that ended waits, and what it was doing then, before its stack is named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RawWaker {
    pub pid: Pid,
    pub tid: Tid,
    /// Where its stack ends; 0 if it is not known.
    pub node: RawNode,
}

/// The columns of [`Waits`](crate::profile::waits::Waits) while a profile is recorded.
#[derive(Clone, Debug, Default)]
pub struct RawWaits {
    pub lengths: Vec<u64>,
    pub wakers: Vec<u32>,
    pub holding: Vec<bool>,
    /// Index of a sample, number of a thread, ns: as [`Waits::shares`](crate::profile::waits::Waits::shares).
    pub shares: Vec<(u32, u32, u64)>,
    /// Index of a sample of a suspended task, and for how long it awaited something, ns. By index.
    pub awaits: Vec<(u32, u64)>,
}

impl RawWaits {
    /// Adds a sample: length of its interval, number of its waker, whether it holds the interpreter lock.
    pub fn push(&mut self, length: u64, waker: u32, holding: bool) {
        self.lengths.push(length);
        self.wakers.push(waker);
        self.holding.push(holding);
    }

    /// Adds a sample of a suspended task: for how long it awaited something, ns.
    pub fn push_await(&mut self, time: u64) {
        let row = u32::try_from(self.lengths.len()).unwrap_or(u32::MAX);
        self.awaits.push((row, time));
        self.push(0, 0, false);
    }

    /// How long the task of a sample awaited something, ns; 0: it is not one of a suspended task.
    pub fn awaited(&self, row: usize) -> u64 {
        let at = self.awaits.binary_search_by_key(&row, |(of, _)| *of as usize);
        at.map_or(0, |at| self.awaits[at].1)
    }

    /// Drops the first rows.
    pub fn forget_first(&mut self, rows: usize) {
        self.lengths.drain(..rows.min(self.lengths.len()));
        self.wakers.drain(..rows.min(self.wakers.len()));
        self.holding.drain(..rows.min(self.holding.len()));
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        self.shares.retain(|(row, ..)| *row >= rows);
        self.shares.iter_mut().for_each(|(row, ..)| *row -= rows);
        self.awaits.retain(|(row, _)| *row >= rows);
        self.awaits.iter_mut().for_each(|(row, _)| *row -= rows);
    }

    /// The lengths of some rows, and which of them held the interpreter lock; without wakers.
    pub fn lengths_of(&self, rows: &[usize]) -> RawWaits {
        let mut some = RawWaits::default();
        for row in rows {
            let length = self.lengths.get(*row).copied().unwrap_or(0);
            match self.awaited(*row) {
                0 => some.push(length, 0, self.holding.get(*row).copied().unwrap_or(false)),
                time => some.push_await(time),
            }
        }
        some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_forgotten_and_selected() {
        let mut waits = RawWaits::default();
        for length in 0..4 {
            waits.push(length, length as u32, length == 2);
        }
        waits.shares = vec![(1, 5, 10), (3, 6, 20)];
        waits.forget_first(2);
        assert_eq!((&waits.lengths[..], &waits.wakers[..]), (&[2, 3][..], &[2, 3][..]));
        assert_eq!(
            (&waits.holding[..], &waits.shares[..]),
            (&[true, false][..], &[(1, 6, 20)][..])
        );
        let some = waits.lengths_of(&[1, 7]);
        assert_eq!(
            (some.lengths, some.wakers, some.holding),
            (vec![3, 0], vec![0, 0], vec![false, false])
        );
        waits.forget_first(9);
        assert!(waits.lengths.is_empty() && waits.shares.is_empty());
    }
}

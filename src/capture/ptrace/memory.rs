//! Memory of a held thread. The same places are read in one sample after the other, so what the last one touched is
//! fetched at once: a system call costs more than the bytes do.

use std::cell::RefCell;

use rustc_hash::FxHashMap;

use crate::process::memory::Memory;
use crate::process::sys;
use crate::sample::Pid;

/// Bytes fetched around a place; divides a page, so that a block is readable as a whole or not at all.
const BLOCK: u64 = 256;
/// Blocks fetched in advance.
const MAX_AHEAD: usize = 1024;

/// Blocks of one process, read since [`Blocks::begin`].
#[derive(Default)]
pub struct Blocks(RefCell<State>);

#[derive(Default)]
struct State {
    pid: Pid,
    /// Address -> place in `data`.
    index: FxHashMap<u64, usize>,
    data: Vec<u8>,
    /// Addresses of blocks that were asked for.
    touched: Vec<(u64, bool)>,
    pieces: Vec<(u64, usize)>,
}

impl Blocks {
    /// Forgets all, and fetches these blocks of a process (sorted addresses, from [`Blocks::touched`]).
    pub fn begin(&mut self, pid: Pid, ahead: &[u64]) {
        let s = self.0.get_mut();
        s.pid = pid;
        s.index.clear();
        s.touched.clear();
        s.pieces.clear();
        let ahead = &ahead[..ahead.len().min(MAX_AHEAD)];
        for at in ahead {
            match s.pieces.last_mut() {
                Some((start, len)) if *start + *len as u64 == *at => *len += BLOCK as usize,
                _ => s.pieces.push((*at, BLOCK as usize)),
            }
        }
        let size = ahead.len() * BLOCK as usize;
        if s.data.len() < size {
            s.data.resize(size, 0);
        }
        let got = match s.pieces.len() {
            0 => 0,
            _ => sys::read_memory_pieces(pid, &s.pieces, &mut s.data[..size]),
        };
        for (i, at) in ahead.iter().enumerate().take(got / BLOCK as usize) {
            s.index.insert(*at, s.touched.len());
            debug_assert_eq!(i, s.touched.len());
            s.touched.push((*at, false));
        }
    }

    /// The blocks that were asked for since, for the next [`Blocks::begin`].
    pub fn touched(&mut self, out: &mut Vec<u64>) {
        out.clear();
        out.extend(
            self.0
                .get_mut()
                .touched
                .iter()
                .filter(|(_, used)| *used)
                .map(|(at, _)| *at),
        );
        out.sort_unstable();
    }
}

impl State {
    /// The place in `data` of the block at this address.
    fn block(&mut self, at: u64) -> Option<usize> {
        let i = match self.index.get(&at) {
            Some(i) => *i,
            None => {
                let i = self.touched.len();
                let place = i * BLOCK as usize;
                let end = place + BLOCK as usize;
                if self.data.len() < end {
                    self.data.resize(end * 2, 0);
                }
                let got = sys::read_memory(self.pid, at, &mut self.data[place..end]);
                (got == BLOCK as usize).then_some(())?;
                self.index.insert(at, i);
                self.touched.push((at, false));
                i
            }
        };
        self.touched[i].1 = true;
        Some(i * BLOCK as usize)
    }
}

impl Memory for Blocks {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut s = self.0.borrow_mut();
        let (mut at, mut rest) = (avma, buf);
        while !rest.is_empty() {
            let skip = (at % BLOCK) as usize;
            let n = rest.len().min(BLOCK as usize - skip);
            let Some(place) = s.block(at - skip as u64) else {
                return false;
            };
            let (head, tail) = rest.split_at_mut(n);
            head.copy_from_slice(&s.data[place + skip..place + skip + n]);
            rest = tail;
            match at.checked_add(n as u64) {
                Some(next) => at = next,
                None => return rest.is_empty(),
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_give_what_memory_holds() {
        let own: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        let (base, mut blocks, mut ahead) = (own.as_ptr() as u64, Blocks::default(), Vec::new());
        for round in 0..2 {
            blocks.begin(std::process::id(), &ahead);
            for (from, len) in [(0, 8), (1, 700), (255, 2), (4000, 1000), (0, 5000)] {
                let mut buf = vec![0; len];
                assert!(blocks.read(base + from as u64, &mut buf), "{from} {len} {round}");
                assert_eq!(buf, own[from..from + len], "{from} {len} {round}");
            }
            assert!(!blocks.read(8, &mut [0; 8]), "an unmapped page");
            assert!(!blocks.read(u64::MAX - 3, &mut [0; 8]), "past the last address");
            blocks.touched(&mut ahead);
            assert!(ahead.is_sorted() && ahead.len() >= 20, "{}", ahead.len());
        }
    }
}

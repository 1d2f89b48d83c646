//! Memory of a thread that stands still. The same places are read in one sample after the other, so what the last one
//! touched is fetched at once: a system call costs more than the bytes do.
//!
//! Allocates nothing once it is made, so that it may serve in a signal handler.

use std::cell::RefCell;

use crate::process::memory::{Memory, in_pieces};
use crate::process::sys;
use crate::sample::Tid;

/// Bytes fetched around a place; divides a page, so that a block is readable as a whole or not at all.
const BLOCK: u64 = 256;
/// Blocks that are kept; what is beyond is read each time.
const MOST: usize = 4096;
/// Blocks fetched in advance, at most.
pub const MAX_AHEAD: usize = 1024;
const SLOTS: usize = 2 * MOST;

/// Blocks of one thread's memory, read since [`Blocks::begin`].
pub struct Blocks(RefCell<State>);

struct State {
    tid: Tid,
    /// Hash table: addresses of blocks, the rounds they were put in, and their places among `touched`. Zeros cost no
    /// memory until they are written to.
    index: Vec<u64>,
    rounds: Vec<u32>,
    places: Vec<u32>,
    round: u32,
    data: Vec<u8>,
    /// Addresses of the blocks in `data`, and whether they were asked for.
    touched: Vec<(u64, bool)>,
    pieces: Vec<(u64, usize)>,
}

impl Default for Blocks {
    fn default() -> Blocks {
        Blocks(RefCell::new(State {
            tid: 0,
            index: vec![0; SLOTS],
            rounds: vec![0; SLOTS],
            places: vec![0; SLOTS],
            round: 0,
            data: vec![0; MOST * BLOCK as usize],
            touched: Vec::with_capacity(MOST),
            pieces: Vec::with_capacity(MAX_AHEAD),
        }))
    }
}

impl Blocks {
    /// Forgets all, and fetches these blocks of a thread's memory (sorted addresses, from [`Blocks::touched`]).
    pub fn begin(&mut self, tid: Tid, ahead: &[u64]) {
        let s = self.0.get_mut();
        s.tid = tid;
        s.round = s.round.wrapping_add(1);
        if s.round == 0 {
            s.rounds.fill(0);
            s.round = 1;
        }
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
        let got = sys::read_memory_pieces(tid, &s.pieces, &mut s.data[..size]);
        for at in ahead.iter().take(got / BLOCK as usize) {
            s.insert(*at, false);
        }
    }

    /// The blocks that were asked for since, for the next [`Blocks::begin`]; as many as `out` takes without growing.
    pub fn touched(&mut self, out: &mut Vec<u64>) {
        out.clear();
        let used = self.0.get_mut().touched.iter().filter(|(_, used)| *used);
        let room = out.capacity();
        out.extend(used.map(|(at, _)| *at).take(room));
        out.sort_unstable();
    }
}

impl State {
    fn slot(&self, at: u64) -> usize {
        let mut slot = ((at / BLOCK).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % SLOTS;
        // At most half of the slots are taken.
        while self.rounds[slot] == self.round && self.index[slot] != at {
            slot = (slot + 1) % SLOTS;
        }
        slot
    }

    fn insert(&mut self, at: u64, used: bool) {
        let slot = self.slot(at);
        (self.index[slot], self.rounds[slot]) = (at, self.round);
        self.places[slot] = self.touched.len() as u32;
        self.touched.push((at, used));
    }

    /// The place in `data` of the block at this address; `Some(None)`: there is no room for it.
    fn block(&mut self, at: u64) -> Option<Option<usize>> {
        let slot = self.slot(at);
        if self.rounds[slot] == self.round {
            let i = self.places[slot] as usize;
            self.touched[i].1 = true;
            return Some(Some(i * BLOCK as usize));
        }
        if self.touched.len() == MOST {
            return Some(None);
        }
        let place = self.touched.len() * BLOCK as usize;
        let got = sys::read_memory(self.tid, at, &mut self.data[place..place + BLOCK as usize]);
        (got == BLOCK as usize).then_some(())?;
        self.insert(at, true);
        Some(Some(place))
    }
}

impl Memory for Blocks {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut s = self.0.borrow_mut();
        in_pieces(avma, buf, BLOCK, |start, skip, piece| match s.block(start) {
            None => false,
            Some(Some(place)) => {
                piece.copy_from_slice(&s.data[place + skip..][..piece.len()]);
                true
            }
            Some(None) => sys::read_memory(s.tid, start + skip as u64, piece) == piece.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_give_what_memory_holds() {
        let own: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        let (base, mut blocks, mut ahead) = (own.as_ptr() as u64, Blocks::default(), Vec::with_capacity(MAX_AHEAD));
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

    #[test]
    fn more_than_fits_is_read_all_the_same() {
        let own: Vec<u8> = (0..2 * MOST as u32 * BLOCK as u32).map(|i| (i / 5) as u8).collect();
        let (mut blocks, mut buf) = (Blocks::default(), vec![0; own.len()]);
        blocks.begin(std::process::id(), &[]);
        assert!(blocks.read(own.as_ptr() as u64, &mut buf));
        assert!(buf == own);
        let mut few = Vec::with_capacity(3);
        blocks.touched(&mut few);
        assert_eq!(few.len(), 3);
    }
}

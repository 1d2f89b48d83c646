//! Small pieces of a target's memory, read together: as much of one moment as can be had without a stop.

use std::cell::RefCell;

use super::memory::{Memory, in_pieces};
use crate::event::PAGE;

/// Size of a piece, bytes: it must not cross a page.
const PIECE: usize = 256;
/// Maximum number of pieces; what is beyond is read each time.
const MAX_PIECES: usize = 2048;

/// What was used of a snapshot.
#[derive(Debug, PartialEq, Eq)]
pub struct Used {
    /// Where the pieces start that can be read, in ascending order. (One that cannot be read would end the next snapshot's common
    /// reading.)
    pub starts: Vec<u64>,
    /// All of them were read together.
    pub together: bool,
}

/// Memory of which each piece is read once.
pub struct Snapshot<'a> {
    memory: &'a dyn Memory,
    known: RefCell<KnownPieces>,
}

#[derive(Default)]
struct KnownPieces {
    /// By address.
    pieces: Vec<Piece>,
    /// What is in them.
    bytes: Vec<u8>,
    /// How often [`Snapshot::take_used`] was called.
    round: u32,
    /// Something was used in this round that was not read together with the rest.
    late: bool,
}

struct Piece {
    at: u64,
    /// Its place among the bytes; `None`: not readable.
    place: Option<usize>,
    /// It was not read together with the first ones.
    late: bool,
    /// The last round in which it was used.
    used: Option<u32>,
}

impl<'a> Snapshot<'a> {
    /// Reads the pieces at `starts`, in ascending order, together: those that an earlier snapshot has
    /// [`used`](Snapshot::take_used).
    pub fn new(memory: &'a dyn Memory, starts: &[u64]) -> Snapshot<'a> {
        let starts = &starts[..starts.len().min(MAX_PIECES)];
        // The kernel takes most of the time to find a page: what lies between pieces of one page is read, too.
        let mut ranges: Vec<(u64, usize)> = Vec::with_capacity(starts.len());
        let mut places = Vec::with_capacity(starts.len());
        let mut total = 0;
        for start in starts {
            match ranges.last_mut() {
                Some((at, length)) if *at / PAGE == *start / PAGE => {
                    total -= *length;
                    *length = (*start - *at) as usize + PIECE;
                    places.push(total + *length - PIECE);
                    total += *length;
                }
                _ => {
                    ranges.push((*start, PIECE));
                    places.push(total);
                    total += PIECE;
                }
            }
        }
        let mut bytes = vec![0; total];
        let copied = if ranges.is_empty() {
            0
        } else {
            memory.read_pieces(&ranges, &mut bytes)
        };
        let read = starts.iter().zip(places).filter(|(_, place)| place + PIECE <= copied);
        let piece = |(at, place): (&u64, usize)| Piece {
            at: *at,
            place: Some(place),
            late: false,
            used: None,
        };
        let pieces = read.map(piece).collect();
        Snapshot {
            memory,
            known: RefCell::new(KnownPieces {
                pieces,
                bytes,
                round: 0,
                late: false,
            }),
        }
    }

    /// What was used since the last time.
    pub fn take_used(&self) -> Used {
        let mut known = self.known.borrow_mut();
        let round = known.round;
        known.round += 1;
        let together = !std::mem::take(&mut known.late);
        let used = known
            .pieces
            .iter()
            .filter(|p| p.used == Some(round) && p.place.is_some());
        Used {
            starts: used.map(|p| p.at).collect(),
            together,
        }
    }
}

impl KnownPieces {
    /// Copies a part of the piece at `at`.
    fn copy(&mut self, memory: &dyn Memory, at: u64, skip: usize, part: &mut [u8]) -> bool {
        let index = match self.pieces.binary_search_by_key(&at, |piece| piece.at) {
            Ok(index) => index,
            Err(_) if self.pieces.len() >= MAX_PIECES => {
                self.late = true;
                return memory.read(at + skip as u64, part);
            }
            Err(index) => {
                let place = self.bytes.len();
                self.bytes.resize(place + PIECE, 0);
                let place = memory.read(at, &mut self.bytes[place..]).then_some(place);
                let (late, used) = (true, None);
                self.pieces.insert(index, Piece { at, place, late, used });
                index
            }
        };
        let piece = &mut self.pieces[index];
        piece.used = Some(self.round);
        // What cannot be read is so at any time.
        let Some(place) = piece.place else { return false };
        self.late |= piece.late;
        part.copy_from_slice(&self.bytes[place + skip..][..part.len()]);
        true
    }
}

impl Memory for Snapshot<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let mut known = self.known.borrow_mut();
        in_pieces(avma, buf, PIECE as u64, |at, skip, part| {
            known.copy(self.memory, at, skip, part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readable below 16 pieces; each byte is the number of its piece. The lengths of the reads.
    #[derive(Default)]
    struct Numbered(RefCell<Vec<Vec<usize>>>);

    impl Numbered {
        fn fill(avma: u64, buf: &mut [u8]) -> bool {
            for (byte, at) in buf.iter_mut().zip(0..) {
                *byte = (avma.wrapping_add(at) / PIECE as u64) as u8;
            }
            let end = avma.checked_add(buf.len() as u64);
            end.is_some_and(|end| end <= 16 * PIECE as u64)
        }
    }

    impl Memory for Numbered {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            self.0.borrow_mut().push(vec![buf.len()]);
            Numbered::fill(avma, buf)
        }

        fn read_pieces(&self, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
            self.0
                .borrow_mut()
                .push(pieces.iter().map(|(_, length)| *length).collect());
            let mut copied = 0;
            for (at, length) in pieces {
                if !Numbered::fill(*at, &mut buf[copied..][..*length]) {
                    break;
                }
                copied += length;
            }
            copied
        }
    }

    #[test]
    fn pieces_that_were_needed_before_are_read_together() {
        const P: u64 = PIECE as u64;
        /// Reads words at these pieces, given which were needed before: the reads, and which were needed.
        fn check(before: &[u64], words: &[u64], reads: &[&[usize]], used: &[u64]) {
            let memory = Numbered::default();
            let before: Vec<u64> = before.iter().map(|n| n * P).collect();
            let snapshot = Snapshot::new(&memory, &before);
            for n in words {
                let is_readable = *n < 16;
                assert_eq!(snapshot.u32(n * P + 8).is_some(), is_readable, "{n}");
                assert_eq!(snapshot.u32(n * P + 8), is_readable.then_some(*n as u32 * 0x0101_0101));
            }
            assert_eq!(*memory.0.borrow(), reads, "{before:?} {words:?}");
            let used: Vec<u64> = used.iter().map(|n| n * P).collect();
            let together = used.iter().all(|at| before.contains(at));
            assert_eq!(
                snapshot.take_used(),
                Used { starts: used, together },
                "{before:?} {words:?}"
            );
        }
        check(&[], &[], &[], &[]);
        check(&[1], &[], &[&[PIECE]], &[]);
        check(&[], &[3, 1, 3], &[&[PIECE], &[PIECE]], &[1, 3]);
        check(&[1, 3], &[3, 1], &[&[3 * PIECE]], &[1, 3]);
        check(&[1, 2, 3, 9], &[3, 1], &[&[9 * PIECE]], &[1, 3]);
        check(&[1], &[2], &[&[PIECE], &[PIECE]], &[2]);
        // What comes after one that cannot be read is read for itself.
        check(&[1, 16, 20], &[1, 16], &[&[PIECE, 5 * PIECE], &[PIECE]], &[1]);
        let words = MAX_PIECES as u64 + 100;
        let many: Vec<u64> = (0..words).map(|n| 2 * n * P).collect();
        let memory = Numbered::default();
        let snapshot = Snapshot::new(&memory, &many);
        assert_eq!(snapshot.known.borrow().pieces.len(), 8);
        (0..words).for_each(|n| assert_eq!(snapshot.u32(n * P).is_some(), n < 16));
        let used = snapshot.take_used();
        assert_eq!((used.starts.len(), used.together), (16, false));
        assert_eq!(snapshot.known.borrow().pieces.len(), MAX_PIECES);
    }

    #[test]
    fn what_is_used_is_known_for_each_round() {
        const P: u64 = PIECE as u64;
        let memory = Numbered::default();
        let snapshot = Snapshot::new(&memory, &[P, 2 * P, 3 * P]);
        let round = |words: &[u64]| {
            words.iter().for_each(|n| assert!(snapshot.u32(n * P).is_some()));
            let used = snapshot.take_used();
            (used.starts, used.together)
        };
        assert_eq!(round(&[1, 5]), (vec![P, 5 * P], false));
        assert_eq!(round(&[5, 2]), (vec![2 * P, 5 * P], false));
        assert_eq!(round(&[2]), (vec![2 * P], true));
        assert_eq!(round(&[]), (vec![], true));
    }

    #[test]
    fn reads_may_cross_pieces() {
        let memory = Numbered::default();
        let snapshot = Snapshot::new(&memory, &[0]);
        assert_eq!(snapshot.u64(PIECE as u64 - 4), Some(0x0101_0101_0000_0000));
        assert_eq!(snapshot.u64(16 * PIECE as u64 - 4), None);
        assert_eq!(snapshot.u64(u64::MAX - 3), None);
    }
}

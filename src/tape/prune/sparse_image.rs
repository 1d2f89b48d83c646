//! A file made of few pieces.

use std::collections::BTreeMap;

use crate::event::PAGE;

/// Zeros that are not worth a piece of their own.
const FEW_ZEROS: usize = 12;

/// A file being assembled that is mostly zero: only other bytes are stored.
#[derive(Default)]
pub struct SparseImage(BTreeMap<u64, Vec<u8>>);

impl SparseImage {
    pub fn put(&mut self, at: u64, bytes: &[u8]) {
        for (i, b) in bytes.iter().enumerate().filter(|(_, b)| **b != 0) {
            let at = at + i as u64;
            let page = self.0.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize]);
            page[(at % PAGE) as usize] = *b;
        }
    }

    /// The nonzero pieces.
    pub fn pieces(&self) -> Vec<(u64, Vec<u8>)> {
        let mut pieces: Vec<(u64, Vec<u8>)> = Vec::new();
        let bytes = self.0.iter().flat_map(|(page, bytes)| {
            let start = page * PAGE;
            bytes.iter().enumerate().map(move |(i, b)| (start + i as u64, *b))
        });
        for (at, b) in bytes.filter(|(_, b)| *b != 0) {
            match pieces.last_mut() {
                Some((start, piece)) if at - *start - piece.len() as u64 <= FEW_ZEROS as u64 => {
                    piece.resize((at - *start) as usize, 0);
                    piece.push(b);
                }
                _ => pieces.push((at, vec![b])),
            }
        }
        pieces
    }
}

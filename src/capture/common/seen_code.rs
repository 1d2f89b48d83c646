//! Which code objects were seen before: small and approximate. One that was evicted is copied again.

use crate::event::Pid;
use std::sync::atomic::{AtomicU64, Ordering};

/// Cells for code objects; each may be in either of two.
const CELLS: usize = 1 << 14;

/// Recently seen code objects. Allocates only when created, so it can be used in a signal handler.
pub struct SeenCode(Vec<AtomicU64>);

impl Default for SeenCode {
    fn default() -> SeenCode {
        SeenCode((0..CELLS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl SeenCode {
    /// Records a code object of a process; true if it was not seen recently. Forked processes have different ones at the
    /// same address, with equal fingerprints.
    pub fn is_new(&self, pid: Pid, code: u64, fingerprint: u32) -> bool {
        let key = key(pid, code, fingerprint);
        let Some([first, second]) = self.cells(key) else {
            return true;
        };
        let [a, b] = [first, second].map(|cell| cell.load(Ordering::Relaxed));
        if a == key || b == key {
            return false;
        }
        // Evict one of the two at random.
        let to = if a != 0 && key & 2 != 0 { second } else { first };
        to.store(key, Ordering::Relaxed);
        true
    }

    /// The copy of a code object was discarded: it is new again.
    pub fn forget(&self, pid: Pid, code: u64, fingerprint: u32) {
        let key = key(pid, code, fingerprint);
        for cell in self.cells(key).into_iter().flatten() {
            let _ = cell.compare_exchange(key, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// The two cells that a key may be in.
    fn cells(&self, key: u64) -> Option<[&AtomicU64; 2]> {
        let cell = |at: u64| self.0.get(at as usize % CELLS);
        Some([cell(key >> 50)?, cell(key >> 30)?])
    }

    /// Clears the table: what was copied went to another consumer.
    pub fn clear(&self) {
        self.0.iter().for_each(|cell| cell.store(0, Ordering::Relaxed));
    }
}

fn key(pid: Pid, code: u64, fingerprint: u32) -> u64 {
    let key = code ^ u64::from(fingerprint) << 20 ^ u64::from(pid.rotate_left(16)) << 32;
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seen_objects_are_not_new() {
        let seen = SeenCode::default();
        let hot = |i: u64| (0x7f00_0000_0000 + 432 * i, 7 + i as u32);
        let new = |seen: &SeenCode| (0..500).filter(|i| seen.is_new(1, hot(*i).0, hot(*i).1)).count();
        assert_eq!(new(&seen), 500);
        // A few may evict each other.
        assert!(new(&seen) + new(&seen) < 10);
        let (code, fingerprint) = hot(3);
        assert!(
            seen.is_new(1, code, fingerprint ^ 64),
            "another object at the same address"
        );
        assert!(seen.is_new(2, code, fingerprint), "another process");
        seen.forget(2, code, fingerprint);
        assert!(seen.is_new(2, code, fingerprint), "its copy was discarded");
        seen.clear();
        assert_eq!(new(&seen), 500);
    }
}

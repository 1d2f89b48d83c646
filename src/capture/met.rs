//! Which code objects were met before: small and approximate. One that is crowded out is copied once more.

use std::sync::atomic::{AtomicU64, Ordering};

/// Places for code objects; each has two that it may be in.
const CELLS: usize = 1 << 14;

/// Code objects met lately. Allocates when it is made only, so that it may serve in a signal handler.
pub struct Met(Vec<AtomicU64>);

impl Default for Met {
    fn default() -> Met {
        Met((0..CELLS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Met {
    /// Notes a code object; true if it was not met lately.
    pub fn is_new(&self, code: u64, fingerprint: u32) -> bool {
        let key = (code ^ u64::from(fingerprint) << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let cell = |at: u64| self.0.get(at as usize % CELLS);
        let (Some(first), Some(second)) = (cell(key >> 50), cell(key >> 30)) else {
            return true;
        };
        let [a, b] = [first, second].map(|cell| cell.load(Ordering::Relaxed));
        if a == key || b == key {
            return false;
        }
        // Which of two goes is as good as random.
        let to = if a != 0 && key & 2 != 0 { second } else { first };
        to.store(key, Ordering::Relaxed);
        true
    }

    /// Forgets all: what was copied was for somebody else.
    pub fn clear(&self) {
        self.0.iter().for_each(|cell| cell.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_met_is_not_new() {
        let met = Met::default();
        let hot = |i: u64| (0x7f00_0000_0000 + 432 * i, 7 + i as u32);
        let new = |met: &Met| (0..500).filter(|i| met.is_new(hot(*i).0, hot(*i).1)).count();
        assert_eq!(new(&met), 500);
        // A few may be in each other's way.
        assert!(new(&met) + new(&met) < 10);
        let (code, fingerprint) = hot(3);
        assert!(met.is_new(code, fingerprint ^ 64), "another object at the same address");
        met.clear();
        assert_eq!(new(&met), 500);
    }
}

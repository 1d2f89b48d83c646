//! The rules of the addresses looked up last.

use super::rule::RuleId;
use super::rules::Rules;
use crate::frame::ModuleId;

#[derive(Clone, Copy)]
struct CacheEntry {
    svma: u64,
    module: u32,
    rule: RuleId,
}

/// Rules of the most recently used addresses: a direct-mapped table, so that memory stays bounded and a hit is one
/// cache line. A miss costs two binary searches.
pub struct RuleCache(Box<[CacheEntry; 1 << RuleCache::BITS]>);

impl RuleCache {
    /// 256 KiB: programs measured had some thousand distinct addresses.
    const BITS: u32 = 14;

    /// Where an address is cached.
    #[inline]
    pub fn slot(module: ModuleId, svma: u64) -> usize {
        let mixed = (svma ^ u64::from(module.0).rotate_right(24)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> (64 - Self::BITS)) as usize
    }

    #[inline]
    pub fn get(&self, slot: usize, module: ModuleId, svma: u64) -> Option<RuleId> {
        let entry = self.0[slot];
        (entry.svma == svma && entry.module == module.0).then_some(entry.rule)
    }

    pub fn put(&mut self, slot: usize, module: ModuleId, svma: u64, rule: RuleId) {
        self.0[slot] = CacheEntry {
            svma,
            module: module.0,
            rule,
        };
    }
}

impl Default for RuleCache {
    fn default() -> Self {
        let empty = CacheEntry {
            svma: u64::MAX,
            module: u32::MAX,
            rule: Rules::NONE,
        };
        let entries = vec![empty; 1 << Self::BITS].into_boxed_slice();
        RuleCache(entries.try_into().unwrap_or_else(|_| unreachable!()))
    }
}

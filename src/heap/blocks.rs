//! Blocks of the C heap that are no objects of Python, by their size and, if they are objects of C++, their class.

use std::cmp::Reverse;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::classes::Classes;
use super::glibc::Block;
use crate::process::memory::Memory;
use crate::process::smaps::Smaps;

/// Sizes of each class that are counted apart. Blocks of others count as those of no class.
const MAX_KINDS: usize = 1 << 16;

/// Blocks of one size, and of one class or none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockUse {
    /// Bytes of one that the program may use: it has asked for up to 15 bytes less (for 24, up to 24 less).
    pub usable: u64,
    pub count: u64,
    /// Bytes of all of them, with what the C library needs for itself.
    pub bytes: u64,
    /// The class of C++ objects. `None`: they are none, or of a class without virtual functions.
    pub class: Option<Rc<str>>,
}

/// The text of such blocks: `of 41 to 56 bytes`, behind the class.
pub fn text(usable: u64, class: Option<&str>) -> String {
    let least = if usable <= 24 { 0 } else { usable - 15 };
    let size = format!("of {least} to {usable} bytes");
    class.map_or(size.clone(), |class| format!("{class} {size}"))
}

/// Counts blocks.
pub struct BlockCounter<'a> {
    classes: Classes<'a>,
    /// How many, and their bytes, by bytes that the program may use, and class.
    counts: FxHashMap<(u64, Option<u32>), (u64, u64)>,
    /// Some have a class that they are not counted as.
    is_truncated: bool,
}

impl<'a> BlockCounter<'a> {
    /// `memory` is that of the process with the mappings `smaps`.
    pub fn new(memory: &'a dyn Memory, smaps: &'a Smaps) -> BlockCounter<'a> {
        BlockCounter {
            classes: Classes::new(memory, smaps),
            counts: FxHashMap::default(),
            is_truncated: false,
        }
    }

    pub fn count(&mut self, block: &Block) {
        let first = block.head.first_chunk().copied().map(u64::from_le_bytes);
        let mut class = first.and_then(|word| self.classes.find(word));
        if self.counts.len() >= MAX_KINDS && !self.counts.contains_key(&(block.usable(), class)) {
            self.is_truncated |= class.is_some();
            class = None;
        }
        let sums = self.counts.entry((block.usable(), class)).or_default();
        *sums = (sums.0 + 1, sums.1.saturating_add(block.bytes));
    }

    /// Whether there are more classes than are named.
    pub fn is_truncated(&self) -> bool {
        self.is_truncated || self.classes.is_truncated
    }

    /// Those with most bytes first.
    pub fn finish(self) -> Vec<BlockUse> {
        let row = |(&(usable, class), &(count, bytes)): (&(u64, Option<u32>), &(u64, u64))| BlockUse {
            usable,
            count,
            bytes,
            class: class.and_then(|class| self.classes.name(class).cloned()),
        };
        let mut rows: Vec<BlockUse> = self.counts.iter().map(row).collect();
        rows.sort_by(|a, b| {
            let key = |row: &BlockUse| (Reverse(row.bytes), row.usable);
            key(a).cmp(&key(b)).then_with(|| a.class.cmp(&b.class))
        });
        rows
    }
}

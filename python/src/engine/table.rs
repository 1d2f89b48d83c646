//! An open-addressing hash table from (owner, address) to a number. Nothing is ever removed: a new table is made of what is
//! to stay.

/// Marks a free slot: no object has this address.
const FREE: usize = 0;

#[derive(Clone, Copy)]
struct TableSlot {
    key: usize,
    owner: u32,
    value: u32,
}

const EMPTY: TableSlot = TableSlot {
    key: FREE,
    owner: 0,
    value: 0,
};

/// See the module. Looking up neither allocates nor locks.
#[derive(Clone)]
pub struct PairTable {
    /// A power of two, at most half full.
    slots: Vec<TableSlot>,
    used: usize,
}

impl Default for PairTable {
    fn default() -> PairTable {
        PairTable {
            slots: vec![EMPTY; 32],
            used: 0,
        }
    }
}

impl PairTable {
    #[inline(always)]
    fn start(&self, owner: u32, key: usize) -> usize {
        // Objects are aligned to 16 bytes; the multiplication spreads what differs to the upper half.
        let mixed = ((key >> 4) as u64 ^ (u64::from(owner) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.slots.len() - 1)
    }

    /// The number of this pair, if it has one.
    #[inline(always)]
    pub fn get(&self, owner: u32, key: usize) -> Option<u32> {
        let mut at = self.start(owner, key);
        loop {
            let slot = self.slots.get(at)?;
            if slot.key == key && slot.owner == owner {
                return Some(slot.value);
            }
            if slot.key == FREE {
                return None;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// All pairs (owner, key) with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, usize, u32)> {
        let used = self.slots.iter().filter(|s| s.key != FREE);
        used.map(|s| (s.owner, s.key, s.value))
    }

    /// Gives a pair that has no number one. `key` is not null.
    pub fn insert(&mut self, owner: u32, key: usize, value: u32) {
        if (self.used + 1) * 2 > self.slots.len() {
            let larger = vec![EMPTY; self.slots.len() * 2];
            let slots = std::mem::replace(&mut self.slots, larger);
            for slot in slots.into_iter().filter(|s| s.key != FREE) {
                self.place(slot);
            }
        }
        self.used += 1;
        self.place(TableSlot { key, owner, value });
    }

    fn place(&mut self, slot: TableSlot) {
        let mut at = self.start(slot.owner, slot.key);
        while self.slots.get(at).is_some_and(|s| s.key != FREE) {
            at = (at + 1) & (self.slots.len() - 1);
        }
        if let Some(place) = self.slots.get_mut(at) {
            *place = slot;
        }
    }
}

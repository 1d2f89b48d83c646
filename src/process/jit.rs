//! Objects that a process has registered with debuggers for its JIT code (GDB manual, "JIT Compilation Interface";
//! LLVM, LuaJIT and V8 can do so). Read from its memory while it runs, and not trusted.

use rustc_hash::FxHashSet;

use super::memory::Memory;

/// The variable that points to the list.
pub const DESCRIPTOR: &str = "__jit_debug_descriptor";
/// Maximum number of entries read from one list.
const MAX_ENTRIES: usize = 16384;

/// An entry of the list. With another object or size it counts as a different one: entries are freed and reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Registered {
    /// avma of the entry.
    pub entry: u64,
    /// avma of the object file in memory.
    pub object: u64,
    /// Size of the object, bytes.
    pub size: u64,
}

/// The entries of the list of the descriptor at this avma. The list may change while it is read, and its pointers may
/// be invalid: it ends at an unreadable entry, and where it is circular.
pub fn registered(memory: &dyn Memory, descriptor: u64) -> Vec<Registered> {
    // struct jit_descriptor: version (u32), action (u32), relevant entry, first entry
    let first = || memory.u64(descriptor.checked_add(16)?);
    let mut next = match memory.u32(descriptor) {
        Some(1) => first().unwrap_or(0),
        _ => 0,
    };
    let (mut found, mut seen) = (Vec::new(), FxHashSet::default());
    while next != 0 && found.len() < MAX_ENTRIES && seen.insert(next) {
        // struct jit_code_entry: next, previous, address and size (u64) of the object
        let mut entry = [0; 32];
        if !memory.read(next, &mut entry) {
            break;
        }
        let [after, _, object, size] = words(&entry);
        if object != 0 && size != 0 {
            found.push(Registered {
                entry: next,
                object,
                size,
            });
        }
        next = after;
    }
    found
}

fn words(bytes: &[u8; 32]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readable from 0x1000 on.
    struct At0x1000(Vec<u8>);

    impl Memory for At0x1000 {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            let from = avma.checked_sub(0x1000).map(|at| at as usize);
            let bytes = from.and_then(|at| self.0.get(at..)?.get(..buf.len()));
            bytes.is_some_and(|bytes| {
                buf.copy_from_slice(bytes);
                true
            })
        }
    }

    fn memory(words: &[u64]) -> At0x1000 {
        At0x1000(words.iter().flat_map(|w| w.to_le_bytes()).collect())
    }

    fn objects(memory: &At0x1000) -> Vec<(u64, u64)> {
        registered(memory, 0x1000).iter().map(|r| (r.object, r.size)).collect()
    }

    #[test]
    fn the_list_is_followed_to_its_end() {
        // The descriptor, and from 0x1018 on entries of 32 bytes.
        let list = [
            1, 0, 0x1018, 0x1038, 0, 0x7000, 5, 0x1058, 0x1018, 0, 0, 0, 0x1038, 0x8000, 6,
        ];
        assert_eq!(objects(&memory(&list)), [(0x7000, 5), (0x8000, 6)]);
        let mut circle = list;
        circle[11] = 0x1018;
        assert_eq!(objects(&memory(&circle)), [(0x7000, 5), (0x8000, 6)]);
        let mut wild = list;
        wild[7] = 0xdead_0000;
        assert_eq!(objects(&memory(&wild)), [(0x7000, 5)]);
        let mut newer = list;
        newer[0] = 2;
        assert_eq!(objects(&memory(&newer)), []);
        assert_eq!(objects(&memory(&list[..2])), []);
        assert!(registered(&memory(&list), u64::MAX - 4).is_empty());
    }

    #[test]
    fn an_endless_list_is_truncated() {
        /// Every entry points to the next address.
        struct Endless;
        impl Memory for Endless {
            fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
                buf.fill(1);
                if buf.len() == 32 {
                    buf[..8].copy_from_slice(&(avma + 1).to_le_bytes());
                }
                if buf.len() == 4 {
                    buf.copy_from_slice(&1u32.to_le_bytes());
                }
                true
            }
        }
        assert_eq!(registered(&Endless, 0).len(), MAX_ENTRIES);
    }
}

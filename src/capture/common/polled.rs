//! What a thread polls that sleeps: of one descriptor, what it waits for is known. The BPF program does the same (`polled_by` and
//! `selected_by` in off_cpu.h).

use crate::arch;
use crate::event::Polled;

/// Words of a set of descriptors that are read: `FD_SETSIZE` in glibc's sys/select.h, 2.36, has so many bits.
const MAX_WORDS: u64 = 16;

/// The only descriptor that a system call polls. `read` copies memory of the thread and returns the bytes copied; the thread must
/// still be in the call, which changes the sets of a `select` when it returns.
pub fn polled(call: u64, args: &[u64; 6], read: impl Fn(u64, &mut [u8]) -> usize) -> Option<Polled> {
    let word = |at: u64| {
        let mut bytes = [0; 8];
        (read(at, &mut bytes) == bytes.len()).then(|| u64::from_le_bytes(bytes))
    };
    if arch::POLLS.contains(&call) {
        return (args[1] == 1)
            .then(|| word(args[0]))
            .flatten()
            .and_then(Polled::from_word);
    }
    if !arch::SELECTS.contains(&call) {
        return None;
    }
    // It is the last one below the limit that the call is given, or there are several.
    let [limit, sets @ ..] = *args.first_chunk::<4>()?;
    let descriptor = limit.checked_sub(1)?;
    let last = descriptor / 64;
    if last >= MAX_WORDS {
        return None;
    }
    let mut events = 0;
    for (set, event) in sets.into_iter().zip([Polled::IN, Polled::OUT, Polled::PRIORITY]) {
        for i in (0..=last).filter(|_| set != 0) {
            let only = if i == last { 1 << (descriptor % 64) } else { 0 };
            match word(set.checked_add(8 * i)?)? {
                0 => {}
                bits if bits == only => events |= event,
                _ => return None,
            }
        }
    }
    Polled::from_word(u64::from(events) << 32 | descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With words of memory at 0x1000.
    fn of(call: u64, args: [u64; 4], memory: &[u64]) -> Option<(u32, u16)> {
        let [first, second, third, fourth] = args;
        let read = |at: u64, out: &mut [u8]| match memory.get((at as usize).wrapping_sub(0x1000) / 8) {
            Some(word) => {
                out.copy_from_slice(&word.to_le_bytes());
                8
            }
            None => 0,
        };
        let found = polled(call, &[first, second, third, fourth, 0, 0], read)?;
        Some((found.descriptor, found.events))
    }

    #[test]
    fn one_descriptor_is_found() {
        let (poll, select) = (arch::POLLS[0], arch::SELECTS[0]);
        let at = 0x1000;
        for (call, args, memory, expected) in [
            // The events found last do not count.
            (poll, [at, 1, 0, 0], &[0x11_0001_0000_0005][..], Some((5, 1))),
            (poll, [at, 2, 0, 0], &[0x1_0000_0005, 0x1_0000_0006], None),
            (poll, [at, 1, 0, 0], &[], None),
            (poll, [at, 1, 0, 0], &[0x1_ffff_ffff], None),
            (poll, [at, 1, 0, 0], &[5], None),
            (select, [6, at, 0, 0], &[1 << 5], Some((5, 1))),
            (select, [6, 0, at, at + 8], &[1 << 5, 1 << 5], Some((5, 6))),
            (select, [6, at, at + 8, 0], &[1 << 5, 1 << 4], None),
            (select, [6, at, 0, 0], &[3 << 4], None),
            (select, [6, at, 0, 0], &[1 << 4], None),
            (select, [6, at, 0, 0], &[0], None),
            (select, [66, at, 0, 0], &[0, 2], Some((65, 1))),
            (select, [66, at, 0, 0], &[1, 2], None),
            (select, [66, at, 0, 0], &[0], None),
            (select, [0, at, 0, 0], &[1], None),
            (select, [2000, at, 0, 0], &[0; 40], None),
            (select, [u64::MAX, at, u64::MAX, 0], &[0; 40], None),
            (u64::MAX, [at, 1, 0, 0], &[0x1_0000_0005], None),
        ] {
            assert_eq!(of(call, args, memory), expected, "{call} {args:x?} {memory:x?}");
        }
    }
}

//! Where a thread's stack ends, and a copy of it that skips unreadable pages: for backends that read the memory of a
//! stopped thread.

use crate::event::PAGE;
use crate::limits::{MAX_FAULTS, MAX_STACK, MAX_STACKS};

/// Words of a bit set with one bit for each page of the longest stack.
pub const HOLES: usize = (MAX_STACKS * MAX_STACK / PAGE / 64 + 1) as usize;

/// End of a stack that begins at `sp`: `argc` in the main thread, the thread descriptor in others (glibc and musl put
/// it above the stack); anywhere else (signal stacks, coroutines) a guess. As in sample.bpf.c.
pub fn end(sp: u64, thread_pointer: u64, main: u64, deep: bool) -> u64 {
    let is_main = main >= sp && main - sp < 64 << 20;
    let end = if is_main {
        main + 8
    } else if thread_pointer > sp && thread_pointer - sp < 1 << 30 {
        thread_pointer
    } else {
        sp.saturating_add(65536)
    };
    // More than this only if the end is certain or Python is deep.
    let max_len = MAX_STACK * if is_main || deep { MAX_STACKS } else { 1 };
    end.min(sp.saturating_add(max_len))
}

/// Copies a stack into `out`, skipping pages that cannot be read; returns its length and sets the bits of such pages.
/// `read` copies as much as is readable and returns how much that was. Allocates nothing.
pub fn copy(
    read: &dyn Fn(u64, &mut [u8]) -> usize,
    base: u64,
    end: u64,
    out: &mut [u8],
    holes: &mut [u64; HOLES],
) -> usize {
    *holes = [0; HOLES];
    let len = usize::try_from(end.saturating_sub(base)).map_or(out.len(), |n| n.min(out.len()));
    let (mut at, mut faults) = (0, 0);
    while at < len && faults <= MAX_FAULTS {
        at += read(base + at as u64, &mut out[at..len]).min(len - at);
        if at < len {
            let avma = base + at as u64;
            let page = (avma / PAGE - base / PAGE) as usize;
            if let Some(word) = holes.get_mut(page / 64) {
                *word |= 1 << (page % 64);
            }
            let next = (((avma / PAGE + 1) * PAGE - base) as usize).min(len);
            out[at..next].fill(0);
            (at, faults) = (next, faults + 1);
        }
    }
    at
}

/// The words of a bit set up to the last nonzero one.
pub fn trimmed(holes: &[u64; HOLES]) -> Vec<u64> {
    let n = holes.iter().rposition(|w| *w != 0).map_or(0, |last| last + 1);
    holes[..n].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys;

    #[test]
    fn stack_ends() {
        const SP: u64 = 0x7000_0000;
        let check =
            |thread_pointer: u64, main: u64, expected: u64| assert_eq!(end(SP, thread_pointer, main, false), expected);
        check(0x6000_0000, SP + 0x3000, SP + 0x3008); // main thread
        check(SP + 0x9000, 0x7fff_0000_0000, SP + 0x9000); // another thread
        check(0x6000_0000, 0x6000_0000, SP + 65536); // neither is plausible
        check(SP + 0x900_0000, 0, SP + MAX_STACK);
        check(0, SP + 0x90_0000, SP + MAX_STACKS * MAX_STACK);
        assert_eq!(end(SP, SP + 0x20_0000, 0, true), SP + 0x20_0000);
        assert_eq!(end(u64::MAX - 8, 0, 0, false), u64::MAX);
    }

    #[test]
    fn copies_skip_unreadable_pages() {
        // The first page of memory serves as an unreadable page, which cannot be made without unsafe code.
        let read = |at: u64, out: &mut [u8]| sys::memory::read_memory(std::process::id(), at, out);
        let mut holes = [0; HOLES];
        let source = [7u8; 64];
        let at = source.as_ptr() as u64;
        let mut out = [1; 64];
        assert_eq!(copy(&read, at, at + 64, &mut out, &mut holes), 64);
        assert_eq!((out, trimmed(&holes)), (source, vec![]));
        let mut out = [1; 6000];
        let len = copy(&read, 8, 5008, &mut out, &mut holes);
        assert_eq!((len, trimmed(&holes)), (5000, vec![0b11]));
        assert!(out[..5000].iter().all(|b| *b == 0));
        let mut out = vec![1; 1 << 20];
        let len = copy(&read, 0, 1 << 20, &mut out, &mut holes);
        assert_eq!(len, (MAX_FAULTS + 1) * PAGE as usize, "no more faults than these");
        assert_eq!(trimmed(&holes), [u64::MAX, 1]);
    }
}

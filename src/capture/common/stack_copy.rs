//! Where a thread's stack ends, and a copy of it that skips unreadable pages: for backends that read the memory of a
//! stopped thread.

use crate::arch::{self, DESCRIPTOR_BEGINS_WITH_ADDRESS, MAIN_STACKS, RED_ZONE, Regs, USER_END};
use crate::event::PAGE;
use crate::limits::{FAULTS_OF_REST, MAX_FAULTS, MAX_LEAP, MAX_STACK, MAX_STACKS, PROBES};

/// Words of a bit set with one bit for each page of the longest stack.
pub const HOLES: usize = (MAX_STACKS * MAX_STACK / PAGE / 64 + 1) as usize;

/// Where a stack ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackEnd {
    pub avma: u64,
    /// It is copied beyond a long hole: that it goes on there is known.
    pub crosses_holes: bool,
}

/// Copies memory as far as it is readable, and returns how much that was.
pub type Read<'a> = &'a dyn Fn(u64, &mut [u8]) -> usize;

/// Is there a thread's descriptor, which `thread_pointer` should point to? Others set it to other things (Go without C), below
/// which there may be much that is not this thread's stack. Close by that does not matter.
fn is_descriptor(read: Read<'_>, thread_pointer: u64, distance: u64) -> bool {
    let mut word = [0; 8];
    let mut is_own = || read(thread_pointer, &mut word) == 8 && u64::from_le_bytes(word) == thread_pointer;
    distance <= 65536 || !DESCRIPTOR_BEGINS_WITH_ADDRESS || is_own()
}

/// End of the goroutine's stack that the thread runs on, if it is on one: `g` begins with the stack's bounds
/// (runtime/runtime2.go, Go 1.16 to 1.25).
fn goroutine_end(read: Read<'_>, regs: &Regs, thread_pointer: u64) -> Option<u64> {
    let word = |at: u64| {
        let mut word = [0; 8];
        (read(at, &mut word) == 8).then(|| u64::from_le_bytes(word))
    };
    let g = arch::goroutine(regs, thread_pointer, word)?;
    let (low, high) = (word(g)?, word(g.checked_add(8)?)?);
    (low..high).contains(&regs.sp()).then_some(high)
}

/// End of a thread's stack: `argc` in the main thread, the thread descriptor in others (glibc and musl put it above the stack),
/// what Go says of a goroutine's; anywhere else (signal stacks, coroutines) a guess. As in sample.bpf.c.
pub fn end(read: Read<'_>, regs: &Regs, thread_pointer: u64, main: u64, deep: bool) -> StackEnd {
    const WHOLE: u64 = MAX_STACKS * MAX_STACK;
    let sp = regs.sp().wrapping_sub(RED_ZONE);
    let from_top = USER_END.saturating_sub(sp);
    let (end, crosses_holes, max_len) = if main >= sp && main - sp < 64 << 20 {
        (main + 8, true, WHOLE)
    } else if thread_pointer > sp
        && thread_pointer - sp < 1 << 30
        && is_descriptor(read, thread_pointer, thread_pointer - sp)
    {
        // A stack of the default size or less. What is not on it is further away, or it is small.
        let is_whole = thread_pointer - sp <= WHOLE;
        let max_len = if is_whole || deep { WHOLE } else { MAX_STACK };
        (thread_pointer, is_whole, max_len)
    } else if from_top != 0 && from_top < MAIN_STACKS {
        // A main thread's, not known yet: it ends where nothing can be read.
        (USER_END, true, WHOLE)
    } else {
        match goroutine_end(read, regs, thread_pointer) {
            Some(end) => (end, true, WHOLE),
            None => (sp.saturating_add(65536), false, WHOLE),
        }
    };
    StackEnd {
        avma: end.min(sp.saturating_add(max_len)),
        crosses_holes,
    }
}

/// Copies a stack into `out`, skipping pages that cannot be read; returns its length and sets the bits of such pages.
/// Allocates nothing.
pub fn copy(read: Read<'_>, base: u64, end: StackEnd, out: &mut [u8], holes: &mut [u64; HOLES]) -> usize {
    *holes = [0; HOLES];
    let len = usize::try_from(end.avma.saturating_sub(base)).map_or(out.len(), |n| n.min(out.len()));
    let (mut at, mut faults, mut parts) = (0, 0, 1);
    while at < len {
        at += read(base + at as u64, &mut out[at..len]).min(len - at);
        if at == len {
            break;
        }
        faults += 1;
        let page = (base + at as u64) / PAGE;
        let mut next = (page + 1) * PAGE;
        if faults > MAX_FAULTS {
            if !end.crosses_holes || parts >= MAX_STACKS {
                break;
            }
            next = after_hole(read, page * PAGE, base + len as u64);
            (faults, parts) = (MAX_FAULTS - FAULTS_OF_REST, parts + 1);
        }
        let next = ((next - base) as usize).min(len);
        for page in page..=(base + next as u64 - 1) / PAGE {
            let page = (page - base / PAGE) as usize;
            if let Some(word) = holes.get_mut(page / 64) {
                *word |= 1 << (page % 64);
            }
        }
        out[at..next].fill(0);
        at = next;
    }
    at
}

/// The end of a hole that begins with the page at `from`: searched by leaps that double up to `MAX_LEAP`, then between
/// the last two. What lies between pages of a hole that were tried counts as a part of it. As in sample/write.h.
fn after_hole(read: Read<'_>, mut from: u64, end: u64) -> u64 {
    // (The end of a stack is always there: what is at it was written first.)
    let last = end.saturating_sub(8) / PAGE * PAGE;
    let (mut stride, mut present) = (PAGE, None);
    for _ in 0..PROBES {
        let at = match present {
            Some(present) if present <= from => break,
            Some(present) => from + (present - from) / 2 / PAGE * PAGE,
            None if from >= end => break,
            None => from.saturating_add(stride).min(last),
        };
        if read(at, &mut [0; 8]) == 8 {
            present = Some(at);
        } else {
            (from, stride) = (at.saturating_add(PAGE), (stride * 2).min(MAX_LEAP));
        }
    }
    present.map_or(end, |present| present.max(from))
}

/// The words of a bit set up to the last nonzero one.
pub fn trimmed(holes: &[u64; HOLES]) -> Vec<u64> {
    let n = holes.iter().rposition(|w| *w != 0).map_or(0, |last| last + 1);
    holes[..n].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::GPRS;
    use crate::sys;

    #[test]
    fn stack_ends() {
        const SP: u64 = 0x7000_0000;
        // Every word has its own address.
        let read = |at: u64, out: &mut [u8]| {
            out.copy_from_slice(&at.to_le_bytes()[..out.len()]);
            out.len()
        };
        let at = |sp: u64| Regs::from_ip_sp(0, sp.wrapping_add(RED_ZONE));
        let end = |sp, thread_pointer, main, deep| super::end(&read, &at(sp), thread_pointer, main, deep);
        let check = |thread_pointer: u64, main: u64, avma: u64, crosses_holes: bool| {
            let expected = StackEnd { avma, crosses_holes };
            assert_eq!(end(SP, thread_pointer, main, false), expected);
        };
        check(0x6000_0000, SP + 0x3000, SP + 0x3008, true); // main thread
        check(SP + 0x9000, 0x7fff_0000_0000, SP + 0x9000, true); // another thread
        check(SP + 0x50_0000, 0, SP + 0x50_0000, true);
        check(0x6000_0000, 0x6000_0000, SP + 65536, false); // neither is plausible
        check(SP + 0x900_0000, 0, SP + MAX_STACK, false);
        check(0, SP + 0x90_0000, SP + MAX_STACKS * MAX_STACK, true);
        let deep = end(SP, SP + 0x900_0000, 0, true);
        assert_eq!(deep.avma, SP + MAX_STACKS * MAX_STACK);
        assert_eq!(end(USER_END - 0x3000, 0x6000, 0, false).avma, USER_END);
        let whole = USER_END - MAIN_STACKS + 8;
        assert_eq!(end(whole, 0, 0, false).avma, whole + MAX_STACKS * MAX_STACK);
        assert_eq!(end(whole - 16, 0, 0, false).avma, whole - 16 + 65536);
        assert_eq!(end(u64::MAX - 8, 0, 0, false).avma, u64::MAX);
        if DESCRIPTOR_BEGINS_WITH_ADDRESS {
            let zeros = |_: u64, out: &mut [u8]| out.len();
            let end = |thread_pointer| super::end(&zeros, &at(SP), thread_pointer, 0, false).avma - SP;
            assert_eq!((end(SP + 0x9000), end(SP + 0x9_0000)), (0x9000, 65536));
        }
    }

    #[test]
    fn goroutines_say_where_their_stacks_end() {
        const SP: u64 = 0xc0_0010_2000;
        const G: u64 = 0xc0_0000_0000;
        const THREAD: u64 = 0xc0_0040_0000;
        for (low, high, expected) in [
            (SP - 0x2000, SP + 0x3_0000, Some(SP + 0x3_0000)),
            (SP, SP + 0x1000, Some(SP + 0x1000)),
            (SP + 8, SP + 0x1000, None),
            (SP - 0x2000, SP, None),
        ] {
            let read = |at: u64, out: &mut [u8]| {
                let words = [(THREAD - 8, G), (G, low), (G + 8, high)];
                let word = words.iter().find(|(known, _)| *known == at);
                out.copy_from_slice(&word.map_or(0, |(_, word)| *word).to_le_bytes()[..out.len()]);
                out.len()
            };
            let mut regs = Regs::from_ip_sp(0, SP);
            // (In a register where it is not next to the thread pointer.)
            let thread = if DESCRIPTOR_BEGINS_WITH_ADDRESS { THREAD } else { 0 };
            if thread == 0 {
                regs.gpr[GPRS - 4] = G;
                regs.known = u32::MAX;
            }
            let end = super::end(&read, &regs, thread, 0, false);
            assert_eq!(end.crosses_holes, expected.is_some(), "{low:x} {high:x}");
            assert_eq!(end.avma, expected.unwrap_or(SP - RED_ZONE + 65536), "{low:x} {high:x}");
        }
    }

    /// Copies what lies between these addresses, of which the pages at `absent` cannot be read. Each byte of the others is 7.
    fn copied(from: u64, to: u64, crosses_holes: bool, absent: &[(u64, u64)]) -> (Vec<u8>, Vec<u64>) {
        let is_absent = |page: u64| absent.iter().any(|(from, to)| (*from..*to).contains(&page));
        let read = |at: u64, out: &mut [u8]| {
            let mut done = 0;
            while done < out.len() && !is_absent((at + done as u64) / PAGE) {
                let more = (PAGE - (at + done as u64) % PAGE).min((out.len() - done) as u64) as usize;
                out[done..done + more].fill(7);
                done += more;
            }
            done
        };
        let end = StackEnd {
            avma: to,
            crosses_holes,
        };
        let (mut out, mut holes) = (vec![1; (to - from) as usize], [0; HOLES]);
        let len = copy(&read, from, end, &mut out, &mut holes);
        out.truncate(len);
        let mut at = 0;
        while at < len {
            let page = (from + at as u64) / PAGE - from / PAGE;
            let next = (((from + at as u64) / PAGE + 1) * PAGE - from).min(len as u64) as usize;
            let in_hole = holes[page as usize / 64] >> (page % 64) & 1 == 1;
            let expected = vec![if in_hole { 0 } else { 7 }; next - at];
            assert!(out[at..next] == expected, "{at:x}");
            at = next;
        }
        let pages = 0..HOLES as u64 * 64;
        let of_holes = pages.filter(|page| holes[*page as usize / 64] >> (page % 64) & 1 == 1);
        (out, of_holes.map(|page| page + from / PAGE).collect())
    }

    #[test]
    fn long_holes_are_skipped() {
        let (from, to) = (100 * PAGE + 8, 1500 * PAGE + 16);
        let check = |absent: &[(u64, u64)]| {
            let (bytes, holes) = copied(from, to, true, absent);
            assert_eq!(bytes.len() as u64, to - from, "{absent:?}");
            let expected: Vec<u64> = absent.iter().flat_map(|(from, to)| *from..*to).collect();
            assert!(holes == expected, "{absent:?}: {} of {}", holes.len(), expected.len());
        };
        check(&[]);
        check(&[(101, 102), (110, 150)]);
        check(&[(101, 165)]);
        for end in [166, 167, 168, 180, 700, 1498, 1499, 1500] {
            check(&[(101, end)]);
        }
        check(&[(100, 900), (1000, 1400)]);
        check(&[(101, 400), (480, 800), (870, 880), (900, 1499)]);
        // Where the end is a guess, a long hole is it.
        let (bytes, holes) = copied(from, to, false, &[(101, 400)]);
        assert_eq!(
            (bytes.len() as u64, holes.len() as u64),
            ((165 * PAGE) - from, MAX_FAULTS as u64)
        );
        // The end of a stack that is not there is not searched for long.
        let (bytes, _) = copied(from, to, true, &[(101, 1501)]);
        assert_eq!(bytes.len() as u64, to - from);
        // What lies between two pages of a hole may be missed, and is a part of the hole then.
        let (bytes, holes) = copied(from, to, true, &[(101, 700), (701, 1499)]);
        assert_eq!(bytes.len() as u64, to - from);
        assert!([1397, 1398].contains(&holes.len()), "{}", holes.len());
    }

    #[test]
    fn copies_skip_unreadable_pages() {
        // The first page of memory serves as an unreadable page, which cannot be made without unsafe code.
        let read = |at: u64, out: &mut [u8]| sys::memory::read_memory(std::process::id(), at, out);
        let mut holes = [0; HOLES];
        let source = [7u8; 64];
        let at = source.as_ptr() as u64;
        let mut out = [1; 64];
        let end = |avma| StackEnd {
            avma,
            crosses_holes: false,
        };
        assert_eq!(copy(&read, at, end(at + 64), &mut out, &mut holes), 64);
        assert_eq!((out, trimmed(&holes)), (source, vec![]));
        let mut out = [1; 6000];
        let len = copy(&read, 8, end(5008), &mut out, &mut holes);
        assert_eq!((len, trimmed(&holes)), (5000, vec![0b11]));
        assert!(out[..5000].iter().all(|b| *b == 0));
        let mut out = vec![1; 1 << 20];
        let len = copy(&read, 0, end(1 << 20), &mut out, &mut holes);
        assert_eq!(len, MAX_FAULTS * PAGE as usize, "no more faults than these");
        assert_eq!(trimmed(&holes), [u64::MAX]);
    }
}

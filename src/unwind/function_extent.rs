//! Extent of a function whose symbol states no size, by following its instructions.
//!
//! Hand-written assembler often has such symbols. Up to the next symbol, there may be other functions that have none.

use std::collections::hash_map::Entry;

use crate::arch::{self, Flow};
use rustc_hash::{FxHashMap, FxHashSet};

/// Maximum number of bytes of code that a function is taken to have.
pub const MAX_FUNCTION: u64 = 1 << 20;
/// Maximum number of instructions that are followed.
const MAX_INSTRUCTIONS: usize = 1 << 18;

/// How far a function was followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionExtent {
    /// Bytes from its start up to the end of the last instruction that was reached.
    pub reached: u64,
    /// Whether it may reach others: it jumps to addresses that it computes, or is too long.
    pub is_open: bool,
}

/// Follows the function at `start`. `code`: from its first instruction up to where it certainly has ended.
fn function_extent(code: &[u8], start: u64) -> FunctionExtent {
    let mut seen = FxHashSet::default();
    let mut work = vec![start];
    let mut extent = FunctionExtent {
        reached: 0,
        is_open: false,
    };
    while let Some(from) = work.pop() {
        let Some(rest) = from
            .checked_sub(start)
            .and_then(|at| code.get(usize::try_from(at).ok()?..))
        else {
            continue;
        };
        for i in arch::instructions(rest, from) {
            if !seen.insert(i.address) {
                break;
            }
            if seen.len() > MAX_INSTRUCTIONS {
                extent.is_open = true;
                return extent;
            }
            extent.reached = extent.reached.max(i.next().wrapping_sub(start));
            match i.flow {
                Flow::Next | Flow::Call => {}
                Flow::ConditionalJump => work.extend(i.target),
                Flow::Jump => {
                    work.extend(i.target);
                    break;
                }
                Flow::IndirectJump => {
                    extent.is_open = true;
                    break;
                }
                Flow::Return | Flow::Trap => break,
            }
        }
    }
    extent
}

/// Extents found so far, by start.
#[derive(Default)]
pub struct FunctionExtents(FxHashMap<u64, Option<FunctionExtent>>);

impl FunctionExtents {
    /// The extent of the function at `start`; `code` reads its instructions, up to where it certainly has ended.
    pub fn get<B: AsRef<[u8]>>(&mut self, start: u64, code: impl FnOnce() -> Option<B>) -> Option<FunctionExtent> {
        match self.0.entry(start) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(free) => *free.insert(code().map(|code| function_extent(code.as_ref(), start))),
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn extents() {
        let found = |code: &[u8]| function_extent(code, 0x1000);
        let check = |code: &[u8], expected: u64| {
            let expected = FunctionExtent {
                reached: expected,
                is_open: false,
            };
            assert_eq!(found(code), expected, "{code:x?}");
        };
        check(b"\xc3\x90\x90", 1); // ret
        check(b"\x74\x01\xc3\x90\xc3\x90", 5); // je 1f; ret; 1: nop; ret
        check(b"\x90\xeb\xfd\x90", 3); // a loop
        check(b"\xeb\x7f\x90", 2); // a jump to another function
        check(b"\xeb\x80\x90", 2);
        check(b"\xe8\0\0\0\0\xc3\x90", 6); // a call returns
        check(b"\xcc\x90", 1);
        check(b"\x90\x90", 2); // cut off
        check(b"", 0);
        // je 1f; jmp *%rax; 1: ret; and what follows: perhaps a target of the jump, perhaps another function
        let open = found(b"\x74\x02\xff\xe0\xc3\x90\xc3");
        assert_eq!((open.reached, open.is_open), (5, true));
    }
}

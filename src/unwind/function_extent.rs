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

/// Bytes from the start of a function up to the end of the last instruction that it can reach; `None` if that cannot be
/// seen: it jumps to addresses that it computes, or is too long. `code`: from its first instruction, at `start`, up to
/// where it certainly has ended.
fn function_extent(code: &[u8], start: u64) -> Option<u64> {
    let mut seen = FxHashSet::default();
    let mut work = vec![start];
    let mut end = 0;
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
                return None;
            }
            end = end.max(i.next().wrapping_sub(start));
            match i.flow {
                Flow::Next | Flow::Call => {}
                Flow::ConditionalJump => work.extend(i.target),
                Flow::Jump => {
                    work.extend(i.target);
                    break;
                }
                Flow::IndirectJump => return None,
                Flow::Return | Flow::Trap => break,
            }
        }
    }
    Some(end)
}

/// Extents found so far, by start.
#[derive(Default)]
pub struct FunctionExtents(FxHashMap<u64, Option<u64>>);

impl FunctionExtents {
    /// The extent of the function at `start`, bytes; `code` reads its instructions, up to where it certainly has ended.
    pub fn get<B: AsRef<[u8]>>(&mut self, start: u64, code: impl FnOnce() -> Option<B>) -> Option<u64> {
        match self.0.entry(start) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(free) => *free.insert(code().and_then(|code| function_extent(code.as_ref(), start))),
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn extents() {
        let check =
            |code: &[u8], expected: Option<u64>| assert_eq!(function_extent(code, 0x1000), expected, "{code:x?}");
        check(b"\xc3\x90\x90", Some(1)); // ret
        check(b"\x74\x01\xc3\x90\xc3\x90", Some(5)); // je 1f; ret; 1: nop; ret
        check(b"\x90\xeb\xfd\x90", Some(3)); // a loop
        check(b"\xeb\x7f\x90", Some(2)); // a jump to another function
        check(b"\xeb\x80\x90", Some(2));
        check(b"\xe8\0\0\0\0\xc3\x90", Some(6)); // a call returns
        check(b"\xff\xe0\x90", None); // jmp *%rax
        check(b"\xcc\x90", Some(1));
        check(b"\x90\x90", Some(2)); // cut off
        check(b"", Some(0));
    }
}

//! Counters that show whether a code object may have been replaced: while no code object was created, or none was
//! freed, the object at an address is the same as before and need not be read again.
//!
//! 3.12 and 3.13 number code objects and store the next number (Objects/codeobject.c, `init_code`, v3.12.1 and
//! v3.13.0); 3.14 counts freed code objects and publishes the counter's offset (debug_offsets.rs).

use super::versions::VersionFacts;
use crate::cpython_layout::Layout;
use crate::process::modules::Module;

/// Bytes of `func_version_cache`, which follows the number in 3.13: 4096 pairs of pointers
/// (Include/internal/pycore_function.h, v3.13.0).
const CACHE: usize = 65536;
/// Upper bound for the next number in a file: more code objects than any file contains.
const MAX_INITIAL_VERSION: u32 = 1 << 20;

/// Where the number of the next code object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeNumbers {
    /// In a variable of its own (3.12).
    Variable,
    /// In `_PyRuntime` (3.13).
    Field,
}

/// The layout with the offset of that number added where the version has one, if it is found.
pub fn found(module: &Module, facts: &VersionFacts, runtime: u64, layout: Layout) -> Layout {
    let at = match facts.code_numbers {
        Some(CodeNumbers::Variable) => variable(module),
        Some(CodeNumbers::Field) => field(module),
        None => None,
    };
    let offset = at.and_then(|at| i32::try_from(at.wrapping_sub(runtime) as i64).ok());
    Layout {
        runtime_generation: offset.unwrap_or(0),
        ..layout
    }
}

/// 3.12: a separate variable, with a symbol unless the file is stripped.
fn variable(module: &Module) -> Option<u64> {
    let found = module.symbols_named(&|name| name == b"_Py_next_func_version");
    let [(_, at, 4)] = found[..] else { return None };
    // Code objects that are part of the file already have numbers.
    let first = u32::from_le_bytes(module.read_untracked(at, 4)?.try_into().ok()?);
    (1..MAX_INITIAL_VERSION).contains(&first).then_some(at)
}

/// 3.13: `func_state.next_version` of the main interpreter, part of `_PyRuntime`. Its offset changes between releases,
/// but its initial value in the file is 1, and only one place has a 1 followed by that many zeros.
fn field(module: &Module) -> Option<u64> {
    let section = module.section_untracked(".PyRuntime")?;
    section.svma.checked_add(before_zeros(&section.bytes)?)
}

/// Offset of the only u32 that is 1 and followed by nothing but zeros for the length of the cache. (The cache is
/// aligned to 8 bytes, so four bytes may lie between them.)
fn before_zeros(bytes: &[u8]) -> Option<u64> {
    let mut found = None;
    let (mut last, mut zeros) = ((0, 0), 0);
    let words = bytes
        .chunks_exact(8)
        .map(|w| u64::from_le_bytes(w.try_into().expect("of 8")));
    for (i, word) in words.enumerate() {
        if word != 0 {
            (last, zeros) = ((8 * i as u64, word), 0);
            continue;
        }
        zeros += 8;
        if zeros == CACHE {
            let at = match last {
                (at, 1) => at,
                (at, word) if word >> 32 == 1 => at + 4,
                _ => continue,
            };
            if found.replace(at).is_some() {
                return None;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(parts: &[(u64, usize)], expected: Option<u64>) {
        let words = parts.iter().flat_map(|(word, zeros)| {
            let zeros = std::iter::repeat_n(0, zeros / 8);
            std::iter::once(*word).chain(zeros)
        });
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        assert_eq!(before_zeros(&bytes), expected, "{parts:x?}");
    }

    #[test]
    fn only_one_place_matches() {
        check(&[(7, 16), (1, CACHE), (9, 8)], Some(24));
        check(&[(7, 16), (1 << 32, CACHE + 40)], Some(28)); // 3.13t: after a lock
        check(&[(1 << 32 | 5, CACHE)], Some(4));
        check(&[(1, CACHE - 8), (9, 8)], None);
        check(&[(0x20000, CACHE)], None);
        check(&[(1, CACHE), (1, CACHE)], None);
        check(&[(1, CACHE), (2, CACHE)], Some(0));
        check(&[(0, CACHE)], None);
        check(&[], None);
    }
}

//! Parts that compilers split off the bytecode loop. A stripped file has only the exported symbol, and where the loop
//! was built with profile-guided optimization, that symbol covers 2 KB of it: the rest is a "cold" part elsewhere, 80
//! KB long and without a symbol (Debian's 3.13 to 3.15). The loop jumps into it, and the call frame table has its
//! extent.

use std::collections::BTreeSet;

use gimli::{BaseAddresses, EhFrame, EhFrameHdr, LittleEndian, UnwindSection};

use crate::arch::{self, Flow};
use crate::process::modules::Module;

/// Maximum size of the decoded part of the loop, bytes; the longest seen has about 100 KB.
const MAX_CODE: u64 = 1 << 20;
/// With more parts than this, none is used.
const MAX_PARTS: usize = 8;

/// svma ranges of the functions that the one at `start` jumps into the middle of, as no call does.
pub fn parts(module: &Module, start: u64) -> Vec<(u64, u64)> {
    let (Some(hdr), Some(eh)) = (module.section(".eh_frame_hdr"), module.section(".eh_frame")) else {
        return Vec::new();
    };
    let bases = BaseAddresses::default()
        .set_eh_frame(eh.svma)
        .set_eh_frame_hdr(hdr.svma);
    let Ok(parsed) = EhFrameHdr::new(&hdr.bytes, LittleEndian).parse(&bases, 8) else {
        return Vec::new();
    };
    let frames = EhFrame::new(&eh.bytes, LittleEndian);
    let range = |at: u64| {
        let entry = parsed
            .table()?
            .fde_for_address(&frames, &bases, at, EhFrame::cie_from_offset)
            .ok()?;
        let from = entry.initial_address();
        Some((from, from.checked_add(entry.len())?))
    };
    let Some(body) = range(start).filter(|(from, to)| to - from <= MAX_CODE) else {
        return Vec::new();
    };
    let code = module
        .read_image(body.0, (body.1 - body.0) as usize)
        .unwrap_or_default();
    let inside = |at: u64| range(at).filter(|(from, _)| *from < at);
    let found: BTreeSet<_> = jump_targets(&code, body.0).into_iter().filter_map(inside).collect();
    if found.len() > MAX_PARTS {
        return Vec::new();
    }
    found.into_iter().collect()
}

/// Targets of direct jumps out of this code.
fn jump_targets(code: &[u8], start: u64) -> BTreeSet<u64> {
    let end = start.saturating_add(code.len() as u64);
    arch::instructions(code, start)
        .filter(|i| matches!(i.flow, Flow::ConditionalJump | Flow::Jump))
        .filter_map(|i| i.target)
        .filter(|to| !(start..end).contains(to))
        .collect()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[track_caller]
    fn check(code: &[u8], expected: &[u64]) {
        let found: Vec<u64> = jump_targets(code, 0x1000).into_iter().collect();
        assert_eq!(found, expected, "{code:x?}");
    }

    #[test]
    fn only_jumps_out_of_the_code_are_found() {
        check(b"\xe9\x00\x01\x00\x00\xc3", &[0x1105]); // jmp
        check(b"\x0f\x84\x00\xff\xff\xff", &[0xf06]); // je
        check(b"\xeb\xfe\x74\x00\xc3", &[]); // to itself, to the next one
        check(b"\xe8\x00\x01\x00\x00\xff\xe0", &[]); // a call, an indirect jump
        check(b"\xe9", &[]); // truncated
    }
}

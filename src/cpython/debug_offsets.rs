//! `_Py_DebugOffsets`: the offsets that CPython 3.13 and later publish themselves (Include/internal/pycore_runtime.h,
//! v3.13.0; pycore_debug_offsets.h, v3.14.0 and v3.15.0). Read from the file's image, checked, and preferred to those
//! of `versions`, whose files say where they are.

use crate::cpython_layout::{ABSENT, Layout};
use crate::process::modules::Module;

const COOKIE: &[u8; 8] = b"xdebugpy";
/// Offsets inside small structures (thread state, frame, code object) are below this.
const SMALL: u64 = 1024;
/// Offsets inside `_PyRuntime` and the interpreter state are below this.
const LARGE: u64 = 1 << 24;

/// Position in bytes of each offset in the table of one minor version; the table does not describe itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetPositions {
    /// Total bytes of the table.
    pub size: usize,
    pub interp_modules: usize,
    pub interp_generation: usize,
    pub tstate_next: usize,
    pub tstate_interp: usize,
    pub tstate_first: usize,
    pub tstate_base_frame: usize,
    pub tstate_thread_id: usize,
    pub frame_previous: usize,
    pub frame_code: usize,
    pub frame_instr: usize,
    pub frame_owner: usize,
    pub frame_copy: usize,
    pub code_filename: usize,
    pub code_name: usize,
    pub code_qualname: usize,
    pub code_linetable: usize,
    pub code_firstlineno: usize,
    pub code_adaptive: usize,
    pub code_copies: usize,
    pub bytes_size: usize,
    pub bytes_data: usize,
    pub str_state: usize,
    pub str_length: usize,
    pub str_ascii_data: usize,
    pub str_compact_data: usize,
}

/// The table does not contain this offset. (The word at 0 is the cookie.)
pub const UNPUBLISHED: usize = 0;

/// The first words of a runtime that publishes its offsets: (PY_VERSION_HEX, free-threaded).
pub fn head(module: &Module, runtime: u64) -> Option<(u64, bool)> {
    let head = module.read_image(runtime, 24)?;
    let word = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    head.starts_with(COOKIE).then_some((word(8)?, word(16)? != 0))
}

/// `row` with the published offsets in place of its own; `None` if the table is not plausible.
pub fn published(module: &Module, runtime: u64, positions: &OffsetPositions, row: Layout) -> Option<Layout> {
    decode(&module.read_image(runtime, positions.size)?, positions, row)
}

fn decode(table: &[u8], positions: &OffsetPositions, row: Layout) -> Option<Layout> {
    let word = |at: usize| Some(u64::from_le_bytes(table.get(at..at + 8)?.try_into().ok()?));
    let small = |at: usize| word(at).filter(|v| *v < SMALL).map(|v| v as u16);
    let large = |at: usize| word(at).filter(|v| *v < LARGE).map(|v| v as u32);
    // The table must contain what this build is known to have.
    let optional = |at: usize, row: u16| {
        if at == UNPUBLISHED || row == ABSENT {
            Some(row)
        } else {
            small(at)
        }
    };
    table.starts_with(COOKIE).then_some(())?;
    let ascii = small(positions.str_ascii_data)?;
    let layout = Layout {
        runtime_interpreters: large(40)?,
        interp_next: large(64)?,
        interp_threads: large(72)?,
        interp_modules: large(positions.interp_modules)?,
        interp_generation: match positions.interp_generation {
            UNPUBLISHED => 0,
            at => large(at).filter(|at| at % 8 == 0).unwrap_or(0), // it is optional
        },
        tstate_next: small(positions.tstate_next)?,
        tstate_interp: small(positions.tstate_interp)?,
        tstate_first: small(positions.tstate_first)?,
        tstate_base_frame: optional(positions.tstate_base_frame, row.tstate_base_frame)?,
        tstate_thread_id: small(positions.tstate_thread_id)?,
        frame_previous: small(positions.frame_previous)?,
        frame_code: small(positions.frame_code)?,
        frame_instr: small(positions.frame_instr)?,
        frame_owner: small(positions.frame_owner)?,
        frame_copy: optional(positions.frame_copy, row.frame_copy)?,
        code_filename: small(positions.code_filename)?,
        code_name: small(positions.code_name)?,
        code_qualname: small(positions.code_qualname)?,
        code_linetable: small(positions.code_linetable)?,
        code_firstlineno: small(positions.code_firstlineno)?,
        code_adaptive: small(positions.code_adaptive)?,
        code_copies: optional(positions.code_copies, row.code_copies)?,
        bytes_size: small(positions.bytes_size)?,
        bytes_data: small(positions.bytes_data)?,
        str_state: small(positions.str_state)?,
        str_length: small(positions.str_length)?,
        str_ascii_data: ascii,
        str_compact_data: match positions.str_compact_data {
            // not published: PyCompactUnicodeObject adds utf8_length and utf8
            UNPUBLISHED => ascii + 16,
            at => small(at)?,
        },
        ..row
    };
    // Two fields cannot share an offset, and pointers are aligned.
    let pointers = [layout.frame_previous, layout.frame_code, layout.frame_instr];
    let copy = Some(layout.frame_copy).filter(|at| *at != ABSENT);
    let frame: Vec<u16> = pointers.into_iter().chain(copy).chain([layout.frame_owner]).collect();
    let code = [
        layout.code_filename,
        layout.code_name,
        layout.code_qualname,
        layout.code_linetable,
    ];
    let apart = |fields: &[u16]| fields.iter().enumerate().all(|(i, f)| !fields[..i].contains(f));
    let aligned = pointers.iter().chain(&code).all(|at| at % 8 == 0);
    // The walk reads at most 127 bytes of a frame, and at most 255 of a code object, from first line to name.
    let ends = pointers.map(|at| at + 8).into_iter().chain(copy.map(|at| at + 4));
    let size = ends.chain([layout.frame_owner + 1]).max()?;
    let near = layout.code_firstlineno < layout.code_filename.min(layout.code_name)
        && layout.code_name.max(layout.code_filename) - layout.code_firstlineno < 120
        && (4..64).contains(&layout.str_ascii_data.saturating_sub(layout.str_length));
    (apart(&frame) && apart(&code) && aligned && near && size <= 127).then_some(Layout {
        frame_size: size,
        ..layout
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpython::versions;

    /// A table with the offsets of the row.
    fn table(positions: &OffsetPositions, row: &Layout) -> Vec<u8> {
        let mut t = vec![0u8; positions.size];
        let mut put = |at: usize, v: u64| t[at..at + 8].copy_from_slice(&v.to_le_bytes());
        for (at, v) in [
            (40, row.runtime_interpreters),
            (64, row.interp_next),
            (72, row.interp_threads),
            (positions.interp_modules, row.interp_modules),
        ] {
            put(at, v.into());
        }
        put(positions.interp_generation, row.interp_generation.into());
        for (at, v) in [
            (positions.tstate_next, row.tstate_next),
            (positions.tstate_interp, row.tstate_interp),
            (positions.tstate_first, row.tstate_first),
            (positions.tstate_base_frame, row.tstate_base_frame),
            (positions.tstate_thread_id, row.tstate_thread_id),
            (positions.frame_previous, row.frame_previous),
            (positions.frame_code, row.frame_code),
            (positions.frame_instr, row.frame_instr),
            (positions.frame_owner, row.frame_owner),
            (positions.frame_copy, row.frame_copy),
            (positions.code_filename, row.code_filename),
            (positions.code_name, row.code_name),
            (positions.code_qualname, row.code_qualname),
            (positions.code_linetable, row.code_linetable),
            (positions.code_firstlineno, row.code_firstlineno),
            (positions.code_adaptive, row.code_adaptive),
            (positions.code_copies, row.code_copies),
            (positions.bytes_size, row.bytes_size),
            (positions.bytes_data, row.bytes_data),
            (positions.str_state, row.str_state),
            (positions.str_length, row.str_length),
            (positions.str_ascii_data, row.str_ascii_data),
            (positions.str_compact_data, row.str_compact_data),
        ] {
            // Builds without a field publish zero.
            put(at, if v == ABSENT { 0 } else { v.into() });
        }
        t[..8].copy_from_slice(COOKIE);
        t
    }

    #[test]
    fn published_offsets_are_used_and_checked() {
        let publishing = versions::ALL
            .iter()
            .filter_map(|facts| Some((facts, facts.debug_offsets?)));
        let mut tables = 0;
        for (facts, positions) in publishing {
            let minor = facts.minor;
            for row in [Some(facts.layout), facts.free_threaded].into_iter().flatten() {
                tables += 1;
                let good = table(&positions, &row);
                assert_eq!(
                    decode(&good, &positions, row).map(|got| Layout {
                        frame_size: row.frame_size,
                        ..got
                    }),
                    Some(row),
                    "3.{minor}: a table with the offsets of the row"
                );
                let with = |at: usize, v: u64| {
                    let mut t = good.clone();
                    t[at..at + 8].copy_from_slice(&v.to_le_bytes());
                    decode(&t, &positions, row)
                };
                assert_eq!(with(positions.tstate_first, 80).map(|l| l.tstate_first), Some(80));
                for at in [
                    0,
                    positions.tstate_first,
                    positions.frame_code,
                    positions.str_ascii_data,
                ] {
                    assert_eq!(with(at, u64::MAX), None, "3.{minor}: word {at} is wild");
                }
                for (at, v) in [
                    (positions.frame_code, row.frame_previous.into()),
                    (positions.frame_instr, 57),
                    (positions.frame_owner, 127),
                    (positions.code_name, row.code_filename.into()),
                    (positions.code_name, 4),
                    (positions.code_firstlineno, 200),
                ] {
                    assert_eq!(with(at, v), None, "3.{minor}: word {at} is {v}");
                }
                for len in 0..positions.str_ascii_data {
                    assert_eq!(decode(&good[..len], &positions, row), None);
                }
            }
        }
        assert!(tables >= 6, "three versions with both builds: {tables}");
    }
}

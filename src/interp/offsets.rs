//! `_Py_DebugOffsets`: the offsets that CPython 3.13 and later publish themselves
//! (Include/internal/pycore_runtime.h, v3.13.0). Taken from the file's image, checked, and used over the table's.

use crate::layout::Layout;
use crate::process::modules::Module;

const COOKIE: &[u8; 8] = b"xdebugpy";
/// Bytes of the table in 3.13.
const SIZE: usize = 584;
/// Offsets inside small structures (thread state, frame, code object) that are believed.
const SMALL: u64 = 1024;
/// Offsets inside `_PyRuntime` and the interpreter state that are believed.
const LARGE: u64 = 1 << 24;

/// The row with the published offsets in place of its own; `None` if the table is not one we can believe, or is of a
/// build whose objects are laid out differently (free-threaded).
pub fn published(module: &Module, runtime: u64, row: Layout) -> Option<Layout> {
    decode(&module.read_image(runtime, SIZE)?, row)
}

fn decode(table: &[u8], row: Layout) -> Option<Layout> {
    let word = |at: usize| Some(u64::from_le_bytes(table.get(at..at + 8)?.try_into().ok()?));
    let small = |at: usize| word(at).filter(|v| *v < SMALL).map(|v| v as u16);
    let large = |at: usize| word(at).filter(|v| *v < LARGE).map(|v| v as u32);
    (table.starts_with(COOKIE) && word(16)? == 0).then_some(())?;
    let ascii = small(560)?;
    let layout = Layout {
        runtime_interpreters: large(40)?,
        interp_next: large(64)?,
        interp_threads: large(72)?,
        tstate_next: small(168)?,
        tstate_interp: small(176)?,
        tstate_first: small(184)?,
        tstate_thread_id: small(192)?,
        frame_previous: small(232)?,
        frame_code: small(240)?,
        frame_instr: small(248)?,
        frame_owner: small(264)?,
        code_filename: small(280)?,
        code_name: small(288)?,
        code_qualname: small(296)?,
        code_linetable: small(304)?,
        code_firstlineno: small(312)?,
        code_adaptive: small(344)?,
        bytes_size: small(520)?,
        bytes_data: small(528)?,
        str_state: small(544)?,
        str_length: small(552)?,
        str_ascii_data: ascii,
        // not published: PyCompactUnicodeObject adds utf8_length and utf8
        str_compact_data: ascii + 16,
        ..row
    };
    let frame = [
        layout.frame_previous,
        layout.frame_code,
        layout.frame_instr,
        layout.frame_owner,
    ];
    // The walk reads at most 127 bytes of a frame.
    let size = frame.iter().max()? + 8;
    (size <= 127).then_some(Layout {
        frame_size: size,
        ..layout
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::tables;

    fn table() -> Vec<u8> {
        let row = tables::ROWS.last().expect("rows").1;
        let mut t = vec![0u8; SIZE];
        t[..8].copy_from_slice(COOKIE);
        let mut put = |at: usize, v: u64| t[at..at + 8].copy_from_slice(&v.to_le_bytes());
        for (at, v) in [
            (40, row.runtime_interpreters.into()),
            (64, row.interp_next.into()),
            (72, row.interp_threads.into()),
            (168, row.tstate_next.into()),
            (176, row.tstate_interp.into()),
            (184, row.tstate_first.into()),
            (192, row.tstate_thread_id.into()),
            (232, row.frame_previous.into()),
            (240, row.frame_code.into()),
            (248, row.frame_instr.into()),
            (264, row.frame_owner.into()),
            (280, row.code_filename.into()),
            (288, row.code_name.into()),
            (296, row.code_qualname.into()),
            (304, row.code_linetable.into()),
            (312, row.code_firstlineno.into()),
            (344, row.code_adaptive.into()),
            (520, row.bytes_size.into()),
            (528, row.bytes_data.into()),
            (544, row.str_state.into()),
            (552, row.str_length.into()),
            (560, u64::from(row.str_ascii_data)),
        ] {
            put(at, v);
        }
        t
    }

    #[test]
    fn published_offsets_are_used_and_checked() {
        let row = tables::ROWS.last().expect("rows").1;
        let got = decode(&table(), row).expect("a sane table");
        assert_eq!(
            Layout {
                frame_size: row.frame_size,
                ..got
            },
            row,
            "same offsets as the static row of 3.13"
        );
        let mut shifted = table();
        shifted[184..192].copy_from_slice(&80u64.to_le_bytes());
        assert_eq!(decode(&shifted, row).map(|l| l.tstate_first), Some(80));
        for at in [0, 16, 184, 240, 560] {
            let mut t = table();
            t[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
            assert_eq!(decode(&t, row), None, "word {at} is wild");
        }
        for len in 0..SIZE - 16 {
            assert_eq!(decode(&table()[..len], row), None);
        }
    }
}

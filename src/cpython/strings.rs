//! `str` and `bytes` objects of a target.

use crate::cpython_layout::Layout;
use crate::target::memory::Memory;

/// Maximum length of a name or path, code points; longer ones are truncated.
const MAX_TEXT: u64 = 4096;
/// Maximum size of a line table, bytes; longer ones are not read.
const MAX_BYTES: u64 = 1 << 20;

/// A `str` (PEP 393; Include/cpython/unicodeobject.h, v3.11 and v3.12), truncated at `MAX_TEXT` code points.
pub fn read_str(memory: &dyn Memory, layout: &Layout, at: u64) -> Option<String> {
    Some(read_str_start(memory, layout, at, MAX_TEXT)?.0)
}

/// The first `max` code points of a `str`, and its full length.
pub fn read_str_start(memory: &dyn Memory, layout: &Layout, at: u64, max: u64) -> Option<(String, u64)> {
    let all = memory.u64(at.checked_add(layout.str_length.into())?)?;
    let len = all.min(max) as usize;
    let state = memory.u32(at.checked_add(layout.str_state.into())?)?;
    let state = state.checked_shr(layout.str_kind_bit.into())?;
    let (kind, compact, ascii) = (state & 7, state >> 3 & 1 == 1, state >> 4 & 1 == 1);
    compact.then_some(())?; // names of code objects are always compact
    let data = if ascii {
        layout.str_ascii_data
    } else {
        layout.str_compact_data
    };
    let width = match kind {
        1 | 2 | 4 => kind as usize,
        _ => return None,
    };
    let mut raw = vec![0; len * width];
    memory.read(at.checked_add(data.into())?, &mut raw).then_some(())?;
    let points = raw.chunks_exact(width).map(|c| {
        let mut b = [0; 4];
        b[..width].copy_from_slice(c);
        char::from_u32(u32::from_le_bytes(b)).unwrap_or(char::REPLACEMENT_CHARACTER)
    });
    Some((points.collect(), all))
}

/// A `bytes` object (Include/cpython/bytesobject.h).
pub fn read_bytes(memory: &dyn Memory, layout: &Layout, at: u64) -> Option<Vec<u8>> {
    let len = memory
        .u64(at.checked_add(layout.bytes_size.into())?)
        .filter(|n| *n <= MAX_BYTES)? as usize;
    let mut raw = vec![0; len];
    memory
        .read(at.checked_add(layout.bytes_data.into())?, &mut raw)
        .then_some(raw)
}

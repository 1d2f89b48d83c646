//! `str` and `bytes` objects of a target.

use std::hash::Hasher;

use rustc_hash::FxHasher;

use crate::cpython_layout::Layout;
use crate::escape;
use crate::process::memory::Memory;

/// Maximum length of a name or path, code points; longer ones are cut, and marked.
const MAX_TEXT: u64 = 4096;
/// Maximum number of code points read of a name that is cut, for its mark.
const MAX_MARKED: u64 = 1 << 20;
/// Maximum size of a line table, bytes: one of 32 KiB is large, generated files can have megabytes. Larger ones are not read, and
/// lines are unknown.
const MAX_BYTES: u64 = 16 << 20;

/// A `str` (PEP 393; Include/cpython/unicodeobject.h, v3.11 and v3.12) or an object of a subclass, spelled as
/// [`escape::name`] says. Names longer than `MAX_TEXT` code points are cut, see [`escape::cut_name`].
pub fn read_str(memory: &dyn Memory, layout: &Layout, at: u64) -> Option<String> {
    let text = CodePoints::of(memory, layout, at)?;
    let start = escape::name(text.read(memory, 0, text.length.min(MAX_TEXT))?);
    if text.length <= MAX_TEXT {
        return Some(start);
    }
    let mut hasher = FxHasher::default();
    let end = text.length.min(MAX_MARKED);
    for from in (0..end).step_by(MAX_TEXT as usize) {
        text.read(memory, from, MAX_TEXT.min(end - from))?
            .for_each(|point| hasher.write_u32(point));
    }
    Some(escape::cut_name(&start, text.length, hasher.finish()))
}

/// The first `max` code points of a `str` as a name, and its full length.
pub fn read_str_start(memory: &dyn Memory, layout: &Layout, at: u64, max: u64) -> Option<(String, u64)> {
    let (points, length) = read_code_points(memory, layout, at, max)?;
    Some((escape::name(points), length))
}

/// The first `max` code points of a `str`, and its full length.
pub fn read_code_points(memory: &dyn Memory, layout: &Layout, at: u64, max: u64) -> Option<(Vec<u32>, u64)> {
    let text = CodePoints::of(memory, layout, at)?;
    Some((text.read(memory, 0, text.length.min(max))?.collect(), text.length))
}

/// Where the code points of a `str` are.
struct CodePoints {
    data: u64,
    /// Bytes of each.
    width: u64,
    length: u64,
}

impl CodePoints {
    fn of(memory: &dyn Memory, layout: &Layout, at: u64) -> Option<CodePoints> {
        let length = memory.u64(at.checked_add(layout.str_length.into())?)?;
        let state = memory.u32(at.checked_add(layout.str_state.into())?)?;
        let state = state.checked_shr(layout.str_kind_bit.into())?;
        let (width, is_compact, is_ascii) = (state & 7, state >> 3 & 1 == 1, state >> 4 & 1 == 1);
        matches!(width, 1 | 2 | 4).then_some(())?;
        let own = |data: u16| at.checked_add(data.into());
        let data = match (is_compact, is_ascii) {
            (true, true) => own(layout.str_ascii_data)?,
            (true, false) => own(layout.str_compact_data)?,
            // An object of a subclass has its text elsewhere (`PyUnicodeObject.data`).
            (false, _) => memory.u64(own(layout.str_compact_data)?)?,
        };
        Some(CodePoints {
            data,
            width: width.into(),
            length,
        })
    }

    /// `count` code points from one on.
    fn read(&self, memory: &dyn Memory, from: u64, count: u64) -> Option<impl Iterator<Item = u32> + use<>> {
        let width = self.width as usize;
        let at = self.data.checked_add(from.checked_mul(self.width)?)?;
        let mut raw = vec![0; usize::try_from(count).ok()?.checked_mul(width)?];
        memory.read(at, &mut raw).then_some(())?;
        let point = move |at: usize| {
            let mut bytes = [0; 4];
            bytes[..width].copy_from_slice(&raw[at..at + width]);
            u32::from_le_bytes(bytes)
        };
        Some((0..count as usize).map(move |at| point(at * width)))
    }
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

//! Copies code objects while a thread that runs them is stopped, which keeps them alive. Mirrors `copy_code` in
//! capture/ebpf/sample/code_objects.h, with the same bounds.
//!
//! Allocates nothing, so it may run in a signal handler.

use crate::bytes::u64_at;
use crate::cpython_layout::{ABSENT, Layout, RunningTasks};
use crate::event::{Copies, RUNNING_TASK, RawPyFrame};
use crate::limits::{MAX_LINES, MAX_TEXT};
use crate::target::memory::Memory;

/// Copies the code objects of these frames for which `is_new` returns true. Once `out` is full, `is_new` is not called
/// any more: the remaining ones are copied with later samples.
pub fn new_codes<'a>(
    memory: &dyn Memory,
    layout: &Layout,
    frames: impl Iterator<Item = &'a RawPyFrame>,
    is_new: &dyn Fn(u64, u32) -> bool,
    out: &mut Copies,
) {
    let mut last = 0;
    for f in frames.filter(|f| f.fingerprint != 0) {
        if f.code == last {
            continue;
        }
        last = f.code;
        if out.is_full() {
            out.missed = true;
            return;
        }
        if !is_new(f.code, f.fingerprint) {
            continue;
        }
        match copy(memory, layout, f.code, out) {
            Some(with_lines) => {
                out.end(f.code, f.fingerprint);
                out.missed |= !with_lines;
            }
            None => {
                out.undo();
                out.missed = true;
            }
        }
    }
}

/// Bytes copied of the name of a task, and entries of a small dictionary. As in sample.bpf.c.
const NAME_BYTES: usize = 128;
const DICT_ENTRIES: usize = 5;

/// Copies the name of the task that a thread state runs, as a copy with the fingerprint [`RUNNING_TASK`].
pub fn running_task(memory: &dyn Memory, r: &RunningTasks, state: u64, out: &mut Copies) {
    if out.is_full() {
        return;
    }
    let task = current_task(memory, r, state);
    let Some(name) = task.and_then(|task| memory.u64(task.checked_add(r.name.into())?)) else {
        return;
    };
    let whole = out.part(name, NAME_BYTES, |to| memory.read(name, to)).is_some();
    if whole || out.part(name, NAME_BYTES / 2, |to| memory.read(name, to)).is_some() {
        out.end(task.unwrap_or(0), RUNNING_TASK);
    }
}

/// `None`: none, or several loops run one each.
fn current_task(memory: &dyn Memory, r: &RunningTasks, state: u64) -> Option<u64> {
    if r.current == 0 {
        return memory.u64(state.checked_add(r.task.into())?).filter(|task| *task != 0);
    }
    let keys = memory.u64(r.current.checked_add(r.keys.into())?)?;
    // 8 slots, or their logarithm (3.11 and later).
    if !matches!(memory.u64(keys.checked_add(8)?)? as u8, 3 | 8) {
        return None;
    }
    let mut raw = [0; 24 * DICT_ENTRIES];
    memory
        .read(keys.checked_add(r.entries.into())?, &mut raw)
        .then_some(())?;
    let values = raw.chunks_exact(24).filter_map(|entry| u64_at(entry, 16));
    let mut tasks = values.filter(|value| *value != 0);
    let task = tasks.next()?;
    tasks.next().is_none().then_some(task)
}

/// Copies one code object. False: its line table could not be copied; `None`: nor could its names.
fn copy(memory: &dyn Memory, layout: &Layout, code: u64, out: &mut Copies) -> Option<bool> {
    let raw = out.part(code, layout.code_copied().into(), |to| memory.read(code, to))?;
    let word = |offset: u16| {
        let bytes = raw.get(usize::from(offset)..)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    };
    let (name, filename, lines) = (
        word(layout.code_name)?,
        word(layout.code_filename)?,
        word(layout.code_linetable)?,
    );
    let qualname = if layout.code_qualname == ABSENT {
        name
    } else {
        word(layout.code_qualname)?
    };
    text(memory, layout, name, out)?;
    // Module-level functions use one string object for both names.
    if qualname != name {
        text(memory, layout, qualname, out)?;
    }
    text(memory, layout, filename, out)?;
    let size = memory.u64(lines.wrapping_add(layout.bytes_size.into()));
    let size = size.and_then(|size| usize::try_from(size).ok()?.checked_add(layout.bytes_data.into()));
    let table = size.filter(|size| *size <= MAX_LINES);
    let table = table.and_then(|size| out.part(lines, size, |to| memory.read(lines, to)));
    Some(table.is_some())
}

/// Copies a string object. Layout: strings.rs.
fn text(memory: &dyn Memory, layout: &Layout, at: u64, out: &mut Copies) -> Option<()> {
    let len = memory.u64(at.checked_add(layout.str_length.into())?)?;
    let state = memory.u32(at.checked_add(layout.str_state.into())?)?;
    let state = state.checked_shr(layout.str_kind_bit.into())?;
    if state >> 3 & 1 == 0 {
        // An object of a subclass of `str`, which has its text elsewhere.
        let own = usize::from(layout.str_compact_data) + 8;
        let data = memory.u64(at.checked_add(layout.str_compact_data.into())?)?;
        let size = usize::try_from(len).ok()?.checked_mul((state & 7) as usize)?;
        let size = Some(size).filter(|size| *size <= MAX_TEXT)?;
        out.part(at, own, |to| memory.read(at, to))?;
        return out.part(data, size, |to| memory.read(data, to)).map(|_| ());
    }
    let data = if state >> 4 & 1 == 1 {
        layout.str_ascii_data
    } else {
        layout.str_compact_data
    };
    let len = usize::try_from(len).ok()?.checked_mul((state & 7) as usize)?;
    let size = len.checked_add(data.into()).filter(|size| *size <= MAX_TEXT)?;
    out.part(at, size, |to| memory.read(at, to)).map(|_| ())
}

//! Copies code objects while a thread that runs them is stopped, which keeps them alive. Mirrors `copy_code` in
//! capture/ebpf/sample/code_objects.h, with the same bounds.
//!
//! Allocates nothing, so it may run in a signal handler.

use crate::bytes::u64_at;
use crate::cpython_layout::{ABSENT, Layout, RunningTasks};
use crate::event::{Copies, RUNNING_TASK, RawPyFrame};
use crate::limits::{MAX_LINES, MAX_TEXT};
use crate::process::memory::Memory;

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

/// Bytes copied of the name of a task, as many as there are; tasks that await each other, cells of a closure, and entries of a
/// small dictionary. As in sample.bpf.c.
const NAME_SIZES: [usize; 3] = [256, 128, 64];
const MAX_CHAIN: usize = 8;
const MAX_CELLS: u64 = 8;
const DICT_ENTRIES: usize = 5;

/// Copies the names of the tasks that run, the thread state's own among them, each followed by those that await it, as
/// copies with the fingerprint [`RUNNING_TASK`]: first an empty part at the frame of the task's coroutine, or at 0 for
/// one that awaits the last, then the name.
pub fn running_tasks(memory: &dyn Memory, r: &RunningTasks, state: u64, out: &mut Copies) {
    let objects = TaskObjects { memory, r };
    let tasks = match r.current {
        0 => objects.word(state, r.task).map(|task| [task, 0, 0, 0, 0]),
        _ => current_tasks(memory, r),
    };
    for task in tasks.unwrap_or_default().into_iter().filter(|task| *task != 0) {
        let Some(frame) = objects.frame(task) else { continue };
        let (mut task, mut frame) = (task, frame);
        for _ in 0..MAX_CHAIN {
            if out.is_full() {
                return;
            }
            if objects.copy(task, frame, out).is_none() {
                out.undo();
                break;
            }
            out.end(task, RUNNING_TASK);
            let Some(awaiter) = objects.awaiter(task) else { break };
            (task, frame) = (awaiter, 0);
        }
    }
}

/// Objects of asyncio while a thread is stopped. A word that is null counts as missing.
struct TaskObjects<'a> {
    memory: &'a dyn Memory,
    r: &'a RunningTasks,
}

impl TaskObjects<'_> {
    fn word(&self, object: u64, offset: u16) -> Option<u64> {
        let word = self.memory.u64(object.checked_add(offset.into())?)?;
        (word != 0).then_some(word)
    }

    /// avma of the frame of a task's coroutine.
    fn frame(&self, task: u64) -> Option<u64> {
        let coroutine = self.word(task, self.r.coroutine)?;
        if self.r.frame_is_pointer {
            self.word(coroutine, self.r.frame)
        } else {
            coroutine.checked_add(self.r.frame.into())
        }
    }

    fn copy(&self, task: u64, frame: u64, out: &mut Copies) -> Option<()> {
        let named = if self.r.coroutine_has_name {
            self.word(task, self.r.coroutine)?
        } else {
            task
        };
        let name = self.word(named, self.r.name)?;
        out.part(frame, 0, |_| true)?;
        // The object may lie at the end of what is mapped.
        let copied = |size| out.part(name, size, |to| self.memory.read(name, to)).map(|_| ());
        NAME_SIZES.into_iter().find_map(copied)
    }

    /// The task that awaits another one: directly, or through a future that functions like `gather` and `wait` create. Their
    /// callbacks refer to it in a closure, or as an argument. `None`: none, several, or in another way.
    fn awaiter(&self, task: u64) -> Option<u64> {
        let r = self.r;
        if r.awaited_by != 0 {
            let mut is_set = [0];
            let at = task.checked_add(r.awaited_by_is_set.into())?;
            (self.memory.read(at, &mut is_set) && is_set == [0]).then_some(())?;
            return self.word(task, r.awaited_by);
        }
        let callback = self.word(task, r.callback)?;
        let through = |future: u64| self.waiter(self.word(future, r.callback)?, future);
        let in_closure = || {
            let cells = self.word(callback, r.closure)?;
            let count = self.word(cells, r.head)?.min(MAX_CELLS);
            let mut cells = (0..count).filter_map(|i| self.word(cells, r.items.checked_add(8 * i as u16)?));
            cells.find_map(|cell| through(self.word(cell, r.head)?))
        };
        let argument = || through(self.word(self.word(callback, r.head.checked_add(8)?)?, r.items)?);
        let direct = self.waiter(callback, task);
        direct.or_else(in_closure).or_else(argument)
    }

    /// The task that a callback resumes, if it awaits this future.
    fn waiter(&self, callback: u64, future: u64) -> Option<u64> {
        let r = self.r;
        let waits = |task: &u64| self.word(*task, r.waiter) == Some(future);
        let first = self.word(callback, r.head).filter(waits);
        first.or_else(|| self.word(callback, r.head.checked_add(8)?).filter(waits))
    }
}

/// The tasks of all event loops that run one.
fn current_tasks(memory: &dyn Memory, r: &RunningTasks) -> Option<[u64; DICT_ENTRIES]> {
    let keys = memory.u64(r.current.checked_add(r.keys.into())?)?;
    // 8 slots, or their logarithm (3.11 and later).
    if !matches!(memory.u64(keys.checked_add(8)?)? as u8, 3 | 8) {
        return None;
    }
    let mut raw = [0; 24 * DICT_ENTRIES];
    memory
        .read(keys.checked_add(r.entries.into())?, &mut raw)
        .then_some(())?;
    let mut tasks = [0; DICT_ENTRIES];
    for (task, entry) in tasks.iter_mut().zip(raw.chunks_exact(24)) {
        *task = u64_at(entry, 16)?;
    }
    Some(tasks)
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

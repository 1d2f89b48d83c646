//! Offsets of asyncio's tasks, and of the coroutines that they run.
//!
//! On x86-64, from the DWARF of the releases named in `versions`: `TaskObj` (Modules/_asynciomodule.c), `PyGenObject` and
//! `PyCoroObject` (Include/genobject.h, later Include/cpython and Include/internal/pycore_interpframe_structs.h),
//! `PyFrameObject` (Include/frameobject.h), `PyInterpreterState` and `_PyThreadStateImpl`. CPython 3.14 and later publish
//! those of `_asyncio` (`_Py_AsyncioModuleDebugOffsets`), and those are preferred.

use super::super::Runtime;
use crate::bytes::u64_at;
use crate::cpython_layout::Layout;

/// Name of the section with the published offsets.
pub const DEBUG_SECTION: &str = ".AsyncioDebug";
/// Bytes of the published offsets: 13 words.
const DEBUG_BYTES: usize = 104;
/// Offsets inside objects and thread states are below this; those in interpreter states below [`LARGE`].
const SMALL: u64 = 4096;
const LARGE: u64 = 1 << 24;

/// Where a frame keeps the top of its value stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackTop {
    /// A pointer just past the top (`f_stacktop`).
    Pointer(u16),
    /// Number of values (i32) above the address at the first offset (`f_valuestack`, `f_stackdepth`).
    Depth(u16, u16),
    /// Number of values and local variables (i32), and where these begin in the frame (`stacktop`, `localsplus`).
    Count(u16, u16),
    /// A pointer; the awaited object lies so many bytes below it (`stackpointer`).
    Below(u16, u64),
}

/// Where a coroutine has its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoroutineFrame {
    /// A pointer to a frame object, null once the coroutine has ended (3.10 and earlier).
    Pointer(u16),
    /// Inside the coroutine (3.11 and later).
    Inline(u16),
}

/// What says whether a coroutine is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameState {
    /// A byte of the frame object that is set while it runs (`f_executing`, 3.9 and earlier).
    Executing(u16),
    /// A byte of the frame object (`f_state`, 3.10).
    InFrame(u16),
    /// A byte of the coroutine (`gi_frame_state`), and what its values mean.
    InCoroutine(u16, StateValues),
}

/// Values of `gi_frame_state`; all others are of a coroutine that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateValues {
    /// Lowest and highest value of a coroutine that awaits something.
    pub suspended: (i8, i8),
    pub executing: i8,
    pub created: i8,
}

/// Where tasks are linked into lists (3.14 and later).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLists {
    /// The link inside a task.
    pub node: u16,
    pub interpreter_head: u32,
    pub thread_head: u16,
    pub thread_running: u16,
    /// The event loop that a thread runs.
    pub running_loop: u16,
    /// The task, or the set of tasks, that awaits a task, and the byte that says whether it is a set.
    pub awaited_by: (u16, u16),
}

/// Offsets in bytes from the start of each structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLayout {
    /// Size of an object's header.
    pub head: u16,
    pub coro: u16,
    /// 3.8 and later.
    pub name: Option<u16>,
    pub waiter: u16,
    /// `fut_callback0`; the list of further callbacks is two words later.
    pub callback: u16,
    pub state: u16,
    pub lists: Option<TaskLists>,
    pub coroutine_frame: CoroutineFrame,
    pub frame_state: FrameState,
    pub stack_top: StackTop,
    /// `gi_qualname`
    pub coroutine_name: u16,
    /// `co_flags`
    pub code_flags: u16,
    /// `func_name` (Include/funcobject.h, later Include/cpython)
    pub function_name: u16,
    /// `func_closure`
    pub closure: u16,
    /// From a frame object to the frame that it stands for (`f_frame`, Include/internal/pycore_frame.h, 3.11 and later).
    /// `None`: the object is the frame.
    pub frame_object_frame: Option<u16>,
    /// In greenlet's object of C++, where the stack is. Before it are pointers to the table and to the Python object,
    /// `exc_info` and `exc_state` (`_PyErr_StackItem`: 4 words up to 3.10, later 2), and arguments of the switch (2 words).
    pub greenlet_stack: u16,
}

impl TaskLayout {
    /// The layout for this interpreter; `published` is the section [`DEBUG_SECTION`], without which lists of tasks of 3.14 and
    /// later are not known. `None` where it is not known: before 3.7, and where what is published is not plausible.
    pub fn of(runtime: &Runtime, layout: &Layout, published: Option<&[u8]>) -> Option<TaskLayout> {
        let facts = runtime.facts?;
        let row = facts.tasks.as_ref()?;
        // By so many bytes the header is longer than in the row: 0, or 16 in free-threaded builds.
        let longer = layout.bytes_size.checked_sub(row.head)?;
        let mut tasks = TaskLayout {
            head: row.head + longer,
            coro: row.coro + longer,
            name: row.name.map(|at| at + longer),
            waiter: row.waiter + longer,
            callback: row.callback + longer,
            state: row.state + longer,
            coroutine_frame: match row.coroutine_frame {
                CoroutineFrame::Inline(at) => CoroutineFrame::Inline(at + longer),
                pointer => pointer,
            },
            frame_state: match row.frame_state {
                FrameState::InCoroutine(at, values) => FrameState::InCoroutine(at + longer, values),
                in_frame => in_frame,
            },
            coroutine_name: row.coroutine_name + longer,
            code_flags: row.code_flags + longer,
            function_name: row.function_name + longer,
            closure: row.closure + longer,
            frame_object_frame: row.frame_object_frame.map(|at| at + longer),
            ..*row
        };
        if let (true, Some(published)) = (facts.publishes_tasks, published) {
            tasks.publish(published)?;
        }
        Some(tasks)
    }

    /// Takes over the published offsets. `None` if one is out of range.
    fn publish(&mut self, table: &[u8]) -> Option<()> {
        (table.len() >= DEBUG_BYTES).then_some(())?;
        let word = |i: usize| u64_at(table, 8 * i);
        let small = |i: usize| word(i).filter(|v| *v < SMALL).map(|v| v as u16);
        let size = word(0)?;
        let inside = |i: usize| small(i).filter(|at| u64::from(*at) < size);
        self.name = Some(inside(1)?);
        self.coro = inside(5)?;
        self.lists = Some(TaskLists {
            awaited_by: (inside(2)?, inside(4)?),
            node: inside(6)?,
            interpreter_head: word(8).filter(|v| *v < LARGE && *v % 8 == 0)? as u32,
            running_loop: thread_offset(word(10)?)?,
            thread_running: thread_offset(word(11)?)?,
            thread_head: thread_offset(word(12)?)?,
        });
        Some(())
    }
}

/// Offset in a thread state: those of free-threaded builds are large.
fn thread_offset(at: u64) -> Option<u16> {
    u16::try_from(at).ok().filter(|at| at % 8 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpython::versions;

    /// The offsets that CPython 3.14.8 publishes.
    const V3_14: [u64; 13] = [168, 136, 96, 108, 109, 128, 152, 0x60000, 10880, 936, 864, 872, 880];

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    fn layout() -> TaskLayout {
        let facts = versions::find((3, 14, 8)).expect("a row");
        facts.tasks.expect("offsets of tasks")
    }

    #[test]
    fn published_offsets_are_checked() {
        let mut good = layout();
        assert_eq!(good.publish(&bytes(&V3_14)), Some(()));
        assert_eq!((good.coro, good.name), (128, Some(136)));
        let lists = good.lists.expect("lists");
        assert_eq!(
            (lists.node, lists.thread_running, lists.interpreter_head),
            (152, 872, 10880)
        );
        for (i, bad) in [
            (1, 168),
            (5, u64::MAX),
            (6, 4096),
            (8, 1 << 40),
            (11, 873),
            (12, 1 << 17),
        ] {
            let mut words = V3_14;
            words[i] = bad;
            assert_eq!(layout().publish(&bytes(&words)), None, "word {i} is {bad}");
        }
        for len in 0..DEBUG_BYTES {
            assert_eq!(layout().publish(&bytes(&V3_14)[..len]), None);
        }
    }
}

//! Single tasks, for samples: which task a coroutine belongs to, and whether what is known of it still holds.

use rustc_hash::FxHashSet;

use super::layout::{CoroutineFrame, TaskLayout};
use super::objects::{Kind, Objects};
use super::registry::FoundTasks;
use super::{NoTasks, TaskReader};
use crate::cpython::{strings, thread_states};
use crate::cpython_layout::RunningTasks;
use crate::event::Part;
use crate::limits::SHIM;
use crate::process::memory::Memory;

/// Maximum number of tasks in a chain of tasks that await each other.
const MAX_AWAITING: usize = 64;
/// Flags of code objects that tasks can run: CO_COROUTINE, and CO_ITERABLE_COROUTINE of generators that were declared
/// coroutines (Include/cpython/code.h).
const COROUTINE: u32 = 0x80 | 0x100;
/// Bytes of one code point, at most.
const MAX_WIDTH: u64 = 4;

/// What identifies a task, and what says which tasks await it: while none of it changes, neither did these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskFacts {
    pub address: u64,
    pub coroutine: u64,
    pub name: u64,
    /// Callbacks; tasks that await it.
    pub links: [u64; 3],
}

/// A task's name at the instant of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopiedName {
    Whole(String),
    /// The copy ends before the name does.
    Beginning(String),
}

impl CopiedName {
    /// Whether a name that was read at another time can be this one.
    pub fn fits(&self, name: &str) -> bool {
        match self {
            CopiedName::Whole(whole) => name == whole,
            CopiedName::Beginning(beginning) => name.starts_with(beginning.as_str()),
        }
    }

    /// Whether it is one that asyncio gives: no other task has the same.
    pub fn is_numbered(&self) -> bool {
        let CopiedName::Whole(name) = self else { return false };
        let number = name.strip_prefix("Task-").filter(|number| !number.is_empty());
        number.is_some_and(|number| number.bytes().all(|digit| digit.is_ascii_digit()))
    }

    /// How it is shown.
    pub fn text(self) -> String {
        match self {
            CopiedName::Whole(whole) => whole,
            CopiedName::Beginning(beginning) => beginning + "...",
        }
    }
}

/// A copied object, and the memory around it as it is now.
struct CopiedObject<'a> {
    copy: &'a Part,
    memory: &'a dyn Memory,
}

impl Memory for CopiedObject<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let Some(at) = avma
            .checked_sub(self.copy.avma)
            .filter(|at| *at < self.copy.bytes.len() as u64)
        else {
            return self.memory.read(avma, buf);
        };
        let copied = self
            .copy
            .bytes
            .get(at as usize..)
            .and_then(|bytes| bytes.get(..buf.len()));
        copied.is_some_and(|bytes| {
            buf.copy_from_slice(bytes);
            true
        })
    }
}

/// A task and those that await it, one by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskChain {
    /// The task first, then one that awaits it, and so on.
    pub tasks: Vec<(TaskFacts, String)>,
}

impl TaskReader {
    pub(super) fn objects<'a>(&'a self, memory: &'a dyn Memory) -> Objects<'a> {
        let types = self.types.clone();
        Objects::new(memory, &self.interpreter.layout, &self.objects, &self.layout, types)
    }

    /// Addresses of the tasks that run now, each with the address of its coroutine's frame.
    ///
    /// # Errors
    /// `NoAsyncio`: not, or not yet.
    pub fn running(&mut self, memory: &dyn Memory) -> Result<Vec<(u64, u64)>, NoTasks> {
        let states = thread_states::states(memory, &self.interpreter);
        self.find_registries(memory, &states)?;
        let objects = self.objects(memory);
        let mut found = FoundTasks::default();
        for registries in self.registries.values() {
            found.read_running(&objects, registries);
        }
        if let Some(lists) = &self.layout.lists {
            for state in &states {
                found.running.extend(objects.pointer(state.state, lists.thread_running));
            }
        }
        Ok(with_frames(&objects, &found.running))
    }

    /// Where the process keeps which tasks run, once that has been found.
    pub fn running_tasks(&self) -> Option<RunningTasks> {
        let l = &self.layout;
        let mut where_it_is = RunningTasks {
            current: 0,
            keys: self.objects.dict_keys,
            // Of 8 slots with an index of a byte each, after a header (Objects/dict-common.h, v3.7; pycore_dict.h, v3.11).
            entries: if self.objects.dict_kinds { 40 } else { 48 },
            task: 0,
            coroutine: l.coro,
            frame: match l.coroutine_frame {
                CoroutineFrame::Pointer(at) | CoroutineFrame::Inline(at) => at,
            },
            frame_is_pointer: matches!(l.coroutine_frame, CoroutineFrame::Pointer(_)),
            name: l.name.unwrap_or(l.coroutine_name),
            coroutine_has_name: l.name.is_none(),
            callback: l.callback,
            waiter: l.waiter,
            closure: l.closure,
            items: self.objects.tuple_items,
            head: l.head,
            awaited_by: l.lists.map_or(0, |lists| lists.awaited_by.0),
            awaited_by_is_set: l.lists.map_or(0, |lists| lists.awaited_by.1),
        };
        match &l.lists {
            Some(lists) => where_it_is.task = lists.thread_running,
            None => where_it_is.current = self.registries.values().find_map(|registries| registries.current)?,
        }
        Some(where_it_is)
    }

    /// Where the process keeps which tasks run. Searches for it.
    ///
    /// # Errors
    /// `NoAsyncio`: not, or not yet.
    pub fn find_running_tasks(&mut self, memory: &dyn Memory) -> Result<RunningTasks, NoTasks> {
        if self.layout.lists.is_none() {
            let states = thread_states::states(memory, &self.interpreter);
            self.find_registries(memory, &states)?;
        }
        self.running_tasks().ok_or(NoTasks::NoAsyncio)
    }

    /// A task's name from a copy of the object that is its name.
    pub fn copied_name(&self, memory: &dyn Memory, copy: &Part) -> Option<CopiedName> {
        let memory = CopiedObject { copy, memory };
        let objects = self.objects(&memory);
        let text = match objects.kind(copy.avma)? {
            Kind::Int => format!("Task-{}", objects.int(copy.avma)?),
            Kind::Str => match objects.text(copy.avma) {
                Some(text) => text,
                None => return self.beginning(&memory).map(CopiedName::Beginning),
            },
            _ => return None,
        };
        Some(CopiedName::Whole(text))
    }

    /// As much of a name as was copied. Names with other than ASCII characters may have more.
    fn beginning(&self, copied: &CopiedObject<'_>) -> Option<String> {
        let l = &self.interpreter.layout;
        let data = l.str_ascii_data.max(l.str_compact_data);
        let room = (copied.copy.bytes.len() as u64).checked_sub(data.into())?;
        strings::read_str_start(copied, l, copied.copy.avma, room / MAX_WIDTH).map(|(text, _)| text)
    }

    /// The same of all tasks.
    ///
    /// # Errors
    /// `NoAsyncio`: not, or not yet.
    pub fn all(&mut self, memory: &dyn Memory) -> Result<Vec<(u64, u64)>, NoTasks> {
        let states = thread_states::states(memory, &self.interpreter);
        self.find_registries(memory, &states)?;
        let objects = self.objects(memory);
        let found = self.find(&objects, &states);
        Ok(with_frames(&objects, &found.tasks))
    }

    /// The address of the frame of a task's coroutine. `None`: it is not, or no longer, a task.
    pub fn frame(&self, memory: &dyn Memory, task: u64) -> Option<u64> {
        let found = with_frames(&self.objects(memory), &[task]);
        found.first().map(|(_, frame)| *frame)
    }

    /// A task with the tasks that await it. Where several do, the one with the lowest address.
    pub fn chain(&self, memory: &dyn Memory, task: u64) -> Option<TaskChain> {
        self.chain_of(&self.objects(memory), task)
    }

    pub(super) fn chain_of(&self, objects: &Objects<'_>, task: u64) -> Option<TaskChain> {
        let mut tasks = Vec::new();
        let mut seen = FxHashSet::default();
        let mut at = Some(task);
        while let Some(task) = at.filter(|task| tasks.len() < MAX_AWAITING && seen.insert(*task)) {
            let Some(facts) = facts(objects, task) else { break };
            tasks.push((facts, self.name_of(objects, &facts)));
            let is_c = objects.kind(task) == Some(Kind::Task);
            at = objects.awaiters(task, is_c, &|_| Vec::new()).first().copied();
        }
        (!tasks.is_empty()).then_some(TaskChain { tasks })
    }

    fn name_of(&self, objects: &Objects<'_>, task: &TaskFacts) -> String {
        let name = Some(task.name).filter(|name| *name != 0);
        self.name(objects, task.address, task.coroutine, name)
    }

    /// Whether what is known of a task and of those that await it is unchanged.
    pub fn still_holds(&self, memory: &dyn Memory, chain: &TaskChain) -> bool {
        self.holds(&self.objects(memory), chain)
    }

    pub(super) fn holds(&self, objects: &Objects<'_>, chain: &TaskChain) -> bool {
        let mut tasks = chain.tasks.iter();
        // Another name may have taken the place of one, as another task does.
        tasks
            .all(|(known, name)| facts(objects, known.address) == Some(*known) && self.name_of(objects, known) == *name)
    }

    /// Whether a frame with this code object, and this owner (3.11 and later), is that of a coroutine.
    pub fn is_coroutine(&self, memory: &dyn Memory, code: u64, owner: u8) -> bool {
        owner < SHIM && is_coroutine(memory, &self.layout, code)
    }
}

/// Whether a code object is that of a coroutine.
pub fn is_coroutine(memory: &dyn Memory, layout: &TaskLayout, code: u64) -> bool {
    let flags = code.checked_add(layout.code_flags.into()).and_then(|at| memory.u32(at));
    flags.is_some_and(|flags| flags & COROUTINE != 0)
}

/// Tasks with the frames of their coroutines.
fn with_frames(objects: &Objects<'_>, tasks: &[u64]) -> Vec<(u64, u64)> {
    let frame = |task: &u64| Some((*task, objects.coroutine_frame(facts(objects, *task)?.coroutine)?));
    tasks.iter().filter_map(frame).collect()
}

/// `None`: it is not a task any more.
fn facts(objects: &Objects<'_>, task: u64) -> Option<TaskFacts> {
    if objects.kind(task)? != Kind::Task {
        return python_facts(objects, task);
    }
    let l = objects.tasks;
    let awaited_by = match l.lists {
        Some(lists) => objects.word(task, lists.awaited_by.0)?,
        None => 0,
    };
    Some(TaskFacts {
        address: task,
        coroutine: objects.pointer(task, l.coro)?,
        name: match l.name {
            Some(at) => objects.word(task, at)?,
            None => 0,
        },
        links: [
            objects.word(task, l.callback)?,
            objects.word(task, l.callback + 16)?,
            awaited_by,
        ],
    })
}

/// The same of a task that is implemented in Python.
fn python_facts(objects: &Objects<'_>, task: u64) -> Option<TaskFacts> {
    Some(TaskFacts {
        address: task,
        coroutine: objects.attribute(task, "_coro")?,
        name: objects.attribute(task, "_name").unwrap_or(0),
        links: [objects.attribute(task, "_callbacks").unwrap_or(0), 0, 0],
    })
}

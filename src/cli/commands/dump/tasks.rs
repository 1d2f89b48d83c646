//! `dump --tasks`: the tasks of asyncio and trio of a process as a tree, and its greenlets.

use std::io::{self, Write as _};

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::task_tree;
use crate::cli::args::{ColorWhen, DebuginfodArg};
use crate::cli::live::{Invoker, check_readable};
use crate::cli::output::JSON_VERSION;
use crate::cli::output::page::Page;
use crate::cli::output::style::TerminalStyle;
use crate::cpython::code_object::CodeTable;
use crate::cpython::frame_groups;
use crate::cpython::tasks::{
    self, GreenletState, ListedGreenlet, NoTasks, OtherTasks, RawAwaitFrame, SuspendedTrioTask, TaskList,
};
use crate::cpython::thread_states::{self, PyThreadState};
use crate::cpython::versions;
use crate::cpython_layout::Layout;
use crate::error::{self, Error, ErrorKind};
use crate::event::{Pid, Tid};
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::process::maps;
use crate::process::memory::{Memory, Pages};
use crate::process::system::{LiveSystem, ProcessMemory, System};
use crate::session::Inspection;
use crate::sys::procfs;

/// A task as it is shown.
pub struct ShownTask {
    pub address: u64,
    pub name: String,
    pub kind: TaskKind,
    /// Of asyncio only.
    pub event_loop: Option<u64>,
    /// Outermost first.
    pub frames: Vec<ShownFrame>,
    /// Type of what the innermost coroutine awaits.
    pub awaited: Option<String>,
    pub state: TaskState,
    pub awaited_by: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    Asyncio,
    Greenlet,
    Trio,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// It has not begun; not of asyncio.
    New,
    Suspended,
    /// In this thread, if it was found.
    Running(Option<Tid>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownFrame {
    pub name: String,
    pub file: String,
    pub line: u32,
}

/// All tasks of a process.
pub struct TaskReport {
    pub pid: Pid,
    pub command: String,
    pub python: String,
    pub tasks: Vec<ShownTask>,
    /// Why tasks may be missing.
    pub gaps: Vec<&'static str>,
}

/// Writes the tasks of a process to standard output, with `json` as JSON. The process is not stopped.
///
/// # Errors
/// `NoSuchProcess`, `NotPermitted`, `Unsupported`: no Python, or no asyncio.
pub fn dump(pid: Pid, json: Option<Page>) -> error::Result<()> {
    Invoker::switch_to(false, Caps::NONE, DebuginfodArg::Off)?;
    check_readable(pid, "reading")?;
    phases::restrict_to_setup(Caps::NONE)?;
    let (inspection, _) = Inspection::open(pid, false)?;
    let Some((_, python)) = inspection.python() else {
        return Err(
            Error::new(ErrorKind::Unsupported, format!("process {pid} does not run Python"))
                .why("it maps no CPython 3.6 or later, so it has no asyncio tasks")
                .hint("list Python processes with `pgrep -af python`"),
        );
    };
    let live = ProcessMemory(&LiveSystem, pid);
    let memory = Pages::new(&live);
    let read = inspection.task_reader().and_then(|mut reader| reader.read(&memory));
    let Some(python) = python else {
        return Err(no_tasks(pid, NoTasks::UnknownVersion, &inspection));
    };
    let states = thread_states::states(&memory, &python);
    let others = inspection.other_tasks();
    let (greenlets, gaps) = match (&others, LiveSystem.maps(pid)) {
        (Some(reader), Ok(text)) => reader.all_greenlets(&live, &maps::parse(&text), &states),
        _ => Default::default(),
    };
    let mut codes = CodeTable::default();
    let trio = others.map_or(Vec::new(), |reader| {
        read_trio((pid, &python.layout), &live, &reader, &states, &mut codes)
    });
    let mut list = match read {
        Ok(list) => list,
        Err(_) if !greenlets.is_empty() || !trio.is_empty() => TaskList::default(),
        Err(why) => return Err(no_tasks(pid, why, &inspection)),
    };
    list.gaps.extend(gaps);
    if LiveSystem.threads(pid).is_empty() {
        return Err(
            Error::new(ErrorKind::NoSuchProcess, format!("process {pid} has exited"))
                .why("it ended while its tasks were read")
                .hint("choose a running process"),
        );
    }
    let thread_pointers = thread_states::thread_pointers(&memory, &python, &states);
    let outer: Vec<(Tid, Option<u64>)> = LiveSystem
        .threads(pid)
        .into_iter()
        .map(|tid| {
            let inner = procfs::namespace_tid(pid, tid);
            (tid, inner.and_then(|inner| thread_pointers.get(&inner).copied()))
        })
        .collect();
    let thread = |thread_pointer: u64| {
        let found = outer.iter().find(|(_, p)| *p == Some(thread_pointer));
        found.map(|(tid, _)| *tid)
    };
    let report = TaskReport {
        pid,
        command: procfs::command_line(pid),
        python: inspection.python_text().unwrap_or_default().to_string(),
        tasks: shown(
            pid,
            (&list, &greenlets, &trio),
            (&memory, &mut codes),
            &python.layout,
            &thread,
        ),
        gaps: list.gaps.iter().map(|gap| gap.reason()).collect(),
    };
    phases::drop_for_symbolization(Caps::NONE)?;
    let text = match json {
        Some(page) => format!("{:#}\n", as_json(&report, page)),
        None => task_tree::text(&report, TerminalStyle::of_stdout(ColorWhen::Auto)),
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::io("cannot write to standard output", e)),
        _ => Ok(()),
    }
}

fn no_tasks(pid: Pid, why: NoTasks, inspection: &Inspection) -> Error {
    let python = inspection.python_text().unwrap_or_default().to_string();
    let mut known = versions::ALL.iter().filter(|facts| facts.tasks.is_some());
    let oldest = known.next().map_or(0, |facts| facts.minor);
    match why {
        NoTasks::UnknownVersion => Error::new(
            ErrorKind::Unsupported,
            format!("the tasks of process {pid} cannot be read"),
        )
        .why(format!(
            "it runs {python}; the layout of tasks is known for CPython 3.{oldest} to 3.{}",
            versions::newest().minor
        ))
        .hint(format!("`nativeprof dump {pid}` shows its threads")),
        NoTasks::NoAsyncio => Error::new(ErrorKind::Unsupported, format!("process {pid} has no asyncio tasks"))
            .why("it has not imported asyncio, and has no greenlets and no tasks of trio")
            .hint(format!("`nativeprof dump {pid}` shows its threads")),
    }
}

/// A task of trio.
struct ListedTrioTask {
    /// `pthread_self` of its thread.
    thread: u64,
    name: String,
    /// avma of the task whose nursery it is in.
    parent: Option<u64>,
    read: SuspendedTrioTask,
}

/// All tasks of trio, but not those that trio itself runs.
fn read_trio(
    (pid, layout): (Pid, &Layout),
    live: &dyn Memory,
    reader: &OtherTasks,
    states: &[PyThreadState],
    codes: &mut CodeTable,
) -> Vec<ListedTrioTask> {
    let memory = Pages::new(live);
    let mut function = |raw: &RawAwaitFrame| {
        let code = codes.observe(pid, &memory, layout, raw.code, 0).ok()?;
        let code = codes.get(code);
        tasks::trio_function(&code.name, &code.filename)
    };
    let schedulers = reader.trio_schedulers(&memory, states, &mut function);
    let mut is_core = |raw: &RawAwaitFrame| {
        let code = codes.observe(pid, &memory, layout, raw.code, 0);
        code.is_ok_and(|code| tasks::is_trio_core(&codes.get(code).filename))
    };
    let mut listed = Vec::new();
    for scheduler in schedulers {
        let Some(offsets) = reader.trio_offsets(&memory, scheduler.frame, scheduler.code) else {
            continue;
        };
        for read in reader.trio_chains(live, &offsets, &scheduler) {
            let frames = &read.chain.frames;
            if !frames.is_empty() && frames.iter().all(&mut is_core) {
                continue;
            }
            let names = reader.trio_names(&memory, &offsets, &read.task);
            listed.push(ListedTrioTask {
                thread: scheduler.thread,
                name: names.into_iter().next().unwrap_or_default(),
                parent: reader.trio_parent(&memory, &offsets, &read.task),
                read,
            });
        }
    }
    listed
}

/// Names the frames.
fn shown(
    pid: Pid,
    (list, greenlets, trio): (&TaskList, &[ListedGreenlet], &[ListedTrioTask]),
    (memory, codes): (&dyn Memory, &mut CodeTable),
    layout: &Layout,
    thread: &dyn Fn(u64) -> Option<Tid>,
) -> Vec<ShownTask> {
    let mut frame = |raw: &RawAwaitFrame| match codes.observe(pid, memory, layout, raw.code, 0) {
        Ok(id) => {
            let line = frame_groups::line(codes, id, layout, raw.code, raw.instr);
            let code = codes.get(id);
            let own = tasks::frame_name(memory, layout, raw);
            ShownFrame {
                name: if code.qualname.is_empty() {
                    own.unwrap_or_else(|| code.name.clone())
                } else {
                    code.qualname.clone()
                },
                file: code.filename.clone(),
                line,
            }
        }
        Err(why) => ShownFrame {
            name: format!("[truncated: {}]", why.reason()),
            file: String::new(),
            line: 0,
        },
    };
    let tasks = list.tasks.iter().map(|task| {
        let running = task.running.as_ref();
        // A running task's coroutines are on its thread's stack, with the functions that they call.
        let frames = match running {
            Some((_, frames)) => frames.iter().rev().map(&mut frame).collect(),
            None => task.chain.frames.iter().map(&mut frame).collect(),
        };
        ShownTask {
            address: task.address,
            kind: TaskKind::Asyncio,
            name: task.name.clone(),
            event_loop: Some(task.event_loop),
            frames,
            awaited: task.awaited.clone(),
            state: match running {
                Some((thread_pointer, _)) => TaskState::Running(thread(*thread_pointer)),
                None if task.chain.is_running => TaskState::Running(None),
                None => TaskState::Suspended,
            },
            awaited_by: task.awaited_by.clone(),
        }
    });
    let mut tasks: Vec<ShownTask> = tasks.collect();
    tasks.extend(greenlets.iter().map(|listed| {
        let frames: Vec<ShownFrame> = listed.frames.iter().map(&mut frame).collect();
        let function = match &listed.state {
            GreenletState::New(function) => function.as_deref(),
            _ => {
                let mut functions = frames.iter().filter(|f| !tasks::is_greenlet_entry(&f.name, &f.file));
                functions.next().map(|f| &*f.name)
            }
        };
        ShownTask {
            address: listed.greenlet.address,
            kind: TaskKind::Greenlet,
            name: listed.greenlet.label(function),
            event_loop: None,
            awaited: None,
            state: match listed.state {
                GreenletState::New(_) => TaskState::New,
                GreenletState::Suspended => TaskState::Suspended,
                GreenletState::Running(thread_pointer) => TaskState::Running(thread_pointer.and_then(thread)),
            },
            awaited_by: Vec::new(),
            frames,
        }
    }));
    let first = tasks.len();
    let at: FxHashMap<u64, usize> = (first..)
        .zip(trio)
        .map(|(at, of)| (of.read.task.address(), at))
        .collect();
    tasks.extend(trio.iter().map(|listed| {
        let parent = listed.parent.and_then(|parent| at.get(&parent));
        let chain = &listed.read.chain;
        ShownTask {
            address: listed.read.task.address(),
            kind: TaskKind::Trio,
            name: listed.name.clone(),
            event_loop: None,
            awaited: None,
            state: match () {
                () if chain.is_running => TaskState::Running(thread(listed.thread)),
                () if chain.is_new => TaskState::New,
                () => TaskState::Suspended,
            },
            awaited_by: parent.copied().into_iter().collect(),
            frames: chain.frames.iter().map(&mut frame).collect(),
        }
    }));
    tasks
}

fn as_json(report: &TaskReport, page: Page) -> Value {
    let address = |at: u64| format!("{at:#x}");
    let task = |task: &ShownTask| {
        let frames = task.frames.iter().map(|f| {
            json!({
                "name": f.name,
                "file": Some(&f.file).filter(|file| !file.is_empty()),
                "line": Some(f.line).filter(|line| *line > 0),
            })
        });
        let by = task.awaited_by.iter().filter_map(|i| report.tasks.get(*i));
        json!({
            "id": address(task.address),
            "kind": match task.kind {
                TaskKind::Asyncio => "asyncio",
                TaskKind::Greenlet => "greenlet",
                TaskKind::Trio => "trio",
            },
            "name": task.name,
            "loop": task.event_loop.map(address),
            "state": match task.state {
                TaskState::New => "new",
                TaskState::Suspended => "suspended",
                TaskState::Running(_) => "running",
            },
            "thread": match task.state {
                TaskState::Running(tid) => tid,
                TaskState::New | TaskState::Suspended => None,
            },
            "frames": frames.collect::<Vec<_>>(),
            "awaits": task.awaited,
            "awaited_by": by.map(|by| address(by.address)).collect::<Vec<_>>(),
        })
    };
    let mut tasks: Vec<&ShownTask> = report.tasks.iter().collect();
    let shown = page.cut(&mut tasks);
    let value = json!({
        "version": JSON_VERSION,
        "pid": report.pid,
        "command": report.command,
        "python": report.python,
        "incomplete": report.gaps,
    });
    shown.with_rows(value, "tasks", tasks.into_iter().map(task).collect())
}

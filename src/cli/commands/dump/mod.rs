//! `dump`: what each thread of a process is doing, once.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::arch;
use crate::capture::common::seen_code::SeenCode;
use crate::capture::ptrace::snapshot::{ReadMode, SnapshotError, SnapshotTarget, Snapshotter, ThreadSnapshot};
use crate::cli::args::{ColorWhen, Dump};
use crate::cli::discover;
use crate::cli::live::{Invoker, check_readable};
use crate::cli::output::style::TerminalStyle;
use crate::cpython;
use crate::cpython::gil;
use crate::cpython::gil::Gil;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::repr::{LocalVariable, ValueReader};
use crate::cpython::thread_states;
use crate::cpython_layout::{Interpreter, TargetLayout};
use crate::error::{self, Error};
use crate::event::{Pid, PythonWalk, Tid};
use crate::interleave::StackQuality;
use crate::privileges::credentials::{Cap, Caps};
use crate::privileges::phases;
use crate::process::maps;
use crate::process::memory::Pages;
use crate::process::system::{LiveSystem, ProcessMemory, System};
use crate::profile::folded::{self, NodeDisplay};
use crate::profile::model::{FrameKind, NodeId, Profile};
use crate::session::Inspection;
use crate::sys;
use crate::sys::procfs;
use crate::truncation::Truncation;

mod render;
mod task_tree;
mod tasks;

/// Longest stop of a thread to read its variables, ns.
const MAX_STOP_FOR_LOCALS: u64 = 400_000;
/// Longest time to read the variables of a sleeping thread, ns.
const MAX_READ_FOR_LOCALS: u64 = 100_000_000;
/// How often a thread that waits for the disk is read again, and after how long.
const RETRIES: usize = 5;
const RETRY_DELAY: Duration = Duration::from_millis(2);
/// `owner` values from here on are entry frames, which run no code of a program's.
const ENTRY_FRAME: u8 = 3;

/// What is read while a thread is stopped or sleeping, in addition to its stack.
#[derive(Clone, Debug, Default)]
struct DumpExtras {
    gil: Option<Gil>,
    /// Variables by frame; a frame that is missing was not read.
    locals: FxHashMap<u64, Vec<LocalVariable>>,
}

/// A thread as it is shown.
struct DumpThread {
    tid: Tid,
    inner: Option<Tid>,
    name: String,
    python_name: Option<String>,
    stack: Result<DumpStack, SnapshotError>,
}

struct DumpStack {
    state: char,
    call: Option<u64>,
    mode: ReadMode,
    gil: Option<Gil>,
    kernel: Option<Vec<String>>,
    quality: DumpQuality,
    /// Innermost first.
    frames: Vec<DumpFrame>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DumpQuality {
    Exact,
    Repaired,
    Partial(Option<Truncation>),
}

struct DumpFrame {
    kind: FrameKind,
    name: String,
    /// Python: path; native: source file, may be empty.
    file: String,
    line: u32,
    module: String,
    /// Native: where the function starts in its file.
    address: u64,
    locals: Option<Vec<LocalVariable>>,
    /// How text shows it; programs get all of them.
    shown: NodeDisplay,
}

/// The complete dump.
struct DumpReport {
    pid: Pid,
    inner: Option<Pid>,
    command: String,
    python: String,
    free_threaded: bool,
    /// With its control group.
    frozen: bool,
    threads: Vec<DumpThread>,
    kernel_refused: bool,
}

/// Writes the state of all threads of a process to standard output.
///
/// # Errors
/// `NoSuchProcess`, `NotPermitted`, `Unsupported`.
pub fn dump(options: &Dump) -> error::Result<()> {
    let pid = discover::find(&options.target.process())?;
    if options.tasks {
        return tasks::dump(pid, options.json.then(|| options.page.page()));
    }
    // SYS_NICE shortens stops; SYS_ADMIN is needed for /proc/PID/stack.
    let more = Caps::of(&[Cap::SysNice]).0
        | if options.kernel {
            Caps::of(&[Cap::SysAdmin]).0
        } else {
            0
        };
    let invoker = Invoker::switch_to(false, Caps(more), options.names.debuginfod)?;
    check_readable(pid, "reading")?;
    phases::restrict_to_setup(Caps(more))?;

    let (mut inspection, layout) = Inspection::open(pid, !options.no_native)?;
    inspection.name_apart(invoker.fetch);
    let mut inspector = Inspector::new(pid, &inspection, layout, options);
    let tids = {
        let mut tids = LiveSystem.threads(pid);
        tids.sort_unstable();
        tids
    };
    let mut snapshots: BTreeMap<Tid, Result<ThreadSnapshot<DumpExtras>, SnapshotError>> =
        inspector.inspect(&tids, false).into_iter().collect();
    let mut qualities = BTreeMap::new();
    for (tid, snapshot) in &snapshots {
        if let Ok(snapshot) = snapshot {
            qualities.insert(*tid, quality_of(&mut inspection, snapshot)?);
        }
    }
    // Their Python frames may be those of thread states that were not known.
    if let Some(layout) = inspection.take_newer_layout() {
        inspector.layout = layout;
        let partial = |tid: &Tid| matches!(qualities.get(tid), Some(DumpQuality::Partial(_)));
        let partial: Vec<Tid> = tids.iter().copied().filter(partial).collect();
        for (tid, again) in inspector.inspect(&partial, false) {
            if let Ok(again) = again {
                qualities.insert(tid, quality_of(&mut inspection, &again)?);
                snapshots.insert(tid, Ok(again));
            }
        }
    }
    // The kernel reports few registers of a sleeping thread. Where they were not sufficient, the thread is stopped if
    // its program does not notice that.
    let incomplete: Vec<Tid> = qualities
        .iter()
        .filter(|(_, quality)| **quality != DumpQuality::Exact)
        .map(|(tid, _)| *tid)
        .filter(|tid| snapshots[tid].as_ref().is_ok_and(can_be_stopped))
        .collect();
    for (tid, again) in inspector.inspect(&incomplete, true) {
        if let Ok(mut again) = again {
            if let Some(Ok(first)) = snapshots.get(&tid).filter(|_| options.locals) {
                again.found.locals = first.found.locals.clone(); // by frame: those of others are of no effect
            }
            qualities.insert(tid, quality_of(&mut inspection, &again)?);
            snapshots.insert(tid, Ok(again));
        }
    }
    // A thread that waits for the disk continues soon, and can then be read or stopped.
    for _ in 0..RETRIES {
        let waits: Vec<Tid> = qualities
            .iter()
            .filter(|(_, quality)| matches!(quality, DumpQuality::Partial(_)))
            .map(|(tid, _)| *tid)
            .filter(|tid| snapshots[tid].as_ref().is_ok_and(|snapshot| snapshot.state == 'D'))
            .collect();
        if waits.is_empty() {
            break;
        }
        std::thread::sleep(RETRY_DELAY);
        for (tid, again) in inspector.inspect(&waits, false) {
            if let Ok(again) = again {
                qualities.insert(tid, quality_of(&mut inspection, &again)?);
                snapshots.insert(tid, Ok(again));
            }
        }
    }
    // Libraries that were loaded since the mappings were read.
    if qualities.values().any(|v| matches!(v, DumpQuality::Partial(_))) && inspection.reopen() {
        for (tid, quality) in &mut qualities {
            if let (DumpQuality::Partial(_), Some(Ok(snapshot))) = (*quality, snapshots.get(tid)) {
                *quality = quality_of(&mut inspection, snapshot)?;
            }
        }
    }
    let mut python_names = inspection.current_thread_names(&tids);
    phases::restrict_to_sampling(Caps::NONE)?;
    let addresses: BTreeMap<Tid, Vec<u64>> = snapshots
        .iter()
        .filter_map(|(tid, snapshot)| Some((*tid, inspector.shown(&mut inspection, snapshot.as_ref().ok()?))))
        .collect();
    inspection.open_symbol_sources();
    phases::drop_for_symbolization(Caps::NONE)?;
    let profile = inspection.resolve();
    let views = if options.interpreter_frames {
        vec![NodeDisplay::Itself; profile.nodes.len()]
    } else {
        folded::shown(&profile)
    };
    let threads = tids.iter().map(|tid| {
        let found = snapshots.remove(tid).unwrap_or(Err(SnapshotError::Gone));
        let found = found.map(|snapshot| shown(*tid, snapshot, (&profile, &views), qualities[tid], &addresses[tid]));
        DumpThread {
            tid: *tid,
            inner: procfs::namespace_tid(pid, *tid).filter(|inner| inner != tid),
            name: inspection.thread_name(*tid).unwrap_or_default().to_string(),
            python_name: python_names.remove(tid),
            stack: found,
        }
    });
    let threads: Vec<DumpThread> = threads
        .filter(|t| !matches!(t.stack, Err(SnapshotError::Gone)))
        .collect();
    let asleep = |t: &DumpThread| {
        t.stack
            .as_ref()
            .is_ok_and(|s| s.mode == ReadMode::Asleep && s.kernel.is_none())
    };
    let report = DumpReport {
        pid,
        inner: procfs::namespace_tid(pid, pid).filter(|inner| *inner != pid),
        command: crate::sys::procfs::command_line(pid),
        python: inspection.python_text().unwrap_or_default().to_string(),
        free_threaded: inspector.free_threaded,
        frozen: sys::cgroup::is_frozen(pid),
        kernel_refused: options.kernel && threads.iter().any(asleep),
        threads,
    };
    let text = if options.json {
        format!("{:#}\n", render::json(&report, options.page.page()))
    } else {
        render::text(&report, TerminalStyle::of_stdout(ColorWhen::Auto))
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::io("cannot write to standard output", e)),
        _ => Ok(()),
    }
}

/// Whether the program would not notice that this sleeping thread is stopped.
fn can_be_stopped(snapshot: &ThreadSnapshot<DumpExtras>) -> bool {
    let call = snapshot.blocked.and_then(|b| b.call);
    snapshot.mode == ReadMode::Asleep
        && match snapshot.state {
            // In no system call: a page fault, which is restarted.
            'S' | 'D' => call.is_none_or(|(call, args)| arch::resumes_unnoticed(call, &args)),
            // By job control, wherever it was: it stays stopped.
            'T' => call.is_none(),
            _ => false,
        }
}

/// Reads the threads of the process.
struct Inspector {
    pid: Pid,
    layout: TargetLayout,
    python: Option<(Interpreter, Option<ObjectLayout>)>,
    free_threaded: bool,
    writable: Vec<(u64, u64)>,
    seen_code: Arc<SeenCode>,
    locals: bool,
    kernel: bool,
}

impl Inspector {
    fn new(pid: Pid, inspection: &Inspection, layout: TargetLayout, options: &Dump) -> Inspector {
        let python = inspection.python();
        let maps = maps::parse(&LiveSystem.maps(pid).unwrap_or_default());
        Inspector {
            pid,
            layout,
            free_threaded: python.as_ref().is_some_and(|(runtime, _)| runtime.free_threaded),
            python: python.and_then(|(runtime, interpreter)| {
                let interpreter = interpreter?;
                Some((interpreter, ObjectLayout::of(&runtime, &interpreter.layout)))
            }),
            writable: maps.iter().filter(|m| m.writable).map(|m| (m.start, m.end)).collect(),
            seen_code: Arc::default(),
            locals: options.locals,
            kernel: options.kernel,
        }
    }

    fn inspect(&mut self, tids: &[Tid], stop: bool) -> Vec<(Tid, Result<ThreadSnapshot<DumpExtras>, SnapshotError>)> {
        if tids.is_empty() {
            return Vec::new();
        }
        let memory = ProcessMemory(&LiveSystem, self.pid);
        let states = self.python.as_ref().map(|(p, _)| thread_states::states(&memory, p));
        let states = states.unwrap_or_default();
        let thread_pointers = self
            .python
            .as_ref()
            .map(|(p, _)| thread_states::thread_pointers(&memory, p, &states));
        let thread_pointers = thread_pointers.unwrap_or_default();
        let target = |tid: &Tid| SnapshotTarget {
            tid: *tid,
            thread_pointer: procfs::namespace_tid(self.pid, *tid)
                .and_then(|inner| thread_pointers.get(&inner).copied()),
            stop_sleeping: stop,
        };
        let targets: Vec<SnapshotTarget> = tids.iter().map(target).collect();
        let during = |python_walk: &PythonWalk, thread_pointer: u64, stopped: bool| {
            let live = ProcessMemory(&LiveSystem, self.pid);
            let memory = Pages::new(&live);
            let Some((python, Some(objects))) = &self.python else {
                return DumpExtras::default();
            };
            let end = sys::clock::now()
                + if stopped {
                    MAX_STOP_FOR_LOCALS
                } else {
                    MAX_READ_FOR_LOCALS
                };
            let reader = ValueReader {
                memory: &memory,
                layout: &python.layout,
                objects,
                over: &|| sys::clock::now() > end,
            };
            let frames = python_walk
                .python
                .iter()
                .filter(|f| self.locals && !stop && f.owner < ENTRY_FRAME);
            let mut locals = FxHashMap::default();
            for f in frames {
                if (reader.over)() {
                    break;
                }
                locals.insert(f.frame, reader.locals(f.frame, f.code));
            }
            DumpExtras {
                gil: gil::of_thread(&memory, python, objects, &states, thread_pointer),
                locals,
            }
        };
        let snapshotter = Snapshotter {
            pid: self.pid,
            layout: &self.layout,
            walk: cpython::frame_walk::walk,
            seen_code: self.seen_code.clone(),
            writable: &self.writable,
            kernel: self.kernel,
            never_stop: false,
            during: &during,
        };
        snapshotter.inspect(&targets)
    }

    /// Addresses of the Python frames that a sample's stack shows, innermost first. None where frames of several interpreters may
    /// be in another order.
    fn shown(&self, inspection: &mut Inspection, snapshot: &ThreadSnapshot<DumpExtras>) -> Vec<u64> {
        let Some((python, _)) = self.python.as_ref().filter(|_| !inspection.has_several_interpreters()) else {
            return Vec::new();
        };
        let memory = ProcessMemory(&LiveSystem, self.pid);
        cpython::frame_groups::shown(&snapshot.sample, &python.layout, inspection.codes(), &memory)
    }
}

/// How good the stack of a thread is.
fn quality_of(inspection: &mut Inspection, snapshot: &ThreadSnapshot<DumpExtras>) -> error::Result<DumpQuality> {
    let quality = inspection.add(&snapshot.sample, &snapshot.codes)?;
    Ok(match quality {
        Some(StackQuality::Exact) => DumpQuality::Exact,
        Some(StackQuality::Repaired) => DumpQuality::Repaired,
        Some(StackQuality::Partial(why)) => DumpQuality::Partial(Some(why)),
        None => DumpQuality::Partial(None),
    })
}

/// A thread's stack from the named profile.
fn shown(
    tid: Tid,
    snapshot: ThreadSnapshot<DumpExtras>,
    (profile, views): (&Profile, &[NodeDisplay]),
    quality: DumpQuality,
    addresses: &[u64],
) -> DumpStack {
    // The last one, if the thread was read twice.
    let sample = profile.timeline.iter().rev().find(|t| t.tid == tid);
    let mut at = sample.map_or(0, |t| t.node);
    let mut path: Vec<NodeId> = Vec::new();
    while at != 0 {
        path.push(at);
        at = profile.nodes[at as usize].parent;
    }
    let kind = |node: &NodeId| profile.frames[profile.nodes[*node as usize].frame as usize].kind;
    let python = path.iter().filter(|node| kind(node) == FrameKind::Python).count();
    // Show no variables rather than another frame's.
    let mut addresses = addresses.iter().filter(|_| python == addresses.len());
    let DumpExtras { gil, mut locals } = snapshot.found;
    let frames = path.iter().filter(|node| kind(node) != FrameKind::Thread).map(|node| {
        let n = &profile.nodes[*node as usize];
        let f = &profile.frames[n.frame as usize];
        let is_python = f.kind == FrameKind::Python;
        let address = if is_python { addresses.next() } else { None };
        DumpFrame {
            kind: f.kind,
            name: if f.qualname.is_empty() { &f.name } else { &f.qualname }.clone(),
            file: if is_python { &f.filename } else { &f.source }.clone(),
            line: n.first_seen_line,
            module: f.module.clone(),
            address: f.address,
            locals: address.and_then(|a| locals.remove(a)),
            shown: views[*node as usize],
        }
    });
    let frames = frames.collect();
    DumpStack {
        state: snapshot.state,
        call: snapshot.blocked.and_then(|b| b.call).map(|(call, _)| call),
        mode: snapshot.mode,
        gil,
        kernel: snapshot.kernel,
        quality,
        frames,
    }
}

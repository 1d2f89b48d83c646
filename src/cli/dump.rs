//! `dump`: what each thread of a process is doing, once.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::args::Dump;
use super::debuginfod;
use super::record::check_target;
use crate::arch;
use crate::capture::met::Met;
use crate::capture::ptrace::once::{How, Lack, Once, Seen, Target};
use crate::error::{self, Error};
use crate::interp::gil::{self, Gil};
use crate::interp::objects::Objects;
use crate::interp::values::{Reader, Variable};
use crate::interp::{self, threads};
use crate::layout::{Interpreter, Space};
use crate::process::credentials::{Cap, Caps};
use crate::process::host::{Host, Live, MemoryOf};
use crate::process::memory::Pages;
use crate::process::{maps, privilege, rights, sys, task};
use crate::sample::{Cut, Event, Pid, Tid, Walked};
use crate::session::{self, Grouping, Session};
use crate::tree::profile::{FrameKind, Meta, NodeId, Profile};

mod show;

/// How long a thread that is held may be held for its variables, ns.
const HELD_FOR_LOCALS: u64 = 400_000;
/// How long those of one that sleeps may be read.
const ASLEEP_FOR_LOCALS: u64 = 100_000_000;
/// How often a thread that waits for the disk is looked at again, and after how long.
const LOOKS_AGAIN: usize = 5;
const UNTIL_AGAIN: Duration = Duration::from_millis(2);
/// `owner` values from here on are entry frames, which run no code of a program's.
const ENTRY_FRAME: u8 = 3;

/// What is found while a thread stands still.
#[derive(Clone, Debug, Default)]
struct Found {
    gil: Option<Gil>,
    /// Variables by frame; a frame that is missing was not read.
    locals: FxHashMap<u64, Vec<Variable>>,
}

/// A thread as it is shown.
struct Thread {
    tid: Tid,
    own: Option<Tid>,
    name: String,
    seen: Result<Shown, Lack>,
}

struct Shown {
    state: char,
    call: Option<u64>,
    how: How,
    gil: Option<Gil>,
    kernel: Option<Vec<String>>,
    quality: Quality,
    /// Innermost first.
    frames: Vec<Frame>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Quality {
    Exact,
    Repaired,
    Partial(Option<Cut>),
}

struct Frame {
    kind: FrameKind,
    name: String,
    /// Python: path; native: source file, may be empty.
    file: String,
    line: u32,
    module: String,
    /// Native: where the function starts in its file.
    address: u64,
    locals: Option<Vec<Variable>>,
}

/// The whole of it.
struct Report {
    pid: Pid,
    own: Option<Pid>,
    command: String,
    python: String,
    free_threaded: bool,
    threads: Vec<Thread>,
    kernel_refused: bool,
}

/// Writes the state of all threads of a process to standard output.
///
/// # Errors
/// `NoSuchProcess`, `NotPermitted`, `Unsupported`.
pub fn dump(options: &Dump) -> error::Result<()> {
    let pid = options.whom.pid();
    let is_root = sys::effective_uid() == 0;
    // To be quick with a thread that is held; and what /proc/PID/stack takes.
    let more = Caps::of(&[Cap::SysNice]).0
        | if options.kernel {
            Caps::of(&[Cap::SysAdmin]).0
        } else {
            0
        };
    let user = privilege::become_caller_with(Caps(more))?;
    let fetch = debuginfod::fetch(options.names.debuginfod, is_root, user.as_ref())?;
    check_target(pid)?;
    if let Some(lack) = rights::memory(pid) {
        return Err(lack.error(format!("looking at process {pid} is not permitted")));
    }
    privilege::for_setting_up(Caps(more))?;

    let making = session::Options {
        grouping: Grouping {
            processes: false,
            threads: true,
        },
        native: !options.no_native,
        weighted: None,
    };
    let mut session = Session::new(making, Box::new(Live));
    session.fetch = fetch;
    let mut space = Space::default();
    session.open(pid, &mut |_, told| {
        space = told.cloned().unwrap_or_default();
        Ok(())
    })?;
    let mut look = Look::new(pid, &session, space, options);
    let tids = {
        let mut tids = Live.threads(pid);
        tids.sort_unstable();
        tids
    };
    let mut seen: BTreeMap<Tid, Result<Seen<Found>, Lack>> = look.at(&tids, false).into_iter().collect();
    let mut verdicts = BTreeMap::new();
    for (tid, seen) in &seen {
        if let Ok(seen) = seen {
            verdicts.insert(*tid, take(&mut session, seen)?);
        }
    }
    // Few of a sleeping thread's registers are told without stopping it. Where they did not suffice and its program will
    // not notice, it is held after all.
    let lacking: Vec<Tid> = verdicts
        .iter()
        .filter(|(_, verdict)| **verdict != Quality::Exact)
        .map(|(tid, _)| *tid)
        .filter(|tid| seen[tid].as_ref().is_ok_and(may_be_held))
        .collect();
    for (tid, again) in look.at(&lacking, true) {
        if let Ok(mut again) = again {
            if let Some(Ok(first)) = seen.get(&tid).filter(|_| options.locals) {
                again.found.locals = first.found.locals.clone(); // by frame: those of others are of no effect
            }
            verdicts.insert(tid, take(&mut session, &again)?);
            seen.insert(tid, Ok(again));
        }
    }
    // A thread that waits for the disk goes on soon, and then stands where it can be read, or is held.
    for _ in 0..LOOKS_AGAIN {
        let waits: Vec<Tid> = verdicts
            .iter()
            .filter(|(_, verdict)| matches!(verdict, Quality::Partial(_)))
            .map(|(tid, _)| *tid)
            .filter(|tid| seen[tid].as_ref().is_ok_and(|seen| seen.state == 'D'))
            .collect();
        if waits.is_empty() {
            break;
        }
        std::thread::sleep(UNTIL_AGAIN);
        for (tid, again) in look.at(&waits, false) {
            if let Ok(again) = again {
                verdicts.insert(tid, take(&mut session, &again)?);
                seen.insert(tid, Ok(again));
            }
        }
    }
    // Libraries that were loaded since the mappings were read.
    if verdicts.values().any(|v| matches!(v, Quality::Partial(_))) && session.open(pid, &mut |_, _| Ok(())).is_ok() {
        for (tid, verdict) in &mut verdicts {
            if let (Quality::Partial(_), Some(Ok(seen))) = (*verdict, seen.get(tid)) {
                *verdict = take(&mut session, seen)?;
            }
        }
    }
    privilege::for_sampling(Caps::NONE)?;
    let addresses: BTreeMap<Tid, Vec<u64>> = seen
        .iter()
        .filter_map(|(tid, seen)| Some((*tid, look.shown(&mut session, seen.as_ref().ok()?))))
        .collect();
    session.open_for_names(pid);
    privilege::for_naming(Caps::NONE)?;
    let meta = Meta { pid, ..Meta::default() };
    let profile = session.resolve(0, meta);
    let threads = tids.iter().map(|tid| {
        let found = seen.remove(tid).unwrap_or(Err(Lack::Gone));
        let found = found.map(|seen| shown(*tid, seen, &profile, verdicts[tid], &addresses[tid]));
        Thread {
            tid: *tid,
            own: task::own_number(pid, *tid).filter(|own| own != tid),
            name: session.threads.get(&(pid, *tid)).cloned().unwrap_or_default(),
            seen: found,
        }
    });
    let threads: Vec<Thread> = threads.filter(|t| !matches!(t.seen, Err(Lack::Gone))).collect();
    let asleep = |t: &Thread| {
        t.seen
            .as_ref()
            .is_ok_and(|s| s.how == How::Asleep && s.kernel.is_none())
    };
    let report = Report {
        pid,
        own: task::own_number(pid, pid).filter(|own| *own != pid),
        command: crate::process::command_line(pid),
        python: session.pythons.get(&pid).cloned().unwrap_or_default(),
        free_threaded: look.free_threaded,
        kernel_refused: options.kernel && threads.iter().any(asleep),
        threads,
    };
    let text = if options.json {
        format!("{:#}\n", show::json(&report))
    } else {
        show::text(&report, show::Style::of_output())
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::io("cannot write to standard output", e)),
        _ => Ok(()),
    }
}

/// Would the program of a thread that does not run not notice that it is stopped?
fn may_be_held(seen: &Seen<Found>) -> bool {
    let call = seen.blocked.and_then(|b| b.call);
    seen.how == How::Asleep
        && match seen.state {
            // In no call: a page fault, which begins again.
            'S' | 'D' => call.is_none_or(|(call, args)| arch::goes_on(call, &args)),
            // By job control, wherever it was: it stays stopped.
            'T' => call.is_none(),
            _ => false,
        }
}

/// What a look at the process needs.
struct Look {
    pid: Pid,
    space: Space,
    python: Option<(Interpreter, Option<Objects>)>,
    free_threaded: bool,
    writable: Vec<(u64, u64)>,
    met: Arc<Met>,
    locals: bool,
    kernel: bool,
}

impl Look {
    fn new(pid: Pid, session: &Session, space: Space, options: &Dump) -> Look {
        let python = session.python(pid);
        let maps = maps::parse(&session.host.maps(pid).unwrap_or_default());
        Look {
            pid,
            space,
            free_threaded: python.as_ref().is_some_and(|(runtime, _)| runtime.free_threaded),
            python: python.and_then(|(runtime, interpreter)| {
                let interpreter = interpreter?;
                Some((interpreter, Objects::of(&runtime, &interpreter.layout)))
            }),
            writable: maps.iter().filter(|m| m.writable).map(|m| (m.start, m.end)).collect(),
            met: Arc::default(),
            locals: options.locals,
            kernel: options.kernel,
        }
    }

    fn at(&mut self, tids: &[Tid], hold: bool) -> Vec<(Tid, Result<Seen<Found>, Lack>)> {
        if tids.is_empty() {
            return Vec::new();
        }
        let memory = MemoryOf(&Live, self.pid);
        let states = self.python.as_ref().map(|(p, _)| threads::states(&memory, p));
        let states = states.unwrap_or_default();
        let pointers = self
            .python
            .as_ref()
            .map(|(p, _)| threads::pointers(&memory, p, &states));
        let pointers = pointers.unwrap_or_default();
        let target = |tid: &Tid| Target {
            tid: *tid,
            pointer: task::own_number(self.pid, *tid).and_then(|own| pointers.get(&own).copied()),
            hold,
        };
        let targets: Vec<Target> = tids.iter().map(target).collect();
        let during = |walked: &Walked, pointer: u64, held: bool| {
            let live = MemoryOf(&Live, self.pid);
            let memory = Pages::new(&live);
            let Some((python, Some(objects))) = &self.python else {
                return Found::default();
            };
            let end = sys::now() + if held { HELD_FOR_LOCALS } else { ASLEEP_FOR_LOCALS };
            let reader = Reader {
                memory: &memory,
                layout: &python.layout,
                objects,
                over: &|| sys::now() > end,
            };
            let frames = walked
                .python
                .iter()
                .filter(|f| self.locals && !hold && f.owner < ENTRY_FRAME);
            let mut locals = FxHashMap::default();
            for f in frames {
                if (reader.over)() {
                    break;
                }
                locals.insert(f.frame, reader.locals(f.frame, f.code));
            }
            Found {
                gil: gil::of_thread(&memory, python, objects, &states, pointer),
                locals,
            }
        };
        let once = Once {
            pid: self.pid,
            space: &self.space,
            walk: interp::walk::walk,
            met: self.met.clone(),
            writable: &self.writable,
            kernel: self.kernel,
            never_stop: false,
            during: &during,
        };
        once.look(&targets)
    }

    /// Addresses of the Python frames that a sample's stack shows, innermost first.
    fn shown(&self, session: &mut Session, seen: &Seen<Found>) -> Vec<u64> {
        let Some((python, _)) = &self.python else {
            return Vec::new();
        };
        let memory = MemoryOf(&Live, self.pid);
        interp::frames::shown(&seen.sample, &python.layout, &mut session.codes, &memory)
    }
}

/// Hands a thread's sample to the session; how good its stack is.
fn take(session: &mut Session, seen: &Seen<Found>) -> error::Result<Quality> {
    let before = session.tally.clone();
    for copy in &seen.codes {
        let copy = Box::new(copy.clone());
        let pid = seen.sample.pid;
        session.event(Event::Code { pid, copy }, &mut |_, _| Ok(()))?;
    }
    session.event(Event::Sample(Box::new(seen.sample.clone())), &mut |_, _| Ok(()))?;
    let after = &session.tally;
    Ok(if after.exact > before.exact {
        Quality::Exact
    } else if after.repaired > before.repaired {
        Quality::Repaired
    } else {
        let more = |(why, n): &(&Cut, &u64)| before.reasons.get(*why).is_none_or(|had| had < *n);
        Quality::Partial(after.reasons.iter().find(more).map(|(why, _)| *why))
    })
}

/// A thread's stack from the named profile.
fn shown(tid: Tid, seen: Seen<Found>, profile: &Profile, quality: Quality, addresses: &[u64]) -> Shown {
    // The last one, where it was looked at twice.
    let tick = profile.timeline.iter().rev().find(|t| t.tid == tid);
    let mut at = tick.map_or(0, |t| t.node);
    let mut path: Vec<NodeId> = Vec::new();
    while at != 0 {
        path.push(at);
        at = profile.nodes[at as usize].parent;
    }
    let kind = |node: &NodeId| profile.frames[profile.nodes[*node as usize].frame as usize].kind;
    let python = path.iter().filter(|node| kind(node) == FrameKind::Python).count();
    // Frames of several interpreters stand in another order: better no variables than another frame's.
    let mut addresses = addresses.iter().filter(|_| python == addresses.len());
    let Found { gil, mut locals } = seen.found;
    let frames = path.iter().filter(|node| kind(node) != FrameKind::Thread).map(|node| {
        let n = &profile.nodes[*node as usize];
        let f = &profile.frames[n.frame as usize];
        let is_python = f.kind == FrameKind::Python;
        let address = if is_python { addresses.next() } else { None };
        Frame {
            kind: f.kind,
            name: if f.qualname.is_empty() { &f.name } else { &f.qualname }.clone(),
            file: if is_python { &f.filename } else { &f.source }.clone(),
            line: n.first_seen_line,
            module: f.module.clone(),
            address: f.address,
            locals: address.and_then(|a| locals.remove(a)),
        }
    });
    let frames = frames.collect();
    Shown {
        state: seen.state,
        call: seen.blocked.and_then(|b| b.call).map(|(call, _)| call),
        how: seen.how,
        gil,
        kernel: seen.kernel,
        quality,
        frames,
    }
}

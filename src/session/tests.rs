//! Tests of what a session keeps of processes.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use rustc_hash::FxHashSet;

use super::*;
use crate::cpython_layout::InterpreterLocks;
use crate::error::{Error, Result};
use crate::event::{HostSample, Sample};
use crate::frame::ModuleId;
use crate::process::file_content::Content;
use crate::process::root::Root;
use crate::process::system::FileKey;

/// The only thread that has a name.
const WORKER: Tid = 9;

/// Processes without mappings and memory, each with one thread, by their start time.
#[derive(Default)]
struct Machine {
    running: BTreeMap<Pid, Cell<Option<u64>>>,
    /// Names of threads that were read.
    names_read: Cell<usize>,
}

impl Machine {
    fn new(pids: impl IntoIterator<Item = Pid>) -> Rc<Machine> {
        let running = pids.into_iter().map(|pid| (pid, Cell::new(Some(u64::from(pid)))));
        Rc::new(Machine {
            running: running.collect(),
            ..Machine::default()
        })
    }

    fn start(&self, pid: Pid, time: u64) {
        self.running[&pid].set(Some(time));
    }

    fn end(&self, pid: Pid) {
        self.running[&pid].set(None);
    }
}

impl System for Rc<Machine> {
    fn start_time(&self, pid: Pid) -> Option<u64> {
        self.running.get(&pid)?.get()
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        self.start_time(pid).map(|_| pid).into_iter().collect()
    }

    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        match self.start_time(pid) {
            Some(_) => Ok(Vec::new()),
            None => Err(Error::no_process(pid)),
        }
    }

    fn stack_end(&self, _: Pid) -> u64 {
        0
    }

    fn thread_name(&self, _: Pid, tid: Tid) -> Option<String> {
        self.names_read.set(self.names_read.get() + 1);
        (tid == WORKER).then(|| "worker".into())
    }

    fn open(&self, _: Pid, _: u64, _: u64, _: &[u8], _: Option<&Root>) -> Option<(Content, FileKey)> {
        None
    }

    fn read_memory(&self, _: Pid, _: u64, _: &mut [u8]) -> usize {
        0
    }

    fn root(&self, _: Pid) -> Option<Root> {
        None
    }

    fn kernel_symbols(&self) -> Option<String> {
        None
    }
}

fn session(machine: &Rc<Machine>) -> Session {
    let options = SessionOptions {
        gil_only: true,
        ..SessionOptions::default()
    };
    Session::new(options, Box::new(machine.clone()))
}

fn host_session(machine: &Rc<Machine>) -> Session {
    let options = SessionOptions {
        host: true,
        ..SessionOptions::default()
    };
    Session::new(options, Box::new(machine.clone()))
}

fn happens(session: &mut Session, event: Event) {
    session.event(event, &mut |_, _| Ok(())).expect("no backend fails");
}

fn fork(session: &mut Session, pid: Pid, parent: Pid) {
    happens(session, Event::Fork { pid, parent });
}

fn exit(session: &mut Session, machine: &Machine, pid: Pid) {
    machine.end(pid);
    happens(session, Event::Exit { pid, tid: pid });
}

/// A sample of a process's first thread that holds no lock.
fn sample(pid: Pid) -> Event {
    Event::Sample(Box::new(Sample {
        pid,
        tid: pid,
        ..Sample::default()
    }))
}

/// A sample of a thread of a whole host.
fn host_sample(pid: Pid, tid: Tid, comm: &[u8]) -> Event {
    let mut host = HostSample {
        cgroup: 1,
        comm: [0; 16],
        new: None,
    };
    host.comm[..comm.len()].copy_from_slice(comm);
    Event::Sample(Box::new(Sample {
        pid,
        tid,
        host: Some(host),
        ..Sample::default()
    }))
}

/// Gives a process a lock and a name that are its own.
fn use_process(session: &mut Session, pid: Pid) {
    let process = &mut session.processes.ensure(pid).process;
    process.locks.found = InterpreterLocks {
        at: vec![4096],
        len: 8,
        ..InterpreterLocks::default()
    };
    session.names.set_interpreter(pid, Some("CPython".into()));
}

fn is_used(session: &Session, pid: Pid) -> bool {
    session
        .processes
        .get(pid)
        .is_some_and(|process| !process.locks.found.at.is_empty())
}

#[test]
fn a_number_that_is_used_again_says_nothing_of_the_process_before() {
    let machine = Machine::new([1, 7]);
    let mut session = session(&machine);
    session.open(1, &mut |_, _| Ok(())).expect("it runs");
    fork(&mut session, 7, 1);
    use_process(&mut session, 7);
    // As long as its samples may come it is known.
    exit(&mut session, &machine, 7);
    assert!(is_used(&session, 7));
    fork(&mut session, 7, 1);
    assert!(!is_used(&session, 7) && session.names.interpreter(7).is_none());
    // Its exit has not been seen.
    use_process(&mut session, 7);
    fork(&mut session, 7, 1);
    assert!(!is_used(&session, 7));
    // That its samples are of threads without the lock is not known.
    happens(&mut session, sample(7));
    let counts = session.activities.states.gil.expect("only holders are sampled");
    assert_eq!((counts.unknown, counts.not_holding), (1, 0));
}

#[test]
fn late_samples_belong_to_the_process_that_has_exited() {
    let machine = Machine::new([7]);
    let mut session = session(&machine);
    session.open(7, &mut |_, _| Ok(())).expect("it runs");
    use_process(&mut session, 7);
    exit(&mut session, &machine, 7);
    happens(&mut session, sample(7));
    assert!(is_used(&session, 7));
    // Another process has got the number, and no event has said so.
    machine.start(7, 99);
    happens(&mut session, sample(7));
    assert!(!is_used(&session, 7));
}

#[test]
fn programs_that_are_executed_start_over() {
    let machine = Machine::new([7]);
    let mut session = session(&machine);
    session.open(7, &mut |_, _| Ok(())).expect("it runs");
    use_process(&mut session, 7);
    happens(
        &mut session,
        Event::Exec {
            pid: 7,
            comm: b"other".to_vec(),
        },
    );
    assert!(!is_used(&session, 7) && session.names.interpreter(7).is_none());
    assert_eq!(session.names.thread(7, 7), Some("other"));
}

#[test]
fn files_that_no_process_has_mapped_are_closed() {
    const COUNT: Pid = 3000;
    let machine = Machine::new(1..=COUNT);
    let mut session = session(&machine);
    session.open(1, &mut |_, _| Ok(())).expect("it runs");
    map(&mut session, 1, 1, "/lib/libc.so".into());
    for pid in 2..=COUNT {
        session.open(pid, &mut |_, _| Ok(())).expect("it runs");
        map(&mut session, pid, pid.into(), "/lib/libc.so".into());
        map(&mut session, pid, pid.into(), format!("/tmp/build/{pid}"));
        exit(&mut session, &machine, pid);
    }
    let modules = &session.files.modules;
    let all = (0..modules.len()).map(|at| ModuleId(at as u32));
    let open: Vec<ModuleId> = all.filter(|id| !modules.is_closed(*id)).collect();
    assert!(modules.len() >= COUNT as usize && open.len() < 600, "{}", open.len());
    // That of the process that still runs, and the newest ones.
    assert_eq!(modules.get(open[0]).path, b"/lib/libc.so");
    let newest = format!("/tmp/build/{COUNT}");
    assert_eq!(modules.get(open[open.len() - 1]).path, newest.as_bytes());
    // One that was closed is opened again.
    let before = modules.len();
    map(&mut session, 1, 1, "/tmp/build/2".into());
    assert_eq!(session.files.modules.len(), before + 1);
}

#[test]
fn processes_are_forgotten_some_time_after_their_end() {
    const COUNT: Pid = 1000;
    let machine = Machine::new(1..=COUNT);
    let mut session = session(&machine);
    for pid in 1..=COUNT {
        session.open(pid, &mut |_, _| Ok(())).expect("it runs");
        use_process(&mut session, pid);
        exit(&mut session, &machine, pid);
    }
    let known = session.processes.iter().count();
    assert!(known < 32, "{known} processes are known");
    assert!(session.names.interpreters.len() < 32);
    assert!(session.names.threads.is_empty());
}

/// A process of a host may have thousands of threads, of which few are sampled.
#[test]
fn threads_of_a_host_are_named_when_they_are_sampled() {
    let machine = Machine::new([7]);
    let mut session = host_session(&machine);
    happens(&mut session, host_sample(7, 7, b"main"));
    let of_opening = machine.names_read.get();
    for tid in 8..1000 {
        happens(&mut session, Event::Thread { pid: 7, tid });
    }
    // Samples have the name of the first thread.
    happens(&mut session, host_sample(7, WORKER, b"main"));
    happens(&mut session, host_sample(7, WORKER, b"main"));
    assert!(machine.names_read.get() == of_opening + 1 && of_opening <= 1);
    let names = &session.names;
    assert_eq!(
        (names.thread(7, 7), names.thread(7, WORKER)),
        (Some("main"), Some("worker"))
    );
    assert_eq!(names.threads.len(), 2);
}

/// Maps a file at an address of its own.
fn map(session: &mut Session, pid: Pid, number: u64, path: String) {
    let event = Event::Mmap {
        pid,
        start: 0x1000 * number,
        end: 0x1000 * number + 0x1000,
        offset: 0,
        path: path.into_bytes(),
    };
    happens(session, event);
}

/// Months, with other programs, threads and functions in each minute.
#[test]
fn what_a_host_has_run_is_forgotten() {
    const SEGMENTS: u32 = 200;
    const PROCESSES: u32 = 6;
    let service = 1;
    let machine = Machine::new(1..=SEGMENTS * PROCESSES + 1);
    let mut session = host_session(&machine);
    let mut most: BTreeMap<&str, u64> = BTreeMap::new();
    let mut dropped: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut first, mut gone) = (BTreeMap::new(), 0);
    for segment in 0..SEGMENTS {
        let pids = (2 + segment * PROCESSES)..(2 + (segment + 1) * PROCESSES);
        happens(&mut session, host_sample(service, service, b"service"));
        map(&mut session, service, 1, "/lib/libc.so".into());
        for pid in pids.clone() {
            happens(&mut session, host_sample(pid, pid, pid.to_string().as_bytes()));
            map(&mut session, pid, 1, "/lib/libc.so".into());
            for file in 2..6 {
                map(&mut session, pid, file, format!("/tmp/build/{pid}/{file}"));
            }
        }
        let known = pids
            .clone()
            .chain([service])
            .filter_map(|pid| session.processes.get(pid));
        let modules: FxHashSet<ModuleId> = known.flat_map(|process| process.space.files()).collect();
        for module in modules {
            let functions = (0..5).map(|svma| RawFrame::Native { module, svma });
            session.segment.tree.add(&functions.collect::<Vec<_>>(), 1);
        }
        let profile = session.resolve_new(0, Meta::default());
        assert!(profile.meta.modules.iter().any(|module| module.path == "/lib/libc.so"));
        for (at, pid) in pids.enumerate() {
            match at % 3 {
                // Its exit is not seen.
                0 => machine.end(pid),
                1 => exit(&mut session, &machine, pid),
                // It goes on, without samples.
                _ => {}
            }
        }
        let end = long_term::close(&mut session);
        gone += end.gone.len();
        for (kind, size) in end.kept {
            let known = most.entry(kind).or_default();
            *known = size.max(*known);
        }
        for (kind, number) in end.dropped {
            *dropped.entry(kind).or_default() += number;
        }
        if segment == SEGMENTS / 2 {
            first.clone_from(&most);
        }
    }
    assert_eq!(first, most, "tables grow without a limit");
    assert!(most["files"] < 1000 && most["file_numbers"] < 1500, "{most:?}");
    assert!(most["frames"] < 5000 && most["threads"] < 100, "{most:?}");
    for kind in ["processes", "files", "names"] {
        assert!(dropped[kind] > 100, "{dropped:?}");
    }
    assert!(gone > 500);
    assert!(session.processes.get(service).is_some(), "it is sampled");
}

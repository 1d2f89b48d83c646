//! The ptrace backend: what it must never do to a target, and that it sees the same as the eBPF backend.
//!
//! Needs root (and setpriv of util-linux, to become an ordinary user), gcc and CPython; fails with a message where one
//! is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::time::{Duration, Instant};

use nativeprof::capture::ebpf::EbpfBackend;
use nativeprof::capture::ptrace::{PtraceBackend, TimerKind};
use nativeprof::capture::{Backend, EventKind, Mode, OffCpuOptions, SamplingOptions};
use nativeprof::cpython::frame_walk;
use nativeprof::event::{Event, RawPyFrame, WalkStatus};
use nativeprof::session::Inspection;
use nativeprof::sys::procfs;

use common::chance::{assert_likely, repeated};
use common::recording::{Running, attach_while, check_counts};
use common::{Program, attach, each_third_python, live, nativeprof, newest_python, programs, record};

mod common;

const TIMED_OPTIONS: SamplingOptions = SamplingOptions {
    off_cpu: OffCpuOptions {
        min_blocked: 0,
        wakers: false,
    },
    mode: Mode::Cpu,
    rate: 500,
    interval: 0,
    max_overhead: 1.0,
    event: EventKind::CpuClock,
    kernel: false,
    children: false,
    workers: false,
    spans: false,
    host: None,
};
const PTRACE: [&str; 2] = ["--backend", "ptrace"];
const EBPF: [&str; 2] = ["--backend", "ebpf"];

/// Numbers that the program prints on request: rounds of each thread, signals sent and handled.
fn rounds(program: &mut Program) -> Vec<u64> {
    program.send("how far?");
    program.wait_for("ROUNDS");
    let line = program.said.last().expect("what was waited for");
    line.split(' ').filter_map(|w| w.parse().ok()).collect()
}

/// Each thread has made progress, and none is in a tracer's stop.
fn check_progress(program: &mut Program, case: &str) {
    let before = rounds(program);
    let (threads, mut now) = (before.len() - 2, before.clone());
    // Repeats as long as a thread makes no progress; the slowest needs some ms for a round.
    for _ in 0..1000 {
        if now[..threads].iter().zip(&before).all(|(now, before)| now > before) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
        now = rounds(program);
    }
    panic!("{case}: a thread does not run: {before:?} {now:?}");
}

#[test]
fn no_call_is_interrupted_and_no_signal_lost() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(programs::uninterruptible(&[]));
        let r = attach(program.pid(), &PTRACE);
        check_progress(&mut program, "after sampling");
        program.finish(); // it aborts on EINTR, and fails when a signal is missing
        assert_likely!(r.samples() > 100, "{}", r.stderr);
        let stopped = r.profile.meta.stopped.expect("how long threads were stopped");
        assert!(stopped.median_us <= stopped.max_us, "{stopped:?}");
        assert!(
            r.stderr.contains(&format!("stopped:  median {} µs", stopped.median_us)),
            "{}",
            r.stderr
        );
    });
}

/// Kills nativeprof at moments spread over its start and its sampling.
fn kill_often(backend: &[&str], times: u32) {
    let _live = live();
    let mut program = Program::start(programs::uninterruptible(&[]));
    for i in 0..times {
        let mut command = nativeprof(&["attach", &program.pid().to_string(), "-r", "1000", "-o", "/dev/null"]);
        command.args(["-f", "json"]).args(backend);
        // Every other one gets as far as sampling.
        let mut child = if i % 2 == 0 {
            Running::start(command).child
        } else {
            command
                .stderr(std::process::Stdio::null())
                .spawn()
                .expect("nativeprof starts")
        };
        // 7919 is coprime to the range, so all of it is tried.
        std::thread::sleep(Duration::from_micros(u64::from(i) * 7919 % 60_000));
        child.kill().expect("a child to kill");
        child.wait().expect("a child to wait for");
        check_progress(&mut program, &format!("{}: kill {i}", backend[1]));
    }
    program.finish();
}

#[test]
fn the_target_outlives_a_sudden_death() {
    kill_often(&PTRACE, 10);
    kill_often(&EBPF, 5);
}

#[test]
#[ignore = "takes a minute; run with --ignored"]
fn the_target_outlives_a_hundred_sudden_deaths() {
    kill_often(&PTRACE, 100);
    kill_often(&EBPF, 100);
}

#[test]
#[ignore = "takes a minute; run with --ignored"]
fn no_call_is_interrupted_in_a_minute() {
    let _live = live();
    let mut program = Program::start(programs::uninterruptible(&[]));
    attach(program.pid(), &["--backend", "ptrace", "-d", "60"]);
    program.finish();
}

/// No tick stops such a thread: its CPU time is polled instead.
#[test]
fn a_thread_that_begins_to_block_all_signals_is_still_sampled() {
    const PROGRAM: &str = "
import signal, time
def spend(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
def before():
    spend(0.3)
def blocking():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    spend(0.7)
before()
blocking()
";
    let _live = live();
    repeated(|| {
        let mut command = Command::new(&newest_python().exe);
        command.args(["-c", PROGRAM]);
        let r = record(&["--backend", "ptrace"], &command);
        let (before, blocking) = (r.with("before"), r.with("blocking"));
        let q = &r.profile.meta.quality;
        // Where the host takes the CPU, polling comes too late for many samples. These count as lost.
        assert_likely!(before > 50 && blocking > 50, "{before}, {blocking}: {}", r.stderr);
        assert_eq!(q.taken + q.lost, q.expected, "{}", r.stderr);
        assert_likely!(q.expected > 800, "of the 1000 of its CPU time: {}", r.stderr);
    });
}

/// How often a process has given up its CPU by itself: it never waits, so each stop is one time, and nothing else is.
fn stops(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process that lives");
    let value = procfs::field(&status, "voluntary_ctxt_switches").expect("a number of switches");
    value.parse().expect("a number")
}

/// Stops of a thread that no tick stops, in a recording: one for a sample, and as many to find out which calls it makes.
fn check_stops(case: &str, stops: u64, rate: u64, seconds: f64) {
    let limit = (3.0 * rate as f64 * seconds) as u64 + 200;
    assert!(stops < limit, "{case}: {stops} stops in {seconds:.1} s at {rate} Hz");
}

#[test]
fn stops_do_not_grow_with_the_number_of_system_calls() {
    let _live = live();
    for (signals, why) in [
        ("unused", None),
        ("blocked", Some("1 thread: it blocks or handles SIGURG")),
        ("handled", Some("1 thread: it blocks or handles SIGURG")),
        ("blocked later", Some("1 thread: it blocks or handles SIGURG")),
    ] {
        repeated(|| {
            let mut command = newest_python().script("many_calls.py");
            command.arg(signals);
            let mut program = Program::start(command);
            let (pid, before) = (program.pid(), stops(program.pid()));
            let r = attach_while(pid, &["--backend", "ptrace", "-r", "500"], || {
                if signals == "blocked later" {
                    program.send("now");
                    program.wait_for("BLOCKED");
                }
            });
            check_stops(signals, stops(pid) - before, 500, r.profile.meta.duration);
            match why {
                Some(why) => assert!(r.stderr.contains(why), "{signals}: {}", r.stderr),
                None => assert!(!r.stderr.contains("  timer:  "), "{signals}: {}", r.stderr),
            }
            let truth = program.finish();
            // Where ticks stop it, a fifth to a third of the time in short calls is missing, which nothing counts yet.
            if why.is_some() {
                let counts = truth.keys().map(|name| (name.clone(), r.with(name))).collect();
                check_counts(signals, &counts, &truth, 0.05);
            }
            r.check_lost(signals);
        });
    }
}

#[test]
fn without_perf_events_stops_do_not_grow_with_the_number_of_system_calls() {
    let _live = live();
    let mut command = newest_python().script("many_calls.py");
    command.arg("unused");
    let program = Program::start(command);
    let (pid, before, began) = (program.pid(), stops(program.pid()), Instant::now());
    let mut backend =
        PtraceBackend::with_timer(&TIMED_OPTIONS, frame_walk::walk, TimerKind::Procfs).expect("privileges");
    backend.attach(pid).expect("permission to sample");
    backend.start().expect("sampling");
    let (mut samples, mut events) = (0, Vec::new());
    while samples < 200 {
        backend.poll(Duration::from_millis(100), &mut events).expect("samples");
        samples += events.drain(..).filter(|e| matches!(e, Event::Sample(_))).count();
    }
    backend.stop();
    check_stops(
        "no perf events",
        stops(pid) - before,
        500,
        began.elapsed().as_secs_f64(),
    );
    let remark = backend.timer_remark().expect("a reason");
    assert!(remark.contains("perf events are not permitted"), "{remark}");
}

#[test]
fn job_control_keeps_working() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(programs::uninterruptible(&[]));
        let pid = program.pid();
        let signal = |name: &str| {
            let done = Command::new("kill").args(["-s", name, &pid.to_string()]).status();
            assert!(done.is_ok_and(|s| s.success()), "signal {name} cannot be sent");
        };
        let r = attach_while(pid, &["--backend", "ptrace", "-d", "1.5"], || {
            for _ in 0..3 {
                signal("STOP");
                let is_stopped = || matches!(nativeprof::sys::procfs::stat_state(pid), Some('T' | 't'));
                let end = Instant::now() + Duration::from_secs(10);
                while !is_stopped() && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::thread::sleep(Duration::from_millis(100)); // time for noticing a thread that still runs
                // Being sampled it looks stopped too, and waits for a CPU after that.
                assert_likely!(is_stopped(), "it runs after SIGSTOP");
                signal("CONT");
                check_progress(&mut program, "after SIGCONT");
            }
        });
        check_progress(&mut program, "after sampling");
        // SIGCONT ends some calls with EINTR, traced or not; here it must not.
        program.finish();
        assert_likely!(r.samples() > 50, "{}", r.stderr);
    });
}

#[test]
fn children_are_followed_or_not_traced() {
    let _live = live();
    repeated(|| {
        let python = newest_python();
        let mut program = Program::start(python.script("forks.py"));
        let with = attach(program.pid(), &["--backend", "ptrace", "--subprocesses"]);
        let without = attach(program.pid(), &["--backend", "ptrace", "-d", "1"]);
        program.finish();
        let (parent, child) = (with.with("in_parent"), with.with("in_child"));
        // How many depends on what a busy machine leaves the processes of the time.
        assert_likely!(parent > 0 && child > 0, "{parent} {child}\n{}", with.stderr);
        assert_eq!(without.with("in_child"), 0, "children that were not requested");
        assert_likely!(without.with("in_parent") > 0, "{}", without.stderr);
    });
}

#[test]
fn launched_commands_are_sampled_from_their_start() {
    let _live = live();
    each_third_python(1, |python| {
        let mut command = python.script("shares.py");
        command.arg("1");
        let r = record(&PTRACE, &command);
        let q = &r.profile.meta.quality;
        assert!(r.stderr.contains("(ptrace, cpu-clock)"), "{}", r.stderr);
        assert_likely!(q.partial * 10 <= q.taken, "{}: {:?}", python.name, q.reasons);
        assert_likely!(r.with("run_alpha") > 0 && r.with("t_alpha_work") > 0, "{}", r.stderr);
        assert!(r.stderr.contains("python:   CPython 3."), "{}", r.stderr);
    });
}

#[test]
fn an_ordinary_user_gets_a_profile_and_the_reason_for_ptrace() {
    let _live = live();
    repeated(|| {
        // A directory that the user can write to, unlike ours.
        let directory = std::env::temp_dir().join(format!("nativeprof-user-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory can be made");
        let copy = |from: &std::path::Path, name: &str| {
            let to = directory.join(name);
            programs::copy(from, &to);
            to
        };
        let ours = copy(std::path::Path::new(env!("CARGO_BIN_EXE_nativeprof")), "nativeprof");
        let program = copy(std::path::Path::new(programs::native(&[]).get_program()), "native");
        let done = Command::new("chmod").args(["-R", "a+rwX"]).arg(&directory).status();
        assert!(
            done.is_ok_and(|s| s.success()),
            "the directory cannot be opened to others"
        );
        let done = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
            .arg(&ours)
            .args(["record", "-r", "500", "-f", "json", "-o"])
            .arg(directory.join("out.json"))
            .arg("--")
            .arg(&program)
            .arg("1")
            .stdin(std::process::Stdio::null())
            .output()
            .expect("setpriv (util-linux) is needed to become an ordinary user: install it");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        let written = std::fs::read(directory.join("out.json"));
        std::fs::remove_dir_all(&directory).expect("our directory can be removed");
        assert!(done.status.success(), "{said}");
        assert!(
            said.contains(
                "eBPF is not permitted (this user does not have CAP_BPF and CAP_PERFMON); falling back to ptrace"
            ),
            "{said}"
        );
        let profile = nativeprof::profile::json::read(&written.expect("a profile")).expect("a good profile");
        assert_likely!(profile.meta.quality.taken > 50, "{said}");
        assert_eq!(profile.meta.backend, "ptrace");
    });
}

#[test]
fn unsupported_requests_are_refused() {
    let _live = live();
    let mut program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    let r = attach(program.pid(), &["--backend", "ptrace", "--kernel", "-d", "0.5"]);
    assert!(
        r.stderr.contains("kernel frames are not available with ptrace"),
        "{}",
        r.stderr
    );
    let words = [
        "attach",
        &pid,
        "--backend",
        "ptrace",
        "--event",
        "page-faults",
        "-f",
        "json",
        "-o",
        "/dev/null",
    ];
    let done = nativeprof(&words).output().expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains("the ptrace backend cannot sample this event"), "{said}");
    // One that is traced already.
    let mut other = nativeprof(&["attach", &pid, "-d", "600", "-f", "json", "-o", "/dev/null"]);
    other.args(PTRACE);
    let mut other = Running::start(other);
    let done = nativeprof(&[
        "attach",
        &pid,
        "--backend",
        "ptrace",
        "-d",
        "1",
        "-o",
        "/dev/null",
        "-f",
        "json",
    ])
    .output()
    .expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains("only one tracer is possible"), "{said}");
    other.signal("INT");
    other.finish();
    program.finish();
}

#[test]
fn every_timer_samples_what_runs() {
    let _live = live();
    let python = newest_python();
    let options = TIMED_OPTIONS;
    for timer in [TimerKind::Perf, TimerKind::PerfUser, TimerKind::Procfs] {
        let program = Program::start(python.script("stay_in_c.py"));
        let backend = PtraceBackend::with_timer(&options, frame_walk::walk, timer).expect("privileges");
        assert_eq!(backend.event(), timer.name());
        let found = chains(program.pid(), Box::new(backend));
        let (frames, _, walk) = found.keys().next().expect("a chain");
        assert_eq!((found.len(), *walk), (1, WalkStatus::Complete), "{timer:?}");
        assert!(frames.len() > 60, "{timer:?}: {} frames", frames.len());
    }
}

/// The distinct chains of interpreter frames of a process, each with its anchors.
fn chains(pid: u32, mut backend: Box<dyn Backend>) -> BTreeMap<Chain, u32> {
    let (_, layout) = Inspection::open(pid, true).expect("a process to open");
    backend.update_process(pid, &layout).expect("a process that lives");
    backend.attach(pid).expect("permission to sample");
    backend.start().expect("sampling");
    let (mut found, mut n, mut events) = (BTreeMap::new(), 0, Vec::new());
    while n < 300 {
        backend.poll(Duration::from_millis(100), &mut events).expect("samples");
        for event in events.drain(..) {
            if let Event::Sample(s) = event {
                n += 1;
                let frames = s.python.iter().map(words).collect();
                let anchors = s.anchors.iter().map(words).collect();
                *found.entry((frames, anchors, s.walk)).or_default() += 1;
            }
        }
    }
    backend.stop();
    found
}

type FrameWords = (u64, u64, u64, u32, u8, bool);
type Chain = (Vec<FrameWords>, Vec<FrameWords>, WalkStatus);

fn words(f: &RawPyFrame) -> FrameWords {
    (f.frame, f.code, f.instr, f.fingerprint, f.owner, f.entry)
}

#[test]
fn both_walkers_see_the_same_frames() {
    let _live = live();
    let options = TIMED_OPTIONS;
    each_third_python(2, |python| {
        // It stays in one C function, deep below Python frames and callbacks: each sample has the same chain.
        let program = Program::start(python.script("stay_in_c.py"));
        let ebpf = chains(program.pid(), Box::new(EbpfBackend::new(&options).expect("privileges")));
        let ptrace = chains(
            program.pid(),
            Box::new(PtraceBackend::new(&options, frame_walk::walk).expect("privileges")),
        );
        let (a, b): (BTreeSet<_>, BTreeSet<_>) = (ebpf.keys().collect(), ptrace.keys().collect());
        assert_eq!(a, b, "{}", python.name);
        let (frames, _, walk) = ebpf.keys().next().expect("a chain");
        assert_eq!((ebpf.len(), *walk), (1, WalkStatus::Complete), "{}", python.name);
        assert!(frames.len() > 60, "{}: {} frames", python.name, frames.len());
        drop(program);
    });
}

//! No backend changes the results of a target's system calls: every kind that a signal or a stop can interrupt is
//! compared with a run without nativeprof.
//!
//! Needs root and gcc; fails with a message where one is missing. The long form, a minute at 1 kHz for each backend and
//! event: `cargo test --release --test unchanged -- --ignored --nocapture`.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use nativeprof::capture::ebpf::EbpfBackend;
use nativeprof::capture::ptrace::{PtraceBackend, TimerKind};
use nativeprof::capture::{Backend, EventKind, OffCpuOptions, SamplingOptions};
use nativeprof::cpython::frame_walk;
use nativeprof::event::Event;

use common::chance::{assert_likely, repeated};
use common::{Program, live, nativeprof, programs};

mod common;

const OPTIONS: SamplingOptions = SamplingOptions {
    rate: 1000,
    interval: 0,
    max_overhead: 1.0,
    event: EventKind::CpuClock,
    kernel: false,
    mode: nativeprof::capture::Mode::Cpu,
    off_cpu: OffCpuOptions {
        min_blocked: 0,
        wakers: false,
    },
    children: false,
    workers: false,
    spans: false,
    host: None,
};

/// Calls and changed results by kind of call.
type Calls = BTreeMap<String, (u64, u64)>;

/// Lets the program make its calls for this long; returns them, and the number of samples.
fn calls(mut backend: Option<Box<dyn Backend>>, time: Duration) -> (Calls, u64) {
    let mut program = Program::start(programs::unchanged());
    let mut samples = 0;
    if let Some(backend) = &mut backend {
        backend.attach(program.pid()).expect("permission to sample");
        backend.start().expect("sampling");
    }
    program.send("go");
    program.wait_for("STARTED");
    let end = Instant::now() + time;
    let mut events = Vec::new();
    while Instant::now() < end {
        match &mut backend {
            Some(backend) => {
                backend.poll(Duration::from_millis(10), &mut events).expect("events");
                samples += events.drain(..).filter(|e| matches!(e, Event::Sample(_))).count() as u64;
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    program.send("how many?");
    program.wait_for("END");
    // Before it exits: a tracer in our process would wait for it, and so would we.
    drop(backend);
    program.finish();
    let mut calls = Calls::new();
    for line in &program.said {
        if line.starts_with("SKIPPED") {
            eprintln!("{line}");
        }
        if let ["CALLS", kind, made, changed, _] = line.split(' ').collect::<Vec<_>>()[..] {
            let number = |word: &str| word.parse::<u64>().expect("a number");
            let entry = calls.entry(kind.to_string()).or_default();
            *entry = (entry.0 + number(made), entry.1 + number(changed));
        }
    }
    assert!(calls.len() >= 30, "{:?}", program.said);
    (calls, samples)
}

fn check(time: Duration) {
    let open = |timer: Option<TimerKind>| -> Box<dyn Backend> {
        let Some(timer) = timer else {
            return Box::new(EbpfBackend::new(&OPTIONS).expect("privileges"));
        };
        let backend = PtraceBackend::with_timer(&OPTIONS, frame_walk::walk, timer).expect("privileges");
        assert_eq!(backend.event(), timer.name());
        Box::new(backend)
    };
    let (without, _) = calls(None, time);
    for (name, timer) in [
        ("ebpf", None),
        ("ptrace, perf events", Some(TimerKind::Perf)),
        ("ptrace, perf events of user code", Some(TimerKind::PerfUser)),
        ("ptrace, no perf events", Some(TimerKind::Procfs)),
    ] {
        // Not earlier: a tracer waits for all children of its process.
        let (with, samples) = calls(Some(open(timer)), time);
        assert_likely!(samples > 300, "{name}: {samples} samples");
        let mut changed = 0;
        for (kind, (made, bad)) in &with {
            let (made_without, bad_without) = without[kind];
            assert_eq!(bad_without, 0, "{kind}: changed without nativeprof");
            assert!(*made > 0 || made_without == 0, "{name}: {kind} was never made");
            if *bad > 0 {
                eprintln!("{name}: {bad} of {made} calls of {kind} had another result");
            }
            changed += bad;
        }
        eprintln!("{name}: {changed} results changed in {samples} samples");
        // At most one in this many stops (the bound that doctor states); one in a short run is within it.
        let bound = timer.map_or(0, |_| 1 + samples / 10_000);
        assert!(
            changed <= bound,
            "{name}: {changed} results changed in {samples} samples: {with:?}"
        );
    }
}

/// Runs `check` in a copy of this process in which SIGCHLD is blocked from the start, as in the command: otherwise the
/// test harness's own thread receives it, and the tracer is notified of stops late.
fn check_in_child(test: &str, time: Duration) {
    const INSIDE: &str = "NATIVEPROF_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return repeated(|| check(time));
    }
    let block = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD]); os.execv(sys.argv[1], sys.argv[1:])";
    let python = common::newest_python().script("shares.py");
    let done = Command::new(python.get_program())
        .args(["-c", block])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--include-ignored", "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .expect("this program starts");
    let said = String::from_utf8_lossy(&done.stdout);
    eprintln!("{said}{}", String::from_utf8_lossy(&done.stderr));
    // A name that fits no test would pass.
    assert!(done.status.success() && said.contains("1 passed"), "see above");
}

#[test]
fn results_of_calls_are_unchanged() {
    let _live = live();
    check_in_child("results_of_calls_are_unchanged", Duration::from_secs(2));
}

#[test]
#[ignore = "takes five minutes; run with --ignored"]
fn results_of_calls_are_unchanged_for_a_minute() {
    let _live = live();
    check_in_child("results_of_calls_are_unchanged_for_a_minute", Duration::from_secs(60));
}

/// Python writes unbuffered output to a pipe with one `write` each, and does not retry what that leaves unwritten.
#[test]
fn unbuffered_output_to_a_slow_reader_is_complete() {
    let _live = live();
    let script = "import os, sys\nfor i in range(12): sys.stdout.write('%04d' % i + 'x' * 2_000_000 + '\\n')";
    for backend in ["ebpf", "ptrace"] {
        let ours = nativeprof(&[]);
        // `dd` reads 16 KB at a time, each with a separate system call.
        let line = "\"$0\" record --backend \"$1\" -r 1000 -o /dev/null -f collapsed -- \"$2\" -c \"$3\" 2>/dev/null | dd bs=16k status=none | wc -c";
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).arg(ours.get_program());
        shell
            .arg(backend)
            .arg(common::newest_python().script("shares.py").get_program())
            .arg(script);
        shell.env("PYTHONUNBUFFERED", "1");
        for name in ["SUDO_UID", "SUDO_GID", "SUDO_USER", "DOAS_USER"] {
            shell.env_remove(name);
        }
        let done = shell.output().expect("a shell");
        let count = String::from_utf8_lossy(&done.stdout).trim().to_string();
        assert_eq!(count, (12 * 2_000_005).to_string(), "{backend}: bytes that arrived");
    }
}

//! A target with false interpreter data: it may waste its own samples, not our memory or time.
//!
//! Needs root and gcc.

use std::time::{Duration, Instant};

use common::recording::Running;
use common::{Program, Scratch, live, nativeprof, programs};

mod common;

/// Maximum memory of nativeprof at any time, KB.
const MAX_MEMORY: u64 = 256 << 10;
/// Maximum size of the profile, bytes; most of it is names.
const MAX_FILE: u64 = 1 << 30;

/// Peak memory use of a process so far, KB; `None` once it has exited.
fn peak(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

fn check(backend: &str, rate: &str) {
    let mut program = Program::start(programs::malicious_target());
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut command = nativeprof(&["attach", &program.pid().to_string(), "-d", "3", "-r", rate]);
    command.args(["--backend", backend, "-o"]).arg(&file);
    let mut running = Running::start(command);
    // If it has not ended by long after its time, it hangs.
    let (pid, start) = (running.child.id(), Instant::now());
    let mut most = 0;
    while let Some(now) = peak(pid) {
        most = most.max(now);
        assert!(start.elapsed() < Duration::from_secs(120), "{backend}: it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    let done = running.finish();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{backend}: {said}");
    assert!(
        said.contains("CPython 3.12.1 (malicious_target)"),
        "{backend}: it was not taken in: {said}"
    );
    assert!(most > 0 && most < MAX_MEMORY, "{backend}: {most} KB");
    let size = std::fs::metadata(&file).expect("a file").len();
    assert!(size < MAX_FILE, "{backend}: the profile has {size} bytes");
    // Every sample has found its place.
    let number = |before: &str| -> u64 {
        let rest = said.split_once(before).map_or("", |(_, rest)| rest);
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
        let number = digits.and_then(|d| d.parse().ok());
        number.unwrap_or_else(|| panic!("{backend}: no number after `{before}` in {said}"))
    };
    let kinds = ["exact ", "repaired ", "partial "].map(number);
    let line = said.lines().find_map(|l| l.split_once(" samples in "));
    let taken: u64 = line
        .and_then(|(l, _)| l.rsplit(' ').next()?.parse().ok())
        .expect("a summary");
    // How many samples fit into that time depends on the target.
    assert!(taken > 0, "{backend}: {said}");
    assert_eq!(taken, kinds.iter().sum::<u64>(), "{backend}: {said}");
    // It continues, and ends when it is stopped.
    program.finish();
}

#[test]
fn false_data_wastes_only_the_targets_samples() {
    let _live = live();
    for (backend, rate) in [("ebpf", "1000"), ("ebpf", "99"), ("ptrace", "500")] {
        check(backend, rate);
    }
}

//! A target that lies about its interpreter: it may waste its own samples, not our memory or time.
//!
//! Needs root and gcc.

use std::time::{Duration, Instant};

use common::recording::Running;
use common::{Program, Scratch, live, nativeprof, programs};

mod common;

/// KB of memory that nativeprof may ever have had.
const MOST_MEMORY: u64 = 256 << 10;
/// Bytes that the profile may have; most of it are names.
const MOST_FILE: u64 = 1 << 30;

/// Highest memory use of a process so far, KB; `None` when it has ended.
fn peak(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

fn check(backend: &str, rate: &str) {
    let mut program = Program::start(programs::forged());
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut command = nativeprof(&["attach", &program.pid().to_string(), "-d", "3", "-r", rate]);
    command.args(["--backend", backend, "-o"]).arg(&file);
    let mut running = Running::start(command);
    // Long after it should have ended, it hangs.
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
        said.contains("CPython 3.12.1 (forged)"),
        "{backend}: it was not taken in: {said}"
    );
    assert!(most > 0 && most < MOST_MEMORY, "{backend}: {most} KB");
    let size = std::fs::metadata(&file).expect("a file").len();
    assert!(size < MOST_FILE, "{backend}: the profile has {size} bytes");
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
    // How many it lets be taken in that time is the liar's affair.
    assert!(taken > 0, "{backend}: {said}");
    assert_eq!(taken, kinds.iter().sum::<u64>(), "{backend}: {said}");
    // It goes on, and ends when it is told to.
    program.finish();
}

#[test]
fn lies_waste_only_the_liars_samples() {
    let _live = live();
    for (backend, rate) in [("ebpf", "1000"), ("ebpf", "99"), ("ptrace", "500")] {
        check(backend, rate);
    }
}

//! A target that lies about its interpreter: it may waste its own samples, not our memory or time.
//!
//! Needs root and gcc.

use std::time::{Duration, Instant};

use nativeprof::export::json;

use common::recording::Running;
use common::{Program, Scratch, live, nativeprof, programs};

mod common;

/// KB of memory that nativeprof may ever have had.
const MOST_MEMORY: u64 = 256 << 10;

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
    assert!(said.contains("CPython 3.12.1 (forged)"), "{backend}: it was not taken in: {said}");
    assert!(most > 0 && most < MOST_MEMORY, "{backend}: {most} KB");
    let profile = json::read(&std::fs::read(&file).expect("a file")).expect("a whole profile");
    let q = &profile.meta.quality;
    assert!(q.taken > 20, "{backend}: {q:?}");
    assert_eq!(q.taken, q.exact + q.repaired + q.partial, "{backend}: {q:?}");
    assert_eq!(q.taken, profile.nodes[0].count, "{backend}: {q:?}");
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

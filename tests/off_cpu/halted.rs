//! Threads that are kept from running: stopped, frozen, throttled.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nativeprof::capture::ebpf::switch_in;

use super::common::chance::{assert_likely, repeated};
use super::common::recording::{Recording, attach, attach_while, nativeprof};
use super::common::{Program, live, newest_python};
use super::{ROLES, SPINNERS, states};

/// What keeps a process from running.
enum Halt {
    Signal,
    /// The directory of its control group, and the file and words that freeze and thaw it.
    Freezer(PathBuf, &'static str, [&'static str; 2]),
}

impl Halt {
    /// Those that this machine has, with the state that they cause. Each group has no processes yet.
    fn all() -> Vec<(Halt, &'static str)> {
        let mut all = vec![(Halt::Signal, "[stopped]")];
        let name = format!("nativeprof-test-{}", std::process::id());
        for (mount, file, words) in [
            ("/sys/fs/cgroup", "cgroup.freeze", ["1", "0"]),
            ("/sys/fs/cgroup/unified", "cgroup.freeze", ["1", "0"]),
            ("/sys/fs/cgroup/freezer", "freezer.state", ["FROZEN", "THAWED"]),
        ] {
            let directory = Path::new(mount).join(&name);
            // On a file system of another kind the file is not there.
            if fs::create_dir(&directory).is_ok() && directory.join(file).exists() {
                all.push((Halt::Freezer(directory, file, words), "[frozen]"));
            } else {
                let _ = fs::remove_dir(&directory);
                eprintln!("NOTE: not tested, as it is not here: {mount} with {file}");
            }
        }
        all
    }

    fn add(&self, program: &Program) {
        if let Halt::Freezer(directory, ..) = self {
            fs::write(directory.join("cgroup.procs"), program.pid().to_string()).expect("root may move processes");
        }
    }

    fn set(&self, pid: u32, halted: bool) {
        match self {
            Halt::Signal => {
                let signal = if halted { "STOP" } else { "CONT" };
                let done = Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
                assert!(done.is_ok_and(|s| s.success()), "a signal can be sent");
            }
            Halt::Freezer(directory, file, [freeze, thaw]) => {
                let word = if halted { freeze } else { thaw };
                fs::write(directory.join(file), word).expect("root may freeze processes");
            }
        }
    }
}

impl Drop for Halt {
    fn drop(&mut self) {
        if let Halt::Freezer(directory, ..) = self {
            let _ = fs::remove_dir(directory); // its program has ended
        }
    }
}

/// Ends the halt of a program, which could not be killed else.
struct EndHalt<'a>(&'a Halt, u32);

impl Drop for EndHalt<'_> {
    fn drop(&mut self) {
        self.0.set(self.1, false);
    }
}

/// Threads of a process that is stopped or frozen do not wait for what they waited for, or want, before.
#[test]
fn stopped_and_frozen_threads() {
    let _live = live();
    let has_ebpf = switch_in::check().is_ok();
    repeated(|| {
        for (halt, expected) in Halt::all() {
            let mut program = Program::start(newest_python().script_with_gil("waits.py"));
            halt.add(&program);
            let pid = program.pid();
            let end = EndHalt(&halt, pid);
            let words = |backend| ["--backend", backend, "--mode", "wall", "-r", "100"];
            let check_of = |roles: &[&str], case: &str, r: &Recording, least: f64, duration: f64| {
                for role in roles {
                    let states = states(r, role);
                    let share = states.get(expected).copied().unwrap_or(0) as f64 / (duration * 1e9);
                    assert_likely!(share > least, "{case}, {expected}: {role}: {states:?}\n{}", r.stderr);
                }
            };
            let check = |case, r: &Recording, least| check_of(SPINNERS, case, r, least, r.profile.meta.duration);
            if has_ebpf {
                // While they are sampled: as the switch shows it.
                let r = attach_while(program.pid(), &words("ebpf"), || halt.set(pid, true));
                check("ebpf", &r, 0.6);
            }
            let mut dumped = None;
            let mut dump = || dumped = nativeprof(&["dump", &pid.to_string()]).output().ok();
            if has_ebpf {
                // Within the recording, with threads that only sleep: version 1 of the freezer leaves them where they are.
                halt.set(pid, false);
                let mut halted = 0.0;
                let r = attach_while(pid, &words("ebpf"), || {
                    halt.set(pid, true);
                    let start = Instant::now();
                    while start.elapsed() < Duration::from_millis(400) {
                        dump();
                    }
                    halted = start.elapsed().as_secs_f64();
                    halt.set(pid, false);
                });
                // (On a busy machine the recording may have ended before.)
                let halted = r.profile.meta.duration.min(halted);
                check_of(&["w_sleep", "w_spin_one"], "ebpf, ended", &r, 0.5, halted);
            }
            halt.set(pid, true);
            if has_ebpf && matches!(halt, Halt::Signal) {
                check("ebpf, before", &attach(program.pid(), &words("ebpf")), 0.9);
            }
            check("ptrace, before", &attach(program.pid(), &words("ptrace")), 0.9);
            dump();
            drop(end);
            program.finish();
            let dump = dumped.expect("nativeprof starts").stdout;
            let dump = String::from_utf8_lossy(&dump);
            let shown = dump
                .matches(&format!("\": {}", expected.trim_matches(['[', ']'])))
                .count();
            assert_eq!(shown, 1 + ROLES.len() + SPINNERS.len(), "{expected}: {dump}");
        }
    });
}

/// A control group that is permitted a thirtieth of a CPU, with another one in it that has no limit of its own. Removed
/// at the end.
struct Throttled(PathBuf);

impl Throttled {
    /// Of each version of control groups that this machine has.
    fn all() -> Vec<Throttled> {
        let name = format!("nativeprof-test-throttled-{}", std::process::id());
        let mut all = Vec::new();
        for (mount, file, limit) in [
            ("/sys/fs/cgroup", "cpu.max", "3000 100000"),
            ("/sys/fs/cgroup/unified", "cpu.max", "3000 100000"),
            ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "3000"),
            ("/sys/fs/cgroup/cpu,cpuacct", "cpu.cfs_quota_us", "3000"),
        ] {
            let group = Throttled(Path::new(mount).join(&name));
            let _ = fs::create_dir(&group.0);
            // (One mount may be a link to another.)
            if group.0.join(file).exists() && fs::create_dir(group.0.join("inner")).is_ok() {
                fs::write(group.0.join(file), limit).expect("root may limit groups");
                all.push(group);
            } else {
                eprintln!("NOTE: not tested, as it is not here: {mount} with {file}");
            }
        }
        all
    }
}

impl Drop for Throttled {
    fn drop(&mut self) {
        // Its program has ended.
        let _ = fs::remove_dir(self.0.join("inner"));
        let _ = fs::remove_dir(&self.0);
    }
}

/// Threads that want to run and whose group may not, by the limit of a group around it.
#[test]
fn throttled_threads() {
    let _live = live();
    repeated(|| {
        for group in Throttled::all() {
            let mut program = Program::start(newest_python().script_with_gil("waits.py"));
            fs::write(group.0.join("inner/cgroup.procs"), program.pid().to_string()).expect("root may move processes");
            for backend in ["ebpf", "ptrace"] {
                if backend == "ebpf" && switch_in::check().is_err() {
                    continue;
                }
                let words = ["--backend", backend, "--mode", "wall", "-r", "100"];
                let r = attach(program.pid(), &words);
                let all: Vec<_> = SPINNERS.iter().map(|role| states(&r, role)).collect();
                // One of them has the interpreter lock and nearly all the time may not run. The other one wakes up from time to
                // time to request it.
                let of = |state: &str| all.iter().filter_map(|s| s.get(state)).sum::<u64>() as f64;
                let share = of("[throttled]") / (r.profile.meta.duration * 1e9);
                assert_likely!(
                    (0.5..1.9).contains(&share),
                    "{backend}: {share:.2} in {all:?}\n{}",
                    r.stderr
                );
                assert!(r.stderr.contains(", throttled "), "{}", r.stderr);
            }
            program.finish();
        }
    });
}

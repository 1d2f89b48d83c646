//! Runs nativeprof and checks what it wrote.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nativeprof::profile::json;
use nativeprof::profile::model::{Frame, FrameKind, Profile};
use serde_json::Value;

use super::chance::{assert_likely, patience};
use super::{Program, Scratch};

/// The command under test; as root if the tests run as root, even under sudo.
pub fn nativeprof(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nativeprof"));
    for name in ["SUDO_UID", "SUDO_GID", "SUDO_USER", "DOAS_USER"] {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// What `dump --tasks` of a process prints, with more arguments.
pub fn dump_tasks(pid: u32, words: &[&str]) -> Output {
    let mut command = nativeprof(&["dump", "--tasks", &pid.to_string()]);
    command.args(words).output().expect("nativeprof starts")
}

/// The tasks of a process, as JSON.
pub fn dumped_tasks(pid: u32) -> Value {
    let done = dump_tasks(pid, &["--json"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).expect("JSON")
}

/// A profile with the output printed while it was made.
pub struct Recording {
    pub profile: Profile,
    pub stderr: String,
    /// Time that the host took from the CPUs of this machine meanwhile (steal).
    stolen: Duration,
    stacks: Vec<(Vec<u32>, u64)>,
}

/// Total time that the host has taken from the CPUs of this machine: the eighth number of /proc/stat, in hundredths of
/// a second (proc_stat(5)).
fn stolen() -> Duration {
    let stat = std::fs::read_to_string("/proc/stat").expect("readable");
    let steal = stat.split_whitespace().nth(8).and_then(|n| n.parse::<u64>().ok());
    Duration::from_millis(10 * steal.expect("a number for all CPUs"))
}

/// Samples a process at 1000 Hz for a second, longer if an attempt failed, or with other options.
pub fn attach(pid: u32, words: &[&str]) -> Recording {
    attach_while(pid, words, || {})
}

/// Like `attach`; runs `act` once sampling has started.
pub fn attach_while(pid: u32, words: &[&str], act: impl FnOnce()) -> Recording {
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut command = nativeprof(&["attach", &pid.to_string(), "-o"]);
    command.arg(&file).args(words);
    if !words.contains(&"-r") {
        command.args(["-r", "1000"]);
    }
    if !words.contains(&"-d") {
        command.args(["-d", &patience().to_string()]);
    }
    let before = stolen();
    let mut running = Running::start(command);
    act();
    let done = running.finish();
    Recording::new(&file, done, stolen() - before)
}

/// `attach` to a program that waits for a line, works, says DONE and waits for another one: of its work, whatever that is
/// sampled by.
pub fn attach_to_work(command: Command, words: &[&str], environment: &[(&str, &str)]) -> Recording {
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut program = Program::start(command);
    let mut ours = nativeprof(&["attach", &program.pid().to_string(), "-o"]);
    ours.arg(&file).args(words).envs(environment.iter().copied());
    let mut running = Running::start(ours);
    program.send("go");
    program.wait_for("DONE");
    running.signal("INT");
    let recording = Recording::of(&file, running.finish());
    program.send("end");
    program.finish();
    recording
}

/// `record -- COMMAND`, at 1000 Hz unless another rate is given.
pub fn record(words: &[&str], command: &Command) -> Recording {
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut ours = nativeprof(&["record", "-o"]);
    ours.arg(&file).args(words);
    if !words.contains(&"-r") {
        ours.args(["-r", "1000"]);
    }
    ours.arg("--").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => ours.env(name, value),
            None => ours.env_remove(name),
        };
    }
    let before = stolen();
    let done = ours.stdin(Stdio::null()).output().expect("nativeprof starts");
    Recording::new(&file, done, stolen() - before)
}

/// The profile that another command writes to this file.
pub fn written_by(mut command: Command, file: &std::path::Path) -> Recording {
    let before = stolen();
    let done = command.stdin(Stdio::null()).output().expect("the command starts");
    Recording::new(file, done, stolen() - before)
}

/// nativeprof while it samples.
pub struct Running {
    pub child: Child,
    output: String,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Running {
    /// Starts it and waits until it reports that it samples.
    pub fn start(command: Command) -> Running {
        Running::start_until(command, "sampling ")
    }

    /// Starts it and waits until its messages have these words.
    pub fn start_until(mut command: Command, words: &str) -> Running {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nativeprof starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut output = String::new();
        while !output.contains(words) {
            let read = stderr.read_line(&mut output).expect("a readable pipe");
            assert!(read > 0, "nativeprof ended before it sampled: {output}");
        }
        Running { child, output, stderr }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, by its name.
    pub fn signal(&self, name: &str) {
        let done = Command::new("kill")
            .args(["-s", name, &self.child.id().to_string()])
            .status();
        assert!(done.is_ok_and(|s| s.success()), "signal {name} cannot be sent");
    }

    /// Reads its messages until one has these words; returns all so far.
    pub fn read_until(&mut self, words: &str) -> &str {
        while !self.output.contains(words) {
            let read = self.stderr.read_line(&mut self.output).expect("a readable pipe");
            assert!(read > 0, "nativeprof ended before it said `{words}`: {}", self.output);
        }
        &self.output
    }

    pub fn finish(&mut self) -> Output {
        let mut stderr = std::mem::take(&mut self.output).into_bytes();
        self.stderr.read_to_end(&mut stderr).expect("a readable pipe");
        let mut stdout = Vec::new();
        // The test may read it itself.
        if let Some(mut pipe) = self.child.stdout.take() {
            pipe.read_to_end(&mut stdout).expect("a readable pipe");
        }
        let status = self.child.wait().expect("a child to wait for");
        Output { status, stdout, stderr }
    }
}

impl Recording {
    /// Wall time below a function by the state it was spent in, ns; `""`: running.
    pub fn states_below(&self, function: &str) -> BTreeMap<String, u64> {
        let p = &self.profile;
        let wall = p.find_value("wall").expect("wall time is recorded");
        let mut states = BTreeMap::new();
        for (at, time) in p.self_amounts(wall).into_iter().enumerate() {
            let mut up = at;
            let mut below = false;
            while up > 0 {
                below |= p.frames[p.nodes[up].frame as usize].name == function;
                up = p.nodes[up].parent as usize;
            }
            if below && time > 0 {
                let leaf = &p.frames[p.nodes[at].frame as usize];
                let state = match leaf.kind {
                    FrameKind::State => leaf.name.as_str(),
                    _ => "",
                };
                *states.entry(state.to_string()).or_default() += time;
            }
        }
        states
    }

    /// What a run of nativeprof wrote to this file, and printed.
    pub fn of(file: &std::path::Path, done: Output) -> Recording {
        Recording::new(file, done, Duration::ZERO)
    }

    fn new(file: &std::path::Path, done: Output, stolen: Duration) -> Recording {
        let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(
            done.status.success(),
            "nativeprof failed with {}:\n{stderr}",
            done.status
        );
        let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("no profile was written ({e}):\n{stderr}"));
        let profile = json::read(&bytes).unwrap_or_else(|e| panic!("unreadable profile: {e:?}"));
        let nodes = &profile.nodes;
        let mut self_counts: Vec<u64> = nodes.iter().map(|n| n.count).collect();
        for n in nodes.iter().skip(1) {
            self_counts[n.parent as usize] -= n.count;
        }
        let mut stacks = Vec::new();
        for (i, count) in self_counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let mut frames = Vec::new();
            let mut at = i;
            while at > 0 {
                frames.push(nodes[at].frame);
                at = nodes[at].parent as usize;
            }
            frames.reverse();
            stacks.push((frames, *count));
        }
        Recording {
            profile,
            stderr,
            stolen,
            stacks,
        }
    }

    /// Each distinct stack, outermost frame first, with its samples.
    pub fn stacks(&self) -> impl Iterator<Item = (Vec<&Frame>, u64)> {
        let frames = &self.profile.frames;
        self.stacks
            .iter()
            .map(|(stack, n)| (stack.iter().map(|f| &frames[*f as usize]).collect(), *n))
    }

    /// Those that are not truncated: a busy machine loses the end of one now and then, which `check_quality` bounds.
    pub fn complete_stacks(&self) -> impl Iterator<Item = (Vec<&Frame>, u64)> {
        self.stacks().filter(|(stack, _)| !is_truncated(stack))
    }

    pub fn samples(&self) -> u64 {
        self.profile.nodes[0].count
    }

    /// Samples with a function of this name on the stack.
    pub fn with(&self, name: &str) -> u64 {
        self.matching(|stack| stack.iter().any(|f| f.name == name))
    }

    pub fn matching(&self, wanted: impl Fn(&[&Frame]) -> bool) -> u64 {
        self.stacks().filter(|(stack, _)| wanted(stack)).map(|(_, n)| n).sum()
    }

    /// The counts add up, almost nothing is lost, almost nothing is incomplete.
    pub fn check_quality(&self, case: &str) {
        self.check_quality_but(case, &[]);
    }

    /// The same, where these reasons for partial stacks are accepted.
    pub fn check_quality_but(&self, case: &str, excused: &[&str]) {
        let q = &self.profile.meta.quality;
        let all = q.exact + q.repaired + q.partial;
        assert_eq!(q.taken, all, "{case}: {q:?}");
        assert_eq!(q.taken, self.samples(), "{case}: samples in the tree");
        assert_eq!(
            q.taken as usize,
            self.profile.timeline.len(),
            "{case}: samples in the timeline"
        );
        self.check_lost(case);
        assert_likely!(q.taken >= 50, "{case}: only {} samples\n{}", q.taken, self.stderr);
        let with_reason: u64 = q.reasons.values().sum();
        assert_eq!(
            with_reason, q.partial,
            "{case}: a partial stack without a reason: {q:?}"
        );
        let truncated = self.matching(is_truncated);
        assert!(
            truncated <= q.partial,
            "{case}: {truncated} stacks are truncated, {} are called partial",
            q.partial
        );
        let excused: u64 = excused.iter().filter_map(|why| q.reasons.get(*why)).sum();
        let bad = q.partial - excused;
        assert_likely!(
            bad <= (q.taken / 1000).max(1),
            "{case}: {bad} of {} stacks are incomplete: {:?}\n{}",
            q.taken,
            q.reasons,
            self.examples(is_truncated)
        );
        // Repaired stacks are complete and must match the table of calls like all others; there must be few. glibc's
        // tables end before the system call that creates a thread (sysdeps/unix/sysv/linux/x86_64/clone3.S, 2.36).
        let makes_threads = |f: &&Frame| f.name.contains("pthread_create") || f.name.contains("clone");
        let making_threads = self.matching(|stack| stack.iter().rev().take(5).any(makes_threads));
        assert_likely!(
            q.repaired <= (q.taken / 20).max(1) + making_threads,
            "{case}: {} of {} stacks had to be repaired, where {making_threads} made threads",
            q.repaired,
            q.taken
        );
    }

    pub fn check_lost(&self, case: &str) {
        let q = &self.profile.meta.quality;
        assert_likely!(q.lost <= self.excused(q.expected), "{case}: {}", self.stderr);
    }

    /// Samples that may be lost, if they are counted. A machine that stalls for a moment loses some of the deepest
    /// stacks; the benchmarks show that a quiet one loses none. With ptrace, ticks in user code stop the thread
    /// themselves; for one in the kernel the tracer comes a moment later, and the thread may sleep by then. Sampling is
    /// not possible while the host has taken the CPUs.
    fn excused(&self, expected: u64) -> u64 {
        let stolen = self.stolen.as_millis() as u64 * self.profile.meta.rate / 1000;
        let some = if self.profile.meta.backend == "ptrace" { 6 } else { 10 };
        expected / some + stolen
    }

    /// As many samples as the CPU time requires, no fewer and no more, except for a few at start and end of threads.
    pub fn check_rate(&self, case: &str) {
        let meta = &self.profile.meta;
        let q = &meta.quality;
        assert_eq!(q.expected, q.taken + q.lost, "{case}: {}", self.stderr);
        let due = meta.target_cpu * meta.rate as f64;
        assert_likely!(
            (q.taken + self.excused(due as u64)) as f64 >= due * 0.98 - 5.0,
            "{case}: {} samples, {due:.0} due",
            q.taken
        );
        // The timers are those of the CPUs: how often they hit a thread that sleeps now and then is a matter of chance.
        assert_likely!(
            q.taken as f64 <= due * 1.02 + 5.0 + 2.5 * due.sqrt(),
            "{case}: {} samples, only {due:.0} due",
            q.taken
        );
    }

    /// Compares sample counts of parts with their times.
    pub fn check_shares(&self, case: &str, truth: &BTreeMap<String, f64>) {
        let counts = truth.keys().map(|name| (name.clone(), self.with(name))).collect();
        check_counts(case, &counts, truth, 0.01);
    }

    /// Checks the stacks against a table of calls.
    ///
    /// Considers only functions of the programs under `fixtures/programs`; `""` is the start of the stack. Nothing is
    /// checked after a truncation, where everything is possible.
    pub fn check_calls(&self, case: &str, ours: &Ours, table: &[(&str, &[&str])]) {
        let mut wrong: BTreeMap<String, (u64, String)> = BTreeMap::new();
        for (stack, n) in self.stacks() {
            if let Some(why) = wrong_call(&stack, ours, table) {
                let entry = wrong.entry(why).or_insert((0, text(&stack)));
                entry.0 += n;
            }
        }
        let mut report = String::new();
        for (why, (n, example)) in &wrong {
            let _ = writeln!(report, "{n} samples: {why}\n    {example}");
        }
        assert!(wrong.is_empty(), "{case}: impossible stacks\n{report}");
    }

    /// Some stacks as text.
    pub fn examples(&self, wanted: impl Fn(&[&Frame]) -> bool) -> String {
        let mut some: Vec<_> = self.stacks().filter(|(stack, _)| wanted(stack)).collect();
        some.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        let line = |(stack, n): &(Vec<&Frame>, u64)| format!("  {n} x {}\n", text(stack));
        some.iter().take(5).map(line).collect()
    }
}

/// Checks that the share of each count is within sampling error of its time's share, plus `slack` for what is between
/// the program's own clock calls or outside of the sampling time.
pub fn check_counts(case: &str, counts: &BTreeMap<String, u64>, truth: &BTreeMap<String, f64>, slack: f64) {
    let (all, time) = (counts.values().sum::<u64>() as f64, truth.values().sum::<f64>());
    assert_likely!(all >= 100.0 && time > 0.0, "{case}: {counts:?} for {truth:?}");
    for (name, ns) in truth {
        let (seen, expected) = (counts[name] as f64 / all, ns / time);
        // four standard deviations of a binomial share
        let band = 4.0 * (expected * (1.0 - expected) / all).sqrt() + slack;
        assert_likely!(
            (seen - expected).abs() <= band,
            "{case}: {name} has {seen:.3} of the samples and {expected:.3} of the time (band {band:.3}): {counts:?} for {truth:?}"
        );
    }
}

/// Checks that wall time is CPU time and time off the CPU, and that one thread has that of the recording.
pub fn check_account(case: &str, profile: &Profile) {
    let of = |value| profile.amounts(profile.find_value(value).expect("the value"))[0];
    assert_eq!(of("wall"), of("cpu") + of("off_cpu"), "{case}: the account closes");
    let duration = profile.meta.duration * 1e9;
    assert_likely!(
        (of("wall") as f64 / duration - 1.0).abs() < 0.05,
        "{case}: {} of {duration}",
        of("wall")
    );
}

/// The frames that the table of calls is about.
pub struct Ours {
    /// Native frames of modules whose names begin with these.
    pub modules: &'static [&'static str],
    /// Python frames of code that is in no file, by the beginning of the file name.
    pub files: &'static [&'static str],
}

pub const TRUTH: Ours = Ours {
    modules: &["known_shares.so"],
    files: &[],
};

impl Ours {
    fn has(&self, f: &Frame) -> bool {
        match f.kind {
            FrameKind::Python => {
                let programs = f.filename.contains("/fixtures/programs/") && !f.filename.ends_with("/handshake.py");
                programs || self.files.iter().any(|start| f.filename.starts_with(start))
            }
            // Excludes what compiler and linker add: linkage tables, `_init` and the like.
            FrameKind::Native => {
                if f.name.ends_with("@plt") {
                    return false;
                }
                let written = ["t_", "n_", "e_", "plugin"]
                    .iter()
                    .any(|start| f.name.starts_with(start));
                (written || f.name == "main") && self.modules.iter().any(|start| f.module.starts_with(start))
            }
            _ => false,
        }
    }
}

/// Whether frames are missing, of which a frame says why.
pub fn is_truncated(stack: &[&Frame]) -> bool {
    stack.iter().any(|f| f.kind == FrameKind::Truncated)
}

/// The call that the program does not make, if the stack has one. `table`: functions, and those
/// that each may call.
fn wrong_call(stack: &[&Frame], ours: &Ours, table: &[(&str, &[&str])]) -> Option<String> {
    // `None`: unknown, after a truncation.
    let mut caller = Some("");
    let mut eval = false;
    for f in stack {
        match f.kind {
            FrameKind::Truncated => {
                caller = None;
                eval = false;
                continue;
            }
            FrameKind::Native if f.name.starts_with("_PyEval_EvalFrameDefault") => eval = true,
            FrameKind::Python if eval => {
                return Some(format!("a evaluation loop without Python frames calls {}", f.name));
            }
            _ => {}
        }
        if !ours.has(f) {
            continue;
        }
        if let Some(from) = caller
            && !table
                .iter()
                .any(|(name, callees)| *name == from && callees.contains(&f.name.as_str()))
        {
            return Some(format!("`{from}` calls `{}`", f.name));
        }
        caller = Some(&f.name);
    }
    None
}

/// The frames' names, without repetitions and the middle of long stacks.
pub fn text(stack: &[&Frame]) -> String {
    let shown = |f: &&Frame| match f.kind {
        FrameKind::Python => format!("{} (Python)", f.name),
        FrameKind::Native | FrameKind::Unknown => format!("{} ({})", f.name, f.module),
        _ => f.name.clone(),
    };
    let mut names: Vec<String> = stack.iter().map(shown).collect();
    if names.len() > 60 {
        names.splice(30..names.len() - 30, ["...".to_string()]);
    }
    names.join("; ")
}

/// Sums of a value over the stacks of suspended tasks: (innermost task, what it awaits) -> amount.
pub fn awaited(profile: &Profile, value: &str) -> BTreeMap<(String, String), u64> {
    let value = profile.find_value(value).expect("the value");
    let mut sums = BTreeMap::new();
    for (at, amount) in profile.self_amounts(value).into_iter().enumerate() {
        let name = |at: usize| &*profile.frames[profile.nodes[at].frame as usize].name;
        let Some(kind) = name(at).strip_prefix("[awaiting ") else {
            continue;
        };
        let (mut task, mut up) = ("", at);
        while up > 0 && task.is_empty() {
            up = profile.nodes[up].parent as usize;
            task = name(up).strip_prefix("[task: ").unwrap_or_default();
        }
        let plain = |text: &str| text.trim_end_matches(']').to_string();
        *sums.entry((plain(task), plain(kind))).or_default() += amount;
    }
    sums
}

//! `host`: processes that are sampled before they are known, and the history that is written.
//!
//! Needs root, and a hierarchy of cgroups of version 2; fails with a message where one is missing.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nativeprof::capture::ebpf::EbpfBackend;
use nativeprof::capture::{EventKind, HostFilter, Mode, OffCpuOptions, SamplingOptions};
use nativeprof::history::name::SegmentName;
use nativeprof::profile::import::{Segments, Selection};
use nativeprof::profile::measure::{Clock, Measure};
use nativeprof::session::{Recording as HostRecording, SessionOptions};

use common::chance::{assert_likely, repeated};
use common::receiver::{Receiver, check_metrics, served_metrics};
use common::recording::{Recording, Running, TRUTH};
use common::{Program, Python, Scratch, each_third_python, live, nativeprof, newest_python, programs, pythons};

mod common;
#[path = "host/failures.rs"]
mod failures;
#[path = "host/labels.rs"]
mod labels;

/// The recorder with these words, and a history in `directory`; segments are of a second unless the words say else.
fn start(directory: &Path, words: &[&str]) -> Running {
    let mut command = nativeprof(&["host", "--dir"]);
    command.arg(directory).args(words);
    if !words.contains(&"--segment") {
        command.args(["--segment", "1s"]);
    }
    Running::start_until(command, "event=started")
}

/// Ends it as a service manager does. Returns what it logged.
fn stop(mut running: Running) -> String {
    running.signal("TERM");
    let done = running.finish();
    let log = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{}: {log}", done.status);
    log
}

/// What is written of a history by `export`.
fn exported(scratch: &Scratch, directory: &Path, words: &[&str]) -> Recording {
    let file = scratch.path("profile.json");
    let mut command = nativeprof(&["export", "-f", "json", "-o"]);
    let done = command.arg(&file).arg(directory).args(words).output();
    Recording::of(&file, done.expect("nativeprof runs"))
}

/// The segments of a history, as they are: names and contents.
fn segments(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(directory).expect("a history");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut all: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "gz"))
        .collect();
    all.sort();
    let read = |path: PathBuf| {
        let bytes = fs::read(&path).expect("a segment");
        (path, bytes)
    };
    all.into_iter().map(read).collect()
}

/// What is compressed in a segment.
fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    let read = flate2::read::GzDecoder::new(bytes).read_to_end(&mut message);
    read.expect("a whole file");
    message
}

#[test]
fn a_process_that_was_not_known_has_its_shares() {
    let _live = live();
    each_third_python(0, |python| {
        let (scratch, mut program) = (Scratch::new(), Program::start(python.script("shares.py")));
        let directory = scratch.path("history");
        let mut running = start(&directory, &["-r", "1000", "--pid", &program.pid().to_string()]);
        running.read_until("file=0000000003-");
        let log = stop(running);
        let truth = program.finish();
        let r = exported(&scratch, &directory, &[]);
        let quality = &r.profile.meta.quality;
        let partial = quality.partial as f64 / quality.taken.max(1) as f64;
        // Only the samples before the process was opened do not have its Python functions.
        assert!(
            quality.taken > 200 && partial < 0.15,
            "{}: {quality:?}\n{log}",
            python.name
        );
        r.check_calls(&python.name, &TRUTH, common::calls::SHARES);
        r.check_shares(&python.name, &truth);
    });
}

/// A cgroup below the root of the hierarchy of version 2, removed at the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(names: &[&str]) -> Cgroup {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        let mount = mounts
            .iter()
            .find(|mount| Path::new(mount).join("cgroup.controllers").exists());
        let mut path = PathBuf::from(mount.expect("a hierarchy of cgroups of version 2 at /sys/fs/cgroup[/unified]"));
        for name in names {
            path.push(name);
            fs::create_dir_all(&path).expect("a cgroup can be made");
        }
        Cgroup(path)
    }

    fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("the process can be moved");
    }

    /// CPU time of all its processes so far, s.
    fn cpu_time(&self) -> f64 {
        let stat = fs::read_to_string(self.0.join("cpu.stat")).expect("cpu.stat");
        let microseconds = stat.lines().find_map(|line| line.strip_prefix("usage_usec "));
        microseconds.and_then(|n| n.parse::<f64>().ok()).expect("a number") * 1e-6
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let mut path = self.0.clone();
        // The processes in it have ended, or end with the test.
        while path
            .file_name()
            .is_some_and(|name| name != "cgroup" && name != "unified")
            && fs::remove_dir(&path).is_ok()
        {
            path.pop();
        }
    }
}

/// Most of these processes are sampled once or twice, and some have exited before anything is read of them.
#[test]
fn short_processes_have_their_python_frames() {
    let _live = live();
    const CODE: &str = "import time\ndef brief():\n    until = time.process_time() + 0.04\n    while time.process_time() < until: pass\nbrief()";
    const LOOP: &str = r#"read go; for i in $(seq 20); do "$0" -c "$1" & wait; done"#;
    // The newest one whose interpreter is in a library, and the newest one whose interpreter is in the program. (Not those that a
    // loader is told to run: that is their program.)
    let is_program = |python: &&Python| fs::read(&python.exe).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF"));
    let has_library = |python: &&Python| {
        let libraries = Command::new("ldd").arg(&python.exe).output().expect("ldd runs").stdout;
        String::from_utf8_lossy(&libraries).contains("libpython")
    };
    let (with, without): (Vec<_>, Vec<_>) = pythons().iter().filter(is_program).partition(has_library);
    for python in [with.last(), without.last()] {
        let python = python.expect("a CPython with its library and one without");
        let scratch = Scratch::new();
        let directory = scratch.path("history");
        let mut shell = Command::new("sh");
        shell
            .args(["-c", LOOP])
            .arg(&python.exe)
            .arg(CODE)
            .stdin(Stdio::piped());
        let mut shell = shell.spawn().expect("sh runs");
        let running = start(&directory, &["-r", "100", "--pid", &shell.id().to_string()]);
        drop(shell.stdin.take());
        assert!(shell.wait().expect("it ends").success());
        let log = stop(running);
        let r = exported(&scratch, &directory, &[]);
        let quality = &r.profile.meta.quality;
        let share = |n: u64| n as f64 / quality.taken.max(1) as f64;
        // Those of the first processes (until the tables of their libraries are loaded, which takes longer on a machine with
        // other work), and those that are taken while a process exits, are not complete.
        assert!(
            quality.taken > 60 && share(quality.partial) < 0.3 && share(r.with("brief")) > 0.4,
            "{}: {quality:?}, {} in `brief`\n{log}",
            python.name,
            r.with("brief")
        );
    }
}

/// A cgroup in each hierarchy, with all that is below it: removed at the end.
struct CgroupTree(String);

impl Drop for CgroupTree {
    fn drop(&mut self) {
        let mounts = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
        let mounts = mounts
            .map(|entry| entry.path())
            .chain([PathBuf::from("/sys/fs/cgroup")]);
        mounts.for_each(|mount| remove_cgroups(&mount.join(&self.0)));
    }
}

fn remove_cgroups(path: &Path) {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories.for_each(|entry| remove_cgroups(&entry.path()));
    let _ = fs::remove_dir(path);
}

/// One that is no script which starts the interpreter.
fn installed_python() -> &'static Python {
    let mut all = pythons().iter().rev();
    all.find(|python| !python.is_unpacked()).expect("an installed CPython")
}

/// Has a first thread and a working one of these names; works when it is told to.
const NAMED: &str = "\
import sys, threading, time
def work():
    with open('/proc/self/task/%d/comm' % threading.get_native_id(), 'w') as comm:
        comm.write(sys.argv[2])
    print('READY', flush=True)
    sys.stdin.readline()
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
with open('/proc/self/comm', 'w') as comm:
    comm.write(sys.argv[1])
thread = threading.Thread(target=work)
thread.start()
thread.join()
";

#[test]
fn filters_admit_what_they_name_and_what_is_below() {
    let _live = live();
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let named = |first: &str, working: &str| {
        let mut command = Command::new(&installed_python().exe);
        command.args(["-c", NAMED, first, working]);
        Program::start(command)
    };
    let busy = "i=0; while [ $i -lt 150000 ]; do i=$((i+1)); done";
    let shell = |program: &str, words: &[&str], then: &str| {
        let mut command = Command::new(program);
        command
            .args(words)
            .args(["-c", &format!("echo READY; read go; {then}")]);
        Program::start(command)
    };
    let tree = CgroupTree(format!("nativeprof-filters-{}", std::process::id()));
    let below = Cgroup::new(&[&tree.0, "a", "b"]);
    let in_group = shell("sh", &[], busy);
    below.add(in_group.pid());
    let user = ["--reuid=12345", "--clear-groups", "sh"];
    let mut programs = [
        ("of the name", true, named("np_named", "np_other")),
        ("of a thread's name", false, named("np_other", "np_named")),
        ("in the group", true, in_group),
        ("of the user", true, shell("setpriv", &user, busy)),
        (
            "with children",
            true,
            shell("sh", &[], &format!("({busy}) & echo CHILD $!; wait")),
        ),
        ("of none", false, shell("sh", &[], busy)),
    ];
    let parent = programs[4].2.pid().to_string();
    let group = format!("/{}", tree.0);
    let filters = [
        "--comm", "np_named", "--cgroup", &group, "--user", "12345", "--pid", &parent,
    ];
    let running = start(&directory, &[&["-r", "500", "--segment", "1m"], &filters[..]].concat());
    programs.iter_mut().for_each(|(_, _, program)| program.send("go"));
    programs[4].2.wait_for("CHILD");
    let child = programs[4]
        .2
        .said
        .last()
        .and_then(|line| line.strip_prefix("CHILD ")?.parse().ok());
    let mut expected: Vec<(&str, bool, u32)> = Vec::new();
    for (what, is_admitted, mut program) in programs {
        let pid = child.filter(|_| what == "with children").unwrap_or(program.pid());
        program.finish();
        expected.push((what, is_admitted, pid));
    }
    let log = stop(running);
    drop(tree);
    let messages: Vec<Vec<u8>> = segments(&directory)
        .into_iter()
        .map(|(_, bytes)| unpacked(&bytes))
        .collect();
    for (what, is_admitted, pid) in expected {
        let mut sum = Segments::new(Selection {
            pid: Some(pid),
            ..Selection::default()
        });
        for message in &messages {
            sum.add(message).unwrap_or_else(|e| panic!("{}", e.reason));
        }
        let samples = sum.finish().nodes.first().map_or(0, |root| root.count);
        assert_eq!(samples > 0, is_admitted, "{samples} samples of a process {what}\n{log}");
    }
}

/// A program in a file system of its own, whose files are those of the directory `layer`.
fn program_of_image(scratch: &Scratch, layer: &Path, name: &str) -> Program {
    let directory = scratch.path(name);
    for part in ["changed", "work"] {
        fs::create_dir_all(directory.join(part)).expect("a directory");
    }
    let root = scratch.path("root");
    fs::create_dir_all(&root).expect("a directory");
    let mount = format!(
        "mount -t overlay overlay -o lowerdir={},upperdir={dir}/changed,workdir={dir}/work {root} && exec {root}/native",
        layer.display(),
        dir = directory.display(),
        root = root.display(),
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &mount]);
    Program::start(command)
}

/// Each container has a device of its own for the files of its image.
#[test]
fn files_of_one_image_are_opened_once() {
    let _live = live();
    let scratch = Scratch::new();
    let (one, other) = (scratch.path("one"), scratch.path("other"));
    for layer in [&one, &other] {
        fs::create_dir(layer).expect("a directory");
        programs::copy(programs::native(&[]).get_program(), &layer.join("native"));
    }
    let images = [("a", &one), ("b", &one), ("c", &other)];
    let programs = images.map(|(name, layer)| program_of_image(&scratch, layer, name));
    let pids: Vec<String> = programs.iter().map(|program| program.pid().to_string()).collect();
    let directory = scratch.path("history");
    let filters: Vec<&str> = pids.iter().flat_map(|pid| ["--pid", pid]).collect();
    let mut running = start(&directory, &[&["-r", "500"], &filters[..]].concat());
    running.read_until("file=0000000003-");
    let links = fs::read_dir(format!("/proc/{}/fd", running.pid())).expect("descriptors");
    let links = links.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let open = links.filter(|link| link.ends_with("root/native")).count();
    let log = stop(running);
    // The third image has a copy.
    assert_eq!(open, 2, "{log}");
    for (pid, (name, _)) in pids.iter().zip(images) {
        let r = exported(&scratch, &directory, &["--pid", pid]);
        let (all, named) = (r.profile.meta.quality.taken, r.with("n_leaf"));
        assert!(named * 2 > all && all > 50, "{named} of {all} samples of {name}\n{log}");
    }
}

/// A sample that is taken while the rate changes counts with the rate that it was taken at: the sum is the CPU time.
#[test]
fn samples_count_with_the_rate_that_they_were_taken_at() {
    const RATES: [u64; 2] = [50, 400];
    let _live = live();
    let group = Cgroup::new(&[&format!("nativeprof-rates-{}", std::process::id())]);
    let mut busy = program();
    group.add(busy.pid());
    repeated(|| {
        let options = SamplingOptions {
            off_cpu: OffCpuOptions::default(),
            mode: Mode::Cpu,
            rate: RATES[1],
            interval: 0,
            max_overhead: 1.0,
            event: EventKind::CpuClock,
            kernel: false,
            children: true,
            workers: false,
            spans: false,
            host: Some(HostFilter {
                cgroups: vec![fs::metadata(&group.0).expect("a cgroup").ino()],
                ..HostFilter::default()
            }),
        };
        let session = SessionOptions {
            measure: Measure::period(Clock::Cpu, options.rate),
            ..SessionOptions::default()
        };
        let backend = EbpfBackend::new(&options).unwrap_or_else(|e| panic!("{e}"));
        let mut recording = HostRecording::new(session, Box::new(backend), options.rate, 0, None);
        recording.start().expect("sampling starts");
        let before = group.cpu_time();
        let (mut sum, mut variance, mut used) = (0.0, 0.0, 0.0);
        for turn in 0..10 {
            let end = Instant::now() + Duration::from_millis(160);
            while Instant::now() < end {
                let wait = end.saturating_duration_since(Instant::now());
                recording.poll(wait, Some(end)).expect("samples");
            }
            let period = 1.0 / recording.rate() as f64;
            let segment = recording.take_host_segment(RATES[turn % 2], |_| used = group.cpu_time() - before, &|| ());
            let samples = segment.expect("a segment").profile.timeline.len() as f64;
            sum += samples * period;
            // Chance is largest where the program has half of the CPU.
            variance += 0.25 * samples * period * period;
        }
        let slack = 0.01 * used + 4.0 * f64::sqrt(variance);
        assert_likely!(
            (sum - used).abs() <= slack,
            "{sum:.3} s in samples, {used:.3} s of CPU time"
        );
        println!("{sum:.3} s in samples, {used:.3} s of CPU time: {:.4}", sum / used);
    });
    busy.finish();
}

fn program() -> Program {
    Program::start(newest_python().script("shares.py"))
}

/// Tokens are read again at SIGHUP, which the service manager sends to the recorder. Metrics are those of both processes.
#[test]
fn a_reload_reaches_the_process_that_sends() {
    let _live = live();
    let scratch = Scratch::new();
    let (directory, socket) = (scratch.path("history"), scratch.path("metrics"));
    let address = format!("unix:{}", socket.display());
    let token = scratch.path("token");
    fs::write(&token, "one").expect("written");
    let mut receiver = Receiver::start("");
    let mut busy = program();
    let pid = busy.pid().to_string();
    let token_file = token.to_str().expect("UTF-8");
    let url = receiver.url();
    let words = ["--pid", &pid, "-r", "200", "--metrics", &address];
    let sending = ["--push", &url, "--token-file", token_file];
    let running = start(&directory, &[&words[..], &sending].concat());
    assert_eq!(receiver.next()["headers"]["authorization"], "Bearer one");
    fs::write(&token, "two").expect("written");
    running.signal("HUP");
    // Messages may be on their way.
    let is_new = (0..10).any(|_| receiver.next()["headers"]["authorization"] == "Bearer two");
    assert!(is_new, "the token was not read again");
    let (_, served) = served_metrics(&socket);
    check_metrics(&served);
    for name in [
        "samples_total{quality=\"exact\"}",
        "cpu_seconds_total{part=\"network\"}",
        "push_messages_total{code=\"200\"}",
    ] {
        assert!(served.contains(&format!("\nnativeprof_{name} ")), "{name}: {served}");
    }
    let log = stop(running);
    assert!(log.contains("event=metrics address=unix:"), "{log}");
    // Each lost sample has a reason.
    let metrics = fs::read_to_string(directory.join("metrics.prom")).expect("metrics");
    let sum = |text: &str, prefix: &str| -> u64 {
        let words = text.split_whitespace();
        words
            .filter_map(|word| word.strip_prefix(prefix)?.parse::<u64>().ok())
            .sum()
    };
    let reasons: Vec<&str> = metrics
        .lines()
        .filter(|line| line.starts_with("nativeprof_samples_lost_total{"))
        .collect();
    assert_eq!(
        (reasons.len(), sum(&reasons.join(" "), "")),
        (3, sum(&log, "lost=")),
        "{metrics}\n{log}"
    );
    busy.finish();
}

#[test]
fn wrong_words_are_explained() {
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let ours = |words: &[&str]| -> Output {
        let mut command: Command = nativeprof(&["host", "--dir"]);
        command.arg(&directory).args(words).output().expect("nativeprof runs")
    };
    for (words, expected) in [
        (&["--cgroup", "no/such/group"][..], "there is no cgroup no/such/group"),
        (
            &["--container", "ffffffffffffffff"],
            "there is no container ffffffffffffffff",
        ),
        (&["--user", "no such user"], "there is no user no such user"),
        (&["--pid", "4000000"], "no process"),
        (&["--max-cpu", "none"], "percent"),
        (&["--keep", "soon"], "an age is a number"),
        (&["--push", "localhost:4318"], "localhost:4318"),
        (&["--token-file", "token"], "--token-file is for a receiver"),
    ] {
        let done = ours(words);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && said.contains(expected), "{words:?}: {said}");
    }
}

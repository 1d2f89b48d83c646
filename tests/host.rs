//! `host`: processes that are sampled before they are known, and the history that is written.
//!
//! Needs root, and a hierarchy of cgroups of version 2; fails with a message where one is missing.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nativeprof::capture::ebpf::EbpfBackend;
use nativeprof::capture::{EventKind, HostFilter, Mode, OffCpuOptions, SamplingOptions};
use nativeprof::profile::import::{Segments, Selection};
use nativeprof::profile::measure::{Clock, Measure};
use nativeprof::session::{Recording as HostRecording, SessionOptions};
use prost::Message;
use serde_json::json;

use common::chance::{assert_likely, repeated};
use common::receiver::{Receiver, check_metrics, served_metrics};
use common::recording::{Recording, Running, TRUTH};
use common::{Program, Python, Scratch, each_third_python, live, nativeprof, newest_python, programs, pythons};

mod common;

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

#[test]
fn containers_are_sampled_and_labelled() {
    let _live = live();
    let id = format!("{:064x}", u128::from(std::process::id()) << 64 | 0xfeed);
    let pod = "kubepods-burstable-pod01234567_89ab_cdef_0123_456789abcdef.slice";
    let parent = format!("nativeprof-test-{}.slice", std::process::id());
    let group = Cgroup::new(&[&parent, pod, &format!("cri-containerd-{id}.scope")]);
    let (mut inside, mut other, mut outside) = (service("shop"), service("search"), program());
    group.add(inside.pid());
    group.add(other.pid());
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let words = [
        "-r",
        "500",
        "--container",
        &id[..60],
        "--label",
        "team=one \"two\"\nthree",
    ];
    let mut running = start(&directory, &words);
    running.read_until("file=0000000002-");
    stop(running);
    inside.finish();
    other.finish();
    outside.finish();
    let all = exported(&scratch, &directory, &[]);
    let of_container = exported(&scratch, &directory, &["--container", &id]);
    assert!(
        all.profile.meta.quality.taken > 100,
        "{} samples",
        all.profile.meta.quality.taken
    );
    assert_eq!(all.profile.meta.quality.taken, of_container.profile.meta.quality.taken);
    let mut otlp = Vec::new();
    for (_, bytes) in segments(&directory) {
        otlp.extend(unpacked(&bytes));
    }
    for text in [&*id, "01234567-89ab-cdef-0123-456789abcdef", "one \"two\"\nthree"] {
        let is_there = otlp.windows(text.len()).any(|part| part == text.as_bytes());
        assert!(is_there, "no label is {text}");
    }
    // Receivers get as many samples of each service and container as are read here.
    let samples = |service: &str| {
        let words = ["--service", service, "--container", &id];
        exported(&scratch, &directory, &words).profile.meta.quality.taken
    };
    let expected = BTreeMap::from(["shop", "search"].map(|name| (format!("{name} in {id}"), samples(name))));
    assert_eq!(expected.values().sum::<u64>(), all.profile.meta.quality.taken);
    for (scheme, receiver) in [("", Receiver::start("")), ("grpc+", Receiver::of_grpc("", &[]))] {
        let url = format!("{scheme}{}", receiver.url());
        let done = nativeprof(&["push", "--once", "--to", &url])
            .arg(&directory)
            .output()
            .expect("nativeprof runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let mut received = BTreeMap::<String, u64>::new();
        for request in receiver.end() {
            for (place, total) in request["totals"].as_object().expect("totals") {
                *received.entry(place.clone()).or_default() += total.as_u64().expect("a number");
            }
        }
        assert_eq!(received, expected, "{url}");
    }
}

/// A program that says which service it is.
fn service(name: &str) -> Program {
    let mut command = newest_python().script("shares.py");
    command.env("OTEL_SERVICE_NAME", name);
    Program::start(command)
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
        // Those of the first process, and those that are taken while a process exits, are not complete.
        assert!(
            quality.taken > 60 && share(quality.partial) < 0.12 && share(r.with("brief")) > 0.4,
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

/// A pod's only container, which uses the CPU for some time.
struct Container {
    id: String,
    running: Child,
}

/// Starts it with files as the kubelet makes them.
fn container(scratch: &Scratch, cgroups: &str, id: &str, seconds: &str, environment: &[&str]) -> Container {
    let bundle = scratch.path(&id[..8]);
    let root = bundle.join("rootfs");
    let account = root.join("run/secrets/kubernetes.io/serviceaccount");
    for directory in ["etc", "proc", "srv", "var"] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    fs::create_dir_all(account.join("..2026")).expect("a directory");
    symlink("/run", root.join("var/run")).expect("a link");
    symlink("..2026", account.join("..data")).expect("a link");
    symlink("..data/namespace", account.join("namespace")).expect("a link");
    fs::write(account.join("..2026/namespace"), "shop").expect("a file");
    fs::write(root.join("etc/hostname"), format!("pod-{}\n", &id[..8])).expect("a file");
    let script = "import sys, time\nwhile time.process_time() < float(sys.argv[1]):\n    pass\n";
    fs::write(root.join("srv/worker.py"), script).expect("a file");
    let mut mounts = vec![json!({"destination": "/proc", "type": "proc", "source": "proc"})];
    // An interpreter, wherever it is, and its libraries are those of the machine.
    for entry in fs::read_dir("/").expect("the root").flatten() {
        let path = entry.path();
        let inside = root.join(entry.file_name());
        if path.is_dir() && !inside.exists() && !path.starts_with("/sys") && !path.starts_with("/dev") {
            fs::create_dir(inside).expect("a directory");
            mounts.push(json!({"destination": path, "type": "none", "source": path, "options": ["rbind", "ro"]}));
        }
    }
    let environment: Vec<&str> = environment
        .iter()
        .copied()
        .chain(["PYTHONDONTWRITEBYTECODE=1"])
        .collect();
    let config = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false, "user": {"uid": 0, "gid": 0}, "cwd": "/", "env": environment,
            "args": [installed_python().exe, "-u", "/srv/worker.py", seconds, "--password=secret"],
        },
        "root": {"path": "rootfs", "readonly": true},
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "uts"}],
            "cgroupsPath": format!("/{cgroups}/kubepods/besteffort/pod{}/{id}", pod_of(id)),
        },
    });
    fs::write(bundle.join("config.json"), config.to_string()).expect("a file");
    let mut runc = Command::new("runc");
    runc.arg("--root").arg(scratch.path("runc")).args(["run", "--bundle"]);
    runc.arg(&bundle).arg(id).stdin(Stdio::null());
    Container {
        id: id.into(),
        running: runc.spawn().expect("runc, which .ci/setup installs"),
    }
}

/// One that is no script which starts the interpreter.
fn installed_python() -> &'static Python {
    let mut all = pythons().iter().rev();
    all.find(|python| !python.is_unpacked()).expect("an installed CPython")
}

/// The identifier of the pod of a container.
fn pod_of(id: &str) -> String {
    format!("12345678-1234-1234-1234-{}", &id[..12])
}

/// Samples of a history by the labels of their resources, as `KEY=VALUE KEY=VALUE`, without the host's name.
fn samples_by_labels(directory: &Path) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for (path, bytes) in segments(directory) {
        let segment = otlp::Segment::decode(&*unpacked(&bytes)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for resource in segment.resources {
            let attributes = resource.resource.expect("a resource").attributes.into_iter();
            let labels = attributes.filter(|a| a.key != "host.name");
            let labels = labels.map(|a| format!("{}={}", a.key, a.value.unwrap_or_default().text));
            let labels = labels.collect::<Vec<_>>().join(" ");
            let samples = resource.scopes.iter().flat_map(|scope| &scope.profiles);
            let samples = samples.flat_map(|profile| &profile.samples);
            *found.entry(labels).or_default() += samples.map(|sample| sample.times.len()).sum::<usize>();
        }
    }
    found
}

/// What of OTLP profiles (proto 1.11.0) says which samples a resource has.
mod otlp {
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    pub struct Segment {
        #[prost(message, repeated, tag = "1")]
        pub resources: Vec<ResourceProfiles>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct ResourceProfiles {
        #[prost(message, optional, tag = "1")]
        pub resource: Option<Resource>,
        #[prost(message, repeated, tag = "2")]
        pub scopes: Vec<Scope>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Resource {
        #[prost(message, repeated, tag = "1")]
        pub attributes: Vec<Attribute>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Attribute {
        #[prost(string, tag = "1")]
        pub key: String,
        #[prost(message, optional, tag = "2")]
        pub value: Option<Value>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Value {
        #[prost(string, tag = "1")]
        pub text: String,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Scope {
        #[prost(message, repeated, tag = "2")]
        pub profiles: Vec<Profile>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Profile {
        #[prost(message, repeated, tag = "2")]
        pub samples: Vec<Sample>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Sample {
        #[prost(fixed64, repeated, tag = "5")]
        pub times: Vec<u64>,
    }
}

#[test]
fn containers_and_units_have_their_labels() {
    let _live = live();
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let tree = CgroupTree(format!("nativeprof-labels-{}", std::process::id()));
    let unit = Cgroup::new(&[&tree.0, "system.slice", "shop@1.service"]);
    let plain = Cgroup::new(&[&tree.0, "plain"]);
    let python = installed_python();
    let group = format!("/{}", tree.0);
    let running = start(&directory, &["-r", "500", "--segment", "1m", "--cgroup", &group]);
    let ids = ["a", "b"].map(|digit| digit.repeat(64));
    let containers = [
        container(&scratch, &tree.0, &ids[0], "0.5", &[]),
        container(&scratch, &tree.0, &ids[1], "1.0", &["OTEL_SERVICE_NAME=web"]),
    ];
    // Waits until it is in its group, uses the CPU, and executes another program.
    let shell = |group: &Cgroup, more: &str| {
        let busy = format!("read go; i=0; while [ $i -lt 150000 ]; do i=$((i+1)); done; {more}");
        let mut child = Command::new("sh")
            .args(["-c", &busy])
            .arg("--password=secret")
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        group.add(child.id());
        child
            .stdin
            .take()
            .expect("a pipe")
            .write_all(b"go\n")
            .expect("it reads");
        child
    };
    let script = scratch.path("again.py");
    fs::write(&script, "i = 0\nwhile i < 3000000:\n    i += 1\n").expect("a script");
    let exec = format!("exec {} {}", python.exe.display(), script.display());
    let others = [shell(&unit, ":"), shell(&plain, &exec)];
    let [first, second] = containers.map(|container| {
        let done = container.running.wait_with_output().expect("its end");
        assert!(done.status.success(), "runc: {}", done.status);
        container.id
    });
    for mut other in others {
        other.wait().expect("its end");
    }
    let log = stop(running);
    drop(tree);
    let pod = |id: &str, service: &str| {
        let name = &id[..8];
        let uid = pod_of(id);
        let pod = format!("k8s.namespace.name=shop k8s.pod.name=pod-{name} k8s.pod.uid={uid}");
        format!("container.id={id} {pod} service.name={service}")
    };
    let expected = [
        pod(&first, "worker.py"),
        pod(&second, "web"),
        "service.name=shop@1".into(),
        "service.name=sh".into(),
        "service.name=again.py".into(),
    ];
    let mut found = samples_by_labels(&directory);
    // runc itself, until it executes the program, is in the container's group.
    found.retain(|labels, _| !labels.contains("service.name=runc") && !labels.contains("service.name=exe"));
    for labels in &expected {
        let samples = found.remove(labels).unwrap_or(0);
        assert!(samples > 0, "no samples of {labels}; others: {found:#?}\n{log}");
    }
    let metrics = fs::read_to_string(directory.join("metrics.prom")).unwrap_or_default();
    assert!(found.is_empty(), "other labels: {found:#?}\n{log}\n{metrics}");
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

#[test]
fn one_recorder_writes_a_history_and_what_it_wrote_stays() {
    let _live = live();
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let mut busy = program();
    let pid = busy.pid().to_string();
    let words = ["--segment", "0.2s", "--pid", &pid, "-r", "200"];
    let mut before = Vec::new();
    for round in 0..3 {
        let mut running = start(&directory, &words);
        if round == 0 {
            let second = nativeprof(&["host", "--dir"]).arg(&directory).output();
            let second = second.expect("nativeprof runs");
            let said = String::from_utf8_lossy(&second.stderr).into_owned();
            assert!(second.status.code() == Some(2) && said.contains("try:"), "{said}");
        }
        running.read_until("event=segment file=0");
        running.signal("KILL");
        drop(running.finish());
        let after = segments(&directory);
        assert_eq!(before[..], after[..before.len()], "closed segments have changed");
        assert!(after.len() > before.len());
        before = after;
        // As if it had been killed while it wrote.
        for left in [".0000000099-20261128T050041.359Z-4001.otlp.gz.tmp", ".metrics.prom.tmp"] {
            fs::write(directory.join(left), "half").expect("a file");
        }
    }
    stop(start(&directory, &words));
    busy.finish();
    assert_eq!(before[..], segments(&directory)[..before.len()]);
    let names = fs::read_dir(&directory)
        .expect("a history")
        .map(|entry| entry.expect("an entry").file_name());
    let names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{names:?}");
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

/// A file system of 8 MB, gone at the end.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(path: PathBuf) -> SmallDisk {
        fs::create_dir(&path).expect("a directory");
        let disk = SmallDisk(path);
        disk.run("mount", &["-t", "tmpfs", "-o", "size=8m", "tmpfs"]);
        disk
    }

    fn run(&self, program: &str, words: &[&str]) {
        let done = Command::new(program).args(words).arg(&self.0).status();
        assert!(done.is_ok_and(|status| status.success()), "{program} {words:?} fails");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status(); // the test has failed already
    }
}

#[test]
fn a_full_disk_costs_the_segments_of_that_time() {
    let _live = live();
    let scratch = Scratch::new();
    let disk = SmallDisk::new(scratch.path("disk"));
    let directory = disk.0.join("history");
    let mut busy = program();
    let pid = busy.pid().to_string();
    let mut running = start(&directory, &["--segment", "0.2s", "--pid", &pid, "-r", "100"]);
    running.read_until("event=segment file=0");
    let filling = disk.0.join("other files");
    let mut file = fs::File::create(&filling).expect("a file");
    while file.write_all(&[0; 4096]).is_ok() {}
    drop(file);
    running.read_until("event=segment_lost");
    let before = segments(&directory);
    // More are lost in this time, of which nothing is said before a minute is over.
    std::thread::sleep(Duration::from_millis(500));
    fs::remove_file(&filling).expect("removed");
    let next = format!("file={:010}-", before.len() + 1);
    running.read_until(&next);
    let log = stop(running);
    let said = |line: &&str| line.contains("event=segment_lost") && !line.contains("repeated=");
    assert_eq!(log.lines().filter(said).count(), 1, "{log}");
    assert!(
        log.contains("No space left") && log.contains("make room there"),
        "{log}"
    );
    let after = segments(&directory);
    assert_eq!(before[..], after[..before.len()], "closed segments have changed");
    assert!(after.len() > before.len());
    disk.run("mount", &["-o", "remount,ro"]);
    for path in [&directory, &disk.0.join("new")] {
        refused(path, "Read-only file system");
    }
    busy.finish();
}

/// Fails with this reason at the start, and says what to do.
#[track_caller]
fn refused(directory: &Path, why: &str) {
    let done = nativeprof(&["host", "--dir"]).arg(directory).output();
    let done = done.expect("nativeprof runs");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        !done.status.success() && said.contains(why) && said.contains("--dir DIR"),
        "{said}"
    );
}

#[test]
fn directories_of_others_are_refused() {
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    fs::create_dir(&directory).expect("a directory");
    std::os::unix::fs::chown(&directory, Some(65534), Some(65534)).expect("the tests run as root");
    refused(&directory, "Permission denied");
}

/// The process that reads names for another one.
fn names_reader(parent: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.find(|pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"--read-names")
    })
}

fn send(signal: &str, pid: u32) {
    let done = Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
    assert!(
        done.is_ok_and(|status| status.success()),
        "{signal} cannot be sent to {pid}"
    );
}

/// The process that reads names is stopped until more samples are taken than the ring holds; then it is killed.
#[test]
fn samples_wait_for_names() {
    let _live = live();
    let group = Cgroup::new(&[&format!("nativeprof-names-{}", std::process::id())]);
    let mut programs = vec![program()];
    group.add(programs[0].pid());
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let path = group.0.to_string_lossy().into_owned();
    let mut running = start(&directory, &["--segment", "0.2s", "--cgroup", &path, "-r", "400"]);
    running.read_until("file=0000000001-");
    let recorder = running.child.id();
    let reader = names_reader(recorder).expect("names are read by a child");
    send("STOP", reader);
    // Of this file no names are known.
    let native = Program::start(programs::native(&["bursts"]));
    group.add(native.pid());
    programs.push(native);
    let enough = group.cpu_time() + 2.5;
    while group.cpu_time() < enough {
        std::thread::sleep(Duration::from_millis(10));
    }
    send("CONT", reader);
    running.read_until("file=0000000003-");
    send("KILL", reader);
    let third = Program::start(programs::native(&["handler"]));
    group.add(third.pid());
    programs.push(third);
    running.read_until("file=0000000005-");
    let next = names_reader(recorder);
    assert!(next.is_some_and(|next| next != reader), "{next:?} after {reader}");
    let log = stop(running);
    drop(programs);
    // On a busy machine, ticks may be missing for other reasons.
    let metrics = fs::read_to_string(directory.join("metrics.prom")).expect("metrics");
    let no_room = metrics
        .lines()
        .find(|line| line.contains("samples_lost_total{reason=\"no_room\"}"));
    assert!(no_room.is_none_or(|line| line.ends_with(" 0")), "{no_room:?}\n{log}");
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

/// Peak memory use of a process so far, KB.
fn peak(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    number.expect("its peak memory")
}

/// A target with false data, and one that maps files, starts threads and forks without end, where few files may be open: what
/// they cost is bounded, and the recording goes on.
#[test]
fn hostile_processes_do_not_end_a_recording() {
    let _live = live();
    let scratch = Scratch::new();
    let (directory, files) = (scratch.path("history"), scratch.path("files"));
    fs::create_dir(&files).expect("a directory");
    let mut script = newest_python().script("hostile_host.py");
    let (mut hostile, mut forged) = (
        Program::start({
            script.arg(&files);
            script
        }),
        Program::start(common::programs::malicious_target()),
    );
    let pids = [hostile.pid(), forged.pid()].map(|pid| pid.to_string());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 150; exec \"$0\" host --segment 1s -r 200 \"$@\""]);
    command.arg(nativeprof(&[]).get_program()).arg("--dir").arg(&directory);
    command.args(["--pid", &pids[0], "--pid", &pids[1]]);
    let mut running = Running::start_until(command, "event=started");
    hostile.send("begin");
    hostile.wait_for("DONE");
    running.read_until("event=files_not_opened");
    running.read_until("event=segment file=0");
    let most = peak(running.child.id());
    let log = stop(running);
    hostile.finish();
    forged.finish();
    assert!(most < 256 << 10, "{most} KB");
    assert!(!log.contains("segment_lost") && !log.contains("panicked"), "{log}");
    let quality = exported(&scratch, &directory, &[]).profile.meta.quality;
    let sum = quality.exact + quality.repaired + quality.partial;
    assert!(quality.taken > 20 && sum == quality.taken, "{quality:?}\n{log}");
    let metrics = fs::read_to_string(directory.join("metrics.prom")).expect("metrics");
    let entries = |kind: &str| -> u64 {
        let name = format!("nativeprof_table_entries{{kind=\"{kind}\"}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {metrics}"))
    };
    assert!(entries("processes") < 40 && entries("threads") < 500, "{metrics}");
    assert!(entries("files_not_opened") > 150, "{metrics}");
}

//! Labels of processes: attributes of the resource that a process belongs to, read from `/proc` alone.
//!
//! Whatever a process controls is hostile: each read, value and table is bounded.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use crate::event::Pid;
use crate::process::root::Root;
use crate::process::system::{LiveSystem, ProcessMemory};
use crate::process::{maps, thread_context};
use crate::session::ProcessInstance;
use crate::sys::procfs;

mod cgroup;
mod groups;
mod pod;
mod script;

use cgroup::Place;
use groups::Groups;
use pod::PodNames;

/// Bytes of a file of `/proc` that are read, and of `/proc/PID/maps`.
const MAX_READ: u64 = 256 << 10;
const MAX_MAPS: u64 = 4 << 20;
/// Bytes of a value; longer ones are cut and end in [`MARK`].
const MAX_VALUE: usize = 1024;
const MARK: &str = "…";
/// Bytes of a name of a process that the kernel keeps (TASK_COMM_LEN without the zero).
const MAX_COMM: usize = 15;
/// Attributes that a process may set by OTEL_RESOURCE_ATTRIBUTES and its process context, besides `service.name`.
const ALLOWED: [&str; 4] = [
    "service.version",
    "service.namespace",
    "deployment.environment.name",
    "deployment.environment",
];
/// Processes that are remembered.
const MAX_PROCESSES: usize = 16_384;
/// Pods whose names are remembered.
const MAX_PODS: usize = 4096;
/// Segments after which a process or pod that was not asked for is forgotten.
const UNUSED_SEGMENTS: u64 = 5;

type Attributes = Vec<(String, String)>;

/// What the user wants besides the labels that every process gets.
#[derive(Clone, Debug, Default)]
pub struct LabelOptions {
    /// Names of environment variables that become `process.environment_variable.NAME`.
    pub include_env: Vec<String>,
    /// Attributes of all resources; they replace what is found under the same key.
    pub labels: Vec<(String, String)>,
}

/// Reads and remembers the labels of processes.
#[derive(Debug)]
pub struct LabelReader {
    options: LabelOptions,
    host: String,
    root: Option<Root>,
    segment: u64,
    known: FxHashMap<Run, Known>,
    /// The last one of each process.
    last: FxHashMap<Pid, Run>,
    /// By UID, with the segment of the last use.
    pods: FxHashMap<String, (u64, PodNames)>,
    groups: Groups,
    problems: BTreeMap<&'static str, u64>,
}

/// A process by pid and start time, and the run of a program in it.
type Run = (Pid, u64, u64);

#[derive(Debug)]
struct Known {
    attributes: Rc<Attributes>,
    /// As they were with the sample.
    cgroup: u64,
    comm: String,
    /// Segments of the last use and of the last reading.
    used: u64,
    read: u64,
    /// Read again in a later segment than the first one: what a process publishes when it starts is there by then.
    is_settled: bool,
}

/// What is known of a process.
#[derive(Default)]
struct Facts {
    place: Place,
    pod: PodNames,
    environment: String,
    /// Attributes that it publishes.
    context: Attributes,
    script: Option<String>,
    program: String,
}

impl LabelReader {
    /// A reader that knows no process yet.
    pub fn new(options: LabelOptions) -> LabelReader {
        LabelReader {
            options,
            host: read("/proc/sys/kernel/hostname").trim_end().to_string(),
            root: Root::of(std::process::id()),
            segment: 0,
            known: FxHashMap::default(),
            last: FxHashMap::default(),
            pods: FxHashMap::default(),
            groups: Groups::of_machine(),
            problems: BTreeMap::new(),
        }
    }

    /// Attributes of the resource that a process belongs to, sorted by key. One that has exited, or could not be opened, has
    /// those of its control group, by the number that was taken with the sample, and its name from there for the program's.
    pub fn resource(&mut self, process: &ProcessInstance) -> Rc<Attributes> {
        let started = process.started.filter(|_| process.run != 0);
        let Some(started) = started else {
            let found = self
                .of_last(process)
                .unwrap_or_else(|| Rc::new(self.of_sample(process)));
            self.read_ahead(process);
            return found;
        };
        let key = (process.pid, started, process.run);
        if let Some(known) = self.known.get_mut(&key) {
            known.used = self.segment;
            if known.is_settled || known.read == self.segment {
                return known.attributes.clone();
            }
        }
        let Some(attributes) = self.read_run(key, process.cgroup, &process.comm) else {
            let known = self.known.get(&key).map(|known| known.attributes.clone());
            let known = known.or_else(|| self.of_last(process));
            return known.unwrap_or_else(|| Rc::new(self.of_sample(process)));
        };
        attributes
    }

    /// Reads and remembers the labels of a process. `None`: it has exited.
    fn read_run(&mut self, key: Run, cgroup: u64, comm: &str) -> Option<Rc<Attributes>> {
        let (pid, started, _) = key;
        // The number may belong to another process before or after this one is read, and of a zombie only the group is left.
        let runs = || procfs::start_of_running(pid) == Some(started);
        let found = runs().then(|| self.of_running(pid, cgroup, comm)).filter(|_| runs());
        let attributes = Rc::new(found?);
        let known = Known {
            attributes: attributes.clone(),
            cgroup,
            comm: comm.into(),
            used: self.segment,
            read: self.segment,
            is_settled: self.known.contains_key(&key),
        };
        if self.known.len() < MAX_PROCESSES || known.is_settled {
            self.known.insert(key, known);
            self.last.insert(pid, key);
        } else {
            self.count("too_many_processes");
        }
        Some(attributes)
    }

    /// Reads the labels of what a process runs now that was not open when its sample was taken: mostly it has executed another
    /// program, which may have exited when its first sample is handled.
    fn read_ahead(&mut self, process: &ProcessInstance) {
        let pid = process.pid;
        let name = procfs::thread_name(pid, pid);
        if let (Some(started), Some(name)) = (procfs::start_time(pid), name) {
            let key = (pid, started, 0);
            let is_known = self
                .known
                .get(&key)
                .is_some_and(|known| known.comm == name && known.read == self.segment);
            if !is_known {
                self.read_run(key, process.cgroup, &name);
            }
        }
    }

    /// Forgets processes that were not asked for in the last segments.
    pub fn end_segment(&mut self) {
        self.segment += 1;
        let oldest = self.segment.saturating_sub(UNUSED_SEGMENTS);
        self.known.retain(|_, known| known.used >= oldest);
        self.last.retain(|_, key| self.known.contains_key(key));
        self.pods.retain(|_, (used, _)| *used >= oldest);
        self.groups.end_segment();
    }

    /// Reads the labels of all processes again when they are asked for.
    pub fn renew(&mut self) {
        self.known.clear();
        self.last.clear();
        self.pods.clear();
    }

    /// Labels that were not found, or not remembered, by the reason, so far: `cgroup_unknown` of a process that had exited,
    /// `too_many_cgroups`, `too_many_processes`.
    pub fn problems(&self) -> BTreeMap<String, u64> {
        let tables = Some(("too_many_cgroups", self.groups.refused())).filter(|(_, refused)| *refused > 0);
        let own = self.problems.iter().map(|(reason, count)| (*reason, *count));
        own.chain(tables)
            .map(|(reason, count)| (reason.into(), count))
            .collect()
    }

    fn count(&mut self, reason: &'static str) {
        *self.problems.entry(reason).or_default() += 1;
    }

    /// The labels of a process that has exited and was known in this segment or the one before: samples that waited meanwhile are
    /// its last ones. Its number, name and group are not those of another process so soon.
    fn of_last(&self, process: &ProcessInstance) -> Option<Rc<Attributes>> {
        let known = self.known.get(self.last.get(&process.pid)?)?;
        let is_same = known.comm == process.comm && known.cgroup == process.cgroup;
        (is_same && known.used + 1 >= self.segment).then(|| known.attributes.clone())
    }

    /// What the sample alone says.
    fn of_sample(&mut self, process: &ProcessInstance) -> Attributes {
        let place = self.groups.place(process.cgroup);
        if place.is_none() {
            self.count("cgroup_unknown");
        }
        let place = place.unwrap_or_default();
        let pid = process.pid;
        // The number may belong to a process of another pod by now.
        let is_of_it = |pod: &str| {
            let now = cgroup::parse(&read(&format!("/proc/{pid}/cgroup")));
            now.pod.as_deref() == Some(pod)
        };
        let pod = self.pod_names(pid, &place, is_of_it);
        self.attributes(Facts {
            pod,
            place,
            program: process.comm.clone(),
            ..Facts::default()
        })
    }

    /// Names of the pod at a place. A process may be read for them, if `is_of_it` says of the pod's UID that it is one of its.
    fn pod_names(&mut self, pid: Pid, place: &Place, is_of_it: impl FnOnce(&str) -> bool) -> PodNames {
        let Some(pod) = &place.pod else {
            return PodNames::default();
        };
        if let Some((used, names)) = self.pods.get_mut(pod) {
            *used = self.segment;
            return names.clone();
        }
        if !is_of_it(pod) {
            return PodNames::default();
        }
        let names = pod::names(pid, self.root.as_ref(), &self.host);
        if names != PodNames::default() && self.pods.len() < MAX_PODS {
            self.pods.insert(pod.clone(), (self.segment, names.clone()));
        }
        names
    }

    fn of_running(&mut self, pid: Pid, cgroup: u64, comm: &str) -> Attributes {
        let text = read(&format!("/proc/{pid}/cgroup"));
        self.groups.add(cgroup, &text);
        let place = cgroup::parse(&text);
        // The process was read for this place just now.
        let pod = self.pod_names(pid, &place, |_| true);
        let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let exe = exe.file_name().unwrap_or_default().as_bytes();
        let is_python = exe.starts_with(b"python") || exe.starts_with(b"pypy");
        let command_line = if is_python {
            procfs::read_at_most(format!("/proc/{pid}/cmdline"), MAX_READ).unwrap_or_default()
        } else {
            Vec::new()
        };
        self.attributes(Facts {
            pod,
            place,
            environment: read(&format!("/proc/{pid}/environ")),
            context: context(pid),
            script: script::name(&command_line),
            program: program(comm, &String::from_utf8_lossy(exe)),
        })
    }

    fn attributes(&self, facts: Facts) -> Attributes {
        let variable = |name: &str| {
            let mut all = facts.environment.split('\0').filter_map(|entry| entry.split_once('='));
            all.find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        };
        let declared = resource_attributes(&variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default());
        let value = |of: &Attributes, name: &str| {
            let mut all = of.iter().filter(|(_, value)| !value.is_empty());
            all.find(|(key, _)| key == name).map(|(_, value)| value.clone())
        };
        let service = [
            variable("OTEL_SERVICE_NAME"),
            value(&declared, "service.name"),
            value(&facts.context, "service.name"),
            facts.place.service,
            facts.script,
            Some(facts.program),
        ];
        let mut out = vec![("host.name".to_string(), self.host.clone())];
        let mut add = |key: &str, value: Option<String>| {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                out.retain(|(known, _)| known != key);
                out.push((key.into(), cut(value)));
            }
        };
        add("container.id", facts.place.container);
        add("k8s.pod.uid", facts.place.pod);
        add("k8s.pod.name", facts.pod.name);
        add("k8s.namespace.name", facts.pod.namespace);
        let mut services = service.into_iter().flatten();
        add("service.name", services.find(|name| !name.is_empty()));
        for key in ALLOWED {
            add(key, value(&declared, key).or_else(|| value(&facts.context, key)));
        }
        for name in &self.options.include_env {
            add(&format!("process.environment_variable.{name}"), variable(name));
        }
        for (key, value) in &self.options.labels {
            add(key, Some(value.clone()));
        }
        out.sort();
        out
    }
}

/// Attributes that a process publishes as an OpenTelemetry process context.
fn context(pid: Pid) -> Attributes {
    let text = procfs::read_at_most(format!("/proc/{pid}/maps"), MAX_MAPS).unwrap_or_default();
    let lines = text.split(|byte| *byte == b'\n');
    let is_context = |line: &&[u8]| line.windows(8).any(|part| part == b"OTEL_CTX");
    let own: Vec<_> = lines.filter(is_context).flat_map(maps::parse).collect();
    thread_context::resource(&ProcessMemory(&LiveSystem, pid), &own)
}

/// Name of the program: the process's, and the whole of its file's where the kernel has cut it.
fn program(comm: &str, exe: &str) -> String {
    let exe = exe.strip_suffix(" (deleted)").unwrap_or(exe);
    let is_cut = comm.len() == MAX_COMM && exe.starts_with(comm);
    if is_cut || comm.is_empty() { exe } else { comm }.to_string()
}

/// The text of a small file, with replacements for what is not UTF-8; empty if it cannot be read.
fn read(path: &str) -> String {
    let bytes = procfs::read_at_most(path, MAX_READ).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn cut(mut value: String) -> String {
    if value.len() > MAX_VALUE {
        let ends = (0..=MAX_VALUE - MARK.len()).rev();
        value.truncate({ ends }.find(|at| value.is_char_boundary(*at)).unwrap_or(0));
        value.push_str(MARK);
    }
    value
}

/// Keys and values of `KEY=VALUE,KEY=VALUE`, values percent-encoded (OpenTelemetry specification, "Resource SDK").
fn resource_attributes(text: &str) -> Attributes {
    let pairs = text.split(',').take(128).filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.trim().into(), decode(value.trim())))
        .collect()
}

fn decode(text: &str) -> String {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    while let [first, after @ ..] = rest {
        rest = after;
        let escaped = match after {
            [high, low, end @ ..] if *first == b'%' => {
                digit(*high).zip(digit(*low)).map(|(high, low)| (16 * high + low, end))
            }
            _ => None,
        };
        match escaped {
            Some((byte, end)) => {
                out.push(byte as u8);
                rest = end;
            }
            None => out.push(*first),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::{Child, ChildStdin, Command, Stdio};

    #[test]
    fn values_are_decoded_and_cut() {
        let pair = |key: &str, value: &str| (key.to_string(), value.to_string());
        assert_eq!(
            resource_attributes("service.name=a%2Cb , x= %zz%,none,y=%ff"),
            [pair("service.name", "a,b"), pair("x", "%zz%"), pair("y", "\u{fffd}")]
        );
        let long = cut("é".repeat(MAX_VALUE));
        assert!(long.len() <= MAX_VALUE && long.ends_with(MARK));
        assert_eq!(cut("a\"\nb".into()), "a\"\nb");
    }

    /// A process that is open, as the session has it.
    fn instance(pid: Pid, run: u64) -> ProcessInstance {
        ProcessInstance {
            pid,
            run,
            started: procfs::start_time(pid),
            ..ProcessInstance::default()
        }
    }

    fn value<'a>(found: &'a Attributes, key: &str) -> Option<&'a str> {
        found.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    /// `cat`, which has been executed, with what it reads.
    fn running_cat(prepare: impl Fn(&mut Command)) -> (Child, ChildStdin) {
        let mut command = Command::new("cat");
        prepare(&mut command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cat");
        // A parent goes on a little earlier.
        let mut echo = [0];
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(b"x").expect("it reads");
        let stdout = child.stdout.as_mut().expect("a pipe");
        stdout.read_exact(&mut echo).expect("it writes");
        (child, stdin)
    }

    fn reader() -> LabelReader {
        LabelReader {
            groups: Groups::below(None),
            ..LabelReader::new(LabelOptions::default())
        }
    }

    #[test]
    fn services_are_named_by_the_first_that_says_it() {
        let pair = |key: &str, value: &str| (key.to_string(), value.to_string());
        let all = || Facts {
            place: cgroup::of_path("/system.slice/unit.service"),
            environment: "OTEL_SERVICE_NAME=variable\0OTEL_RESOURCE_ATTRIBUTES=service.name=declared".into(),
            context: vec![pair("service.name", "published"), pair("service.version", "3")],
            script: Some("script.py".into()),
            program: "program".into(),
            ..Facts::default()
        };
        let reader = reader();
        let mut facts = all();
        let check = |facts: Facts, expected: &str| {
            let found = reader.attributes(facts);
            assert_eq!(value(&found, "service.name"), Some(expected));
        };
        check(all(), "variable");
        facts.environment = "OTEL_SERVICE_NAME=\0OTEL_RESOURCE_ATTRIBUTES=service.name=declared".into();
        check(facts, "declared");
        check(
            Facts {
                environment: "OTEL_RESOURCE_ATTRIBUTES=service.name=".into(),
                ..all()
            },
            "published",
        );
        let without = || Facts {
            environment: String::new(),
            context: Vec::new(),
            ..all()
        };
        check(without(), "unit");
        let outside = || Facts {
            place: Place::default(),
            ..without()
        };
        check(outside(), "script.py");
        check(
            Facts {
                script: None,
                ..outside()
            },
            "program",
        );
        let found = reader.attributes(all());
        assert_eq!(value(&found, "service.version"), Some("3"));
        let long = format!("OTEL_SERVICE_NAME={}", "\"\n\u{fffd}".repeat(3_000));
        let found = reader.attributes(Facts {
            environment: long,
            ..all()
        });
        let name = value(&found, "service.name").expect("a name");
        assert!(name.len() <= MAX_VALUE && name.ends_with(MARK));
    }

    #[test]
    fn programs_have_whole_names() {
        for (comm, exe, expected) in [
            ("nginx", "nginx", "nginx"),
            ("systemd-journal", "systemd-journald", "systemd-journald"),
            ("worker", "python3.11", "worker"),
            ("a_thread_of_15__", "other", "a_thread_of_15__"),
            ("", "nginx (deleted)", "nginx"),
            ("", "", ""),
        ] {
            assert_eq!(program(comm, exe), expected, "{comm} {exe}");
        }
    }

    #[test]
    fn what_has_exited_has_the_labels_of_its_sample() {
        let mut reader = reader();
        let id = "0123456789abcdef".repeat(4);
        reader.groups.add(7, &format!("0::/docker/{id}\n"));
        let mut child = Command::new("true").spawn().expect("true");
        child.wait().expect("its end");
        let mut gone = ProcessInstance {
            pid: child.id(),
            run: 0,
            cgroup: 7,
            comm: "true".into(),
            ..ProcessInstance::default()
        };
        // Of a process that could not be opened, and of one whose number another process has now.
        let of_other = (1, Some(1), std::process::id());
        for (run, started, pid) in [(0, None, gone.pid), (1, Some(1), gone.pid), of_other] {
            gone.pid = pid;
            gone.run = run;
            gone.started = started;
            let found = reader.resource(&gone);
            assert_eq!(value(&found, "container.id"), Some(&*id), "{run}");
            assert_eq!(value(&found, "service.name"), Some("true"));
        }
        assert!(reader.known.is_empty() && reader.problems().is_empty());
        gone.cgroup = 8;
        assert_eq!(value(&reader.resource(&gone), "container.id"), None);
        assert_eq!(reader.problems(), BTreeMap::from([("cgroup_unknown".to_string(), 1)]));
    }

    #[test]
    fn the_last_samples_of_a_process_have_its_labels() {
        let mut reader = reader();
        let (mut child, _stdin) = running_cat(|_| {});
        let mut own = instance(child.id(), 1);
        own.comm = "cat".into();
        let labels = reader.resource(&own);
        child.kill().expect("it runs");
        // A zombie, too, has exited.
        while procfs::stat_state(child.id()) != Some('Z') {
            std::thread::yield_now();
        }
        let other = ProcessInstance { run: 2, ..own.clone() };
        assert!(Rc::ptr_eq(&labels, &reader.resource(&other)));
        child.wait().expect("its end");
        let mut gone = ProcessInstance {
            run: 0,
            started: None,
            ..own.clone()
        };
        assert!(Rc::ptr_eq(&labels, &reader.resource(&gone)));
        gone.comm = "other".into();
        assert_eq!(value(&reader.resource(&gone), "service.name"), Some("other"));
        gone.comm = own.comm.clone();
        gone.cgroup = 5;
        assert!(!Rc::ptr_eq(&labels, &reader.resource(&gone)));
        gone.cgroup = own.cgroup;
        reader.end_segment();
        assert!(Rc::ptr_eq(&labels, &reader.resource(&gone)));
        reader.end_segment();
        assert!(!Rc::ptr_eq(&labels, &reader.resource(&gone)));
    }

    #[test]
    fn labels_are_read_again_after_an_exec_and_in_the_second_segment() {
        let mut reader = reader();
        let own = instance(std::process::id(), 1);
        let first = reader.resource(&own);
        assert!(Rc::ptr_eq(&first, &reader.resource(&own)));
        let other = instance(std::process::id(), 2);
        assert!(!Rc::ptr_eq(&first, &reader.resource(&other)));
        reader.end_segment();
        let second = reader.resource(&own);
        assert!(!Rc::ptr_eq(&first, &second));
        reader.end_segment();
        assert!(Rc::ptr_eq(&second, &reader.resource(&own)));
        reader.renew();
        assert!(!Rc::ptr_eq(&second, &reader.resource(&own)));
        for _ in 0..=UNUSED_SEGMENTS {
            reader.end_segment();
        }
        assert!(reader.known.is_empty());
        // More processes than are remembered.
        for run in 0..MAX_PROCESSES as u64 {
            let known = Known {
                attributes: first.clone(),
                cgroup: 0,
                comm: String::new(),
                used: reader.segment,
                read: reader.segment,
                is_settled: true,
            };
            reader.known.insert((1, 1, run), known);
        }
        assert!(!reader.resource(&own).is_empty());
        assert_eq!(
            reader.problems(),
            BTreeMap::from([("too_many_processes".to_string(), 1)])
        );
    }

    #[test]
    fn a_process_has_the_labels_of_its_environment() {
        let (mut child, stdin) = running_cat(|cat| {
            cat.env(
                "OTEL_RESOURCE_ATTRIBUTES",
                "service.name=other,service.version=2,secret=x",
            )
            .env("OTEL_SERVICE_NAME", "shop \"a\"\nb")
            .env("SHOWN", "yes")
            .env("HIDDEN", "no");
        });
        let mut reader = LabelReader::new(LabelOptions {
            include_env: vec!["SHOWN".into()],
            labels: vec![("region".into(), "north".into())],
        });
        let child_instance = instance(child.id(), 1);
        let found = reader.resource(&child_instance);
        let value = |key: &str| value(&found, key);
        assert_eq!(value("service.name"), Some("shop \"a\"\nb"));
        assert_eq!(value("service.version"), Some("2"));
        assert_eq!(value("process.environment_variable.SHOWN"), Some("yes"));
        assert_eq!(value("region"), Some("north"));
        assert!(value("host.name").is_some() && found.is_sorted());
        assert!(
            found
                .iter()
                .all(|(k, v)| !k.contains("secret") && !k.contains("HIDDEN") && v != "no")
        );
        drop(stdin);
        child.wait().expect("its end");
    }
}

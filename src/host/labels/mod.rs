//! Labels of processes: attributes of the resource that a process belongs to, read from `/proc` alone.
//!
//! Whatever a process controls is hostile: each read, value and table is bounded.

use std::fs::File;
use std::io::Read;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use crate::event::Pid;
use crate::sys::procfs;

mod cgroup;
mod groups;

use cgroup::Place;
use groups::Groups;

/// Bytes of a file of `/proc` that are read.
const MAX_READ: u64 = 256 << 10;
/// Bytes that most of them have at most.
const EXPECTED: usize = 4 << 10;
/// Bytes of a value; longer ones are cut and end in [`MARK`].
const MAX_VALUE: usize = 1024;
const MARK: &str = "…";
/// Attributes that a process may set by OTEL_RESOURCE_ATTRIBUTES, besides `service.name`.
const ALLOWED: [&str; 4] = [
    "service.version",
    "service.namespace",
    "deployment.environment.name",
    "deployment.environment",
];
/// Processes that are remembered.
const MAX_PROCESSES: usize = 16_384;
/// Segments after which a process that was not asked for is forgotten.
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
    segment: u64,
    /// By pid and start time, with the segment of the last use.
    known: FxHashMap<(Pid, u64), (u64, Rc<Attributes>)>,
    groups: Groups,
}

impl LabelReader {
    /// A reader that knows no process yet.
    pub fn new(options: LabelOptions) -> LabelReader {
        LabelReader {
            options,
            host: read("/proc/sys/kernel/hostname").trim_end().to_string(),
            segment: 0,
            known: FxHashMap::default(),
            groups: Groups::of_machine(),
        }
    }

    /// Attributes of the resource that a process belongs to, sorted by key. One that has exited has those of its control group,
    /// by the number that was taken with the sample (0: unknown), and the thread's name `comm` from there for the program's.
    pub fn resource(&mut self, pid: Pid, cgroup: u64, comm: &str) -> Rc<Attributes> {
        let key = (pid, procfs::start_time(pid).unwrap_or(0));
        if let Some((used, known)) = self.known.get_mut(&key) {
            *used = self.segment;
            return known.clone();
        }
        let found = Rc::new(if key.1 == 0 {
            let place = self.groups.place(cgroup).unwrap_or_default();
            self.attributes(place, "", comm)
        } else {
            let text = read(&format!("/proc/{pid}/cgroup"));
            self.groups.add(cgroup, &text);
            let environment = read(&format!("/proc/{pid}/environ"));
            let program = read(&format!("/proc/{pid}/comm"));
            self.attributes(cgroup::parse(&text), &environment, program.trim_end())
        });
        // Without a start time, the pid may be that of another process the next time; with another one, what was read is.
        let is_same = key.1 != 0 && procfs::start_time(pid) == Some(key.1);
        if is_same && self.known.len() < MAX_PROCESSES {
            self.known.insert(key, (self.segment, found.clone()));
        }
        found
    }

    /// Forgets processes that were not asked for in the last segments.
    pub fn end_segment(&mut self) {
        self.segment += 1;
        let oldest = self.segment.saturating_sub(UNUSED_SEGMENTS);
        self.known.retain(|_, (used, _)| *used >= oldest);
        self.groups.end_segment();
    }

    fn attributes(&self, place: Place, environment: &str, program: &str) -> Attributes {
        let variable = |name: &str| {
            let mut all = environment.split('\0').filter_map(|entry| entry.split_once('='));
            all.find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        };
        let declared = resource_attributes(&variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default());
        let declared_value = |name: &str| declared.iter().find(|(key, _)| key == name).map(|(_, v)| v.clone());
        let service = [
            variable("OTEL_SERVICE_NAME"),
            declared_value("service.name"),
            place.service,
            Some(program.to_string()),
        ];
        let mut out = vec![("host.name".to_string(), self.host.clone())];
        let mut add = |key: &str, value: Option<String>| {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                out.retain(|(known, _)| known != key);
                out.push((key.into(), cut(value)));
            }
        };
        add("container.id", place.container);
        add("k8s.pod.uid", place.pod);
        let mut services = service.into_iter().flatten();
        add("service.name", services.find(|name| !name.is_empty()));
        for key in ALLOWED {
            add(key, declared_value(key));
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

/// The text of a small file, with replacements for what is not UTF-8; empty if it cannot be read.
fn read(path: &str) -> String {
    let mut bytes = Vec::with_capacity(EXPECTED);
    let read = File::open(path).and_then(|file| file.take(MAX_READ).read_to_end(&mut bytes));
    read.map_or(String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
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
    use std::io::Write;
    use std::process::{Command, Stdio};

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

    #[test]
    fn a_process_has_the_labels_of_its_environment() {
        let mut child = Command::new("cat")
            .env(
                "OTEL_RESOURCE_ATTRIBUTES",
                "service.name=other,service.version=2,secret=x",
            )
            .env("OTEL_SERVICE_NAME", "shop \"a\"\nb")
            .env("SHOWN", "yes")
            .env("HIDDEN", "no")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cat");
        // Its environment is there once it runs; a parent goes on a little earlier.
        let mut echo = [0];
        let (stdin, stdout) = (child.stdin.as_mut(), child.stdout.as_mut());
        stdin.expect("a pipe").write_all(b"x").expect("it reads");
        stdout.expect("a pipe").read_exact(&mut echo).expect("it writes");
        let mut reader = LabelReader::new(LabelOptions {
            include_env: vec!["SHOWN".into()],
            labels: vec![("region".into(), "north".into())],
        });
        let found = reader.resource(child.id(), 0, "");
        let value = |key: &str| found.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str());
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
        assert!(Rc::ptr_eq(&found, &reader.resource(child.id(), 0, "")));
        for _ in 0..=UNUSED_SEGMENTS {
            reader.end_segment();
        }
        assert!(reader.known.is_empty());
        drop(child.stdin.take());
        child.wait().expect("its end");
    }
}

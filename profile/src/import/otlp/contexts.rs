//! What samples have besides their stack: process, thread and labels.

use std::collections::{BTreeMap, HashMap};

use super::tables::{Table, Tables, decode, number_of};
use crate::import::Damage;
use crate::import::stacks::Stacks;
use crate::labels::{LabelSet, LabelSetId, LabelSets};
use crate::model::{Frame, FrameKind, PlaceId};
use crate::otlp;
use crate::otlp::messages::{Any, Link, Resource};

/// What is known of a resource.
#[derive(Default)]
pub struct Process {
    pub pid: u32,
    /// The name of its executable.
    pub executable: String,
    /// The version of its CPython.
    pub python: String,
    /// What it can be selected by: names of its service and container, by key.
    pub labels: BTreeMap<String, String>,
}

impl Process {
    pub fn read(bytes: &[u8], tables: &Tables<'_>) -> Result<Process, Damage> {
        let Resource { attributes } = decode(bytes)?;
        let mut process = Process::default();
        let (mut runtime, mut version) = (None, None);
        for attribute in &attributes {
            let value = attribute.value.as_ref();
            match &*tables.key(attribute)? {
                otlp::PID => process.pid = small(number_of(value)),
                otlp::EXECUTABLE => process.executable = tables.text_of(value)?.unwrap_or_default(),
                otlp::RUNTIME_NAME => runtime = tables.text_of(value)?,
                otlp::RUNTIME_VERSION => version = tables.text_of(value)?,
                key if otlp::is_selected_by(key) => {
                    let value = tables.text_of(value)?;
                    process.labels.extend(value.map(|value| (key.to_string(), value)));
                }
                _ => {}
            }
        }
        if runtime.as_deref() == Some(otlp::CPYTHON) {
            process.python = version.unwrap_or_default();
        }
        Ok(process)
    }

    /// The name of its node in the tree.
    fn node_name(&self) -> Option<String> {
        node_name(&self.executable, self.pid)
    }
}

fn node_name(executable: &str, pid: u32) -> Option<String> {
    match (executable, pid) {
        ("", 0) => None,
        ("", pid) => Some(pid.to_string()),
        (name, 0) => Some(name.into()),
        (name, pid) => Some(format!("{name} {pid}")),
    }
}

/// What samples of the same attributes have in common.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context {
    pub thread: (u32, u32),
    /// The place of its process and thread in the tree.
    pub base: PlaceId,
    pub labels: LabelSetId,
}

#[derive(Default)]
pub struct Contexts {
    /// By index of the resource, attributes, and link.
    known: HashMap<(usize, Vec<i32>, i32), Context>,
    /// Names of threads.
    pub threads: HashMap<(u32, u32), String>,
    pub labels: LabelSets,
}

impl Contexts {
    /// The context of a sample. `by_process`: there are several processes.
    pub fn find(
        &mut self,
        sample: (usize, Vec<i32>, i32),
        process: &Process,
        by_process: bool,
        tables: &Tables<'_>,
        out: &mut Stacks,
    ) -> Result<Context, Damage> {
        if let Some(known) = self.known.get(&sample) {
            return Ok(*known);
        }
        let (_, attributes, link) = &sample;
        let (mut pid, mut tid) = (process.pid, 0);
        let mut process_frame = process.node_name().filter(|_| by_process);
        let (mut thread_frame, mut thread_name, mut executable) = (None, None, None);
        let mut labels = link_labels(*link, tables)?;
        for attribute in attributes {
            let (key, value) = tables.attribute(*attribute)?;
            let value = value.as_ref();
            match &*key {
                otlp::PID => pid = small(number_of(value)),
                otlp::TID => tid = small(number_of(value)),
                otlp::THREAD_NAME => thread_name = tables.text_of(value)?,
                otlp::EXECUTABLE => executable = tables.text_of(value)?,
                otlp::PROCESS_FRAME => process_frame = tables.text_of(value)?.or(process_frame),
                otlp::THREAD_FRAME => thread_frame = tables.text_of(value)?,
                key => {
                    let key = key.strip_prefix(otlp::LABEL_PREFIX).unwrap_or(key);
                    match value.and_then(|value| value.value.as_ref()) {
                        Some(Any::Array(array)) => {
                            for value in &array.values {
                                labels.extend(tables.text_of(Some(value))?.map(|value| (key.to_string(), value)));
                            }
                        }
                        _ => labels.extend(tables.text_of(value)?.map(|value| (key.to_string(), value))),
                    }
                }
            }
        }
        process_frame = process_frame.or_else(|| node_name(executable.as_deref()?, pid));
        let mut base = Stacks::ROOT;
        for (kind, name) in [(FrameKind::Process, process_frame), (FrameKind::Thread, thread_frame)] {
            if let Some(name) = name {
                tables.count(name.len())?;
                let frame = out.frame(Frame::new(kind, name));
                base = out.place(base, frame, 0)?;
            }
        }
        if let Some(name) = thread_name {
            self.threads.entry((pid, tid)).or_insert(name);
        }
        let context = Context {
            thread: (pid, tid),
            base,
            labels: self.labels.id(&labels),
        };
        self.known.insert(sample, context);
        Ok(context)
    }
}

/// The labels of a link: identifiers in hexadecimal.
fn link_labels(link: i32, tables: &Tables<'_>) -> Result<LabelSet, Damage> {
    if link == 0 {
        return Ok(LabelSet::new());
    }
    let link: Link = tables.entry(Table::Links, link)?;
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
    let labels = [
        (otlp::TRACE_ID, &link.trace_id, otlp::TRACE_ID_LENGTH),
        (otlp::SPAN_ID, &link.span_id, otlp::SPAN_ID_LENGTH),
    ];
    let whole = labels.into_iter().filter(|(_, bytes, length)| bytes.len() == *length);
    Ok(whole.map(|(key, bytes, _)| (key.to_string(), hex(bytes))).collect())
}

/// The number of a process or thread; 0 if it is none.
pub fn small(number: Option<u64>) -> u32 {
    number.and_then(|number| u32::try_from(number).ok()).unwrap_or(0)
}

//! The spans of a session's processes: where each keeps them, and the labels of samples.

use std::collections::HashMap;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::Session;
use crate::cpython::{DEFAULT_DESCRIPTOR, spans};
use crate::cpython_layout::{SpanLocation, ThreadContext};
use crate::event::{Pid, Sample, SpanRecords};
use crate::frame::ModuleId;
use crate::process::system::ProcessMemory;
use crate::process::thread_context::VariableAccess;
use crate::process::{maps, thread_context};
use crate::profile::labels::{LabelSet, LabelSetId, LabelSets, SPAN};

/// Time between the first attempts to find the location of spans in a process, ns, and how many of them are not to be late: the
/// package publishes the location while it is imported.
const RETRY: u64 = 5_000_000;
const URGENT: u64 = 20;
/// The names of a process's attributes are not read again within this time, ns.
const KEYS_AGE: u64 = 100_000_000;
/// Maximum number of different sets of labels, and of the total length of sets and records in bytes.
const MAX_SETS: usize = 1 << 16;
const MAX_BYTES: usize = 16 << 20;
/// Name of the span of samples for whose labels there is no room.
const OTHER: &str = "(other)";

/// What is known of spans.
#[derive(Default)]
pub(super) struct Spans {
    processes: FxHashMap<Pid, ProcessSpans>,
    /// How files refer to the OpenTelemetry context of threads, if they define it.
    contexts: FxHashMap<ModuleId, Option<VariableAccess>>,
    sets: LabelSets,
    /// By records, and by process where they hold numbers of its names. Records come from the target: a hasher that resists
    /// collision attacks.
    of_records: HashMap<(Pid, SpanRecords), LabelSetId>,
    bytes: usize,
}

#[derive(Default)]
struct ProcessSpans {
    /// State of the mappings that were searched.
    generation: Option<u64>,
    /// avma of the publication, if the package is mapped.
    publication: Option<u64>,
    location: Option<SpanLocation>,
    /// The OpenTelemetry context of threads: how a file refers to it, and its load bias.
    access: Option<(VariableAccess, u64)>,
    context: Option<ThreadContext>,
    /// Names of attributes in it, and when they were read.
    keys: Vec<String>,
    keys_read: u64,
    next: u64,
    attempts: u64,
}

impl ProcessSpans {
    fn is_waiting(&self) -> bool {
        (self.publication.is_some() && self.location.is_none()) || (self.access.is_some() && self.context.is_none())
    }
}

impl Spans {
    /// All sets of labels, by their numbers.
    pub(super) fn label_sets(&self) -> &[LabelSet] {
        &self.sets.all
    }

    pub(super) fn forget_labels(&mut self) {
        self.sets = LabelSets::default();
        (self.of_records, self.bytes) = Default::default();
    }

    /// The number of the labels in some records. `read_keys` reads the names of the process's attributes.
    fn label_set(
        &mut self,
        pid: Pid,
        records: &SpanRecords,
        now: u64,
        read_keys: &dyn Fn() -> Option<Vec<String>>,
    ) -> LabelSetId {
        if records.is_empty() {
            return 0;
        }
        let pid = if records.context.is_empty() { 0 } else { pid };
        let key = (pid, records.clone());
        if let Some(id) = self.of_records.get(&key) {
            return *id;
        }
        let size = records.package.len() + records.context.len();
        if self.of_records.len() >= MAX_SETS || self.bytes + size > MAX_BYTES {
            return self.other_set();
        }
        let mut labels = spans::labels(&records.package);
        let mut has_all = true;
        if !records.context.is_empty() {
            let known = self.processes.entry(pid).or_default();
            let mut found = thread_context::labels(&records.context, &known.keys);
            if !found.1 && now >= known.keys_read + KEYS_AGE {
                known.keys_read = now;
                known.keys = read_keys().unwrap_or_default();
                found = thread_context::labels(&records.context, &known.keys);
            }
            labels.extend(found.0);
            has_all = found.1;
        }
        let id = self.set_within_limits(&labels);
        // Once the names of all attributes are known, the record has more labels.
        if has_all {
            self.bytes += size;
            self.of_records.insert(key, id);
        }
        id
    }

    /// The number of a set, if it is known or there is room for it. Its length counts, too: a short record can refer to
    /// long names of attributes.
    fn set_within_limits(&mut self, labels: &[(String, String)]) -> LabelSetId {
        if let Some(id) = self.sets.known(labels) {
            return id;
        }
        let size: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
        // The first one is the empty set.
        if self.sets.all.len() > MAX_SETS || self.bytes + size > MAX_BYTES {
            return self.other_set();
        }
        self.bytes += size;
        self.sets.id(labels)
    }

    fn other_set(&mut self) -> LabelSetId {
        self.sets.id(&[(SPAN.into(), OTHER.into())])
    }
}

impl Session {
    /// The number of the labels of a sample.
    pub(super) fn label_set(&mut self, s: &Sample) -> LabelSetId {
        let system = &*self.system;
        let read_keys = || {
            let maps = maps::parse(&system.maps(s.pid).ok()?);
            thread_context::keys(&ProcessMemory(system, s.pid), &maps)
        };
        self.spans.label_set(s.pid, &s.spans, s.time, &read_keys)
    }

    /// Where the backend is to read which span is active.
    pub(super) fn span_location(&self, pid: Pid) -> Option<SpanLocation> {
        self.spans.processes.get(&pid)?.location
    }

    /// The same of the OpenTelemetry context of threads.
    pub(super) fn thread_context(&self, pid: Pid) -> Option<ThreadContext> {
        self.spans.processes.get(&pid)?.context
    }

    /// The process has ended, or executes another program.
    pub(super) fn forget_spans(&mut self, pid: Pid) {
        self.spans.processes.remove(&pid);
    }

    /// How long to wait at most until processes are to be searched again.
    pub(super) fn until_spans(&self) -> Duration {
        let is_urgent = |spans: &ProcessSpans| spans.is_waiting() && spans.attempts < URGENT;
        match self.spans.processes.values().any(is_urgent) {
            true => Duration::from_nanos(RETRY),
            false => Duration::MAX,
        }
    }

    /// The processes where the location of spans was found now.
    pub(super) fn read_spans(&mut self, now: u64) -> Vec<Pid> {
        let waiting = self.spans.processes.iter().filter(|(_, spans)| spans.is_waiting());
        let mut found: Vec<Pid> = waiting.map(|(pid, _)| *pid).collect();
        found.retain(|pid| self.find_spans(*pid, now));
        found
    }

    /// Looks for the location of a process's spans, if it is not known. True if it was found now: the backend is to be notified.
    pub(super) fn find_spans(&mut self, pid: Pid, now: u64) -> bool {
        if !self.options.spans {
            return false;
        }
        let Some(target) = self.targets.get(&pid) else {
            return false;
        };
        let known = self.spans.processes.entry(pid).or_default();
        if known.generation != Some(target.process.generation) {
            known.generation = Some(target.process.generation);
            for (id, bias) in target.process.code().iter().filter_map(|code| code.file) {
                let module = self.modules.get(id);
                if known.publication.is_none() && module.name().starts_with("_native.") {
                    let section = module.section_untracked(spans::SECTION);
                    known.publication = section.map(|section| section.svma.wrapping_add(bias));
                }
                if self.options.thread_context && known.access.is_none() {
                    let access = self.spans.contexts.entry(id);
                    let access = *access.or_insert_with(|| thread_context::access(module));
                    known.access = access.map(|access| (access, bias));
                }
            }
            (known.next, known.attempts) = (0, 0);
        }
        if !known.is_waiting() || now < known.next {
            return false;
        }
        known.attempts += 1;
        // The longer nothing comes, the less often it is searched for.
        known.next = now + RETRY * known.attempts;
        let memory = ProcessMemory(&*self.system, pid);
        let mut is_new = false;
        if let (Some(at), None) = (known.publication, known.location) {
            known.location = spans::read(&memory, at).and_then(|words| spans::location(&words));
            is_new |= known.location.is_some();
        }
        if let (Some((access, bias)), None) = (known.access, known.context) {
            let tls = target.descriptor.unwrap_or(DEFAULT_DESCRIPTOR).tls;
            known.context = thread_context::location(&memory, access, bias, tls);
            is_new |= known.context.is_some();
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_bounded() {
        let mut known = Spans::default();
        let mut id = |value: &str| {
            let mut records = SpanRecords::default();
            spans::write_label(spans::NAME, value, &mut records.package);
            known.label_set(7, &records, 0, &|| None)
        };
        assert_eq!((id("a"), id("a")), (1, 1));
        for i in 0..2 * MAX_SETS {
            id(&i.to_string());
        }
        assert_eq!(id("a"), 1);
        assert!(known.label_sets().len() <= MAX_SETS + 2);
        assert_eq!(known.label_set(7, &SpanRecords::default(), 0, &|| None), 0);
        known.forget_labels();
        assert_eq!(known.label_sets().len(), 1);
    }

    /// Of a trace, with one attribute.
    fn context(trace: u64, attribute: u8) -> SpanRecords {
        let mut context = vec![0; 28];
        context[..8].copy_from_slice(&trace.to_le_bytes());
        (context[24], context[26]) = (1, 3);
        context.extend([attribute, 1, b'v']);
        SpanRecords {
            package: Vec::new(),
            context,
        }
    }

    #[test]
    fn records_with_unnamed_attributes_are_bounded() {
        let mut known = Spans::default();
        let mut id = |trace: u64| known.label_set(7, &context(trace, 9), 0, &|| None);
        assert_eq!((id(1), id(2), id(1)), (1, 2, 1));
        let last: Vec<LabelSetId> = (3..MAX_SETS as u64 + 10).map(&mut id).collect();
        assert_eq!(last[last.len() - 1], last[last.len() - 2], "both are the other one");
        assert_eq!(id(1), 1);
        assert!(known.of_records.is_empty());
        assert_eq!(known.label_sets().len(), MAX_SETS + 2);
    }

    #[test]
    fn names_of_attributes_count() {
        let mut known = Spans::default();
        let keys = || Some(vec!["k".repeat(60_000)]);
        for trace in 1..400 {
            known.label_set(7, &context(trace, 0), KEYS_AGE, &keys);
        }
        let labels = known.label_sets().iter().flatten();
        let total: usize = labels.map(|(key, value)| key.len() + value.len()).sum();
        assert!((MAX_BYTES / 2..MAX_BYTES + 60_000).contains(&total), "{total}");
    }

    #[test]
    fn names_of_attributes_are_read_when_they_are_needed() {
        let mut known = Spans::default();
        let records = context(1, 1);
        let reads = std::cell::Cell::new(0);
        let keys = |count: usize| {
            reads.set(reads.get() + 1);
            Some(["a", "b"][..count].iter().map(|key| key.to_string()).collect())
        };
        let before = known.label_set(7, &records, KEYS_AGE, &|| keys(1));
        assert_eq!(
            known.label_set(7, &records, KEYS_AGE + 1, &|| keys(2)),
            before,
            "too soon"
        );
        let after = known.label_set(7, &records, 3 * KEYS_AGE, &|| keys(2));
        assert_eq!(known.label_set(7, &records, 9 * KEYS_AGE, &|| keys(2)), after);
        assert_eq!(reads.get(), 2);
        let all = known.label_sets();
        assert_eq!(all[before as usize].len(), 1);
        assert_eq!(all[after as usize][1], ("b".to_string(), "v".to_string()));
    }
}

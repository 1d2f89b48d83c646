//! The spans of a session's processes: where each keeps them, and the labels of samples.

use std::collections::HashMap;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::SessionOptions;
use super::files::Files;
use super::process::Process;
use crate::cpython::{DEFAULT_DESCRIPTOR, spans};
use crate::cpython_layout::{SpanLocation, ThreadContext};
use crate::event::{Sample, SpanRecords};
use crate::frame::ModuleId;
use crate::process::modules::Modules;
use crate::process::thread_context::VariableAccess;
use crate::process::{maps, thread_context};
use crate::profile::labels::{LabelSetId, LabelSets, SPAN};

/// Time between the first attempts to find the location of spans in a process, ns, and how many of them are not to be late: the
/// package publishes the location while it is imported.
const RETRY: u64 = 5_000_000;
const URGENT: u64 = 20;
/// The names of a process's attributes are not read again within this time, ns.
const KEYS_AGE: u64 = 100_000_000;
/// Maximum number of different sets of labels, and of the total length of sets and records in bytes.
const MAX_SETS: usize = 1 << 16;
const MAX_BYTES: usize = 16 << 20;
/// Part of both that one process of a host may have.
const SHARE: usize = 4;
/// Name of the span of samples for whose labels there is no room.
const OTHER: &str = "(other)";

/// The labels of samples by the spans that are active in them.
#[derive(Default)]
pub(super) struct Spans {
    /// Label samples.
    is_enabled: bool,
    /// Also by the OpenTelemetry context that threads publish.
    reads_context: bool,
    /// Processes are those of a whole host: each has a part of what is bounded.
    is_of_host: bool,
    /// How files refer to the OpenTelemetry context of threads, if they define it.
    contexts: FxHashMap<ModuleId, Option<VariableAccess>>,
    /// By records of the package alone. Records come from the target: a hasher that resists collision attacks.
    of_records: HashMap<SpanRecords, LabelSetId>,
    /// Records with a known set, those of processes included, and the bytes of records and sets.
    count: usize,
    bytes: usize,
    /// Segments before this one: their sets have other numbers.
    segment: u32,
}

/// Spans of one process.
#[derive(Default)]
pub(super) struct ProcessSpans {
    /// State of the mappings that were searched.
    generation: Option<u64>,
    /// avma of the publication, if the package is mapped.
    publication: Option<u64>,
    /// Where the backend is to read which span is active.
    pub(super) location: Option<SpanLocation>,
    /// The OpenTelemetry context of threads: how a file refers to it, and its load bias.
    access: Option<(VariableAccess, u64)>,
    /// Where the backend is to read it.
    pub(super) context: Option<ThreadContext>,
    /// Names of attributes in it, and when they were read.
    keys: Vec<String>,
    keys_read: u64,
    /// By records that hold numbers of these names, in `segment`.
    of_records: HashMap<SpanRecords, LabelSetId>,
    segment: u32,
    /// Sets and records that it has added in `segment`, and their bytes.
    added: (usize, usize),
    next: u64,
    attempts: u64,
}

impl ProcessSpans {
    /// Whether it is known that there are spans, but not where.
    pub(super) fn is_waiting(&self) -> bool {
        (self.publication.is_some() && self.location.is_none()) || (self.access.is_some() && self.context.is_none())
    }

    /// How long to wait at most until the process is to be searched again.
    pub(super) fn until_search(&self) -> Duration {
        if self.is_waiting() && self.attempts < URGENT {
            Duration::from_nanos(RETRY)
        } else {
            Duration::MAX
        }
    }
}

impl Spans {
    pub(super) fn new(options: &SessionOptions) -> Spans {
        Spans {
            is_enabled: options.spans,
            reads_context: options.thread_context,
            is_of_host: options.host,
            ..Spans::default()
        }
    }

    /// The labels have gone with their segment.
    pub(super) fn forget_labels(&mut self) {
        self.of_records.clear();
        (self.count, self.bytes) = (0, 0);
        self.segment = self.segment.wrapping_add(1);
    }

    /// Drops what is known of files that are closed.
    pub(super) fn forget_closed(&mut self, modules: &Modules) {
        self.contexts.retain(|id, _| !modules.is_closed(*id));
    }

    /// The number of the labels of a sample, among `sets`.
    pub(super) fn label_set(
        &mut self,
        own: &mut ProcessSpans,
        sets: &mut LabelSets,
        s: &Sample,
        process: &Process,
        files: &Files,
    ) -> LabelSetId {
        let read_keys = || {
            let maps = maps::parse(&files.system.maps(s.pid).ok()?);
            thread_context::keys(&process.live_memory(&*files.system), &maps)
        };
        self.set_of(own, sets, &s.spans, s.time, &read_keys)
    }

    /// The number of the labels in some records. `read_keys` reads the names of the process's attributes.
    fn set_of(
        &mut self,
        own: &mut ProcessSpans,
        sets: &mut LabelSets,
        records: &SpanRecords,
        now: u64,
        read_keys: &dyn Fn() -> Option<Vec<String>>,
    ) -> LabelSetId {
        if records.is_empty() {
            return 0;
        }
        if own.segment != self.segment {
            own.of_records.clear();
            (own.segment, own.added) = (self.segment, (0, 0));
        }
        let has_context = !records.context.is_empty();
        let known = if has_context { &own.of_records } else { &self.of_records };
        if let Some(id) = known.get(records) {
            return *id;
        }
        let size = records.package.len() + records.context.len();
        let has_share = !self.is_of_host || own.added.0 < MAX_SETS / SHARE && own.added.1 + size <= MAX_BYTES / SHARE;
        if self.count >= MAX_SETS || self.bytes + size > MAX_BYTES || !has_share {
            return other_set(sets);
        }
        let before = (self.count + sets.all.len(), self.bytes);
        let mut labels = spans::labels(&records.package);
        let mut has_all = true;
        if has_context {
            let mut found = thread_context::labels(&records.context, &own.keys);
            if !found.1 && now >= own.keys_read + KEYS_AGE {
                own.keys_read = now;
                own.keys = read_keys().unwrap_or_default();
                found = thread_context::labels(&records.context, &own.keys);
            }
            labels.extend(found.0);
            has_all = found.1;
        }
        let id = self.set_within_limits(sets, &labels);
        // Once the names of all attributes are known, the record has more labels.
        if has_all {
            self.bytes += size;
            self.count += 1;
            let known = if has_context {
                &mut own.of_records
            } else {
                &mut self.of_records
            };
            known.insert(records.clone(), id);
        }
        own.added.0 += (self.count + sets.all.len() - before.0).div_ceil(2);
        own.added.1 += self.bytes - before.1;
        id
    }

    /// The number of a set, if it is known or there is room for it. Its length counts, too: a short record can refer to
    /// long names of attributes.
    fn set_within_limits(&mut self, sets: &mut LabelSets, labels: &[(String, String)]) -> LabelSetId {
        if let Some(id) = sets.known(labels) {
            return id;
        }
        let size: usize = labels.iter().map(|(key, value)| key.len() + value.len()).sum();
        // The first one is the empty set.
        if sets.all.len() > MAX_SETS || self.bytes + size > MAX_BYTES {
            return other_set(sets);
        }
        self.bytes += size;
        sets.id(labels)
    }

    /// Looks for the location of a process's spans, if it is not known; `now`: CLOCK_MONOTONIC, ns. True if it was found now: the
    /// backend is to be notified.
    pub(super) fn find(&mut self, own: &mut ProcessSpans, process: &Process, files: &Files, now: u64) -> bool {
        if !self.is_enabled {
            return false;
        }
        if own.generation != Some(process.space.generation) {
            own.generation = Some(process.space.generation);
            for (id, bias) in process.space.code().iter().filter_map(|code| code.file) {
                let module = files.modules.get(id);
                if own.publication.is_none() && module.name().starts_with("_native.") {
                    let section = module.section_untracked(spans::SECTION);
                    own.publication = section.map(|section| section.svma.wrapping_add(bias));
                }
                if self.reads_context && own.access.is_none() {
                    let access = self.contexts.entry(id);
                    let access = *access.or_insert_with(|| thread_context::access(module));
                    own.access = access.map(|access| (access, bias));
                }
            }
            (own.next, own.attempts) = (0, 0);
        }
        if !own.is_waiting() || now < own.next {
            return false;
        }
        own.attempts += 1;
        // The longer nothing comes, the less often it is searched for.
        own.next = now + RETRY * own.attempts;
        let memory = process.live_memory(&*files.system);
        let mut is_new = false;
        if let (Some(at), None) = (own.publication, own.location) {
            own.location = spans::read(&memory, at).and_then(|words| spans::location(&words));
            is_new |= own.location.is_some();
        }
        if let (Some((access, bias)), None) = (own.access, own.context) {
            let tls = process.descriptor.unwrap_or(DEFAULT_DESCRIPTOR).tls;
            own.context = thread_context::location(&memory, access, bias, tls);
            is_new |= own.context.is_some();
        }
        is_new
    }
}

fn other_set(sets: &mut LabelSets) -> LabelSetId {
    sets.id(&[(SPAN.into(), OTHER.into())])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spans of one process.
    #[derive(Default)]
    struct Known {
        spans: Spans,
        own: ProcessSpans,
        sets: LabelSets,
    }

    impl Known {
        fn set(&mut self, records: &SpanRecords, now: u64, keys: &dyn Fn() -> Option<Vec<String>>) -> LabelSetId {
            self.spans.set_of(&mut self.own, &mut self.sets, records, now, keys)
        }
    }

    #[test]
    fn labels_are_bounded() {
        fn id(known: &mut Known, value: &str) -> LabelSetId {
            let mut records = SpanRecords::default();
            spans::write_label(spans::NAME, value, &mut records.package);
            known.set(&records, 0, &|| None)
        }
        let mut known = Known::default();
        assert_eq!((id(&mut known, "a"), id(&mut known, "a")), (1, 1));
        for i in 0..2 * MAX_SETS {
            id(&mut known, &i.to_string());
        }
        assert_eq!(id(&mut known, "a"), 1);
        assert!(known.sets.all.len() <= MAX_SETS + 2);
        assert_eq!(known.set(&SpanRecords::default(), 0, &|| None), 0);
        known.spans.forget_labels();
        known.sets = LabelSets::default();
        assert_eq!(id(&mut known, "b"), 1);
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
    fn one_process_of_many_has_a_part_of_the_labels() {
        let mut known = Known::default();
        known.spans.is_of_host = true;
        let name = |known: &mut Known, value: u64| {
            let mut records = SpanRecords::default();
            spans::write_label(spans::NAME, &value.to_string(), &mut records.package);
            known.set(&records, 0, &|| None)
        };
        for value in 0..MAX_SETS as u64 {
            name(&mut known, value);
        }
        assert!(known.sets.all.len() <= MAX_SETS / SHARE + 2);
        known.own = ProcessSpans::default();
        let (before, of_other) = (known.sets.all.len(), name(&mut known, u64::MAX));
        assert_eq!(of_other as usize, before, "others have room");
    }

    #[test]
    fn records_with_unnamed_attributes_are_bounded() {
        let mut known = Known::default();
        let mut id = |trace: u64| known.set(&context(trace, 9), 0, &|| None);
        assert_eq!((id(1), id(2), id(1)), (1, 2, 1));
        let last: Vec<LabelSetId> = (3..MAX_SETS as u64 + 10).map(&mut id).collect();
        assert_eq!(last[last.len() - 1], last[last.len() - 2], "both are the other one");
        assert_eq!(id(1), 1);
        assert!(known.spans.of_records.is_empty() && known.own.of_records.is_empty());
        assert_eq!(known.sets.all.len(), MAX_SETS + 2);
    }

    #[test]
    fn names_of_attributes_count() {
        let mut known = Known::default();
        let keys = || Some(vec!["k".repeat(60_000)]);
        for trace in 1..400 {
            known.set(&context(trace, 0), KEYS_AGE, &keys);
        }
        let labels = known.sets.all.iter().flatten();
        let total: usize = labels.map(|(key, value)| key.len() + value.len()).sum();
        assert!((MAX_BYTES / 2..MAX_BYTES + 60_000).contains(&total), "{total}");
    }

    #[test]
    fn names_of_attributes_are_read_when_they_are_needed() {
        let mut known = Known::default();
        let records = context(1, 1);
        let reads = std::cell::Cell::new(0);
        let keys = |count: usize| {
            reads.set(reads.get() + 1);
            Some(["a", "b"][..count].iter().map(|key| key.to_string()).collect())
        };
        let before = known.set(&records, KEYS_AGE, &|| keys(1));
        assert_eq!(known.set(&records, KEYS_AGE + 1, &|| keys(2)), before, "too soon");
        let after = known.set(&records, 3 * KEYS_AGE, &|| keys(2));
        assert_eq!(known.set(&records, 9 * KEYS_AGE, &|| keys(2)), after);
        assert_eq!(reads.get(), 2);
        let all = known.sets.all;
        assert_eq!(all[before as usize].len(), 1);
        assert_eq!(all[after as usize][1], ("b".to_string(), "v".to_string()));
    }
}

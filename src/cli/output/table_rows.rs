//! Rows of the tables of `report` and `diff`: names, locations and samples.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::profile::category::Categories;
use crate::profile::model::{Frame, FrameKind, Profile};
use crate::profile::stats;
use crate::profile::stats::{FunctionId, SelfTotal, Stats};
use crate::profile::your_functions::{InnermostFunction, function_name};

/// A row; texts are as the target gave them, not escaped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportRow {
    /// Of a function: what commands know it by, see [`function_id`].
    pub id: Option<String>,
    /// `None` for what is not a function.
    pub kind: Option<FrameKind>,
    pub name: String,
    /// Python: `file:line` of the definition or the line; native: module, or `source:line`.
    pub place: String,
    /// Self samples.
    pub self_count: u64,
    pub total: u64,
    /// Self samples in native code, of a Python function that they count for.
    pub native: Option<u64>,
    /// Of a function where calls are counted, but something else is shown.
    pub calls: Option<u64>,
    /// The same of a sampled profile.
    pub sampled: Option<SampledTime>,
    /// Interval (95 % confidence) of a function's share of self samples, from 0 to 1.
    pub share: Option<(f64, f64)>,
    /// Of a function of the user's own.
    pub yours: Option<YourRow>,
}

/// A function with the libraries and C code that it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct YourRow {
    /// Self samples with those of the libraries that it calls.
    pub amount: u64,
    /// Part of these in libraries.
    pub in_libraries: u64,
    /// Part of these in native code that it calls itself.
    pub in_native: u64,
    /// Its line with most samples; 0: unknown.
    pub hottest_line: u32,
    /// Its file with that line.
    pub place: String,
}

impl YourRow {
    /// Of a function whose frame this is.
    pub fn new(function: &InnermostFunction, frame: &Frame) -> YourRow {
        YourRow {
            amount: function.amount,
            in_libraries: function.in_libraries,
            in_native: function.in_native,
            hottest_line: function.hottest_line,
            place: function.place(frame),
        }
    }
}

/// A function's own time in ns, with its interval (95 % confidence).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledTime {
    pub time: u64,
    pub interval: (u64, u64),
}

impl ReportRow {
    /// As filters and patterns see it.
    pub fn text(&self) -> String {
        if self.place.is_empty() {
            self.name.clone()
        } else {
            format!("{} ({})", self.name, self.place)
        }
    }

    /// Whether this is the complete name, or its last component; or `id:` and its identifier.
    pub fn is_named(&self, name: &str) -> bool {
        if name.starts_with(ID) {
            return self.id.as_deref() == Some(name);
        }
        let short = self.name.strip_suffix(name);
        short.is_some_and(|rest| rest.is_empty() || (self.kind == Some(FrameKind::Python) && rest.ends_with('.')))
    }

    pub fn json(&self) -> Value {
        let mut value = json!({"self": self.self_count, "total": self.total});
        if let Some(id) = &self.id {
            value["id"] = id.as_str().into();
        }
        if let Some(native) = self.native {
            value["native"] = native.into();
        }
        if let Some(calls) = self.calls {
            value["calls"] = calls.into();
        }
        if let Some(sampled) = self.sampled {
            value["self_ns"] = sampled.time.into();
            value["self_ns_interval"] = json!([sampled.interval.0, sampled.interval.1]);
        }
        if let Some((low, high)) = self.share {
            value["self_share_interval"] = json!([low, high]);
        }
        if let Some(yours) = &self.yours {
            value["self_with_libraries"] = yours.amount.into();
            value["hottest_line"] = (yours.hottest_line > 0).then_some(yours.hottest_line).into();
        }
        if let Some(kind) = self.kind {
            value["kind"] = kind_name(kind).into();
        }
        value["name"] = self.name.as_str().into();
        if !self.place.is_empty() {
            value["place"] = self.place.as_str().into();
        }
        value
    }

    pub fn of_functions_by_id(stats: &Stats<'_>) -> Vec<(FunctionId, ReportRow)> {
        let counts = stats.functions().into_iter().enumerate();
        let row = |(id, counts): (usize, SelfTotal)| {
            let (id, SelfTotal { self_count, total }) = (id as FunctionId, counts);
            (
                id,
                ReportRow {
                    self_count,
                    total,
                    ..ReportRow::of_function(stats, id)
                },
            )
        };
        counts.map(row).collect()
    }

    /// Without samples.
    pub fn of_function(stats: &Stats<'_>, id: FunctionId) -> ReportRow {
        ReportRow::of_frame(stats.frame(id))
    }

    pub fn of_frame(frame: &Frame) -> ReportRow {
        ReportRow {
            id: Some(function_id(frame)),
            kind: Some(frame.kind),
            name: function_name(frame).into(),
            place: match frame.kind {
                FrameKind::Python if frame.first_line == 0 => frame.filename.clone(),
                FrameKind::Python => format!("{}:{}", frame.filename, frame.first_line),
                // Its name has the module.
                FrameKind::Unknown => String::new(),
                _ => frame.module.clone(),
            },
            ..ReportRow::default()
        }
    }

    /// Represents the caller of functions without one.
    pub fn outermost() -> ReportRow {
        ReportRow {
            name: "[outermost]".into(),
            ..ReportRow::default()
        }
    }

    /// A row for each line of a source file, called after the function with most samples there; of samples without a
    /// line, one for each function.
    pub fn of_lines(stats: &Stats<'_>) -> Vec<ReportRow> {
        let lines = stats.file_lines().into_iter();
        let row = |l: stats::FileLineCounts<'_>| {
            let frame = stats.frame(l.function);
            let mut row = ReportRow::of_frame(frame);
            if l.line > 0 {
                row.place = format!("{}:{}", l.file, l.line);
            } else if !l.file.is_empty() {
                row.place = format!("{} [no line]", l.file);
            }
            (row.self_count, row.total) = (l.counts.self_count, l.counts.total);
            row
        };
        lines.map(row).collect()
    }

    /// A row for each category of code: the user's, a library, an extension.
    pub fn of_categories(profile: &Profile, stats: &Stats<'_>) -> Vec<ReportRow> {
        let categories = Categories::new(profile);
        let mut names: Vec<String> = Vec::new();
        let mut known: HashMap<String, u32> = HashMap::new();
        let functions = stats.functions().len() as FunctionId;
        let of_function: Vec<u32> = (0..functions)
            .map(|id| {
                let label = categories.label(stats.frame(id)).unwrap_or_default();
                *known.entry(label).or_insert_with_key(|label| {
                    names.push(label.clone());
                    names.len() as u32 - 1
                })
            })
            .collect();
        let counts = stats.group(names.len(), &of_function);
        let rows = names.into_iter().zip(counts).filter(|(_, counts)| counts.total > 0);
        let row = |(name, counts): (String, SelfTotal)| ReportRow {
            name,
            self_count: counts.self_count,
            total: counts.total,
            ..ReportRow::default()
        };
        rows.map(row).collect()
    }

    pub fn of_modules(stats: &Stats<'_>) -> Vec<ReportRow> {
        let modules = stats.modules().into_iter();
        let row = |(name, counts): (&str, SelfTotal)| ReportRow {
            name: name.into(),
            self_count: counts.self_count,
            total: counts.total,
            ..ReportRow::default()
        };
        modules.map(row).collect()
    }

    /// A row for each thread or process, by the timeline, else by the nodes for them; `None` if there is neither.
    pub fn of_threads(profile: &Profile, processes: bool) -> Option<Vec<ReportRow>> {
        // A timeline with only some of the samples would give wrong shares.
        let timed = profile.is_timed();
        let threads = if timed { stats::threads(profile) } else { Vec::new() };
        let mut rows: BTreeMap<(u32, u32), ReportRow> = BTreeMap::new();
        for thread in &threads {
            let tid = if processes { thread.pid } else { thread.tid };
            let row = rows.entry((thread.pid, tid)).or_default();
            row.self_count = row.self_count.saturating_add(thread.samples);
            row.total = row.self_count;
            if !processes {
                row.place = thread.pid.to_string();
            }
            if row.name.is_empty() || thread.tid == tid {
                let named = profile
                    .meta
                    .threads
                    .iter()
                    .find(|(p, t, _)| (*p, *t) == (thread.pid, tid));
                row.name = match named {
                    Some((_, _, name)) if !name.is_empty() => format!("{name} ({tid})"),
                    _ => tid.to_string(),
                };
            }
        }
        if timed {
            return Some(rows.into_values().collect());
        }
        let kind = if processes {
            FrameKind::Process
        } else {
            FrameKind::Thread
        };
        let mut by_name: BTreeMap<&str, u64> = BTreeMap::new();
        for node in &profile.nodes {
            if let Some(frame) = profile
                .frames
                .get(node.frame as usize)
                .filter(|frame| frame.kind == kind)
            {
                let sum = by_name.entry(&frame.name).or_default();
                *sum = sum.saturating_add(node.count);
            }
        }
        let row = |(name, count): (&str, u64)| ReportRow {
            name: name.into(),
            self_count: count,
            total: count,
            ..ReportRow::default()
        };
        (!by_name.is_empty()).then(|| by_name.into_iter().map(row).collect())
    }
}

/// What the identifiers of functions begin with.
pub const ID: &str = "id:";

/// An identifier of a function: `id:` and 12 hexadecimal digits. It is made of its kind, name, and file or module, so that it
/// is the same in all recordings of a program, also after lines were added above the function.
pub fn function_id(frame: &Frame) -> String {
    let place = match frame.kind {
        FrameKind::Python => &frame.filename,
        _ => &frame.module,
    };
    let mut hash = Sha256::new();
    for part in [kind_name(frame.kind), &*function_name(frame), place] {
        hash.update(part);
        hash.update([0]);
    }
    let digits = hash.finalize().into_iter().take(6).map(|byte| format!("{byte:02x}"));
    digits.fold(ID.into(), |id, digits| id + &digits)
}

/// Name of a kind of frames.
pub fn kind_name(kind: FrameKind) -> &'static str {
    match kind {
        FrameKind::Root => "root",
        FrameKind::Process => "process",
        FrameKind::Thread => "thread",
        FrameKind::Python => "Python",
        FrameKind::Native => "native",
        FrameKind::Inlined => "inlined",
        FrameKind::Kernel => "kernel",
        FrameKind::Truncated => "truncated",
        FrameKind::Task => "task",
        FrameKind::Worker => "worker",
        FrameKind::State => "state",
        FrameKind::Unknown => "unknown",
    }
}

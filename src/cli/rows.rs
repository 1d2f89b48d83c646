//! Rows of the tables that `report` and `diff` show: names, places and samples.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::export::view::shown_name;
use crate::tree::profile::{Frame, FrameKind, Profile};
use crate::tree::stats::{self, Counts, FunctionId, Stats};

/// A row; texts are as the target gave them, not escaped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// `None` for what is no function.
    pub kind: Option<FrameKind>,
    pub name: String,
    /// Python: `file:line`, where a function begins or the line itself; native: module; of a line, `source:line`.
    pub place: String,
    /// Self samples.
    pub own: u64,
    pub total: u64,
}

impl Row {
    /// As restrictions and patterns see it.
    pub fn text(&self) -> String {
        match self.place.is_empty() {
            true => self.name.clone(),
            false => format!("{} ({})", self.name, self.place),
        }
    }

    /// Whether this is its whole name, or the last part of one with dots.
    pub fn is_named(&self, name: &str) -> bool {
        let short = self.name.strip_suffix(name);
        short.is_some_and(|rest| rest.is_empty() || (self.kind == Some(FrameKind::Python) && rest.ends_with('.')))
    }

    pub fn json(&self) -> Value {
        let mut value = json!({"self": self.own, "total": self.total});
        if let Some(kind) = self.kind {
            value["kind"] = kind_name(kind).into();
        }
        value["name"] = self.name.as_str().into();
        if !self.place.is_empty() {
            value["place"] = self.place.as_str().into();
        }
        value
    }

    pub fn of_functions(stats: &Stats<'_>) -> Vec<Row> {
        let rows = Row::of_functions_by_id(stats).into_iter();
        rows.map(|(_, row)| row).filter(|row| row.total > 0).collect()
    }

    pub fn of_functions_by_id(stats: &Stats<'_>) -> Vec<(FunctionId, Row)> {
        let counts = stats.functions().into_iter().enumerate();
        let row = |(id, counts): (usize, Counts)| {
            let (id, Counts { own, total }) = (id as FunctionId, counts);
            (
                id,
                Row {
                    own,
                    total,
                    ..Row::of_function(stats, id)
                },
            )
        };
        counts.map(row).collect()
    }

    /// Without samples.
    pub fn of_function(stats: &Stats<'_>, id: FunctionId) -> Row {
        Row::of_frame(stats.frame(id))
    }

    pub fn of_frame(frame: &Frame) -> Row {
        Row {
            kind: Some(frame.kind),
            name: name(frame),
            place: match frame.kind {
                FrameKind::Python => format!("{}:{}", frame.filename, frame.first_line),
                // Its name has the module.
                FrameKind::Unknown => String::new(),
                _ => frame.module.clone(),
            },
            ..Row::default()
        }
    }

    /// Stands for the caller of functions that have none.
    pub fn outermost() -> Row {
        Row {
            name: "[outermost]".into(),
            ..Row::default()
        }
    }

    pub fn of_lines(stats: &Stats<'_>) -> Vec<Row> {
        let lines = stats.lines().into_iter();
        let row = |l: stats::Line| {
            let frame = stats.frame(l.function);
            let mut row = Row::of_frame(frame);
            if frame.kind == FrameKind::Python {
                row.place = format!("{}:{}", frame.filename, l.line);
            } else if l.line > 0 && !frame.source.is_empty() {
                row.place = format!("{}:{}", frame.source, l.line);
            }
            (row.own, row.total) = (l.counts.own, l.counts.total);
            row
        };
        lines.map(row).collect()
    }

    pub fn of_modules(stats: &Stats<'_>) -> Vec<Row> {
        let modules = stats.modules().into_iter();
        let row = |(name, counts): (&str, Counts)| Row {
            name: name.into(),
            own: counts.own,
            total: counts.total,
            ..Row::default()
        };
        modules.map(row).collect()
    }

    /// A row for each thread or process, by the timeline, else by the nodes for them; `None` if there is neither.
    pub fn of_threads(profile: &Profile, processes: bool) -> Option<Vec<Row>> {
        // A timeline of some samples only would tell wrong shares.
        let timed = profile.is_timed();
        let threads = if timed { stats::threads(profile) } else { Vec::new() };
        let mut rows: BTreeMap<(u32, u32), Row> = BTreeMap::new();
        for thread in &threads {
            let tid = if processes { thread.pid } else { thread.tid };
            let row = rows.entry((thread.pid, tid)).or_default();
            row.own += thread.samples;
            row.total = row.own;
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
                *by_name.entry(&frame.name).or_default() += node.count;
            }
        }
        let row = |(name, count): (&str, u64)| Row {
            name: name.into(),
            own: count,
            total: count,
            ..Row::default()
        };
        (!by_name.is_empty()).then(|| by_name.into_iter().map(row).collect())
    }
}

fn name(frame: &Frame) -> String {
    let name = match frame.kind {
        FrameKind::Python if !frame.qualname.is_empty() => &frame.qualname,
        _ => &*shown_name(frame),
    };
    if name.is_empty() { "[unnamed]" } else { name }.into()
}

/// A kind of frames in a word.
pub fn kind_name(kind: FrameKind) -> &'static str {
    match kind {
        FrameKind::Root => "root",
        FrameKind::Process => "process",
        FrameKind::Thread => "thread",
        FrameKind::Python => "Python",
        FrameKind::Native => "native",
        FrameKind::Inlined => "inlined",
        FrameKind::Kernel => "kernel",
        FrameKind::Cut => "cut",
        FrameKind::State => "state",
        FrameKind::Unknown => "unknown",
    }
}

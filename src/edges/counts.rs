//! Judged edges by verdict, and by how the unwinder found the caller.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{Doubt, Fault, Lack, Verdict};
use crate::event::Pid;
use crate::frame::{ModuleId, UnwindMethod};

/// Different impossible edges that are kept.
const MAX_IMPOSSIBLE: usize = 1000;
/// Impossible edges that are printed.
const SHOWN: usize = 20;

/// How the caller of an edge was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Found {
    Tables,
    /// The kernel put the frame there, or interrupted it.
    Signal,
    Instructions,
    FramePointer,
    StackScan,
    Other,
}

impl Found {
    pub fn by(method: UnwindMethod) -> Found {
        match method {
            UnwindMethod::Cfi => Found::Tables,
            UnwindMethod::InstructionAnalysis => Found::Instructions,
            UnwindMethod::FramePointer => Found::FramePointer,
            UnwindMethod::StackScan => Found::StackScan,
            UnwindMethod::StackEnd | UnwindMethod::Begins(_) | UnwindMethod::Failed => Found::Other,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Found::Tables => "call frame tables",
            Found::Signal => "signal frame",
            Found::Instructions => "instructions",
            Found::FramePointer => "frame pointer",
            Found::StackScan => "stack scan",
            Found::Other => "other",
        }
    }
}

/// Edges by verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdicts {
    pub proved: u64,
    pub possible: u64,
    pub impossible: u64,
    pub unjudged: u64,
}

impl Verdicts {
    pub fn all(&self) -> u64 {
        self.proved + self.possible + self.impossible + self.unjudged
    }
}

/// Code in a file (svma), or in memory (avma).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CodePlace {
    File(ModuleId, u64),
    Memory(Pid, u64),
}

/// An edge that the machine code contradicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImpossibleEdge {
    pub found: Found,
    pub fault: Fault,
    /// The return address, and an address in the function that is to return there.
    pub caller: CodePlace,
    pub callee: CodePlace,
}

/// All judged edges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EdgeCounts {
    /// Samples with native frames.
    pub samples: u64,
    pub by_method: BTreeMap<Found, Verdicts>,
    pub doubts: BTreeMap<Doubt, u64>,
    pub lacks: BTreeMap<Lack, u64>,
    pub impossible: BTreeMap<ImpossibleEdge, u64>,
}

impl EdgeCounts {
    pub fn add(&mut self, found: Found, verdict: Verdict) {
        let row = self.by_method.entry(found).or_default();
        match verdict {
            Verdict::Proved => row.proved += 1,
            Verdict::Possible(doubt) => {
                row.possible += 1;
                *self.doubts.entry(doubt).or_default() += 1;
            }
            Verdict::Impossible(_) => row.impossible += 1,
            Verdict::Unjudged(lack) => {
                row.unjudged += 1;
                *self.lacks.entry(lack).or_default() += 1;
            }
        }
    }

    pub fn add_impossible(&mut self, edge: ImpossibleEdge) {
        if self.impossible.len() < MAX_IMPOSSIBLE || self.impossible.contains_key(&edge) {
            *self.impossible.entry(edge).or_default() += 1;
        }
    }

    pub fn total(&self) -> Verdicts {
        self.by_method.values().fold(Verdicts::default(), |sum, row| Verdicts {
            proved: sum.proved + row.proved,
            possible: sum.possible + row.possible,
            impossible: sum.impossible + row.impossible,
            unjudged: sum.unjudged + row.unjudged,
        })
    }

    /// Proved edges for each sample.
    pub fn proved_per_sample(&self) -> f64 {
        self.total().proved as f64 / self.samples.max(1) as f64
    }

    /// The counts as a table, the reasons, and the impossible edges; `place` names code.
    pub fn text(&self, place: &dyn Fn(CodePlace) -> String) -> String {
        let total = self.total();
        let mut out = format!(
            "edges: {:.2} proved per sample ({} in {} samples)\n",
            self.proved_per_sample(),
            total.all(),
            self.samples
        );
        let mut row = |name: &str, v: &Verdicts| {
            let unjudged = 100.0 * v.unjudged as f64 / v.all().max(1) as f64;
            let _ = writeln!(
                out,
                "{name:<18} {:>9} {:>9} {:>10} {:>9} ({unjudged:.1} %)",
                v.proved, v.possible, v.impossible, v.unjudged
            );
        };
        for (found, v) in &self.by_method {
            row(found.name(), v);
        }
        row("all", &total);
        let head = format!(
            "{:<18} {:>9} {:>9} {:>10} {:>9}\n",
            "caller found by", "proved", "possible", "impossible", "unjudged"
        );
        let at = out.find('\n').map_or(0, |end| end + 1);
        out.insert_str(at, &head);
        for (doubt, n) in &self.doubts {
            let _ = writeln!(out, "possible: {n}: {}", doubt.reason());
        }
        for (lack, n) in &self.lacks {
            let _ = writeln!(out, "unjudged: {n}: {}", lack.reason());
        }
        let mut impossible: Vec<_> = self.impossible.iter().collect();
        impossible.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
        for (edge, n) in impossible.iter().take(SHOWN) {
            let _ = writeln!(
                out,
                "impossible: {n}: {} returns to {} ({}): {}",
                place(edge.callee),
                place(edge.caller),
                edge.found.name(),
                edge.fault.reason()
            );
        }
        if let Some(more) = impossible.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            let _ = writeln!(out, "impossible: {more} other edges");
        }
        out
    }
}

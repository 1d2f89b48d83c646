//! The functions that every view begins with: the user's own, each with the libraries and C code that it runs.

use std::borrow::Cow;
use std::cmp::Reverse;

use rustc_hash::FxHashMap;

use super::category::{Categories, Category};
use super::model::{Frame, FrameKind, NodeId, Profile};
use super::stats::{FunctionId, SelfTotal, Stats};
use super::view::shown_name;

/// Which functions the samples of a profile are assigned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user's own Python functions.
    Yours,
    /// All Python functions: none of those with samples is the user's own.
    Python,
    /// Functions of native code: none is Python.
    Native,
}

/// A function, with the samples of which it is the innermost of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InnermostFunction {
    /// Its number in the [`Stats`].
    pub function: FunctionId,
    /// Samples in it and in what it runs that is not of its kind: libraries and native code. An amount of the profile's
    /// first value type, as all of these.
    pub amount: u64,
    /// The part of `amount` in functions of libraries, with the native code that they run.
    pub in_libraries: u64,
    /// The part of `amount` in native code that it runs itself.
    pub in_native: u64,
    /// Samples with the function anywhere on the stack.
    pub total: u64,
    /// The line of the function with most of `amount`, as far as the places of samples are known, else with the highest total; 0:
    /// unknown.
    pub hottest_line: u32,
}

impl InnermostFunction {
    /// File and hottest line, `demo.py:21`: of a file the last part of its path.
    pub fn short_place(&self, frame: &Frame) -> String {
        let place = self.place(frame);
        let is_path = frame.kind == FrameKind::Python && !place.starts_with('<');
        match place.rsplit_once('/').filter(|_| is_path) {
            Some((_, name)) => name.into(),
            None => place,
        }
    }

    /// File and hottest line, `/srv/demo.py:21`, or the line of the definition where lines are not known; of native code its
    /// module.
    pub fn place(&self, frame: &Frame) -> String {
        if frame.kind != FrameKind::Python {
            return frame.module.clone();
        }
        match [self.hottest_line, frame.first_line].into_iter().find(|line| *line > 0) {
            Some(line) => format!("{}:{line}", frame.filename),
            None => frame.filename.clone(),
        }
    }
}

/// The functions with samples, those with most first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InnermostFunctions {
    /// Which functions these are.
    pub whose: Whose,
    /// By `amount`, the highest first, then by total and name; those with samples, also if others are always further in.
    pub rows: Vec<InnermostFunction>,
    /// Samples without such a function on their stack.
    pub outside: u64,
}

/// Where a sample is, seen from the innermost function of the kind.
#[derive(Clone, Copy)]
enum Inside {
    Itself,
    Library,
    Native,
}

impl Inside {
    /// Where a sample is that goes on into another function, not of the kind.
    fn then(self, next: FrameKind) -> Inside {
        match (self, next) {
            (Inside::Library, _) | (_, FrameKind::Python) => Inside::Library,
            (_, kind) if kind.is_native() => Inside::Native,
            _ => self,
        }
    }
}

impl InnermostFunctions {
    /// Those with an amount: the innermost ones of some sample.
    pub fn innermost(&self) -> impl Iterator<Item = &InnermostFunction> {
        self.rows.iter().filter(|row| row.amount > 0)
    }

    /// Assigns each sample to the innermost function of the user's own on its stack; of all Python functions if there is
    /// none, and of all functions if there is no Python.
    pub fn of(profile: &Profile, stats: &Stats<'_>) -> InnermostFunctions {
        let categories = Categories::new(profile);
        let is_of = |frame: &Frame, whose| match whose {
            Whose::Yours => matches!(categories.of(frame), Some((Category::Yours, _))),
            Whose::Python => frame.kind == FrameKind::Python,
            Whose::Native => frame.kind == FrameKind::Python || frame.kind.is_native(),
        };
        let counts = stats.functions();
        let is_sampled = |whose: &Whose| {
            let mut functions = (0..).zip(&counts);
            functions.any(|(id, counts)| counts.total > 0 && is_of(stats.frame(id), *whose))
        };
        let whose = [Whose::Yours, Whose::Python].into_iter().find(is_sampled);
        let whose = whose.unwrap_or(Whose::Native);
        of_kind(profile, stats, counts, whose, |frame| is_of(frame, whose))
    }
}

fn of_kind(
    profile: &Profile,
    stats: &Stats<'_>,
    counts: Vec<SelfTotal>,
    whose: Whose,
    is_of: impl Fn(&Frame) -> bool,
) -> InnermostFunctions {
    let kind: Vec<bool> = (0..stats.len() as FunctionId)
        .map(|id| is_of(stats.frame(id)))
        .collect();
    let mut rows: Vec<InnermostFunction> = (0..).zip(counts).map(row).collect();
    let mut outside = 0u64;
    // By node: the innermost function of the kind, and where the node is in it.
    let mut inside: Vec<Option<(FunctionId, Inside)>> = Vec::with_capacity(profile.nodes.len());
    for (at, node) in profile.nodes.iter().enumerate() {
        let parent = node.parent as usize;
        let outer = if parent < at { inside[parent] } else { None };
        let function = stats.function(at as NodeId);
        let here = match (function, outer) {
            (Some(function), _) if kind[function as usize] => Some((function, Inside::Itself)),
            (Some(function), Some((of, was))) => Some((of, was.then(stats.frame(function).kind))),
            _ => outer,
        };
        inside.push(here);
        let amount = stats.node(at as NodeId).self_count;
        let Some((function, place)) = here else {
            outside = outside.saturating_add(amount);
            continue;
        };
        let row = &mut rows[function as usize];
        row.amount = row.amount.saturating_add(amount);
        match place {
            Inside::Itself => {}
            Inside::Library => row.in_libraries = row.in_libraries.saturating_add(amount),
            Inside::Native => row.in_native = row.in_native.saturating_add(amount),
        }
    }
    for (row, line) in rows.iter_mut().zip(hottest_lines(profile, stats, &kind)) {
        row.hottest_line = line;
    }
    rows.retain(|row| row.total > 0 && kind[row.function as usize]);
    let name = |row: &InnermostFunction| function_name(stats.frame(row.function)).into_owned();
    rows.sort_by_cached_key(|row| (Reverse(row.amount), Reverse(row.total), name(row), row.function));
    InnermostFunctions { whose, rows, outside }
}

/// Of each function the line with most of the samples of which it is the innermost one of its kind; where the places of samples
/// are not known, the line with the highest total. 0: unknown.
fn hottest_lines(profile: &Profile, stats: &Stats<'_>, kind: &[bool]) -> Vec<u32> {
    // By place: the place of the innermost function of the kind.
    let mut inside: Vec<Option<(FunctionId, u32)>> = Vec::with_capacity(profile.places.len());
    for (at, place) in profile.places.iter().enumerate() {
        let outer = inside.get(place.parent as usize).copied().flatten();
        let function = stats
            .function(place.node)
            .filter(|function| at > 0 && kind[*function as usize]);
        inside.push(function.map_or(outer, |function| Some((function, place.line))));
    }
    let mut amounts: FxHashMap<(FunctionId, u32), u64> = FxHashMap::default();
    // A broken profile may have more of them than samples.
    for (at, (_, place)) in profile.timeline.iter().zip(&profile.sample_places).enumerate() {
        if let Some(Some(line)) = inside.get(*place as usize) {
            let amount = amounts.entry(*line).or_default();
            *amount = amount.saturating_add(profile.sample_amount(0, at));
        }
    }
    let mut hottest = vec![(0u64, 0u64, Reverse(0u32)); stats.len()];
    for row in stats.lines().into_iter().filter(|row| row.line > 0) {
        let amount = amounts.get(&(row.function, row.line)).copied().unwrap_or(0);
        let most = &mut hottest[row.function as usize];
        *most = (*most).max((amount, row.counts.total, Reverse(row.line)));
    }
    hottest.into_iter().map(|(_, _, Reverse(line))| line).collect()
}

fn row((function, counts): (FunctionId, SelfTotal)) -> InnermostFunction {
    InnermostFunction {
        function,
        amount: 0,
        in_libraries: 0,
        in_native: 0,
        total: counts.total,
        hottest_line: 0,
    }
}

/// The name of a function as tables show it: of Python the qualified one.
pub fn function_name(frame: &Frame) -> Cow<'_, str> {
    let name = match frame.kind {
        FrameKind::Python | FrameKind::Task => Cow::Borrowed(frame.full_name()),
        _ => shown_name(frame),
    };
    if name.is_empty() { "[unnamed]".into() } else { name }
}

#[cfg(test)]
mod tests;

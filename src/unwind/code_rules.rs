//! Code of one file: its executable sections, and rules for functions without tables, from analyzing their
//! instructions.

use super::cfi::{FrameTables, FunctionRows};
use super::function_extent::{FunctionExtents, MAX_FUNCTION};
use super::instruction_analysis::analyze;
use super::rule::RuleId;
use super::rules::Rules;
use super::{CodeSection, Sections};
use crate::arch::{self, FUNCTION_ALIGNMENT};
use rustc_hash::FxHashMap;

/// Lookups of code outside all sections before lookups stop.
const MAX_MISSES: u32 = 64;
/// Rows cached for one file; past this they are computed again.
const MAX_ROWS: usize = 1 << 20;
/// Call targets cached for one section.
const MAX_TARGETS: usize = 1 << 20;

/// Executable sections of one file, and the results of analyzing their instructions.
#[derive(Default)]
pub struct FunctionRules {
    sections: Vec<CodeSection>,
    misses: u32,
    functions: Option<Vec<(u64, u64)>>,
    extents: FunctionExtents,
    /// Targets of calls, by section.
    targets: FxHashMap<u64, Vec<u64>>,
    /// Functions analyzed so far, by start and whether they are certain to be one function.
    done: FxHashMap<(u64, bool), FunctionRows>,
    rows: Vec<(u32, RuleId)>,
}

impl FunctionRules {
    /// The executable section at `svma`.
    pub fn section(&mut self, svma: u64, source: &mut dyn Sections) -> Option<&CodeSection> {
        let i = self.section_index(svma, source)?;
        self.sections.get(i)
    }

    fn section_index(&mut self, svma: u64, source: &mut dyn Sections) -> Option<usize> {
        if let Some(i) = self.sections.iter().position(|s| s.contains(svma)) {
            return Some(i);
        }
        if self.misses >= MAX_MISSES {
            return None;
        }
        let Some(section) = source.code(svma).filter(|s| s.contains(svma)) else {
            self.misses += 1;
            return None;
        };
        self.sections.push(section);
        Some(self.sections.len() - 1)
    }

    /// The rule for `svma`, which no table covers. Without symbols it is not certain where functions begin: `joined`
    /// counts what follows a return and padding as the same function.
    pub fn rule(
        &mut self,
        svma: u64,
        joined: bool,
        source: &mut dyn Sections,
        tables: &mut FrameTables,
        rules: &mut Rules,
    ) -> Option<RuleId> {
        let i = self.section_index(svma, source)?;
        let (start, end, complete) = self.bounds(svma, i, source, tables)?;
        let complete = complete || joined;
        if self.rows.len() > MAX_ROWS {
            self.rows = Vec::new();
            self.done.clear();
        }
        let rows = match self.done.get(&(start, complete)).filter(|rows| rows.end == end) {
            Some(rows) => rows.clone(),
            None => {
                let section = &self.sections[i];
                let bytes = section.from(start)?;
                let bytes = bytes.get(..(end - start) as usize).unwrap_or(bytes);
                let first = self.rows.len() as u32;
                for (at, full) in analyze(bytes, start, complete) {
                    self.rows
                        .push((at, full.map_or(Rules::NONE, |full| rules.intern_full(full))));
                }
                let rows = FunctionRows {
                    start,
                    end,
                    rows: first..self.rows.len() as u32,
                };
                self.done.insert((start, complete), rows.clone());
                rows
            }
        };
        let slice = &self.rows[rows.rows.start as usize..rows.rows.end as usize];
        let row = slice
            .partition_point(|&(at, _)| u64::from(at) <= svma - start)
            .checked_sub(1)?;
        Some(slice[row].1)
    }

    /// Start and end of the function at `svma`, which no table covers.
    pub fn function(&mut self, svma: u64, source: &mut dyn Sections, tables: &mut FrameTables) -> Option<(u64, u64)> {
        let section = self.section_index(svma, source)?;
        let (start, end, _) = self.bounds(svma, section, source, tables)?;
        Some((start, end))
    }

    /// Start and end of the function at `svma`, and whether they come from a symbol.
    fn bounds(
        &mut self,
        svma: u64,
        section: usize,
        source: &mut dyn Sections,
        tables: &mut FrameTables,
    ) -> Option<(u64, u64, bool)> {
        let FunctionRules {
            sections,
            functions,
            extents,
            targets,
            ..
        } = self;
        let functions = functions.get_or_insert_with(|| {
            let mut functions = source.functions();
            if !functions.is_sorted() {
                functions.sort_unstable();
            }
            functions
        });
        let code = &sections[section];
        let (low, high) = (code.svma, code.end());
        let clip = |start: u64, end: u64| (start, end.min(high).min(start.saturating_add(MAX_FUNCTION)));
        let after = functions.partition_point(|&(start, _)| start <= svma);
        let next = functions.get(after).map_or(high, |f| f.0);
        // The end of a function, and whether it may go on from there. Without a size it is as far as its instructions
        // lead, at most up to the next function that a symbol or a table begins.
        let mut function_end = |i: usize, tables: &mut FrameTables, source: &mut dyn Sections| {
            let (start, size) = functions[i];
            if size != 0 {
                return (start.saturating_add(size), false);
            }
            let next = functions.get(i + 1).map_or(high, |f| f.0);
            let following = tables.gap(start, source).1.map_or(next, |table| table.min(next));
            let bytes = || {
                let len = usize::try_from(following.checked_sub(start)?.min(MAX_FUNCTION)).ok()?;
                code.from(start).map(|bytes| &bytes[..bytes.len().min(len)])
            };
            let extent = extents.get(start, bytes);
            extent.map_or((following, false), |extent| {
                (start.saturating_add(extent.reached), extent.is_open)
            })
        };
        // There are aliases and functions inside others: check a few before it.
        for i in (after.saturating_sub(8)..after).rev() {
            let (start, (end, _)) = (functions[i].0, function_end(i, tables, source));
            if svma < end && start >= low {
                let (start, end) = clip(start, end);
                return (svma < end).then_some((start, end, true));
            }
        }
        // No symbol: between the tables and symbols around it, from the last call target on.
        let (table_before, table_after) = tables.gap(svma, source);
        let symbol_before = after.checked_sub(1).map(|i| match function_end(i, tables, source) {
            (_, true) => functions[i].0,
            (end, false) => end,
        });
        let before = [table_before, symbol_before]
            .into_iter()
            .flatten()
            .filter(|&e| e <= svma)
            .max();
        let start = before.unwrap_or(low).max(low);
        let end = table_after.unwrap_or(high).min(next).min(high);
        let targets = targets.entry(low).or_insert_with(|| call_targets(code));
        let called = targets.partition_point(|&t| t <= svma);
        let start = called.checked_sub(1).map_or(start, |i| targets[i].max(start));
        let end = targets.get(called).map_or(end, |&t| t.min(end));
        let aligned = |at: u64| at & !(FUNCTION_ALIGNMENT - 1);
        // Assembler that states no sizes is often not aligned either, and follows at once.
        let follows = after.checked_sub(1).is_some_and(|i| functions[i].1 == 0) && symbol_before == Some(start);
        let start = if follows {
            start
        } else {
            aligned(start.checked_add(FUNCTION_ALIGNMENT - 1)?)
        };
        let (start, end) = clip(if start > svma { aligned(svma) } else { start }, end);
        (svma >= start && svma < end).then_some((start, end, false))
    }
}

/// Targets, inside the section, of what look like direct calls and addresses of functions, sorted.
fn call_targets(section: &CodeSection) -> Vec<u64> {
    let mut targets = Vec::new();
    let calls = arch::calls(&section.bytes, section.svma);
    let calls = calls.chain(arch::loaded_functions(&section.bytes, section.svma));
    for target in calls
        .map(|(_, target)| target)
        .filter(|target| section.contains(*target))
    {
        targets.push(target);
        if targets.len() >= 2 * MAX_TARGETS {
            targets.sort_unstable();
            targets.dedup();
            targets.truncate(MAX_TARGETS);
        }
    }
    targets.sort_unstable();
    targets.dedup();
    targets
}

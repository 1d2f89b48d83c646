//! The functions of one unit, and the calls inlined into each.

use gimli::{AttributeValue, UnitOffset};

use crate::dwarf_util::{Bounds, DieRef, Fuel, GimliUnit, Slice};

/// Maximum depth of inlined calls: deeper frames are left out.
const MAX_DEPTH: usize = 256;
/// Maximum number of overlapping ranges that are searched.
const MAX_OVERLAPS: usize = 1000;

/// Ranges of addresses with an index each; they may overlap.
#[derive(Default)]
pub(crate) struct Ranges(Vec<FunctionRange>);

struct FunctionRange {
    begin: u64,
    end: u64,
    /// The maximum end of the ranges up to this one: if it is not above an address, no earlier range contains the
    /// address.
    reach: u64,
    index: u32,
}

impl Ranges {
    /// Returns whether the range was added. Linkers set the ranges of discarded code to 0 or 1, or to the top.
    pub fn push(&mut self, begin: u64, end: u64, index: usize) -> bool {
        let keep = begin > 1 && begin < end;
        if keep {
            self.0.push(FunctionRange {
                begin,
                end,
                reach: end,
                index: index as u32,
            });
        }
        keep
    }

    pub fn sort(&mut self) {
        self.0.sort_by_key(|r| r.begin);
        let mut reach = 0;
        for r in &mut self.0 {
            reach = reach.max(r.end);
            r.reach = reach;
        }
        self.0.shrink_to_fit();
    }

    fn hits(&self, svma: u64) -> impl Iterator<Item = &FunctionRange> {
        let after = self.0.partition_point(|r| r.begin <= svma);
        let before = self.0[..after].iter().rev();
        before
            .take_while(move |r| r.reach > svma)
            .take(MAX_OVERLAPS)
            .filter(move |r| r.end > svma)
    }

    /// The indices of all ranges with this address, the one that starts last first.
    pub fn containing(&self, svma: u64) -> Vec<usize> {
        self.hits(svma).map(|r| r.index as usize).collect()
    }
}

/// One inlined call.
#[derive(Clone, Copy)]
pub(crate) struct InlinedCall {
    /// The entry with the name of the inlined function.
    pub name_at: DieRef,
    /// The call site: index of the file in the unit's line table, and line.
    pub file: Option<u64>,
    pub line: Option<u32>,
    /// The inlined call that contains this one.
    parent: Option<u32>,
    depth: u32,
}

/// The function and the inlined calls at an address.
pub(crate) struct Inlined {
    /// Outermost first.
    pub calls: Vec<InlinedCall>,
    /// Entry of the real function, in its unit.
    pub die: usize,
    pub range: (u64, u64),
}

/// All functions with code of one unit.
pub(crate) struct UnitFunctions {
    ranges: Ranges,
    functions: Vec<UnitFunction>,
}

struct UnitFunction {
    die: usize,
    calls: Option<InlinedCalls>,
}

/// The calls inlined into one function, in the order of their entries: parents come before their children.
#[derive(Default)]
struct InlinedCalls {
    calls: Vec<InlinedCall>,
    /// (begin, end, call).
    ranges: Vec<(u64, u64, u32)>,
}

impl UnitFunctions {
    /// Collects the functions of a unit. Stops early, with what it has, where the unit is corrupt; `None` if the fuel
    /// is used up.
    pub fn parse<'a>(dwarf: &gimli::Dwarf<Slice<'a>>, unit: &GimliUnit<'a>, fuel: &mut Fuel) -> Option<UnitFunctions> {
        let mut out = UnitFunctions {
            ranges: Ranges::default(),
            functions: Vec::new(),
        };
        let mut entries = unit.entries_raw(None).ok()?;
        while !entries.is_empty() {
            let die = entries.next_offset().0;
            let Ok(abbrev) = entries.read_abbreviation() else { break };
            let Some(abbrev) = abbrev else { continue };
            // Attributes can take no bytes, so entries are paid for by their attributes.
            fuel.spend(1 + abbrev.attributes().len() as u64)?;
            if abbrev.tag() != gimli::DW_TAG_subprogram {
                if entries.skip_attributes(abbrev.attributes()).is_err() {
                    break;
                }
                continue;
            }
            let mut bounds = Bounds::default();
            let mut ok = true;
            for spec in abbrev.attributes() {
                match entries.read_attribute(*spec) {
                    Ok(attr) => bounds.add_attribute(attr),
                    Err(_) => {
                        ok = false;
                        break;
                    }
                }
            }
            if !ok {
                break;
            }
            let index = out.functions.len();
            let mut has_code = false;
            let ranges = &mut out.ranges;
            let _ = bounds.each(dwarf, unit, fuel, |begin, end| {
                has_code |= ranges.push(begin, end, index)
            });
            if has_code {
                out.functions.push(UnitFunction { die, calls: None });
            }
        }
        out.ranges.sort();
        Some(out)
    }

    /// The function and the inlined calls that contain an address.
    pub fn find<'a>(
        &mut self,
        dwarf: &gimli::Dwarf<Slice<'a>>,
        unit: &GimliUnit<'a>,
        svma: u64,
        fuel: &mut Fuel,
    ) -> Option<Inlined> {
        let hit = self.ranges.hits(svma).next()?;
        let range = (hit.begin, hit.end);
        let function = self.functions.get_mut(hit.index as usize)?;
        let die = function.die;
        let calls = function
            .calls
            .get_or_insert_with(|| InlinedCalls::parse(dwarf, unit, die, fuel).unwrap_or_default());
        Some(Inlined {
            calls: calls.find(svma),
            die,
            range,
        })
    }
}

impl InlinedCalls {
    /// Walks the entries below a function, without recursion.
    fn parse<'a>(
        dwarf: &gimli::Dwarf<Slice<'a>>,
        unit: &GimliUnit<'a>,
        die: usize,
        fuel: &mut Fuel,
    ) -> Option<InlinedCalls> {
        let mut out = InlinedCalls::default();
        let mut entries = unit.entries_raw(Some(UnitOffset(die))).ok()?;
        let top = entries.next_depth();
        let abbrev = entries.read_abbreviation().ok()??;
        entries.skip_attributes(abbrev.attributes()).ok()?;
        // Inlined calls that are still open: depth of the entry, index of the call.
        let mut open: Vec<(isize, u32)> = Vec::new();
        // Inside a nested function, or inside too deep inlining: skip everything deeper than this.
        let mut skip: Option<isize> = None;
        while entries.next_depth() > top && !entries.is_empty() {
            let at = entries.next_offset().0;
            let depth = entries.next_depth();
            let Ok(abbrev) = entries.read_abbreviation() else { break };
            let Some(abbrev) = abbrev else { continue };
            fuel.spend(1 + abbrev.attributes().len() as u64)?;
            if skip.is_some_and(|s| depth <= s) {
                skip = None;
            }
            while open.last().is_some_and(|o| depth <= o.0) {
                open.pop();
            }
            let is_call = abbrev.tag() == gimli::DW_TAG_inlined_subroutine && open.len() < MAX_DEPTH;
            if skip.is_some() || !is_call {
                if skip.is_none() && (abbrev.tag() == gimli::DW_TAG_subprogram || open.len() >= MAX_DEPTH) {
                    skip = Some(depth);
                }
                if entries.skip_attributes(abbrev.attributes()).is_err() {
                    break;
                }
                continue;
            }
            let mut bounds = Bounds::default();
            let parent = open.last().map(|o| o.1);
            let mut call = InlinedCall {
                name_at: DieRef::Unit(at),
                file: None,
                line: None,
                parent,
                depth: open.len() as u32,
            };
            for spec in abbrev.attributes() {
                let attr = entries.read_attribute(*spec).ok()?;
                match (attr.name(), attr.value()) {
                    (gimli::DW_AT_abstract_origin, value) => {
                        call.name_at = DieRef::of(value).unwrap_or(call.name_at);
                    }
                    // 0 means "no file" up to DWARF 4.
                    (gimli::DW_AT_call_file, AttributeValue::FileIndex(file)) => {
                        call.file = (file > 0 || unit.header.version() >= 5).then_some(file);
                    }
                    (gimli::DW_AT_call_line, AttributeValue::Udata(line)) => {
                        call.line = u32::try_from(line).ok().filter(|&l| l != 0);
                    }
                    _ => bounds.add_attribute(attr),
                }
            }
            let index = out.calls.len() as u32;
            out.calls.push(call);
            open.push((depth, index));
            let ranges = &mut out.ranges;
            let _ = bounds.each(dwarf, unit, fuel, |begin, end| {
                if begin < end {
                    ranges.push((begin, end, index));
                }
            });
        }
        Some(out)
    }

    /// From outside to inside. Linear search: parents come before their children, and a function has at most some
    /// thousands of ranges.
    fn find(&self, svma: u64) -> Vec<InlinedCall> {
        let mut path: Vec<InlinedCall> = Vec::new();
        let mut last = None;
        for &(begin, end, index) in &self.ranges {
            if begin <= svma && svma < end {
                let Some(call) = self.calls.get(index as usize) else {
                    continue;
                };
                if call.parent == last && call.depth as usize == path.len() {
                    path.push(*call);
                    last = Some(index);
                }
            }
        }
        path
    }
}

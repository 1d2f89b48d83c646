//! Calls as the machine code has them: whether the call before a return address can have led to a callee.

use rustc_hash::{FxHashMap, FxHashSet};
use std::hash::Hasher;

use super::instruction_analysis::PathCode;
use super::rule::{Rule, RuleKind};
use super::{CodeMap, Unwinder, locate};
use crate::arch::{self, Flow, SP};

/// Instructions of the called function that are followed to find the callee.
const MAX_INSTRUCTIONS: usize = 2048;
/// Instructions followed for one stack, beyond what is cached, at most.
pub(super) const MAX_WORK: usize = 1 << 16;
/// What finding the bounds of a function counts as, in instructions.
const BOUNDS_WORK: usize = 16;
/// Edges cached; past this they are examined again.
const MAX_EDGES: usize = 1 << 14;
/// Different sizes of a frame recorded for one call.
const MAX_FRAMES: usize = 8;
/// Bytes read before a return address: more than a call and the instruction before it have.
const BEFORE: usize = 16;
/// Bytes of code read at once.
const CHUNK: usize = 256;
/// Maximum length of an instruction.
const MAX_INSTRUCTION: u64 = 16;

/// Whether a callee was called from a place, as the machine code has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallEdge {
    /// There is no call, or it is to a function that cannot lead to the callee.
    Impossible,
    /// There is no call in code without a file, which may put return addresses on the stack itself, as interpreters do.
    Pushed,
    /// The target is computed, or cannot be followed, or the code cannot be read.
    Possible,
    /// The call is to the callee's function, or to one that jumps there.
    Proved,
}

/// A place in a file, or in a process: then together with some of the code there.
type Place = (u32, u64);

/// What the code says of a call.
struct Examined {
    edge: CallEdge,
    /// Bytes from the stack pointer to the end of the frame where the called function jumps to computed addresses, as
    /// tables have it.
    frames: Vec<i32>,
}

/// Edges examined so far: return address, callee, hash of the code before the return address.
#[derive(Default)]
pub(super) struct CallEdges(FxHashMap<(Place, Place, u64), Examined>);

/// The code of a process and its tables.
pub(super) struct ProcessCode<'a, 'b> {
    pub unwinder: &'a mut Unwinder,
    pub map: &'b dyn CodeMap,
}

impl PathCode for ProcessCode<'_, '_> {
    fn read(&mut self, avma: u64, out: &mut [u8]) -> usize {
        let Some((module, svma)) = locate(self.map, avma) else {
            return self.map.read(avma, out);
        };
        let known = self
            .unwinder
            .modules
            .get_mut(module.0 as usize)
            .and_then(Option::as_mut);
        let section = known.and_then(|known| known.code.section(svma, &mut *known.sections));
        let bytes = section.and_then(|s| s.from(svma)).unwrap_or_default();
        let len = bytes.len().min(out.len());
        out[..len].copy_from_slice(&bytes[..len]);
        len
    }

    fn table_rule(&mut self, avma: u64) -> Option<Rule> {
        let (module, svma) = locate(self.map, avma)?;
        let rule = self.unwinder.rule(module, svma);
        (!rule.code && rule.kind != RuleKind::None).then_some(rule)
    }
}

impl Unwinder {
    /// Can the call that ends at `ra` have led to the code at `callee`?
    pub(super) fn call_edge(&mut self, map: &dyn CodeMap, ra: u64, callee: u64) -> CallEdge {
        self.call_edge_over(map, ra, callee, 0)
    }

    /// The same, if the frame of `callee` has this size. Where the called function jumps to computed addresses with just this
    /// much of a frame, it has led to the callee: virtual machines are entered like that.
    pub(super) fn call_edge_over(&mut self, map: &dyn CodeMap, ra: u64, callee: u64, size: u64) -> CallEdge {
        if !map.is_code(ra.wrapping_sub(1)) {
            return CallEdge::Impossible;
        }
        let place = |avma: u64| locate(map, avma).map_or((u32::MAX, avma), |(module, svma)| (module.0, svma));
        let site = place(ra.wrapping_sub(1));
        let mut buffer = [0; BEFORE];
        let before = self.code_before(map, ra, &mut buffer);
        let mut hash = rustc_hash::FxHasher::default();
        if site.0 == u32::MAX {
            hash.write(before);
        }
        let key = (site, place(callee), hash.finish());
        let sized = |known: &Examined| match known.edge {
            CallEdge::Possible if known.frames.iter().any(|n| u64::try_from(*n) == Ok(size)) => CallEdge::Proved,
            edge => edge,
        };
        if let Some(known) = self.edges.0.get(&key) {
            return sized(known);
        }
        let mut frames = Vec::new();
        let edge = self.examine(map, ra, before, callee, &mut frames);
        let examined = Examined { edge, frames };
        let edge = sized(&examined);
        if self.work == 0 {
            return edge;
        }
        if self.edges.0.len() >= MAX_EDGES {
            self.edges.0.clear();
        }
        self.edges.0.insert(key, examined);
        edge
    }

    fn examine(&mut self, map: &dyn CodeMap, ra: u64, before: &[u8], callee: u64, frames: &mut Vec<i32>) -> CallEdge {
        if before.is_empty() {
            return CallEdge::Possible;
        }
        let calls = arch::calls_before(before, ra).map(|target| match target {
            Some(target) => self.leads_to(map, target, callee, frames),
            None => CallEdge::Possible,
        });
        if let Some(best) = calls.max() {
            return best;
        }
        match locate(map, ra.wrapping_sub(1)) {
            None => CallEdge::Pushed,
            // A signal handler returns to a trampoline that nothing called.
            Some(_) if self.follows_call(map, ra) == Some(true) => CallEdge::Possible,
            Some(_) => CallEdge::Impossible,
        }
    }

    /// Is this address, in code that can be read, after a call?
    pub(super) fn is_after_call(&mut self, map: &dyn CodeMap, ra: u64) -> bool {
        map.is_code(ra.wrapping_sub(1)) && arch::ends_with_call(self.code_before(map, ra, &mut [0; BEFORE]))
    }

    /// The code before a return address, as much as is readable; empty: none.
    fn code_before<'a>(&mut self, map: &dyn CodeMap, ra: u64, buffer: &'a mut [u8; BEFORE]) -> &'a [u8] {
        let mut code = ProcessCode { unwinder: self, map };
        // Code may begin shortly before.
        for len in [BEFORE, BEFORE / 2, 5, 4, 2] {
            let bytes = &mut buffer[..len];
            let from = ra.wrapping_sub(len as u64);
            let same = locate(map, from).map(|(module, _)| module) == locate(map, ra.wrapping_sub(1)).map(|(m, _)| m);
            if same && code.read(from, bytes) == len {
                return &buffer[..len];
            }
        }
        &[]
    }

    /// Does a call to `target` lead to the code at `callee`, in the same function or by jumps?
    /// `frames`: see [`Examined`].
    fn leads_to(&mut self, map: &dyn CodeMap, target: u64, callee: u64, frames: &mut Vec<i32>) -> CallEdge {
        if !map.is_code(target) {
            return CallEdge::Impossible;
        }
        let mut walk = CallWalk {
            visited: FxHashSet::default(),
            room: MAX_INSTRUCTIONS.min(self.work),
            work: vec![target],
            worst: CallEdge::Impossible,
            frames,
        };
        while let Some(from) = walk.work.pop() {
            walk.room = walk.room.saturating_sub(BOUNDS_WORK);
            self.work = self.work.saturating_sub(BOUNDS_WORK);
            if self.is_same_function(map, from, callee) {
                return CallEdge::Proved;
            }
            let before = walk.visited.len();
            let found = walk.follow(&mut ProcessCode { unwinder: self, map }, from, callee);
            self.work = self.work.saturating_sub(walk.visited.len() - before);
            if found {
                return CallEdge::Proved;
            }
        }
        walk.worst
    }

    /// Are both in one function of a file, as tables or symbols have it?
    fn is_same_function(&mut self, map: &dyn CodeMap, a: u64, b: u64) -> bool {
        let (Some((module, a)), Some((other, b))) = (locate(map, a), locate(map, b)) else {
            return false;
        };
        let Some(Some(known)) = self.modules.get_mut(module.0 as usize).filter(|_| module == other) else {
            return false;
        };
        match (known.start(a), known.start(b)) {
            (None, None) => {}
            (a, b) => return a == b,
        }
        let known = &mut **known;
        let bounds = known.code.function(b, &mut *known.sections, &mut known.tables);
        bounds.is_some_and(|(start, end)| (start..end).contains(&a))
    }
}

/// Follows the instructions of a called function.
struct CallWalk<'a> {
    visited: FxHashSet<u64>,
    /// Instructions that may still be followed.
    room: usize,
    work: Vec<u64>,
    /// What the edge is if the callee is not found.
    worst: CallEdge,
    /// See [`Examined`].
    frames: &'a mut Vec<i32>,
}

impl CallWalk<'_> {
    /// Follows the code at `from` up to where it returns or jumps; true if it comes to `callee`.
    fn follow(&mut self, code: &mut dyn PathCode, from: u64, callee: u64) -> bool {
        let mut bytes = [0; CHUNK];
        let mut at = from;
        loop {
            let (first, len) = (at, code.read(at, &mut bytes));
            for i in arch::instructions(&bytes[..len], first) {
                let cut_off = len == CHUNK && i.address - first > CHUNK as u64 - MAX_INSTRUCTION;
                if cut_off {
                    break;
                }
                if (i.address..i.next()).contains(&callee) {
                    return true;
                }
                if !self.visited.insert(i.address) {
                    return false;
                }
                if self.room == 0 {
                    self.work.clear();
                    self.worst = CallEdge::Possible;
                    return false;
                }
                self.room -= 1;
                match i.flow {
                    Flow::Next | Flow::Call => {}
                    Flow::ConditionalJump => self.work.extend(i.target),
                    Flow::Jump => {
                        self.work.extend(i.target);
                        return false;
                    }
                    Flow::IndirectJump => {
                        let rule = code.table_rule(i.address).filter(|r| r.kind == RuleKind::Frame);
                        let size = rule.filter(|r| usize::from(r.base) == SP).map(|r| r.offset);
                        if self.frames.len() < MAX_FRAMES && size.is_some_and(|n| !self.frames.contains(&n)) {
                            self.frames.extend(size);
                        }
                        self.worst = CallEdge::Possible;
                        return false;
                    }
                    Flow::Return | Flow::Trap => return false,
                }
                at = i.next();
            }
            if at == first {
                // It goes on where nothing can be read.
                self.worst = CallEdge::Possible;
                return false;
            }
        }
    }
}

//! Where code returns to, by following it from where it is now up to its return: for code whose beginning is not known, such
//! as that of JIT compilers.
//!
//! What the instructions up to the return do to the stack pointer and the saved registers is certain, if they are run: a call
//! that never returns may be followed by the code of something else. Hence there may be several results, to be validated.

use rustc_hash::FxHashSet;

use super::super::rule::{CallerRegister, Cfa, FullRule, Rule, RuleKind};
use super::cpu::{self, Effects};
use super::{DataflowState, Entry, Loaded, Stack, SymbolicValue, Unknown};
use crate::arch::{CALLEE, CALLEE_SAVED, FP, Flow, GPRS, LINK, PUSHED_RETURN, RA, SP};

/// Instructions followed, on all paths.
const MAX_INSTRUCTIONS: usize = 512;
/// Branches that are still to be followed.
const MAX_BRANCHES: usize = 64;
/// Different results.
const MAX_RESULTS: usize = 3;
/// Bytes of code read at once. At least four times the longest instruction.
const CHUNK: usize = 64;

/// Code by address in the process.
pub trait PathCode {
    /// Copies code, as much as is readable from `avma` on; returns the bytes copied.
    fn read(&mut self, avma: u64, out: &mut [u8]) -> usize;
    /// The rule of a table for the instruction at `avma`.
    fn table_rule(&mut self, avma: u64) -> Option<Rule>;
}

/// The base that represents what a register held at the beginning.
fn base_of(register: usize) -> u32 {
    u32::MAX - register as u32
}

/// The register whose value at the beginning this base represents.
fn register_of(base: u32) -> Option<u8> {
    u8::try_from(u32::MAX - base).ok().filter(|r| usize::from(*r) < GPRS)
}

/// All registers have the values that they have now.
fn beginning() -> DataflowState {
    let kept = |r: usize| r == SP || CALLEE_SAVED >> r & 1 == 1;
    let value = |r: usize| if kept(r) { Stack(base_of(r), 0) } else { Entry(r as u8) };
    DataflowState {
        regs: std::array::from_fn(value),
        slots: Vec::new(),
        has_memory: true,
    }
}

/// The rules by which the code at `start` returns, the most likely first. `interrupted`: the code was interrupted there;
/// otherwise a call returns to it, so that it has set up its frame.
pub fn return_rules(code: &mut dyn PathCode, start: u64, interrupted: bool) -> Vec<FullRule> {
    let mut search = PathSearch {
        code,
        interrupted,
        visited: FxHashSet::default(),
        branches: vec![(start, beginning())],
        found: Vec::new(),
        effects: Effects::default(),
    };
    while let Some((at, state)) = search.branches.pop() {
        if search.found.len() >= MAX_RESULTS {
            break;
        }
        if let Some(rule) = search.follow(at, state)
            && !search.found.contains(&rule)
        {
            search.found.push(rule);
        }
    }
    search.found
}

struct PathSearch<'a> {
    code: &'a mut dyn PathCode,
    interrupted: bool,
    visited: FxHashSet<u64>,
    branches: Vec<(u64, DataflowState)>,
    found: Vec<FullRule>,
    effects: Effects,
}

impl PathSearch<'_> {
    /// Follows one path to its end.
    fn follow(&mut self, mut at: u64, mut state: DataflowState) -> Option<FullRule> {
        let mut bytes = [0; CHUNK];
        let mut jumped = !self.visited.is_empty();
        loop {
            if jumped && let Some(rule) = self.code.table_rule(at) {
                return join(&mut state, &rule);
            }
            jumped = false;
            let len = self.code.read(at, &mut bytes);
            let from = at;
            for i in cpu::decode(bytes.get(..len)?, from, CHUNK) {
                at = cpu::address(&i);
                // The last one may be cut off.
                if len == CHUNK && at != from && at - from > (CHUNK - CHUNK / 4) as u64 {
                    break;
                }
                if self.visited.len() >= MAX_INSTRUCTIONS || !self.visited.insert(at) {
                    return None;
                }
                let (flow, target) = cpu::flow(&i);
                match flow {
                    Flow::Next | Flow::Call => {}
                    Flow::Return => return return_rule(&state, cpu::popped_by_return(&i)),
                    Flow::IndirectJump | Flow::Trap => return None,
                    Flow::ConditionalJump if self.branches.len() < MAX_BRANCHES => {
                        self.branches.extend(target.map(|target| (target, state.clone())));
                    }
                    Flow::ConditionalJump => {}
                    Flow::Jump => {
                        (at, jumped) = (target?, true);
                        break;
                    }
                }
                let fp = state.regs[FP];
                cpu::step(&mut state, &i, self.visited.len() as u32, &mut self.effects);
                // A frame is set up: this belongs to another function, after a call that does not return.
                if !self.interrupted && state.regs[FP] == state.regs[SP] && state.regs[FP] != fp {
                    return None;
                }
                at = cpu::end(&i);
            }
            if at == from {
                return None;
            }
        }
    }
}

/// The rule of code that returns now, and takes `popped` bytes of arguments off the stack.
fn return_rule(state: &DataflowState, popped: i32) -> Option<FullRule> {
    let size = i64::from(popped) + if LINK.is_some() { 0 } else { -PUSHED_RETURN };
    let (cfa, base) = match state.regs[SP] {
        Stack(base, at) => (
            Cfa::Reg(register_of(base)?, i64::from(at) + size),
            Some((base, at, size)),
        ),
        Loaded(base, at) => (Cfa::Deref(register_of(base)?, at.into(), size), None),
        _ => return None,
    };
    let in_memory = |b: u32, at: i32| match base {
        Some((base, sp, size)) if base == b => Some(CallerRegister::AtCfa(i64::from(at) - i64::from(sp) - size)),
        _ => register_of(b).map(|r| CallerRegister::AtReg(r, at.into())),
    };
    let place = |r: usize| {
        let place = match state.regs[r] {
            Entry(from) if usize::from(from) == r => Some(CallerRegister::Same),
            Entry(from) => Some(CallerRegister::Reg(from)),
            Stack(base, 0) if base == base_of(r) => Some(CallerRegister::Same),
            Stack(base, 0) => register_of(base).map(CallerRegister::Reg),
            Loaded(base, at) => in_memory(base, at),
            Stack(..) | Unknown => None,
        };
        place.unwrap_or(CallerRegister::Undefined)
    };
    let ra = match LINK {
        None => CallerRegister::AtCfa(-size),
        Some(_) => Some(place(RA)).filter(|at| *at != CallerRegister::Undefined)?,
    };
    let preserved = CALLEE.into_iter().filter(|r| LINK.is_none() || usize::from(*r) != RA);
    let regs = preserved.map(|r| (r, place(r.into())));
    Some(FullRule {
        cfa,
        ra,
        regs: regs.filter(|(_, at)| *at != CallerRegister::Same).collect(),
        signal: false,
        code: true,
    })
}

/// The rule of code that jumps now to where a table has `rule`.
fn join(state: &mut DataflowState, rule: &Rule) -> Option<FullRule> {
    if rule.kind != RuleKind::Frame || rule.signal || rule.code {
        return None;
    }
    let cfa = state.regs[usize::from(rule.base) % GPRS].plus(rule.offset.into());
    let mut caller = state.clone();
    for (i, r) in CALLEE.into_iter().enumerate() {
        if rule.saved >> i & 1 == 1 {
            caller.regs[usize::from(r)] = state.load(cfa.plus(rule.at[i].into()));
        } else if rule.lost >> i & 1 == 1 {
            caller.regs[usize::from(r)] = SymbolicValue::Unknown;
        }
    }
    caller.regs[SP] = if LINK.is_some() { cfa } else { cfa.plus(PUSHED_RETURN) };
    return_rule(&caller, 0)
}

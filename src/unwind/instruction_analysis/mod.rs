//! Analysis of a function's own instructions from its start: for every instruction, the register or stack slot that
//! gives the CFA, and where the caller's registers are. For hand-written assembler, which has no tables.
//!
//! A forward data-flow analysis over the control flow graph; where paths meet, only facts on which they agree are kept.

//!
//! What one instruction does is in the CPU's file next to this one.

use super::rule::{CallerRegister, Cfa, FullRule};
use crate::arch::{CALLEE, FP, FUNCTION_ALIGNMENT, Flow, GPRS, LINK, PUSHED_RETURN, RA, SP};
use rustc_hash::FxHashMap;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
use aarch64 as cpu;
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64 as cpu;

mod return_path;
pub use return_path::{PathCode, return_rules};

use cpu::{Effects, Instruction, SCRATCH};

/// Instructions of one function that are analyzed. The largest OpenBLAS kernels have some 15,000.
const MAX_INSTRUCTIONS: usize = 1 << 16;
/// Visits per instruction, on average, at most; few facts can change, so three is normal.
const MAX_VISITS: usize = 24;
const MAX_SLOTS: usize = 64;
/// Are functions aligned to more than an instruction, so that alignment says something?
const ALIGNS_FUNCTIONS: bool = FUNCTION_ALIGNMENT > 4;

/// The content of a register or stack slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SymbolicValue {
    Unknown,
    /// What the register (by DWARF number) held at function entry.
    Entry(u8),
    /// An address: base 0 is the CFA; others are stack pointers at an unknown distance from it, after `and $-64,%rsp`
    /// or alloca.
    Stack(u32, i32),
    /// What was in memory at a base + offset when the analysis began.
    Loaded(u32, i32),
}

use SymbolicValue::{Entry, Loaded, Stack, Unknown};

impl SymbolicValue {
    fn plus(self, n: i64) -> SymbolicValue {
        match self {
            Stack(base, at) => match i32::try_from(n).ok().and_then(|n| at.checked_add(n)) {
                Some(at) => Stack(base, at),
                None => Unknown,
            },
            Entry(_) | Loaded(..) if n == 0 => self,
            _ => Unknown,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct DataflowState {
    regs: [SymbolicValue; GPRS],
    /// Known words of the stack: base, offset, content.
    slots: Vec<(u32, i32, SymbolicValue)>,
    /// Does what the other words of the stack held at the beginning matter?
    has_memory: bool,
}

impl DataflowState {
    /// At a function's first instruction: the return address is on top of the stack, or in the link register.
    fn entry() -> DataflowState {
        let mut regs = std::array::from_fn(|r| Entry(r as u8));
        regs[SP] = Stack(0, if LINK.is_some() { 0 } else { PUSHED_RETURN as i32 });
        DataflowState {
            regs,
            slots: Vec::new(),
            has_memory: false,
        }
    }

    /// Keeps the facts on which `other` agrees; did anything change? `base` names a stack pointer on which they differ.
    fn meet(&mut self, other: &DataflowState, base: u32) -> bool {
        let before = self.clone();
        let differ = self.regs[SP] != other.regs[SP] && self.regs[SP] != Stack(base, 0);
        for (mine, theirs) in self.regs.iter_mut().zip(&other.regs) {
            if mine != theirs {
                *mine = Unknown;
            }
        }
        self.slots.retain(|slot| other.slots.contains(slot));
        if differ || before.regs[SP] == Stack(base, 0) {
            self.rebase(SP, base);
        }
        *self != before
    }

    /// Gives register `r` a new base.
    fn rebase(&mut self, r: usize, base: u32) {
        for value in &mut self.regs {
            if matches!(value, Stack(b, _) if *b == base) {
                *value = Unknown;
            }
        }
        self.slots
            .retain(|&(b, _, value)| b != base && !matches!(value, Stack(b, _) if b == base));
        self.regs[r] = Stack(base, 0);
    }

    fn load(&self, address: SymbolicValue) -> SymbolicValue {
        let Stack(base, at) = address else { return Unknown };
        let slot = self.slots.iter().find(|s| s.0 == base && s.1 == at);
        match slot {
            Some(slot) => slot.2,
            None if self.has_memory => Loaded(base, at),
            None => Unknown,
        }
    }

    fn store(&mut self, address: SymbolicValue, size: usize, value: SymbolicValue) {
        let Stack(base, at) = address else { return };
        let (from, to) = (i64::from(at), i64::from(at) + size as i64);
        self.slots
            .retain(|&(b, o, _)| b != base || i64::from(o) + 8 <= from || i64::from(o) >= to);
        if size == 8 && (value != Unknown || self.has_memory) && self.slots.len() < MAX_SLOTS {
            self.slots.push((base, at, value));
        }
    }

    /// After a call returned.
    fn call(&mut self) {
        for r in SCRATCH {
            self.regs[r] = Unknown;
        }
        if let Stack(base, sp) = self.regs[SP] {
            self.slots.retain(|&(b, at, _)| b != base || at >= sp);
        }
    }

    /// The unwind rule that follows from these facts.
    fn rule(&self) -> Option<FullRule> {
        let others = CALLEE.iter().map(|r| usize::from(*r)).filter(|r| *r != FP && *r != RA);
        let keepers: Vec<usize> = [SP, FP].into_iter().chain(others).collect();
        let direct = |r: usize| match self.regs[r] {
            Stack(0, at) => Some(Cfa::Reg(r as u8, -i64::from(at))),
            _ => None,
        };
        // A stack pointer saved in memory, unless it was popped already.
        let live = |b: u32, o: i32| !matches!(self.regs[SP], Stack(base, sp) if base == b && o < sp);
        let stored = |r: usize| match self.regs[r] {
            Stack(base, at) => self.slots.iter().find_map(|&(b, o, value)| match value {
                Stack(0, k) if b == base && live(b, o) => {
                    Some(Cfa::Deref(r as u8, i64::from(o) - i64::from(at), -i64::from(k)))
                }
                _ => None,
            }),
            _ => None,
        };
        // Registers that a call may change are valid only in the interrupted frame: last.
        let cfa = (keepers.iter().find_map(|&r| direct(r)))
            .or_else(|| keepers.iter().find_map(|&r| stored(r)))
            .or_else(|| SCRATCH.iter().find_map(|&r| direct(r)))
            .or_else(|| SCRATCH.iter().find_map(|&r| stored(r)))?;
        // Where the caller's value of a register is.
        let place = |r: u8| {
            let value = Entry(r);
            if self.regs[usize::from(r)] == value {
                return CallerRegister::Same;
            }
            let on_frame = self.slots.iter().find(|s| s.0 == 0 && s.2 == value);
            let in_register = || {
                let register = self.regs.iter().position(|v| *v == value);
                register.map(|r| CallerRegister::Reg(r as u8))
            };
            let elsewhere = || {
                self.slots.iter().filter(|s| s.2 == value).find_map(|&(base, at, _)| {
                    self.regs.iter().enumerate().find_map(|(r, v)| match *v {
                        Stack(b, o) if b == base => Some(CallerRegister::AtReg(r as u8, i64::from(at) - i64::from(o))),
                        _ => None,
                    })
                })
            };
            let found = on_frame.map(|s| CallerRegister::AtCfa(s.1.into()));
            found
                .or_else(in_register)
                .or_else(elsewhere)
                .unwrap_or(CallerRegister::Undefined)
        };
        let ra = match LINK {
            None => CallerRegister::AtCfa(PUSHED_RETURN),
            Some(link) => Some(place(CALLEE[link])).filter(|at| *at != CallerRegister::Undefined)?,
        };
        let preserved = CALLEE.into_iter().filter(|r| LINK.is_none() || usize::from(*r) != RA);
        let regs = preserved.map(|r| (r, place(r)));
        Some(FullRule {
            cfa,
            ra,
            regs: regs.filter(|(_, at)| *at != CallerRegister::Same).collect(),
            signal: false,
            code: true,
        })
    }
}

/// Does the instruction begin the epilogue: move the stack pointer up, or restore a register?
fn restores_frame(before: &[SymbolicValue; GPRS], after: &[SymbolicValue; GPRS]) -> bool {
    let up = match (before[SP], after[SP]) {
        (Stack(a, x), Stack(b, y)) => a == b && y > x || a != 0 && b == 0,
        _ => false,
    };
    up || CALLEE.iter().any(|&r| {
        let r = usize::from(r);
        before[r] != after[r] && after[r] == Entry(r as u8)
    })
}

/// One function under analysis.
struct AnalyzedFunction {
    code: Vec<Instruction>,
    /// Instruction at the offset of a jump target.
    index: FxHashMap<u64, usize>,
    /// Starts of basic blocks.
    leader: Vec<bool>,
    /// Starts of functions, after a call that does not return.
    starts: Vec<bool>,
    states: Vec<Option<DataflowState>>,
    /// Leaders whose state is final: reached from the entry, not by assumption.
    settled: Vec<bool>,
    /// Leaders with a state that is not final.
    fresh: Vec<usize>,
    work: Vec<usize>,
    visits: usize,
    effects: Effects,
}

/// Result of running through a block.
struct BlockResult {
    last: usize,
    out: DataflowState,
    /// The state before the block's epilogue began.
    body: DataflowState,
}

impl AnalyzedFunction {
    /// `complete`: `bytes` holds one function and nothing else.
    fn new(bytes: &[u8], start: u64, complete: bool) -> AnalyzedFunction {
        let code = cpu::decode(bytes, start, MAX_INSTRUCTIONS);
        let index: FxHashMap<u64, usize> = code.iter().enumerate().map(|(n, i)| (cpu::address(i), n)).collect();
        let mut leader = vec![false; code.len()];
        for (n, i) in code.iter().enumerate() {
            if ends_block(i) {
                if let Some(&to) = jump_target(i).and_then(|to| index.get(&to)) {
                    leader[to] = true;
                }
                if let Some(next) = leader.get_mut(n + 1) {
                    *next = true;
                }
            }
        }
        let jump_targets = leader.clone();
        let mut starts = vec![false; code.len()];
        for n in 1..code.len() {
            if is_aligned(&code[n]) && cpu::is_padding(&code[n - 1]) && !cpu::is_padding(&code[n]) {
                leader[n] = true;
                // Padding after a call would align the start of a loop, to which something jumps.
                let call = code[..n].iter().rfind(|i| !cpu::is_padding(i));
                let after_call = call.is_some_and(|i| cpu::flow(i).0 == Flow::Call);
                starts[n] = !complete && ALIGNS_FUNCTIONS && after_call && !jump_targets[n];
            }
        }
        let states = vec![None; code.len()];
        let settled = vec![false; code.len()];
        let effects = Effects::default();
        let visits = code.len() * MAX_VISITS;
        AnalyzedFunction {
            code,
            index,
            leader,
            starts,
            states,
            settled,
            fresh: Vec::new(),
            work: Vec::new(),
            visits,
            effects,
        }
    }

    fn flow_to(&mut self, to: usize, state: &DataflowState) {
        if to >= self.code.len() || self.settled[to] {
            return;
        }
        let base = (self.code.len() + to + 1) as u32;
        let changed = match &mut self.states[to] {
            Some(known) => known.meet(state, base),
            empty => {
                *empty = Some(state.clone());
                self.fresh.push(to);
                true
            }
        };
        if changed {
            self.work.push(to);
        }
    }

    /// Runs through the block at `first`; `each` gets the state before every instruction.
    fn block(&mut self, first: usize, mut each: impl FnMut(&Instruction, &DataflowState)) -> Option<BlockResult> {
        let mut state = self.states.get(first)?.clone()?;
        let mut body: Option<DataflowState> = None;
        for n in first..self.code.len() {
            let i = self.code[n];
            each(&i, &state);
            let before = state.regs;
            cpu::step(&mut state, &i, n as u32 + 1, &mut self.effects);
            if body.is_none() && restores_frame(&before, &state.regs) {
                body = Some(DataflowState {
                    regs: before,
                    slots: state.slots.clone(),
                    has_memory: false,
                });
            } else if matches!((before[SP], state.regs[SP]), (Stack(a, x), Stack(b, y)) if a == b && y < x) {
                body = None;
            }
            if ends_block(&i) || self.leader.get(n + 1) != Some(&false) {
                let body = body.unwrap_or_else(|| state.clone());
                return Some(BlockResult {
                    last: n,
                    out: state,
                    body,
                });
            }
        }
        None
    }

    fn solve(&mut self) {
        while let Some(first) = self.work.pop() {
            let Some(run) = self.block(first, |_, _| {}) else {
                continue;
            };
            let last = self.code[run.last];
            self.visits = self.visits.saturating_sub(run.last - first + 1);
            if self.visits == 0 {
                self.work.clear();
                return;
            }
            if let Some(&to) = jump_target(&last).and_then(|to| self.index.get(&to)) {
                self.flow_to(to, &run.out);
            }
            if !ends_flow(&last) && self.starts.get(run.last + 1) == Some(&false) {
                self.flow_to(run.last + 1, &run.out);
            }
        }
    }
}

/// The unwind rules of a function: each from an offset on. `complete`: `bytes` holds one function and nothing else.
pub fn analyze(bytes: &[u8], start: u64, complete: bool) -> Vec<(u32, Option<FullRule>)> {
    let mut function = AnalyzedFunction::new(bytes, start, complete);
    let mut rows: Vec<(u32, Option<FullRule>)> = Vec::new();
    let start_state = cpu::start_state(&function.code, 0).unwrap_or_else(DataflowState::entry);
    function.flow_to(0, &start_state);
    function.solve();
    let mut body = DataflowState::entry();
    let mut next = 0;
    while next < function.code.len() {
        if function.states[next].is_none() {
            // Reached only by jump tables, or by nothing that we know of. After a return the frame is likely to be as
            // it was before the epilogue, unless another function begins here or after the padding. Blocks that have a
            // state by now keep it.
            for n in std::mem::take(&mut function.fresh) {
                function.settled[n] = true;
            }
            let code = &function.code;
            let first = (next..code.len())
                .take(64)
                .find(|&n| !cpu::is_padding(&code[n]))
                .unwrap_or(next);
            let aligned = function.starts[next] || first > next && code.get(first).is_some_and(is_aligned);
            match cpu::start_state(code, first)
                .or_else(|| aligned.then(DataflowState::entry))
                .filter(|_| !complete)
            {
                Some(state) => {
                    function.flow_to(first, &state);
                    function.solve();
                    function.states[next].get_or_insert(body.clone());
                }
                None => {
                    function.flow_to(next, &body);
                    function.solve();
                }
            }
        }
        let mut seen: Option<DataflowState> = None;
        let run = function.block(next, |i, state| {
            if seen.as_ref() == Some(state) {
                return;
            }
            let rule = state.rule();
            if rows.last().is_none_or(|(_, last)| *last != rule) {
                rows.push(((cpu::address(i) - start) as u32, rule));
            }
            seen = Some(state.clone());
        });
        let Some(run) = run else { break };
        body = run.body;
        next = run.last + 1;
    }
    for (first, end) in cpu::thread_starts(&function.code) {
        set_rows(&mut rows, (first - start) as u32, (end - start) as u32, thread_start());
    }
    rows
}

/// The rule of code that only a new thread runs: its stack begins here.
fn thread_start() -> FullRule {
    FullRule {
        cfa: Cfa::Reg(SP as u8, 0),
        ra: CallerRegister::Undefined,
        regs: Vec::new(),
        signal: false,
        code: true,
    }
}

/// Makes `rule` that of the offsets `first..end`.
fn set_rows(rows: &mut Vec<(u32, Option<FullRule>)>, first: u32, end: u32, rule: FullRule) {
    let from = rows.partition_point(|(at, _)| *at < first);
    let to = rows.partition_point(|(at, _)| *at <= end);
    let after = to.checked_sub(1).and_then(|last| rows[last].1.clone());
    rows.splice(from..to, [(first, Some(rule)), (end, after)]);
}

fn is_aligned(i: &Instruction) -> bool {
    cpu::address(i).is_multiple_of(FUNCTION_ALIGNMENT)
}

/// Target of a jump to a fixed address.
fn jump_target(i: &Instruction) -> Option<u64> {
    match cpu::flow(i) {
        (Flow::ConditionalJump | Flow::Jump, target) => target,
        _ => None,
    }
}

fn ends_block(i: &Instruction) -> bool {
    cpu::flow(i).0 == Flow::ConditionalJump || ends_flow(i)
}

/// Does execution never continue with the next instruction?
fn ends_flow(i: &Instruction) -> bool {
    matches!(
        cpu::flow(i).0,
        Flow::Jump | Flow::IndirectJump | Flow::Return | Flow::Trap
    )
}

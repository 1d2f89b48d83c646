//! Unwind rules as they are stored and applied: one row of a call frame table (DWARF 5, section 6.4.1), reduced to what
//! x86-64 code needs.

use super::expr::{self, Expr};
use super::handler_entry::HandlerRow;
use super::stack_memory::StackMemory;
use crate::arch::{CALLEE_SAVED, GPRS, RA, Regs, SP};
use crate::event::StackBytes;
use crate::truncation::Truncation;
use rustc_hash::FxHashMap;

/// The registers that a compact rule can restore, by DWARF number: those a callee must preserve.
pub const CALLEE: [u8; 6] = [3, 6, 12, 13, 14, 15];

/// Names of the registers by DWARF number (System V ABI AMD64, figure 3.36).
const NAMES: [&str; 17] = [
    "rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "ra",
];

/// How to unwind the code that one rule covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RuleKind {
    /// CFA = base + offset, return address at CFA - 8.
    Frame,
    /// CFA = word at (base + offset), return address at CFA - 8 (GCC's realigned frames).
    Deref,
    /// The rule at index `offset` of the full rules.
    Full,
    /// CFA = base + offset; nothing called this code.
    End,
    /// A landmark: interpreted by the unwinder.
    Stub,
    Switch,
    First,
    /// The tables are damaged here.
    Bad,
    /// No table covers this code.
    None,
}

/// A compact rule. Registers that it does not mention keep their value if a callee must preserve them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    pub kind: RuleKind,
    /// DWARF number of the register that the CFA is relative to.
    pub base: u8,
    /// Bit `i`: `CALLEE[i]` was saved at CFA + `at[i]`.
    pub saved: u8,
    /// Bit `i`: the value of `CALLEE[i]` in the caller is lost.
    pub lost: u8,
    /// A frame created by the kernel: its caller was interrupted.
    pub signal: bool,
    /// Derived from the function's instructions, not from a table.
    pub code: bool,
    pub offset: i32,
    pub at: [i16; 6],
}

impl Rule {
    /// The stack words that lead from a frame to its caller by a plain rule, as (avma, value): the return address and
    /// the saved registers. `None` if one of them cannot be read.
    pub fn words(&self, cfa: u64, ra: u64, stack: &StackBytes, out: &mut [(u64, u64); 7]) -> Option<usize> {
        out[0] = (cfa.wrapping_sub(8), ra);
        let mut n = 1;
        let mut saved = self.saved;
        while saved != 0 {
            let i = saved.trailing_zeros() as usize;
            saved &= saved - 1;
            let slot = cfa.wrapping_add(i64::from(self.at[i]) as u64);
            *out.get_mut(n)? = (slot, stack.word(slot)?);
            n += 1;
        }
        Some(n)
    }

    pub const fn new(kind: RuleKind, base: usize, offset: i32) -> Rule {
        Rule {
            kind,
            base: base as u8,
            saved: 0,
            lost: 0,
            signal: false,
            code: false,
            offset,
            at: [0; 6],
        }
    }

    /// The same rule as a full rule.
    fn expand(&self) -> FullRule {
        let (base, n) = (self.base, i64::from(self.offset));
        let cfa = if self.kind == RuleKind::Deref {
            Cfa::Deref(base, n, 0)
        } else {
            Cfa::Reg(base, n)
        };
        let ra = if self.kind == RuleKind::End {
            CallerRegister::Undefined
        } else {
            CallerRegister::AtCfa(-8)
        };
        let regs = (0..CALLEE.len()).filter_map(|i| match (self.saved >> i & 1, self.lost >> i & 1) {
            (1, _) => Some((CALLEE[i], CallerRegister::AtCfa(self.at[i].into()))),
            (_, 1) => Some((CALLEE[i], CallerRegister::Undefined)),
            _ => None,
        });
        FullRule {
            cfa,
            ra,
            regs: regs.collect(),
            signal: self.signal,
            code: self.code,
        }
    }

    pub const BAD: Rule = Rule::new(RuleKind::Bad, 0, 0);
    pub const NONE: Rule = Rule::new(RuleKind::None, 0, 0);
    pub const STUB: Rule = Rule::new(RuleKind::Stub, 0, 0);
    pub const SWITCH: Rule = Rule::new(RuleKind::Switch, 0, 0);
    pub const FIRST: Rule = Rule::new(RuleKind::First, 0, 0);
}

/// Where the caller's value of a register is (DWARF 5, section 6.4.1).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CallerRegister {
    Undefined,
    Same,
    /// In memory at CFA + N.
    AtCfa(i64),
    /// CFA + N itself.
    Cfa(i64),
    /// In another register.
    Reg(u8),
    /// In memory at register + N.
    AtReg(u8, i64),
    /// In memory at the expression's address.
    At(Expr),
    /// The expression's value.
    Is(Expr),
}

/// How to compute the canonical frame address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Cfa {
    Reg(u8, i64),
    /// (word at register + N) + M
    Deref(u8, i64, i64),
    Is(Expr),
}

/// A rule of any shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FullRule {
    pub cfa: Cfa,
    pub ra: CallerRegister,
    /// Registers that do not simply keep their value.
    pub regs: Vec<(u8, CallerRegister)>,
    pub signal: bool,
    pub code: bool,
}

impl FullRule {
    /// The same as a compact rule, if it has that shape.
    pub fn compact(&self) -> Option<Rule> {
        let (kind, base, offset) = match (&self.cfa, &self.ra) {
            (&Cfa::Reg(r, n), CallerRegister::AtCfa(-8)) => (RuleKind::Frame, r, n),
            (&Cfa::Deref(r, n, 0), CallerRegister::AtCfa(-8)) => (RuleKind::Deref, r, n),
            (&Cfa::Reg(r, n), CallerRegister::Undefined) => (RuleKind::End, r, n),
            _ => return None,
        };
        if usize::from(base) >= GPRS {
            return None;
        }
        let mut rule = Rule::new(kind, base.into(), i32::try_from(offset).ok()?);
        (rule.signal, rule.code) = (self.signal, self.code);
        for (reg, location) in &self.regs {
            let slot = CALLEE.iter().position(|r| r == reg);
            match (location, slot) {
                (CallerRegister::Same, Some(_)) | (CallerRegister::Undefined, None) => {}
                (CallerRegister::Undefined, Some(i)) => rule.lost |= 1 << i,
                (&CallerRegister::AtCfa(n), Some(i)) => {
                    rule.at[i] = i16::try_from(n).ok()?;
                    rule.saved |= 1 << i;
                }
                _ => return None,
            }
        }
        Some(rule)
    }
}

/// Index of a rule in [`Rules`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleId(pub u32);

/// All rules found so far, each once.
pub struct Rules {
    all: Vec<Rule>,
    full: Vec<FullRule>,
    ids: FxHashMap<Rule, RuleId>,
    full_ids: FxHashMap<FullRule, RuleId>,
}

impl Default for Rules {
    fn default() -> Self {
        let mut rules = Rules {
            all: vec![],
            full: vec![],
            ids: FxHashMap::default(),
            full_ids: FxHashMap::default(),
        };
        for rule in [Rule::NONE, Rule::BAD, Rule::STUB, Rule::SWITCH, Rule::FIRST] {
            rules.intern(rule);
        }
        rules
    }
}

impl Rules {
    pub const NONE: RuleId = RuleId(0);
    pub const BAD: RuleId = RuleId(1);
    pub const STUB: RuleId = RuleId(2);
    pub const SWITCH: RuleId = RuleId(3);
    pub const FIRST: RuleId = RuleId(4);
    /// Bounds memory for damaged tables: past this many distinct rules (libpython has about a thousand), new ones count
    /// as damaged.
    const MAX_RULES: usize = 1 << 20;

    pub fn get(&self, id: RuleId) -> Rule {
        self.all.get(id.0 as usize).copied().unwrap_or(Rule::BAD)
    }

    /// The rule as text. Expressions appear as `exp`, as in binutils.
    pub fn describe(&self, rule: &Rule) -> Option<String> {
        let full = match rule.kind {
            RuleKind::None | RuleKind::Stub | RuleKind::Switch | RuleKind::First => return None,
            RuleKind::Bad => return Some("bad".into()),
            RuleKind::Full => self.full.get(rule.offset as usize)?.clone(),
            RuleKind::Frame | RuleKind::Deref | RuleKind::End => rule.expand(),
        };
        let name = |r: u8| NAMES.get(usize::from(r)).copied().unwrap_or("?");
        let mut text = match full.cfa {
            Cfa::Reg(r, n) => format!("{}{n:+}", name(r)),
            Cfa::Deref(r, n, 0) => format!("*({}{n:+})", name(r)),
            Cfa::Deref(r, n, m) => format!("*({}{n:+}){m:+}", name(r)),
            Cfa::Is(_) => "exp".into(),
        };
        let ra = (RA as u8, full.ra.clone());
        for (r, location) in full.regs.iter().chain([&ra]) {
            let location = match location {
                CallerRegister::Undefined => "u".into(),
                CallerRegister::Same => "s".into(),
                CallerRegister::AtCfa(n) => format!("c{n:+}"),
                CallerRegister::Cfa(n) => format!("v{n:+}"),
                CallerRegister::Reg(r) => name(*r).into(),
                CallerRegister::AtReg(r, n) => format!("*({}{n:+})", name(*r)),
                CallerRegister::At(_) => "exp".into(),
                CallerRegister::Is(_) => "vexp".into(),
            };
            text += &format!(" {}={location}", name(*r));
        }
        Some(text + if rule.signal { " signal" } else { "" } + if rule.code { " code" } else { "" })
    }

    /// Is this a row of a function that jumps into an exception handler? Nothing else saves rax and rdx for its caller:
    /// they are what the handler is passed (System V ABI AMD64, section 6.2.5).
    pub fn handler_row(&self, rule: &Rule) -> Option<HandlerRow> {
        if rule.kind != RuleKind::Full || rule.code {
            return None;
        }
        let full = self.full.get(rule.offset as usize)?;
        let is_saved = |r: u8| {
            full.regs
                .iter()
                .any(|(reg, at)| *reg == r && matches!(at, CallerRegister::AtCfa(_)))
        };
        let through_rcx = matches!(full.cfa, Cfa::Reg(2, _)) || full.ra == CallerRegister::Reg(2);
        (is_saved(0) && is_saved(1)).then_some(if through_rcx || !is_saved(6) {
            HandlerRow::Loaded
        } else {
            HandlerRow::Saved
        })
    }

    pub fn intern(&mut self, rule: Rule) -> RuleId {
        if let Some(&id) = self.ids.get(&rule) {
            return id;
        }
        if self.all.len() >= Self::MAX_RULES {
            return Self::BAD;
        }
        let id = RuleId(self.all.len() as u32);
        self.all.push(rule);
        self.ids.insert(rule, id);
        id
    }

    pub fn intern_full(&mut self, full: FullRule) -> RuleId {
        if let Some(rule) = full.compact() {
            return self.intern(rule);
        }
        if let Some(&id) = self.full_ids.get(&full) {
            return id;
        }
        if self.all.len() >= Self::MAX_RULES {
            return Self::BAD;
        }
        let mut rule = Rule::new(RuleKind::Full, 0, self.full.len() as i32);
        (rule.signal, rule.code) = (full.signal, full.code);
        let id = RuleId(self.all.len() as u32);
        self.all.push(rule);
        self.full.push(full.clone());
        self.full_ids.insert(full, id);
        id
    }

    /// Turns the registers of a frame into those of its caller. On failure `regs` is as before.
    #[inline]
    pub fn apply(&self, rule: &Rule, regs: &mut Regs, memory: &mut StackMemory) -> UnwindStep {
        let base = usize::from(rule.base) % GPRS;
        let from = regs.gpr[base].wrapping_add(i64::from(rule.offset) as u64);
        let known = regs.known & (1 << base) != 0;
        let cfa = match rule.kind {
            RuleKind::Frame if known => from,
            RuleKind::Deref if known => match memory.word(from) {
                Ok(cfa) => cfa,
                Err(cut) => return UnwindStep::Fail { cut, cfa: None },
            },
            RuleKind::End if known => return UnwindStep::End { cfa: Some(from) },
            RuleKind::End => return UnwindStep::End { cfa: None },
            RuleKind::Full => return self.apply_full(rule, regs, memory),
            RuleKind::None | RuleKind::Stub | RuleKind::Switch | RuleKind::First => {
                return UnwindStep::Fail {
                    cut: Truncation::NoUnwindInfo,
                    cfa: None,
                };
            }
            RuleKind::Bad => {
                return UnwindStep::Fail {
                    cut: Truncation::BadUnwindInfo,
                    cfa: None,
                };
            }
            RuleKind::Frame | RuleKind::Deref => {
                return UnwindStep::Fail {
                    cut: memory.why_unknown(),
                    cfa: None,
                };
            }
        };
        let ra = match memory.word(cfa.wrapping_sub(8)) {
            Ok(ra) => ra,
            Err(cut) => return UnwindStep::Fail { cut, cfa: Some(cfa) },
        };
        Rules::restore(rule, regs, memory, cfa, ra);
        UnwindStep::Caller { cfa }
    }

    /// CFA and return address by a plain table rule; `None`: use [`Rules::apply`].
    #[inline]
    pub fn plain(&self, rule: &Rule, regs: &Regs, memory: &StackMemory) -> Option<(u64, u64)> {
        let base = usize::from(rule.base) % GPRS;
        if rule.kind != RuleKind::Frame || rule.code || rule.signal || regs.known & (1 << base) == 0 {
            return None;
        }
        let cfa = regs.gpr[base].wrapping_add(i64::from(rule.offset) as u64);
        Some((cfa, memory.stack.word(cfa.wrapping_sub(8))?))
    }

    /// Makes `regs` those of the caller, whose CFA and return address a compact rule gave.
    #[inline]
    pub fn restore(rule: &Rule, regs: &mut Regs, memory: &mut StackMemory, cfa: u64, ra: u64) {
        let mut known = regs.known & CALLEE_SAVED;
        let mut saved = rule.saved;
        while saved != 0 {
            let i = saved.trailing_zeros() as usize;
            saved &= saved - 1;
            let reg = usize::from(CALLEE[i]);
            let slot = cfa.wrapping_add(i64::from(rule.at[i]) as u64);
            match memory.word(slot) {
                Ok(value) => {
                    regs.gpr[reg] = value;
                    known |= 1 << reg;
                }
                Err(_) if slot < regs.gpr[SP] => {} // Popped: see below.
                Err(cut) => {
                    memory.lost = Some(cut);
                    known &= !(1 << reg);
                }
            }
        }
        if rule.lost != 0 {
            for (i, reg) in CALLEE.iter().enumerate() {
                known &= !(u32::from(rule.lost >> i & 1) << reg);
            }
        }
        regs.gpr[SP] = cfa;
        regs.ip = ra;
        regs.known = known | 1 << SP;
    }

    fn apply_full(&self, rule: &Rule, regs: &mut Regs, memory: &mut StackMemory) -> UnwindStep {
        let Some(full) = self.full.get(rule.offset as usize) else {
            return UnwindStep::Fail {
                cut: Truncation::BadUnwindInfo,
                cfa: None,
            };
        };
        let reg = |r: u8| regs.get(r.into());
        let cfa = match &full.cfa {
            &Cfa::Reg(r, n) => reg(r).map(|v| v.wrapping_add(n as u64)).ok_or(memory.why_unknown()),
            &Cfa::Deref(r, n, m) => match reg(r) {
                Some(v) => memory.word(v.wrapping_add(n as u64)).map(|v| v.wrapping_add(m as u64)),
                None => Err(memory.why_unknown()),
            },
            Cfa::Is(e) => expr::evaluate(e, None, regs, memory),
        };
        let cfa = match cfa {
            Ok(cfa) => cfa,
            Err(_) if full.ra == CallerRegister::Undefined => return UnwindStep::End { cfa: None },
            Err(cut) => return UnwindStep::Fail { cut, cfa: None },
        };
        let find = |location: &CallerRegister, register: usize, memory: &mut StackMemory| -> Result<u64, Truncation> {
            let missing = memory.why_unknown();
            match location {
                CallerRegister::Undefined => Err(missing),
                CallerRegister::Same => regs.get(register).ok_or(missing),
                CallerRegister::AtCfa(n) => memory.word(cfa.wrapping_add(*n as u64)),
                CallerRegister::Cfa(n) => Ok(cfa.wrapping_add(*n as u64)),
                CallerRegister::Reg(r) => reg(*r).ok_or(missing),
                CallerRegister::AtReg(r, n) => reg(*r)
                    .ok_or(missing)
                    .and_then(|v| memory.word(v.wrapping_add(*n as u64))),
                CallerRegister::At(e) => expr::evaluate(e, Some(cfa), regs, memory).and_then(|a| memory.word(a)),
                CallerRegister::Is(e) => expr::evaluate(e, Some(cfa), regs, memory),
            }
        };
        if full.ra == CallerRegister::Undefined {
            return UnwindStep::End { cfa: Some(cfa) };
        }
        let ra = match find(&full.ra, RA, memory) {
            Ok(ra) => ra,
            Err(cut) => return UnwindStep::Fail { cut, cfa: Some(cfa) },
        };
        // Compilers leave a register's row in place while an epilogue pops it, and with it the base of other rows. A
        // slot outside the frame means that the register has its old value again. (Below the stack pointer it may still
        // be in the copy, and valid.)
        let outside = |slot: u64| !full.signal && (slot >= cfa || slot < regs.gpr[SP]);
        let popped = |location: &CallerRegister, read: bool| match location {
            CallerRegister::AtCfa(n) => !read && outside(cfa.wrapping_add(*n as u64)),
            CallerRegister::AtReg(r, n) => reg(*r).is_some_and(|v| {
                let slot = v.wrapping_add(*n as u64);
                outside(slot) && (!read || slot >= cfa)
            }),
            _ => false,
        };
        let mut new = Regs {
            gpr: regs.gpr,
            ip: ra,
            known: regs.known & CALLEE_SAVED | 1 << SP,
        };
        new.gpr[SP] = cfa;
        for (r, location) in &full.regs {
            let r = usize::from(*r) % GPRS;
            match find(location, r, memory) {
                Ok(_) if popped(location, true) => {} // `new` has it, as far as it is known.
                Ok(value) => {
                    new.gpr[r] = value;
                    new.known |= 1 << r;
                }
                // Without a stack pointer there is no frame; the CFA is its value by definition.
                Err(_) if r == SP => {}
                Err(_) if popped(location, false) => {}
                Err(cut) => {
                    if *location != CallerRegister::Undefined {
                        memory.lost = Some(cut);
                    }
                    new.known &= !(1 << r);
                }
            }
        }
        *regs = new;
        UnwindStep::Caller { cfa }
    }
}

/// Result of applying a rule to a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnwindStep {
    Caller { cfa: u64 },
    End { cfa: Option<u64> },
    Fail { cut: Truncation, cfa: Option<u64> },
}

//! All unwind rules found so far, and what applying one gives.

use super::expr;
use super::handler_entry::HandlerRow;
use super::rule::{CallerRegister, Cfa, FullRule, LINK_BIT, Rule, RuleId, RuleKind};
use super::stack_memory::StackMemory;
use super::{UnwindState, locate};
use crate::arch::{self, CALLEE, CALLEE_SAVED, GPRS, LINK, NAMES, RA, Regs, SP};
use crate::frame::ModuleId;
use crate::truncation::Truncation;
use rustc_hash::FxHashMap;

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
        let fixed = [
            Rule::NONE,
            Rule::BAD,
            Rule::STUB,
            Rule::SWITCH,
            Rule::FIRST,
            Rule::OTHER_STACK,
        ];
        for rule in fixed {
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
    pub const OTHER_STACK: RuleId = RuleId(5);
    /// Bounds memory for damaged tables: past this many distinct rules (libpython has about a thousand), new ones count
    /// as damaged.
    const MAX_RULES: usize = 1 << 20;

    /// Whether half of the room for rules is used.
    pub fn is_nearly_full(&self) -> bool {
        self.all.len() > Self::MAX_RULES / 2
    }

    pub fn get(&self, id: RuleId) -> Rule {
        self.all.get(id.0 as usize).copied().unwrap_or(Rule::BAD)
    }

    /// The rule as text. Expressions appear as `exp`, as in binutils.
    pub fn describe(&self, rule: &Rule) -> Option<String> {
        let full = match rule.kind {
            RuleKind::None | RuleKind::Stub | RuleKind::Switch | RuleKind::First | RuleKind::OtherStack => return None,
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
        // Of aarch64 the sequence of instructions is not known here.
        if rule.kind != RuleKind::Full || rule.code || LINK.is_some() {
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

    /// The rule of code that signal handlers return to: the kernel has stored the interrupted registers there.
    pub fn signal_return(&mut self) -> RuleId {
        let register = |r: usize| CallerRegister::AtReg(SP as u8, arch::signal_frame_slot(r));
        self.intern_full(FullRule {
            cfa: Cfa::Deref(SP as u8, arch::signal_frame_slot(SP), 0),
            ra: register(GPRS),
            regs: (0..GPRS).filter(|r| *r != SP).map(|r| (r as u8, register(r))).collect(),
            signal: true,
            code: false,
        })
    }

    /// Turns the registers of a frame into those of its caller. On failure `regs` is as before.
    #[inline]
    pub fn apply(&self, rule: &Rule, regs: &mut Regs, memory: &mut StackMemory) -> UnwindStep {
        let base = usize::from(rule.base) % GPRS;
        let from = regs.gpr[base].wrapping_add(i64::from(rule.offset) as u64);
        let known = regs.known & (1 << base) != 0;
        let cfa = match rule.kind {
            RuleKind::Frame if known => from,
            RuleKind::Frame if base == SP && rule.by_frame_record(regs).is_some() => {
                rule.by_frame_record(regs).unwrap_or(from)
            }
            RuleKind::Deref if known => match memory.word(from) {
                Ok(cfa) => cfa,
                Err(truncation) => return UnwindStep::Fail { truncation, cfa: None },
            },
            RuleKind::End if known => return UnwindStep::End { cfa: Some(from) },
            RuleKind::End => return UnwindStep::End { cfa: None },
            RuleKind::Full => return self.apply_full(rule, regs, memory),
            RuleKind::None | RuleKind::Stub | RuleKind::Switch | RuleKind::First | RuleKind::OtherStack => {
                return UnwindStep::Fail {
                    truncation: Truncation::NoUnwindInfo,
                    cfa: None,
                };
            }
            RuleKind::Bad => {
                return UnwindStep::Fail {
                    truncation: Truncation::BadUnwindInfo,
                    cfa: None,
                };
            }
            RuleKind::Frame | RuleKind::Deref => {
                return UnwindStep::Fail {
                    truncation: memory.why_unknown(),
                    cfa: None,
                };
            }
        };
        let ra = match rule.return_slot() {
            Some(at) => memory.word(cfa.wrapping_add(at as u64)),
            None => regs.get(RA).ok_or(memory.why_unknown()),
        };
        let ra = match ra {
            Ok(ra) => ra,
            Err(truncation) => {
                return UnwindStep::Fail {
                    truncation,
                    cfa: Some(cfa),
                };
            }
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
        let at = rule.return_slot()?;
        Some((cfa, memory.stack.word(cfa.wrapping_add(at as u64))?))
    }

    /// Makes `regs` those of the caller, whose CFA and return address a compact rule gave.
    #[inline]
    pub fn restore(rule: &Rule, regs: &mut Regs, memory: &mut StackMemory, cfa: u64, ra: u64) {
        let mut known = regs.known & CALLEE_SAVED;
        let mut saved = rule.saved & !LINK_BIT;
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
                Err(truncation) => {
                    memory.lost = Some(truncation);
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
                truncation: Truncation::BadUnwindInfo,
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
            Err(truncation) => return UnwindStep::Fail { truncation, cfa: None },
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
            Err(truncation) => {
                return UnwindStep::Fail {
                    truncation,
                    cfa: Some(cfa),
                };
            }
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
                Err(truncation) => {
                    if *location != CallerRegister::Undefined {
                        memory.lost = Some(truncation);
                    }
                    new.known &= !(1 << r);
                }
            }
        }
        *regs = new;
        UnwindStep::Caller { cfa }
    }
}

impl UnwindState<'_> {
    /// Address and location of the current frame, which has this rule and is at `at`. Nothing called the code that a
    /// signal handler returns to: the address is that of its first instruction, and not one byte earlier.
    #[inline]
    pub fn place(&self, rule: &Rule, at: Option<(ModuleId, u64)>) -> (u64, Option<(ModuleId, u64)>) {
        if rule.signal {
            (self.regs.ip, locate(self.code, self.regs.ip).or(at))
        } else {
            (self.lookup(), at)
        }
    }
}

/// Result of applying a rule to a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnwindStep {
    Caller { cfa: u64 },
    End { cfa: Option<u64> },
    Fail { truncation: Truncation, cfa: Option<u64> },
}

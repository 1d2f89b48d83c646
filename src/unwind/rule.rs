//! Unwind rules in the form in which they are kept and applied: one row of a call frame table (DWARF 5, section 6.4.1),
//! reduced to what x86-64 code needs.

use super::expr::{self, Expr};
use super::memory::Memory;
use crate::arch::{CALLEE_SAVED, GPRS, RA, Regs, SP};
use crate::sample::{Cut, StackBytes};
use rustc_hash::FxHashMap;

/// The registers that a compact rule can restore, by DWARF number: those a callee must preserve.
pub const CALLEE: [u8; 6] = [3, 6, 12, 13, 14, 15];

/// Names of the registers by DWARF number (System V ABI AMD64, figure 3.36).
const NAMES: [&str; 17] = [
    "rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "ra",
];

/// What is to be done in code that one rule covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// CFA = base + offset, return address at CFA - 8.
    Frame,
    /// CFA = word at (base + offset), return address at CFA - 8 (GCC's realigned frames).
    Deref,
    /// See the table of general rules at index `offset`.
    General,
    /// CFA = base + offset; nothing called this code.
    End,
    /// A landmark: what it means is for the walk to say.
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
    pub kind: Kind,
    /// DWARF number of the register that the CFA is relative to.
    pub base: u8,
    /// Bit `i`: `CALLEE[i]` was saved at CFA + `at[i]`.
    pub saved: u8,
    /// Bit `i`: the value of `CALLEE[i]` in the caller is lost.
    pub lost: u8,
    /// A frame that the kernel made: its caller was interrupted.
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

    pub const fn new(kind: Kind, base: usize, offset: i32) -> Rule {
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

    /// The same rule written out.
    fn expand(&self) -> General {
        let (base, n) = (self.base, i64::from(self.offset));
        let cfa = if self.kind == Kind::Deref {
            Cfa::Deref(base, n, 0)
        } else {
            Cfa::Reg(base, n)
        };
        let ra = if self.kind == Kind::End {
            Where::Undefined
        } else {
            Where::AtCfa(-8)
        };
        let regs = (0..CALLEE.len()).filter_map(|i| match (self.saved >> i & 1, self.lost >> i & 1) {
            (1, _) => Some((CALLEE[i], Where::AtCfa(self.at[i].into()))),
            (_, 1) => Some((CALLEE[i], Where::Undefined)),
            _ => None,
        });
        General {
            cfa,
            ra,
            regs: regs.collect(),
            signal: self.signal,
            code: self.code,
        }
    }

    pub const BAD: Rule = Rule::new(Kind::Bad, 0, 0);
    pub const NONE: Rule = Rule::new(Kind::None, 0, 0);
    pub const STUB: Rule = Rule::new(Kind::Stub, 0, 0);
    pub const SWITCH: Rule = Rule::new(Kind::Switch, 0, 0);
    pub const FIRST: Rule = Rule::new(Kind::First, 0, 0);
}

/// Where the caller's value of a register is (DWARF 5, section 6.4.1).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Where {
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
    /// In memory where the expression says.
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
pub struct General {
    pub cfa: Cfa,
    pub ra: Where,
    /// Registers that do not simply keep their value.
    pub regs: Vec<(u8, Where)>,
    pub signal: bool,
    pub code: bool,
}

impl General {
    /// The same as a compact rule, if it has such a shape.
    pub fn compact(&self) -> Option<Rule> {
        let (kind, base, offset) = match (&self.cfa, &self.ra) {
            (&Cfa::Reg(r, n), Where::AtCfa(-8)) => (Kind::Frame, r, n),
            (&Cfa::Deref(r, n, 0), Where::AtCfa(-8)) => (Kind::Deref, r, n),
            (&Cfa::Reg(r, n), Where::Undefined) => (Kind::End, r, n),
            _ => return None,
        };
        if usize::from(base) >= GPRS {
            return None;
        }
        let mut rule = Rule::new(kind, base.into(), i32::try_from(offset).ok()?);
        (rule.signal, rule.code) = (self.signal, self.code);
        for (reg, place) in &self.regs {
            let slot = CALLEE.iter().position(|r| r == reg);
            match (place, slot) {
                (Where::Same, Some(_)) | (Where::Undefined, None) => {}
                (Where::Undefined, Some(i)) => rule.lost |= 1 << i,
                (&Where::AtCfa(n), Some(i)) => {
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

/// All rules met so far, each once.
pub struct Rules {
    all: Vec<Rule>,
    general: Vec<General>,
    ids: FxHashMap<Rule, RuleId>,
    general_ids: FxHashMap<General, RuleId>,
}

impl Default for Rules {
    fn default() -> Self {
        let mut rules = Rules {
            all: vec![],
            general: vec![],
            ids: FxHashMap::default(),
            general_ids: FxHashMap::default(),
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
    /// Damaged tables must not fill our memory: past this many distinct rules (libpython has about a thousand),
    /// new ones count as damaged.
    const MOST: usize = 1 << 20;

    pub fn get(&self, id: RuleId) -> Rule {
        self.all.get(id.0 as usize).copied().unwrap_or(Rule::BAD)
    }

    /// The rule in words. Expressions show as `exp`, as binutils prints them.
    pub fn describe(&self, rule: &Rule) -> Option<String> {
        let general = match rule.kind {
            Kind::None | Kind::Stub | Kind::Switch | Kind::First => return None,
            Kind::Bad => return Some("bad".into()),
            Kind::General => self.general.get(rule.offset as usize)?.clone(),
            Kind::Frame | Kind::Deref | Kind::End => rule.expand(),
        };
        let name = |r: u8| NAMES.get(usize::from(r)).copied().unwrap_or("?");
        let mut text = match general.cfa {
            Cfa::Reg(r, n) => format!("{}{n:+}", name(r)),
            Cfa::Deref(r, n, 0) => format!("*({}{n:+})", name(r)),
            Cfa::Deref(r, n, m) => format!("*({}{n:+}){m:+}", name(r)),
            Cfa::Is(_) => "exp".into(),
        };
        let ra = (RA as u8, general.ra.clone());
        for (r, place) in general.regs.iter().chain([&ra]) {
            let place = match place {
                Where::Undefined => "u".into(),
                Where::Same => "s".into(),
                Where::AtCfa(n) => format!("c{n:+}"),
                Where::Cfa(n) => format!("v{n:+}"),
                Where::Reg(r) => name(*r).into(),
                Where::AtReg(r, n) => format!("*({}{n:+})", name(*r)),
                Where::At(_) => "exp".into(),
                Where::Is(_) => "vexp".into(),
            };
            text += &format!(" {}={place}", name(*r));
        }
        Some(text + if rule.signal { " signal" } else { "" } + if rule.code { " code" } else { "" })
    }

    pub fn intern(&mut self, rule: Rule) -> RuleId {
        if let Some(&id) = self.ids.get(&rule) {
            return id;
        }
        if self.all.len() >= Self::MOST {
            return Self::BAD;
        }
        let id = RuleId(self.all.len() as u32);
        self.all.push(rule);
        self.ids.insert(rule, id);
        id
    }

    pub fn intern_general(&mut self, general: General) -> RuleId {
        if let Some(rule) = general.compact() {
            return self.intern(rule);
        }
        if let Some(&id) = self.general_ids.get(&general) {
            return id;
        }
        if self.all.len() >= Self::MOST {
            return Self::BAD;
        }
        let mut rule = Rule::new(Kind::General, 0, self.general.len() as i32);
        (rule.signal, rule.code) = (general.signal, general.code);
        let id = RuleId(self.all.len() as u32);
        self.all.push(rule);
        self.general.push(general.clone());
        self.general_ids.insert(general, id);
        id
    }

    /// Turns the registers of a frame into those of its caller. On failure `regs` is as before.
    #[inline]
    pub fn apply(&self, rule: &Rule, regs: &mut Regs, memory: &mut Memory) -> Step {
        let base = usize::from(rule.base) % GPRS;
        let from = regs.gpr[base].wrapping_add(i64::from(rule.offset) as u64);
        let known = regs.known & (1 << base) != 0;
        let cfa = match rule.kind {
            Kind::Frame if known => from,
            Kind::Deref if known => match memory.word(from) {
                Ok(cfa) => cfa,
                Err(cut) => return Step::Fail { cut, cfa: None },
            },
            Kind::End if known => return Step::End { cfa: Some(from) },
            Kind::End => return Step::End { cfa: None },
            Kind::General => return self.apply_general(rule, regs, memory),
            Kind::None | Kind::Stub | Kind::Switch | Kind::First => {
                return Step::Fail {
                    cut: Cut::NoUnwindInfo,
                    cfa: None,
                };
            }
            Kind::Bad => {
                return Step::Fail {
                    cut: Cut::BadUnwindInfo,
                    cfa: None,
                };
            }
            Kind::Frame | Kind::Deref => {
                return Step::Fail {
                    cut: memory.why_unknown(),
                    cfa: None,
                };
            }
        };
        let ra = match memory.word(cfa.wrapping_sub(8)) {
            Ok(ra) => ra,
            Err(cut) => return Step::Fail { cut, cfa: Some(cfa) },
        };
        Rules::restore(rule, regs, memory, cfa, ra);
        Step::Caller { cfa }
    }

    /// CFA and return address by a plain table rule; `None` means nothing but "ask [`Rules::apply`]".
    #[inline]
    pub fn plain(&self, rule: &Rule, regs: &Regs, memory: &Memory) -> Option<(u64, u64)> {
        let base = usize::from(rule.base) % GPRS;
        if rule.kind != Kind::Frame || rule.code || rule.signal || regs.known & (1 << base) == 0 {
            return None;
        }
        let cfa = regs.gpr[base].wrapping_add(i64::from(rule.offset) as u64);
        Some((cfa, memory.stack.word(cfa.wrapping_sub(8))?))
    }

    /// Makes `regs` those of the caller, whose CFA and return address a compact rule gave.
    #[inline]
    pub fn restore(rule: &Rule, regs: &mut Regs, memory: &mut Memory, cfa: u64, ra: u64) {
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

    fn apply_general(&self, rule: &Rule, regs: &mut Regs, memory: &mut Memory) -> Step {
        let Some(general) = self.general.get(rule.offset as usize) else {
            return Step::Fail {
                cut: Cut::BadUnwindInfo,
                cfa: None,
            };
        };
        let reg = |r: u8| regs.get(r.into());
        let cfa = match &general.cfa {
            &Cfa::Reg(r, n) => reg(r).map(|v| v.wrapping_add(n as u64)).ok_or(memory.why_unknown()),
            &Cfa::Deref(r, n, m) => match reg(r) {
                Some(v) => memory.word(v.wrapping_add(n as u64)).map(|v| v.wrapping_add(m as u64)),
                None => Err(memory.why_unknown()),
            },
            Cfa::Is(e) => expr::evaluate(e, None, regs, memory),
        };
        let cfa = match cfa {
            Ok(cfa) => cfa,
            Err(_) if general.ra == Where::Undefined => return Step::End { cfa: None },
            Err(cut) => return Step::Fail { cut, cfa: None },
        };
        let find = |place: &Where, own: usize, memory: &mut Memory| -> Result<u64, Cut> {
            let missing = memory.why_unknown();
            match place {
                Where::Undefined => Err(missing),
                Where::Same => regs.get(own).ok_or(missing),
                Where::AtCfa(n) => memory.word(cfa.wrapping_add(*n as u64)),
                Where::Cfa(n) => Ok(cfa.wrapping_add(*n as u64)),
                Where::Reg(r) => reg(*r).ok_or(missing),
                Where::AtReg(r, n) => reg(*r)
                    .ok_or(missing)
                    .and_then(|v| memory.word(v.wrapping_add(*n as u64))),
                Where::At(e) => expr::evaluate(e, Some(cfa), regs, memory).and_then(|a| memory.word(a)),
                Where::Is(e) => expr::evaluate(e, Some(cfa), regs, memory),
            }
        };
        if general.ra == Where::Undefined {
            return Step::End { cfa: Some(cfa) };
        }
        let ra = match find(&general.ra, RA, memory) {
            Ok(ra) => ra,
            Err(cut) => return Step::Fail { cut, cfa: Some(cfa) },
        };
        // Compilers leave a register's row in place while an epilogue pops it, and with it the base of other rows. A
        // slot outside the frame means that the register has its old value again. (Below the stack pointer it may
        // still be in the copy, and good.)
        let outside = |slot: u64| !general.signal && (slot >= cfa || slot < regs.gpr[SP]);
        let popped = |place: &Where, read: bool| match place {
            Where::AtCfa(n) => !read && outside(cfa.wrapping_add(*n as u64)),
            Where::AtReg(r, n) => reg(*r).is_some_and(|v| {
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
        for (r, place) in &general.regs {
            let r = usize::from(*r) % GPRS;
            match find(place, r, memory) {
                Ok(_) if popped(place, true) => {} // `new` has it, as far as it is known.
                Ok(value) => {
                    new.gpr[r] = value;
                    new.known |= 1 << r;
                }
                // Without a stack pointer there is no frame; the CFA is its value by definition.
                Err(_) if r == SP => {}
                Err(_) if popped(place, false) => {}
                Err(cut) => {
                    if *place != Where::Undefined {
                        memory.lost = Some(cut);
                    }
                    new.known &= !(1 << r);
                }
            }
        }
        *regs = new;
        Step::Caller { cfa }
    }
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Caller { cfa: u64 },
    End { cfa: Option<u64> },
    Fail { cut: Cut, cfa: Option<u64> },
}

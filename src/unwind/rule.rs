//! Unwind rules as they are stored and applied: one row of a call frame table (DWARF 5, section 6.4.1), reduced to what
//! compiled code needs.

use super::expr::Expr;
use crate::arch::{CALLEE, FP, GPRS, LINK, PUSHED_RETURN, Regs, SP};
use crate::event::StackBytes;

/// Maximum number of words that lead from a frame to its caller: the return address and the saved registers.
pub const MAX_WORDS: usize = CALLEE.len() + 1;
/// The link register as a bit of [`Rule::saved`]: it represents the return address.
pub const LINK_BIT: u16 = match LINK {
    Some(i) => 1 << i,
    None => 0,
};

/// How to unwind the code that one rule covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RuleKind {
    /// CFA = base + offset; the return address is where calls push it, or where the link register was saved.
    Frame,
    /// CFA = word at (base + offset), else the same (GCC's realigned frames).
    Deref,
    /// The rule at index `offset` of the full rules.
    Full,
    /// CFA = base + offset; nothing called this code.
    End,
    /// A landmark: interpreted by the unwinder.
    Stub,
    Switch,
    First,
    /// Code that switches from one stack to another.
    OtherStack,
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
    pub saved: u16,
    /// Bit `i`: the value of `CALLEE[i]` in the caller is lost.
    pub lost: u16,
    /// A frame created by the kernel: its caller was interrupted.
    pub signal: bool,
    /// Derived from the function's instructions, not from a table.
    pub code: bool,
    pub offset: i32,
    pub at: [i16; CALLEE.len()],
}

impl Rule {
    /// Where the return address is, relative to the CFA; `None`: in the link register.
    #[inline]
    pub fn return_slot(&self) -> Option<i64> {
        match LINK {
            None => Some(PUSHED_RETURN),
            Some(i) => (self.saved >> i & 1 == 1).then(|| self.at[i].into()),
        }
    }

    /// The stack words that lead from a frame to its caller by a plain rule, as (avma, value): the return address and
    /// the saved registers. `None` if one of them cannot be read.
    pub fn words(&self, cfa: u64, stack: &StackBytes, out: &mut [(u64, u64); MAX_WORDS]) -> Option<usize> {
        let slot = cfa.wrapping_add(self.return_slot()? as u64);
        out[0] = (slot, stack.word(slot)?);
        let mut n = 1;
        let mut saved = self.saved & !LINK_BIT;
        while saved != 0 {
            let i = saved.trailing_zeros() as usize;
            saved &= saved - 1;
            let slot = cfa.wrapping_add(i64::from(self.at[i]) as u64);
            *out.get_mut(n)? = (slot, stack.word(slot)?);
            n += 1;
        }
        Some(n)
    }

    /// CFA of a frame whose stack pointer is not known, if it has a frame record: the frame pointer points to where it and,
    /// just above, the link register were saved (AAPCS64, 6.4.6).
    pub fn by_frame_record(&self, regs: &Regs) -> Option<u64> {
        let fp = CALLEE.iter().position(|r| usize::from(*r) == FP)?;
        let at = i64::from(self.at[fp]);
        let is_saved = |i: usize| self.saved >> i & 1 == 1;
        let is_record = LINK.is_some_and(|link| is_saved(link) && is_saved(fp) && i64::from(self.at[link]) == at + 8);
        regs.get(FP).filter(|_| is_record).map(|fp| fp.wrapping_sub(at as u64))
    }

    /// Whether the caller may have another stack: that of a frame created by the kernel has, and that of a function
    /// which keeps its stack pointer in a register that compilers use for no frame (OCaml, while it runs C code).
    pub fn may_switch(&self) -> bool {
        let base = usize::from(self.base);
        self.signal || self.kind == RuleKind::Frame && base != SP && base != FP
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
            at: [0; CALLEE.len()],
        }
    }

    /// The same rule as a full rule.
    pub fn expand(&self) -> FullRule {
        let (base, n) = (self.base, i64::from(self.offset));
        let cfa = if self.kind == RuleKind::Deref {
            Cfa::Deref(base, n, 0)
        } else {
            Cfa::Reg(base, n)
        };
        let ra = if self.kind == RuleKind::End {
            CallerRegister::Undefined
        } else {
            self.return_slot().map_or(CallerRegister::Same, CallerRegister::AtCfa)
        };
        let others = (0..CALLEE.len()).filter(|i| LINK != Some(*i));
        let regs = others.filter_map(|i| match (self.saved >> i & 1, self.lost >> i & 1) {
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
    pub const OTHER_STACK: Rule = Rule::new(RuleKind::OtherStack, 0, 0);
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
        let return_slot = match (&self.ra, LINK) {
            (CallerRegister::Undefined, _) => None,
            (&CallerRegister::AtCfa(n), Some(i)) => Some((i, i16::try_from(n).ok()?)),
            (CallerRegister::Same, Some(_)) | (CallerRegister::AtCfa(PUSHED_RETURN), None) => None,
            _ => return None,
        };
        let (kind, base, offset) = match (&self.cfa, &self.ra) {
            (&Cfa::Reg(r, n), CallerRegister::Undefined) => (RuleKind::End, r, n),
            (_, CallerRegister::Undefined) => return None,
            (&Cfa::Reg(r, n), _) => (RuleKind::Frame, r, n),
            (&Cfa::Deref(r, n, 0), _) => (RuleKind::Deref, r, n),
            _ => return None,
        };
        if usize::from(base) >= GPRS {
            return None;
        }
        let mut rule = Rule::new(kind, base.into(), i32::try_from(offset).ok()?);
        if let Some((i, at)) = return_slot {
            (rule.saved, rule.at[i]) = (1 << i, at);
        }
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

//! Frames of Go code, by Go's own function table: at each instruction it says how far the stack pointer was moved, which
//! functions begin a stack (`runtime.goexit`), and which switch from one stack to another.
//!
//! Go's linker writes `.debug_frame`, which is gone in stripped programs and knows nothing of that.

use symbolize::{GO_TABLE_SECTIONS, GoSections, GoTable};

use super::Sections;
use super::rule::{CallerRegister, Cfa, FullRule, Rule, RuleId, RuleKind};
use super::rules::Rules;
use crate::arch::{FP, LINK, PUSHED_RETURN, SP};

/// What the table says of an instruction.
pub enum GoRule {
    Rule(RuleId),
    /// It aligns the stack pointer: the instructions say how.
    Analyze,
}

/// The table of one file, if it has one; read when first needed.
#[derive(Default)]
pub struct GoFrames(Option<Option<GoTable>>);

impl GoFrames {
    fn table(&mut self, sections: &mut dyn Sections) -> Option<&GoTable> {
        self.0.get_or_insert_with(|| read(sections)).as_ref()
    }

    /// The rule for `svma`; `None` if it is not in a function of Go.
    pub fn rule(&mut self, svma: u64, sections: &mut dyn Sections, rules: &mut Rules) -> Option<GoRule> {
        let function = self.table(sections)?.find(svma)?;
        if function.is_first() {
            return Some(GoRule::Rule(rules.intern(Rule::new(RuleKind::End, SP, 0))));
        }
        if function.switches_stacks() {
            return Some(GoRule::Rule(Rules::OTHER_STACK));
        }
        if function.writes_stack_pointer() {
            return Some(GoRule::Analyze);
        }
        let size = i64::from(function.stack_size(svma)?);
        Some(GoRule::Rule(rules.intern_full(frame(size))))
    }

    /// Start of the function that contains `svma`.
    pub fn start(&mut self, svma: u64, sections: &mut dyn Sections) -> Option<u64> {
        self.table(sections)?.find(svma).map(|function| function.start)
    }
}

/// The rule where the stack pointer was moved by so many bytes. A function that moved it at all has saved the frame pointer,
/// on x86-64 just below the return address, on aarch64 just below the stack pointer, which the link register was saved at
/// (`cmd/internal/obj/x86/obj6.go` and `cmd/internal/obj/arm64/obj7.go`, Go 1.24).
fn frame(size: i64) -> FullRule {
    let (cfa, ra, fp) = match LINK {
        None => (
            size - PUSHED_RETURN,
            CallerRegister::AtCfa(PUSHED_RETURN),
            2 * PUSHED_RETURN,
        ),
        Some(_) if size == 0 => (0, CallerRegister::Same, 0),
        Some(_) => (size, CallerRegister::AtCfa(-size), -size - 8),
    };
    FullRule {
        cfa: Cfa::Reg(SP as u8, cfa),
        ra,
        regs: Vec::from_iter((size > 0).then_some((FP as u8, CallerRegister::AtCfa(fp)))),
        signal: false,
        code: false,
    }
}

fn read(sections: &mut dyn Sections) -> Option<GoTable> {
    let table = GO_TABLE_SECTIONS.iter().find_map(|name| sections.section(name))?;
    let mut known = GoSections {
        table: table.svma,
        ..GoSections::default()
    };
    // Up to Go 1.25 it says itself where the code is.
    if let Some(parsed) = GoTable::parse(table.bytes.clone(), &known) {
        return Some(parsed);
    }
    let data = sections.section(".go.module").map_or(Vec::new(), |data| data.bytes);
    known.data = &data;
    if let Some(parsed) = GoTable::parse(table.bytes.clone(), &known) {
        return Some(parsed);
    }
    let text = sections.section(".text")?;
    known.text = (text.svma, text.bytes.len() as u64);
    GoTable::parse(table.bytes, &known)
}

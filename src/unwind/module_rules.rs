//! The unwind rules of one file, from all that says something about its code.

use super::cfi::{CfiContext, FrameTables};
use super::code_rules::FunctionRules;
use super::go_frames::{GoFrames, GoRule};
use super::rule::RuleId;
use super::rules::Rules;
use super::{Landmarks, Sections};
use crate::arch;

/// Data about one file.
pub(super) struct ModuleRules {
    pub sections: Box<dyn Sections>,
    pub tables: FrameTables,
    pub code: FunctionRules,
    go: GoFrames,
    pub landmarks: Landmarks,
}

impl ModuleRules {
    pub fn new(sections: Box<dyn Sections>) -> ModuleRules {
        ModuleRules {
            sections,
            tables: FrameTables::default(),
            code: FunctionRules::default(),
            go: GoFrames::default(),
            landmarks: Landmarks::default(),
        }
    }

    /// Start of the function at `svma`, by its tables.
    pub fn start(&mut self, svma: u64) -> Option<u64> {
        let by_table = self.tables.start(svma, &mut *self.sections);
        by_table.or_else(|| self.go.start(svma, &mut *self.sections))
    }

    /// The rule at `svma`.
    pub fn rule(&mut self, svma: u64, rules: &mut Rules, context: &mut CfiContext) -> RuleId {
        let l = &self.landmarks;
        for (ranges, id) in [
            (&l.switch, Rules::SWITCH),
            (&l.stub, Rules::STUB),
            (&l.first, Rules::FIRST),
        ] {
            if Landmarks::has(ranges, svma) {
                return id;
            }
        }
        self.real_rule(svma, rules, context)
    }

    /// Is this the code that signal handlers return to? Its table, if it has one, does not say where all registers are.
    pub fn is_signal_return(&mut self, svma: u64) -> bool {
        let section = self.code.section(svma, &mut *self.sections);
        section.is_some_and(|s| arch::is_signal_return(&s.bytes, svma.wrapping_sub(s.svma) as usize))
    }

    /// The rule at `svma`, regardless of landmarks.
    pub fn real_rule(&mut self, svma: u64, rules: &mut Rules, context: &mut CfiContext) -> RuleId {
        let id = match self.go.rule(svma, &mut *self.sections, rules) {
            // Go has a table of it like of any other function.
            Some(_) if self.is_signal_return(svma) => return rules.signal_return(),
            Some(GoRule::Rule(id)) => return id,
            Some(GoRule::Analyze) => None,
            None => self.tables.rule(svma, &mut *self.sections, rules, context),
        };
        if id.is_none_or(|id| !arch::SIGNAL_TABLES_COMPLETE && rules.get(id).signal) && self.is_signal_return(svma) {
            return rules.signal_return();
        }
        if let Some(id) = id {
            return id;
        }
        self.code
            .rule(svma, false, &mut *self.sections, &mut self.tables, rules)
            .unwrap_or(Rules::NONE)
    }
}

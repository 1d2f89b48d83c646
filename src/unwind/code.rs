//! Functions without tables.

use super::cfi::Tables;
use super::rule::{RuleId, Rules};
use super::{Section, Sections};

/// Executable sections of one file, and what was learned from their instructions.
#[derive(Default)]
pub struct Code {
    sections: Vec<Section>,
    misses: u32,
}

/// Questions for code outside all sections before we stop asking.
const MOST_MISSES: u32 = 64;

impl Code {
    /// The executable section at `svma`.
    pub fn section(&mut self, svma: u64, source: &mut dyn Sections) -> Option<&Section> {
        if let Some(i) = self.sections.iter().position(|s| s.contains(svma)) {
            return self.sections.get(i);
        }
        if self.misses >= MOST_MISSES {
            return None;
        }
        match source.code(svma).filter(|s| s.contains(svma)) {
            Some(section) => self.sections.push(section),
            None => {
                self.misses += 1;
                return None;
            }
        }
        self.sections.last()
    }

    pub fn rule(&mut self, _svma: u64, _s: &mut dyn Sections, _t: &mut Tables, _rules: &mut Rules) -> Option<RuleId> {
        None
    }
}

/// Do these bytes end with a call instruction? `E8 rel32`, or `FF /2` with any operand (Intel SDM volume 2, CALL).
pub fn ends_with_call(bytes: &[u8]) -> bool {
    let n = bytes.len();
    let at = |back: usize| n.checked_sub(back).map(|i| bytes[i]);
    if at(5) == Some(0xe8) {
        return true;
    }
    (2..=7).any(|len| {
        let (Some(0xff), Some(modrm)) = (at(len), at(len - 1)) else {
            return false;
        };
        let sib = usize::from(modrm & 7 == 4);
        let operand = match modrm >> 6 {
            0 if modrm & 7 == 5 => 4,
            0 if sib == 1 && len >= 3 && at(len - 2).is_some_and(|s| s & 7 == 5) => 5,
            0 => sib,
            1 => 1 + sib,
            2 => 4 + sib,
            _ => 0,
        };
        modrm >> 3 & 7 == 2 && len == 2 + operand
    })
}

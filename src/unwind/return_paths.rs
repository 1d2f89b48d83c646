//! The rules by which code without tables returns, found by following it from where it is, and cached.

use rustc_hash::{FxHashMap, FxHasher};
use std::hash::Hasher;

use super::call_edges::{CallEdge, ProcessCode};
use super::instruction_analysis::{PathCode, return_rules};
use super::rule::RuleId;
use super::rules::UnwindStep;
use super::{CodeMap, UnwindState, Unwinder, code_address, locate};
use crate::arch::{LINK, Regs};
use crate::frame::NativeFrame;

/// Places of which the rules are cached; past this they are found again.
const MAX_PLACES: usize = 1 << 14;
/// What following code to its return counts as, in instructions.
const PATH_WORK: usize = 128;
/// Bytes of code that distinguish a place in memory without a file from the same one at another time or in another process.
const FINGERPRINT: usize = 64;

/// A place (file and svma, or avma and hash of the code there), and whether the code was interrupted there.
type Place = (u32, u64, u64, bool);

/// The rules of the places examined so far.
#[derive(Default)]
pub(super) struct ReturnPaths(FxHashMap<Place, Vec<RuleId>>);

impl Unwinder {
    /// The caller's registers, if following the code up to its return leads to a call that can have led here.
    pub(super) fn return_path(&mut self, state: &mut UnwindState, frame: &NativeFrame) -> Option<Regs> {
        if !state.code.is_code(state.regs.ip) {
            return None;
        }
        let sp = state.regs.sp();
        let leaf = LINK.is_some() && state.interrupted;
        for id in self.return_path_rules(state.code, state.regs.ip, state.interrupted) {
            let (rule, mut regs) = (self.rules.get(id), state.regs);
            let UnwindStep::Caller { cfa } = self.rules.apply(&rule, &mut regs, &mut state.memory) else {
                continue;
            };
            regs.ip = code_address(state.code, regs.ip);
            if (cfa > sp || cfa == sp && leaf)
                && self.call_edge(state.code, regs.ip, frame.lookup) > CallEdge::Impossible
            {
                return Some(regs);
            }
        }
        None
    }

    fn return_path_rules(&mut self, map: &dyn CodeMap, ip: u64, interrupted: bool) -> Vec<RuleId> {
        let mut code = ProcessCode { unwinder: self, map };
        let place = match locate(map, ip) {
            Some((module, svma)) => (module.0, svma, 0, interrupted),
            None => {
                let mut bytes = [0; FINGERPRINT];
                let len = code.read(ip, &mut bytes);
                let mut hash = FxHasher::default();
                hash.write(&bytes[..len]);
                (u32::MAX, ip, hash.finish(), interrupted)
            }
        };
        if let Some(known) = code.unwinder.return_paths.0.get(&place) {
            return known.clone();
        }
        if code.unwinder.work == 0 {
            return Vec::new();
        }
        code.unwinder.work = code.unwinder.work.saturating_sub(PATH_WORK);
        let found = return_rules(&mut code, ip, interrupted);
        let ids: Vec<RuleId> = found.into_iter().map(|full| self.rules.intern_full(full)).collect();
        if self.return_paths.0.len() >= MAX_PLACES {
            self.return_paths.0.clear();
        }
        self.return_paths.0.insert(place, ids.clone());
        ids
    }
}

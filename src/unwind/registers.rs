//! The registers in each frame of a stack.

use super::{StackCache, UnwindState, Unwinder};
use crate::arch::{CALLEE_SAVED, Regs};
use crate::code_map::CodeMap;
use crate::event::StackBytes;

impl Unwinder {
    /// Stack pointer of each frame, innermost first, and the values that its caller-independent registers have in it: those that
    /// functions keep for their callers. Frames whose caller was found by other means than a rule are left out.
    pub fn kept_registers(&mut self, code: &dyn CodeMap, regs: &Regs, stack: &StackBytes) -> Vec<(u64, Vec<u64>)> {
        let (mut cache, mut frames) = (StackCache::recording(), Vec::new());
        let mut state = UnwindState::new(code, regs, stack, 0);
        // Why the stack ends is known already.
        let _ = self.walk(&mut state, Some(&mut cache), &mut frames);
        let kept = |regs: &Regs| {
            let known = regs.known & CALLEE_SAVED;
            let values = regs.gpr.iter().enumerate();
            values
                .filter(|(i, _)| known >> i & 1 == 1)
                .map(|(_, value)| *value)
                .collect()
        };
        cache.recorded().map(|(frame, regs)| (frame.sp, kept(regs))).collect()
    }
}

//! The native stack of a suspended greenlet.

use super::OtherTasks;
use super::greenlets::SuspendedGreenlet;
use crate::process::memory::Memory;

/// Maximum number of words read of a stack: more than gevent's compiled functions need between the program's code and the switch.
const MAX_WORDS: u64 = 512;

impl OtherTasks {
    /// Words of a suspended greenlet's stack, from its innermost frame on, as far as they can be read.
    pub fn stack_words(memory: &dyn Memory, greenlet: &SuspendedGreenlet) -> impl Iterator<Item = u64> {
        let stack = greenlet.stack(memory);
        let length = greenlet.stack_stop().saturating_sub(stack.start);
        let words = (0..MAX_WORDS.min(length / 8)).map(move |n| stack.start.checked_add(8 * n));
        words.map_while(move |at| stack.u64(at?))
    }
}

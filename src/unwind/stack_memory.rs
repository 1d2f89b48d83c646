//! The stack copy for the unwinder: words, or the reason why one cannot be read.

use crate::event::StackBytes;
use crate::truncation::Truncation;

/// The stack copy, and why words of it could not be read.
pub struct StackMemory<'a> {
    pub stack: &'a StackBytes,
    /// Why a register's saved value could not be read; the reason if it turns out to be needed.
    pub lost: Option<Truncation>,
}

impl<'a> StackMemory<'a> {
    /// No frame is this large: a word this far past the copy lies on another stack.
    const FAR: u64 = 64 << 20;

    pub fn new(stack: &'a StackBytes) -> Self {
        StackMemory { stack, lost: None }
    }

    #[inline]
    pub fn word(&self, avma: u64) -> Result<u64, Truncation> {
        self.stack.word(avma).ok_or_else(|| self.why(avma))
    }

    /// The reason why the word at `avma` cannot be read.
    #[cold]
    pub fn why(&self, avma: u64) -> Truncation {
        let end = self.stack.end();
        if avma >= self.stack.base && avma < end {
            if end - avma >= 8 {
                Truncation::StackHole
            } else {
                Truncation::StackTooDeep
            }
        } else if avma >= end && avma - end < Self::FAR {
            Truncation::StackTooDeep
        } else {
            Truncation::ForeignStack
        }
    }

    pub fn why_unknown(&self) -> Truncation {
        self.lost.unwrap_or(Truncation::BadUnwindInfo)
    }
}

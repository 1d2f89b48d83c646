//! The stack copy as the unwinder reads it: words, or the reason why not.

use crate::sample::{Cut, StackBytes};

/// The stack copy, and why words of it could not be had.
pub struct Memory<'a> {
    pub stack: &'a StackBytes,
    /// Why a register's saved value could not be read; the reason if it turns out to be needed.
    pub lost: Option<Cut>,
}

impl<'a> Memory<'a> {
    /// No frame is so large: a word this far past the copy lies on another stack.
    const FAR: u64 = 64 << 20;

    pub fn new(stack: &'a StackBytes) -> Self {
        Memory { stack, lost: None }
    }

    #[inline]
    pub fn word(&self, avma: u64) -> Result<u64, Cut> {
        self.stack.word(avma).ok_or_else(|| self.why(avma))
    }

    /// The reason why the word at `avma` cannot be read.
    #[cold]
    pub fn why(&self, avma: u64) -> Cut {
        let end = self.stack.end();
        if avma >= self.stack.base && avma < end {
            if end - avma >= 8 {
                Cut::StackHole
            } else {
                Cut::StackTooDeep
            }
        } else if avma >= end && avma - end < Self::FAR {
            Cut::StackTooDeep
        } else {
            Cut::OtherStack
        }
    }

    pub fn why_unknown(&self) -> Cut {
        self.lost.unwrap_or(Cut::BadUnwindInfo)
    }
}

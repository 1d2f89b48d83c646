//! Reads the files of Python's `pstats`, which `cProfile`, `profile`, `profiling.sampling` and [`crate::export::pstats`]
//! write.
//!
//! Such a file is a table: of each function the number of calls, its own time and the time with what it called, and the
//! same for each pair of caller and callee. Whole stacks are not in it. The tree of the profile is an estimate of them,
//! made such that what the table states stays as it is: see `tree.rs`.
//!
//! ```text
//! {(file, line, name): (primitive calls, calls, own time, cumulative time, {(file, line, name): of this caller})}
//! ```
//!
//! Of a caller it has `(calls, primitive calls, own time, cumulative time)` of the callee (`cProfile`) or only a number
//! of calls (`profile`). Times are seconds.

use std::fmt;

use super::model::Profile;

mod marshal;
mod table;
mod tree;

/// Second value of a file that nativeprof writes of a sampled profile: what other files have as calls are samples there.
/// It is followed by the name of the clock, if known. Python's readers ignore it.
pub const SAMPLES_MARK: &str = "nativeprof samples";

/// Module of functions written in C, as our own tracer has it: such a file does not name it.
pub const BUILTIN: &str = "[builtin]";

/// Why a file could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PstatsError {
    /// Byte of the file where it was noticed.
    pub at: usize,
    /// What is wrong there.
    pub reason: String,
}

impl fmt::Display for PstatsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a file of pstats: {} at byte {}", self.reason, self.at)
    }
}

impl std::error::Error for PstatsError {}

/// Whether the file begins as those of pstats do: a dictionary whose first key is a tuple, or an empty one. (JSON begins
/// with the same byte, but has other ones after it.)
pub fn is_pstats(bytes: &[u8]) -> bool {
    let code = |at: usize| bytes.get(at).map(|byte| byte & 0x7f);
    code(0) == Some(b'{') && matches!(code(1), Some(b'(' | b')' | b'0'))
}

/// The profile of such a file: its count is `calls` (or `samples`), and the time is `wall` (or `cpu`), in ns.
///
/// # Errors
/// It is not such a file, or damaged.
pub fn read(bytes: &[u8]) -> Result<Profile, PstatsError> {
    table::read(bytes).map(|table| tree::profile(&table))
}

#[cfg(test)]
mod tests;

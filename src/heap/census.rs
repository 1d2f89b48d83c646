//! Looks at the memory of a process once: the order of the steps.

use super::mappings::{Account, Claim, Part, divide};
use super::present::Present;
use super::stacks;
use crate::error::Result;
use crate::event::Pid;
use crate::process::smaps::Smaps;

/// What the memory of a process is made of.
#[derive(Debug, Default)]
pub struct Census {
    pub account: Account,
    /// What could not be told, and why.
    pub notes: Vec<String>,
}

impl Census {
    /// Reads the memory of a process while it runs.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn take(pid: Pid) -> Result<Census> {
        let smaps = Smaps::of(pid)?;
        let present = Present::of(pid, &smaps)?;
        let mut notes = Vec::new();
        if !present.is_complete {
            notes.push("too many ranges of pages are in memory to look at all of them: parts may be too small".into());
        }
        let stacks = stacks::find(pid, &smaps).into_iter();
        let claims: Vec<Claim> = stacks.map(|range| Claim::whole(range, Part::Stacks)).collect();
        Ok(Census {
            account: divide(&smaps, &present, claims),
            notes,
        })
    }
}

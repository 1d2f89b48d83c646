//! Looks at the memory of a process once: the order of the steps.

use std::time::Duration;

use super::glibc::{self, Glibc};
use super::mappings::{Account, Claim, Part, divide};
use super::present::Present;
use super::stacks;
use crate::error::Result;
use crate::event::Pid;
use crate::process::smaps::Smaps;
use crate::process::system::{LiveSystem, ProcessMemory};
use crate::sys::clock;

/// How often the C heap is looked for: the process may have changed its mappings since they were read.
const ATTEMPTS: usize = 3;

/// How much of a process is read.
#[derive(Clone, Copy, Debug)]
pub struct CensusOptions {
    /// Time for each of the walks through Python's heap and the C heap.
    pub budget: Duration,
}

/// What the memory of a process is made of.
#[derive(Debug, Default)]
pub struct Census {
    pub account: Account,
    /// `None`: the C library is another one.
    pub glibc: Option<Glibc>,
    /// What could not be told, and why.
    pub notes: Vec<String>,
}

impl Census {
    /// Reads the memory of a process while it runs.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn take(pid: Pid, options: &CensusOptions) -> Result<Census> {
        let mut census = Census::attempt(pid, options)?;
        for _ in 1..ATTEMPTS {
            if census.glibc.is_some() || !census.has_c_heap() {
                break;
            }
            census = Census::attempt(pid, options)?;
        }
        Ok(census)
    }

    /// Whether there is a heap that was not divided.
    fn has_c_heap(&self) -> bool {
        self.account.parts.contains_key(&Part::CHeap)
    }

    fn attempt(pid: Pid, options: &CensusOptions) -> Result<Census> {
        let smaps = Smaps::of(pid)?;
        let present = Present::of(pid, &smaps)?;
        let memory = ProcessMemory(&LiveSystem, pid);
        let mut notes = Vec::new();
        if !present.is_complete {
            notes.push("too many ranges of pages are in memory to look at all of them: parts may be too small".into());
        }
        let stacks = stacks::find(pid, &smaps).into_iter();
        let mut claims: Vec<Claim> = stacks.map(|range| Claim::whole(range, Part::Stacks)).collect();
        let target = glibc::Target {
            smaps: &smaps,
            present: &present,
            memory: &memory,
            deadline: clock::now().saturating_add(options.budget.as_nanos().try_into().unwrap_or(u64::MAX)),
        };
        let glibc = match glibc::read(&target, &mut claims) {
            Ok(glibc) => Some(glibc),
            Err(why) => {
                notes.push(format!("the C heap is not divided: {why}"));
                None
            }
        };
        Ok(Census {
            account: divide(&smaps, &present, claims),
            glibc,
            notes,
        })
    }
}

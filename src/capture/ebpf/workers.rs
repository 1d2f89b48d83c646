//! Native workers: the programs that note who gives work to them. How that is found, and why so, says sample.bpf.c.

use aya::Ebpf;
use aya::programs::RawTracePoint;

use super::{bpf_error, object};
use crate::error::Result;

const LOAD: &str = "cannot load the BPF programs for native workers";
/// Workers, and parts of stacks, that are known at the same time; the one that was not used for the longest time is forgotten.
pub const MAX_WORKERS: u32 = 16384;

/// Loads and attaches the programs.
///
/// # Errors
/// The kernel refuses them.
pub fn attach(bpf: &mut Ebpf) -> Result<()> {
    for (name, event) in [
        ("worker_woken", "sched_waking"),
        ("thread_created", "sched_process_fork"),
    ] {
        let program: &mut RawTracePoint = object::program(bpf, name)?;
        program.load().map_err(|e| bpf_error(LOAD, e))?;
        program.attach(event).map_err(|e| bpf_error(LOAD, e))?;
    }
    Ok(())
}

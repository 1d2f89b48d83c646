//! Native workers: the programs that note who gives work to them. How that is found, and why so, says sample/dispatchers.h.

use aya::Ebpf;
use aya::maps::{HashMap as BpfHash, MapData};
use aya::programs::RawTracePoint;

use super::errors::bpf_error;
use super::object;
use crate::cpython_layout::TargetLayout;
use crate::error::Result;
use crate::event::Pid;

const LOAD: &str = "cannot load the BPF programs for native workers";
/// Workers, and parts of stacks, that are known at the same time; the one that was not used for the longest time is forgotten.
pub const MAX_WORKERS: u32 = 16384;

/// `CHUNK_BITS` of sample.bpf.c.
const CHUNK_BITS: u32 = 16;
/// Parts of the stack of a thread that exists already, from its outer end on, and such threads of one process, at most.
const CHUNKS: u32 = 8;
const MAX_THREADS: usize = 512;

/// `INHERITED` of sample.bpf.c.
const INHERITED: usize = if cfg!(target_arch = "x86_64") { 6 } else { 11 };

/// `struct worker` of the program as words: `struct dispatcher`, then `inherited`.
type Worker = [u64; DISPATCHER + INHERITED];
const DISPATCHER: usize = 3;

/// The maps of these programs.
pub struct WorkerMaps {
    /// `PYTHON_STACKS`.
    stacks: BpfHash<MapData, [u32; 2], [u64; 3]>,
    /// `WORKERS`.
    workers: BpfHash<MapData, u32, Worker>,
}

impl WorkerMaps {
    /// Adds what is known of the threads of a process that exist already: otherwise those with Python frames are known from
    /// their first sample on, and others from their creation on.
    pub fn add(&mut self, pid: Pid, layout: &TargetLayout) {
        for (tid, thread_pointer) in layout.python_threads.iter().take(MAX_THREADS) {
            // The descriptor lies above the stack, but the main thread's elsewhere.
            let end = if *tid == pid { layout.stack_end } else { *thread_pointer };
            let last = (end >> CHUNK_BITS) as u32;
            for chunk in last.saturating_sub(CHUNKS)..=last {
                // What is there is more recent.
                let _ = self
                    .stacks
                    .insert([pid, chunk], [*thread_pointer, 0, u64::from(*tid)], object::NO_EXIST);
            }
        }
        for (tid, words) in &layout.inherited {
            let mut worker = self.workers.get(tid, 0).unwrap_or([0; DISPATCHER + INHERITED]);
            let inherited = &mut worker[DISPATCHER..];
            if inherited.iter().all(|register| *register == 0) {
                for (register, word) in inherited.iter_mut().zip(words) {
                    *register = *word;
                }
                // The kernel refuses only what does not matter: there is no room.
                let _ = self.workers.insert(tid, worker, 0);
            }
        }
    }
}

/// Loads and attaches the programs.
///
/// # Errors
/// The kernel refuses them.
pub fn attach(bpf: &mut Ebpf) -> Result<WorkerMaps> {
    for (name, event) in [
        ("worker_woken", "sched_waking"),
        ("thread_created", "sched_process_fork"),
    ] {
        let program: &mut RawTracePoint = object::program(bpf, name)?;
        program.load().map_err(|e| bpf_error(LOAD, e))?;
        program.attach(event).map_err(|e| bpf_error(LOAD, e))?;
    }
    let map_error = |e| bpf_error(LOAD, e);
    Ok(WorkerMaps {
        stacks: object::take_map(bpf, "PYTHON_STACKS")?.try_into().map_err(map_error)?,
        workers: object::take_map(bpf, "WORKERS")?.try_into().map_err(map_error)?,
    })
}

//! Probes (USDT) at which a process publishes the allocations that it samples.

use std::fs::File;
use std::sync::Arc;

use super::Pid;

/// Name of the provider of these probes. It is not final upstream.
pub const ALLOCATION_PROVIDER: &str = "otel_memory";
/// Arguments of a probe that are used, at most.
pub const MAX_ARGUMENTS: usize = 3;

/// Probes of one process that are attached to, at most.
pub const MAX_PROBES: usize = 256;

/// Where a probe has an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeArgument {
    pub place: ArgumentPlace,
    /// 1, 2, 4 or 8 bytes.
    pub size: u8,
    pub is_signed: bool,
}

/// A value, or where it is. Registers are words of the kernel's `struct pt_regs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentPlace {
    Constant(i64),
    Register(u8),
    /// In memory, at the sum of a register, an offset, and another register times a power of two.
    Memory {
        register: u8,
        offset: i64,
        index: Option<(u8, u8)>,
    },
}

/// What a probe publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeEvent {
    /// A block was sampled: its address, its size, and the bytes that it stands for.
    Allocation([ProbeArgument; 3]),
    /// A sampled block is freed: its address.
    Free(ProbeArgument),
}

/// A probe in a file that a process has mapped. Offsets are those in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocationProbe {
    pub event: ProbeEvent,
    /// Address of its instruction in the process.
    pub avma: u64,
    pub offset: u64,
    /// Of the counter of those who observe it; 0: it has none.
    pub semaphore: u64,
    pub file: ProbedFile,
}

/// An open file, equal to itself alone.
#[derive(Clone, Debug)]
pub struct ProbedFile(pub Arc<File>);

impl PartialEq for ProbedFile {
    fn eq(&self, other: &ProbedFile) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ProbedFile {}

/// A block that a process has sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledBlock {
    /// avma
    pub address: u64,
    /// Bytes that were requested.
    pub size: u64,
    /// Bytes that it stands for.
    pub bytes: u64,
}

/// The end of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreedBlock {
    pub pid: Pid,
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    /// avma
    pub address: u64,
}

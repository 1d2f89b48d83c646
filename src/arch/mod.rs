//! Facts of one CPU: registers, their DWARF numbers, how the kernel stores user registers, and what instructions do. A new
//! CPU is one file here, with a directory, and one line below; what follows from its instructions for unwinding is in
//! `unwind/instruction_analysis/`.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("nativeprof knows only x86-64 and aarch64 so far: add src/arch/<cpu>.rs");

/// Reads memory of this process: fills the buffer with the bytes at an address, or returns false.
pub type ReadMemory<'a> = &'a dyn Fn(u64, &mut [u8]) -> bool;

/// Which system calls return another result when a stop cuts them short, although what the kernel ends is restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutShort {
    Always,
    /// If its descriptor, this one, is a pipe, socket or device that lets a writer wait: a part is written.
    Write(u64),
    /// If its descriptor, this one, is a device, from which a large read is ended early.
    Read(u64),
}

/// Where execution continues after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Next,
    /// At the target or at the next instruction.
    ConditionalJump,
    /// At the target.
    Jump,
    /// At an address that is computed.
    IndirectJump,
    /// In another function, which returns to the next instruction.
    Call,
    Return,
    /// A trap, or no instruction.
    Trap,
}

/// One instruction of machine code, as far as control flow goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub address: u64,
    pub length: u8,
    pub flow: Flow,
    /// Of a direct jump or call.
    pub target: Option<u64>,
}

impl Instruction {
    /// Address of the instruction that follows in memory.
    pub fn next(&self) -> u64 {
        self.address.wrapping_add(self.length.into())
    }
}

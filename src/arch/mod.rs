//! Facts of one CPU: registers, their DWARF numbers, and how the kernel stores user registers. A new CPU is one file
//! here and one line below.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("nativeprof knows only x86-64 so far: add src/arch/<cpu>.rs");

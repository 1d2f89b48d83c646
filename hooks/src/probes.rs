//! Probes (USDT) at which sampled blocks are published to observers outside of the process, as OpenTelemetry's eBPF profiler
//! expects them: `alloc(address, size, weighted_bytes)` and `free(address)`, the latter for blocks of the former only.
//!
//! A probe is an instruction that does nothing, and a note in the file that says where it is and where its arguments are. An
//! observer raises a counter (semaphore) and has the kernel put a breakpoint in its place. The instruction is one of one byte on
//! x86-64: that of five bytes, which Linux 6.18 to 7.1 replace by a call, would overwrite what a function keeps below its
//! stack pointer.

use std::arch::asm;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::{Pointer, SampledBlock};

/// The name of the provider, as a literal: it is not final upstream.
macro_rules! provider {
    () => {
        "otel_memory"
    };
}

/// Name of the provider of the probes at which sampled blocks are published.
pub const PROBE_PROVIDER: &str = provider!();

/// Observers of each probe, counted by the kernel.
// SAFETY: an ordinary section for variables, here and below.
#[unsafe(link_section = ".probes")]
static ALLOC_OBSERVERS: AtomicU16 = AtomicU16::new(0);
// SAFETY: as above.
#[unsafe(link_section = ".probes")]
static FREE_OBSERVERS: AtomicU16 = AtomicU16::new(0);

/// The text of an argument of eight bytes that is in a register, the operand of this name.
#[cfg(target_arch = "x86_64")]
macro_rules! in_register {
    ($operand:literal) => {
        concat!("8@%{", $operand, "}")
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! in_register {
    ($operand:literal) => {
        concat!("8@{", $operand, "}")
    };
}

/// The instruction of a probe and its note. Arguments are in registers, whose names the assembler fills in.
macro_rules! probe {
    ($name:literal, $observers:path, $arguments:expr, $($operand:tt)*) => {
        asm!(
            "990: nop",
            ".pushsection .note.stapsdt, \"\", \"note\"",
            ".balign 4",
            ".4byte 992f-991f, 994f-993f, 3",
            "991: .asciz \"stapsdt\"",
            "992: .balign 4",
            "993: .8byte 990b",
            ".8byte _.stapsdt.base",
            ".8byte {observers}",
            concat!(".asciz \"", provider!(), "\""),
            concat!(".asciz \"", $name, "\""),
            concat!(".asciz \"", $arguments, "\""),
            "994: .balign 4",
            ".popsection",
            // What tells observers by how much the file was moved after it was linked: one for all notes in it.
            ".ifndef _.stapsdt.base",
            ".pushsection .stapsdt.base, \"aG\", \"progbits\", .stapsdt.base, comdat",
            ".weak _.stapsdt.base",
            ".hidden _.stapsdt.base",
            "_.stapsdt.base: .space 1",
            ".size _.stapsdt.base, 1",
            ".popsection",
            ".endif",
            $($operand)*
            observers = sym $observers,
            options(nostack, preserves_flags),
        )
    };
}

/// A block was given that is sampled.
pub fn allocated(block: Pointer, sampled: SampledBlock) {
    if ALLOC_OBSERVERS.load(Ordering::Relaxed) == 0 {
        return;
    }
    let size = sampled.size as f64;
    // Samples of the size 0 stand for 0 bytes.
    let chance = -(-size.max(1.0) / sampled.mean.max(1) as f64).exp_m1();
    let weighted = (size / chance).round() as u64;
    // SAFETY: the instruction does nothing.
    unsafe {
        probe!(
            "alloc",
            ALLOC_OBSERVERS,
            concat!(in_register!("block"), " ", in_register!("size"), " ", in_register!("weighted")),
            block = in(reg) block,
            size = in(reg) sampled.size,
            weighted = in(reg) weighted,
        );
    }
}

/// A sampled block is about to be freed.
pub fn freed(block: Pointer) {
    if FREE_OBSERVERS.load(Ordering::Relaxed) == 0 {
        return;
    }
    // SAFETY: the instruction does nothing.
    unsafe {
        probe!("free", FREE_OBSERVERS, in_register!("block"), block = in(reg) block,);
    }
}

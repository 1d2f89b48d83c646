//! Limits that the BPF program (capture/ebpf/sample.bpf.c) and its counterparts in Rust share, so that all backends see
//! the same frames and stacks. A test compares them with the program's `#define`s.

/// Maximum size of a stack copy, bytes; the BPF program splits longer stacks into several records.
pub const MAX_STACK: u64 = 1 << 20;
/// Maximum size of the copy of a main thread's or deep stack, in multiples of [`MAX_STACK`].
pub const MAX_STACKS: u64 = 8;
/// Number of Python frames from which on a stack may be longer than [`MAX_STACK`].
pub const DEEP_FRAMES: usize = 1000;
/// Maximum number of unreadable pages in a stack copy before the end of a hole is searched for.
pub const MAX_FAULTS: usize = 64;
/// The same after each such hole.
pub const FAULTS_OF_REST: usize = 16;
/// Maximum number of pages that are tried in one search.
pub const PROBES: usize = 48;
/// Maximum distance of two of them, bytes.
pub const MAX_LEAP: u64 = 1 << 18;
/// Maximum number of Python frames walked in each chain.
pub const MAX_FRAMES: usize = 16384;
/// Maximum number of CFrames walked in each chain.
pub const MAX_CFRAMES: usize = 16384;
/// Maximum number of thread states walked per thread, besides its own (subinterpreters).
pub const MAX_NESTED: usize = 64;
/// Maximum number of interpreter locks of one process that the BPF program knows.
pub const MAX_LOCKS: usize = 64;
/// Maximum distance between two local variables of the bytecode loop, bytes.
pub const MAX_LOCALS_DISTANCE: u64 = 512;
/// `owner` values from here on are entry frames (Include/internal/pycore_frame.h, v3.12: FRAME_OWNED_BY_CSTACK;
/// pycore_interpframe_structs.h, v3.15.0).
pub const SHIM: u8 = 3;
/// Maximum size of a string object that is copied with a code object, bytes.
pub const MAX_TEXT: usize = 0x7ff;
/// Maximum size of the record of an active span, bytes.
pub const MAX_SPAN: usize = 0x1ff;
/// Maximum size of what is copied of the record of an OpenTelemetry context, bytes: OTEP 4947 recommends 640 at most.
pub const MAX_CONTEXT: usize = 0x3ff;
/// Maximum size of a line table that is copied with a code object, bytes.
pub const MAX_LINES: usize = 0x7fff;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{MAIN_STACKS, RED_ZONE, USER_END};
    use crate::event::PAGE;

    const PROGRAM: &str = concat!(
        include_str!("capture/ebpf/sample/cpu.h"),
        include_str!("capture/ebpf/sample/records.h")
    );

    /// The value of a `#define` in the program: a decimal or hexadecimal number, or `(A << B)`.
    fn defined(name: &str) -> Option<u64> {
        let line = |line: &'static str| line.strip_prefix("#define ")?.strip_prefix(name)?.strip_prefix(' ');
        // What differs between CPUs is defined for x86-64 first.
        let mut found = PROGRAM.lines().filter_map(line);
        let text = if cfg!(target_arch = "x86_64") {
            found.next()
        } else {
            found.next_back()
        }?;
        let text = text.split("//").next()?.trim().trim_matches(['(', ')']);
        let number = |text: &str| {
            let text = text.trim_end_matches(['U', 'L']);
            match text.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).ok(),
                None => text.parse().ok(),
            }
        };
        match text.split_once(" << ") {
            Some((value, shift)) => Some(number(value)? << number(shift).or_else(|| defined(shift))?),
            None => number(text),
        }
    }

    #[test]
    fn limits_match_the_bpf_program() {
        for (name, value) in [
            ("PAGE", PAGE),
            ("MAX_STACK", MAX_STACK),
            ("MAX_STACKS", MAX_STACKS),
            ("DEEP_FRAMES", DEEP_FRAMES as u64),
            ("MAX_FAULTS", MAX_FAULTS as u64),
            ("FAULTS_OF_REST", FAULTS_OF_REST as u64),
            ("PROBES", PROBES as u64),
            ("MAX_LEAP", MAX_LEAP),
            ("MAIN_STACKS", MAIN_STACKS),
            ("USER_END", USER_END),
            ("RED_ZONE", RED_ZONE),
            ("MAX_FRAMES", MAX_FRAMES as u64),
            ("MAX_CFRAMES", MAX_CFRAMES as u64),
            ("MAX_NESTED", MAX_NESTED as u64),
            ("MAX_GILS", MAX_LOCKS as u64),
            ("MAX_LOCALS_DISTANCE", MAX_LOCALS_DISTANCE),
            ("SHIM", SHIM.into()),
            ("MAX_TEXT", MAX_TEXT as u64),
            ("MAX_LINES", MAX_LINES as u64),
            ("MAX_SPAN", MAX_SPAN as u64),
            ("MAX_CONTEXT", MAX_CONTEXT as u64),
        ] {
            assert_eq!(defined(name), Some(value), "{name}");
        }
    }
}

#![no_main]
//! Reads a speedscope file.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| nativeprof_fuzz::import("speedscope", bytes));

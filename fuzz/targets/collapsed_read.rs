#![no_main]
//! Reads collapsed stacks.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| nativeprof_fuzz::import("collapsed", bytes));

#![no_main]
//! Reads the output of `perf script`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| nativeprof_fuzz::import("perf script", bytes));

#![no_main]
//! Reads a profile of the Firefox Profiler.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| nativeprof_fuzz::import("firefox", bytes));

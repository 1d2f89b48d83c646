#![no_main]
//! Reads a page of ours.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| nativeprof_fuzz::import("html", bytes));

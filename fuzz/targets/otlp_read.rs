#![no_main]
//! Reads a file of OTLP profiles.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| nativeprof_fuzz::import("otlp", bytes));

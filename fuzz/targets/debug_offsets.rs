#![no_main]
//! The input as a whole file, and as the table at the head of `_PyRuntime` in a good one.

use libfuzzer_sys::fuzz_target;
use nativeprof::interp;
use nativeprof_fuzz::module;

/// `char _PyRuntime[584] = "xdebugpy..."`, compiled; see `fuzz/seeds`.
const GOOD: &[u8] = include_bytes!("../small/runtime.so");

fn look(file: Vec<u8>) -> bool {
    let file = module(file);
    interp::find_tls(&file);
    let runtime = interp::find_runtime(&file);
    let layout = runtime.as_ref().and_then(|r| r.layout);
    // The walker in the kernel reads a frame in one go.
    assert!(layout.is_none_or(|l| l.frame_size <= 127));
    runtime.is_some()
}

fuzz_target!(|data: &[u8]| {
    look(data.to_vec());
    let mut file = GOOD.to_vec();
    let at = file.windows(8).position(|w| w == b"xdebugpy").expect("the table");
    let n = data.len().min(584 - 16);
    // Behind the cookie and the version: without these it is no such table.
    file[at + 16..at + 16 + n].copy_from_slice(&data[..n]);
    assert!(look(file));
});

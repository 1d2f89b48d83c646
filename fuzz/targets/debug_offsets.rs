#![no_main]
//! The input as a complete file, and as the table at the start of `_PyRuntime` in a valid one.

use libfuzzer_sys::fuzz_target;
use nativeprof::cpython;
use nativeprof_fuzz::module;

/// `char _PyRuntime[584] = "xdebugpy..."`, compiled; see `fuzz/seeds`.
const GOOD: &[u8] = include_bytes!("../small/runtime.so");

fn read(file: Vec<u8>) -> bool {
    let file = module(file);
    cpython::find_descriptor(&file);
    let runtime = cpython::find_runtime(&file);
    let layout = runtime.as_ref().and_then(|r| r.layout);
    // The walker in the kernel reads a frame at once.
    assert!(layout.is_none_or(|l| l.frame_size <= 127));
    runtime.is_some()
}

fuzz_target!(|data: &[u8]| {
    read(data.to_vec());
    let mut file = GOOD.to_vec();
    let at = file.windows(8).position(|w| w == b"xdebugpy").expect("the table");
    let n = data.len().min(584 - 16);
    // After the cookie and the version, without which it is not such a table.
    file[at + 16..at + 16 + n].copy_from_slice(&data[..n]);
    assert!(read(file));
});

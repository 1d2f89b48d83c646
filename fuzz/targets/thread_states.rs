#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::cpython::{DEFAULT_DESCRIPTOR, thread_states};
use nativeprof::cpython_layout::{Interpreter, ThreadStateLocation};
use nativeprof_fuzz::{Bytes, Mirrors};

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let python = Interpreter {
        layout: b.layout(),
        runtime: b.u64(),
        thread_state: ThreadStateLocation::InterpreterList,
        descriptor: DEFAULT_DESCRIPTOR,
    };
    let found = thread_states::states(&Mirrors(b.0), &python);
    for (_, mut states) in thread_states::states_by_thread(&python, &found, false) {
        let all = states.len();
        states.sort_unstable();
        states.dedup();
        assert!(all > 0 && states.len() == all, "a state was listed twice");
    }
});

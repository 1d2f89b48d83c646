#![no_main]
//! Reads the messages of a client, and shows texts of them as answers do.

use libfuzzer_sys::fuzz_target;
use nativeprof::mcp::{answer, message};

fuzz_target!(|bytes: &[u8]| {
    let mut input = std::io::BufReader::with_capacity(64, bytes);
    let lines = bytes.split(|byte| *byte == b'\n').count();
    let mut messages = 0;
    while let Some(message) = message::read(&mut input).expect("a slice is readable") {
        messages += 1;
        if let message::Message::Request { id, method, .. } = message {
            let shown = answer::data(&method);
            assert!(shown.chars().count() <= 200 && !shown.contains(char::is_control));
            let sent = message::result(&id, shown.into()).to_string();
            assert!(!sent.contains('\n') && sent.len() < 4096);
        }
    }
    assert!(messages <= lines);
});

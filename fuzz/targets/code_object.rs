#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::cpython::code_object::CodeTable;
use nativeprof_fuzz::{Bytes, Mirrors};

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let (layout, at) = (b.layout(), b.u64());
    let memory = Mirrors(b.0);
    let mut codes = CodeTable::default();
    for at in [at, at.wrapping_add(64), at.wrapping_add(128)] {
        let Ok(id) = codes.observe(1, &memory, &layout, at, 0) else {
            continue;
        };
        let code = codes.get(id);
        for text in [&code.name, &code.qualname, &code.filename] {
            assert!(text.chars().count() <= 4096);
        }
        for offset in [-1, 0, 2, 77, code.first_traceable, i32::MAX] {
            code.line(offset);
        }
        assert_eq!(codes.observe(1, &memory, &layout, at, 0), Ok(id));
    }
});

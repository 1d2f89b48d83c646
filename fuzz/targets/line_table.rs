#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::cpython::line_table;
use nativeprof::cpython_layout::LineTable;
use nativeprof_fuzz::Bytes;

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let (first, offset) = (b.u32(), b.u32() as i32);
    for kind in [LineTable::Lnotab, LineTable::Ranges, LineTable::Locations] {
        line_table::line(kind, b.0, first, offset);
        for offset in 0..64 {
            line_table::line(kind, b.0, first, offset);
        }
        assert_eq!(line_table::line(kind, b.0, first, -1), Some(first));
    }
});

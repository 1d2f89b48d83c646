#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::interp::lines;
use nativeprof::layout::LineTable;
use nativeprof_fuzz::Bytes;

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let (first, offset) = (b.u32(), b.u32() as i32);
    for kind in [LineTable::Lnotab, LineTable::Ranges, LineTable::Locations] {
        lines::line(kind, b.0, first, offset);
        for offset in 0..64 {
            lines::line(kind, b.0, first, offset);
        }
        assert_eq!(lines::line(kind, b.0, first, -1), Some(first));
    }
});

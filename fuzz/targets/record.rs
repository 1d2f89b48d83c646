#![no_main]
//! What the kernel's program writes, on through the grouping of Python frames.

use libfuzzer_sys::fuzz_target;
use nativeprof::capture::ebpf::record::{self, Record};
use nativeprof::interp::code::CodeTable;
use nativeprof::interp::frames::{self, Last};
use nativeprof::interp::tables;
use nativeprof::merge;
use nativeprof::sample::Groups;
use nativeprof_fuzz::Mirrors;

fuzz_target!(|data: &[u8]| {
    if let Some(Record::Code(pid, _, copy)) = record::decode_code(data) {
        for (_, layout) in tables::ROWS {
            CodeTable::default().learn(pid, &Mirrors(data), layout, &copy);
        }
    }
    let Some(sample) = record::decode(data) else {
        return;
    };
    for (_, layout) in tables::ROWS {
        let mut groups = Groups::default();
        let (codes, last) = (&mut CodeTable::default(), &mut Last::default());
        frames::groups(&sample, layout, codes, &Mirrors(data), last, &mut groups);
        let frames: usize = groups.list.iter().map(|g| groups.frames(g).len()).sum();
        assert!(frames <= sample.python.len());
        merge::python_only(&groups, None, &mut Vec::new());
    }
});

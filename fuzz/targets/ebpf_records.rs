#![no_main]
//! Records of the kernel's program, up to the grouping of Python frames.

use libfuzzer_sys::fuzz_target;
use nativeprof::capture::ebpf::abi;
use nativeprof::capture::ebpf::abi::DecodedRecord;
use nativeprof::cpython::code_object::CodeTable;
use nativeprof::cpython::frame_groups;
use nativeprof::cpython::frame_groups::LastFrames;
use nativeprof::cpython::versions;
use nativeprof::interleave;
use nativeprof::frame::EvalGroups;
use nativeprof_fuzz::Mirrors;

fuzz_target!(|data: &[u8]| {
    if let Some(DecodedRecord::Code(pid, _, copy)) = abi::decode_code(data) {
        for layout in versions::ALL.iter().map(|facts| &facts.layout) {
            CodeTable::default().update_process(pid, &Mirrors(data), layout, &copy);
        }
    }
    let Some(sample) = abi::decode(data) else {
        return;
    };
    for layout in versions::ALL.iter().map(|facts| &facts.layout) {
        let mut groups = EvalGroups::default();
        let (codes, last) = (&mut CodeTable::default(), &mut LastFrames::default());
        frame_groups::groups(&sample, layout, codes, &Mirrors(data), last, &mut groups);
        let frames: usize = groups.list.iter().map(|g| groups.frames(g).len()).sum();
        assert!(frames <= sample.python.len());
        interleave::python_only(&groups, None, &mut Vec::new());
    }
});

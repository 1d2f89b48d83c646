//! Go's function table. The input is where moduledata may be, and the table.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof_fuzz::Bytes;
use symbolize::{GoSections, GoTable};

fuzz_target!(|input: &[u8]| {
    let mut input = Bytes(input);
    let (table, text) = (input.u64(), (input.u64(), input.u64()));
    let data = input.block().to_vec();
    let sections = GoSections {
        table,
        text,
        data: &data,
    };
    let Some(parsed) = GoTable::parse(input.0.to_vec(), &sections) else {
        return;
    };
    let (start, end) = parsed.range();
    let size = end.saturating_sub(start);
    for part in 0..64 {
        let svma = start.saturating_add(size / 64 * part);
        let Some(f) = parsed.find(svma) else { continue };
        assert!((f.start..f.end).contains(&svma));
        let _ = (f.name(), f.is_first(), f.switches_stacks(), f.stack_size(svma));
        let frames = f.frames(svma, &mut |_, size| Some(vec![0; size as usize]));
        assert!(!frames.is_empty() && frames.len() <= 65);
    }
});

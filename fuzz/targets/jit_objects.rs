#![no_main]

use libfuzzer_sys::fuzz_target;
use nativeprof::process::jit::registered;
use nativeprof_fuzz::{Bytes, Mirrors};
use symbolize::{JitCode, JitObject};

// The target's memory is the input, repeated; an object that is registered in it is, too.
fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let at = b.u64();
    let entries = registered(&Mirrors(b.0), at);
    assert!(entries.iter().all(|e| e.entry != 0 && e.object != 0 && e.size != 0));
    let Ok(object) = JitObject::parse(b.0.to_vec()) else {
        return;
    };
    assert!(object.code.iter().all(|(start, end)| start <= end));
    let mut code = JitCode::default();
    code.add_object(&object);
    let starts = object.functions().flat_map(|(start, size)| [start, start.saturating_add(size)]);
    for at in starts.chain([0, u64::MAX]).take(300) {
        assert!(code.lookup(at).is_none_or(|s| s.start <= at && at - s.start < s.size));
    }
});

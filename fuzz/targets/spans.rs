#![no_main]
//! Active spans: where a process says they are, the walk to their records, and the labels in these.

use libfuzzer_sys::fuzz_target;
use nativeprof::cpython::spans;
use nativeprof::cpython_layout::Tls;
use nativeprof::event::SpanRecords;
use nativeprof::process::thread_context::{self, VariableAccess};
use nativeprof::process::maps;
use nativeprof_fuzz::{Bytes, Mirrors};

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let (state, thread) = (b.u64(), b.u64());
    let access = [VariableAccess::Static(b.u64() as i64), VariableAccess::Offset(b.u64()), VariableAccess::Pair(b.u64()), VariableAccess::Descriptor(b.u64())];
    let mut out = SpanRecords {
        package: Vec::with_capacity(512),
        context: Vec::with_capacity(1024),
    };
    let memory = Mirrors(b.0);
    let mut words = spans::read(&memory, state).unwrap_or_default();
    (words[0], words[1]) = (spans::MAGIC, 1);
    if let Some(at) = spans::location(&words) {
        spans::copy(&memory, &at, state, &mut out);
    }
    for access in access {
        if let Some(at) = thread_context::location(&memory, access, 0, Tls::Glibc(0)) {
            thread_context::copy(&memory, &at, thread, &mut out);
        }
    }
    let published = maps::parse(b"1000-2000 rw-p 0 00:00 0 /memfd:OTEL_CTX");
    let keys = thread_context::keys(&memory, &published).unwrap_or_default();
    let _ = thread_context::resource(&memory, &published);
    for record in [&out.package[..], &out.context, data] {
        assert!(spans::labels(record).len() <= record.len() / 2);
        assert!(thread_context::labels(record, &keys).0.len() <= 2 + record.len() / 2);
    }
});

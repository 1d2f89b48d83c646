//! What sampling costs a program that allocates: CPU time for `malloc(64)` and `free`, one block at a time and with 10,000 live,
//! without hooks, with the sampler, and with a handler. Minimum of interleaved runs.
//!
//! ```console
//! $ cargo bench --package nativeprof-hooks
//! ```

use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use nativeprof_hooks::{BlockSampler, DEFAULT_MEAN, Handler, HookSet, SampledBlock, install, sample};

const LIBRARY: &str = r#"
#include <stdlib.h>
#include <time.h>
#define LIVE 10000
static void *blocks[LIVE];
long measure(long count, long live) {
    struct timespec a, b;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    for (long i = 0; i < count; i++) {
        long at = i % live;
        free(blocks[at]);
        blocks[at] = malloc(64);
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    return (b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec;
}
"#;

const COUNT: i64 = 1_000_000;
const RUNS: usize = 15;

/// Takes blocks and their ends, and nothing else.
struct Drops;

impl BlockSampler for Drops {
    fn on_block(&self, _: SampledBlock) -> Option<u32> {
        Some(0)
    }
    fn on_end(&self, _: u32) {}
    fn on_resize(&self, _: u32, _: i64) {}
    fn on_overflow(&self, _: u32) {}
}

impl Handler for Drops {}

fn load() -> extern "C" fn(i64, i64) -> i64 {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (file, out) = (directory.join("cost.c"), directory.join("libcost.so"));
    std::fs::write(&file, LIBRARY).expect("the source is written");
    let mut compiler = Command::new("gcc");
    compiler
        .args(["-O2", "-fno-builtin", "-shared", "-fPIC", "-o"])
        .arg(&out)
        .arg(&file);
    assert!(compiler.status().expect("gcc").success());
    let path = CString::new(out.into_os_string().into_encoded_bytes()).expect("a path");
    // SAFETY: the library is our own and stays loaded; the function has this type.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let function = libc::dlsym(library, c"measure".as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn(i64, i64) -> i64>(function)
    }
}

fn main() {
    let measure = load();
    for live in [1, 10_000] {
        let mut least = [i64::MAX; 3];
        for _ in 0..RUNS {
            least[0] = least[0].min(measure(COUNT, live));
            let sampling = sample(Arc::new(Drops), DEFAULT_MEAN, false).expect("a sampler");
            least[1] = least[1].min(measure(COUNT, live));
            drop(sampling);
            let native = HookSet {
                native: true,
                ..HookSet::default()
            };
            let installed = install(Arc::new(Drops), native).expect("a handler");
            least[2] = least[2].min(measure(COUNT, live));
            drop(installed);
        }
        let [none, sampled, handled] = least.map(|time| time as f64 / COUNT as f64);
        println!(
            "malloc(64) + free, {live} live: {none:.1} ns, sampled {sampled:.1} (+{:.1}), with a handler {handled:.1} (+{:.1})",
            sampled - none,
            handled - none
        );
    }
}

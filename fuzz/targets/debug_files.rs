//! A file and its debug files: the input is the file and, for every path that it opens, another one.
#![no_main]

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use nativeprof_fuzz::Bytes;
use symbolize::Module;

/// An anonymous file with these bytes.
fn file(bytes: &[u8]) -> Option<File> {
    let path = std::env::temp_dir().join(format!("debug-files-{}", std::process::id()));
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .ok()?;
    std::fs::remove_file(&path).ok()?;
    file.write_all(bytes).ok()?;
    file.seek(SeekFrom::Start(0)).ok()?;
    Some(file)
}

fuzz_target!(|input: &[u8]| {
    let mut input = Bytes(input);
    let around: Arc<[Vec<u8>]> = [input.block().to_vec(), input.block().to_vec(), input.block().to_vec()].into();
    let Ok(module) = Module::from_bytes(input.0.to_vec()) else {
        return;
    };
    let files = move |path: &Path| {
        let text = path.to_string_lossy();
        let which = usize::from(text.ends_with(".dwo")) + 2 * usize::from(text.ends_with("common"));
        file(around.get(which)?)
    };
    let mut module = module.with_files("/usr/bin/program", Arc::new(files));
    let mut places: Vec<u64> = module
        .symbols()
        .take(20)
        .flat_map(|f| [f.start, f.start.wrapping_add(5)])
        .collect();
    places.extend((0..0x2000).step_by(97));
    for names in module.lookup_many(&places).iter().flatten() {
        assert!(names.last().is_some_and(|f| !f.inlined));
    }
    let sources = module.sources();
    assert!(sources.searched.len() <= 32 && sources.refused.len() <= 32);
});

//! Compares with the addr2line crate, on files that can be trusted.

mod common;

use std::path::Path;

fn compare(path: &Path, count: usize) {
    let mut module = common::open(path);
    let svmas = common::addresses(&mut module, count);
    let loader = addr2line::Loader::new(path).expect("loaded");
    for (&svma, found) in svmas.iter().zip(module.lookup_many(&svmas)) {
        let mut frames = loader.find_frames(svma).expect("frames");
        let mut theirs = Vec::new();
        while let Ok(Some(frame)) = frames.next() {
            let location = frame.location;
            theirs.push((
                location.as_ref().and_then(|l| l.file).map(str::to_string),
                location.as_ref().and_then(|l| l.line),
                frame.function.and_then(|f| f.raw_name().ok().map(|n| n.into_owned())),
            ));
        }
        let found = found.expect("named");
        if theirs.is_empty() {
            assert!(found.len() == 1 && found[0].line.is_none(), "{svma:#x} {found:?}");
            continue;
        }
        assert_eq!(found.len(), theirs.len(), "{svma:#x} {found:?} {theirs:?}");
        for (ours, theirs) in found.iter().zip(&theirs) {
            assert_eq!(
                (ours.file.as_deref(), ours.line),
                (theirs.0.as_deref(), theirs.1),
                "{svma:#x}"
            );
            if ours.inlined {
                assert_eq!(Some(&*ours.raw), theirs.2.as_deref(), "{svma:#x}");
            }
        }
    }
}

#[test]
fn this_test_itself() {
    let path = std::env::current_exe().expect("a path");
    if common::open(&path).sources().dwarf {
        compare(&path, 2000);
    } else {
        eprintln!("SKIPPED: built without debug information");
    }
}

#[test]
fn libpython() {
    let Some(path) = common::libpythons().pop() else {
        eprintln!("SKIPPED: no libpython with DWARF under ~/.pyenv/versions: nothing was compared");
        return;
    };
    compare(&path, 10_000);
}

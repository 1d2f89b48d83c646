//! A large real library with DWARF, against binutils.

mod common;

#[test]
fn agrees_with_binutils() {
    let libraries = common::libpythons();
    let Some(path) = libraries.last() else {
        eprintln!("SKIPPED: no libpython with DWARF under ~/.pyenv/versions: nothing was compared");
        return;
    };
    let mut module = common::open(path);
    if !module.sources().dwarf {
        eprintln!("SKIPPED: {} has no DWARF", path.display());
        return;
    }
    let svmas = common::addresses(&mut module, 2000);
    let Some(theirs) = common::binutils(path, &svmas) else {
        return;
    };
    let ours = common::ours(&mut module, &svmas);
    let mut names = 0;
    let mut places = 0;
    for ((svma, ours), theirs) in svmas.iter().zip(&ours).zip(&theirs) {
        let only_names = |f: &common::Frames| f.iter().map(|f| f.0.clone()).collect::<Vec<_>>();
        if only_names(ours) != only_names(theirs) {
            names += 1;
            eprintln!("{svma:#x}:\n  ours   {ours:?}\n  theirs {theirs:?}");
        } else if ours != theirs {
            places += 1;
            eprintln!("{svma:#x}:\n  ours   {ours:?}\n  theirs {theirs:?}");
        }
    }
    eprintln!(
        "{}: {names} of {} differ in names, {places} only in places",
        path.display(),
        svmas.len()
    );
    assert!(names * 200 <= svmas.len(), "{names} differ in names");
    assert!(places * 200 <= svmas.len(), "{places} differ in places");
}

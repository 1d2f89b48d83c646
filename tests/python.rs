//! The installed Python package: its own tests in each CPython from 3.9 on, and other packages that read our files.
//! `.ci/install-python-venvs` builds the wheel and the environments; it is called here, so that no outdated wheel is
//! tested.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use common::environments::environments;
use common::pythons::{all_combinations, third};

mod common;

/// Runs one program in the environment, and fails with what it printed.
fn passes(name: &str, mut command: Command) {
    let output = command.output().expect("the Python of the environment starts");
    assert!(
        output.status.success(),
        "CPython {name}, {}:\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn python(environment: &Path) -> Command {
    let mut command = Command::new(environment.join("bin/python"));
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Files of the package's tests that contain this text. Importing the others takes longer than the tests that it leaves.
fn files_with(text: &str, contain: bool) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/tests");
    let entries = std::fs::read_dir(directory).expect("the tests are there");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    files.retain(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let is_test = name.starts_with("test_") && name.ends_with(".py");
        is_test && std::fs::read_to_string(file).expect("text").contains(text) == contain
    });
    files.sort();
    files
}

/// Runs the tests in these files that have the marks. Returns what they printed if one failed. `first_way`: of the ways
/// of starting a program, only every third one, beginning with this one.
fn package_tests(
    (name, environment): &(String, PathBuf),
    marks: &str,
    files: &[PathBuf],
    first_way: Option<usize>,
) -> Option<String> {
    let mut command = python(environment);
    command
        .envs(first_way.map(|first| ("FIRST_WAY", first.to_string())))
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks])
        .args(files);
    let output = command.output().expect("the Python of the environment starts");
    let printed = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (!output.status.success()).then(|| {
        format!(
            "CPython {name}, -m '{marks}', {}:\n{}{}",
            output.status,
            printed(&output.stdout),
            printed(&output.stderr)
        )
    })
}

/// The files of tests that run in the environment with this number, of so many: all of them in the newest one. Each of the
/// others has those with the mark `every_version`, every third of those that depend on the version, beginning with a
/// different one, and its part of the rest.
fn files_of(at: usize, environments: usize) -> Vec<PathBuf> {
    let mark = |name: &str| format!("pytestmark = pytest.mark.{name}");
    let (rest, mut dependent) = (
        files_with(&mark("few_versions"), true),
        files_with(&mark("few_versions"), false),
    );
    let every = files_with(&mark("every_version"), true);
    assert!(
        !rest.is_empty() && !every.is_empty(),
        "no file of tests has these marks"
    );
    if all_combinations() || at + 1 == environments {
        return [rest, dependent].concat();
    }
    dependent.retain(|file| !every.contains(file));
    let others = environments - 1;
    let rest = rest.into_iter().skip(at).step_by(others);
    let dependent = dependent.into_iter().skip(at % 3).step_by(3);
    rest.chain(dependent).chain(every).collect()
}

/// With two interpreters at a time, since one leaves half of the machine idle; then what compares wall time, alone, in every
/// third interpreter.
#[test]
fn the_tests_of_the_package_pass_in_every_python() {
    let all = environments();
    // The one that runs most of them first, in parts, so that both workers end at about the same time.
    let parts = all.iter().enumerate().rev().flat_map(|(at, environment)| {
        let files = files_of(at, all.len());
        let is_newest = at + 1 == all.len();
        let parts = if is_newest { 4 } else { 1 };
        let first_way = (!is_newest && !all_combinations()).then_some(at);
        let parts: Vec<_> = files.chunks(files.len().div_ceil(parts)).map(<[_]>::to_vec).collect();
        parts.into_iter().map(move |files| (environment, files, first_way))
    });
    let waiting = Mutex::new(parts);
    let take = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || -> Vec<String> {
        std::iter::from_fn(take)
            .filter_map(|(environment, files, first_way)| package_tests(environment, "not alone", &files, first_way))
            .collect()
    };
    let mut failed: Vec<String> = std::thread::scope(|scope| {
        let workers = [scope.spawn(work), scope.spawn(work)];
        workers.into_iter().flat_map(|w| w.join().expect("no panic")).collect()
    });
    let files = files_with("pytest.mark.alone", true);
    let alone = |environment: &(String, PathBuf)| package_tests(environment, "alone", &files, None);
    failed.extend(third(0, all).filter_map(alone));
    assert!(failed.is_empty(), "{}", failed.concat());
}

/// The real consumer reads our file: the unmodified `distributed` package merges, plots and sends it.
#[test]
fn dask_reads_merges_and_plots_our_profile() {
    let (name, environment) = environments().last().expect("a Python");
    let mut command = python(environment);
    command.args([
        "tests/dask_check.py",
        "fixtures/golden/profile.json",
        "fixtures/golden/profile.svg",
    ]);
    passes(name, command);
}

#[test]
fn merge_sums_as_dask_does() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (dask, merged) = (directory.join("dask.json"), directory.join("merged.json"));
    // A worker's own profile, which has one of our processes with one more callee.
    let tree = r#"{"identifier": "root", "count": 9, "description":
        {"filename": "", "name": "", "line_number": 0, "line": ""}, "children": {
        "python 4242;;0": {"identifier": "python 4242;;0", "count": 7, "description":
        {"filename": "", "name": "python 4242", "line_number": 0, "line": ""}, "children": {
        "f;a.py;4": {"identifier": "f;a.py;4", "count": 5, "children": {}, "description":
        {"filename": "a.py", "name": "f", "line_number": 5, "line": "sin(x)"}}}}}}"#;
    std::fs::write(&dask, tree).expect("a file");
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden/profile.json");
    let files: [&Path; 3] = [&ours, &dask, &ours];
    let mut merge = Command::new(env!("CARGO_BIN_EXE_nativeprof"));
    let done = merge
        .arg("merge")
        .args(files)
        .arg("-o")
        .arg(&merged)
        .output()
        .expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    for word in [
        "is given twice",
        "the rates differ (unknown, 99 Hz)",
        "823 samples from 3 profiles",
    ] {
        assert!(said.contains(word), "`{word}` is not in:\n{said}");
    }
    let (name, environment) = environments().last().expect("a Python");
    let mut command = python(environment);
    command.arg("tests/dask_merge_check.py").arg(&merged).args(files);
    passes(name, command);
}

//! The programs in `examples/`: each shows what its text says.
//!
//! Needs root, a C compiler, and the environments of `.ci/install-python-venvs`.

use std::path::{Path, PathBuf};
use std::process::Command;

use nativeprof::profile::model::Profile;

use common::chance::{assert_likely, repeated};
use common::environments::environments;
use common::recording::{Recording, record};
use common::{live, sources};

mod common;
#[path = "examples/pull_request.rs"]
mod pull_request;
#[path = "../examples/read_profile.rs"]
mod read_profile;

/// An environment with an interpreter whose headers can be compiled: those that are unpacked from packages have a part of them.
fn interpreter() -> PathBuf {
    let has_headers = "import subprocess, sys, sysconfig
compile = ['cc', '-fsyntax-only', '-x', 'c', '-I', sysconfig.get_path('include'), '-']
done = subprocess.run(compile, input=b'#include <Python.h>', stderr=subprocess.DEVNULL)
sys.exit(done.returncode)";
    let interpreters = environments()
        .iter()
        .rev()
        .map(|(_, directory)| directory.join("bin/python"));
    let found = interpreters.into_iter().find(|python| {
        let status = Command::new(python).args(["-c", has_headers]).status();
        status.expect("an interpreter").success()
    });
    found.expect("an interpreter with headers")
}

fn recorded(python: &Path, example: &str, words: &[&str]) -> Recording {
    let mut command = Command::new(python);
    command.arg(sources().join("../../examples").join(example)).arg("0.8");
    record(words, &command)
}

/// Is there a stack in which these names follow each other, others between them? (Suspended tasks have time, but no samples.)
fn has_stack(profile: &Profile, names: &[&str]) -> bool {
    (1..profile.nodes.len()).any(|leaf| {
        let mut wanted = names.iter().rev().peekable();
        let mut at = leaf;
        while at > 0 {
            let name = &profile.frames[profile.nodes[at].frame as usize].name;
            wanted.next_if(|wanted| name.starts_with(**wanted));
            at = profile.nodes[at].parent as usize;
        }
        wanted.peek().is_none()
    })
}

/// A program of `examples/`, options for its recording, and stacks that the profile has.
type Case = (
    &'static str,
    &'static [&'static str],
    &'static [&'static [&'static str]],
);

#[test]
fn examples_show_what_they_say() {
    let _live = live();
    let python = interpreter();
    let cases: &[Case] = &[
        (
            "extension.py",
            &[],
            &[&["main", "total", "weight"], &["main", "total", "mix"]],
        ),
        (
            "event_loop.py",
            &["--tasks", "--mode", "wall", "--lag", "50ms"],
            &[
                &["[task: compute]", "compute"],
                &["[task: report]", "report", "parse"],
                &["[task: fetch]", "fetch", "[awaiting sleep]"],
            ],
        ),
        (
            "greenlets.py",
            &["--tasks", "--mode", "wall"],
            &[&["[task: producer]", "produce"], &["[task: consumer]", "consume"]],
        ),
        (
            "numpy_pool.py",
            &["--attribute-workers"],
            &[&["main", "large", "[worker thread"], &["main", "small"]],
        ),
    ];
    for (example, words, stacks) in cases {
        repeated(|| {
            let r = recorded(&python, example, words);
            for names in *stacks {
                assert_likely!(has_stack(&r.profile, names), "{example}: {names:?}: {}", r.stderr);
            }
            let blocked = r.profile.meta.lags.len();
            assert_likely!(*example != "event_loop.py" || blocked > 0, "{example}: {}", r.stderr);
        });
    }
}

#[test]
fn a_profile_is_read() {
    let profile = std::fs::read(sources().join("../golden/profile.json")).expect("a profile");
    let rows = read_profile::hottest(&profile, 2).expect("rows");
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert!(rows[0].1 >= rows[1].1 && rows[0].2 <= 1.0, "{rows:?}");
    assert!(read_profile::hottest(b"{}", 2).is_err());
}

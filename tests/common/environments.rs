//! The environments that `.ci/install-python-venvs` creates: one for each CPython from 3.9 on, with the packages of
//! python/tests/requirements.txt and the wheel of these sources.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::pythons::{all_combinations, some_at_a_time, third};

/// `(3.X, its environment)`, the oldest first, with the wheel of these sources installed.
pub fn environments() -> &'static [(String, PathBuf)] {
    static FOUND: OnceLock<Vec<(String, PathBuf)>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let output = Command::new(root.join(".ci/install-python-venvs"))
            .output()
            .expect(".ci/install-python-venvs starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        // Its last line names them.
        let names = text
            .trim_end()
            .lines()
            .last()
            .and_then(|l| l.strip_prefix("python-venvs: "));
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let place = |name: &str| (name.to_string(), target.join("python-venvs").join(name));
        names.expect("a list of environments").split(' ').map(place).collect()
    })
}

/// Runs `test` with the name and directory of every third environment, two at a time: see [`third`].
pub fn each_third_environment(first: usize, test: impl Fn(&str, &Path) + Sync) {
    each_of(third(first, environments()), test);
}

/// The same with every backend: with ptrace in one environment, since what reads the interpreters and packages is the same.
pub fn each_third_environment_and_backend(first: usize, test: impl Fn(&str, &Path, &str) + Sync) {
    each_third_environment(first, |name, directory| test(name, directory, "ebpf"));
    let number = if all_combinations() { usize::MAX } else { 1 };
    let with_ptrace = third(first + 1, environments()).take(number);
    each_of(with_ptrace, |name, directory| test(name, directory, "ptrace"));
}

fn each_of(some: impl IntoIterator<Item = &'static (String, PathBuf)>, test: impl Fn(&str, &Path) + Sync) {
    some_at_a_time(2, some, |(name, _)| name, |(name, directory)| test(name, directory));
}

//! Programs and objects that tests start.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The object of an example of this crate.
pub fn built_object(example: &str) -> PathBuf {
    // Below target/ and its profile's directory, as Cargo has it.
    let here = std::env::current_exe().expect("this program");
    let profile = here.parent().and_then(Path::parent).expect("the profile's directory");
    let mut cargo = Command::new(env!("CARGO"));
    // The variables that `cargo test` sets for a test would rerun build scripts, and rebuild all that depends on them.
    for (name, _) in std::env::vars_os() {
        let of_test = ["MANIFEST", "PKG", "BIN", "CRATE", "PRIMARY"].map(|part| format!("CARGO_{part}"));
        if of_test
            .iter()
            .any(|start| name.as_encoded_bytes().starts_with(start.as_bytes()))
        {
            cargo.env_remove(name);
        }
    }
    cargo.args([
        "build",
        "--quiet",
        "--package",
        "nativeprof-hooks",
        "--example",
        example,
    ]);
    cargo
        .arg("--target-dir")
        .arg(profile.parent().expect("the target directory"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo").success());
    profile.join(format!("examples/lib{example}.so"))
}

/// A C program or library. `libraries`: options that come after the source.
pub fn compiled(name: &str, source: &str, flags: &[&str], libraries: &[&str]) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (file, out) = (directory.join(format!("{name}.c")), directory.join(name));
    std::fs::write(&file, source).expect("the source is written");
    let mut compiler = Command::new("gcc");
    compiler.args(flags).arg("-o").arg(&out).arg(&file).args(libraries);
    assert!(compiler.status().expect("gcc").success());
    out
}

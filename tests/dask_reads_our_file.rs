//! The real consumer reads our file: the unmodified `distributed` package merges, plots and sends it.

use std::path::PathBuf;
use std::process::Command;

#[test]
fn dask_reads_merges_and_plots_our_profile() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let venv = std::env::var_os("NATIVEPROF_DASK_VENV").map_or_else(|| root.join("target/ci-venv"), PathBuf::from);
    let python = venv.join("bin/python");
    assert!(
        python.exists(),
        "no Python with Dask at {}; make it with\n\n    .ci/dask-venv\n",
        python.display()
    );
    let output = Command::new(&python)
        .arg(root.join("tests/dask_check.py"))
        .arg(root.join("fixtures/golden/profile.json"))
        .arg(root.join("fixtures/golden/profile.svg"))
        .output()
        .expect("the Python of the environment starts");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

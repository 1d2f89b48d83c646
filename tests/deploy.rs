//! The files in `deploy/`, judged by the tools of those who use them.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Exposure in tenths that `systemd-analyze security` may find at most.
const MAX_EXPOSURE: &str = "40";

#[test]
fn the_unit_is_hardened() {
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=yes"])
        .arg(format!("--threshold={MAX_EXPOSURE}"))
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/nativeprof.service"))
        .output()
        .expect("systemd-analyze: install the package systemd");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn the_unit_has_no_fault() {
    let text = fs::read_to_string("deploy/nativeprof.service").expect("the unit");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nativeprof.service");
    // The program that the unit starts has to exist.
    let text = text.replace("/usr/bin/nativeprof", env!("CARGO_BIN_EXE_nativeprof"));
    fs::write(&path, text).expect("written");
    let output = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&path)
        .output()
        .expect("systemd-analyze: install the package systemd");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
}

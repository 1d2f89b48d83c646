//! `selftest` as a user runs it: it confirms that sampling works here, and reports when it cannot start.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use common::chance::{assert_likely, patience, repeated};
use common::{Scratch, live, nativeprof, programs};

mod common;

#[test]
fn sampling_works_here() {
    let _alone = live();
    repeated(|| {
        let window = (0.4 * f64::from(patience())).to_string();
        let done = nativeprof(&["selftest", "--json", "--pairs", "3", "--window", &window])
            .stdin(Stdio::null())
            .output()
            .expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        let value: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|e| {
            panic!("no JSON ({e}): {said}{}", String::from_utf8_lossy(&done.stderr));
        });
        assert_likely!(done.status.success() && value["passed"] == true, "{said}");
        for backend in value["backends"].as_array().expect("backends") {
            let number = |key: &str| backend[key].as_f64().unwrap_or_else(|| panic!("{key}: {said}"));
            assert_eq!(number("impossible_stacks"), 0.0, "{said}");
            assert_likely!(number("taken") > 300.0, "{said}");
            assert!(number("error") > 0.0 && number("noise_floor") > 0.0, "{said}");
            assert_eq!(
                number("exact") + number("repaired") + number("partial"),
                number("taken"),
                "{said}"
            );
            assert_eq!(backend["stop_us"].is_object(), backend["backend"] == "ptrace", "{said}");
            assert_eq!(
                backend["slowdown_wall"]["pairs"].as_array().map(Vec::len),
                Some(3),
                "{said}"
            );
        }
    });
}

/// As an ordinary user, the reason is that of eBPF, not a crash.
#[test]
fn a_refused_backend_is_no_crash() {
    let scratch = Scratch::new();
    let copy = scratch.path("nativeprof");
    programs::copy(env!("CARGO_BIN_EXE_nativeprof"), &copy);
    for path in [scratch.directory(), &copy] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("permissions");
    }
    let done = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["selftest", "--backend", "ebpf", "--python", "/usr/bin/python3"])
        .output()
        .expect("nativeprof starts");
    let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    assert!(said.contains("CAP_BPF") && !said.contains("crashed"), "{said}");
}

#[test]
fn programs_other_than_python() {
    for (python, why) in [
        ("/nonexistent/python", "No such file"),
        ("/bin/true", "it exited silently"),
        ("/bin/false", "exited"),
    ] {
        let done = nativeprof(&["selftest", "--python", python])
            .output()
            .expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(
            said.contains(why) && said.contains("\n  try: choose a CPython with --python"),
            "{said}"
        );
    }
}

#[test]
fn a_rate_that_the_kernel_refuses() {
    let done = nativeprof(&["selftest", "-r", "1000000000000"])
        .output()
        .expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.code() == Some(2) && done.stdout.is_empty(), "{said}");
    assert!(
        said.contains("maximum sampling rate") && said.contains("\n  try: "),
        "{said}"
    );
}

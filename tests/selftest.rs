//! `selftest` as a user runs it: it confirms that sampling works here, and reports when it cannot start.

use std::process::Stdio;

use common::{live, nativeprof};

mod common;

#[test]
fn sampling_works_here() {
    let _alone = live();
    let done = nativeprof(&["selftest", "--json", "--pairs", "3", "--window", "0.4"])
        .stdin(Stdio::null())
        .output()
        .expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let value: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|e| {
        panic!("no JSON ({e}): {said}{}", String::from_utf8_lossy(&done.stderr));
    });
    assert!(done.status.success() && value["passed"] == true, "{said}");
    for backend in value["backends"].as_array().expect("backends") {
        let number = |key: &str| backend[key].as_f64().unwrap_or_else(|| panic!("{key}: {said}"));
        assert!(number("taken") > 300.0 && number("impossible_stacks") == 0.0, "{said}");
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

//! `selftest` as a user runs it: it finds sampling in order here, and says so when it cannot begin.

use std::process::Stdio;

use common::{live, nativeprof};

mod common;

#[test]
fn sampling_is_in_order_here() {
    let _alone = live();
    let done = nativeprof(&["selftest", "--json", "--pairs", "3", "--window", "0.4"])
        .stdin(Stdio::null())
        .output()
        .expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let value: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|e| {
        panic!("no JSON ({e}): {said}{}", String::from_utf8_lossy(&done.stderr));
    });
    assert!(done.status.success() && value["good"] == true, "{said}");
    for backend in value["backends"].as_array().expect("backends") {
        let number = |key: &str| backend[key].as_f64().unwrap_or_else(|| panic!("{key}: {said}"));
        assert!(number("taken") > 300.0 && number("torn") == 0.0, "{said}");
        assert!(number("distance") > 0.0 && number("floor") > 0.0, "{said}");
        assert_eq!(
            number("exact") + number("repaired") + number("partial"),
            number("taken"),
            "{said}"
        );
        assert_eq!(backend["held_us"].is_object(), backend["backend"] == "ptrace", "{said}");
        assert_eq!(
            backend["slowdown_wall"]["pairs"].as_array().map(Vec::len),
            Some(3),
            "{said}"
        );
    }
}

#[test]
fn pythons_that_are_none() {
    for (python, why) in [
        ("/nonexistent/python", "No such file"),
        ("/bin/true", "it ended without a word"),
        ("/bin/false", "ended"),
    ] {
        let done = nativeprof(&["selftest", "--python", python])
            .output()
            .expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(
            said.contains(why) && said.contains("\n  try: name a CPython with --python"),
            "{said}"
        );
    }
}

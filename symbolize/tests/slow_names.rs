//! C++ names that take the parser minutes, in a separate process: it may still be parsing one at the end.

use std::time::{Duration, Instant};

#[test]
fn slow_names_are_returned_unchanged() {
    let deep = format!("_Z1f{}i{}", "1tI".repeat(9), "E".repeat(9));
    let shown = symbolize::demangle(&deep).into_owned();
    assert!(shown.starts_with("f(t<t<t<"), "{shown}");
    let began = Instant::now();
    for (unit, times) in [("nw", 26), ("nwnw1A", 13), ("LDTnwnw", 9), ("L1AI", 12)] {
        for n in 1..=times {
            let name = format!("_Z1fIX{}E", unit.repeat(n));
            assert_eq!(symbolize::demangle(&name), name);
        }
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}"); // one of them alone takes longer
}

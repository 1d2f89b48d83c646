//! Random calls of allocators in many threads, while sampling is started and removed: for a second, or as long as the variable
//! `STRESS_SECONDS` says. `.ci/stress-allocations` does the same with AddressSanitizer.

mod common;

use std::process::Command;

use common::{built_object, compiled};

const SOURCE: &str = include_str!("stress_allocations.c");

#[test]
fn the_ends_of_sampled_blocks_are_reported_whatever_is_called() {
    let object = built_object("stress_allocations");
    let flags = ["-O1", "-g", "-fno-builtin", "-pthread", "-Wno-alloc-size-larger-than"];
    let program = compiled("stress_allocations", SOURCE, &flags, &["-l:libstdc++.so.6"]);
    let of_library = ["-shared", "-fPIC", "-DLIBRARY", "-fno-builtin"];
    let library = compiled("libstress_allocations.so", SOURCE, &of_library, &[]);
    let seconds = std::env::var("STRESS_SECONDS").unwrap_or_else(|_| "1".to_string());
    let output = Command::new(program)
        .arg(seconds)
        .args([object, library])
        .output()
        .expect("the program runs");
    let [said, wrong] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{said}{wrong}{}", output.status);
    println!("{said}");
}

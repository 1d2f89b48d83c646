//! Real C++ names, long ones among them.

use std::io::Write;
use std::process::{Command, Stdio};

/// Pairs of names: mangled, and as displayed.
fn table() -> Vec<(&'static str, &'static str)> {
    let lines = include_str!("cpp_names.txt").lines();
    let lines: Vec<&str> = lines.filter(|line| !line.starts_with('#')).collect();
    let pairs = lines.chunks_exact(2).map(|pair| (pair[0], pair[1].trim_start()));
    pairs.collect()
}

#[test]
fn names_are_displayed_as_expected() {
    let table = table();
    assert!(table.len() > 90, "{}", table.len());
    for (mangled, expected) in table {
        assert_eq!(symbolize::demangle(mangled), expected, "{mangled}");
    }
}

/// Where c++filt shows something else: it leaves names as they are (`_`), or parameters of nested functions stand for those of
/// another (binutils 2.40).
const DIFFERENT: &[&str] = &["_ZNSt9once_flag18_Prepare_executionC2"];

/// c++filt has parentheses around more operands, and full names of strings and streams.
fn plain(name: &str) -> String {
    let name = name.split(" [clone ").next().unwrap_or(name);
    let mut name: String = name.chars().filter(|c| !"() ".contains(*c)).collect();
    for (short, full) in [
        (
            "std::string",
            "std::basic_string<char,std::char_traits<char>,std::allocator<char>>",
        ),
        ("std::istream", "std::basic_istream<char,std::char_traits<char>>"),
        ("std::ostream", "std::basic_ostream<char,std::char_traits<char>>"),
        ("std::iostream", "std::basic_iostream<char,std::char_traits<char>>"),
    ] {
        name = name.replace(full, short);
    }
    name
}

#[test]
#[cfg_attr(not(feature = "tool-tests"), ignore = "needs c++filt")]
fn names_are_those_of_binutils() {
    let table = table();
    let input: String = table.iter().map(|(mangled, _)| format!("{mangled}\n")).collect();
    let started = Command::new("c++filt")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = started else {
        println!("skipped: no c++filt");
        return;
    };
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().expect("ends");
    writer.join().expect("no panic").expect("written");
    let shown = String::from_utf8(output.stdout).expect("text");
    let mut compared = 0;
    for ((mangled, ours), theirs) in table.iter().zip(shown.lines()) {
        if theirs.starts_with('_') || DIFFERENT.iter().any(|start| mangled.starts_with(start)) {
            continue;
        }
        compared += 1;
        assert_eq!(plain(ours), plain(theirs), "{mangled}");
    }
    assert!(compared > 80, "{compared}");
}

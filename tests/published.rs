//! Allocations that programs sample themselves and publish at probes (USDT), read from outside.

use common::recording::{Recording, Running, attach_to_work};
use common::{Program, Scratch, live, nativeprof, programs, record};

mod common;

const OPTIONS: &[&str] = &["--mode", "alloc"];
const BLOCKS: u64 = 100;

/// What each function of `published.c` publishes: bytes, blocks (in hundredths), and bytes that are live in the end.
const KNOWN: &[(&str, u64, u64, u64)] = &[
    ("kept", BLOCKS * 10_000 + 4950, 100_495, BLOCKS * 10_000 + 4950),
    ("freed", BLOCKS * 6000, 30_000, 0),
    ("half_freed", BLOCKS * 4500, 150_000, BLOCKS / 2 * 4500),
    ("with_constants", BLOCKS * 524_288, 81_920_000, BLOCKS * 524_288),
    ("same_address", BLOCKS * 5000, 1_000_000, 5000),
    ("by_thread", BLOCKS * 7000, 100_000, BLOCKS * 7000),
];

/// Compares each value of each function with what is known.
fn check_known(recording: &Recording) {
    let profile = &recording.profile;
    let of = |value: &str, function: &str| -> u64 {
        let value = profile.find_value(value).expect("a value of the recording");
        let nodes = profile.nodes.iter().zip(profile.amounts(value));
        let of_function = nodes.filter(|(node, _)| profile.frames[node.frame as usize].name == function);
        of_function.map(|(_, amount)| amount).sum()
    };
    for (function, bytes, blocks, live) in KNOWN {
        let seen = (of("alloc_bytes", function), of("live_bytes", function));
        assert_eq!(seen, (*bytes, *live), "{function}\n{}", recording.stderr);
        // Rounding carries over to the next block, which may be of another function.
        let seen = of("allocs", function);
        assert!(
            (100 * seen).abs_diff(*blocks) <= 100,
            "{function}: {seen}\n{}",
            recording.stderr
        );
    }
    let default = &profile.value_types()[profile.default_value()];
    assert_eq!((default.kind.key().as_str(), profile.meta.rate), ("alloc_bytes", 0));
    let quality = &profile.meta.quality;
    assert_eq!((quality.lost, quality.taken), (0, 6 * BLOCKS), "{}", recording.stderr);
    assert!(quality.exact * 100 >= quality.taken * 99, "{}", recording.stderr);
    assert!(!recording.stderr.contains("limit:"), "{}", recording.stderr);
    assert!(recording.stderr.contains("  memory:   about "), "{}", recording.stderr);
}

#[test]
fn published_allocations_are_known_by_function() {
    let _live = live();
    check_known(&attach_to_work(programs::published(&[], false), OPTIONS, &[]));
}

/// The program for older kernels, and children.
#[test]
fn every_program_for_a_kernel_reads_them() {
    let _live = live();
    let words = [OPTIONS, &["--subprocesses"]].concat();
    let command = programs::published(&[], false);
    check_known(&attach_to_work(command, &words, &[("NATIVEPROF_BPF_OBJECT", "5.8")]));
}

/// A library that is loaded while its process is recorded.
#[test]
fn libraries_that_are_loaded_later_publish() {
    let _live = live();
    check_known(&attach_to_work(programs::published(&[], true), OPTIONS, &[]));
}

/// A command from its start, and a program that a recorded process executes.
#[test]
fn commands_and_executed_programs_publish() {
    let _live = live();
    check_known(&record(OPTIONS, &programs::published(&["observed"], false)));
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    // (Of the same file, all probes would be observed before it is known where they are now.)
    let mut command = programs::published(&["exec"], false);
    let copy = scratch.path("copy");
    std::fs::copy(command.get_program(), &copy).expect("copied");
    command.arg(&copy);
    let mut program = Program::start(command);
    let mut ours = nativeprof(&["attach", &program.pid().to_string(), "-o"]);
    ours.arg(&file).args(OPTIONS);
    let mut running = Running::start(ours);
    program.send("go");
    let recording = Recording::of(&file, running.finish());
    program.finish();
    check_known(&recording);
}

/// What a program that does not publish anything is told to do instead.
#[test]
fn processes_that_publish_nothing_are_refused() {
    let _live = live();
    let program = Program::start(programs::known_growth(&[]));
    let pid = program.pid().to_string();
    for words in [&["attach", &pid][..], &["record", "--", "true"]] {
        let scratch = Scratch::new();
        let file = scratch.path("profile.json");
        let mut ours = nativeprof(&[words[0], "--mode", "alloc", "-o"]);
        let done = ours.arg(&file).args(&words[1..]).output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && !file.exists(), "{said}");
        for part in ["no process publishes", "otel_memory:alloc", "--mode rss", "--alloc"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
    for (words, part) in [
        (
            &["--interval", "64KiB"][..],
            "--interval cannot be used with --mode alloc",
        ),
        (&["--save-tape", "x.tape"], "--save-tape cannot be used"),
        (
            &["--backend", "ptrace"],
            "--backend ptrace cannot be used with --mode alloc",
        ),
    ] {
        let mut ours = nativeprof(&["attach", &pid, "--mode", "alloc"]);
        let done = ours.args(words).output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(2) && said.contains(part), "{said}");
    }
}

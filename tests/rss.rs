//! Growth of resident memory by stack: what grew, what of it is still there, what was given back; and the account.

use std::collections::BTreeMap;
use std::process::Command;

use common::recording::{Recording, Running, attach_to_work};
use common::{Program, Scratch, live, nativeprof, programs, record};
use nativeprof::profile::memory_over_time::ObservedMemory;

mod common;

const MIB: u64 = 1 << 20;
/// Bytes between two samples in these tests.
const INTERVAL: u64 = 64 << 10;
const OPTIONS: &[&str] = &["--mode", "rss", "--interval", "64KiB", "--max-overhead", "100"];

/// What each function of `known_growth.c` does, in MiB: grown, of that resident in the end, given back.
const KNOWN: &[(&str, u64, u64, u64)] = &[
    ("kept", 16, 16, 0),
    ("unmapped", 16, 0, 16),
    ("given_back_twice", 32, 8, 24),
    ("filled_at_once", 16, 16, 0),
    ("areas_filled_at_once", 16, 16, 0),
    ("areas_moved", 16, 16, 0),
    ("moved", 16, 16, 0),
    ("heap_lowered", 16, 8, 8),
    ("file_shortened", 16, 8, 8),
    ("written_after_reading", 32, 16, 16),
    ("only_read", 0, 0, 0),
    ("by_thread", 16, 16, 0),
];

/// Inclusive bytes of a value by function.
fn by_function(recording: &Recording, value: &str) -> BTreeMap<String, u64> {
    let profile = &recording.profile;
    let value = profile.find_value(value).expect("a value of the recording");
    let mut sums = BTreeMap::new();
    for (node, amount) in profile.nodes.iter().zip(profile.amounts(value)) {
        let frame = &profile.frames[node.frame as usize];
        *sums.entry(frame.name.clone()).or_default() += amount;
    }
    sums
}

/// Compares each value of each function with what is known, within four standard deviations of samples that each page has the
/// same chance to be in.
fn check_known(recording: &Recording, has_ended: bool) {
    let of = |value| by_function(recording, value);
    let seen = [of("rss_grown_bytes"), of("rss_bytes"), of("rss_returned_bytes")];
    for (function, grown, resident, returned) in KNOWN {
        let known = [grown, resident, returned];
        for ((seen, known), what) in seen.iter().zip(known).zip(["grown", "resident", "given back"]) {
            // Which pages went with the end of a file is looked up: not in time, perhaps, where the process ends at once.
            if has_ended && (*function, what) == ("file_shortened", "resident") {
                continue;
            }
            let (seen, known) = (seen.get(*function).copied().unwrap_or(0), known * MIB);
            let band = 4.0 * ((known * INTERVAL) as f64).sqrt() + 4096.0;
            let distance = seen.abs_diff(known) as f64;
            assert!(
                distance <= band,
                "{function}: {seen} bytes {what}, not {known}\n{}",
                recording.stderr
            );
        }
    }
}

/// A recording of the program that grows, which runs with `words` and rests at both ends.
fn attached(words: &[&str], options: &[&str]) -> Recording {
    attach_to_work(programs::known_growth(words), options, &[])
}

/// What was resident when most was, beside what is in the end.
#[test]
fn memory_at_the_peak() {
    let _live = live();
    let recording = attached(&["peak"], &[OPTIONS, &["--at", "peak"]].concat());
    let profile = &recording.profile;
    let default = &profile.value_types()[profile.default_value()];
    assert_eq!(default.kind.key(), "rss_peak_bytes");
    let (peak, end) = (
        by_function(&recording, "rss_peak_bytes"),
        by_function(&recording, "rss_bytes"),
    );
    for (function, at_peak, in_the_end) in [("kept", 16, 16), ("needed_for_a_while", 32, 0), ("kept_later", 0, 8)] {
        for (seen, known) in [(&peak, at_peak), (&end, in_the_end)] {
            let (seen, known) = (seen.get(function).copied().unwrap_or(0), known * MIB);
            let band = 4.0 * ((known * INTERVAL) as f64).sqrt() + 4096.0;
            assert!(
                seen.abs_diff(known) as f64 <= band,
                "{function}: {seen} bytes, not {known}\n{}",
                recording.stderr
            );
        }
    }
    let [memory] = &profile.meta.memory[..] else {
        panic!("one account: {:?}", profile.meta.memory)
    };
    let highest = memory.peak.expect("a peak");
    assert!(
        highest.bytes.abs_diff(memory.total().start + 48 * MIB) <= MIB,
        "{memory:?}"
    );
    assert!((highest.time as f64) < profile.meta.duration * 1e9, "{memory:?}");
    let without = attached(&["peak"], OPTIONS);
    for (recording, is_pointed_to) in [(recording, false), (without, true)] {
        let said = &recording.stderr;
        assert!(
            said.contains("peak: ") && said.contains("report --value rss_peak_bytes") == is_pointed_to,
            "{said}"
        );
    }
}

/// A command may have ended before its memory is observed.
#[test]
fn commands_that_end_at_once_leave_a_profile() {
    let _live = live();
    let scratch = Scratch::new();
    for turn in 0..5 {
        let file = scratch.path(&format!("{turn}.json"));
        let mut ours = nativeprof(&["record", "--mode", "rss", "-o", &file.to_string_lossy(), "--", "true"]);
        let done = ours.output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success() && file.exists(), "{said}");
    }
}

/// The longest interval between samples that the budget led to, bytes: `one for 16.00 KiB to 4.00 MiB on average`.
fn longest_interval(said: &str) -> f64 {
    let (_, range) = said.split_once(": one for ").expect("what the budget left out");
    let (_, longest) = range.split_once(" to ").expect("a range");
    let (number, rest) = longest.split_once(' ').expect("a number and a unit");
    let unit = match rest.split_once(' ').map(|(unit, _)| unit) {
        Some("KiB") => 1024.0,
        Some("MiB") => MIB as f64,
        Some("GiB") => 1024.0 * MIB as f64,
        _ => panic!("{said}"),
    };
    unit * number.parse::<f64>().expect("a number")
}

/// Fewer samples than the interval asks for stand for as much.
#[test]
fn samples_within_a_budget_stand_for_more() {
    let _live = live();
    let options = ["--mode", "rss", "--interval", "16KiB", "--max-overhead", "0.1"];
    let recording = attached(&[], &options);
    let profile = &recording.profile;
    assert!(
        recording.stderr.contains("budget:") && profile.meta.quality.lost == 0,
        "{}",
        recording.stderr
    );
    let value = profile.find_value("rss_grown_bytes").expect("a value of the recording");
    let amounts: Vec<f64> = (0..profile.timeline.len())
        .map(|at| profile.sample_amount(value, at) as f64)
        .collect();
    let (seen, squares): (f64, f64) = (amounts.iter().sum(), amounts.iter().map(|amount| amount * amount).sum());
    let grown = profile.meta.memory[0].total().grown as f64;
    // Where the machine is busy, the interval may get so long that what remains has no sample.
    let unseen = 10.0 * longest_interval(&recording.stderr);
    assert!(
        -5.0 * squares.sqrt() - unseen <= seen - grown && seen - grown <= 5.0 * squares.sqrt(),
        "{seen} bytes, not {grown}\n{}",
        recording.stderr
    );
    let known: u64 = KNOWN.iter().map(|row| row.1 * MIB).sum();
    assert!((grown - known as f64).abs() <= 2.0 * MIB as f64, "{}", recording.stderr);
}

#[test]
fn memory_belongs_to_the_function_that_touched_it() {
    let _live = live();
    let recording = attached(&[], OPTIONS);
    check_known(&recording, false);
    recording.check_quality("rss");
    // Of each sample the page fault is found, or what the system call fills.
    assert!(
        !recording.stderr.contains("it is not known where they lie"),
        "{}",
        recording.stderr
    );
    let profile = &recording.profile;
    let default = &profile.value_types()[profile.default_value()];
    assert_eq!(default.kind.key(), "rss_bytes");
    // The process rests at both ends: the account is that of all pages.
    let [memory] = &profile.meta.memory[..] else {
        panic!("one account: {:?}", profile.meta.memory)
    };
    let (total, measured) = (memory.total(), memory.measured.expect("measured at both ends"));
    let slack = 64 * 4096;
    assert!(total.start.abs_diff(measured.0) <= slack, "{memory:?}");
    assert!(total.end().abs_diff(measured.1) <= slack, "{memory:?}");
    let known: (u64, u64) = KNOWN.iter().fold((0, 0), |sum, row| (sum.0 + row.1, sum.1 + row.3));
    assert!(total.grown.abs_diff(known.0 * MIB) <= 2 * MIB, "{memory:?}");
    assert!(total.returned.abs_diff(known.1 * MIB) <= MIB, "{memory:?}");
    // Of the file that became shorter, and of the one that copies took the place of.
    assert!(memory.shared.grown.abs_diff(32 * MIB) <= MIB, "{memory:?}");
    assert!(recording.stderr.contains("grown"), "{}", recording.stderr);
    // Over time: from what there was to what there is.
    let observed = &profile.meta.memory_over_time;
    assert!(observed.times.len() > 1 && observed.times.is_sorted(), "{observed:?}");
    assert!(
        observed.times[observed.times.len() - 1] <= profile.end(),
        "{observed:?}"
    );
    let kinds: Vec<ObservedMemory> = observed.amounts.iter().map(|(kind, _)| *kind).collect();
    let expected = [ObservedMemory::Anonymous, ObservedMemory::File, ObservedMemory::Shared];
    assert_eq!(kinds, expected);
    let at = |row: usize| observed.amounts.iter().map(|(_, column)| column[row]).sum::<u64>();
    let last = at(observed.times.len() - 1);
    assert!(at(0).abs_diff(total.start) <= MIB, "{observed:?} {memory:?}");
    assert!(last.abs_diff(total.end()) <= slack, "{observed:?} {memory:?}");
}

/// A process that has ended is judged by the ranges that it gave back; its children, and programs that it executes, have accounts
/// of their own.
#[test]
fn commands_and_children_are_observed_from_their_start() {
    let _live = live();
    check_known(&record(OPTIONS, &programs::known_growth(&["now"])), true);
    let options = [OPTIONS, &["--subprocesses"]].concat();
    let recording = record(&options, &programs::known_growth(&["child"]));
    check_known(&recording, true);
    // (`record` gives one.)
    assert!(
        recording.stderr.contains("--rate has no effect"),
        "{}",
        recording.stderr
    );
    let accounts = &recording.profile.meta.memory;
    let grown: Vec<u64> = accounts
        .iter()
        .map(|memory| memory.total().grown / (16 * MIB))
        .collect();
    assert!(grown.contains(&13), "{accounts:?}");
    assert!(
        accounts.iter().all(|memory| memory.total().start < 16 * MIB),
        "{accounts:?}"
    );
}

/// Samples of a burst stand for as many page faults as those of a time with few.
#[test]
fn samples_of_events_have_weights() {
    let _live = live();
    let scratch = Scratch::new();
    let file = scratch.path("profile.json");
    let mut program = Program::start(programs::known_growth(&["faults"]));
    let mut ours = nativeprof(&[
        "attach",
        &program.pid().to_string(),
        "--event",
        "page-faults",
        "-r",
        "1000",
        "-o",
    ]);
    ours.arg(&file);
    let mut running = Running::start(ours);
    program.send("go");
    program.wait_for("DONE");
    running.signal("INT");
    let recording = Recording::of(&file, running.finish());
    program.send("end");
    program.finish();
    let faults = by_function(&recording, "page-faults");
    let of = |function: &str| faults.get(function).copied().unwrap_or(0) as f64;
    let (burst, slow) = (of("faults_in_a_burst"), of("faults_now_and_then"));
    let share = burst / (burst + slow).max(1.0);
    assert!(
        (0.35..0.65).contains(&share),
        "{burst} and {slow} faults\n{}",
        recording.stderr
    );
    let profile = &recording.profile;
    assert_eq!(profile.value_types()[profile.default_value()].kind.name, "page-faults");
}

#[test]
fn options_that_need_time_are_refused() {
    for words in [
        &["--mode", "rss", "--gil"][..],
        &["--mode", "rss", "--event", "page-faults"],
        &["--mode", "rss", "--wakers"],
        &["--mode", "rss", "--backend", "ptrace"],
        &["--mode", "rss", "--save-tape", "out.tape"],
        &["--mode", "rss", "--interval", "1"],
        &["--interval", "64KiB"],
        &["--max-overhead", "2"],
        &["--at", "peak"],
        &["--mode", "rss", "--max-overhead", "0"],
    ] {
        let mut ours: Command = nativeprof(&["record"]);
        let done = ours
            .args(words)
            .args(["--", "true"])
            .output()
            .expect("nativeprof starts");
        assert_eq!(done.status.code(), Some(125), "{words:?}");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(
            ["--mode", "interval", "PERCENT"].iter().any(|word| said.contains(word)),
            "{words:?}: {said}"
        );
    }
}

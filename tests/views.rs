//! Views of real recordings: without the interpreter's frames, stacks begin at the program's code in every interpreter of
//! this machine, and nothing that a user calls by name is missing.
//!
//! Needs the privileges to sample.

use std::collections::HashMap;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use nativeprof::profile::category::{GARBAGE_COLLECTION, START, THREAD_START};
use nativeprof::profile::folded::without_interpreter_frames;
use nativeprof::profile::interpreter_frames::{
    GLUE_SOURCES, KNOWN_BY_NAME, Role, Roles, is_interpreter_file, matches_name,
};
use nativeprof::profile::model::{Frame, FrameKind, Profile};
use object::{Object, ObjectSegment, ObjectSymbol};

use common::chance::{assert_likely, patience};
use common::recording::is_truncated;
use common::{Python, each_python, each_third_python, live, record};

mod common;

/// Samples that ended at each stack, root first.
fn stacks(profile: &Profile) -> Vec<(Vec<&Frame>, u64)> {
    let self_counts = profile.self_counts();
    let stack = |mut at: usize| {
        let mut stack = Vec::new();
        while at > 0 {
            stack.push(&profile.frames[profile.nodes[at].frame as usize]);
            at = profile.nodes[at].parent as usize;
        }
        stack.reverse();
        stack
    };
    let ends = (0..self_counts.len()).filter(|at| self_counts[*at] > 0);
    ends.map(|at| (stack(at), self_counts[at])).collect()
}

fn sampled(python: &Python) -> Profile {
    record(&[], &python.script("view_calls.py")).profile
}

/// Samples of the program's own functions whose stacks begin as they should.
#[test]
fn stacks_begin_at_the_programs_code() {
    let _live = live();
    each_third_python(0, |python| {
        let profile = sampled(python);
        let folded = without_interpreter_frames(&profile);
        assert_eq!(folded.amounts(0)[0], profile.amounts(0)[0], "{}", python.name);
        let roles = Roles::new(&folded.frames, &folded.meta.python);
        let (mut begun, mut all) = (0, 0);
        for (stack, count) in stacks(&folded) {
            let names: Vec<&str> = stack.iter().map(|frame| &*frame.name).collect();
            if is_truncated(&stack) || !names.contains(&"worker") {
                continue;
            }
            all += count;
            let is_begun = names.starts_with(&[START, "<module>", "main", "worker"])
                || names.starts_with(&[THREAD_START, "worker"]);
            begun += if is_begun { count } else { 0 };
            let last = stack
                .iter()
                .rposition(|frame| frame.kind == FrameKind::Python)
                .unwrap_or(0);
            for frame in &stack[1..last] {
                let role = roles.of(frame);
                let stays = frame.kind == FrameKind::Python || matches!(role, Role::Interpreter | Role::Other);
                assert!(stays, "{}: {} ({role:?}) in {names:?}", python.name, frame.name);
            }
        }
        assert_likely!(all > 500, "{}: {all} samples of the program", python.name);
        assert_eq!(begun, all, "{}: samples that begin as they should, of all", python.name);
    });
}

/// Collections are a row, with what began them above it, and the finalizers that they call below it. The program measures how
/// much of its time they take.
#[test]
fn garbage_collections_are_a_row() {
    let _live = live();
    each_python(|python| {
        let mut program = python.script("garbage.py");
        program.arg((2 * patience()).to_string());
        let recording = record(&[], &program);
        let folded = without_interpreter_frames(&recording.profile);
        let measured = recording
            .stderr
            .lines()
            .find_map(|line| line.strip_prefix("collections: ")?.parse::<f64>().ok());
        let measured = measured.expect("a share");
        let (mut all, mut collecting, mut outside) = (0, 0, 0);
        let mut below: HashMap<&str, u64> = HashMap::new();
        for (stack, count) in stacks(&folded) {
            let names: Vec<&str> = stack.iter().map(|frame| &*frame.name).collect();
            let Some(main) = names.iter().position(|name| *name == "main") else {
                continue;
            };
            all += count;
            let Some(row) = names.iter().position(|name| *name == GARBAGE_COLLECTION) else {
                // Finalizers run in collections alone.
                outside += if names.contains(&"finalize_slowly") { count } else { 0 };
                continue;
            };
            collecting += count;
            // Functions of the interpreter that allocate may stand between.
            let caller = stack[..row].iter().rev().find(|frame| frame.kind == FrameKind::Python);
            *below.entry(caller.map_or("", |frame| &*frame.name)).or_default() += count;
            assert!(row > main, "{}: {names:?}", python.name);
            // What extensions call in the interpreter stays, as elsewhere.
            let inside = stack.get(row + 1).filter(|frame| frame.kind != FrameKind::Python);
            assert!(
                inside.is_none_or(|frame| !is_interpreter_file(&frame.module)),
                "{}: {names:?}",
                python.name
            );
            if names.contains(&"finalize_slowly") {
                assert_eq!(names[row + 1], "__del__", "{}: {names:?}", python.name);
            }
        }
        if collecting == 0 {
            // Without symbols nothing says what is a collection.
            let is_named = |frame: &Frame| frame.name == "subtract_refs" || frame.name.contains("gc_collect");
            assert!(!recording.profile.frames.iter().any(is_named), "{}", python.name);
            eprintln!("{}: no symbols", python.name);
            return;
        }
        assert_eq!(
            outside, 0,
            "{}: samples of finalizers without a collection",
            python.name
        );
        let share = collecting as f64 / all as f64;
        eprintln!(
            "{}: {share:.3} of the samples, {measured:.3} of the time: {below:?}",
            python.name
        );
        assert_likely!(all > 1000, "{}: {all} samples", python.name);
        assert_likely!(
            (share - measured).abs() < 0.05,
            "{}: {share} of the samples, {measured} of the time",
            python.name
        );
        // From CPython 3.12 on, one that an allocation makes necessary begins where a function next begins or ends.
        for triggers in [&["make", "__init__"][..], &["collect_now"]] {
            let begun: u64 = triggers.iter().filter_map(|name| below.get(name)).sum();
            assert_likely!(begun * 10 > collecting, "{}: {below:?}", python.name);
        }
    });
}

/// The names alone find the glue that debug information would, for interpreters that come without it.
#[test]
fn names_find_the_glue() {
    let _live = live();
    each_third_python(1, |python| {
        let mut profile = sampled(python);
        let files = [
            "Python/ceval.c",
            "Python/ceval_gil.c",
            "Python/ceval_gil.h",
            "Python/generated_cases.c.h",
            "Objects/call.c",
            "Objects/methodobject.c",
            "Objects/descrobject.c",
        ];
        assert!(files.iter().all(|file| GLUE_SOURCES.contains(file)));
        let is_glue = |frame: &Frame| {
            let is_known = KNOWN_BY_NAME.iter().any(|pattern| matches_name(&frame.name, pattern));
            !is_known && files.iter().any(|file| frame.source.ends_with(file))
        };
        let glue: Vec<bool> = profile.frames.iter().map(is_glue).collect();
        let on_stacks = |profile: &Profile| -> u64 {
            let nodes = profile.nodes.iter().skip(1);
            let glue = nodes.filter(|node| glue.get(node.frame as usize) == Some(&true));
            glue.map(|node| node.count).sum()
        };
        let before = on_stacks(&profile);
        if !glue.contains(&true) {
            return; // No debug information says which they are.
        }
        profile.frames.iter_mut().for_each(|frame| frame.source.clear());
        let left = on_stacks(&without_interpreter_frames(&profile));
        assert_likely!(before > 1000, "{}: {before}", python.name);
        assert!(left * 20 <= before, "{}: {left} of {before} are left", python.name);
    });
}

/// C functions of a file by their address in it.
fn functions(path: &str) -> HashMap<u64, Vec<String>> {
    let bytes = fs::read(path).expect("a mapped file");
    let file = object::File::parse(&*bytes).expect("an ELF file");
    let base = file.segments().map(|segment| segment.address()).min().unwrap_or(0) & !0xfff;
    let mut functions: HashMap<u64, Vec<String>> = HashMap::new();
    for symbol in file
        .symbols()
        .chain(file.dynamic_symbols())
        .filter(|symbol| symbol.is_definition())
    {
        let name = symbol.name().unwrap_or_default().to_string();
        functions
            .entry(symbol.address() - base.min(symbol.address()))
            .or_default()
            .push(name);
    }
    functions
}

/// No C function behind a built-in function or method is taken for glue.
#[test]
fn functions_that_are_called_by_name_stay() {
    let named = AtomicUsize::new(0);
    each_third_python(2, |python| {
        let mut command: Command = python.script("c_functions.py");
        let done = command.output().expect("the interpreter starts");
        assert!(
            done.status.success(),
            "{}: {}",
            python.name,
            String::from_utf8_lossy(&done.stderr)
        );
        let text = String::from_utf8(done.stdout).expect("UTF-8");
        let mut files: HashMap<&str, HashMap<u64, Vec<String>>> = HashMap::new();
        let roles = Roles::new(&[], &format!("CPython 3.{}", python.minor));
        let mut checked = 0;
        for row in text.lines() {
            let [label, address, path] = row.splitn(3, ' ').collect::<Vec<_>>()[..] else {
                panic!("{}: {row}", python.name);
            };
            let address = u64::from_str_radix(address.trim_start_matches("0x"), 16).expect("an address");
            let names = files.entry(path).or_insert_with(|| functions(path)).get(&address);
            let module = path.rsplit('/').next().unwrap_or(path);
            // An alias of `__new__`, which is the same for all classes.
            for name in names.into_iter().flatten().filter(|name| *name != "tp_new_wrapper") {
                let role = roles.of(&Frame::native(name.as_str(), module, address));
                // A collection that is called by name is the row of collections.
                let is_collection = role == Role::Collection && label == "gc.collect";
                let stays = matches!(role, Role::Interpreter | Role::Other) || is_collection;
                assert!(stays, "{}: {label} is {name}: {role:?}", python.name);
                checked += 1;
            }
        }
        assert!(text.lines().count() > 1000, "{}: {text}", python.name);
        // Interpreters without a symbol table name none of them.
        assert!(checked == 0 || checked > 300, "{}: {checked}", python.name);
        named.fetch_add(usize::from(checked > 0), Relaxed);
    });
    assert!(
        named.into_inner() > 0,
        "no interpreter of this machine has a symbol table"
    );
}

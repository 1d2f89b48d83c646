//! `heap`: a process of known objects, compared with what it says of itself and with the kernel's own sums.
//!
//! Needs root, gcc and CPython; fails with a message where one is missing.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use common::pythons::{each_of, with_known_heap};
use common::{Program, Python, Scratch, nativeprof, newest_python, programs, pythons};

mod common;

fn printed(words: &[&str]) -> String {
    let done = nativeprof(words).output().expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{words:?}: {said}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn heap(pid: u32, words: &[&str]) -> Value {
    let pid = pid.to_string();
    let text = printed(&[&["heap", &pid, "--format", "json"], words].concat());
    serde_json::from_str(&text).expect("JSON")
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("a number, not {value}"))
}

/// Bytes by part. They sum to what is resident.
fn parts(heap: &Value) -> BTreeMap<String, u64> {
    let rows = heap["parts"].as_array().expect("parts").iter();
    let parts: BTreeMap<String, u64> = rows
        .map(|row| (row["name"].as_str().expect("a name").to_string(), number(&row["bytes"])))
        .collect();
    assert_eq!(parts.values().sum::<u64>(), number(&heap["rss_bytes"]));
    parts
}

/// The bytes of each type are divided among parts; sums of the types by part.
fn parts_of_types(heap: &Value) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for row in heap["types"].as_array().expect("types") {
        let bytes = number(&row["bytes"][0]);
        let parts = row["parts"].as_object().expect("parts");
        let divided: u64 = parts.values().map(number).sum();
        assert!(divided.abs_diff(bytes) <= bytes / 100 + 1024, "{row}");
        for (part, bytes) in parts {
            *sums.entry(part.clone()).or_default() += number(bytes);
        }
    }
    sums
}

/// What the kernel says of a process: its resident memory, the memory of its page tables and its page faults.
fn kernel_view(pid: u32) -> (u64, String, String) {
    let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).expect("it runs");
    let rollup = read("smaps_rollup");
    let rollup = String::from_utf8_lossy(&rollup);
    let rss = rollup.lines().find_map(|line| line.strip_prefix("Rss:")).expect("Rss");
    let rss = rss.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024;
    let status = read("status");
    let status = String::from_utf8_lossy(&status);
    let tables = status.lines().find(|line| line.starts_with("VmPTE")).expect("VmPTE");
    let stat = read("stat");
    let stat = String::from_utf8_lossy(&stat);
    let after_name = stat.rsplit_once(") ").expect("a name").1;
    let faults: Vec<&str> = after_name.split(' ').skip(7).take(4).collect();
    (rss, tables.to_string(), faults.join(" "))
}

fn python() -> &'static Python {
    let wanted = pythons().iter().find(|python| python.name.contains("3.12"));
    wanted.unwrap_or_else(|| newest_python())
}

/// Numbers after `kind name` in the program's output.
fn said(program: &Program, start: &str) -> Option<Vec<u64>> {
    let line = program.said.iter().find_map(|line| line.strip_prefix(start))?;
    Some(line.split_whitespace().filter_map(|word| word.parse().ok()).collect())
}

#[test]
fn a_known_heap() {
    let mut program = Program::start(python().script("heap_objects.py"));
    let before = kernel_view(program.pid());
    let full = heap(program.pid(), &["--all"]);
    let sampled = heap(program.pid(), &["--budget", "1ms"]);
    assert_eq!(kernel_view(program.pid()), before, "reading changes nothing");

    let amounts = parts(&full);
    let rss = number(&full["rss_bytes"]);
    assert!(rss.abs_diff(before.0) * 100 <= rss, "{rss} and {}", before.0);
    assert!(
        amounts["unknown"] * 100 <= rss && amounts["python_arenas"] == 0,
        "{amounts:?}"
    );
    for part in [
        "python_objects",
        "python_free_blocks",
        "c_in_use",
        "c_free",
        "stacks",
        "files_private",
        "files_shared",
    ] {
        assert!(amounts[part] > 0, "{part}: {amounts:?}");
    }
    check_c_heap(&program, &full);

    let types = full["types"].as_array().expect("types");
    let row = |name: &str| {
        types
            .iter()
            .find(|row| row["name"].as_str().is_some_and(|n| n.rsplit('.').next() == Some(name)))
    };
    for (name, more) in [("HeapPlain", 0), ("HeapSlots", 0), ("float", 1000), ("bytearray", 1010)] {
        let row = row(name).unwrap_or_else(|| panic!("no {name}"));
        let made = said(&program, &format!("COUNT {name} ")).expect("a count")[0];
        let [value, low, high] = [0, 1, 2].map(|i| number(&row["count"][i]));
        assert!((made..=made + more).contains(&value), "{name}: {value}, not {made}");
        assert_eq!((low, high), (value, value), "{name}: everything was read");
    }
    assert_eq!(full["pools"]["is_full"], true);
    let large = full["large"].as_array().expect("large blocks");
    let mine = large
        .iter()
        .find(|block| number(&block["bytes"]) > 9 << 20)
        .expect("the large block");
    assert_eq!((&mine["owner"], &mine["type"]), (&"object".into(), &"bytearray".into()));

    parts(&sampled);
    let ordered =
        |estimate: &Value| number(&estimate[1]) <= number(&estimate[0]) && number(&estimate[0]) <= number(&estimate[2]);
    for row in sampled["types"].as_array().expect("types") {
        assert!(ordered(&row["count"]) && ordered(&row["bytes"]), "{row}");
    }

    let text = printed(&["heap", &program.pid().to_string(), "--sample", "float"]);
    // Floats of this program are whole numbers.
    assert!(
        text.lines()
            .any(|line| line.starts_with("  0x") && line.ends_with(".0")),
        "{text}"
    );
    for expected in ["HeapPlain", "C heap: free but kept", "CPython 3."] {
        assert!(text.contains(expected), "{expected}: {text}");
    }

    program.send("grow");
    program.wait_for("GROWN");
    check_growth(&full, &heap(program.pid(), &["--all"]));
}

/// A child has the pages that its parent wrote, and nothing else until it needs it: not the names of types.
#[test]
fn a_forked_child_has_the_types_of_its_parent() {
    each_of(with_known_heap(), |python| {
        let mut program = Program::start(python.script("forked_heap.py"));
        let child = said(&program, "CHILD ").expect("a child")[0] as u32;
        let before = kernel_view(child);
        let census = heap(child, &["--all"]);
        assert_eq!(kernel_view(child), before, "reading changes nothing");
        assert!(
            number(&census["private_bytes"]) * 2 < number(&census["rss_bytes"]),
            "its parent has most of it: {census}"
        );
        let types = census["types"].as_array().expect("types");
        for (name, least) in [
            ("__main__.ForkedPlain", 3000),
            ("float", 20_000),
            ("dict", 2000),
            ("str", 2000),
        ] {
            let row = types.iter().find(|row| row["name"] == name);
            let count = row.map_or(0, |row| number(&row["count"][0]));
            assert!((least..least + 20_000).contains(&count), "{name}: {count}");
        }
        program.finish();
    });
}

/// Compares the C heap with what mallinfo2(3) says, which glibc has since 2.33.
fn check_c_heap(program: &Program, census: &Value) {
    let Some(said) = said(program, "GLIBC ") else {
        return;
    };
    let glibc = &census["glibc"];
    for (key, expected) in [("system", said[0]), ("in_use", said[1]), ("free", said[2])] {
        let found = number(&glibc[key]);
        assert!(
            found.abs_diff(expected) * 50 <= said[0],
            "{key}: {found}, not {expected}"
        );
    }
    assert_eq!(glibc["arenas"].as_array().map(Vec::len), Some(2), "{glibc:#}");
    assert_eq!(number(&glibc["not_read"]), 0);
    assert!(number(&glibc["returnable"]) <= number(&glibc["free_resident"]));
    assert!(number(&glibc["free_resident"]) <= number(&glibc["free"]));
    // The large block, which has a mapping of its own.
    assert!(parts(census)["c_large"] >= 9 << 20, "{glibc:#}");
}

/// The newest interpreters that the tests use have a C library of their own, a newer one.
#[test]
fn the_c_heap_of_a_newer_library() {
    let program = Program::start(newest_python().script("heap_objects.py"));
    check_c_heap(&program, &heap(program.pid(), &["--all"]));
}

/// Two censuses, between which the program made 20,000 objects more.
fn check_growth(before: &Value, after: &Value) {
    let scratch = Scratch::new();
    let write = |name: &str, census: &Value| {
        let path = scratch.path(name);
        fs::write(&path, census.to_string()).expect("a file");
        path.display().to_string()
    };
    let (before, after) = (write("before.json", before), write("after.json", after));
    let diff: Value = serde_json::from_str(&printed(&["diff", &before, &after, "--json"])).expect("JSON");
    let first = &diff["types"][0];
    assert_eq!(
        first["name"].as_str().and_then(|name| name.rsplit('.').next()),
        Some("HeapSlots"),
        "{first}"
    );
    assert_eq!(number(&first["count"][1][0]) - number(&first["count"][0][0]), 20_000);
    assert_eq!(first["significant"], true);
    let text = printed(&["diff", &before, &after]);
    assert!(
        text.contains("+20000") && text.contains("HeapSlots") && text.contains("resident"),
        "{text}"
    );
    assert!(printed(&["diff", &before, &before]).contains("No type has changed significantly"));

    let profile = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/golden/profile.json");
    for (words, expected) in [
        (&["diff", &before, profile][..], "is no census of memory"),
        (&["diff", &before, &after, "--self"], "of no use for a census"),
        (&["report", &before], "nativeprof: "),
    ] {
        let done = nativeprof(words).output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains(expected), "{words:?}: {said}");
    }
}

/// A series ends with its process; each of its lines is a census.
#[test]
fn a_series_is_a_line_each_time() {
    let mut target = Program::start({
        let mut command = Command::new(&python().exe);
        command.args(["-c", "print('READY', flush=True); input()"]);
        command
    });
    let pid = target.pid().to_string();
    let mut command = nativeprof(&["heap", &pid, "--format", "json", "--every", "0.01", "--budget", "10ms"]);
    let mut series = command.stdout(Stdio::piped()).spawn().expect("nativeprof starts");
    let mut lines = BufReader::new(series.stdout.take().expect("a pipe")).lines();
    let mut last = 0;
    for _ in 0..2 {
        let line = lines.next().expect("a line").expect("text");
        let census: Value = serde_json::from_str(&line).expect("JSON");
        parts(&census);
        assert!(number(&census["time_ms"]) > last);
        last = number(&census["time_ms"]);
    }
    target.send("");
    target.finish();
    assert!(lines.all(|line| line.is_ok()));
    assert!(series.wait().expect("it ends").success());
}

/// A program without Python, of which the C library is linked statically in the second case.
#[test]
fn programs_without_python_have_c_parts() {
    let scratch = Scratch::new();
    let source = scratch.path("blocks.c");
    fs::write(
        &source,
        "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n\
         int main(void) { static char *p[4000]; for (int i = 0; i < 4000; i++) { p[i] = malloc(5000); memset(p[i], 1, 5000); }\n\
         for (int i = 0; i < 4000; i += 2) free(p[i]);\n\
         puts(\"READY\"); fflush(stdout); char c; return read(0, &c, 1) < 0; }\n",
    )
    .expect("a file");
    for (name, linking) in [("blocks", &[][..]), ("static_blocks", &["-static"])] {
        let program = scratch.path(name);
        programs::compile(&source, &program, linking);
        let target = Program::start(Command::new(&program));
        let found = heap(target.pid(), &[]);
        let amounts = parts(&found);
        // 2000 chunks of 5008 bytes each, and what surrounds them.
        for part in ["c_in_use", "c_free"] {
            assert!(
                (10_000_000..10_500_000).contains(&amounts[part]),
                "{linking:?}: {part}: {amounts:?}"
            );
        }
        // Some free chunks have a whole page.
        assert!(number(&found["glibc"]["returnable"]) > 0);
        let (pools, types) = (&found["pools"], found["types"].as_array());
        assert!(pools.is_null() && types.is_some_and(Vec::is_empty));
        let text = printed(&["heap", &target.pid().to_string()]);
        assert!(text.contains("no Python found"), "{text}");
    }
}

/// Blocks that no type of Python says anything about have their sizes, and objects of C++ their classes.
#[test]
fn blocks_of_the_c_heap_have_sizes_and_classes() {
    for command in programs::classes() {
        let name = format!("{command:?}");
        let mut target = Program::start(command);
        let scratch = Scratch::new();
        let [before, after] = ["before.json", "after.json"].map(|file| scratch.path(file));
        let pid = target.pid();
        let save = |path: &Path| {
            let census = heap(pid, &[]);
            fs::write(path, census.to_string()).expect("a file");
            census
        };
        let first = save(&before);
        let rows = first["c_blocks"].as_array().expect("blocks");
        let count = |class: Option<&str>, usable: u64| {
            let is_it = |row: &&Value| row["class"].as_str() == class && row["usable_bytes"] == usable;
            rows.iter().find(is_it).map_or(0, |row| number(&row["count"]))
        };
        // Each chunk has 8 bytes for itself, and its size is a multiple of 16.
        for (class, usable, made) in [
            ("known::Widget", 56, 3000),
            ("known::Holder<int>", 72, 2000),
            ("(anonymous namespace)::Hidden", 120, 500),
            ("std::runtime_error", 24, 100),
        ] {
            assert_eq!(count(Some(class), usable), made, "{name}: {class}: {rows:?}");
        }
        let plain = count(None, 200);
        assert!((1000..1010).contains(&plain), "{name}: {plain}");
        let text = printed(&["heap", &pid.to_string()]);
        assert!(
            text.contains("3000  187.5 KiB  known::Widget of 41 to 56 bytes"),
            "{text}"
        );

        target.send("more");
        target.wait_for("GROWN");
        save(&after);
        let paths = [&before, &after].map(|path| path.to_str().expect("UTF-8"));
        let text = printed(&["diff", paths[0], paths[1]]);
        assert!(
            text.contains("+700  +43.75 KiB  known::Widget of 41 to 56 bytes"),
            "{text}"
        );
        target.finish();
    }
}

/// A census is written as what the name of its file says; a saved one is exported as a page.
#[test]
fn a_census_is_written_to_a_file() {
    let scratch = Scratch::new();
    let target = Program::start(python().script("heap_objects.py"));
    let pid = target.pid().to_string();
    let name = |path: &std::path::Path| path.to_str().expect("a path").to_string();
    let [page, json, text] = ["heap.html", "heap.json", "heap.txt"].map(|file| scratch.path(file));
    for path in [&page, &json, &text] {
        printed(&["heap", &pid, "--all", "-o", &name(path)]);
    }
    let census: Value = serde_json::from_slice(&fs::read(&json).expect("a file")).expect("JSON");
    let (whole, of_types) = (parts(&census), parts_of_types(&census));
    // Nearly all of Python's own memory is that of types; what they have in the C heap is some of it.
    let share = of_types["python_objects"] as f64 / whole["python_objects"] as f64;
    assert!((0.9..1.05).contains(&share), "{of_types:?} {whole:?}");
    assert!(
        of_types["c_in_use"] <= whole["c_in_use"] * 21 / 20,
        "{of_types:?} {whole:?}"
    );
    assert!(fs::read_to_string(&text).expect("text").contains("C heap: in use"));
    let is_page = |path: &std::path::Path| fs::read_to_string(path).expect("text").starts_with("<!doctype html>");
    assert!(is_page(&page) && printed(&["heap", &pid, "-f", "html"]).starts_with("<!doctype html>"));
    // No other user may read values of --sample.
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(&page).expect("a file").permissions().mode() & 0o777, 0o600);
    let exported = scratch.path("exported.html");
    printed(&["export", &name(&json), "-o", &name(&exported)]);
    assert!(is_page(&exported));
    assert!(printed(&["export", &name(&json), "-f", "html", "-o", "-"]).starts_with("<!doctype html>"));
    for (words, code, part) in [
        (
            vec!["export", "heap.json", "-o", "heap.svg"],
            2,
            "exported as a page only",
        ),
        (vec!["export", "heap.json", "-f", "svg"], 2, "exported as a page only"),
        (
            vec!["export", "heap.json", "-f", "html", "-o", "heap.json"],
            2,
            "is the input and the output",
        ),
        (
            vec!["heap", &pid, "-o", "heap.png"],
            2,
            "supported extensions: .html, .json, .txt",
        ),
        (
            vec!["heap", &pid, "-f", "html", "--every", "1"],
            2,
            "a page shows one census",
        ),
        (
            vec!["heap", &pid, "-o", "no/heap.html"],
            1,
            "directory no does not exist",
        ),
    ] {
        let mut command = nativeprof(&words);
        let done = command
            .current_dir(scratch.directory())
            .output()
            .expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(part), "{words:?}: {said}");
    }
}

#[test]
fn refusals_say_why() {
    for (words, code, parts) in [
        (&["heap"][..], 2, &["missing argument <PID|NAME>"][..]),
        (&["heap", "99999999"], 1, &["no process 99999999", "pgrep"]),
        (
            &["heap", "1", "--budget", "0"],
            2,
            &["SECONDS must be a number above 0"],
        ),
        (&["heap", "1", "--budget", "1", "--all"], 2, &["--budget", "--all"]),
        (&["heap", "1", "--format", "xml"], 2, &["xml", "json"]),
    ] {
        let done = nativeprof(words).output().expect("nativeprof starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{words:?}: {said}");
        for part in parts {
            assert!(said.contains(part), "{words:?}: {part}: {said}");
        }
    }
}

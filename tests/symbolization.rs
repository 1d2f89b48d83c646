//! Names that are not in the mapped file: debug files in the target's own root, JIT code, debuginfod.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use common::chance::{assert_likely, repeated};
use common::pythons::some_at_a_time;
use common::recording::{Running, attach_while};
use common::{Program, Recording, Scratch, attach, live, nativeprof, programs, pythons, record};
use nativeprof::profile::model::{Frame, FrameKind, ModuleMeta, Node, Profile};

fn run(command: &mut Command) {
    let done = command.output().expect("the tool is there (.ci/setup installs it)");
    assert!(
        done.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// The row of the table whose path contains this.
fn row<'a>(recording: &'a Recording, path: &str) -> &'a ModuleMeta {
    let rows = &recording.profile.meta.modules;
    let found = rows.iter().find(|m| m.path.contains(path));
    found.unwrap_or_else(|| panic!("no row for {path} in {rows:?}"))
}

fn share(recording: &Recording, wanted: &str) -> f64 {
    recording.with(wanted) as f64 / recording.samples() as f64
}

/// A root directory with the stripped program in it, and its debug file where packages put it.
fn small_root(scratch: &Scratch) -> String {
    let full = common::built().join("jit");
    programs::compile(&common::sources().join("jit.c"), &full, &["-static", "-Wl,--build-id"]);
    let make_directory = |name: &str| fs::create_dir_all(scratch.path(name)).expect("made");
    make_directory("tmp");
    fs::set_permissions(scratch.directory(), fs::Permissions::from_mode(0o755)).expect("changed");
    let file = fs::File::open(&full).expect("opened");
    let module = symbolize::Module::from_file(file).expect("an ELF file");
    let id: String = module
        .build_id()
        .expect("a build id")
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    make_directory(&format!("usr/lib/debug/.build-id/{}", &id[..2]));
    let place = format!("/usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);
    // An absolute link, as some packages have it: it must be resolved within the root.
    make_directory("opt");
    let debug = scratch.path("opt/jit.debug");
    run(Command::new("objcopy").arg("--only-keep-debug").args([&full, &debug]));
    std::os::unix::fs::symlink("/opt/jit.debug", scratch.path(&place[1..])).expect("linked");
    run(Command::new("strip").arg("-o").args([&scratch.path("prog"), &full]));
    place
}

#[test]
fn a_container_has_its_own_files_and_numbers() {
    let _live = live();
    repeated(|| {
        let scratch = Scratch::new();
        let place = small_root(&scratch);
        // In its own PID namespace the program is number 1, and its map has that number.
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "chroot"])
            .arg(scratch.directory())
            .args(["/prog", "400"]);
        let recording = record(&["--subprocesses", "-v"], &command);
        assert!(scratch.path("tmp/perf-1.map").exists());
        let jitted = "jitted_loop(int, \"a b\")";
        let (made, compiled) = (share(&recording, jitted), share(&recording, "compiled_loop"));
        assert_likely!(
            made > 0.2 && compiled > 0.2 && made + compiled > 0.9,
            "{made} {compiled}\n{}",
            recording.stderr
        );
        let frames = &recording.profile.frames;
        let of = |name: &str| {
            frames
                .iter()
                .find(|f| f.name == name)
                .unwrap_or_else(|| panic!("no {name}"))
        };
        assert_eq!(
            (of(jitted).kind, of(jitted).module.as_str()),
            (FrameKind::Native, "[jit]")
        );
        assert!(
            of("compiled_loop").source.ends_with("jit.c"),
            "{:?}",
            of("compiled_loop")
        );
        assert_eq!(of("step").kind, FrameKind::Inlined);

        let prog = row(&recording, "/prog");
        assert_eq!(
            (prog.symbols_from.as_str(), prog.symbols_missing.as_str()),
            (format!("DWARF, symbols, debug file {place}").as_str(), "")
        );
        assert_likely!(
            prog.samples as f64 >= 0.9 * recording.samples() as f64 && prog.frames >= prog.samples,
            "{prog:?}"
        );
        let code = row(&recording, "[anonymous code");
        assert_eq!(code.symbols_from, "perf map /tmp/perf-1.map");
        // Those in it at its start are not known yet to be the loop's.
        let others = code.samples.checked_sub(recording.with(jitted));
        assert_likely!(others.is_some_and(|n| n * 50 <= code.samples), "{others:?} of {code:?}");
        assert!(
            recording
                .stderr
                .contains(&format!("prog: {} samples; DWARF", prog.samples)),
            "{}",
            recording.stderr
        );

        // Without the debug file there are no names, and the summary lists what was searched. A map that neither the
        // program nor root wrote is not read: here it is a link.
        fs::remove_file(scratch.path(&place[1..])).expect("removed");
        fs::rename(scratch.path("tmp/perf-1.map"), scratch.path("map")).expect("renamed");
        std::os::unix::fs::symlink("/map", scratch.path("tmp/perf-1.map")).expect("linked");
        let recording = record(&["--subprocesses", "-v"], &command);
        assert_eq!(recording.with(jitted) + recording.with("compiled_loop"), 0);
        let (prog, code) = (row(&recording, "/prog"), row(&recording, "[anonymous code"));
        assert!(
            prog.symbols_from.starts_with("none") && prog.symbols_missing.contains(&place),
            "{prog:?}"
        );
        assert!(
            code.symbols_from.starts_with("none")
                && code
                    .symbols_missing
                    .starts_with("/tmp/perf-1.map is not used: it is a symbolic link"),
            "{code:?}"
        );
        assert!(
            recording.stderr.contains(&format!("no {place}")),
            "{}",
            recording.stderr
        );
    });
}

/// A program of `fixtures/programs`, with its arguments.
fn fixture(name: &str, args: &[&str]) -> Command {
    let exe = common::built().join(format!("{name}-dynamic"));
    programs::compile(&common::sources().join(format!("{name}.c")), &exe, &[]);
    let mut command = Command::new(exe);
    command.args(args);
    command
}

/// Names of the functions in JIT code, and their addresses, which distinguish functions with the same name.
fn jit_functions(recording: &Recording) -> BTreeSet<(&str, u64)> {
    let frames = recording.profile.frames.iter();
    let without_file = frames.filter(|f| f.module == "[jit]" || f.kind == FrameKind::Unknown && f.module.is_empty());
    without_file.map(|f| (f.name.as_str(), f.address)).collect()
}

#[test]
fn names_of_an_exited_program_are_kept() {
    let _live = live();
    repeated(|| {
        let (library, scratch) = (programs::plugins().join("plugin0.so"), Scratch::new());
        let mut program = Program::start(fixture("short_lived", &[library.to_str().expect("a path")]));
        let file = scratch.path("profile.json");
        let mut command = nativeprof(&["attach", &program.pid().to_string(), "-r", "1000", "-o"]);
        command.arg(&file);
        let mut ours = Running::start(command);
        // It sees the library only after the program and its directories in /proc are gone.
        ours.signal("STOP");
        while !process_state(ours.child.id()).starts_with('T') {
            std::thread::yield_now();
        }
        program.send("go");
        program.finish();
        ours.signal("CONT");
        let done = ours.finish();
        let recording = Recording::of(&file, done);
        let named = share(&recording, "plugin0_inner");
        assert_likely!(recording.samples() > 50 && named > 0.9, "{named}\n{}", recording.stderr);
        assert!(
            row(&recording, "/plugin0.so").symbols_from.starts_with("DWARF"),
            "{}",
            recording.stderr
        );
    });
}

/// The state letter of proc_pid_stat(5).
fn process_state(pid: u32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let (_, after) = stat.rsplit_once(") ").expect("a name in brackets");
    after.to_string()
}

#[test]
fn perf_maps_name_code_in_memory_that_looks_like_a_file() {
    for kind in ["memfd", "zero"] {
        let _live = live();
        repeated(|| {
            let recording = record(&[], &fixture("jit", &["200", kind]));
            let named = share(&recording, "jitted_loop(int, \"a b\")");
            assert_likely!(named > 0.3, "{kind}: {named}\n{}", recording.stderr);
            let code = row(&recording, "[anonymous code");
            let path = format!("/tmp/perf-{}.map", recording.profile.meta.pid);
            assert_eq!(code.symbols_from, format!("perf map {path}"), "{kind}");
            fs::remove_file(path).expect("the file that the program left");
        });
    }
}

#[test]
fn a_perf_map_is_opened_while_its_program_runs() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(fixture("jit", &["0", "gone"]));
        let recording = attach_while(program.pid(), &[], || {
            program.send("remove it");
            program.wait_for("GONE");
        });
        let named = share(&recording, "jitted_loop(int, \"a b\")");
        assert_likely!(named > 0.3, "{named}\n{}", recording.stderr);
    });
}

#[test]
fn a_perf_map_of_another_user_is_refused_by_name() {
    let _live = live();
    // The PID is not known in advance, except in its own PID namespace.
    let scratch = Scratch::new();
    small_root(&scratch);
    let map = scratch.path("tmp/perf-1.map");
    fs::write(&map, "0 ffffffffffff0000 malicious\n").expect("written");
    fs::set_permissions(&map, fs::Permissions::from_mode(0o666)).expect("changed");
    std::os::unix::fs::chown(&map, Some(12345), None).expect("tests of permissions are run by root");
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "chroot"])
        .arg(scratch.directory())
        .args(["/prog", "1000"]);
    let recording = record(&["--subprocesses", "-v"], &command);
    let code = row(&recording, "[anonymous code");
    assert_eq!(recording.with("malicious"), 0);
    let why = "/tmp/perf-1.map is not used: it belongs to user 12345; it must belong to root or to user 0";
    assert!(code.symbols_missing.contains(why), "{code:?}");
    assert!(recording.stderr.contains(why), "{}", recording.stderr);
}

#[test]
fn registered_objects_have_names_and_unwind_tables() {
    let _live = live();
    repeated(|| {
        // It runs until nativeprof is done, which can read its memory therefore.
        let program = Program::start(fixture("registered", &["calls"]));
        let recording = attach(program.pid(), &["-d", "3"]);
        let calls = ["main", "registered_outer", "compiled_loop"];
        let complete =
            recording.matching(|stack| stack.windows(3).any(|w| w.iter().map(|f| f.name.as_str()).eq(calls)));
        let q = &recording.profile.meta.quality;
        let all = recording.samples();
        assert_likely!(
            all > 20 && (complete + 2) as f64 > 0.95 * all as f64,
            "{complete}\n{}",
            recording.stderr
        );
        // The table is not known when the first sample comes; that one is repaired.
        assert_likely!(q.repaired <= 1 + all / 50 && q.partial <= 1 + all / 50, "{q:?}");
        let code = row(&recording, "[anonymous code");
        assert_eq!(
            (code.symbols_from.as_str(), code.unnamed),
            ("1 object registered with the debugger interface", 0)
        );
    });
}

#[test]
fn unnamed_code_is_the_same_function_in_all_runs() {
    let _live = live();
    repeated(|| {
        let run = || attach(Program::start(fixture("registered", &["loops"])).pid(), &["-d", "3"]);
        let (one, other) = (run(), run());
        for recording in [&one, &other] {
            let expected = BTreeSet::from([("registered_loop", 0), ("[anonymous code #2]", 0)]);
            assert_eq!(jit_functions(recording), expected, "{}", recording.stderr);
            let (named, silent) = (
                share(recording, "registered_loop"),
                share(recording, "[anonymous code #2]"),
            );
            assert_likely!(
                (0.1..0.6).contains(&named) && silent > 0.4,
                "{named} {silent}\n{}",
                recording.stderr
            );
            let code = row(recording, "[anonymous code");
            assert_eq!(code.unnamed, recording.with("[anonymous code #2]"), "{code:?}");
        }
        // The kernel places it elsewhere each time.
        assert_ne!(
            row(&one, "[anonymous code").symbols_missing,
            row(&other, "[anonymous code").symbols_missing
        );
    });
}

/// Names of a child's trampolines are in the buffer of its file when `os._exit` ends it, and so in no file.
#[test]
fn trampolines_of_forked_children_are_shown_as_their_functions() {
    let script = "\
import os
def inner(n):
    s = 0
    for i in range(n): s += i * i
    return s
def outer(): return inner(20000)
outer()
pid = os.fork()
if pid == 0:
    for _ in range(500): outer()
    os._exit(0)
os.waitpid(pid, 0)
";
    let scratch = Scratch::new();
    fs::write(scratch.path("fork.py"), script).expect("written");
    let with_option = pythons().iter().filter_map(|p| match p.minor {
        ..12 => None,
        12 => Some((p, "perf")),
        _ => Some((p, "perf_jit")),
    });
    let all: Vec<_> = with_option.collect();
    let _live = live();
    some_at_a_time(
        2,
        &all,
        |(p, ..)| &p.name,
        |(python, option)| {
            let mut command = Command::new(&python.exe);
            command.args(["-X", option]).arg(scratch.path("fork.py"));
            let recording = record(&["--subprocesses", "-v"], &command);
            let case = format!("{} -X {option}", python.name);
            let named = share(&recording, "inner");
            assert_likely!(named > 0.7, "{case}: {named}\n{}", recording.stderr);
            let unnamed = |stack: &[&Frame]| {
                let above = stack.windows(2).find(|pair| pair[1].name == "inner");
                above.is_some_and(|pair| pair[0].name.starts_with("[anonymous code"))
            };
            assert_eq!(
                recording.matching(unnamed),
                0,
                "{case}: {}",
                recording.examples(unnamed)
            );
            for entry in fs::read_dir("/tmp").expect("readable").flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let pids = recording.profile.meta.threads.iter().map(|(pid, ..)| *pid);
                for pid in pids {
                    if name == format!("perf-{pid}.map") || name == format!("jit-{pid}.dump") {
                        let _ = fs::remove_file(entry.path());
                    }
                }
            }
        },
    );
}

#[test]
fn trampolines_of_python_are_shown_as_their_functions() {
    let script = "\
def inner(n):
    s = 0
    for i in range(n): s += i * i
    return s
def outer(): return inner(20000)
for _ in range(700): outer()
";
    let scratch = Scratch::new();
    fs::write(scratch.path("spin.py"), script).expect("written");
    // perf maps came with 3.12, jitdump files with 3.13.
    let both = pythons()
        .iter()
        .flat_map(|p| [(p, 12, "perf", "perf map"), (p, 13, "perf_jit", "jitdump")]);
    let both: Vec<_> = both.filter(|(p, since, ..)| p.minor >= *since).collect();
    let _live = live();
    some_at_a_time(
        2,
        &both,
        |(p, ..)| &p.name,
        |(python, _, option, source)| {
            let mut command = Command::new(&python.exe);
            command.args(["-X", option]).arg(scratch.path("spin.py"));
            let recording = record(&[], &command);
            let case = format!("{} -X {option}", python.name);
            let named = share(&recording, "inner");
            assert_likely!(named > 0.7, "{case}: {named}\n{}", recording.stderr);
            let code = row(&recording, "[anonymous code");
            assert_likely!(
                code.symbols_from.starts_with(source) && code.samples >= recording.with("inner"),
                "{case}: {code:?}"
            );
            // Each function is on the stack once, and is the same whether a sample has its frame or only its trampoline.
            let is_ours = |f: &Frame| f.kind == FrameKind::Python && f.filename.ends_with("spin.py");
            for (stack, _) in recording.stacks() {
                let trampoline = stack
                    .iter()
                    .find(|f| f.name.starts_with("py::") && f.name.ends_with("spin.py"));
                assert!(trampoline.is_none(), "{case}: {trampoline:?}");
                for name in ["inner", "outer", "<module>"] {
                    let count = stack.iter().filter(|f| is_ours(f) && f.name == name).count();
                    assert!(count <= 1, "{case}: {count} of {name} in {stack:?}");
                }
            }
            let frames = recording.profile.frames.iter();
            assert_eq!(frames.filter(|f| is_ours(f) && f.name == "inner").count(), 1, "{case}");
            let nodes = &recording.profile.nodes;
            let mut left: Vec<i64> = nodes.iter().map(|n| n.count as i64).collect();
            nodes[1..]
                .iter()
                .for_each(|n| left[n.parent as usize] -= n.count as i64);
            assert!(left.iter().all(|left| *left >= 0), "{case}: samples are counted twice");
            let pid = recording.profile.meta.pid;
            let file = code.symbols_from.strip_prefix(source).expect("checked").trim();
            assert!(
                file == format!("/tmp/perf-{pid}.map") || file == format!("/tmp/jit-{pid}.dump"),
                "{case}: {file}"
            );
            fs::remove_file(Path::new(file)).expect("the file that Python left");
        },
    );
    assert!(!both.is_empty(), "no CPython 3.12 or newer to try: install one");
}

#[test]
fn servers_are_contacted_only_on_request() {
    let run = |option: &str, urls: &str| {
        let mut command = common::nativeprof(&["replay", option, "/no/such.tape"]);
        command.env("DEBUGINFOD_URLS", urls);
        let done = command.output().expect("nativeprof starts");
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let (code, text) = run("--debuginfod", "");
    assert_eq!(code, Some(2), "{text}");
    for words in [
        "no debuginfod server is configured",
        "DEBUGINFOD_URLS",
        "nativeprof attach --debuginfod PID",
    ] {
        assert!(text.contains(words), "{text}");
    }
    for option in ["--debuginfod=auto", "--debuginfod=off"] {
        let (code, text) = run(option, "");
        assert!(code == Some(1) && text.contains("no/such.tape"), "{text}");
    }
}

/// The instructions of a function have all samples that ended in it, and only where its file is the recorded one.
#[test]
fn machine_code_has_its_samples() {
    let _live = live();
    let scratch = Scratch::new();
    let json = scratch.path("x.json");
    let json = json.to_str().expect("UTF-8");
    let program = scratch.path("native");
    programs::compile(
        &common::sources().join("native.c"),
        &program,
        &["-pthread", "-Wl,--build-id"],
    );
    let recorded = {
        let running = Program::start(Command::new(&program));
        let pid = running.pid().to_string();
        nativeprof(&["attach", &pid, "-d", "3", "-r", "999", "-o", json]).output()
    };
    assert!(recorded.expect("nativeprof starts").status.success());
    let assembly = |words: &[&str]| {
        let words = [&["report", json, "--assembly"], words].concat();
        nativeprof(&words).output().expect("nativeprof starts")
    };
    let said = assembly(&["n_leaf", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
    let rows = report["assembly"][0]["instructions"].as_array().expect("a list");
    let sum: u64 = rows.iter().filter_map(|row| row["self"].as_u64()).sum();
    let profile = nativeprof::profile::json::read(&fs::read(json).expect("readable")).expect("a profile");
    let frame = |at: usize| &profile.frames[profile.nodes[at].frame as usize];
    let leaf = profile
        .frames
        .iter()
        .find(|frame| frame.name == "n_leaf")
        .expect("it ran");
    // With what is inlined into it.
    let is_inside = |frame: &Frame| (&frame.module, frame.address) == (&leaf.module, leaf.address);
    let self_counts = profile.self_counts();
    let of_function = (0..self_counts.len()).filter(|at| is_inside(frame(*at)));
    assert_eq!(sum, of_function.map(|at| self_counts[at]).sum::<u64>());
    assert!(
        sum > 0 && rows.last().expect("an instruction")["text"] == "ret",
        "{rows:?}"
    );
    assert!(
        rows[0]["source"]
            .as_str()
            .is_some_and(|source| source.ends_with("native.c"))
    );
    let text = String::from_utf8_lossy(&assembly(&["n_leaf"]).stdout).into_owned();
    assert!(
        text.contains(&format!("{sum} samples ended in its")) && text.contains("native.c:"),
        "{text}"
    );
    let said = assembly(&["nothing"]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("no native function with samples is called `nothing`"));
    fs::remove_file(&program).expect("removed");
    programs::compile(&common::sources().join("jit.c"), &program, &["-Wl,--build-id"]);
    let said = assembly(&["n_leaf"]);
    let why = String::from_utf8_lossy(&said.stderr);
    assert!(why.contains("build ID differs"), "{why}");
}

/// Machine code of a file without a build ID is marked as not checked, and is not shown once the file has changed.
#[test]
fn machine_code_without_a_build_id_is_not_checked() {
    let scratch = Scratch::new();
    let program = scratch.path("native");
    programs::compile(
        &common::sources().join("native.c"),
        &program,
        &["-pthread", "-Wl,--build-id=none"],
    );
    let now = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock")
            .as_secs_f64()
    };
    let leaf = {
        let mut module =
            symbolize::Module::from_file(fs::File::open(&program).expect("readable")).expect("an ELF file");
        module.symbol_named("n_leaf").expect("a symbol").0
    };
    let mut profile = Profile {
        frames: vec![
            Frame::new(FrameKind::Root, "root"),
            Frame::native("n_leaf", "native", leaf),
        ],
        nodes: vec![Node::new(0, 0), Node::new(1, 0)],
        ..Profile::default()
    };
    profile.nodes.iter_mut().for_each(|node| node.count = 5);
    profile.meta.start = now() + 2.0;
    profile.meta.modules = vec![ModuleMeta {
        path: program.display().to_string(),
        instructions: BTreeMap::from([(leaf, 5)]),
        ..ModuleMeta::default()
    }];
    let json = scratch.path("x.json");
    let json = json.to_str().expect("UTF-8");
    let report = |profile: &Profile, words: &[&str]| {
        let mut out = Vec::new();
        nativeprof::profile::json::write(profile, &mut out).expect("written");
        fs::write(json, out).expect("written");
        let words = [&["report", json, "--assembly"], words].concat();
        let done = nativeprof(&words).output().expect("nativeprof starts");
        [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned())
    };
    let at = format!("{leaf:#x}");
    let in_file = format!("native+{leaf:#x}");
    for word in ["n_leaf", &at, &in_file] {
        let [text, _] = report(&profile, &[word]);
        assert!(
            text.contains("5 samples ended in its") && text.contains("not checked: the file has no build ID"),
            "{word}: {text}"
        );
    }
    for word in ["0x1", "other+0x1", &format!("other+{leaf:#x}")] {
        let [_, why] = report(&profile, &[word]);
        assert!(why.contains("expected the address of a function"), "{word}: {why}");
    }
    let [text, _] = report(&profile, &["n_leaf", "--json"]);
    assert!(text.contains("\"checked\": false"), "{text}");
    profile.meta.start = now() - 3600.0;
    let [_, why] = report(&profile, &["n_leaf"]);
    assert!(
        why.contains("has changed since the recording, and has no build ID"),
        "{why}"
    );
    // A function without a name.
    let stripped = Command::new("strip").arg(&program).status();
    assert!(stripped.expect("strip").success());
    profile.frames[1] = Frame {
        kind: FrameKind::Unknown,
        name: "[unknown]".into(),
        ..profile.frames[1].clone()
    };
    profile.meta.start = now() + 2.0;
    let inside = leaf + 1;
    profile.meta.modules[0].instructions = BTreeMap::from([(inside, 5)]);
    for word in [&at, &in_file, &format!("native+{inside:#x}")] {
        let [text, why] = report(&profile, &[word]);
        assert!(text.contains("5 samples ended in its"), "{word}: {text}{why}");
    }
}

//! The command line from a new user's point of view: every error says what, why and what to type; no profile is
//! partially written.

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use base64::prelude::{BASE64_STANDARD, Engine};
use common::chance::{assert_likely, patience, repeated};
use common::recording::Running;
use common::{Program, Scratch, live, nativeprof, programs};
use flate2::read::{MultiGzDecoder, ZlibDecoder};
use nativeprof::tape::encode;

mod common;
#[path = "common/wrong_returns.rs"]
mod wrong_returns;

fn run(args: &[&str]) -> Output {
    nativeprof(args)
        .stdin(Stdio::null())
        .output()
        .expect("nativeprof starts")
}

fn stderr(done: &Output) -> String {
    String::from_utf8_lossy(&done.stderr).into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// A file of ours, by its path below `fixtures`.
fn golden(name: &str) -> String {
    format!("{}/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Exit code, and words of the message, which says why and what to type.
#[track_caller]
fn refused(done: &Output, code: i32, words: &[&str]) {
    let said = stderr(done);
    assert_eq!(done.status.code(), Some(code), "{said}");
    assert!(done.stdout.is_empty(), "an error on standard output");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in:\n{said}");
    }
    assert!(!said.contains("panicked"), "{said}");
    // Without a command, its help is printed.
    if said.starts_with("nativeprof: ") {
        for part in ["\n  why: ", "\n  try: "] {
            assert!(said.contains(part), "`{part}` is not in:\n{said}");
        }
    }
}

#[test]
fn help_and_version() {
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let said = String::from_utf8_lossy(&help.stdout).into_owned();
    assert!(said.contains("record") && said.contains("attach"), "{said}");
    let help = run(&["record", "--help"]);
    let said = String::from_utf8_lossy(&help.stdout).into_owned();
    for word in [
        "--rate",
        "--duration",
        "--output",
        "--format",
        "--subprocesses",
        "--threads",
        "Examples:",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    for words in [&["help"][..], &["help", "--help"], &["help", "record", "-h"]] {
        let help = run(words);
        let said = String::from_utf8_lossy(&help.stdout).into_owned();
        assert!(
            help.status.success() && said.contains("Usage: nativeprof"),
            "{words:?}: {said}"
        );
    }
    let version = run(&["--version"]);
    let said = String::from_utf8_lossy(&version.stdout).into_owned();
    assert_eq!(said.trim(), format!("nativeprof {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn invalid_arguments() {
    refused(&run(&[]), 2, &["Usage"]);
    refused(&run(&["record"]), 2, &["COMMAND"]);
    refused(&run(&["attach"]), 2, &["PID"]);
    refused(
        &run(&["attach", "no-such-program"]),
        1,
        &["no process is named no-such-program", "pgrep"],
    );
    refused(&run(&["attach", "-5"]), 2, &["-5"]);
    refused(&run(&["attach", "99999999999"]), 2, &["99999999999"]);
    refused(&run(&["record", "-r", "0", "--", "true"]), 125, &["rate", "0"]);
    refused(
        &run(&["record", "-d", "0", "--", "true"]),
        125,
        &["SECONDS must be a number above 0"],
    );
    refused(
        &run(&["record", "-d", "soon", "--", "true"]),
        125,
        &["SECONDS must be a number above 0"],
    );
    refused(
        &run(&["record", "--event", "moon", "--", "true"]),
        125,
        &["cpu-clock", "page-faults"],
    );
    refused(
        &run(&["record", "-p", "1", "--", "true"]),
        2,
        &["takes a PID or a command, not both", "--pid 1"],
    );
    refused(
        &run(&["record", "-o", "x.svg", "--save-tape", "x.svg", "--", "true"]),
        125,
        &["the tape would replace the profile", "--save-tape FILE"],
    );
    refused(
        &run(&["record", "-r", "2000000000", "--", "true"]),
        125,
        &["above this kernel's maximum sampling rate", "-r "],
    );
}

#[test]
fn what_users_of_other_profilers_type() {
    refused(
        &run(&["1234"]),
        2,
        &["1234 is not a command", "PID", "nativeprof attach 1234"],
    );
    refused(
        &run(&["app.py"]),
        2,
        &["nativeprof record -o out.svg -- python3 app.py"],
    );
    refused(&run(&["out.json"]), 2, &["nativeprof report out.json"]);
    refused(&run(&["recrod"]), 2, &["record"]);
    refused(&run(&["top"]), 2, &["no program to show", "nativeprof top -- COMMAND"]);
    refused(
        &run(&["record", "--mode", "wall", "--event", "page-faults", "--", "true"]),
        125,
        &["need a clock", "events, not times", "omit --event"],
    );
    refused(
        &run(&["record", "--save-tape", "-", "--", "true"]),
        125,
        &["a tape cannot be written to standard output", "--save-tape out.tape"],
    );
    for (option, instead) in [
        ("--native", "--no-native"),
        ("--nonblocking", "eBPF"),
        ("--speed=5", "`record` has no such option"),
        ("--output-file=x", "a similar option exists: --output"),
    ] {
        let done = run(&["record", option, "--", "true"]);
        let name = option.split('=').next().unwrap_or(option);
        refused(&done, 125, &[&format!("unknown option {name}"), instead]);
    }
    refused(
        &run(&["record", "-p", "1", "--native"]),
        2,
        &["unknown option --native", "--no-native"],
    );
    refused(&run(&["attach", "1", "--follow-forks"]), 2, &["--subprocesses"]);
    refused(
        &run(&["record", "--idle", "--", "true"]),
        125,
        &["--idle needs off-CPU time", "--mode wall --idle"],
    );
    let scratch = Scratch::new();
    let script = scratch.path("script.py");
    fs::write(&script, "print(1)\n").expect("written");
    let hint = format!("nativeprof record -- python3 {}", text(&script));
    let output = scratch.path("x.svg");
    refused(&run(&["record", "-o", text(&output), text(&script)]), 126, &[&hint]);
    let done = nativeprof(&["record", "-o", "x.svg", "script.py"])
        .current_dir(scratch.directory())
        .output()
        .expect("nativeprof starts");
    refused(&done, 127, &["nativeprof record -- python3 script.py"]);
    for bad in ["fast", "0.5", "10mhz"] {
        refused(
            &run(&["record", "-r", bad, "--", "true"]),
            125,
            &["a rate is a whole number of samples per second"],
        );
    }
}

#[test]
fn rates_times_formats_and_names_as_people_type_them() {
    let _live = live();
    let scratch = Scratch::new();
    // A name that no other process has.
    let name = format!("named-{}", std::process::id());
    let program = scratch.path(&name);
    programs::copy(programs::native(&[]).get_program(), &program);
    let first = Program::start(Command::new(&program));
    let output = scratch.path("out");
    let words = [
        "attach",
        &name,
        "-r",
        "1khz",
        "-d",
        "1500ms",
        "-f",
        "raw",
        "-o",
        text(&output),
    ];
    let done = run(&words);
    assert!(done.status.success(), "{}", stderr(&done));
    for word in [
        &format!("{name} is process {}", first.pid()),
        "at 1000 Hz",
        "(collapsed, ",
    ] {
        assert!(stderr(&done).contains(word), "`{word}` is not in:\n{}", stderr(&done));
    }
    assert!(fs::read_to_string(&output).expect("a profile").contains("n_leaf"));
    let second = Program::start(Command::new(&program));
    let pids = [first.pid().to_string(), second.pid().to_string()];
    let several = format!("2 processes are named {name}");
    refused(
        &run(&["dump", &name]),
        2,
        &[&several, &pids[0], &pids[1], "give the PID of one"],
    );
}

#[test]
fn formats() {
    let scratch = Scratch::new();
    let unknown = run(&["record", "-f", "xml", "-o", text(&scratch.path("x")), "--", "true"]);
    refused(&unknown, 125, &["xml", "json", "collapsed", "svg"]);
    let ending = run(&["record", "-o", text(&scratch.path("x.docx")), "--", "true"]);
    refused(&ending, 125, &["x.docx", ".json", ".svg"]);
    let directory = run(&[
        "record",
        "-o",
        &format!("{}/", text(&scratch.path("new"))),
        "--",
        "true",
    ]);
    refused(&directory, 125, &["new/ does not exist", "mkdir -p"]);
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
}

#[test]
fn saved_profiles_are_read_from_files_pipes_and_tapes() {
    let scratch = Scratch::new();
    let json = golden("golden/profile.json");
    let expected = fs::read(golden("golden/profile.collapsed")).expect("a golden file");
    let done = run(&["export", &json, "-f", "collapsed", "-o", "-"]);
    assert!(done.status.success() && done.stdout == expected, "{}", stderr(&done));

    let packed = scratch.path("packed");
    let done = run(&["export", &json, "-f", "json.gz", "-o", text(&packed)]);
    assert!(done.status.success(), "{}", stderr(&done));
    let piped = nativeprof(&["export", "-", "-o", "-"])
        .stdin(fs::File::open(&packed).expect("what was written"))
        .output()
        .expect("nativeprof starts");
    assert!(piped.status.success() && piped.stdout == expected, "{}", stderr(&piped));

    // The default path is the file's name with the extension of the format.
    let mut command = nativeprof(&["export", &json, "-f", "json.gz"]);
    let done = command
        .current_dir(scratch.path("."))
        .output()
        .expect("nativeprof starts");
    assert!(done.status.success(), "{}", stderr(&done));
    assert_eq!(
        fs::read(scratch.path("profile.json.gz")).expect("a new file"),
        fs::read(&packed).expect("what was written")
    );
    let done = run(&["export", &golden("tapes/native.tape"), "-o", "-"]);
    let lines = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        done.status.success() && lines.contains(" (tape_native) "),
        "{lines}{}",
        stderr(&done)
    );
}

#[test]
fn edges_of_tapes_are_verified() {
    let scratch = Scratch::new();
    let (out, wrong) = (scratch.path("out.collapsed"), scratch.path("wrong.tape"));
    let good = golden("tapes/native.tape");
    let mut tape = encode::read(&fs::read(&good).expect("a tape")).expect("a good tape");
    wrong_returns::make(&mut tape);
    fs::write(&wrong, encode::write(&tape)).expect("a file");
    for (tape, code, word) in [
        (good.as_str(), 0, "proved per sample"),
        (text(&wrong), 3, "no call is before"),
    ] {
        let done = run(&["replay", tape, "--verify-edges", "-o", text(&out)]);
        let said = stderr(&done);
        assert_eq!(done.status.code(), Some(code), "{said}");
        assert!(said.contains(word) && said.contains("call frame tables"), "{said}");
    }
    let without = run(&["replay", &good, "-o", text(&out)]);
    assert!(!stderr(&without).contains("edges"), "{}", stderr(&without));
}

#[test]
fn files_without_a_profile() {
    let scratch = Scratch::new();
    let (out, truncated) = (scratch.path("out.svg"), scratch.path("truncated.json"));
    let golden = format!("{}/fixtures/golden/profile", env!("CARGO_MANIFEST_DIR"));
    let complete = fs::read(format!("{golden}.json")).expect("a golden file");
    fs::write(&truncated, &complete[..complete.len() / 2]).expect("a file");
    for (file, words) in [
        (
            "/nonexistent/x.json",
            &["cannot read /nonexistent/x.json", "No such file"][..],
        ),
        ("/", &["is a directory without segments"]),
        (&format!("{golden}.svg"), &["it is an SVG"]),
        (
            &format!("{}/Cargo.toml", env!("CARGO_MANIFEST_DIR")),
            &[
                "Cargo.toml",
                "it is text of another kind; formats that are read: html, pstats",
            ],
        ),
        (text(&truncated), &["the file ends early"]),
        ("-", &["standard input", "it is empty"]),
    ] {
        refused(&run(&["export", file, "-o", text(&out)]), 1, words);
    }
    refused(
        &run(&["replay", text(&truncated), "-o", text(&out)]),
        1,
        &["truncated.json: this is not a tape", "--save-tape FILE"],
    );
    refused(
        &run(&["export", text(&truncated), "-o", "x.docx"]),
        2,
        &["x.docx", ".svg"],
    );
    assert_eq!(scratch.names(), ["truncated.json"]);
}

#[test]
fn commands_that_cannot_run() {
    let scratch = Scratch::new();
    let out = scratch.path("x.svg");
    let missing = run(&["record", "-o", text(&out), "--", "no-such-command-anywhere"]);
    refused(&missing, 127, &["no such command: no-such-command-anywhere", "PATH"]);
    let missing = run(&["record", "-o", text(&out), "--", "/nowhere/at/all"]);
    refused(&missing, 127, &["no such command: /nowhere/at/all"]);
    refused(
        &run(&["record", "-o", text(&out), "--", ""]),
        127,
        &["no such command: ''"],
    );
    let plain = scratch.path("plain.txt");
    fs::write(&plain, "#!/bin/sh\n").expect("a file");
    let forbidden = run(&["record", "-o", text(&out), "--", text(&plain)]);
    refused(&forbidden, 126, &["plain.txt", "ermission denied"]);
    assert_eq!(scratch.names(), ["plain.txt"], "left behind");
}

#[test]
fn targets_that_cannot_be_sampled() {
    let scratch = Scratch::new();
    let out = scratch.path("x.svg");
    // Above the largest id that the kernel gives.
    refused(
        &run(&["attach", "4194305", "-o", text(&out)]),
        1,
        &["no process 4194305"],
    );
    refused(&run(&["attach", "0", "-o", text(&out)]), 2, &["PIDs begin at 1"]);
    refused(&run(&["dump", "99999999999"]), 2, &["no PID is that large"]);
    refused(
        &run(&["record", "--pid", "4194305", "-o", text(&out)]),
        1,
        &["no process 4194305"],
    );

    // kthreadd; in a container it is another process, or none.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        refused(&run(&["attach", "2", "-o", text(&out)]), 1, &["2 is a kernel thread"]);
    } else {
        eprintln!("NOTE: no kernel thread is to be seen here (a pid namespace); refusing one was not tried");
    }

    let mut ended = Command::new("true").spawn().expect("`true` starts");
    let state = format!("/proc/{}/stat", ended.id());
    while !fs::read_to_string(&state).expect("not waited for").contains(") Z ") {
        std::thread::yield_now();
    }
    let zombie = run(&["attach", &ended.id().to_string(), "-o", text(&out)]);
    ended.wait().expect("a child");
    refused(&zombie, 1, &["has exited", "zombie"]);
    assert!(scratch.names().is_empty(), "{:?}", scratch.names());
}

/// An i386 program that jumps to itself: ELF header, one segment, `jmp .`.
fn endless_32_bit_program() -> Vec<u8> {
    let base = 0x0804_8000u32;
    let mut elf = b"\x7fELF\x01\x01\x01".to_vec();
    elf.resize(16, 0);
    for half in [2u16, 3] {
        elf.extend(half.to_le_bytes()); // ET_EXEC, EM_386
    }
    for word in [1, base + 84, 52, 0, 0] {
        elf.extend(word.to_le_bytes()); // version, entry, program headers, section headers, flags
    }
    for half in [52u16, 32, 1, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    for word in [1, 0, base, base, 86, 86, 5, 0x1000] {
        elf.extend(word.to_le_bytes()); // PT_LOAD of the complete file, readable and executable
    }
    elf.extend([0xeb, 0xfe]);
    elf
}

#[test]
fn programs_of_32_bits() {
    let scratch = Scratch::new();
    let path = scratch.path("endless");
    fs::write(&path, endless_32_bit_program()).expect("a file");
    fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("privileges");
    let mut target = match Command::new(&path).spawn() {
        Ok(target) => target,
        Err(e) if e.raw_os_error() == Some(libc::ENOEXEC) => {
            eprintln!("NOTE: this kernel runs no 32-bit programs ({e}); so none can be sampled");
            return;
        }
        Err(e) => panic!("the 32-bit program does not start: {e}"),
    };
    let out = scratch.path("x.svg");
    let done = run(&["attach", &target.id().to_string(), "-d", "1", "-o", text(&out)]);
    target.kill().expect("a child");
    target.wait().expect("a child");
    refused(&done, 1, &["32-bit program", "only 64-bit"]);
    assert_eq!(scratch.names(), ["endless"], "left behind");
}

#[test]
#[cfg_attr(not(feature = "live-tests"), ignore = "needs root: run .ci/test")]
fn without_privileges() {
    let scratch = Scratch::new();
    // Readable by any user, unlike the directory it was built in.
    let copy = scratch.path("nativeprof");
    programs::copy(env!("CARGO_BIN_EXE_nativeprof"), &copy);
    fs::set_permissions(scratch.directory(), Permissions::from_mode(0o777)).expect("permissions");
    let _live = live();
    let program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    const OTHERS: &[&str] = &[
        "not permitted",
        "sudo",
        "belongs to another user (uid 0)",
        "CAP_SYS_PTRACE",
    ];
    const EBPF: &[&str] = &["not permitted", "sudo", "CAP_BPF and CAP_PERFMON", "no_new_privs"];
    for (args, words) in [
        (&["attach", &pid][..], OTHERS),
        // A user's own command can be sampled with ptrace, but eBPF was requested.
        (&["record", "--backend", "ebpf", "--", "sleep", "1"], EBPF),
    ] {
        let done = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"])
            .arg(&copy)
            .args(&args[..1])
            .args(["-d", "1", "-o"])
            .arg(scratch.path("x.svg"))
            .args(&args[1..])
            .output()
            .expect("setpriv is needed to try without privileges: install util-linux");
        let code = if args[0] == "record" { 125 } else { 1 };
        refused(&done, code, words);
    }
    assert_eq!(scratch.names(), ["nativeprof"], "left behind");
}

#[test]
fn paths_that_cannot_be_written() {
    let scratch = Scratch::new();
    let marker = scratch.path("ran");
    let command = ["--", "touch", text(&marker)];
    let missing = scratch.path("not/there/x.svg");
    for (place, words) in [
        (
            text(&missing),
            &["not/there/x.svg", "not/there does not exist", "mkdir -p", "-o FILE"][..],
        ),
        ("/proc/x.svg", &["/proc/x.svg", "-o FILE"]),
    ] {
        let done = run(&[&["record", "-o", place][..], &command].concat());
        refused(&done, 125, &[words, &["cannot write to"]].concat());
    }
    // Noticed before the start: the command never ran.
    assert!(!marker.exists(), "the command ran though its profile has no place");
}

/// In a directory, and without -o, the file has a name by default.
#[test]
fn files_have_names_by_default() {
    let scratch = Scratch::new();
    let json = golden("golden/profile.json");
    for (place, format, expected) in [
        (&[][..], &[][..], "profile.html"),
        (&["-o", "."], &[], "profile.html"),
        (&["-o", "below"], &["-f", "collapsed"], "below/profile.collapsed"),
    ] {
        let _ = fs::create_dir(scratch.path("below"));
        let words = [&["export", &json][..], place, format].concat();
        let done = nativeprof(&words).current_dir(scratch.directory()).output();
        let done = done.expect("nativeprof starts");
        assert!(done.status.success(), "{}", stderr(&done));
        let file = scratch.path(expected);
        assert!(
            fs::metadata(&file).is_ok_and(|m| m.len() > 0),
            "{words:?}: {}",
            stderr(&done)
        );
        fs::remove_file(file).expect("removed");
    }
    let done = run(&["diff", &json, &json, "-o", text(scratch.directory())]);
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(scratch.path("nativeprof-diff.html").exists());
    let _live = live();
    let done = nativeprof(&["record", "--", "true"])
        .current_dir(scratch.path("below"))
        .output();
    assert!(done.expect("nativeprof starts").status.success());
    let names: Vec<_> = fs::read_dir(scratch.path("below"))
        .expect("readable")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    let [name] = &names[..] else { panic!("{names:?}") };
    let name = name.to_string_lossy();
    assert!(name.starts_with("nativeprof-") && name.ends_with(".html"), "{name}");
}

/// The packed profile of a page, as text.
fn packed(page: &Path) -> String {
    let page = fs::read_to_string(page).expect("a page");
    let bytes = |id: &str| {
        let (_, rest) = page.split_once(&format!("id=\"{id}\">")).expect("the element");
        let base64 = rest.split_once("</script>").expect("an end").0;
        BASE64_STANDARD.decode(base64).expect("base64")
    };
    let mut unpacked = Vec::new();
    let shown = bytes("profile");
    ZlibDecoder::new(&*shown).read_to_end(&mut unpacked).expect("zlib");
    let saved = bytes("saved");
    if !saved.is_empty() {
        MultiGzDecoder::new(&*saved).read_to_end(&mut unpacked).expect("gzip");
    }
    String::from_utf8_lossy(&unpacked).into_owned()
}

/// What is shared with others can leave the text of source files out.
#[test]
fn source_text_is_left_out_on_request() {
    let scratch = Scratch::new();
    let file = scratch.path("app.py");
    fs::write(&file, "def work():\n    return compute_it()\n\n# the last line\n").expect("written");
    let shown = text(&file);
    let json = scratch.path("profile.json");
    let profile = format!(
        r#"{{"count": 7, "identifier": "root", "description": {{}}, "children": {{"work;{shown};1": {{"count": 7,
            "identifier": "work;{shown};1", "children": {{}}, "description":
            {{"filename": "{shown}", "name": "work", "line_number": 2, "line": "return compute_it()"}}}}}}}}"#
    );
    fs::write(&json, profile).expect("written");
    let json = text(&json);
    let [page, other] = ["page.html", "other.json"].map(|name| scratch.path(name));
    for (words, quotes) in [
        (&["export", json, "-o"][..], true),
        (&["export", json, "--no-source", "-o"], false),
        (&["merge", json, json, "-o"], true),
        (&["merge", json, json, "--no-source", "-o"], false),
        (&["diff", json, json, "-o"], true),
        (&["diff", json, json, "--no-source", "-o"], false),
    ] {
        let done = run(&[words, &[text(&page)]].concat());
        assert!(done.status.success(), "{words:?}: {}", stderr(&done));
        let packed = packed(&page);
        assert!(packed.contains("\"work\""), "{words:?}: it has the function");
        assert_eq!(packed.contains("compute_it"), quotes, "{words:?}");
        assert_eq!(packed.contains("the last line"), quotes, "{words:?}: of the whole file");
        assert_eq!(packed.contains("\"noSource\":true"), !quotes, "{words:?}: it says so");
        if words[0] == "export" {
            let done = run(&[words, &[text(&other)]].concat());
            assert!(done.status.success(), "{words:?}: {}", stderr(&done));
            let written = fs::read_to_string(&other).expect("a profile");
            assert_eq!(written.contains("compute_it"), quotes, "{words:?}: JSON");
        }
    }
}

/// A browser is opened on request, and never as root.
#[test]
#[cfg_attr(not(feature = "live-tests"), ignore = "needs root: run .ci/test")]
fn the_browser() {
    let scratch = Scratch::new();
    fs::set_permissions(scratch.directory(), Permissions::from_mode(0o777)).expect("permissions");
    let (json, page, opened) = (
        golden("golden/profile.json"),
        scratch.path("x.html"),
        scratch.path("opened"),
    );
    let opener = scratch.path("xdg-open");
    let script = format!(
        "#!/bin/sh\necho \"$(id -u) $HOME $1\" > {}.new && mv {0}.new {0}\n",
        text(&opened)
    );
    fs::write(&opener, script).expect("written");
    fs::set_permissions(&opener, Permissions::from_mode(0o755)).expect("permissions");
    let path = format!(
        "{}:{}",
        text(scratch.directory()),
        std::env::var("PATH").unwrap_or_default()
    );
    let export = |words: &[&str], variables: &[(&str, &str)]| {
        let mut command = nativeprof(&[&["export", &json, "-o", text(&page)], words].concat());
        command
            .env("PATH", &path)
            .env_remove("DISPLAY")
            .env_remove("WAYLAND_DISPLAY");
        command.envs(variables.iter().copied());
        let done = command.output().expect("nativeprof starts");
        assert!(done.status.success(), "{}", stderr(&done));
        stderr(&done)
    };
    let said = export(&["--browser"], &[]);
    assert!(said.contains("there is no desktop here"), "{said}");
    let (desktop, user) = (
        ("DISPLAY", ":0"),
        [("SUDO_UID", "65534"), ("SUDO_GID", "65534"), ("SUDO_USER", "nobody")],
    );
    let said = export(&["--browser"], &[desktop]);
    assert!(said.contains("should not run as root"), "{said}");
    fs::remove_file(&page).expect("removed"); // root's
    // Standard error is no terminal here.
    let said = export(&[], &[desktop, user[0], user[1], user[2]]);
    assert!(!said.contains("browser"), "{said}");
    assert!(!opened.exists());
    let said = export(&["--browser"], &[desktop, user[0], user[1], user[2]]);
    assert!(said.contains("opened in the browser"), "{said}");
    // Not waited for.
    let mut tries = 0..400;
    while !opened.exists() && tries.next().is_some() {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let seen = fs::read_to_string(&opened).expect("written by the opener");
    let words: Vec<&str> = seen.split_whitespace().collect();
    assert!(
        words[0] == "65534" && words[1] != "/root" && words[2].ends_with("/x.html"),
        "{seen}"
    );
    let mut diff = nativeprof(&[
        "diff",
        &json,
        &json,
        "--browser",
        "-o",
        text(&scratch.path("diff.html")),
    ]);
    let done = diff.env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY").output();
    let said = stderr(&done.expect("nativeprof starts"));
    assert!(
        said.contains("diff.html is not opened: there is no desktop here"),
        "{said}"
    );
    fs::write(&opener, "#!/bin/sh\nexit 3\n").expect("written");
    // What takes long, as it may on a busy machine, is not waited for.
    repeated(|| {
        let said = export(&["--browser"], &[desktop, user[0], user[1], user[2]]);
        assert_likely!(said.contains("is not opened: xdg-open failed"), "{said}");
    });
}

/// `script` gives the command a terminal as standard output.
#[test]
fn binary_formats_are_not_written_to_a_terminal() {
    let on_terminal = |format: &str| {
        let exe = env!("CARGO_BIN_EXE_nativeprof");
        let line = format!("'{exe}' export '{}' -f {format} -o -", golden("golden/profile.json"));
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
        let done = command.output().expect("`script` of util-linux starts");
        (
            done.status.success(),
            String::from_utf8_lossy(&done.stdout).into_owned(),
        )
    };
    for format in ["pprof", "otlp", "perfetto", "pstats", "json.gz"] {
        let (is_written, said) = on_terminal(format);
        let expected = format!("{format} is not written to a terminal");
        assert!(
            !is_written && said.contains(&expected) && said.contains("try: -o "),
            "{format}: {said}"
        );
    }
    let (is_written, said) = on_terminal("collapsed");
    assert!(is_written && said.lines().count() > 3, "{said}");
}

#[test]
fn a_full_disk_loses_no_profile() {
    let _live = live();
    let scratch = Scratch::new();
    let program = Program::start(programs::native(&[]));
    let mut command = nativeprof(&["attach", &program.pid().to_string(), "-d", "1", "-f", "collapsed"]);
    let done = command
        .args(["-o", "/dev/full"])
        .env("TMPDIR", scratch.directory())
        .output()
        .expect("nativeprof starts");
    let said = stderr(&done);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(
        said.contains("/dev/full was not written"),
        "the exit code says so, and why: {said}"
    );
    assert!(
        said.contains("/dev/full could not be written") && said.contains("No space left"),
        "{said}"
    );
    assert_eq!(scratch.names(), ["full"], "{said}");
    let kept = fs::read_to_string(scratch.path("full")).expect("the profile");
    assert!(kept.contains("n_leaf"), "{said}");
    let full = fs::File::options().write(true).open("/dev/full").expect("it is there");
    let mut command = nativeprof(&["attach", &program.pid().to_string(), "-d", "0.2", "-o", "-"]);
    command.env("TMPDIR", scratch.directory()).stdout(full);
    let done = command.output().expect("nativeprof starts");
    let said = stderr(&done);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output was not written"), "{said}");
}

#[test]
fn standard_output_may_close_early() {
    let _live = live();
    let program = Program::start(programs::native(&[]));
    let mut command = nativeprof(&["attach", &program.pid().to_string(), "-d", "1", "-o", "-"]);
    let done = command.stdin(Stdio::null()).output().expect("nativeprof starts");
    assert!(done.status.success(), "{}", stderr(&done));
    // Text by default, and nothing else on standard output.
    let out = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(out.lines().count() > 1, "{out}");
    for line in out.lines() {
        assert!(
            line.rsplit_once(' ').is_some_and(|(_, n)| n.parse::<u64>().is_ok()),
            "{line}"
        );
    }

    let mut command = nativeprof(&["attach", &program.pid().to_string(), "-d", "1", "-o", "-"]);
    let mut running = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("nativeprof starts");
    drop(running.stdout.take());
    let done = running.wait_with_output().expect("a child");
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(stderr(&done).contains("closed early"), "{}", stderr(&done));
}

#[test]
fn a_killed_recording_leaves_the_old_file() {
    let _live = live();
    let scratch = Scratch::new();
    let out = scratch.path("x.json");
    fs::write(&out, "what was there before").expect("a file");
    let program = Program::start(programs::native(&[]));
    let mut command = nativeprof(&["attach", &program.pid().to_string(), "-r", "1000", "-o"]);
    command.arg(&out);
    let running = Running::start(command);
    running.signal("KILL");
    drop(running);
    assert_eq!(fs::read_to_string(&out).expect("a file"), "what was there before");
    assert_eq!(scratch.names(), ["x.json"], "left behind");
}

#[test]
fn short_recordings_are_complete_files() {
    let _live = live();
    let scratch = Scratch::new();
    let program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    // Shorter than the time between two samples.
    for (name, format) in [
        ("a.json", "json"),
        ("a.collapsed", "collapsed"),
        ("a.svg", "svg"),
        ("a.json.gz", "json.gz"),
    ] {
        let out = scratch.path(name);
        let done = run(&["attach", &pid, "-r", "1", "-d", "0.001", "-o", text(&out)]);
        assert!(done.status.success(), "{}", stderr(&done));
        assert!(
            stderr(&done).contains(&format!("{name} ({format}, ")),
            "{}",
            stderr(&done)
        );
        assert!(out.exists(), "{}", stderr(&done));
    }
    let json = fs::read(scratch.path("a.json")).expect("a file");
    nativeprof::profile::json::read(&json).expect("a complete profile");
    // Interrupted before the first sample.
    let out = scratch.path("b.json");
    let mut command = nativeprof(&["attach", &pid, "-r", "1", "-o"]);
    command.arg(&out);
    let mut running = Running::start(command);
    running.signal("INT");
    let done = running.finish();
    assert!(done.status.success(), "{}", stderr(&done));
    nativeprof::profile::json::read(&fs::read(&out).expect("a file")).expect("a complete profile");
}

#[test]
fn the_exit_of_the_command_is_reported() {
    let _live = live();
    let scratch = Scratch::new();
    let out = scratch.path("x.collapsed");
    let done = run(&[
        "record",
        "-o",
        text(&out),
        "--",
        "sh",
        "-c",
        "echo from the command; exit 7",
    ]);
    assert!(stderr(&done).contains("sh exited with code 7"), "{}", stderr(&done));
    assert_eq!(done.status.code(), Some(7));
    assert_eq!(String::from_utf8_lossy(&done.stdout), "from the command\n");
    assert!(out.exists(), "a failing command has a profile too");
    let done = run(&["record", "-o", text(&out), "--", "sh", "-c", "kill -9 $$"]);
    assert!(stderr(&done).contains("was killed by signal 9"), "{}", stderr(&done));
    assert_eq!(done.status.code(), Some(137), "128 and the signal, as a shell says it");
}

/// A profile is being written when the second Ctrl-C comes: the pipe has no reader yet.
#[test]
fn the_third_interrupt_ends_nativeprof() {
    let _live = live();
    let scratch = Scratch::new();
    let pipe = scratch.pipe("pipe");
    let program = Program::start(programs::native(&[]));
    let pid = program.pid().to_string();
    repeated(|| {
        for (signals, good) in [(2, true), (3, false)] {
            let mut running = Running::start(nativeprof(&["attach", &pid, "-f", "collapsed", "-o", text(&pipe)]));
            // A pending signal absorbs another one of its kind: each one here is different.
            for name in ["INT", "TERM", "HUP"].iter().take(signals) {
                running.signal(name);
            }
            if good {
                let read = fs::read_to_string(&pipe).expect("a profile");
                assert_likely!(read.is_empty() || read.contains("n_leaf"), "{read}");
            }
            let done = running.finish();
            assert_eq!(done.status.success(), good, "{}", stderr(&done));
            assert_eq!(done.status.code().is_none(), !good, "ended by the signal");
        }
    });
}

#[test]
#[cfg_attr(not(feature = "live-tests"), ignore = "needs root: run .ci/test")]
fn where_little_is_seen_the_reason_is_said() {
    let _live = live();
    let scratch = Scratch::new();
    let output = scratch.path("out.json");
    let done = run(&["record", "-o", text(&output), "--", "sleep", "0.7"]);
    assert!(
        stderr(&done).contains("to see what it waited for, add --mode wall"),
        "{}",
        stderr(&done)
    );
    let mut parent = Command::new("sh");
    parent.args(["-c", "(while :; do :; done) & echo READY; wait"]);
    let parent = Program::start(parent);
    let pid = parent.pid().to_string();
    // A busy machine leaves the child little CPU time.
    repeated(|| {
        let seconds = patience().to_string();
        let mut words = vec!["attach", &pid, "-d", &seconds, "-o", text(&output)];
        let done = run(&words);
        assert_likely!(stderr(&done).contains("add --subprocesses"), "{}", stderr(&done));
        words.push("--subprocesses");
        let done = run(&words);
        assert_likely!(!stderr(&done).contains("  hint: "), "{}", stderr(&done));
    });
}

#[test]
fn a_recording_survives_the_reader_of_its_messages() {
    let _live = live();
    let scratch = Scratch::new();
    let output = scratch.path("out.json");
    let mut command = nativeprof(&["record", "-o", text(&output), "--", "true"]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("nativeprof starts");
    drop(child.stderr.take());
    let status = child.wait().expect("a child to wait for");
    assert!(status.success(), "{status}");
    assert!(fs::metadata(&output).is_ok_and(|file| file.len() > 0));
}

#[test]
fn inputs_are_not_replaced() {
    let scratch = Scratch::new();
    let copy = scratch.path("a.json");
    fs::copy(golden("golden/profile.json"), &copy).expect("a file");
    let before = fs::read(&copy).expect("the profile");
    let name = text(&copy);
    for words in [
        &["merge", name, name, "-o", name][..],
        &["export", name, "--no-native", "-o", name],
        // In this directory, with the extension of the format.
        &["export", "a.json", "-f", "json"],
    ] {
        let done = nativeprof(words).current_dir(scratch.directory()).output();
        let done = done.expect("nativeprof starts");
        refused(&done, 2, &["an input and the output", "-o FILE"]);
    }
    assert_eq!(fs::read(&copy).expect("the profile"), before);
}

//! Names that are not in the mapped file: debug files in the target's own root, code made at run time, debuginfod.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::{Recording, Scratch, live, programs, pythons, record};
use nativeprof::tree::profile::{FrameKind, ModuleMeta};

fn run(command: &mut Command) {
    let done = command.output().expect("the tool is there (.ci/setup installs it)");
    assert!(
        done.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// The row of the table whose path holds this.
fn row<'a>(recording: &'a Recording, path: &str) -> &'a ModuleMeta {
    let rows = &recording.profile.meta.modules;
    let found = rows.iter().find(|m| m.path.contains(path));
    found.unwrap_or_else(|| panic!("no row for {path} in {rows:?}"))
}

fn share(recording: &Recording, wanted: &str) -> f64 {
    recording.with(wanted) as f64 / recording.samples() as f64
}

/// A root folder with the stripped program in it, and its debug file where packages put it.
fn small_root(scratch: &Scratch) -> String {
    let whole = common::built().join("jit");
    programs::compile(&common::sources().join("jit.c"), &whole, &["-static", "-Wl,--build-id"]);
    let folder = |name: &str| fs::create_dir_all(scratch.path(name)).expect("made");
    folder("tmp");
    fs::set_permissions(scratch.folder(), fs::Permissions::from_mode(0o755)).expect("changed");
    let file = fs::File::open(&whole).expect("opened");
    let module = symbolize::Module::from_file(file).expect("an ELF file");
    let id: String = module
        .build_id()
        .expect("a build id")
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    folder(&format!("usr/lib/debug/.build-id/{}", &id[..2]));
    let place = format!("/usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);
    // An absolute link, as some packages have it: it must be followed within the root.
    folder("opt");
    let debug = scratch.path("opt/jit.debug");
    run(Command::new("objcopy").arg("--only-keep-debug").args([&whole, &debug]));
    std::os::unix::fs::symlink("/opt/jit.debug", scratch.path(&place[1..])).expect("linked");
    run(Command::new("strip").arg("-o").args([&scratch.path("prog"), &whole]));
    place
}

#[test]
fn a_container_has_its_own_files_and_numbers() {
    let _live = live();
    let scratch = Scratch::new();
    let place = small_root(&scratch);
    // In a pid namespace of its own the program is number 1, and so is its map.
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "chroot"])
        .arg(scratch.folder())
        .args(["/prog", "400"]);
    let recording = record(&["--subprocesses"], &command);
    assert!(scratch.path("tmp/perf-1.map").exists());
    let jitted = "jitted_loop(int, \"a b\")";
    let (made, compiled) = (share(&recording, jitted), share(&recording, "compiled_loop"));
    assert!(
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
        (prog.names.as_str(), prog.missing.as_str()),
        (format!("DWARF, symbols, debug file {place}").as_str(), "")
    );
    assert!(
        prog.samples as f64 >= 0.9 * recording.samples() as f64 && prog.frames >= prog.samples,
        "{prog:?}"
    );
    let code = row(&recording, "[code without a file");
    assert_eq!(code.names, "perf map /tmp/perf-1.map");
    // Those in it at its start are not known yet to be the loop's.
    let others = code.samples.checked_sub(recording.with(jitted));
    assert!(others.is_some_and(|n| n * 50 <= code.samples), "{others:?} of {code:?}");
    assert!(
        recording
            .stderr
            .contains(&format!("prog: {} samples; DWARF", prog.samples)),
        "{}",
        recording.stderr
    );

    // Without the debug file there are no names, and the summary says what was looked for. A map that neither the
    // program nor root has written is not read: here it is a link.
    fs::remove_file(scratch.path(&place[1..])).expect("removed");
    fs::rename(scratch.path("tmp/perf-1.map"), scratch.path("map")).expect("renamed");
    std::os::unix::fs::symlink("/map", scratch.path("tmp/perf-1.map")).expect("linked");
    let recording = record(&["--subprocesses"], &command);
    assert_eq!(recording.with(jitted) + recording.with("compiled_loop"), 0);
    let (prog, code) = (row(&recording, "/prog"), row(&recording, "[code without a file"));
    assert!(
        prog.names.starts_with("none") && prog.missing.contains(&place),
        "{prog:?}"
    );
    assert!(
        code.names.starts_with("none") && code.missing == "no /tmp/perf-1.map",
        "{code:?}"
    );
    assert!(
        recording.stderr.contains(&format!("no {place}")),
        "{}",
        recording.stderr
    );
}

#[test]
fn trampolines_of_python_have_names() {
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
    let mut tried = 0;
    for (python, _, option, source) in both.filter(|(p, since, ..)| p.minor >= *since) {
        let _live = live();
        let mut command = Command::new(&python.exe);
        command.args(["-X", option]).arg(scratch.path("spin.py"));
        let recording = record(&[], &command);
        let whom = format!("{} -X {option}", python.name);
        let name = format!("py::inner:{}", scratch.path("spin.py").display());
        let named = share(&recording, &name);
        assert!(named > 0.7, "{whom}: {named}\n{}", recording.stderr);
        let code = row(&recording, "[code without a file");
        assert!(
            code.names.starts_with(source) && code.samples >= recording.with(&name),
            "{whom}: {code:?}"
        );
        let pid = recording.profile.meta.pid;
        let file = code.names.strip_prefix(source).expect("checked").trim();
        assert!(
            file == format!("/tmp/perf-{pid}.map") || file == format!("/tmp/jit-{pid}.dump"),
            "{whom}: {file}"
        );
        fs::remove_file(Path::new(file)).expect("the file that Python left");
        tried += 1;
    }
    assert!(tried > 0, "no CPython 3.12 or newer to try: install one");
}

#[test]
fn servers_are_asked_only_when_told() {
    let ask = |option: &str, urls: &str| {
        let mut command = common::nativeprof(&["replay", option, "/no/such.tape"]);
        command.env("DEBUGINFOD_URLS", urls);
        let done = command.output().expect("nativeprof starts");
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let (code, text) = ask("--debuginfod", "");
    assert_eq!(code, Some(2), "{text}");
    for words in [
        "no debuginfod server is named",
        "DEBUGINFOD_URLS",
        "nativeprof attach --debuginfod PID",
    ] {
        assert!(text.contains(words), "{text}");
    }
    for option in ["--debuginfod=auto", "--debuginfod=off"] {
        let (code, text) = ask(option, "");
        assert!(code == Some(1) && text.contains("no/such.tape"), "{text}");
    }
}

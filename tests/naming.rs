//! The process that reads names: what it may do, and what is left when a file stops it.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::Scratch;
use nativeprof::profile::json;
use nativeprof::resolve::naming::protocol::{FileFormat, ModuleNames, NamedFrame};
use nativeprof::resolve::naming::{ARGUMENT, NamesRequest, NamingError, NamingLimits, NamingProcess};
use nativeprof::session::{SessionOptions, replay};
use nativeprof::tape::encode;
use symbolize::Module;

mod common;

const PROGRAM: &str = env!("CARGO_BIN_EXE_nativeprof");

const SOURCE: &str = r#"
#include <stdlib.h>
static inline __attribute__((always_inline)) int in(int x) { return x ^ rand(); }
__attribute__((noinline)) int f(int x) { return in(x) + in(x + 1); }
__attribute__((noinline)) int nested(int x) __asm__("_ZN5space6nestedEi");
int nested(int x) { return f(x) + in(x); }
int main(int argc, char **argv) { return nested(argc) + f(argc); }
"#;

fn process(cpu: Duration) -> NamingProcess {
    let elapsed = Duration::from_secs(600);
    NamingProcess::new(
        PROGRAM,
        &[ARGUMENT],
        NamingLimits {
            cpu,
            elapsed,
            memory: None,
        },
    )
}

/// More than any file here needs.
const ENOUGH: Duration = Duration::from_secs(100);

fn compile(scratch: &Scratch, name: &str, flags: &[&str]) -> PathBuf {
    let (source, out) = (scratch.path("s.c"), scratch.path(name));
    std::fs::write(&source, SOURCE).expect("written");
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2"]).args(flags).arg("-o").arg(&out).arg(&source);
    assert!(gcc.status().expect("gcc").success());
    out
}

/// Every few bytes of the functions; the first one of those whose symbols have no size, which may end anywhere.
fn addresses(path: &Path) -> Vec<u64> {
    let mut module = Module::from_file(File::open(path).expect("a file")).expect("an ELF file");
    let length = |f: &symbolize::Function| if f.sized { f.size.min(300) } else { 1 };
    let functions: Vec<_> = module.symbols().map(|f| f.start..f.start + length(&f)).collect();
    functions
        .into_iter()
        .flat_map(|function| function.step_by(3))
        .chain([0, 0x1020, u64::MAX])
        .collect()
}

/// Names by the process, which may open any file.
fn look_up(process: &mut NamingProcess, id: u32, path: &Path, svmas: &[u64]) -> Result<ModuleNames, String> {
    look_up_with(process, id, path, svmas, &|path| File::open(path).ok())
}

fn look_up_with(
    process: &mut NamingProcess,
    id: u32,
    path: &Path,
    svmas: &[u64],
    open: &dyn Fn(&Path) -> Option<File>,
) -> Result<ModuleNames, String> {
    let file = File::open(path).expect("a file");
    let request = NamesRequest {
        format: FileFormat::Elf,
        id,
        file: &file,
        path: path.as_os_str().as_encoded_bytes(),
        open,
        fetch: None,
    };
    process.name(&request, svmas).map_err(|e| match e {
        NamingError::Failed(why) => why,
        NamingError::NotStarted(e) => panic!("{e}"),
    })
}

/// Names as this process finds them.
fn expected(path: &Path, svmas: &[u64]) -> Vec<Vec<NamedFrame>> {
    let module = Module::from_file(File::open(path).expect("a file")).expect("an ELF file");
    let mut module = module.with_files(path, Arc::new(|path: &Path| File::open(path).ok()));
    let found = module.lookup_many(svmas).into_iter();
    found
        .map(|r| r.unwrap_or_default().into_iter().map(NamedFrame::from).collect())
        .collect()
}

#[test]
fn names_are_those_found_in_this_process() {
    let scratch = Scratch::new();
    let mut process = process(ENOUGH);
    let plain = compile(&scratch, "plain", &["-g"]);
    let stripped = compile(&scratch, "stripped", &["-s"]);
    let split = compile(&scratch, "split", &["-g", "-gsplit-dwarf"]);
    let compressed = compile(&scratch, "compressed", &["-g", "-gz=zlib"]);
    let svmas = addresses(&plain);
    for (id, path) in (0..).zip([&plain, &stripped, &split, &compressed]) {
        let names = look_up(&mut process, id, path, &svmas).expect("names");
        assert_eq!(names.found, expected(path, &svmas), "{}", path.display());
        // It has the file open now.
        let again = look_up(&mut process, id, path, &svmas[svmas.len() / 2..]).expect("names");
        assert_eq!(again.found, names.found[svmas.len() / 2..], "{}", path.display());
    }
    let names = look_up(&mut process, 0, &plain, &svmas).expect("names");
    let has = |name: &str| names.found.iter().flatten().any(|f| *f.name == *name);
    assert!(has("in") && has("main") && has("space::nested(int)"), "{names:?}");
    assert!(
        names.symbols_from.starts_with("DWARF, symbols"),
        "{}",
        names.symbols_from
    );
    let split = look_up(&mut process, 2, &split, &svmas).expect("names");
    assert!(split.symbols_from.contains("1 split units"), "{}", split.symbols_from);
    let none = look_up(&mut process, 9, &scratch.path("s.c"), &svmas).expect("an answer");
    assert_eq!(none.symbols_from, "none: not an ELF file (no \\x7fELF at its start)");
    assert!(none.found.len() == svmas.len() && none.found.iter().all(Vec::is_empty));
    assert!(process.cpu_time() > 0);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn names_of_functions_without_a_size_are_not_those_of_others() {
    let scratch = Scratch::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/sizeless.s");
    let mut process = process(ENOUGH);
    for (id, (strip, symbols)) in (0..).zip([("-s", ["", "", ""]), ("-Wl,--build-id", ["open", "", ""])]) {
        let library = scratch.path(&format!("sizeless-{id}.so"));
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-nostdlib", strip, "-o"])
            .arg(&library)
            .arg(&source);
        assert!(gcc.status().expect("gcc").success());
        let elf = || Module::from_file(File::open(&library).expect("a file")).expect("an ELF file");
        let start = elf().symbol_named("open").expect("exported").0;
        let [after_open, after_table, after_last] = symbols;
        let expected = [
            (0, "open"),
            (0x10, after_open),
            (0x20, "table"),
            (0x22, "table"),
            (0x23, after_table),
            (0x30, ""),
            (0x41, "__restore_rt"),
            (0x49, "__restore_rt"),
            (0x50, "last"),
            (0x53, "last"),
            (0x54, after_last),
        ];
        let found = |process: &mut NamingProcess, id, path: &Path| {
            let svmas = expected.map(|(at, _)| start + at);
            let names = look_up(process, id, path, &svmas).expect("names");
            let name = |frames: &Vec<NamedFrame>| frames.first().map_or(String::new(), |f| f.name.to_string());
            names.found.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(
            found(&mut process, id, &library),
            expected.map(|(_, name)| name),
            "{strip}"
        );
        let function = |at: u64| elf().symbol_at(start + at).map(|f| (f.start - start, f.size, f.sized));
        assert_eq!(function(0x22), Some((0x20, 3, true)));
        // Without section headers, as `sstrip` leaves a file.
        if strip == "-s" {
            let headerless = scratch.path("headerless.so");
            let mut bytes = std::fs::read(&library).expect("a file");
            bytes[40..48].fill(0);
            bytes[58..64].fill(0);
            std::fs::write(&headerless, bytes).expect("written");
            assert_eq!(found(&mut process, 9, &headerless), expected.map(|(_, name)| name));
        }
    }
}

#[test]
fn names_of_jit_compilers() {
    let scratch = Scratch::new();
    let mut process = process(ENOUGH);
    let map = scratch.path("perf-1.map");
    std::fs::write(&map, "1000 10 py::f:/home/a@b/x.py\n1010 20 _ZN5space3runEi\n").expect("written");
    let found = |process: &mut NamingProcess, format, path: &Path| {
        let file = File::open(path).expect("a file");
        let request = NamesRequest {
            format,
            id: 1,
            file: &file,
            path: b"",
            open: &|_| None,
            fetch: None,
        };
        let names = process.name(&request, &[0xfff, 0x1004, 0x1010, 0x1030]).expect("names");
        let text = |frame: &NamedFrame| {
            (
                frame.name.to_string(),
                frame.raw.as_deref().map(String::from),
                frame.start,
            )
        };
        let all: Vec<_> = names.found.iter().map(|frames| frames.first().map(text)).collect();
        (all, names.symbols_missing)
    };
    let (all, missing) = found(&mut process, FileFormat::PerfMap, &map);
    let trampoline = "py::f:/home/a@b/x.py".to_string();
    assert_eq!(all[1].as_ref().and_then(|f| f.1.as_ref()), Some(&trampoline));
    let function = ("space::run(int)".into(), Some("_ZN5space3runEi".into()), 0x1010);
    assert_eq!(
        (&all[0], &all[2], &all[3], &*missing),
        (&None, &Some(function), &None, "")
    );
    // The file has grown.
    std::fs::write(&map, "1030 10 later\n").expect("written");
    let (all, _) = found(&mut process, FileFormat::PerfMap, &map);
    assert_eq!(all[3].as_ref().map(|f| &*f.0), Some("later"));
    let (all, missing) = found(&mut process, FileFormat::JitDump, &map);
    assert_eq!(all, [None, None, None, None]);
    assert_eq!(missing, "not a jitdump file of this byte order");
}

#[test]
fn the_process_has_no_privileges() {
    let scratch = Scratch::new();
    let stripped = compile(&scratch, "stripped", &["-s"]);
    let mut process = process(ENOUGH);
    look_up(&mut process, 0, &stripped, &[]).expect("names");
    let pid = process.id().expect("it runs");
    let status = Cell::new(String::new());
    // It waits for this answer.
    let open = |_: &Path| {
        status.set(std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process"));
        None
    };
    look_up_with(&mut process, 1, &stripped, &[0x1000], &open).expect("names");
    let status = status.take();
    let value = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(":\t"));
        line.unwrap_or_else(|| panic!("no {name} in {status}")).to_string()
    };
    for name in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
        assert_eq!(value(name), "0000000000000000", "{name}");
    }
    assert_eq!((&*value("NoNewPrivs"), &*value("Seccomp")), ("1", "2"));
}

/// What the process sends when it has given up its privileges: kind and length.
const READY: &str = r"printf '\010\000\000\000\000' >&0";

/// Programs that take the place of the process: none of them is waited for longer than the limits.
#[test]
fn processes_that_do_not_answer() {
    let scratch = Scratch::new();
    let plain = compile(&scratch, "plain", &["-g"]);
    let short = NamingLimits {
        cpu: Duration::from_millis(200),
        elapsed: Duration::from_secs(600),
        memory: None,
    };
    let asleep = NamingLimits {
        cpu: ENOUGH,
        elapsed: Duration::from_millis(200),
        memory: None,
    };
    let invalid = "the process that reads names gave an invalid answer";
    for (script, limits, why) in [
        (
            "while :; do :; done",
            short,
            "reading names was stopped after 0.2 s of CPU time",
        ),
        ("exec sleep 1000", asleep, "reading names was stopped after 0.2 s"),
        ("", short, "the process that reads names ended early"),
        (
            "kill -SEGV $$",
            short,
            "the process that reads names was killed by signal 11",
        ),
        // kind and length of a message
        (r"printf '\007\377\377\377\377' >&0; exec sleep 1000", short, invalid),
        (r"printf '\007\001\000\000\000x' >&0; exec sleep 1000", short, invalid),
        (r"printf '\005\377\377\000\000' >&0; exec sleep 1000", short, invalid),
        (r"printf '\011\000\000\000\000' >&0; exec sleep 1000", short, invalid),
        // build information that was not offered
        (r"printf '\006\000\000\000\000' >&0; exec sleep 1000", short, invalid),
        // questions without end
        (
            r"while :; do printf '\005\001\000\000\000/' >&0; done",
            asleep,
            "reading names was stopped after 0.2 s",
        ),
    ] {
        let script = format!("{READY}; {script}");
        let mut process = NamingProcess::new("/bin/sh", &["-c", &script], limits);
        let found = look_up(&mut process, 0, &plain, &[0x1000]);
        assert_eq!(found, Err(why.into()), "{script}");
        assert_eq!(process.id(), None);
    }
    assert_eq!(children(), [0u32; 0], "they were waited for");
    let file = File::open(&plain).expect("a file");
    let request = NamesRequest {
        format: FileFormat::Elf,
        id: 0,
        file: &file,
        path: b"/x",
        open: &|_| None,
        fetch: None,
    };
    for program in ["/no such program", "/bin/false"] {
        let mut process = NamingProcess::new(program, &[], asleep);
        let found = process.name(&request, &[]);
        assert!(matches!(found, Err(NamingError::NotStarted(_))), "{program}: {found:?}");
    }
    assert_eq!(children(), [0u32; 0]);
}

/// Processes that this thread has started and not waited for, dead ones included.
fn children() -> Vec<u32> {
    let tasks = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    tasks.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
fn a_file_that_takes_too_long_costs_its_own_names() {
    let scratch = Scratch::new();
    let plain = compile(&scratch, "plain", &["-g"]);
    let linked = compile(&scratch, "linked", &["-s", "-Wl,--build-id=none"]);
    // The module names a debug file and its checksum: to check it, 4 GiB are read, all of them zero but for the start.
    let large = scratch.path("large");
    std::fs::copy(&linked, &large).expect("copied");
    File::options()
        .write(true)
        .open(&large)
        .expect("a file")
        .write_at(&[0], (4 << 30) - 1)
        .expect("a long file");
    let link = format!("--add-gnu-debuglink={}", plain.display());
    let done = Command::new("objcopy").arg(link).arg(&linked).status();
    assert!(done.expect("objcopy").success());
    let svmas = addresses(&plain);
    let mut process = process(Duration::from_millis(400));
    let open = |path: &Path| path.ends_with("plain").then(|| File::open(&large).expect("a file"));
    let why = look_up_with(&mut process, 0, &linked, &svmas, &open).expect_err("too long");
    assert_eq!(why, "reading names was stopped after 0.4 s of CPU time");
    assert_eq!((process.id(), children()), (None, vec![]));
    let names = look_up(&mut process, 1, &plain, &svmas).expect("the next file");
    assert_eq!(names.found, expected(&plain, &svmas));
}

#[test]
fn a_process_that_is_killed_is_started_again() {
    let scratch = Scratch::new();
    let (plain, stripped) = (
        compile(&scratch, "plain", &["-g"]),
        compile(&scratch, "stripped", &["-s"]),
    );
    let svmas = addresses(&plain);
    let mut process = process(ENOUGH);
    look_up(&mut process, 0, &plain, &svmas).expect("names");
    let pid = process.id().expect("it runs");
    // It waits for this answer. Once may have other reasons than the file.
    let kill_most = |most: usize| {
        let killed = Cell::new(0);
        move |_: &Path| {
            if killed.get() < most {
                killed.set(killed.get() + 1);
                let running: Vec<String> = children().iter().map(ToString::to_string).collect();
                let done = Command::new("sh")
                    .args(["-c", "kill -KILL \"$@\"", "sh"])
                    .args(running)
                    .status();
                assert!(done.expect("kill").success());
            }
            None
        }
    };
    look_up_with(&mut process, 4, &stripped, &svmas, &kill_most(1)).expect("an answer of the next process");
    assert_ne!(process.id().expect("it runs"), pid);
    let why = look_up_with(&mut process, 1, &stripped, &svmas, &kill_most(9)).expect_err("no answer");
    assert_eq!(why, "the process that reads names was killed by signal 9");
    assert_eq!((process.id(), children()), (None, vec![]));
    let names = look_up(&mut process, 2, &plain, &svmas).expect("names");
    assert_eq!(names.found, expected(&plain, &svmas));
    let second = process.id().expect("it runs");
    assert_ne!(second, pid);
    // Killed while it has nothing to do, it costs nothing.
    let done = Command::new("kill").args(["-KILL", &second.to_string()]).status();
    assert!(done.expect("kill").success());
    let is_dead = || {
        let stat = std::fs::read_to_string(format!("/proc/{second}/stat")).expect("not waited for");
        stat.contains(") Z ")
    };
    while !is_dead() {
        std::thread::yield_now();
    }
    let names = look_up(&mut process, 3, &plain, &svmas).expect("names");
    assert_eq!(names.found, expected(&plain, &svmas));
    drop(process);
    assert_eq!(children(), [0u32; 0]);
}

#[test]
fn damaged_files() {
    let scratch = Scratch::new();
    let plain = compile(&scratch, "plain", &["-g"]);
    let svmas = addresses(&plain);
    let bytes = std::fs::read(&plain).expect("a file");
    let mut process = process(ENOUGH);
    let mut state = 7u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let damaged = scratch.path("damaged");
    for id in 0..150 {
        let mut copy = bytes.clone();
        for _ in 0..4 {
            let at = match id % 3 {
                0 => random(1024),
                1 => copy.len() - 1 - random(2600),
                _ => random(copy.len()),
            };
            copy[at] ^= 1 << random(8);
        }
        std::fs::write(&damaged, copy).expect("written");
        // Whatever is in it: an answer of the right size.
        let names = look_up(&mut process, id, &damaged, &svmas).expect("an answer");
        assert_eq!(names.found.len(), svmas.len());
        std::fs::remove_file(&damaged).expect("removed"); // the process has it open
    }
    let names = look_up(&mut process, 1000, &plain, &svmas).expect("names");
    assert_eq!(names.found, expected(&plain, &svmas));
}

/// A tape as JSON, named by this process or by another one.
fn replayed(name: &str, naming: Option<NamingProcess>) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tapes").join(name);
    let tape = encode::read(&std::fs::read(path).expect("a tape")).expect("a good tape");
    let profile = replay::profile_with(&Rc::new(tape), SessionOptions::default(), None, naming).expect("a replay");
    let mut out = Vec::new();
    json::write(&profile, &mut out).expect("written to memory");
    String::from_utf8(out).expect("text")
}

#[test]
fn profiles_are_the_same_with_and_without_the_process() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tapes");
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .expect("a directory")
        .map(|f| f.expect("a file").file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".tape"))
        .collect();
    names.sort();
    for name in names.iter().step_by(3) {
        assert!(replayed(name, Some(process(ENOUGH))) == replayed(name, None), "{name}");
    }
    // Without names, the profile says why in each file's row.
    let nothing = NamingProcess::new("/bin/sh", &["-c", READY], NamingLimits::default());
    let text = replayed(&names[0], Some(nothing));
    assert!(
        text.contains("none: the process that reads names ended early"),
        "{text}"
    );
}

/// What a user starts by mistake ends at once.
#[test]
fn without_a_socket_it_ends() {
    let mut command = Command::new(PROGRAM);
    let done = command.arg(ARGUMENT).stdin(Stdio::null()).output().expect("it starts");
    assert_eq!(
        (done.status.code(), done.stdout.len(), done.stderr.len()),
        (Some(1), 0, 0)
    );
}

/// A file whose debug information does not fit into the memory has names all the same, and others have all of theirs.
#[test]
fn files_that_take_much_memory_have_the_names_of_their_symbols() {
    const MEMORY: u64 = 192 << 20;
    let scratch = Scratch::new();
    let more = scratch.path("more.s");
    let text = format!(".section .debug_str,\"\",@progbits\n.zero {MEMORY}\n.section .note.GNU-stack,\"\"\n");
    std::fs::write(&more, text).expect("written");
    let plain = compile(&scratch, "plain", &["-g"]);
    let large = compile(&scratch, "large", &["-g", &more.display().to_string()]);
    let limits = NamingLimits {
        memory: Some(MEMORY),
        ..NamingLimits::default()
    };
    let mut process = NamingProcess::new(PROGRAM, &[ARGUMENT], limits);
    let named = |process: &mut NamingProcess, id, path: &Path| {
        let svmas = addresses(path);
        let names = look_up(process, id, path, &svmas).expect("names");
        let inlined = names.found.iter().flatten().filter(|frame| frame.inlined).count();
        (
            names
                .found
                .iter()
                .any(|frames| frames.iter().any(|frame| &*frame.name == "f")),
            inlined,
            names,
        )
    };
    for round in 0..2 {
        let (has_name, inlined, names) = named(&mut process, 0, &plain);
        assert!(
            has_name && inlined > 0 && !names.symbols_missing.contains("MB"),
            "{round}: {names:?}"
        );
        let (has_name, inlined, names) = named(&mut process, 1, &large);
        assert!(has_name && inlined == 0, "{round}: {:?}", names.symbols_from);
        assert!(
            names.symbols_missing.contains("takes more than 192 MB"),
            "{}",
            names.symbols_missing
        );
    }
}

//! Compiles the programs of `fixtures/programs`, starts them, and communicates with them over pipes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::{built, sources};

/// Without frame pointers and sibling calls: every call has a frame, and only tables describe it.
const FLAGS: &[&str] = &[
    "-O2",
    "-g",
    "-fomit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-Wall",
    "-Werror",
];

/// Compiles one file, unless the output exists and is newer.
///
/// # Panics
/// If the compiler is missing or fails.
pub fn compile(source: &Path, out: &Path, more: &[&str]) {
    compile_by("gcc", source, out, more);
}

fn compile_by(compiler: &str, source: &Path, out: &Path, more: &[&str]) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = |p: &Path| std::fs::metadata(p).and_then(|m| m.modified()).ok();
    if changed(out).is_some_and(|done| changed(source).is_some_and(|s| s < done)) {
        return;
    }
    std::fs::create_dir_all(out.parent().expect("a directory")).expect("the directory for programs can be made");
    // Renamed when complete: another test binary may read it at the same time.
    let part = out.with_extension(format!("part-{}", std::process::id()));
    let done = Command::new(compiler)
        .args(FLAGS)
        .arg(source)
        .arg("-o")
        .arg(&part)
        .args(more)
        .output();
    let done = done.unwrap_or_else(|_| panic!("{compiler} is needed to compile the programs under test: install it"));
    assert!(
        done.status.success(),
        "{} does not compile:\n{}",
        source.display(),
        String::from_utf8_lossy(&done.stderr)
    );
    std::fs::rename(&part, out).expect("a compiled program can be renamed");
}

/// The library with the pools of native threads for `worker_pools.py`.
pub fn worker_pool() -> PathBuf {
    let out = built().join("worker_pool.so");
    compile(
        &sources().join("worker_pool.c"),
        &out,
        &["-fPIC", "-shared", "-pthread"],
    );
    out
}

/// The libraries with variables that threads wait for: with symbols, and without.
pub fn named_locks() -> [PathBuf; 2] {
    [("named_locks.so", "-g"), ("stripped_locks.so", "-s")].map(|(name, symbols)| {
        let out = built().join(name);
        let flags = ["-fPIC", "-shared", "-pthread", symbols];
        compile(&sources().join("named_locks.c"), &out, &flags);
        out
    })
}

/// The library that steps the time of day, to be preloaded.
pub fn stepped_clock() -> PathBuf {
    let out = built().join("stepped_clock.so");
    compile(&sources().join("stepped_clock.c"), &out, &["-fPIC", "-shared"]);
    out
}

/// The C program without Python.
pub fn native(args: &[&str]) -> Command {
    let exe = built().join("native");
    compile(&sources().join("native.c"), &exe, &["-pthread"]);
    let mut command = Command::new(exe);
    command.args(args);
    command
}

/// The program with objects of C++ classes: without symbols, or linked statically.
pub fn classes() -> [Command; 2] {
    [("stripped_classes", "-s"), ("static_classes", "-static")].map(|(name, linking)| {
        let exe = built().join(name);
        compile_by("g++", &sources().join("classes.cc"), &exe, &[linking]);
        Command::new(exe)
    })
}

/// The program whose resident memory grows by known amounts.
pub fn known_growth(args: &[&str]) -> Command {
    let exe = built().join("known_growth");
    compile(&sources().join("known_growth.c"), &exe, &["-pthread"]);
    let mut command = Command::new(exe);
    command.args(args);
    command
}

/// The program that publishes known allocations; `is_library`: it is given a library that has the same functions.
pub fn published(args: &[&str], is_library: bool) -> Command {
    let (source, exe) = (sources().join("published.c"), built().join("published"));
    compile(&source, &exe, &["-pthread", "-ldl"]);
    let mut command = Command::new(exe);
    command.args(args);
    if is_library {
        let library = built().join("published.so");
        compile(&source, &library, &["-shared", "-fPIC", "-pthread", "-ldl"]);
        command.arg(library);
    }
    command
}

/// The program with code that no table covers.
pub fn no_tables(args: &[&str]) -> Command {
    let exe = built().join("no_tables");
    compile(&sources().join("no_tables.c"), &exe, &[]);
    let mut command = Command::new(exe);
    command.args(args);
    command
}

/// The program that one of its threads executes again: `thread`, or `outlived` if the first thread has exited before.
pub fn exec_by_thread(how: &str) -> Command {
    let exe = built().join("exec_by_thread");
    compile(&sources().join("exec_by_thread.c"), &exe, &["-pthread"]);
    let mut command = Command::new(exe);
    command.arg(how);
    command
}

/// The C program without Python for musl: linked with its shared library, or with all of it.
pub fn native_for_musl(linking: &str, args: &[&str]) -> Command {
    let exe = built().join(format!("native-musl{linking}"));
    let flags: &[&str] = if linking.is_empty() {
        &["-pthread"]
    } else {
        &["-pthread", linking]
    };
    compile_by("musl-gcc", &sources().join("native.c"), &exe, flags);
    let mut command = Command::new(exe);
    command.args(args);
    command
}

/// The program whose calls must not be interrupted, with all kinds of calls or only these.
pub fn uninterruptible(args: &[&str]) -> Command {
    let exe = built().join("uninterruptible");
    compile(&sources().join("uninterruptible.c"), &exe, &["-pthread"]);
    let mut command = Command::new(exe);
    command.args(args);
    command
}

/// The program that checks the results of its system calls.
pub fn unchanged() -> Command {
    let exe = built().join("unchanged");
    compile(&sources().join("unchanged.c"), &exe, &["-pthread"]);
    Command::new(exe)
}

/// The program that publishes the OpenTelemetry context of its threads, and the libraries that do, in a process that loads them:
/// with a descriptor, and with a pair of words. Each with a name.
pub fn otel_contexts() -> Vec<(&'static str, Command)> {
    let source = sources().join("otel_context.c");
    let exe = built().join("otel_context");
    compile(&source, &exe, &["-rdynamic", "-pthread"]);
    let library = |name: &'static str, dialect: &str| {
        let out = built().join(format!("otel_{name}.so"));
        let dialect = format!("-mtls-dialect={dialect}");
        compile(&source, &out, &["-fPIC", "-shared", "-DLIBRARY", "-pthread", &dialect]);
        let mut command = Command::new("python3");
        command
            .args(["-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).run()"])
            .arg(out);
        (name, command)
    };
    vec![
        ("program", Command::new(exe)),
        library("descriptor", "gnu2"),
        library("pair", "gnu"),
    ]
}

/// The program that prints the state that it starts in.
pub fn state() -> Command {
    let exe = built().join("state");
    compile(&sources().join("state.c"), &exe, &[]);
    Command::new(exe)
}

/// The program whose functions run on stacks other than its threads' own.
pub fn contexts() -> Command {
    let exe = built().join("contexts");
    compile(&sources().join("contexts.c"), &exe, &["-pthread"]);
    Command::new(exe)
}

/// Copies a program in another process: one that another test forks meanwhile would inherit the copy open for writing, and
/// the copy could not be executed until then ("text file busy").
pub fn copy(from: impl AsRef<OsStr>, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status();
    assert!(
        copied.is_ok_and(|status| status.success()),
        "a copy at {}",
        to.display()
    );
}

/// The program that pretends to be CPython, with false data.
pub fn malicious_target() -> Command {
    let exe = built().join("malicious_target");
    compile(&sources().join("malicious_target.c"), &exe, &["-rdynamic", "-pthread"]);
    Command::new(exe)
}

/// Compiles the libraries that are loaded and unloaded; returns their directory. With one frame size they are identical
/// except for names; with several, the unwind rules of one are wrong in another.
pub fn plugins() -> PathBuf {
    for n in 0..3 {
        let (name, pad) = (format!("-DNAME=plugin{n}"), format!("-DPAD={}", 8 + 40 * n));
        let out = built().join(format!("plugin{n}.so"));
        compile(&sources().join("plugin.c"), &out, &["-fPIC", "-shared", &name, &pad]);
    }
    built()
}

/// A running program that has printed READY. Killed, with its children, at the end of the test.
pub struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Lines of its output.
    pub said: Vec<String>,
}

impl Program {
    pub fn start(mut command: Command) -> Program {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?} does not start: {e}"));
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut program = Program {
            input: child.stdin.take(),
            output,
            child,
            said: Vec::new(),
        };
        program.wait_for("READY");
        program
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Reads lines up to one that begins with this word.
    ///
    /// # Panics
    /// If the program ends without printing it.
    pub fn wait_for(&mut self, word: &str) {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).expect("a readable pipe");
            assert!(
                read > 0,
                "the program ended before it said {word}; it said {:?}",
                self.said
            );
            self.said.push(line.trim_end().to_string());
            if line.starts_with(word) {
                return;
            }
        }
    }

    /// Writes a line to it.
    pub fn send(&mut self, line: &str) {
        let input = self.input.as_mut().expect("its input is open");
        // One write: a program that reads what there is gets the whole line.
        input
            .write_all(format!("{line}\n").as_bytes())
            .expect("a writable pipe");
    }

    /// Closes its input and waits for it to end. Returns the CPU times that it reported, ns.
    pub fn finish(&mut self) -> BTreeMap<String, f64> {
        self.input = None;
        for line in (&mut self.output).lines() {
            self.said.push(line.expect("a readable pipe"));
        }
        let status = self.child.wait().expect("a child to wait for");
        assert!(
            status.success(),
            "the program ended with {status}; it said {:?}",
            self.said
        );
        let mut spent = BTreeMap::new();
        for line in &self.said {
            if let ["SPENT", name, ns] = line.split(' ').collect::<Vec<_>>()[..] {
                spent.insert(name.to_string(), ns.parse().expect("a number of ns"));
            }
        }
        spent
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Its process group contains its children, too. Without unsafe code, `kill` is only available as a command.
        let group = format!("-{}", self.child.id());
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
            let _ = self.child.wait();
        }
    }
}

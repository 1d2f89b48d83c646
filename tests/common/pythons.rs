//! Every supported CPython on this machine.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use nativeprof::cpython::versions;

use super::chance::{self, Attempt};
use super::{built, programs, sources};

/// Oldest and newest minor version used.
const KNOWN: RangeInclusive<u32> = versions::ALL[0].minor as u32..=versions::ALL[versions::ALL.len() - 1].minor as u32;

#[derive(Clone, Debug)]
pub struct Python {
    pub exe: PathBuf,
    pub minor: u32,
    /// `3.11.7-pyenv`: for messages and directory names.
    pub name: String,
    pub prefix: PathBuf,
    /// Directory of `Python.h`.
    include: PathBuf,
    /// Letters that distinguish builds of one version: `d` for a debug build, `t` for one without the GIL.
    pub flags: String,
    /// Whether it has a JIT compiler.
    jit: bool,
}

/// Directory of the interpreters that `.ci/install-new-pythons` unpacks.
fn unpacked() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("pythons/root/usr")
}

/// All of them, oldest first.
///
/// # Panics
/// If there is none: the tests would prove nothing.
pub fn pythons() -> &'static [Python] {
    static FOUND: OnceLock<Vec<Python>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let mut seen = BTreeSet::new();
        let mut found: Vec<Python> = candidates()
            .iter()
            .filter_map(|exe| inspect(exe))
            .filter(|p| seen.insert(p.exe.clone()))
            .collect();
        found.sort_by_key(|p| (p.minor, p.name.clone()));
        assert!(
            !found.is_empty(),
            "no CPython 3.{} to 3.{} was found, neither on PATH nor below ~/.pyenv/versions: install one",
            KNOWN.start(),
            KNOWN.end()
        );
        let headers: Vec<(u32, String, PathBuf)> = found
            .iter()
            .map(|p| (p.minor, p.flags.clone(), p.include.clone()))
            .collect();
        for p in &mut found {
            // Distributions have separate packages for headers; those of the same minor version are compatible.
            let fits = |(minor, flags, directory): &&(u32, String, PathBuf)| {
                *minor == p.minor && *flags == p.flags && directory.join("Python.h").exists()
            };
            if !p.include.join("Python.h").exists()
                && let Some((_, _, directory)) = headers.iter().find(fits)
            {
                p.include = directory.clone();
            }
        }
        found
    })
}

/// For tests that do not depend on the version. Not a debug build, if there is another: these are slow.
pub fn newest_python() -> &'static Python {
    let plain = pythons().iter().rev().find(|p| p.flags.is_empty());
    plain.or(pythons().last()).expect("checked in `pythons`")
}

/// Runs `test` for every interpreter and fails at the end with all that failed.
pub fn each_python(test: impl Fn(&Python) + Sync) {
    each_of(pythons(), test);
}

/// Runs `test` for every third interpreter: see [`third`].
pub fn each_third_python(first: usize, test: impl Fn(&Python) + Sync) {
    each_of(third(first, pythons()), test);
}

/// Runs `test` for the interpreters with every backend; the test passes the arguments on to nativeprof.
pub fn each_python_and_backend(test: impl Fn(&Python, &[&str]) + Sync) {
    each_with_backend(pythons(), |python, backend| test(python, &["--backend", backend]));
}

/// The same with every third interpreter.
pub fn each_third_python_and_backend(first: usize, test: impl Fn(&Python, &[&str]) + Sync) {
    each_with_backend(third(first, pythons()), |python, backend| {
        test(python, &["--backend", backend])
    });
}

/// Interpreters whose heaps `heap` knows.
pub fn with_known_heap() -> impl Iterator<Item = &'static Python> {
    pythons().iter().filter(|python| python.minor >= 8)
}

/// Runs `test` for these interpreters with every backend: all of them with eBPF, and with ptrace every third one, since what
/// reads the interpreters is the same.
pub fn each_with_backend(all: impl IntoIterator<Item = &'static Python>, test: impl Fn(&Python, &str) + Sync) {
    let all: Vec<&Python> = all.into_iter().collect();
    eprintln!("with ebpf:"); // printed if it fails
    each_of(all.iter().copied(), |python| test(python, "ebpf"));
    eprintln!("with ptrace:");
    each_of(third(0, all), |python| test(python, "ptrace"));
}

/// Every third of these, beginning with the newest, the second newest or the third newest (`first` 0, 1, 2, and so on
/// again): for tests that hardly ever find with one version what they do not find with the others. The tests of one
/// subject begin with different ones, so that together they have every version. All of them if `ALL_COMBINATIONS` is
/// set, or if they are few.
pub fn third<T>(first: usize, all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let all: Vec<T> = all.into_iter().collect();
    let (step, first) = if all_combinations() || all.len() <= 3 {
        (1, 0)
    } else {
        (3, first % 3)
    };
    all.into_iter().rev().skip(first).step_by(step)
}

/// Whether to test every combination of interpreters, backends and packages, which takes more than twice as long.
pub fn all_combinations() -> bool {
    std::env::var_os("ALL_COMBINATIONS").is_some()
}

/// Runs `test` for these interpreters, two at a time, since one recording leaves most of the machine idle. What fails by
/// chance then is repeated alone.
pub fn each_of<'a>(them: impl IntoIterator<Item = &'a Python>, test: impl Fn(&Python) + Sync) {
    some_at_a_time(2, them, |p| &p.name, test);
}

/// Runs `test` for some interpreters, `number` of them at a time, and what failed by chance again, alone.
pub fn some_at_a_time<'a, T: Sync + 'a>(
    number: usize,
    them: impl IntoIterator<Item = &'a T>,
    name: impl Fn(&T) -> &str,
    test: impl Fn(&T) + Sync,
) {
    let waiting = Mutex::new(them.into_iter().collect::<Vec<_>>().into_iter());
    let take = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let by_chance = Mutex::new(Vec::new());
    let failed = Mutex::new(Vec::new());
    let add = |list: &Mutex<Vec<&'a T>>, p| list.lock().unwrap_or_else(PoisonError::into_inner).push(p);
    std::thread::scope(|scope| {
        for _ in 0..number {
            scope.spawn(|| {
                while let Some(p) = take() {
                    match chance::attempt(|| test(p)) {
                        Attempt::Passed => (),
                        Attempt::Unlikely => add(&by_chance, p),
                        Attempt::Failed => add(&failed, p), // the panic message says why
                    }
                }
            });
        }
    });
    for p in by_chance.into_inner().unwrap_or_else(PoisonError::into_inner) {
        eprintln!("NOTE: {} is tried again, alone", name(p));
        if std::panic::catch_unwind(AssertUnwindSafe(|| chance::repeated(|| test(p)))).is_err() {
            add(&failed, p);
        }
    }
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let failed: Vec<&str> = failed.iter().map(|p| name(p)).collect();
    assert!(failed.is_empty(), "failed with {}", failed.join(", "));
}

fn candidates() -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os("PYTHONS") {
        let named = named.to_string_lossy();
        eprintln!("NOTE: only the interpreters in PYTHONS are tested: {named}");
        return named.split_whitespace().map(PathBuf::from).collect();
    }
    let names = KNOWN.flat_map(|n| ["", "t", "-dbg"].map(|build| format!("python3.{n}{build}")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<_> = std::env::split_paths(&path).collect();
    if unpacked().exists() {
        directories.push(unpacked().join("bin"));
    } else {
        eprintln!("NOTE: the newest CPythons are not here unless on PATH; .ci/install-new-pythons brings them");
    }
    let mut all: Vec<PathBuf> = names
        .flat_map(|name| directories.iter().map(move |f| f.join(&name)).collect::<Vec<_>>())
        .collect();
    let free_threaded = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("free-threaded/bin");
    all.extend(KNOWN.map(|n| free_threaded.join(format!("python3.{n}t"))));
    let versions = std::env::var_os("HOME").map(|home| Path::new(&home).join(".pyenv/versions"));
    match versions.as_deref().map(std::fs::read_dir) {
        Some(Ok(entries)) => all.extend(entries.flatten().map(|e| e.path().join("bin/python"))),
        _ => eprintln!("NOTE: there is no ~/.pyenv/versions; only the interpreters on PATH are tested"),
    }
    all.retain(|exe| exe.exists());
    all
}

/// `None` if it is not a CPython of a supported version.
fn inspect(exe: &Path) -> Option<Python> {
    let script = "import platform, sys, sysconfig\n\
                  print(sys.executable, sys.base_prefix, sysconfig.get_paths()['include'], \
                  platform.python_version(), platform.python_implementation(), sys.abiflags, \
                  hasattr(sys, '_jit') and sys._jit.is_available(), sep='\\n')";
    let said = Command::new(exe).args(["-I", "-c", script]).output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let mut lines = said.lines();
    let exe = Path::new(lines.next()?).canonicalize().ok()?;
    let (prefix, include) = (PathBuf::from(lines.next()?), PathBuf::from(lines.next()?));
    let version = lines.next()?;
    (lines.next()? == "CPython").then_some(())?;
    let minor = version.strip_prefix("3.")?.split('.').next()?.parse().ok()?;
    KNOWN.contains(&minor).then_some(())?;
    let flags = lines.next()?.replace(['m', 'u'], ""); // set in all builds of their time
    let origin = if prefix.starts_with(unpacked()) {
        "unpacked"
    } else if prefix.to_string_lossy().contains("pyenv") {
        "pyenv"
    } else {
        "system"
    };
    Some(Python {
        name: format!("{version}{flags}-{origin}"),
        exe,
        minor,
        prefix,
        include,
        flags,
        jit: lines.next()? == "True",
    })
}

/// The loader for what is unpacked; a program and its arguments follow.
fn loader() -> Command {
    let libraries = unpacked().join("lib/x86_64-linux-gnu");
    let mut loader = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    loader.arg("--library-path").arg(libraries);
    loader
}

impl Python {
    /// Compiles the extension `known_shares` for it and returns its directory.
    fn known_shares(&self) -> PathBuf {
        self.extension("known_shares")
    }

    fn extension(&self, name: &str) -> PathBuf {
        let directory = built().join(&self.name);
        let [include, more] = self.includes();
        programs::compile(
            &sources().join(format!("{name}.c")),
            &directory.join(format!("{name}.so")),
            &["-fPIC", "-shared", &include, &more],
        );
        directory
    }

    /// The program with frames that no evaluation loop runs; `None`: the headers of this version's frames are missing, or
    /// there is none for its version.
    pub fn with_compiled_frames(&self) -> Option<Command> {
        let knows = self.minor <= 10 || self.headers().join("internal/pycore_frame.h").exists();
        (self.minor <= 13 && knows).then(|| {
            self.extension("compiled_frames");
            self.script("compiled_python.py")
        })
    }

    /// Threads whose code calls code of other interpreters: each of them in one of these ways.
    pub fn with_calls_between_interpreters(&self, ways: &[&str]) -> Command {
        self.extension("interpreter_calls");
        let mut command = self.script("calls_between_interpreters.py");
        command.args(ways);
        command
    }

    /// Where the compiler finds the headers. Debian has those of the machine's architecture in a directory next to the
    /// others.
    fn includes(&self) -> [String; 2] {
        let directory = self.headers();
        let parent = directory.parent().expect("a directory").display();
        [format!("-I{}", directory.display()), format!("-idirafter{parent}")]
    }

    fn headers(&self) -> &Path {
        assert!(
            self.include.join("Python.h").exists(),
            "the headers of CPython {} are missing: {} has no Python.h (install python3.{}-dev)",
            self.name,
            self.include.display(),
            self.minor
        );
        &self.include
    }

    /// Its shared library, if it has one.
    pub fn library(&self) -> Option<PathBuf> {
        let name = format!("libpython3.{}{}.so", self.minor, self.flags);
        let paths = [format!("lib/{name}"), format!("lib/x86_64-linux-gnu/{name}.1.0")];
        // Before 3.8 the letter that all builds have was part of the name, too.
        let old = format!("lib/libpython3.{}m{}.so", self.minor, self.flags);
        paths
            .iter()
            .chain([&old])
            .map(|name| self.prefix.join(name))
            .find(|path| path.exists())
    }

    /// The command that runs one of our scripts.
    pub fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.exe);
        command.arg(sources().join(name));
        self.prepare(&mut command);
        command
    }

    pub fn has_jit(&self) -> bool {
        self.jit
    }

    /// Whether `.ci/install-new-pythons` installed it.
    pub fn is_unpacked(&self) -> bool {
        self.prefix.starts_with(unpacked())
    }

    /// The ELF file of an unpacked one, whose executable is replaced by a script.
    pub fn program(&self) -> PathBuf {
        let mut name = self.exe.clone().into_os_string();
        name.push(".bin");
        name.into()
    }

    /// Like `script`, with a copy of the unpacked one's ELF file instead.
    pub fn script_with(&self, program: &Path, name: &str) -> Command {
        let mut command = loader();
        command.arg("--argv0").arg(&self.exe).arg(program);
        command.arg(sources().join(name));
        self.prepare(&mut command);
        command
    }

    fn prepare(&self, command: &mut Command) {
        command
            .env("PYTHONPATH", self.known_shares())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env_remove("PYTHONHOME");
        // Our extension module would turn the GIL of a free-threaded build on.
        if self.is_free_threaded() {
            command.env("PYTHON_GIL", "0");
        }
    }

    pub fn is_free_threaded(&self) -> bool {
        self.flags.contains('t')
    }

    /// Like `script`, with the GIL turned on where it is off otherwise.
    pub fn script_with_gil(&self, name: &str) -> Command {
        let mut command = self.script(name);
        if self.is_free_threaded() {
            command.env("PYTHON_GIL", "1");
        }
        command
    }

    /// The C program that runs `in_process.py` in this interpreter: linked with it, or loading it later.
    pub fn embedded(&self, late: bool) -> Command {
        let library = self.library().expect("an interpreter with a shared library");
        let exe = built().join(&self.name).join(if late { "late" } else { "embedded" });
        if late {
            programs::compile(&sources().join("embedded.c"), &exe, &["-DLATE", "-ldl"]);
        } else {
            self.link(&library, "embedded.c", &exe);
        }
        let mut command = self.command(&exe);
        command.arg(sources().join("in_process.py")).arg(&library);
        self.prepare(&mut command);
        command.env("PYTHONHOME", &self.prefix);
        command
    }

    /// The C program that makes interpreters, linked with this one.
    pub fn new_interpreters(&self) -> Command {
        let library = self.library().expect("an interpreter with a shared library");
        let exe = built().join(&self.name).join("new_interpreters");
        self.link(&library, "new_interpreters.c", &exe);
        let mut command = self.command(&exe);
        command.env("PYTHONHOME", &self.prefix);
        command
    }

    fn link(&self, library: &Path, source: &str, exe: &Path) {
        let directory = library.parent().expect("a directory").display();
        let [include, more] = self.includes();
        let file = library.file_name().expect("a file's name").to_string_lossy();
        let (at, run) = (format!("-L{directory}"), format!("-Wl,-rpath,{directory}"));
        // An unpacked library needs a newer C library than the linker has.
        let lax = "-Wl,--allow-shlib-undefined";
        let flags = [&include, &more, &at, &run, lax, "-pthread", &format!("-l:{file}")];
        programs::compile(&sources().join(source), exe, &flags);
    }

    /// Runs a program that is linked with the interpreter.
    fn command(&self, exe: &Path) -> Command {
        if self.is_unpacked() {
            let mut loader = loader();
            loader.arg(exe);
            loader
        } else {
            Command::new(exe)
        }
    }
}

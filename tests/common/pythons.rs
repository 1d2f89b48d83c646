//! Every CPython of this machine that nativeprof knows.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::{built, programs, sources};

/// Oldest and newest minor version that is asked for.
const KNOWN: std::ops::RangeInclusive<u32> = 8..=13;

#[derive(Clone, Debug)]
pub struct Python {
    pub exe: PathBuf,
    pub minor: u32,
    /// `3.11.7-pyenv`: for messages and folder names.
    pub name: String,
    pub prefix: PathBuf,
    /// Folder of `Python.h`.
    include: PathBuf,
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
            .filter_map(|exe| ask(exe))
            .filter(|p| seen.insert(p.exe.clone()))
            .collect();
        found.sort_by_key(|p| (p.minor, p.name.clone()));
        assert!(
            !found.is_empty(),
            "no CPython 3.8 to 3.13 was found, neither on PATH nor below ~/.pyenv/versions: install one"
        );
        let headers: Vec<(u32, PathBuf)> = found.iter().map(|p| (p.minor, p.include.clone())).collect();
        for p in &mut found {
            // Distributions pack headers apart; those of the same minor version fit.
            let fits = |(minor, folder): &&(u32, PathBuf)| *minor == p.minor && folder.join("Python.h").exists();
            if !p.include.join("Python.h").exists()
                && let Some((_, folder)) = headers.iter().find(fits)
            {
                p.include = folder.clone();
            }
        }
        found
    })
}

/// For what does not hang on the version.
pub fn newest_python() -> &'static Python {
    pythons().last().expect("checked in `pythons`")
}

/// Runs `test` for every interpreter and fails at the end with all that failed.
pub fn each_python(test: impl Fn(&Python)) {
    each_of(pythons(), test);
}

pub fn each_of<'a>(them: impl IntoIterator<Item = &'a Python>, test: impl Fn(&Python)) {
    let mut failed = Vec::new();
    for p in them {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(p)));
        if done.is_err() {
            failed.push(p.name.clone()); // the panic has said why
        }
    }
    assert!(failed.is_empty(), "failed with {}", failed.join(", "));
}

fn candidates() -> Vec<PathBuf> {
    let names = KNOWN.map(|n| format!("python3.{n}"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> = std::env::split_paths(&path).collect();
    let mut all: Vec<PathBuf> = names
        .flat_map(|name| folders.iter().map(move |f| f.join(&name)).collect::<Vec<_>>())
        .collect();
    let versions = std::env::var_os("HOME").map(|home| Path::new(&home).join(".pyenv/versions"));
    match versions.as_deref().map(std::fs::read_dir) {
        Some(Ok(entries)) => all.extend(entries.flatten().map(|e| e.path().join("bin/python"))),
        _ => eprintln!("NOTE: there is no ~/.pyenv/versions; only the interpreters on PATH are tested"),
    }
    all.retain(|exe| exe.exists());
    all
}

/// `None` if it is not a CPython of a version that is asked for.
fn ask(exe: &Path) -> Option<Python> {
    let script = "import platform, sys, sysconfig\n\
                  print(sys.executable, sys.base_prefix, sysconfig.get_paths()['include'], \
                  platform.python_version(), platform.python_implementation(), sep='\\n')";
    let said = Command::new(exe).args(["-I", "-c", script]).output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let mut lines = said.lines();
    let exe = Path::new(lines.next()?).canonicalize().ok()?;
    let (prefix, include) = (PathBuf::from(lines.next()?), PathBuf::from(lines.next()?));
    let version = lines.next()?;
    (lines.next()? == "CPython").then_some(())?;
    let minor = version.strip_prefix("3.")?.split('.').next()?.parse().ok()?;
    KNOWN.contains(&minor).then_some(())?;
    let origin = if prefix.to_string_lossy().contains("pyenv") {
        "pyenv"
    } else {
        "system"
    };
    Some(Python {
        name: format!("{version}-{origin}"),
        exe,
        minor,
        prefix,
        include,
    })
}

impl Python {
    /// Compiles the extension `truth` for it and gives its folder.
    fn truth(&self) -> PathBuf {
        let folder = built().join(&self.name);
        let source = sources().join("truth.c");
        let include = format!("-I{}", self.headers().display());
        programs::compile(&source, &folder.join("truth.so"), &["-fPIC", "-shared", &include]);
        folder
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
        let path = self.prefix.join(format!("lib/libpython3.{}.so", self.minor));
        path.exists().then_some(path)
    }

    /// The command that runs a script of ours.
    pub fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.exe);
        command.arg(sources().join(name));
        self.prepare(&mut command);
        command
    }

    fn prepare(&self, command: &mut Command) {
        command
            .env("PYTHONPATH", self.truth())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env_remove("PYTHONHOME");
    }

    /// The C program that runs `inside.py` in this interpreter: linked with it, or loading it late.
    pub fn embedded(&self, late: bool) -> Command {
        let library = self.library().expect("an interpreter with a shared library");
        let folder = library.parent().expect("a folder").display().to_string();
        let source = sources().join("embedded.c");
        let exe = built().join(&self.name).join(if late { "late" } else { "embedded" });
        if late {
            programs::compile(&source, &exe, &["-DLATE", "-ldl"]);
        } else {
            let include = format!("-I{}", self.headers().display());
            let (at, run) = (format!("-L{folder}"), format!("-Wl,-rpath,{folder}"));
            programs::compile(
                &source,
                &exe,
                &[&include, &at, &run, &format!("-lpython3.{}", self.minor)],
            );
        }
        let mut command = Command::new(exe);
        command.arg(sources().join("inside.py")).arg(&library);
        self.prepare(&mut command);
        command.env("PYTHONHOME", &self.prefix);
        command
    }
}

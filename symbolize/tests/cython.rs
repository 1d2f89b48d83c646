//! Functions of a module that Cython makes: names, and lines of the `.pyx` file.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use common::Scratch;
use symbolize::{Module, Symbol};

const SOURCE: &str = "\
cdef double dist(double a, double b) noexcept:
    cdef double s = 0
    cdef int i
    for i in range(1000):
        s += (a - b) * i
    return s

def nearest(points, double x):
    best = None
    for p in points:
        d = dist(p, x)
        if best is None or d < best:
            best = d
    return best

def sum_rows(rows):
    total = 0
    for row in rows:
        total = total + nearest(row, 1.0)
    return total

class Plain:
    def method(self, n):
        return nearest([1.0], n)

cdef class Grid:
    cdef double w
    cpdef double half(self):
        return dist(self.w, 2)
";

/// A Python that has Cython: the first on PATH, or that of an environment of `.ci/install-python-venvs`.
fn cython() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/python-venvs");
    let environments = fs::read_dir(target).into_iter().flatten().flatten();
    let inside = environments.map(|entry| entry.path().join("bin/python"));
    let has_cython = |python: &PathBuf| {
        let output = Command::new(python).args(["-m", "cython", "--version"]).output();
        output.is_ok_and(|output| output.status.success())
    };
    let found = std::iter::once("python3".into()).chain(inside).find(has_cython);
    found.expect("no Python has Cython; `.ci/setup` brings it")
}

/// Makes `pkg/NAME.so` in the directory.
fn build(directory: &Path, python: &Path, name: &str, cython: &[&str], compiler: &[&str]) -> PathBuf {
    let package = directory.join("pkg");
    fs::create_dir_all(&package).expect("a directory");
    fs::write(package.join("__init__.py"), "").expect("written");
    fs::write(package.join(format!("{name}.pyx")), SOURCE).expect("written");
    let run = |command: &mut Command| {
        let output = command.current_dir(directory).output().expect("starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text").trim().to_string()
    };
    let generated = format!("pkg/{name}.c");
    run(Command::new(python)
        .args(["-m", "cython", "-3"])
        .args(cython)
        .arg(format!("pkg/{name}.pyx"))
        .args(["-o", &generated]));
    let headers = "import sysconfig; print(sysconfig.get_paths()['include'])";
    let headers = run(Command::new(python).args(["-c", headers]));
    // Debian's headers include others by their path in the directory above.
    let above = Path::new(&headers).parent().expect("a path").display().to_string();
    let library = package.join(format!("{name}.so"));
    run(Command::new("gcc")
        .args(["-O1", "-shared", "-fPIC", "-w", "-I", &headers, "-I", &above, "-o"])
        .arg(&library)
        .args(compiler)
        .arg(directory.join(generated)));
    library
}

fn open(path: &Path) -> Module {
    let module = Module::from_file(fs::File::open(path).expect("opens")).expect("an ELF file");
    module.with_files(path, std::sync::Arc::new(|path: &Path| fs::File::open(path).ok()))
}

/// All frames at all addresses of functions of Cython.
fn frames(module: &mut Module) -> Vec<Vec<Symbol>> {
    let functions = module.symbols().filter(|function| function.raw.contains("__pyx_"));
    let ranges: Vec<(u64, u64)> = functions.map(|function| (function.start, function.size)).collect();
    let addresses = ranges.iter().flat_map(|(start, size)| *start..start + size);
    let addresses: Vec<u64> = addresses.collect();
    module.lookup_many(&addresses).into_iter().flatten().collect()
}

/// Files and lines of the function with this name.
fn positions(frames: &[Vec<Symbol>], name: &str) -> BTreeSet<(String, u32)> {
    let all = frames.iter().flatten().filter(|symbol| *symbol.name == *name);
    all.filter_map(|symbol| Some((symbol.file.as_ref()?.to_string(), symbol.line?)))
        .collect()
}

#[test]
fn names_and_lines_in_the_source() {
    let python = cython();
    let scratch = Scratch::new("cython");
    let directory = &scratch.0;
    let expected = [
        ("dist", 1..=6),
        ("nearest", 8..=14),
        ("sum_rows", 16..=20),
        ("Plain.method", 23..=24),
        ("Grid.half", 28..=29),
    ];

    // By the comments of the generated file, and by directives in it.
    for (name, options) in [("comments", &[][..]), ("directives", &["--line-directives"])] {
        let library = build(directory, &python, name, options, &["-g"]);
        let mut module = open(&library);
        let frames = frames(&mut module);
        for (function, lines) in &expected {
            let found = positions(&frames, &format!("pkg.{name}.{function}"));
            let source = format!("pkg/{name}.pyx");
            let inside = found
                .iter()
                .filter(|(file, line)| file.ends_with(&source) && lines.contains(line));
            assert!(
                inside.count() >= lines.clone().count() / 2,
                "{name} {function}: {found:?}"
            );
            // What is not there is of an inlined function of the generated file or of a header.
            let path = directory.join(&source).display().to_string();
            let is_wrong = |file: &str, line| file.ends_with(".pyx") && (file != path || !lines.contains(&line));
            let wrong = found.iter().find(|(file, line)| is_wrong(file, *line));
            assert!(wrong.is_none() || name == "directives", "{function}: {wrong:?}");
        }
        assert!(!module.sources().cython_lines_missing);
        // A function that is inlined into its wrapper is not shown twice.
        let twice = frames.iter().find(|frames| {
            let names: Vec<&str> = frames.iter().map(|symbol| &*symbol.name).collect();
            names.windows(2).any(|two| two[0] == two[1])
        });
        assert_eq!(twice, None);
    }

    // Without debug information there are only names.
    let library = build(directory, &python, "plain", &[], &[]);
    let mut module = open(&library);
    let frames = frames(&mut module);
    let names: BTreeSet<&str> = frames.iter().flatten().map(|symbol| &*symbol.name).collect();
    for function in ["nearest", "sum_rows", "Plain.method", "Grid.half"] {
        assert!(
            names.contains(&*format!("pkg.plain.{function}")),
            "{function}: {names:?}"
        );
    }
    assert!(module.sources().cython_lines_missing);

    // A file that was generated after the module was built is not the one that it was built from.
    let generated = fs::File::options().write(true).open(directory.join("pkg/comments.c"));
    let later = SystemTime::now() + Duration::from_secs(60);
    generated.expect("opens").set_modified(later).expect("changed");
    let mut module = open(&directory.join("pkg/comments.so"));
    let found = positions(&self::frames(&mut module), "pkg.comments.nearest");
    // Inlined functions of Python's headers are at their own lines.
    let is_in = |end: &str| found.iter().any(|(file, _)| file.ends_with(end));
    assert!(is_in("pkg/comments.c") && !is_in(".pyx"), "{found:?}");
    assert!(module.sources().cython_lines_missing);
}

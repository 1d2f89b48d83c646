//! Separate debug information: every way of splitting it off must give the results of the complete file.

mod common;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::{Frames, Scratch, binutils, open, ours};
use symbolize::Module;

const A: &str = r#"
#include <stdio.h>
#include <stdlib.h>
struct node { struct node *left, *right; const char *name; double weight[4]; long counts[8]; };
typedef int (*visitor)(struct node *, void *, unsigned long long, const char *const *);
static inline __attribute__((always_inline)) int innermost(struct node *n, int x) {
    for (int i = 0; i < x; i++) x ^= rand() + (n ? (int)n->counts[i & 7] : 0);
    return x * 3;
}
static inline __attribute__((always_inline)) int middle(struct node *n, int x) {
    return innermost(n, x) + innermost(n, x + 1);
}
static __attribute__((noinline)) void hidden(void) { puts("hidden"); }
__attribute__((noinline)) int outer(struct node *n, int x) { hidden(); return middle(n, x); }
int visit(struct node *n, visitor v, int x) { return n ? visit(n->left, v, x) + v(n, 0, x, 0) + outer(n, x) : 0; }
int main(int argc, char **argv) { struct node n = {0}; return outer(&n, argc) + visit(&n, 0, argc); }
"#;

const FUNCTIONS: [&str; 4] = ["outer", "visit", "hidden", "main"];

const CPP: &str = r#"
#include <vector>
#include <string>
#include <algorithm>
namespace space {
template <class T> struct Box { T value; __attribute__((noinline)) T get(int n) const { return value + n; } };
struct Derived { int run(const std::string& s); };
int Derived::run(const std::string& s) { std::vector<int> v(s.begin(), s.end()); std::sort(v.begin(), v.end()); return v[0]; }
}
int main(int argc, char** argv) { space::Derived d; space::Box<long> b{argc}; return d.run(argv[0]) + b.get(argc); }
"#;

/// A directory that serves as the program's root.
struct Root(Scratch);

impl Root {
    fn new(name: &str) -> Root {
        Root(Scratch::new(name))
    }

    /// Copies a file to a path in it.
    fn put(&self, from: &Path, path: &str) {
        let to = self.0.0.join(path.trim_start_matches('/'));
        fs::create_dir_all(to.parent().expect("a directory")).expect("made");
        fs::copy(from, to).expect("copied");
    }

    /// The module at `path` as the program sees it, with access only to this root's files.
    fn module(&self, file: &Path, path: &str) -> Module {
        let root = self.0.0.clone();
        let files = move |path: &Path| File::open(root.join(path.strip_prefix("/").ok()?)).ok();
        open(file).with_files(path, Arc::new(files))
    }
}

/// Runs a tool that the tests need.
fn run(command: &mut Command) {
    let done = command.stdout(Stdio::null()).status();
    assert!(
        done.as_ref().is_ok_and(|s| s.success()),
        "{command:?}: {done:?} (.ci/setup installs what the tests need)"
    );
}

fn compile(scratch: &Scratch, out: &str, source: (&str, &str), command: &[&str]) -> PathBuf {
    let path = scratch.compile(out, source, command);
    path.unwrap_or_else(|| panic!("{command:?} (.ci/setup installs what the tests need)"))
}

/// `PATH.debug` and a stripped copy.
fn split_off(full: &Path) -> (PathBuf, PathBuf) {
    let (debug, bare) = (full.with_extension("debug"), full.with_extension("bare"));
    run(Command::new("objcopy").arg("--only-keep-debug").args([full, &debug]));
    run(Command::new("strip").arg("-o").args([&bare, full]));
    (debug, bare)
}

fn link(bare: &Path, debug: &Path) {
    // objcopy reads the file for its checksum, and stores its name without the directory.
    let link = format!("--add-gnu-debuglink={}", debug.display());
    run(Command::new("objcopy")
        .args(["--remove-section=.gnu_debuglink", &link])
        .arg(bare));
}

/// Addresses in the functions, every few bytes.
fn places(module: &mut Module, functions: &[&str]) -> Vec<u64> {
    let mut all = Vec::new();
    for name in functions {
        let (start, size) = module.symbol_named(name).unwrap_or_else(|| panic!("no {name}"));
        all.extend((start..start + size).step_by(3));
    }
    assert!(all.len() > 20);
    all
}

/// Shows the first difference only.
fn equal(svmas: &[u64], left: &[Frames], right: &[Frames], what: &str) {
    for ((svma, left), right) in svmas.iter().zip(left).zip(right) {
        assert_eq!(left, right, "{what}: {svma:#x}");
    }
}

/// Fails unless `module` gives the same results for `full`'s functions as `full` itself, which binutils confirms.
fn same_as(full: &Path, module: &mut Module, what: &str) {
    let mut complete = open(full);
    let svmas = places(&mut complete, &FUNCTIONS);
    let expected = ours(&mut complete, &svmas);
    assert!(expected.iter().any(|f| f.len() == 3), "{what}: nothing inlined");
    let theirs = binutils(full, &svmas).expect("addr2line of binutils");
    equal(&svmas, &expected, &theirs, what);
    equal(&svmas, &ours(module, &svmas), &expected, what);
    assert!(module.dwarf_error().is_none() && module.sources().dwarf, "{what}");
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn by_build_id() {
    let scratch = Scratch::new("build-id");
    let full = compile(&scratch, "full", ("a.c", A), &["gcc", "-O2", "-g", "-Wl,--build-id"]);
    let (debug, bare) = split_off(&full);
    let id = hex(open(&full).build_id().expect("a build id"));
    let place = format!("/usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);

    let root = Root::new("build-id-root");
    root.put(&debug, &place);
    let mut module = root.module(&bare, "/opt/full");
    same_as(&full, &mut module, "build id");
    let sources = module.sources();
    assert_eq!(sources.debug_file.as_deref(), Some(Path::new(&place)));
    assert!(sources.symtab && sources.refused.is_empty());

    // Of another build: reported, and not used.
    let other = compile(&scratch, "other", ("a.c", A), &["gcc", "-O1", "-g", "-Wl,--build-id"]);
    let root = Root::new("build-id-other");
    root.put(&other, &place);
    let mut module = root.module(&bare, "/opt/full");
    assert!(
        module
            .lookup(open(&full).symbol_named("hidden").expect("hidden").0)
            .is_err()
    );
    let sources = module.sources();
    assert_eq!((sources.debug_file, sources.refused.len()), (None, 1));
    assert!(sources.refused[0].contains(&place) && sources.refused[0].contains("another build"));

    // Nothing there: the paths are reported.
    let mut module = Root::new("build-id-none").module(&bare, "/opt/full");
    let _ = module.lookup(0);
    assert_eq!(module.sources().searched, [PathBuf::from(&place)]);
}

#[test]
fn by_debuglink() {
    let scratch = Scratch::new("debuglink");
    for id in ["-Wl,--build-id=none", "-Wl,--build-id"] {
        let full = compile(&scratch, "full", ("a.c", A), &["gcc", "-O2", "-g", id]);
        let (debug, bare) = split_off(&full);
        link(&bare, &debug);
        for place in [
            "/opt/bin/full.debug",
            "/opt/bin/.debug/full.debug",
            "/usr/lib/debug/opt/bin/full.debug",
        ] {
            let root = Root::new("debuglink-root");
            root.put(&debug, place);
            let mut module = root.module(&bare, "/opt/bin/full");
            same_as(&full, &mut module, place);
            assert_eq!(module.sources().debug_file.as_deref(), Some(Path::new(place)));
        }
        // One byte more: another checksum, or another build id.
        let root = Root::new("debuglink-wrong");
        if id.ends_with("none") {
            let mut bytes = fs::read(&debug).expect("read");
            bytes.push(0);
            fs::write(&debug, bytes).expect("written");
        } else {
            run(Command::new("objcopy")
                .args(["--remove-section=.note.gnu.build-id"])
                .arg(&debug));
        }
        root.put(&debug, "/opt/bin/full.debug");
        let mut module = root.module(&bare, "/opt/bin/full");
        let _ = module.lookup(0);
        let sources = module.sources();
        assert!(
            !sources.dwarf && sources.refused.iter().any(|r| r.contains("another build")),
            "{sources:?}"
        );
    }
}

#[test]
fn by_eu_strip() {
    let scratch = Scratch::new("eu-strip");
    let full = compile(&scratch, "full", ("a.c", A), &["gcc", "-O2", "-g"]);
    let (debug, bare) = (scratch.0.join("full.debug"), scratch.0.join("bare"));
    run(Command::new("eu-strip")
        .arg("-f")
        .arg(&debug)
        .arg("-o")
        .args([&bare, &full]));
    let root = Root::new("eu-strip-root");
    root.put(&debug, "/bin/full.debug");
    same_as(&full, &mut root.module(&bare, "/bin/full"), "eu-strip");
}

#[test]
fn mini_debug_info() {
    let scratch = Scratch::new("mini");
    let full = compile(&scratch, "full", ("a.c", A), &["gcc", "-O2", "-g", "-rdynamic"]);
    let (_, bare) = split_off(&full);
    // As Fedora's find-debuginfo does it: the symbols that are not in .dynsym.
    let mini = scratch.0.join("mini");
    run(Command::new("objcopy")
        .args(["-S", "--keep-symbol=hidden"])
        .args([&full, &mini]));
    run(Command::new("xz").arg("--keep").arg("--force").arg(&mini));
    let section = format!("--add-section=.gnu_debugdata={}.xz", mini.display());
    run(Command::new("objcopy").arg(section).arg(&bare));
    let mut complete = open(&full);
    let (hidden, outer) = (complete.symbol_named("hidden"), complete.symbol_named("outer"));
    let mut module = open(&bare); // it is in the file: no other is needed
    for (name, place) in [("hidden", hidden), ("outer", outer)] {
        let start = place.expect(name).0;
        let found = module.lookup(start + 1).expect(name);
        assert_eq!((&*found[0].name, found[0].start, found.len()), (name, start, 1));
    }
    assert_eq!(module.symbol_named("hidden"), hidden);
    let sources = module.sources();
    assert!(
        sources.debugdata && sources.dynsym && !sources.symtab && !sources.dwarf,
        "{sources:?}"
    );

    // Truncated, and a decompression bomb: reasons, no names, and little memory.
    for (bytes, what) in [
        (
            fs::read(scratch.0.join("mini.xz")).map(|b| b[..b.len() / 2].to_vec()),
            "decompressed",
        ),
        (Ok(packed_zeros(300 << 20)), "too large"),
    ] {
        let bad = scratch.0.join("bad.xz");
        fs::write(&bad, bytes.expect("bytes")).expect("written");
        let copy = scratch.changed(
            &bare,
            "bad",
            &["objcopy", &format!("--update-section=.gnu_debugdata={}", bad.display())],
        );
        let mut module = open(&copy.expect("objcopy"));
        assert!(module.lookup(hidden.expect("hidden").0).is_err());
        let refused = module.sources().refused;
        assert!(refused.iter().any(|r| r.contains(what)), "{what}: {refused:?}");
    }
}

/// This many zeros, compressed with xz.
fn packed_zeros(count: usize) -> Vec<u8> {
    use std::io::Write;
    let mut xz = Command::new("xz")
        .args(["-c", "-0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("xz");
    let mut stdin = xz.stdin.take().expect("a pipe");
    let writer = std::thread::spawn(move || stdin.write_all(&vec![0; count]));
    let packed = xz.wait_with_output().expect("xz").stdout;
    writer.join().expect("joined").expect("written");
    packed
}

#[test]
fn supplementary_files_of_dwz() {
    for (version, form, link) in [
        ("-gdwarf-4", "", ".gnu_debugaltlink"),
        ("-gdwarf-5", "--dwarf-5", ".debug_sup"),
    ] {
        let scratch = Scratch::new(&format!("dwz{version}"));
        let flags = ["gcc", "-O2", version, "-Wl,--build-id"];
        let full = compile(&scratch, "one", ("a.c", A), &flags);
        // The same types and functions in another program: dwz moves these.
        let second = format!("{A}\nint other(void) {{ return 1; }}\n");
        let other = compile(&scratch, "two", ("b.c", &second), &flags);
        let root = Root::new(&format!("dwz-root{version}"));
        let (packed, packed2, common) = (scratch.0.join("p1"), scratch.0.join("p2"), scratch.0.join("common"));
        fs::copy(&full, &packed).expect("copied");
        fs::copy(&other, &packed2).expect("copied");
        let mut dwz = Command::new("dwz");
        if !form.is_empty() {
            dwz.arg(form);
        }
        dwz.arg("-m")
            .arg(&common)
            .args(["-M", "../dwz/common"])
            .args([&packed, &packed2]);
        run(&mut dwz);
        let sections = Command::new("readelf")
            .args(["-SW"])
            .arg(&packed)
            .output()
            .expect("readelf")
            .stdout;
        assert!(
            String::from_utf8_lossy(&sections).contains(link),
            "{version}: dwz moved nothing"
        );
        root.put(&common, "/lib/dwz/common");
        root.put(&packed, "/lib/bin/one");
        let mut module = root.module(&packed, "/lib/bin/one");
        same_as(&full, &mut module, version);
        assert_eq!(
            module.sources().supplementary.as_deref(),
            Some(Path::new("/lib/bin/../dwz/common"))
        );

        // Without it there are lines and names of functions, but no inlined functions.
        let mut module = Root::new("dwz-none").module(&packed, "/lib/bin/one");
        let outer = open(&full).symbol_named("outer").expect("outer").0;
        assert_eq!(
            &*module.lookup(outer).expect("outer").last().expect("one").name,
            "outer"
        );
        assert_eq!(module.sources().searched[0], Path::new("/lib/bin/../dwz/common"));
    }
}

/// The output of LLVM: binutils does not read `.dwp` files.
fn llvm(file: &Path, svmas: &[u64]) -> Vec<Frames> {
    let addresses = svmas.iter().map(|a| format!("{a:#x}"));
    let out = Command::new("llvm-symbolizer")
        .args(["--output-style=GNU", "-f", "-i", "-C", "-a", "-e"])
        .arg(file)
        .args(addresses)
        .output()
        .expect("llvm-symbolizer (.ci/setup installs it)");
    let mut all: Vec<Frames> = Vec::new();
    let mut name = None;
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        match name.take() {
            None if line.starts_with("0x") => all.push(Vec::new()),
            None => name = Some(line.to_string()),
            Some(function) => {
                let place = line.split(" (discriminator").next().unwrap_or(line);
                let (file, line) = place.rsplit_once(':').unwrap_or((place, "0"));
                let frames = all.last_mut().expect("an address first");
                frames.push((function, file.to_string(), line.parse().unwrap_or(0)));
            }
        }
    }
    assert_eq!(all.len(), svmas.len());
    all
}

#[test]
fn split_dwarf() {
    for compiler in [
        &["gcc", "-gdwarf-4"][..],
        &["gcc", "-gdwarf-5"],
        &["clang", "-gdwarf-4"],
        &["clang", "-gdwarf-5"],
    ] {
        for (name, text, cc) in [("a.c", A, false), ("a.cc", CPP, true)] {
            let scratch = Scratch::new(&format!("split-{}{}{cc}", compiler[0], compiler[1]));
            let compiler = match (compiler, cc) {
                (["gcc", rest], true) => ["g++", rest],
                (["clang", rest], true) => ["clang++", rest],
                (rest, _) => [rest[0], rest[1]],
            };
            let what = format!("{compiler:?} {name}");
            // In two steps: clang puts the .dwo file of a program into a directory of its own choice.
            let flags = [&compiler[..], &["-O2", "-fPIE", "-gsplit-dwarf", "-c"]].concat();
            let build = |text: &str, out: &str| {
                let object = compile(&scratch, &format!("{out}.o"), (name, text), &flags);
                let file = scratch.0.join(out);
                run(Command::new(compiler[0]).arg("-pie").arg(&object).arg("-o").arg(&file));
                (file, object.with_extension("dwo"))
            };
            let (file, dwo) = build(text, "split");
            let everywhere = Arc::new(|path: &Path| File::open(path).ok());
            let module = || open(&file).with_files(&file, everywhere.clone());

            let mut complete = module();
            let functions = if cc {
                &[
                    "main",
                    "_ZN5space7Derived3runERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
                ][..]
            } else {
                &FUNCTIONS
            };
            let svmas = places(&mut complete, functions);
            let expected = llvm(&file, &svmas);
            // LLVM prints linkage names without the default spaces between parameters.
            let plain = |all: Vec<Frames>| -> Vec<Frames> {
                let name = |n: String| n.split('(').next().unwrap_or(&n).replace("> >", ">>");
                all.into_iter()
                    .map(|f| f.into_iter().map(|(n, f, l)| (name(n), f, l)).collect())
                    .collect()
            };
            let expected = plain(expected);
            assert!(expected.iter().any(|f| f.len() >= 3), "{what}: nothing inlined");
            equal(&svmas, &plain(ours(&mut complete, &svmas)), &expected, &what);
            assert_eq!(complete.sources().split_units, (1, 0), "{what}");

            // As a package, from which the unit is taken by its id. No tool makes one of GCC's DWARF 5: llvm-dwp 14
            // does not end, dwp of binutils 2.40 crashes.
            // not end, dwp of binutils 2.40 crashes.
            let gone = scratch.0.join("gone");
            let package = scratch.0.join("split.dwp");
            if !compiler[0].starts_with('g') || compiler[1] != "-gdwarf-5" {
                run(Command::new("llvm-dwp").arg(&dwo).arg("-o").arg(&package));
                fs::rename(&dwo, &gone).expect("renamed");
                let mut packed = module();
                equal(
                    &svmas,
                    &plain(ours(&mut packed, &svmas)),
                    &expected,
                    &format!("{what} packed"),
                );
                assert_eq!(packed.sources().split_units, (1, 0), "{what} packed");
                fs::remove_file(&package).expect("removed");
            } else {
                fs::rename(&dwo, &gone).expect("renamed");
            }

            // Without either, and with that of another build.
            for other in [false, true] {
                if other {
                    let (_, made) = build(&format!("{text}\nint another;\n"), "split2");
                    fs::rename(made, &dwo).expect("renamed");
                }
                let mut none = module();
                let found = none.lookup(svmas[0]).expect("a symbol remains");
                assert!(
                    found.last().is_some_and(|f| f.line.is_some()),
                    "lines are in the executable"
                );
                let sources = none.sources();
                assert_eq!(sources.split_units, (0, 1), "{what} {sources:?}");
                assert_eq!(sources.refused.is_empty(), !other, "{what} {sources:?}");
                assert!(other || sources.searched.contains(&dwo), "{what} {sources:?}");
            }
        }
    }
}

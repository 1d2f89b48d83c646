//! Small programs, compiled here in many ways, compared with binutils.

mod common;

use common::{Scratch, binutils, open, ours};
use symbolize::{Module, Reason};

const C: &str = r#"
#include <stdio.h>
#include <stdlib.h>
static inline __attribute__((always_inline)) int innermost(int x) {
    for (int i = 0; i < x; i++) x ^= rand();
    return x * 3;
}
static inline __attribute__((always_inline)) int middle(int x) {
    return innermost(x) + innermost(x + 1);
}
static __attribute__((noinline, cold)) void hidden(void) { puts("hidden"); }
__attribute__((noinline)) int outer(int x) {
    int y = middle(x);
    if (y == 42) { hidden(); y += rand(); hidden(); }
    return y;
}
__attribute__((visibility("default"), noinline)) int exported(int x) { hidden(); return outer(x) + atoi("1"); }
int strong_name(int x) __attribute__((alias("exported")));
int __reserved(int x) __attribute__((alias("exported")));
int weakling(int x) __attribute__((weak, alias("exported")));
int main(int argc, char **argv) { printf("%s\n", argv[0]); return exported(argc); }
"#;

const CPP: &str = r#"
#include <vector>
#include <string>
#include <algorithm>
#include <cstdio>
namespace space {
template <class T> struct Box { T value; __attribute__((noinline)) T get(int n) const { return value + n; } };
struct Base { virtual ~Base() {} virtual int run(const std::string& s) = 0; };
struct Derived : Base { int run(const std::string& s) override; };
int Derived::run(const std::string& s) { std::vector<int> v(s.begin(), s.end()); std::sort(v.begin(), v.end()); return v[0]; }
namespace { __attribute__((noinline)) int anonymous(int x) { std::puts("x"); return x; } }
}
int main(int argc, char** argv) {
    space::Derived d; space::Box<long> b{argc};
    try { return d.run(argv[0]) + b.get(argc) + space::anonymous(argc); } catch (int) { return 1; }
}
"#;

const RUST: &str = r#"
#[inline(always)] fn small(x: usize) -> usize { x.wrapping_mul(3) ^ std::hint::black_box(x) }
mod inner { #[inline(never)] pub fn generic<T: std::fmt::Debug>(t: T) -> usize { format!("{t:?}").len() + super::small(1) } }
fn main() { let f = |x: u32| inner::generic(x) + small(2); println!("{} {}", f(1), inner::generic("x")); }
"#;

const ASM: &str = r#"
    .text
    .globl _start
_start:
    call unsized
    call sized
    mov $60, %eax
    syscall
unsized:
    nop
    nop
    ret
    .type sized, @function
sized:
    nop
inside:
    nop
    ret
    .size sized, . - sized
    .section .text.other, "ax"
other:
    nop
    ret
    .section .note.GNU-stack, "", @progbits
"#;

/// Compares many addresses of every function with binutils.
fn compare(path: &std::path::Path, functions: &[&str]) {
    let mut module = open(path);
    let mut svmas = Vec::new();
    for f in module.symbols() {
        // Start-up code of the C library is excluded; binutils names it by other rules.
        if functions
            .iter()
            .any(|n| f.raw.contains("5space") || f.raw.split('.').next() == Some(n))
        {
            svmas.extend((f.start..f.start + f.size).step_by(3));
        }
    }
    assert!(svmas.len() > 5, "{}: {functions:?} not found", path.display());
    let Some(theirs) = binutils(path, &svmas) else { return };
    for ((svma, ours), theirs) in svmas.iter().zip(ours(&mut module, &svmas)).zip(theirs) {
        // binutils keeps the suffixes of split parts, and a space between closing brackets.
        // binutils reads parameters from DWARF, and spells types as they are there.
        let plain = |n: &str| {
            let n = n.replace("(anonymous namespace)", "{anonymous}").replace("> >", ">>");
            symbolize::demangle(n.split([' ', '(']).next().unwrap_or(&n)).into_owned()
        };
        let names = |f: &common::Frames| f.iter().map(|f| (plain(&f.0), f.2)).collect::<Vec<_>>();
        assert_eq!(names(&ours), names(&theirs), "{} {svma:#x}", path.display());
        let file = |f: &common::Frames| f.iter().map(|f| f.1.clone()).collect::<Vec<_>>();
        assert_eq!(file(&ours), file(&theirs), "{} {svma:#x}", path.display());
    }
}

#[test]
fn c_in_many_forms() {
    let scratch = Scratch::new("c");
    let names = ["outer", "exported", "main", "hidden"];
    for (out, flags) in [
        ("dwarf4", &["-gdwarf-4"][..]),
        ("dwarf5", &["-gdwarf-5"]),
        ("zlib", &["-g", "-gz=zlib"]),
        ("gnu", &["-gdwarf-4", "-gz=zlib-gnu"]),
        ("zstd", &["-g", "-gz=zstd"]),
        ("nopie", &["-g", "-no-pie"]),
        ("static", &["-g", "-static"]),
        ("clang5", &["clang", "-gdwarf-5"]),
        ("clang4", &["clang", "-gdwarf-4"]),
    ] {
        let (compiler, flags) = match flags {
            ["clang", rest @ ..] => ("clang", rest),
            _ => ("gcc", flags),
        };
        let command: Vec<&str> = [compiler, "-O2"].iter().chain(flags).copied().collect();
        let Some(path) = scratch.compile(out, ("c.c", C), &command) else {
            continue;
        };
        compare(&path, &names);
        let mut module = open(&path);
        let inlined = module.symbol_named("outer").map(|(start, size)| {
            let all: Vec<u64> = (start..start + size).collect();
            module.lookup_many(&all).into_iter().flatten().map(|s| s.len()).max()
        });
        assert_eq!(inlined, Some(Some(3)), "{out}");
        assert!(module.sources().dwarf && module.dwarf_error().is_none(), "{out}");
    }
}

#[test]
fn zstd_sections_are_read() {
    let scratch = Scratch::new("zstd");
    let Some(plain) = scratch.compile("plain", ("c.c", C), &["gcc", "-O2", "-g"]) else {
        return;
    };
    for option in [
        "--compress-debug-sections=zstd",
        "--compress-debug-sections=zlib",
        "--compress-debug-sections=zlib-gnu",
    ] {
        let Some(packed) = scratch.changed(&plain, "packed", &["objcopy", option]) else {
            continue;
        };
        let (mut a, mut b) = (open(&plain), open(&packed));
        let svmas = common::addresses(&mut a, 300);
        assert_eq!(a.lookup_many(&svmas), b.lookup_many(&svmas), "{option}");
        assert!(b.dwarf_error().is_none(), "{option}");
    }
}

#[test]
fn stripped_and_aliases() {
    let scratch = Scratch::new("strip");
    let Some(full) = scratch.compile("full", ("c.c", C), &["gcc", "-O2", "-g", "-rdynamic"]) else {
        return;
    };
    let mut module = open(&full);
    let (exported, size) = module.symbol_named("exported").expect("exported");
    let (hidden, _) = module.symbol_named("hidden").expect("hidden");
    assert!(size > 0);
    for alias in ["strong_name", "__reserved", "weakling"] {
        assert_eq!(module.symbol_named(alias), Some((exported, size)));
    }
    assert_eq!(module.symbol_named("no such"), None);
    // GLOBAL over WEAK, no underscores, the shortest.
    assert_eq!(&*module.lookup(exported).unwrap()[0].name, "exported");

    let stripped = scratch.changed(&full, "stripped", &["strip"]).expect("strip");
    let mut module = open(&stripped);
    let found = module.lookup(exported + 1).unwrap();
    assert_eq!(
        (&*found[0].name, found[0].start, found[0].file.as_ref()),
        ("exported", exported, None)
    );
    assert_eq!(module.lookup(hidden), Err(Reason::NotInAnyFunction));
    assert_eq!(module.lookup(u64::MAX), Err(Reason::OutsideFile));
    let sources = module.sources();
    assert!(sources.dynsym && !sources.symtab && !sources.dwarf);

    // Only DWARF: the function's name and extent come from there.
    let only = scratch.changed(
        &full,
        "dwarf-only",
        &["objcopy", "-R", ".dynsym", "--strip-symbol=hidden"],
    );
    if let Some(only) = only {
        let found = open(&only).lookup(hidden).unwrap();
        assert_eq!((&*found[0].name, found[0].start), ("hidden", hidden));
        assert!(found[0].line.is_some());
    }
}

#[test]
fn variables() {
    let scratch = Scratch::new("variables");
    let source = r#"
#include <stdio.h>
static char one[40] = "1";
int shared = 7;
extern int other __attribute__((alias("shared")));
static struct { long head; char lock[40]; } table[4];
static __thread long of_thread[2];
static const char text[] = "constant";
static long *const addresses[] = { (long *)one, (long *)&shared, (long *)table, (long *)text, (long *)puts };
int main(int argc, char **argv) {
    static int inner;
    of_thread[argc & 1]++;
    table[argc & 3].head = ++inner;
    for (int i = 0; i < 5; i++) printf("%lx\n", (unsigned long)addresses[i]);
    printf("%lx %lx %lx\n", (unsigned long)&inner, (unsigned long)main, (unsigned long)of_thread);
}
"#;
    let Some(full) = scratch.compile("full", ("v.c", source), &["gcc", "-O0", "-no-pie", "-rdynamic"]) else {
        return;
    };
    let said = std::process::Command::new(&full).output().expect("it runs").stdout;
    let said = String::from_utf8(said).expect("text");
    let at: Vec<u64> = said
        .split_whitespace()
        .map(|word| u64::from_str_radix(word, 16).expect("an address"))
        .collect();
    let [one, shared, table, text, _, inner, main, of_thread] = at[..] else {
        panic!("{said}");
    };
    let addresses = [
        table + 56,
        one,
        one + 39,
        shared,
        table,
        text + 3,
        inner,
        main,
        of_thread,
        one + 39,
        0,
        u64::MAX,
    ];
    let names = |path: &std::path::Path| -> Vec<Option<(String, u64, u64)>> {
        let found = open(path).data_objects(&addresses).into_iter();
        found
            .map(|o| o.map(|o| (o.name.to_string(), o.start, o.size)))
            .collect()
    };
    let is = |name: &str, start, size| Some((name.to_string(), start, size));
    let found = names(&full);
    assert_eq!(found[0], is("table", table, 192));
    assert_eq!(found[1..3], [is("one", one, 40), is("one", one, 40)]);
    assert!(
        [is("other", shared, 4), is("shared", shared, 4)].contains(&found[3]),
        "{found:?}"
    );
    assert_eq!(found[4..6], [is("table", table, 192), is("text", text, 9)]);
    assert!(
        found[6].as_ref().is_some_and(|(name, ..)| name.starts_with("inner.")),
        "{found:?}"
    );
    assert_eq!(found[7..9], [None, None], "code, and a variable of threads");
    assert_eq!(found[9..], [is("one", one, 40), None, None]);

    let stripped = scratch.changed(&full, "stripped", &["strip"]).expect("strip");
    let found = names(&stripped);
    assert_eq!(found[..3], [None, None, None]);
    assert!(found[3].is_some(), "it is exported");
    assert_eq!(open(&stripped).data_objects(&[]), []);
}

#[test]
fn no_symbols_at_all() {
    let scratch = Scratch::new("none");
    let Some(full) = scratch.compile("full", ("a.s", ASM), &["gcc", "-nostdlib", "-static"]) else {
        return;
    };
    let start = open(&full).symbol_named("_start").expect("_start").0;
    let bare = scratch.changed(&full, "bare", &["strip"]).expect("strip");
    assert_eq!(open(&bare).lookup(start), Err(Reason::NoSymbols));
}

#[test]
fn assembler() {
    let scratch = Scratch::new("asm");
    let Some(path) = scratch.compile("asm", ("a.s", ASM), &["gcc", "-nostdlib", "-static", "-g"]) else {
        return;
    };
    let mut module = open(&path);
    let mut at = |name: &str| module.symbol_named(name).expect(name).0;
    let (unsized_, sized, inside, other) = (at("unsized"), at("sized"), at("inside"), at("other"));
    for (svma, name, start) in [
        (unsized_, "unsized", unsized_),
        (unsized_ + 2, "unsized", unsized_),
        (sized, "sized", sized),
        (inside, "sized", sized), // a label, not a function
        (other + 1, "other", other),
    ] {
        let found = module.lookup(svma).unwrap();
        assert_eq!((&*found[0].name, found[0].start), (name, start));
        assert!(
            found[0].line.is_some(),
            "assembler has lines, but no functions, in its DWARF"
        );
    }
    assert_eq!(module.symbol_at(inside).map(|f| f.size), Some(3));
    let starts: Vec<u64> = module.symbols().map(|f| f.start).collect();
    assert!(starts.is_sorted() && !starts.contains(&inside));
}

#[test]
fn cpp_and_rust() {
    let scratch = Scratch::new("cpp");
    if let Some(path) = scratch.compile("cpp", ("c.cc", CPP), &["g++", "-O2", "-g"]) {
        compare(&path, &["main"]);
        let mut module = open(&path);
        let mut all = Vec::new();
        let starts: Vec<u64> = module.symbols().map(|f| f.start).collect();
        for symbols in module.lookup_many(&starts).into_iter().flatten() {
            all.extend(symbols.into_iter().map(|s| s.name.to_string()));
        }
        for name in [
            "space::Box<long>::get(int) const",
            "space::(anonymous namespace)::anonymous(int)",
        ] {
            assert!(all.iter().any(|n| n == name), "{name} in {all:?}");
        }
    }
    for command in [
        &["rustc", "-g", "-O"][..],
        &["rustc", "-g", "-O", "-Csymbol-mangling-version=v0"],
    ] {
        let Some(path) = scratch.compile("rust", ("r.rs", RUST), command) else {
            continue;
        };
        let mut module = open(&path);
        let generic: Vec<u64> = module
            .symbols()
            .filter(|f| f.raw.contains("7generic"))
            .map(|f| f.start)
            .collect();
        assert!(!generic.is_empty());
        for start in generic {
            let found = module.lookup(start).unwrap();
            let name = &found.last().unwrap().name;
            assert!(name.starts_with("r::inner::generic") && !name.contains("17h"), "{name}");
        }
    }
}

#[test]
fn cold_parts_have_the_name_of_their_function() {
    let scratch = Scratch::new("cold");
    let flags = ["gcc", "-O2", "-g", "-freorder-blocks-and-partition"];
    let Some(path) = scratch.compile("cold", ("c.c", C), &flags) else {
        return;
    };
    let mut module = open(&path);
    let Some((cold, _)) = module.symbol_named("outer.cold") else {
        eprintln!("SKIPPED: this compiler split nothing");
        return;
    };
    let found = module.lookup(cold).unwrap();
    let last = found.last().unwrap();
    assert_eq!((&*last.name, &*last.raw, last.start), ("outer", "outer.cold", cold));
}

#[test]
fn plt_stubs() {
    let scratch = Scratch::new("plt");
    for (out, flags) in [
        ("lazy", &["-Wl,-z,lazy", "-fcf-protection=none"][..]),
        ("now", &["-Wl,-z,now", "-fcf-protection=none"]),
        ("cet", &["-Wl,-z,lazy", "-fcf-protection=full", "-Wl,-z,ibtplt"]),
        ("nopie", &["-no-pie", "-Wl,-z,lazy"]),
    ] {
        let command: Vec<&str> = ["gcc", "-O2", "-fplt"].iter().chain(flags).copied().collect();
        let Some(path) = scratch.compile(out, ("c.c", C), &command) else {
            continue;
        };
        let mut module = open(&path);
        // objdump decodes stubs independently.
        let dump = std::process::Command::new("objdump")
            .args(["-d", "--no-show-raw-insn"])
            .arg(&path)
            .output();
        let Ok(dump) = dump else { return };
        let mut seen = 0;
        for line in String::from_utf8_lossy(&dump.stdout).lines() {
            let Some((addr, name)) = line.strip_suffix(">:").and_then(|l| l.split_once(" <")) else {
                continue;
            };
            let Some(name) = name.strip_suffix("@plt") else {
                continue;
            };
            let svma = u64::from_str_radix(addr, 16).expect("an address");
            match module.lookup(svma + 3) {
                Ok(found) => {
                    assert_eq!(*found[0].name, format!("{name}@plt"), "{out}");
                    assert_eq!(found[0].start, svma);
                    seen += 1;
                }
                // objdump's name for the unnamed first stub.
                Err(e) => assert!(name.starts_with('*') || name.contains('+'), "{out}: {name} {e}"),
            }
        }
        assert!(seen >= 3, "{out}: {seen} stubs");
    }
}

#[test]
fn build_id_and_offsets() {
    let scratch = Scratch::new("id");
    let flags = ["gcc", "-Wl,--build-id=0x0123456789abcdef"];
    let Some(path) = scratch.compile("id", ("c.c", C), &flags) else {
        return;
    };
    let mut module = open(&path);
    assert_eq!(
        module.build_id(),
        Some(&[0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef][..])
    );
    let main = module.symbol_named("main").expect("main").0;
    assert_eq!(module.svma_of_offset(main), Some(main)); // text is mapped one to one in a small PIE
    assert_eq!(module.svma_of_offset(u64::MAX), None);
}

#[test]
fn unsupported_files_are_refused() {
    let scratch = Scratch::new("refuse");
    let check = |bytes: &[u8], words: &str| {
        let error = Module::from_bytes(bytes.to_vec()).err().expect("refused").to_string();
        assert!(error.contains(words), "{error}");
    };
    check(b"", "not an ELF");
    check(b"#!/bin/sh\n", "not an ELF");
    check(b"\x7fELF", "ends inside");
    check(b"\x7fELF\x01\x01\x01", "32-bit");
    check(b"\x7fELF\x02\x02\x01", "big-endian");
    check(b"\x7fELF\x02\x01\x01", "ends inside");
    if let Some(object) = scratch.compile("c.o", ("c.c", C), &["gcc", "-c"]) {
        check(&std::fs::read(object).unwrap(), "ET_REL");
    }
    let directory = std::fs::File::open(&scratch.0).unwrap();
    assert!(
        Module::from_file(directory)
            .err()
            .expect("refused")
            .to_string()
            .contains("regular file")
    );
}

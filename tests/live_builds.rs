//! Unusual interpreters: without symbols, newer than all known versions, with the JIT compiler on, with compiled Python.
//!
//! Needs what tests/live.rs needs.

use std::path::Path;
use std::process::Command;

use object::read::elf::ElfFile64;
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol};

use nativeprof::profile::model::{Frame, FrameKind};

use common::calls::{CALLBACKS, SHARES};
use common::chance::{assert_likely, repeated};
use common::recording::{Ours, TRUTH, is_truncated};
use common::{Program, Python, Recording, Scratch, attach, live, pythons};

mod common;

/// Runs a script with a library instead of the interpreter's own.
fn with_library(python: &Python, library: &Path, script: &str) -> Command {
    let mut command = python.script(script);
    command.env("LD_LIBRARY_PATH", library.parent().expect("a directory"));
    command
}

/// The pythons of pyenv from 3.10 on with a shared library: those have anchors on the stack.
fn with_anchors() -> impl Iterator<Item = &'static Python> {
    let all = common::pythons().iter();
    all.filter(|p| p.minor >= 10 && p.library().is_some() && p.name.ends_with("-pyenv"))
}

/// Takes the evaluation loop's name out of a stripped library: out of the one relocation that refers to it, and out of the
/// table of names.
fn forget_eval(file: &mut [u8]) {
    const NAME: &[u8] = b"_PyEval_EvalFrameDefault\0";
    let (name_at, relocation, address) = {
        let elf = ElfFile64::<LittleEndian>::parse(&*file).expect("an ELF file");
        let names = elf.section_by_name(".dynstr").expect("names");
        let range = names.file_range().expect("in the file");
        let bytes = names.data().expect("names");
        let at = bytes
            .windows(NAME.len())
            .position(|w| w == NAME)
            .expect("the loop is exported");
        let symbol = elf.dynamic_symbols().find(|s| {
            let at_name = s.elf_symbol().st_name.get(LittleEndian);
            at_name as usize == at
        });
        let symbol = symbol.expect("its symbol");
        let relocations = elf.section_by_name(".rela.dyn").expect("relocations");
        let from = relocations.file_range().expect("in the file").0 as usize;
        let mut mine = relocations.data().expect("relocations").chunks_exact(24).enumerate();
        let index = symbol.index().0 as u32;
        let found = mine.find(|(_, r)| u32::from_le_bytes(r[12..16].try_into().expect("four")) == index);
        (
            range.0 as usize + at,
            found.map(|(i, _)| from + 24 * i),
            symbol.address(),
        )
    };
    if let Some(at) = relocation {
        // R_X86_64_RELATIVE: the load address and this
        file[at + 8..at + 16].copy_from_slice(&8u64.to_le_bytes());
        file[at + 16..at + 24].copy_from_slice(&address.to_le_bytes());
    }
    file[name_at..name_at + NAME.len() - 1].fill(b'x');
}

#[test]
fn merging_needs_no_names() {
    let _live = live();
    pythons::each_of(with_anchors(), |python| {
        let scratch = Scratch::new();
        let library = python.library().expect("a library").canonicalize().expect("a file");
        let copy = scratch.path(&library.file_name().expect("a name").to_string_lossy());
        let done = Command::new("strip")
            .args(["--strip-all", "-o"])
            .arg(&copy)
            .arg(&library)
            .status();
        assert!(done.is_ok_and(|s| s.success()), "strip is needed (package binutils)");
        let mut bytes = std::fs::read(&copy).expect("the copy");
        forget_eval(&mut bytes);
        std::fs::write(&copy, bytes).expect("the copy can be written");
        let mut program = Program::start(with_library(python, &copy, "callbacks.py"));
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.pid())).expect("its maps");
        assert!(
            maps.contains(&copy.display().to_string()),
            "{}: runs its own library",
            python.name
        );
        let r = attach(program.pid(), &[]);
        program.finish();
        r.check_quality(&python.name);
        r.check_calls(&python.name, &TRUTH, CALLBACKS);
        assert_eq!(
            r.with("_PyEval_EvalFrameDefault"),
            0,
            "{}: the name is gone",
            python.name
        );
        for (stack, _) in r
            .complete_stacks()
            .filter(|(s, _)| s.iter().any(|f| f.name == "level3"))
        {
            let bridges = stack.iter().filter(|f| f.name == "t_bridge").count();
            assert_eq!(bridges, 3, "{}", python.name);
        }
    });
}

/// Version 3.15 as released. Prints a message where it is missing, since tests that need it are skipped then.
fn shipped_3_15() -> Option<&'static Python> {
    let found = common::pythons()
        .iter()
        .find(|p| p.minor == 15 && p.is_unpacked() && !p.name.contains("d-"));
    if found.is_none() {
        eprintln!("NOTE: left out: there is no CPython 3.15 (.ci/install-new-pythons brings it, where apt can)");
    }
    found
}

/// Samples `shares.py` in a copy of the interpreter with a modified table of offsets: words at their positions.
fn with_table(python: &Python, words: &[(usize, u64)]) -> Recording {
    let scratch = Scratch::new();
    let mut bytes = std::fs::read(python.program()).expect("the interpreter's file");
    let at = bytes
        .windows(12)
        .position(|w| w.starts_with(b"xdebugpy") && w[11] == 3)
        .expect("a table of offsets");
    for (word, value) in words {
        bytes[at + word..at + word + 8].copy_from_slice(&value.to_le_bytes());
    }
    let copy = scratch.path("python");
    std::fs::write(&copy, bytes).expect("the copy can be written");
    let mut program = Program::start(python.script_with(&copy, "shares.py"));
    let r = attach(program.pid(), &["-d", "1"]);
    program.finish();
    r
}

/// PY_VERSION_HEX of a version that is not released yet.
const NEWER: (usize, u64) = (8, 0x0310_00f0);

#[test]
fn newer_versions_are_read_if_they_fit() {
    let _live = live();
    repeated(|| {
        let Some(python) = shipped_3_15() else { return };
        let r = with_table(python, &[NEWER]);
        r.check_quality("as 3.16");
        assert!(r.profile.meta.python.starts_with("CPython 3.16.0 ("), "{}", r.stderr);
        assert_likely!(r.with("run_alpha") > 0, "{}", r.stderr);
        // Either the offset of the code is that of the function, or the table is nonsense.
        for wrong in [(328, 16), (320, 0x7fff_ffff)] {
            let r = with_table(python, &[NEWER, wrong]);
            let frames = |s: &[&Frame]| s.iter().any(|f| f.kind == FrameKind::Python);
            assert_eq!(r.matching(frames), 0, "frames from a wrong table: {}", r.stderr);
            assert_likely!(r.with("t_alpha_work") > 0, "{}", r.stderr);
            let reported = r
                .stderr
                .lines()
                .filter(|l| l.contains("unsupported version, so Python frames are not available"))
                .count();
            assert_eq!(reported, 1, "{}", r.stderr);
        }
    });
}

#[test]
fn compiled_traces_keep_their_callers() {
    let _live = live();
    let compiling: Vec<_> = common::pythons().iter().filter(|p| p.has_jit()).collect();
    if compiling.is_empty() {
        eprintln!(
            "NOTE: left out: no CPython here has a JIT compiler (.ci/install-new-pythons brings some, where apt can)"
        );
    }
    pythons::each_of(compiling, |python| {
        for (script, calls) in [("shares.py", SHARES), ("callbacks.py", CALLBACKS)] {
            let mut command = python.script(script);
            command.env("PYTHON_JIT", "1");
            let mut program = Program::start(command);
            let r = attach(program.pid(), &[]);
            let truth = program.finish();
            let q = &r.profile.meta.quality;
            assert_likely!(q.taken > 200, "{}: {}", python.name, r.stderr);
            r.check_lost(&python.name);
            // Compiled traces have no tables, so stacks through them are repaired: complete, and checked against the
            // calls.
            assert_likely!(q.partial <= (q.taken / 1000).max(1), "{}: {}", python.name, r.stderr);
            r.check_calls(&python.name, &TRUTH, calls);
            if script == "shares.py" {
                r.check_shares(&python.name, &truth);
                let compiled = |s: &[&Frame]| {
                    let is_jit = |f: &&Frame| f.module == "[jit]";
                    s.iter().any(|f| f.name == "run_python") && s.iter().any(is_jit)
                };
                assert_likely!(r.matching(compiled) > 20, "{}: nothing was compiled", python.name);
            }
        }
    });
}

#[test]
fn compiled_python_is_never_in_a_wrong_place() {
    const REASON: &str = "[truncated: place of compiled Python unknown]";
    let _live = live();
    pythons::each_of(pythons::third(1, common::pythons()), |python| {
        let Some(command) = python.with_compiled_frames() else {
            eprintln!("NOTE: {}: left out: its frames are not known here", python.name);
            return;
        };
        let mut program = Program::start(command);
        let r = attach(program.pid(), &[]);
        program.finish();
        r.check_lost(&python.name);
        let chains: [&[&str]; 2] = [
            &["calls_one_that_computes", REASON, "c_compiled", "t_alpha_work"],
            &[
                "calls_one_that_calls_back",
                REASON,
                "c_compiled",
                "interpreted",
                "t_alpha_work",
            ],
        ];
        let is_chain = |s: &[&Frame], chain: &[&str]| {
            let known =
                |f: &&&Frame| chains.iter().any(|c| c.contains(&f.name.as_str())) || f.kind == FrameKind::Truncated;
            s.iter()
                .filter(known)
                .map(|f| f.name.as_str())
                .eq(chain.iter().copied())
        };
        for chain in chains {
            assert_likely!(
                r.matching(|s| is_chain(s, chain)) > 10,
                "{}: {chain:?}\n{}",
                python.name,
                r.stderr
            );
        }
        // A call is entered or left.
        let works = |s: &[&Frame]| s.iter().any(|f| f.name == "t_alpha_work");
        let other = |s: &[&Frame]| works(s) && !chains.iter().any(|chain| is_chain(s, chain));
        assert_likely!(
            r.matching(other) * 100 <= r.samples(),
            "{}: {}",
            python.name,
            r.examples(other)
        );
        assert_eq!(r.with("compiled_function"), 0, "{}", python.name);
    });
}

#[test]
fn interpreters_are_sampled_from_their_first_moment() {
    let _live = live();
    // Up to 3.11 a thread that has released the GIL is found by its first state, which belongs to another interpreter.
    let embedded = common::pythons()
        .iter()
        .filter(|p| p.minor <= 11 && p.library().is_some());
    pythons::each_with_backend(pythons::third(2, embedded), |python, backend| {
        let case = format!("{}, {backend}", python.name);
        let mut program = Program::start(python.new_interpreters());
        let r = attach(program.pid(), &["--backend", backend]);
        program.finish();
        r.check_lost(&case);
        let released = |s: &[&Frame]| s.iter().any(|f| f.name == "i_burn");
        let is_python = |f: &&Frame, name: &str| f.kind == FrameKind::Python && f.name == name;
        let complete =
            |s: &[&Frame]| s.iter().any(|f| is_python(f, "load")) && s.iter().any(|f| is_python(f, "release"));
        assert_likely!(r.matching(released) > 20, "{case}: {}", r.stderr);
        let wrong = |s: &[&Frame]| released(s) && !complete(s);
        assert_likely!(
            r.matching(wrong) * 50 <= r.matching(released),
            "{case}: {} of {}\n{}",
            r.matching(wrong),
            r.matching(released),
            r.examples(wrong)
        );
    });
}

/// Whichever thread a thread state names: no stack that lacks frames between those of another interpreter counts as complete.
#[test]
fn code_of_other_interpreters_is_below_its_callers() {
    const OURS: Ours = Ours {
        modules: &["interpreter_calls.so"],
        files: &["<string>"],
    };
    let _live = live();
    // From 3.13 on all versions keep thread states in the same way.
    let some = common::pythons().iter().filter(|p| p.minor <= 13 && p.flags.is_empty());
    pythons::each_with_backend(some, |python, backend| {
        let case = format!("{}, {backend}", python.name);
        // From 3.13 on it is not known which thread a thread state is lent to.
        let second = if python.minor < 13 { "lent" } else { "own" };
        let mut program = Program::start(python.with_calls_between_interpreters(&["own", second]));
        let r = attach(program.pid(), &["--backend", backend, "-d", "1"]);
        program.finish();
        r.check_lost(&case);
        r.check_calls(
            &case,
            &OURS,
            &[
                ("", &["<module>", "outer"]),
                ("<module>", &["main", "inner"]),
                ("outer", &["e_call"]),
                ("e_call", &["<module>"]),
                ("inner", &["burn", "e_burn", "e_release", "e_back"]),
                ("e_back", &["again"]),
                ("again", &["burn_again", "e_release"]),
                ("e_release", &["e_burn"]),
            ],
        );
        // Until the thread states are read again, and where a lent one begins to run code.
        let q = &r.profile.meta.quality;
        assert_likely!(q.taken >= 20 && q.partial * 3 <= q.taken, "{case}: {}", r.stderr);
        let again = |s: &[&Frame]| !is_truncated(s) && s.iter().any(|f| f.name == "again");
        assert_likely!(r.matching(again) > 0, "{case}: {}", r.stderr);
    });
}

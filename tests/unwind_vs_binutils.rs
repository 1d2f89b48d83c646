//! The unwinder's table rules compared with binutils' interpretation of the same tables, at pseudo-random addresses of
//! real libraries.

mod unwind_support;

use nativeprof::frame::ModuleId;
use nativeprof::unwind::Unwinder;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use unwind_support::{Elf, Rng};

/// One function's table as `readelf` prints it.
#[derive(Default)]
struct Entry {
    start: u64,
    end: u64,
    columns: Vec<String>,
    /// Address, CFA, columns.
    rows: Vec<(u64, String, Vec<String>)>,
}

fn readelf(path: &Path) -> Vec<Entry> {
    let output = Command::new("readelf")
        .args(["-W", "--debug-dump=frames-interp"])
        .arg(path)
        .output();
    let output = output.expect("this test needs readelf (binutils)");
    let text = String::from_utf8_lossy(&output.stdout);
    let hex = |s: &str| u64::from_str_radix(s, 16).ok();
    let mut entries: Vec<Entry> = Vec::new();
    // Offset of a CIE -> its columns and row, which apply where an entry adds nothing.
    let mut shared: BTreeMap<u64, (Vec<String>, String, Vec<String>)> = BTreeMap::new();
    let mut cie = None;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.contains(&"CIE") {
            cie = hex(words[0]);
        } else if let Some(range) = words.iter().find_map(|w| w.strip_prefix("pc=")) {
            cie = None;
            let (start, end) = range.split_once("..").unwrap();
            let mut entry = Entry {
                start: hex(start).unwrap(),
                end: hex(end).unwrap(),
                ..Entry::default()
            };
            let of = words.iter().find_map(|w| w.strip_prefix("cie=")).and_then(hex);
            if let Some((columns, cfa, values)) = of.and_then(|of| shared.get(&of)) {
                entry.columns = columns.clone();
                entry.rows.push((entry.start, cfa.clone(), values.clone()));
            }
            entries.push(entry);
        } else if words.first() == Some(&"LOC") {
            let columns: Vec<String> = words[2..].iter().map(|w| w.to_string()).collect();
            match (cie, entries.last_mut()) {
                (Some(of), _) => drop(shared.insert(of, (columns, String::new(), Vec::new()))),
                (None, Some(entry)) => (entry.columns, entry.rows) = (columns, Vec::new()),
                _ => {}
            }
        } else if words.len() > 2 && words[0].len() == 16 && hex(words[0]).is_some() {
            // A register saved in a register is printed as number and name: `r5 (rdi)`.
            let mut row: Vec<String> = Vec::new();
            for word in &words[2..] {
                match (word.strip_prefix('(').and_then(|w| w.strip_suffix(')')), row.last_mut()) {
                    (Some(name), Some(last)) => *last = name.to_string(),
                    _ => row.push(word.to_string()),
                }
            }
            match (cie, entries.last_mut()) {
                (Some(of), _) => {
                    let known = shared.get_mut(&of).unwrap();
                    (known.1, known.2) = (words[1].into(), row);
                }
                (None, Some(entry)) => entry.rows.push((hex(words[0]).unwrap(), words[1].into(), row)),
                _ => {}
            }
        }
    }
    entries.retain(|e| e.end > e.start && !e.rows.is_empty());
    entries
}

/// The output of `readelf` at `pc`, in the unwinder's form. Registers without a rule are left out.
fn expected(entry: &Entry, pc: u64) -> (String, BTreeMap<String, String>) {
    let at = entry.rows.iter().rposition(|r| r.0 <= pc).expect("a row");
    let (_, cfa, values) = &entry.rows[at];
    let values = entry.columns.iter().cloned().zip(values.iter().cloned());
    (
        cfa.clone(),
        values.filter(|(c, v)| v != "u" && !c.starts_with("xmm")).collect(),
    )
}

/// The unwinder's rule; everything computed from memory or by expression is `exp`, as in `readelf`.
fn ours(text: &str) -> (String, BTreeMap<String, String>) {
    let plain = |s: &str| {
        if s.starts_with('*') {
            "exp".to_string()
        } else {
            s.to_string()
        }
    };
    let mut words = text.split(' ').filter(|w| *w != "signal");
    let cfa = plain(words.next().unwrap());
    let pairs = words
        .map(|w| w.split_once('=').unwrap())
        .map(|(r, v)| (r.to_string(), plain(v)));
    (cfa, pairs.filter(|(_, v)| v != "u").collect())
}

fn compare(path: &Path, min: usize) {
    let entries = readelf(path);
    let mut unwinder = Unwinder::default();
    unwinder.add(ModuleId(0), Box::new(Elf::open(path)));
    let mut random = Rng(20);
    let (mut compared, mut wrong) = (0, Vec::new());
    for entry in &entries {
        let picks = [entry.start, entry.end - 1];
        let random = (0..6).map(|_| entry.start + random.next() % (entry.end - entry.start));
        for pc in picks.into_iter().chain(random.collect::<Vec<_>>()) {
            let is = unwinder.explain(ModuleId(0), pc);
            compared += 1;
            if is.as_deref().map(ours) != Some(expected(entry, pc)) {
                wrong.push(format!("{pc:#x}: {is:?}, readelf {:?}", expected(entry, pc)));
            }
        }
    }
    println!(
        "{}: {compared} addresses of {} functions, {} differ",
        path.display(),
        entries.len(),
        wrong.len()
    );
    for line in wrong.iter().take(20) {
        println!("{line}");
    }
    assert!(
        compared >= min,
        "only {compared} addresses compared: is this all of {}?",
        path.display()
    );
    assert!(wrong.is_empty(), "{} of {compared} differ", wrong.len());
}

/// The library as the dynamic linker of this machine finds it.
fn library(name: &str) -> Option<PathBuf> {
    let places = [
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib64",
        "/usr/lib64",
        "/usr/lib",
    ];
    places.iter().map(|p| Path::new(p).join(name)).find(|p| p.exists())
}

#[test]
fn rows_of_the_c_library() {
    compare(&library("libc.so.6").expect("this test needs libc.so.6"), 10_000);
}

#[test]
fn rows_of_the_cxx_library() {
    compare(
        &library("libstdc++.so.6").expect("this test needs libstdc++.so.6"),
        10_000,
    );
}

/// Another library, for experiments: `REFERENCE_LIBRARY=path`.
#[test]
#[ignore = "needs a library in REFERENCE_LIBRARY"]
fn rows_of_another_library() {
    compare(
        Path::new(&std::env::var("REFERENCE_LIBRARY").expect("REFERENCE_LIBRARY")),
        1,
    );
}

/// How many functions of `REFERENCE_LIBRARY` have no table, and how far analyzing their instructions gets.
#[test]
#[ignore = "needs a library in REFERENCE_LIBRARY"]
fn code_without_tables_in_another_library() {
    use nativeprof::unwind::Sections;
    let path = PathBuf::from(std::env::var("REFERENCE_LIBRARY").expect("REFERENCE_LIBRARY"));
    let mut elf = Elf::open(&path);
    let mut unwinder = Unwinder::default();
    unwinder.add(ModuleId(0), Box::new(elf.clone()));
    let (mut functions, mut complete, mut addresses, mut ruled, mut kept) = (0, 0, 0u64, 0u64, 0u64);
    let mut poor = Vec::new();
    for (start, size) in elf.functions() {
        let code = |text: &Option<String>| text.as_ref().is_none_or(|t| t.ends_with("code"));
        if size == 0 || !code(&unwinder.explain(ModuleId(0), start)) {
            continue;
        }
        functions += 1;
        let section = elf.code(start).expect("code");
        let bytes = &section.bytes[(start - section.svma) as usize..][..size as usize];
        let mut decoder = iced_x86::Decoder::with_ip(64, bytes, start, 0);
        let (mut bad, mut last) = (0u64, String::new());
        while decoder.can_decode() {
            let at = decoder.decode().ip();
            let text = unwinder.explain(ModuleId(0), at);
            addresses += 1;
            ruled += u64::from(text.is_some());
            // rsp and the callee-saved registers survive calls; all six must be known or found.
            let good = text.as_ref().is_some_and(|t| {
                let base = t.trim_start_matches("*(");
                !t.contains("=u")
                    && ["rsp", "rb", "r12", "r13", "r14", "r15"]
                        .iter()
                        .any(|r| base.starts_with(r))
            });
            kept += u64::from(good);
            if !good {
                bad += 1;
                last = format!("{at:#x} {text:?}");
            }
        }
        complete += u64::from(bad == 0);
        if bad > 0 {
            poor.push(format!("{start:#x}: {bad} addresses, such as {last}"));
        }
    }
    println!("{functions} functions without tables, {complete} completely analyzed");
    println!("{addresses} instructions, {ruled} with a rule, {kept} with every register");
    for line in poor.iter().take(20) {
        println!("{line}");
    }
}

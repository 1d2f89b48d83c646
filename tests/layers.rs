//! Checks the architecture in the source text: imports go one way, unsafe code is limited to few files and explained,
//! versions of CPython are compared in one place, long files have a reason, and comments fit on a screen.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Allowed imports: a module imports from lower ranks only, never from another one of its own rank. `error`, `escape`,
/// `export` and `profile` are those of the crate `nativeprof-profile`.
const RANKS: &[&[&str]] = &[
    &[
        "arch",
        "bytes",
        "code_map",
        "codec",
        "cpython_layout",
        "error",
        "escape",
        "event",
        "export",
        "frame",
        "limits",
        "profile",
        "truncation",
    ],
    &["counts", "sys", "interleave", "unwind"],
    &["history", "privileges", "tui"],
    &["process"],
    &["capture", "cpython", "edges"],
    &["heap", "resolve", "tape"],
    &["session"],
    &["host", "in_process"],
    &["mcp", "push"],
    &["cli"],
];

/// Files with `unsafe`: system calls, memory shared with the kernel, plain bytes given to BPF maps.
const UNSAFE: &[&str] = &[
    "sys/clock.rs",
    "sys/directory_watch.rs",
    "sys/files.rs",
    "sys/interrupts.rs",
    "sys/memory.rs",
    "sys/pagemap.rs",
    "sys/perf.rs",
    "sys/process.rs",
    "sys/ptrace.rs",
    "sys/sandbox.rs",
    "sys/sockets.rs",
    "sys/spawn.rs",
    "sys/threads.rs",
    "privileges/credentials.rs",
    "capture/common/perf_ring.rs",
    "capture/signal/handler.rs",
    "capture/signal/slot_pool.rs",
    "capture/signal/slot.rs",
    "capture/ebpf/mod.rs",
    "capture/ebpf/interpreter_locks.rs",
    "capture/ebpf/host_rules.rs",
    "capture/ebpf/nested_states.rs",
    "capture/ebpf/off_cpu.rs",
    "capture/ebpf/program_map.rs",
];

/// The same in `hooks/src`: the loader's tables, the functions that replace others, and the allocators of Python.
const UNSAFE_HOOKS: &[&str] = &[
    "elf.rs",
    "got.rs",
    "lib.rs",
    "mappings.rs",
    "native.rs",
    "probes.rs",
    "pymem.rs",
    "sampling.rs",
    "thread.rs",
    "thunk.rs",
    "wait.rs",
];

/// Files that read text as UTF-8: the kernel's name of a clock, and what our own programs print.
const TRUSTED_TEXT: &[&str] = &["engine/clock.rs", "cli/commands/selftest/workload.rs"];

/// Where versions of CPython are compared: in the rows of facts, and in the names of functions by version.
const VERSIONS: &[&str] = &["cpython/versions/", "profile/interpreter_frames/"];

const MAX_LINES: usize = 800;

/// Columns of a comment with its indentation. New ones are wrapped at 120, as code is.
const MAX_COMMENT: usize = 130;

/// Longer files, and why they are not split.
const LONG: &[(&str, &str)] = &[];

struct Source {
    /// Below `src`, with slashes.
    name: String,
    text: String,
}

fn sources() -> Vec<Source> {
    files(&["rs"])
}

/// The files below `src` with one of these extensions.
fn files(extensions: &[&str]) -> Vec<Source> {
    files_below("src", extensions)
}

fn files_below(directory: &str, extensions: &[&str]) -> Vec<Source> {
    fn walk(directory: &Path, extensions: &[&str], out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).expect("a source directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, extensions, out);
            } else if path.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)) {
                out.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let mut paths = Vec::new();
    walk(&root, extensions, &mut paths);
    paths.sort();
    assert!(paths.len() > 5, "the sources were not found");
    let read = |path: PathBuf| Source {
        name: path
            .strip_prefix(&root)
            .expect("below src")
            .to_string_lossy()
            .into_owned(),
        text: fs::read_to_string(&path).expect("a source file"),
    };
    paths.into_iter().map(read).collect()
}

/// The line without its comment. (No string in the sources has `//` before something relevant here.)
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or(line)
}

/// Modules named by `crate::NAME`, and by `crate::{NAME, ...}`.
fn imports(text: &str) -> Vec<String> {
    let plain: String = text.lines().map(code).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for rest in plain.split("crate::").skip(1) {
        let word = |s: &str| -> String { s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
        match rest.strip_prefix('{') {
            Some(list) => {
                let (mut depth, mut start) = (0, true);
                for (i, c) in list.char_indices() {
                    if start && depth == 0 && (c.is_alphabetic() || c == '_') {
                        found.push(word(&list[i..]));
                        start = false;
                    }
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => start = true,
                        _ => {}
                    }
                }
            }
            None => found.push(word(rest)),
        }
    }
    found
}

fn rank(module: &str) -> Option<usize> {
    RANKS.iter().position(|names| names.contains(&module))
}

#[test]
fn imports_go_one_way() {
    let mut wrong = Vec::new();
    for source in sources() {
        let module = source
            .name
            .split('/')
            .next()
            .unwrap_or_default()
            .trim_end_matches(".rs")
            .to_string();
        if module == "lib" || module == "main" {
            continue;
        }
        let Some(here) = rank(&module) else {
            wrong.push(format!(
                "{}: the module {module} has no rank; give it one in tests/layers.rs",
                source.name
            ));
            continue;
        };
        for name in imports(&source.text) {
            match rank(&name) {
                _ if name == module => {}
                // Rank 0 is shared vocabulary: its files may refer to each other.
                Some(0) if here == 0 => {}
                Some(there) if there < here => {}
                Some(there) => wrong.push(format!(
                    "{} (rank {here}) imports {name} (rank {there}): hand it in as data or as a function",
                    source.name
                )),
                None => wrong.push(format!("{}: crate::{name} has no rank", source.name)),
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Formats of other tools are made of profiles and read as profiles, and nothing of a profile depends on them. A reader may know
/// what the writer of its format does.
#[test]
fn profiles_know_no_other_formats() {
    let profile = files_below("profile/src", &["rs"]);
    let is_format = |source: &&Source| {
        ["export/", "import/"]
            .iter()
            .any(|start| source.name.starts_with(start))
    };
    for source in profile.iter().filter(|source| !is_format(source)) {
        for formats in ["export", "import"] {
            let knows = imports(&source.text).contains(&formats.to_string());
            assert!(!knows, "{} imports from {formats}", source.name);
        }
    }
}

#[test]
fn unsafe_code_stays_in_few_files_and_says_why() {
    let mut wrong = Vec::new();
    for (directory, allowed) in [("src", UNSAFE), ("profile/src", &[]), ("hooks/src", UNSAFE_HOOKS)] {
        check_unsafe(directory, allowed, &mut wrong);
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn check_unsafe(directory: &str, allowed: &[&str], wrong: &mut Vec<String>) {
    let mut holders = Vec::new();
    for source in files_below(directory, &["rs"]) {
        let lines: Vec<&str> = source.text.lines().collect();
        let has = |line: &str| {
            code(line)
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .any(|w| w == "unsafe")
        };
        let places: Vec<usize> = (0..lines.len()).filter(|i| has(lines[*i])).collect();
        if places.is_empty() {
            continue;
        }
        let name = format!("{directory}/{}", source.name);
        if !allowed.contains(&source.name.as_str()) {
            wrong.push(format!("{name}:{}: unsafe code belongs in {allowed:?}", places[0] + 1));
        }
        for at in places {
            // The function's documentation says what its callers owe, and a type has nothing to say.
            let words = ["unsafe fn", "unsafe extern", "#[unsafe(naked)]"];
            let declares = words.iter().any(|words| lines[at].contains(words));
            // The comment is right above, perhaps above the statement that contains the block, or above another
            // implementation that it applies to, too.
            let above = lines[..at].iter().rev();
            let explained = above
                .take_while(|l| {
                    let l = l.trim();
                    l.starts_with("//")
                        || l.starts_with("#[")
                        || l.starts_with("unsafe impl")
                        || l.ends_with(['=', '(', '{'])
                })
                .any(|l| l.trim_start().starts_with("// SAFETY:"));
            if !explained && !declares {
                wrong.push(format!("{name}:{}: no `// SAFETY:` above", at + 1));
            }
        }
        holders.push(source.name);
    }
    for name in allowed.iter().filter(|name| !holders.iter().any(|h| h == *name)) {
        wrong.push(format!(
            "{directory}/{name} holds no unsafe code (any more): take it off the list"
        ));
    }
}

/// Processes choose their names, and the names of files: `/proc` holds bytes. A file that is read as UTF-8 cannot be read when
/// one of them is not.
#[test]
fn files_of_proc_are_read_as_bytes() {
    let mut wrong = Vec::new();
    let others = ["profile/src", "python/src", "hooks/src"].map(|directory| files_below(directory, &["rs"]));
    for source in sources().into_iter().chain(others.into_iter().flatten()) {
        let (program, _) = source
            .text
            .split_once("#[cfg(test)]\nmod ")
            .unwrap_or((&source.text, ""));
        for (i, line) in program.lines().enumerate() {
            let is_reader = code(line).contains("read_to_string");
            if is_reader && !source.name.ends_with("tests.rs") && !TRUSTED_TEXT.contains(&source.name.as_str()) {
                wrong.push(format!(
                    "{}:{}: use sys::procfs::read_text, or read bytes",
                    source.name,
                    i + 1
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Whether a line of code compares a version of CPython: its minor number, or all of it with `(3, N)`.
fn compares_versions(line: &str) -> bool {
    let line = code(line);
    let has_word = |wanted: &str| {
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.into_iter().any(|word| word == wanted)
    };
    // Files have devices with two numbers.
    let has_minor = has_word("minor") && !has_word("major") || line.contains("version.1");
    let operators = ["<=", ">=", "==", "!=", " < ", " > ", "..", "match ", "matches!"];
    let is_version = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    let (before_arrow, after_arrow) = line.split_once("=>").unwrap_or((line, ""));
    let is_arm = line.contains("=>") && before_arrow.split("(3, ").skip(1).any(is_version);
    let is_compared = operators.iter().any(|operator| {
        let mut sides = [before_arrow, after_arrow]
            .into_iter()
            .flat_map(|part| part.split(operator).skip(1));
        sides.any(|rest| rest.trim_start().starts_with("(3, "))
    });
    is_arm || is_compared || has_minor && operators.iter().any(|operator| line.contains(operator))
}

#[test]
fn versions_are_compared_in_one_place() {
    for (line, expected) in [
        ("    if minor >= 11 {", true),
        ("    let at = match self.tasks.minor {", true),
        ("    let (3, minor @ 7..=15, _) = runtime.version else {", true),
        ("        (3, 9 | 10, _) => 352,", true),
        ("    if published.is_none() && runtime.version >= (3, 14, 0) {", true),
        ("    let is_half = py.version_info() < (3, 12);", true),
        ("    let newest = rows.last().filter(|row| row.version.1 > at);", true),
        ("        (major, minor, 255) => format!(\"{major}.{minor}{t}\"),", false),
        (
            "    inode == mapping.inode || device != libc::makedev(major, minor)",
            false,
        ),
        ("        (Offset(at), _) => (3, 0, at as u32),", false),
        ("    Some((3, digits.parse().ok()?, 255)) // minor >= 6", false),
    ] {
        assert_eq!(compares_versions(line), expected, "{line}");
    }
    let mut wrong = Vec::new();
    for directory in ["src", "python/src", "hooks/src"] {
        for source in files_below(directory, &["rs"]) {
            let is_exempt = VERSIONS.iter().any(|place| source.name.starts_with(place));
            if is_exempt || source.name.ends_with("tests.rs") || source.name.contains("/tests/") {
                continue;
            }
            let text = &source.text;
            let (program, _) = text.split_once("#[cfg(test)]\nmod ").unwrap_or((text, ""));
            let lines = (1..).zip(program.lines()).filter(|(_, line)| compares_versions(line));
            wrong.extend(lines.map(|(n, line)| format!("{directory}/{}:{n}: {}", source.name, line.trim())));
        }
    }
    assert!(
        wrong.is_empty(),
        "make it a field of a row in src/cpython/versions:\n{}",
        wrong.join("\n")
    );
}

/// rustfmt leaves comments as they are. Rows of tables cannot be wrapped.
#[test]
fn comments_are_not_wider_than_a_screen() {
    let mut wrong = Vec::new();
    let crates = [
        "src",
        "profile",
        "symbolize",
        "hooks/src",
        "python/src",
        "tests",
        "benches",
        "fuzz/targets",
    ];
    for directory in crates {
        for source in files_below(directory, &["rs"]) {
            for (n, line) in (1..).zip(source.text.lines()) {
                let comment = line.trim_start();
                let is_row = comment.trim_start_matches(['/', '!', ' ']).starts_with('|');
                let width = line.chars().count();
                if comment.starts_with("//") && !is_row && width > MAX_COMMENT {
                    wrong.push(format!("{directory}/{}:{n}: {width} columns", source.name));
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "wrap these comments at 120 columns:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn long_files_have_a_reason() {
    let mut wrong = Vec::new();
    const EXTENSIONS: &[&str] = &["rs", "c", "h", "js", "css", "py"];
    for source in files(EXTENSIONS)
        .into_iter()
        .chain(files_below("profile/src", EXTENSIONS))
    {
        let length = source.text.lines().count();
        let listed = LONG.iter().any(|(name, _)| *name == source.name);
        if length > MAX_LINES && !listed {
            wrong.push(format!("{} has {length} lines: is it two files?", source.name));
        }
        if length <= MAX_LINES && listed {
            wrong.push(format!("{} has {length} lines only: take it off the list", source.name));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The files of the session whose functions may take all of it: the list of stages, the pump, and what runs a session for others,
/// which do not name it.
const STAGES: &[&str] = &[
    "session/inspection.rs",
    "session/mod.rs",
    "session/pump.rs",
    "session/long_term.rs",
    "session/recording.rs",
    "session/replay.rs",
    "session/sample.rs",
    "session/tests.rs",
];

/// What is observed of samples and processes: no activity names another.
const ACTIVITIES: &[&str] = &[
    "awaits", "lags", "resident", "spans", "states", "tasks", "wakers", "workers",
];

/// Most fields of a struct of the session, and most files with functions of one.
const MAX_FIELDS: usize = 12;
const MAX_IMPLS: usize = 3;

#[test]
fn the_session_is_divided_among_owners() {
    let session: Vec<Source> = sources()
        .into_iter()
        .filter(|s| s.name.starts_with("session/"))
        .collect();
    let mut impls: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for source in &session {
        let own = source.name.trim_start_matches("session/").trim_end_matches(".rs");
        let (mut name, mut fields) = (String::new(), 0);
        for line in source.text.lines().take_while(|line| *line != "#[cfg(test)]").map(code) {
            let words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            assert!(
                STAGES.contains(&&*source.name) || !words.contains(&"Session"),
                "{}: only the stages know the whole session: {line}",
                source.name
            );
            let other = ACTIVITIES
                .iter()
                .find(|other| line.contains(&format!("super::{other}::")));
            assert!(
                !ACTIVITIES.contains(&own) || other.is_none(),
                "{}: an activity names another one: {line}",
                source.name
            );
            if line.contains("struct ") && line.ends_with('{') {
                (name, fields) = (line.to_string(), 0);
            } else if line.starts_with("    ")
                && !line.starts_with("     ")
                && line.ends_with(',')
                && line.contains(": ")
            {
                fields += 1;
                assert!(
                    fields <= MAX_FIELDS || name.is_empty(),
                    "{}: more than {MAX_FIELDS} fields in {name}",
                    source.name
                );
            } else if line == "}" {
                name.clear();
            }
            if let Some(of) = line.strip_prefix("impl ").and_then(|rest| rest.strip_suffix(" {")) {
                impls.entry(of.to_string()).or_default().insert(&source.name);
            }
        }
    }
    for (of, files) in impls {
        assert!(files.len() <= MAX_IMPLS, "{of} has functions in {files:?}");
    }
}

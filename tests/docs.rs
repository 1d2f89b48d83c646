//! The documentation: its commands run, its links resolve, and the options and formats that it names exist.
//!
//! Every line of an `sh` block that calls nativeprof runs in a shell, in a directory with the files that the text
//! names. A busy Python program is the process to attach to. Needs root and `python3`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Program, Scratch, live, nativeprof, programs};

mod common;

/// The documents, below the root of the repository.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/architecture.md",
    "docs/formats.md",
    "docs/guide.md",
    "docs/production.md",
];

/// The PID in the text; replaced by that of a running process.
const EXAMPLE_PID: &str = "1234";
/// The name of its script.
const EXAMPLE_NAME: &str = "server.py";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(document: &str) -> String {
    fs::read_to_string(root().join(document)).unwrap_or_else(|e| panic!("{document}: {e}"))
}

/// The lines outside and inside of fenced blocks, the latter with the language of their block.
fn lines(text: &str) -> Vec<(Option<String>, &str)> {
    let mut fence = None;
    let mut out = Vec::new();
    for line in text.lines() {
        match line.strip_prefix("```") {
            Some(language) if fence.is_none() => fence = Some(language.to_string()),
            Some(_) => fence = None,
            None => out.push((fence.clone(), line)),
        }
    }
    assert!(fence.is_none(), "a block is not closed");
    out
}

/// The command lines of `sh` blocks: document, line.
fn commands() -> Vec<(&'static str, String)> {
    let mut out = Vec::new();
    for document in DOCUMENTS {
        let text = read(document);
        for (language, line) in lines(&text) {
            if language.as_deref() == Some("sh") && !line.is_empty() {
                out.push((*document, line.to_string()));
            }
        }
    }
    out
}

/// The PATH of the test: nativeprof as built, and a `sudo` that changes nothing.
fn path_directory(scratch: &Scratch) -> PathBuf {
    let directory = scratch.path("bin");
    fs::create_dir(&directory).expect("a directory");
    symlink(env!("CARGO_BIN_EXE_nativeprof"), directory.join("nativeprof")).expect("a link");
    let sudo = directory.join("sudo");
    fs::write(&sudo, "#!/bin/sh\nexec \"$@\"\n").expect("a file");
    fs::set_permissions(&sudo, fs::Permissions::from_mode(0o755)).expect("a mode");
    directory
}

/// The input files that the commands name.
fn make_inputs(scratch: &Scratch) {
    let busy = "import time\ndef parse(): sorted(range(9999), key=str)\n\
                def main():\n    end = time.process_time() + 0.8\n    while time.process_time() < end: parse()\nmain()\n";
    for name in ["script.py", "bench.py"] {
        fs::write(scratch.path(name), busy).expect("a file");
    }
    let service = "import asyncio, time\nasync def main():\n    for _ in range(3):\n        await asyncio.sleep(0.3)\n\
                   \x20       time.sleep(0.4)\nasyncio.run(main())\n";
    fs::write(scratch.path("service.py"), service).expect("a file");
    symlink(root().join("examples"), scratch.path("examples")).expect("a link");
    for name in ["out", "before", "after", "worker-1", "worker-2"] {
        let profile = root().join("fixtures/golden/profile.json");
        fs::copy(profile, scratch.path(&format!("{name}.json"))).expect("a copy");
    }
    for side in ["before", "after"] {
        fs::create_dir(scratch.path(side)).expect("a directory");
    }
    let publisher = programs::published(&["observed"], false);
    let text = format!(
        "#!/bin/sh\nexec {} observed\n",
        publisher.get_program().to_string_lossy()
    );
    fs::write(scratch.path("server"), text).expect("a file");
    fs::set_permissions(scratch.path("server"), fs::Permissions::from_mode(0o755)).expect("a mode");
    fs::write(scratch.path("calls.py"), "sorted(range(9), key=str)").expect("a file");
    for name in ["before", "after", "before-1", "before-2", "after-1", "after-2"] {
        let mut trace = Command::new("python3");
        trace.args(["-m", "cProfile", "-o", &format!("{name}.pstats"), "calls.py"]);
        let done = trace.current_dir(scratch.directory()).output().expect("python3 starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    // One with labels.
    let profile = fs::read_to_string(scratch.path("out.json")).expect("a copy");
    let labels = r#""samples":{"labels":{"sets":[[],[["span","parse"],["route","/cart"]]],"set":[1,1]},"#;
    fs::write(
        scratch.path("requests.json"),
        profile.replacen(r#""samples":{"#, labels, 1),
    )
    .expect("a file");
    // One with wall time.
    let profile = fs::read_to_string(scratch.path("out.json")).expect("a copy");
    let profile = profile.replace(r#"{"name":"cpu","#, r#"{"name":"wall","#);
    fs::write(scratch.path("tasks.json"), profile).expect("a file");
}

/// The files that `-o` and `--save-tape` name.
fn outputs(line: &str) -> Vec<&str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let pairs = words.windows(2).filter(|pair| ["-o", "--save-tape"].contains(&pair[0]));
    // Those of a loop have names that only the shell knows.
    let files = pairs
        .map(|pair| pair[1])
        .filter(|file| *file != "-" && !file.contains('$'));
    files.collect()
}

/// The line as the test runs it: with a PID that exists, for a short time, without building first.
fn for_test(line: &str, pid: u32) -> String {
    let code = line.split(" #").next().unwrap_or(line).trim();
    let code = code.strip_prefix("cargo build --release && ").unwrap_or(code);
    let words = code.split_whitespace().map(|word| match word {
        EXAMPLE_PID => pid.to_string(),
        "target/release/nativeprof" => "nativeprof".into(),
        word => word.into(),
    });
    let code = words
        .collect::<Vec<_>>()
        .join(" ")
        .replace("-d 30", "-d 0.3")
        .replace("--max-time 3m", "--max-time 1s")
        .replace("in 1 2 3 4 5 6 7 8;", "in 1 2;");
    if code.contains("nativeprof selftest") {
        code + " --pairs 1 --window 0.3"
    } else {
        code
    }
}

#[test]
fn every_command_runs() {
    let _alone = live();
    let scratch = Scratch::new();
    let directory = path_directory(&scratch);
    make_inputs(&scratch);
    let server = scratch.path(EXAMPLE_NAME);
    fs::write(
        &server,
        "import asyncio, os, sys, threading\n\
         def wait():\n    sys.stdin.read()\n    os._exit(0)\n\
         threading.Thread(target=wait, daemon=True).start()\n\
         print('READY', flush=True)\n\
         while True: sorted(range(9999), key=str)",
    )
    .expect("a file");
    let mut program = Command::new("python3");
    program.arg(&server);
    let target = Program::start(program);
    let publisher = Program::start(programs::published(&[], false));
    let path = std::env::var("PATH").expect("a PATH");
    let (mut ran, mut failed) = (0, Vec::new());
    for (document, line) in commands() {
        let is_published = line.contains("--mode alloc");
        let code = for_test(&line, if is_published { publisher.pid() } else { target.pid() });
        if !["nativeprof ", "python3 -m cProfile"]
            .iter()
            .any(|word| code.contains(word))
        {
            continue;
        }
        for file in outputs(&code) {
            // A copy made by `make_inputs` or an earlier command must not pass for this one's output.
            let _ = fs::remove_file(scratch.path(file));
        }
        let mut command = Command::new("sh");
        command
            .args(["-c", &code])
            .current_dir(scratch.directory())
            .env("PATH", format!("{}:{path}", directory.display()))
            .stdin(Stdio::null());
        for name in ["SUDO_UID", "SUDO_GID", "SUDO_USER", "DOAS_USER", "DEBUGINFOD_URLS"] {
            command.env_remove(name);
        }
        let done = command.output().expect("a shell");
        let stderr = String::from_utf8_lossy(&done.stderr);
        // The arguments are parsed before a missing terminal is noticed. tests/top.rs has a terminal.
        let refused = code.contains("nativeprof top") && stderr.contains("`top` needs a terminal");
        // These check measurements, which are short here: any result is accepted.
        let judged = match done.status.code() {
            Some(3 | 4) => code.contains("--fail-above"),
            Some(1) => code.contains("selftest") && String::from_utf8_lossy(&done.stdout).contains("verdict"),
            _ => false,
        };
        if !done.status.success() && !refused && !judged {
            failed.push(format!(
                "{document}: {line}\n  ran as: {code}\n  {}\n{stderr}",
                done.status
            ));
        }
        for file in outputs(&code) {
            if fs::metadata(scratch.path(file)).map_or(0, |meta| meta.len()) == 0 {
                failed.push(format!("{document}: {line}\n  {file} was not written"));
            }
        }
        ran += 1;
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(ran > 30, "only {ran} commands were found");
}

/// Words of the documents that begin like paths of the repository.
fn paths() -> BTreeSet<String> {
    const DIRECTORIES: &[&str] = &[
        ".ci/",
        "benches/",
        "examples/",
        "fixtures/",
        "fuzz/",
        "python/",
        "src/",
        "profile/src/",
        "tests/",
    ];
    let mut names = BTreeSet::new();
    for document in DOCUMENTS {
        for word in read(document).split(|c: char| c.is_whitespace() || "`,;:()[]".contains(c)) {
            if DIRECTORIES.iter().any(|directory| word.starts_with(directory)) {
                names.insert(word.trim_end_matches('.').to_string());
            }
        }
    }
    names
}

/// Scripts run this test themselves, so they are only checked for being executable files.
#[test]
fn paths_exist() {
    let names = paths();
    assert!(
        names.contains(".ci/test") && names.contains("profile/src/"),
        "{names:?}"
    );
    let mut wrong = Vec::new();
    for name in &names {
        let Ok(meta) = fs::metadata(root().join(name)) else {
            wrong.push(format!("{name} does not exist"));
            continue;
        };
        let script = name.starts_with(".ci/") || name.ends_with(".sh") || name == "fuzz/run";
        if script && (meta.is_dir() || meta.permissions().mode() & 0o111 == 0) {
            wrong.push(format!("{name} is not an executable file"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .collect::<String>();
    kept.replace(' ', "-")
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = lines(text)
        .into_iter()
        .filter(|(fence, line)| fence.is_none() && line.starts_with('#'));
    headings.map(|(_, line)| anchor(line.trim_start_matches('#'))).collect()
}

#[test]
fn links_resolve() {
    let (mut checked, mut broken) = (0, Vec::new());
    for document in DOCUMENTS {
        let text = read(document);
        let prose: Vec<&str> = lines(&text)
            .into_iter()
            .filter_map(|(fence, line)| fence.is_none().then_some(line))
            .collect();
        for rest in prose.join("\n").split("](").skip(1) {
            let link = rest.split(')').next().unwrap_or(rest);
            if link.starts_with("https://") {
                continue;
            }
            let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
            let from = root().join(document);
            let target = match file {
                "" => from,
                file => from.with_file_name(file),
            };
            let good = if fragment.is_empty() {
                target.exists()
            } else {
                fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(fragment))
            };
            if !good {
                broken.push(format!("{document}: {link}"));
            }
            checked += 1;
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(checked > 30, "only {checked} links were found");
}

#[test]
fn the_readme_is_short() {
    let length = read("README.md").lines().count();
    assert!(length <= 100, "README.md has {length} lines; details belong in docs/");
}

#[test]
fn every_format_is_in_the_guide() {
    let guide = read("docs/guide.md");
    let rows: Vec<&str> = guide.lines().filter(|line| line.starts_with("| `")).collect();
    for format in nativeprof::export::FORMATS {
        let (name, extension) = (format!("`{}`", format.name), format!("`{}`", format.extensions[0]));
        assert!(
            rows.iter().any(|row| row.contains(&name) && row.contains(&extension)),
            "no row of docs/guide.md has {name} and {extension}"
        );
    }
}

/// Options in the running text and in tables, which no command uses.
#[test]
fn every_option_exists() {
    let mut known = BTreeSet::new();
    for name in [
        "record", "attach", "dump", "heap", "top", "report", "diff", "compare", "merge", "export", "doctor",
        "selftest", "replay", "host", "mcp", "push",
    ] {
        let help = nativeprof(&[name, "--help"]).output().expect("nativeprof starts");
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        known.extend(options(&help));
    }
    assert!(known.contains("--fail-above") && known.contains("--save-tape"));
    // Options of other programs that the text mentions, and of the Python package.
    let others: BTreeSet<&str> =
        "--all --all-targets --all-threads --alloc --bench --benchmark-compare --build --call-graph \
         --cap-add --check --features --format --image --install --junit-xml --lib --max-overhead \
         --native --nativeprof --nativeprof-compare --nativeprof-fail-above --nativeprof-mode \
         --nativeprof-save --open --path --perf-basic-prof --profile --release --rm --security-opt \
         --short --target --test --trace --use-largepages --workspace"
            .split_whitespace()
            .collect();
    let mut unknown = Vec::new();
    for document in DOCUMENTS {
        for option in options(&read(document)) {
            if !known.contains(&option) && !others.contains(option.as_str()) {
                unknown.push(format!("{document}: {option}"));
            }
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
}

/// Words like `--fail-above`, without values.
fn options(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words
        .filter(|word| word.starts_with("--") && word.chars().nth(2).is_some_and(|c| c.is_ascii_lowercase()))
        .map(str::to_string)
        .collect()
}

//! Markdown, test results and annotations: their form, and names that try to be more than names.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};

use nativeprof::escape::line;
use nativeprof::profile::build::Builder;
use nativeprof::profile::json;
use nativeprof::profile::measure::{Clock, Measure};
use nativeprof::profile::model::{Frame, Meta, Profile};
use nativeprof::profile::values::ValueType;
use serde_json::Value;

use super::common::{Scratch, nativeprof};

const HOSTILE: &[&str] = &[
    "a|b||",
    "tick`tock``",
    "\\|x\\",
    "</details></td><script>alert(1)</script>",
    "--><!--",
    "]]>&lt;&\"'",
    "\x1b]0;title\x07",
    "two\nlines\r\n| x | y |",
    "\n::error::injected",
    "##[error]injected",
    "%0A::stop-commands::x,title=y",
    "\u{0}\u{1}\u{b}\u{fffe}\u{ffff}",
    "\\udce9",
    "\u{202e}evil",
    "@somebody #1 www.example.com [x](http://example.com)",
    "   ",
    "e\u{301}\u{301}\u{301}\u{301}\u{301}\u{301}",
];

/// Functions with these samples, in a file with these lines.
fn profile(file: &str, counts: impl Iterator<Item = (String, u64)>) -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let mut time = 0;
    for (at, (name, count)) in counts.enumerate() {
        let first_line = 10 * at as u32 + 1;
        let function = builder.frame(Frame::python(name, "", file, first_line));
        for _ in 0..count {
            time += 1_000_000;
            builder.sample(time, (7, 7), &[(function, first_line + 2)], &[1]);
        }
    }
    let mut profile = builder.finish(Meta {
        command: "python3 '`app`|.py'\n##[error]::x".into(),
        duration: time as f64 / 1e9,
        rate: 1000,
        ..Meta::default()
    });
    profile.values = Measure::period(Clock::Cpu, 1000).values();
    profile
}

struct Sides {
    scratch: Scratch,
    files: [std::path::PathBuf; 2],
}

impl Sides {
    /// Functions with 300 samples before, and with 900 after; the names of the files are hostile, too.
    fn of(names: &[&str]) -> Sides {
        let scratch = Scratch::new();
        fs::write(scratch.path("a,b:c%.py"), "").expect("a file");
        let source = scratch.path("a,b:c%.py");
        let files = [300, 900].map(|count| {
            let counts = names.iter().map(|name| (name.to_string(), count));
            let profile = profile(source.to_str().expect("UTF-8"), counts);
            let mut out = Vec::new();
            json::write(&profile, &mut out).expect("memory takes it");
            let name = [format!("{count}`|\n##[x]").as_bytes(), b"\xff.json"].concat();
            let path = scratch.path("").join(OsStr::from_bytes(&name));
            fs::write(&path, out).expect("a file");
            path
        });
        Sides { scratch, files }
    }

    /// Standard output and standard error.
    fn diff(&self, words: &[&str], code: i32) -> [String; 2] {
        let mut command = nativeprof(&["diff"]);
        command.args(&self.files).args(words);
        let command = command
            .env_remove("COLUMNS")
            .env("GITHUB_WORKSPACE", self.scratch.path(""))
            .stdin(Stdio::null());
        let done = command.output().expect("nativeprof starts");
        let said = [done.stdout, done.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        assert_eq!(done.status.code(), Some(code), "{words:?}: {said:?}");
        said
    }
}

const GATE: &[&str] = &["--normalize", "time", "--fail-above", "5", "--single-run"];

/// The cells of a row of a table, as GitHub divides it: at each `|` without a backslash before it, wherever it is.
fn cells(row: &str) -> Vec<&str> {
    assert!(!row.contains('\\') || row.contains("\\*"), "an escape in a row: {row}");
    let inner = row.strip_prefix("| ").and_then(|row| row.strip_suffix(" |"));
    inner.unwrap_or_else(|| panic!("no row: {row}")).split(" | ").collect()
}

/// The rows of all tables, and what is around them.
fn tables(markdown: &str) -> (Vec<Vec<&str>>, String) {
    let (rows, others): (Vec<&str>, Vec<&str>) = markdown.lines().partition(|line| line.starts_with('|'));
    let rows = rows.into_iter().filter(|row| !row.starts_with("| ---"));
    (rows.map(cells).collect(), others.join("\n"))
}

#[test]
fn markdown_has_the_verdict_first_and_names_as_code() {
    let sides = Sides::of(HOSTILE);
    let [said, errors] = sides.diff(&[GATE, &["--markdown"]].concat(), 3);
    assert!(
        said.starts_with("### nativeprof: failed, 18 rows grew\n\n```text\nall CPU time grew by "),
        "{said}"
    );
    assert!(
        said.contains("\nand 13 more\n```\n\n| Before, s | After, s | Change | Interval | Kind | Function | Where |\n"),
        "{said}"
    );
    assert!(errors.contains("grew by"), "{errors}");
    let (rows, others) = tables(&said);
    assert_eq!(rows.len(), 1 + 1 + HOSTILE.len());
    assert_eq!(rows[1][5], "`[all]`");
    for row in &rows[1..] {
        assert_eq!(row.len(), 7, "{row:?}");
        assert!(row[2].starts_with("**+0.600**") || row[5] == "`[all]`", "{row:?}");
        let name = row[5];
        let plain = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'));
        let element = name
            .strip_prefix("<code>")
            .and_then(|name| name.strip_suffix("</code>"));
        match (plain, element) {
            (Some(plain), _) => assert!(!plain.contains('`'), "{name}"),
            (_, Some(element)) => assert!(!element.contains(['<', '>', '`', '|', '[', ':', '@']), "{name}"),
            _ => panic!("{name}"),
        }
    }
    // What is not in a table is in two blocks.
    assert_eq!(
        others.lines().filter(|line| line.starts_with("```")).count(),
        4,
        "{others}"
    );
    assert!(!said.contains("##["), "{said}");
    assert!(!said.chars().any(|c| c.is_control() && c != '\n'), "{said}");

    // More rows than are shown, and more than there is room for.
    let many: Vec<String> = (0..30).map(|at| format!("f{at}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let [said, _] = Sides::of(&many).diff(&["--normalize", "time", "--markdown"], 0);
    assert!(
        said.starts_with("### nativeprof: 30 rows changed\n\n| Before"),
        "{said}"
    );
    let (open, folded) = said
        .split_once("\n<details><summary>11 more</summary>\n\n| Before")
        .expect("a folded table");
    assert_eq!(
        open.matches("\n| 0.").count() + open.matches("\n| 9.").count(),
        20,
        "{open}"
    );
    assert_eq!(folded.matches("\n| 0.").count(), 11, "{folded}");
    assert!(folded.contains("\n</details>\n\n```text\nbefore: "), "{folded}");
    let long: Vec<String> = (0..200).map(|at| format!("{at}{}", "|".repeat(3000))).collect();
    let long: Vec<&str> = long.iter().map(String::as_str).collect();
    let [said, _] = Sides::of(&long).diff(&["--normalize", "time", "--markdown"], 0);
    assert!(said.len() < 65_536, "{} bytes", said.len());
    assert!(
        said.contains(" rows left out: this text would be too long.\n"),
        "{said}"
    );
}

#[test]
fn test_results_are_read_by_strict_parsers() {
    let sides = Sides::of(HOSTILE);
    let file = sides.scratch.path("results.xml");
    let path = file.to_str().expect("UTF-8");
    sides.diff(&[GATE, &["--junit", path]].concat(), 3);
    let script = "import json, sys, xml.etree.ElementTree as tree\n\
                  root = tree.parse(sys.argv[1]).getroot()\n\
                  suite = root[0]\n\
                  cases = [[c.get('classname'), c.get('name'), c.get('line'), [p.tag for p in c]] for c in suite.iter('testcase')]\n\
                  json.dump({'suite': suite.attrib, 'cases': cases}, sys.stdout)";
    let read = |file: &str| -> Value {
        let mut python = Command::new("python3");
        let done = python.args(["-c", script, file]).output().expect("python3 starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        serde_json::from_slice(&done.stdout).expect("JSON")
    };
    let found = read(path);
    let counts = ["tests", "failures", "errors", "skipped"].map(|key| found["suite"][key].as_str());
    assert_eq!(counts, [Some("19"), Some("19"), Some("0"), Some("0")], "{found}");
    let cases = found["cases"].as_array().expect("cases");
    assert_eq!(cases[0][0], "nativeprof.gate");
    assert_eq!(cases[0][1], "--fail-above 5 %");
    let mut names: Vec<&str> = cases[2..].iter().filter_map(|case| case[1].as_str()).collect();
    let mut expected: Vec<String> = HOSTILE.iter().map(|name| line(name).into_owned()).collect();
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    let source = sides.scratch.path("a,b:c%.py");
    for case in &cases[2..] {
        assert_eq!(case[0].as_str(), source.to_str());
        assert_eq!(case[3], serde_json::json!(["failure", "system-out"]));
    }

    // Undecided: the gate is an error, its rows are skipped.
    let [_, said] = sides.diff(&["--fail-above", "5", "--junit", path], 4);
    assert!(said.contains("written: "), "{said}");
    let found = read(path);
    let counts = ["tests", "failures", "errors", "skipped"].map(|key| found["suite"][key].as_str());
    assert_eq!(counts, [Some("18"), Some("0"), Some("1"), Some("17")], "{found}");
    let [_, said] = sides.diff(&["--fail-above", "5", "--junit", "-"], 2);
    assert!(said.contains("--junit needs a file"), "{said}");
}

/// A workflow command as GitHub's runner reads it: kind, properties and message.
fn command(text: &str) -> (String, Vec<(String, String)>, String) {
    let decode = |text: &str, more: &[(&str, &str)]| {
        let all = [&[("%0D", "\r"), ("%0A", "\n")], more, &[("%25", "%")]].concat();
        all.iter()
            .fold(text.to_string(), |text, (from, to)| text.replace(from, to))
    };
    let (info, message) = text
        .strip_prefix("::")
        .and_then(|text| text.split_once("::"))
        .expect("a command");
    let (kind, properties) = info.split_once(' ').expect("properties");
    let properties = properties.split(',').map(|property| {
        let (key, value) = property.split_once('=').expect("a value");
        (key.to_string(), decode(value, &[("%3A", ":"), ("%2C", ",")]))
    });
    (kind.into(), properties.collect(), decode(message, &[]))
}

#[test]
fn annotations_are_one_command_each_at_file_and_line() {
    let sides = Sides::of(HOSTILE);
    let [out, errors] = sides.diff(&[GATE, &["--github"]].concat(), 3);
    assert!(
        !out.contains("##[") && !out.lines().any(|line| line.trim_start().starts_with("::")),
        "{out}"
    );
    let commands: Vec<&str> = errors.lines().collect();
    assert_eq!(commands.len(), 10, "{errors}");
    for text in &commands[..9] {
        let (kind, properties, message) = command(text);
        assert_eq!(kind, "error");
        let keys: Vec<&str> = properties.iter().map(|(key, _)| &**key).collect();
        assert_eq!(keys, ["file", "line", "title"], "{text}");
        assert_eq!(properties[0].1, "a,b:c%.py");
        let line_of_function: u32 = properties[1].1.parse().expect("a number");
        assert_eq!(line_of_function % 10, 3, "the line that grew: {text}");
        assert!(
            message.contains(" grew by ") && message.contains(" s before, "),
            "{message}"
        );
        assert_eq!(message.lines().count(), 2, "{message}");
        let name = properties[2].1.strip_prefix("nativeprof: ").expect("a title");
        assert!(
            HOSTILE.iter().any(|hostile| name.starts_with(&*line(hostile))),
            "{name}"
        );
    }
    assert_eq!(command(commands[9]).1[0].1, "nativeprof: 9 more");
    // Undecided, and passed.
    let [_, errors] = sides.diff(&["--fail-above", "5", "--github"], 4);
    assert!(
        errors.starts_with("::warning title=nativeprof%3A undecided::undecided: one run of each side"),
        "{errors}"
    );
    let [_, errors] = sides.diff(&["--fail-above", "99", "--single-run", "--github"], 0);
    assert_eq!(errors, "");
}

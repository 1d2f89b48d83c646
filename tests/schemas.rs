//! The JSON that commands print, against the schemas in `docs`: each key that is printed is in the schema, and each that the
//! schema requires is printed. Needs root, and what `.ci/install-mcp-clients` installs.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Program, Scratch, live, mcp_client, nativeprof};

mod common;

const PROFILE: &str = "fixtures/golden/profile.json";

/// Checks what a command printed against a schema that allows only the keys that it names.
fn check(schema: &str, words: &[&str], scratch: &Scratch) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let done = nativeprof(words)
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .expect("nativeprof starts");
    assert!(
        !done.stdout.is_empty(),
        "{words:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    let printed = scratch.path("printed.json");
    fs::write(&printed, &done.stdout).expect("a file");
    let done = Command::new(mcp_client("2.3.0"))
        .arg(root.join("tests/schemas/check.py"))
        .args([&root.join("docs").join(schema), &printed])
        .output()
        .expect("Python starts");
    assert!(
        done.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

#[test]
fn of_reports_and_comparisons() {
    let scratch = Scratch::new();
    let tape = |mode: &str| format!("fixtures/tapes/modes/{mode}.tape");
    let (waits, lag, gil) = (tape("waits"), tape("lag"), tape("gil_holders"));
    for words in [
        &["report", PROFILE][..],
        &["report", PROFILE, "--limit", "2", "--cursor", "1"],
        &["report", PROFILE, "--by", "line"],
        &["report", PROFILE, "--by", "thread"],
        &["report", PROFILE, "--tree", "--limit", "3"],
        &["report", PROFILE, "--callers", "."],
        &["report", PROFILE, "--callees", ".", "--limit", "1"],
        &["report", PROFILE, "--source", "数.py"],
        &["report", &waits, "--waits", "--limit", "1"],
        &["report", &gil, "--waits", "--kind", "gil"],
        &["report", &lag, "--lag"],
    ] {
        check("report.schema.json", &[words, &["--json"]].concat(), &scratch);
    }
    for words in [
        &["--all"][..],
        &["--all", "--limit", "1"],
        &["--by", "module"],
        &["--normalize", "rate"],
        &["--fail-above", "5"],
    ] {
        check(
            "diff.schema.json",
            &[&["diff", PROFILE, PROFILE, "--json"], words].concat(),
            &scratch,
        );
    }
}

#[test]
fn of_processes() {
    let _alone = live();
    let scratch = Scratch::new();
    let mut python = Command::new(mcp_client("2.3.0"));
    python.args([
        "-c",
        "import asyncio\nasync def wait(): await asyncio.sleep(9999)\n\
         async def main():\n    tasks = [asyncio.create_task(wait()) for _ in range(3)]\n    print('READY', flush=True)\n    await tasks[0]\n\
         asyncio.run(main())",
    ]);
    let target = Program::start(python);
    let pid = target.pid().to_string();
    for words in [
        &[][..],
        &["--limit", "1"],
        &["--locals"],
        &["--tasks"],
        &["--tasks", "--limit", "1"],
    ] {
        check(
            "dump.schema.json",
            &[&["dump", &pid, "--json"], words].concat(),
            &scratch,
        );
    }
    check(
        "heap.schema.json",
        &["heap", &pid, "--format", "json", "--sample", "dict"],
        &scratch,
    );
    check("doctor.schema.json", &["doctor", &pid, "--json"], &scratch);
}

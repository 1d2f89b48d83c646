//! Completions and manual pages, tested with a shell and `man`.

use std::process::{Command, Stdio};

use common::{Scratch, nativeprof};

mod common;

fn said(command: &mut Command) -> String {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("{name}: {e} (.ci/setup brings it)"));
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && stderr.is_empty(), "{name} said:\n{stderr}");
    String::from_utf8(done.stdout).expect("UTF-8")
}

#[test]
fn bash_completes_words() {
    let scratch = Scratch::new();
    let script = scratch.path("nativeprof.bash");
    std::fs::write(&script, said(&mut nativeprof(&["completions", "bash"]))).expect("a file");
    for (line, expected) in [
        ("nativeprof rec", "record"),
        ("nativeprof sel", "selftest"),
        ("nativeprof report --call", "--callees --callers"),
        ("nativeprof report x.json --by m", "module"),
        ("nativeprof record --backend e", "ebpf"),
        ("nativeprof record --mode ", "alloc cpu off-cpu rss wall"),
        ("nativeprof attach --event c", "context-switches cpu-clock cycles"),
        ("nativeprof record -f s", "speedscope svg"),
        ("nativeprof export x.json --format coll", "collapsed"),
        ("nativeprof report x.json --value off", "off_cpu"),
        ("nativeprof diff a b --value a", "alloc_bytes allocs await"),
        ("nativeprof report x.json --waits --kind gi", "gil"),
        ("nativeprof diff --normalize ", "rate share time"),
        ("nativeprof completions ", "bash elvish fish powershell zsh"),
        // Bash takes `=` as a word.
        ("nativeprof export x --browser =", "auto off on"),
        ("nativeprof record --debuginfod = o", "off on"),
        // No dash that the user has not typed: files, or nothing.
        ("nativeprof attach ", ""),
        ("nativeprof report ", ""),
        ("nativeprof merge a.json ", ""),
        ("nativeprof report --js", "--json"),
        ("nativeprof record -- ls -", ""),
    ] {
        let last = if line.ends_with(' ') { " ''" } else { "" };
        let line = &format!("{line}{last}");
        let script = format!(
            "source {}; COMP_LINE=\"{line}\"; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _nativeprof nativeprof \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; \
             printf '%s\\n' \"${{COMPREPLY[@]}}\" | sort",
            script.display()
        );
        let found = said(Command::new("bash").args(["--norc", "-c", &script]));
        assert_eq!(
            found.split_whitespace().collect::<Vec<_>>().join(" "),
            expected,
            "{line}"
        );
    }
}

#[test]
fn every_shell_gets_its_script() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = said(&mut nativeprof(&["completions", shell]));
        assert!(script.contains("selftest") && script.contains("fail-above"), "{shell}");
    }
}

#[test]
#[cfg_attr(not(feature = "live-tests"), ignore = "needs groff: run .ci/test")]
fn manual_pages_render_without_a_warning() {
    let scratch = Scratch::new();
    let pages = scratch.path("share/man1"); // does not exist yet
    let done = nativeprof(&["man", pages.to_str().expect("UTF-8")])
        .output()
        .expect("nativeprof starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let entries = std::fs::read_dir(&pages).expect("the directory of the pages");
    let names: Vec<_> = entries
        .map(|entry| entry.expect("a page").file_name().into_string().expect("UTF-8"))
        .collect();
    for name in [
        "nativeprof.1",
        "nativeprof-record.1",
        "nativeprof-diff.1",
        "nativeprof-selftest.1",
    ] {
        assert!(names.iter().any(|n| n == name), "{name} is not among {names:?}");
    }
    assert_eq!(
        said(&mut nativeprof(&["man"])),
        std::fs::read_to_string(pages.join("nativeprof.1")).expect("the main page")
    );
    for name in &names {
        let text = said(
            Command::new("groff")
                .args(["-man", "-Tutf8", "-ww", "-b", "-z"])
                .arg(pages.join(name)),
        );
        assert!(text.is_empty(), "{name}: {text}");
        let text = said(Command::new("groff").args(["-man", "-Tutf8"]).arg(pages.join(name)));
        // Bold letters may be printed twice.
        assert!(
            ["SYNOPSIS", "SSYYNNOOPPSSIISS"]
                .iter()
                .any(|word| text.replace('\u{8}', "").contains(word)),
            "{name}: {text}"
        );
    }
}

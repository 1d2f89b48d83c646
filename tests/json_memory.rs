//! Memory limit of the profile reader: 32 bytes for each byte of a file, whatever it contains. Metadata of a recording,
//! which needs more, is refused where it is long.
//!
//! Each file is read in a separate process, whose memory is measured.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use nativeprof::profile::json;

/// Memory that every file may take in addition, bytes.
const MORE: u64 = 4 << 20;
/// Environment variable with the number of the file to read.
const NUMBER: &str = "FILE_TO_READ";
/// Length of each file.
const LENGTH: usize = 5 << 20;

fn status(word: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").expect("/proc");
    let line = text.lines().find_map(|l| l.strip_prefix(word)).expect("a line");
    let kb: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kb << 10
}

/// A file between these texts, made of parts up to the intended length.
fn file(before: &str, after: &str, part: impl Fn(usize) -> String) -> String {
    let mut text = before.to_string();
    for n in 0.. {
        if text.len() >= LENGTH {
            break;
        }
        let _ = write!(text, "{}{}", if n > 0 { "," } else { "" }, part(n));
    }
    text + after
}

#[test]
fn memory_stays_within_its_bound() {
    let nodes = |part: fn(usize) -> String| file("{\"count\":1,\"children\":{", "}}", part);
    let facts = |before: &str, after: &str, part: fn(usize) -> String| {
        file(
            &format!("{{\"count\":1,\"children\":{{}},\"nativeprof\":{{{before}"),
            &format!("{after}}}}}"),
            part,
        )
    };
    // All rows below each other, or all except the first below the root.
    let stacks = |up: u32| {
        let column = |first: u32, rest: u32| {
            let rows = format!(",{rest}").repeat(LENGTH / 4);
            format!("[{first}{rows}]")
        };
        format!(
            "{{\"count\":1,\"children\":{{}},\"nativeprof\":{{\"samples\":{{\"omitted_nodes\":1,\"stacks\":{{\"functions\":[{{\"identifier\":\"\"}}],\
             \"frames\":{{\"function\":[0],\"line\":[1]}},\"up\":{},\"frame\":{}}}}}}}}}",
            column(0, up),
            column(0, 0)
        )
    };
    let nested = 80_000;
    let files = [
        ("nodes", nodes(|_| "\"\":{}".into())),
        ("frames", nodes(|n| format!("\"{n}\":{{}}"))),
        (
            "names",
            nodes(|n| format!("\"\":{{\"description\":{{\"name\":\"{n}\"}}}}")),
        ),
        (
            "lines",
            nodes(|_| "\"\":{\"lines\":{\"1\":1},\"self_lines\":{\"1\":1}}".into()),
        ),
        (
            "many lines",
            file("{\"count\":1,\"children\":{},\"lines\":{", "}}", |n| {
                format!("\"{n}\":1")
            }),
        ),
        (
            "a description",
            file("{\"count\":1,\"children\":{},\"description\":{\"x\":[", "]}}", |_| {
                "{\"\":0}".into()
            }),
        ),
        (
            "what is not known",
            file("{\"count\":1,\"children\":{},\"x\":[", "]}", |_| "{\"\":0}".into()),
        ),
        ("facts not known", facts("\"x\":[", "]", |_| "{\"\":0}".into())),
        ("times", facts("\"timeline\":{\"time\":[", "]}", |_| "1".into())),
        (
            "nothing as times",
            facts("\"timeline\":{\"time\":[", "]}", |_| "[]".into()),
        ),
        ("modules", facts("\"modules\":[", "]", |_| "{\"path\":\"a\"}".into())),
        ("empty modules", facts("\"modules\":[", "]", |_| "{}".into())),
        ("threads", facts("\"threads\":[", "]", |_| "{\"tid\":1}".into())),
        (
            "reasons",
            facts("\"quality\":{\"reasons\":{", "}}", |n| format!("\"{n}\":1")),
        ),
        (
            "values",
            nodes(|n| format!("\"\":{{\"values\":{{\"{}_ns\":1}}}}", n % 64)),
        ),
        ("stacks of what was left out", stacks(0)),
        ("stacks side by side", stacks(1)),
        (
            "depth",
            "{\"count\":1,".to_string() + &"\"children\":{\"a\":{".repeat(nested) + &"}}".repeat(nested) + "}",
        ),
    ];
    // Freed memory is reused: each file is read in a fresh process, this test with the file's number.
    let number = std::env::var(NUMBER).ok().and_then(|n| n.parse::<usize>().ok());
    if let Some((what, text)) = number.map(|n| &files[n]) {
        let before = status("VmRSS:");
        fs::write("/proc/self/clear_refs", "5").expect("permission to measure our own memory");
        let read = json::read(text.as_bytes());
        let most = status("VmHWM:").saturating_sub(before);
        let facts = ["facts not known", "modules", "empty modules", "threads", "reasons"];
        assert_eq!(read.is_ok(), !facts.contains(what), "{what}: {read:?}");
        let times = most as f64 / text.len() as f64;
        println!("{what}: {times:.1} bytes for each of the file");
        assert!(
            most <= 32 * text.len() as u64 + MORE,
            "{what}: {most} bytes, {times:.1} for each of the file"
        );
        return;
    }
    for (n, (what, _)) in files.iter().enumerate() {
        let exe = std::env::current_exe().expect("the path of this test");
        let done = Command::new(exe).env(NUMBER, n.to_string()).arg("--nocapture").status();
        assert!(done.is_ok_and(|s| s.success()), "{what}");
    }
}

//! `dump` and `doctor`: the tools that look at a process, or this machine, once.

use serde_json::{Map, Value, json};

use super::{AnswerText, Tool, command_line, count, page, read, rows, whole, with_rows, words};
use crate::mcp::answer::{self, Rows, data, data_of};

/// Frames of a thread, innermost first; more are counted.
const FRAMES: usize = 8;

pub const DUMP: Tool = Tool {
    name: "dump",
    description: "What each thread of a process does now: innermost frames, state, who holds the GIL.",
    is_read_only: true,
    arguments: || (with_rows(json!({"pid": whole()})), &["pid"]),
    answer: AnswerText {
        keys: &[],
        rows: &["name", "state", "stack", "frames"],
    },
    run: |arguments, surroundings| {
        let pid = arguments.needed_pid()?;
        let wanted = arguments.wanted()?;
        let process = surroundings.permission.process(pid)?;
        Ok(Box::new(move |permission, watch| {
            let mut words = words(["dump", &pid.to_string(), "--json"]);
            words.extend(page(wanted));
            let dump = read(&words, permission, watch)?.json()?;
            if !process.is_same() {
                return Err(crate::error::Error::no_process(pid));
            }
            let mut answer = Map::new();
            let totals = dump.get("totals").cloned().unwrap_or_default();
            answer.insert("totals".into(), totals);
            answer.insert("command".into(), command_line(&words).into());
            let rows = Rows {
                rows: rows(&dump, "threads").iter().map(thread).collect(),
                skipped: wanted.skipped,
                total: count(&dump, "total_rows"),
            };
            Ok(answer::with_rows(answer, rows, wanted.max_bytes))
        }))
    },
};

fn thread(thread: &Value) -> Value {
    let python_name = data_of(thread, "python_name");
    let mut row = json!({
        "tid": count(thread, "tid"),
        "name": if python_name.is_empty() { data_of(thread, "name") } else { python_name },
    });
    if thread.get("error").is_some() {
        row["stack"] = data_of(thread, "error").into();
        return row;
    }
    let call = data_of(thread, "syscall");
    row["state"] = match (&*data_of(thread, "state"), &*call) {
        ("R", _) => "running".into(),
        (_, "") => "waiting".into(),
        (_, call) => format!("waiting in {call}").into(),
    };
    if thread.get("holds_gil") == Some(&true.into()) {
        row["holds_gil"] = true.into();
    }
    row["stack"] = data_of(thread, "stack").into();
    let frames = rows(thread, "frames");
    let python: Vec<&Value> = frames
        .iter()
        .filter(|frame| frame.get("kind") == Some(&"python".into()))
        .collect();
    // Native frames of the interpreter say little.
    let shown: Vec<&Value> = if python.is_empty() {
        frames.iter().collect()
    } else {
        python
    };
    row["frames"] = shown.iter().take(FRAMES).map(|row| Value::from(frame(row))).collect();
    if frames.len() > FRAMES.min(shown.len()) {
        row["more_frames"] = (frames.len() - FRAMES.min(shown.len())).into();
    }
    row
}

/// `name (file:line)`
fn frame(frame: &Value) -> String {
    let place = ["file", "module"].map(|key| frame.get(key).and_then(Value::as_str).unwrap_or_default());
    let place = place.into_iter().find(|place| !place.is_empty()).unwrap_or_default();
    let name = frame.get("name").and_then(Value::as_str).unwrap_or_default();
    match frame.get("line").and_then(Value::as_u64) {
        Some(line) => data(&format!("{name} ({place}:{line})")),
        None => data(&format!("{name} ({place})")),
    }
}

pub const DOCTOR: Tool = Tool {
    name: "doctor",
    description: "Whether sampling works on this machine, or for a process, and how to fix what does not.",
    is_read_only: true,
    arguments: || (with_rows(json!({"pid": whole()})), &[]),
    answer: AnswerText {
        keys: &[],
        rows: &["subject", "status", "text", "try"],
    },
    run: |arguments, surroundings| {
        let pid = arguments.pid()?;
        let wanted = arguments.wanted()?;
        let process = pid.map(|pid| surroundings.permission.process(pid)).transpose()?;
        Ok(Box::new(move |permission, watch| {
            let mut words = words(["doctor", "--json"]);
            words.extend(process.map(|process| process.pid.to_string()));
            let found = read(&words, permission, watch)?.json()?;
            let of_process = found
                .get("process")
                .map_or(&[][..], |process| rows(process, "findings"));
            let mut all: Vec<&Value> = of_process.iter().chain(rows(&found, "machine")).collect();
            // What does not work comes first.
            all.sort_by_key(|finding| match finding.get("status").and_then(Value::as_str) {
                Some("missing") => 0,
                Some("limited") => 1,
                _ => 2,
            });
            let row = |finding: &&Value| {
                let mut row = json!({
                    "subject": data_of(finding, "subject"),
                    "status": finding.get("status").cloned().unwrap_or_default(),
                    "text": data_of(finding, "text"),
                });
                let fix = data_of(finding, "try");
                if !fix.is_empty() {
                    row["try"] = fix.into();
                }
                row
            };
            let mut answer = Map::new();
            answer.insert("works".into(), (found.get("works") == Some(&true.into())).into());
            answer.insert("command".into(), command_line(&words).into());
            let rows = Rows {
                rows: all.iter().skip(wanted.skipped as usize).map(row).collect(),
                skipped: wanted.skipped,
                total: all.len() as u64,
            };
            Ok(answer::with_rows(answer, rows, wanted.max_bytes))
        }))
    },
};

//! A dump as text for people and as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::{DumpFrame, DumpQuality, DumpReport, DumpStack, DumpThread};
use crate::capture::ptrace::snapshot::{ReadMode, SnapshotError};
use crate::cli::output::JSON_VERSION;
use crate::cli::output::page::Page;
use crate::cli::output::style::{Color, TerminalStyle};
use crate::cpython::gil::Gil;
use crate::cpython::thread_names::both_names;
use crate::escape::line;
use crate::profile::folded::NodeDisplay;
use crate::profile::model::FrameKind;
use crate::profile::summary::counted;

/// `futex`; a number that is not a known system call.
fn call_name(call: u64) -> String {
    let known = usize::try_from(call).ok().and_then(syscalls::Sysno::new);
    known.map_or_else(|| format!("system call {call}"), |s| s.name().to_string())
}

/// A thread's state as text.
fn state_text(s: &DumpStack, is_frozen: bool) -> String {
    let state = match s.state {
        _ if is_frozen => "frozen",
        'R' => return "running".into(),
        'S' => "sleeping",
        'D' => "waiting (uninterruptible)",
        'T' => "stopped by job control",
        't' => "stopped by a tracer",
        'I' => "idle",
        other => return format!("in state {other}"),
    };
    match s.call {
        Some(call) => format!("{state} in {}", call_name(call)),
        None => state.into(),
    }
}

fn gil(s: &DumpStack) -> Option<&'static str> {
    match s.gil {
        Some(Gil::Held(_)) => Some("holds the GIL"),
        _ => None,
    }
}

fn read_mode_text(s: &DumpStack) -> String {
    let stack = match s.quality {
        DumpQuality::Exact => "exact".to_string(),
        DumpQuality::Repaired => "repaired".into(),
        DumpQuality::Partial(why) => format!("partial: {}", why.map_or("unknown", |why| why.reason())),
    };
    match s.mode {
        ReadMode::Asleep => format!("{stack}; read while sleeping, not stopped"),
        ReadMode::Stopped(ns) => format!("{stack}; stopped for {} µs", ns.div_ceil(1000)),
    }
}

fn error_text(why: SnapshotError) -> &'static str {
    match why {
        SnapshotError::Gone => "it has exited",
        SnapshotError::Refused => {
            "tracing it is not permitted: it already has a tracer, or a security module forbids it"
        }
        SnapshotError::KeptRunning | SnapshotError::MovedOn => "it kept running while it was read",
        SnapshotError::NoTracer => {
            "no thread can be started to trace it: a limit of processes (ulimit -u, or of the container) is reached"
        }
        SnapshotError::DidNotStop => "it did not stop in time: it is waiting for a CPU or inside the kernel",
    }
}

/// The report as text; names are escaped for terminals.
pub fn text(r: &DumpReport, style: TerminalStyle) -> String {
    let mut out = String::new();
    let number = |own: Option<u32>| own.map_or(String::new(), |own| format!(" ({own} in its PID namespace)"));
    let python = if r.python.is_empty() {
        "no Python found"
    } else {
        &r.python
    };
    let _ = writeln!(
        out,
        "{}: {}",
        style.paint(Color::Bold, &format!("Process {}{}", r.pid, number(r.inner))),
        line(&r.command)
    );
    let _ = writeln!(out, "{}; {}", line(python), gil_line(r));
    for t in &r.threads {
        let name = match &t.python_name {
            Some(python) => both_names(python, &t.name),
            None => t.name.clone(),
        };
        let name = format!("Thread {}{} \"{}\"", t.tid, number(t.inner), line(&name));
        let _ = write!(out, "\n{}", style.paint(Color::Bold, &name));
        match &t.stack {
            Err(why) => {
                let _ = writeln!(out, ": not read: {}", error_text(*why));
            }
            Ok(s) => {
                let _ = write!(out, ": {}", state_text(s, r.frozen));
                if let Some(gil) = gil(s) {
                    let _ = write!(out, ", {}", style.paint(Color::Green, gil));
                }
                let _ = writeln!(out, "\n  {}", style.paint(Color::Dim, &read_mode_text(s)));
                for name in s.kernel.iter().flatten() {
                    let _ = writeln!(out, "    {} {}", line(name), style.paint(Color::Dim, "[kernel]"));
                }
                let mut row = "";
                for f in &s.frames {
                    match f.shown {
                        NodeDisplay::Hidden => {}
                        NodeDisplay::Row(name) if name == row => {}
                        NodeDisplay::Row(name) => {
                            let _ = writeln!(out, "    {}", style.paint(Color::Dim, name));
                            row = name;
                        }
                        NodeDisplay::Itself => {
                            frame(&mut out, f, style);
                            row = "";
                        }
                    }
                }
            }
        }
    }
    let _ = writeln!(out, "\n{}", stops_line(r));
    if r.kernel_refused {
        let _ = writeln!(out, "Kernel frames could not be read: CAP_SYS_ADMIN is needed (sudo).");
    }
    out
}

fn gil_line(r: &DumpReport) -> String {
    let gils = || {
        r.threads
            .iter()
            .filter_map(|t| Some((t.tid, t.stack.as_ref().ok()?.gil?)))
    };
    let mut holders: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for (tid, gil) in gils() {
        if let Gil::Held(lock) = gil {
            holders.entry(lock).or_default().push(tid.to_string());
        }
    }
    // Interpreters may have a lock each (3.12).
    let several = |tids: &&Vec<String>| tids.len() > 1;
    let changed = holders.values().filter(several);
    let single: Vec<&str> = holders
        .values()
        .filter(|tids| !several(tids))
        .flatten()
        .map(|tid| &**tid)
        .collect();
    let threads = counted(r.threads.len() as u64, "threads");
    if r.python.is_empty() {
        return threads;
    }
    let gil = match holders.len() {
        0 if gils().any(|(_, g)| g == Gil::None) => "no GIL (free-threaded)".to_string(),
        0 if gils().next().is_none() && r.free_threaded => "no GIL (free-threaded)".into(),
        0 if gils().next().is_none() => "GIL holder unknown".into(),
        0 => "no thread holds the GIL".into(),
        _ => {
            let changed = changed.map(|tids| {
                let tids = tids.join(", ");
                format!("the GIL changed hands: threads {tids} each held it when read")
            });
            let held = match single.as_slice() {
                [] => None,
                [only] => Some(format!("thread {only} holds the GIL")),
                tids => Some(format!(
                    "threads {} hold the GILs of their interpreters",
                    tids.join(", ")
                )),
            };
            held.into_iter().chain(changed).collect::<Vec<_>>().join("; ")
        }
    };
    format!("{threads}; {gil}")
}

/// How long threads were stopped, and how many were not.
fn stops_line(r: &DumpReport) -> String {
    let stacks: Vec<&DumpStack> = r.threads.iter().filter_map(|t| t.stack.as_ref().ok()).collect();
    let stops: Vec<u64> = stacks
        .iter()
        .filter_map(|s| match s.mode {
            ReadMode::Stopped(ns) => Some(ns),
            ReadMode::Asleep => None,
        })
        .collect();
    let asleep = stacks.len() - stops.len();
    match stops.iter().max() {
        None => format!("Stopped: none; {asleep} read in place while sleeping."),
        Some(longest) => format!(
            "Stopped: {} of {}, one at a time, for at most {} µs; {asleep} read in place while sleeping.",
            stops.len(),
            counted(stacks.len() as u64, "threads"),
            longest.div_ceil(1000)
        ),
    }
}

fn frame(out: &mut String, f: &DumpFrame, style: TerminalStyle) {
    let name = line(&f.name);
    // The directory in which a library was built is of little interest.
    let file = match f.kind {
        FrameKind::Python => &f.file,
        _ => f.file.rsplit('/').next().unwrap_or_default(),
    };
    let place = match (file, f.line) {
        ("", _) => String::new(),
        (file, 0) => line(file).into_owned(),
        (file, n) => format!("{}:{n}", line(file)),
    };
    let module = line(&f.module);
    let _ = match f.kind {
        FrameKind::Python => writeln!(out, "    {} ({place})", style.paint(Color::Cyan, &name)),
        FrameKind::Truncated => writeln!(out, "    {}", style.paint(Color::Red, &name)),
        FrameKind::Unknown if !module.is_empty() => {
            writeln!(
                out,
                "    {name} {}",
                style.paint(Color::Dim, &format!("({module}+{:#x})", f.address))
            )
        }
        FrameKind::Unknown => writeln!(
            out,
            "    {name} {}",
            style.paint(Color::Dim, &format!("({:#x})", f.address))
        ),
        kind => {
            let inlined = if kind == FrameKind::Inlined { ", inlined" } else { "" };
            let at = if place.is_empty() {
                String::new()
            } else {
                format!(" {place}")
            };
            let what = format!("{module}{inlined}{at}");
            if what.is_empty() {
                writeln!(out, "    {name}")
            } else {
                writeln!(out, "    {name} {}", style.paint(Color::Dim, &format!("({what})")))
            }
        }
    };
    for (name, value) in f.locals.iter().flatten() {
        let _ = writeln!(out, "        {} = {}", line(name), line(value));
    }
}

/// A part of the report as JSON; `totals` are of all threads.
pub fn json(r: &DumpReport, page: Page) -> Value {
    let longest = r.threads.iter().filter_map(|t| match t.stack.as_ref().ok()?.mode {
        ReadMode::Stopped(ns) => Some(ns),
        ReadMode::Asleep => None,
    });
    let is = |quality: fn(&DumpQuality) -> bool| {
        let stacks = r.threads.iter().filter_map(|t| t.stack.as_ref().ok());
        stacks.filter(|stack| quality(&stack.quality)).count()
    };
    let totals = json!({
        "exact": is(|quality| matches!(quality, DumpQuality::Exact)),
        "repaired": is(|quality| matches!(quality, DumpQuality::Repaired)),
        "partial": is(|quality| matches!(quality, DumpQuality::Partial(_))),
        "not_read": r.threads.iter().filter(|t| t.stack.is_err()).count(),
    });
    let mut threads: Vec<&DumpThread> = r.threads.iter().collect();
    let shown = page.cut(&mut threads);
    let value = json!({
        "version": JSON_VERSION,
        "pid": r.pid,
        "namespace_pid": r.inner.unwrap_or(r.pid),
        "command": r.command,
        "python": Some(&r.python).filter(|p| !p.is_empty()),
        "max_stop_us": longest.max().map(micros),
        "totals": totals,
    });
    shown.with_rows(value, "threads", threads.into_iter().map(thread_json).collect())
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn thread_json(t: &DumpThread) -> Value {
    let mut value = json!({
        "tid": t.tid,
        "namespace_tid": t.inner.unwrap_or(t.tid),
        "name": t.name,
        "python_name": t.python_name,
    });
    let more = match &t.stack {
        Err(why) => json!({"error": error_text(*why)}),
        Ok(s) => json!({
            "state": s.state.to_string(),
            "syscall": s.call.map(call_name),
            "holds_gil": match s.gil {
                Some(Gil::Held(_)) => Some(true),
                Some(_) => Some(false),
                None => None,
            },
            "stop_us": match s.mode {
                ReadMode::Stopped(ns) => Some(micros(ns)),
                ReadMode::Asleep => None,
            },
            "stack": match s.quality {
                DumpQuality::Exact => "exact",
                DumpQuality::Repaired => "repaired",
                DumpQuality::Partial(_) => "partial",
            },
            "truncated": match s.quality {
                DumpQuality::Partial(why) => why.map(|why| why.reason()),
                _ => None,
            },
            "kernel": s.kernel,
            "frames": s.frames.iter().map(frame_json).collect::<Vec<_>>(),
        }),
    };
    if let (Value::Object(value), Value::Object(more)) = (&mut value, more) {
        value.extend(more);
    }
    value
}

fn frame_json(f: &DumpFrame) -> Value {
    let kind = match f.kind {
        FrameKind::Python => "python",
        FrameKind::Inlined => "inlined",
        FrameKind::Kernel => "kernel",
        FrameKind::Truncated => "truncated",
        FrameKind::Unknown => "unknown",
        _ => "native",
    };
    let filled = |text: &String| Some(text.clone()).filter(|t| !t.is_empty());
    let mut value = json!({
        "kind": kind,
        "name": f.name,
        "file": filled(&f.file),
        "line": Some(f.line).filter(|n| *n > 0),
        "module": filled(&f.module),
    });
    if let (Value::Object(value), Some(locals)) = (&mut value, &f.locals) {
        let pair = |(name, text): &(String, String)| json!({"name": name, "value": text});
        value.insert("locals".into(), locals.iter().map(pair).collect());
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::truncation::Truncation;

    fn frame(kind: FrameKind, name: &str, file: &str, line: u32) -> DumpFrame {
        DumpFrame {
            kind,
            name: name.into(),
            file: file.into(),
            line,
            module: if kind == FrameKind::Python { "" } else { "libx.so" }.into(),
            address: 0x40,
            locals: None,
            shown: NodeDisplay::Itself,
        }
    }

    #[test]
    fn threads_in_words() {
        let mut python = frame(FrameKind::Python, "main\x1b[2J", "/a.py", 3);
        python.locals = Some(vec![("x".into(), "'\u{202e}'".into())]);
        let running = DumpStack {
            state: 'R',
            call: None,
            mode: ReadMode::Stopped(31_400),
            gil: Some(Gil::Held(0)),
            kernel: None,
            quality: DumpQuality::Exact,
            frames: vec![
                frame(FrameKind::Inlined, "inner", "/build/x.c", 7),
                frame(FrameKind::Unknown, "[unknown]", "", 0),
                python,
            ],
        };
        let asleep = DumpStack {
            state: 'S',
            call: Some(202),
            mode: ReadMode::Asleep,
            gil: Some(Gil::NotHeld),
            kernel: Some(vec!["futex_wait".into()]),
            quality: DumpQuality::Partial(Some(Truncation::StackHole)),
            frames: vec![frame(FrameKind::Truncated, "[truncated: x]", "", 0)],
        };
        let thread = |tid, inner, stack| DumpThread {
            tid,
            inner,
            name: "py\n".into(),
            python_name: (tid == 11).then(|| "worker".into()),
            stack,
        };
        let report = DumpReport {
            pid: 10,
            inner: Some(2),
            command: "python3 a.py".into(),
            python: "CPython 3.11.7 (python3.11)".into(),
            free_threaded: false,
            frozen: false,
            threads: vec![
                thread(10, Some(2), Ok(running)),
                thread(11, None, Ok(asleep)),
                thread(12, None, Err(SnapshotError::KeptRunning)),
            ],
            kernel_refused: false,
        };
        let expected = "\
Process 10 (2 in its PID namespace): python3 a.py
CPython 3.11.7 (python3.11); 3 threads; thread 10 holds the GIL

Thread 10 (2 in its PID namespace) \"py\\x0a\": running, holds the GIL
  exact; stopped for 32 µs
    inner (libx.so, inlined x.c:7)
    [unknown] (libx.so+0x40)
    main\\x1b[2J (/a.py:3)
        x = '\\u{202e}'

Thread 11 \"worker [py\\x0a]\": sleeping in futex
  partial: stack page not present; read while sleeping, not stopped
    futex_wait [kernel]
    [truncated: x]

Thread 12 \"py\\x0a\": not read: it kept running while it was read

Stopped: 1 of 2 threads, one at a time, for at most 32 µs; 1 read in place while sleeping.
";
        assert_eq!(text(&report, TerminalStyle::default()), expected);
        let value = json(&report, Page::default());
        assert_eq!(value["threads"][1]["syscall"], "futex");
        assert_eq!(value["threads"][0]["frames"][2]["locals"][0]["name"], "x");
        assert_eq!(value["max_stop_us"], 31.4);
    }
}

//! A dump as text for people and as JSON for programs.

use std::fmt::Write;
use std::io::{self, IsTerminal};

use serde_json::{Value, json};

use super::{Frame, Quality, Report, Shown, Thread};
use crate::capture::ptrace::once::{How, Lack};
use crate::export::escape::line;
use crate::interp::gil::Gil;
use crate::tree::profile::FrameKind;

/// Colours, where they are welcome.
#[derive(Clone, Copy)]
pub struct Style {
    colour: bool,
}

impl Style {
    pub fn of_output() -> Style {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        Style {
            colour: io::stdout().is_terminal() && !plain,
        }
    }

    fn paint(self, colour: u8, text: &str) -> String {
        if self.colour {
            format!("\x1b[{colour}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }
}

const BOLD: u8 = 1;
const DIM: u8 = 2;
const RED: u8 = 31;
const GREEN: u8 = 32;
const BLUE: u8 = 34;

/// `futex`; a number that is no system call by itself.
fn call_name(call: u64) -> String {
    let known = usize::try_from(call).ok().and_then(syscalls::Sysno::new);
    known.map_or_else(|| format!("system call {call}"), |s| s.name().to_string())
}

/// What a thread does, in words.
fn doing(s: &Shown) -> String {
    let state = match s.state {
        'R' => return "running".into(),
        'S' => "sleeping",
        'D' => "waiting (not interruptible)",
        'T' => "stopped by job control",
        't' => "stopped by a debugger",
        'I' => "idle",
        other => return format!("in state {other}"),
    };
    match s.call {
        Some(call) => format!("{state} in {}", call_name(call)),
        None => state.into(),
    }
}

fn gil(s: &Shown) -> Option<&'static str> {
    match s.gil {
        Some(Gil::Held) => Some("holds the GIL"),
        _ => None,
    }
}

fn how(s: &Shown) -> String {
    let stack = match s.quality {
        Quality::Exact => "exact".to_string(),
        Quality::Repaired => "repaired".into(),
        Quality::Partial(why) => format!("partial: {}", why.map_or("unknown", |why| why.reason())),
    };
    match s.how {
        How::Asleep => format!("{stack}; read while it slept, not stopped"),
        How::Held(ns) => format!("{stack}; held for {} us", ns.div_ceil(1000)),
    }
}

fn lack(why: Lack) -> &'static str {
    match why {
        Lack::Gone => "it has ended",
        Lack::Refused => "it may not be traced: another tracer has it, or a security module forbids it",
        Lack::Restless => "it moved on whenever it was looked at",
        Lack::Late => "it did not stop when asked to: it waits for a CPU, or in the kernel",
    }
}

/// The report for people; names cannot send anything to the terminal but themselves.
pub fn text(r: &Report, style: Style) -> String {
    let mut out = String::new();
    let number = |own: Option<u32>| own.map_or(String::new(), |own| format!(" ({own} in its own namespace)"));
    let python = if r.python.is_empty() {
        "no Python found"
    } else {
        &r.python
    };
    let _ = writeln!(
        out,
        "{}: {}",
        style.paint(BOLD, &format!("Process {}{}", r.pid, number(r.own))),
        line(&r.command)
    );
    let _ = writeln!(out, "{}; {}", line(python), gil_line(r));
    for t in &r.threads {
        let name = format!("Thread {}{} \"{}\"", t.tid, number(t.own), line(&t.name));
        let _ = write!(out, "\n{}", style.paint(BOLD, &name));
        match &t.seen {
            Err(why) => {
                let _ = writeln!(out, ": not read: {}", lack(*why));
            }
            Ok(s) => {
                let _ = write!(out, ": {}", doing(s));
                if let Some(gil) = gil(s) {
                    let _ = write!(out, ", {}", style.paint(GREEN, gil));
                }
                let _ = writeln!(out, "\n  {}", style.paint(DIM, &how(s)));
                for name in s.kernel.iter().flatten() {
                    let _ = writeln!(out, "    {} {}", line(name), style.paint(DIM, "[kernel]"));
                }
                for f in &s.frames {
                    frame(&mut out, f, style);
                }
            }
        }
    }
    let _ = writeln!(out, "\n{}", held_line(r));
    if r.kernel_refused {
        let _ = writeln!(
            out,
            "Kernel functions could not be read: that takes CAP_SYS_ADMIN (sudo)."
        );
    }
    out
}

fn gil_line(r: &Report) -> String {
    let seen = || {
        r.threads
            .iter()
            .filter_map(|t| Some((t.tid, t.seen.as_ref().ok()?.gil?)))
    };
    let holders: Vec<String> = seen()
        .filter(|(_, g)| *g == Gil::Held)
        .map(|(tid, _)| tid.to_string())
        .collect();
    if r.python.is_empty() {
        return format!("{} threads", r.threads.len());
    }
    let gil = match holders.len() {
        0 if seen().any(|(_, g)| g == Gil::None) => "no GIL (free-threaded)".to_string(),
        0 if seen().next().is_none() && r.free_threaded => "no GIL (free-threaded)".into(),
        0 if seen().next().is_none() => "holder of the GIL not known".into(),
        0 => "the GIL is held by no thread".into(),
        1 => format!("the GIL is held by thread {}", holders[0]),
        _ => format!(
            "the GIL was held by threads {}, each when it was read",
            holders.join(", ")
        ),
    };
    format!("{} threads; {gil}", r.threads.len())
}

/// How long threads were held, and how many were not.
fn held_line(r: &Report) -> String {
    let seen: Vec<&Shown> = r.threads.iter().filter_map(|t| t.seen.as_ref().ok()).collect();
    let held: Vec<u64> = seen
        .iter()
        .filter_map(|s| match s.how {
            How::Held(ns) => Some(ns),
            How::Asleep => None,
        })
        .collect();
    let asleep = seen.len() - held.len();
    match held.iter().max() {
        None => format!("Held: none; {asleep} slept and were not stopped."),
        Some(longest) => format!(
            "Held: {} of {} threads, one at a time, the longest for {} us; {asleep} slept and were not stopped.",
            held.len(),
            seen.len(),
            longest.div_ceil(1000)
        ),
    }
}

fn frame(out: &mut String, f: &Frame, style: Style) {
    let name = line(&f.name);
    // Where a library was built is of little interest.
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
        FrameKind::Python => writeln!(out, "    {} ({place})", style.paint(BLUE, &name)),
        FrameKind::Cut => writeln!(out, "    {}", style.paint(RED, &name)),
        FrameKind::Unknown if !module.is_empty() => {
            writeln!(
                out,
                "    {name} {}",
                style.paint(DIM, &format!("({module}+{:#x})", f.address))
            )
        }
        FrameKind::Unknown => writeln!(out, "    {name} {}", style.paint(DIM, &format!("({:#x})", f.address))),
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
                writeln!(out, "    {name} {}", style.paint(DIM, &format!("({what})")))
            }
        }
    };
    for (name, value) in f.locals.iter().flatten() {
        let _ = writeln!(out, "        {} = {}", line(name), line(value));
    }
}

/// The report for programs.
pub fn json(r: &Report) -> Value {
    let longest = r.threads.iter().filter_map(|t| match t.seen.as_ref().ok()?.how {
        How::Held(ns) => Some(ns),
        How::Asleep => None,
    });
    json!({
        "pid": r.pid,
        "own_pid": r.own.unwrap_or(r.pid),
        "command": r.command,
        "python": Some(&r.python).filter(|p| !p.is_empty()),
        "longest_held_us": longest.max().map(micros),
        "threads": r.threads.iter().map(thread_json).collect::<Vec<_>>(),
    })
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn thread_json(t: &Thread) -> Value {
    let mut value = json!({"tid": t.tid, "own_tid": t.own.unwrap_or(t.tid), "name": t.name});
    let more = match &t.seen {
        Err(why) => json!({"lack": lack(*why)}),
        Ok(s) => json!({
            "state": s.state.to_string(),
            "syscall": s.call.map(call_name),
            "holds_gil": match s.gil {
                Some(Gil::Held) => Some(true),
                Some(_) => Some(false),
                None => None,
            },
            "held_us": match s.how {
                How::Held(ns) => Some(micros(ns)),
                How::Asleep => None,
            },
            "stack": match s.quality {
                Quality::Exact => "exact",
                Quality::Repaired => "repaired",
                Quality::Partial(_) => "partial",
            },
            "cut": match s.quality {
                Quality::Partial(why) => why.map(|why| why.reason()),
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

fn frame_json(f: &Frame) -> Value {
    let kind = match f.kind {
        FrameKind::Python => "python",
        FrameKind::Inlined => "inlined",
        FrameKind::Kernel => "kernel",
        FrameKind::Cut => "cut",
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
    use crate::sample::Cut;

    fn frame(kind: FrameKind, name: &str, file: &str, line: u32) -> Frame {
        Frame {
            kind,
            name: name.into(),
            file: file.into(),
            line,
            module: if kind == FrameKind::Python { "" } else { "libx.so" }.into(),
            address: 0x40,
            locals: None,
        }
    }

    #[test]
    fn threads_in_words() {
        let mut python = frame(FrameKind::Python, "main\x1b[2J", "/a.py", 3);
        python.locals = Some(vec![("x".into(), "'\u{202e}'".into())]);
        let held = Shown {
            state: 'R',
            call: None,
            how: How::Held(31_400),
            gil: Some(Gil::Held),
            kernel: None,
            quality: Quality::Exact,
            frames: vec![
                frame(FrameKind::Inlined, "inner", "/build/x.c", 7),
                frame(FrameKind::Unknown, "[unknown]", "", 0),
                python,
            ],
        };
        let asleep = Shown {
            state: 'S',
            call: Some(202),
            how: How::Asleep,
            gil: Some(Gil::NotHeld),
            kernel: Some(vec!["futex_wait".into()]),
            quality: Quality::Partial(Some(Cut::StackHole)),
            frames: vec![frame(FrameKind::Cut, "[cut: x]", "", 0)],
        };
        let thread = |tid, own, seen| Thread {
            tid,
            own,
            name: "py\n".into(),
            seen,
        };
        let report = Report {
            pid: 10,
            own: Some(2),
            command: "python3 a.py".into(),
            python: "CPython 3.11.7 (python3.11)".into(),
            free_threaded: false,
            threads: vec![
                thread(10, Some(2), Ok(held)),
                thread(11, None, Ok(asleep)),
                thread(12, None, Err(Lack::Restless)),
            ],
            kernel_refused: false,
        };
        let expected = "\
Process 10 (2 in its own namespace): python3 a.py
CPython 3.11.7 (python3.11); 3 threads; the GIL is held by thread 10

Thread 10 (2 in its own namespace) \"py\\x0a\": running, holds the GIL
  exact; held for 32 us
    inner (libx.so, inlined x.c:7)
    [unknown] (libx.so+0x40)
    main\\x1b[2J (/a.py:3)
        x = '\\u{202e}'

Thread 11 \"py\\x0a\": sleeping in futex
  partial: stack page not present; read while it slept, not stopped
    futex_wait [kernel]
    [cut: x]

Thread 12 \"py\\x0a\": not read: it moved on whenever it was looked at

Held: 1 of 2 threads, one at a time, the longest for 32 us; 1 slept and were not stopped.
";
        assert_eq!(text(&report, Style { colour: false }), expected);
        let value = json(&report);
        assert_eq!(value["threads"][1]["syscall"], "futex");
        assert_eq!(value["threads"][0]["frames"][2]["locals"][0]["name"], "x");
        assert_eq!(value["longest_held_us"], 31.4);
    }
}

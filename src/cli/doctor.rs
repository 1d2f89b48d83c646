//! `doctor`: what this user may do here, and what was found in a process.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use serde_json::{Value, json};

use super::args::{Backend, Doctor};
use super::look::{Look, Seen, descendants, numbers};
use super::record::check_target;
use crate::capture::ebpf::{EbpfSource, off_cpu};
use crate::capture::{Clock, Options, Source};
use crate::error::{Error, Kind, Result};
use crate::export::escape::line;
use crate::process::credentials::{self, Cap, User, Who};
use crate::process::modules::Module;
use crate::process::rights::{self, Facts, Lack, Target};
use crate::process::{self, privilege};
use crate::sample::Pid;

/// How often a stop lands in a system call all the same: measured by tests/unchanged.rs, which holds it to the bound.
const CHANGED: &str = "0 of 8,700 stops at 1000 Hz changed a result when measured with perf events";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Good,
    /// It works, but not all of it.
    Less,
    Bad,
}

/// A line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    state: State,
    subject: &'static str,
    text: String,
    /// What to type; may be empty.
    mend: String,
}

impl Finding {
    fn good(subject: &'static str, text: impl Into<String>) -> Finding {
        Finding {
            state: State::Good,
            subject,
            text: text.into(),
            mend: String::new(),
        }
    }

    fn less(subject: &'static str, text: impl Into<String>) -> Finding {
        Finding {
            state: State::Less,
            ..Finding::good(subject, text)
        }
    }

    fn lack(state: State, lack: Lack) -> Finding {
        Finding {
            state,
            subject: lack.stops,
            text: lack.why,
            mend: lack.mend,
        }
    }
}

/// Backends that can be used, as far as rules and a trial tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usable {
    ebpf: bool,
    ptrace: bool,
}

/// Writes the report. True if sampling would work.
///
/// # Errors
/// `NoSuchProcess`, `Unsupported` for a process that cannot be looked at; `Io`.
pub fn doctor(options: &Doctor) -> Result<bool> {
    let caller = privilege::become_caller()?;
    if let Some(pid) = options.pid {
        check_target(pid)?;
    }
    let facts = Facts::read();
    let target = options.pid.and_then(Target::read);
    let may = Usable {
        ebpf: true,
        ptrace: Backend::value_variants()
            .iter()
            .any(|b| b.to_possible_value().is_some_and(|v| v.get_name() == "ptrace")),
    };
    let (mut machine, mut usable) = machine(&facts, try_ebpf(), may);
    if usable.ebpf {
        machine.push(match off_cpu::check() {
            Ok(hook) => Finding::good("off-CPU time", format!("stacks at switch-in by {hook}")),
            Err(e) => Finding::less("off-CPU time", format!("not sampled: {}", e.why)),
        });
    }
    machine.insert(0, here(&facts, caller.as_ref()));
    let process = match &target {
        None => Vec::new(),
        Some(target) => {
            let (findings, of_target) = access(&facts, target, usable);
            usable = of_target;
            [findings, contents(target.pid)].concat()
        }
    };
    let works = usable.ebpf || usable.ptrace;
    let text = if options.json {
        let value = json!({
            "works": works,
            "machine": as_json(&machine),
            "process": target.map(|t| json!({"pid": t.pid, "findings": as_json(&process)})),
        });
        format!("{value:#}\n")
    } else {
        let style = Style::of_output();
        let mut text = section("This machine and user", &machine, style);
        if let Some(t) = &target {
            let title = format!("Process {}: {}", numbers(t.pid), process::command_line(t.pid));
            let _ = write!(text, "\n{}", section(&title, &process, style));
        }
        let verdict = if works {
            "Sampling works."
        } else {
            "Sampling does not work."
        };
        let _ = writeln!(text, "\n{verdict}");
        text
    };
    match io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::io("cannot write the report", e)),
        _ => Ok(works),
    }
}

/// Loads the program and opens the events as a recording would; the name of what makes samples due.
fn try_ebpf() -> Result<String> {
    let source = EbpfSource::new(&Options {
        rate: 99,
        event: Clock::Auto,
        kernel: false,
        children: false,
        mode: crate::capture::Mode::Cpu,
    })?;
    Ok(source.name())
}

fn here(f: &Facts, caller: Option<&User>) -> Finding {
    let name = credentials::find_user(Who::Uid(f.uid)).map_or_else(|| f.uid.to_string(), |u| u.name);
    let mut text = format!("Linux {}.{}, user {name}", f.kernel.0, f.kernel.1);
    if caller.is_some() {
        text += " with rights of root";
    }
    if let Some(kind) = f.container {
        let _ = write!(text, ", in a {kind} container");
    }
    if f.inner_user_ns {
        text += ", in a user namespace";
    }
    Finding::good("system", text)
}

/// What the facts and a trial of eBPF say; `may` names the backends that there are.
fn machine(f: &Facts, trial: Result<String>, may: Usable) -> (Vec<Finding>, Usable) {
    let mut all = Vec::new();
    let mut usable = Usable::default();
    match &trial {
        Ok(name) => {
            usable.ebpf = true;
            all.push(Finding::good(rights::EBPF, "the program loads and runs"));
            all.push(if name.ends_with("cycles") {
                Finding::good("hardware counters", "cycles")
            } else {
                Finding::less(
                    "hardware counters",
                    "none (a virtual machine?): the CPU clock is used instead",
                )
            });
        }
        Err(e) => {
            // All causes that the rules see; else what the trial says.
            let lacks = rights::ebpf(f);
            all.extend(lacks.iter().map(|lack| Finding::lack(State::Bad, lack.clone())));
            if lacks.is_empty() {
                all.push(Finding {
                    state: State::Bad,
                    subject: rights::EBPF,
                    text: format!("{}: {}", e.what, e.why),
                    mend: e.hint.clone(),
                });
            }
        }
    }
    let others = rights::others(f);
    if may.ptrace {
        let child = Target {
            uids: [f.uid; 3],
            permitted: f.permitted,
            dumpable: true,
            descends: true,
            ..Target::default()
        };
        let own = Target {
            descends: false,
            ..child.clone()
        };
        all.push(match (rights::ptrace_of(f, &child), rights::ptrace_of(f, &own)) {
            (Some(lack), _) => Finding::lack(State::Bad, lack),
            (None, Some(_)) => Finding::less(
                rights::PTRACE,
                "of commands that nativeprof starts (kernel.yama.ptrace_scope)",
            ),
            (None, None) if others.is_some() => Finding::less(rights::PTRACE, "of this user's own processes"),
            (None, None) => Finding::good(rights::PTRACE, "of all processes"),
        });
        usable.ptrace = all.last().is_some_and(|f| f.state != State::Bad);
        if usable.ptrace {
            all.push(Finding::good(
                "ptrace and system calls",
                format!("none is interrupted on purpose; {CHANGED}"),
            ));
        }
    }
    all.push(match others {
        None => Finding::good(rights::OTHERS, "CAP_SYS_PTRACE"),
        Some(lack) => Finding::lack(State::Less, lack),
    });
    all.push(match rights::kernel_names(f) {
        None => Finding::good(rights::KERNEL_NAMES, "for --kernel"),
        Some(lack) => Finding::lack(State::Less, lack),
    });
    if let Some(kb) = f.memlock.filter(|kb| *kb < 1024 && !f.permitted.has(Cap::IpcLock)) {
        all.push(Finding {
            mend: "ulimit -l 8192".into(),
            ..Finding::less(
                "locked memory",
                format!("{kb} KB only: enough for one recording at a time"),
            )
        });
    }
    (all, usable)
}

/// May this process be sampled, and how?
fn access(f: &Facts, t: &Target, usable: Usable) -> (Vec<Finding>, Usable) {
    let mut all = Vec::new();
    let user = credentials::find_user(Who::Uid(t.uids[1])).map_or_else(|| t.uids[1].to_string(), |u| u.name);
    let mut text = format!("user {user}");
    if let Some(inner) = t.inner_pid {
        let _ = write!(text, ", pid {inner} in its own namespace");
    }
    if t.other_mount_ns {
        text += ", with a file system of its own (a container): files are opened in there";
    }
    if t.other_user_ns {
        text += ", in another user namespace";
    }
    all.push(Finding::good("process", text));
    let memory = rights::memory_of(f, t);
    let ptrace = rights::ptrace_of(f, t);
    let now = Usable {
        ebpf: usable.ebpf && memory.is_none(),
        ptrace: usable.ptrace && ptrace.is_none(),
    };
    let ways: Vec<_> = [(now.ebpf, "eBPF"), (now.ptrace, "ptrace")]
        .into_iter()
        .filter_map(|(can, name)| can.then_some(name))
        .collect();
    if !ways.is_empty() {
        all.push(Finding::good("may be sampled", format!("with {}", ways.join(" and "))));
    }
    let lack = memory.or(ptrace.filter(|_| usable.ptrace));
    let state = if ways.is_empty() { State::Bad } else { State::Less };
    all.extend(lack.map(|lack| Finding::lack(state, lack)));
    (all, now)
}

/// What the process runs.
fn contents(pid: Pid) -> Vec<Finding> {
    let mut look = Look::default();
    let seen = match look.at(pid) {
        Ok(seen) => seen,
        // Told already.
        Err(e) if e.kind == Kind::NotPermitted => return Vec::new(),
        Err(e) => {
            return vec![Finding {
                mend: e.hint,
                ..Finding::less("interpreter", format!("{}: {}", e.what, e.why))
            }];
        }
    };
    let mut all = Vec::new();
    match &seen.python {
        Some((module, runtime)) => all.extend(interpreter(&seen, module, runtime)),
        None => {
            all.push(Finding::less(
                "interpreter",
                "no CPython: the profile will show native frames only",
            ));
            let has = |child: &Pid| look.at(*child).is_ok_and(|seen| seen.python.is_some());
            if let Some(child) = descendants(pid).into_iter().find(has) {
                all.push(Finding {
                    mend: format!("nativeprof doctor {child}"),
                    ..Finding::less(
                        "children",
                        format!("{child} ({}) runs Python", process::command_line(child)),
                    )
                });
            }
        }
    }
    all.push(names_of_files(&seen));
    all
}

fn interpreter(seen: &Seen, module: &Module, runtime: &crate::interp::Runtime) -> Vec<Finding> {
    let own = |m: &Module| m.name().starts_with("python");
    let program = seen.files.first().map_or(String::new(), |m| m.name());
    let linked = if own(module) {
        "static".to_string()
    } else if program.starts_with("python") {
        "shared".to_string()
    } else {
        format!("embedded in {program}")
    };
    // Only builds with Py_DEBUG have it (Objects/object.c, CPython 3.8 to 3.14).
    let debug = if module.exports("_Py_NegativeRefcount").is_some() {
        ", debug build"
    } else {
        ""
    };
    let text = format!(
        "CPython {}, {linked} ({}){debug}",
        runtime.version_text(),
        module.name()
    );
    let mut all = vec![if runtime.layout.is_some() {
        Finding::good("interpreter", text)
    } else {
        Finding::less(
            "interpreter",
            format!("{text}: not a version that is known; native frames only"),
        )
    }];
    if runtime.eval.is_empty() {
        let text = "it has no name in the file (stripped): Python frames are placed by address all the same";
        all.push(Finding::less("bytecode loop", text));
    }
    all
}

/// Where names in the main files come from.
fn names_of_files(seen: &Seen) -> Finding {
    let source = |m: &Module| {
        let has = |name: &str| {
            use object::Object;
            m.elf(|e| e.section_by_name(name).is_some()).unwrap_or(false)
        };
        match () {
            () if m.content.is_empty() => "it cannot be opened",
            () if has(".debug_info") || has(".zdebug_info") => "DWARF",
            () if has(".symtab") => "symbols",
            () if has(".gnu_debuglink") || has(".gnu_debugdata") => "exported symbols, and perhaps a debug file",
            () => "exported symbols only",
        }
    };
    let python = seen.python.as_ref().map(|(module, _)| module);
    let mut main: Vec<&Module> = seen.files.first().into_iter().chain(python).map(|m| &**m).collect();
    main.dedup_by_key(|m| m.path.clone());
    let mut parts: Vec<String> = main.iter().map(|m| format!("{}: {}", m.name(), source(m))).collect();
    let others: Vec<_> = seen
        .files
        .iter()
        .filter(|m| !main.iter().any(|main| main.path == m.path))
        .collect();
    let poor = others
        .iter()
        .filter(|m| !["DWARF", "symbols"].contains(&source(m)))
        .count();
    if !others.is_empty() {
        parts.push(format!(
            "of {} other files {poor} have exported symbols only",
            others.len()
        ));
    }
    let whole = main.iter().all(|m| ["DWARF", "symbols"].contains(&source(m)));
    let state = if whole { State::Good } else { State::Less };
    Finding {
        state,
        ..Finding::good("names", parts.join("; "))
    }
}

/// How the marks look.
#[derive(Clone, Copy)]
struct Style {
    unicode: bool,
    colour: bool,
}

impl Style {
    fn of_output() -> Style {
        let terminal = io::stdout().is_terminal();
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
            .into_iter()
            .find_map(set)
            .unwrap_or_default();
        let utf8 = locale.to_ascii_lowercase().replace('-', "").contains("utf8");
        Style {
            unicode: terminal && utf8,
            colour: terminal && set("NO_COLOR").is_none(),
        }
    }

    fn mark(self, state: State) -> String {
        let (mark, plain, colour) = match state {
            State::Good => ("✓", "ok", 32),
            State::Less => ("–", "--", 33),
            State::Bad => ("✗", "NO", 31),
        };
        let mark = if self.unicode { mark } else { plain };
        if self.colour {
            format!("\x1b[{colour}m{mark}\x1b[0m")
        } else {
            mark.to_string()
        }
    }
}

/// A title and a line for each finding, with the remedy below it where that is not the one just given.
fn section(title: &str, findings: &[Finding], style: Style) -> String {
    let width = findings.iter().map(|f| f.subject.len()).max().unwrap_or(0);
    let mut text = format!("{}\n", line(title));
    let mut given = "";
    for f in findings {
        let _ = writeln!(
            text,
            "  {} {:width$}  {}",
            style.mark(f.state),
            f.subject,
            line(&f.text)
        );
        if !f.mend.is_empty() && f.mend != given {
            given = &f.mend;
            let mark = if style.unicode { 1 } else { 2 };
            let _ = writeln!(text, "  {:mark$} {:width$}  try: {}", "", "", line(&f.mend));
        }
    }
    text
}

fn as_json(findings: &[Finding]) -> Value {
    let one = |f: &Finding| {
        let state = match f.state {
            State::Good => "good",
            State::Less => "less",
            State::Bad => "bad",
        };
        json!({"subject": f.subject, "state": state, "text": f.text, "try": f.mend})
    };
    findings.iter().map(one).collect()
}

#[cfg(test)]
mod tests;

//! `doctor`: checks permissions and kernel support, and what was found in a process.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::cli::args::{BackendChoice, ColorWhen, Doctor, ProcessRef};
use crate::cli::discover;
use crate::cli::discover::{ProcessInspector, ProcessSummary, check_target, descendants, pid_label};
use crate::cli::output::JSON_VERSION;
use crate::cli::output::style::{Color, TerminalStyle};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::event::Pid;
use crate::privileges::checks;
use crate::privileges::checks::host::{DirectoryFacts, HostNeed, State, VisibleCgroups};
use crate::privileges::checks::{MissingPrivilege, SystemFacts, TargetFacts};
use crate::privileges::credentials;
use crate::privileges::credentials::{Cap, Caps, User, UserQuery};
use crate::privileges::phases;
use crate::process::modules::Module;
use crate::sys::procfs;

use trials::{EbpfTrial, EbpfTrials};

mod trials;

/// Subject of the finding about the BPF program of `host`.
const TRIAL: &str = "trial";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok,
    /// Works in part.
    Limited,
    Missing,
}

/// A line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    status: Status,
    subject: &'static str,
    text: String,
    /// What to type; may be empty.
    fix: String,
}

impl Finding {
    fn ok(subject: &'static str, text: impl Into<String>) -> Finding {
        Finding {
            status: Status::Ok,
            subject,
            text: text.into(),
            fix: String::new(),
        }
    }

    fn limited(subject: &'static str, text: impl Into<String>) -> Finding {
        Finding {
            status: Status::Limited,
            ..Finding::ok(subject, text)
        }
    }

    fn missing(status: Status, missing: MissingPrivilege) -> Finding {
        Finding {
            status,
            subject: missing.feature,
            text: missing.reason,
            fix: missing.fix,
        }
    }
}

/// Backends that can be used, going by the checks and a trial.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct UsableBackends {
    ebpf: bool,
    ptrace: bool,
}

/// Writes the report. True if sampling would work, or with `--host` a recording of the host.
///
/// # Errors
/// `NoSuchProcess`, `Usage` for a name that several processes have, `Unsupported` for one that cannot be inspected; `Io`.
pub fn doctor(options: &Doctor) -> Result<bool> {
    // `host` stays the user who started it.
    let caller = if options.host {
        None
    } else {
        phases::switch_to_invoking_user_with(Caps::of(phases::PROBING))?
    };
    let directory = options
        .host
        .then(|| restrict_as_host(options.dir.as_deref()))
        .transpose()?
        .flatten();
    let named = options.pid.map(ProcessRef::Pid).or(options.process.clone());
    let pid = named.map(|process| discover::find(&process)).transpose()?;
    pid.map(check_target).transpose()?;
    let facts = SystemFacts::read();
    let target = pid.and_then(TargetFacts::read);
    let may = UsableBackends {
        ebpf: true,
        ptrace: BackendChoice::value_variants()
            .iter()
            .any(|b| b.to_possible_value().is_some_and(|v| v.get_name() == "ptrace")),
    };
    let trials = EbpfTrials::run();
    let (mut machine, mut usable) = check_system(&facts, trials.cpu, may);
    if usable.ebpf {
        machine.push(match trials.off_cpu {
            Ok(hook) => Finding::ok("off-CPU time", format!("stacks are taken at switch-in, by {hook}")),
            Err(e) => Finding::limited("off-CPU time", format!("not available: {}", e.why)),
        });
        machine.push(match trials.rss {
            Ok(()) => Finding::ok("resident memory", "changes are found at kmem:rss_stat (--mode rss)"),
            Err(e) => Finding::limited("resident memory", format!("not available: {}", e.why)),
        });
        machine.push(match trials.alloc {
            Ok(()) => Finding::ok(
                "published allocations",
                "are read at uprobes, from programs that have such probes (--mode alloc)",
            ),
            Err(e) => Finding::limited("published allocations", format!("not available: {}", e.why)),
        });
    }
    machine.insert(0, describe_system(&facts, caller.as_ref()));
    let process = match &target {
        None => Vec::new(),
        Some(target) => {
            let (findings, of_target) = check_access(&facts, target, usable);
            usable = of_target;
            [findings, check_process(target.pid)].concat()
        }
    };
    let (host, host_works) = if options.host {
        let needs = checks::host::needs(&facts, VisibleCgroups::read(), directory.as_ref());
        check_host(needs, trials::try_host())
    } else {
        (Vec::new(), true)
    };
    let works = if options.host {
        host_works
    } else {
        usable.ebpf || usable.ptrace
    };
    let text = if options.json {
        let value = json!({
            "version": JSON_VERSION,
            "works": works,
            "machine": as_json(&machine),
            "process": target.map(|t| json!({"pid": t.pid, "findings": as_json(&process)})),
            "host": options.host.then(|| json!({"works": host_works, "findings": as_json(&host)})),
        });
        format!("{value:#}\n")
    } else {
        let style = TerminalStyle::of_stdout(ColorWhen::Auto);
        let mut text = section("This machine and user", &machine, &style);
        if let Some(t) = &target {
            let title = format!("Process {}: {}", pid_label(t.pid), procfs::command_line(t.pid));
            let _ = write!(text, "\n{}", section(&title, &process, &style));
        }
        if options.host {
            let _ = write!(text, "\n{}", section("All processes: `nativeprof host`", &host, &style));
        }
        let is_limited = host.iter().any(|finding| finding.status != Status::Ok);
        let verdict = if options.host {
            match (works, is_limited) {
                (false, _) => "`nativeprof host` does not work.",
                (true, true) => "`nativeprof host` works, with limits.",
                (true, false) => "`nativeprof host` works.",
            }
        } else if !works {
            "Sampling does not work."
        } else if usable.ebpf {
            "Sampling works."
        } else {
            "Sampling works with ptrace only."
        };
        let _ = writeln!(text, "\n{verdict}");
        text
    };
    match io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Error::io("cannot write the report", e)),
        _ => Ok(works),
    }
}

fn describe_system(f: &SystemFacts, caller: Option<&User>) -> Finding {
    let name = credentials::find_user(UserQuery::Uid(f.uid)).map_or_else(|| f.uid.to_string(), |u| u.name);
    let mut text = format!("Linux {}.{}, user {name}", f.kernel.0, f.kernel.1);
    if caller.is_some() {
        text += " as root";
    }
    if let Some(kind) = f.container {
        let _ = write!(text, ", in a {kind} container");
    }
    if f.inner_user_ns {
        text += ", in a user namespace";
    }
    Finding::ok("system", text)
}

/// Findings from the facts and a trial of eBPF; `may` has the backends of this build.
fn check_system(f: &SystemFacts, trial: Result<EbpfTrial>, may: UsableBackends) -> (Vec<Finding>, UsableBackends) {
    let mut all = Vec::new();
    let mut usable = UsableBackends::default();
    match &trial {
        Ok(trial) => {
            usable.ebpf = true;
            all.push(Finding::ok(
                checks::EBPF,
                match &trial.why_older_program {
                    None => "the BPF program loads and runs".into(),
                    Some(why) => format!("the BPF program for Linux 5.8 and newer loads and runs; {why}"),
                },
            ));
            all.push(if trial.event.ends_with("cycles") {
                Finding::ok("hardware counters", "cycles")
            } else {
                Finding::limited(
                    "hardware counters",
                    "none (a virtual machine?); the CPU clock is used instead",
                )
            });
        }
        Err(e) => {
            // All causes that the checks know; else the error of the trial.
            let missing = checks::ebpf(f);
            all.extend(missing.iter().map(|m| Finding::missing(Status::Missing, m.clone())));
            if missing.is_empty() {
                all.push(Finding {
                    status: Status::Missing,
                    subject: checks::EBPF,
                    text: format!("{}: {}", e.what, e.why),
                    fix: e.hint.clone(),
                });
            }
        }
    }
    let others = checks::other_processes(f);
    if may.ptrace {
        let child = TargetFacts {
            uids: [f.uid; 3],
            permitted: f.permitted,
            dumpable: true,
            descends: true,
            ..TargetFacts::default()
        };
        let own = TargetFacts {
            descends: false,
            ..child.clone()
        };
        all.push(match (checks::ptrace_of(f, &child), checks::ptrace_of(f, &own)) {
            (Some(missing), _) => Finding::missing(Status::Missing, missing),
            (None, Some(_)) => Finding::limited(
                checks::PTRACE,
                "only commands started by nativeprof (kernel.yama.ptrace_scope)",
            ),
            (None, None) if others.is_some() => Finding::limited(checks::PTRACE, "only this user's own processes"),
            (None, None) => Finding::ok(checks::PTRACE, "all processes"),
        });
        usable.ptrace = all.last().is_some_and(|f| f.status != Status::Missing);
        if usable.ptrace {
            all.push(Finding::ok(
                "ptrace and system calls",
                // Measured, and bounded, by tests/unchanged.rs.
                "stops do not change the results of system calls",
            ));
        }
    }
    all.push(match others {
        None => Finding::ok(checks::OTHER_PROCESSES, "CAP_SYS_PTRACE"),
        Some(missing) => Finding::missing(Status::Limited, missing),
    });
    all.push(match checks::kernel_names(f) {
        None => Finding::ok(checks::KERNEL_NAMES, "for --kernel"),
        Some(missing) => Finding::missing(Status::Limited, missing),
    });
    if let Some(kb) = f.memlock.filter(|kb| *kb < 1024 && !f.permitted.has(Cap::IpcLock)) {
        all.push(Finding {
            fix: "ulimit -l 8192".into(),
            ..Finding::limited(
                "locked memory",
                format!("only {kb} KB; enough for one recording at a time"),
            )
        });
    }
    (all, usable)
}

/// Keeps the privileges that `host` keeps. Returns what is known of its directory.
fn restrict_as_host(directory: Option<&Path>) -> Result<Option<DirectoryFacts>> {
    phases::restrict_to_setup(Caps::NONE)?;
    Ok(directory.map(DirectoryFacts::read))
}

/// Findings about a recording of all processes, and whether it works.
fn check_host(needs: Vec<HostNeed>, trial: Result<EbpfTrial>) -> (Vec<Finding>, bool) {
    let mut all: Vec<Finding> = needs.into_iter().map(of_need).collect();
    let is_explained = all.iter().any(|finding| finding.status == Status::Missing);
    match trial {
        Ok(_) => all.push(Finding::ok(
            TRIAL,
            "the BPF program, its tracepoints and its events work",
        )),
        Err(_) if is_explained => {}
        Err(e) => all.push(Finding {
            status: Status::Missing,
            fix: e.hint,
            ..Finding::ok(TRIAL, format!("{}: {}", e.what, e.why))
        }),
    }
    let works = all.iter().all(|finding| finding.status != Status::Missing);
    (all, works)
}

fn of_need(need: HostNeed) -> Finding {
    let (status, missing) = match need.state {
        State::Met(text) => return Finding::ok(need.subject, text),
        State::Limited(missing) => (Status::Limited, missing),
        State::Missing(missing) => (Status::Missing, missing),
    };
    Finding {
        subject: need.subject,
        ..Finding::missing(status, missing)
    }
}

/// May this process be sampled, and how?
fn check_access(f: &SystemFacts, t: &TargetFacts, usable: UsableBackends) -> (Vec<Finding>, UsableBackends) {
    let mut all = Vec::new();
    let user = credentials::find_user(UserQuery::Uid(t.uids[1])).map_or_else(|| t.uids[1].to_string(), |u| u.name);
    let mut text = format!("user {user}");
    if let Some(inner) = t.inner_pid {
        let _ = write!(text, ", PID {inner} in its namespace");
    }
    if t.other_mount_ns {
        text += ", with its own file system (a container); files are opened inside it";
    }
    if t.other_user_ns {
        text += ", in another user namespace";
    }
    all.push(Finding::ok("process", text));
    let memory = checks::memory_of(f, t);
    let ptrace = checks::ptrace_of(f, t);
    let now = UsableBackends {
        ebpf: usable.ebpf && memory.is_none(),
        ptrace: usable.ptrace && ptrace.is_none(),
    };
    let ways: Vec<_> = [(now.ebpf, "eBPF"), (now.ptrace, "ptrace")]
        .into_iter()
        .filter_map(|(can, name)| can.then_some(name))
        .collect();
    if !ways.is_empty() {
        all.push(Finding::ok("can be sampled", format!("with {}", ways.join(" and "))));
    }
    let missing = memory.or(ptrace.filter(|_| usable.ptrace));
    let status = if ways.is_empty() {
        Status::Missing
    } else {
        Status::Limited
    };
    all.extend(missing.map(|missing| Finding::missing(status, missing)));
    (all, now)
}

/// What the process runs.
fn check_process(pid: Pid) -> Vec<Finding> {
    let mut inspector = ProcessInspector::default();
    let summary = match inspector.inspect(pid) {
        Ok(summary) => summary,
        // Reported already.
        Err(e) if e.kind == ErrorKind::NotPermitted => return Vec::new(),
        Err(e) => {
            return vec![Finding {
                fix: e.hint,
                ..Finding::limited("interpreter", format!("{}: {}", e.what, e.why))
            }];
        }
    };
    let mut all = Vec::new();
    match &summary.python {
        Some((module, runtime)) => all.extend(interpreter(&summary, module, runtime)),
        None => {
            all.push(Finding::limited(
                "interpreter",
                "no CPython found; the profile will have native frames only",
            ));
            let has = |child: &Pid| inspector.inspect(*child).is_ok_and(|process| process.python.is_some());
            if let Some(child) = descendants(pid).into_iter().find(has) {
                all.push(Finding {
                    fix: format!("nativeprof doctor {child}"),
                    ..Finding::limited(
                        "children",
                        format!("{child} ({}) runs Python", procfs::command_line(child)),
                    )
                });
            }
        }
    }
    all.push(check_symbols(&summary));
    all
}

fn interpreter(summary: &ProcessSummary, module: &Module, runtime: &crate::cpython::Runtime) -> Vec<Finding> {
    let own = |m: &Module| m.name().starts_with("python");
    let program = summary.files.first().map_or(String::new(), |m| m.name());
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
        Finding::ok("interpreter", text)
    } else {
        Finding::limited(
            "interpreter",
            format!("{text}: unsupported version; native frames only"),
        )
    }];
    if runtime.eval.is_empty() {
        let text = "no symbol for it (stripped binary); Python frames are placed by address instead";
        all.push(Finding::limited("evaluation loop", text));
    }
    all
}

/// Where names in the main files come from.
fn check_symbols(summary: &ProcessSummary) -> Finding {
    let source = |m: &Module| {
        let has = |name: &str| {
            use object::Object;
            m.elf(|e| e.section_by_name(name).is_some()).unwrap_or(false)
        };
        match () {
            () if m.content.is_empty() => "cannot be opened",
            () if has(".debug_info") || has(".zdebug_info") => "DWARF",
            () if has(".symtab") => "symbols",
            () if has(".gnu_debuglink") || has(".gnu_debugdata") => "exported symbols, perhaps a separate debug file",
            () => "exported symbols only",
        }
    };
    let python = summary.python.as_ref().map(|(module, _)| module);
    let mut main: Vec<&Module> = summary.files.first().into_iter().chain(python).map(|m| &**m).collect();
    main.dedup_by_key(|m| m.path.clone());
    let mut parts: Vec<String> = main.iter().map(|m| format!("{}: {}", m.name(), source(m))).collect();
    let others: Vec<_> = summary
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
            "{poor} of {} other files have exported symbols only",
            others.len()
        ));
    }
    let has_symbols = main.iter().all(|m| ["DWARF", "symbols"].contains(&source(m)));
    let status = if has_symbols { Status::Ok } else { Status::Limited };
    Finding {
        status,
        ..Finding::ok("symbols", parts.join("; "))
    }
}

/// The mark before a finding.
fn mark(style: &TerminalStyle, status: Status) -> String {
    let (mark, plain, color) = match status {
        Status::Ok => ("✓", "ok", Color::Green),
        Status::Limited => ("–", "--", Color::Yellow),
        Status::Missing => ("✗", "NO", Color::Red),
    };
    style.paint(color, if style.unicode { mark } else { plain })
}

/// A title and a line for each finding, followed by its fix unless that was just printed.
fn section(title: &str, findings: &[Finding], style: &TerminalStyle) -> String {
    let width = findings.iter().map(|f| f.subject.len()).max().unwrap_or(0);
    let mut text = format!("{}\n", line(title));
    let mut given = "";
    for f in findings {
        let _ = writeln!(
            text,
            "  {} {:width$}  {}",
            mark(style, f.status),
            f.subject,
            line(&f.text)
        );
        if !f.fix.is_empty() && f.fix != given {
            given = &f.fix;
            let mark = if style.unicode { 1 } else { 2 };
            let _ = writeln!(text, "  {:mark$} {:width$}  try: {}", "", "", line(&f.fix));
        }
    }
    text
}

fn as_json(findings: &[Finding]) -> Value {
    let one = |f: &Finding| {
        let status = match f.status {
            Status::Ok => "ok",
            Status::Limited => "limited",
            Status::Missing => "missing",
        };
        json!({"subject": f.subject, "status": status, "text": f.text, "try": f.fix})
    };
    findings.iter().map(one).collect()
}

#[cfg(test)]
mod tests;

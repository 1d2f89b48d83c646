//! `selftest`: accuracy and overhead on this machine. Samples a workload that measures its own functions, and compares
//! the profile with these measurements.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::cli::args::{BackendChoice, Selftest};
use crate::cli::backend::check_rate;
use crate::cli::output::style::{Color, TerminalStyle};
use crate::cli::output::table;
use crate::cli::output::table::{Cell, Overflow, plain};
use crate::error::{Error, Result};
use crate::profile::summary::{counted, percent};
use crate::sys;

mod verify;
mod workload;

use verify::{Findings, PARTS};
use workload::{Program, RunWindow, Sampler};

/// What a backend did.
enum Outcome {
    Ran(Box<Run>),
    /// It is not permitted or not possible here, for this reason.
    Refused(String),
}

#[derive(Default)]
struct Run {
    findings: Findings,
    /// By the program's clock, seconds.
    truth: BTreeMap<String, f64>,
    /// How much longer a round took with sampling than without, as a part; one for each pair of windows.
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

/// Tests all backends, or the given one; false if one fails.
///
/// # Errors
/// If there is no Python to test with, or it crashes.
pub fn selftest(options: &Selftest) -> Result<bool> {
    check_rate(options.rate)?;
    let style = TerminalStyle::of_stdout(options.color);
    let backends = match options.backend {
        BackendChoice::Auto => vec!["ebpf", "ptrace"],
        BackendChoice::Ebpf => vec!["ebpf"],
        BackendChoice::Ptrace => vec!["ptrace"],
    };
    let mut program = Program::start(&options.python)?;
    let mut outcomes = Vec::new();
    for name in backends {
        let seconds = f64::from(options.pairs) * (2.0 * options.window + 0.5);
        crate::cli::print_status(&format!("testing {name}, about {:.0} s", seconds.ceil()));
        outcomes.push((name, run(&mut program, name, options)?));
    }
    let problems: Vec<_> = outcomes.iter().map(|(_, outcome)| find_problems(outcome)).collect();
    let ran = outcomes.iter().any(|(_, outcome)| matches!(outcome, Outcome::Ran(_)));
    let good = ran && problems.iter().all(Vec::is_empty);
    let text = if options.json {
        let backends = outcomes.iter().zip(&problems);
        let backends: Value = backends
            .map(|((name, outcome), problems)| json(name, outcome, problems))
            .collect();
        let value = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "kernel": kernel(),
            "python": program.version,
            "rate": options.rate,
            "passed": good,
            "backends": backends,
        });
        format!("{value:#}\n")
    } else {
        render(&program, options, &outcomes, &problems, &style)
    };
    table::print(&text).map_err(|e| Error::io("cannot write the result", e).hint("free some disk space"))?;
    Ok(good)
}

/// Pairs of windows with and without sampling, in turn first.
fn run(program: &mut Program, backend: &str, options: &Selftest) -> Result<Outcome> {
    let mut run = Run::default();
    program.work(options.window / 4.0)?; // warm
    for pair in 0..options.pairs {
        let mut off = None;
        if pair % 2 == 0 {
            off = Some(program.work(options.window)?);
        }
        let sampler = match Sampler::start(program.pid(), backend, options)? {
            Ok(sampler) => sampler,
            Err(why) => return Ok(Outcome::Refused(why)),
        };
        let on = program.work(options.window)?;
        run.findings.add(&sampler.finish()?);
        let off = match off {
            Some(off) => off,
            None => program.work(options.window)?,
        };
        let longer = |by: fn(&RunWindow) -> f64| by(&on) / by(&off) - 1.0;
        run.wall.push(longer(|w| w.wall / w.rounds));
        run.cpu.push(longer(|w| w.cpu / w.rounds));
        for (name, seconds) in on.parts {
            *run.truth.entry(name).or_default() += seconds;
        }
    }
    Ok(Outcome::Ran(Box::new(run)))
}

impl Run {
    /// Total variation between the shares seen and those of the program's clock, and what a perfect sampler with so
    /// many samples would have on average. Both in 0 to 1.
    fn error(&self) -> (f64, f64) {
        let seen: u64 = self.findings.parts.values().sum();
        let time: f64 = self.truth.values().sum();
        let (mut error, mut floor) = (0.0, 0.0);
        for part in PARTS {
            let truth = self.truth.get(*part).copied().unwrap_or(0.0) / time.max(f64::MIN_POSITIVE);
            let share = self.findings.parts.get(*part).copied().unwrap_or(0) as f64 / seen.max(1) as f64;
            error += (share - truth).abs() / 2.0;
            // The mean of the absolute value of a normal variable with this deviation.
            floor += (2.0 * truth * (1.0 - truth) / std::f64::consts::PI / seen.max(1) as f64).sqrt() / 2.0;
        }
        (error, floor)
    }
}

/// What is not as it should be, a line each.
fn find_problems(outcome: &Outcome) -> Vec<String> {
    let Outcome::Ran(run) = outcome else { return Vec::new() };
    let (f, q) = (&run.findings, &run.findings.quality);
    let mut problems = Vec::new();
    let (error, floor) = run.error();
    if q.taken == 0 {
        return vec!["no sample was taken".into()];
    }
    if f.torn > 0 {
        problems.push(format!("{}: {}", counted(f.torn, "impossible stacks"), f.example));
    }
    if q.exact + q.repaired + q.partial != q.taken || f.samples != q.taken {
        let in_tree = counted(f.samples, "samples");
        problems.push(format!("{in_tree} in the tree, but {} taken", q.taken));
    }
    if q.partial * 100 > q.taken {
        problems.push("more than 1 % of the stacks are incomplete; check `nativeprof doctor`".into());
    }
    if error > 3.0 * floor + 0.01 {
        problems.push(format!("shares differ by {:.1} % from the ground truth", 100.0 * error));
    }
    if f.without_native * 10 > f.in_power {
        problems.push("native frames are missing above Python code that calls C".into());
    }
    // The tracer stops threads after the tick, and on a busy machine too late for some.
    let excused = if f.stopped.is_some() { 2 } else { 50 };
    if (q.taken + q.expected / excused + 5) < q.expected {
        problems.push(format!("only {} of {} taken", q.taken, counted(q.expected, "samples")));
    }
    problems
}

fn kernel() -> String {
    let text = sys::procfs::read_text("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("Linux {} {}", text.trim(), std::env::consts::ARCH)
}

/// Median, least and most.
fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (first, last) = (sorted.first().copied(), sorted.last().copied());
    let middle = match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    };
    (middle, first.unwrap_or(0.0), last.unwrap_or(0.0))
}

fn longer(values: &[f64]) -> String {
    let (median, least, most) = spread(values);
    format!(
        "{:+.1} % ({:+.1} to {:+.1})",
        100.0 * median,
        100.0 * least,
        100.0 * most
    )
}

fn render(
    program: &Program,
    options: &Selftest,
    outcomes: &[(&str, Outcome)],
    problems: &[Vec<String>],
    style: &TerminalStyle,
) -> String {
    let mut text = format!(
        "{}, CPython {} ({}), {}; {} Hz, {} of {} s windows with and without sampling\n",
        kernel(),
        program.version,
        program.path,
        counted(sys::process::cpu_count() as u64, "CPUs"),
        options.rate,
        counted(options.pairs, "pairs"),
        options.window
    );
    const ROWS: &[&str] = &[
        "samples",
        "lost",
        "exact",
        "repaired",
        "partial",
        "impossible",
        "error vs ground truth",
        "  sampling-noise floor",
        "slowdown (wall)",
        "slowdown (CPU)",
        "threads stopped",
        "profiler CPU",
        "verdict",
    ];
    let mut columns = vec![("", Overflow::Word)];
    let mut rows: Vec<Vec<Cell>> = ROWS.iter().map(|row| vec![plain(*row)]).collect();
    for ((name, outcome), problems) in outcomes.iter().zip(problems) {
        columns.push((name, Overflow::Word));
        let Outcome::Ran(run) = outcome else {
            for row in &mut rows {
                row.push(Cell {
                    text: "-".into(),
                    color: Color::Dim,
                });
            }
            if let Some(last) = rows.last_mut().and_then(|row| row.last_mut()) {
                *last = Cell {
                    text: "unavailable".into(),
                    color: Color::Yellow,
                };
            }
            continue;
        };
        let (f, q) = (&run.findings, &run.findings.quality);
        let (error, floor) = run.error();
        let stops = match f.stopped {
            Some((median, longest)) => format!("median {median} µs, longest {longest} µs"),
            None => "never".into(),
        };
        let verdict = if problems.is_empty() {
            Cell {
                text: "passed".into(),
                color: Color::Green,
            }
        } else {
            Cell {
                text: "FAILED".into(),
                color: Color::Red,
            }
        };
        let cells = [
            plain(format!("{} of {} expected", q.taken, q.expected)),
            plain(q.lost.to_string()),
            plain(format!("{} ({})", q.exact, percent(q.exact, q.taken))),
            plain(q.repaired.to_string()),
            plain(q.partial.to_string()),
            plain(f.torn.to_string()),
            plain(format!("{:.2} %", 100.0 * error)),
            plain(format!("{:.2} %", 100.0 * floor)),
            plain(longer(&run.wall)),
            plain(longer(&run.cpu)),
            plain(stops),
            plain(format!("{:.2} s, including startup and symbolization", f.profiler_cpu)),
            verdict,
        ];
        for (row, cell) in rows.iter_mut().zip(cells) {
            row.push(cell);
        }
    }
    if outcomes.iter().any(|(_, outcome)| matches!(outcome, Outcome::Ran(_))) {
        let _ = write!(text, "\n{}", table::draw(&columns, &rows, style));
    }
    for ((name, outcome), problems) in outcomes.iter().zip(problems) {
        if let Outcome::Refused(why) = outcome {
            let _ = write!(text, "\n{name} is not available: {why}\n  try: nativeprof doctor\n");
        }
        if let Outcome::Ran(run) = outcome
            && !run.findings.quality.reasons.is_empty()
        {
            let reasons = run
                .findings
                .quality
                .reasons
                .iter()
                .map(|(why, n)| format!("{why}: {n}"));
            let _ = write!(text, "\n{name}, partial: {}\n", reasons.collect::<Vec<_>>().join(", "));
        }
        for line in problems {
            let _ = write!(text, "\n{name} FAILED: {line}\n");
        }
    }
    if outcomes
        .iter()
        .all(|(_, outcome)| matches!(outcome, Outcome::Refused(_)))
    {
        text += "\nno backend is available: run `nativeprof doctor` to see why\n";
    }
    text
}

fn json(name: &str, outcome: &Outcome, problems: &[String]) -> Value {
    let run = match outcome {
        Outcome::Refused(why) => return json!({"backend": name, "refused": why}),
        Outcome::Ran(run) => run,
    };
    let (f, q) = (&run.findings, &run.findings.quality);
    let (error, floor) = run.error();
    let longer = |values: &[f64]| {
        let (median, least, most) = spread(values);
        json!({"median": median, "min": least, "max": most, "pairs": values})
    };
    json!({
        "backend": name,
        "expected": q.expected,
        "taken": q.taken,
        "exact": q.exact,
        "repaired": q.repaired,
        "partial": q.partial,
        "reasons": q.reasons,
        "lost": q.lost,
        "impossible_stacks": f.torn,
        "parts": f.parts,
        "truth_seconds": run.truth,
        "error": error,
        "noise_floor": floor,
        "slowdown_wall": longer(&run.wall),
        "slowdown_cpu": longer(&run.cpu),
        "stop_us": f.stopped.map(|(median, longest)| json!({"median": median, "max": longest})),
        "profiler_cpu": f.profiler_cpu,
        "problems": problems,
    })
}

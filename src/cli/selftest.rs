//! `selftest`: what sampling is worth here, on this kernel and this Python: a program that measures itself is sampled,
//! and what was seen is held against what it knows.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::args::{Backend, Selftest};
use super::summary::percent;
use super::table::{self, Cell, Color, Fit, Style, plain};
use crate::error::{Error, Result};
use crate::process::sys;

mod judge;
mod program;

use judge::{Findings, PARTS};
use program::{Program, Sampler, Window};

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

/// Tests all backends, or the one asked for; false if something is wrong.
///
/// # Errors
/// If there is no Python to test with, or it breaks down.
pub fn selftest(options: &Selftest) -> Result<bool> {
    let style = Style::of_stdout(options.color);
    let backends = match options.backend {
        Backend::Auto => vec!["ebpf", "ptrace"],
        Backend::Ebpf => vec!["ebpf"],
        Backend::Ptrace => vec!["ptrace"],
    };
    let mut program = Program::start(&options.python)?;
    let mut outcomes = Vec::new();
    for name in backends {
        let seconds = f64::from(options.pairs) * (2.0 * options.window + 0.5);
        super::say(&format!("testing {name}, some {:.0} s", seconds.ceil()));
        outcomes.push((name, run(&mut program, name, options)?));
    }
    let wrong: Vec<_> = outcomes.iter().map(|(_, outcome)| wrong(outcome)).collect();
    let ran = outcomes.iter().any(|(_, outcome)| matches!(outcome, Outcome::Ran(_)));
    let good = ran && wrong.iter().all(Vec::is_empty);
    let text = match options.json {
        true => {
            let backends = outcomes.iter().zip(&wrong);
            let backends: Value = backends
                .map(|((name, outcome), wrong)| json(name, outcome, wrong))
                .collect();
            let value = json!({
                "version": env!("CARGO_PKG_VERSION"),
                "kernel": kernel(),
                "python": program.version,
                "rate": options.rate,
                "good": good,
                "backends": backends,
            });
            format!("{value:#}\n")
        }
        false => screen(&program, options, &outcomes, &wrong, &style),
    };
    table::print(&text).map_err(|e| Error::io("cannot write the result", e).hint("make room"))?;
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
        let longer = |by: fn(&Window) -> f64| by(&on) / by(&off) - 1.0;
        run.wall.push(longer(|w| w.wall / w.rounds));
        run.cpu.push(longer(|w| w.cpu / w.rounds));
        for (name, seconds) in on.parts {
            *run.truth.entry(name).or_default() += seconds;
        }
    }
    Ok(Outcome::Ran(Box::new(run)))
}

impl Run {
    /// Total variation between the shares seen and those of the program's clock, and what a perfect sampler with so many
    /// samples would have on average. Both in 0 to 1.
    fn distance(&self) -> (f64, f64) {
        let seen: u64 = self.findings.parts.values().sum();
        let time: f64 = self.truth.values().sum();
        let (mut distance, mut floor) = (0.0, 0.0);
        for part in PARTS {
            let truth = self.truth.get(*part).copied().unwrap_or(0.0) / time.max(f64::MIN_POSITIVE);
            let share = self.findings.parts.get(*part).copied().unwrap_or(0) as f64 / seen.max(1) as f64;
            distance += (share - truth).abs() / 2.0;
            // The mean of the absolute value of a normal variable with this deviation.
            floor += (2.0 * truth * (1.0 - truth) / std::f64::consts::PI / seen.max(1) as f64).sqrt() / 2.0;
        }
        (distance, floor)
    }
}

/// What is not as it should be, a line each.
fn wrong(outcome: &Outcome) -> Vec<String> {
    let Outcome::Ran(run) = outcome else { return Vec::new() };
    let (f, q) = (&run.findings, &run.findings.quality);
    let mut wrong = Vec::new();
    let (distance, floor) = run.distance();
    if q.taken == 0 {
        return vec!["no sample was taken".into()];
    }
    if f.torn > 0 {
        wrong.push(format!("{} stacks cannot have been: {}", f.torn, f.example));
    }
    if q.exact + q.repaired + q.partial != q.taken || f.samples != q.taken {
        wrong.push(format!(
            "{} samples in the tree, {} taken: counts do not add up",
            f.samples, q.taken
        ));
    }
    if q.partial * 100 > q.taken {
        wrong.push("more than 1 % of the stacks are incomplete: nativeprof doctor may tell why".into());
    }
    if distance > 3.0 * floor + 0.01 {
        wrong.push(format!("shares are {:.1} % away from the truth", 100.0 * distance));
    }
    if f.without_native * 10 > f.in_power {
        wrong.push("native frames are missing above Python code that calls C".into());
    }
    // The tracer comes a moment after the tick, and on a busy machine too late for some.
    let excused = if f.held.is_some() { 2 } else { 50 };
    if (q.taken + q.asked / excused + 5) < q.asked {
        wrong.push(format!("only {} of {} samples were taken", q.taken, q.asked));
    }
    wrong
}

fn kernel() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
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

fn screen(
    program: &Program,
    options: &Selftest,
    outcomes: &[(&str, Outcome)],
    wrong: &[Vec<String>],
    style: &Style,
) -> String {
    let mut text = format!(
        "{}, CPython {} ({}), {} CPUs; {} Hz, {} pairs of windows of {} s with and without sampling\n\n",
        kernel(),
        program.version,
        program.path,
        sys::cpu_count(),
        options.rate,
        options.pairs,
        options.window
    );
    const ROWS: &[&str] = &[
        "samples",
        "lost",
        "exact",
        "repaired",
        "partial",
        "torn",
        "distance to the truth",
        "  of a perfect sampler",
        "slowdown (wall)",
        "slowdown (CPU)",
        "threads held",
        "own CPU",
        "verdict",
    ];
    let mut columns = vec![("", Fit::Word)];
    let mut rows: Vec<Vec<Cell>> = ROWS.iter().map(|row| vec![plain(*row)]).collect();
    for ((name, outcome), wrong) in outcomes.iter().zip(wrong) {
        columns.push((name, Fit::Word));
        let Outcome::Ran(run) = outcome else {
            for row in &mut rows {
                row.push(Cell {
                    text: "-".into(),
                    color: Color::Dim,
                });
            }
            if let Some(last) = rows.last_mut().and_then(|row| row.last_mut()) {
                *last = Cell {
                    text: "not here".into(),
                    color: Color::Yellow,
                };
            }
            continue;
        };
        let (f, q) = (&run.findings, &run.findings.quality);
        let (distance, floor) = run.distance();
        let held = match f.held {
            Some((median, longest)) => format!("median {median} us, longest {longest} us"),
            None => "never".into(),
        };
        let verdict = match wrong.is_empty() {
            true => Cell {
                text: "good".into(),
                color: Color::Green,
            },
            false => Cell {
                text: "WRONG".into(),
                color: Color::Red,
            },
        };
        let cells = [
            plain(format!("{} of {} asked", q.taken, q.asked)),
            plain(q.lost.to_string()),
            plain(format!("{} ({})", q.exact, percent(q.exact, q.taken))),
            plain(q.repaired.to_string()),
            plain(q.partial.to_string()),
            plain(f.torn.to_string()),
            plain(format!("{:.2} %", 100.0 * distance)),
            plain(format!("{:.2} %", 100.0 * floor)),
            plain(longer(&run.wall)),
            plain(longer(&run.cpu)),
            plain(held),
            plain(format!("{:.2} s, starts and names included", f.own_cpu)),
            verdict,
        ];
        for (row, cell) in rows.iter_mut().zip(cells) {
            row.push(cell);
        }
    }
    text += &table::draw(&columns, &rows, style);
    for ((name, outcome), wrong) in outcomes.iter().zip(wrong) {
        if let Outcome::Refused(why) = outcome {
            let _ = write!(text, "\n{name} cannot be used here: {why}\n");
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
        for line in wrong {
            let _ = write!(text, "\n{name} is WRONG: {line}\n");
        }
    }
    if outcomes
        .iter()
        .all(|(_, outcome)| matches!(outcome, Outcome::Refused(_)))
    {
        text += "\nnothing can be sampled here: `nativeprof doctor` tells what is lacking\n";
    }
    text
}

fn json(name: &str, outcome: &Outcome, wrong: &[String]) -> Value {
    let run = match outcome {
        Outcome::Refused(why) => return json!({"backend": name, "refused": why}),
        Outcome::Ran(run) => run,
    };
    let (f, q) = (&run.findings, &run.findings.quality);
    let (distance, floor) = run.distance();
    let longer = |values: &[f64]| {
        let (median, least, most) = spread(values);
        json!({"median": median, "least": least, "most": most, "pairs": values})
    };
    json!({
        "backend": name,
        "asked": q.asked,
        "taken": q.taken,
        "exact": q.exact,
        "repaired": q.repaired,
        "partial": q.partial,
        "reasons": q.reasons,
        "lost": q.lost,
        "torn": f.torn,
        "parts": f.parts,
        "truth_seconds": run.truth,
        "distance": distance,
        "floor": floor,
        "slowdown_wall": longer(&run.wall),
        "slowdown_cpu": longer(&run.cpu),
        "held_us": f.held.map(|(median, longest)| json!({"median": median, "longest": longest})),
        "own_cpu": f.own_cpu,
        "wrong": wrong,
    })
}

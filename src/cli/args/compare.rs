//! Arguments of `compare`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::diff::{DiffBy, limit};
use super::shared::{confidence, rate, seconds};
use super::{ColorWhen, Limit};

#[derive(Debug, Args)]
pub struct CompareCommand {
    /// Older command, in one string, as `sh -c` takes it: 'python3 old.py --size 10'
    #[arg(value_name = "COMMAND A")]
    pub before: String,
    /// Newer command
    #[arg(value_name = "COMMAND B")]
    pub after: String,
    /// Exit with code 3 if a function, or all time, grew significantly by more than PERCENT of all time of the older
    /// command, or by more than so many calls (`10 calls`); with code 4 if that is undecided. With 0, any growth that is
    /// seen before the time is over
    #[arg(long, value_name = "PERCENT|N calls", default_value = "5%", value_parser = limit)]
    pub fail_above: Limit,
    /// What to compare
    #[arg(long, value_enum, default_value_t = CompareValue::Cpu)]
    pub value: CompareValue,
    /// Begin no pair of runs that would end later than this after the start, such as 30s or 10m [default: 3m; no limit
    /// with --runs N]
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    pub max_time: Option<f64>,
    /// Runs of each command: exactly N, or from MIN on until the answer is known, at most MAX [default: 5..400; of calls: 2]
    #[arg(long, value_name = "N|MIN..[MAX]", value_parser = runs)]
    pub runs: Option<RunNumber>,
    /// Runs of each command before the first one that is compared
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warmup: u32,
    /// Command to run before each run, as `sh -c` takes it
    #[arg(long, value_name = "COMMAND")]
    pub prepare: Option<String>,
    /// Samples per second of CPU time, per thread
    #[arg(short, long, value_name = "HZ", default_value_t = 999, value_parser = rate)]
    pub rate: u64,
    /// Also sample child processes
    #[arg(long)]
    pub subprocesses: bool,
    /// Keep the runs in this directory, as a-001.json.gz, b-001.json.gz, ...; it is created
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Print what the commands print, to standard error
    #[arg(long)]
    pub show_output: bool,
    /// What each row represents
    #[arg(long, value_enum, default_value_t = DiffBy::Function)]
    pub by: DiffBy,
    /// Python frames only: C time counts as part of the calling Python function
    #[arg(long)]
    pub no_native: bool,
    /// Compare self instead of total samples (calls always do)
    #[arg(long = "self")]
    pub self_count: bool,
    /// Simultaneous confidence level of all intervals, at all looks at the runs together; at most 99.99
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = confidence_of_looks)]
    pub confidence: f64,
    /// Also show insignificant changes
    #[arg(long)]
    pub all: bool,
    /// Also test interpreter-internal functions, whose time varies between runs with the memory layout
    #[arg(long)]
    pub interpreter: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Print Markdown, as `diff --markdown` does
    #[arg(long, conflicts_with = "json")]
    pub markdown: bool,
    /// Also write the verdict to FILE, in JUnit's format
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
    /// Also print the verdict as annotations of GitHub Actions
    #[arg(long)]
    pub github: bool,
    /// When to use color; `auto`: on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = ColorWhen::Auto)]
    pub color: ColorWhen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompareValue {
    /// CPU time
    Cpu,
    /// Time of all threads, with waiting time
    Wall,
    /// Calls of Python functions, counted exactly, of `python3 SCRIPT`
    Calls,
}

/// How many runs of each command are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunNumber {
    /// At least 1.
    pub min: usize,
    pub max: usize,
}

impl RunNumber {
    /// As many as `diff` takes.
    pub const MAX: usize = 400;
}

/// `8`, `4..` or `4..40`.
fn runs(text: &str) -> Result<RunNumber, String> {
    let number = |text: &str| text.parse().ok().filter(|runs| (1..=RunNumber::MAX).contains(runs));
    let found = match text.split_once("..") {
        None => number(text).map(|runs| RunNumber { min: runs, max: runs }),
        Some((min, "")) => number(min).map(|min| RunNumber {
            min,
            max: RunNumber::MAX,
        }),
        Some((min, max)) => number(min).zip(number(max)).map(|(min, max)| RunNumber { min, max }),
    };
    found.filter(|runs| runs.min <= runs.max).ok_or_else(|| {
        format!(
            "give a number of runs from 1 to {}, or a range of them: 8, 5.., 5..40",
            RunNumber::MAX
        )
    })
}

/// Each look has a part of the error, and [`confidence`] a limit.
fn confidence_of_looks(text: &str) -> Result<f64, String> {
    match confidence(text) {
        Ok(percent) if percent <= 99.99 => Ok(percent),
        _ => Err("PERCENT must be a number from 50 to 99.99".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_runs() {
        let found = |text| runs(text).ok().map(|runs| (runs.min, runs.max));
        for (text, expected) in [
            ("8", Some((8, 8))),
            ("5..", Some((5, 400))),
            ("5..40", Some((5, 40))),
            ("5..5", Some((5, 5))),
            ("0", None),
            ("9..5", None),
            ("..5", None),
            ("401", None),
            ("", None),
            ("-1", None),
            ("5...7", None),
        ] {
            assert_eq!(found(text), expected, "{text}");
        }
    }
}

//! Arguments of `diff`.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::offered::values;
use super::shared::{
    BrowserArg, FrameArgs, HistoryArgs, LabelArgs, PageArgs, TimeRangeArgs, confidence, duration, percent,
};
use super::{ColorWhen, input_help};

#[derive(Debug, Args)]
pub struct DiffCommand {
    #[arg(
        value_name = "BEFORE",
        required_unless_present = "before_runs",
        help = input_help("Older profile: a tape, or a file")
    )]
    before: Option<PathBuf>,
    /// Newer profile
    #[arg(
        value_name = "AFTER",
        required_unless_present_any = ["against", "before_runs"],
        conflicts_with = "against"
    )]
    after: Option<PathBuf>,
    /// Row filters, applied in order, as in `report`
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    /// Runs of the older program, one file each, or directories of them; all other arguments are filters
    #[arg(long = "before", value_name = "FILE", num_args = 1.., requires = "after_runs", conflicts_with = "against")]
    before_runs: Vec<PathBuf>,
    /// Runs of the newer program
    #[arg(long = "after", value_name = "FILE", num_args = 1.., requires = "before_runs")]
    after_runs: Vec<PathBuf>,
    /// What each row represents
    #[arg(long, value_enum, default_value_t = DiffBy::Function, conflicts_with_all = ["output", "format"])]
    pub by: DiffBy,
    #[command(flatten)]
    pub range: TimeRangeArgs,
    #[command(flatten)]
    pub history: HistoryArgs,
    #[command(flatten)]
    pub labels: LabelArgs,
    /// Of a history: compare the selected time with the same one so much earlier: 24h
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub against: Option<u64>,
    #[command(flatten)]
    pub frames: FrameArgs,
    /// Python frames only: C time counts as part of the calling Python function
    #[arg(long)]
    pub no_native: bool,
    /// Compare self instead of total samples (flame graphs and calls always do)
    #[arg(long = "self")]
    pub self_count: bool,
    /// Value to compare, such as cpu, wall, await or calls [default: the time of traced calls and of recordings with waiting
    /// time, else samples or calls]
    #[arg(long, value_name = "VALUE", hide_possible_values = true, value_parser = values())]
    pub value: Option<String>,
    /// How to normalize the profiles [default: time for traced times, else share; calls are numbers]
    #[arg(long, value_enum)]
    pub normalize: Option<Normalize>,
    /// Judge times and rates of different machines, or Pythons, too: other CPUs, kernels, governors, versions, builds
    #[arg(long)]
    pub any_machine: bool,
    /// Simultaneous confidence level of all intervals
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = confidence)]
    pub confidence: f64,
    /// Also show insignificant changes
    #[arg(long)]
    pub all: bool,
    /// Also test interpreter-internal functions, whose time varies between runs with the memory layout
    #[arg(long)]
    pub interpreter: bool,
    /// Exit with code 3 if a function, or all time, grew significantly by more than PERCENT of all samples (with --normalize
    /// rate or time, and of calls: of the older side's; with --by label: of the label's own), or by more than so many calls
    /// (`10 calls`); with code 4 if that is undecided. One run of each side decides about calls only
    #[arg(long, value_name = "PERCENT|N calls", value_parser = limit, allow_negative_numbers = true)]
    pub fail_above: Option<Limit>,
    /// Let --fail-above decide by one recording of each side, whose difference may be that of any two runs
    #[arg(long, requires = "fail_above", conflicts_with = "before_runs")]
    pub single_run: bool,
    /// Write a differential flame graph to FILE, to a file in that directory, or to standard output (`-`)
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["filters", "all"])]
    pub output: Option<PathBuf>,
    /// Format of the differential flame graph [default: from the file extension]
    #[arg(short, long, value_enum, value_name = "FORMAT", conflicts_with_all = ["filters", "all"])]
    pub format: Option<DiffFormat>,
    /// Leave the text of source files out of the HTML report
    #[arg(long)]
    pub no_source: bool,
    #[command(flatten)]
    pub browser: BrowserArg,
    /// Print JSON
    #[arg(long, conflicts_with_all = ["output", "format"])]
    pub json: bool,
    /// Print Markdown for a comment or the summary of a job, below GitHub's 65,536 characters: the verdict, 20 rows, the others
    /// folded
    #[arg(long, conflicts_with_all = ["output", "format", "json"])]
    pub markdown: bool,
    /// Also write the verdict of --fail-above to FILE, in JUnit's format: a test case for each row
    #[arg(long, value_name = "FILE", requires = "fail_above")]
    pub junit: Option<PathBuf>,
    /// Also print the verdict of --fail-above to standard error as annotations of GitHub Actions, at file and line
    #[arg(long, requires = "fail_above")]
    pub github: bool,
    #[command(flatten)]
    pub page: PageArgs,
    /// When to use color; `auto`: on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = ColorWhen::Auto)]
    pub color: ColorWhen,
}

impl DiffCommand {
    /// What was given for the older and for the newer side: a file or directory each, or runs. With `--against`, both
    /// sides are in one directory.
    pub fn paths(&self) -> [Vec<&Path>; 2] {
        if self.has_runs() {
            return [&self.before_runs, &self.after_runs].map(|runs| runs.iter().map(PathBuf::as_path).collect());
        }
        let after = self.after.as_ref().or(self.before.as_ref());
        [self.before.as_ref(), after].map(|path| path.into_iter().map(PathBuf::as_path).collect())
    }

    /// Whether runs are given with `--before` and `--after`.
    pub fn has_runs(&self) -> bool {
        !self.before_runs.is_empty()
    }

    /// Filters of rows: where runs are given with options, all other arguments.
    pub fn filters(&self) -> Vec<String> {
        let paths = [&self.before, &self.after].into_iter().flatten();
        let words = paths
            .filter(|_| self.has_runs())
            .map(|path| path.to_string_lossy().into_owned());
        words.chain(self.filters.iter().cloned()).collect()
    }
}

/// How much growth `--fail-above` allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    Percent(f64),
    Calls(u64),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Percent(percent) => write!(f, "{percent} %"),
            Limit::Calls(calls) => write!(f, "{calls} calls"),
        }
    }
}

/// A limit for growth: a number of percent, or `10 calls`.
pub(super) fn limit(text: &str) -> Result<Limit, String> {
    match text.trim().strip_suffix("calls").or(text.trim().strip_suffix("call")) {
        Some(number) => match number.trim().parse() {
            Ok(number) => Ok(Limit::Calls(number)),
            Err(_) => Err("a number of calls is a whole number, 0 or above: `10 calls`".into()),
        },
        None => percent(text).map(Limit::Percent),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiffBy {
    Function,
    /// Program, library or Python file
    Module,
    /// Span, or label of another key, with all samples that have it
    Label,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Normalize {
    /// Fraction of all samples, or of what else is compared: for recordings of any length
    Share,
    /// Time per second: for servers under the same load
    Rate,
    /// Time: for two runs of the same work, from start to end
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiffFormat {
    Svg,
    Html,
}

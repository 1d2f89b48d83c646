//! Arguments of `diff`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::shared::{BrowserArg, FrameArgs, HistoryArgs, PageArgs, TimeRangeArgs, confidence, duration, limit, values};
use super::{ColorWhen, input_help};

#[derive(Debug, Args)]
pub struct DiffCommand {
    #[arg(value_name = "BEFORE", help = input_help("Older profile: a tape, or a file"))]
    pub before: PathBuf,
    /// Newer profile
    #[arg(
        value_name = "AFTER",
        required_unless_present = "against",
        conflicts_with = "against"
    )]
    pub after: Option<PathBuf>,
    /// Row filters, applied in order, as in `report`
    #[arg(value_name = "FILTER")]
    pub filters: Vec<String>,
    /// What each row represents
    #[arg(long, value_enum, default_value_t = DiffBy::Function, conflicts_with_all = ["output", "format"])]
    pub by: DiffBy,
    #[command(flatten)]
    pub range: TimeRangeArgs,
    #[command(flatten)]
    pub history: HistoryArgs,
    /// Of a history: compare the selected time with the same one so much earlier: 24h
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub against: Option<u64>,
    #[command(flatten)]
    pub frames: FrameArgs,
    /// Python frames only: C time counts as part of the calling Python function
    #[arg(long)]
    pub no_native: bool,
    /// Compare self instead of total samples (flame graphs always do)
    #[arg(long = "self")]
    pub self_count: bool,
    /// Value to compare, such as cpu, wall, await or calls [default: the time of traced calls and of recordings with waiting
    /// time, else samples or calls]
    #[arg(long, value_name = "VALUE", hide_possible_values = true, value_parser = values())]
    pub value: Option<String>,
    /// How to normalize the profiles [default: time for traced calls, else share]
    #[arg(long, value_enum)]
    pub normalize: Option<Normalize>,
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
    /// rate or time: of the older profile's time), with code 4 if the profiles are too short to decide
    #[arg(long, value_name = "PERCENT", value_parser = limit, allow_negative_numbers = true)]
    pub fail_above: Option<f64>,
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
    #[command(flatten)]
    pub page: PageArgs,
    /// When to use color; `auto`: on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = ColorWhen::Auto)]
    pub color: ColorWhen,
}

impl DiffCommand {
    /// The older and the newer profile. With `--against`, both are in one directory.
    pub fn paths(&self) -> [&Path; 2] {
        [&self.before, self.after.as_ref().unwrap_or(&self.before)]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiffBy {
    Function,
    /// Program, library or Python file
    Module,
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

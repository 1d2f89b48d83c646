//! Arguments of `heap`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::shared::{TargetArg, seconds};

#[derive(Debug, Args)]
pub struct HeapCommand {
    #[command(flatten)]
    pub target: TargetArg,
    /// CPU time to read Python's heap, in seconds or such as 300ms; amounts have intervals if that is not enough for all of it
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3, value_parser = seconds, conflicts_with = "all")]
    pub budget: f64,
    /// Read everything, however long it takes
    #[arg(long)]
    pub all: bool,
    /// Search all of Python's pools for the owners of large blocks: about a second for 3 GB
    #[arg(long, conflicts_with = "all")]
    pub owners: bool,
    /// Also print some objects of a type, drawn at random: simple values, as `dump --locals` shows them
    #[arg(long, value_name = "TYPE")]
    pub sample: Option<String>,
    /// Repeat this often, such as 60 or 5m, until the process exits or Ctrl-C; as JSON, each time is a line
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub every: Option<f64>,
    /// Output format [default: by the extension of the output, else text]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub format: Option<HeapFormat>,
    /// Output file, or `-` for standard output [default: standard output]
    #[arg(short, long, value_name = "FILE", conflicts_with = "every")]
    pub output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeapFormat {
    Text,
    Json,
    /// A page with a map of the memory
    Html,
}

//! Arguments of `heap`.

use clap::{Args, ValueEnum};

use super::shared::{TargetArg, seconds};

#[derive(Debug, Args)]
pub struct HeapCommand {
    #[command(flatten)]
    pub target: TargetArg,
    /// Time to read Python's heap, in seconds or such as 300ms; as long again for the C heap. What is not read is estimated
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3, value_parser = seconds, conflicts_with = "all")]
    pub budget: f64,
    /// Read everything, however long it takes
    #[arg(long)]
    pub all: bool,
    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = HeapFormat::Text)]
    pub format: HeapFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeapFormat {
    Text,
    Json,
}

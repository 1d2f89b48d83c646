//! Arguments of `heap`.

use clap::{Args, ValueEnum};

use super::shared::TargetArg;

#[derive(Debug, Args)]
pub struct HeapCommand {
    #[command(flatten)]
    pub target: TargetArg,
    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = HeapFormat::Text)]
    pub format: HeapFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HeapFormat {
    Text,
    Json,
}

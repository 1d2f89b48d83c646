//! Arguments of `mcp`.

use std::path::PathBuf;

use clap::Args;

use super::pid;

#[derive(Debug, Args)]
pub struct McpCommand {
    /// Directory whose profiles and source files may be read; recordings are written to .nativeprof in it
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub root: PathBuf,
    /// Another user's process that may be sampled, besides the processes of this user
    #[arg(long, value_name = "PID", value_parser = pid)]
    pub allow_pid: Vec<u32>,
    /// Commands that may be run: words in which * stands for any text; a last word * allows any further arguments
    #[arg(long, value_name = "PATTERN")]
    pub allow_run: Vec<String>,
}

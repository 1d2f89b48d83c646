//! Words that several commands share.

use clap::{Args, ValueEnum};

use super::pid;

/// A process, told in either way.
#[derive(Debug, Args)]
pub struct Whom {
    /// Process to look at
    #[arg(value_name = "PID", value_parser = pid, required_unless_present = "pid_option")]
    pid: Option<u32>,
    /// The same
    #[arg(short, long = "pid", value_name = "PID", value_parser = pid, id = "pid_option", conflicts_with = "pid")]
    pid_option: Option<u32>,
}

impl Whom {
    pub fn pid(&self) -> u32 {
        self.pid.or(self.pid_option).expect("clap asks for one")
    }
}

/// Where names may come from.
#[derive(Debug, Args)]
pub struct Names {
    /// Ask the servers of DEBUGINFOD_URLS for debug information that is not here: on, off, auto (on, but not as root)
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        hide_possible_values = true,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = Debuginfod::Auto,
        default_missing_value = "on"
    )]
    pub debuginfod: Debuginfod,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Debuginfod {
    On,
    Off,
    Auto,
}

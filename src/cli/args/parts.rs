//! Words that several commands share.

use clap::{Args, ValueEnum};

use super::{Backend, pid};
use crate::capture::{self, CLOCKS, Clock, MODES, Mode};

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

/// How samples are taken, and which frames of them are kept.
#[derive(Debug, Args)]
pub struct Sampling {
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// What makes a sample due: auto, cpu-clock, cycles, page-faults, context-switches
    #[arg(long, value_name = "EVENT", default_value = "auto", value_parser = clock)]
    event: Clock,
    /// Which part of a thread's time to sample: cpu (while it runs), off-cpu (while it waits), wall (all of it)
    #[arg(long, value_name = "MODE", default_value = "cpu", value_parser = mode)]
    pub mode: Mode,
    /// Python frames only
    #[arg(long)]
    pub no_native: bool,
    /// Kernel frames too
    #[arg(long)]
    pub kernel: bool,
}

impl Sampling {
    /// The sampling period, ns, where samples represent times of different lengths.
    pub fn weighted(&self, rate: u64) -> Option<u64> {
        (self.mode != Mode::Cpu).then(|| 1_000_000_000 / rate.max(1))
    }

    /// What a source is made for; `rate` in samples per second, `children`: those of the process too.
    pub fn capture(&self, rate: u64, children: bool) -> capture::Options {
        capture::Options {
            rate,
            event: self.event,
            kernel: self.kernel,
            mode: self.mode,
            children,
        }
    }
}

fn mode(text: &str) -> Result<Mode, String> {
    let names: Vec<_> = MODES.iter().map(|(name, _)| *name).collect();
    let found = MODES.iter().find(|(name, _)| *name == text).map(|(_, mode)| *mode);
    found.ok_or_else(|| format!("known modes: {}", names.join(", ")))
}

fn clock(text: &str) -> Result<Clock, String> {
    let names: Vec<_> = CLOCKS.iter().map(|(name, _)| *name).collect();
    let found = CLOCKS.iter().find(|(name, _)| *name == text).map(|(_, clock)| *clock);
    found.ok_or_else(|| format!("known events: {}", names.join(", ")))
}

/// How formats that show one thing show a profile.
#[derive(Debug, Default, Args)]
pub struct Shown {
    /// What svg, collapsed and firefox show of a profile that measures several things: cpu, wall, alloc_bytes, ...
    #[arg(long, value_name = "VALUE")]
    pub value: Option<String>,
    /// A frame for each line of a function (svg, collapsed; the other formats have lines as they are)
    #[arg(long)]
    pub lines: bool,
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

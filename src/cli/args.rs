//! What was typed. Nothing below `cli` sees clap.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::capture::{CLOCKS, Clock};
use crate::export::FORMATS;

/// Sampling profiler that shows one stack: Python frames, the C, C++ and Rust they call, and the kernel.
#[derive(Debug, Parser)]
#[command(name = "nativeprof", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Sample a command from its start, or a running process, into a file
    #[command(after_help = "Examples:\n  nativeprof record -o out.svg -- python3 script.py\n  \
                            sudo nativeprof record --pid 1234 -d 10 -o out.json")]
    Record(Record),
    /// Sample a running process into a file (the same as `record --pid PID`)
    #[command(after_help = "Example:\n  sudo nativeprof attach 1234 -d 10 -o out.svg")]
    Attach(Attach),
    /// Make the profile of a tape that `record --save-tape` kept; needs no rights and nothing of the machine it is from
    #[command(after_help = "Example:\n  nativeprof replay bug.tape -o out.svg")]
    Replay(Replay),
    /// Write a saved profile in another format
    #[command(after_help = export_help())]
    Export(Export),
    /// Put saved profiles together: of several processes, runs or machines
    #[command(after_help = "Example:\n  nativeprof merge worker-*.json.gz -o all.json.gz")]
    Merge(Merge),
    /// Tell what this user may do here, what is lacking and what mends it; of a process, what was found in it
    #[command(
        after_help = "Ends with code 0 if sampling would work, else 1.\n\nExamples:\n  nativeprof doctor\n  \
                            sudo nativeprof doctor 1234"
    )]
    Doctor(Doctor),
}

#[derive(Debug, Args)]
pub struct Record {
    /// Process to sample
    #[arg(short, long, value_name = "PID", value_parser = pid, conflicts_with = "command")]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub common: Common,
    /// Command to run and sample, with its arguments
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present = "pid"
    )]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Attach {
    /// Process to sample
    #[arg(value_name = "PID", value_parser = pid)]
    pub pid: u32,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Process to look at
    #[arg(value_name = "PID", value_parser = pid)]
    pub pid: Option<u32>,
    /// For programs
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Replay {
    /// The tape
    #[arg(value_name = "TAPE")]
    pub tape: PathBuf,
    /// Where to write; `-` is standard output [default: nativeprof-PID.svg]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[arg(short, long, value_name = "NAME", help = format_help())]
    pub format: Option<String>,
    /// Python frames only
    #[arg(long)]
    pub no_native: bool,
    /// A node for each process
    #[arg(long)]
    pub subprocesses: bool,
    /// A node for each thread
    #[arg(long)]
    pub threads: bool,
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

#[derive(Debug, Args)]
pub struct Export {
    /// The profile: json or json.gz, of nativeprof or Dask, or a tape; `-` is standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Where to write; `-` is standard output [default: name of FILE with another ending]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[arg(short, long, value_name = "NAME", help = format_help())]
    pub format: Option<String>,
}

#[derive(Debug, Args)]
pub struct Merge {
    /// The profiles: json or json.gz, of nativeprof or Dask, or tapes; `-` is standard input
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Where to write; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    #[arg(short, long, value_name = "NAME", help = format_help())]
    pub format: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The best one that is permitted here
    Auto,
    /// perf events and a BPF program; the target is never stopped
    Ebpf,
    /// Holds one thread at a time for tens of microseconds; needs no rights but those over the target
    Ptrace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Debuginfod {
    On,
    Off,
    Auto,
}

#[derive(Debug, Args)]
pub struct Common {
    /// Samples per second of each thread's CPU time
    #[arg(short, long, value_name = "HZ", default_value_t = 99, value_parser = clap::value_parser!(u64).range(1..))]
    pub rate: u64,
    /// Stop after this many seconds
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<f64>,
    /// Where to write; `-` is standard output [default: nativeprof-PID.svg]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[arg(short, long, value_name = "NAME", help = format_help())]
    pub format: Option<String>,
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// What makes a sample due: auto, cpu-clock, cycles, page-faults, context-switches
    #[arg(long, value_name = "EVENT", default_value = "auto", value_parser = clock)]
    pub event: Clock,
    /// Python frames only
    #[arg(long)]
    pub no_native: bool,
    /// Kernel frames too
    #[arg(long)]
    pub kernel: bool,
    /// Child processes too
    #[arg(long)]
    pub subprocesses: bool,
    /// A node for each thread
    #[arg(long)]
    pub threads: bool,
    /// Under sudo: stay root, for the command and the files that are written [default: become the user who ran sudo]
    #[arg(long)]
    pub as_root: bool,
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
    /// Also keep what was captured, for a bug report: the stacks' raw bytes and parts of the program's files (see `replay`)
    #[arg(long, value_name = "FILE")]
    pub save_tape: Option<PathBuf>,
    /// Samples that a tape keeps, the first ones
    #[arg(long, value_name = "N", default_value_t = 1000, requires = "save_tape")]
    pub tape_samples: u64,
}

fn format_help() -> String {
    let names: Vec<_> = FORMATS.iter().map(|format| format.name).collect();
    format!("Format, else by the ending of FILE: {}", names.join(", "))
}

fn export_help() -> String {
    let mut text = String::from("Formats:\n");
    for format in FORMATS {
        let endings = format.extensions.join(" ");
        text += &format!("  {:<11} {} ({endings})\n", format.name, format.help);
    }
    text + "\nExamples:\n  nativeprof export out.json -o out.svg\n  nativeprof export out.json.gz -f collapsed -o - | less"
}

fn pid(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| "a process is told by its number; `pgrep -af NAME` lists numbers".into())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 1e9 => Ok(s),
        _ => Err("seconds must be a number above 0".into()),
    }
}

fn clock(text: &str) -> Result<Clock, String> {
    let names: Vec<_> = CLOCKS.iter().map(|(name, _)| *name).collect();
    let found = CLOCKS.iter().find(|(name, _)| *name == text).map(|(_, clock)| *clock);
    found.ok_or_else(|| format!("known events: {}", names.join(", ")))
}

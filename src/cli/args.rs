//! What was typed. Nothing below `cli` sees clap.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::export::FORMATS;

mod parts;

pub use parts::{Debuginfod, Names, Sampling, Shown, Whom};

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
    /// Show once what each thread of a process is doing: merged stacks, state, the holder of the GIL
    #[command(
        after_help = "Threads that sleep are left alone; one that runs is held for some tens of microseconds.\n\n\
                            Examples:\n  sudo nativeprof dump 1234\n  sudo nativeprof dump 1234 --locals --kernel"
    )]
    Dump(Dump),
    /// Watch a process: functions and stacks of the last seconds
    #[command(after_help = "Example:\n  sudo nativeprof top 1234\n\nThe key ? lists all keys.")]
    Top(Top),
    /// Make the profile of a tape that `record --save-tape` kept; needs no rights and nothing of the machine it is from
    #[command(after_help = "Example:\n  nativeprof replay bug.tape -o out.svg")]
    Replay(Replay),
    /// Show the tables of a saved profile: functions, lines, modules, threads; callers and callees; the call tree
    #[command(after_help = "Examples:\n  nativeprof report out.json\n  \
                            nativeprof report out.json numpy 20\n  \
                            nativeprof report out.json --callers memcpy\n  \
                            nativeprof report out.json --tree 5%")]
    Report(Report),
    /// Tell what changed from one profile to another, and what noise accounts for
    #[command(
        after_help = "Ends with code 3 if --fail-above finds something, else 0.\n\nExamples:\n  \
                            nativeprof diff before.json after.json\n  \
                            nativeprof diff before.json after.json -o diff.svg\n  \
                            nativeprof diff --normalize time --fail-above 2 before.json after.json"
    )]
    Diff(Diff),
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
    /// Sample a program that knows its own truth, and tell how right and how costly sampling is here
    #[command(
        after_help = "Ends with code 1 if something is wrong.\n\nExamples:\n  sudo nativeprof selftest\n  \
                            nativeprof selftest --backend ptrace --python /opt/python/bin/python3"
    )]
    Selftest(Selftest),
    /// Print what makes a shell complete our words
    #[command(
        after_help = "Examples:\n  nativeprof completions bash > ~/.local/share/bash-completion/completions/nativeprof\n  \
                            nativeprof completions zsh > ~/.zfunc/_nativeprof\n  \
                            nativeprof completions fish > ~/.config/fish/completions/nativeprof.fish"
    )]
    Completions(Completions),
    /// Print the manual page, or write those of all commands into a folder
    #[command(after_help = "Examples:\n  nativeprof man | man -l -\n  \
                            nativeprof man ~/.local/share/man/man1")]
    Man(Man),
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
pub struct Dump {
    #[command(flatten)]
    pub whom: Whom,
    /// Local variables of Python frames too, as far as their values are simple
    #[arg(long)]
    pub locals: bool,
    /// Functions of the kernel too, for threads that sleep in it
    #[arg(long)]
    pub kernel: bool,
    /// Python frames only
    #[arg(long)]
    pub no_native: bool,
    /// For programs
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub names: Names,
}

#[derive(Debug, Args)]
pub struct Top {
    #[command(flatten)]
    pub whom: Whom,
    /// Samples per second of each thread's CPU time
    #[arg(short, long, value_name = "HZ", default_value_t = 99, value_parser = clap::value_parser!(u64).range(1..))]
    pub rate: u64,
    #[command(flatten)]
    pub sampling: Sampling,
    #[command(flatten)]
    pub names: Names,
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
    #[command(flatten)]
    pub shown: Shown,
    #[command(flatten)]
    pub names: Names,
}

#[derive(Debug, Args)]
pub struct Report {
    /// The profile: json or json.gz, of nativeprof or Dask, or a tape; `-` is standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What to show of the rows, one after the other: `20` (the first ones), `0.1` or `10%` (the first part; of a tree,
    /// nodes with so many of the samples), else a regular expression that `NAME (PLACE)` must match
    #[arg(value_name = "RESTRICTION")]
    pub restrictions: Vec<String>,
    /// What a row stands for
    #[arg(long, value_enum, default_value_t = By::Function)]
    pub by: By,
    /// Order of the rows
    #[arg(long, value_enum, default_value_t = Sort::Own)]
    pub sort: Sort,
    /// Who calls the function (its name, or a regular expression)
    #[arg(long, value_name = "FUNCTION", conflicts_with_all = ["callees", "tree", "by"])]
    pub callers: Option<String>,
    /// Whom the function calls (its name, or a regular expression)
    #[arg(long, value_name = "FUNCTION", conflicts_with_all = ["tree", "by"])]
    pub callees: Option<String>,
    /// The tree of calls, largest branch first
    #[arg(long, conflicts_with = "by")]
    pub tree: bool,
    /// What to count, of a profile that measures several things: cpu, wall, alloc_bytes, ... [default: samples or calls]
    #[arg(long, value_name = "VALUE")]
    pub value: Option<String>,
    /// For programs
    #[arg(long)]
    pub json: bool,
    /// Colours; by itself on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = When::Auto)]
    pub color: When,
}

#[derive(Debug, Args)]
pub struct Diff {
    /// The older profile; json or json.gz, of nativeprof or Dask, or a tape; `-` is standard input
    #[arg(value_name = "BEFORE")]
    pub before: PathBuf,
    /// The newer profile
    #[arg(value_name = "AFTER")]
    pub after: PathBuf,
    /// What to show of the rows, one after the other, as for `report`
    #[arg(value_name = "RESTRICTION")]
    pub restrictions: Vec<String>,
    /// What a row stands for
    #[arg(long, value_enum, default_value_t = DiffBy::Function, conflicts_with_all = ["output", "format"])]
    pub by: DiffBy,
    /// Compare self instead of total samples (pictures always do)
    #[arg(long = "self")]
    pub own: bool,
    /// What to compare, of profiles that measure several things: cpu, wall, alloc_bytes, ... [default: samples or calls]
    #[arg(long, value_name = "VALUE")]
    pub value: Option<String>,
    /// What makes the profiles comparable
    #[arg(long, value_enum, default_value_t = Normalize::Share)]
    pub normalize: Normalize,
    /// Confidence of all intervals together
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, value_parser = confidence)]
    pub confidence: f64,
    /// Show rows whose change noise accounts for, too
    #[arg(long)]
    pub all: bool,
    /// Judge functions inside the interpreter too: their time changes from run to run with where code and data lie in
    /// memory
    #[arg(long)]
    pub interpreter: bool,
    /// End with code 3 if something grew, beyond noise, by more than PERCENT of all that the older profile has
    #[arg(long, value_name = "PERCENT", value_parser = limit)]
    pub fail_above: Option<f64>,
    /// Where to write a differential flame graph; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Draw a differential flame graph, else by the ending of FILE
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub format: Option<Picture>,
    /// For programs
    #[arg(long, conflicts_with_all = ["output", "format"])]
    pub json: bool,
    /// Colours; by itself on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = When::Auto)]
    pub color: When,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiffBy {
    Function,
    /// A program or library, a Python file
    Module,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Normalize {
    /// Parts of all samples: for recordings of any length
    Share,
    /// CPU time per second: for servers under the same load
    Rate,
    /// CPU time: for two runs of the same work, from start to end
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Picture {
    Svg,
    Html,
}

#[derive(Debug, Args)]
pub struct Selftest {
    /// The Python to sample, CPython 3.6 or newer
    #[arg(long, value_name = "PATH", default_value = "python3")]
    pub python: PathBuf,
    /// Test this backend alone; auto: all of them
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// Samples per second of CPU time
    #[arg(short, long, value_name = "HZ", default_value_t = 999, value_parser = clap::value_parser!(u64).range(1..))]
    pub rate: u64,
    /// How often to work with and without sampling
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// How long each time
    #[arg(long, value_name = "SECONDS", default_value_t = 0.75, value_parser = seconds)]
    pub window: f64,
    /// For programs
    #[arg(long)]
    pub json: bool,
    /// Colours; by itself on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = When::Auto)]
    pub color: When,
}

#[derive(Debug, Args)]
pub struct Completions {
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// Folder for a page of each command [default: the main page on standard output]
    #[arg(value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    Function,
    Line,
    /// A program or library, a Python file
    Module,
    Thread,
    Process,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Samples that ended there
    #[value(name = "self")]
    Own,
    /// Samples that it was part of
    Total,
    Name,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum When {
    Auto,
    Always,
    Never,
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
    #[command(flatten)]
    pub shown: Shown,
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
    #[command(flatten)]
    pub shown: Shown,
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
    #[command(flatten)]
    pub sampling: Sampling,
    /// Child processes too
    #[arg(long)]
    pub subprocesses: bool,
    /// A node for each thread
    #[arg(long)]
    pub threads: bool,
    /// Under sudo: stay root, for the command and the files that are written [default: become the user who ran sudo]
    #[arg(long)]
    pub as_root: bool,
    #[command(flatten)]
    pub shown: Shown,
    #[command(flatten)]
    pub names: Names,
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

fn confidence(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if (50.0..=99.9999).contains(&percent) => Ok(percent),
        _ => Err("confidence must be a number from 50 to 99.9999".into()),
    }
}

fn limit(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if percent.is_finite() && percent >= 0.0 => Ok(percent),
        _ => Err("a limit must be a number, 0 or above".into()),
    }
}

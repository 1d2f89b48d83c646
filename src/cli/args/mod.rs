//! The command line as clap parses it. No module outside `cli` uses clap.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::export::FORMATS;
use crate::profile::import::READERS;

mod compare;
mod diff;
mod heap;
mod host;
mod mcp;
mod offered;
mod push;
mod shared;

pub use compare::{CompareCommand, CompareValue, RunNumber};
pub use diff::{DiffBy, DiffCommand, DiffFormat, Limit, Normalize};
pub use heap::{HeapCommand, HeapFormat};
pub use host::{Host, HostFilterArgs, LogFormatArg};
pub use mcp::McpCommand;
use offered::{formats, values, wait_kinds};
pub use push::{CredentialArgs, PushCommand};
pub use shared::{
    Browse, DEFAULT_RATE, DebuginfodArg, FrameArgs, HistoryArgs, HistoryProcesses, LabelArgs, PageArgs, ProcessRef,
    ResidentAt, Sampling, SymbolArgs, TargetArg, TaskArgs, TimePoint, TimeRangeArgs, ViewArgs,
};
use shared::{rate, seconds};

/// Sampling profiler for Linux: one interleaved stack of Python, native and kernel frames.
#[derive(Debug, Parser)]
#[command(name = "nativeprof", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Record a profile of a command or of a running process to a file
    #[command(after_help = "Examples:\n  nativeprof record -o out.svg -- python3 script.py\n  \
                            sudo nativeprof record --pid 1234 -d 10 -o out.json\n\n\
                            Exit code: that of COMMAND; 125 if nativeprof fails, 126 if COMMAND cannot be executed, 127 if it is not found. With --pid: 0; 1 on failure, 2 for wrong arguments.")]
    Record(RecordCommand),
    /// Record a profile of a running process to a file (same as `record --pid PID`)
    #[command(after_help = "Examples:\n  sudo nativeprof attach 1234 -d 10 -o out.svg\n  \
                            sudo nativeprof attach server.py -d 1m -o out.html\n\n\
                            Exit code: 0; 1 on failure, 2 for wrong arguments.")]
    Attach(Attach),
    /// Print every thread's current stack, state and the GIL holder
    #[command(
        after_help = "Sleeping threads are read in place. Running threads are stopped one at a time, typically for 45 to 100 µs each (not with --tasks).\n\n\
                            Examples:\n  sudo nativeprof dump 1234\n  sudo nativeprof dump 1234 --locals --kernel\n  \
                            sudo nativeprof dump 1234 --tasks"
    )]
    Dump(Dump),
    /// Print what the memory of a running process is made of: Python's objects by type, the C heap, files, stacks
    #[command(after_help = "The process is neither stopped nor changed.\n\n\
                            Examples:\n  sudo nativeprof heap 1234\n  sudo nativeprof heap server.py -o heap.html")]
    Heap(HeapCommand),
    /// Show the hottest functions of a process, live
    #[command(
        after_help = "Examples:\n  sudo nativeprof top 1234\n  nativeprof top -- python3 script.py\n\nPress ? for help."
    )]
    Top(Top),
    /// Record all processes of this host for months, as a directory of segments that `report`, `diff` and `export` read
    #[command(
        after_help = "Examples:\n  sudo nativeprof host --dir /var/lib/nativeprof --max-cpu 1%\n  \
                            sudo nativeprof host --dir /var/lib/nativeprof --cgroup system.slice/web.service\n  \
                            nativeprof report /var/lib/nativeprof --last 10m\n\n\
                            SIGTERM and Ctrl-C end it with the current segment written."
    )]
    Host(Host),
    /// Build a profile from a tape (a replayable recording made with `record --save-tape`); needs neither
    /// privileges nor the original machine
    #[command(after_help = "Example:\n  nativeprof replay bug.tape -o out.svg")]
    Replay(Replay),
    /// Print tables of a saved profile: functions, lines, modules, threads, callers and callees, the call tree
    #[command(after_help = "Examples:\n  nativeprof report out.json\n  \
                            nativeprof report out.json numpy 20\n  \
                            nativeprof report out.json --callers memcpy\n  \
                            nativeprof report out.json --tree 5%")]
    Report(ReportCommand),
    /// Show statistically significant differences between two profiles, or several runs of each side
    #[command(
        after_help = "Exit code: 0; 1 or 2 on errors; 3 if --fail-above finds growth, 4 if that is undecided.\n\nExamples:\n  \
                            nativeprof diff before.json after.json\n  \
                            nativeprof diff before.json after.json -o diff.svg\n  \
                            nativeprof diff --normalize time --fail-above 5 --before before --after after"
    )]
    Diff(DiffCommand),
    /// Run two commands by turns, record each run, and show what changed, until it is known whether B takes longer than A
    #[command(
        after_help = "Exit code: 0 if nothing grew by more than --fail-above; 1 or 2 on errors; 3 if something did, 4 if that is undecided.\n\nExamples:\n  \
                            nativeprof compare 'python3 old.py' 'python3 new.py'\n  \
                            nativeprof compare --fail-above 2% --max-time 10m -o runs './before' './after'"
    )]
    Compare(CompareCommand),
    /// Convert a saved profile to another format
    #[command(after_help = export_help())]
    Export(Export),
    /// Merge saved profiles of several processes, runs or machines
    #[command(after_help = "Example:\n  nativeprof merge worker-*.json.gz -o all.json.gz")]
    Merge(Merge),
    /// Send the history of a host to OpenTelemetry receivers or Pyroscope
    #[command(
        after_help = "What was accepted is remembered in the directory. Runs until SIGTERM or Ctrl-C.\n\n\
                            Exit code: 0; 1 on failure, and with --once if something was refused, dropped or damaged; 2 for wrong arguments.\n\n\
                            Examples:\n  nativeprof push /var/lib/nativeprof --to http://localhost:4318\n  \
                            nativeprof push /var/lib/nativeprof --to pyroscope+http://localhost:4040 --once"
    )]
    Push(PushCommand),
    /// Answer a language model's client over standard input and output (Model Context Protocol)
    #[command(
        after_help = "What the model may do is decided here: it reads profiles below the root directory, and samples processes of this user.\n\n\
                            Examples:\n  nativeprof mcp --root /srv/app --allow-run 'pytest *'\n  \
                            claude mcp add nativeprof -- nativeprof mcp --root /srv/app"
    )]
    Mcp(McpCommand),
    /// Check permissions and kernel support, and print how to fix what is missing; with a process, check that too
    #[command(
        after_help = "Exit code: 0 if sampling works, with --host if `nativeprof host` works; else 1.\n\nExamples:\n  \
                            nativeprof doctor\n  sudo nativeprof doctor 1234\n  sudo nativeprof doctor server.py\n  \
                            sudo nativeprof doctor --host --dir /var/lib/nativeprof"
    )]
    Doctor(Doctor),
    /// Measure accuracy and overhead on this machine against a calibrated workload
    #[command(
        after_help = "Exit code: 0; 1 if a backend fails the test or none is available.\n\nExamples:\n  sudo nativeprof selftest\n  \
                            nativeprof selftest --backend ptrace --python /opt/python/bin/python3"
    )]
    Selftest(Selftest),
    /// Generate shell completions
    #[command(
        after_help = "Examples:\n  nativeprof completions bash > ~/.local/share/bash-completion/completions/nativeprof\n  \
                            nativeprof completions zsh > ~/.zfunc/_nativeprof\n  \
                            nativeprof completions fish > ~/.config/fish/completions/nativeprof.fish"
    )]
    Completions(Completions),
    /// Print the manual page, or write the pages of all commands into a directory
    #[command(after_help = "Examples:\n  nativeprof man | man -l -\n  \
                            nativeprof man ~/.local/share/man/man1")]
    Man(Man),
}

#[derive(Debug, Args)]
pub struct RecordCommand {
    /// PID of the process to sample
    #[arg(short, long, value_name = "PID", value_parser = pid)]
    pub pid: Option<u32>,
    #[command(flatten)]
    pub common: RecordArgs,
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
    #[command(flatten)]
    pub target: TargetArg,
    #[command(flatten)]
    pub common: RecordArgs,
}

#[derive(Debug, Args)]
pub struct Dump {
    #[command(flatten)]
    pub target: TargetArg,
    /// Show local variables of Python frames (simple values only)
    #[arg(long)]
    pub locals: bool,
    /// Include kernel frames of threads that wait in the kernel
    #[arg(long)]
    pub kernel: bool,
    /// Python frames only
    #[arg(long)]
    pub no_native: bool,
    /// Also show the interpreter's own frames: start-up and bytecode loop (--json always has them)
    #[arg(long)]
    pub interpreter_frames: bool,
    /// Print tasks (asyncio, trio) and greenlets instead of threads, as a tree: below each task, the tasks that it awaits
    #[arg(long, conflicts_with_all = ["locals", "kernel", "no_native", "interpreter_frames"])]
    pub tasks: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub page: PageArgs,
    #[command(flatten)]
    pub names: SymbolArgs,
}

#[derive(Debug, Args)]
pub struct Top {
    /// PID of the process, the name of its program or script if it is unique, or the directory of a host's history
    #[arg(value_name = "PID|NAME|DIR", required_unless_present_any = ["pid", "command"])]
    pub process: Option<ProcessRef>,
    /// Alternative to the positional PID; of a history: only this process
    #[arg(short, long, value_name = "PID", value_parser = pid)]
    pub pid: Option<u32>,
    /// Command to run and sample, with its arguments, instead of a running process; its output is not shown
    #[arg(value_name = "COMMAND", last = true, conflicts_with_all = ["process", "pid"])]
    pub command: Vec<String>,
    #[command(flatten)]
    pub of_history: HistoryProcesses,
    /// Samples per second of CPU time, per thread
    #[arg(short, long, value_name = "HZ", default_value_t = DEFAULT_RATE, value_parser = rate)]
    pub rate: u64,
    #[command(flatten)]
    pub sampling: Sampling,
    #[command(flatten)]
    pub tasks: TaskArgs,
    #[command(flatten)]
    pub frames: FrameArgs,
    #[command(flatten)]
    pub names: SymbolArgs,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Process to check as well: its PID, or the name of its program or script if it is unique
    #[arg(value_name = "PID|NAME")]
    pub process: Option<ProcessRef>,
    /// Alternative to the positional PID
    #[arg(short, long, value_name = "PID", value_parser = pid, conflicts_with = "process")]
    pub pid: Option<u32>,
    /// Also check what `host` needs, with the privileges that it keeps
    #[arg(long, conflicts_with_all = ["process", "pid"])]
    pub host: bool,
    /// With --host: directory for the history, which is not created
    #[arg(long, value_name = "DIR", requires = "host")]
    pub dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Replay {
    /// Tape file to replay
    #[arg(value_name = "TAPE")]
    pub tape: PathBuf,
    /// Output file or directory, or `-` for standard output [default: nativeprof-PID.html]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true, value_parser = formats(), help = format_help())]
    pub format: Option<String>,
    /// Python frames only
    #[arg(long)]
    pub no_native: bool,
    /// Also check each native frame and its caller against the machine code, and count what it proves; exit code 3 if
    /// it contradicts any
    #[arg(long, conflicts_with = "no_native")]
    pub verify_edges: bool,
    /// Group stacks by process
    #[arg(long)]
    pub processes: bool,
    /// Group stacks by thread
    #[arg(long)]
    pub threads: bool,
    /// List all files with samples in the summary, and what symbols they have
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub shown: ViewArgs,
    #[command(flatten)]
    pub names: SymbolArgs,
}

#[derive(Debug, Args)]
pub struct ReportCommand {
    #[arg(value_name = "FILE", help = input_help("Profile: a tape, or a file"))]
    pub file: PathBuf,
    /// Row filters, applied in order: `20` (first 20 rows), `0.1` or `10%` (first tenth of the rows; in a tree, nodes
    /// with at least that share of the samples), otherwise a regular expression matched against `NAME (LOCATION)`
    #[arg(value_name = "FILTER")]
    pub filters: Vec<String>,
    /// What each row represents [default: Python functions including the C code that they call; `function`: each C
    /// function separately]
    #[arg(long, value_enum)]
    pub by: Option<ReportBy>,
    /// Source of a function (its name or the end of it, or its `id`) or a file, with the samples of each line
    #[arg(long, value_name = "FUNCTION|FILE", conflicts_with_all = ["filters", "callers", "callees", "tree", "by", "waits", "lag"])]
    pub source: Option<String>,
    /// Machine code of a native function (its name or the end of it, an address such as 0x1234 or geo.so+0x1234), with the
    /// samples of each instruction
    #[arg(long, value_name = "FUNCTION|ADDRESS", conflicts_with_all = ["filters", "source", "callers", "callees", "tree", "by", "waits", "lag", "value", "from", "to", "span", "label"])]
    pub assembly: Option<String>,
    /// Sort order
    #[arg(long, value_enum, default_value_t = ReportOrder::SelfCount)]
    pub sort: ReportOrder,
    #[command(flatten)]
    pub frames: FrameArgs,
    /// Python frames only: C time counts as part of the calling Python function
    #[arg(long)]
    pub no_native: bool,
    #[command(flatten)]
    pub range: TimeRangeArgs,
    #[command(flatten)]
    pub history: HistoryArgs,
    #[command(flatten)]
    pub labels: LabelArgs,
    /// Callers of the function (a name, a regular expression, or an `id` of JSON output)
    #[arg(long, value_name = "FUNCTION", conflicts_with_all = ["callees", "tree", "by"])]
    pub callers: Option<String>,
    /// What the function calls (a name, a regular expression, or an `id`)
    #[arg(long, value_name = "FUNCTION", conflicts_with_all = ["tree", "by"])]
    pub callees: Option<String>,
    /// Print the call tree, largest branch first
    #[arg(long, conflicts_with_all = ["by", "sort"])]
    pub tree: bool,
    /// Where threads waited, in a profile made with --mode wall or off-cpu: total, count, median, p99 and longest
    #[arg(long, conflicts_with_all = ["callers", "callees", "tree", "by", "sort", "value"])]
    pub waits: bool,
    /// Callbacks and task steps that blocked an asyncio event loop for too long, in a profile made with --lag
    #[arg(long, conflicts_with_all = ["callers", "callees", "tree", "by", "sort", "value", "waits", "span", "label"])]
    pub lag: bool,
    /// Waits of one kind: gil (with who held it), lock, condition, sleep, read, poll, runnable, ...
    #[arg(long, value_name = "KIND", requires = "waits", hide_possible_values = true, value_parser = wait_kinds())]
    pub kind: Option<String>,
    /// Value to show, such as cpu, wall, await or calls [default: the time of traced calls and of recordings with waiting time,
    /// else samples or calls]
    #[arg(long, value_name = "VALUE", hide_possible_values = true, value_parser = values())]
    pub value: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub page: PageArgs,
    /// When to use color; `auto`: on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = ColorWhen::Auto)]
    pub color: ColorWhen,
}

#[derive(Debug, Args)]
pub struct Selftest {
    /// Python interpreter to sample: CPython 3.6 or newer
    #[arg(long, value_name = "PATH", default_value = "python3")]
    pub python: PathBuf,
    /// Backend to test: ebpf, ptrace, or auto for both
    #[arg(long, value_enum, hide_possible_values = true, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Samples per second of CPU time
    #[arg(short, long, value_name = "HZ", default_value_t = 999, value_parser = rate)]
    pub rate: u64,
    /// Number of pairs of windows, one with and one without sampling
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// Length of each window
    #[arg(long, value_name = "SECONDS", default_value_t = 0.75, value_parser = seconds)]
    pub window: f64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// When to use color; `auto`: on a terminal, unless NO_COLOR is set
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = ColorWhen::Auto)]
    pub color: ColorWhen,
}

#[derive(Debug, Args)]
pub struct Completions {
    /// Shell to generate them for
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// Directory for one page per command, created if missing [default: print the main page]
    #[arg(value_name = "DIR")]
    pub directory: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReportBy {
    Function,
    /// Your code, libraries, the standard library, the interpreter, extensions, C libraries, the kernel
    Category,
    Line,
    /// Program, library or Python file
    Module,
    Thread,
    Process,
    /// Span names and other labels
    Label,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReportOrder {
    /// Samples with the row's function (or line, module) innermost on the stack
    #[value(name = "self")]
    SelfCount,
    /// Samples with it anywhere on the stack
    Total,
    Name,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColorWhen {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Args)]
pub struct Export {
    #[arg(value_name = "FILE", help = input_help("Profile: a tape, or a file"))]
    pub file: PathBuf,
    /// Output file or directory, or `-` for standard output [default: FILE, in the current directory, with the
    /// extension of the format]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true, value_parser = formats(), help = format_help())]
    pub format: Option<String>,
    /// Python frames only: C time counts as part of the calling Python function
    #[arg(long)]
    pub no_native: bool,
    #[command(flatten)]
    pub range: TimeRangeArgs,
    #[command(flatten)]
    pub history: HistoryArgs,
    #[command(flatten)]
    pub labels: LabelArgs,
    #[command(flatten)]
    pub shown: ViewArgs,
}

#[derive(Debug, Args)]
pub struct Merge {
    #[arg(value_name = "FILE", required = true, help = input_help("Profiles: tapes, or files"))]
    pub files: Vec<PathBuf>,
    /// Output file or directory, or `-` for standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true, value_parser = formats(), help = format_help())]
    pub format: Option<String>,
    /// Python frames only: C time counts as part of the calling Python function
    #[arg(long)]
    pub no_native: bool,
    #[command(flatten)]
    pub shown: ViewArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// Best backend available
    Auto,
    /// perf events and a BPF program; never stops the target
    Ebpf,
    /// Stops one thread at a time, typically for 45 to 100 µs per sample; needs only permission to trace the target
    Ptrace,
}

#[derive(Debug, Args)]
pub struct RecordArgs {
    /// Samples per second of CPU time, per thread
    #[arg(short, long, value_name = "HZ", default_value_t = DEFAULT_RATE, value_parser = rate)]
    pub rate: u64,
    /// Stop after this many seconds, or after a time such as 500ms, 5m or 1h
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<f64>,
    /// Output file or directory, or `-` for standard output [default: nativeprof-PID.html]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true, value_parser = formats(), help = format_help())]
    pub format: Option<String>,
    /// List all files with samples in the summary, and what symbols they have
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub sampling: Sampling,
    /// With --mode rss: what views show first: memory that is resident at the end of the recording (end), or when most of its
    /// process's memory was (peak)
    #[arg(long, value_enum, value_name = "TIME", hide_possible_values = true)]
    pub at: Option<ResidentAt>,
    /// Sample what a Python program allocates instead of its time, from inside by the package `nativeprof`: all of it, what is
    /// not freed, and what was not when most was allocated
    #[arg(long, conflicts_with_all = NOT_WITH_ALLOC)]
    pub alloc: bool,
    /// Also sample child processes
    #[arg(long)]
    pub subprocesses: bool,
    /// Group stacks by thread
    #[arg(long)]
    pub threads: bool,
    #[command(flatten)]
    pub tasks: TaskArgs,
    /// Label samples by the program's spans: those of `nativeprof.span`, and the OpenTelemetry context of its threads
    #[arg(long)]
    pub spans: bool,
    /// Under sudo: keep root for the command and output files [default: switch to the user who ran sudo]
    #[arg(long)]
    pub as_root: bool,
    /// For a program that runs this one: when standard input is closed, end without a profile. A command has no input, its
    /// output is dropped, and it ends with the recording
    #[arg(long, hide = true)]
    pub with_parent: bool,
    /// With --with-parent: what the command prints goes to standard output
    #[arg(long, hide = true, requires = "with_parent")]
    pub show_output: bool,
    #[command(flatten)]
    pub shown: ViewArgs,
    #[command(flatten)]
    pub names: SymbolArgs,
    /// Also save a tape, a replayable recording for bug reports; it holds raw stack memory and parts of mapped files
    /// (see `replay`)
    #[arg(long, value_name = "FILE")]
    pub save_tape: Option<PathBuf>,
    /// Keep only the first N samples in the tape
    #[arg(long, value_name = "N", default_value_t = 1000, requires = "save_tape")]
    pub tape_samples: u64,
}

/// Options that have no effect on allocations.
const NOT_WITH_ALLOC: [&str; 18] = [
    "rate",
    "backend",
    "event",
    "mode",
    "min_blocked",
    "wakers",
    "attribute_workers",
    "gil",
    "kernel",
    "subprocesses",
    "tasks",
    "lag",
    "spans",
    "with_parent",
    "save_tape",
    "tape_samples",
    "debuginfod",
    "idle",
];

fn format_help() -> String {
    let names: Vec<_> = FORMATS.iter().map(|format| format.name).collect();
    format!(
        "Output format [default: by the extension of the output, else html; collapsed to standard output]: {}",
        names.join(", ")
    )
}

/// `what` are files with profiles to read.
fn input_help(what: &str) -> String {
    let names: Vec<_> = READERS.iter().map(|reader| reader.name).collect();
    format!(
        "{what} of any format that is read ({}), compressed or not; `-` for standard input",
        names.join(", ")
    )
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
    match text.parse() {
        Ok(0) => Err("PIDs begin at 1; find one with `pgrep -af NAME`".into()),
        Ok(pid) => Ok(pid),
        Err(_) if text.bytes().all(|c| c.is_ascii_digit()) && !text.is_empty() => {
            Err("no PID is that large; find it with `pgrep -af NAME`".into())
        }
        Err(_) => Err("PID must be a number; find it with `pgrep -af NAME`".into()),
    }
}

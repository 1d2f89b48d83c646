//! Arguments that several commands share.

use clap::{Args, ValueEnum};

use super::offered::{event_kinds, modes, values};
use super::{BackendChoice, pid};
use crate::capture::{self, EventKind, Mode};
use crate::cli::output::page::Page;
use crate::error::{Error, ErrorKind};
use crate::history::name;
use crate::privileges::credentials::Caps;
use crate::privileges::phases::PROBING;
use crate::profile::labels::{LabelFilter, SPAN};
use crate::profile::measure::{Clock, Measure};
use crate::profile::values::Unit;
use crate::profile::views::ViewOptions;

/// Samples per second, unless `--rate` says otherwise.
pub const DEFAULT_RATE: u64 = 99;

/// A process: its PID, or the name of its program or script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessRef {
    Pid(u32),
    Name(String),
}

impl std::str::FromStr for ProcessRef {
    type Err = String;

    fn from_str(text: &str) -> Result<ProcessRef, String> {
        if text.starts_with(|c: char| c.is_ascii_digit()) && text.bytes().all(|c| c.is_ascii_digit()) {
            return pid(text).map(ProcessRef::Pid);
        }
        if text.is_empty() {
            return Err("a PID or the name of a program is needed".into());
        }
        Ok(ProcessRef::Name(text.into()))
    }
}

/// A process, given in either way.
#[derive(Debug, Args)]
pub struct TargetArg {
    /// PID of the process, or the name of its program or script if it is unique
    #[arg(value_name = "PID|NAME", required_unless_present = "pid_option")]
    process: Option<ProcessRef>,
    /// Alternative to the positional PID
    #[arg(short, long = "pid", value_name = "PID", value_parser = pid, id = "pid_option", conflicts_with = "process")]
    pid_option: Option<u32>,
}

impl TargetArg {
    pub fn process(&self) -> ProcessRef {
        let numbered = self.pid_option.map(ProcessRef::Pid);
        numbered.or(self.process.clone()).expect("clap requires one")
    }
}

/// How samples are taken, and which frames are kept.
#[derive(Debug, Args)]
pub struct Sampling {
    /// How to take samples
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Event that triggers a sample: cpu-clock, cycles, page-faults, context-switches, or auto: cycles where the CPU has
    /// hardware counters, else cpu-clock
    #[arg(long, value_name = "EVENT", default_value = "auto", hide_possible_values = true, value_parser = event_kinds())]
    event: EventKind,
    /// Time to sample: cpu (while threads run), off-cpu (while they wait, or are runnable without a CPU), wall (both); or memory:
    /// rss (growth of resident memory, and what of it is still there in the end), alloc (allocations that the process samples
    /// itself and publishes); both eBPF only
    #[arg(long, value_name = "MODE", default_value = "cpu", hide_possible_values = true, value_parser = modes())]
    pub mode: Mode,
    /// With --mode off-cpu or wall: leave out blocked intervals shorter than this, such as 10ms or 2s
    /// (eBPF only)
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub min_blocked: Option<u64>,
    /// With --mode rss or --alloc: bytes between two samples on average, such as 64KiB or 4MiB [default: 512KiB]
    #[arg(long, value_name = "BYTES", value_parser = interval)]
    pub interval: Option<u64>,
    /// With --mode rss or --alloc: take fewer samples when taking stacks uses more than this part of the target's CPU time
    /// [default: 1%]
    #[arg(long, value_name = "PERCENT", value_parser = overhead)]
    pub max_overhead: Option<f64>,
    /// With --mode off-cpu or wall: below each wait, show the stack of the thread that ended it (eBPF only)
    #[arg(long)]
    pub wakers: bool,
    /// Place samples of threads that run no Python (OpenMP, BLAS and other pools) below the code that gave them work
    /// (eBPF only)
    #[arg(long)]
    pub attribute_workers: bool,
    /// Keep only samples of threads that hold the GIL
    #[arg(long)]
    pub gil: bool,
    /// Python frames only
    #[arg(long)]
    pub no_native: bool,
    /// Include kernel frames (eBPF only)
    #[arg(long)]
    pub kernel: bool,
}

/// At which time resident memory is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ResidentAt {
    /// At the end of the recording.
    End,
    /// When most was resident.
    Peak,
}

/// What to show of tasks.
#[derive(Debug, Args)]
pub struct TaskArgs {
    /// Show the running task (asyncio, trio, greenlets) and the tasks that await it, as callers of its frames; with
    /// --mode wall or off-cpu, also what suspended tasks await, and for how long
    #[arg(long)]
    pub tasks: bool,
    /// List callbacks and task steps that block an asyncio event loop for at least this long, such as 50ms (implies
    /// --tasks)
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub lag: Option<u64>,
}

/// Which samples to keep, by their labels.
#[derive(Debug, Args)]
pub struct LabelArgs {
    /// Keep only samples within spans of this name
    #[arg(long, value_name = "NAME")]
    span: Vec<String>,
    /// Keep only samples with this label; if given several times, with all of them
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<LabelFilter>,
}

impl LabelArgs {
    pub fn filters(&self) -> Vec<LabelFilter> {
        let spans = self.span.iter().map(|name| LabelFilter {
            key: SPAN.into(),
            value: name.clone(),
        });
        spans.chain(self.label.iter().cloned()).collect()
    }
}

/// Which rows of JSON output are printed.
#[derive(Clone, Copy, Debug, Args)]
pub struct PageArgs {
    /// With --json: print this many rows at most; amounts of the profile stay those of all of it
    #[arg(long, value_name = "N", requires = "json", value_parser = rows)]
    limit: Option<u32>,
    /// With --json: continue after an earlier output, with its `next_cursor`
    #[arg(long, value_name = "CURSOR", requires = "json")]
    cursor: Option<u32>,
}

impl PageArgs {
    pub fn page(&self) -> Page {
        Page {
            limit: self.limit.map(|limit| limit as usize),
            skipped: self.cursor.unwrap_or(0) as usize,
        }
    }
}

fn rows(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|rows| *rows > 0);
    number.ok_or_else(|| "N is a number of rows, 1 or more".into())
}

pub(super) fn label(text: &str) -> Result<LabelFilter, String> {
    let (key, value) = text.split_once('=').ok_or("a label is given as KEY=VALUE")?;
    Ok(LabelFilter {
        key: key.into(),
        value: value.into(),
    })
}

impl TaskArgs {
    pub fn shows_tasks(&self) -> bool {
        self.tasks || self.lag.is_some()
    }
}

impl Sampling {
    /// That of a whole host: CPU time.
    pub fn of_host(kernel: bool) -> Sampling {
        Sampling {
            backend: BackendChoice::Ebpf,
            event: EventKind::CpuClock,
            mode: Mode::Cpu,
            min_blocked: None,
            interval: None,
            max_overhead: None,
            wakers: false,
            attribute_workers: false,
            gil: false,
            no_native: false,
            kernel,
        }
    }

    /// What a sample amounts to; `rate` in samples per second.
    pub fn measure(&self, rate: u64) -> Measure {
        match (self.mode, self.event) {
            (Mode::OffCpu | Mode::Wall, _) => Measure::time(rate),
            (Mode::Rss, _) => Measure::Bytes(self.interval()),
            (Mode::Alloc, _) => Measure::Event,
            (Mode::Cpu, EventKind::PageFaults | EventKind::ContextSwitches) => Measure::Event,
            (Mode::Cpu, EventKind::Auto | EventKind::CpuClock | EventKind::Cycles) => Measure::period(Clock::Cpu, rate),
        }
    }

    /// Bytes between two samples of memory, on average.
    pub fn interval(&self) -> u64 {
        self.interval.unwrap_or(DEFAULT_INTERVAL)
    }

    /// Part of the target's CPU time that taking stacks may use.
    pub fn max_overhead(&self) -> f64 {
        self.max_overhead.unwrap_or(DEFAULT_OVERHEAD)
    }

    /// Capabilities that sampling needs besides the usual ones.
    pub fn needs(&self) -> Caps {
        match self.mode {
            Mode::Alloc => Caps::of(PROBING),
            _ => Caps::NONE,
        }
    }

    /// How often samples are taken, for messages; `rate` in samples per second.
    pub fn frequency(&self, rate: u64) -> String {
        match self.mode {
            Mode::Rss => format!("every {}", Unit::Bytes.show(self.interval())),
            Mode::Alloc => "where it samples its allocations".into(),
            _ => format!("at {rate} Hz"),
        }
    }

    /// # Errors
    /// `Usage` for options that need time which is not sampled.
    pub fn check(&self) -> Result<(), Error> {
        if self.mode.is_of_memory() {
            return self.check_memory();
        }
        if self.interval.is_some() {
            return Err(Error::new(ErrorKind::Usage, "--interval needs --mode rss or --alloc")
                .why("it is a number of bytes, and only samples of memory are taken by bytes")
                .hint("--mode rss --interval ..., or --rate for samples of time"));
        }
        if self.max_overhead.is_some() {
            return Err(
                Error::new(ErrorKind::Usage, "--max-overhead needs --mode rss or --alloc")
                    .why("samples of time are taken at a rate, which bounds what they use")
                    .hint("--rate for fewer samples of time, or --mode rss"),
            );
        }
        if self.mode != Mode::Cpu && matches!(self.event, EventKind::PageFaults | EventKind::ContextSwitches) {
            return Err(
                Error::new(ErrorKind::Usage, "--mode off-cpu and --mode wall need a clock")
                    .why("page faults and context switches are events, not times")
                    .hint("omit --event, or --mode"),
            );
        }
        let word = match (self.mode, self.min_blocked, self.wakers) {
            (Mode::Cpu, Some(_), _) => "--min-blocked",
            (Mode::Cpu, _, true) => "--wakers",
            (Mode::OffCpu, ..) if self.attribute_workers => {
                return Err(Error::new(ErrorKind::Usage, "--attribute-workers needs CPU time")
                    .why("with --mode off-cpu, threads are not sampled while they run")
                    .hint("--mode wall --attribute-workers, or omit --mode"));
            }
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Usage, format!("{word} needs off-CPU time"))
            .why("by default only CPU time is sampled, and threads that wait use none")
            .hint(format!("--mode off-cpu {word} ..., or --mode wall")))
    }

    /// # Errors
    /// `Usage` for options that need time.
    fn check_memory(&self) -> Result<(), Error> {
        let options = [
            ("--event", self.event != EventKind::Auto),
            ("--min-blocked", self.min_blocked.is_some()),
            ("--wakers", self.wakers),
            ("--attribute-workers", self.attribute_workers),
            ("--gil", self.gil),
            ("--backend ptrace", self.backend == BackendChoice::Ptrace),
        ];
        let of_interval = [
            ("--interval", self.interval.is_some()),
            ("--max-overhead", self.max_overhead.is_some()),
        ];
        let (mode, why, of_mode) = match self.mode {
            Mode::Alloc => (
                "alloc",
                "the process decides which of its allocations it samples; they are read by eBPF only, and have no time",
                &of_interval[..],
            ),
            _ => (
                "rss",
                "samples of resident memory are taken where memory grows, by eBPF only, and have no time",
                &[][..],
            ),
        };
        match options.iter().chain(of_mode).find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((option, _)) => Err(Error::new(
                ErrorKind::Usage,
                format!("{option} cannot be used with --mode {mode}"),
            )
            .why(why)
            .hint(format!("omit {option}, or --mode"))),
        }
    }

    /// Options of the backend; `rate` in samples per second, `children`: sample child processes too.
    pub fn capture(&self, rate: u64, children: bool) -> capture::SamplingOptions {
        capture::SamplingOptions {
            rate,
            event: self.event,
            kernel: self.kernel,
            mode: self.mode,
            off_cpu: capture::OffCpuOptions {
                min_blocked: self.min_blocked.unwrap_or(0),
                wakers: self.wakers,
            },
            interval: self.interval(),
            max_overhead: self.max_overhead(),
            children,
            workers: self.attribute_workers,
            spans: false,
            host: None,
        }
    }
}

/// A number and the letters after it, in lower case.
pub(super) fn number_and_unit(text: &str) -> Option<(f64, String)> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number = digits.trim_end().parse::<f64>().ok().filter(|n| n.is_finite())?;
    Some((number, text[digits.len()..].to_ascii_lowercase()))
}

/// Bytes between two samples of resident memory on average, where none are chosen.
const DEFAULT_INTERVAL: u64 = 512 << 10;

/// Part of the target's CPU time that taking stacks may use where none is chosen.
const DEFAULT_OVERHEAD: f64 = 0.01;

/// Bytes between two samples: of a page up to a terabyte.
fn interval(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    if (4096..=1 << 40).contains(&bytes) {
        Ok(bytes)
    } else {
        Err("BYTES is a size from 4KiB (a page) to 1TiB".into())
    }
}

/// Bytes: `512k`, `500M`, `2G`; units are powers of 1000, or of 1024 with an `i`.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let error = || "a size is a number with its unit: 500M, 2G, 1.5GiB".to_string();
    let (number, unit) = number_and_unit(text).ok_or_else(error)?;
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let (base, unit) = match unit.strip_suffix('i') {
        Some(unit) => (1024f64, unit),
        None => (1000f64, unit),
    };
    let power = match unit {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(error()),
    };
    let bytes = number * base.powi(power);
    if (0.0..=1e15).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err(error())
    }
}

/// Units of time, in seconds.
const UNITS: &[(&str, f64)] = &[
    ("ns", 1e-9),
    ("us", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("m", 60.0),
    ("min", 60.0),
    ("h", 3600.0),
];

/// Seconds of a duration with its unit.
fn with_unit(text: &str) -> Option<f64> {
    let (number, unit) = number_and_unit(text)?;
    let (_, seconds) = UNITS.iter().find(|(name, _)| *name == unit)?;
    Some(number * seconds)
}

/// A duration in ns: `10ms`, `1.5s`, `300us`.
pub fn duration(text: &str) -> Result<u64, String> {
    match with_unit(text) {
        Some(seconds) if (0.0..=1e9).contains(&seconds) => Ok((seconds * 1e9) as u64),
        _ => Err("a duration is a number with its unit: 300us, 10ms, 1.5s".into()),
    }
}

/// A duration in seconds; without a unit, the number is one of seconds.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse().ok().or_else(|| with_unit(text)) {
        Some(seconds) if seconds > 0.0 && seconds <= 1e9 => Ok(seconds),
        _ => Err("SECONDS must be a number above 0, or have a unit: 500ms, 90s, 5m, 1h".into()),
    }
}

/// A time, as options state it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimePoint {
    /// ns since the start of the recording.
    SinceStart(u64),
    /// ns since the Unix epoch.
    Clock(u64),
    /// ns since midnight, UTC.
    OfDay(u64),
}

/// A time: since the start of a recording, written as a duration, or of a clock.
fn time(text: &str) -> Result<TimePoint, String> {
    match text.parse().ok().or_else(|| with_unit(text)) {
        Some(seconds) if (0.0..=1e9).contains(&seconds) => Ok(TimePoint::SinceStart((seconds * 1e9).round() as u64)),
        _ => clock_time(text).ok_or_else(|| {
            "TIME is a number of seconds since the start of the recording, or has a unit: 2.5, 500ms, 5m; of a history, it is \
             a time in UTC: 03:00, 2026-11-28T03:00"
                .into()
        }),
    }
}

/// `2026-11-28T03:00:30Z`, `2026-11-28T03:00`, `2026-11-28`, `03:00:30`, `03:00`.
fn clock_time(text: &str) -> Option<TimePoint> {
    const SECOND: u64 = 1_000_000_000;
    let text = text.strip_suffix('Z').unwrap_or(text);
    let numbers = |text: &str, separator: char| -> Option<Vec<u64>> {
        let is_number = |part: &str| (1..=4).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit());
        let part = |part: &str| part.parse().ok().filter(|_| is_number(part));
        text.split(separator).map(part).collect()
    };
    let of_day = |text: &str| match numbers(text, ':')?[..] {
        [hour, minute] if hour < 24 && minute < 60 => Some((hour * 60 + minute) * 60 * SECOND),
        [hour, minute, second] if hour < 24 && minute < 60 && second < 60 => {
            Some(((hour * 60 + minute) * 60 + second) * SECOND)
        }
        _ => None,
    };
    if !text.contains('-') {
        return of_day(text).map(TimePoint::OfDay);
    }
    let (date, time) = text.split_once('T').unwrap_or((text, "00:00"));
    let [year, month, day] = numbers(date, '-')?[..] else {
        return None;
    };
    let days = name::days(year, month, day)?;
    let midnight = days.checked_mul(86_400 * SECOND)?;
    midnight.checked_add(of_day(time)?).map(TimePoint::Clock)
}

/// Which part of the history in a directory to read.
#[derive(Clone, Debug, Default, Args)]
pub struct HistoryArgs {
    /// Of a history: only the last 10m, 1h, 30s that it has (or before --to)
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "from")]
    pub last: Option<u64>,
    #[command(flatten)]
    pub processes: HistoryProcesses,
    /// Of a history: only this process
    #[arg(long, value_name = "PID", value_parser = pid)]
    pub pid: Option<u32>,
}

/// Which processes of a history to read.
#[derive(Clone, Debug, Default, Args)]
pub struct HistoryProcesses {
    /// Of a history: only containers of this name, or whose ID begins with this
    #[arg(long, value_name = "NAME|ID")]
    pub container: Option<String>,
    /// Of a history: only this service
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,
    /// Of a history: only processes of this program
    #[arg(long, value_name = "NAME")]
    pub comm: Option<String>,
}

impl HistoryProcesses {
    /// The first option that was given.
    pub fn first_used(&self) -> Option<&'static str> {
        let options = [
            ("--container", self.container.is_some()),
            ("--service", self.service.is_some()),
            ("--comm", self.comm.is_some()),
        ];
        options.iter().find(|(_, is_used)| *is_used).map(|(option, _)| *option)
    }
}

impl HistoryArgs {
    /// The first option that was given.
    pub fn first_used(&self) -> Option<&'static str> {
        let last = self.last.map(|_| "--last");
        last.or(self.processes.first_used()).or(self.pid.map(|_| "--pid"))
    }
}

/// Which part of a recording to show.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct TimeRangeArgs {
    /// Only the time from here on, since the start of the recording: 2s, 500ms, 5m (of profiles with a timeline); of a history:
    /// 03:00, 2026-11-28T03:00 (UTC)
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub from: Option<TimePoint>,
    /// Only the time up to here
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub to: Option<TimePoint>,
}

/// Samples per second: `99`, `250hz`, `10khz`.
pub fn rate(text: &str) -> Result<u64, String> {
    let per_second = match number_and_unit(text) {
        Some((number, unit)) if unit.is_empty() || unit == "hz" => Some(number),
        Some((number, unit)) if unit == "khz" => Some(number * 1e3),
        _ => None,
    };
    match per_second {
        Some(rate) if rate.fract() == 0.0 && (1.0..=1e12).contains(&rate) => Ok(rate as u64),
        _ => Err("a rate is a whole number of samples per second, 1 or more: 99, 250hz, 10khz".into()),
    }
}

/// A confidence level, percent.
pub fn confidence(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if (50.0..=99.9999).contains(&percent) => Ok(percent),
        _ => Err("PERCENT must be a number from 50 to 99.9999".into()),
    }
}

/// A part of CPU time: `1%` is 0.01.
pub fn overhead(text: &str) -> Result<f64, String> {
    match percent(text) {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent / 100.0),
        _ => Err("PERCENT is a part of the CPU time, above 0 % and at most 100 %: 1%, 0.5%".into()),
    }
}

/// A limit, percent.
pub fn percent(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%').unwrap_or(text).trim_end().parse::<f64>() {
        Ok(percent) if percent.is_finite() && percent >= 0.0 => Ok(percent),
        _ => Err("PERCENT must be a number, 0 or above".into()),
    }
}

/// Which frames are shown.
#[derive(Clone, Debug, Default, Args)]
pub struct FrameArgs {
    /// Also show the interpreter's own frames: start-up and bytecode loop [default: folded into the calling functions]
    #[arg(long)]
    pub interpreter_frames: bool,
    /// Show the full stacks of idle thread pools (waiting for work), instead of one row or bar for each pool (of profiles
    /// with waiting time)
    #[arg(long)]
    pub idle: bool,
    /// Show each task by its name, instead of those without one of their own (`Task-7`) grouped by what they run
    #[arg(long)]
    pub task_names: bool,
    /// Hide the standard library; its time counts for its callers
    #[arg(long)]
    pub hide_stdlib: bool,
    /// Hide installed libraries and their extensions; their time counts for their callers
    #[arg(long)]
    pub hide_libraries: bool,
    /// Keep only this function and what it calls
    #[arg(long, value_name = "NAME")]
    pub focus: Option<String>,
}

impl FrameArgs {
    /// The view of a profile that these request.
    pub fn view(&self, no_native: bool) -> ViewOptions {
        ViewOptions {
            interpreter_frames: self.interpreter_frames,
            idle: self.idle,
            task_names: self.task_names,
            no_native,
            hide_stdlib: self.hide_stdlib,
            hide_libraries: self.hide_libraries,
            focus: self.focus.clone(),
        }
    }
}

/// How formats that hold one value per stack show a profile.
#[derive(Debug, Default, Args)]
pub struct ViewArgs {
    #[command(flatten)]
    pub frames: FrameArgs,
    /// Value to show, such as cpu, wall, await or calls (html, speedscope: to begin with; svg, collapsed, firefox: alone)
    /// [default: the time of traced calls and of recordings with waiting time, else samples or calls]
    #[arg(long, value_name = "VALUE", hide_possible_values = true, value_parser = values())]
    pub value: Option<String>,
    /// Fold the interpreter's own frames into the calling functions, as svg and html do (speedscope, firefox and other formats
    /// that programs read; not json, which keeps everything)
    #[arg(long, conflicts_with = "interpreter_frames")]
    pub fold: bool,
    /// One frame per line of a function (svg, collapsed; the other formats always have lines)
    #[arg(long)]
    pub lines: bool,
    /// Leave out the text of source files, for output that is shared with others (html, json; other formats have none)
    #[arg(long)]
    pub no_source: bool,
    #[command(flatten)]
    pub browser: BrowserArg,
}

#[derive(Clone, Copy, Debug, Default, Args)]
pub struct BrowserArg {
    /// Open the output in the desktop's browser: on, off, auto (only what `record` and `attach` write without -o and -f, on a
    /// desktop's terminal)
    #[arg(
        long = "browser",
        value_enum,
        value_name = "WHEN",
        hide_possible_values = true,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = Browse::Auto,
        default_missing_value = "on"
    )]
    pub when: Browse,
}

/// When the output is opened in a browser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Browse {
    On,
    Off,
    #[default]
    Auto,
}

/// Where symbols may come from.
#[derive(Debug, Args)]
pub struct SymbolArgs {
    /// Download missing debug info from DEBUGINFOD_URLS: on, off, auto (on, except as root)
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        hide_possible_values = true,
        num_args = 0..=1,
        require_equals = true,
        default_value_t = DebuginfodArg::Auto,
        default_missing_value = "on"
    )]
    pub debuginfod: DebuginfodArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DebuginfodArg {
    On,
    Off,
    Auto,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, expected) in [
            ("250M", 250_000_000),
            ("2G", 2_000_000_000),
            ("1.5GiB", 1_610_612_736),
            ("64KiB", 65_536),
            ("512k", 512_000),
            ("1mb", 1_000_000),
            ("10", 10),
        ] {
            assert_eq!(size(text), Ok(expected), "{text}");
        }
        for text in ["", "-1G", "5x", "1e400G", "G", "i"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rates() {
        for (text, expected) in [("99", 99), ("250Hz", 250), ("10khz", 10_000), ("1.5 kHz", 1500)] {
            assert_eq!(rate(text), Ok(expected), "{text}");
        }
        for text in ["0", "-1", "0.5", "99.5", "fast", "1mhz", "", "inf", "nan", "1e99", "hz"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations() {
        for (text, expected) in [
            ("10", 10.0),
            ("0.5", 0.5),
            ("500ms", 0.5),
            ("90s", 90.0),
            ("5m", 300.0),
            ("1h", 3600.0),
        ] {
            assert_eq!(seconds(text), Ok(expected), "{text}");
        }
        for text in ["0", "-1", "0s", "soon", "5 weeks", "inf", "nan", "1e10", "m", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!(duration("10ms"), Ok(10_000_000));
        assert!(duration("10").is_err() && duration("-1s").is_err());
    }

    #[test]
    fn processes() {
        assert_eq!("12".parse(), Ok(ProcessRef::Pid(12)));
        assert_eq!("7z".parse(), Ok(ProcessRef::Name("7z".into())));
        assert_eq!("app.py".parse(), Ok(ProcessRef::Name("app.py".into())));
        for text in ["", "99999999999"] {
            assert!(text.parse::<ProcessRef>().is_err(), "{text}");
        }
    }
}

//! The events that trigger samples on each CPU, and their periods.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use super::errors::not_permitted;
use crate::capture::common::jitter::{RUN, TickSchedule, period};
use crate::capture::common::rng::Rng;
use crate::capture::{EventKind, SamplingOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::sys;
use crate::sys::perf::perf;

/// About the shortest time between two changes of the interval, ns: setting another interrupts the CPU, ...
const REPROGRAM_INTERVAL: u64 = 20_000_000;
/// ... and takes us some microseconds per CPU: with very many CPUs, the time for each is at least this.
const INTERVAL_PER_CPU: u64 = 400_000;
/// The same for counted events: time to measure how often they occur.
const COUNTED_INTERVAL: u64 = 50_000_000;
/// Maximum delay of a change of the interval, ns. The change restarts the ticks, at a time that must be independent of
/// the program: if it were made after the program has just woken us (it started a thread), what it does next would
/// never be sampled.
const MAX_LATENESS: u64 = 2_000_000;
/// One of so many counted events triggers a sample until it is known how often they occur.
const INITIAL_DOWNSAMPLING: u64 = 4;
/// Samples from which the cost of one is computed.
const COST_SAMPLES: u64 = 20;
/// For each expected sample, so many events of other processes may be inspected.
const MAX_FOREIGN_EVENTS: u64 = 10;

/// Where a sample takes more than so many thousandths of the time between samples, there are two ticks for each.
///
/// Taking a sample delays the program. With one interval for several samples, a loop in which one part is expensive to
/// sample locks into step with the ticks, and some of it is sampled too often. Using one of two ticks at random breaks
/// the step; but each tick takes time as well (1 us, on some virtual machines 20).
const MULTI_TICK_THRESHOLD: u64 = 25;

/// How the events that trigger samples are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeriodMode {
    /// Clock ticks, at random intervals.
    Ticks,
    /// One of several software events, as many as the rate allows. (The kernel, given a rate, would settle on one of
    /// two switches: always the one from the idle CPU to the thread.)
    Counted,
    /// Hardware events, chosen by the kernel.
    Kernel,
}

/// An event on each CPU that runs the BPF program.
pub struct CpuEvents {
    pub name: &'static str,
    events: Vec<SamplingEvent>,
    mode: PeriodMode,
    rate: u64,
    rng: Rng,
    running: bool,
    window: PeriodWindow,
    ticks: u32,
    cost: SampleCost,
}

/// Time that samples have taken so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct SampleCost {
    pub samples: u64,
    /// ns
    pub time: u64,
}

struct SamplingEvent {
    event: OwnedFd,
    ticks: TickSchedule,
}

#[derive(Default)]
struct PeriodWindow {
    began: u64,
    ends: u64,
    /// For [`PeriodMode::Counted`]: about one of so many events triggers a sample.
    downsampling: u64,
    /// Samples and events up to its beginning.
    delivered: u64,
    counted: u64,
}

impl CpuEvents {
    /// Opens the events; they do not tick yet.
    ///
    /// # Errors
    /// Not permitted, or the machine has no such event.
    pub fn open(options: &SamplingOptions, program: BorrowedFd<'_>) -> Result<CpuEvents> {
        let (mut attr, name, mode) = attr(options)?;
        let mut events = Vec::new();
        for event in on_each_cpu(
            &mut attr,
            "cannot open the sampling events",
            &format!("cannot open the sampling event {name}"),
        )? {
            sys::perf::perf_set_bpf(event.as_fd(), program)
                .map_err(|e| Error::io("cannot attach the BPF program", e))?;
            events.push(SamplingEvent {
                event,
                ticks: TickSchedule::default(),
            });
        }
        Ok(CpuEvents {
            name,
            events,
            mode,
            rate: options.rate,
            rng: Rng::new(sys::clock::now()),
            running: false,
            window: PeriodWindow::default(),
            ticks: 1,
            cost: SampleCost::default(),
        })
    }

    /// Does a sample represent CPU time?
    pub fn is_clock(&self) -> bool {
        self.mode == PeriodMode::Ticks
    }

    pub fn is_running(&self) -> bool {
        self.running
    }

    pub fn start(&mut self) -> Result<()> {
        let period = period(self.rate);
        for e in &mut self.events {
            e.ticks.begin(sys::clock::now(), period, period);
            sys::perf::perf_enable(e.event.as_fd()).map_err(|e| Error::io("cannot start sampling", e))?;
        }
        self.running = true;
        self.window = PeriodWindow {
            began: sys::clock::now(),
            downsampling: INITIAL_DOWNSAMPLING,
            ..PeriodWindow::default()
        };
        self.window.ends = self.window.began + REPROGRAM_INTERVAL;
        Ok(())
    }

    pub fn stop(&mut self) {
        self.running = false;
        for e in &self.events {
            let _ = sys::perf::perf_disable(e.event.as_fd()); // the CPU is off
        }
    }

    /// Changes the number of samples per second, and the intervals with it. On each CPU the kernel interrupts what runs there,
    /// but not a sample that is taken: those of the old rate are complete when this returns.
    pub fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
        if self.running && self.mode == PeriodMode::Ticks {
            self.window.began = sys::clock::now();
            self.window.ends = self.window.began + self.set_intervals();
        }
    }

    /// Is it time to change the intervals?
    pub fn is_due(&self) -> bool {
        self.running && sys::clock::now() >= self.window.ends
    }

    /// Time until then.
    pub fn time_left(&self) -> Duration {
        if self.running {
            Duration::from_nanos(self.window.ends.saturating_sub(sys::clock::now()))
        } else {
            Duration::MAX
        }
    }

    /// Changes the intervals. `delivered`: samples so far. Returns of how many ticks one is to trigger a sample.
    pub fn reprogram(&mut self, cost: SampleCost, delivered: u64) -> u32 {
        let now = sys::clock::now();
        let duration = match self.mode {
            PeriodMode::Ticks => self.reprogram_clock(now, cost),
            PeriodMode::Counted => self.reprogram_counted(now, delivered),
            PeriodMode::Kernel => u64::MAX / 2,
        };
        (self.window.began, self.window.ends) = (now, now + duration);
        self.ticks
    }

    fn reprogram_clock(&mut self, now: u64, cost: SampleCost) -> u64 {
        if now > self.window.ends + MAX_LATENESS {
            return self.rng.below(self.shortest_window());
        }
        let samples = cost.samples.saturating_sub(self.cost.samples);
        if samples >= COST_SAMPLES {
            let time = cost.time.saturating_sub(self.cost.time);
            let share = time * 1000 / (samples * period(self.rate));
            self.ticks = if share > MULTI_TICK_THRESHOLD { 2 } else { 1 };
            self.cost = cost;
        }
        self.set_intervals()
    }

    /// The shortest time until the intervals are changed again, ns.
    fn shortest_window(&self) -> u64 {
        REPROGRAM_INTERVAL.max(INTERVAL_PER_CPU * self.events.len() as u64)
    }

    /// Sets the intervals between ticks. Returns the time until they are to be changed again, ns.
    fn set_intervals(&mut self) -> u64 {
        let period = (period(self.rate) / u64::from(self.ticks)).max(1);
        let duration = self.shortest_window().max(u64::from(RUN) * period);
        let ticks = (duration / period) as u32;
        for e in &mut self.events {
            let interval = e.ticks.next_period(sys::clock::now(), ticks, period, &mut self.rng);
            let _ = sys::perf::perf_set_period(e.event.as_fd(), interval); // the CPU is off
            // When the CPU has done so: up to 0.1 ms later.
            e.ticks.set(sys::clock::now(), interval, period);
        }
        self.rng.between(duration)
    }

    fn reprogram_counted(&mut self, now: u64, delivered: u64) -> u64 {
        let counts = self
            .events
            .iter()
            .filter_map(|e| sys::perf::read_count(e.event.as_fd()).ok());
        let counted: u64 = counts.sum();
        let window = &mut self.window;
        let wanted = (self.rate * (now - window.began) / 1_000_000_000).max(1);
        let by_rate = (delivered - window.delivered) * window.downsampling / wanted;
        let by_total = counted.saturating_sub(window.counted) / (MAX_FOREIGN_EVENTS * wanted);
        window.downsampling = by_rate.max(by_total).max(1);
        (window.delivered, window.counted) = (delivered, counted);
        for e in &self.events {
            // Random within a factor of three, so that nothing stays in step.
            let interval = window.downsampling.div_ceil(2) + self.rng.below(window.downsampling);
            let _ = sys::perf::perf_set_period(e.event.as_fd(), interval); // the CPU is off
        }
        COUNTED_INTERVAL
    }
}

/// Opens an event on each online CPU.
///
/// # Errors
/// `denied` if it is not permitted, else `failed`.
pub fn on_each_cpu(attr: &mut perf::perf_event_attr, denied: &str, failed: &str) -> Result<Vec<OwnedFd>> {
    let mut events = Vec::new();
    for cpu in 0..sys::process::cpu_count() {
        match sys::perf::perf_event_open(attr, -1, cpu as i32) {
            Ok(event) => events.push(event),
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {} // CPU is off
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(not_permitted(denied, &e)),
            Err(e) => return Err(Error::io(failed, e)),
        }
    }
    Ok(events)
}

/// The event, its name, and its period mode.
fn attr(options: &SamplingOptions) -> Result<(perf::perf_event_attr, &'static str, PeriodMode)> {
    let mut attr = perf::perf_event_attr {
        clockid: libc::CLOCK_MONOTONIC,
        ..Default::default()
    };
    attr.set_disabled(1);
    let cycles = has_cycles();
    let (kind, config, name, mode) = match options.event {
        EventKind::Cycles if !cycles => {
            return Err(
                Error::new(ErrorKind::Unsupported, "hardware event `cycles` is not available")
                    .why("this machine has no hardware counters (a virtual machine?)")
                    .hint("omit --event, or use --event cpu-clock"),
            );
        }
        EventKind::Auto | EventKind::Cycles if cycles => (
            perf::PERF_TYPE_HARDWARE,
            perf::PERF_COUNT_HW_CPU_CYCLES,
            "cycles",
            PeriodMode::Kernel,
        ),
        EventKind::Auto | EventKind::CpuClock | EventKind::Cycles => (
            perf::PERF_TYPE_SOFTWARE,
            perf::PERF_COUNT_SW_CPU_CLOCK,
            "cpu-clock",
            PeriodMode::Ticks,
        ),
        EventKind::PageFaults => (
            perf::PERF_TYPE_SOFTWARE,
            perf::PERF_COUNT_SW_PAGE_FAULTS,
            "page-faults",
            PeriodMode::Counted,
        ),
        EventKind::ContextSwitches => (
            perf::PERF_TYPE_SOFTWARE,
            perf::PERF_COUNT_SW_CONTEXT_SWITCHES,
            "context-switches",
            PeriodMode::Counted,
        ),
    };
    attr.type_ = kind;
    attr.config = config.into();
    match mode {
        PeriodMode::Ticks => {
            attr.__bindgen_anon_1.sample_period = period(options.rate);
            // The BPF program does not run at the ticks of an idle CPU (perf_swevent_hrtimer in kernel/events/core.c).
            attr.set_exclude_idle(1);
        }
        PeriodMode::Counted => attr.__bindgen_anon_1.sample_period = INITIAL_DOWNSAMPLING,
        PeriodMode::Kernel => {
            attr.set_freq(1);
            attr.__bindgen_anon_1.sample_freq = options.rate.max(1);
        }
    }
    Ok((attr, name, mode))
}

fn has_cycles() -> bool {
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_HARDWARE,
        config: perf::PERF_COUNT_HW_CPU_CYCLES.into(),
        ..Default::default()
    };
    attr.set_disabled(1);
    sys::perf::perf_event_open(&mut attr, 0, -1).is_ok()
}

//! What makes samples due on each CPU, and at what distances.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use super::not_permitted;
use crate::capture::random::Random;
use crate::capture::ticks::{RUN, Ticks, period};
use crate::capture::{Clock, Options};
use crate::error::{Error, Kind, Result};
use crate::process::sys::{self, perf};

/// Shortest time at one distance, ns, more or less: to set another interrupts the CPU, ...
const LAP: u64 = 20_000_000;
/// ... and takes us some microseconds for each: where there are very many CPUs, the time for each is no less than this.
const LAP_OF_ONE: u64 = 400_000;
/// The same for events that are counted: time to see how often they come.
const COUNTED_LAP: u64 = 50_000_000;
/// How late other distances may be set, ns. The ticks begin anew then, at a time of our own choosing: were it done when the
/// program has just woken us (it started a thread), what it does next would have none each time.
const PUNCTUAL: u64 = 2_000_000;
/// Of so many counted events, one makes a sample due until it is known how often they come.
const THINNING: u64 = 4;
/// Samples that tell what one takes.
const COST_SAMPLES: u64 = 20;
/// For each sample that is wanted, so many events of other processes may be looked at.
const STRANGERS: u64 = 10;

/// Where a sample takes more than so many thousandths of the time between samples, there are two ticks for each.
///
/// What a sample takes delays the program. At one distance for several samples, a loop in which it is dear to sample one
/// part settles into a step with the ticks that shows some of it too often. One of two ticks at random is less in step;
/// but each tick takes time as well (1 us, on some virtual machines 20).
const DEAR: u64 = 25;

/// How it is decided which of the events make samples due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// Ticks of a clock, at random distances.
    Ticks,
    /// Events of software, one of several, as many as the rate allows. (The kernel, given a rate, would settle on one of
    /// two switches: always the one from the idle CPU to the thread.)
    Counted,
    /// Events of the hardware, by the kernel.
    Kernel,
}

/// An event on each CPU that runs the program.
pub struct CpuEvents {
    pub name: &'static str,
    events: Vec<Event>,
    pace: Pace,
    rate: u64,
    random: Random,
    running: bool,
    lap: Lap,
    ticks: u32,
    cost: Cost,
}

/// What samples have taken so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub samples: u64,
    /// ns
    pub time: u64,
}

struct Event {
    event: OwnedFd,
    ticks: Ticks,
}

#[derive(Default)]
struct Lap {
    began: u64,
    ends: u64,
    /// Of [`Pace::Counted`]: of so many events one makes a sample due, more or less.
    thinning: u64,
    /// Samples and events up to its beginning.
    delivered: u64,
    counted: u64,
}

impl CpuEvents {
    /// Opens them; they do not tick yet.
    ///
    /// # Errors
    /// Not permitted, or there is no such event here.
    pub fn open(options: &Options, program: BorrowedFd<'_>) -> Result<CpuEvents> {
        let (mut attr, name, pace) = attr(options)?;
        let mut events = Vec::new();
        for event in on_each_cpu(
            &mut attr,
            "cannot sample the CPUs",
            &format!("cannot sample with {name}"),
        )? {
            sys::perf_set_bpf(event.as_fd(), program).map_err(|e| Error::io("cannot attach the BPF program", e))?;
            events.push(Event {
                event,
                ticks: Ticks::default(),
            });
        }
        Ok(CpuEvents {
            name,
            events,
            pace,
            rate: options.rate,
            random: Random::new(sys::now()),
            running: false,
            lap: Lap::default(),
            ticks: 1,
            cost: Cost::default(),
        })
    }

    /// Does a sample stand for CPU time?
    pub fn is_clock(&self) -> bool {
        self.pace == Pace::Ticks
    }

    pub fn is_running(&self) -> bool {
        self.running
    }

    pub fn start(&mut self) -> Result<()> {
        let period = period(self.rate);
        for e in &mut self.events {
            e.ticks.begin(sys::now(), period, period);
            sys::perf_enable(e.event.as_fd()).map_err(|e| Error::io("cannot start sampling", e))?;
        }
        self.running = true;
        self.lap = Lap {
            began: sys::now(),
            thinning: THINNING,
            ..Lap::default()
        };
        self.lap.ends = self.lap.began + LAP;
        Ok(())
    }

    pub fn stop(&mut self) {
        self.running = false;
        for e in &self.events {
            let _ = sys::perf_disable(e.event.as_fd()); // the CPU is off
        }
    }

    /// Is it time to set other distances?
    pub fn is_time(&self) -> bool {
        self.running && sys::now() >= self.lap.ends
    }

    /// Time until then.
    pub fn lap_left(&self) -> Duration {
        if self.running {
            Duration::from_nanos(self.lap.ends.saturating_sub(sys::now()))
        } else {
            Duration::MAX
        }
    }

    /// Sets other distances. `delivered`: samples so far. Returns of how many ticks one is to make a sample due.
    pub fn vary(&mut self, cost: Cost, delivered: u64) -> u32 {
        let now = sys::now();
        let lasts = match self.pace {
            Pace::Ticks => self.vary_ticks(now, cost),
            Pace::Counted => self.vary_counted(now, delivered),
            Pace::Kernel => u64::MAX / 2,
        };
        (self.lap.began, self.lap.ends) = (now, now + lasts);
        self.ticks
    }

    fn vary_ticks(&mut self, now: u64, cost: Cost) -> u64 {
        let lap = LAP.max(LAP_OF_ONE * self.events.len() as u64);
        if now > self.lap.ends + PUNCTUAL {
            return self.random.below(lap);
        }
        let each = period(self.rate);
        let samples = cost.samples - self.cost.samples;
        if samples >= COST_SAMPLES {
            let share = (cost.time - self.cost.time) * 1000 / (samples * each);
            self.ticks = if share > DEAR { 2 } else { 1 };
            self.cost = cost;
        }
        let period = (each / u64::from(self.ticks)).max(1);
        let lasts = lap.max(u64::from(RUN) * period);
        let ticks = (lasts / period) as u32;
        for e in &mut self.events {
            let distance = e.ticks.distance(sys::now(), ticks, period, &mut self.random);
            let _ = sys::perf_set_period(e.event.as_fd(), distance); // the CPU is off
            // When the CPU has done so: up to 0.1 ms later.
            e.ticks.set(sys::now(), distance, period);
        }
        self.random.between(lasts)
    }

    fn vary_counted(&mut self, now: u64, delivered: u64) -> u64 {
        let counts = self.events.iter().filter_map(|e| sys::read_count(e.event.as_fd()).ok());
        let counted: u64 = counts.sum();
        let lap = &mut self.lap;
        let wanted = (self.rate * (now - lap.began) / 1_000_000_000).max(1);
        let ours = (delivered - lap.delivered) * lap.thinning / wanted;
        let all = counted.saturating_sub(lap.counted) / (STRANGERS * wanted);
        lap.thinning = ours.max(all).max(1);
        (lap.delivered, lap.counted) = (delivered, counted);
        for e in &self.events {
            // Three times as many at most, so that nothing keeps step.
            let distance = lap.thinning.div_ceil(2) + self.random.below(lap.thinning);
            let _ = sys::perf_set_period(e.event.as_fd(), distance); // the CPU is off
        }
        COUNTED_LAP
    }
}

/// Opens an event on each CPU that is on.
///
/// # Errors
/// `denied` if it is not permitted, else `failed`.
pub fn on_each_cpu(attr: &mut perf::perf_event_attr, denied: &str, failed: &str) -> Result<Vec<OwnedFd>> {
    let mut events = Vec::new();
    for cpu in 0..sys::cpu_count() {
        match sys::perf_event_open(attr, -1, cpu as i32) {
            Ok(event) => events.push(event),
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {} // CPU is off
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(not_permitted(denied, &e)),
            Err(e) => return Err(Error::io(failed, e)),
        }
    }
    Ok(events)
}

/// The event, its name, and how it is paced.
fn attr(options: &Options) -> Result<(perf::perf_event_attr, &'static str, Pace)> {
    let mut attr = perf::perf_event_attr {
        clockid: libc::CLOCK_MONOTONIC,
        ..Default::default()
    };
    attr.set_disabled(1);
    let cycles = has_cycles();
    let (kind, config, name, pace) = match options.event {
        Clock::Cycles if !cycles => {
            return Err(Error::new(Kind::Unsupported, "the event cycles cannot be counted here")
                .why("this machine (perhaps a virtual one) offers no hardware counters")
                .hint("leave --event out, or say --event cpu-clock"));
        }
        Clock::Auto | Clock::Cycles if cycles => (
            perf::PERF_TYPE_HARDWARE,
            perf::PERF_COUNT_HW_CPU_CYCLES,
            "cycles",
            Pace::Kernel,
        ),
        Clock::Auto | Clock::CpuClock | Clock::Cycles => (
            perf::PERF_TYPE_SOFTWARE,
            perf::PERF_COUNT_SW_CPU_CLOCK,
            "cpu-clock",
            Pace::Ticks,
        ),
        Clock::PageFaults => (
            perf::PERF_TYPE_SOFTWARE,
            perf::PERF_COUNT_SW_PAGE_FAULTS,
            "page-faults",
            Pace::Counted,
        ),
        Clock::ContextSwitches => (
            perf::PERF_TYPE_SOFTWARE,
            perf::PERF_COUNT_SW_CONTEXT_SWITCHES,
            "context-switches",
            Pace::Counted,
        ),
    };
    attr.type_ = kind;
    attr.config = config.into();
    match pace {
        Pace::Ticks => attr.__bindgen_anon_1.sample_period = period(options.rate),
        Pace::Counted => attr.__bindgen_anon_1.sample_period = THINNING,
        Pace::Kernel => {
            attr.set_freq(1);
            attr.__bindgen_anon_1.sample_freq = options.rate.max(1);
        }
    }
    Ok((attr, name, pace))
}

fn has_cycles() -> bool {
    let mut attr = perf::perf_event_attr {
        type_: perf::PERF_TYPE_HARDWARE,
        config: perf::PERF_COUNT_HW_CPU_CYCLES.into(),
        ..Default::default()
    };
    attr.set_disabled(1);
    sys::perf_event_open(&mut attr, 0, -1).is_ok()
}

//! The loop of a recording of a host: samples, segments, the budget.

use std::fmt::Display;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::budget::{Budget, NextRate, Used};
use super::labels::LabelReader;
use super::sd_notify::Notifier;
use crate::error::{Error, Result};
use crate::event::Pid;
use crate::export::otlp::{SegmentInfo, SegmentProcess, encode_segment};
use crate::history::Writer;
use crate::session::{HostSegment, ProcessInstance, Recording};
use crate::sys;
use crate::sys::procfs;

/// Longest time before the clock and signals are checked again.
const MAX_TURN: Duration = Duration::from_millis(500);
/// Time allowed for samples that are still waiting when the recording ends.
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// How a host is recorded.
pub struct HostOptions {
    /// Samples per second of CPU time, at most.
    pub rate: u64,
    /// Length of a segment.
    pub segment: Duration,
    /// Ends the recording.
    pub duration: Option<Duration>,
    /// CPU seconds per second that all processes of nativeprof may use together.
    pub max_cpu: Option<f64>,
    /// Bytes that they may use.
    pub max_memory: Option<u64>,
}

/// A value of an event.
pub type Field<'a> = (&'a str, &'a dyn Display);

/// What the recorder needs besides the recording.
pub struct Surroundings<'a> {
    /// Writes an event to the log: its name, and what is to be known of it.
    pub log: &'a dyn Fn(&str, &[Field<'_>]),
    /// Tells the service manager.
    pub notifier: &'a Notifier,
    /// How often it wants to hear that this runs.
    pub watchdog: Option<Duration>,
    /// Called in each turn: keeps the process that sends segments running. Returns its id.
    pub network: &'a mut dyn FnMut() -> Option<Pid>,
}

/// A recording of a host that runs.
pub struct HostRecorder<'a> {
    recording: Recording,
    writer: Writer,
    labels: LabelReader,
    options: HostOptions,
    budget: Option<Budget>,
    surroundings: Surroundings<'a>,
    rate: u64,
    /// By process of the current segment: its labels, read while it ran.
    resources: Vec<Rc<Vec<(String, String)>>>,
    /// CPU time of all processes of nativeprof at the last segment's end, seconds.
    cpu: f64,
}

impl<'a> HostRecorder<'a> {
    /// A recorder of what `recording` samples; labels are read by `labels`, segments written by `writer`.
    pub fn new(
        recording: Recording,
        writer: Writer,
        labels: LabelReader,
        options: HostOptions,
        surroundings: Surroundings<'a>,
    ) -> HostRecorder<'a> {
        HostRecorder {
            recording,
            writer,
            labels,
            budget: options.max_cpu.map(|limit| Budget::new(limit, 1..=options.rate)),
            surroundings,
            rate: options.rate,
            resources: Vec::new(),
            cpu: 0.0,
            options,
        }
    }

    /// Records until a signal, or the end of the duration. The last segment is written then.
    ///
    /// # Errors
    /// Those of the backend. Segments that cannot be written are dropped and logged.
    pub fn run(mut self) -> Result<()> {
        let began = Instant::now();
        let end = self.options.duration.map(|duration| began + duration);
        let mut next_segment = began + self.options.segment;
        let mut next_word = began;
        self.notify(self.surroundings.notifier.ready());
        let is_over = || sys::interrupts::interrupted() || end.is_some_and(|end| Instant::now() >= end);
        let mut network = (self.surroundings.network)();
        while !is_over() {
            let until = end.map_or(next_segment, |end| end.min(next_segment));
            let wait = until.saturating_duration_since(Instant::now()).min(MAX_TURN);
            let wait = self.recording.wait(wait);
            self.recording.poll(wait, Some(Instant::now() + wait + MAX_TURN))?;
            self.read_labels();
            network = (self.surroundings.network)();
            let now = Instant::now();
            if let Some(interval) = self.surroundings.watchdog
                && now >= next_word
            {
                self.notify(self.surroundings.notifier.watchdog());
                next_word = now + interval;
            }
            if now >= next_segment {
                self.end_segment(network);
                // One that took long to write leaves no short ones behind.
                while next_segment <= Instant::now() {
                    next_segment += self.options.segment;
                }
            }
        }
        self.notify(self.surroundings.notifier.stopping());
        self.recording.stop();
        let until = Instant::now() + DRAIN_TIME;
        while self.recording.poll(Duration::ZERO, Some(until))? && Instant::now() < until {}
        self.read_labels();
        self.end_segment(network);
        Ok(())
    }

    /// Reads the labels of processes that are new in this segment: they may be about to exit.
    fn read_labels(&mut self) {
        for instance in self.recording.instances().iter().skip(self.resources.len()) {
            self.resources.push(self.labels.resource(instance.pid, instance.cgroup));
        }
    }

    fn end_segment(&mut self, network: Option<Pid>) {
        let elapsed = self.recording.elapsed();
        let segment = self.recording.take_host_segment();
        let resources = std::mem::take(&mut self.resources);
        self.labels.end_segment();
        let (samples, lost) = (segment.profile.timeline.len(), segment.profile.meta.quality.lost);
        let start = segment.start;
        let processes = segment.processes.len();
        let written = if samples == 0 && lost == 0 {
            Ok(None)
        } else {
            let message = encode(segment, &resources);
            self.writer.write(start, elapsed, &message).map(Some)
        };
        let log = self.surroundings.log;
        let cpu = self.cpu_time(network);
        let used = Used {
            elapsed: elapsed.as_secs_f64(),
            cpu: (cpu - self.cpu).max(0.0),
            rate: self.rate,
        };
        self.cpu = cpu;
        let share = format!("{:.2}", 100.0 * used.cpu / used.elapsed.max(1e-3));
        match written {
            Ok(written) => {
                let (name, dropped) = match &written {
                    Some((name, dropped)) => (name.to_string(), dropped.segments),
                    None => ("none, no samples".into(), 0),
                };
                log(
                    "segment",
                    &[
                        ("file", &name),
                        ("samples", &samples),
                        ("lost", &lost),
                        ("processes", &processes),
                        ("rate_hz", &self.rate),
                        ("own_cpu_percent", &share),
                        ("dropped_segments", &dropped),
                    ],
                );
            }
            Err(Error { what, why, hint, .. }) => {
                log(
                    "segment_lost",
                    &[("error", &what), ("why", &why), ("try", &hint), ("samples", &samples)],
                );
            }
        }
        self.keep_budget(used);
        self.keep_memory(network);
    }

    /// Gives the next segment the rate that the budget allows.
    fn keep_budget(&mut self, used: Used) {
        let Some(budget) = &mut self.budget else { return };
        let NextRate { rate, is_kept } = budget.next_rate(used);
        if !is_kept {
            let limit = format!("{:.2}", 100.0 * self.options.max_cpu.unwrap_or(0.0));
            (self.surroundings.log)(
                "budget_exceeded",
                &[
                    ("max_cpu_percent", &limit),
                    (
                        "why",
                        &"the lowest rate costs more; sample fewer processes, or allow more",
                    ),
                ],
            );
        }
        if rate != self.rate {
            (self.surroundings.log)("rate", &[("from_hz", &self.rate), ("to_hz", &rate)]);
            self.rate = rate;
            self.recording.set_rate(rate);
        }
    }

    /// Drops what can be read again, if all processes of nativeprof use too much memory.
    fn keep_memory(&mut self, network: Option<Pid>) {
        let Some(limit) = self.options.max_memory else { return };
        let own = std::process::id();
        let naming = self.recording.naming_pid();
        let used: u64 = [Some(own), naming, network]
            .into_iter()
            .flatten()
            .filter_map(procfs::pss)
            .sum();
        if used > limit {
            self.recording.release_memory();
            (self.surroundings.log)("memory_exceeded", &[("bytes", &used), ("max_bytes", &limit)]);
        }
    }

    /// CPU time of all processes of nativeprof and of the BPF programs, seconds.
    fn cpu_time(&self, network: Option<Pid>) -> f64 {
        let of_network = network.and_then(sys::clock::cpu_time_of).unwrap_or(0);
        let own = sys::clock::process_cpu_time() + self.recording.naming_cpu();
        (own + of_network + self.recording.kernel_time()) as f64 * 1e-9
    }

    fn notify(&self, sent: std::io::Result<()>) {
        if let Err(e) = sent {
            (self.surroundings.log)("service_manager", &[("error", &e)]);
        }
    }
}

/// The message of a segment. `labels` are those of its processes.
fn encode(segment: HostSegment, labels: &[Rc<Vec<(String, String)>>]) -> Vec<u8> {
    let HostSegment {
        profile,
        processes,
        process_of_sample,
        refused,
        ..
    } = segment;
    let mut resources: Vec<Vec<(String, String)>> = Vec::new();
    let mut known: FxHashMap<&Vec<(String, String)>, u32> = FxHashMap::default();
    let none = Rc::new(Vec::new());
    let mut of_segment = Vec::with_capacity(processes.len());
    for (at, process) in processes.iter().enumerate() {
        let labels = labels.get(at).unwrap_or(&none);
        let resource = *known.entry(labels).or_insert_with(|| {
            resources.push(labels.to_vec());
            resources.len() as u32 - 1
        });
        of_segment.push(segment_process(process, resource));
    }
    let info = SegmentInfo {
        resources,
        processes: of_segment,
        process_of_sample,
        counts: refused
            .into_iter()
            .map(|(reason, processes)| (format!("processes.{reason}"), processes))
            .collect(),
    };
    encode_segment(&profile, &info)
}

fn segment_process(process: &ProcessInstance, resource: u32) -> SegmentProcess {
    let taken = process.quality.taken();
    SegmentProcess {
        pid: process.pid,
        name: process.comm.clone(),
        resource,
        quality: process.quality.quality(taken, 0),
    }
}

//! The loop of a recording of a host: samples, segments, the budget.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::budget::{Budget, NextRate, Used};
use super::labels::LabelReader;
use super::logs::Log;
use super::metrics::HostMetrics;
use super::sd_notify::Notifier;
use crate::error::{Error, Result};
use crate::event::Pid;
use crate::export::otlp::{SegmentInfo, SegmentProcess, encode_segment};
use crate::history::{REFUSED_PROCESSES, Writer};
use crate::session::{HostSegment, ProcessInstance, Recording, SegmentEnd};
use crate::sys;
use crate::sys::procfs;

/// Longest time before the clock and signals are checked again.
const MAX_TURN: Duration = Duration::from_millis(500);

/// Descriptors that are kept for the end of a segment, when names are read and files written: what is read of processes may
/// use all others.
const SPARE: usize = 8;

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

/// The rest of the process that the recorder runs in.
pub struct Surroundings<'a> {
    pub log: &'a Log,
    /// The service manager.
    pub notifier: &'a Notifier,
    /// How often the service manager is to be told that this runs.
    pub watchdog: Option<Duration>,
    /// Called in each turn: keeps the process that sends segments running. Returns its id.
    pub network: &'a mut dyn FnMut() -> Option<Pid>,
}

/// What the service manager is told again and again.
struct Watchdog {
    interval: Option<Duration>,
    next: Mutex<Instant>,
}

impl Watchdog {
    /// Tells it that this runs, if it is time.
    fn tell(&self, notifier: &Notifier) -> io::Result<()> {
        let Some(interval) = self.interval else { return Ok(()) };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if now < *next {
            return Ok(());
        }
        *next = now + interval;
        notifier.watchdog()
    }
}

/// A recording of a host that runs.
pub struct HostRecorder<'a> {
    recording: Recording,
    writer: Writer,
    labels: LabelReader,
    options: HostOptions,
    budget: Option<Budget>,
    surroundings: Surroundings<'a>,
    watchdog: Watchdog,
    /// By process of the current segment: its labels, read while it ran.
    resources: Vec<Rc<Vec<(String, String)>>>,
    /// SIGHUP so far: labels are read again at each.
    hangups: u32,
    /// CPU time of all processes of nativeprof at the last segment's end, seconds.
    cpu: f64,
    /// When it was made: the duration and the first segment begin with it.
    began: Instant,
    metrics: HostMetrics,
    /// Closed while a segment ends.
    spare: Vec<File>,
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
            watchdog: Watchdog {
                interval: surroundings.watchdog,
                next: Mutex::new(Instant::now()),
            },
            surroundings,
            resources: Vec::new(),
            hangups: sys::interrupts::hangups(),
            cpu: 0.0,
            began: Instant::now(),
            // A counter that begins with its first increase shows none.
            metrics: HostMetrics {
                errors: ["segment_lost", "segment_not_dropped"]
                    .map(|kind| (kind.to_string(), 0))
                    .into(),
                ..HostMetrics::default()
            },
            spare: spare_files(),
            options,
        }
    }

    /// Records until a signal, or the end of the duration. The last segment is written then.
    ///
    /// # Errors
    /// Those of the backend. Segments that cannot be written are dropped and logged.
    pub fn run(mut self) -> Result<()> {
        let end = self.options.duration.map(|duration| self.began + duration);
        let mut next_segment = self.began + self.options.segment;
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
            let told = self.watchdog.tell(self.surroundings.notifier);
            self.notify(told);
            let now = Instant::now();
            if now >= next_segment {
                self.end_segment(network, false)?;
                // One that took long to write leaves no short ones behind.
                while next_segment <= Instant::now() {
                    next_segment += self.options.segment;
                }
            }
        }
        self.notify(self.surroundings.notifier.stopping());
        self.recording.stop();
        self.end_segment(network, true)
    }

    /// Reads the labels of processes that are new in this segment: they may be about to exit.
    fn read_labels(&mut self) {
        let hangups = sys::interrupts::hangups();
        if hangups != self.hangups {
            self.hangups = hangups;
            self.labels.renew();
        }
        read_labels(&mut self.labels, self.recording.instances(), &mut self.resources);
    }

    /// Ends the segment and writes it. The next one has the rate that the budget allows: what writing costs is only known then,
    /// and counts with the next one.
    fn end_segment(&mut self, network: Option<Pid>, is_last: bool) -> Result<()> {
        self.spare.clear();
        let cpu = self.measure_cpu(network);
        let used = Used {
            elapsed: self.recording.elapsed().as_secs_f64(),
            cpu: (cpu - self.cpu).max(0.0),
            rate: self.recording.rate(),
        };
        self.cpu = cpu;
        let rate = if is_last { used.rate } else { self.next_rate(used) };
        let (labels, resources) = (&mut self.labels, &mut self.resources);
        let (watchdog, notifier) = (&self.watchdog, self.surroundings.notifier);
        let segment = self.recording.take_host_segment(
            rate,
            |instances| read_labels(labels, instances, resources),
            // Names of many large files may take longer than the service manager waits; each of them is limited.
            &|| drop(watchdog.tell(notifier)), // an error is logged in the next turn
        )?;
        let resources = std::mem::take(&mut self.resources);
        self.labels.end_segment();
        let (samples, lost) = (segment.profile.timeline.len(), segment.profile.meta.quality.lost);
        let (start, elapsed) = (segment.start, Duration::from_secs_f64(segment.profile.meta.duration));
        let processes = segment.processes.len();
        self.count(&segment);
        self.report_limits(&segment.end);
        let written = if samples == 0 && lost == 0 {
            Ok(None)
        } else {
            let writer = &mut self.writer;
            let write = || writer.write(start, elapsed, &encode(segment, &resources));
            let (watchdog, notifier) = (&self.watchdog, self.surroundings.notifier);
            let tell = || drop(watchdog.tell(notifier));
            self.recording.while_buffering(&tell, write).map(Some)
        };
        let log = self.surroundings.log;
        let is_lost = written.is_err();
        let share = format!("{:.2}", 100.0 * used.cpu / used.elapsed.max(1e-3));
        match written {
            Ok(written) => {
                let is_written = written.is_some();
                let (name, dropped, not_dropped) = match written {
                    Some((name, dropped)) => (name.to_string(), dropped.segments, dropped.failure),
                    None => ("none, no samples".into(), 0, None),
                };
                self.metrics.segments_written += u64::from(is_written);
                self.metrics.segments_dropped += dropped;
                log.event(
                    "segment",
                    &[
                        ("file", &name),
                        ("samples", &samples),
                        ("lost", &lost),
                        ("processes", &processes),
                        ("rate_hz", &used.rate),
                        ("own_cpu_percent", &share),
                        ("dropped_segments", &dropped),
                    ],
                );
                if let Some(why) = not_dropped {
                    *self.metrics.errors.entry("segment_not_dropped".into()).or_default() += 1;
                    let hint = "remove it, or give its directory back to this user";
                    log.error("segment_not_dropped", "not removed", &[("error", &why), ("try", &hint)]);
                }
            }
            Err(Error { what, why, hint, .. }) => {
                *self.metrics.errors.entry("segment_lost".into()).or_default() += 1;
                log.error("segment_lost", &why, &[("error", &what), ("try", &hint)]);
            }
        }
        self.keep_memory(network);
        self.write_metrics(is_lost);
        self.spare = spare_files();
        Ok(())
    }

    /// Adds a segment to the metrics.
    fn count(&mut self, segment: &HostSegment) {
        let quality = &segment.profile.meta.quality;
        let metrics = &mut self.metrics;
        for (name, samples) in [
            ("exact", quality.exact),
            ("repaired", quality.repaired),
            ("partial", quality.partial),
        ] {
            *metrics.samples.entry(name.into()).or_default() += samples;
        }
        for (reason, samples) in &segment.lost {
            *metrics.samples_lost.entry((*reason).into()).or_default() += samples;
        }
        metrics.label_problems = self.labels.problems();
        let refused: u64 = segment.refused.values().sum();
        let seen = segment.processes.len() as u64;
        metrics.processes_seen += seen;
        metrics.processes_opened += seen.saturating_sub(refused);
        for (kind, number) in &segment.end.dropped {
            *metrics.dropped.entry((*kind).into()).or_default() += number;
        }
        for (kind, number) in &segment.end.kept {
            metrics.table_entries.insert((*kind).into(), *number);
        }
        for (reason, processes) in &segment.refused {
            *metrics.processes_refused.entry((*reason).into()).or_default() += processes;
        }
    }

    /// Says that files of processes could not be opened, whose functions have no names.
    fn report_limits(&self, end: &SegmentEnd) {
        let files = end.kept.get("files_not_opened").copied().unwrap_or(0);
        if files > 0 {
            let hint = "a larger limit of open files: `ulimit -n`, or LimitNOFILE= of the unit";
            let fields: [(_, &dyn Display); 2] = [("files", &files), ("try", &hint)];
            self.surroundings.log.error("files_not_opened", "open files", &fields);
        }
    }

    /// Writes the metrics to the directory of the segments, for what serves them. `is_lost`: the segment could not be written,
    /// which has been said.
    fn write_metrics(&mut self, is_lost: bool) {
        self.metrics.rate_hertz = self.recording.rate() as f64;
        self.metrics.history_bytes = self.writer.size().1;
        self.metrics.uptime_seconds = self.began.elapsed().as_secs_f64();
        let written = self.writer.write_metrics(&self.metrics.text());
        if let Err(e) = written
            && !is_lost
        {
            self.surroundings.log.error("metrics_not_written", &e.to_string(), &[]);
        }
    }

    /// The rate that the budget allows the next segment.
    fn next_rate(&mut self, used: Used) -> u64 {
        let Some(budget) = &mut self.budget else {
            return used.rate;
        };
        let NextRate { rate, is_kept } = budget.next_rate(used);
        if !is_kept {
            let limit = format!("{:.2}", 100.0 * self.options.max_cpu.unwrap_or(0.0));
            self.surroundings.log.error(
                "budget_exceeded",
                "cpu",
                &[
                    ("max_cpu_percent", &limit),
                    ("why", &"the lowest rate costs more"),
                    ("try", &"sample fewer processes, or a larger --max-cpu"),
                ],
            );
        }
        if rate != used.rate {
            self.surroundings
                .log
                .event("rate", &[("from_hz", &used.rate), ("to_hz", &rate)]);
        }
        rate
    }

    /// Drops what can be read again, if all processes of nativeprof use too much memory.
    fn keep_memory(&mut self, network: Option<Pid>) {
        let parts = [
            ("sampler", Some(std::process::id())),
            ("naming", self.recording.naming_pid()),
            ("network", network),
        ];
        let mut used = 0;
        for (part, pid) in parts {
            let bytes = pid.and_then(procfs::pss).unwrap_or(0);
            used += bytes;
            self.metrics.memory_bytes.insert(part.into(), bytes);
        }
        let Some(limit) = self.options.max_memory else { return };
        if used > limit {
            self.recording.release_memory();
            let fields: [(_, &dyn Display); 2] = [("bytes", &used), ("max_bytes", &limit)];
            self.surroundings.log.error("memory_exceeded", "memory", &fields);
        }
    }

    /// CPU time of all processes of nativeprof and of the BPF programs, seconds.
    fn measure_cpu(&mut self, network: Option<Pid>) -> f64 {
        let parts = [
            ("sampler", sys::clock::process_cpu_time()),
            ("naming", self.recording.naming_cpu()),
            ("network", network.and_then(sys::clock::cpu_time_of).unwrap_or(0)),
            ("bpf", self.recording.kernel_time()),
        ];
        let mut all = 0.0;
        for (part, nanoseconds) in parts {
            let seconds = nanoseconds as f64 * 1e-9;
            all += seconds;
            self.metrics.cpu_seconds.insert(part.into(), seconds);
        }
        all
    }

    fn notify(&self, sent: io::Result<()>) {
        if let Err(e) = sent {
            self.surroundings
                .log
                .error("service_manager_not_reached", &e.to_string(), &[]);
        }
    }
}

fn spare_files() -> Vec<File> {
    (0..SPARE).map_while(|_| File::open("/dev/null").ok()).collect()
}

/// Reads the labels of processes that are new in a segment, whose others have theirs in `resources`: they may be about to exit.
fn read_labels(
    labels: &mut LabelReader,
    instances: &[ProcessInstance],
    resources: &mut Vec<Rc<Vec<(String, String)>>>,
) {
    for instance in instances.iter().skip(resources.len()) {
        resources.push(labels.resource(instance));
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
            .map(|(reason, processes)| (format!("{REFUSED_PROCESSES}{reason}"), processes))
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

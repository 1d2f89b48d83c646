//! A session with the backend that samples for it: what live recordings run.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use super::long_term;
use super::pump::{EventPump, PumpEnd, update_backend};
use super::{GilCounts, Naming, ProcessInstance, QualityCounts, SegmentEnd, Session, SessionOptions, TaskCounts};
use crate::capture::{Backend, SampleCounts};
use crate::edges::EdgeJudge;
use crate::error::{Error, Result};
use crate::event::{Event, Pid, Tid};
use crate::privileges::credentials;
use crate::privileges::credentials::Caps;
use crate::process::launch::Launched;
use crate::process::machine;
use crate::process::system::{LiveSystem, System};
use crate::profile::machine::Machine;
use crate::profile::measure::{Clock, Measure, event_name};
use crate::profile::model::{Meta, Profile, Quality, StopSummary};
use crate::profile::resident::ResidentMemory;
use crate::resolve::Fetch;
use crate::resolve::naming::NamingProcess;
use crate::sys;
use crate::sys::procfs;
use crate::tape::recorder::{RecordingSystem, TapeRecorder};

/// Time between two looks at what has been sampled while the session is busy with something else: the ring has room for some
/// hundred samples.
const BUFFER_INTERVAL: Duration = Duration::from_millis(100);

/// A live recording: of one process, or of those that descend from it.
pub struct Recording {
    session: Session,
    backend: Box<dyn Backend>,
    pump: EventPump,
    tape: Option<Rc<TapeRecorder>>,
    /// The first process, and its command line.
    pid: Pid,
    command: String,
    /// Samples per second.
    rate: u64,
    machine: Machine,
    start: RecordingStart,
}

/// A segment of a whole host's recording.
pub struct HostSegment {
    pub profile: Profile,
    /// When it began.
    pub start: SystemTime,
    /// The processes that have samples.
    pub processes: Vec<ProcessInstance>,
    /// By sample of the profile's timeline, index in `processes`.
    pub process_of_sample: Vec<u32>,
    /// Processes that could not be opened, by the reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Samples that were lost, by the reason.
    pub lost: BTreeMap<&'static str, u64>,
    /// What was dropped with its end.
    pub end: SegmentEnd,
}

/// The same accounts, with times since a start in place of those on the samples' clock.
fn timed_from(mut accounts: Vec<ResidentMemory>, start: u64) -> Vec<ResidentMemory> {
    for account in &mut accounts {
        account.began = account.began.saturating_sub(start);
        if let Some(peak) = &mut account.peak {
            peak.time = peak.time.saturating_sub(start);
        }
    }
    accounts
}

/// Why samples were lost: `all`, those that the backend has counted and those that CPU time requires beyond them.
fn reasons_of_loss(counted: &SampleCounts, all: u64) -> BTreeMap<&'static str, u64> {
    BTreeMap::from([
        ("no_room", counted.lost.saturating_sub(counted.skipped)),
        ("skipped", counted.skipped),
        ("not_taken", all.saturating_sub(counted.lost)),
    ])
}

/// When the samples of the current segment begin.
#[derive(Clone, Copy)]
struct RecordingStart {
    /// On the samples' clock, ns.
    time: u64,
    date: SystemTime,
    /// CPU time of this process until then, ns.
    cpu: u64,
    /// The backend's counts of earlier segments.
    counted: SampleCounts,
}

impl RecordingStart {
    fn now() -> RecordingStart {
        RecordingStart {
            time: sys::clock::now(),
            date: SystemTime::now(),
            cpu: sys::clock::process_cpu_time(),
            counted: SampleCounts::default(),
        }
    }
}

impl Recording {
    /// A recording by `backend`, which takes `rate` samples per second, of the process `pid` first (0: of a whole host). What is
    /// read of the processes is written to `tape` as well, if there is one.
    pub fn new(
        options: SessionOptions,
        backend: Box<dyn Backend>,
        rate: u64,
        pid: Pid,
        tape: Option<Rc<TapeRecorder>>,
    ) -> Recording {
        let system: Box<dyn System> = match &tape {
            Some(tape) => Box::new(RecordingSystem(tape.clone())),
            None => Box::new(LiveSystem),
        };
        let mut session = Session::new(options, system);
        // What the judge reads of the process gets onto the tape.
        session.stacks.edges = tape.as_ref().map(|_| EdgeJudge::default());
        Recording {
            session,
            backend,
            pump: EventPump::default(),
            tape,
            pid,
            command: String::new(),
            rate,
            machine: machine::this_machine(),
            start: RecordingStart::now(),
        }
    }

    /// Has names read by another process with little memory, or not at all: for a recording that never ends.
    pub fn name_only_apart(&mut self) {
        self.session.naming = Naming {
            process: Some(NamingProcess::of_host()),
            ..Naming::default()
        };
    }

    /// Has names read by another process, and debug files downloaded by `fetch`.
    pub fn name_apart(&mut self, fetch: Option<Fetch>) {
        self.session.naming = Naming::apart(fetch);
    }

    /// Puts the stacks of wakers below the waits that they ended; `kernel`: with the kernel's functions.
    pub fn show_wakers(&mut self, kernel: bool) {
        self.session.show_wakers(kernel);
    }

    /// Adds a process that runs, sampled from [`Recording::start`] on.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn attach(&mut self, pid: Pid) -> Result<()> {
        if pid == self.pid {
            self.command = procfs::command_line(pid);
            self.machine.cores = machine::allowed_cpus(pid);
        }
        let backend = &mut *self.backend;
        self.session
            .open(pid, &mut |pid, layout| update_backend(backend, pid, layout))?;
        self.backend.attach(pid)
    }

    /// Lets a command run, sampled from its first instruction on.
    ///
    /// # Errors
    /// Those of the backend; if the command cannot be executed.
    pub fn start_command(&mut self, launched: &mut Launched, words: &[String]) -> Result<()> {
        self.command = words.join(" ");
        // The new program's mappings come as events; until then the process still runs our code.
        let pid = launched.pid();
        self.session.add_before_exec(pid);
        if let Some(program) = launched.program() {
            self.session.prepare(pid, program);
        }
        self.backend.update_process(pid, &Default::default())?;
        self.backend.attach_at_exec(pid)?;
        launched.release()
    }

    /// Starts sampling.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn start(&mut self) -> Result<()> {
        self.start = RecordingStart::now();
        self.backend.start()
    }

    /// Processes samples that are available; true if more are. Waits up to `wait` for the first one, and returns soon after
    /// `until`, if given: a target can make each sample slow to read.
    ///
    /// # Errors
    /// Those of the backend, and of the session on an event.
    pub fn poll(&mut self, wait: Duration, until: Option<Instant>) -> Result<bool> {
        self.poll_until(wait, PumpEnd { until, before: None })
    }

    fn poll_until(&mut self, wait: Duration, end: PumpEnd) -> Result<bool> {
        let tape = self.tape.as_deref();
        let mut observe = |event: &Event| {
            if let Some(tape) = tape {
                tape.event(event);
            }
        };
        let (backend, session) = (&mut *self.backend, &mut self.session);
        let more = self.pump.pump(backend, session, &mut observe, wait, end);
        if tape.is_some_and(TapeRecorder::is_full) {
            self.session.stacks.edges = None;
        }
        more
    }

    /// How long [`Recording::poll`] would wait: not at all while samples are waiting, else at most `max`.
    pub fn wait(&self, max: Duration) -> Duration {
        self.pump.wait(max)
    }

    /// Stops sampling. What was sampled before can still be processed.
    pub fn stop(&mut self) {
        self.backend.stop();
    }

    /// Why there can be no samples, as [`Backend::missing_source`] says.
    pub fn missing_source(&self) -> Option<Error> {
        self.backend.missing_source()
    }

    /// The accounts of resident memory, after [`Recording::stop`].
    pub fn memory_accounts(&mut self) -> Vec<ResidentMemory> {
        timed_from(self.backend.memory_accounts(), self.start.time)
    }

    /// How sampling went so far.
    pub fn remarks(&self) -> SamplingRemarks {
        let mut exceeded = self.backend.exceeded_limits();
        exceeded.extend(self.session.activities.resident.exceeded());
        exceeded.extend(self.session.activities.allocations.exceeded());
        let unknown = self.session.files.unknown_probes.get();
        exceeded.extend((unknown > 0).then(|| {
            format!(
                "at some probes for allocations ({unknown}) arguments have forms that are not known: their blocks are missing"
            )
        }));
        SamplingRemarks {
            timer: self.backend.timer_remark(),
            budget: self.backend.sampling_remark(),
            exceeded,
        }
    }

    /// Stops sampling and processes what was sampled, for `drain_time` at most: the rest counts as lost. `failure` is what ended
    /// the recording early, if anything did.
    pub fn finish(mut self, drain_time: Duration, mut failure: Option<Error>) -> FinishedRecording {
        // Before the time that stopping takes: it reads all threads that wait.
        let duration = self.elapsed();
        self.stop();
        if let Some(naming) = &mut self.session.naming.process {
            naming.prepare();
        }
        let until = Instant::now() + drain_time;
        failure = failure.or(self.drain(until).err());
        failure = failure.or(self.session.add_open_intervals(&mut *self.backend).err());
        // Threads that have got a CPU meanwhile have handed in the samples of their last waits.
        failure = failure.or(self.drain(until).err());
        let memory = self.backend.memory_accounts();
        let memory_over_time = self.backend.memory_over_time();
        let lasted = duration.as_nanos().try_into().unwrap_or(u64::MAX);
        let memory_over_time = memory_over_time.of_profile(self.start.time, lasted);
        let Session {
            files,
            activities,
            segment,
            options,
            ..
        } = &mut self.session;
        let by_process = options.grouping.processes;
        activities.resident.finish(&memory, by_process, &*files.system, segment);
        let left = std::mem::take(&mut self.pump).discard(&mut *self.backend);
        let mut counts = self.counts();
        counts.lost += *left.as_ref().unwrap_or(&0);
        failure = failure.or(left.err());
        let meta = Meta {
            sampling_cpu: sys::clock::process_cpu_time().saturating_sub(self.start.cpu) as f64 * 1e-9,
            memory: timed_from(memory, self.start.time),
            memory_over_time,
            ..self.meta_of(&counts, duration)
        };
        self.session.update_thread_names();
        self.session.open_symbol_sources(self.pid);
        FinishedRecording {
            remarks: self.remarks(),
            session: self.session,
            began: self.start.time,
            meta,
            failure,
        }
        // The backend goes here: its descriptors are privileges too.
    }

    fn drain(&mut self, until: Instant) -> Result<()> {
        while self.poll(Duration::ZERO, Some(until))? && Instant::now() < until {}
        Ok(())
    }

    /// The samples of the last `seconds` before `until` (on the samples' clock), of all threads or one, and the time at
    /// which they begin. What is older than `max_age` seconds is forgotten.
    pub fn window(&mut self, seconds: u64, max_age: u64, until: u64, thread: Option<Tid>) -> (Profile, u64) {
        let began = self.start.time;
        let before = |seconds: u64| until.saturating_sub(seconds.saturating_mul(1_000_000_000)).max(began);
        let since = before(seconds);
        self.session.forget_before(before(max_age));
        let meta = Meta {
            memory: timed_from(self.backend.memory_accounts_so_far(), began),
            ..self.meta()
        };
        self.session.look_up_memory();
        let is_all = since == began && thread.is_none();
        let others = if is_all { meta.memory.clone() } else { Vec::new() };
        self.session.open_symbol_sources(self.pid);
        let span: Range<u64> = since..until;
        let session = &mut self.session;
        // Symbol files are not trusted: no capability is effective while they are parsed.
        let profile = credentials::with_only(Caps::NONE, || session.window(span, thread, &others, meta));
        let mut profile = profile.unwrap_or_default();
        for lag in &mut profile.meta.lags {
            lag.time = lag.start.saturating_sub(began);
        }
        (profile, since)
    }

    /// The profile of what was sampled since the start or the last call. `profiler_cpu` is our CPU time since then, in seconds.
    pub fn take_profile(&mut self, profiler_cpu: f64) -> Profile {
        let next = self.next_start();
        let meta = Meta {
            profiler_cpu,
            sampling_cpu: profiler_cpu,
            ..self.meta_until(&next)
        };
        let profile = self.session.resolve(self.start.time, meta);
        self.session.close_segment();
        self.start = next;
        profile
    }

    /// The start of the next segment, which is now.
    fn next_start(&self) -> RecordingStart {
        RecordingStart {
            counted: self.backend.counts(),
            ..RecordingStart::now()
        }
    }

    /// What is known of the segment that ends where the next one starts.
    fn meta_until(&self, next: &RecordingStart) -> Meta {
        let duration = Duration::from_nanos(next.time.saturating_sub(self.start.time));
        self.meta_of(&self.of_segment(next.counted), duration)
    }

    /// When the current segment began, on the samples' clock, ns.
    pub fn start_time(&self) -> u64 {
        self.start.time
    }

    /// Samples per second.
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// The processes that have samples in the current segment, by the number that [`HostSegment`] has of them.
    pub fn instances(&self) -> &[ProcessInstance] {
        &self.session.segment.instances.all
    }

    /// Ends a segment of a whole host's recording, which goes on with `rate` samples per second. Samples belong to the segment
    /// in which they were taken, so that each counts with the rate that it was taken at. `complete` is called with the segment's
    /// processes, before names are read, which may take long; `meanwhile` again and again then, in another thread. No
    /// capability is effective while files are parsed.
    ///
    /// # Errors
    /// As [`Recording::poll`].
    pub fn take_host_segment(
        &mut self,
        rate: u64,
        complete: impl FnOnce(&[ProcessInstance]),
        meanwhile: &(dyn Fn() + Sync),
    ) -> Result<HostSegment> {
        if rate != self.rate {
            self.backend.set_rate(rate);
        }
        let next = self.next_start();
        // A target can make each sample slow to read.
        let soon = || PumpEnd {
            until: Some(Instant::now() + BUFFER_INTERVAL),
            before: Some(next.time),
        };
        while self.poll_until(Duration::ZERO, soon())? {
            meanwhile();
        }
        complete(self.instances());
        let (began, meta) = (self.start, self.meta_until(&next));
        let lost = reasons_of_loss(&self.of_segment(next.counted), meta.quality.lost);
        let (pid, session) = (self.pid, &mut self.session);
        let profile = while_buffering(&mut *self.backend, meanwhile, || {
            session.open_symbol_sources(pid);
            credentials::with_only(Caps::NONE, || session.resolve_new(began.time, meta))
        });
        let instances = std::mem::take(&mut session.segment.instances);
        let end = long_term::close(session);
        for pid in &end.gone {
            self.backend.remove_process(*pid);
        }
        self.start = next;
        self.rate = rate;
        self.session.options.measure = Measure::period(Clock::Cpu, rate);
        Ok(HostSegment {
            profile: profile.unwrap_or_default(),
            start: began.date,
            processes: instances.all,
            process_of_sample: instances.of_sample,
            refused: instances.refused,
            lost,
            end,
        })
    }

    /// Does work that may take long. Samples that are taken meanwhile wait in memory, a thousand of them; `meanwhile` is called
    /// again and again in another thread.
    pub fn while_buffering<R>(&mut self, meanwhile: &(dyn Fn() + Sync), work: impl FnOnce() -> R) -> R {
        while_buffering(&mut *self.backend, meanwhile, work)
    }

    /// CPU time that reading names has taken in another process, ns.
    pub fn naming_cpu(&self) -> u64 {
        self.session.naming.process.as_ref().map_or(0, NamingProcess::cpu_time)
    }

    /// Drops names that were read, which are read again when they are needed, and ends the process that reads them.
    pub fn release_memory(&mut self) {
        self.session.naming.cache.clear();
        if let Some(naming) = &mut self.session.naming.process {
            naming.stop();
        }
    }

    /// Id of the process that reads names, if it runs.
    pub fn naming_pid(&self) -> Option<Pid> {
        self.session.naming.process.as_ref().and_then(NamingProcess::id)
    }

    /// Time that the backend has used in the kernel while it took samples, ns, of all segments.
    pub fn kernel_time(&self) -> u64 {
        self.backend.kernel_time()
    }

    /// What is known of the recording so far.
    fn meta(&self) -> Meta {
        self.meta_of(&self.counts(), self.elapsed())
    }

    fn meta_of(&self, counts: &SampleCounts, duration: Duration) -> Meta {
        let since = self.start.date.duration_since(SystemTime::UNIX_EPOCH);
        Meta {
            version: env!("CARGO_PKG_VERSION").into(),
            // Samples of memory are taken by bytes.
            rate: match self.session.options.measure {
                Measure::Bytes(_) => 0,
                _ => self.rate,
            },
            event: event_name(self.backend.event(), self.session.options.gil_only),
            backend: self.backend.backend().into(),
            start: since.map_or(0.0, |d| d.as_secs_f64()),
            duration: duration.as_secs_f64(),
            pid: self.pid,
            command: self.command.clone(),
            machine: self.machine_now(),
            stopped: counts.stopped.map(|h| StopSummary {
                median_us: h.median / 1000,
                max_us: h.longest / 1000,
            }),
            quality: self.quality_of(counts),
            target_cpu: counts.cpu_time as f64 * 1e-9,
            ..Meta::default()
        }
    }

    /// The machine. The target may have changed which CPUs it runs on, or was executed by a program that did.
    fn machine_now(&self) -> Machine {
        Machine {
            cores: match machine::allowed_cpus(self.pid) {
                0 => self.machine.cores,
                cores => cores,
            },
            ..self.machine.clone()
        }
    }

    /// The backend's counts of the current segment.
    fn counts(&self) -> SampleCounts {
        self.of_segment(self.backend.counts())
    }

    /// What the current segment has of all the backend's counts.
    fn of_segment(&self, all: SampleCounts) -> SampleCounts {
        let earlier = self.start.counted;
        SampleCounts {
            cpu_time: all.cpu_time.saturating_sub(earlier.cpu_time),
            lost: all.lost.saturating_sub(earlier.lost),
            skipped: all.skipped.saturating_sub(earlier.skipped),
            ..all
        }
    }

    /// Quality of all samples.
    pub fn quality(&self) -> Quality {
        self.quality_of(&self.counts())
    }

    fn quality_of(&self, counts: &SampleCounts) -> Quality {
        let (options, quality) = (&self.session.options, self.quality_counts());
        // Off the CPU nothing is expected: intervals are taken by their lengths. Nor of one lock's holders, or of memory.
        let is_of_memory = matches!(options.measure, Measure::Bytes(_)) || options.own_code.is_some();
        if !options.measure.is_time() && !options.gil_only && !is_of_memory {
            quality.quality_at_rate(counts, self.rate)
        } else {
            quality.quality(0, counts.lost)
        }
    }

    /// Samples by quality so far.
    pub fn quality_counts(&self) -> &QualityCounts {
        &self.session.segment.quality
    }

    /// Time since the segment began.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(sys::clock::now().saturating_sub(self.start.time))
    }

    /// Name of the backend and its event for messages: `ebpf, cpu-clock`.
    pub fn backend_name(&self) -> String {
        self.backend.name()
    }

    /// Whether an interpreter was found in any process.
    pub fn has_python(&self) -> bool {
        !self.session.names.interpreters.is_empty()
    }

    /// Threads of the first process that hold the global lock of an interpreter now.
    pub fn gil_holders(&self) -> Vec<Tid> {
        let process = self.session.processes.get(self.pid);
        process.map_or(Vec::new(), |process| process.gil_holders(&*self.session.files.system))
    }
}

/// Does work while another thread keeps what the backend samples, and calls `meanwhile`.
fn while_buffering<R>(backend: &mut dyn Backend, meanwhile: &(dyn Fn() + Sync), work: impl FnOnce() -> R) -> R {
    let Some(mut buffering) = backend.buffering() else {
        return work();
    };
    std::thread::scope(|scope| {
        let (working, done) = mpsc::channel::<()>();
        let buffer = move || {
            // It reads mapped memory only.
            let is_harmless = credentials::keep(Caps::NONE).is_ok();
            while done.recv_timeout(BUFFER_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if is_harmless {
                    buffering.buffer();
                }
                meanwhile();
            }
        };
        // Without the thread, samples that the ring has no room for are lost, and counted.
        let thread = std::thread::Builder::new().name("buffer".into());
        let _ = thread.spawn_scoped(scope, buffer);
        let result = work();
        drop(working);
        result
    })
}

/// What a user may want to know of how samples were taken, as texts.
pub struct SamplingRemarks {
    /// How threads were sampled that the usual timer cannot sample.
    pub timer: Option<String>,
    /// Which share of the samples was taken, if not all were.
    pub budget: Option<String>,
    /// Limits that were exceeded.
    pub exceeded: Vec<String>,
}

/// A recording whose samples are complete, and whose names are not read yet.
pub struct FinishedRecording {
    session: Session,
    /// On the samples' clock, ns.
    began: u64,
    meta: Meta,
    pub remarks: SamplingRemarks,
    /// What ended the recording early.
    pub failure: Option<Error>,
}

impl FinishedRecording {
    /// The profile, with the names of its frames. All files were opened before; no capabilities are needed, except for debug
    /// files.
    pub fn resolve(&mut self) -> Profile {
        let mut profile = self.session.resolve(self.began, std::mem::take(&mut self.meta));
        if self.session.options.allocations {
            self.session.activities.allocations.add_values(&mut profile, self.began);
        }
        let naming = self.session.naming.process.take();
        let naming_cpu = naming.map_or(0, |naming| naming.cpu_time());
        profile.meta.profiler_cpu = (sys::clock::process_cpu_time() + naming_cpu) as f64 * 1e-9;
        profile
    }

    /// When it began, on the samples' clock, ns.
    pub fn began(&self) -> u64 {
        self.began
    }

    /// Samples of coroutines; `None` if no tasks were searched for.
    pub fn task_counts(&self) -> Option<TaskCounts> {
        self.session.activities.tasks.counts()
    }

    /// Samples by whether their thread held the interpreter lock, if only such threads were sampled.
    pub fn gil_counts(&self) -> Option<GilCounts> {
        self.session.activities.states.gil
    }
}

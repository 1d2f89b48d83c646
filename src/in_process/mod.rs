//! Profiles the process that it runs in: recordings of its threads, and single stacks on demand. Basis of `python/`.
//!
//! Nothing here needs the GIL: the interpreter's memory is read like that of another process.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::capture::signal::{self, SamplingClock, SignalBackend};
use crate::cpython;
use crate::error::{Error, ErrorKind, Result};
use crate::profile::measure::{Clock, Measure};
use crate::profile::model::Profile;
use crate::session::{Grouping, Recording, SessionOptions};
use crate::sys;
use crate::sys::threads;

pub mod allocations;
pub mod thread_stack;

use allocations::AllocationLog;

/// Parameters of a recording.
#[derive(Clone, Debug)]
pub struct ProfilerConfig {
    /// Samples per second, per thread; [`Recorder::limitation`] says whether there are fewer.
    pub rate: u64,
    pub clock: SamplingClock,
    /// `pthread_self` (Python's `get_ident`) of the only threads to sample; `None`: all.
    pub threads: Option<Vec<u64>>,
    /// Native frames as well as Python frames.
    pub native: bool,
    /// One node per thread below the root.
    pub by_thread: bool,
    /// With [`SamplingClock::Calls`]: what is known of the allocations that are sampled.
    pub allocations: Option<Arc<AllocationLog>>,
}

/// Maximum time between two polls of the samples. The backend waits less, and a command ends its wait.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

enum RecorderCommand {
    /// Get the profile so far and begin a new one.
    Take(Sender<Profile>),
    Stop(Sender<Profile>),
}

/// A recording of this process, made by a separate thread.
pub struct Recorder {
    commands: Sender<RecorderCommand>,
    thread: Option<JoinHandle<()>>,
    generation: u32,
    limitation: Option<Error>,
}

impl Recorder {
    /// Starts a recording; sampling has begun when this returns.
    ///
    /// # Errors
    /// `Unsupported`: there is one already, or this process cannot sample itself. `Usage`: a rate of 0.
    pub fn start(mut config: ProfilerConfig) -> Result<Recorder> {
        if config.rate == 0 {
            return Err(Error::new(ErrorKind::Usage, "the rate must be at least 1 Hz").hint("rate=100"));
        }
        let mut limitation = None;
        if config.clock == SamplingClock::Cpu {
            (config.rate, limitation) = signal::possible_rate(config.rate);
        }
        let generation = threads::generation();
        let (commands, received) = channel();
        let (notify, begun) = channel();
        let thread = std::thread::Builder::new().name("nativeprof".into());
        let thread = thread.spawn(move || {
            threads::block_signals();
            match RecordingThread::begin(&config) {
                Ok(recording) => {
                    let _ = notify.send(Ok(()));
                    recording.run(&received);
                }
                Err(e) => drop(notify.send(Err(e))),
            }
        });
        let thread = thread.map_err(|e| Error::not_started("cannot start the sampling thread", e))?;
        begun.recv().unwrap_or_else(|_| Err(ended()))?;
        Ok(Recorder {
            commands,
            thread: Some(thread),
            generation,
            limitation,
        })
    }

    /// Why there are fewer samples per second than requested; `None`: there are not.
    pub fn limitation(&self) -> Option<&Error> {
        self.limitation.as_ref()
    }

    /// Whether it was started in this process and not in one that this was forked from.
    pub fn is_current_process(&self) -> bool {
        self.generation == threads::generation()
    }

    fn command(&self, command: fn(Sender<Profile>) -> RecorderCommand) -> Result<Profile> {
        if !self.is_current_process() {
            return Err(Error::new(ErrorKind::Unsupported, "this process has no recording")
                .why("it was forked from the recorded process; only the parent is recorded")
                .hint("start a new recording in this process"));
        }
        let (reply, response) = channel();
        self.commands.send(command(reply)).map_err(|_| ended())?;
        signal::wake();
        response.recv().map_err(|_| ended())
    }

    /// The samples since the start or the last call. Sampling continues.
    ///
    /// # Errors
    /// In a forked child, and after the end.
    pub fn take_profile(&self) -> Result<Profile> {
        self.command(RecorderCommand::Take)
    }

    /// Ends the recording; returns the samples since the start or the last [`Recorder::take_profile`].
    ///
    /// # Errors
    /// In a forked child: the recording continues in its parent.
    pub fn stop(mut self) -> Result<Profile> {
        let profile = self.command(RecorderCommand::Stop)?;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its profile has come
        }
        Ok(profile)
    }
}

impl Drop for Recorder {
    /// Ends the recording; its samples are lost.
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.is_current_process() {
            let (reply, _) = channel();
            let _ = self.commands.send(RecorderCommand::Stop(reply)); // the thread has exited
            signal::wake();
            let _ = thread.join();
        } else {
            // A forked child does not have the thread, whatever the C library believes: there is nothing to wait for,
            // and what the thread shared with us may be in any state.
            std::mem::forget(thread);
            std::mem::forget(std::mem::replace(&mut self.commands, channel().0));
        }
    }
}

/// Number of the signal that interrupts threads; `None` if another handler has replaced ours.
pub fn signal() -> Option<i32> {
    signal::number(cpython::frame_walk::walk)
}

fn ended() -> Error {
    Error::new(ErrorKind::Io, "the recording has ended")
        .why("the sampling thread has exited")
        .hint("start a new Profiler")
}

/// State of the recording thread.
struct RecordingThread {
    recording: Recording,
    allocations: Option<Arc<AllocationLog>>,
    /// CPU time of this thread before the samples of the next profile, ns.
    cpu_before: u64,
}

impl RecordingThread {
    fn begin(config: &ProfilerConfig) -> Result<RecordingThread> {
        let pid = std::process::id();
        let options = signal::SignalOptions {
            rate: config.rate,
            clock: config.clock,
            threads: config.threads.clone(),
            native: config.native,
        };
        let backend = SignalBackend::new(options, cpython::frame_walk::walk)?;
        let grouping = Grouping {
            processes: false,
            threads: config.by_thread,
        };
        let options = SessionOptions {
            grouping,
            native: config.native,
            spans: true,
            measure: match config.clock {
                SamplingClock::Cpu => Measure::period(Clock::Cpu, config.rate),
                SamplingClock::Wall => Measure::time(config.rate),
                SamplingClock::Calls => Measure::Event,
            },
            own_code: (config.clock == SamplingClock::Calls).then_some(signal::sample_here as *const () as u64),
            ..SessionOptions::default()
        };
        let mut recording = Recording::new(options, Box::new(backend), config.rate, pid, None);
        recording.attach(pid)?;
        if let Some(allocations) = &config.allocations {
            allocations.set_own_thread();
        }
        recording.start()?;
        Ok(RecordingThread {
            recording,
            allocations: config.allocations.clone(),
            cpu_before: 0,
        })
    }

    fn run(mut self, received: &Receiver<RecorderCommand>) {
        loop {
            // The owner cannot disappear silently: dropping its end of the channel sends `Stop`.
            match received.try_recv() {
                Ok(RecorderCommand::Take(reply)) => drop(reply.send(self.profile(false))),
                Ok(RecorderCommand::Stop(reply)) => {
                    self.recording.stop();
                    self.poll(Duration::ZERO);
                    let _ = reply.send(self.profile(true));
                    return;
                }
                Err(_) => {}
            }
            self.poll(POLL_INTERVAL);
        }
    }

    /// Takes in what has been sampled.
    fn poll(&mut self, wait: Duration) {
        let cpu = || sys::clock::read_clock(libc::CLOCK_THREAD_CPUTIME_ID).unwrap_or(0);
        let before = cpu();
        // Only the backend fails, and this one does not.
        let _ = self.recording.poll(wait, None);
        if let Some(allocations) = &self.allocations {
            allocations.control(cpu().saturating_sub(before));
        }
    }

    /// The profile so far; the next one begins, unless it is the last.
    fn profile(&mut self, is_last: bool) -> Profile {
        if self.allocations.is_some() {
            self.poll(Duration::ZERO);
        }
        let start = self.recording.start_time();
        let cpu = threads::cpu_time(sys::process::current_tid() as u32).unwrap_or(0);
        let before = std::mem::replace(&mut self.cpu_before, cpu);
        let mut profile = self.recording.take_profile(cpu.saturating_sub(before) as f64 / 1e9);
        if let Some(allocations) = &self.allocations {
            allocations.add_values(&mut profile, start, is_last);
        }
        profile
    }
}

//! This process from inside: recordings of its threads, and single stacks on demand. What `python/` is made of.
//!
//! Nothing here needs the interpreter's lock: its memory is read like that of another process.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use crate::capture::signal::{self, Clock, SignalSource};
use crate::capture::{Counts, Source};
use crate::error::{Error, Kind, Result};
use crate::interp;
use crate::process::host::Live;
use crate::process::{self, own, sys};
use crate::session::{self, Grouping, Session};
use crate::tree::profile::{Meta, Profile};

pub mod stack;

/// How a recording is made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Samples per second of each thread.
    pub rate: u64,
    pub clock: Clock,
    /// Pointers (`pthread_self`, Python's `get_ident`) of the only threads to sample; `None`: all.
    pub threads: Option<Vec<u64>>,
    /// Native frames too, not only Python's.
    pub native: bool,
    /// A node per thread below the root.
    pub by_thread: bool,
}

/// Longest wait for samples before commands are looked at again.
const TURN: Duration = Duration::from_millis(10);

enum Command {
    /// What was gathered so far; a new profile begins.
    Take(Sender<Profile>),
    Stop(Sender<Profile>),
}

/// A recording of this process, made by a thread of its own.
pub struct Recorder {
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    generation: u32,
}

impl Recorder {
    /// Begins a recording; sampling has begun when it returns.
    ///
    /// # Errors
    /// `Unsupported`: there is one already, or this process cannot sample itself. `Usage`: a rate of 0.
    pub fn start(settings: Settings) -> Result<Recorder> {
        if settings.rate == 0 {
            return Err(Error::new(Kind::Usage, "a rate of 0 Hz takes no samples").hint("rate=100"));
        }
        let generation = own::generation();
        let (commands, told) = channel();
        let (tell, begun) = channel();
        let thread = std::thread::Builder::new().name("nativeprof".into());
        let thread = thread.spawn(move || {
            own::block_signals();
            match Recording::begin(settings) {
                Ok(recording) => {
                    let _ = tell.send(Ok(()));
                    recording.run(&told);
                }
                Err(e) => drop(tell.send(Err(e))),
            }
        });
        let thread = thread.map_err(|e| Error::io("cannot start the thread that samples", e))?;
        begun.recv().unwrap_or_else(|_| Err(ended()))?;
        Ok(Recorder {
            commands,
            thread: Some(thread),
            generation,
        })
    }

    /// Was it started in this process, not in one that this was forked from?
    pub fn is_own(&self) -> bool {
        self.generation == own::generation()
    }

    fn command(&self, command: fn(Sender<Profile>) -> Command) -> Result<Profile> {
        if !self.is_own() {
            return Err(
                Error::new(Kind::Unsupported, "this process has no recording of its own")
                    .why("it was forked from the process that is recorded, which goes on")
                    .hint("start another one here"),
            );
        }
        let (reply, answer) = channel();
        self.commands.send(command(reply)).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())
    }

    /// What was gathered since the start or the last call. Sampling goes on.
    ///
    /// # Errors
    /// In a forked child, and after the end.
    pub fn take(&self) -> Result<Profile> {
        self.command(Command::Take)
    }

    /// Ends the recording; what was gathered since the start or the last [`Recorder::take`].
    ///
    /// # Errors
    /// In a forked child: the recording goes on in its parent.
    pub fn stop(mut self) -> Result<Profile> {
        let profile = self.command(Command::Stop)?;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // its profile has come
        }
        Ok(profile)
    }
}

impl Drop for Recorder {
    /// Ends the recording; what it has gathered is lost.
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.is_own() {
            let (reply, _) = channel();
            let _ = self.commands.send(Command::Stop(reply)); // it has ended by itself
            let _ = thread.join();
        } else {
            // In a forked child there is no such thread, whatever the C library believes: nothing to wait for, and
            // what it shared with us may be in any state.
            std::mem::forget(thread);
            std::mem::forget(std::mem::replace(&mut self.commands, channel().0));
        }
    }
}

/// Number of the signal that interrupts threads; `None` if another handler has taken its place.
pub fn signal() -> Option<i32> {
    signal::number(interp::walk::walk)
}

fn ended() -> Error {
    Error::new(Kind::Io, "the recording has ended").why("the thread that samples is gone")
}

/// What the thread does.
struct Recording {
    settings: Settings,
    session: Session,
    source: SignalSource,
    /// Of the profile that is being gathered.
    began: u64,
    began_wall: SystemTime,
    before: Before,
}

/// Counts at the beginning of a profile.
#[derive(Default)]
struct Before {
    counts: Counts,
    own_cpu: u64,
}

impl Recording {
    fn begin(settings: Settings) -> Result<Recording> {
        let pid = std::process::id();
        let options = signal::Options {
            rate: settings.rate,
            clock: settings.clock,
            threads: settings.threads.clone(),
            native: settings.native,
        };
        let mut source = SignalSource::new(options, interp::walk::walk)?;
        let grouping = Grouping {
            processes: false,
            threads: settings.by_thread,
        };
        let making = session::Options {
            grouping,
            native: settings.native,
            weighted: None,
        };
        let mut session = Session::new(making, Box::new(Live));
        session.open(pid, &mut |pid, space| space.map_or(Ok(()), |s| source.learn(pid, s)))?;
        source.attach(pid)?;
        source.start()?;
        Ok(Recording {
            settings,
            session,
            source,
            began: sys::now(),
            began_wall: SystemTime::now(),
            before: Before::default(),
        })
    }

    fn run(mut self, told: &Receiver<Command>) {
        loop {
            // Who started it cannot go away without a word: their end of the channel says `Stop` when it is dropped.
            match told.try_recv() {
                Ok(Command::Take(reply)) => drop(reply.send(self.profile())),
                Ok(Command::Stop(reply)) => {
                    self.source.stop();
                    self.turn(Duration::ZERO);
                    let _ = reply.send(self.profile());
                    return;
                }
                Err(_) => {}
            }
            self.turn(TURN);
        }
    }

    /// Takes in what has been sampled.
    fn turn(&mut self, wait: Duration) {
        let mut events = Vec::new();
        // Polling this source does not fail.
        let _ = self.source.poll(wait, &mut events);
        self.session.open_files(&events);
        self.session.see_codes(&events);
        let source = &mut self.source;
        let mut learn = |pid, space: Option<&_>| space.map_or(Ok(()), |s| source.learn(pid, s));
        for event in events {
            // Only the source fails, and this one does not.
            let _ = self.session.event(event, &mut learn);
        }
    }

    /// The profile so far; another one begins.
    fn profile(&mut self) -> Profile {
        let counts = self.source.counts();
        let own_cpu = own::cpu_time(sys::own_tid() as u32).unwrap_or(0);
        let (now, before) = (sys::now(), std::mem::take(&mut self.before));
        let new = Counts {
            cpu_time: counts.cpu_time.saturating_sub(before.counts.cpu_time),
            lost: counts.lost.saturating_sub(before.counts.lost),
            ..counts
        };
        let pid = std::process::id();
        let when = (self.began_wall, Duration::from_nanos(now - self.began));
        let meta = Meta {
            command: process::command_line(pid),
            own_cpu: own_cpu.saturating_sub(before.own_cpu) as f64 / 1e9,
            ..self.session.meta(&self.source, &new, self.settings.rate, pid, when)
        };
        let profile = self.session.resolve(self.began, meta);
        self.session.begin_again();
        (self.began, self.began_wall) = (now, SystemTime::now());
        self.before = Before { counts, own_cpu };
        profile
    }
}

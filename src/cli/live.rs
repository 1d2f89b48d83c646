//! Live processes as `record`, `attach`, `top` and `dump` get at them: who runs the command, which process it is for,
//! and what is kept of the privileges when. The order of these steps is that of [`phases`].

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::args::{DebuginfodArg, Sampling, TaskArgs};
use super::backend::open_backend;
use super::debuginfod;
use super::discover::{self, check_target};
use super::print_status;
use crate::capture::{Mode, SamplingOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::privileges::credentials::{Caps, User};
use crate::privileges::{checks, phases};
use crate::process::launch::Launched;
use crate::resolve::Fetch;
use crate::session::{FinishedRecording, Grouping, Recording, SessionOptions, replay};
use crate::sys;
use crate::sys::process::ExitWatch;
use crate::sys::ptrace;
use crate::sys::spawn::Streams;
use crate::tape::TapeOptions;
use crate::tape::recorder::TapeRecorder;

/// Longest time before the clock, the target and signals are checked again.
const MAX_TURN: Duration = Duration::from_millis(100);
/// Maximum number of times that a tree of processes is read before sampling starts.
const MAX_SCANS: usize = 16;
/// Time allowed for samples that are still waiting at the end; the rest count as lost. Many threads on a busy machine leave a
/// backlog that takes far less; a target that makes each sample slow to read must not keep nativeprof for long.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// The user who runs this command, to whom nativeprof has switched if it was root.
pub struct Invoker {
    pub user: Option<User>,
    /// Downloads debug files, if that is wanted.
    pub fetch: Option<Fetch>,
}

impl Invoker {
    /// Switches to the user who ran sudo, unless nativeprof is to stay root (`as_root`), and keeps these capabilities as well.
    ///
    /// # Errors
    /// `NotPermitted`; those of the debuginfod client.
    pub fn switch_to(as_root: bool, kept: Caps, debuginfod: DebuginfodArg) -> Result<Invoker> {
        let is_root = sys::process::effective_uid() == 0;
        let user = if as_root {
            None
        } else {
            phases::switch_to_invoking_user_with(kept)?
        };
        let fetch = debuginfod::fetch(debuginfod, is_root, user.as_ref())?;
        Ok(Invoker { user, fetch })
    }
}

/// Checks that a process runs and is not nativeprof itself, and that its memory may be read. `action` is what is not permitted
/// otherwise: `sampling`.
///
/// # Errors
/// `NoSuchProcess`, `NotPermitted`.
pub fn check_readable(pid: Pid, action: &str) -> Result<()> {
    check_target(pid)?;
    match checks::memory(pid) {
        Some(missing) => Err(missing.error(format!("{action} process {pid} is not permitted"))),
        None => Ok(()),
    }
}

/// What to sample.
pub enum LiveTarget {
    Pid(Pid),
    /// A command with its arguments.
    Launch(Vec<String>, Streams),
}

/// How to sample it.
pub struct LiveOptions<'a> {
    pub rate: u64,
    pub sampling: &'a Sampling,
    pub tasks: &'a TaskArgs,
    /// By process: with those that descend from the target.
    pub grouping: Grouping,
    pub spans: bool,
    pub tape: Option<Rc<TapeRecorder>>,
    /// Capabilities that are needed to write the output.
    pub kept: Caps,
}

/// A target before anything is opened for it: a process, or a command that waits to be executed.
pub struct PreparedTarget {
    pub pid: Pid,
    target: LiveTarget,
    launched: Option<Launched>,
}

impl PreparedTarget {
    /// Checks the process, or forks the command. To be called before other threads exist, which might receive the signals that a
    /// backend waits for.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`, `NoSuchCommand`.
    pub fn new(target: LiveTarget, invoker: &Invoker, with_children: bool) -> Result<PreparedTarget> {
        let user = invoker.user.as_ref();
        let (pid, launched) = match &target {
            // Its children may be readable where it is not.
            LiveTarget::Pid(pid) if with_children => (*pid, check_target(*pid).map(|()| None)?),
            LiveTarget::Pid(pid) => (*pid, check_readable(*pid, "sampling").map(|()| None)?),
            LiveTarget::Launch(command, streams) => {
                let launched = Launched::prepare(command, user, *streams)?;
                (launched.pid(), Some(launched))
            }
        };
        // After the command was forked, which must not inherit the mask.
        ptrace::block_child_signals();
        Ok(PreparedTarget { pid, target, launched })
    }
}

/// A recording of a live process: everything is open, and sampling starts with [`LiveRecording::start`].
pub struct LiveRecording {
    pub recording: Recording,
    pub launched: Option<Launched>,
    pid: Pid,
    kept: Caps,
    /// Capabilities that sampling needs besides.
    needed: Caps,
    /// Becomes readable when the process ends.
    watch: ExitWatch,
}

impl LiveRecording {
    /// Opens the backend, attaches to the target or lets its command run.
    ///
    /// # Errors
    /// Those of the backend; `NoSuchProcess`, `NotPermitted`; if the command cannot be executed.
    pub fn open(prepared: PreparedTarget, invoker: Invoker, options: &LiveOptions) -> Result<LiveRecording> {
        let PreparedTarget {
            pid,
            target,
            mut launched,
        } = prepared;
        let needed = options.sampling.needs();
        phases::restrict_to_setup(Caps(options.kept.0 | needed.0))?;
        sys::files::raise_file_limit();
        sys::memory::keep_freed_memory();
        if let Some(launched) = &launched {
            launched.pass_on_signals();
        }
        sys::interrupts::install_interrupt_handler();
        let with_children = options.grouping.processes;
        let capture = SamplingOptions {
            spans: options.spans,
            host: None,
            ..options.sampling.capture(options.rate, with_children)
        };
        let backend = open_backend(options.sampling.backend, &capture)?;
        let tape = options.tape.clone();
        let mut recording = Recording::new(options.session(), backend, options.rate, pid, tape);
        recording.name_apart(invoker.fetch);
        if options.sampling.wakers {
            recording.show_wakers(options.sampling.kernel);
        }
        let watch = ExitWatch::new(pid);
        match (&mut launched, &target) {
            (Some(launched), LiveTarget::Launch(words, _)) => {
                recording.start_command(launched, words)?;
            }
            _ if with_children => attach_family(&mut recording, pid)?,
            _ => recording.attach(pid)?,
        }
        Ok(LiveRecording {
            recording,
            launched,
            pid,
            kept: options.kept,
            needed,
            watch,
        })
    }

    /// Starts sampling, and drops the privileges that only set-up needed.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn start(&mut self) -> Result<()> {
        self.recording.start()?;
        phases::restrict_to_sampling(Caps(self.kept.0 | self.needed.0))
    }

    /// Processes samples for a short time, and not for long after `end`, if given. Waits up to `wait` for the first one. True if
    /// more are waiting.
    ///
    /// # Errors
    /// Those of the backend, and of the session.
    pub fn poll(&mut self, wait: Duration, end: Option<Instant>) -> Result<bool> {
        let wait = self.recording.wait(wait);
        let turn = Instant::now() + wait + MAX_TURN;
        let until = end.map_or(turn, |end| turn.min(end));
        self.recording.poll(wait, Some(until))
    }

    /// Whether the target has exited.
    pub fn has_exited(&mut self) -> bool {
        self.watch.has_exited()
    }

    /// Stops sampling, processes the rest, and drops all privileges but those that the output needs. Returns the command, too.
    /// `failure` is what ended the recording early.
    pub fn finish(self, failure: Option<Error>) -> (Result<FinishedRecording>, Option<Launched>) {
        let finished = self.recording.finish(DRAIN_TIME, failure);
        let restricted = phases::drop_for_symbolization(self.kept);
        (restricted.map(|()| finished), self.launched)
    }

    /// A line that suggests a child of the target to attach to, if only that one runs Python.
    pub fn suggestion(&self) -> Option<String> {
        if self.launched.is_some() || self.recording.has_python() {
            return None;
        }
        discover::suggest_python_child(self.pid)
    }
}

impl LiveOptions<'_> {
    /// What a tape of the recording says of its options.
    pub fn on_tape(&self) -> TapeOptions {
        let wakers = self.sampling.wakers.then_some(self.sampling.kernel);
        replay::recorded_options(&self.session(), wakers)
    }

    fn session(&self) -> SessionOptions {
        SessionOptions {
            grouping: self.grouping,
            native: !self.sampling.no_native,
            tasks: self.tasks.shows_tasks(),
            measure: self.sampling.measure(self.rate),
            gil_only: self.sampling.gil,
            lag: self.tasks.lag,
            workers: self.sampling.attribute_workers,
            spans: self.spans,
            thread_context: self.spans,
            allocations: self.sampling.mode == Mode::Alloc,
            host: false,
            own_code: None,
        }
    }
}

/// Attaches to a process and its existing descendants. Later forks come as events. One message counts those that cannot
/// be sampled.
///
/// # Errors
/// If none can be sampled, that of the process itself.
fn attach_family(recording: &mut Recording, pid: Pid) -> Result<()> {
    let (mut known, mut refused, mut is_attached) = (BTreeSet::new(), Vec::new(), false);
    // Those that appear meanwhile; their parents pass on forks from then on.
    for _ in 0..MAX_SCANS {
        let before = known.len();
        for process in std::iter::once(pid).chain(discover::descendants(pid)) {
            if !known.insert(process) {
                continue;
            }
            match recording.attach(process) {
                Ok(()) => is_attached = true,
                Err(e) if e.kind == ErrorKind::NoSuchProcess && process != pid => {}
                Err(e) => refused.push((process, e)),
            }
        }
        if known.len() == before {
            break;
        }
    }
    let Some((first, e)) = refused.first() else {
        return Ok(());
    };
    if !is_attached {
        return Err(e.clone());
    }
    let which = match refused.len() {
        1 => format!("process {first} is"),
        n => format!("{n} processes, the first of which is {first}, are"),
    };
    print_status(&format!("{which} not sampled: {} ({})", e.what, e.why));
    Ok(())
}

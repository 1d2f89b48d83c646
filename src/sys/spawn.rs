//! Starts a command in exactly the state in which nativeprof itself was started.
//!
//! The standard library cannot: before `main` it ignores SIGPIPE and opens missing standard descriptors, and its
//! process spawning resets SIGPIPE to the default and returns only after the exec, so that it needs another thread,
//! whose exit would count as the parent's death (PR_SET_PDEATHSIG). So the initial state is recorded before the
//! standard library changes it, and the process is created here, by the calling thread.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::event::Pid;
use crate::sys;

static IGNORED_PIPE: AtomicBool = AtomicBool::new(false);
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];
static DEATH_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Records the state of this process that the start of the standard library, or a change of user, modifies.
extern "C" fn record_initial_state() {
    // SAFETY: integers, and pointers to values of the right type. All of it may be called before `main`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut action) == 0 {
            IGNORED_PIPE.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
        }
        for (fd, closed) in (0..).zip(&CLOSED) {
            closed.store(libc::fcntl(fd, libc::F_GETFD) < 0, Ordering::Relaxed);
        }
        let mut signal = 0;
        if libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut signal) == 0 {
            DEATH_SIGNAL.store(signal, Ordering::Relaxed);
        }
    }
}

/// Functions listed in this section run before `main`, and so before the start of the standard library.
// SAFETY: a pointer to a function of the type that the section holds (System V gABI, "Initialization and Termination
// Functions"), which needs nothing set up.
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD_INITIAL_STATE: extern "C" fn() = record_initial_state;

/// Kinds of interval timers (setitimer(2)): they survive an exec, but a forked child has none.
const TIMERS: [libc::c_int; 3] = [
    libc::ITIMER_REAL as _,
    libc::ITIMER_VIRTUAL as _,
    libc::ITIMER_PROF as _,
];

/// What a command has as its input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// Those of this process.
    Ours,
    /// No input, and its output is dropped. It is terminated when the thread that started it ends.
    None,
    /// The same, but all that it prints goes to the standard output of this process.
    OnlyOutput,
}

/// A process that waits to exec a command.
pub struct WaitingProcess {
    pub pid: Pid,
    /// A byte lets it continue; at end of file it exits.
    pub go: File,
    failure: File,
}

/// Forks a process that waits and then executes a command, which is looked up in PATH. The interval timers of this
/// process move to it. `environment`: variables to replace or to add.
///
/// # Errors
/// A NUL in a word, no descriptor, or no process left.
pub fn spawn(command: &[String], environment: &[(&str, &str)], streams: Streams) -> io::Result<WaitingProcess> {
    let words: Vec<CString> = command
        .iter()
        .map(|word| CString::new(word.as_str()))
        .collect::<Result<_, _>>()?;
    let variables = variables(environment)?;
    let argv = pointers(words.iter().map(CString::as_c_str));
    let envp = pointers(variables.iter().map(CString::as_c_str));
    let file = words.first().ok_or(io::ErrorKind::InvalidInput)?;
    let (go_read, go_write) = sys::files::pipe()?;
    let (failure_read, failure_write) = sys::files::pipe()?;
    let null = match streams {
        Streams::Ours => None,
        Streams::None | Streams::OnlyOutput => Some(File::options().read(true).write(true).open("/dev/null")?),
    };
    let timers = TIMERS.map(take_timer);
    // SAFETY: the child calls only what is safe there, see `become_command`.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => {
            let start = Start {
                file,
                argv: &argv,
                envp: &envp,
                go: go_read.as_raw_fd(),
                go_write: go_write.as_raw_fd(),
                failure: failure_write.as_raw_fd(),
                timers: &timers,
                null: null.as_ref().map(AsRawFd::as_raw_fd),
                streams,
            };
            become_command(&start)
        }
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(WaitingProcess {
            pid: pid as Pid,
            go: go_write,
            failure: failure_read,
        }),
    }
}

impl WaitingProcess {
    /// Waits, after the process may continue, until it has executed the command.
    ///
    /// # Errors
    /// The error of `exec`.
    pub fn executed(&mut self) -> io::Result<()> {
        let mut code = [0; 4];
        match self.failure.read_exact(&mut code) {
            Ok(()) => Err(io::Error::from_raw_os_error(i32::from_le_bytes(code))),
            // The other end closes at the exec, or when the process was killed: `wait` reports which.
            Err(_) => Ok(()),
        }
    }

    /// Waits for its exit. Signals are passed on to it until then, see `interrupts`.
    ///
    /// # Errors
    /// Another part of this process has already waited for it.
    pub fn wait(&self) -> io::Result<ExitStatus> {
        let pid = self.pid as libc::pid_t;
        // SAFETY: a zeroed structure is a valid place for the result. The process is not reaped yet.
        uninterrupted(|| unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, pid as _, &mut info, libc::WEXITED | libc::WNOWAIT)
        })?;
        sys::interrupts::forget_command();
        let mut status = 0;
        // SAFETY: a pointer to the status.
        uninterrupted(|| unsafe { libc::waitpid(pid, &mut status, 0) })?;
        Ok(ExitStatus::from_raw(status))
    }
}

/// Repeats a call that a signal has interrupted.
fn uninterrupted(mut call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    loop {
        if call() >= 0 {
            return Ok(());
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// A process in our process group that does nothing but keep the signals it receives: those that were sent to the whole
/// group (by a terminal, by `kill -- -PGID`), and so to a command as well. The kernel does not say which ones these
/// are.
pub struct GroupProbe {
    pid: libc::pid_t,
    /// A byte requests the signal of this number.
    _request: File,
    /// A byte answers: whether the signal has come.
    _answer: File,
}

/// Descriptors of the only probe, for a signal handler; negative: there is none.
static REQUEST: AtomicI32 = AtomicI32::new(-1);
static ANSWER: AtomicI32 = AtomicI32::new(-1);
/// How long a probe waits for a signal: senders that signal each process for itself take some time.
const GROUP_TIME: libc::timespec = libc::timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// How long an answer may take, ms. A probe can be stopped.
const ANSWER_TIME: libc::c_int = 1000;

impl GroupProbe {
    /// Starts the probe. To be called after the fork of the command, which must not inherit its pipes, and while there
    /// is no other thread.
    ///
    /// # Errors
    /// No process or descriptor is left.
    pub fn start() -> io::Result<GroupProbe> {
        let (request_read, request) = sys::files::pipe()?;
        let (answer, answer_write) = sys::files::pipe()?;
        // SAFETY: the sets are initialized by these calls. The child calls only what is safe there, see `keep_signals`.
        let pid = unsafe {
            let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::sigprocmask(libc::SIG_SETMASK, &all, &mut before);
            let pid = libc::fork();
            if pid == 0 {
                keep_signals(request_read.as_raw_fd(), answer_write.as_raw_fd());
            }
            libc::sigprocmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
            pid
        };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        ANSWER.store(answer.as_raw_fd(), Ordering::SeqCst);
        REQUEST.store(request.as_raw_fd(), Ordering::SeqCst);
        Ok(GroupProbe {
            pid,
            _request: request,
            _answer: answer,
        })
    }

    /// Whether the process group has received this signal; `None` if there is no probe. For signal handlers.
    pub fn has_received(signal: libc::c_int) -> Option<bool> {
        let (request, answer) = (REQUEST.load(Ordering::SeqCst), ANSWER.load(Ordering::SeqCst));
        if request < 0 {
            return None;
        }
        let mut has_come = 0u8;
        let mut ready = libc::pollfd {
            fd: answer,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: only async-signal-safe calls, on values that live here.
        let has_answered = unsafe {
            let number = signal as u8;
            libc::write(request, (&raw const number).cast(), 1) == 1
                && libc::poll(&mut ready, 1, ANSWER_TIME) == 1
                && libc::read(answer, (&raw mut has_come).cast(), 1) == 1
        };
        if !has_answered {
            // A late answer must not be taken for the next one.
            REQUEST.store(-1, Ordering::SeqCst);
        }
        has_answered.then_some(has_come != 0)
    }
}

impl Drop for GroupProbe {
    fn drop(&mut self) {
        REQUEST.store(-1, Ordering::SeqCst);
        // SAFETY: integers and a null pointer. The process is our child, and not reaped before.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

/// The probe, after its fork: all signals are blocked. Ends when nativeprof does.
fn keep_signals(request: libc::c_int, answer: libc::c_int) -> ! {
    // SAFETY: only async-signal-safe calls, on memory that lives here. The descriptors are this process's own copies:
    // the other ends of pipes are seen to close only if none is left open.
    unsafe {
        let limit = sys::files::file_limit().min(MAX_CLOSED) as libc::c_int;
        for fd in (0..limit).filter(|fd| *fd != request && *fd != answer) {
            libc::close(fd);
        }
        // It needs no privileges (capset(2): version, thread, and three sets of two words).
        let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
        libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr());
        let mut number = 0u8;
        while libc::read(request, (&raw mut number).cast(), 1) == 1 {
            let mut wanted: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&mut wanted, number.into());
            let signal = libc::sigtimedwait(&wanted, std::ptr::null_mut(), &GROUP_TIME);
            let has_come = u8::from(signal == libc::c_int::from(number));
            libc::write(answer, (&raw const has_come).cast(), 1);
        }
        libc::_exit(0)
    }
}

/// Maximum number of descriptors that are closed for the probe; ours are among the first.
const MAX_CLOSED: usize = 4096;

fn pointers<'a>(strings: impl Iterator<Item = &'a CStr>) -> Vec<*const libc::c_char> {
    strings.map(CStr::as_ptr).chain([std::ptr::null()]).collect()
}

/// The variables of this process, byte for byte and in their order, except the replaced ones.
fn variables(replaced: &[(&str, &str)]) -> io::Result<Vec<CString>> {
    let mut all = Vec::new();
    // SAFETY: nothing in this program changes its environment, and no other thread could while it starts.
    unsafe {
        unsafe extern "C" {
            static environ: *const *const libc::c_char;
        }
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            all.push(CStr::from_ptr(*at).to_owned());
            at = at.add(1);
        }
    }
    for (name, value) in replaced {
        let new = CString::new(format!("{name}={value}"))?;
        let start = format!("{name}=");
        match all.iter_mut().find(|v| v.to_bytes().starts_with(start.as_bytes())) {
            Some(old) => *old = new,
            None => all.push(new),
        }
    }
    Ok(all)
}

/// Disarms an interval timer of this process and returns what was left of it.
fn take_timer(which: libc::c_int) -> libc::itimerval {
    // SAFETY: plain integers, for which zero is valid (a disarmed timer); pointers of the right type.
    unsafe {
        let (off, mut left): (libc::itimerval, libc::itimerval) = std::mem::zeroed();
        libc::setitimer(which as _, &off, &mut left);
        left
    }
}

struct Start<'a> {
    file: &'a CStr,
    /// Each ends in a null pointer.
    argv: &'a [*const libc::c_char],
    envp: &'a [*const libc::c_char],
    go: i32,
    go_write: i32,
    failure: i32,
    timers: &'a [libc::itimerval; 3],
    /// Replaces standard streams; the process is terminated with its parent.
    null: Option<libc::c_int>,
    streams: Streams,
}

/// Between fork and exec: waits, restores the state in which nativeprof was started, and executes.
fn become_command(start: &Start<'_>) -> ! {
    // SAFETY: only async-signal-safe calls (execvpe allocates nothing in glibc and musl), on memory that lives in the
    // caller. The closed descriptor is this process's own copy: with it open there would be no end of file.
    unsafe {
        libc::close(start.go_write);
        let mut byte = 0u8;
        loop {
            match libc::read(start.go, (&raw mut byte).cast(), 1) {
                1 => break,
                -1 if *libc::__errno_location() == libc::EINTR => {}
                _ => libc::_exit(0),
            }
        }
        let pipe = if IGNORED_PIPE.load(Ordering::Relaxed) {
            libc::SIG_IGN
        } else {
            libc::SIG_DFL
        };
        libc::signal(libc::SIGPIPE, pipe);
        for (fd, closed) in (0..).zip(&CLOSED) {
            if closed.load(Ordering::Relaxed) {
                libc::close(fd);
            }
        }
        // Not inherited by a fork.
        libc::prctl(
            libc::PR_SET_PDEATHSIG,
            DEATH_SIGNAL.load(Ordering::Relaxed) as libc::c_ulong,
        );
        if let Some(null) = start.null {
            let output = match start.streams {
                Streams::OnlyOutput => libc::STDOUT_FILENO,
                Streams::Ours | Streams::None => null,
            };
            for (fd, from) in [(0, null), (1, output), (2, output)] {
                libc::dup2(from, fd);
            }
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM as libc::c_ulong);
        }
        for (which, timer) in TIMERS.iter().zip(start.timers) {
            if timer.it_value.tv_sec != 0 || timer.it_value.tv_usec != 0 {
                libc::setitimer(*which as _, timer, std::ptr::null_mut());
            }
        }
        libc::execvpe(start.file.as_ptr(), start.argv.as_ptr(), start.envp.as_ptr());
        let code = (*libc::__errno_location()).to_le_bytes();
        libc::write(start.failure, code.as_ptr().cast(), code.len());
        libc::_exit(127)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_keep_their_order() {
        let before = variables(&[]).unwrap();
        let after = variables(&[("PATH", "/x"), ("NATIVEPROF_NEW", "1")]).unwrap();
        assert_eq!(after.len(), before.len() + 1);
        for (before, after) in before.iter().zip(&after) {
            if before.to_bytes().starts_with(b"PATH=") {
                assert_eq!(after.as_c_str(), c"PATH=/x")
            } else {
                assert_eq!(after, before)
            }
        }
        assert_eq!(after.last().map(|v| v.as_c_str()), Some(c"NATIVEPROF_NEW=1"));
    }
}

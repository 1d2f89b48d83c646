//! How a program ends whose profile would be lost: by a signal, or by `os._exit`. For `python -m nativeprof`.
//!
//! The handler is the kernel's, not one of Python's: these run in the main thread only, between two instructions of
//! Python code, which a program may not reach for long; and `signal.getsignal` would show it. A program that sets its
//! own replaces it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

/// Signals that service managers, `docker stop` and closed terminals send.
const SIGNALS: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGHUP];
/// This many end the program at once, as without a profiler.
const MAX_SIGNALS: u32 = 3;

/// The process that is recorded; 0: none any more.
static RECORDED: AtomicI32 = AtomicI32::new(0);
/// Where the handler writes the number of a signal.
static PIPE: AtomicI32 = AtomicI32::new(-1);
static RECEIVED: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    // SAFETY: only async-signal-safe calls, and the calling thread's own errno.
    unsafe {
        let errno = *libc::__errno_location();
        // A forked child has the handler, but not the thread.
        let is_recorded = libc::getpid() == RECORDED.load(Ordering::SeqCst);
        let number = signal as u8;
        let ends = !is_recorded
            || RECEIVED.fetch_add(1, Ordering::SeqCst) + 1 >= MAX_SIGNALS
            || libc::write(PIPE.load(Ordering::SeqCst), (&raw const number).cast(), 1) != 1;
        if ends {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        *libc::__errno_location() = errno;
    }
}

/// Whether this process is still recorded.
fn is_recorded() -> bool {
    let recorded = RECORDED.load(Ordering::SeqCst);
    recorded != 0 && recorded == std::process::id() as i32
}

/// Waits for a signal, in a thread of its own: calls `finish`, and then ends the process as the signal does without a
/// handler.
fn wait_for_signal(mut pipe: File, finish: &Py<PyAny>) {
    let mut number = [0];
    if pipe.read_exact(&mut number).is_err() {
        return;
    }
    Python::attach(|py| {
        if let Err(error) = finish.call0(py) {
            error.write_unraisable(py, None);
        }
    });
    // SAFETY: integers; the default action is always valid. The signal is blocked in this thread: another one receives
    // it.
    unsafe {
        libc::signal(number[0].into(), libc::SIG_DFL);
        libc::kill(libc::getpid(), number[0].into());
    }
}

/// From now on `finish()` is called before SIGTERM or SIGHUP ends this process, unless the program handles or ignores
/// the signal. It is called by another thread, once, and should end with `release_end`. Called twice, it does nothing.
///
/// Raises `OSError` if no thread or descriptor is left; the signals then end the process as usual.
#[pyfunction]
pub fn before_end_by_signal(finish: Py<PyAny>) -> PyResult<()> {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let failed = |error: std::io::Error| PyOSError::new_err(error.to_string());
    let mut ends = [0; 2];
    // SAFETY: room for the two descriptors; both are ours alone.
    let (read, write) = unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    };
    // The program's signals are for its own threads: this one inherits the mask.
    // SAFETY: the sets are initialized by these calls.
    let started = unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let thread = std::thread::Builder::new().name("nativeprof-end".into());
        let started = thread.spawn(move || wait_for_signal(read, &finish));
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        started
    };
    started.map_err(failed)?;
    PIPE.store(write.into_raw_fd(), Ordering::SeqCst);
    RECORDED.store(std::process::id() as i32, Ordering::SeqCst);
    for signal in SIGNALS {
        // SAFETY: the handler does only what is async-signal-safe; the structures are fully initialized.
        unsafe {
            let (mut action, mut before): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
            libc::sigaction(signal, std::ptr::null(), &mut before);
            if before.sa_sigaction == libc::SIG_DFL {
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
    Ok(())
}

/// The recording has ended: signals and `os._exit` end this process as without a profiler.
#[pyfunction]
pub fn release_end() {
    RECORDED.store(0, Ordering::SeqCst);
    for signal in SIGNALS {
        // SAFETY: as above. A handler of the program stays.
        unsafe {
            let mut now: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut now);
            if now.sa_sigaction == on_signal as *const () as usize {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
}

/// A function that calls `exit`, which is `os._exit`, and before that writes `line` to standard error if the call ends
/// a process that is still recorded. It is built in as the original is: it has no frame in tracebacks.
#[pyfunction]
pub fn announcing_exit(py: Python<'_>, exit: Py<PyAny>, line: String) -> PyResult<Bound<'_, PyCFunction>> {
    let call = move |arguments: &Bound<'_, PyTuple>, named: Option<&Bound<'_, PyDict>>| -> PyResult<Py<PyAny>> {
        let status = match (arguments.len(), named) {
            (1, None) => Some(arguments.get_item(0)?),
            (0, Some(named)) if named.len() == 1 => named.get_item("status")?,
            _ => None,
        };
        // Else the call fails, and the program goes on.
        let ends = status.is_some_and(|status| status.extract::<i32>().is_ok());
        if ends && is_recorded() {
            // Not by `sys.stderr`: the thread that uses it may be the reason for this call.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
        exit.call(arguments.py(), arguments, named)
    };
    PyCFunction::new_closure(
        py,
        Some(c"_exit"),
        Some(c"_exit(status)\n--\n\nExit to the system with specified status, without normal exit processing."),
        call,
    )
}

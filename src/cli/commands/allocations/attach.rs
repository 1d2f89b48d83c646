//! A running process whose allocations are recorded: it is requested to run a script (PEP 768) that imports the package, which
//! starts and ends the recording as this process says through a socket, and hands over the profile.
//!
//! What the process needs of us lies in a directory of its own user in its own root, and is gone when the recording has
//! begun. When this process ends, whatever the reason, the socket is closed, and the package ends the recording.

use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind as IoKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{MAX_PROFILE, from_outside, output, write};
use crate::cli::args::RecordArgs;
use crate::cli::discover;
use crate::cli::live::{Invoker, check_readable};
use crate::cli::output::Output;
use crate::cli::{print_line, print_status};
use crate::cpython::script_request::{NoScriptRequests, ScriptRequests};
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::privileges::phases::WRITING;
use crate::process::system::{LiveSystem, ProcessMemory};
use crate::profile::values::Unit;
use crate::session::Inspection;
use crate::sys;
use crate::sys::process::ExitWatch;
use crate::sys::{files, interrupts, memory, procfs, sockets};

/// Longest time until the process begins with the script.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Longest time for the package: to be imported and start, and between two parts of the profile.
const MAX_ANSWER: Duration = Duration::from_secs(60);
/// Time after which the wait is explained.
const SHORT_WAIT: Duration = Duration::from_secs(1);
/// Longest time before signals and the process are checked again.
const TURN: Duration = Duration::from_millis(50);
/// Longest line of an answer.
const MAX_LINE: usize = 4096;
/// Directories in which a process can read files of its own user, in its root.
const DIRECTORIES: [&str; 3] = ["tmp", "var/tmp", "dev/shm"];

/// Starts a thread in the process, which leaves the one that runs it to its work.
const SCRIPT: &str = r#"import _thread
def run(path=PATH, arguments=ARGUMENTS):
    import socket
    import sys
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.connect(path)
    except OSError:
        return
    try:
        from nativeprof._attached import record
    except BaseException as error:
        text = " ".join(("%s: %s" % (type(error).__name__, error)).split())[:1000]
        channel.sendall(("no package\t%s\t%s\n" % (sys.executable, text)).encode("utf-8", "replace"))
        channel.close()
    else:
        record(channel, *arguments)
_thread.start_new_thread(run, ())
"#;

/// Records until the process exits, the duration is over or Ctrl-C, and writes the profile.
pub fn record(pid: Pid, options: &RecordArgs) -> Result<()> {
    check_readable(pid, "recording the allocations of")?;
    // Before another user is switched to, who may not make files for that of the process.
    let place = Place::new(pid, &arguments(options))?;
    let writing = Caps::of(WRITING);
    let _invoker = Invoker::switch_to(options.as_root, writing, options.names.debuginfod)?;
    phases::restrict_to_setup(writing)?;
    let output = output(options, pid)?;
    let kept = Caps(writing.0 | output.needs().0);
    let live = ProcessMemory(&LiveSystem, pid);
    let requests = requests(pid, &live)?;
    phases::restrict_to_sampling(kept)?;
    interrupts::install_interrupt_handler();
    let mut target = Target {
        pid,
        watch: ExitWatch::new(pid),
        start: procfs::start_time(pid),
    };
    let command = procfs::command_line(pid);
    let mut channel = target.connect(&place, &requests, &live)?;
    let started = channel.line(&mut target, MAX_ANSWER)?;
    // The process has all that it needs.
    drop(place);
    phases::drop_for_symbolization(output.needs())?;
    if started != "started" {
        return Err(refused(pid, &started));
    }
    print_line(&format!(
        "nativeprof: sampling the allocations of {} every {} (by the package nativeprof in it)",
        discover::pid_label(pid),
        Unit::Bytes.show(options.sampling.interval()),
    ));
    target.wait_for_end(&channel, options.duration);
    channel.end();
    let profile = channel.profile(&mut target)?;
    write_checked(&profile, command, &output, options)
}

fn write_checked(profile: &[u8], command: String, output: &Output, options: &RecordArgs) -> Result<()> {
    write(profile, command, output, options)?;
    output.check_written()
}

/// Where requests to the process are written.
fn requests(pid: Pid, live: &ProcessMemory) -> Result<ScriptRequests> {
    let (inspection, _) = Inspection::open(pid, false)?;
    // It may be sampled by another tool.
    let mode = if inspection.publishes_allocations() {
        "alloc"
    } else {
        "rss"
    };
    let refused = |why: String| {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("the allocations of process {pid} cannot be recorded from its inside"),
        )
        .why(why)
        .hint(from_outside(&format!("attach {pid} --mode {mode}"))))
    };
    let name = inspection.python_text().unwrap_or("Python").to_string();
    let Some((runtime, interpreter)) = inspection.python() else {
        return refused("it does not run CPython, or has not loaded it yet".into());
    };
    let found = interpreter.map_or(Err(NoScriptRequests::Version), |python| {
        ScriptRequests::find(live, &runtime, &python)
    });
    match found {
        Ok(found) => Ok(found),
        Err(why) => refused(match why {
            NoScriptRequests::Version => {
                format!("it runs {name}; CPython 3.14 and 3.15 run scripts on request (sys.remote_exec)")
            }
            NoScriptRequests::Disabled => format!(
                "remote debugging is turned off in its {name}: by PYTHON_DISABLE_REMOTE_DEBUG, -X disable-remote-debug, or when it \
                 was built"
            ),
            NoScriptRequests::NotRunning => format!("its {name} is just starting or ending"),
            NoScriptRequests::Occupied => "a request of another tool is waiting in it: try again later".into(),
            NoScriptRequests::NotWritable => "its memory cannot be written to".into(),
        }),
    }
}

/// The error for an answer other than `started`.
fn refused(pid: Pid, answer: &str) -> Error {
    let mut parts = answer.split('\t');
    let (kind, rest): (_, Vec<&str>) = (parts.next().unwrap_or_default(), parts.collect());
    let outside = from_outside(&format!("attach {pid} --mode rss"));
    match (kind, &rest[..]) {
        ("no package", [executable, why]) => Error::new(
            ErrorKind::Unsupported,
            format!("process {pid} cannot use the package nativeprof"),
        )
        .why(*why)
        .hint(format!(
            "{executable} -m pip install --upgrade nativeprof, or {outside}"
        )),
        ("failed", [why]) => Error::new(ErrorKind::Unsupported, format!("the recording of process {pid} failed"))
            .why(*why)
            .hint(outside),
        _ => Error::new(
            ErrorKind::Data,
            format!("process {pid} gave an answer that is not understood"),
        )
        .why(answer.chars().take(100).collect::<String>())
        .hint(outside),
    }
}

/// What the process finds in its root: a directory with a script and a socket. Removed when this is dropped.
struct Place {
    /// The directory that it is in, as it is open here, and its name.
    parent: File,
    name: String,
    /// The directory itself.
    directory: File,
    listener: UnixListener,
    /// Its path in the process.
    path: String,
}

impl Place {
    fn new(pid: Pid, arguments: &str) -> Result<Place> {
        let status = procfs::read_bytes(format!("/proc/{pid}/status")).unwrap_or_default();
        let status = String::from_utf8_lossy(&status);
        let owner = (procfs::user_ids(&status, "Uid")[1], procfs::user_ids(&status, "Gid")[1]);
        let root = File::options()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
            .open(format!("/proc/{pid}/root"));
        let failed = |e: io::Error| {
            Error::io(format!("cannot hand a script to process {pid}"), e).hint(format!(
                "run it as root (sudo), or {}",
                from_outside(&format!("attach {pid} --mode rss"))
            ))
        };
        let root = root.map_err(failed)?;
        let mut last = io::Error::from(IoKind::NotFound);
        for directory in DIRECTORIES {
            match Place::in_directory(&root, directory, owner, arguments) {
                Ok(place) => return Ok(place),
                Err(e) => last = e,
            }
        }
        Err(failed(last))
    }

    fn in_directory(root: &File, directory: &str, owner: (u32, u32), arguments: &str) -> io::Result<Place> {
        let parent = files::open_in_root(root.as_fd(), Path::new(directory), libc::O_DIRECTORY | libc::O_CLOEXEC)?;
        let name = format!("nativeprof-{:016x}", RandomState::new().hash_one(0));
        let inside = within(&parent, &name);
        DirBuilder::new().mode(0o700).create(&inside)?;
        let path = format!("/{directory}/{name}");
        let text = SCRIPT
            .replace("PATH", &format!("{:?}", format!("{path}/{SOCKET}")))
            .replace("ARGUMENTS", arguments);
        match fill(&inside, &text, owner) {
            Ok((directory, listener)) => Ok(Place {
                parent,
                name,
                directory,
                listener,
                path,
            }),
            Err(e) => {
                let _ = fs::remove_dir_all(&inside); // the first failure is the one to report
                Err(e)
            }
        }
    }

    /// The path of the script in the process.
    fn script(&self) -> String {
        format!("{}/{SCRIPT_NAME}", self.path)
    }
}

/// Puts script and socket into a new directory, and gives all of it to the user of the process.
fn fill(path: &Path, script: &str, owner: (u32, u32)) -> io::Result<(File, UnixListener)> {
    let directory = File::options()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)?;
    let meta = directory.metadata()?;
    if meta.uid() != sys::process::effective_uid() || meta.mode() & 0o077 != 0 {
        return Err(io::Error::other("the directory was replaced"));
    }
    let socket = within(&directory, SOCKET);
    let listener = UnixListener::bind(&socket)?;
    listener.set_nonblocking(true)?;
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(within(&directory, SCRIPT_NAME))?;
    file.write_all(script.as_bytes())?;
    if owner.0 != meta.uid() {
        let (user, group) = (Some(owner.0), Some(owner.1));
        fchown(&file, user, group)?;
        lchown(&socket, user, group)?;
        // The last: from now on the user may change what is in it.
        fchown(&directory, user, group)?;
    }
    Ok((directory, listener))
}

const SOCKET: &str = "socket";
const SCRIPT_NAME: &str = "start.py";

impl Drop for Place {
    fn drop(&mut self) {
        // By names in directories that are open: another one may be at the path by now.
        for name in [SOCKET, SCRIPT_NAME] {
            let _ = fs::remove_file(within(&self.directory, name));
        }
        let _ = fs::remove_dir(within(&self.parent, &self.name));
    }
}

/// A file in a directory that is open.
fn within(directory: &File, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()))
}

/// Arguments of the package's function, in Python.
fn arguments(options: &RecordArgs) -> String {
    let truth = |is: bool| if is { "True" } else { "False" };
    format!(
        "({}, {}, {}, {})",
        options.sampling.interval(),
        options.sampling.max_overhead(),
        truth(!options.sampling.no_native),
        truth(options.threads)
    )
}

/// The process.
struct Target {
    pid: Pid,
    watch: ExitWatch,
    /// When it started, by which another process with its number is known.
    start: Option<u64>,
}

impl Target {
    /// Requests that the process runs the script, and waits until it connects.
    fn connect(&mut self, place: &Place, requests: &ScriptRequests, live: &ProcessMemory) -> Result<Channel> {
        let pid = self.pid;
        if self.start != procfs::start_time(pid) {
            return Err(Error::no_process(pid));
        }
        let write = |at: u64, bytes: &[u8]| memory::write_memory(pid, at, bytes);
        requests.request(live, &write, &place.script()).map_err(|_| {
            Error::new(ErrorKind::NotPermitted, format!("process {pid} takes no requests"))
                .why("its memory cannot be written to")
                .hint(format!(
                    "run it as root (sudo), or {}",
                    from_outside(&format!("attach {pid} --mode rss"))
                ))
        })?;
        let (start, mut is_explained) = (Instant::now(), false);
        loop {
            match place.listener.accept() {
                Ok((stream, _)) if sockets::peer(&stream) == Some(pid) => {
                    return Channel::new(stream).map_err(|e| Error::io("cannot use the socket", e));
                }
                // Another process of the same user.
                Ok(_) => {}
                Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {}
                Err(e) => return Err(Error::io("cannot use the socket", e)),
            }
            if self.watch.has_exited() {
                return Err(exited(pid));
            }
            let waited = start.elapsed();
            let is_waiting = requests.is_waiting(live) == Some(true);
            if interrupts::interrupted() || waited > MAX_WAIT {
                if is_waiting {
                    requests.withdraw(&write);
                }
                return Err(not_run(pid, waited, is_waiting));
            }
            if waited > SHORT_WAIT && !is_explained {
                is_explained = true;
                print_status(&waiting(pid, is_waiting));
            }
            let _ = files::poll(&[place.listener.as_fd()], TURN); // what it says is seen above
        }
    }

    /// Waits until the process exits, the duration is over, a signal comes, or the package says something: the program has ended.
    fn wait_for_end(&self, channel: &Channel, duration: Option<f64>) {
        let end = duration.map(|duration| Instant::now() + Duration::from_secs_f64(duration));
        let is_over = || interrupts::interrupted() || end.is_some_and(|end| Instant::now() >= end);
        while !is_over() && !self.watch.has_exited() {
            let left = end.map_or(TURN, |end| end.saturating_duration_since(Instant::now()).min(TURN));
            if files::poll(&[channel.stream.as_fd()], left).unwrap_or(false) {
                return;
            }
        }
    }
}

/// What a wait is for.
fn waiting(pid: Pid, is_waiting: bool) -> String {
    if !is_waiting {
        return format!("waiting for process {pid} to import the package nativeprof");
    }
    let state = match procfs::thread_state(pid, pid) {
        Some('S' | 'D') => "its main thread is asleep in the kernel",
        Some('T' | 't') => "it is stopped",
        _ => "its main thread runs native code",
    };
    format!(
        "waiting until the main thread of process {pid} runs Python code again, at most {} s: {state} (Ctrl-C gives up)",
        MAX_WAIT.as_secs()
    )
}

/// The error for a process that did not run the script.
fn not_run(pid: Pid, waited: Duration, is_waiting: bool) -> Error {
    let seconds = waited.as_secs_f64();
    let why = if is_waiting {
        format!("its main thread ran no Python code for {seconds:.0} s; the request was taken back")
    } else {
        format!("it began with the script, but did not answer within {seconds:.0} s")
    };
    Error::new(
        ErrorKind::Unsupported,
        format!("process {pid} did not start the recording"),
    )
    .why(why)
    .hint(from_outside(&format!("attach {pid} --mode rss")))
}

fn exited(pid: Pid) -> Error {
    Error::new(ErrorKind::NoSuchProcess, format!("process {pid} has exited"))
        .why("it ended before it handed over a profile")
        .hint("record a command from its start: nativeprof record --alloc -- python3 ...")
}

/// The connection with the package.
struct Channel {
    stream: UnixStream,
    /// What was received and not used yet.
    received: Vec<u8>,
}

impl Channel {
    fn new(stream: UnixStream) -> io::Result<Channel> {
        stream.set_nonblocking(true)?;
        Ok(Channel {
            stream,
            received: Vec::new(),
        })
    }

    /// Tells the package to end the recording. Where it has gone, so much is seen when the profile is read.
    fn end(&mut self) {
        let _ = self.stream.write_all(b"stop\n");
    }

    /// Waits for more bytes, at most so long. False at the end of the stream.
    fn receive(&mut self, target: &mut Target, most: Duration) -> Result<bool> {
        let pid = target.pid;
        let (end, mut part) = (Instant::now() + most, [0; 1 << 16]);
        let given_up = interrupts::interrupts();
        loop {
            match self.stream.read(&mut part) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    self.received.extend_from_slice(part.get(..n).unwrap_or_default());
                    return Ok(true);
                }
                Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {}
                Err(e) if e.kind() == IoKind::ConnectionReset => return Ok(false),
                Err(e) => return Err(Error::io("cannot read from the process", e)),
            }
            // What it wrote before it exited is still there, so that this is seen twice.
            if target.watch.has_exited() && !files::poll(&[self.stream.as_fd()], Duration::ZERO).unwrap_or(false) {
                return Ok(false);
            }
            if Instant::now() > end || interrupts::interrupts() > given_up {
                return Err(Error::new(ErrorKind::Io, format!("process {pid} does not answer"))
                    .why("its package nativeprof waits for the GIL, or the process is stopped")
                    .hint(from_outside(&format!("attach {pid} --mode rss"))));
            }
            let _ = files::poll(&[self.stream.as_fd()], TURN); // what it says is seen above
        }
    }

    /// The next line.
    fn line(&mut self, target: &mut Target, most: Duration) -> Result<String> {
        loop {
            if let Some(at) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=at).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_string());
            }
            if self.received.len() > MAX_LINE || !self.receive(target, most)? {
                return Err(if target.watch.has_exited() {
                    exited(target.pid)
                } else {
                    refused(target.pid, &String::from_utf8_lossy(&self.received))
                });
            }
        }
    }

    /// The profile.
    fn profile(&mut self, target: &mut Target) -> Result<Vec<u8>> {
        let line = self.line(target, MAX_ANSWER)?;
        let length = line
            .strip_prefix("profile\t")
            .and_then(|number| number.parse::<u64>().ok());
        let Some(length) = length.filter(|length| *length <= MAX_PROFILE) else {
            return Err(refused(target.pid, &line));
        };
        while (self.received.len() as u64) < length {
            if !self.receive(target, MAX_ANSWER)? {
                return Err(exited(target.pid));
            }
        }
        self.received.truncate(length as usize);
        Ok(std::mem::take(&mut self.received))
    }
}

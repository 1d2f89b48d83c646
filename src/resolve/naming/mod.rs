//! Reads names of files in a separate process, without privileges and with limits on time and memory: a crafted file
//! costs its own names at most.
//!
//! The process opens nothing. It gets each file as a descriptor, and requests debug files, which are opened here, below
//! the target's root directory. It is killed when a file takes too long, and started again for the next one.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::sys;

pub mod protocol;
pub mod worker;

use protocol::{FileFormat, HEADER, LookUp, MAX_QUESTION, MAX_RESULT, ModuleNames};

/// The argument that makes nativeprof the process that reads names.
pub const ARGUMENT: &str = "--read-names";
/// How memory is allocated in the process, if its C library is glibc ("Memory Allocation Tunables" in its manual): large
/// pages, and what was freed is kept. Sections are read into fresh memory, and half of the time would be page faults.
const ALLOCATION: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:\
                          glibc.malloc.trim_threshold=1073741824:glibc.malloc.top_pad=16777216";
/// Addresses in one message.
const CHUNK: usize = 1 << 16;
/// Maximum number of files that are opened for another one: those of split DWARF, and more.
const MAX_OPENED: usize = 100_000;
/// How often limits are checked while nothing arrives.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// After so many files that reached a limit, the rest has a tenth of the time each.
const MAX_FAILED: usize = 3;

/// Address space of the process of a host, bytes.
const HOST_MEMORY: u64 = 512 << 20;
/// Files, bytes of memory and CPU time, ns, from which on the process is not kept for another period. The CPU time is half of
/// what it may use in its life.
const MAX_FILES: usize = 1024;
const MAX_IDLE_MEMORY: u64 = 80 << 20;
/// It is kept so long in spite of its memory: a file with hundreds of megabytes of names is read again in a second, and new names
/// of it may be wanted in each period.
const MIN_LIFE: Duration = Duration::from_secs(600);
const MAX_CPU: u64 = 1_800_000_000_000;
/// Files that are not read again, at most.
const MAX_FAILED_FILES: usize = 4096;

/// What reading the names of one file may take.
#[derive(Clone, Copy, Debug)]
pub struct NamingLimits {
    /// CPU time of the process.
    pub cpu: Duration,
    /// Time that it may wait for something else.
    pub elapsed: Duration,
    /// Bytes of address space, if less than usual. A file that takes more has the names of its symbol tables.
    pub memory: Option<u64>,
}

impl Default for NamingLimits {
    /// A file of 200 MB takes half a second. The largest that are read have 4 GiB, which may be compressed.
    fn default() -> NamingLimits {
        NamingLimits {
            cpu: Duration::from_secs(60),
            elapsed: Duration::from_secs(300),
            memory: None,
        }
    }
}

/// A file whose names are wanted, and its context.
pub struct NamesRequest<'a> {
    pub format: FileFormat,
    /// Number of the file among those that contain the same, the same each time.
    pub id: u32,
    pub file: &'a File,
    /// Path as the target sees it.
    pub path: &'a [u8],
    /// Opens a file by its path, as the target sees it.
    pub open: &'a dyn Fn(&Path) -> Option<File>,
    /// Debug information of this module from elsewhere, or why there is none.
    pub fetch: Option<&'a dyn Fn() -> Result<File, String>>,
}

/// Why there are no names.
#[derive(Debug)]
pub enum NamingError {
    /// The process cannot be started, or cannot give up its privileges: on this system there is none.
    NotStarted(io::Error),
    /// The process was ended, for this reason. Another one is started for the next file.
    Failed(String),
}

/// The process that reads names. It is started when it is first needed, or [`NamingProcess::prepare`]d.
pub struct NamingProcess {
    program: PathBuf,
    arguments: Vec<String>,
    limits: NamingLimits,
    running: Option<Running>,
    /// Files that are not read again, and why.
    failed: FxHashMap<(FileFormat, u32), String>,
    /// Files whose DWARF takes more memory than there is, by number.
    large: FxHashSet<u32>,
    /// CPU time, ns, of all processes so far.
    cpu: u64,
    /// Where it cannot be started, files are not read at all.
    pub(super) is_needed: bool,
}

struct Running {
    child: Child,
    socket: UnixStream,
    /// It has given up its privileges.
    is_ready: bool,
    /// That it was asked for.
    files: FxHashSet<u32>,
    /// CPU time, ns.
    cpu: u64,
    began: Instant,
}

impl Default for NamingProcess {
    /// This program again.
    fn default() -> NamingProcess {
        NamingProcess::new("/proc/self/exe", &[ARGUMENT], NamingLimits::default())
    }
}

impl NamingProcess {
    /// `program` serves its standard input, as [`worker::main`] does.
    pub fn new(program: impl Into<PathBuf>, arguments: &[&str], limits: NamingLimits) -> NamingProcess {
        NamingProcess {
            program: program.into(),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            limits,
            running: None,
            failed: FxHashMap::default(),
            large: FxHashSet::default(),
            cpu: 0,
            is_needed: false,
        }
    }

    /// This program again, with little memory: for a recording that never ends. Where it cannot be started, files are not read.
    pub fn of_host() -> NamingProcess {
        let limits = NamingLimits {
            memory: Some(HOST_MEMORY),
            ..NamingLimits::default()
        };
        NamingProcess {
            is_needed: true,
            ..NamingProcess::new("/proc/self/exe", &[ARGUMENT], limits)
        }
    }

    /// Id of the process, if it runs.
    pub fn id(&self) -> Option<u32> {
        self.running.as_ref().map(|running| running.child.id())
    }

    /// CPU time that it has taken so far, ns.
    pub fn cpu_time(&self) -> u64 {
        self.cpu
    }

    /// Ends the process. It is started again when it is needed.
    pub fn stop(&mut self) {
        self.running = None;
    }

    /// Begins another period of a recording of months: processes have other numbers, and the process is ended if it has read many
    /// files or used much memory. It keeps each file that it has read, and is started again for the next one.
    pub fn begin_period(&mut self) {
        self.failed.retain(|(format, _), _| *format != FileFormat::PerfMap);
        if self.failed.len() + self.large.len() > MAX_FAILED_FILES {
            self.failed.clear();
            self.large.clear();
        }
        let is_large = |running: &Running| {
            let memory = sys::procfs::resident(running.child.id()).unwrap_or(0);
            let is_idle_memory = memory > MAX_IDLE_MEMORY && running.began.elapsed() >= MIN_LIFE;
            running.files.len() > MAX_FILES || is_idle_memory || running.cpu > MAX_CPU
        };
        if self.running.as_ref().is_some_and(is_large) {
            self.stop();
        }
    }

    /// Starts the process, so that it is ready when it is needed.
    pub fn prepare(&mut self) {
        if self.running.is_none() {
            self.running = self.start().ok();
        }
    }

    /// The names at addresses of a file (svma, or avma of a JIT compiler's file), which should be sorted.
    ///
    /// # Errors
    /// If the process cannot be started, or was ended before it had an answer.
    pub fn name(&mut self, request: &NamesRequest<'_>, addresses: &[u64]) -> Result<ModuleNames, NamingError> {
        let is_large = request.format == FileFormat::Elf && self.large.contains(&request.id);
        let format = if is_large {
            FileFormat::ElfSymbols
        } else {
            request.format
        };
        let request = &NamesRequest { format, ..*request };
        let file = (request.format.of_file(), request.id);
        if let Some(why) = self.failed.get(&file) {
            return Err(NamingError::Failed(why.clone()));
        }
        let mut ended = self.try_name(request, addresses)?;
        // What has killed it may have nothing to do with this file, or others that it has read may have taken the memory.
        if matches!(ended, Err((Stop::Gone, _))) {
            ended = self.try_name(request, addresses)?;
        }
        if matches!(ended, Err((Stop::Gone, _))) && self.limits.memory.is_some() && format == FileFormat::Elf {
            self.large.insert(request.id);
            return self.name(request, addresses);
        }
        ended.map_err(|(_, why)| {
            self.failed.insert(file, why.clone());
            NamingError::Failed(why)
        })
    }

    /// The names; or why the process was ended, also as text.
    ///
    /// # Errors
    /// If the process cannot be started.
    fn try_name(
        &mut self,
        request: &NamesRequest<'_>,
        addresses: &[u64],
    ) -> Result<Result<ModuleNames, (Stop, String)>, NamingError> {
        let alive = |mut running: Running| running.is_alive().then_some(running);
        let mut running = match self.running.take().and_then(alive) {
            Some(running) => running,
            None => self.start().map_err(NamingError::NotStarted)?,
        };
        if !running.is_ready {
            let limits = NamingLimits::default();
            let ready = Turn::new(&mut running, limits).ready();
            ready.map_err(|stop| {
                let why = stop.text(limits, running.end());
                NamingError::NotStarted(io::Error::other(why))
            })?;
            running.is_ready = true;
        }
        let limits = if self.failed.len() < MAX_FAILED {
            self.limits
        } else {
            NamingLimits {
                cpu: self.limits.cpu / 10,
                elapsed: self.limits.elapsed / 10,
                ..self.limits
            }
        };
        let mut turn = Turn::new(&mut running, limits);
        let result = turn.name(request, addresses);
        let cpu = turn.cpu_time();
        self.cpu += cpu;
        running.cpu += cpu;
        running.files.insert(request.id);
        match result {
            Ok(mut names) => {
                self.running = Some(running);
                if let (FileFormat::ElfSymbols, Some(memory)) = (request.format, limits.memory) {
                    let why = format!("reading its DWARF takes more than {} MB", memory >> 20);
                    let others = std::mem::take(&mut names.symbols_missing);
                    let all = [why, others];
                    let all: Vec<String> = all.into_iter().filter(|text| !text.is_empty()).collect();
                    names.symbols_missing = all.join("; ");
                }
                Ok(Ok(names))
            }
            Err(stop) => {
                let why = stop.text(limits, running.end());
                Ok(Err((stop, why)))
            }
        }
    }

    fn start(&self) -> io::Result<Running> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_read_timeout(Some(CHECK_INTERVAL))?;
        socket.set_write_timeout(Some(CHECK_INTERVAL))?;
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .args(self.limits.memory.map(|bytes| bytes.to_string()))
            .env_clear()
            .env("GLIBC_TUNABLES", ALLOCATION)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for this process only: names are read after it, too.
            .process_group(0)
            .spawn()?;
        Ok(Running {
            child,
            socket,
            is_ready: false,
            files: FxHashSet::default(),
            cpu: 0,
            began: Instant::now(),
        })
    }
}

impl Running {
    /// It may have been killed while it had nothing to do, for its memory.
    fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the process and returns how it ended, which may have been before.
    fn end(&mut self) -> Option<ExitStatus> {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let ended = self.child.try_wait().ok().flatten();
        let _ = self.child.kill();
        let killed = self.child.wait().ok();
        ended.or(killed)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// Why a process is ended.
#[derive(Debug)]
enum Stop {
    CpuTime,
    Elapsed,
    /// It has exited, or was killed.
    Gone,
    /// Its messages are not valid.
    Invalid,
}

impl Stop {
    fn text(&self, limits: NamingLimits, status: Option<ExitStatus>) -> String {
        let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
        match self {
            Stop::CpuTime => format!("reading names was stopped after {} of CPU time", seconds(limits.cpu)),
            Stop::Elapsed => format!("reading names was stopped after {}", seconds(limits.elapsed)),
            Stop::Invalid => "the process that reads names gave an invalid answer".into(),
            Stop::Gone => match status.and_then(|status| status.signal()) {
                Some(signal) => format!("the process that reads names was killed by signal {signal}"),
                None => "the process that reads names ended early".into(),
            },
        }
    }
}

/// One file in the process.
struct Turn<'a> {
    running: &'a mut Running,
    limits: NamingLimits,
    /// CPU time of the process at the beginning.
    cpu: u64,
    /// When the time is over; later if this process has kept it waiting.
    end: Instant,
    opened: usize,
}

impl Turn<'_> {
    fn new(running: &mut Running, limits: NamingLimits) -> Turn<'_> {
        Turn {
            cpu: sys::clock::cpu_time_of(running.child.id()).unwrap_or(0),
            end: Instant::now() + limits.elapsed,
            running,
            limits,
            opened: 0,
        }
    }

    /// CPU time of the process since the beginning, ns.
    fn cpu_time(&self) -> u64 {
        sys::clock::cpu_time_of(self.running.child.id())
            .unwrap_or(0)
            .saturating_sub(self.cpu)
    }

    /// Waits until it has given up its privileges: nothing is sent to it before.
    fn ready(&mut self) -> Result<(), Stop> {
        let mut header = [0; HEADER];
        self.read(&mut header)?;
        match protocol::parse_header(header) {
            (protocol::READY, 0) => Ok(()),
            _ => Err(Stop::Invalid),
        }
    }

    fn name(&mut self, request: &NamesRequest<'_>, addresses: &[u64]) -> Result<ModuleNames, Stop> {
        let mut all = ModuleNames::default();
        // At least one message, for the text about the file.
        for addresses in addresses.chunks(CHUNK).chain(addresses.is_empty().then_some(addresses)) {
            let look_up = LookUp {
                format: request.format,
                id: request.id,
                can_fetch: request.fetch.is_some(),
                path: request.path.to_vec(),
                addresses: addresses.to_vec(),
            };
            self.send(protocol::LOOK_UP, &look_up.encode(), Some(request.file))?;
            let names = self.read_names(request, addresses.len())?;
            all.found.extend(names.found);
            (all.symbols_from, all.symbols_missing) = (names.symbols_from, names.symbols_missing);
        }
        Ok(all)
    }

    /// Answers questions until the names arrive.
    fn read_names(&mut self, request: &NamesRequest<'_>, count: usize) -> Result<ModuleNames, Stop> {
        let mut fetch = request.fetch;
        loop {
            let mut header = [0; HEADER];
            self.read(&mut header)?;
            let (kind, length) = protocol::parse_header(header);
            if kind == protocol::NAMES {
                let bytes = self.read_message(length, MAX_RESULT)?;
                return ModuleNames::decode(&bytes, count).ok_or(Stop::Invalid);
            }
            let question = self.read_message(length, MAX_QUESTION)?;
            let requested = Instant::now();
            match kind {
                protocol::OPEN if self.opened < MAX_OPENED => {
                    self.opened += 1;
                    let path: &Path = Path::new(OsStr::from_bytes(&question));
                    let file = (request.open)(path);
                    let kind = file.as_ref().map_or(protocol::NO_FILE, |_| protocol::FILE);
                    self.end += requested.elapsed();
                    self.send(kind, &[], file.as_ref())?;
                }
                // Once, and only for this module: its build ID is known here.
                protocol::FETCH => {
                    let fetched = fetch.take().ok_or(Stop::Invalid)?();
                    self.end += requested.elapsed();
                    match fetched {
                        Ok(file) => self.send(protocol::FILE, &[], Some(&file))?,
                        Err(why) => self.send(protocol::REFUSED, why.as_bytes(), None)?,
                    }
                }
                _ => return Err(Stop::Invalid),
            }
        }
    }

    fn read_message(&mut self, length: usize, most: usize) -> Result<Vec<u8>, Stop> {
        if length > most {
            return Err(Stop::Invalid);
        }
        // What has arrived is kept, not what was announced.
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let (at, more) = (bytes.len(), (length - bytes.len()).min(1 << 20));
            bytes.resize(at + more, 0);
            self.read(&mut bytes[at..])?;
        }
        Ok(bytes)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<(), Stop> {
        let mut done = 0;
        while done < buffer.len() {
            done += passed(self.running.socket.read(&mut buffer[done..]))?;
            self.check()?;
        }
        Ok(())
    }

    fn send(&mut self, kind: u8, bytes: &[u8], file: Option<&File>) -> Result<(), Stop> {
        let mut message = protocol::header(kind, bytes.len()).to_vec();
        message.extend(bytes);
        let (mut done, mut file) = (0, file);
        while done < message.len() {
            let (socket, rest) = (&mut self.running.socket, &message[done..]);
            let sent = passed(match file {
                Some(file) => sys::sockets::send_with_file(socket, rest, file.as_fd()),
                None => socket.write(rest),
            })?;
            // It goes with the first bytes.
            file = file.filter(|_| sent == 0);
            done += sent;
            self.check()?;
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Stop> {
        if self.cpu_time() > self.limits.cpu.as_nanos() as u64 {
            return Err(Stop::CpuTime);
        }
        if Instant::now() > self.end {
            Err(Stop::Elapsed)
        } else {
            Ok(())
        }
    }
}

/// Bytes that were read or sent: none in this interval, or some.
fn passed(result: io::Result<usize>) -> Result<usize, Stop> {
    match result {
        Ok(0) => Err(Stop::Gone),
        Ok(n) => Ok(n),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        Err(_) => Err(Stop::Gone),
    }
}

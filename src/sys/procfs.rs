//! Parsers of /proc for processes and threads: `status`, `stat`, `schedstat`, `syscall`, `comm`, `cmdline`, `exe`.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use crate::event::{Pid, Tid};

/// Bytes that are expected of a file.
const FILE_SIZE: usize = 4096;

/// Bytes of a file of `/proc`.
///
/// # Errors
/// The file is not there, or may not be read.
pub fn read_bytes(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    read_at_most(path, u64::MAX)
}

/// The first `most` bytes of a file of `/proc`, which says nothing of its size: most take two reads, and not one for each
/// doubling of a buffer.
///
/// # Errors
/// The file is not there, or may not be read.
pub fn read_at_most(path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(FILE_SIZE);
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Text of a file of `/proc`. What a process chooses in it (its threads' names, paths) may be any bytes: those that are not
/// UTF-8 become U+FFFD. The rest is ASCII.
///
/// # Errors
/// The file is not there, or may not be read.
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    let text = String::from_utf8(read_bytes(path)?);
    Ok(text.unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
}

/// State of a thread and how often it has left a CPU. If both are equal before and after a read, and it is not running,
/// it did not run in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunSnapshot {
    /// `R`, `S`, `D`, `T`, `t`, `Z` ... (proc_pid_status(5)).
    pub state: char,
    switches: (u64, u64),
}

impl RunSnapshot {
    /// `None` if the thread has exited.
    pub fn read(pid: Pid, tid: Tid) -> Option<RunSnapshot> {
        still(&read_text(format!("/proc/{pid}/task/{tid}/status")).ok()?)
    }

    /// Is it running or runnable?
    pub fn runs(&self) -> bool {
        self.state == 'R'
    }
}

fn still(status: &str) -> Option<RunSnapshot> {
    let number = |name| field(status, name)?.parse().ok();
    Some(RunSnapshot {
        state: field(status, "State")?.chars().next()?,
        switches: (
            number("voluntary_ctxt_switches")?,
            number("nonvoluntary_ctxt_switches")?,
        ),
    })
}

/// How many CPUs a process may run on; `None` if it is gone.
pub fn allowed_cpus(pid: Pid) -> Option<u32> {
    cpus_of(&read_text(format!("/proc/{pid}/status")).ok()?)
}

/// The CPUs of a mask in hexadecimal digits, with commas between groups.
fn cpus_of(status: &str) -> Option<u32> {
    let digits = field(status, "Cpus_allowed")?.chars().filter(|c| *c != ',');
    let cpus = digits
        .map(|digit| Some(digit.to_digit(16)?.count_ones()))
        .sum::<Option<u32>>()?;
    (cpus > 0).then_some(cpus)
}

/// The model of the first CPU in a beginning of `/proc/cpuinfo`: a name on x86-64, implementer and part on aarch64 (where they
/// are numbers).
pub fn cpu_model(cpuinfo: &str) -> Option<String> {
    let value = |key: &str| {
        let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = fields.find(|(name, _)| name.trim() == key)?;
        Some(value.trim()).filter(|value| !value.is_empty())
    };
    value("model name").map(str::to_string).or_else(|| {
        Some(format!(
            "implementer {}, part {}",
            value("CPU implementer")?,
            value("CPU part")?
        ))
    })
}

/// The ID of a thread in its own pid namespace.
pub fn namespace_tid(pid: Pid, tid: Tid) -> Option<Tid> {
    let status = read_text(format!("/proc/{pid}/task/{tid}/status")).ok()?;
    innermost_id(&status)
}

/// The id in the innermost PID namespace, from the text of a `status` file (proc_pid_status(5), `NSpid`: the last one).
pub fn innermost_id(status: &str) -> Option<u32> {
    field(status, "NSpid")?.split_ascii_whitespace().last()?.parse().ok()
}

/// Where a thread that does not run is blocked, in user space and in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockedAt {
    /// Number of the system call and its arguments; `None`: in none (a page fault, job control).
    pub call: Option<(u64, [u64; 6])>,
    pub sp: u64,
    pub ip: u64,
}

/// `None` if the thread runs.
///
/// # Errors
/// It has exited, or may not be read (needs permission to trace it).
pub fn blocked(pid: Pid, tid: Tid) -> io::Result<Option<BlockedAt>> {
    Ok(parse_blocked(&read_text(format!("/proc/{pid}/task/{tid}/syscall"))?))
}

/// `202 0x7f.. 0x80 ... 0xSP 0xIP`, `-1 0xSP 0xIP`, `running` (proc_pid_syscall(5)).
pub fn parse_blocked(text: &str) -> Option<BlockedAt> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let hex = |word: &&str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let (first, rest) = words.split_first()?;
    let numbers: Vec<u64> = rest.iter().map(hex).collect::<Option<_>>()?;
    let (call, at) = match first.parse::<i64>().ok()? {
        -1 => (None, &numbers[..]),
        number => {
            let args: [u64; 6] = numbers.get(..6)?.try_into().ok()?;
            (Some((u64::try_from(number).ok()?, args)), &numbers[6..])
        }
    };
    let [sp, ip] = at else { return None };
    Some(BlockedAt { call, sp: *sp, ip: *ip }).filter(|b| b.ip != 0)
}

/// How a thread was scheduled (Documentation/scheduler/sched-stats.rst). Times in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedStat {
    pub cpu_time: u64,
    /// Time that it was runnable and had no CPU.
    pub delayed: u64,
    /// How often it got a CPU.
    pub runs: u64,
}

impl SchedStat {
    /// Reads an open `schedstat` file of a thread; `None` once the thread has exited.
    pub fn read(file: &File) -> Option<SchedStat> {
        let mut text = [0; 96];
        let length = file.read_at(&mut text, 0).ok()?;
        let mut words = std::str::from_utf8(&text[..length]).ok()?.split_ascii_whitespace();
        let mut number = || words.next()?.parse().ok();
        Some(SchedStat {
            cpu_time: number()?,
            delayed: number()?,
            runs: number()?,
        })
    }
}

/// What decides whether a thread may be sent a signal, from its open `status` file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalReadiness {
    /// Running, runnable, or in a wait that signals do not end.
    pub runs: bool,
    /// It blocks the signal. Those that it waits for (sigwait) are not shown as blocked meanwhile.
    pub blocks: bool,
}

impl SignalReadiness {
    /// `None` once the thread has exited.
    pub fn read(status: &File, signal: i32) -> Option<SignalReadiness> {
        let mut text = [0; 4096]; // without a very long list of groups, which comes before: then nothing is known
        let length = status.read_at(&mut text, 0).ok().filter(|n| *n > 0)?;
        let lines = || text[..length].split(|c| *c == b'\n');
        let value = |name: &[u8]| lines().find_map(|line| Some(line.strip_prefix(name)?.trim_ascii()));
        let blocked = value(b"SigBlk:").and_then(|hex| u64::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        Some(SignalReadiness {
            runs: value(b"State:").is_some_and(|state| state.starts_with(b"R") || state.starts_with(b"D")),
            blocks: blocked.is_none_or(|blocked| blocked & (1 << (signal - 1)) != 0),
        })
    }
}

/// Reads an open `syscall` file of a thread, as [`blocked`] does.
///
/// # Errors
/// The thread has exited.
pub fn read_blocked(file: &File) -> io::Result<Option<BlockedAt>> {
    let mut text = [0; 256];
    let length = file.read_at(&mut text, 0)?;
    if length == 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(parse_blocked(&String::from_utf8_lossy(&text[..length])))
}

/// The functions a thread is in, in the kernel, innermost first; `None` without permission (CAP_SYS_ADMIN).
pub fn kernel_stack(pid: Pid, tid: Tid) -> Option<Vec<String>> {
    Some(parse_kernel_stack(
        &read_text(format!("/proc/{pid}/task/{tid}/stack")).ok()?,
    ))
}

/// `[<0>] futex_wait_queue+0x60/0x90`, one function per line; a module's name may follow in brackets.
fn parse_kernel_stack(text: &str) -> Vec<String> {
    let name = |line: &str| {
        let location = line.split_once("] ")?.1;
        let (name, rest) = location.split_once('+').unwrap_or((location, ""));
        let module = rest.split_once(" [").map_or("", |(_, m)| m.trim_end_matches(']'));
        (!name.is_empty()).then(|| match module {
            "" => name.to_string(),
            m => format!("{name} [{m}]"),
        })
    };
    text.lines().filter_map(name).collect()
}

/// A number after a word.
fn number(text: &str, word: &str) -> Option<u32> {
    text.lines().find_map(|l| l.strip_prefix(word)?.trim().parse().ok())
}

/// Process and parent process of a thread.
pub fn ids(tid: Tid) -> Option<(Pid, Pid)> {
    let text = read_text(format!("/proc/{tid}/status")).ok()?;
    Some((number(&text, "Tgid:")?, number(&text, "PPid:")?))
}

/// Signals that are ignored unless the program handles them, that are not needed immediately, and that wake no thread
/// (SIGCONT would).
const TICKS: [i32; 3] = [libc::SIGURG, libc::SIGWINCH, libc::SIGCHLD];

/// Why no signal can stop a thread at its ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoSignal {
    /// We may not send it any (fs/fcntl.c, sigio_perm: capabilities do not count).
    NotPermitted,
    /// The thread blocks, or its process handles, all of them.
    Taken,
    /// It has exited.
    Exited,
}

/// The signal that stops a thread at its ticks, or why there is none.
pub type TickSignal = Result<i32, NoSignal>;

/// The signal that may stop a thread at its ticks: the process does not handle it, the thread does not block it, and we
/// may send it. The signals that a new thread blocks say nothing: the C library starts it with all of them blocked.
/// `tid`: that thread, or the process for what applies to all its threads.
///
/// # Errors
/// There is none.
pub fn tick_signal(tid: Tid) -> TickSignal {
    let text = read_text(format!("/proc/{tid}/status")).map_err(|_| NoSignal::Exited)?;
    choose(&text, (super::process::real_uid(), super::process::effective_uid()))
}

fn choose(status: &str, (real, effective): (u32, u32)) -> TickSignal {
    let set = |word: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(word))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    let uids = status.lines().find_map(|l| l.strip_prefix("Uid:")).unwrap_or_default();
    let uids: Vec<u32> = uids.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    let [its_real, _, its_saved, _] = uids[..] else {
        return Err(NoSignal::Exited);
    };
    // fs/fcntl.c, sigio_perm
    let may_send = effective == 0 || [real, effective].iter().any(|uid| [its_real, its_saved].contains(uid));
    if !may_send {
        return Err(NoSignal::NotPermitted);
    }
    let (Some(blocked), Some(handled)) = (set("SigBlk:"), set("SigCgt:")) else {
        return Err(NoSignal::Exited);
    };
    let free = |signal: &i32| (blocked | handled) & (1 << (signal - 1)) == 0;
    TICKS.into_iter().find(free).ok_or(NoSignal::Taken)
}

/// Can a stop make a process's transfer by this descriptor return early? Writes to files are not interrupted, and where nothing
/// waits (O_NONBLOCK) a stop changes nothing; of reads, only large ones from devices end early.
pub fn is_transfer_interruptible(pid: Pid, descriptor: u64, writes: bool) -> bool {
    const O_NONBLOCK: u32 = libc::O_NONBLOCK as u32;
    let Ok(file) = fs::metadata(format!("/proc/{pid}/fd/{descriptor}")) else {
        return false; // not open: the call fails
    };
    let kind = file.file_type();
    if !kind.is_char_device() && !(writes && (kind.is_fifo() || kind.is_socket())) {
        return false;
    }
    let info = read_bytes(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    let info = String::from_utf8_lossy(&info);
    let flags = field(&info, "flags").and_then(|octal| u32::from_str_radix(octal, 8).ok());
    flags.is_none_or(|flags| flags & O_NONBLOCK == 0)
}

/// The tracer of a thread.
pub fn tracer_of(tid: Tid) -> Option<Tid> {
    let text = read_text(format!("/proc/{tid}/status")).ok()?;
    number(&text, "TracerPid:").filter(|pid| *pid != 0)
}

/// Address of `argc`: `startstack`, field 28 of /proc/PID/stat (0 without permission).
pub fn stack_end(pid: Pid) -> u64 {
    stat_field(pid, 28).unwrap_or(0)
}

/// Size of the stack that a new thread gets by default, bytes: the soft limit in `/proc/PID/limits`. `None`: unlimited,
/// or unknown.
pub fn stack_limit(pid: Pid) -> Option<u64> {
    let text = read_text(format!("/proc/{pid}/limits")).ok()?;
    let values = text.lines().find_map(|line| line.strip_prefix("Max stack size"))?;
    values.split_ascii_whitespace().next()?.parse().ok()
}

/// Address of a program's code: `startcode`, field 26 of /proc/PID/stat (0 without permission).
pub fn code_start(pid: Pid) -> u64 {
    stat_field(pid, 26).unwrap_or(0)
}

/// When a process was started, clock ticks since the machine was: `starttime`, field 22 of /proc/PID/stat.
pub fn start_time(pid: Pid) -> Option<u64> {
    stat_field(pid, 22)
}

/// [`start_time`] of a process that runs; `None` of one that has exited, which may still wait for its parent.
pub fn start_of_running(pid: Pid) -> Option<u64> {
    let text = read_text(format!("/proc/{pid}/stat")).ok()?;
    let has_exited = field_of_stat(&text, 3)?.starts_with(['Z', 'X']);
    if has_exited {
        return None;
    }
    field_of_stat(&text, 22)?.parse().ok()
}

/// A numeric field of /proc/PID/stat, numbered as in proc(5).
fn stat_field(pid: Pid, field: usize) -> Option<u64> {
    stat_text(pid, field)?.parse().ok()
}

fn stat_text(pid: Pid, field: usize) -> Option<String> {
    field_of_stat(&read_text(format!("/proc/{pid}/stat")).ok()?, field)
}

fn field_of_stat(text: &str, field: usize) -> Option<String> {
    // the name, field 2, may hold spaces and brackets
    let (_, rest) = text.rsplit_once(") ")?;
    Some(rest.split(' ').nth(field.checked_sub(3)?)?.trim().to_string())
}

/// State of a thread, as in [`RunSnapshot`]; `None` if it has exited.
pub fn thread_state(pid: Pid, tid: Tid) -> Option<char> {
    let text = read_text(format!("/proc/{pid}/task/{tid}/stat")).ok()?;
    field_of_stat(&text, 3)?.chars().next()
}

/// State of a process (`R`, `S`, `Z` ...), field 3 of /proc/PID/stat.
pub fn stat_state(pid: Pid) -> Option<char> {
    stat_text(pid, 3)?.chars().next()
}

/// CPU time of a process and of the children that it has waited for; `None` if it does not exist.
pub fn cpu_times(pid: Pid) -> Option<(Duration, Duration)> {
    // utime, stime, cutime and cstime of proc_pid_stat(5), in units of USER_HZ (include/asm-generic/param.h, Linux 6.18)
    const USER_HZ: u64 = 100;
    let ticks = |field| stat_field(pid, field);
    let time = |ticks: u64| Duration::from_millis(ticks.saturating_mul(1000 / USER_HZ));
    let own = ticks(14)?.saturating_add(ticks(15)?);
    Some((time(own), time(ticks(16)?.saturating_add(ticks(17)?))))
}

/// Is it a kernel thread, which has no memory of its own?
pub fn is_kernel_thread(pid: Pid) -> bool {
    // PF_KTHREAD (include/linux/sched.h, Linux 6.18) among the flags, field 9 of proc_pid_stat(5)
    const KERNEL_THREAD: u64 = 0x0020_0000;
    stat_field(pid, 9).is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

/// Parent of a process; `None` if it has exited.
pub fn parent(pid: Pid) -> Option<Pid> {
    stat_text(pid, 4)?.parse().ok()
}

/// ELF class of a process's executable: 1 for 32 bits, 2 for 64.
pub fn elf_class(pid: Pid) -> Option<u8> {
    use std::io::Read;
    let mut head = [0; 5];
    fs::File::open(format!("/proc/{pid}/exe"))
        .ok()?
        .read_exact(&mut head)
        .ok()?;
    head.starts_with(b"\x7fELF").then_some(head[4])
}

/// Thread IDs of a process; none if it has exited.
pub fn threads(pid: Pid) -> Vec<Tid> {
    let dir = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    dir.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// Name of a thread (`comm`), without control characters.
pub fn thread_name(pid: Pid, tid: Tid) -> Option<String> {
    let raw = read_bytes(format!("/proc/{pid}/task/{tid}/comm")).ok()?;
    Some(String::from_utf8_lossy(raw.strip_suffix(b"\n").unwrap_or(&raw)).into_owned())
}

/// Thread group IDs of all processes.
pub fn processes() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// The arguments of a process, without empty ones; none if it has exited or is a kernel thread.
pub fn arguments(pid: Pid) -> Vec<String> {
    let raw = read_bytes(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    raw.split(|c| *c == 0)
        .filter(|word| !word.is_empty())
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

/// Command line of a process, separated by blanks; its name if it has none.
pub fn command_line(pid: Pid) -> String {
    let words = arguments(pid);
    if words.is_empty() {
        thread_name(pid, pid).unwrap_or_default()
    } else {
        words.join(" ")
    }
}

/// The value of a field of /proc/PID/status.
pub fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    status.lines().find_map(value).map(str::trim)
}

/// Real, effective and saved ID (`Uid` or `Gid`).
pub fn user_ids(status: &str, name: &str) -> [u32; 3] {
    let mut ids = [u32::MAX; 3];
    let words = field(status, name).unwrap_or_default().split_ascii_whitespace();
    ids.iter_mut()
        .zip(words)
        .for_each(|(id, word)| *id = word.parse().unwrap_or(u32::MAX));
    ids
}

/// Effective and supplementary groups.
pub fn groups(status: &str) -> Vec<u32> {
    let more = field(status, "Groups").unwrap_or_default().split_ascii_whitespace();
    std::iter::once(user_ids(status, "Gid")[1])
        .chain(more.filter_map(|g| g.parse().ok()))
        .collect()
}

/// Memory of a process, with its share of what several use, bytes.
pub fn pss(pid: Pid) -> Option<u64> {
    rolled_up(pid, "Pss")
}

/// Resident memory of a process, bytes, by a look at all its pages.
pub fn rss(pid: Pid) -> Option<u64> {
    rolled_up(pid, "Rss")
}

/// Which of a process's pages (avma) are resident, by its page table; `None`: it has ended, or that may not be read.
pub fn resident_pages(pid: Pid, pages: &[u64]) -> Option<Vec<bool>> {
    /// Bit of a page that is present (Documentation/admin-guide/mm/pagemap.rst, v6.18).
    const PRESENT: u64 = 1 << 63;
    let table = File::open(format!("/proc/{pid}/pagemap")).ok()?;
    let mut entry = [0; 8];
    // The table of a process that has ended is empty.
    table.read_exact_at(&mut entry, 0).ok()?;
    let size = super::memory::page_size() as u64;
    let mut is_present = |page: &u64| {
        let is_read = table.read_exact_at(&mut entry, page / size * 8).is_ok();
        is_read && u64::from_ne_bytes(entry) & PRESENT != 0
    };
    Some(pages.iter().map(&mut is_present).collect())
}

/// A size in proc(5), `smaps_rollup`, bytes.
fn rolled_up(pid: Pid, name: &str) -> Option<u64> {
    let text = read_text(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let kilobytes = field(&text, name)?.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(kilobytes.saturating_mul(1024))
}

/// Memory of a process, bytes (proc(5), `statm`).
pub fn resident(pid: Pid) -> Option<u64> {
    let text = read_text(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages.saturating_mul(super::memory::page_size() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines() {
        for (status, cpus) in [
            ("Name:\tx\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\n", Some(2)),
            ("Cpus_allowed:\tffffffff,00000001\n", Some(33)),
            ("Cpus_allowed:\t0\n", None),
            ("Cpus_allowed:\tx\n", None),
            ("Name:\tx\n", None),
        ] {
            assert_eq!(cpus_of(status), cpus, "{status}");
        }
        for (cpuinfo, model) in [
            (
                "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Xeon(R) @ 2.60GHz\n\nprocessor\t: 1\n",
                Some("Xeon(R) @ 2.60GHz"),
            ),
            (
                "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n",
                Some("implementer 0x41, part 0xd0c"),
            ),
            ("processor\t: 0\nmodel name\t:\n", None),
            ("model name", None),
            ("", None),
        ] {
            assert_eq!(cpu_model(cpuinfo).as_deref(), model, "{cpuinfo}");
        }
    }

    #[test]
    fn states_of_threads() {
        let text =
            "Name:\tState: R\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n";
        let seen = still(text).expect("all there");
        assert_eq!((seen.state, seen.switches, seen.runs()), ('S', (12, 3), false));
        assert_eq!(still("State:\tS (sleeping)\n"), None);
    }

    #[test]
    fn names_may_hold_anything() {
        let check = |name: &str, state: Option<&str>, parent: Option<&str>| {
            let text = format!("7 ({name}) S 3 7\n");
            let field = |number| field_of_stat(&text, number);
            assert_eq!((field(3).as_deref(), field(4).as_deref()), (state, parent), "{name}");
        };
        check("python", Some("S"), Some("3"));
        check(") R 1 (", Some("S"), Some("3"));
        check("загруз\u{fffd}", Some("S"), Some("3"));
        check("", Some("S"), Some("3"));
        assert_eq!(field_of_stat("7 (name", 3), None);
        assert_eq!(field_of_stat("7 (name) S", 2), None);
    }

    #[test]
    fn text_that_is_not_utf8_is_read() {
        let name = std::thread::Builder::new().spawn(|| {
            let tid = crate::sys::process::current_tid() as u32;
            let path = format!("/proc/self/task/{tid}/comm");
            fs::write(path, b"cut \xd0").expect("a thread can rename itself");
            let pid = std::process::id();
            let status = read_text(format!("/proc/{pid}/task/{tid}/status")).expect("readable");
            let seen = RunSnapshot::read(pid, tid).is_some();
            assert!(seen && namespace_tid(pid, tid).is_some() && thread_state(pid, tid) == Some('R'));
            field(&status, "Name").map(String::from)
        });
        let name = name.expect("a thread").join().expect("no panic");
        assert_eq!(name.as_deref(), Some("cut \u{fffd}"));
    }

    #[test]
    fn blocked_threads() {
        let check = |text: &str, expected: Option<(Option<u64>, u64, u64)>| {
            let got = parse_blocked(text).map(|b| (b.call.map(|c| c.0), b.sp, b.ip));
            assert_eq!(got, expected, "{text}");
        };
        check(
            "202 0x1 0x80 0x0 0x0 0x0 0x0 0x7ffd10 0x7f20\n",
            Some((Some(202), 0x7ffd10, 0x7f20)),
        );
        check("-1 0x7ffd10 0x7f20\n", Some((None, 0x7ffd10, 0x7f20)));
        check("running\n", None);
        check("202 0x1 0x80\n", None);
        check("0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n", None);
        check("", None);
    }

    #[test]
    fn kernel_stacks() {
        let text = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] tun_do_read+0x1/0x2 [tun]\nnonsense\n[<0>] \n";
        assert_eq!(parse_kernel_stack(text), ["futex_wait_queue", "tun_do_read [tun]"]);
    }

    #[test]
    fn timer_signals_are_unused_signals() {
        let check = |blocked: u64, handled: u64, us: (u32, u32), expected: TickSignal| {
            let status = format!(
                "Name:\tx\nUid:\t1000\t1001\t1002\t1003\nSigPnd:\t0\nSigBlk:\t{blocked:016x}\nSigIgn:\t0\nSigCgt:\t{handled:016x}\n"
            );
            assert_eq!(choose(&status, us), expected, "{blocked:x} {handled:x} {us:?}");
        };
        let bit = |signal: i32| 1u64 << (signal - 1);
        check(0, 0, (0, 0), Ok(libc::SIGURG));
        check(bit(libc::SIGINT), bit(libc::SIGTERM), (0, 0), Ok(libc::SIGURG));
        check(0, bit(libc::SIGURG), (0, 0), Ok(libc::SIGWINCH));
        check(bit(libc::SIGURG), bit(libc::SIGWINCH), (0, 0), Ok(libc::SIGCHLD));
        check(u64::MAX, 0, (0, 0), Err(NoSignal::Taken));
        check(0, u64::MAX, (0, 0), Err(NoSignal::Taken));
        check(0, 0, (1000, 1000), Ok(libc::SIGURG));
        check(0, 0, (7, 1002), Ok(libc::SIGURG));
        check(0, 0, (7, 1001), Err(NoSignal::NotPermitted));
        check(u64::MAX, 0, (7, 1001), Err(NoSignal::NotPermitted));
        assert_eq!(choose("Uid:\t0\nSigBlk:\tx\n", (0, 0)), Err(NoSignal::Exited));
    }
}

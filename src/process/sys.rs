//! System calls behind safe functions. Most of the project's `unsafe` is here.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub use perf_event_open_sys::bindings as perf;

fn check(r: i64) -> io::Result<i64> {
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r) }
}

/// Copies memory of another process, as much as is readable from `avma` on; returns the bytes copied (0 if none).
pub fn read_memory(pid: u32, avma: u64, buf: &mut [u8]) -> usize {
    let local = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    let remote = libc::iovec {
        iov_base: avma as *mut _,
        iov_len: buf.len(),
    };
    // SAFETY: the local iovec covers exactly `buf`; the remote address is only looked at by the kernel.
    let n = unsafe { libc::process_vm_readv(pid as i32, &local, 1, &remote, 1, 0) };
    n.max(0) as usize
}

/// Copies pieces of memory of another process (address and length each), one after the other, up to the first that is
/// not readable; returns the bytes copied. Allocates nothing.
pub fn read_memory_pieces(pid: u32, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
    let mut copied = 0;
    for pieces in pieces.chunks(64) {
        let mut remote = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; 64];
        for (iovec, (at, len)) in remote.iter_mut().zip(pieces) {
            (iovec.iov_base, iovec.iov_len) = (*at as *mut _, *len);
        }
        let rest = &mut buf[copied..];
        let local = libc::iovec {
            iov_base: rest.as_mut_ptr().cast(),
            iov_len: rest.len(),
        };
        let count = pieces.len() as libc::c_ulong;
        // SAFETY: the local iovec covers exactly `rest`, and `remote` holds `count` of them; the remote addresses are
        // only looked at by the kernel.
        let n = unsafe { libc::process_vm_readv(pid as i32, &local, 1, remote.as_ptr(), count, 0) }.max(0) as usize;
        copied += n;
        if n < pieces.iter().map(|(_, len)| len).sum() {
            break;
        }
    }
    copied
}

/// Opens a perf event; `tid` -1 means every thread, `cpu` -1 every CPU. The descriptor is close-on-exec.
pub fn perf_event_open(attr: &mut perf::perf_event_attr, tid: i32, cpu: i32) -> io::Result<OwnedFd> {
    attr.size = size_of::<perf::perf_event_attr>() as u32;
    // SAFETY: `attr` is a valid attribute structure whose size field is set.
    let fd = unsafe { perf_event_open_sys::perf_event_open(attr, tid, cpu, -1, perf::PERF_FLAG_FD_CLOEXEC.into()) };
    check(fd.into())?;
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn perf_ioctl(fd: BorrowedFd<'_>, request: u32, arg: u64) -> io::Result<()> {
    // SAFETY: perf ioctls used here take an integer argument, no pointer.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::c_ulong, arg) }.into()).map(drop)
}

/// Attaches a BPF program to a perf event.
pub fn perf_set_bpf(event: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::SET_BPF, program.as_raw_fd() as u64)
}

/// Makes an event write to the ring of another one of the same thread.
pub fn perf_set_output(event: BorrowedFd<'_>, ring: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::SET_OUTPUT, ring.as_raw_fd() as u64)
}

/// Sends each tick of an event to a thread, as a signal that tells of the event's descriptor.
pub fn signal_ticks(event: BorrowedFd<'_>, tid: u32, signal: i32) -> io::Result<()> {
    // include/uapi/asm-generic/fcntl.h
    const F_SETSIG: i32 = 10;
    const F_SETOWN_EX: i32 = 15;
    const F_OWNER_TID: i32 = 0;
    let fd = event.as_raw_fd();
    let owner = [F_OWNER_TID, tid as i32]; // struct f_owner_ex
    // SAFETY: the first reads the two numbers above, the others take integers.
    unsafe {
        check(libc::fcntl(fd, F_SETOWN_EX, owner.as_ptr()).into())?;
        check(libc::fcntl(fd, F_SETSIG, signal).into())?;
        let flags = check(libc::fcntl(fd, libc::F_GETFL).into())? as i32;
        check(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC).into())?;
    }
    Ok(())
}

/// Sets the distance to the next sample, and between those after it.
pub fn perf_set_period(event: BorrowedFd<'_>, period: u64) -> io::Result<()> {
    // SAFETY: the kernel reads one u64 at the address, which lives as long as the call.
    let r = unsafe { libc::ioctl(event.as_raw_fd(), perf::PERIOD as libc::c_ulong, &raw const period) };
    check(r.into()).map(drop)
}

pub fn perf_enable(event: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::ENABLE, 0)
}

pub fn perf_disable(event: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::DISABLE, 0)
}

/// The count of an event.
pub fn read_count(event: BorrowedFd<'_>) -> io::Result<u64> {
    let mut value = [0u8; 8];
    // SAFETY: room for the eight bytes that an event without read_format gives.
    check(unsafe { libc::read(event.as_raw_fd(), value.as_mut_ptr().cast(), 8) } as i64)?;
    Ok(u64::from_le_bytes(value))
}

/// Waits until one of the descriptors is readable; false on time-out. An interruption by a signal counts as time-out.
pub fn poll(fds: &[BorrowedFd<'_>], wait: Duration) -> io::Result<bool> {
    let mut polls: Vec<libc::pollfd> = fds
        .iter()
        .map(|f| libc::pollfd {
            fd: f.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let wait = libc::timespec {
        tv_sec: wait.as_secs().min(i32::MAX as u64) as i64,
        tv_nsec: wait.subsec_nanos().into(),
    };
    // SAFETY: pointer and count describe the vector above; the time lives here; no signal mask.
    let n = unsafe { libc::ppoll(polls.as_mut_ptr(), polls.len() as u64, &wait, std::ptr::null()) };
    match check(n.into()) {
        Ok(n) => Ok(n > 0),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(e) => Err(e),
    }
}

/// Thread pointer (`fs` base) of the calling thread.
pub fn own_thread_pointer() -> u64 {
    let mut base = 0u64;
    const ARCH_GET_FS: i32 = 0x1003; // arch/x86/include/uapi/asm/prctl.h
    // SAFETY: ARCH_GET_FS stores one word at the address given.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_GET_FS, &mut base as *mut u64) };
    base
}

pub fn own_tid() -> i32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::gettid() }
}

/// Lets the calling thread go before others that want the CPU, as far as is permitted.
pub fn hurry() {
    // SAFETY: integers only; 0 is the calling thread. Without the right nothing changes.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
    // Short turns, and therefore early ones: needs no right (Linux 6.12, kernel/sched/syscalls.c; older kernels ignore
    // it). The priority is written again, so it is read first.
    // SAFETY: size and structure agree; it is read and written in place.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>();
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) == 0 {
            attr.sched_runtime = 100_000; // ns, the shortest there is
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0);
        }
    }
}

/// Lets nobody but the kernel keep the calling thread from running, where that is permitted (CAP_SYS_NICE); true if so. For
/// threads that end soon.
pub fn go_first() -> bool {
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: the structure is complete and lives as long as the call; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &lowest) == 0 }
}

/// Enters the kernel and leaves again, at once.
pub fn spend_time_in_kernel() {
    // SAFETY: no arguments, cannot fail. (`libc::getppid` may not be cached, unlike getpid.)
    unsafe { libc::getppid() };
}

/// CLOCK_MONOTONIC, ns.
pub fn now() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

/// CPU time of this process, ns.
pub fn own_cpu() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of a process with all its threads, also those that have ended, ns; `None` if there is no such process.
pub fn cpu_time_of(pid: u32) -> Option<u64> {
    // include/linux/posix-timers.h, make_process_cpuclock: the number inverted, above three bits of which 2 is
    // CPUCLOCK_SCHED.
    read_clock(!(pid as libc::clockid_t) << 3 | 2)
}

fn clock(id: libc::clockid_t) -> u64 {
    read_clock(id).unwrap_or(0)
}

/// Time on a clock, ns; `None` if there is no such clock (any more).
pub fn read_clock(id: libc::clockid_t) -> Option<u64> {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid place for the result.
    let r = unsafe { libc::clock_gettime(id, &mut t) };
    (r == 0).then_some(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Keeps up to 32 MiB of freed memory instead of giving it back to the kernel: samples come and go, and a page got anew
/// costs more than what is done with it.
pub fn keep_freed_memory() {
    // SAFETY: sets two numbers of the allocator.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 16 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 32 << 20);
    }
}

/// Raises the limit of open files to the hard limit: a target with many threads needs one descriptor each.
pub fn raise_file_limit() {
    let mut r = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `r` is a valid place for the result and a valid argument after it.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut r) == 0 {
            r.rlim_cur = r.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &r);
        }
    }
}

/// Descriptors that this process may have open.
pub fn file_limit() -> usize {
    let mut r = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `r` is a valid place for the result.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut r) } == 0;
    // What POSIX grants every process, _POSIX_OPEN_MAX of limits.h, is less.
    if known {
        r.rlim_cur.try_into().unwrap_or(usize::MAX)
    } else {
        64
    }
}

pub fn effective_uid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() }
}

pub fn real_uid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::getuid() }
}

/// A descriptor that becomes readable when the process has ended.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: two integers; the result is checked.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as i32, 0) })?;
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

pub fn page_size() -> usize {
    // SAFETY: no pointers.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// CPUs that may exist; their numbers are below this.
pub fn cpu_count() -> usize {
    // SAFETY: no pointers.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF).max(1) as usize }
}

/// Opens a file for reading as if `folder` were the root: neither links nor `..` lead out of it (openat2(2), Linux 5.6).
pub fn open_within(folder: BorrowedFd<'_>, path: &str, flags: i32) -> io::Result<File> {
    let path = std::ffi::CString::new(path)?;
    // SAFETY: plain integers, for which zero is valid; the structure has fields that cannot be named.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = flags as u64;
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: the path ends in a NUL; pointer and size describe `how`.
    let fd = check(unsafe {
        libc::syscall(
            libc::SYS_openat2,
            folder.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    })?;
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}

/// A read-only memory file of the kernel, `mmap`ed by `ring`; see there.
pub(crate) fn map_shared(file: BorrowedFd<'_>, bytes: usize) -> io::Result<*mut u8> {
    // SAFETY: a fresh mapping chosen by the kernel; the caller unmaps it.
    let p = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if p == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(p.cast())
    }
}

/// Two ends of a pipe, close-on-exec: (read, write).
pub fn pipe() -> io::Result<(File, File)> {
    let mut fds = [0; 2];
    // SAFETY: room for the two descriptors the kernel writes.
    check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
    // SAFETY: both are ours alone.
    Ok(unsafe { (File::from_raw_fd(fds[0]), File::from_raw_fd(fds[1])) })
}

static INTERRUPTS: AtomicU32 = AtomicU32::new(0);
/// So many signals end us at once: twice is pressed in haste, while the profile is being written.
const IMPATIENT: u32 = 3;

extern "C" fn on_interrupt(signal: libc::c_int) {
    if INTERRUPTS.fetch_add(1, Ordering::Relaxed) + 1 >= IMPATIENT {
        // SAFETY: both are async-signal-safe; the default action is always valid.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}

/// From now on Ctrl-C (SIGINT), SIGTERM and SIGHUP are only counted, and `interrupts` tells; the third one ends us.
pub fn watch_interrupts() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler keeps to what is async-signal-safe; the structure is fully initialised. Without SA_RESTART, so that
        // a wait ends at once.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_interrupt as *const () as usize;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// From now on Ctrl-C ends this process again.
pub fn leave_interrupts() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the default action is always valid.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

pub fn interrupted() -> bool {
    interrupts() > 0
}

/// Signals to end that came so far.
pub fn interrupts() -> u32 {
    INTERRUPTS.load(Ordering::Relaxed)
}

/// Has the other end of this terminal or pipe gone?
pub fn is_hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut asked = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one structure, which lives here.
    let told = unsafe { libc::poll(&mut asked, 1, 0) };
    told == 1 && asked.revents & (libc::POLLHUP | libc::POLLERR) != 0
}

/// Is there something to read now?
pub fn is_readable(fd: &OwnedFd) -> bool {
    poll(&[fd.as_fd()], Duration::ZERO).unwrap_or(false)
}

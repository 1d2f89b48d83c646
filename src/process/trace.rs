//! ptrace, signals of children and waiting for many descriptors, behind safe functions.
//!
//! A thread is traced by seizing it, which does not stop it. A stop is a value, [`Stopped`], and dropping it lets the
//! thread go on in the way its kind of stop asks for. Waiting leaves the stop's signal in the kernel (WNOWAIT): if we
//! are killed at any moment, the kernel lets every thread go, and a signal that was on its way still arrives.
//!
//! All calls must come from one thread: the kernel knows that thread, not its process, as the tracer.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::arch::{USER_REGS_WORDS, UserRegs};
use crate::sample::Tid;

/// Requests, whose type differs between C libraries.
#[allow(clippy::unnecessary_cast)]
mod request {
    pub const CONT: u32 = libc::PTRACE_CONT as u32;
    pub const DETACH: u32 = libc::PTRACE_DETACH as u32;
    /// From Linux 5.3 on (include/uapi/linux/ptrace.h).
    pub const GET_SYSCALL_INFO: u32 = 0x420e;
    pub const GETSIGINFO: u32 = libc::PTRACE_GETSIGINFO as u32;
    pub const GETREGSET: u32 = libc::PTRACE_GETREGSET as u32;
    pub const INTERRUPT: u32 = libc::PTRACE_INTERRUPT as u32;
    pub const LISTEN: u32 = libc::PTRACE_LISTEN as u32;
    pub const SEIZE: u32 = libc::PTRACE_SEIZE as u32;
    pub const SETREGSET: u32 = libc::PTRACE_SETREGSET as u32;
    pub const SYSCALL: u32 = libc::PTRACE_SYSCALL as u32;
}

fn ptrace(request: u32, tid: Tid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests used here take integers, or the address of what outlives the call: (registers) an iovec that
    // describes the caller's words, (GETSIGINFO) words as long as a siginfo_t, (GET_SYSCALL_INFO) as many bytes as `address`
    // says.
    let r = unsafe { libc::ptrace(request as _, tid as libc::pid_t, address, data) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Begins to trace a thread, without stopping it. It and the threads it makes (with `children`: the processes too)
/// stop when they are made and when they execute a program.
///
/// # Errors
/// ESRCH: no such thread. EPERM: not permitted, or traced already.
pub fn seize(tid: Tid, children: bool) -> io::Result<()> {
    let mut options = libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACESYSGOOD;
    if children {
        options |= libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACEVFORK;
    }
    ptrace(request::SEIZE, tid, 0, options as usize)
}

/// Begins to trace a thread, without stopping it; threads that it makes are left alone.
///
/// # Errors
/// As [`seize`].
pub fn seize_alone(tid: Tid) -> io::Result<()> {
    ptrace(request::SEIZE, tid, 0, 0)
}

/// Asks a traced thread to stop; the stop is told of later.
///
/// # Errors
/// ESRCH: it has ended.
pub fn interrupt(tid: Tid) -> io::Result<()> {
    ptrace(request::INTERRUPT, tid, 0, 0)
}

/// Why a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// We asked, it is new, or a job-control stop has ended.
    Trap,
    /// SIGSTOP and the like have stopped its process.
    Group,
    /// A signal is about to be delivered.
    Signal(i32),
    /// A signal that we caused; it is not delivered.
    Tick,
    /// It has made a thread or a process.
    Made,
    /// It runs another program now.
    Exec,
    /// It is about to enter a system call, or has just left one; see [`Stopped::calls`].
    Call,
}

/// Where in a system call a thread stands that has stopped for [`Why::Call`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Entry,
    Exit,
}

/// A thread that has stopped, and goes on when this is dropped.
#[derive(Debug)]
pub struct Stopped {
    pub tid: Tid,
    pub why: Why,
    /// It shall stop at its next system call too, before and after it.
    pub calls: bool,
}

/// `PTRACE_EVENT_STOP` (include/uapi/linux/ptrace.h)
const EVENT_STOP: i32 = 128;

impl Why {
    /// From what waitid tells: a signal, and above it the event.
    fn of(status: i32) -> Why {
        let (signal, event) = (status & 0xff, status >> 8);
        match event {
            EVENT_STOP if signal == libc::SIGTRAP => Why::Trap,
            EVENT_STOP => Why::Group,
            libc::PTRACE_EVENT_EXEC => Why::Exec,
            // PTRACE_O_TRACESYSGOOD
            0 if signal == libc::SIGTRAP | 0x80 => Why::Call,
            0 => Why::Signal(signal),
            _ => Why::Made,
        }
    }
}

impl Stopped {
    /// # Errors
    /// ESRCH: it was killed while it stood.
    pub fn registers(&self) -> io::Result<UserRegs> {
        let mut words = [0u64; USER_REGS_WORDS];
        let place = libc::iovec {
            iov_base: words.as_mut_ptr().cast(),
            iov_len: size_of_val(&words),
        };
        ptrace(request::GETREGSET, self.tid, NT_PRSTATUS, (&raw const place) as usize)?;
        Ok(UserRegs(words))
    }

    /// # Errors
    /// ESRCH: it was killed while it stood.
    pub fn set_registers(&self, regs: &UserRegs) -> io::Result<()> {
        let mut words = regs.0;
        let place = libc::iovec {
            iov_base: words.as_mut_ptr().cast(),
            iov_len: size_of_val(&words),
        };
        ptrace(request::SETREGSET, self.tid, NT_PRSTATUS, (&raw const place) as usize)
    }

    /// The descriptor that the signal tells is ready to be read (F_SETSIG in fcntl(2)); `None`: it is another signal.
    pub fn ready_descriptor(&self) -> Option<i32> {
        // siginfo_t (include/uapi/asm-generic/siginfo.h): signal, error, code, padding; band (two words), descriptor
        const POLL_IN: i32 = 1;
        let mut words = [0i32; size_of::<libc::siginfo_t>() / 4];
        ptrace(request::GETSIGINFO, self.tid, 0, words.as_mut_ptr() as usize).ok()?;
        (words[2] == POLL_IN).then_some(words[6])
    }

    /// Where it stands in a system call, if it stopped for one. The kernel must know (Linux 5.3).
    pub fn side(&self) -> Option<Side> {
        let mut info = [0u8; 88]; // struct ptrace_syscall_info (include/uapi/linux/ptrace.h); the first byte says which
        ptrace(
            request::GET_SYSCALL_INFO,
            self.tid,
            info.len(),
            info.as_mut_ptr() as usize,
        )
        .ok()?;
        match info[0] {
            1 => Some(Side::Entry),
            2 => Some(Side::Exit),
            _ => None,
        }
    }

    /// Keeps the signal that it stopped for from it.
    pub fn swallow(&mut self) {
        self.why = Why::Tick;
    }

    /// Lets it go for good: it is traced no longer.
    pub fn detach(self) {
        let signal = self.signal();
        let _ = ptrace(request::DETACH, self.tid, 0, signal); // killed meanwhile: nothing to detach
        std::mem::forget(self);
    }

    fn signal(&self) -> usize {
        match self.why {
            Why::Signal(signal) => signal as usize,
            _ => 0,
        }
    }
}

const NT_PRSTATUS: usize = 1;

impl Drop for Stopped {
    fn drop(&mut self) {
        // A thread that was killed while it stood needs no letting go.
        let _ = match self.why {
            Why::Group => ptrace(request::LISTEN, self.tid, 0, 0),
            _ if self.calls => ptrace(request::SYSCALL, self.tid, 0, self.signal()),
            _ => ptrace(request::CONT, self.tid, 0, self.signal()),
        };
    }
}

/// What has become of a traced thread.
#[derive(Debug)]
pub enum News {
    Stopped(Stopped),
    /// It has ended and waits to be reaped.
    Ended(Tid),
}

/// A traced thread that has stopped or ended, of all or this one; `None` if there is none now. One that has ended is
/// told of again and again until it is reaped.
pub fn next(tid: Option<Tid>) -> Option<News> {
    // Asked for the ends alone, the kernel tells of stops all the same (kernel/exit.c, wait_task_stopped).
    let (tid, status, code) = waitid(tid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT)?;
    if matches!(code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED) {
        return Some(News::Ended(tid));
    }
    let why = Why::of(status);
    if why == Why::Exec {
        // Its number may have changed, and the kernel answers no request before this stop was waited for
        // (kernel/ptrace.c, looks_like_a_spurious_pid). No signal is lost with it.
        waitid(Some(tid), libc::WSTOPPED);
    }
    let calls = false;
    Some(News::Stopped(Stopped { tid, why, calls }))
}

/// Takes note of the end of a thread that has ended, so that the kernel forgets it and tells its parent.
pub fn reap(tid: Tid) {
    waitid(Some(tid), libc::WEXITED);
}

/// Thread, status and kind of event.
fn waitid(tid: Option<Tid>, options: i32) -> Option<(Tid, i32, i32)> {
    let (kind, id) = tid.map_or((libc::P_ALL, 0), |tid| (libc::P_PID, tid));
    // SAFETY: a zeroed siginfo is valid, and room for the answer; its pid and status are set for every kind of child
    // event, and stay zero where there was none.
    let (r, pid, status, code) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let r = libc::waitid(kind, id, &mut info, options | libc::WNOHANG | libc::__WALL);
        (r, info.si_pid(), info.si_status(), info.si_code)
    };
    (r == 0 && pid > 0).then_some((pid as Tid, status, code))
}

fn child_signal() -> libc::sigset_t {
    // SAFETY: the set is initialised by sigemptyset before use.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        set
    }
}

/// Blocks SIGCHLD in the calling thread and those it makes from now on: one that did not would take it from
/// [`child_signals`].
pub fn block_child_signals() {
    // SAFETY: the set is complete and lives as long as the call.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &child_signal(), std::ptr::null_mut()) };
}

/// A descriptor that becomes readable when a traced thread (or a child) stops or ends.
///
/// # Errors
/// No descriptor is left.
pub fn child_signals() -> io::Result<OwnedFd> {
    block_child_signals();
    // SAFETY: the set is complete and lives as long as the call.
    owned(unsafe { libc::signalfd(-1, &child_signal(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })
}

/// A descriptor that [`wake`] makes readable.
///
/// # Errors
/// No descriptor is left.
pub fn waker() -> io::Result<OwnedFd> {
    // SAFETY: two integers.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Makes a waker readable.
pub fn wake(waker: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes that live here. It cannot fail but for a counter that is full, which is readable too.
    unsafe { libc::write(waker.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// A descriptor that becomes readable when its time has come; see [`set_alarm`].
///
/// # Errors
/// No descriptor is left.
pub fn alarm() -> io::Result<OwnedFd> {
    // SAFETY: two integers; the descriptor is checked and nobody else owns it.
    unsafe {
        owned(libc::timerfd_create(
            libc::CLOCK_MONOTONIC,
            libc::TFD_CLOEXEC | libc::TFD_NONBLOCK,
        ))
    }
}

/// Sets an alarm to go off once.
pub fn set_alarm(alarm: BorrowedFd<'_>, after: Duration) {
    let after = after.max(Duration::from_nanos(1)); // zero would stop it
    let when = libc::itimerspec {
        it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: libc::timespec {
            tv_sec: after.as_secs() as _,
            tv_nsec: after.subsec_nanos().into(),
        },
    };
    // SAFETY: the structure is complete and lives as long as the call.
    unsafe { libc::timerfd_settime(alarm.as_raw_fd(), 0, &when, std::ptr::null_mut()) };
}

/// Empties a descriptor of the kinds above, so that it is no longer readable.
pub fn empty(fd: BorrowedFd<'_>) {
    let mut buf = [0u8; 1024];
    // SAFETY: room for what is read; the descriptor does not block. What does not fill the room is all there was.
    while unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) } == buf.len() as isize {}
}

/// Takes what the kernel has just given.
fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: private, and called with fresh descriptors only, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits for many descriptors. One that is closed is forgotten.
pub struct Epoll(OwnedFd);

/// A descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    pub token: u64,
    /// What it told of has ended: nothing more will come.
    pub over: bool,
}

impl Epoll {
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: one integer.
        owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Epoll)
    }

    /// # Errors
    /// The kernel's memory or limit for watched descriptors.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: token,
        };
        // SAFETY: the structure lives as long as the call.
        let r = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event) };
        if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits until something is ready or the time is up, and replaces `ready` by what is.
    pub fn wait(&self, wait: Duration, ready: &mut Vec<Ready>) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let ms = wait.as_millis().min(i32::MAX as u128) as i32;
        // SAFETY: pointer and count describe the array above.
        let n = unsafe { libc::epoll_wait(self.0.as_fd().as_raw_fd(), events.as_mut_ptr(), events.len() as i32, ms) };
        ready.clear();
        // An interruption by a signal counts as time-out.
        ready.extend(events.iter().take(n.max(0) as usize).map(|e| Ready {
            token: e.u64,
            over: e.events & libc::EPOLLHUP as u32 != 0,
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_are_told_apart() {
        let check = |status: i32, expected: Why| assert_eq!(Why::of(status), expected, "{status:#x}");
        check(libc::SIGTRAP | EVENT_STOP << 8, Why::Trap);
        check(libc::SIGSTOP | EVENT_STOP << 8, Why::Group);
        check(libc::SIGTTIN | EVENT_STOP << 8, Why::Group);
        check(libc::SIGTRAP, Why::Signal(libc::SIGTRAP));
        check(libc::SIGUSR1, Why::Signal(libc::SIGUSR1));
        check(libc::SIGTRAP | 0x80, Why::Call);
        check(64, Why::Signal(64));
        check(libc::SIGTRAP | libc::PTRACE_EVENT_EXEC << 8, Why::Exec);
        check(libc::SIGTRAP | libc::PTRACE_EVENT_CLONE << 8, Why::Made);
        check(libc::SIGTRAP | libc::PTRACE_EVENT_FORK << 8, Why::Made);
        check(libc::SIGTRAP | libc::PTRACE_EVENT_VFORK << 8, Why::Made);
    }
}

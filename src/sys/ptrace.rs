//! ptrace, child signals and waiting for many descriptors, behind safe functions.
//!
//! Tracing a thread begins with PTRACE_SEIZE, which does not stop it. A stop is a value, [`Stopped`], and dropping it
//! resumes the thread in the way that its kind of stop requires. Waiting leaves the stop's signal in the kernel
//! (WNOWAIT): if we are killed at any moment, the kernel resumes every thread, and a pending signal is still delivered.
//!
//! All calls must come from one thread: for the kernel that thread is the tracer, not its process.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::arch::{REGISTER_SETS, USER_REGS_WORDS, UserRegs};
use crate::event::Tid;

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
    // SAFETY: the requests used here take integers, or the address of a value that outlives the call: (registers) an
    // iovec that describes the caller's words, (GETSIGINFO) words as long as a siginfo_t, (GET_SYSCALL_INFO) a buffer
    // of `address` bytes.
    let r = unsafe { libc::ptrace(request as _, tid as libc::pid_t, address, data) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Begins to trace a thread, without stopping it. It and the threads it creates (with `children`: processes too) stop
/// when they are created and when they exec.
///
/// # Errors
/// ESRCH: no such thread. EPERM: not permitted, or already traced.
pub fn seize(tid: Tid, children: bool) -> io::Result<()> {
    let mut options = libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACESYSGOOD;
    if children {
        options |= libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACEVFORK;
    }
    ptrace(request::SEIZE, tid, 0, options as usize)
}

/// Begins to trace a thread, without stopping it; threads that it creates are not traced.
///
/// # Errors
/// As [`seize`].
pub fn seize_alone(tid: Tid) -> io::Result<()> {
    ptrace(request::SEIZE, tid, 0, 0)
}

/// Requests a traced thread to stop; the stop is reported later.
///
/// # Errors
/// ESRCH: it has exited.
pub fn interrupt(tid: Tid) -> io::Result<()> {
    ptrace(request::INTERRUPT, tid, 0, 0)
}

/// Why a thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// We requested it, the thread is new, or a job-control stop has ended.
    Trap,
    /// A job-control signal (SIGSTOP for example) has stopped its process.
    GroupStop,
    /// A signal is about to be delivered.
    Signal(i32),
    /// A signal of our timers; it is not delivered.
    TimerSignal,
    /// It has created a thread or a process.
    Cloned,
    /// It has executed another program.
    Exec,
    /// It is about to enter a system call, or has just left one; see [`Stopped::at_syscalls`].
    Call,
}

/// The side of a system call at which a thread has stopped for [`StopReason::Call`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyscallSide {
    /// Number and arguments of the call.
    Entry(u64, [u64; 6]),
    Exit,
}

/// A stopped thread, resumed when this is dropped.
#[derive(Debug)]
pub struct Stopped {
    pub tid: Tid,
    pub reason: StopReason,
    /// Resume it until its next system call, and stop before and after that.
    pub at_syscalls: bool,
}

/// `PTRACE_EVENT_STOP` (include/uapi/linux/ptrace.h)
const EVENT_STOP: i32 = 128;

impl StopReason {
    /// From the status of waitid: a signal, and above it the event.
    fn of(status: i32) -> StopReason {
        let (signal, event) = (status & 0xff, status >> 8);
        match event {
            EVENT_STOP if signal == libc::SIGTRAP => StopReason::Trap,
            EVENT_STOP => StopReason::GroupStop,
            libc::PTRACE_EVENT_EXEC => StopReason::Exec,
            // PTRACE_O_TRACESYSGOOD
            0 if signal == libc::SIGTRAP | 0x80 => StopReason::Call,
            0 => StopReason::Signal(signal),
            _ => StopReason::Cloned,
        }
    }
}

impl Stopped {
    /// # Errors
    /// ESRCH: it was killed while it was stopped.
    pub fn registers(&self) -> io::Result<UserRegs> {
        let mut words = [0u64; USER_REGS_WORDS];
        for (set, range) in REGISTER_SETS {
            let part = &mut words[range];
            let buffer = libc::iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: size_of_val(part),
            };
            ptrace(request::GETREGSET, self.tid, set, (&raw const buffer) as usize)?;
        }
        Ok(UserRegs(words))
    }

    /// # Errors
    /// ESRCH: it was killed while it was stopped.
    pub fn set_registers(&self, regs: &UserRegs) -> io::Result<()> {
        let mut words = regs.0;
        for (set, first, size) in regs.written_sets() {
            let part = &mut words[first..];
            let buffer = libc::iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: size.min(size_of_val(part)),
            };
            ptrace(request::SETREGSET, self.tid, set, (&raw const buffer) as usize)?;
        }
        Ok(())
    }

    /// The readable descriptor that the signal reports (F_SETSIG in fcntl(2)); `None`: it is another signal.
    pub fn ready_descriptor(&self) -> Option<i32> {
        // siginfo_t (include/uapi/asm-generic/siginfo.h): signal, error, code, padding; band (two words), descriptor
        const POLL_IN: i32 = 1;
        let mut words = [0i32; size_of::<libc::siginfo_t>() / 4];
        ptrace(request::GETSIGINFO, self.tid, 0, words.as_mut_ptr() as usize).ok()?;
        (words[2] == POLL_IN).then_some(words[6])
    }

    /// On which side of a system call it stopped, if it stopped for one. Needs Linux 5.3.
    pub fn side(&self) -> Option<SyscallSide> {
        let mut info = [0u8; 88]; // struct ptrace_syscall_info (include/uapi/linux/ptrace.h); the first byte says which
        ptrace(
            request::GET_SYSCALL_INFO,
            self.tid,
            info.len(),
            info.as_mut_ptr() as usize,
        )
        .ok()?;
        let word = |at: usize| info.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes);
        match info[0] {
            1 => {
                let args: Vec<u64> = (0..6).filter_map(|i| word(32 + 8 * i)).collect();
                Some(SyscallSide::Entry(word(24)?, args.try_into().ok()?))
            }
            2 => Some(SyscallSide::Exit),
            _ => None,
        }
    }

    /// Drops the signal that it stopped for instead of delivering it.
    pub fn suppress_signal(&mut self) {
        self.reason = StopReason::TimerSignal;
    }

    /// Resumes it and stops tracing it.
    pub fn detach(self) {
        let signal = self.signal();
        let _ = ptrace(request::DETACH, self.tid, 0, signal); // if killed meanwhile there is nothing to detach
        std::mem::forget(self);
    }

    fn signal(&self) -> usize {
        match self.reason {
            StopReason::Signal(signal) => signal as usize,
            _ => 0,
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // A thread that was killed while it was stopped need not be resumed.
        let _ = match self.reason {
            StopReason::GroupStop => ptrace(request::LISTEN, self.tid, 0, 0),
            _ if self.at_syscalls => ptrace(request::SYSCALL, self.tid, 0, self.signal()),
            _ => ptrace(request::CONT, self.tid, 0, self.signal()),
        };
    }
}

/// State change of a traced thread.
#[derive(Debug)]
pub enum WaitEvent {
    Stopped(Stopped),
    /// It has exited and waits to be reaped.
    Ended(Tid),
}

/// A traced thread that has stopped or exited: any, or this one; `None` if there is none now. One that has exited is
/// reported again until it is reaped.
pub fn next_wait_event(tid: Option<Tid>) -> Option<WaitEvent> {
    // Even without WSTOPPED the kernel would report stops of traced threads (kernel/exit.c, wait_task_stopped).
    let (tid, status, code) = waitid(tid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT)?;
    if matches!(code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED) {
        return Some(WaitEvent::Ended(tid));
    }
    let reason = StopReason::of(status);
    if reason == StopReason::Exec {
        // Its ID may have changed, and the kernel accepts no request before this stop was waited for (kernel/ptrace.c,
        // looks_like_a_spurious_pid). No signal is lost with it.
        waitid(Some(tid), libc::WSTOPPED);
    }
    let at_syscalls = false;
    Some(WaitEvent::Stopped(Stopped {
        tid,
        reason,
        at_syscalls,
    }))
}

/// Reaps a thread that has exited: the kernel releases it and notifies its parent.
pub fn reap(tid: Tid) {
    waitid(Some(tid), libc::WEXITED);
}

/// Thread, status and kind of event, of threads that the calling thread traces or has started. Child processes of other threads
/// of this process are left to these.
fn waitid(tid: Option<Tid>, options: i32) -> Option<(Tid, i32, i32)> {
    let (kind, id) = tid.map_or((libc::P_ALL, 0), |tid| (libc::P_PID, tid));
    // SAFETY: a zeroed siginfo is valid, and large enough for the result; its pid and status are set for every kind of
    // child event, and stay zero if there was none.
    let (r, pid, status, code) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let r = libc::waitid(
            kind,
            id,
            &mut info,
            options | libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD,
        );
        (r, info.si_pid(), info.si_status(), info.si_code)
    };
    (r == 0 && pid > 0).then_some((pid as Tid, status, code))
}

fn child_signal() -> libc::sigset_t {
    // SAFETY: the set is initialized by sigemptyset before use.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        set
    }
}

/// Blocks SIGCHLD in the calling thread and those it creates from now on: a thread that did not block it would take it
/// from [`child_signals`].
pub fn block_child_signals() {
    // SAFETY: the set is complete and lives as long as the call.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &child_signal(), std::ptr::null_mut()) };
}

/// A descriptor that becomes readable when a traced thread (or a child) stops or exits.
///
/// # Errors
/// No descriptor is left.
pub fn child_signals() -> io::Result<OwnedFd> {
    block_child_signals();
    // SAFETY: the set is complete and lives as long as the call.
    from_raw_checked(unsafe { libc::signalfd(-1, &child_signal(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })
}

/// A descriptor that [`wake`] makes readable.
///
/// # Errors
/// No descriptor is left.
pub fn waker() -> io::Result<OwnedFd> {
    // SAFETY: two integers.
    from_raw_checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Makes a waker readable.
pub fn wake(waker: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes that live here. It can fail only if the counter is full, and then it is readable too.
    unsafe { libc::write(waker.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// A timer descriptor, readable once it has expired; see [`set_alarm`].
///
/// # Errors
/// No descriptor is left.
pub fn alarm() -> io::Result<OwnedFd> {
    // SAFETY: two integers; the descriptor is checked and has no other owner.
    unsafe {
        from_raw_checked(libc::timerfd_create(
            libc::CLOCK_MONOTONIC,
            libc::TFD_CLOEXEC | libc::TFD_NONBLOCK,
        ))
    }
}

/// Sets an alarm to go off once.
pub fn set_alarm(alarm: BorrowedFd<'_>, after: Duration) {
    let after = after.max(Duration::from_nanos(1)); // zero would disarm it
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

/// Reads a descriptor of the kinds above empty, so that it is no longer readable.
pub fn drain(fd: BorrowedFd<'_>) {
    let mut buf = [0u8; 1024];
    // SAFETY: a buffer for what is read; the descriptor does not block. A read that does not fill it was the last.
    while unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) } == buf.len() as isize {}
}

/// Takes ownership of a descriptor that the kernel has just returned.
fn from_raw_checked(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: private, and called with new descriptors only, which have no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits for many descriptors. Closed ones are removed.
pub struct Epoll(OwnedFd);

/// A descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    pub token: u64,
    /// The other end was closed: nothing more will come.
    pub hung_up: bool,
}

impl Epoll {
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: one integer.
        from_raw_checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Epoll)
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

    /// Waits until a descriptor is ready or the time is over, and replaces `ready` by those that are.
    pub fn wait(&self, wait: Duration, ready: &mut Vec<Ready>) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let ms = wait.as_millis().min(i32::MAX as u128) as i32;
        // SAFETY: pointer and count describe the array above.
        let n = unsafe { libc::epoll_wait(self.0.as_fd().as_raw_fd(), events.as_mut_ptr(), events.len() as i32, ms) };
        ready.clear();
        // An interruption by a signal counts as time-out.
        ready.extend(events.iter().take(n.max(0) as usize).map(|e| Ready {
            token: e.u64,
            hung_up: e.events & libc::EPOLLHUP as u32 != 0,
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_reasons() {
        let check = |status: i32, expected: StopReason| assert_eq!(StopReason::of(status), expected, "{status:#x}");
        check(libc::SIGTRAP | EVENT_STOP << 8, StopReason::Trap);
        check(libc::SIGSTOP | EVENT_STOP << 8, StopReason::GroupStop);
        check(libc::SIGTTIN | EVENT_STOP << 8, StopReason::GroupStop);
        check(libc::SIGTRAP, StopReason::Signal(libc::SIGTRAP));
        check(libc::SIGUSR1, StopReason::Signal(libc::SIGUSR1));
        check(libc::SIGTRAP | 0x80, StopReason::Call);
        check(64, StopReason::Signal(64));
        check(libc::SIGTRAP | libc::PTRACE_EVENT_EXEC << 8, StopReason::Exec);
        check(libc::SIGTRAP | libc::PTRACE_EVENT_CLONE << 8, StopReason::Cloned);
        check(libc::SIGTRAP | libc::PTRACE_EVENT_FORK << 8, StopReason::Cloned);
        check(libc::SIGTRAP | libc::PTRACE_EVENT_VFORK << 8, StopReason::Cloned);
    }
}

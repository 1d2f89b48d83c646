//! This process and its threads: IDs, users, priorities.

#![allow(unsafe_code)]

use std::os::fd::{FromRawFd, OwnedFd};

use super::{check, files, procfs};

/// Thread pointer of the calling thread (the `fs` base).
#[cfg(target_arch = "x86_64")]
pub fn current_thread_pointer() -> u64 {
    let mut base = 0u64;
    const ARCH_GET_FS: i32 = 0x1003; // arch/x86/include/uapi/asm/prctl.h
    // SAFETY: ARCH_GET_FS stores one word at the address given.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_GET_FS, &mut base as *mut u64) };
    base
}

/// Thread pointer of the calling thread (`tpidr_el0`).
#[cfg(target_arch = "aarch64")]
pub fn current_thread_pointer() -> u64 {
    let pointer;
    // SAFETY: reads one register, which user code may read.
    unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}

/// Id of the calling thread. Not `gettid`, which C libraries have only since glibc 2.30.
pub fn current_tid() -> i32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// Raises the priority of the calling thread, as far as permitted.
pub fn raise_priority() {
    // SAFETY: integers only; 0 is the calling thread. Without permission nothing changes.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
    // Short time slices, and therefore early ones: needs no privilege (Linux 6.12, kernel/sched/syscalls.c; older
    // kernels ignore it). The priority is written too, so it is read first.
    // SAFETY: size and structure agree; it is read and written in place.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>();
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) == 0 {
            attr.sched_runtime = 100_000; // ns, the minimum
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0);
        }
    }
}

/// Lets the calling thread run before all but the kernel and other real-time threads, if permitted (CAP_SYS_NICE); true
/// if so. For short-lived threads.
pub fn set_realtime_priority() -> bool {
    // SAFETY: the structure has integers only, for some C libraries more than one, and lives as long as the call; 0 is
    // the calling thread.
    unsafe {
        let mut lowest: libc::sched_param = std::mem::zeroed();
        lowest.sched_priority = 1;
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &lowest) == 0
    }
}

/// Enters the kernel and returns at once.
pub fn enter_kernel() {
    // SAFETY: no arguments, cannot fail. (`libc::getppid` may not be cached, unlike getpid.)
    unsafe { libc::getppid() };
}

pub fn effective_uid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() }
}

pub fn real_uid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::getuid() }
}

/// Whether this program has the privileges of another user or group than the one who runs it: its file is setuid or
/// setgid. (File capabilities, see setcap(8), leave both as they are.)
pub fn is_setuid() -> bool {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::getuid() != libc::geteuid() || libc::getgid() != libc::getegid() }
}

/// Ends all processes of a group at once (SIGKILL). The group is that of a child of this process that has not been waited for:
/// else its number may be that of another one.
pub fn kill_group(leader: u32) {
    if let Ok(leader @ 2..) = i32::try_from(leader) {
        // SAFETY: two integers. That there is no such process is of no interest.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
}

/// Detects when a process has exited.
pub struct ExitWatch {
    pid: u32,
    /// A descriptor that becomes readable then; `None` where the kernel has none (before Linux 5.3) or forbids it.
    descriptor: Option<OwnedFd>,
}

impl ExitWatch {
    pub fn new(pid: u32) -> ExitWatch {
        // SAFETY: two integers; the result is checked.
        let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as i32, 0) });
        // SAFETY: the kernel has just returned this descriptor; it has no other owner.
        let descriptor = fd.ok().map(|fd| unsafe { OwnedFd::from_raw_fd(fd as i32) });
        ExitWatch { pid, descriptor }
    }

    pub fn has_exited(&self) -> bool {
        match &self.descriptor {
            Some(descriptor) => files::is_readable(descriptor),
            None => matches!(procfs::stat_state(self.pid), None | Some('Z' | 'X')),
        }
    }
}

/// Number of CPUs that may exist; their numbers are below this.
pub fn cpu_count() -> usize {
    // SAFETY: no pointers.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF).max(1) as usize }
}

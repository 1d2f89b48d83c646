//! Takes from this process what it does not need to compute an answer from open files: see seccomp(2), setrlimit(2).

#![allow(unsafe_code)]

use std::io;

use super::check;
use crate::arch::{AUDIT_ARCH, FOREIGN_CALLS};

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const ARGUMENTS: u32 = 16;

/// System calls that are allowed with any arguments: reading files and the socket, memory without code, threads of our
/// own, clocks, and the end.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_lseek,
    libc::SYS_fstat,
    // The C library's fstat. It gives size and owner of other files, but opens none.
    libc::SYS_newfstatat,
    libc::SYS_close,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_gettid,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// System calls that are allowed if an argument has this value: number, index of the argument, mask, value.
const ALLOWED_IF: &[(i64, u32, u32, u32)] = &[
    (libc::SYS_mmap, 2, libc::PROT_EXEC as u32, 0),
    (libc::SYS_mprotect, 2, libc::PROT_EXEC as u32, 0),
    (libc::SYS_clone, 0, libc::CLONE_THREAD as u32, libc::CLONE_THREAD as u32),
    (libc::SYS_fcntl, 1, u32::MAX, libc::F_DUPFD_CLOEXEC as u32),
];

/// Limits the address space of this process, and its CPU time. It cannot write files or core dumps, is killed when the
/// thread that started it ends, and no other process of its user can trace it.
///
/// # Errors
/// If a limit cannot be set.
pub fn limit_resources(address_space: u64, cpu_seconds: u64) -> io::Result<()> {
    for (resource, limit) in [
        (libc::RLIMIT_AS, address_space),
        (libc::RLIMIT_CPU, cpu_seconds),
        (libc::RLIMIT_FSIZE, 0),
        (libc::RLIMIT_CORE, 0),
    ] {
        let mut limits = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: a place for the result, and the same as an argument. A hard limit that is lower stays.
        unsafe {
            check(libc::getrlimit(resource, &mut limits).into())?;
            limits.rlim_max = limits.rlim_max.min(limit);
            limits.rlim_cur = limits.rlim_max;
            check(libc::setrlimit(resource, &limits).into())?;
        }
    }
    // SAFETY: integers only.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0).into())?;
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0).into())?;
    }
    Ok(())
}

/// Refuses all system calls but those above, for this thread and those it starts. `no_new_privs` must be set.
///
/// # Errors
/// If the kernel has no such filters.
pub fn filter_system_calls() -> io::Result<()> {
    let mut filter = filter();
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: pointer and length describe the vector, which the kernel copies.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, 0, 0) };
    check(done.into())?;
    Ok(())
}

/// The filter, in classic BPF. What is not allowed fails with EPERM: libraries cope with that.
fn filter() -> Vec<libc::sock_filter> {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let load = |offset: u32| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let result = |action: u32| statement(libc::BPF_RET | libc::BPF_K, action);
    // Skips this many statements unless the value loaded is `k`.
    let unless = |test: u32, k: u32, skipped: u8| libc::sock_filter {
        code: (libc::BPF_JMP | test | libc::BPF_K) as u16,
        jt: 0,
        jf: skipped,
        k,
    };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut out = vec![load(ARCH)];
    out.push(libc::sock_filter {
        jt: 1,
        jf: 0,
        ..unless(libc::BPF_JEQ, AUDIT_ARCH, 0)
    });
    out.push(result(libc::SECCOMP_RET_KILL_PROCESS));
    out.push(load(NUMBER));
    if let Some(foreign) = FOREIGN_CALLS {
        out.push(unless(libc::BPF_JGE, foreign, 1));
        out.push(result(libc::SECCOMP_RET_KILL_PROCESS));
    }
    for number in ALLOWED {
        out.push(unless(libc::BPF_JEQ, *number as u32, 1));
        out.push(result(libc::SECCOMP_RET_ALLOW));
    }
    for (number, argument, mask, value) in ALLOWED_IF {
        out.push(unless(libc::BPF_JEQ, *number as u32, 5));
        // The lower half of the argument, on a little-endian CPU.
        out.push(load(ARGUMENTS + 8 * argument));
        out.push(statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, *mask));
        out.push(unless(libc::BPF_JEQ, *value, 1));
        out.push(result(libc::SECCOMP_RET_ALLOW));
        out.push(result(refused));
    }
    // What aborts sends itself a signal. If that failed, the C library would try again without end.
    out.push(unless(libc::BPF_JEQ, libc::SYS_tgkill as u32, 1));
    out.push(result(libc::SECCOMP_RET_KILL_PROCESS));
    // The C library starts threads by the older clone then, whose flags can be checked.
    out.push(unless(libc::BPF_JEQ, libc::SYS_clone3 as u32, 1));
    out.push(result(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32));
    out.push(result(refused));
    out
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    /// In a separate thread: the filter is for that one, and permanent.
    #[test]
    fn what_is_not_allowed_fails() {
        let mut open = File::open("/proc/self/stat").unwrap();
        let test = move || {
            // SAFETY: five integers.
            check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into()).unwrap();
            filter_system_calls().unwrap();
            let refused = |r: i64| {
                let error = check(r).expect_err("refused");
                assert_eq!(error.raw_os_error(), Some(libc::EPERM));
            };
            // SAFETY: integers, null pointers and constant texts; nothing is mapped.
            unsafe {
                refused(libc::syscall(
                    libc::SYS_openat,
                    libc::AT_FDCWD,
                    c"/dev/null".as_ptr(),
                    0,
                ));
                refused(libc::syscall(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0));
                refused(libc::syscall(libc::SYS_kill, 0, 0));
                refused(libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0));
                refused(libc::syscall(libc::SYS_execve, c"/bin/true".as_ptr(), 0, 0));
                refused(libc::syscall(libc::SYS_fcntl, 0, libc::F_SETFL, 0));
                for call in [libc::SYS_mmap, libc::SYS_mprotect] {
                    let protection = libc::PROT_READ | libc::PROT_EXEC;
                    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    refused(libc::syscall(call, 0, 4096, protection, flags, -1, 0));
                }
            }
            let mut bytes = [0; 8];
            assert!(open.read(&mut bytes).unwrap() == 8 && open.try_clone().is_ok());
            // Memory, and threads of our own.
            let sum = std::thread::spawn(|| vec![1u8; 64 << 20].iter().map(|b| u64::from(*b)).sum::<u64>());
            assert_eq!(sum.join().unwrap(), 64 << 20);
        };
        std::thread::spawn(test).join().unwrap();
    }
}

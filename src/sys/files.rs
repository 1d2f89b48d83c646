//! Descriptors: waiting for them, limits, pipes, opening below a directory.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use super::check;

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

/// Raises the limit of open files to the hard limit: a target with many threads needs one descriptor each.
pub fn raise_file_limit() {
    let mut r = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `r` is a valid pointer for the result and a valid argument after it.
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
    // SAFETY: `r` is a valid pointer for the result.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut r) } == 0;
    // The minimum of POSIX, _POSIX_OPEN_MAX of limits.h, is less.
    if known {
        r.rlim_cur.try_into().unwrap_or(usize::MAX)
    } else {
        64
    }
}

/// Opens a file for reading as if `directory` were the root: neither links nor `..` lead out of it (openat2(2), Linux
/// 5.6).
pub fn open_in_root(directory: BorrowedFd<'_>, path: &Path, flags: i32) -> io::Result<File> {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: plain integers, for which zero is valid; the structure has fields that cannot be named.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = flags as u64;
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: the path ends in a NUL; pointer and size describe `how`.
    let fd = check(unsafe {
        libc::syscall(
            libc::SYS_openat2,
            directory.as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    })?;
    // SAFETY: the kernel has just returned this descriptor; it has no other owner.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}

/// Has the other end of this terminal or pipe been closed?
pub fn is_hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut entry = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one structure, which lives here.
    let ready = unsafe { libc::poll(&mut entry, 1, 0) };
    ready == 1 && entry.revents & (libc::POLLHUP | libc::POLLERR) != 0
}

/// Is it readable now?
pub fn is_readable(fd: &OwnedFd) -> bool {
    poll(&[fd.as_fd()], Duration::ZERO).unwrap_or(false)
}

/// An empty file in memory, close-on-exec.
pub fn memory_file() -> io::Result<File> {
    // SAFETY: a name that ends in a NUL, and flags; the result is checked.
    let fd = check(unsafe { libc::memfd_create(c"nativeprof".as_ptr(), libc::MFD_CLOEXEC) }.into())?;
    // SAFETY: the kernel has just returned this descriptor; it has no other owner.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}

/// Two ends of a pipe, close-on-exec: (read, write).
pub fn pipe() -> io::Result<(File, File)> {
    let mut fds = [0; 2];
    // SAFETY: room for the two descriptors the kernel writes.
    check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
    // SAFETY: both are ours alone.
    Ok(unsafe { (File::from_raw_fd(fds[0]), File::from_raw_fd(fds[1])) })
}

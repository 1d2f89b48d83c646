//! Descriptors: waiting for them, limits, pipes, opening files that others may have replaced.

#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{c_path, check};

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

/// How many more descriptors this process may open.
pub fn free_descriptors() -> usize {
    let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    file_limit().saturating_sub(open)
}

/// Whether half of the descriptors that this process may have open are in use, by the number of the one opened last.
pub fn are_scarce(last: BorrowedFd<'_>) -> bool {
    last.as_raw_fd().try_into().unwrap_or(usize::MAX) >= file_limit() / 2
}

/// A descriptor of this process alone: a child closes it when it is forked, as it does at exec those that are close-on-exec.
#[derive(Debug)]
pub struct ClosedAtFork(OwnedFd);

/// Descriptors from this number on cannot be [`ClosedAtFork`].
const MAX_CLOSED_AT_FORK: usize = 1 << 16;
/// A bit by descriptor: is it closed at a fork?
static CLOSED_AT_FORK: [AtomicU64; MAX_CLOSED_AT_FORK / 64] = [const { AtomicU64::new(0) }; MAX_CLOSED_AT_FORK / 64];

impl ClosedAtFork {
    /// `None`: its number is too high; it is closed.
    pub fn new(fd: OwnedFd) -> Option<ClosedAtFork> {
        static REGISTERED: OnceLock<()> = OnceLock::new();
        extern "C" fn after_fork() {
            for (i, word) in CLOSED_AT_FORK.iter().enumerate() {
                let mut bits = word.swap(0, Ordering::Relaxed);
                while bits != 0 {
                    // SAFETY: an integer only; whatever owned the descriptor runs in the parent alone.
                    unsafe { libc::close((64 * i) as i32 + bits.trailing_zeros() as i32) };
                    bits &= bits - 1;
                }
            }
        }
        REGISTERED.get_or_init(|| {
            // SAFETY: the function changes atomic numbers and closes descriptors, which a forked child may do.
            unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
        });
        let (word, bit) = place(fd.as_raw_fd())?;
        word.fetch_or(bit, Ordering::Relaxed);
        Some(ClosedAtFork(fd))
    }

    /// Whether a descriptor is one of these. For signal handlers too.
    pub fn is(fd: i32) -> bool {
        place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Forgets the descriptor: the program has closed it, and its number may be that of another file.
    pub fn forget(self) {
        self.unregister();
        std::mem::forget(self);
    }

    fn unregister(&self) {
        if let Some((word, bit)) = place(self.0.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// Where the bit of a descriptor is.
fn place(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((CLOSED_AT_FORK.get(fd / 64)?, 1 << (fd % 64)))
}

impl Drop for ClosedAtFork {
    fn drop(&mut self) {
        self.unregister();
    }
}

impl AsFd for ClosedAtFork {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Opens a file for reading as if `directory` were the root: neither links nor `..` lead out of it (openat2(2), Linux
/// 5.6).
pub fn open_in_root(directory: BorrowedFd<'_>, path: &Path, flags: i32) -> io::Result<File> {
    let path = c_path(path)?;
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

/// Opens a file for reading where another user may have put a link, a pipe or a device: opening waits for nothing.
///
/// # Errors
/// Those of open(2): ELOOP for a link. `InvalidData` if it is no file.
pub fn open_plain(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let options = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file"));
    }
    Ok(file)
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

/// An open file that is locked for this process alone, until this is dropped.
#[derive(Debug)]
pub struct FileLock(File);

impl FileLock {
    /// Locks a file. `None`: another open file has the lock.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn take(file: File) -> io::Result<Option<FileLock>> {
        // SAFETY: integers only.
        match check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }.into()) {
            Ok(_) => Ok(Some(FileLock(file))),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub fn file(&self) -> &File {
        &self.0
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Not when the last copy of the descriptor is closed: a child has one until it executes its program.
        // SAFETY: integers only.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}

/// Whether this process may add and remove files in a directory, by its effective user and capabilities.
///
/// # Errors
/// Why not.
pub fn may_write(directory: &Path) -> io::Result<()> {
    let path = c_path(directory)?;
    let wanted = libc::W_OK | libc::X_OK;
    // SAFETY: a string that ends in a NUL, and integers.
    check(unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), wanted, libc::AT_EACCESS) }.into()).map(drop)
}

/// Bytes that users other than root can still write to the file system of this path.
///
/// # Errors
/// Those of statvfs(3).
pub fn free_space(path: &Path) -> io::Result<u64> {
    let path = c_path(path)?;
    let mut found = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: a string that ends in a NUL, and a place for the result.
    check(unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) }.into())?;
    // SAFETY: the call has filled it.
    let found = unsafe { found.assume_init() };
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Whether a file is seen through an overlay file system, as those of most containers are.
pub fn is_in_overlay(file: &File) -> bool {
    let mut found = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a descriptor, and a place for the result.
    if check(unsafe { libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()) }.into()).is_err() {
        return false;
    }
    // SAFETY: the call has filled it.
    let kind = unsafe { found.assume_init() }.f_type;
    // (C libraries give the two different signs.)
    i128::from(kind) == i128::from(libc::OVERLAYFS_SUPER_MAGIC)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_are_opened() {
        let directory = std::env::temp_dir().join(format!("nativeprof-plain-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let [file, link, pipe] = ["file", "link", "pipe"].map(|name| directory.join(name));
        fs::write(&file, "").expect("a file");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo, of coreutils").success());
        assert!(open_plain(&file).is_ok());
        for path in [&directory, &pipe] {
            let refused = open_plain(path).expect_err("no file");
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        }
        let refused = open_plain(&link).expect_err("a link");
        assert_eq!(refused.raw_os_error(), Some(libc::ELOOP));
        fs::remove_dir_all(&directory).expect("it is ours");
    }

    #[test]
    fn a_forked_child_closes_what_is_not_for_it() {
        let open = || OwnedFd::from(File::open("/dev/null").expect("a file"));
        let (kept, closed) = (open(), ClosedAtFork::new(open()).expect("a low number"));
        let (fd, other) = (closed.as_fd().as_raw_fd(), kept.as_raw_fd());
        assert!(ClosedAtFork::is(fd) && !ClosedAtFork::is(other));
        let is_open = |fd| {
            // SAFETY: integers only.
            unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
        };
        // SAFETY: the child makes system calls only, and ends.
        let code = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(is_open(fd)) | i32::from(!is_open(other)) << 1);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            libc::WEXITSTATUS(status)
        };
        assert_eq!(code, 0);
        assert!(is_open(fd));
        drop(closed);
        assert!(!ClosedAtFork::is(fd));
        for wrong in [-1, i32::MAX, MAX_CLOSED_AT_FORK as i32] {
            assert!(!ClosedAtFork::is(wrong));
        }
    }
}

//! The root directory of a process as that process sees it, kept open: files in it can be opened after the process has
//! exited, and after the privileges needed to get there are dropped.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::event::Pid;
use crate::sys;
use crate::sys::procfs;

/// The root directory of a process.
#[derive(Debug)]
pub struct Root {
    directory: Arc<OwnedFd>,
    identity: FileIdentity,
    /// The process's number in its own PID namespace.
    pub inner_pid: Pid,
    /// It is our own: that of the process was not available.
    pub is_ours: bool,
    key: RootKey,
}

/// Identity of a root directory: mount namespace, device and inode.
type RootKey = (PathBuf, u64, u64);

/// Root directories that are open.
pub type OpenRoots = FxHashMap<RootKey, Arc<OwnedFd>>;

/// Flags for opening files: a pipe must not block us, and a terminal must not become our controlling terminal.
const OPEN: i32 = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;

/// The user and groups that the process has when it opens files.
#[derive(Debug)]
struct FileIdentity {
    uid: u32,
    gids: Vec<u32>,
}

impl Root {
    /// The root of a process, or our own if the process has exited or may not be read.
    pub fn of(pid: Pid) -> Option<Root> {
        let open = |path: String| {
            let directory = File::options()
                .read(true)
                .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
                .open(path);
            directory.ok()
        };
        let theirs = open(format!("/proc/{pid}/root"));
        let who = if theirs.is_some() {
            pid.to_string()
        } else {
            "self".into()
        };
        let status = procfs::read_bytes(format!("/proc/{who}/status")).unwrap_or_default();
        let status = String::from_utf8_lossy(&status);
        let is_ours = theirs.is_none();
        let directory = theirs.or_else(|| open("/".into()))?;
        let meta = directory.metadata().ok()?;
        let mounts = fs::read_link(format!("/proc/{who}/ns/mnt")).unwrap_or_default();
        Some(Root {
            directory: Arc::new(directory.into()),
            inner_pid: procfs::innermost_id(&status).filter(|_| !is_ours).unwrap_or(pid),
            is_ours,
            key: (mounts, meta.dev(), meta.ino()),
            identity: FileIdentity {
                uid: procfs::user_ids(&status, "Uid")[1],
                gids: procfs::groups(&status),
            },
        })
    }

    /// Whether another process has the same root directory.
    pub fn is_same(&self, other: &Root) -> bool {
        self.key == other.key
    }

    /// Whether another process has the same root directory, in whichever mount namespace.
    pub fn is_same_directory(&self, other: &Root) -> bool {
        (self.key.1, self.key.2) == (other.key.1, other.key.2)
    }

    /// A directory as the root of a process of user 0.
    #[cfg(test)]
    pub fn example(directory: File) -> Root {
        let meta = directory.metadata().expect("it is open");
        Root {
            key: (PathBuf::new(), meta.dev(), meta.ino()),
            directory: Arc::new(directory.into()),
            inner_pid: 1,
            is_ours: false,
            identity: FileIdentity {
                uid: 0,
                gids: Vec::new(),
            },
        }
    }

    /// Shares the descriptor of an equal root of another process: most processes have the same one.
    pub fn share(&mut self, known: &mut OpenRoots) {
        if !self.key.0.as_os_str().is_empty() {
            let directory = known.entry(self.key.clone()).or_insert_with(|| self.directory.clone());
            self.directory = directory.clone();
        }
    }

    /// Like `open`, for a world-writable directory: does not follow a link, and opens only a file that the process's
    /// user or root owns.
    ///
    /// # Errors
    /// `None`: the file does not exist; else why it is not used, in words.
    pub fn open_trusted(&self, path: &str) -> Result<File, Option<String>> {
        let refused = |why: String| Some(format!("{path} is not used: {why}"));
        let file = match sys::files::open_in_root(self.directory.as_fd(), Path::new(path), OPEN | libc::O_NOFOLLOW) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(None),
            Err(e) if e.raw_os_error() == Some(libc::ELOOP) => {
                return Err(refused("it is a symbolic link".into()));
            }
            Err(e) => return Err(refused(e.to_string())),
        };
        let meta = file.metadata().map_err(|e| refused(e.to_string()))?;
        let (owner, user) = (meta.uid(), self.identity.uid);
        if !meta.is_file() {
            return Err(refused("it is not a regular file".into()));
        }
        if owner != user && owner != 0 {
            let why =
                format!("it belongs to user {owner}; it must belong to root or to user {user}, who runs the process");
            return Err(refused(why));
        }
        if !self.identity.may_read(meta.mode(), owner, meta.gid()) {
            return Err(refused(format!("user {user}, who runs the process, cannot read it")));
        }
        Ok(file)
    }

    /// Like `open`, for the path of a mapping, in which the kernel has already resolved all links.
    pub fn open_mapped(&self, path: impl AsRef<Path>) -> Option<File> {
        self.open_with(path.as_ref(), libc::O_NOFOLLOW)
    }

    /// The regular file at an absolute path of the process, following links within its root, if that process may read
    /// it: a target must not be able to read files through us. (Access control lists beyond owner, group and others are
    /// not evaluated.)
    pub fn open(&self, path: impl AsRef<Path>) -> Option<File> {
        self.open_with(path.as_ref(), 0)
    }

    fn open_with(&self, path: &Path, more: i32) -> Option<File> {
        let file = sys::files::open_in_root(self.directory.as_fd(), path, OPEN | more).ok()?;
        let meta = file.metadata().ok()?;
        (meta.is_file() && self.identity.may_read(meta.mode(), meta.uid(), meta.gid())).then_some(file)
    }
}

impl FileIdentity {
    fn may_read(&self, mode: u32, owner: u32, group: u32) -> bool {
        let bit = if self.uid == 0 {
            return true;
        } else if self.uid == owner {
            0o400
        } else if self.gids.contains(&group) {
            0o040
        } else {
            0o004
        };
        mode & bit != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_files_that_the_user_may_read() {
        let alice = FileIdentity {
            uid: 1000,
            gids: vec![1000, 50],
        };
        let check = |mode, owner, group, expected| {
            assert_eq!(alice.may_read(mode, owner, group), expected, "{mode:o} {owner} {group}");
        };
        check(0o600, 1000, 1000, true);
        check(0o600, 0, 0, false);
        check(0o640, 0, 50, true);
        check(0o604, 0, 50, false);
        check(0o644, 0, 0, true);
        check(0o044, 1000, 50, false);
        let root = FileIdentity { uid: 0, gids: vec![0] };
        assert!(root.may_read(0o000, 1000, 1000));
    }

    #[test]
    fn only_regular_files_below_the_root() {
        let root = Root::of(std::process::id()).unwrap();
        assert!(root.open("/proc/self/status").is_some());
        for path in ["/dev/null", "/tmp", "/no such file", "", "/proc/self/exe"] {
            assert!(root.open(path).is_none(), "{path}");
        }
        // Links stay within the directory.
        let directory = std::env::temp_dir().join(format!("nativeprof-root-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        symlink("/inside", directory.join("link")).unwrap();
        symlink("../../../../etc/passwd", directory.join("out")).unwrap();
        fs::write(directory.join("inside"), "").unwrap();
        let mut small = Root {
            directory: Arc::new(File::open(&directory).unwrap().into()),
            ..root
        };
        assert!(small.open("/link").is_some());
        assert!(small.open("/out").is_none() && small.open("/etc/passwd").is_none());
        // Only a file that is not a link and does not belong to another user is accepted as the process's own.
        assert!(small.open_trusted("/inside").is_ok());
        assert!(small.open_mapped("/inside").is_some() && small.open_mapped("/link").is_none());
        // Names are bytes.
        let name = Path::new(std::ffi::OsStr::from_bytes(b"/lib\xff.so"));
        fs::write(directory.join("lib\u{fffd}.so"), "").unwrap();
        assert!(small.open_mapped(name).is_none());
        fs::write(directory.join(name.strip_prefix("/").unwrap()), "").unwrap();
        assert!(small.open_mapped(name).is_some());
        assert_eq!(small.open_trusted("/none").err(), Some(None));
        let why = |small: &Root, path| small.open_trusted(path).err().flatten().unwrap_or_default();
        assert_eq!(why(&small, "/link"), "/link is not used: it is a symbolic link");
        assert_eq!(why(&small, "/"), "/ is not used: it is not a regular file");
        if sys::process::effective_uid() == 0 {
            std::os::unix::fs::chown(directory.join("inside"), Some(12345), None).unwrap();
            small.identity.uid = 12346;
            assert_eq!(
                why(&small, "/inside"),
                "/inside is not used: it belongs to user 12345; it must belong to root or to user 12346, who runs the process"
            );
            small.identity.uid = 12345;
            assert!(small.open_trusted("/inside").is_ok());
        } else {
            eprintln!("SKIPPED: only root can make files of other users");
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}

//! The file system of a process, as that process sees it, held open: files in it can be opened when the process has
//! ended, and when we have given up the rights that it took to get there.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::rights::facts;
use super::sys;
use crate::sample::Pid;

/// The root folder of a process.
#[derive(Debug)]
pub struct Root {
    folder: Arc<OwnedFd>,
    reader: Reader,
    /// The number of the process in its own pid namespace.
    pub inner_pid: Pid,
    /// It is ours: that of the process was not to be had.
    pub is_ours: bool,
    key: RootKey,
}

/// Tells root folders apart: mount namespace, device and inode.
type RootKey = (PathBuf, u64, u64);

/// Root folders that are open.
pub type Known = FxHashMap<RootKey, Arc<OwnedFd>>;

/// How files are opened: a pipe or a terminal must not make us wait or become ours.
const OPEN: i32 = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;

/// Who the process is when it opens files.
#[derive(Debug)]
struct Reader {
    uid: u32,
    gids: Vec<u32>,
}

impl Root {
    /// That of a process, or ours if it has ended or may not be looked at.
    pub fn of(pid: Pid) -> Option<Root> {
        let open = |path: String| {
            let folder = File::options()
                .read(true)
                .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
                .open(path);
            folder.ok()
        };
        let theirs = open(format!("/proc/{pid}/root"));
        let who = if theirs.is_some() {
            pid.to_string()
        } else {
            "self".into()
        };
        let status = fs::read(format!("/proc/{who}/status")).unwrap_or_default();
        let status = String::from_utf8_lossy(&status);
        // proc_pid_status(5): the number in the innermost namespace stands last.
        let inner = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let inner = inner.and_then(|ids| ids.split_ascii_whitespace().last()?.parse().ok());
        let is_ours = theirs.is_none();
        let folder = theirs.or_else(|| open("/".into()))?;
        let meta = folder.metadata().ok()?;
        let mounts = fs::read_link(format!("/proc/{who}/ns/mnt")).unwrap_or_default();
        Some(Root {
            folder: Arc::new(folder.into()),
            inner_pid: inner.filter(|_| !is_ours).unwrap_or(pid),
            is_ours,
            key: (mounts, meta.dev(), meta.ino()),
            reader: Reader {
                uid: facts::ids(&status, "Uid")[1],
                gids: facts::groups(&status),
            },
        })
    }

    /// Uses the descriptor of another process with the same root: many have it.
    pub fn share(&mut self, known: &mut Known) {
        if !self.key.0.as_os_str().is_empty() {
            let folder = known.entry(self.key.clone()).or_insert_with(|| self.folder.clone());
            self.folder = folder.clone();
        }
    }

    /// Like `open`, for a directory where everybody may write: not through a link, and only a file that the process's
    /// user or root owns.
    ///
    /// # Errors
    /// `None`: there is no such file; else why it is not used, in words.
    pub fn open_own(&self, path: &str) -> Result<File, Option<String>> {
        let refused = |why: String| Some(format!("{path} is not used: {why}"));
        let file = match sys::open_within(self.folder.as_fd(), path, OPEN | libc::O_NOFOLLOW) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(None),
            Err(e) if e.raw_os_error() == Some(libc::ELOOP) => return Err(refused("it is a symbolic link".into())),
            Err(e) => return Err(refused(e.to_string())),
        };
        let meta = file.metadata().map_err(|e| refused(e.to_string()))?;
        let (owner, user) = (meta.uid(), self.reader.uid);
        if !meta.is_file() {
            return Err(refused("it is not a regular file".into()));
        }
        if owner != user && owner != 0 {
            let why = format!("it belongs to user {owner}, neither to root nor to user {user}, who runs the process");
            return Err(refused(why));
        }
        if !self.reader.may_read(meta.mode(), owner, meta.gid()) {
            return Err(refused(format!("user {user}, who runs the process, may not read it")));
        }
        Ok(file)
    }

    /// Like `open`, for the path of a mapping, in which the kernel has followed all links already.
    pub fn open_mapped(&self, path: &str) -> Option<File> {
        self.open_with(path, libc::O_NOFOLLOW)
    }

    /// The regular file at an absolute path of the process, links followed within its root, if that process may read
    /// it: a target must not get at the content of files through us. (Access lists beyond owner, group and others are
    /// not looked at.)
    pub fn open(&self, path: &str) -> Option<File> {
        self.open_with(path, 0)
    }

    fn open_with(&self, path: &str, more: i32) -> Option<File> {
        let file = sys::open_within(self.folder.as_fd(), path, OPEN | more).ok()?;
        let meta = file.metadata().ok()?;
        (meta.is_file() && self.reader.may_read(meta.mode(), meta.uid(), meta.gid())).then_some(file)
    }
}

impl Reader {
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
    use std::os::unix::fs::symlink;

    #[test]
    fn what_its_user_may_read() {
        let alice = Reader {
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
        let root = Reader { uid: 0, gids: vec![0] };
        assert!(root.may_read(0o000, 1000, 1000));
    }

    #[test]
    fn only_regular_files_below_it() {
        let root = Root::of(std::process::id()).unwrap();
        assert!(root.open("/proc/self/status").is_some());
        for path in ["/dev/null", "/tmp", "/no such file", "", "/proc/self/exe"] {
            assert!(root.open(path).is_none(), "{path}");
        }
        // Links stay within the folder.
        let folder = std::env::temp_dir().join(format!("nativeprof-root-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        symlink("/inside", folder.join("link")).unwrap();
        symlink("../../../../etc/passwd", folder.join("out")).unwrap();
        fs::write(folder.join("inside"), "").unwrap();
        let mut small = Root {
            folder: Arc::new(File::open(&folder).unwrap().into()),
            ..root
        };
        assert!(small.open("/link").is_some());
        assert!(small.open("/out").is_none() && small.open("/etc/passwd").is_none());
        // Only what is no link and belongs to no stranger is believed to be the process's own.
        assert!(small.open_own("/inside").is_ok());
        assert!(small.open_mapped("/inside").is_some() && small.open_mapped("/link").is_none());
        assert_eq!(small.open_own("/none").err(), Some(None));
        let why = |small: &Root, path| small.open_own(path).err().flatten().unwrap_or_default();
        assert_eq!(why(&small, "/link"), "/link is not used: it is a symbolic link");
        assert_eq!(why(&small, "/"), "/ is not used: it is not a regular file");
        if sys::effective_uid() == 0 {
            std::os::unix::fs::chown(folder.join("inside"), Some(12345), None).unwrap();
            small.reader.uid = 12346;
            assert_eq!(
                why(&small, "/inside"),
                "/inside is not used: it belongs to user 12345, neither to root nor to user 12346, who runs the process"
            );
            small.reader.uid = 12345;
            assert!(small.open_own("/inside").is_ok());
        } else {
            eprintln!("SKIPPED: only root can make files of other users");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}

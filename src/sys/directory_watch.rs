//! Watching directories for new directories in them (inotify(7)).

#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use super::{c_path, check};
use crate::bytes::u32_at;

/// Bytes of records that are read at once: at least one has room.
const BUFFER: usize = 16 << 10;
/// Bytes of a record without its name, and where its fields are: watch, what has happened, cookie, length of the name.
const HEAD: usize = 16;
const MASK: usize = 4;
const NAME_LENGTH: usize = 12;

/// Number of a directory that is watched.
pub type WatchId = i32;

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryChange {
    /// A directory was made in a watched one.
    Made { within: WatchId, name: OsString },
    /// A directory is not watched any more: it was removed.
    Removed(WatchId),
    /// Records were lost.
    Lost,
}

/// Directories that are watched.
#[derive(Debug)]
pub struct DirectoryWatch(File);

impl DirectoryWatch {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// The limit of such descriptors is reached.
    pub fn new() -> io::Result<DirectoryWatch> {
        // SAFETY: takes no pointers.
        let fd = check(unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) }.into())?;
        // SAFETY: the kernel has just returned this descriptor; it has no other owner.
        Ok(DirectoryWatch(unsafe { File::from_raw_fd(fd as i32) }))
    }

    /// Watches a directory; what is in it already has to be listed afterwards.
    ///
    /// # Errors
    /// It is not there, or the limit of the user's watches is reached.
    pub fn add(&self, directory: &Path) -> io::Result<WatchId> {
        let path = c_path(directory)?;
        let what = libc::IN_CREATE | libc::IN_ONLYDIR | libc::IN_DONT_FOLLOW;
        // SAFETY: the path ends in a NUL.
        let watch = unsafe { libc::inotify_add_watch(self.0.as_raw_fd(), path.as_ptr(), what) };
        Ok(check(watch.into())? as WatchId)
    }

    /// What has happened since the last call; nothing if there is nothing.
    pub fn read(&self) -> Vec<DirectoryChange> {
        let mut bytes = vec![0; BUFFER];
        let length = (&self.0).read(&mut bytes).unwrap_or(0);
        changes(bytes.get(..length).unwrap_or_default())
    }
}

impl AsFd for DirectoryWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The changes that records describe (`struct inotify_event`).
fn changes(mut records: &[u8]) -> Vec<DirectoryChange> {
    let mut found = Vec::new();
    while let (Some(watch), Some(mask), Some(length)) =
        (u32_at(records, 0), u32_at(records, MASK), u32_at(records, NAME_LENGTH))
    {
        let end = HEAD.saturating_add(length as usize);
        let Some(name) = records.get(HEAD..end) else { break };
        let watch = watch as WatchId;
        if mask & libc::IN_Q_OVERFLOW != 0 {
            found.push(DirectoryChange::Lost);
        } else if mask & libc::IN_IGNORED != 0 {
            found.push(DirectoryChange::Removed(watch));
        } else if mask & libc::IN_CREATE != 0 && mask & libc::IN_ISDIR != 0 {
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            let name = OsString::from_vec(name.to_vec());
            found.push(DirectoryChange::Made { within: watch, name });
        }
        records = records.get(end..).unwrap_or_default();
    }
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn new_and_removed_directories_are_seen() {
        let directory = std::env::temp_dir().join(format!("nativeprof-watch-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let watch = DirectoryWatch::new().expect("a watch");
        assert_eq!(watch.read(), []);
        let within = watch.add(&directory).expect("it is there");
        assert!(watch.add(&directory.join("none")).is_err());
        fs::write(directory.join("file"), "").expect("a file");
        fs::create_dir(directory.join("new")).expect("a directory");
        let made = DirectoryChange::Made {
            within,
            name: "new".into(),
        };
        assert_eq!(watch.read(), [made]);
        fs::remove_dir_all(&directory).expect("it is ours");
        assert_eq!(watch.read(), [DirectoryChange::Removed(within)]);
    }

    #[test]
    fn cut_records_end_the_list() {
        let mut record = 7u32.to_ne_bytes().to_vec();
        record.extend((libc::IN_CREATE | libc::IN_ISDIR).to_ne_bytes());
        record.extend([0; 4]);
        record.extend(4u32.to_ne_bytes());
        record.extend(b"a\0\0\0");
        assert_eq!(changes(&record).len(), 1);
        for length in 0..record.len() {
            assert_eq!(changes(&record[..length]), [], "{length}");
        }
        record[NAME_LENGTH..HEAD].fill(0xff);
        assert_eq!(changes(&record), []);
    }
}

//! The file that says what a receiver has accepted of a history. It is locked while something sends to that receiver.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind, Result};
use crate::sys;
use crate::sys::files::FileLock;

/// The first line of the file.
const HEADER: &str = "nativeprof push 1";
/// Bytes that are read of the file.
const MAX_FILE: u64 = 64 << 10;

/// What is to be sent next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The first segment that was not accepted in whole.
    pub sequence: u64,
    /// How many of its samples were accepted.
    pub samples: usize,
}

/// The open file.
pub struct Cursor {
    directory: PathBuf,
    path: PathBuf,
    url: String,
    position: Option<Position>,
    _lock: FileLock,
}

impl Cursor {
    /// Opens or creates the file for the receiver at this address.
    ///
    /// # Errors
    /// The directory cannot be written, another process has the file, or the file is none of ours.
    pub fn open(directory: &Path, url: &str) -> Result<Cursor> {
        let digest = Sha256::digest(url.as_bytes());
        let hash: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let path = directory.join(format!("push-{hash}.cursor"));
        let failed = |e: io::Error| {
            Error::io(format!("cannot open {}", path.display()), e)
                .hint("run it as a user who may write to the history: what was accepted is remembered there")
        };
        loop {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
                .map_err(failed)?;
            let Some(lock) = FileLock::take(file).map_err(failed)? else {
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!("another process sends {} to {url}", directory.display()),
                )
                .why(format!("it has locked {}", path.display()))
                .hint("end that process first: `pgrep -af 'nativeprof push'`"));
            };
            // Another process may have replaced the file before we locked it.
            let is_current =
                fs::metadata(&path).is_ok_and(|now| lock.file().metadata().is_ok_and(|own| now.ino() == own.ino()));
            if !is_current {
                continue;
            }
            let mut text = Vec::new();
            lock.file().take(MAX_FILE).read_to_end(&mut text).map_err(failed)?;
            let position = parse(&String::from_utf8_lossy(&text)).ok_or_else(|| {
                Error::new(ErrorKind::Data, format!("{} is damaged", path.display()))
                    .hint("remove it to send the whole history again")
            })?;
            return Ok(Cursor {
                directory: directory.into(),
                path: path.clone(),
                url: url.into(),
                position,
                _lock: lock,
            });
        }
    }

    /// Whether nothing was sent to this receiver yet.
    pub fn is_new(&self) -> bool {
        self.position.is_none()
    }

    /// What is to be sent next; the beginning, if nothing was sent yet.
    pub fn position(&self) -> Position {
        self.position.unwrap_or_default()
    }

    /// Moves on and replaces the file; afterwards the position is safe on the disk.
    ///
    /// # Errors
    /// It cannot be written: the position is known, but the next process would send messages again.
    pub fn write(&mut self, position: Position) -> Result<()> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let new = self.directory.join(format!(".{name}.tmp"));
        self.position = Some(position);
        self.replace(&new, position).map_err(|e| {
            let _ = fs::remove_file(&new); // the first failure is reported
            Error::io(format!("cannot write {}", self.path.display()), e)
                .hint("make room, or let this user write there; then run the same command again")
        })
    }

    fn replace(&mut self, new: &Path, position: Position) -> io::Result<()> {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(new)?;
        let Position { sequence, samples } = position;
        write!(
            file,
            "{HEADER}\nreceiver {}\nsegment {sequence}\nsamples {samples}\n",
            self.url
        )?;
        file.sync_all()?;
        // Before others can open it.
        let lock = FileLock::take(file)?.ok_or(io::ErrorKind::WouldBlock)?;
        fs::rename(new, &self.path)?;
        File::open(&self.directory)?.sync_all()?;
        self._lock = lock;
        Ok(())
    }
}

/// The largest sequence that the cursors in a directory name: numbers below it were accepted by a receiver.
pub fn largest_sequence(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let cursors = entries.filter(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("push-") && name.ends_with(".cursor")
    });
    let sequences = cursors.filter_map(|entry| {
        let mut text = Vec::new();
        let file = sys::files::open_plain(&entry.path()).ok()?;
        file.take(MAX_FILE).read_to_end(&mut text).ok()?;
        Some(parse(&String::from_utf8_lossy(&text))??.sequence)
    });
    sequences.max().unwrap_or(0)
}

/// The position in a file; that of an empty file is `None`.
fn parse(text: &str) -> Option<Option<Position>> {
    if text.is_empty() {
        return Some(None);
    }
    let mut lines = text.lines();
    if lines.next()? != HEADER {
        return None;
    }
    lines.next()?.strip_prefix("receiver ")?;
    Some(Some(Position {
        sequence: lines.next()?.strip_prefix("segment ")?.parse().ok()?,
        samples: lines.next()?.strip_prefix("samples ")?.parse().ok()?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let directory = std::env::temp_dir().join(format!("nativeprof-cursor-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        let url = "http://localhost/x";
        let mut cursor = Cursor::open(&directory, url).expect("a cursor");
        assert!(cursor.is_new());
        let position = Position {
            sequence: 12,
            samples: 3,
        };
        assert_eq!(largest_sequence(&directory), 0);
        cursor.write(position).expect("written");
        assert_eq!(largest_sequence(&directory), 12);
        let second = Cursor::open(&directory, url).err().expect("locked");
        assert!(second.what.starts_with("another process sends"), "{second}");
        let other = Cursor::open(&directory, "http://other/").expect("a receiver of its own");
        assert!(other.is_new());
        let path = cursor.path.clone();
        drop(cursor);
        assert_eq!(
            Cursor::open(&directory, url).expect("a cursor").position,
            Some(position)
        );
        fs::write(&path, "nativeprof push 1\n").expect("written");
        let damaged = Cursor::open(&directory, url).err().expect("damaged");
        assert!(damaged.what.ends_with("is damaged"), "{damaged}");
        fs::remove_dir_all(&directory).expect("removed");
    }
}

//! Writes segments, and drops the oldest ones.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::name::SegmentName;
use super::{Directory, Entry, LOCK, METRICS, UNFINISHED_METRICS, temporary};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::files::FileLock;

/// What a directory keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Segments that ended longer before the newest one did are dropped; `None`: none of them.
    pub keep: Option<Duration>,
    /// Bytes of all segments; `None`: any number.
    pub max_size: Option<u64>,
}

/// What was dropped to keep to the limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Number of segments.
    pub segments: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The last sequence among them.
    pub last: Option<u64>,
    /// Why others could not be: the first one of them, and the reason. It is tried again with the next segment.
    pub failure: Option<String>,
}

/// Segments that cannot be removed, after which no more are tried for now.
const MAX_FAILURES: usize = 16;

/// The only writer of a directory.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    limits: Limits,
    /// By sequence.
    segments: VecDeque<Entry>,
    /// Bytes of them.
    size: u64,
    next: u64,
    /// The directory, to be synced.
    directory: File,
    _lock: FileLock,
}

impl Writer {
    /// Opens a directory, which is created if needed, and removes what a writer that was stopped has left.
    ///
    /// # Errors
    /// `Usage` if another process writes to it; `Io` or `NotPermitted` if it cannot be read or written.
    pub fn open(path: &Path, limits: Limits) -> Result<Writer> {
        let shown = path.display();
        let failed = |e: io::Error| {
            Error::io(format!("cannot write to {shown}"), e)
                .hint("choose a directory that this user may write to with --dir DIR")
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(path)
            .map_err(failed)?;
        let flags = libc::O_NOFOLLOW;
        let mut options = File::options();
        let lock = options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(flags);
        let lock = lock.open(path.join(LOCK)).map_err(failed)?;
        let Some(lock) = FileLock::take(lock).map_err(failed)? else {
            return Err(Error::new(ErrorKind::Usage, format!("{shown} is in use"))
                .why("another process writes its history there")
                .hint("end that one, or choose another directory with --dir DIR"));
        };
        let directory = Directory::open(path)?;
        for left in &directory.temporary {
            fs::remove_file(left).map_err(failed)?;
        }
        match fs::remove_file(path.join(UNFINISHED_METRICS)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
            _ => {}
        }
        let segments: VecDeque<Entry> = directory.segments.into();
        Ok(Writer {
            path: path.into(),
            limits,
            size: segments.iter().map(|segment| segment.size).sum(),
            next: segments.back().map_or(1, |last| last.name.sequence + 1),
            segments,
            directory: File::open(path).map_err(failed)?,
            _lock: lock,
        })
    }

    /// Has segments begin with this sequence, if those that there are do not reach it: numbers that a receiver has seen are not
    /// used again where segments were removed.
    pub fn begin_at(&mut self, sequence: u64) {
        if sequence <= SegmentName::MAX_SEQUENCE {
            self.next = self.next.max(sequence);
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The segments and their bytes.
    pub fn size(&self) -> (usize, u64) {
        (self.segments.len(), self.size)
    }

    /// The sequence of the next segment.
    pub fn next_sequence(&self) -> u64 {
        self.next
    }

    /// Writes a segment that began at `start`, and drops the oldest ones that exceed the limits. `message` is `ProfilesData`;
    /// the file is compressed. Returns its name, and what was dropped.
    ///
    /// # Errors
    /// `Io` or `NotPermitted`: it could not be written, for example because the disk is full. Segments that exist are intact, and
    /// the next one may be written.
    pub fn write(&mut self, start: SystemTime, duration: Duration, message: &[u8]) -> Result<(SegmentName, Dropped)> {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let name = SegmentName {
            sequence: self.next,
            // Before the epoch no clock of a running system is.
            start: start.duration_since(UNIX_EPOCH).map_or(0, milliseconds),
            duration: milliseconds(duration),
        };
        if self.next > SegmentName::MAX_SEQUENCE {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{} has no room for more segments", self.path.display()),
            )
            .why("the largest sequence is in use")
            .hint("choose another directory with --dir DIR"));
        }
        let unfinished = temporary(&self.path, &name);
        let size = self.create(&unfinished, &name, message).map_err(|e| {
            let _ = fs::remove_file(&unfinished); // the first failure is the one to report
            let hint = match e.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "make room there, or keep less: --max-size, --keep"
                }
                _ => "check the directory and its file system",
            };
            Error::io(format!("cannot write a segment to {}", self.path.display()), e).hint(hint)
        })?;
        self.segments.push_back(Entry { name, size });
        self.size += size;
        self.next += 1;
        Ok((name, self.drop_oldest()))
    }

    fn create(&self, unfinished: &Path, name: &SegmentName, message: &[u8]) -> io::Result<u64> {
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(true).mode(0o640);
        let file = file.custom_flags(libc::O_NOFOLLOW).open(unfinished)?;
        let mut gz = GzEncoder::new(io::BufWriter::with_capacity(1 << 16, file), Compression::default());
        gz.write_all(message)?;
        let mut buffer = gz.finish()?;
        buffer.flush()?;
        let file = buffer.get_ref();
        file.sync_all()?;
        let size = file.metadata()?.len();
        fs::rename(unfinished, self.path.join(name.to_string()))?;
        // The segment is there. If its name is not safe from a power failure, that is no reason to write it twice.
        let _ = self.directory.sync_all();
        Ok(size)
    }

    /// Writes the recorder's metrics to the directory. Their file is replaced as a whole.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_metrics(&self, text: &str) -> io::Result<()> {
        let unfinished = self.path.join(UNFINISHED_METRICS);
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(true).mode(0o640);
        let mut file = file.custom_flags(libc::O_NOFOLLOW).open(&unfinished)?;
        let written = file.write_all(text.as_bytes());
        let replaced = written.and_then(|()| fs::rename(&unfinished, self.path.join(METRICS)));
        if replaced.is_err() {
            let _ = fs::remove_file(&unfinished); // the first failure is the one to report
        }
        replaced
    }

    /// Drops the oldest segments, but never the last one. One that cannot be removed does not keep the others.
    fn drop_oldest(&mut self) -> Dropped {
        let mut dropped = Dropped::default();
        let newest = self.segments.back().map_or(0, |last| last.name.end());
        let keep = self
            .limits
            .keep
            .map(|keep| u64::try_from(keep.as_millis()).unwrap_or(u64::MAX));
        let mut at = 0;
        while at < MAX_FAILURES
            && self.segments.len() > at + 1
            && let Some(oldest) = self.segments.get(at).copied()
        {
            let is_old = keep.is_some_and(|keep| newest.saturating_sub(oldest.name.end()) > keep);
            let is_too_much = self.limits.max_size.is_some_and(|max| self.size > max);
            if !is_old && !is_too_much {
                break;
            }
            match fs::remove_file(self.path.join(oldest.name.to_string())) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => {
                    dropped.failure.get_or_insert_with(|| format!("{}: {e}", oldest.name));
                    at += 1;
                    continue;
                }
            }
            self.segments.remove(at);
            self.size = self.size.saturating_sub(oldest.size);
            dropped.segments += 1;
            dropped.bytes += oldest.size;
            dropped.last = Some(oldest.name.sequence);
        }
        dropped
    }
}

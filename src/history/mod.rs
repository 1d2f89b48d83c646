//! The history of a host: a directory of segments, each a file that is written once and never changed.
//!
//! ```text
//! DIR/lock                                                    locked by the writer
//! DIR/0000001234-20261128T031400.123Z-60000.otlp.gz           sequence, start (UTC), duration in ms
//! DIR/.NAME.tmp                                               is being written
//! ```
//!
//! Segments are in the order of their sequence. A file is synced before it gets its name, so what has the name of a segment is
//! whole, whenever the writer or the machine stopped.

pub mod name;
mod writer;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use crate::error::{Error, ErrorKind, Result};
use crate::sys::files;
use name::SegmentName;
pub use writer::{Dropped, Limits, Writer};

/// Maximum number of segments that a listing has: 19 years of one a minute.
pub const MAX_SEGMENTS: usize = 10_000_000;
/// Maximum number of bytes of a segment, compressed and decompressed.
pub const MAX_BYTES: u64 = 256 << 20;
/// What names of a segment's numbers begin with that count processes which could not be opened; the reason follows.
pub const REFUSED_PROCESSES: &str = "processes.";
/// Maximum number of foreign names that are kept for messages; more are only counted.
const MAX_FOREIGN: usize = 16;

/// A segment of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// What its name says.
    pub name: SegmentName,
    /// Bytes of its file.
    pub size: u64,
}

/// The segments of a directory, as they were when it was listed.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// By sequence.
    segments: Vec<Entry>,
    /// The first names that are neither of a segment nor ours.
    foreign: Vec<OsString>,
    /// How many such names there are.
    foreign_count: usize,
    /// What writers that were stopped have left.
    temporary: Vec<PathBuf>,
}

impl Directory {
    /// Lists a directory.
    ///
    /// # Errors
    /// `Io` or `NotPermitted` if it cannot be read, `Data` if it has more than [`MAX_SEGMENTS`].
    pub fn open(path: &Path) -> Result<Directory> {
        let failed =
            |e| Error::io(format!("cannot read {}", path.display()), e).hint("check the path and who may read it");
        let mut directory = Directory {
            path: path.into(),
            segments: Vec::new(),
            foreign: Vec::new(),
            foreign_count: 0,
            temporary: Vec::new(),
        };
        for entry in fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let file_name = entry.file_name();
            let text = file_name.to_str().unwrap_or_default();
            if let Some(name) = SegmentName::parse(text) {
                // A file may be dropped while the directory is listed; a link or a pipe is no segment.
                let metadata = entry.metadata().ok().filter(|metadata| metadata.is_file());
                directory.segments.extend(metadata.map(|metadata| Entry {
                    name,
                    size: metadata.len(),
                }));
                if directory.segments.len() > MAX_SEGMENTS {
                    let what = format!("{} has too many files", path.display());
                    return Err(Error::new(ErrorKind::Data, what)
                        .why(format!("more than {MAX_SEGMENTS} segments"))
                        .hint("move some of them to another directory"));
                }
            } else if is_temporary(text) {
                directory.temporary.push(entry.path());
            } else if !is_ours(text) {
                directory.foreign_count += 1;
                if directory.foreign.len() < MAX_FOREIGN {
                    directory.foreign.push(file_name);
                }
            }
        }
        directory.segments.sort_unstable();
        Ok(directory)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The segments, by sequence.
    pub fn segments(&self) -> &[Entry] {
        &self.segments
    }

    /// Names that are not of a segment, of a cursor, or of a lock: the first ones, and how many there are in all.
    pub fn foreign(&self) -> (&[OsString], usize) {
        (&self.foreign, self.foreign_count)
    }

    /// The path of a segment.
    pub fn path_of(&self, name: &SegmentName) -> PathBuf {
        self.path.join(name.to_string())
    }

    /// The content of a segment, decompressed: the message `ProfilesData`.
    ///
    /// # Errors
    /// It is gone, cannot be read, is damaged, or exceeds [`MAX_BYTES`].
    pub fn read(&self, name: &SegmentName) -> io::Result<Vec<u8>> {
        decompress(open_segment(&self.path, name)?)
    }
}

/// Opens a segment of a directory.
///
/// # Errors
/// It is gone, or is no file, or may not be read.
pub fn open_segment(directory: &Path, name: &SegmentName) -> io::Result<File> {
    // What is a file in the listing may have been replaced.
    files::open_plain(&directory.join(name.to_string()))
}

/// The content of a segment: the message `ProfilesData`.
///
/// # Errors
/// It cannot be read, is damaged, or exceeds [`MAX_BYTES`].
pub fn decompress(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let packed = io::BufReader::with_capacity(1 << 16, file.take(MAX_BYTES));
    MultiGzDecoder::new(packed)
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it decompresses to more than {} MiB", MAX_BYTES >> 20),
        ));
    }
    Ok(bytes)
}

const LOCK: &str = "lock";
/// The recorder's metrics, as Prometheus' text.
pub const METRICS: &str = "metrics.prom";
/// The same while they are written.
const UNFINISHED_METRICS: &str = ".metrics.prom.tmp";

fn is_ours(name: &str) -> bool {
    // Cursors, and what a sender that was stopped has left of one.
    let cursor = name
        .strip_prefix('.')
        .and_then(|name| name.strip_suffix(".tmp"))
        .unwrap_or(name);
    [LOCK, METRICS, UNFINISHED_METRICS].contains(&name) || cursor.starts_with("push-") && cursor.ends_with(".cursor")
}

/// Whether it is the name of a segment that is being written.
fn is_temporary(name: &str) -> bool {
    let name = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
    name.is_some_and(|name| SegmentName::parse(name).is_some())
}

fn temporary(directory: &Path, name: &SegmentName) -> PathBuf {
    directory.join(format!(".{name}.tmp"))
}

#[cfg(test)]
mod tests;

//! The segments of a history, as far as sending needs them.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use flate2::read::GzDecoder;

use crate::error::{Error, Result};

/// Bytes of a segment, decompressed: far more than the samples of a minute.
const MAX_SEGMENT: u64 = 128 << 20;
const SUFFIX: &str = ".otlp.gz";

/// A closed segment.
#[derive(Clone, Debug)]
pub struct Segment {
    pub sequence: u64,
    pub path: PathBuf,
    pub bytes: u64,
    /// When it was closed.
    pub closed: SystemTime,
}

/// Why a segment has no content.
#[derive(Debug)]
pub enum Unreadable {
    /// The history has dropped it.
    Gone,
    Damaged(String),
    /// It may be readable later.
    Failed(io::Error),
}

/// When a name in the directory was added or removed; `None` if it cannot be known.
pub fn changed(directory: &Path) -> Option<(i64, i64)> {
    let metadata = fs::metadata(directory).ok()?;
    Some((metadata.mtime(), metadata.mtime_nsec()))
}

/// The closed segments, in their order.
///
/// # Errors
/// The directory cannot be read.
pub fn list(directory: &Path) -> Result<Vec<Segment>> {
    let failed = |e| {
        Error::io(format!("cannot read the history {}", directory.display()), e)
            .hint("name the directory that `nativeprof host --dir` writes to")
    };
    let mut segments = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let sequence = name.to_str().and_then(sequence_of);
        // Segments may be dropped meanwhile. Links and pipes are not of the history.
        let metadata = entry.metadata().ok().filter(Metadata::is_file);
        if let (Some(sequence), Some(metadata)) = (sequence, metadata) {
            segments.push(Segment {
                sequence,
                path: entry.path(),
                bytes: metadata.len(),
                closed: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            });
        }
    }
    segments.sort_by_key(|segment| segment.sequence);
    Ok(segments)
}

/// The number at the start of a segment's name.
fn sequence_of(name: &str) -> Option<u64> {
    let (digits, _) = name.strip_suffix(SUFFIX)?.split_once('-')?;
    let is_number = digits.len() == 10 && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

/// The content of a segment, decompressed.
///
/// # Errors
/// It is gone, damaged, or cannot be read now.
pub fn read(segment: &Segment) -> std::result::Result<Vec<u8>, Unreadable> {
    let unreadable = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => Unreadable::Gone,
        // What decompression finds wrong.
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            Unreadable::Damaged(e.to_string())
        }
        _ => Unreadable::Failed(e),
    };
    let file = File::open(&segment.path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    let mut content = GzDecoder::new(io::BufReader::new(file)).take(MAX_SEGMENT + 1);
    content.read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_SEGMENT {
        return Err(Unreadable::Damaged(format!("it has more than {MAX_SEGMENT} bytes")));
    }
    Ok(bytes)
}

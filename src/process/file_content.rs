//! The bytes of an ELF file: on disk, copied from memory, or from a tape.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use crate::sys;

/// The bytes of an ELF file.
#[derive(Clone, Debug)]
pub enum Content {
    File(Arc<File>),
    Bytes(Arc<Sparse>),
    /// It could not be opened.
    Missing,
}

impl Content {
    /// Length in bytes; 0 if unknown.
    pub fn len(&self) -> u64 {
        match self {
            Content::File(f) => f.metadata().map_or(0, |m| m.len()),
            Content::Bytes(b) => b.len,
            Content::Missing => 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes as a file, which for those in memory is a new one; `None` if they are missing.
    pub fn file(&self) -> Option<io::Result<Arc<File>>> {
        match self {
            Content::File(f) => Some(Ok(f.clone())),
            Content::Bytes(b) => Some(b.to_file().map(Arc::new)),
            Content::Missing => None,
        }
    }

    /// The file of an image's layer that this is; `None` if it is not seen through an overlay.
    pub fn layer_file(&self) -> Option<LayerFile> {
        let Content::File(file) = self else { return None };
        if !sys::files::is_in_overlay(file) {
            return None;
        }
        let meta = file.metadata().ok()?;
        Some(LayerFile {
            inode: meta.ino(),
            len: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        })
    }

    /// Fills `buf` from `at`, as far as there are bytes; returns how many.
    pub fn read_at(&self, at: u64, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Content::File(f) => f.read_at(buf, at),
            Content::Bytes(b) => Ok(b.read_at(at, buf)),
            Content::Missing => Ok(0),
        }
    }
}

/// Identity of a file below an overlay. Each container sees the layers of its image through a mount, and so a device, of its
/// own; the inode and the times are those of the one file in the layer (`ovl_getattr`, fs/overlayfs/inode.c, Linux 6.18).
/// The time of the last change is the kernel's: who copies a file cannot set it. (A user who may mount file systems can make
/// one below an overlay that states all of these falsely.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerFile {
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Bytes of which most are zero and not stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sparse {
    len: u64,
    /// Sorted, not overlapping, within `len`.
    pieces: Vec<(u64, Vec<u8>)>,
}

impl Sparse {
    /// `None` if the pieces are not in order, overlap, or reach past `len`.
    pub fn new(len: u64, pieces: Vec<(u64, Vec<u8>)>) -> Option<Sparse> {
        let mut end = 0;
        for (at, bytes) in &pieces {
            (*at >= end).then_some(())?;
            end = at.checked_add(bytes.len() as u64)?;
        }
        (end <= len).then_some(Sparse { len, pieces })
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn pieces(&self) -> &[(u64, Vec<u8>)] {
        &self.pieces
    }

    fn read_at(&self, at: u64, buf: &mut [u8]) -> usize {
        let n = self.len.saturating_sub(at).min(buf.len() as u64) as usize;
        let buf = &mut buf[..n];
        buf.fill(0);
        let first = self.pieces.partition_point(|(start, b)| start + b.len() as u64 <= at);
        for (start, bytes) in &self.pieces[first..] {
            let (skip, to) = (at.saturating_sub(*start) as usize, start.saturating_sub(at) as usize);
            if to >= n {
                break;
            }
            let m = (bytes.len() - skip).min(n - to);
            buf[to..to + m].copy_from_slice(&bytes[skip..skip + m]);
        }
        n
    }

    /// A file in memory with these bytes. What is not stored is a hole in it.
    fn to_file(&self) -> io::Result<File> {
        let file = sys::files::memory_file()?;
        file.set_len(self.len)?;
        for (at, bytes) in &self.pieces {
            file.write_all_at(bytes, *at)?;
        }
        Ok(file)
    }

    /// All bytes. Zero pages are not touched, so a long file costs no more memory than its pieces.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = vec![0; self.len as usize];
        for (at, bytes) in &self.pieces {
            let at = *at as usize;
            all[at..at + bytes.len()].copy_from_slice(bytes);
        }
        all
    }
}

impl From<Vec<u8>> for Sparse {
    fn from(bytes: Vec<u8>) -> Sparse {
        Sparse {
            len: bytes.len() as u64,
            pieces: vec![(0, bytes)],
        }
    }
}

/// Reads a `Content` from its own position: that of the file is shared by all who have it open.
pub struct ContentReader {
    content: Content,
    at: u64,
    len: u64,
}

impl ContentReader {
    pub fn new(content: Content) -> ContentReader {
        let len = content.len();
        ContentReader { content, at: 0, len }
    }
}

impl Read for ContentReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.content.read_at(self.at, buf)?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for ContentReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(n) => Some(n),
            SeekFrom::End(n) => self.len.checked_add_signed(n),
            SeekFrom::Current(n) => self.at.checked_add_signed(n),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_between_pieces_read_as_zeros() {
        let s = Sparse::new(10, vec![(2, vec![1, 2]), (4, vec![3]), (8, vec![4])]).expect("good pieces");
        let all = [0, 0, 1, 2, 3, 0, 0, 0, 4, 0];
        assert_eq!(s.to_vec(), all);
        for from in 0..=12u64 {
            for len in 0..=12 {
                let mut buf = vec![9; len];
                let n = s.read_at(from, &mut buf);
                let rest = all.get(from as usize..).unwrap_or_default();
                assert_eq!(&buf[..n], &rest[..len.min(rest.len())], "{len} from {from}");
            }
        }
        for bad in [
            vec![(9, vec![1, 2])],
            vec![(2, vec![1, 2]), (3, vec![1])],
            vec![(u64::MAX, vec![1])],
        ] {
            assert_eq!(Sparse::new(10, bad), None);
        }
    }
}

//! Separate debug files: where they may be, and whether one belongs to a file.
//!
//! The places and their order are those of GDB ("Debugging Information in Separate Files" in its manual): by build id,
//! then by `.gnu_debuglink`; then `.gnu_debugdata` (GDB manual, "Debugging information in a special section"); then
//! [`Files::fetch`].

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::elf::{Elf, cstr_at, u32_at};
use crate::{Error, ErrorKind};

/// Where distributions install debug files, in the file system of the program.
const DEBUG_ROOT: &str = "/usr/lib/debug";
/// Maximum size of a file that is read for its checksum.
const MAX_CHECKED: u64 = 4 << 30;
/// Maximum size of mini debug info: it contains symbols only.
const MAX_MINI: u64 = 256 << 20;
/// Memory limit of the xz decoder, KiB: `xz -9` needs 64 MiB.
const XZ_MEMORY: u32 = 80 << 10;
/// Maximum number of paths reported as searched.
const MAX_SEARCHED: usize = 32;

/// Access to other files as the program sees them; in a container, these are not ours.
///
/// Implemented by closures from a path to a file.
pub trait Files: Send + Sync {
    /// The regular file at an absolute path, or `None`. Must not block on a pipe or a device.
    fn open(&self, path: &Path) -> Option<File>;

    /// Debug information from elsewhere, by build id; called when no file has it. `None` if there is no such source,
    /// `Err` with the reason if it was not available.
    fn fetch(&self, build_id: &[u8]) -> Option<Result<File, String>> {
        let _ = build_id;
        None
    }
}

impl<F: Fn(&Path) -> Option<File> + Send + Sync> Files for F {
    fn open(&self, path: &Path) -> Option<File> {
        self(path)
    }
}

/// Path of a file, and access to others.
#[derive(Clone)]
pub(crate) struct FileContext {
    pub path: PathBuf,
    pub files: Arc<dyn Files>,
}

/// A debug file that belongs to the file.
pub(crate) struct DebugFile {
    pub elf: Elf,
    /// `None`: it was fetched.
    pub path: Option<PathBuf>,
}

/// Result of a search.
#[derive(Default)]
pub(crate) struct Search {
    /// Paths where nothing was found.
    pub searched: Vec<PathBuf>,
    /// What was found and not used, with the reason.
    pub refused: Vec<String>,
}

impl Search {
    /// The debug file of `elf`.
    pub fn debug_file(&mut self, elf: &Elf, context: &FileContext) -> Option<DebugFile> {
        let local = self.local(elf, context);
        if local.is_some() {
            return local;
        }
        let fetched = context.files.fetch(elf.build_id.as_deref()?)?;
        let opened = fetched.and_then(|file| Elf::from_file(file).map_err(|e| e.to_string()));
        match opened {
            Ok(debug) if debug.build_id == elf.build_id => Some(DebugFile { elf: debug, path: None }),
            Ok(_) => self.refuse("debuginfod: the received file has another build ID".into()),
            Err(why) => self.refuse(format!("debuginfod: {why}")),
        }
    }

    fn local(&mut self, elf: &Elf, context: &FileContext) -> Option<DebugFile> {
        let same_id = |found: &Elf| found.build_id.is_some() && found.build_id == elf.build_id;
        let path = elf.build_id.as_deref().and_then(build_id_path);
        if let Some((debug, path)) = path.and_then(|path| Some((self.open(&path, context)?.0, path))) {
            if same_id(&debug) {
                return Some(DebugFile {
                    elf: debug,
                    path: Some(path),
                });
            }
            self.refuse::<()>(format!("{}: it has another build ID", path.display()));
        }
        let (name, crc) = debuglink(&elf.raw_section(".gnu_debuglink"))?;
        let directory = context.path.parent()?;
        let below = Path::new(DEBUG_ROOT).join(directory.strip_prefix("/").ok()?);
        for path in [
            directory.join(&name),
            directory.join(".debug").join(&name),
            below.join(&name),
        ] {
            if path == context.path {
                continue; // a link to itself
            }
            let Some((debug, file)) = self.open(&path, context) else {
                continue;
            };
            // Two build ids are more reliable than a checksum, and do not need the complete file to be read.
            let fits = match (&debug.build_id, &elf.build_id) {
                (Some(_), Some(_)) => same_id(&debug),
                _ => crc_of(&file) == Some(crc),
            };
            if fits {
                return Some(DebugFile {
                    elf: debug,
                    path: Some(path),
                });
            }
            self.refuse::<()>(format!("{}: it belongs to another build", path.display()));
        }
        None
    }

    /// The supplementary file that `elf`, found at `path`, shares strings and entries with.
    pub fn supplementary(&mut self, elf: &Elf, path: &Path, context: &FileContext) -> Option<DebugFile> {
        let link = elf.raw_section(".gnu_debugaltlink");
        let (name, id) = match debugaltlink(&link) {
            Some(found) => found,
            None => debug_sup(&elf.debug_data(".debug_sup").ok()?)?,
        };
        let adjacent = path.parent().unwrap_or(Path::new("/")).join(name);
        let places = [Some(adjacent), build_id_path(&id)];
        for path in places.into_iter().flatten() {
            let Some((found, _)) = self.open(&path, context) else {
                continue;
            };
            if identity(&found).is_some_and(|found| found == id) {
                return Some(DebugFile {
                    elf: found,
                    path: Some(path),
                });
            }
            self.refuse::<()>(format!("{}: it belongs to another build", path.display()));
        }
        None
    }

    /// The ELF file at a path; records it if it is missing or unusable.
    pub fn open(&mut self, path: &Path, context: &FileContext) -> Option<(Elf, File)> {
        let file = self.file(path, context)?;
        let again = file.try_clone().ok()?;
        match Elf::from_debug_file(file) {
            Ok(elf) => Some((elf, again)),
            Err(why) => self.refuse(format!("{}: {why}", path.display())),
        }
    }

    /// The file at a path; records it if it is missing.
    pub fn file(&mut self, path: &Path, context: &FileContext) -> Option<File> {
        let found = context.files.open(path);
        if found.is_none() && self.searched.len() < MAX_SEARCHED && !self.searched.iter().any(|p| p == path) {
            self.searched.push(path.to_path_buf());
        }
        found
    }

    pub fn refuse<T>(&mut self, why: String) -> Option<T> {
        if self.refused.len() < MAX_SEARCHED {
            self.refused.push(why);
        }
        None
    }
}

/// `/usr/lib/debug/.build-id/ab/cdef.debug`
fn build_id_path(id: &[u8]) -> Option<PathBuf> {
    let (first, rest) = id.split_first()?;
    (!rest.is_empty()).then_some(())?;
    let rest: String = rest.iter().map(|b| format!("{b:02x}")).collect();
    Some(PathBuf::from(format!(
        "{DEBUG_ROOT}/.build-id/{first:02x}/{rest}.debug"
    )))
}

/// File name and CRC-32 of `.gnu_debuglink` (binutils, `bfd/opncls.c`): a name, zeros up to a multiple of 4, the CRC.
/// Names that contain directories are refused: no tool writes them.
fn debuglink(section: &[u8]) -> Option<(PathBuf, u32)> {
    let name = cstr_at(section, 0, 255)?;
    let crc = u32_at(section, (name.len() + 1).next_multiple_of(4))?;
    let plain = !name.is_empty() && !name.contains(&b'/') && name != b"." && name != b"..";
    plain.then(|| (PathBuf::from(OsStr::from_bytes(name)), crc))
}

/// Path and build id of `.gnu_debugaltlink`: a string and the rest.
fn debugaltlink(section: &[u8]) -> Option<(PathBuf, Vec<u8>)> {
    let path = cstr_at(section, 0, 4096)?;
    let id = section.get(path.len() + 1..)?;
    let good = !path.is_empty() && (1..=64).contains(&id.len());
    good.then(|| (PathBuf::from(OsStr::from_bytes(path)), id.to_vec()))
}

/// Path and checksum of `.debug_sup` (DWARF 5, section 7.3.6): version, whether this is the supplementary file itself,
/// path, length of the checksum, checksum. For the supplementary file the path is empty.
fn debug_sup(section: &[u8]) -> Option<(PathBuf, Vec<u8>)> {
    (section.get(..2)? == [5, 0]).then_some(())?;
    let path = cstr_at(section, 3, 4096)?;
    let rest = section.get(3 + path.len() + 1..)?;
    // A LEB128 number below 128 is one byte.
    let len = usize::from(*rest.first()?);
    let id = rest.get(1..)?.get(..len)?;
    (1..=64)
        .contains(&len)
        .then(|| (PathBuf::from(OsStr::from_bytes(path)), id.to_vec()))
}

/// What identifies a supplementary file.
fn identity(elf: &Elf) -> Option<Vec<u8>> {
    let id = elf.debug_data(".debug_sup").ok().and_then(|s| debug_sup(&s));
    id.map(|(_, id)| id).or_else(|| elf.build_id.clone())
}

/// CRC-32 of a complete file, as in `.gnu_debuglink`.
fn crc_of(file: &File) -> Option<u32> {
    (file.metadata().ok()?.len() <= MAX_CHECKED).then_some(())?;
    let mut hasher = crc32fast::Hasher::new();
    let mut block = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let n = file.read_at(&mut block, at).ok()?;
        if n == 0 {
            return Some(hasher.finalize());
        }
        hasher.update(&block[..n]);
        at += n as u64;
        (at <= MAX_CHECKED).then_some(())?;
    }
}

/// The ELF file in `.gnu_debugdata`: symbols of functions that are not exported, compressed with xz. `None` if there is
/// none.
pub(crate) fn mini_debug_info(elf: &Elf) -> Option<Result<Elf, Error>> {
    let packed = elf.raw_section(".gnu_debugdata");
    if packed.is_empty() {
        return None;
    }
    let bad = |why: &str| Error::new(ErrorKind::Corrupt, format!(".gnu_debugdata {why}"));
    let mut bytes = Vec::new();
    let reader = lzma_rust2::XzReader::new_mem_limit(&packed[..], false, XZ_MEMORY);
    Some(match reader.take(MAX_MINI + 1).read_to_end(&mut bytes) {
        Err(_) => Err(bad("cannot be decompressed")),
        Ok(_) if bytes.len() as u64 > MAX_MINI => Err(bad("is too large")),
        Ok(_) => Elf::from_bytes(bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debuglinks() {
        let with = |name: &[u8], pad: usize, crc: &[u8]| [name, &vec![0; pad][..], crc].concat();
        let crc = [1, 2, 3, 4];
        for (section, expected) in [
            (with(b"a.debug", 1, &crc), Some("a.debug")),
            (with(b"abc", 1, &crc), Some("abc")),
            (with(b"abcd", 4, &crc), Some("abcd")),
            (with(b"abcd", 4, &[1, 2]), None),
            (with(b"abcd", 0, &[]), None),
            (with(b"", 4, &crc), None),
            (with(b"../a", 4, &crc), None),
            (with(b"..", 2, &crc), None),
            (Vec::new(), None),
        ] {
            let expected = expected.map(|name| (PathBuf::from(name), 0x04030201));
            assert_eq!(debuglink(&section), expected, "{section:?}");
        }
    }

    #[test]
    fn links_to_supplementary_files() {
        let found = |path: &str, id: &[u8]| Some((PathBuf::from(path), id.to_vec()));
        assert_eq!(debugaltlink(b"../x\0\x01\x02"), found("../x", &[1, 2]));
        assert_eq!(debugaltlink(b"../x\0"), None);
        assert_eq!(debugaltlink(b"\0\x01"), None);
        assert_eq!(debugaltlink(b"no end"), None);
        assert_eq!(debug_sup(b"\x05\0\0../x\0\x02\x08\x09"), found("../x", &[8, 9]));
        assert_eq!(debug_sup(b"\x05\0\x01\0\x01\x08"), found("", &[8]));
        assert_eq!(debug_sup(b"\x05\0\0../x\0\x03\x08\x09"), None);
        assert_eq!(debug_sup(b"\x04\0\0x\0\x01\x08"), None);
        assert_eq!(debug_sup(b""), None);
    }

    #[test]
    fn places_by_build_id() {
        let path = |id: &[u8]| build_id_path(id).map(|p| p.display().to_string());
        let expected = "/usr/lib/debug/.build-id/ab/cd0e.debug";
        assert_eq!(path(&[0xab, 0xcd, 0x0e]).as_deref(), Some(expected));
        assert_eq!(path(&[0xab]), None);
        assert_eq!(path(&[]), None);
    }
}

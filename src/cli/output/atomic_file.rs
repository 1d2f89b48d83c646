//! Output files: checked before sampling, written after it.
//!
//! A file is always new: it is created in the same directory under an unguessable name, and renamed when it is
//! complete. So no link is followed, no existing file is written to, and no reader sees half a file. Only devices and
//! pipes are written to directly.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::privileges::credentials;
use crate::privileges::credentials::{Cap, Caps};
use crate::privileges::phases::WRITING;
use crate::sys;

/// Modes of files that everyone may read, and of those for their owner only.
pub const PUBLIC: u32 = 0o644;
pub const PRIVATE: u32 = 0o600;

/// Writes the content.
pub type WriteFn<'a> = dyn Fn(&mut dyn Write) -> io::Result<()> + 'a;

/// A checked output file.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    /// A device or a pipe, which is not replaced by a rename.
    device: bool,
    mode: u32,
    needs: Caps,
}

impl OutputFile {
    /// Tries to create a file there, with the user's privileges only; leaves nothing behind.
    ///
    /// # Errors
    /// `Io` or `NotPermitted`.
    pub fn new(path: &Path, mode: u32) -> Result<OutputFile> {
        let mut output = OutputFile {
            path: path.to_path_buf(),
            device: false,
            mode,
            needs: Caps::NONE,
        };
        let failed = |e: io::Error| {
            let error = Error::io(format!("cannot write to {}", path.display()), e);
            let directory = directory(path);
            if directory.exists() {
                return error.hint("choose another file with -o FILE");
            }
            let directory = directory.display();
            error
                .why(format!("directory {directory} does not exist"))
                .hint(format!("mkdir -p {directory}, or choose another file with -o FILE"))
        };
        let (permitted, _) = credentials::current().map_err(failed)?;
        let root_may = permitted.and(Caps::of(WRITING));
        // Root without an invoking user (in a container, say) may use its capabilities to write.
        for needs in [Caps::NONE, root_may] {
            output.needs = needs;
            let tried = credentials::with_only(needs, || output.probe()).map_err(failed)?;
            match tried {
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied && needs != root_may => {}
                Err(e) => return Err(failed(e)),
                Ok(()) => break,
            }
        }
        Ok(output)
    }

    /// Capabilities needed to create the file.
    pub fn needs(&self) -> Caps {
        self.needs
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn probe(&mut self) -> io::Result<()> {
        let path = &self.path;
        match fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
            Ok(found) => {
                // The target of a link is read only to recognize devices and directories; a file there is not changed.
                let behind = if found.is_symlink() {
                    fs::metadata(path).unwrap_or_else(|_| found.clone())
                } else {
                    found.clone()
                };
                if behind.is_dir() {
                    return Err(io::Error::other("is a directory"));
                }
                let of_device = |m: &Metadata| m.file_type().is_char_device() || m.file_type().is_fifo();
                if of_device(&behind) {
                    if ![0, sys::process::effective_uid()].contains(&found.uid()) {
                        return Err(io::Error::other("it is a device, pipe or link owned by another user"));
                    }
                    self.device = true;
                    return Ok(());
                }
                if found.is_file() {
                    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
                    File::options().append(true).custom_flags(flags).open(path)?;
                } else if !found.is_symlink() {
                    return Err(io::Error::other("it is not a file, device or pipe"));
                }
                let directory = fs::metadata(directory(path))?;
                let shared = directory.mode() & libc::S_ISVTX != 0;
                let owners = [directory.uid(), found.uid()];
                if shared && !owners.contains(&sys::process::effective_uid()) && !self.needs.has(Cap::Fowner) {
                    let why = "it belongs to another user, in a directory where only the owner may replace files";
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
                }
            }
        }
        let (trial, _) = create_temp(path, self.mode)?;
        fs::remove_file(trial)
    }

    /// Writes the file; its length, or `None` for a device. An existing file is replaced by the complete new one or not
    /// at all.
    pub fn write(&self, write: &WriteFn<'_>) -> io::Result<Option<u64>> {
        if self.device {
            write_all_parts(
                File::options()
                    .write(true)
                    .custom_flags(libc::O_NOCTTY)
                    .open(&self.path)?,
                write,
            )?;
            return Ok(None);
        }
        let (temporary, file) = create_temp(&self.path, self.mode)?;
        let done =
            write_all_parts(file, write).and_then(|length| fs::rename(&temporary, &self.path).map(|()| Some(length)));
        if done.is_err() {
            let _ = fs::remove_file(&temporary); // the first failure is the one to report
        }
        done
    }
}

/// Writes the file elsewhere when its path has failed: in the first directory that works, under this name or a similar
/// one. For its owner only: the original path may have been private.
pub fn write_elsewhere(name: &OsStr, write: &WriteFn<'_>) -> Option<(PathBuf, u64)> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let directories = [
        Some(std::env::temp_dir()),
        home,
        Some("/var/tmp".into()),
        Some(".".into()),
    ];
    for directory in directories.into_iter().flatten() {
        for n in 1..100 {
            let mut name = name.to_os_string();
            if n > 1 {
                name.push(format!(".{n}"));
            }
            let path = directory.join(name);
            match create(&path, PRIVATE) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(_) => break,
                Ok(file) => match write_all_parts(file, write) {
                    Ok(length) => return Some((path, length)),
                    Err(_) => {
                        let _ = fs::remove_file(&path); // the next directory may work
                        break;
                    }
                },
            }
        }
    }
    None
}

fn directory(path: &Path) -> &Path {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

fn write_all_parts(file: File, write: &WriteFn<'_>) -> io::Result<u64> {
    let mut out = BufWriter::new(file);
    write(&mut out)?;
    out.flush()?;
    Ok(out.get_ref().metadata()?.len())
}

/// A file that was not there before, not even as a link.
fn create(path: &Path, mode: u32) -> io::Result<File> {
    let mut options = File::options();
    options
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

/// Creates a new, empty file in the directory of `path`.
fn create_temp(path: &Path, mode: u32) -> io::Result<(PathBuf, File)> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::other("it has no file name"))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{:016x}", RandomState::new().hash_one(0)));
    let temporary = directory(path).join(temporary);
    Ok((temporary.clone(), create(&temporary, mode)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn scratch(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("nativeprof-output-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        directory
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn hello(out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"hello")
    }

    #[test]
    fn links_are_replaced_not_followed() {
        let directory = scratch("links");
        let (victim, link) = (directory.join("victim"), directory.join("x.svg"));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        let output = OutputFile::new(&link, PUBLIC).unwrap();
        assert_eq!(output.write(&hello).unwrap(), Some(5));
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert!(fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(fs::read_to_string(&link).unwrap(), "hello");
        // A dangling link, and one to a directory.
        for to in ["nowhere", "."] {
            fs::remove_file(&link).unwrap();
            symlink(to, &link).unwrap();
            assert_eq!(OutputFile::new(&link, PUBLIC).is_ok(), to == "nowhere");
        }
        assert_eq!(names(&directory), ["victim", "x.svg"]);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn rights_of_files() {
        let directory = scratch("modes");
        for (name, mode) in [("a", PUBLIC), ("b", PRIVATE)] {
            let path = directory.join(name);
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
            OutputFile::new(&path, mode).unwrap().write(&hello).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777 & !mode, 0, "{name}");
        }
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let directory = scratch("failed");
        let path = directory.join("x.json");
        fs::write(&path, "old").unwrap();
        let output = OutputFile::new(&path, PUBLIC).unwrap();
        let fails = |out: &mut dyn Write| out.write_all(b"ha").and(Err(io::Error::other("no more")));
        assert_eq!(output.write(&fails).unwrap_err().to_string(), "no more");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(&directory), ["x.json"]);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn devices_are_written_to() {
        let output = OutputFile::new(Path::new("/dev/null"), PUBLIC).unwrap();
        assert_eq!(output.write(&hello).unwrap(), None);
        assert!(fs::symlink_metadata("/dev/null").unwrap().file_type().is_char_device());
    }
}

//! A place for a new file: checked before sampling, filled after it.
//!
//! A file is always new: it is made beside its place under a name that nobody can guess, and takes the place's name
//! when it is whole. So no link is followed, no file of somebody else is written to, and no reader sees half a file.
//! Only a device or a pipe is written to as it is.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::process::credentials::{self, Cap, Caps};
use crate::process::privilege::WRITING;
use crate::process::sys;

/// Rights of files that may be read by all, and of those that are for their owner.
pub const PUBLIC: u32 = 0o644;
pub const PRIVATE: u32 = 0o600;

/// Makes the content.
pub type Make<'a> = dyn Fn(&mut dyn Write) -> io::Result<()> + 'a;

/// A checked place.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    /// A device or a pipe: there is nothing to rename over.
    device: bool,
    mode: u32,
    needs: Caps,
}

impl Place {
    /// Tries whether a file can be made there, with no other rights than those of our user; leaves nothing behind.
    ///
    /// # Errors
    /// `Io` or `NotPermitted`.
    pub fn new(path: &Path, mode: u32) -> Result<Place> {
        let mut place = Place {
            path: path.to_path_buf(),
            device: false,
            mode,
            needs: Caps::NONE,
        };
        let failed = |e: io::Error| {
            Error::io(format!("cannot write to {}", path.display()), e).hint("choose another place with -o FILE")
        };
        let (permitted, _) = credentials::own().map_err(failed)?;
        let root_may = permitted.and(Caps::of(WRITING));
        // Root without a user to become (in a container, say) may write where plain rights do not reach.
        for needs in [Caps::NONE, root_may] {
            place.needs = needs;
            let tried = credentials::with_only(needs, || place.try_out()).map_err(failed)?;
            match tried {
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied && needs != root_may => {}
                Err(e) => return Err(failed(e)),
                Ok(()) => break,
            }
        }
        Ok(place)
    }

    /// Capabilities without which the file cannot be made.
    pub fn needs(&self) -> Caps {
        self.needs
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn try_out(&mut self) -> io::Result<()> {
        let path = &self.path;
        match fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
            Ok(found) => {
                // What a link leads to is asked only to tell devices and folders; a file there stays as it is.
                let behind = if found.is_symlink() {
                    fs::metadata(path).unwrap_or_else(|_| found.clone())
                } else {
                    found.clone()
                };
                if behind.is_dir() {
                    return Err(io::Error::other("it is a folder"));
                }
                let of_device = |m: &Metadata| m.file_type().is_char_device() || m.file_type().is_fifo();
                if of_device(&behind) {
                    if ![0, sys::effective_uid()].contains(&found.uid()) {
                        return Err(io::Error::other("it is a device, a pipe or a link of another user"));
                    }
                    self.device = true;
                    return Ok(());
                }
                if found.is_file() {
                    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
                    File::options().append(true).custom_flags(flags).open(path)?;
                } else if !found.is_symlink() {
                    return Err(io::Error::other("it is neither a file, a device nor a pipe"));
                }
                let folder = fs::metadata(folder(path))?;
                let shared = folder.mode() & libc::S_ISVTX != 0;
                let owners = [folder.uid(), found.uid()];
                if shared && !owners.contains(&sys::effective_uid()) && !self.needs.has(Cap::Fowner) {
                    let why = "it belongs to another user, in a folder where only its owner may replace it";
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
                }
            }
        }
        let (trial, _) = beside(path, self.mode)?;
        fs::remove_file(trial)
    }

    /// Makes the file; gives its length, but of a device. What had the name is replaced by the whole new file or not
    /// at all.
    pub fn write(&self, make: &Make<'_>) -> io::Result<Option<u64>> {
        if self.device {
            fill(
                File::options()
                    .write(true)
                    .custom_flags(libc::O_NOCTTY)
                    .open(&self.path)?,
                make,
            )?;
            return Ok(None);
        }
        let (temporary, file) = beside(&self.path, self.mode)?;
        let done = fill(file, make).and_then(|length| fs::rename(&temporary, &self.path).map(|()| Some(length)));
        if done.is_err() {
            let _ = fs::remove_file(&temporary); // what matters is the first failure
        }
        done
    }
}

/// Makes the file somewhere else, when its place has failed: in the first folder that takes it, under this name or one
/// that is like it. For its owner only: the place may have been private.
pub fn write_elsewhere(name: &OsStr, make: &Make<'_>) -> Option<(PathBuf, u64)> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let folders = [
        Some(std::env::temp_dir()),
        home,
        Some("/var/tmp".into()),
        Some(".".into()),
    ];
    for folder in folders.into_iter().flatten() {
        for n in 1..100 {
            let mut name = name.to_os_string();
            if n > 1 {
                name.push(format!(".{n}"));
            }
            let path = folder.join(name);
            match create(&path, PRIVATE) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(_) => break,
                Ok(file) => match fill(file, make) {
                    Ok(length) => return Some((path, length)),
                    Err(_) => {
                        let _ = fs::remove_file(&path); // the next folder may do
                        break;
                    }
                },
            }
        }
    }
    None
}

fn folder(path: &Path) -> &Path {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

fn fill(file: File, make: &Make<'_>) -> io::Result<u64> {
    let mut out = BufWriter::new(file);
    make(&mut out)?;
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

/// Makes a new, empty file in the folder of `path`.
fn beside(path: &Path, mode: u32) -> io::Result<(PathBuf, File)> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::other("it has no file name"))?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{:016x}", RandomState::new().hash_one(0)));
    let temporary = folder(path).join(temporary);
    Ok((temporary.clone(), create(&temporary, mode)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("nativeprof-place-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        folder
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn hello(out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"hello")
    }

    #[test]
    fn links_are_replaced_not_followed() {
        let folder = scratch("links");
        let (victim, link) = (folder.join("victim"), folder.join("x.svg"));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        let place = Place::new(&link, PUBLIC).unwrap();
        assert_eq!(place.write(&hello).unwrap(), Some(5));
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert!(fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(fs::read_to_string(&link).unwrap(), "hello");
        // A link that leads nowhere, and one to a folder.
        for to in ["nowhere", "."] {
            fs::remove_file(&link).unwrap();
            symlink(to, &link).unwrap();
            assert_eq!(Place::new(&link, PUBLIC).is_ok(), to == "nowhere");
        }
        assert_eq!(names(&folder), ["victim", "x.svg"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn rights_of_files() {
        let folder = scratch("modes");
        for (name, mode) in [("a", PUBLIC), ("b", PRIVATE)] {
            let path = folder.join(name);
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
            Place::new(&path, mode).unwrap().write(&hello).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777 & !mode, 0, "{name}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let folder = scratch("failed");
        let path = folder.join("x.json");
        fs::write(&path, "old").unwrap();
        let place = Place::new(&path, PUBLIC).unwrap();
        let fails = |out: &mut dyn Write| out.write_all(b"ha").and(Err(io::Error::other("no more")));
        assert_eq!(place.write(&fails).unwrap_err().to_string(), "no more");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(&folder), ["x.json"]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn devices_are_written_to() {
        let place = Place::new(Path::new("/dev/null"), PUBLIC).unwrap();
        assert_eq!(place.write(&hello).unwrap(), None);
        assert!(fs::symlink_metadata("/dev/null").unwrap().file_type().is_char_device());
    }
}

//! Where the profile goes: checked before sampling starts, and never lost to a failed write.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::export::{self, Format};
use crate::tree::profile::Profile;

/// A checked place and format.
#[derive(Debug)]
pub struct Output {
    /// `None`: standard output.
    path: Option<PathBuf>,
    format: &'static Format,
}

impl Output {
    /// Decides place and format, and tries whether a file can be made there.
    ///
    /// # Errors
    /// `Usage` for an unknown format; `Io` or `NotPermitted` for a place that cannot be written.
    pub fn new(path: Option<&Path>, format: Option<&str>, pid: u32) -> Result<Output> {
        let default = PathBuf::from(format!("nativeprof-{pid}.{}", format.unwrap_or("svg")));
        let path = path.unwrap_or(&default);
        let unknown = |e: export::UnknownFormat| {
            let text = e.to_string();
            let (what, why) = text.rsplit_once("; ").unwrap_or((&text, ""));
            Error::new(Kind::Usage, what)
                .why(why)
                .hint("nativeprof record -f svg -o out.svg ...")
        };
        let format = match format {
            Some(name) => export::by_name(name).map_err(unknown)?,
            None if path == Path::new("-") => export::by_name("collapsed").map_err(unknown)?,
            None => export::by_path(path).map_err(unknown)?,
        };
        if path == Path::new("-") {
            return Ok(Output { path: None, format });
        }
        let failed = |e: io::Error| {
            Error::io(format!("cannot write to {}", path.display()), e).hint("choose another place with -o FILE")
        };
        if path.is_dir() {
            return Err(failed(io::Error::other("it is a folder")));
        }
        if path.exists() {
            File::options().append(true).open(path).map_err(failed)?;
        }
        let (trial, _) = beside(path).map_err(failed)?;
        fs::remove_file(trial).map_err(failed)?;
        Ok(Output {
            path: Some(path.to_path_buf()),
            format,
        })
    }

    /// Writes the profile; says in words where it is now.
    ///
    /// # Errors
    /// If neither the chosen place nor the folder for temporary files can be written.
    pub fn write(&self, profile: &Profile) -> Result<String> {
        let Some(path) = &self.path else {
            let mut out = BufWriter::new(io::stdout().lock());
            let done = (self.format.write)(profile, &mut out).and_then(|()| out.flush());
            return match done {
                // Whoever read it has had enough.
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok("standard output (closed early)".into()),
                Err(e) => Err(Error::io("cannot write to standard output", e)),
                Ok(()) => Ok(format!("standard output ({})", self.format.name)),
            };
        };
        match self.write_file(profile, path) {
            Ok(bytes) => Ok(format!("{} ({}, {})", path.display(), self.format.name, size(bytes))),
            Err(e) => {
                let name = path.file_name().unwrap_or("profile".as_ref());
                let other = std::env::temp_dir().join(name);
                let bytes = self.write_file(profile, &other).map_err(|_| {
                    Error::io(
                        format!("cannot write to {}", path.display()),
                        io::Error::new(e.kind(), e.to_string()),
                    )
                })?;
                let shown = other.display();
                Ok(format!(
                    "{shown} ({}), because writing to {} failed: {e}",
                    size(bytes),
                    path.display()
                ))
            }
        }
    }

    /// Writes beside the place and renames, so that a reader never sees half a file.
    fn write_file(&self, profile: &Profile, path: &Path) -> io::Result<u64> {
        if !fs::symlink_metadata(path).map_or(true, |m| m.is_file()) {
            // A device or a pipe, such as /dev/null: there is nothing to rename over.
            let mut out = BufWriter::new(File::options().write(true).open(path)?);
            (self.format.write)(profile, &mut out)?;
            out.flush()?;
            return Ok(0);
        }
        let (temporary, file) = beside(path)?;
        let mut out = BufWriter::new(file);
        let done = (self.format.write)(profile, &mut out).and_then(|()| out.flush());
        let done = done.and_then(|()| out.get_ref().metadata()).and_then(|m| {
            fs::rename(&temporary, path)?;
            Ok(m.len())
        });
        if done.is_err() {
            let _ = fs::remove_file(&temporary); // what matters is the first failure
        }
        done
    }
}

/// Writes bytes as a new file that takes the place of what had the name.
pub fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (temporary, mut file) = beside(path)?;
    let done = file.write_all(bytes).and_then(|()| fs::rename(&temporary, path));
    if done.is_err() {
        let _ = fs::remove_file(&temporary); // what matters is the first failure
    }
    done
}

/// Makes a new, empty file in the folder of `path`; never opens one that is there.
fn beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::other("it has no file name"))?;
    for n in 0..100 {
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}-{n}", std::process::id()));
        let temporary = folder.join(temporary);
        match File::options()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&temporary)
        {
            Ok(file) => return Ok((temporary, file)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
    }
    Err(io::Error::other("too many temporary files"))
}

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        10_000..10_000_000 => format!("{} KB", bytes / 1000),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

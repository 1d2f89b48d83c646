//! The directory of the runs of a comparison.

use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::privileges::credentials::User;

/// Files of each side begin with this.
const SIDES: [&str; 2] = ["a-", "b-"];
const EXTENSION: &str = "json.gz";

/// A directory with a file for each run: `a-001.json.gz`, `b-001.json.gz`, ...
pub struct RunDirectory {
    path: PathBuf,
    /// It goes away with this.
    is_temporary: bool,
    /// Complete pairs in it.
    pairs: usize,
}

impl RunDirectory {
    /// Creates `path`, or one that is removed again. It belongs to `user`, if that is not the one of this process.
    ///
    /// # Errors
    /// `Io`; `Usage` if there are runs in it.
    pub fn new(path: Option<&Path>, user: Option<&User>) -> Result<RunDirectory> {
        let (path, is_temporary) = match path {
            // What begins with a dash would be an option of `diff`.
            Some(path) if path.as_os_str().as_encoded_bytes().starts_with(b"-") => (Path::new(".").join(path), false),
            Some(path) => (path.to_path_buf(), false),
            None => {
                let name = format!("nativeprof-compare-{:016x}", RandomState::new().hash_one(0));
                (std::env::temp_dir().join(name), true)
            }
        };
        let failed = |e: io::Error| {
            let hint = if is_temporary {
                "choose a directory with -o DIR"
            } else {
                "choose another directory with -o DIR"
            };
            Error::io(format!("cannot create the directory {}", path.display()), e).hint(hint)
        };
        let mode = if is_temporary { 0o700 } else { 0o755 };
        match DirBuilder::new().mode(mode).create(&path) {
            Ok(()) => {
                if let Some(user) = user {
                    give_to(&path, user).map_err(failed)?;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => check_no_runs(&path)?,
            Err(e) => return Err(failed(e)),
        }
        Ok(RunDirectory {
            path,
            is_temporary,
            pairs: 0,
        })
    }

    /// The file of a side's next run.
    pub fn next_file(&self, side: usize) -> PathBuf {
        self.file(side, self.pairs)
    }

    fn file(&self, side: usize, pair: usize) -> PathBuf {
        self.path.join(format!("{}{:03}.{EXTENSION}", SIDES[side], pair + 1))
    }

    /// Both next runs are there.
    pub fn add_pair(&mut self) {
        self.pairs += 1;
    }

    /// Complete pairs in it.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// The files of a side's complete pairs.
    pub fn files(&self, side: usize) -> Vec<PathBuf> {
        (0..self.pairs).map(|pair| self.file(side, pair)).collect()
    }

    /// Where the complete pairs can be found later; `None`: nowhere.
    pub fn kept(&self) -> Option<&Path> {
        (!self.is_temporary && self.pairs > 0).then_some(&*self.path)
    }

    /// The words after `diff` that compare all pairs again, for the reader of a message.
    pub fn arguments(&self) -> String {
        let all = SIDES.map(|side| format!("{}/{side}*", line(&self.path.to_string_lossy())));
        format!("--before {} --after {}", all[0], all[1])
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if self.is_temporary {
            let _ = fs::remove_dir_all(&self.path); // nothing more can be done
            return;
        }
        // A pair that is not complete would be taken for one.
        for side in 0..SIDES.len() {
            let _ = fs::remove_file(self.next_file(side)); // it may not be there
        }
    }
}

/// Gives a new directory to a user.
fn give_to(path: &Path, user: &User) -> io::Result<()> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let directory = File::options().read(true).custom_flags(flags).open(path)?;
    fchown(directory, Some(user.uid), Some(user.gid))
}

/// # Errors
/// `Usage`: runs of different comparisons would become one.
fn check_no_runs(path: &Path) -> Result<()> {
    let entries = fs::read_dir(path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    let is_run = |name: &String| SIDES.iter().any(|side| name.starts_with(side)) && name.ends_with(EXTENSION);
    let mut runs = names.filter(is_run);
    match runs.next() {
        None => Ok(()),
        Some(name) => Err(Error::new(
            ErrorKind::Usage,
            format!("{} has runs already, such as {name}", path.display()),
        )
        .why("runs of two comparisons in one directory would be compared as one")
        .hint("choose a new directory with -o DIR")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_stay_in_pairs() {
        let scratch = std::env::temp_dir().join(format!("nativeprof-runs-{}", std::process::id()));
        let _ = fs::remove_dir_all(&scratch);
        let mut runs = RunDirectory::new(Some(&scratch), None).unwrap();
        assert_eq!(runs.kept(), None);
        for side in [1, 0] {
            fs::write(runs.next_file(side), "").unwrap();
        }
        runs.add_pair();
        fs::write(runs.next_file(0), "").unwrap();
        assert_eq!((runs.kept(), runs.pairs()), (Some(&*scratch), 1));
        assert_eq!(runs.files(1), [scratch.join("b-001.json.gz")]);
        drop(runs);
        let names = |path: &Path| fs::read_dir(path).unwrap().count();
        assert_eq!(names(&scratch), 2);
        let again = RunDirectory::new(Some(&scratch), None).err().unwrap();
        assert!(again.what.contains("has runs already"), "{again}");
        fs::remove_dir_all(&scratch).unwrap();

        let temporary = RunDirectory::new(None, None).unwrap();
        let path = temporary.path.clone();
        fs::write(temporary.next_file(0), "").unwrap();
        drop(temporary);
        assert!(!path.exists());
    }
}

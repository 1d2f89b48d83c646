//! The recordings that are compared: those of two paths, two times of one history, or several runs of each side.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cli::args::DiffCommand as Options;
use crate::cli::{history, input, print_status};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::history::name::SegmentName;
use crate::privileges::credentials::Caps;
use crate::profile::model::Profile;

/// Runs of a side, at most: each is read as a whole, and all are open at once.
const MAX_RUNS: usize = 400;

/// A recording, or the requested time of it.
pub struct Input {
    pub path: PathBuf,
    pub profile: Profile,
    /// It is one recording, and not a part of a history, of which the CPU time of the processes is not known.
    pub is_recording: bool,
}

/// The recordings of the older and of the newer side, at least one each.
///
/// # Errors
/// Those of [`history::profiles`]; `Usage` for a file that is given twice.
pub fn read(options: &Options, kept: Caps) -> Result<[Vec<Input>; 2]> {
    let paths = options.paths();
    let files: [Vec<PathBuf>; 2] = if options.has_runs() {
        let [before, after] = &paths;
        let files = [files_of(before, "--before")?, files_of(after, "--after")?];
        check_different(&files)?;
        files
    } else {
        paths.map(|paths| paths.into_iter().map(PathBuf::from).collect())
    };
    let earlier = [options.against.unwrap_or(0), 0];
    let sides = files.iter().zip(earlier);
    let sources: Vec<(&Path, u64)> = sides
        .flat_map(|(files, earlier)| files.iter().map(move |path| (path.as_path(), earlier)))
        .collect();
    let mut read = history::profiles(&sources, options.range, &options.history, kept)?.into_iter();
    Ok(files.map(|files| {
        let inputs = files.into_iter().zip(read.by_ref());
        inputs
            .map(|(path, profile)| Input {
                is_recording: !path.is_dir(),
                path,
                profile,
            })
            .collect()
    }))
}

/// The files of runs, those of directories in the order of their names.
fn files_of(paths: &[&Path], option: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(in_directory(path, option)?);
        } else {
            files.push(path.to_path_buf());
        }
    }
    if files.len() > MAX_RUNS {
        let what = format!("{option} has {} files", files.len());
        return Err(Error::new(ErrorKind::Usage, what)
            .why(format!("at most {MAX_RUNS} runs of a side are compared"))
            .hint("give fewer of them"));
    }
    Ok(files)
}

fn in_directory(directory: &Path, option: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).map_err(|e| input::unreadable(directory, e))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| input::unreadable(directory, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if SegmentName::parse(&name).is_some() {
            let what = format!("{} is the history of a host", directory.display());
            return Err(Error::new(ErrorKind::Usage, what)
                .why(format!("{option} takes a directory in which each file is one run"))
                .hint(format!(
                    "nativeprof diff {} --last 10m --against 24h",
                    directory.display()
                )));
        }
        if !name.starts_with('.') && path.is_file() {
            files.push(path);
        }
    }
    if files.is_empty() {
        let what = format!("{} has no files", directory.display());
        return Err(Error::new(ErrorKind::Usage, what)
            .why(format!(
                "{option} takes files, or directories in which each file is one run"
            ))
            .hint("check the path"));
    }
    files.sort();
    Ok(files)
}

/// # Errors
/// `Usage` if a file is there twice: it would seem to be two runs that are equal.
fn check_different(files: &[Vec<PathBuf>; 2]) -> Result<()> {
    let mut known: Vec<(u64, u64, &PathBuf)> = Vec::new();
    for path in files.iter().flatten() {
        // What cannot be opened is reported when it is.
        let Ok(found) = fs::metadata(path) else { continue };
        let (device, inode) = (found.dev(), found.ino());
        if let Some((.., other)) = known.iter().find(|(d, i, _)| (*d, *i) == (device, inode)) {
            let shown = |path: &Path| line(&path.to_string_lossy()).into_owned();
            let what = if shown(other) == shown(path) {
                format!("{} is given twice", shown(path))
            } else {
                format!("{} and {} are one file", shown(other), shown(path))
            };
            return Err(Error::new(ErrorKind::Usage, what)
                .why("each file is to be one run; a run compared with itself shows no spread")
                .hint("record the program again for each file"));
        }
        known.push((device, inode, path));
    }
    Ok(())
}

/// Says which programs are compared if the runs of a side are not all of one.
pub fn report_programs(inputs: &[Vec<Input>; 2]) {
    for (side, word) in inputs.iter().zip(["older", "newer"]) {
        let mut commands: Vec<&str> = side.iter().map(|input| input.profile.meta.command.as_str()).collect();
        commands.retain(|command| !command.is_empty());
        commands.sort_unstable();
        commands.dedup();
        if let [first, second, ..] = commands[..] {
            print_status(&format!(
                "the {word} runs are of {} different commands, such as `{}` and `{}`: their spread is that of different work",
                commands.len(),
                line(first),
                line(second)
            ));
        }
    }
}

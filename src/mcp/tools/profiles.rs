//! `profiles`: the files with profiles below the root directory.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Map, json};

use super::{AnswerText, Tool, with_rows};
use crate::error::{Error, ErrorKind, Result};
use crate::mcp::answer::{self, Rows, data};
use crate::mcp::permission::Permission;
use crate::privileges::phases;
use crate::sys::files;

/// The directory of the server's own recordings, below the root.
pub const OWN: &str = ".nativeprof";
/// Directories are searched so deep, and so many entries at most.
const MAX_DEPTH: usize = 5;
const MAX_ENTRIES: usize = 20_000;
/// Bytes in which a profile in JSON is recognized.
const HEAD: u64 = 512;

pub const PROFILES: Tool = Tool {
    name: "profiles",
    description: "Lists recorded profiles, newest first.",
    is_read_only: true,
    arguments: || (with_rows(json!({})), &[]),
    answer: AnswerText {
        keys: &[],
        rows: &["profile"],
    },
    run: |arguments, _| {
        let wanted = arguments.wanted()?;
        Ok(Box::new(move |permission, _| {
            let (mut found, is_incomplete) = find(permission);
            found.sort_by(|a, b| (b.modified, &a.path).cmp(&(a.modified, &b.path)));
            let now = SystemTime::now();
            let row = |file: &ProfileFile| {
                json!({
                    "profile": data(&file.path.to_string_lossy()),
                    "bytes": file.bytes,
                    "age_seconds": now.duration_since(file.modified).map_or(0, |age| age.as_secs()),
                })
            };
            let total = found.len() as u64;
            let rows = found.iter().skip(wanted.skipped as usize).map(row).collect();
            let mut answer = Map::new();
            answer.insert("incomplete".into(), is_incomplete.into());
            answer.insert("command".into(), "find . -name '*.json*'".into());
            let rows = Rows {
                rows,
                skipped: wanted.skipped,
                total,
            };
            Ok(answer::with_rows(answer, rows, wanted.max_bytes))
        }))
    },
};

struct ProfileFile {
    /// Relative to the root.
    path: PathBuf,
    bytes: u64,
    modified: SystemTime,
}

/// The files, and whether there were too many entries to see all.
fn find(permission: &Permission) -> (Vec<ProfileFile>, bool) {
    let (mut found, mut seen) = (Vec::new(), 0);
    let mut directories = vec![(PathBuf::new(), 0)];
    while let Some((directory, depth)) = directories.pop() {
        // One that cannot be read has nothing to list.
        let Ok(entries) = fs::read_dir(permission.root().join(&directory)) else {
            continue;
        };
        for entry in entries.flatten() {
            seen += 1;
            if seen > MAX_ENTRIES {
                return (found, true);
            }
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let Ok(kind) = entry.file_type() else {
                continue;
            };
            let path = directory.join(entry.file_name());
            if kind.is_dir() && depth < MAX_DEPTH && (!name.starts_with('.') || name == OWN) && name != "node_modules" {
                directories.push((path, depth + 1));
            } else if kind.is_file()
                && is_profile(&name, &entry.path())
                && let Ok(meta) = entry.metadata()
            {
                found.push(ProfileFile {
                    path,
                    bytes: meta.len(),
                    modified: meta.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                });
            }
        }
    }
    (found, false)
}

/// Whether a file is a profile, going by its name; one in JSON also by its beginning, since many files are JSON.
fn is_profile(name: &str, path: &Path) -> bool {
    if name.ends_with(".json") {
        let mut head = Vec::new();
        // It may have become a link or a pipe since it was listed.
        let read = files::open_plain(path).and_then(|file| file.take(HEAD).read_to_end(&mut head));
        return read.is_ok() && String::from_utf8_lossy(&head).contains("\"identifier\"");
    }
    [".json.gz", ".tape"].iter().any(|ending| name.ends_with(ending))
}

/// The path of a new recording of the server, relative to the root: in a directory of its own, which is created.
///
/// # Errors
/// `Io` or `NotPermitted` if the directory cannot be created, or is a link.
pub fn new_file(permission: &Permission, name: &str) -> Result<PathBuf> {
    let directory = permission.root().join(OWN);
    let failed = |e| {
        Error::io(format!("cannot create the directory {OWN}"), e)
            .hint("start the server with a directory that can be written: nativeprof mcp --root DIR")
    };
    match fs::symlink_metadata(&directory) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => {
            return Err(Error::new(ErrorKind::NotPermitted, format!("{OWN} is not a directory"))
                .why("recordings are written there, and links are not followed")
                .hint(format!("rename {OWN} in the root directory")));
        }
        Err(_) => {
            // Root must not create files where another user may put a link in their way.
            if phases::invoking_user().is_some() {
                return Err(
                    Error::new(ErrorKind::NotPermitted, format!("there is no directory {OWN}"))
                        .why("under sudo it is not created, since it has to belong to the user who ran sudo")
                        .hint(format!("mkdir {OWN} in the root directory")),
                );
            }
            fs::create_dir(&directory).map_err(failed)?;
            // As other tools have it: version control ignores what is in here.
            fs::write(directory.join(".gitignore"), "*\n").map_err(failed)?;
        }
    }
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "_-.".contains(*c);
    let name: String = name
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .chars()
        .filter(is_plain)
        .take(40)
        .collect();
    let name = name.trim_start_matches(['.', '-']);
    let path = |n: u32| Path::new(OWN).join(format!("{name}-{n}.json.gz"));
    let is_free = |n: &u32| fs::symlink_metadata(permission.root().join(path(*n))).is_err();
    let free = (1..=u32::MAX).find(is_free).unwrap_or(u32::MAX);
    Ok(path(free))
}

//! What a client may do. It is decided when the server is started, by the user, and never by the model that sends requests.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::privileges::phases;
use crate::sys;
use crate::sys::procfs;

/// Longest path, bytes.
const MAX_PATH: usize = 4096;

/// Everything that is permitted.
#[derive(Debug)]
pub struct Permission {
    /// Without links.
    root: PathBuf,
    /// Whose processes may be read.
    user: u32,
    /// Others, see [`ProcessId`].
    others: Vec<ProcessId>,
    commands: Vec<CommandPattern>,
}

/// A process, distinguished from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId {
    pub pid: Pid,
    /// Clock ticks since the machine was started.
    start: u64,
}

/// A command that may be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandPattern {
    /// Each may have `*`, for any text.
    words: Vec<String>,
    /// The last word was `*` alone: any number of further words.
    has_more: bool,
}

impl ProcessId {
    /// `None` if there is no such process.
    pub fn of(pid: Pid) -> Option<ProcessId> {
        procfs::start_time(pid).map(|start| ProcessId { pid, start })
    }

    /// Whether it is still that process.
    pub fn is_same(&self) -> bool {
        ProcessId::of(self.pid) == Some(*self)
    }
}

impl Permission {
    /// `root`: the directory whose files may be read. `pids`: processes in addition to those of the user. `commands`: what may be
    /// run.
    ///
    /// # Errors
    /// `Io` if there is no such directory; `NoSuchProcess`; `Usage` for a pattern without words.
    pub fn new(root: &Path, pids: &[Pid], commands: &[String]) -> Result<Permission> {
        let root = fs::canonicalize(root)
            .and_then(|root| fs::read_dir(&root).map(|_| root))
            .map_err(|e| {
                Error::io(format!("cannot read the directory {}", root.display()), e)
                    .hint("name another one with --root")
            })?;
        let others = pids
            .iter()
            .map(|pid| ProcessId::of(*pid).ok_or_else(|| Error::no_process(*pid)));
        Ok(Permission {
            root,
            user: phases::invoking_user().map_or_else(sys::process::effective_uid, |user| user.uid),
            others: others.collect::<Result<_>>()?,
            commands: commands
                .iter()
                .map(|text| CommandPattern::parse(text))
                .collect::<Result<_>>()?,
        })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a file or directory below the root, relative to it.
    ///
    /// # Errors
    /// `NotPermitted` if it is elsewhere, or if a part of the path is a link; `Io` if it is not there.
    pub fn file(&self, name: &str) -> Result<PathBuf> {
        let path = Path::new(name);
        let below = path.strip_prefix(&self.root).unwrap_or(path);
        let refused = |why: &str| {
            Error::new(ErrorKind::NotPermitted, "reading this file is not permitted")
                .why(why)
                .hint("start the server with the directory of the file: nativeprof mcp --root DIR")
        };
        if name.is_empty() || name.len() > MAX_PATH || name.contains('\0') {
            return Err(refused("the path is empty, too long or has a NUL"));
        }
        let (mut whole, mut relative) = (self.root.clone(), PathBuf::new());
        for part in below.components() {
            match part {
                Component::CurDir => continue,
                Component::Normal(part) => {
                    whole.push(part);
                    relative.push(part);
                }
                _ => return Err(refused("it is not below the root directory")),
            }
            let found = fs::symlink_metadata(&whole)
                .map_err(|e| Error::io("cannot read this file", e).hint("list profiles with the tool `profiles`"))?;
            if found.is_symlink() {
                return Err(refused("a part of the path is a link"));
            }
            if !found.is_dir() && !found.is_file() {
                return Err(refused("it is not a file or a directory"));
            }
        }
        if relative.as_os_str().is_empty() {
            return Err(refused("it is the root directory itself"));
        }
        Ok(relative)
    }

    /// The process with this number.
    ///
    /// # Errors
    /// `NoSuchProcess`; `NotPermitted` if it is neither the user's nor allowed.
    pub fn process(&self, pid: Pid) -> Result<ProcessId> {
        let id = ProcessId::of(pid).ok_or_else(|| Error::no_process(pid))?;
        let status = procfs::read_text(format!("/proc/{pid}/status")).map_err(|_| Error::no_process(pid))?;
        let is_own = procfs::user_ids(&status, "Uid").iter().all(|user| *user == self.user);
        // Between both reads another process may have got the number.
        if self.others.contains(&id) || is_own && id.is_same() {
            return Ok(id);
        }
        Err(Error::new(
            ErrorKind::NotPermitted,
            format!("reading process {pid} is not permitted"),
        )
        .why("it is another user's, or has another user's rights")
        .hint(format!(
            "start the server with this process: nativeprof mcp --allow-pid {pid}"
        )))
    }

    /// Whether a command may be run.
    ///
    /// # Errors
    /// `NotPermitted` if not.
    pub fn command(&self, words: &[String]) -> Result<()> {
        if self.commands.iter().any(|pattern| pattern.matches(words)) {
            return Ok(());
        }
        let why = if self.commands.is_empty() {
            "the server was started without --allow-run"
        } else {
            "no pattern of --allow-run matches it"
        };
        Err(
            Error::new(ErrorKind::NotPermitted, "running this command is not permitted")
                .why(why)
                .hint("start the server with a pattern that matches it: nativeprof mcp --allow-run 'pytest *'"),
        )
    }

    /// Whether the text of a source file may be shown, whose path a profile states: it is below the root, without links on the
    /// way. (Files that look secret are not read at all, see `resolve::source_lines`.)
    pub fn may_quote(&self, path: &str) -> bool {
        let path = Path::new(path);
        path.starts_with(&self.root) && fs::canonicalize(path).is_ok_and(|real| real == path)
    }
}

impl CommandPattern {
    /// Words are separated by blanks; `*` is any text in a word, and a last word `*` any further words.
    ///
    /// # Errors
    /// `Usage` if it has no program.
    pub fn parse(text: &str) -> Result<CommandPattern> {
        let mut words: Vec<String> = text.split_whitespace().map(String::from).collect();
        let has_more = words.len() > 1 && words.last().is_some_and(|word| word == "*");
        if has_more {
            words.pop();
        }
        if words.first().is_none_or(|program| program.contains('*')) {
            return Err(
                Error::new(ErrorKind::Usage, format!("--allow-run `{text}` names no program"))
                    .why("the first word is the program, without *; a last word * allows any arguments")
                    .hint("--allow-run 'pytest *'"),
            );
        }
        Ok(CommandPattern { words, has_more })
    }

    fn matches(&self, words: &[String]) -> bool {
        let fits = words.len() == self.words.len() || self.has_more && words.len() > self.words.len();
        fits && self
            .words
            .iter()
            .zip(words)
            .all(|(pattern, word)| is_like(pattern, word) && !climbs(pattern, word))
    }
}

/// Whether a word leads out of the directories that its pattern names.
fn climbs(pattern: &str, word: &str) -> bool {
    pattern.contains('*') && word.split('/').any(|part| part == "..")
}

/// Whether a word is like a pattern, in which `*` is any text.
fn is_like(pattern: &str, word: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == word;
    };
    let Some(mut left) = word.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match left.split_once(part) {
            Some((_, after)) => left = after,
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(String::from).collect()
    }

    #[test]
    fn patterns_allow_what_they_say() {
        for (pattern, command, expected) in [
            ("pytest *", "pytest", true),
            ("pytest *", "pytest -x tests", true),
            ("pytest *", "/tmp/pytest", false),
            ("pytest", "pytest -x", false),
            ("python3 bench.py *", "python3 bench.py 1 2", true),
            ("python3 bench.py *", "python3 -c x", false),
            ("python3 bench_*.py", "python3 bench_a.py", true),
            ("python3 bench_*.py", "python3 bench_a.pyc", false),
            ("python3 bench_*.py", "python3 bench_/../../x.py", false),
            ("make a*b*c", "make axbxbxc", true),
            ("make a*b*c", "make abxb", false),
            ("make *", "sh -c make", false),
        ] {
            let parsed = CommandPattern::parse(pattern).unwrap();
            assert_eq!(parsed.matches(&words(command)), expected, "{pattern}: {command}");
        }
        for wrong in ["", " ", "*", "* x", "py*"] {
            assert!(CommandPattern::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_are_below_the_root_and_no_links() {
        let base = std::env::temp_dir().join(format!("nativeprof-permission-{}", std::process::id()));
        let root = base.join("root");
        fs::create_dir_all(root.join("in")).unwrap();
        fs::write(root.join("in/a.json"), "").unwrap();
        fs::write(base.join("b.json"), "").unwrap();
        symlink(base.join("b.json"), root.join("link.json")).unwrap();
        symlink(&base, root.join("up")).unwrap();
        let permission = Permission::new(&root, &[], &[]).unwrap();
        let absolute = permission.root().join("in/a.json");
        for good in ["in/a.json", "./in//a.json", absolute.to_str().unwrap()] {
            assert_eq!(permission.file(good).unwrap(), Path::new("in/a.json"), "{good}");
        }
        for wrong in [
            "",
            ".",
            "..",
            "../b.json",
            "in/../../b.json",
            "/etc/passwd",
            "link.json",
            "up/b.json",
            "in/missing.json",
            "in/a.json/x",
            "a\0b",
        ] {
            assert!(permission.file(wrong).is_err(), "{wrong:?}");
        }
        for (path, expected) in [
            (root.join("in/a.json"), true),
            (root.join("link.json"), false),
            (base.join("b.json"), false),
            (root.join("in/missing.py"), false),
            (PathBuf::from("in/a.json"), false),
        ] {
            assert_eq!(permission.may_quote(path.to_str().unwrap()), expected, "{path:?}");
        }
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn processes_of_others_are_refused() {
        let permission = Permission::new(Path::new("/"), &[], &[]).unwrap();
        assert!(permission.process(std::process::id()).is_ok());
        let e = permission.process(u32::MAX).unwrap_err();
        assert_eq!(e.kind, ErrorKind::NoSuchProcess);
        let other = Permission {
            user: permission.user + 1,
            ..permission
        };
        let e = other.process(std::process::id()).unwrap_err();
        assert!(
            e.kind == ErrorKind::NotPermitted && e.hint.contains("--allow-pid"),
            "{e}"
        );
    }
}

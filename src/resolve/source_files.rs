//! Source files by their paths, each in the root directories of the processes whose stacks name it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::escape;
use crate::event::Pid;
use crate::process::root::Root;

/// Maximum number of Python source files that are opened.
const MAX_SOURCES: usize = 2000;
/// Maximum number of different root directories in which one path is looked up.
const MAX_ROOTS: usize = 16;

/// Root directories of processes, and Python source files that were opened while privileges permitted it.
#[derive(Default)]
pub struct SourceFiles {
    /// The process whose root directory stands for those that are not known.
    first: Option<Pid>,
    roots: FxHashMap<Pid, Arc<Root>>,
    python: BTreeMap<String, SourceFile>,
}

/// A source file by its path.
struct SourceFile {
    /// `None`: it could not be opened, or the path names different files in several root directories.
    file: Option<File>,
    /// The root directories in which it was looked up.
    roots: Vec<Arc<Root>>,
}

impl SourceFiles {
    /// Adds the root directory of a process.
    pub fn add_root(&mut self, pid: Pid, root: Arc<Root>) {
        self.first.get_or_insert(pid);
        self.roots.insert(pid, root);
    }

    /// Whether the root directory of a process was added before all others, or none was.
    pub fn is_first(&self, pid: Pid) -> bool {
        self.first.is_none_or(|first| first == pid)
    }

    pub fn has_root(&self, pid: Pid) -> bool {
        self.roots.contains_key(&pid)
    }

    /// Forgets the root directory of a process of which no stack is kept.
    pub fn forget_root(&mut self, pid: Pid) {
        if self.first != Some(pid) {
            self.roots.remove(&pid);
        }
    }

    /// Drops the root directories of processes that are not `kept`.
    pub fn retain_roots(&mut self, kept: &dyn Fn(Pid) -> bool) {
        self.roots.retain(|pid, _| kept(*pid));
    }

    fn root(&self, pid: Option<Pid>) -> Option<&Arc<Root>> {
        let of_process = pid.and_then(|pid| self.roots.get(&pid));
        of_process.or_else(|| self.roots.get(&self.first?))
    }

    /// Opens a Python source file that a stack of a process names; `None`: of the first process.
    pub fn open_python(&mut self, pid: Option<Pid>, path: &str) {
        let Some(root) = self.root(pid).filter(|_| path.starts_with('/')).cloned() else {
            return;
        };
        let open = |root: &Root| root.open(OsString::from_vec(escape::name_bytes(path)));
        if let Some(known) = self.python.get_mut(path) {
            let is_known = known.roots.iter().any(|other| other.is_same(&root));
            if !is_known && known.roots.len() < MAX_ROOTS {
                known.file = known.file.take().filter(|file| is_same(file, open(&root).as_ref()));
                known.roots.push(root);
            }
        } else if self.python.len() < MAX_SOURCES {
            let file = open(&root);
            let roots = vec![root];
            self.python.insert(path.into(), SourceFile { file, roots });
        }
    }

    /// The file at a path, to be read from its start. `None`: there is none, or different ones in the root directories
    /// of different processes.
    pub fn get(&self, path: &str) -> Option<File> {
        if let Some(known) = self.python.get(path) {
            return known.file.as_ref()?.try_clone().ok();
        }
        let mut different: Vec<&Arc<Root>> = self.root(None).into_iter().collect();
        for root in self.roots.values() {
            if different.len() >= MAX_ROOTS {
                return None;
            }
            if different.iter().all(|other| !other.is_same(root)) {
                different.push(root);
            }
        }
        let mut files = different.into_iter().filter_map(|root| root.open(path));
        let file = files.next()?;
        files.all(|other| is_same(&file, Some(&other))).then_some(file)
    }
}

/// Whether two files have the same content, as far as can be told without reading them: files of container images keep
/// their times.
fn is_same(file: &File, other: Option<&File>) -> bool {
    let (Ok(a), Some(Ok(b))) = (file.metadata(), other.map(File::metadata)) else {
        return false;
    };
    let content = |meta: &std::fs::Metadata| (meta.len(), meta.mtime(), meta.mtime_nsec());
    (a.dev(), a.ino()) == (b.dev(), b.ino()) || content(&a) == content(&b)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::{fs, time};

    use super::*;

    /// Directories as the root directories of the processes 1, 2 and so on, each with `/app.py`.
    fn sources(name: &str, texts: &[&str]) -> SourceFiles {
        let above = std::env::temp_dir().join(format!("nativeprof-{name}-{}", std::process::id()));
        let mut sources = SourceFiles::default();
        for (pid, text) in (1..).zip(texts) {
            let directory = above.join(pid.to_string());
            fs::create_dir_all(&directory).expect("a directory");
            fs::write(directory.join("app.py"), text).expect("a file");
            let file = File::options().write(true).open(directory.join("app.py")).expect("it");
            file.set_modified(time::UNIX_EPOCH).expect("its time");
            let root = Root::example(File::open(&directory).expect("it is there"));
            sources.add_root(pid, Arc::new(root));
        }
        sources
    }

    fn text(sources: &SourceFiles) -> Option<String> {
        let mut text = String::new();
        let mut file = sources.get("/app.py")?;
        file.rewind().expect("a file");
        file.read_to_string(&mut text).expect("text");
        Some(text)
    }

    #[test]
    fn files_are_opened_in_the_root_of_their_process() {
        let mut of_second = sources("second", &["a = 1", "a = 22"]);
        assert_eq!(text(&of_second), None, "it is not known which one");
        of_second.open_python(Some(2), "/app.py");
        assert_eq!(text(&of_second).as_deref(), Some("a = 22"));
        of_second.open_python(Some(1), "/app.py");
        assert_eq!(text(&of_second), None, "both are meant");
        let mut of_first = sources("first", &["a = 1", "a = 22"]);
        of_first.open_python(None, "/app.py");
        assert_eq!(text(&of_first).as_deref(), Some("a = 1"));
        of_first.open_python(Some(9), "/app.py");
        assert_eq!(text(&of_first).as_deref(), Some("a = 1"), "its root is not known");
    }

    #[test]
    fn copies_of_one_file_are_the_same() {
        let mut sources = sources("copies", &["a = 1", "a = 1"]);
        assert_eq!(text(&sources).as_deref(), Some("a = 1"));
        sources.open_python(Some(2), "/app.py");
        sources.open_python(Some(1), "/app.py");
        assert_eq!(text(&sources).as_deref(), Some("a = 1"));
    }

    #[test]
    fn processes_without_samples_do_not_count() {
        let mut sources = sources("forgotten", &["a = 1", "a = 22"]);
        sources.forget_root(2);
        assert_eq!(text(&sources).as_deref(), Some("a = 1"));
    }
}

//! Perf maps: opened while their processes run, read after these have finished writing.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::OpenFiles;
use crate::event::Pid;
use crate::process::root::Root;
use crate::sys;

/// Maximum number of open perf maps.
const MAX_OPEN: usize = 4096;

/// The perf map of a process, or why there is none.
#[derive(Debug)]
pub struct PerfMap {
    /// Path as the process sees it.
    pub path: String,
    /// It grows while the process runs.
    pub file: Option<Arc<File>>,
    /// Why the file at this path is not used, as text; `None` if there is none.
    pub refused: Option<String>,
}

impl OpenFiles {
    /// Opens the perf map of a process if it has one, and again if it has been replaced.
    pub fn open_perf_map(&mut self, pid: Pid, root: &Root) {
        let full = self.perf_maps.len() >= MAX_OPEN.min(sys::files::file_limit() / 4);
        if full && !self.perf_maps.contains_key(&pid) {
            return;
        }
        let map = self.perf_maps.entry(pid).or_insert_with(|| PerfMap {
            path: format!("/tmp/perf-{}.map", root.inner_pid),
            file: None,
            refused: None,
        });
        match root.open_trusted(&map.path) {
            Ok(file) => {
                if !map.file.as_ref().is_some_and(|known| is_same(known, &file)) {
                    map.file = Some(Arc::new(file));
                }
            }
            // The file that was opened before belonged to the process: keep it.
            Err(why) => map.refused = why,
        }
    }
}

fn is_same(a: &File, b: &File) -> bool {
    let key = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
    matches!((key(a), key(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;

    #[test]
    fn a_map_is_opened_early_and_read_late() {
        let root = Root::of(std::process::id()).expect("our own root directory");
        let path = format!("/tmp/perf-{}.map", root.inner_pid);
        let _ = fs::remove_file(&path); // left by an earlier process of this number
        let mut open_files = OpenFiles::default();
        let mut text = |change: &dyn Fn()| {
            change();
            open_files.open_perf_map(7, &root);
            let map = &open_files.perf_maps[&7];
            let mut text = String::new();
            let file = map.file.as_ref()?;
            file.try_clone()
                .and_then(|mut file| file.read_to_string(&mut text))
                .expect("readable");
            Some(text)
        };
        assert_eq!(text(&|| {}), None);
        let write = |text: &str| fs::write(&path, text).expect("written");
        assert_eq!(text(&|| write("1000 10 a\n")), Some("1000 10 a\n".into()));
        // Another file of this name replaces it; when none is left, the last one stays.
        let other = text(&|| {
            fs::remove_file(&path).expect("removed");
            write("1000 10 b\n");
        });
        assert_eq!(other, Some("1000 10 b\n".into()));
        assert_eq!(text(&|| fs::remove_file(&path).expect("removed")), Some(String::new()));
    }
}

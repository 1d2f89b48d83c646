//! Paths of Python files as people say them: `demo.py`, `json/__init__.py`.

use std::collections::HashMap;

use crate::model::{Frame, FrameKind};

/// Parts of a path that are usually enough; a path that needs more is shown in full.
const MAX_PARTS: usize = 5;

/// The shortest end of each path that no other path has.
pub struct ShortPaths<'a>(HashMap<&'a str, &'a str>);

impl<'a> ShortPaths<'a> {
    /// Of all Python files among the frames.
    pub fn new(frames: &'a [Frame]) -> ShortPaths<'a> {
        let files = frames.iter().filter(|frame| frame.kind == FrameKind::Python);
        let mut paths: Vec<&str> = files.map(|frame| &*frame.filename).collect();
        paths.sort_unstable();
        paths.dedup();
        // How many paths have an end.
        let mut ends: HashMap<&str, u32> = HashMap::new();
        for end in paths.iter().flat_map(|path| ends_of(path)) {
            *ends.entry(end).or_default() += 1;
        }
        let short = |path: &&'a str| ends_of(path).find(|end| ends[end] == 1 && says_something(end));
        let known = paths.iter().filter_map(|path| Some((*path, short(path)?)));
        ShortPaths(known.collect())
    }

    /// The short form of a path; `None` if it is shown as it is.
    pub fn of(&self, path: &str) -> Option<&'a str> {
        self.0.get(path).copied()
    }
}

/// The last part of a path, the last two parts, and so on.
fn ends_of(path: &str) -> impl Iterator<Item = &str> {
    let starts = path.rmatch_indices('/').map(|(at, _)| at + 1).chain([0]);
    starts
        .take(MAX_PARTS)
        .map(|start| &path[start..])
        .filter(|end| !end.is_empty())
}

/// Whether the end of a path is more than the name that every package has.
fn says_something(end: &str) -> bool {
    !["__init__.py", "__main__.py"].contains(&end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_short_and_distinct() {
        let paths = [
            ("/srv/app/main.py", "main.py"),
            ("/srv/app/models.py", "app/models.py"),
            ("/srv/other/models.py", "other/models.py"),
            ("/usr/lib/python3.11/json/__init__.py", "json/__init__.py"),
            ("demo.py", "demo.py"),
            ("<stdin>", "<stdin>"),
        ];
        let frames: Vec<Frame> = paths
            .iter()
            .map(|(path, _)| Frame::python("f", "f", *path, 1))
            .collect();
        let short = ShortPaths::new(&frames);
        for (path, expected) in paths {
            assert_eq!(short.of(path), Some(expected), "{path}");
        }
        let frames = ["/a/x.py", "a/x.py", "x.py"].map(|path| Frame::python("f", "f", path, 1));
        let short = ShortPaths::new(&frames);
        assert_eq!((short.of("/a/x.py"), short.of("x.py")), (Some("/a/x.py"), None));
    }
}

//! Paths of Python files as people say them: `demo.py`, `json/__init__.py`; and places in tables, as far as there is
//! room for them.

use std::borrow::Cow;
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

/// Directories at the end of a path that a shortened one keeps, at most.
const MAX_KEPT: usize = 8;
/// Bytes of a text whose paths are shortened; a longer one only loses its start, as texts may be made to cost time.
const MAX_TEXT: usize = 512;
/// What links the program's function to that of the library which waits, see [`crate::waits::WaitSite::site`].
const IN: &str = ") in ";

/// A part of a text: as it is, or a path in ever shorter forms.
struct TextPart<'a> {
    forms: Vec<Cow<'a, str>>,
    /// The form that is shown.
    form: usize,
}

impl<'a> TextPart<'a> {
    /// `/srv/app/web/views.py:31`, `/srv/…/web/views.py:31`, `/srv/…/views.py:31`, `…/views.py:31`.
    fn new(text: &'a str) -> TextPart<'a> {
        let mut forms: Vec<Cow<'a, str>> = vec![text.into()];
        let root = text.find(|c| c != '/').unwrap_or(0);
        if let Some(first) = text[root..].find('/').map(|at| root + at) {
            // Where each directory at the end of the path begins, but the first one of the whole path.
            let starts = text.rmatch_indices('/').map(|(at, _)| at).take_while(|at| *at > first);
            let mut starts: Vec<usize> = starts.take(MAX_KEPT).collect();
            starts.reverse();
            forms.extend(
                starts
                    .iter()
                    .map(|at| format!("{}/…{}", &text[..first], &text[*at..]).into()),
            );
            forms.extend(text.rfind('/').map(|at| format!("…{}", &text[at..]).into()));
        }
        TextPart { forms, form: 0 }
    }

    fn shown(&self) -> &str {
        &self.forms[self.form]
    }
}

/// A text with places, `serve (/srv/app/web/server.py:7) in Condition.wait (threading.py:355)`, shortened until it fits: first
/// directories in the middle of paths, then the library's place, then the start of the text, so that the line is left. `fits` is
/// true for texts that are shorter than one for which it is; where nothing fits, the result is `…`.
pub fn place_within<'a>(text: &'a str, fits: &dyn Fn(&str) -> bool) -> Cow<'a, str> {
    if fits(text) {
        return text.into();
    }
    if text.len() > MAX_TEXT {
        return end_within(text, fits).into();
    }
    // Parentheses enclose places; a place may also be alone.
    let mut parts: Vec<TextPart<'a>> = text.split_inclusive(['(', ')']).map(TextPart::new).collect();
    let joined = |parts: &[TextPart<'_>]| parts.iter().map(TextPart::shown).collect::<String>();
    loop {
        let shown = joined(&parts);
        if fits(&shown) {
            return shown.into();
        }
        let longer = parts.iter_mut().filter(|part| part.form + 1 < part.forms.len());
        match longer.max_by_key(|part| part.shown().len()) {
            Some(part) => part.form += 1,
            None => {
                let end = shown.find(IN).map_or(shown.len(), |at| at + 1);
                return end_within(&shown[..end], fits).into();
            }
        }
    }
}

/// A text without its start, where `…` is.
fn end_within(text: &str, fits: &dyn Fn(&str) -> bool) -> String {
    if fits(text) {
        return text.into();
    }
    let end_from = |at: usize| format!("…{}", text[at..].trim_start_matches('…'));
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    let first = starts.partition_point(|at| !fits(&end_from(*at)));
    end_from(starts.get(first).copied().unwrap_or(text.len()))
}

/// A text without the tags of extension modules, which say for which interpreter they are built:
/// `_json.cpython-312-x86_64-linux-gnu.so` is `_json.so` (`EXT_SUFFIX` of CPython's sysconfig, 3.15).
pub fn without_tags(text: &str) -> Cow<'_, str> {
    const TAG: &str = ".cpython-";
    let mut kept = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(TAG) {
        let end = after.find(|c: char| !c.is_ascii_alphanumeric() && !"-_".contains(c));
        let tagged = end
            .and_then(|end| after.get(end..))
            .filter(|after| after.starts_with(".so"));
        kept.push_str(before);
        rest = tagged.unwrap_or_else(|| {
            kept.push_str(TAG);
            after
        });
    }
    if kept.is_empty() {
        return rest.into();
    }
    (kept + rest).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_lose_the_middle_of_their_paths_first() {
        let both = "serve (/srv/app/web/server.py:7) in Condition.wait (threading.py:355)";
        for (text, width, expected) in [
            ("/srv/app/web/views.py:31", 24, "/srv/app/web/views.py:31"),
            ("/srv/app/web/views.py:31", 23, "/srv/…/web/views.py:31"),
            ("/srv/app/web/views.py:31", 20, "/srv/…/views.py:31"),
            ("/srv/app/web/views.py:31", 15, "…/views.py:31"),
            ("/srv/app/web/views.py:31", 5, "…y:31"),
            ("serve (/srv/app/server.py:7)", 15, "…/server.py:7)"),
            ("app/views.py:31", 14, "…/views.py:31"),
            ("views.py:31", 4, "…:31"),
            ("/", 0, "…"),
            ("//x/é/ü.py:1", 9, "…/ü.py:1"),
            (both, 70, both),
            (
                both,
                66,
                "serve (/srv/…/server.py:7) in Condition.wait (threading.py:355)",
            ),
            (both, 62, "serve (…/server.py:7) in Condition.wait (threading.py:355)"),
            (both, 40, "serve (…/server.py:7)"),
            ("list_sort (libpython3.12.so.1.0)", 9, "….so.1.0)"),
        ] {
            let fits = |text: &str| text.chars().count() <= width;
            assert_eq!(place_within(text, &fits), expected, "{text} in {width}");
        }
        for (depth, expected) in [(200, "d/…/d/d/d/x.py:9"), (2000, "…d/d/d/d/d/x.py:9")] {
            let deep = format!("{}x.py:9", "d/".repeat(depth));
            assert_eq!(place_within(&deep, &|text| text.len() < 20), expected);
        }
    }

    #[test]
    fn tags_of_extension_modules_are_left_out() {
        for (text, expected) in [
            ("_json.cpython-312-x86_64-linux-gnu.so", "_json.so"),
            (
                "f (a.cpython-314t-aarch64-linux-gnu.so) in g (b.cpython-39-x86_64-linux-musl.so)",
                "f (a.so) in g (b.so)",
            ),
            ("a.cpython-312.pyc", "a.cpython-312.pyc"),
            ("a.abi3.so", "a.abi3.so"),
            ("a.cpython-", "a.cpython-"),
            (".cpython-é.so", ".cpython-é.so"),
            ("", ""),
        ] {
            assert_eq!(without_tags(text), expected);
        }
    }

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

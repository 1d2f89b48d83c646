//! Source lines: the text of the first line seen at each Python place, as in Dask's tree; the user's own files as a whole, those
//! with most samples first; and of other files what is near lines with samples.
//!
//! Profiles are shared with others. So only files that look like source code are quoted, not those that may contain
//! secrets, and no line that assigns a value to a password.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::escape;
use crate::profile::category::{Categories, Category};
use crate::profile::model::{Frame, FrameKind, Profile, SourceExcerpt};
use crate::sys;

/// Maximum number of bytes read of a file.
const MAX_FILE: u64 = 8 << 20;
/// Maximum number of files that are opened.
const MAX_FILES: usize = 2000;
/// Maximum size of all excerpts together, bytes.
const MAX_EXCERPTS: usize = 2 << 20;
/// The part of it that whole files may have, and the size of a file that is quoted as a whole, bytes.
const MAX_WHOLE: usize = 1 << 20;
const MAX_WHOLE_FILE: usize = 256 << 10;
/// What a line takes in addition to its text, bytes.
const PER_LINE: usize = 8;
/// Maximum length of a line, characters.
const MAX_LINE: usize = 400;
/// Lines before and after one with samples.
const CONTEXT: u32 = 6;

/// Extensions of source files.
const EXTENSIONS: &[&str] = &[
    "py", "pyx", "pxd", "pxi", "c", "h", "cc", "cpp", "cxx", "c++", "hh", "hpp", "hxx", "inc", "inl", "tcc", "ipp",
    "cu", "cuh", "rs", "go", "f", "f90", "f95", "s", "asm", "zig", "nim", "d", "java", "kt", "swift", "m", "mm", "jl",
    "lua",
];
/// Directories where programs keep keys.
const SECRET_DIRECTORIES: &[&str] = &[
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".kube",
    ".docker",
    ".password-store",
];
/// Parts of file names, and of names that are assigned a value in a line.
const SECRET_WORDS: &[&str] = &[
    "secret",
    "password",
    "passwd",
    "credential",
    "private_key",
    "privatekey",
    "api_key",
    "apikey",
    "access_key",
    "auth_token",
];
const LEFT_OUT: &str = "[hidden: looks like a secret]";

/// What is needed of one file.
#[derive(Default)]
struct NeededLines {
    /// Number of samples in it.
    count: u64,
    /// It is the user's own code.
    is_own: bool,
    lines: BTreeSet<u32>,
    /// Nodes with a first line, some of them with its text.
    nodes: Vec<usize>,
}

/// Fills [`Node::line_text`](crate::profile::model::Node::line_text) where it is empty, and [`Profile::excerpts`].
/// `open` returns a file by its path; it is read from its start. A file that has changed since the recording is not
/// quoted.
pub fn add(profile: &mut Profile, open: &mut dyn FnMut(&str) -> Option<File>) {
    let categories = Categories::new(profile);
    let own: Vec<bool> = profile.frames.iter().map(|frame| is_own(&categories, frame)).collect();
    let mut files: BTreeMap<&str, NeededLines> = BTreeMap::new();
    for (i, n) in profile.nodes.iter().enumerate() {
        let Some(f) = profile.frames.get(n.frame as usize) else {
            continue;
        };
        let path = match f.kind {
            FrameKind::Python => &f.filename,
            FrameKind::Native | FrameKind::Inlined => &f.source,
            _ => continue,
        };
        if !path.starts_with('/') {
            continue;
        }
        let wanted = files.entry(path).or_default();
        wanted.count = wanted.count.saturating_add(n.count);
        wanted.is_own |= own[n.frame as usize];
        wanted.lines.extend(n.lines.keys());
        if f.kind == FrameKind::Python && n.first_seen_line > 0 {
            wanted.nodes.push(i);
        }
    }
    let mut files: Vec<_> = files.into_iter().collect();
    files.sort_by(|a, b| (b.1.count, a.0).cmp(&(a.1.count, b.0)));
    files.truncate(MAX_FILES);

    let (mut texts, mut excerpts) = (Vec::new(), Vec::new());
    let (mut room, mut whole_room) = (MAX_EXCERPTS, MAX_WHOLE);
    for (path, wanted) in files {
        let mut text = Vec::new();
        let read = open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut text).ok());
        if read.is_none() || may_hold_secrets(path, &text) {
            continue;
        }
        let body = text.strip_suffix(b"\n").unwrap_or(&text);
        let lines: Vec<_> = body.split(|c| *c == b'\n').collect();
        let mut changed = false;
        for i in wanted.nodes {
            let node = &profile.nodes[i];
            let Some(text) = lines.get(node.first_seen_line as usize - 1) else {
                changed = true;
                continue;
            };
            let text = String::from_utf8_lossy(text);
            let quoted = quoted(&text);
            if node.line_text.is_empty() {
                texts.push((i, quoted.trim().to_string()));
            } else {
                // Files of earlier versions have the text of every line.
                changed |= ![text.trim(), quoted.trim()].contains(&node.line_text.trim());
            }
        }
        if !changed && is_source(Path::new(path)) {
            let size = text.len() + PER_LINE * lines.len();
            let is_whole = wanted.is_own && text.len() <= MAX_WHOLE_FILE && size <= whole_room;
            let shown = if is_whole {
                (1..=count_of(&lines)).collect()
            } else {
                near(&wanted.lines, count_of(&lines))
            };
            whole_room -= if is_whole { size } else { 0 };
            if !shown.is_empty() {
                excerpts.push(excerpt(path, &lines, &shown, &mut room));
            }
        }
    }
    excerpts.sort_by(|a, b| a.path.cmp(&b.path));
    for (i, text) in texts {
        profile.nodes[i].line_text = text;
    }
    profile.excerpts = excerpts;
}

/// Removes the text of source lines.
pub fn remove(profile: &mut Profile) {
    profile.excerpts.clear();
    for node in &mut profile.nodes {
        node.line_text.clear();
    }
}

/// Whether the file of a frame is the user's own: not of an installed package, the interpreter or the system.
fn is_own(categories: &Categories<'_>, frame: &Frame) -> bool {
    match frame.kind {
        FrameKind::Python => matches!(categories.of(frame), Some((Category::Yours, _))),
        FrameKind::Native | FrameKind::Inlined => {
            categories.is_own_extension(frame) && !frame.source.starts_with("/usr/")
        }
        _ => false,
    }
}

/// Opens a source file on this machine: a regular file whose name, after resolving links, may be quoted, too.
pub fn open_local(path: &str) -> Option<File> {
    let real = fs::canonicalize(OsStr::from_bytes(&escape::name_bytes(path))).ok()?;
    if !is_quotable_name(path) || !is_quotable_name(&escape::name_of_utf8(real.as_os_str().as_bytes())) {
        return None;
    }
    sys::files::open_plain(&real).ok()
}

fn count_of(lines: &[&[u8]]) -> u32 {
    u32::try_from(lines.len()).unwrap_or(u32::MAX)
}

/// The lines with samples and those around them, of a file of `last` lines.
fn near(sampled: &BTreeSet<u32>, last: u32) -> BTreeSet<u32> {
    let in_file = sampled.iter().filter(|line| (1..=last).contains(*line));
    in_file
        .flat_map(|line| line.saturating_sub(CONTEXT).max(1)..=line.saturating_add(CONTEXT).min(last))
        .collect()
}

/// Lines of a file by their numbers, as far as there is `room` for them (bytes).
fn excerpt(path: &str, lines: &[&[u8]], shown: &BTreeSet<u32>, room: &mut usize) -> SourceExcerpt {
    let mut out = Vec::new();
    for number in shown {
        let text = String::from_utf8_lossy(lines[*number as usize - 1]);
        let text: String = quoted(&text).trim_end().chars().take(MAX_LINE).collect();
        let Some(left) = room.checked_sub(text.len() + PER_LINE) else {
            break;
        };
        *room = left;
        out.push((*number, text));
    }
    SourceExcerpt {
        path: path.to_string(),
        length: count_of(lines),
        lines: out,
    }
}

fn is_quotable_name(path: &str) -> bool {
    is_source(Path::new(path)) && !is_secret_name(Path::new(path))
}

/// Whether a file's name is that of source code.
fn is_source(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    EXTENSIONS.contains(&extension.as_str())
}

/// Whether no line of a file is to be quoted.
fn may_hold_secrets(path: &str, text: &[u8]) -> bool {
    let key = b"PRIVATE KEY-----";
    is_secret_name(Path::new(path)) || text.windows(key.len()).any(|w| w == key)
}

fn is_secret_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let mut directories = path.components().map(|c| c.as_os_str().to_string_lossy());
    name.starts_with('.')
        || SECRET_WORDS.iter().any(|word| name.contains(word))
        || directories.any(|directory| SECRET_DIRECTORIES.contains(&&*directory))
}

/// The text of a line, or what stands for it if it looks like a secret.
fn quoted(line: &str) -> Cow<'_, str> {
    if is_secret(line) {
        let indent: String = line.chars().take_while(|c| c.is_whitespace()).collect();
        Cow::Owned(indent + LEFT_OUT)
    } else {
        Cow::Borrowed(line)
    }
}

/// Whether a line assigns a literal value to something with a suspicious name.
fn is_secret(line: &str) -> bool {
    let lower = line.to_lowercase();
    let names = SECRET_WORDS.iter().filter_map(|word| lower.find(word));
    names.min().is_some_and(|at| {
        let rest = &lower[at..];
        let value = rest.find(['=', ':']).map(|to| &rest[to..]);
        value.is_some_and(|value| value.contains(['"', '\'']))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::model::Node;

    fn profile(path: &str, lines: &[u32]) -> Profile {
        let frame = |kind, filename: &str| Frame {
            kind,
            name: "f".into(),
            qualname: String::new(),
            filename: filename.into(),
            first_line: 1,
            address: 0,
            module: String::new(),
            source: String::new(),
        };
        let node = |frame, lines: &[u32]| Node {
            count: 1,
            lines: lines.iter().map(|line| (*line, 1)).collect(),
            first_seen_line: lines.first().copied().unwrap_or(0),
            ..Node::new(frame, 0)
        };
        Profile {
            frames: vec![frame(FrameKind::Root, ""), frame(FrameKind::Python, path)],
            nodes: vec![node(0, &[]), node(1, lines)],
            ..Profile::default()
        }
    }

    /// The line text and the excerpt, for a file with this text and this name.
    fn quotations(name: &str, text: &str, lines: &[u32]) -> (String, Vec<(u32, String)>) {
        let directory = std::env::temp_dir().join(format!("nativeprof-sources-{}-{}", std::process::id(), name.len()));
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        let mut profile = profile(path.to_str().unwrap(), lines);
        add(&mut profile, &mut open_local);
        fs::remove_dir_all(&directory).unwrap();
        let excerpt = profile.excerpts.pop().unwrap_or_default();
        (profile.nodes[1].line_text.clone(), excerpt.lines)
    }

    #[test]
    fn own_files_are_quoted_as_a_whole() {
        let text: String = (1..=100).map(|n| format!("line {n}\n")).collect();
        let numbers = |lines: Vec<(u32, String)>| lines.into_iter().map(|line| line.0).collect::<Vec<_>>();
        let (first, lines) = quotations("app.py", &text, &[50]);
        assert_eq!(first, "line 50");
        assert_eq!(numbers(lines), (1..=100).collect::<Vec<_>>());
        let large = text.repeat(MAX_WHOLE_FILE / text.len() + 1);
        assert_eq!(
            numbers(quotations("large.py", &large, &[50]).1),
            (44..=56).collect::<Vec<_>>()
        );
    }

    #[test]
    fn the_most_valuable_files_are_quoted_first() {
        let directory = std::env::temp_dir().join(format!("nativeprof-room-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        // There is room for three of these.
        let text = format!("{:59}\n", "x = 1").repeat(MAX_WHOLE_FILE / 60);
        let mut sum = Profile::default();
        for (at, count) in [10, 50, 20, 40, 30].into_iter().enumerate() {
            let path = directory.join(format!("{count}.py"));
            fs::write(&path, &text).unwrap();
            let mut one = profile(path.to_str().unwrap(), &[7]);
            one.nodes[1].count = count;
            one.nodes[1].frame = at as u32 + 1;
            sum.frames.extend(one.frames.drain(usize::from(at > 0)..));
            sum.nodes.extend(one.nodes.drain(usize::from(at > 0)..));
        }
        add(&mut sum, &mut open_local);
        fs::remove_dir_all(&directory).unwrap();
        let quoted: Vec<_> = sum
            .excerpts
            .iter()
            .map(|e| (&e.path[e.path.len() - 5..], e.lines.len()))
            .collect();
        let all = MAX_WHOLE_FILE / 60;
        assert_eq!(
            quoted,
            [
                ("10.py", 13),
                ("20.py", 13),
                ("30.py", all),
                ("40.py", all),
                ("50.py", all)
            ]
        );
        assert!(sum.excerpts.iter().all(|e| e.length as usize == all));
    }

    #[test]
    fn lines_with_samples_come_with_context() {
        let text: String = (1..=100).map(|n| format!("  line {n}\n")).collect();
        let (first, lines) = quotations("site-packages/plain.py", &text, &[50, 3, 52, 1000]);
        assert_eq!(first, "line 50");
        let numbers: Vec<u32> = lines.iter().map(|l| l.0).collect();
        assert_eq!(numbers, (1..=9).chain(44..=58).collect::<Vec<_>>());
        assert_eq!(lines[0].1, "  line 1");
        let long = "x".repeat(10_000);
        assert_eq!(quotations("long.py", &long, &[1]).1[0].1.len(), MAX_LINE);
    }

    #[test]
    fn a_changed_file_is_not_quotations() {
        let path = std::env::temp_dir().join(format!("nativeprof-changed-{}.py", std::process::id()));
        fs::write(&path, "a = 1\nb = 2\n").unwrap();
        for (text, lines) in [("b = 2\n", 2), ("b = 3", 0)] {
            let mut profile = profile(path.to_str().unwrap(), &[2]);
            profile.nodes[1].line_text = text.into();
            add(&mut profile, &mut open_local);
            assert_eq!(profile.excerpts.iter().map(|e| e.lines.len()).max().unwrap_or(0), lines);
            assert_eq!(profile.nodes[1].line_text, text);
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_looks_like_a_secret_is_left_out() {
        let text = "a = 1\n";
        for (name, quotable) in [
            ("main.py", true),
            ("tokenize.py", true),
            ("gemm.c", true),
            ("id_rsa", false),
            ("shadow", false),
            ("db_passwords.py", false),
            (".env.py", false),
            (".ssh/config.py", false),
            (".venv/lib.py", true),
        ] {
            assert_eq!(!quotations(name, text, &[1]).1.is_empty(), quotable, "{name}");
        }
        let (first, lines) = quotations("key.py", "K = '''-----BEGIN RSA PRIVATE KEY-----'''", &[1]);
        assert_eq!((&*first, lines.len()), ("", 0), "not in the tree either");
        for (line, left_out) in [
            ("PASSWORD = 'hunter2'", true),
            ("    'secret': \"abc\",", true),
            ("SECRET_KEY: str = 'x'", true),
            ("password = getpass()", false),
            ("check(password)", false),
        ] {
            let (first, lines) = quotations("line.py", line, &[1]);
            assert_eq!(lines[0].1.trim() == LEFT_OUT, left_out, "{line}");
            assert_eq!(first, lines[0].1.trim(), "{line}");
        }
    }

    #[test]
    fn only_regular_files_are_opened() {
        for path in ["/dev/zero", "/proc/self/mem", "/", "/nowhere.py", "/tmp"] {
            assert!(open_local(path).is_none(), "{path}");
        }
    }
}

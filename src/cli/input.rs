//! Reads saved profiles, for every command: a file or `-` for standard input, compressed or not; a tape, or a file of one of
//! [`import::READERS`].
//!
//! A command calls [`phases::switch_to_invoking_user`] before it opens anything.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::rc::Rc;

use flate2::read::MultiGzDecoder;

use crate::error::{Error, ErrorKind, Result};
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::profile::import;
use crate::profile::model::Profile;
use crate::resolve::naming::NamingProcess;
use crate::session::{SessionOptions, replay};
use crate::tape::encode as tape;

/// Maximum size of a file, and of its decompressed content, in bytes.
const MAX_BYTES: u64 = 2 << 30;

const HINT: &str = "record one with `nativeprof record -o out.json ...`";

/// The profiles in some files, in their order. Their content is not trusted, so all capabilities but `kept` are dropped before
/// it is parsed.
///
/// # Errors
/// Those of [`open`] and [`OpenInput::profile`].
pub fn profiles(paths: &[impl AsRef<Path>], kept: Caps) -> Result<Vec<Profile>> {
    let opened = open(paths)?;
    phases::drop_for_symbolization(kept)?;
    opened.into_iter().map(OpenInput::profile).collect()
}

/// A file that is open, and not read yet.
pub struct OpenInput<'a> {
    path: &'a Path,
    file: Box<dyn Read>,
}

impl OpenInput<'_> {
    /// The profile in it. Its content is not trusted: privileges should be dropped before.
    ///
    /// # Errors
    /// `Io` or `NotPermitted` if it cannot be read, `Data` if it is not a profile.
    pub fn profile(self) -> Result<Profile> {
        parse(self.path, &content(self.path, self.file)?)
    }
}

/// Opens files, in their order.
///
/// # Errors
/// `Io` or `NotPermitted` if a file cannot be opened; `Usage` if standard input is given twice.
pub fn open(paths: &[impl AsRef<Path>]) -> Result<Vec<OpenInput<'_>>> {
    let paths: Vec<&Path> = paths.iter().map(AsRef::as_ref).collect();
    if paths.iter().filter(|path| is_standard(path)).count() > 1 {
        return Err(Error::new(ErrorKind::Usage, "standard input given twice")
            .why("it can only be read once")
            .hint("use `-` for one file only"));
    }
    let opened = paths.into_iter().map(|path| {
        let file = open_file(path)?;
        Ok(OpenInput { path, file })
    });
    opened.collect()
}

/// Whether the path means standard input.
pub fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// The name of a file for messages.
pub fn shown(path: &Path) -> String {
    if is_standard(path) {
        "standard input".into()
    } else {
        path.display().to_string()
    }
}

/// An error about a file that cannot be read, with what to do.
pub fn unreadable(path: &Path, e: io::Error) -> Error {
    let hint = match e.kind() {
        io::ErrorKind::PermissionDenied => "run this as the owner of the file",
        _ => "check the path",
    };
    Error::io(format!("cannot read {}", shown(path)), e).hint(hint)
}

fn open_file(path: &Path) -> Result<Box<dyn Read>> {
    if is_standard(path) {
        return Ok(Box::new(io::stdin()));
    }
    let file = File::open(path).map_err(|e| unreadable(path, e))?;
    if file.metadata().is_ok_and(|m| m.is_dir()) {
        return Err(unreadable(path, io::Error::other("is a directory")));
    }
    Ok(Box::new(file))
}

/// The content of the file, decompressed.
fn content(path: &Path, file: Box<dyn Read>) -> Result<Vec<u8>> {
    let mut bytes = read_bounded(path, file, "is larger")?;
    if bytes.starts_with(&[0x1f, 0x8b]) {
        bytes = read_bounded(path, MultiGzDecoder::new(&bytes[..]), "decompresses to more")?;
    }
    Ok(bytes)
}

fn read_bounded(path: &Path, file: impl Read, larger: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                no_profile(path, format!("it is truncated or damaged: decompression failed ({e})"))
            }
            _ => unreadable(path, e),
        })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(no_profile(path, format!("it {larger} than {} GiB", MAX_BYTES >> 30)));
    }
    Ok(bytes)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Profile> {
    if tape::is_tape(bytes) {
        let tape = tape::parse(bytes).map_err(|e| Error {
            what: format!("{}: {}", shown(path), e.what),
            ..e
        })?;
        return replay::profile_with(
            &Rc::new(tape),
            SessionOptions::default(),
            None,
            Some(NamingProcess::default()),
        );
    }
    import::read(bytes).map_err(|e| {
        let error = no_profile(path, e.reason);
        if e.hint.is_empty() { error } else { error.hint(e.hint) }
    })
}

fn no_profile(path: &Path, why: String) -> Error {
    Error::new(ErrorKind::Data, format!("cannot read {} as a profile", shown(path)))
        .why(why)
        .hint(HINT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    const TREE: &[u8] = br#"{"identifier":"root","description":{},"count":3,"children":{}}"#;

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
        gz.write_all(bytes).unwrap();
        gz.finish().unwrap()
    }

    #[test]
    fn formats_are_recognized_by_content() {
        let read = |bytes: &[u8]| {
            let path = Path::new("x");
            content(path, Box::new(io::Cursor::new(bytes.to_vec()))).and_then(|bytes| parse(path, &bytes))
        };
        for bytes in [
            TREE.to_vec(),
            packed(TREE),
            [packed(&TREE[..9]), packed(&TREE[9..])].concat(),
        ] {
            assert_eq!(read(&bytes).unwrap().nodes[0].count, 3);
        }
        let half = packed(TREE);
        for (bytes, why) in [
            (&b""[..], "it is empty"),
            (b"<?xml version=\"1.0\"?><svg>", "it is an SVG"),
            (b"<!DOCTYPE html>", "it is an HTML page"),
            (
                b"say what is read",
                "it is text of another kind; formats that are read: html, pstats",
            ),
            (b"{}", "it is JSON of another kind"),
            (b"{\"traceEvents\": []}", "it is a file of Chrome trace events"),
            (b"PERFILE2", "it is a perf.data file"),
            (
                br#"{"name": "x", "count": 3, "a": {"children": {}}}"#,
                "`children` expected in the root object",
            ),
            (
                br#"{"nativeprof": {}, "children": {"f": {"count": 3}}}"#,
                "`count` expected in the root object",
            ),
            (&half[..half.len() / 2], "decompression failed"),
            (b"\x0a\x04\x08\x01\x10\xff", "it is binary data of another kind"),
            (&packed(b"nativeprof tape\n"), "its format"),
        ] {
            let e = read(bytes).unwrap_err();
            assert_eq!(e.kind, ErrorKind::Data);
            assert!(e.why.contains(why) && !e.hint.is_empty(), "{e:?}");
        }
    }

    #[test]
    fn unreadable_paths() {
        for (path, why) in [("/nonexistent/x", "No such file"), ("/", "is a directory")] {
            let e = profiles(&[path], Caps::NONE).unwrap_err();
            assert!(e.why.contains(why) && !e.hint.is_empty(), "{e:?}");
        }
        let twice = [Path::new("-"), Path::new("-")];
        assert_eq!(profiles(&twice, Caps::NONE).unwrap_err().kind, ErrorKind::Usage);
    }
}

//! Saved profiles, for every command that takes some: a file or `-` for standard input, packed or not; the count tree
//! that we write, one of Dask itself, or a tape.
//!
//! A command calls [`privilege::become_caller`] before it opens anything.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::rc::Rc;

use flate2::read::MultiGzDecoder;

use crate::capture::tape::format as tape;
use crate::error::{Error, Kind, Result};
use crate::export::json;
use crate::process::credentials::Caps;
use crate::process::privilege;
use crate::replay;
use crate::session::{Grouping, Options};
use crate::tree::profile::Profile;

/// Bytes of a file that are read, and that it may unpack to.
const MOST_BYTES: u64 = 2 << 30;

const HINT: &str = "nativeprof record -o out.json ... makes one that can be read";

/// The profile in a file. What it holds may come from anybody, so it is read when all rights but `kept` are given up.
///
/// # Errors
/// `Io` or `NotPermitted` if the file cannot be read, `Data` if it holds no profile.
pub fn profile(path: &Path, kept: Caps) -> Result<Profile> {
    Ok(profiles(&[path], kept)?.remove(0))
}

/// The profiles in some files, in their order; as [`profile`].
///
/// # Errors
/// As [`profile`]; `Usage` if standard input is named twice.
pub fn profiles(paths: &[impl AsRef<Path>], kept: Caps) -> Result<Vec<Profile>> {
    let paths: Vec<&Path> = paths.iter().map(AsRef::as_ref).collect();
    if paths.iter().filter(|path| is_standard(path)).count() > 1 {
        return Err(Error::new(Kind::Usage, "standard input is named twice")
            .why("it can be read once only")
            .hint("give at most one `-`"));
    }
    let opened = paths.iter().map(|path| open(path)).collect::<Result<Vec<_>>>()?;
    privilege::for_naming(kept)?;
    let read = paths.iter().zip(opened);
    read.map(|(path, file)| parse(path, &content(path, file)?)).collect()
}

/// Whether the path stands for standard input.
pub fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// The name of a file as people are told it.
pub fn shown(path: &Path) -> String {
    match is_standard(path) {
        true => "standard input".into(),
        false => path.display().to_string(),
    }
}

fn unreadable(path: &Path, e: io::Error) -> Error {
    let hint = match e.kind() {
        io::ErrorKind::PermissionDenied => "ask its owner, or be its owner",
        _ => "check the path; `nativeprof record -o out.json ...` makes a file to read",
    };
    Error::io(format!("cannot read {}", shown(path)), e).hint(hint)
}

fn open(path: &Path) -> Result<Box<dyn Read>> {
    if is_standard(path) {
        return Ok(Box::new(io::stdin()));
    }
    let file = File::open(path).map_err(|e| unreadable(path, e))?;
    if file.metadata().is_ok_and(|m| m.is_dir()) {
        return Err(unreadable(path, io::Error::other("it is a folder")));
    }
    Ok(Box::new(file))
}

/// What the file holds, unpacked.
fn content(path: &Path, file: Box<dyn Read>) -> Result<Vec<u8>> {
    let mut bytes = all(path, file, "is larger")?;
    if bytes.starts_with(&[0x1f, 0x8b]) {
        bytes = all(path, MultiGzDecoder::new(&bytes[..]), "unpacks to more")?;
    }
    Ok(bytes)
}

fn all(path: &Path, file: impl Read, larger: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                no_profile(path, format!("it does not unpack: {e}"))
            }
            _ => unreadable(path, e),
        })?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(no_profile(path, format!("it {larger} than {} GiB", MOST_BYTES >> 30)));
    }
    Ok(bytes)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Profile> {
    if tape::is_tape(bytes) {
        let tape = tape::parse(bytes).map_err(|e| Error {
            what: format!("{}: {}", shown(path), e.what),
            ..e
        })?;
        let options = Options {
            grouping: Grouping::default(),
            native: true,
            weighted: None,
        };
        return replay::profile(&Rc::new(tape), options);
    }
    json::read(bytes).map_err(|e| {
        let why = match kind(bytes) {
            Some(kind) => format!("it is {kind}"),
            None => format!("{} at byte {}", e.reason, e.at),
        };
        no_profile(path, why)
    })
}

fn no_profile(path: &Path, why: String) -> Error {
    Error::new(Kind::Data, format!("{} holds no profile that can be read", shown(path)))
        .why(why)
        .hint(HINT)
}

/// What people may take for a profile that can be read, by its first bytes.
fn kind(bytes: &[u8]) -> Option<&'static str> {
    let starts = |with: &str| bytes.trim_ascii_start().starts_with(with.as_bytes());
    match () {
        _ if bytes.trim_ascii_start().is_empty() => Some("empty"),
        _ if starts("<?xml") || starts("<svg") => Some("a picture, which lacks what was drawn too small"),
        _ if starts("<") => Some("a page"),
        _ if starts("PERFILE2") => Some("a recording of perf"),
        _ => None,
    }
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
    fn files_are_told_by_what_they_hold() {
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
            (b"<?xml version=\"1.0\"?><svg>", "it is a picture"),
            (b"<!DOCTYPE html>", "it is a page"),
            (b"main (a.py:3);f 7\n", "`{` expected at byte 0"),
            (&half[..half.len() / 2], "it does not unpack"),
            (&packed(b"nativeprof tape\n"), "its format"),
        ] {
            let e = read(bytes).unwrap_err();
            assert_eq!(e.kind, Kind::Data);
            assert!(e.why.contains(why) && !e.hint.is_empty(), "{e:?}");
        }
    }

    #[test]
    fn places_that_cannot_be_read() {
        for (path, why) in [("/nonexistent/x", "No such file"), ("/", "it is a folder")] {
            let e = profile(Path::new(path), Caps::NONE).unwrap_err();
            assert!(e.why.contains(why) && !e.hint.is_empty(), "{e:?}");
        }
        let twice = [Path::new("-"), Path::new("-")];
        assert_eq!(profiles(&twice, Caps::NONE).unwrap_err().kind, Kind::Usage);
    }
}

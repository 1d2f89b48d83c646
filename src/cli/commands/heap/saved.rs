//! Censuses that were saved as JSON.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use serde_json::Value;

use super::KIND;
use crate::cli::input;
use crate::error::{Error, ErrorKind, Result};

/// Largest file.
const MAX_BYTES: u64 = 256 << 20;
/// Bytes at the beginning of a file that say what it is.
const HEAD: u64 = 64;

/// The file, if it is a census.
pub fn open(path: &Path) -> Option<File> {
    if input::is_standard(path) {
        return None;
    }
    let mut file = File::open(path)
        .ok()
        .filter(|file| file.metadata().is_ok_and(|m| m.is_file()))?;
    let mut head = Vec::new();
    (&mut file).take(HEAD).read_to_end(&mut head).ok()?;
    file.rewind().ok()?;
    let text = String::from_utf8_lossy(&head);
    let mut words = text
        .split(|c: char| c.is_whitespace() || "{:,".contains(c))
        .filter(|word| !word.is_empty());
    let is_census = words.next() == Some("\"kind\"") && words.next() == Some(&format!("\"{KIND}\""));
    is_census.then_some(file)
}

/// What it contains.
///
/// # Errors
/// `Data` if it is damaged.
pub fn read(path: &Path, file: File) -> Result<Value> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| input::unreadable(path, e))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(no_census(path, "it is larger than 256 MiB"));
    }
    serde_json::from_slice(&bytes).map_err(|e| no_census(path, &format!("it is damaged: {e}")))
}

/// The error for a file that is no census, or a damaged one.
pub fn no_census(path: &Path, why: &str) -> Error {
    Error::new(
        ErrorKind::Data,
        format!("{} is no census of memory", input::shown(path)),
    )
    .why(why)
    .hint("write one with `nativeprof heap PID --format json > before.json`")
}

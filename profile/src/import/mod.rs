//! Reads saved profiles: nativeprof's own, and those of other tools.
//!
//! [`READERS`] is the only list of them; a file is recognized by its content, whatever its name. What a format does not
//! have stays unknown: a function has the module, file and line that are stated, and amounts keep their unit as
//! [value types](crate::values).
//!
//! Files may come from anywhere. Nothing recurses; memory is bounded by the size of the file, and what other tools'
//! files make of it by [`MAX_PLACES`], [`MAX_DEPTH`], [`MAX_SAMPLES`] and [`MAX_VALUE_TYPES`], beyond which a file is
//! not read.

mod collapsed;
mod firefox;
mod frames;
mod otlp;
mod page;
mod perf_script;
mod pprof;
mod speedscope;
mod stacks;
#[cfg(test)]
mod tests;
mod wire;

pub use otlp::segment_names::SegmentNames;
pub use otlp::segments::{Segments, Selection};
pub use stacks::{MAX_DEPTH, MAX_PLACES, MAX_SAMPLES, MAX_VALUE_TYPES};

use std::fmt;

use crate::json::lexer::{Lexer, Members};
use crate::json::{self, JsonError};
use crate::model::Profile;
use crate::pstats::{self, PstatsError};

/// A format that is read.
pub struct Reader {
    /// As in `--format`, if it is also written.
    pub name: &'static str,
    /// What a file of it is, with an article.
    pub file: &'static str,
    /// Whether a file is one, by its content, decompressed.
    pub is: fn(&[u8]) -> bool,
    /// The profile of such a file.
    pub read: fn(&[u8]) -> Result<Profile, Damage>,
    /// What to do if it is damaged; empty if nothing special.
    hint: &'static str,
}

/// Every format there is. A file is of the first one that says so.
pub const READERS: &[Reader] = &[
    Reader {
        name: "html",
        file: "a page of nativeprof",
        is: page::is,
        read: page::read,
        hint: "read the json of that recording, or record again: nativeprof record -o out.html ...",
    },
    Reader {
        name: "pstats",
        file: "a pstats file",
        is: pstats::is_pstats,
        read: |bytes| Ok(pstats::read(bytes)?),
        hint: "write it again: python3 -m cProfile -o out.pstats script.py",
    },
    Reader {
        name: "speedscope",
        file: "a speedscope file",
        is: |bytes| json_kind(bytes) == Some(JsonKind::Speedscope),
        read: speedscope::read,
        hint: "",
    },
    Reader {
        name: "firefox",
        file: "a profile of the Firefox Profiler",
        is: |bytes| json_kind(bytes) == Some(JsonKind::Firefox),
        read: firefox::read,
        hint: "open it in profiler.firefox.com and save it again from there",
    },
    Reader {
        name: "json",
        file: "a count tree of nativeprof or Dask",
        is: |bytes| json_kind(bytes) == Some(JsonKind::CountTree),
        read: |bytes| Ok(json::read(bytes)?),
        hint: "",
    },
    Reader {
        name: "pprof",
        file: "a pprof file",
        is: pprof::is,
        read: pprof::read,
        hint: "",
    },
    Reader {
        name: "otlp",
        file: "a file of OTLP profiles",
        is: otlp::is,
        read: otlp::read,
        hint: "",
    },
    Reader {
        name: "perf script",
        file: "the output of `perf script`",
        is: perf_script::is,
        read: perf_script::read,
        hint: "write it again: perf script > out.perf",
    },
    Reader {
        name: "collapsed",
        file: "collapsed stacks",
        is: collapsed::is,
        read: collapsed::read,
        hint: "",
    },
];

/// What is wrong in a file, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The place, such as `line 7`; empty for the file as a whole.
    pub at: String,
    /// What is wrong there.
    pub reason: String,
}

impl Damage {
    fn new(at: impl Into<String>, reason: impl Into<String>) -> Damage {
        Damage {
            at: at.into(),
            reason: reason.into(),
        }
    }

    /// Of the file as a whole.
    fn whole(reason: impl Into<String>) -> Damage {
        Damage::new("", reason)
    }
}

impl From<JsonError> for Damage {
    fn from(e: JsonError) -> Damage {
        Damage::new(format!("byte {}", e.at), e.reason)
    }
}

impl From<PstatsError> for Damage {
    fn from(e: PstatsError) -> Damage {
        Damage::new(format!("byte {}", e.at), e.reason)
    }
}

/// Why a file could not be read as a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportError {
    /// What the file is, and what is wrong with it.
    pub reason: String,
    /// What to do about it; empty if nothing special.
    pub hint: String,
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for ImportError {}

/// The profile in a file of any format. The content is decompressed already.
///
/// # Errors
/// It is damaged, or of no format that is read.
pub fn read(bytes: &[u8]) -> Result<Profile, ImportError> {
    // Some programs put a byte order mark before JSON.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let Some(reader) = READERS.iter().find(|reader| (reader.is)(bytes)) else {
        let known: Vec<&str> = READERS.iter().map(|reader| reader.name).collect();
        let (what, hint) = other(bytes);
        return Err(ImportError {
            reason: format!("it is {what}; formats that are read: {}", known.join(", ")),
            hint: hint.into(),
        });
    };
    (reader.read)(bytes).map_err(|damage| {
        let Damage { at, reason } = damage;
        let reason = match &*at {
            "" => format!("it is {}: {reason}", reader.file),
            at => format!("it is {}, damaged at {at}: {reason}", reader.file),
        };
        ImportError {
            reason,
            hint: reader.hint.into(),
        }
    })
}

/// What a file is that no reader knows, and what to do about it (empty if nothing special).
fn other(bytes: &[u8]) -> (&'static str, &'static str) {
    let text = bytes.trim_ascii_start();
    let starts = |with: &str| {
        text.get(..with.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(with.as_bytes()))
    };
    match json_kind(bytes) {
        Some(JsonKind::Trace) => ("a file of Chrome trace events, which are not stacks of samples", ""),
        Some(JsonKind::CpuProfile) => ("a CPU profile of V8", ""),
        Some(JsonKind::Gecko) => (
            "a raw profile of Firefox",
            "open it in profiler.firefox.com and save it from there",
        ),
        _ if text.is_empty() => ("empty", ""),
        _ if starts("{") => ("JSON of another kind", ""),
        _ if starts("<?xml") || starts("<svg") => ("an SVG, which omits frames too narrow to draw", ""),
        _ if starts("<") => ("an HTML page, but not one of nativeprof", ""),
        _ if starts("PERFILE2") => (
            "a perf.data file",
            "convert it: perf script -i perf.data > out.perf, then read out.perf",
        ),
        _ if std::str::from_utf8(bytes).is_ok_and(|text| !text.contains('\0')) => ("text of another kind", ""),
        _ => ("binary data of another kind", ""),
    }
}

/// What a file of JSON holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JsonKind {
    CountTree,
    Speedscope,
    Firefox,
    Gecko,
    Trace,
    CpuProfile,
}

/// By the keys of the outermost object, in the order of the file. `None`: it is no object, or has no key that is known.
fn json_kind(bytes: &[u8]) -> Option<JsonKind> {
    match bytes.trim_ascii_start() {
        [b'{', ..] => {}
        [b'[', rest @ ..] if rest.trim_ascii_start().starts_with(b"{") => return Some(JsonKind::Trace),
        _ => return None,
    }
    let mut lexer = Lexer::new(bytes).ok()?;
    let mut members = Members::default();
    let mut is_gecko = false;
    while let Ok(Some(key)) = lexer.key(&mut members) {
        match &*key {
            "children" | "count" | "identifier" | "description" | "nativeprof" => return Some(JsonKind::CountTree),
            "traceEvents" => return Some(JsonKind::Trace),
            "nodes" => return Some(JsonKind::CpuProfile),
            "profiles" | "activeProfileIndex" => return Some(JsonKind::Speedscope),
            "$schema" if lexer.peek() == Some(b'"') => {
                if lexer.string().ok()?.contains("speedscope") {
                    return Some(JsonKind::Speedscope);
                }
                continue;
            }
            "meta" => is_gecko = firefox::is_raw(&mut lexer).ok()?,
            "threads" | "libs" if is_gecko => return Some(JsonKind::Gecko),
            "threads" | "libs" => return Some(JsonKind::Firefox),
            _ => lexer.skip_value().ok()?,
        }
    }
    None
}

//! Output formats: pure functions that turn a finished [`Profile`] into bytes.
//!
//! [`FORMATS`] is the only list of them: the command line, the help text and the error messages read it, so a new
//! format is one file and one row.

pub mod chrome;
pub mod collapsed;
pub mod cut;
pub mod diff_flamegraph;
pub mod firefox;
pub mod flamegraph;
pub mod html;
pub mod otlp;
pub mod perfetto;
pub mod pprof;
pub mod pstats;
pub mod select;
pub mod short_paths;
pub mod speedscope;
mod thread_tracks;

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use crate::escape;
use crate::json;
use crate::model::Profile;
use crate::views::ViewOptions;

/// One output format.
pub struct Format {
    /// Names for `--format`.
    pub name: &'static str,
    /// Endings of file names that mean this format, with their dot.
    pub extensions: &'static [&'static str],
    /// One line for the help text.
    pub help: &'static str,
    /// Who reads it, as it is.
    pub audience: Audience,
    /// Whether a terminal cannot show it.
    pub is_binary: bool,
    /// Whether it shows one value alone, or before the others, so that another one can be chosen ([`Format::with_value`]).
    pub opens_with_value: bool,
    /// Whether it has names only, so that functions can be split by line ([`select::by_line`]).
    pub has_names_only: bool,
    /// Whether nativeprof reads it again, so that nothing is to be left out of it.
    pub is_complete: bool,
    /// Writes the complete profile. The writer need not be buffered.
    pub write: fn(&Profile, &mut dyn Write) -> io::Result<()>,
}

/// The reader of a format, which decides what is left out of it by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Other programs, which get everything.
    Programs,
    /// People who look at a picture: it is without frames of the interpreter
    /// ([`without_interpreter_frames`](crate::folded::without_interpreter_frames)), and shows each idle pool as one
    /// frame ([`crate::idle`]), as well as tasks without names that run the same function ([`crate::task_groups`]).
    People,
    /// People who look at a page, which leaves frames of the interpreter out itself, and can show them.
    PeopleWithPage,
}

/// Every format there is.
pub const FORMATS: &[Format] = &[
    Format {
        name: "json",
        extensions: &[".json"],
        help: "the tree of Dask's distributed.profile, plus timeline and metadata",
        audience: Audience::Programs,
        is_binary: false,
        opens_with_value: false,
        has_names_only: false,
        is_complete: true,
        write: json::write,
    },
    Format {
        name: "json.gz",
        extensions: &[".json.gz"],
        help: "json, gzip-compressed",
        audience: Audience::Programs,
        is_binary: true,
        opens_with_value: false,
        has_names_only: false,
        is_complete: true,
        write: json::write_gz,
    },
    Format {
        name: "collapsed",
        extensions: &[".collapsed", ".folded", ".txt"],
        help: "one line per stack, for flame graph tools and speedscope",
        audience: Audience::Programs,
        is_binary: false,
        opens_with_value: true,
        has_names_only: true,
        is_complete: false,
        write: collapsed::write,
    },
    Format {
        name: "svg",
        extensions: &[".svg"],
        help: "interactive flame graph for a web browser",
        audience: Audience::People,
        is_binary: false,
        opens_with_value: true,
        has_names_only: true,
        is_complete: false,
        write: flamegraph::write,
    },
    Format {
        name: "html",
        extensions: &[".html", ".htm"],
        help: "HTML report in one file: flame graph, timeline, callers, source lines",
        audience: Audience::PeopleWithPage,
        is_binary: false,
        opens_with_value: true,
        has_names_only: false,
        is_complete: false,
        write: html::write,
    },
    Format {
        name: "speedscope",
        extensions: &[".speedscope.json", ".speedscope"],
        help: "for speedscope.app: all threads merged, and each alone",
        audience: Audience::Programs,
        is_binary: false,
        opens_with_value: true,
        has_names_only: false,
        is_complete: false,
        write: speedscope::write,
    },
    Format {
        name: "firefox",
        extensions: &[".firefox.json"],
        help: "for profiler.firefox.com: threads, times, lines, inlined functions",
        audience: Audience::Programs,
        is_binary: false,
        opens_with_value: true,
        has_names_only: false,
        is_complete: false,
        write: firefox::write,
    },
    Format {
        name: "pprof",
        extensions: &[".pb.gz", ".pprof"],
        help: "for `go tool pprof` and other readers of pprof protocol buffers",
        audience: Audience::Programs,
        is_binary: true,
        opens_with_value: false,
        has_names_only: false,
        is_complete: false,
        write: pprof::write,
    },
    Format {
        name: "otlp",
        extensions: &[".otlp", ".otlp.gz"],
        help: "for OpenTelemetry: OTLP profiles, gzip-compressed",
        audience: Audience::Programs,
        is_binary: true,
        opens_with_value: false,
        is_complete: true,
        has_names_only: false,
        write: otlp::write,
    },
    Format {
        name: "chrome",
        extensions: &[".trace.json", ".trace"],
        help: "trace events for Chrome DevTools, in chronological order",
        audience: Audience::Programs,
        is_binary: false,
        opens_with_value: true,
        has_names_only: false,
        is_complete: false,
        write: chrome::write,
    },
    Format {
        name: "perfetto",
        extensions: &[".pftrace", ".perfetto-trace"],
        help: "for ui.perfetto.dev: samples, tasks, thread states",
        audience: Audience::Programs,
        is_binary: true,
        opens_with_value: false,
        has_names_only: false,
        is_complete: false,
        write: perfetto::write,
    },
    Format {
        name: "pstats",
        extensions: &[".pstats", ".prof"],
        help: "for Python's pstats, snakeviz and gprof2dot: functions and callers",
        audience: Audience::Programs,
        is_binary: true,
        opens_with_value: false,
        has_names_only: false,
        is_complete: false,
        write: pstats::write,
    },
];

impl Format {
    /// Whether people read it as it is, so that it leaves out frames of the interpreter and folds idle pools and tasks without
    /// names unless they are wanted.
    pub fn is_for_people(&self) -> bool {
        self.audience != Audience::Programs
    }

    /// Whether it is a page with tables and source text.
    pub fn is_page(&self) -> bool {
        self.audience == Audience::PeopleWithPage
    }

    /// The profile with the value first that the format opens with: `value`, an index in [`Profile::value_types`], or
    /// [`Profile::default_value`].
    pub fn with_value<'a>(&self, profile: Cow<'a, Profile>, value: Option<usize>) -> Cow<'a, Profile> {
        match value.unwrap_or_else(|| profile.default_value()) {
            value if value > 0 && self.opens_with_value => Cow::Owned(select::by_value(profile.into_owned(), value)),
            _ => profile,
        }
    }

    /// Writes the profile as people see it by default.
    pub fn write_default(&self, profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
        let shown = self.with_value(Cow::Borrowed(profile), None);
        if !self.is_for_people() {
            return (self.write)(&shown, out);
        }
        let view = ViewOptions {
            interpreter_frames: self.is_page(),
            ..ViewOptions::default()
        };
        let shown = view.folded(shown.into_owned());
        if self.is_page() {
            let page = html::PageOptions {
                saved: Some(profile),
                ..html::PageOptions::default()
            };
            return html::write_page(&shown, &page, out);
        }
        (self.write)(&shown, out)
    }
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// No format has this name or file extension; the text lists the known ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFormat(String);

impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UnknownFormat {}

/// Names that other profilers have for these formats: py-spy, austin and flamegraph.pl.
const ALIASES: &[(&str, &str)] = &[
    ("raw", "collapsed"),
    ("folded", "collapsed"),
    ("flamegraph", "svg"),
    ("chrometrace", "chrome"),
];

/// The format of `--format NAME`, where NAME may be another profiler's.
pub fn by_name(name: &str) -> Result<&'static Format, UnknownFormat> {
    let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
    let name = alias.map_or(name, |(_, own)| own);
    FORMATS.iter().find(|format| format.name == name).ok_or_else(|| {
        let known: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
        UnknownFormat(format!(
            "unknown format `{}`; expected one of {}",
            escape::text(name),
            known.join(", ")
        ))
    })
}

/// The format of a file's extension; of several that match, the longest.
pub fn by_path(path: &Path) -> Result<&'static Format, UnknownFormat> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    let fitting = |format: &Format| {
        format
            .extensions
            .iter()
            .filter(|e| name.ends_with(**e))
            .map(|e| e.len())
            .max()
    };
    FORMATS
        .iter()
        .filter_map(|format| Some((fitting(format)?, format)))
        .max_by_key(|(length, _)| *length)
        .map(|(_, format)| format)
        .ok_or_else(|| {
            let known: Vec<String> = FORMATS
                .iter()
                .map(|format| format!("{} ({})", format.extensions.join(" "), format.name))
                .collect();
            UnknownFormat(format!(
                "cannot tell the format from the extension of `{}`; expected one of {}",
                escape::text(&name),
                known.join(", ")
            ))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_endings_lead_to_formats() {
        assert_eq!(by_name("json.gz").unwrap().name, "json.gz");
        for (path, name) in [
            ("a.json", "json"),
            ("/x.svg/a.JSON.GZ", "json.gz"),
            ("a.folded", "collapsed"),
            ("a.txt", "collapsed"),
            ("a.svg", "svg"),
            ("a.HTM", "html"),
            ("a.speedscope.json", "speedscope"),
            ("a.firefox.json", "firefox"),
            ("a.pb.gz", "pprof"),
            ("a.otlp", "otlp"),
            ("a.otlp.gz", "otlp"),
            ("a.trace.json", "chrome"),
            ("a.prof", "pstats"),
        ] {
            assert_eq!(by_path(Path::new(path)).unwrap().name, name, "{path}");
        }
    }

    #[test]
    fn errors_list_what_exists() {
        let error = by_name("xml\x1b[2J").unwrap_err().to_string();
        let known = FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
        assert_eq!(error, format!("unknown format `xml\\x1b[2J`; expected one of {known}"));
        let error = by_path(Path::new("a.gz")).unwrap_err().to_string();
        assert!(
            error.contains(".json.gz (json.gz), .collapsed .folded .txt (collapsed), .svg (svg)"),
            "{error}"
        );
        assert!(by_path(Path::new("/")).is_err());
    }
}

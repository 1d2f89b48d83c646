//! Where the profile goes, and in which format. A finished profile is never lost to a failed write.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::args::Shown;
use super::place::{self, PUBLIC, Place};
use crate::error::{Error, Kind, Result};
use crate::export::escape::line;
use crate::export::{self, Format, select};
use crate::process::credentials::Caps;
use crate::tree::profile::Profile;

/// A checked place and format.
#[derive(Debug)]
pub struct Output {
    /// `None`: standard output.
    place: Option<Place>,
    format: &'static Format,
    /// Name of the file, if it has to be made elsewhere.
    name: OsString,
    /// Value to show in place of the count.
    value: Option<String>,
    lines: bool,
}

impl Output {
    /// Decides place and format, and tries whether a file can be made there. Without a path it is `stem` with the ending
    /// of the format, which is a flame graph if nothing else is said.
    ///
    /// # Errors
    /// `Usage` for an unknown format; `Io` or `NotPermitted` for a place that cannot be written.
    pub fn new(path: Option<&Path>, format: Option<&str>, stem: &str) -> Result<Output> {
        let ending = format
            .and_then(|name| export::by_name(name).ok())
            .map_or(".svg", |f| f.extensions[0]);
        let default = PathBuf::from(format!("{stem}{ending}"));
        let path = path.unwrap_or(&default);
        // The second leads to the first, but as a link that cannot always be opened.
        let standard = [Path::new("-"), Path::new("/dev/stdout")].contains(&path);
        let unknown = |e: export::UnknownFormat| {
            let text = e.to_string();
            let (what, why) = text.rsplit_once("; ").unwrap_or((&text, ""));
            Error::new(Kind::Usage, what)
                .why(why)
                .hint("nativeprof record -f svg -o out.svg ...")
        };
        let format = match format {
            Some(name) => export::by_name(name).map_err(unknown)?,
            None if standard => export::by_name("collapsed").map_err(unknown)?,
            None => export::by_path(path).map_err(unknown)?,
        };
        let place = if standard {
            None
        } else {
            Some(Place::new(path, PUBLIC)?)
        };
        let named = if standard { &default } else { path };
        Ok(Output {
            place,
            format,
            name: named.file_name().unwrap_or("profile".as_ref()).to_os_string(),
            value: None,
            lines: false,
        })
    }

    /// The same, to be shown in another way.
    ///
    /// # Errors
    /// `Usage` if the format does not show profiles in this way.
    pub fn shown(self, shown: &Shown) -> Result<Output> {
        let refused = |word: &str, why: &str, hint: &str| {
            let what = format!("{word} means nothing for the format {}", self.format.name);
            Err(Error::new(Kind::Usage, what).why(why).hint(hint))
        };
        if shown.lines && !self.format.has_names_only() {
            return refused(
                "--lines",
                "it has the lines of all samples as they are",
                "leave --lines out, or -f svg",
            );
        }
        if shown.value.is_some() && !self.format.shows_one_value() {
            return refused(
                "--value",
                "it holds all values, or samples alone",
                "leave --value out, or -f svg",
            );
        }
        Ok(Output {
            value: shown.value.clone(),
            lines: shown.lines,
            ..self
        })
    }

    /// Whether the profile has the value that was chosen.
    ///
    /// # Errors
    /// `Data` if it does not.
    pub fn check(&self, profile: &Profile) -> Result<()> {
        match &self.value {
            Some(value) => value_of(profile, value, "the profile").map(|_| ()),
            None => Ok(()),
        }
    }

    /// Whether the format has a place for source lines.
    pub fn quotes_source(&self) -> bool {
        self.format.name == "html"
    }

    /// Capabilities without which the profile cannot be written.
    pub fn needs(&self) -> Caps {
        self.place.as_ref().map_or(Caps::NONE, Place::needs)
    }

    /// Writes the profile; says in words where it is now. A profile without the value that was chosen is written with its
    /// count: it may be the only copy.
    ///
    /// # Errors
    /// If neither the chosen place nor any folder that is tried instead can be written.
    pub fn write(&self, profile: &Profile) -> Result<String> {
        let mut profile = Cow::Borrowed(profile);
        if let Some(value) = &self.value {
            match value_of(&profile, value, "the profile") {
                Ok(index) => profile = Cow::Owned(select::by_value(&profile, index)),
                Err(e) => super::say(&format!("{}: {} are shown", e.what, profile.count_type().name)),
            }
        }
        if self.lines {
            profile = Cow::Owned(select::by_line(&profile));
        }
        let profile = &*profile;
        let (format, make) = (self.format.name, |out: &mut dyn Write| {
            (self.format.write)(profile, out)
        });
        let (shown, done) = match &self.place {
            Some(place) => (place.path().display().to_string(), place.write(&make)),
            None => {
                let mut out = BufWriter::new(io::stdout().lock());
                let done = make(&mut out).and_then(|()| out.flush());
                ("standard output".to_string(), done.map(|()| None))
            }
        };
        let why = match done {
            Ok(None) => return Ok(format!("{shown} ({format})")),
            Ok(Some(bytes)) => return Ok(format!("{shown} ({format}, {})", size(bytes))),
            // Whoever read it has had enough.
            Err(e) if self.place.is_none() && e.kind() == io::ErrorKind::BrokenPipe => {
                return Ok(format!("{shown} (closed early)"));
            }
            Err(why) => why,
        };
        match place::write_elsewhere(&self.name, &make) {
            Some((path, bytes)) => {
                let path = path.display();
                Ok(format!(
                    "{path} ({}), because writing to {shown} failed: {why}",
                    size(bytes)
                ))
            }
            None => Err(Error::io(format!("cannot write to {shown}"), why)
                .hint("make room; no other folder took the profile either")),
        }
    }
}

/// The index of a value of a profile by its name.
///
/// # Errors
/// `Data` if the profile, which goes by `name`, does not have it.
pub fn value_of(profile: &Profile, value: &str, name: &str) -> Result<usize> {
    profile.find_value(value).ok_or_else(|| {
        let known: Vec<String> = profile
            .value_types()
            .iter()
            .map(|value| line(&value.kind.name).into_owned())
            .collect();
        Error::new(Kind::Data, format!("{name} has no value `{}`", line(value)))
            .why(format!("it has {}", known.join(", ")))
            .hint(format!("--value {}", known[0]))
    })
}

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        10_000..10_000_000 => format!("{} KB", bytes / 1000),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

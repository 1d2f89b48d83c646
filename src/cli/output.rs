//! Where the profile goes, and in which format. A finished profile is never lost to a failed write.

use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::place::{self, PUBLIC, Place};
use crate::error::{Error, Kind, Result};
use crate::export::{self, Format};
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
        })
    }

    /// Whether the format has a place for source lines.
    pub fn quotes_source(&self) -> bool {
        self.format.name == "html"
    }

    /// Capabilities without which the profile cannot be written.
    pub fn needs(&self) -> Caps {
        self.place.as_ref().map_or(Caps::NONE, Place::needs)
    }

    /// Writes the profile; says in words where it is now.
    ///
    /// # Errors
    /// If neither the chosen place nor any folder that is tried instead can be written.
    pub fn write(&self, profile: &Profile) -> Result<String> {
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

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        10_000..10_000_000 => format!("{} KB", bytes / 1000),
        _ => format!("{} MB", bytes / 1_000_000),
    }
}

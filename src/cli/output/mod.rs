//! Output path and format of a profile. A finished profile is never lost to a failed write.

use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::OsString;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::args::{Browse, ViewArgs};
use super::input;
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::export::html::PageOptions;
use crate::export::{self, Format, html, select};
use crate::privileges::credentials::Caps;
use crate::profile::model::Profile;
use crate::profile::views::{self, NoSuchFunction, ViewOptions};
use crate::resolve::{assembly, source_lines};
use atomic_file::{OutputFile, PUBLIC};

pub mod atomic_file;
pub mod browser;
pub mod first_functions;
pub mod labels;
pub mod page;
pub mod row_filter;
pub mod style;
pub mod table;
pub mod table_rows;
pub mod time_range;

/// `version` of what `report`, `dump`, `diff` and `doctor` print with --json: it rises when a reader of older output would
/// misread newer one. docs/*.schema.json describe it.
pub const JSON_VERSION: u32 = 1;

/// A checked path and format.
#[derive(Debug)]
pub struct Output {
    /// `None`: standard output.
    file: Option<OutputFile>,
    format: &'static Format,
    /// Name of the file, if it has to be written elsewhere.
    name: OsString,
    /// Value to show instead of the profile's default.
    value: Option<String>,
    lines: bool,
    /// Leave the text of source files out.
    no_source: bool,
    view: ViewOptions,
    browser: Browse,
    /// Neither path nor format were given.
    is_default: bool,
    /// Whether the file has been written to its place.
    written: Cell<bool>,
}

impl Output {
    /// Chooses path and format, and checks that the file can be created. Without a path, and in a directory, its name is
    /// `stem` with the extension of the format, by default a page.
    ///
    /// # Errors
    /// `Usage` for an unknown format; `Io` or `NotPermitted` for a path that cannot be written.
    pub fn new(path: Option<&Path>, format: Option<&str>, stem: &str) -> Result<Output> {
        let is_default = path.is_none() && format.is_none();
        let ending = format
            .and_then(|name| export::by_name(name).ok())
            .map_or(".html", |f| f.extensions[0]);
        let default = PathBuf::from(format!("{stem}{ending}"));
        if let Some(path) = path.filter(|path| path.as_os_str().as_bytes().ends_with(b"/") && !path.exists()) {
            return Err(
                Error::new(ErrorKind::Usage, format!("directory {} does not exist", path.display()))
                    .why("a name that ends in / is that of a directory")
                    .hint(format!("mkdir -p {}, or omit the /", path.display())),
            );
        }
        let in_directory = path.filter(|path| path.is_dir()).map(|path| path.join(&default));
        let path = in_directory.as_deref().or(path).unwrap_or(&default);
        // /dev/stdout is a link that cannot always be opened.
        let standard = [Path::new("-"), Path::new("/dev/stdout")].contains(&path);
        let unknown = |e: export::UnknownFormat| {
            let text = e.to_string();
            let (what, why) = text.rsplit_once("; ").unwrap_or((&text, ""));
            Error::new(ErrorKind::Usage, what)
                .why(why)
                .hint("choose one with -f, as in -f svg -o out.svg")
        };
        let format = match format {
            Some(name) => export::by_name(name).map_err(unknown)?,
            None if standard => export::by_name("collapsed").map_err(unknown)?,
            None => export::by_path(path).map_err(unknown)?,
        };
        if standard && format.is_binary && io::stdout().is_terminal() {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{} is not written to a terminal", format.name),
            )
            .why("it is binary")
            .hint(format!("-o {stem}{}", format.extensions[0])));
        }
        let file = if standard {
            None
        } else {
            Some(OutputFile::new(path, PUBLIC)?)
        };
        let named = if standard { &default } else { path };
        Ok(Output {
            file,
            format,
            name: named.file_name().unwrap_or("profile".as_ref()).to_os_string(),
            value: None,
            lines: false,
            no_source: false,
            view: if format.is_for_people() {
                ViewOptions::default()
            } else {
                ViewOptions::all()
            },
            browser: Browse::Off,
            is_default,
            written: Cell::new(false),
        })
    }

    /// The same with other view options; formats for other programs keep the interpreter's frames unless `--fold` is given.
    ///
    /// # Errors
    /// `Usage` if the format does not support them.
    pub fn shown(self, shown: &ViewArgs, no_native: bool) -> Result<Output> {
        let refused = |word: &str, why: &str, hint: &str| {
            let what = format!("{word} has no effect on format {}", self.format.name);
            Err(Error::new(ErrorKind::Usage, what).why(why).hint(hint))
        };
        if shown.lines && !self.format.has_names_only {
            return refused(
                "--lines",
                "that format always has the lines of all samples",
                "omit --lines, or use -f svg",
            );
        }
        if shown.fold && self.format.is_complete {
            return refused(
                "--fold",
                "that format keeps everything, so that later commands can show it in any way",
                "omit --fold, or use -f speedscope",
            );
        }
        for (word, given, has) in [
            ("--idle", shown.frames.idle, "the stacks of idle threads in full"),
            ("--task-names", shown.frames.task_names, "the names of all tasks"),
        ] {
            if given && !self.format.is_for_people() {
                let (why, hint) = (
                    format!("that format always has {has}"),
                    format!("omit {word}, or use -f svg"),
                );
                return refused(word, &why, &hint);
            }
        }
        if shown.value.is_some() && !self.format.opens_with_value {
            return refused(
                "--value",
                "that format has all values, and none before the others",
                "omit --value, or use -f svg",
            );
        }
        Ok(Output {
            value: shown.value.clone(),
            lines: shown.lines,
            no_source: shown.no_source,
            view: ViewOptions {
                interpreter_frames: shown.frames.interpreter_frames || !self.format.is_for_people() && !shown.fold,
                idle: shown.frames.idle || !self.format.is_for_people(),
                task_names: shown.frames.task_names || !self.format.is_for_people(),
                ..shown.frames.view(no_native)
            },
            browser: shown.browser.when,
            ..self
        })
    }

    /// Whether the profile has the value and the function that were chosen.
    ///
    /// # Errors
    /// `Data` if it does not.
    pub fn check(&self, profile: &Profile) -> Result<()> {
        if let Some(value) = &self.value {
            value_of(profile, value, "the profile")?;
        }
        match &self.view.focus {
            Some(name) => views::focus(profile, name).map(drop).map_err(no_such_function),
            None => Ok(()),
        }
    }

    /// Opens what was written in a browser if that was requested; `by_default`: also on a desktop's terminal, if neither
    /// path nor format were given.
    pub fn browse(&self, by_default: bool) {
        let said = match &self.file {
            Some(file) if self.written.get() => browser::open(self.browser, file.path(), by_default && self.is_default),
            None if self.browser == Browse::On => Some(browser::NOT_STANDARD_OUTPUT.into()),
            _ => None,
        };
        if let Some(said) = said {
            super::print_status(&said);
        }
    }

    /// Whether source lines are wanted in addition to those that the profile has.
    pub fn quotes_source(&self) -> bool {
        self.format.is_page() && !self.no_source
    }

    /// Whether the profile is where it was to be written, for commands whose exit code says so.
    ///
    /// # Errors
    /// `Io` if it is elsewhere.
    pub fn check_written(&self) -> Result<()> {
        if self.written.get() {
            return Ok(());
        }
        let what = match &self.file {
            Some(file) => format!("{} was not written", file.path().display()),
            None => "standard output was not written".into(),
        };
        Err(Error::new(ErrorKind::Io, what)
            .why("the file system refused it, as said above")
            .hint("copy the profile from the file named above"))
    }

    /// Refuses an output that would replace an input.
    ///
    /// # Errors
    /// `Usage`, with the input's name.
    pub fn check_inputs(&self, files: &[PathBuf]) -> Result<()> {
        // A file that is not there yet has no canonical path.
        let replaced = self.file.as_ref().and_then(|file| file.path().canonicalize().ok());
        let is_replaced = |file: &&PathBuf| replaced.is_some() && replaced == file.canonicalize().ok();
        let Some(file) = files.iter().find(is_replaced) else {
            return Ok(());
        };
        let what = format!("{} is an input and the output", input::shown(file));
        Err(Error::new(ErrorKind::Usage, what)
            .why("it would be replaced")
            .hint("choose another file with -o FILE"))
    }

    /// Capabilities without which the profile cannot be written.
    pub fn needs(&self) -> Caps {
        self.file.as_ref().map_or(Caps::NONE, OutputFile::needs)
    }

    /// Writes the profile; returns a text with the path. A profile without the chosen value is written with its default:
    /// it may be the only copy.
    ///
    /// # Errors
    /// If neither the path nor any fallback directory can be written.
    pub fn write(&self, profile: &Profile) -> Result<String> {
        let is_page = self.format.is_page();
        // A page also has the profile as other formats have it, with idle threads in full and its values in their order.
        let complete = ViewOptions {
            idle: true,
            task_names: true,
            interpreter_frames: true,
            ..self.view.clone()
        };
        let saved = is_page.then(|| self.viewed(Cow::Borrowed(profile), &complete).0);
        let (value, refused) = self.chosen_value(profile);
        // The page folds interpreter frames itself, so that its button can show them.
        let view = ViewOptions {
            interpreter_frames: self.view.interpreter_frames || is_page,
            ..self.view.clone()
        };
        let (mut profile, said) = self.viewed(self.format.with_value(Cow::Borrowed(profile), value), &view);
        for said in refused.into_iter().chain(said) {
            super::print_status(&said);
        }
        if is_page {
            assembly::add(profile.to_mut(), &mut assembly::open_local);
        }
        let profile = &*profile;
        let page = PageOptions {
            interpreter_frames: self.view.interpreter_frames,
            no_source: self.no_source,
            saved: saved.as_deref(),
        };
        let (format, make) = (self.format.name, |out: &mut dyn Write| {
            if is_page {
                html::write_page(profile, &page, out)
            } else {
                (self.format.write)(profile, out)
            }
        });
        let (shown, done) = match &self.file {
            Some(file) => (file.path().display().to_string(), file.write(&make)),
            None => {
                let mut out = BufWriter::new(io::stdout().lock());
                let done = make(&mut out).and_then(|()| out.flush());
                ("standard output".to_string(), done.map(|()| None))
            }
        };
        let closed_early = |e: &io::Error| self.file.is_none() && e.kind() == io::ErrorKind::BrokenPipe;
        self.written.set(done.as_ref().map_or_else(closed_early, |_| true));
        let why = match done {
            Ok(None) => return Ok(format!("{shown} ({format})")),
            Ok(Some(bytes)) => return Ok(format!("{shown} ({format}, {})", size(bytes))),
            // The reader closed the pipe.
            Err(e) if closed_early(&e) => {
                return Ok(format!("{shown} (closed early)"));
            }
            Err(why) => why,
        };
        match atomic_file::write_elsewhere(&self.name, &make) {
            Some((path, bytes)) => {
                let path = path.display();
                Ok(format!(
                    "{path} ({}), because {shown} could not be written: {why}",
                    size(bytes)
                ))
            }
            None => Err(Error::io(format!("cannot write to {shown}"), why)
                .hint("free some disk space; the fallback directories failed too")),
        }
    }

    /// The value that was chosen, if the profile has it; else what to say.
    fn chosen_value(&self, profile: &Profile) -> (Option<usize>, Option<String>) {
        match self.value.as_ref().map(|value| value_of(profile, value, "the profile")) {
            None => (None, None),
            Some(Ok(value)) => (Some(value), None),
            Some(Err(e)) => {
                let shown = &profile.value_types()[profile.default_value()].kind;
                (None, Some(format!("{}; showing {}", e.what, line(&shown.name))))
            }
        }
    }

    /// The profile as it was requested, and what to say if a part of that was not possible.
    fn viewed<'a>(&self, mut profile: Cow<'a, Profile>, view: &ViewOptions) -> (Cow<'a, Profile>, Option<String>) {
        let mut said = None;
        if *view != ViewOptions::all() {
            match view.apply(profile.clone().into_owned()) {
                Ok(viewed) => profile = Cow::Owned(viewed),
                Err(e) => said = Some(format!("{}; showing all stacks", no_such_function(e).what)),
            }
        }
        if self.lines {
            profile = Cow::Owned(select::by_line(&profile));
        }
        if self.no_source {
            source_lines::remove(profile.to_mut());
        }
        (profile, said)
    }
}

/// What to say where a view has no function to focus on.
pub fn no_such_function(e: NoSuchFunction) -> Error {
    let error = Error::new(
        ErrorKind::Data,
        format!("no function with samples is called `{}`", line(&e.name)),
    );
    let similar: Vec<_> = e.similar.iter().map(|name| line(name).into_owned()).collect();
    match similar.first() {
        Some(first) => error
            .why(format!("names that contain it: {}", similar.join(", ")))
            .hint(format!("--focus {first}")),
        None => error
            .why("no name of a function contains it either")
            .hint("list functions with `nativeprof report FILE --by function`"),
    }
}

/// The index of a value of a profile by its name.
///
/// # Errors
/// `Data` if the profile, called `name` in the error, does not have it.
pub fn value_of(profile: &Profile, value: &str, name: &str) -> Result<usize> {
    profile.find_value(value).ok_or_else(|| {
        let known: Vec<String> = profile
            .value_types()
            .iter()
            .map(|value| line(&value.kind.name).into_owned())
            .collect();
        Error::new(ErrorKind::Data, format!("{name} has no value `{}`", line(value)))
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

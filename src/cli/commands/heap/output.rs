//! Where a census is written, and as what.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Report, json, saved, text};
use crate::cli::args::{ColorWhen, Export, HeapFormat};
use crate::cli::input;
use crate::cli::output::atomic_file::{OutputFile, PRIVATE};
use crate::cli::output::style::TerminalStyle;
use crate::cli::output::table;
use crate::cli::print_status;
use crate::error::{Error, ErrorKind, Result};
use crate::export::html;
use crate::privileges::credentials::Caps;
use crate::privileges::phases;

/// A checked place for a census.
pub struct CensusOutput {
    pub format: HeapFormat,
    /// `None`: standard output.
    file: Option<OutputFile>,
}

impl CensusOutput {
    /// Checks that the output can be written. Without a format, it is that of the file's extension, or text.
    ///
    /// # Errors
    /// `Usage` if the extension names no format, or for a page on a terminal; `Io`, `NotPermitted`.
    pub fn new(path: Option<&Path>, format: Option<HeapFormat>) -> Result<CensusOutput> {
        let path = path.filter(|path| !input::is_standard(path));
        let format = match (format, path) {
            (Some(format), _) => format,
            (None, None) => HeapFormat::Text,
            (None, Some(path)) => by_extension(path)?,
        };
        if format == HeapFormat::Html && path.is_none() && io::stdout().is_terminal() {
            return Err(Error::new(ErrorKind::Usage, "a page is not written to a terminal")
                .why("it is for a browser")
                .hint("-o heap.html"));
        }
        Ok(CensusOutput {
            format,
            // Values of --sample may be in it.
            file: path.map(|path| OutputFile::new(path, PRIVATE)).transpose()?,
        })
    }

    /// Capabilities that are needed to write it.
    pub fn needs(&self) -> Caps {
        self.file.as_ref().map_or(Caps::NONE, OutputFile::needs)
    }

    /// Drops what is not needed to write it.
    ///
    /// # Errors
    /// As [`phases::drop_all`].
    pub fn drop_privileges(&self) -> Result<()> {
        match self.needs() {
            Caps::NONE => phases::drop_all(),
            needs => phases::drop_for_symbolization(needs),
        }
    }

    /// Writes a census, and says where.
    pub fn write(&self, report: &Report) -> Result<()> {
        match self.format {
            HeapFormat::Html => self.write_page(&json::json(report)),
            HeapFormat::Json => self.write_text(&format!("{:#}\n", json::json(report))),
            HeapFormat::Text => {
                let color = if self.file.is_some() {
                    ColorWhen::Never
                } else {
                    ColorWhen::Auto
                };
                self.write_text(&text::text(report, &TerminalStyle::of_stdout(color)))
            }
        }
    }

    fn write_page(&self, census: &Value) -> Result<()> {
        let json = census.to_string();
        self.write_with(&|out: &mut dyn Write| html::write_census(json.as_bytes(), out))
    }

    fn write_text(&self, text: &str) -> Result<()> {
        match &self.file {
            None => table::print(text).map_err(|e| Error::io("cannot write to standard output", e)),
            Some(_) => self.write_with(&|out: &mut dyn Write| out.write_all(text.as_bytes())),
        }
    }

    fn write_with(&self, write: &dyn Fn(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let Some(file) = &self.file else {
            return match write(&mut io::stdout().lock()) {
                // The reader closed the pipe.
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                done => done.map_err(|e| Error::io("cannot write to standard output", e)),
            };
        };
        let path = file.path().display();
        file.write(write)
            .map_err(|e| Error::io(format!("cannot write to {path}"), e).hint("free some disk space"))?;
        print_status(&format!("written: {path}"));
        Ok(())
    }
}

fn by_extension(path: &Path) -> Result<HeapFormat> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("html" | "htm") => Ok(HeapFormat::Html),
        Some("json") => Ok(HeapFormat::Json),
        Some("txt") => Ok(HeapFormat::Text),
        _ => Err(Error::new(
            ErrorKind::Usage,
            format!("{} has no extension of a format", path.display()),
        )
        .why("supported extensions: .html, .json, .txt")
        .hint("choose the format with -f, as in -f html")),
    }
}

/// Exports a census that was saved as JSON, as a page. `None`: the file is none.
pub fn export(options: &Export) -> Option<Result<()>> {
    saved::open(&options.file).map(|file| {
        let path = page_path(options)?;
        let output = CensusOutput::new(Some(&path), Some(HeapFormat::Html))?;
        output.drop_privileges()?;
        output.write_page(&saved::read(&options.file, file)?)
    })
}

/// Where the page of a saved census is written.
///
/// # Errors
/// `Usage` if something else than a page is wanted, or it would replace the census.
fn page_path(options: &Export) -> Result<PathBuf> {
    let name = format!("{}.html", options.file.file_stem().unwrap_or_default().display());
    let path = match &options.output {
        Some(path) if path.is_dir() => path.join(name),
        Some(path) => path.clone(),
        None => name.into(),
    };
    let is_page = match &options.format {
        Some(format) => format == "html",
        None => input::is_standard(&path) || by_extension(&path).is_ok_and(|format| format == HeapFormat::Html),
    };
    let is_input = path
        .canonicalize()
        .is_ok_and(|path| options.file.canonicalize().is_ok_and(|file| file == path));
    if is_input {
        let what = format!("{} is the input and the output", input::shown(&path));
        return Err(Error::new(ErrorKind::Usage, what)
            .why("it would be replaced")
            .hint("choose another file with -o FILE"));
    }
    if is_page {
        return Ok(path);
    }
    Err(
        Error::new(ErrorKind::Usage, "a census of memory is exported as a page only")
            .why("other formats have stacks, of which it has none")
            .hint("nativeprof export heap.json -f html -o heap.html"),
    )
}

//! `export`: a saved profile in another format, or the page of a census.

use std::path::Path;

use crate::cli::args::Export;
use crate::cli::commands::heap;
use crate::cli::history;
use crate::cli::input;
use crate::cli::output::{Output, labels};
use crate::error::Result;
use crate::privileges::phases;
use crate::resolve::source_lines;

/// Reads a profile and writes it again.
pub fn export(options: &Export) -> Result<()> {
    phases::switch_to_invoking_user()?;
    if let Some(done) = heap::export(options) {
        return done;
    }
    let output = Output::new(
        options.output.as_deref(),
        options.format.as_deref(),
        &stem(&options.file),
    )?
    .shown(&options.shown, options.no_native)?;
    output.check_inputs(std::slice::from_ref(&options.file))?;
    let mut profile = history::profile(&options.file, options.range, &options.history, output.needs())?;
    profile = labels::select(profile, &options.labels, &options.file)?;
    output.check(&profile)?;
    if output.quotes_source() {
        source_lines::add(&mut profile, &mut source_lines::open_local);
    }
    crate::cli::print_status(&format!("written: {}", output.write(&profile)?));
    output.browse(false);
    output.check_written()
}

/// Name of the file without the extension of its format; the complete name if nothing else would be left.
fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let bare = name.strip_suffix(".gz").unwrap_or(&name);
    match bare.rsplit_once('.') {
        _ if input::is_standard(path) => "nativeprof".into(),
        Some((stem, _)) if !stem.is_empty() => stem.into(),
        _ => bare.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_new_files() {
        for (path, expected) in [
            ("/data/run.1.json.gz", "run.1"),
            ("out.json", "out"),
            ("out", "out"),
            (".json", ".json"),
            ("-", "nativeprof"),
        ] {
            assert_eq!(stem(Path::new(path)), expected);
        }
    }
}

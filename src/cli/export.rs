//! `export`: a saved profile in another format.

use std::path::Path;

use super::args::Export;
use super::open;
use super::output::Output;
use crate::error::Result;
use crate::process::privilege;
use crate::resolve::sources;

/// Reads a profile and writes it again.
pub fn export(options: &Export) -> Result<()> {
    privilege::become_caller()?;
    let output = Output::new(
        options.output.as_deref(),
        options.format.as_deref(),
        &stem(&options.file),
    )?
    .shown(&options.shown)?;
    let mut profile = open::profile(&options.file, output.needs())?;
    output.check(&profile)?;
    if output.quotes_source() {
        sources::add(&mut profile, &mut sources::open_here);
    }
    super::say(&format!("written: {}", output.write(&profile)?));
    Ok(())
}

/// Name of the file without what tells its format; where only an ending would be left, all of it.
fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let bare = name.strip_suffix(".gz").unwrap_or(&name);
    match bare.rsplit_once('.') {
        _ if open::is_standard(path) => "nativeprof".into(),
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

//! A self-contained HTML report of a profile.
//!
//! The page is plain HTML, CSS and JavaScript from the files in this directory, and the profile as packed by
//! `data`. Names come from the target and are not trusted: they are in base64, enter the document as text only, and the
//! content security policy allows only the script and the style with the listed hashes.
//!
//! The page has shortened names and microseconds, and may show a view of the profile. So that no data is lost, the complete
//! profile is embedded, too, as `json.gz` in base64, after the script: browsers skip it. [`saved`] finds it.

mod census;
mod comparison;
mod data;
mod lags;
mod waits;

pub use census::write_census;
pub use comparison::Comparison;

use std::io::{self, Write};

use base64::prelude::{BASE64_STANDARD, Engine};
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

use crate::json;
use crate::model::Profile;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = concat!(include_str!("base.css"), include_str!("page.css"));

/// In the order of their definitions; a function around them keeps their names private.
const SCRIPTS: &[&str] = &[
    include_str!("text.js"),
    include_str!("unpack.js"),
    include_str!("tooltip.js"),
    include_str!("data.js"),
    include_str!("tree.js"),
    include_str!("workers.js"),
    include_str!("model.js"),
    include_str!("draw.js"),
    include_str!("boxes.js"),
    include_str!("chart.js"),
    include_str!("timeline.js"),
    include_str!("memory.js"),
    include_str!("rows.js"),
    include_str!("comparison.js"),
    include_str!("source.js"),
    include_str!("waits.js"),
    include_str!("lag.js"),
    include_str!("details.js"),
    include_str!("filters.js"),
    include_str!("theme.js"),
    include_str!("toolbar.js"),
    include_str!("page.js"),
];

/// A tenth smaller than the fastest one, in twice its time; higher levels take longer than all else.
const COMPRESSION: Compression = Compression::new(4);

/// Begins the element with the profile to be read again.
const SAVED: &str = "<script type=\"application/gzip\" id=\"saved\">";

/// How a page begins, and what it says of its data.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageOptions<'a> {
    /// It begins with the interpreter's frames.
    pub interpreter_frames: bool,
    /// Its source text was removed on request: it says so.
    pub no_source: bool,
    /// The profile that readers of the page get, if the page shows only a part of it; `None`: the one that is shown.
    pub saved: Option<&'a Profile>,
}

/// Writes the profile as a page, which leaves out the interpreter's frames until they are requested.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    write_page(profile, &PageOptions::default(), out)
}

/// The same with other options.
pub fn write_page(profile: &Profile, options: &PageOptions<'_>, out: &mut dyn Write) -> io::Result<()> {
    let mut saved = GzEncoder::new(Vec::new(), COMPRESSION);
    json::write(options.saved.unwrap_or(profile), &mut saved)?;
    write_packed(&data::pack(profile, options, None)?, &saved.finish()?, out)
}

/// Writes a comparison as a page; `no_source`: its source text was removed on request.
pub fn write_comparison(comparison: &Comparison<'_>, no_source: bool, out: &mut dyn Write) -> io::Result<()> {
    let options = PageOptions {
        // Its profiles are without frames of the interpreter already, or are to be shown with them.
        interpreter_frames: true,
        no_source,
        saved: None,
    };
    write_packed(&data::pack(comparison.both, &options, Some(comparison))?, &[], out)
}

/// Whether a file is a page of ours, of any version.
pub fn is_page(bytes: &[u8]) -> bool {
    find(bytes, b"<script type=\"application/octet-stream\" id=\"profile\">").is_some()
}

/// What is embedded in a page to be read again: a profile in base64 of `json.gz`. It is empty in comparisons, and `None` in pages
/// of earlier versions and incomplete ones.
pub fn saved(page: &[u8]) -> Option<&[u8]> {
    let rest = page.get(find(page, SAVED.as_bytes())? + SAVED.len()..)?;
    rest.get(..find(rest, b"</script>")?)
}

/// Where a text begins.
fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text)
}

fn write_packed(packed: &[u8], saved: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let (packed, saved) = (BASE64_STANDARD.encode(packed), BASE64_STANDARD.encode(saved));
    let document = Document {
        template: PAGE,
        style: STYLE,
        scripts: SCRIPTS,
    };
    document.write(&packed, &[("{saved}", &saved)], out)
}

/// A page without its data.
struct Document<'a> {
    template: &'a str,
    style: &'a str,
    scripts: &'a [&'a str],
}

impl Document<'_> {
    /// Writes it with its data, which are base64, and what else comes after them in the template.
    fn write(&self, data: &str, others: &[(&str, &str)], out: &mut dyn Write) -> io::Result<()> {
        let script = format!("(() => {{\n\"use strict\";\n{}}})();\n", self.scripts.concat());
        let policy = format!(
            "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'; \
             require-trusted-types-for 'script'; trusted-types 'none'",
            source_of(&script),
            source_of(self.style)
        );
        let places = [
            ("{policy}", policy.as_str()),
            ("{style}", self.style),
            ("{profile}", data),
            ("{script}", &script),
        ];
        let mut rest = self.template;
        for (place, text) in places.iter().chain(others) {
            let (before, after) = rest.split_once(place).unwrap_or((rest, ""));
            out.write_all(before.as_bytes())?;
            out.write_all(text.as_bytes())?;
            rest = after;
        }
        out.write_all(rest.as_bytes())?;
        out.flush()
    }
}

/// The source expression of this text in a content security policy.
fn source_of(text: &str) -> String {
    format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_page_are_whole() {
        let mut out = Vec::new();
        write(&Profile::default(), &mut out).unwrap();
        let page = String::from_utf8(out).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        for place in ["{policy}", "{style}", "{profile}", "{script}", "{saved}", SAVED] {
            assert_eq!(PAGE.matches(place).count(), 1, "{place}");
        }
        assert_eq!(
            page.matches("</script>").count(),
            3,
            "nothing ends a script element early"
        );
        assert_eq!(page.matches("<!--").count(), 0);
        assert!(
            !page.contains("http://") && !page.contains("https://"),
            "the page speaks of no network"
        );
    }
}

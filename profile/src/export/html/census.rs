//! The page of a census of memory: a treemap of the parts of resident memory, with the types of objects in them.
//!
//! Its data are the census as `nativeprof heap --format json` writes it. Names come from the target, and are treated as on
//! the page of a profile.

use std::io::{self, Write};

use base64::prelude::{BASE64_STANDARD, Engine};
use flate2::write::ZlibEncoder;

use super::{COMPRESSION, Document};

const PAGE: Document<'_> = Document {
    template: include_str!("census.html"),
    style: concat!(include_str!("base.css"), include_str!("census.css")),
    scripts: &[
        include_str!("text.js"),
        include_str!("unpack.js"),
        include_str!("tooltip.js"),
        include_str!("theme.js"),
        include_str!("treemap.js"),
        include_str!("census.js"),
    ],
};

/// Writes the page of a census, which is JSON.
pub fn write_census(json: &[u8], out: &mut dyn Write) -> io::Result<()> {
    let mut packed = ZlibEncoder::new(Vec::new(), COMPRESSION);
    packed.write_all(json)?;
    PAGE.write(&BASE64_STANDARD.encode(packed.finish()?), &[], out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_page_are_whole() {
        let mut out = Vec::new();
        write_census(b"{\"command\":\"</script><script>alert(1)</script>\"}", &mut out)
            .expect("a vector can be written");
        let page = String::from_utf8(out).expect("text");
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        for place in ["{policy}", "{style}", "{profile}", "{script}"] {
            assert_eq!(PAGE.template.matches(place).count(), 1, "{place}");
        }
        assert_eq!(
            page.matches("</script>").count(),
            2,
            "nothing ends a script element early"
        );
        assert!(
            !page.contains("http://") && !page.contains("https://"),
            "the page speaks of no network"
        );
    }
}

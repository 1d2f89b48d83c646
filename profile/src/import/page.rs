//! A page of ours, which has the complete profile embedded: see [`crate::export::html`].

use std::io::Read;

use base64::prelude::{BASE64_STANDARD, Engine};
use flate2::read::GzDecoder;

use super::Damage;
use crate::export::html;
use crate::json;
use crate::model::Profile;

/// Maximum size of the embedded profile, decompressed.
const MAX_BYTES: u64 = 2 << 30;

/// Whether it is a page of ours, of any version.
pub fn is(bytes: &[u8]) -> bool {
    let start = bytes.trim_ascii_start();
    start.first() == Some(&b'<') && html::is_page(bytes)
}

/// Reads what is embedded.
///
/// # Errors
/// Nothing is, or it is damaged.
pub fn read(bytes: &[u8]) -> Result<Profile, Damage> {
    let packed = match html::saved(bytes) {
        None => {
            return Err(Damage::whole(
                "it is incomplete, or of an earlier version, whose pages only a browser can read",
            ));
        }
        Some(b"") => return Err(Damage::whole("it compares two profiles; read these instead")),
        Some(packed) => packed,
    };
    let embedded = |reason: String| Damage::new("the embedded profile", reason);
    let packed = BASE64_STANDARD.decode(packed).map_err(|e| embedded(e.to_string()))?;
    let mut json = Vec::new();
    GzDecoder::new(&packed[..])
        .take(MAX_BYTES + 1)
        .read_to_end(&mut json)
        .map_err(|e| embedded(e.to_string()))?;
    if json.len() as u64 > MAX_BYTES {
        return Err(embedded(format!("it is larger than {} GiB", MAX_BYTES >> 30)));
    }
    json::read(&json).map_err(|e| embedded(format!("{} at byte {}", e.reason, e.at)))
}

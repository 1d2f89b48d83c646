//! Messages for the push service of Pyroscope: pprof, with labels.
//!
//! Source: `push/v1/push.proto` and `types/v1/types.proto` of Grafana Pyroscope 1.14.

use prost::Message;
use sha2::{Digest, Sha256};

use super::cursor::Position;
use crate::export;
use crate::profile::import;
use crate::profile::otlp_parts::OtlpPart;

/// Namespaces of attributes that become labels. Each other value would make a series of its own.
const LABELS: &[&str] = &["service.", "host.", "container.", "k8s."];
/// Bytes of a label's value (`validation.max-label-value-length` of Pyroscope).
const MAX_VALUE: usize = 2048;

/// `PushRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct PushRequest {
    #[prost(message, repeated, tag = "1")]
    pub series: Vec<Series>,
}

/// `RawProfileSeries`.
#[derive(Clone, PartialEq, Message)]
pub struct Series {
    #[prost(message, repeated, tag = "1")]
    pub labels: Vec<Label>,
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<RawSample>,
}

/// `LabelPair`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Message)]
pub struct Label {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `RawSample`: a whole profile.
#[derive(Clone, PartialEq, Message)]
pub struct RawSample {
    /// pprof, gzip.
    #[prost(bytes = "vec", tag = "1")]
    pub raw_profile: Vec<u8>,
    #[prost(string, tag = "2")]
    pub id: String,
}

/// The message for a part with one resource.
///
/// # Errors
/// What is wrong with the part.
pub fn message(part: &OtlpPart, position: Position) -> Result<Vec<u8>, String> {
    let profile = import::read(&part.message).map_err(|e| e.to_string())?;
    let pprof = export::by_name("pprof").map_err(|e| e.to_string())?;
    let mut raw_profile = Vec::new();
    pprof
        .write_default(&profile, &mut raw_profile)
        .map_err(|e| e.to_string())?;
    let is_cpu = profile.value_types().iter().any(|value| value.kind.name == "cpu");
    let name = match profile.value_types().last() {
        Some(value) if !is_cpu => label_name(&value.kind.name),
        // As other profilers name it; the sample types of the profile make it several.
        _ => "process_cpu".into(),
    };
    // The same again if the answer to it was not seen.
    let digest = Sha256::new()
        .chain_update(&part.message)
        .chain_update(position.sequence.to_le_bytes())
        .chain_update(position.samples.to_le_bytes())
        .finalize();
    let request = PushRequest {
        series: vec![Series {
            labels: labels(&part.resource, name),
            samples: vec![RawSample {
                raw_profile,
                id: uuid(&digest),
            }],
        }],
    };
    Ok(request.encode_to_vec())
}

/// Labels, sorted by name: those of the resource whose attributes Pyroscope itself makes labels of, by the same names.
fn labels(resource: &[(String, String)], profile_name: String) -> Vec<Label> {
    let label = |name: &str, value: &str| Label {
        name: name.into(),
        value: shortened(value).into(),
    };
    let mut labels = vec![label("__name__", &profile_name)];
    for (key, value) in resource {
        if LABELS.iter().any(|namespace| key.starts_with(namespace)) && !value.is_empty() {
            labels.push(label(&label_name(key), value));
        }
    }
    if !labels.iter().any(|label| label.name == "service_name") {
        labels.push(label("service_name", "unknown_service"));
    }
    labels.sort();
    labels.dedup_by(|second, first| first.name == second.name);
    labels
}

/// A name with what labels may have: letters, digits and underscores.
fn label_name(key: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    key.chars().map(plain).collect()
}

fn shortened(value: &str) -> &str {
    let end = (0..=MAX_VALUE.min(value.len()))
        .rev()
        .find(|end| value.is_char_boundary(*end));
    &value[..end.unwrap_or(0)]
}

/// 16 of these bytes in the form of a UUID (RFC 9562, version 8).
fn uuid(digest: &[u8]) -> String {
    let mut hex = String::new();
    for (at, byte) in digest.iter().take(16).enumerate() {
        let byte = match at {
            6 => byte & 0x0f | 0x80,
            8 => byte & 0x3f | 0x80,
            _ => *byte,
        };
        if [4, 6, 8, 10].contains(&at) {
            hex.push('-');
        }
        hex.push_str(&format!("{byte:02x}"));
    }
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_few_and_valid() {
        let rows = [
            ("k8s.pod.name", "web-1"),
            ("service.name", "shop \"1\""),
            ("process.command", "secret"),
            ("host.name", ""),
            ("container.id", "ä"),
        ];
        let mut resource = rows.map(|(key, value)| (key.to_string(), value.to_string()));
        resource[4].1 = "ä".repeat(2000);
        let found = labels(&resource, "process_cpu".into());
        let names: Vec<&str> = found.iter().map(|label| label.name.as_str()).collect();
        assert_eq!(names, ["__name__", "container_id", "k8s_pod_name", "service_name"]);
        assert_eq!(found[1].value.len(), MAX_VALUE);
        assert_eq!(labels(&[], "x".into())[1].value, "unknown_service");
    }

    #[test]
    fn identifiers_have_the_form_of_uuids() {
        assert_eq!(uuid(&[0xff; 32]), "ffffffff-ffff-8fff-bfff-ffffffffffff");
    }
}

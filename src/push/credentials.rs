//! Headers, tokens and certificates. They come from files and from the environment, not from arguments, which every user sees.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};

/// Bytes that are read of a file.
const MAX_FILE: u64 = 1 << 20;
/// Headers that describe the message.
const OURS: &[&str] = &[
    "content-type",
    "content-encoding",
    "content-length",
    "host",
    "transfer-encoding",
    "connection",
];

/// Files that credentials are read from, each time they are needed.
#[derive(Clone, Debug, Default)]
pub struct CredentialFiles {
    /// Lines `name: value`.
    pub headers: Option<PathBuf>,
    /// A bearer token.
    pub token: Option<PathBuf>,
    /// PEM: certificates that the receiver's one is signed by, instead of the well-known ones.
    pub ca: Option<PathBuf>,
    /// PEM: our certificate, and those between it and its root.
    pub certificate: Option<PathBuf>,
    /// PEM: its key.
    pub key: Option<PathBuf>,
    /// Headers of the environment, `name=value,name=value`, percent-encoded.
    pub variable: Option<String>,
}

/// What is sent with every message, and used for connections.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Names are lower-case; each is there once.
    pub headers: Vec<(String, String)>,
    pub ca: Option<Vec<u8>>,
    /// Certificates and key.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
}

impl CredentialFiles {
    /// Adds what the variables of OpenTelemetry name and options do not: `variable` has the value of one without
    /// `OTEL_EXPORTER_OTLP_`. Those for profiles come first.
    pub fn or_of_environment(mut self, variable: &dyn Fn(&str) -> Option<String>) -> CredentialFiles {
        let of = |name: &str| variable(&format!("PROFILES_{name}")).or_else(|| variable(name));
        self.ca = self.ca.or_else(|| of("CERTIFICATE").map(PathBuf::from));
        if self.certificate.is_none() && self.key.is_none() {
            self.certificate = of("CLIENT_CERTIFICATE").map(PathBuf::from);
            self.key = of("CLIENT_KEY").map(PathBuf::from);
        }
        self.variable = of("HEADERS");
        self
    }

    /// Reads the files.
    ///
    /// # Errors
    /// One cannot be read or is malformed. No error quotes what is in a file.
    pub fn read(&self) -> Result<Credentials> {
        let mut headers = Vec::new();
        if let Some(text) = &self.variable {
            for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
                let header = pair
                    .split_once('=')
                    .and_then(|(name, value)| Some((name, decoded(value.trim())?)));
                let (name, value) =
                    header.ok_or_else(|| malformed("OTEL_EXPORTER_OTLP_HEADERS", "name=value,name=value"))?;
                add(&mut headers, "OTEL_EXPORTER_OTLP_HEADERS", name, &value)?;
            }
        }
        if let Some(path) = &self.headers {
            for line in text_of(path)?.lines() {
                if line.trim().is_empty() || line.starts_with('#') {
                    continue;
                }
                let source = path.display().to_string();
                let (name, value) = line
                    .split_once(':')
                    .ok_or_else(|| malformed(&source, "lines `name: value`"))?;
                add(&mut headers, &source, name, value)?;
            }
        }
        if let Some(path) = &self.token {
            let token = text_of(path)?;
            add(
                &mut headers,
                &path.display().to_string(),
                "authorization",
                &format!("Bearer {}", token.trim()),
            )?;
        }
        let client = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Some((bytes_of(certificate)?, bytes_of(key)?)),
            (None, None) => None,
            _ => {
                return Err(Error::new(
                    ErrorKind::Usage,
                    "a client certificate needs its key, and a key its certificate",
                )
                .hint("give both: --certificate FILE --key FILE"));
            }
        };
        Ok(Credentials {
            headers,
            ca: self.ca.as_deref().map(bytes_of).transpose()?,
            client,
        })
    }
}

/// Adds a header, which replaces one of the same name.
fn add(headers: &mut Vec<(String, String)>, source: &str, name: &str, value: &str) -> Result<()> {
    let (name, value) = (name.trim().to_ascii_lowercase(), value.trim_matches([' ', '\t']));
    // RFC 9110, 5.1 and 5.5.
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let is_value = |byte: u8| byte == b'\t' || (b' '..=b'~').contains(&byte);
    if name.is_empty() || !name.bytes().all(is_token) || !value.bytes().all(is_value) {
        return Err(malformed(
            source,
            "headers of HTTP: names without spaces, values in ASCII",
        ));
    }
    if OURS.contains(&name.as_str()) {
        return Err(Error::new(ErrorKind::Usage, format!("{source} sets the header {name}"))
            .why("nativeprof sets it, as it is for the message")
            .hint("remove that header"));
    }
    headers.retain(|(known, _)| *known != name);
    headers.push((name, value.into()));
    Ok(())
}

fn malformed(source: &str, expected: &str) -> Error {
    Error::new(ErrorKind::Data, format!("cannot read the headers of {source}")).why(format!("expected {expected}"))
}

/// A value with `%XX` decoded; `None` if it is malformed.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (hex, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes));
    read.map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
    Ok(bytes)
}

fn text_of(path: &Path) -> Result<String> {
    let not_text = |_| malformed(&path.display().to_string(), "UTF-8");
    String::from_utf8(bytes_of(path)?).map_err(not_text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_variable(text: &str) -> Option<Vec<(String, String)>> {
        let files = CredentialFiles {
            variable: Some(text.into()),
            ..CredentialFiles::default()
        };
        files.read().ok().map(|read| read.headers)
    }

    #[test]
    fn headers_of_the_environment() {
        for (text, expected) in [
            ("", Some(&[][..])),
            ("Api-Key=a%20b, x = y=z ,", Some(&[("api-key", "a b"), ("x", "y=z")])),
            ("a=1,A=2", Some(&[("a", "2")])),
            ("a", None),
            ("a=%zz", None),
            ("a=%0a", None),
            ("a b=1", None),
            ("content-type=x", None),
        ] {
            let expected = expected.map(|rows| {
                rows.iter()
                    .map(|(key, value)| (key.to_string(), value.to_string()))
                    .collect()
            });
            assert_eq!(of_variable(text), expected, "{text}");
        }
    }

    #[test]
    fn files_come_before_the_environment_and_errors_quote_nothing() {
        let directory = std::env::temp_dir().join(format!("nativeprof-credentials-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let [headers, token] = ["headers", "token"].map(|name| directory.join(name));
        std::fs::write(&headers, "# comment\nX-Scope-OrgID: one\nauthorization: Basic abc\n\n").expect("written");
        std::fs::write(&token, "secret\n").expect("written");
        let files = CredentialFiles {
            headers: Some(headers.clone()),
            token: Some(token),
            ..CredentialFiles::default()
        };
        let files = files.or_of_environment(&|name| match name {
            "PROFILES_HEADERS" => Some("x-scope-orgid=two,more=1".into()),
            "HEADERS" => Some("never=1".into()),
            _ => None,
        });
        let read = files.read().expect("credentials").headers;
        let rows: Vec<_> = read.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(
            rows,
            [
                ("more", "1"),
                ("x-scope-orgid", "one"),
                ("authorization", "Bearer secret")
            ]
        );
        std::fs::write(&headers, "secret").expect("written");
        let error = files.read().err().expect("malformed").to_string();
        assert!(!error.contains("secret"), "{error}");
        std::fs::remove_dir_all(&directory).expect("removed");
    }
}

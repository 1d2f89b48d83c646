//! Addresses of receivers.

use crate::error::{Error, ErrorKind, Result};

/// The path of OTLP profiles over HTTP (opentelemetry-proto 1.11.0).
const OTLP_PATH: &str = "/v1development/profiles";
/// The path of Pyroscope's service that takes profiles (`push/v1/push.proto` of Grafana Pyroscope 1.14).
const PYROSCOPE_PATH: &str = "/push.v1.PusherService/Push";
/// What precedes the scheme of addresses that are not of OTLP over HTTP.
const PREFIXES: &[(&str, Protocol)] = &[("grpc+", Protocol::Grpc), ("pyroscope+", Protocol::Pyroscope)];

/// What a receiver understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP over HTTP, protocol buffers.
    Otlp,
    /// OTLP over gRPC.
    Grpc,
    /// The push service of Pyroscope.
    Pyroscope,
}

/// Where to send to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub protocol: Protocol,
    /// With the path.
    pub url: String,
}

impl Endpoint {
    /// Parses an address as users give it: `http://host:4318`, `https://host/path`, `grpc+http://host:4317`,
    /// `pyroscope+http://host:4040`. The path of OTLP
    /// is used as it is; without one it is that of the specification.
    ///
    /// # Errors
    /// The address has another form, or a password.
    pub fn parse(text: &str) -> Result<Endpoint> {
        let wrong = |why: &str| {
            Error::new(ErrorKind::Usage, format!("cannot send to `{text}`"))
                .why(why)
                .hint("nativeprof push DIR --to http://localhost:4318   or, to Pyroscope: --to pyroscope+http://localhost:4040")
        };
        let mut prefixes = PREFIXES.iter();
        let (protocol, url) = prefixes
            .find_map(|(prefix, protocol)| Some((*protocol, text.strip_prefix(prefix)?)))
            .unwrap_or((Protocol::Otlp, text));
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("it has no scheme"))?;
        if !["http", "https"].contains(&scheme) {
            return Err(wrong("the scheme is not http or https"));
        }
        if url.bytes().any(|byte| !byte.is_ascii_graphic()) {
            return Err(wrong("it has spaces or characters outside ASCII"));
        }
        let (host, path) = rest.find(['/', '?']).map_or((rest, ""), |at| rest.split_at(at));
        if host.is_empty() {
            return Err(wrong("it has no host"));
        }
        if host.contains('@') {
            return Err(Error {
                what: "the address has a user or password".into(),
                hint: "write a header into a file, and use --headers-file FILE: authorization: Basic ...".into(),
                ..wrong("every user of the machine sees arguments of commands")
            });
        }
        let (_, port) = host
            .rsplit_once(':')
            .filter(|(_, port)| !port.ends_with(']'))
            .unwrap_or((host, "1"));
        if port.parse::<u16>().is_err() {
            return Err(wrong("its port is no number up to 65535"));
        }
        let path = match protocol {
            Protocol::Otlp if path.is_empty() || path == "/" => OTLP_PATH.into(),
            Protocol::Otlp => path.to_string(),
            Protocol::Grpc if path.is_empty() || path == "/" => String::new(),
            Protocol::Grpc => return Err(wrong("addresses of gRPC have no path")),
            Protocol::Pyroscope => format!("{}{PYROSCOPE_PATH}", path.trim_end_matches('/')),
        };
        Ok(Endpoint {
            protocol,
            url: format!("{scheme}://{host}{path}"),
        })
    }

    /// The receiver that the environment names (OpenTelemetry's `OTEL_EXPORTER_OTLP_*` variables); `None` if it names none. The
    /// address for profiles is used as it is, the one for all signals is the start of a path.
    ///
    /// # Errors
    /// As [`Endpoint::parse`]; or the protocol is not supported.
    pub fn of_environment(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Endpoint>> {
        let protocol = variable("PROFILES_PROTOCOL").or_else(|| variable("PROTOCOL"));
        let is_grpc = protocol.as_deref() == Some("grpc");
        let url = match (variable("PROFILES_ENDPOINT"), variable("ENDPOINT")) {
            (Some(url), _) => url,
            (None, Some(url)) if is_grpc => url,
            (None, Some(base)) => format!("{}{OTLP_PATH}", base.trim_end_matches('/')),
            (None, None) => return Ok(None),
        };
        match protocol.as_deref() {
            Some("grpc") => Endpoint::parse(&format!("grpc+{url}")).map(Some),
            None | Some("http/protobuf") => Endpoint::parse(&url).map(Some),
            Some(other) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("cannot send to {url} by the protocol `{other}`"),
            )
            .why("OTEL_EXPORTER_OTLP_PROTOCOL, or the one for profiles, asks for it")
            .hint("set it to http/protobuf or grpc")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (text, expected) in [
            ("http://host:4318", Some("Otlp http://host:4318/v1development/profiles")),
            (
                "http://host:4318/",
                Some("Otlp http://host:4318/v1development/profiles"),
            ),
            (
                "https://host/api/org/v1/profiles",
                Some("Otlp https://host/api/org/v1/profiles"),
            ),
            ("http://[::1]:4318/x?y=z", Some("Otlp http://[::1]:4318/x?y=z")),
            (
                "pyroscope+http://host:4040",
                Some("Pyroscope http://host:4040/push.v1.PusherService/Push"),
            ),
            (
                "pyroscope+https://host/base/",
                Some("Pyroscope https://host/base/push.v1.PusherService/Push"),
            ),
            ("grpc+https://host:4317/", Some("Grpc https://host:4317")),
            ("grpc+http://host:4317/path", None),
            ("host:4318", None),
            ("ftp://host", None),
            ("http://", None),
            ("http:///path", None),
            ("http://host:port", None),
            ("http://host:65536/x", None),
            ("http://[::1]", Some("Otlp http://[::1]/v1development/profiles")),
            ("http://user:secret@host", None),
            ("http://host/a b", None),
        ] {
            let found = Endpoint::parse(text).map(|found| format!("{:?} {}", found.protocol, found.url));
            assert_eq!(found.as_deref().ok(), expected, "{text}");
            if let Err(e) = found {
                assert!(!e.why.is_empty() && !e.hint.is_empty());
            }
        }
        let secret = Endpoint::parse("http://user:secret@host")
            .expect_err("refused")
            .to_string();
        assert!(!secret.contains("secret"), "{secret}");
    }

    #[test]
    fn variables_for_profiles_come_first() {
        for (variables, expected) in [
            (&[][..], Ok(None)),
            (
                &[("ENDPOINT", "http://a:1/")],
                Ok(Some("http://a:1/v1development/profiles")),
            ),
            (
                &[("ENDPOINT", "http://a:1"), ("PROFILES_ENDPOINT", "http://b:2/x")],
                Ok(Some("http://b:2/x")),
            ),
            (
                &[
                    ("ENDPOINT", "http://a:1"),
                    ("PROTOCOL", "grpc"),
                    ("PROFILES_PROTOCOL", "http/protobuf"),
                ],
                Ok(Some("http://a:1/v1development/profiles")),
            ),
            (
                &[("ENDPOINT", "http://a:1"), ("PROTOCOL", "grpc")],
                Ok(Some("http://a:1")),
            ),
            (&[("ENDPOINT", "http://a:1"), ("PROTOCOL", "http/json")], Err(())),
        ] {
            let variable = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| value.to_string())
            };
            let found = Endpoint::of_environment(&variable).map(|found| found.map(|found| found.url));
            assert_eq!(
                found.map_err(drop),
                expected.map(|url| url.map(String::from)),
                "{variables:?}"
            );
        }
    }
}

//! A receiver behind gRPC: a connection of HTTP/2 for each message, which is one a minute.
//!
//! Sources: `doc/PROTOCOL-HTTP2.md` and `doc/statuscodes.md` of grpc 1.80; "OTLP/gRPC Response" and "OTLP/gRPC Throttling" of the
//! OpenTelemetry protocol's specification 1.11.0.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine, alphabet};
use flate2::Compression;
use flate2::write::GzEncoder;
use h2::client;
use http::{HeaderMap, Request};
use prost::Message;
use prost::bytes::Bytes;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;

use super::{Answer, CredentialFiles, Credentials, Endpoint, Receiver, Verdict};
use crate::error::{Error, ErrorKind, Result};

/// `profiles_service.proto` of opentelemetry-proto 1.11.0.
const METHOD: &str = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export";
/// Bytes that are read of an answer, and of its headers.
const MAX_ANSWER: usize = 64 << 10;
/// Bytes before a message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Without padding, which some senders add (`grpc-status-details-bin`).
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Names of the status codes, by number.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// The client.
pub struct GrpcReceiver {
    runtime: Runtime,
    host: String,
    port: u16,
    /// Scheme, host and port.
    base: String,
    tls: Option<TlsConnector>,
    compress: bool,
    timeout: Duration,
    files: CredentialFiles,
    credentials: Credentials,
}

impl GrpcReceiver {
    /// `timeout`: of a message, from the connection to the end of the answer.
    ///
    /// # Errors
    /// The address has no host, or credentials cannot be read.
    pub fn new(endpoint: &Endpoint, files: CredentialFiles, timeout: Duration, compress: bool) -> Result<GrpcReceiver> {
        let wrong = || {
            Error::new(ErrorKind::Usage, format!("cannot send to {}", endpoint.url))
                .why("it has no valid host and port")
                .hint("nativeprof push DIR --to grpc+http://localhost:4317")
        };
        let address: http::Uri = endpoint.url.parse().map_err(|_| wrong())?;
        let is_secure = address.scheme_str() == Some("https");
        let host = address.host().ok_or_else(wrong)?;
        let credentials = files.read()?;
        let tls = is_secure.then(|| connector(&credentials, &files)).transpose()?;
        // Only this thread uses it.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Ok(GrpcReceiver {
            runtime: runtime.map_err(|e| Error::not_started("cannot start the client of gRPC", e))?,
            // Addresses of IPv6 have brackets in URLs only.
            host: host.trim_matches(['[', ']']).into(),
            port: address.port_u16().unwrap_or(if is_secure { 443 } else { 80 }),
            base: endpoint.url.trim_end_matches('/').into(),
            tls,
            compress,
            timeout,
            files,
            credentials,
        })
    }

    fn framed(&self, message: &[u8]) -> io::Result<Bytes> {
        let mut framed = vec![0; PREFIX];
        if self.compress {
            let mut gzip = GzEncoder::new(framed, Compression::default());
            gzip.write_all(message)?;
            framed = gzip.finish()?;
        } else {
            framed.extend_from_slice(message);
        }
        let length = u32::try_from(framed.len() - PREFIX).map_err(|_| io::ErrorKind::FileTooLarge)?;
        if let Some((flag, rest)) = framed.split_first_mut() {
            *flag = self.compress.into();
            if let Some(place) = rest.first_chunk_mut() {
                *place = length.to_be_bytes();
            }
        }
        Ok(framed.into())
    }

    async fn try_send(&self, message: &[u8]) -> std::result::Result<Answer, Failure> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        stream.set_nodelay(true)?;
        match &self.tls {
            None => self.exchange(stream, message).await,
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(|e| Failure::tls(&e))?;
                let stream = tls.connect(name, stream).await.map_err(|e| Failure::tls(&e))?;
                self.exchange(stream, message).await
            }
        }
    }

    async fn exchange<T>(&self, stream: T, message: &[u8]) -> std::result::Result<Answer, Failure>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut builder = client::Builder::new();
        builder.max_header_list_size(MAX_ANSWER as u32).enable_push(false);
        let (sender, connection) = builder.handshake(stream).await?;
        // It ends with this exchange.
        let connection = tokio::spawn(connection);
        let answer = self.request(sender, message).await;
        connection.abort();
        answer
    }

    async fn request(
        &self,
        sender: client::SendRequest<Bytes>,
        message: &[u8],
    ) -> std::result::Result<Answer, Failure> {
        let mut sender = sender.ready().await?;
        let mut request = Request::post(format!("{}{METHOD}", self.base))
            .header("te", "trailers")
            .header("content-type", "application/grpc+proto")
            .header("user-agent", concat!("nativeprof/", env!("CARGO_PKG_VERSION")));
        if self.compress {
            request = request.header("grpc-encoding", "gzip");
        }
        for (name, value) in &self.credentials.headers {
            request = request.header(name, value);
        }
        let request = request
            .body(())
            .map_err(|e| Failure::new("connection", e.to_string()))?;
        let (response, mut body) = sender.send_request(request, false)?;
        body.send_data(self.framed(message)?, true)?;
        let (head, mut body) = response.await?.into_parts();
        let mut content = Vec::new();
        while let Some(data) = body.data().await {
            let data = data?;
            if content.len() + data.len() > MAX_ANSWER {
                return Err(Failure::new("connection", "the answer is too long".into()));
            }
            content.extend_from_slice(&data);
            body.flow_control().release_capacity(data.len())?;
        }
        let trailers = body.trailers().await?;
        // An answer without a message has the status in its headers.
        let status = trailers
            .filter(|trailers| trailers.contains_key("grpc-status"))
            .unwrap_or(head.headers);
        Ok(answer(head.status.as_u16(), &status, &content))
    }
}

impl Receiver for GrpcReceiver {
    fn send(&mut self, message: &[u8]) -> Answer {
        let sent = self
            .runtime
            .block_on(async { tokio::time::timeout(self.timeout, self.try_send(message)).await });
        match sent {
            Ok(Ok(answer)) => answer,
            Ok(Err(failure)) => Answer::none(failure.kind, failure.text),
            Err(_) => Answer::none("timeout", format!("no answer in {:.1} s", self.timeout.as_secs_f64())),
        }
    }

    fn renew(&mut self) -> Result<bool> {
        let credentials = self.files.read()?;
        let is_other = credentials != self.credentials;
        if is_other {
            if self.tls.is_some() {
                self.tls = Some(connector(&credentials, &self.files)?);
            }
            self.credentials = credentials;
        }
        Ok(is_other)
    }
}

/// Why there is no answer.
struct Failure {
    kind: &'static str,
    text: String,
}

impl Failure {
    fn new(kind: &'static str, text: String) -> Failure {
        Failure { kind, text }
    }

    fn tls(e: &dyn std::fmt::Display) -> Failure {
        Failure::new("tls", e.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Failure {
        Failure::new("connection", e.to_string())
    }
}

impl From<h2::Error> for Failure {
    fn from(e: h2::Error) -> Failure {
        Failure::new("connection", e.to_string())
    }
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Detail>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Detail {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Delay>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, PartialEq, Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// What an answer means. `status`: the headers or trailers with the status of gRPC.
fn answer(http_status: u16, status: &HeaderMap, content: &[u8]) -> Answer {
    let text = |name: &str| status.get(name).and_then(|value| value.to_str().ok());
    let Some(code) = text("grpc-status").and_then(|text| text.parse::<usize>().ok()) else {
        // No server of gRPC, but a proxy before it, perhaps.
        let answer = Answer::of_http(http_status, None, b"");
        return match answer.verdict {
            Verdict::Accepted { .. } => Answer {
                code: "UNKNOWN".into(),
                verdict: Verdict::Refused,
                text: "the receiver does not speak gRPC".into(),
            },
            _ => answer,
        };
    };
    let name = CODES.get(code).copied().unwrap_or("UNKNOWN");
    if code == 0 {
        // The same message as that of HTTP, after its length.
        let answer = Answer::of_http(200, None, content.get(PREFIX..).unwrap_or_default());
        return Answer {
            code: name.into(),
            ..answer
        };
    }
    let wait = text("grpc-status-details-bin").and_then(wait_of);
    let verdict = match name {
        "CANCELLED" | "DEADLINE_EXCEEDED" | "ABORTED" | "OUT_OF_RANGE" | "UNAVAILABLE" | "DATA_LOSS" => {
            Verdict::Later(wait)
        }
        "RESOURCE_EXHAUSTED" if wait.is_some() => Verdict::Later(wait),
        // It is how servers say that a message is too large; if it is something else, smaller ones are refused, too.
        "RESOURCE_EXHAUSTED" => Verdict::TooLarge,
        "UNAUTHENTICATED" | "PERMISSION_DENIED" => Verdict::Credentials,
        _ => Verdict::Refused,
    };
    Answer {
        code: name.into(),
        verdict,
        text: super::answer::shortened(text("grpc-message").unwrap_or_default()),
    }
}

/// The wait that a status asks for by `RetryInfo`.
fn wait_of(details: &str) -> Option<Duration> {
    let status = Status::decode(&BASE64.decode(details.trim()).ok()?[..]).ok()?;
    let mut details = status.details.iter();
    let info = details.find(|detail| detail.type_url.ends_with("/google.rpc.RetryInfo"))?;
    let delay = RetryInfo::decode(&info.value[..]).ok()?.retry_delay?;
    let nanos = delay.nanos.clamp(0, 999_999_999) as u32;
    Some(Duration::new(u64::try_from(delay.seconds).unwrap_or(0), nanos))
}

fn connector(credentials: &Credentials, files: &CredentialFiles) -> Result<TlsConnector> {
    let wrong = |path: &Option<std::path::PathBuf>, why: String| {
        let path = path.as_deref().unwrap_or("".as_ref()).display().to_string();
        Error::new(ErrorKind::Data, format!("cannot use {path}")).why(why)
    };
    let certificates = |pem: &[u8], path: &Option<std::path::PathBuf>| {
        let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
            .filter_map(std::result::Result::ok)
            .collect();
        if found.is_empty() {
            return Err(wrong(path, "it has no certificate in PEM: -----BEGIN ...".into()));
        }
        Ok(found)
    };
    let mut roots = rustls::RootCertStore::empty();
    match &credentials.ca {
        Some(pem) => {
            for certificate in certificates(pem, &files.ca)? {
                roots.add(certificate).map_err(|e| wrong(&files.ca, e.to_string()))?;
            }
        }
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder
        .map_err(|e| Error::new(ErrorKind::Unsupported, "cannot use TLS").why(e.to_string()))?
        .with_root_certificates(roots);
    let mut config = match &credentials.client {
        Some((chain, key)) => {
            let key = PrivateKeyDer::from_pem_slice(key);
            let key = key.map_err(|_| wrong(&files.key, "it has no private key in PEM: -----BEGIN ...".into()))?;
            let chain = certificates(chain, &files.certificate)?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(|e| wrong(&files.certificate, e.to_string()))?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_mean_what_the_specification_says() {
        let details = |type_url: &str| {
            let delay = Some(Delay {
                seconds: 3,
                nanos: 500_000_000,
            });
            let status = Status {
                details: vec![Detail {
                    type_url: type_url.into(),
                    value: RetryInfo { retry_delay: delay }.encode_to_vec(),
                }],
            };
            BASE64.encode(status.encode_to_vec())
        };
        let retry = details("type.googleapis.com/google.rpc.RetryInfo");
        let wait = Some(Duration::from_millis(3500));
        for (code, details, verdict) in [
            ("0", None, Verdict::Accepted { refused: 0 }),
            ("14", None, Verdict::Later(None)),
            ("14", Some(&retry), Verdict::Later(wait)),
            ("1", None, Verdict::Later(None)),
            ("4", None, Verdict::Later(None)),
            ("10", None, Verdict::Later(None)),
            ("11", None, Verdict::Later(None)),
            ("15", None, Verdict::Later(None)),
            ("8", Some(&retry), Verdict::Later(wait)),
            (
                "8",
                Some(&details("type.googleapis.com/google.rpc.Help")),
                Verdict::TooLarge,
            ),
            ("8", Some(&"***".to_string()), Verdict::TooLarge),
            ("3", Some(&retry), Verdict::Refused),
            ("13", None, Verdict::Refused),
            ("99", None, Verdict::Refused),
            ("16", None, Verdict::Credentials),
        ] {
            let mut status = HeaderMap::new();
            status.insert("grpc-status", code.parse().expect("a value"));
            if let Some(details) = details {
                status.insert("grpc-status-details-bin", details.parse().expect("a value"));
            }
            assert_eq!(answer(200, &status, b"").verdict, verdict, "{code}");
        }
        for (status, verdict) in [
            (200, Verdict::Refused),
            (503, Verdict::Later(None)),
            (404, Verdict::Refused),
        ] {
            assert_eq!(answer(status, &HeaderMap::new(), b"").verdict, verdict);
        }
    }
}

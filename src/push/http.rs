//! A receiver behind HTTP.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig};

use super::{Answer, CredentialFiles, Credentials, Endpoint, Protocol, Receiver};
use crate::error::{Error, ErrorKind, Result};

/// Bytes that are read of an answer.
const MAX_ANSWER: u64 = 64 << 10;

/// The client. Connections are kept for a few seconds, for messages of one segment.
pub struct HttpReceiver {
    agent: ureq::Agent,
    url: String,
    content_type: &'static str,
    compress: bool,
    timeout: Duration,
    files: CredentialFiles,
    credentials: Credentials,
}

impl HttpReceiver {
    /// `timeout`: of a message, from the connection to the end of the answer.
    ///
    /// # Errors
    /// Credentials cannot be read.
    pub fn new(endpoint: &Endpoint, files: CredentialFiles, timeout: Duration, compress: bool) -> Result<HttpReceiver> {
        let credentials = files.read()?;
        Ok(HttpReceiver {
            agent: agent(&credentials, &files, timeout)?,
            url: endpoint.url.clone(),
            content_type: match endpoint.protocol {
                Protocol::Otlp | Protocol::Grpc => "application/x-protobuf",
                Protocol::Pyroscope => "application/proto",
            },
            compress,
            timeout,
            files,
            credentials,
        })
    }

    fn try_send(&self, message: &[u8]) -> std::result::Result<Answer, ureq::Error> {
        let mut request = self.agent.post(&self.url).header("content-type", self.content_type);
        for (name, value) in &self.credentials.headers {
            request = request.header(name, value);
        }
        let mut response = if self.compress {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
            gzip.write_all(message)?;
            request.header("content-encoding", "gzip").send(&gzip.finish()?[..])?
        } else {
            request.send(message)?
        };
        let mut body = Vec::new();
        // The status is the answer; if the rest is missing, only its text is.
        let _ = response.body_mut().as_reader().take(MAX_ANSWER).read_to_end(&mut body);
        let after = response.headers().get("retry-after");
        let after = after.and_then(|value| value.to_str().ok());
        Ok(Answer::of_http(response.status().as_u16(), after, &body))
    }
}

impl Receiver for HttpReceiver {
    fn send(&mut self, message: &[u8]) -> Answer {
        self.try_send(message).unwrap_or_else(|e| {
            let kind = match &e {
                ureq::Error::Timeout(_) => "timeout",
                ureq::Error::HostNotFound => "name",
                ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::Pem(_) => "tls",
                // What rustls finds wrong with an established connection.
                ureq::Error::Io(e) if e.kind() == io::ErrorKind::InvalidData => "tls",
                ureq::Error::Io(e) if e.kind() == io::ErrorKind::TimedOut => "timeout",
                _ => "connection",
            };
            Answer::none(kind, e.to_string())
        })
    }

    fn renew(&mut self) -> Result<bool> {
        let credentials = self.files.read()?;
        let is_other = credentials != self.credentials;
        if is_other {
            self.agent = agent(&credentials, &self.files, self.timeout)?;
            self.credentials = credentials;
        }
        Ok(is_other)
    }
}

fn agent(credentials: &Credentials, files: &CredentialFiles, timeout: Duration) -> Result<ureq::Agent> {
    let mut tls = TlsConfig::builder();
    let unreadable = |what: &str, path: &Option<std::path::PathBuf>| {
        let path = path.as_deref().unwrap_or("".as_ref()).display().to_string();
        Error::new(ErrorKind::Data, format!("{path} has no {what}")).why("expected PEM: -----BEGIN ...")
    };
    if let Some(pem) = &credentials.ca {
        let roots = certificates(pem);
        if roots.is_empty() {
            return Err(unreadable("certificate", &files.ca));
        }
        tls = tls.root_certs(RootCerts::Specific(Arc::new(roots)));
    }
    if let Some((chain, key)) = &credentials.client {
        let chain = certificates(chain);
        if chain.is_empty() {
            return Err(unreadable("certificate", &files.certificate));
        }
        let key = PrivateKey::from_pem(key).map_err(|_| unreadable("private key", &files.key))?;
        tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
    }
    let config = ureq::Agent::config_builder()
        .tls_config(tls.build())
        .timeout_global(Some(timeout))
        // Headers have secrets, which are for this address only.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .user_agent(concat!("nativeprof/", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(config.into())
}

fn certificates(pem: &[u8]) -> Vec<Certificate<'static>> {
    let items = ureq::tls::parse_pem(pem).filter_map(std::result::Result::ok);
    let found = items.filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate.to_owned()),
        _ => None,
    });
    found.collect()
}

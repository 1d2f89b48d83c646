//! Arguments of `push`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::host::LogFormatArg;
use super::shared::{seconds, size};
use crate::push::MIN_MESSAGE;

/// Most that the OTLP specification 1.11.0 recommends servers to take.
const MAX_MESSAGE: usize = 64 << 20;

#[derive(Debug, Args)]
pub struct PushCommand {
    /// The history: the directory that `nativeprof host --dir` writes to
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// Receiver of OTLP profiles over HTTP, such as http://localhost:4318; its path is used as given, without one it is
    /// /v1development/profiles. Over gRPC: grpc+http://localhost:4317. Pyroscope: pyroscope+http://localhost:4040
    /// [default: OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT]
    #[arg(long, value_name = "URL")]
    pub to: Option<String>,
    /// End when standard input is closed: by the end of the process that started this one
    #[arg(long, hide = true)]
    pub with_parent: bool,
    /// Send what is there, and end
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub credentials: CredentialArgs,
    /// Largest message before compression: 512k, 4M; most receivers take 4 MiB
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = message_size)]
    pub max_message: usize,
    /// Serve metrics of sending and recording for Prometheus at GET /metrics of a port, such as 127.0.0.1:7071, or of a Unix
    /// socket, such as unix:/run/nativeprof/metrics
    #[arg(long, value_name = "ADDRESS", conflicts_with = "once")]
    pub metrics: Option<String>,
    /// Form of the log on standard error [default: text for people]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub log_format: Option<LogFormatArg>,
    /// Serve metrics of recording, and send nothing
    #[arg(long, hide = true, requires = "metrics", conflicts_with = "to")]
    pub metrics_only: bool,
    /// How long a message may take, with its answer [default: OTEL_EXPORTER_OTLP_TIMEOUT, else 10s]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<f64>,
    /// Longest wait between attempts; the first is a second, each is twice the one before
    #[arg(long, value_name = "SECONDS", default_value = "1m", value_parser = seconds)]
    pub longest_wait: f64,
}

/// Files with what a receiver asks for. No option has a secret itself: every user sees the arguments of commands.
#[derive(Clone, Debug, Default, Args)]
pub struct CredentialArgs {
    /// File with headers, lines of `name: value`; read again at SIGHUP
    #[arg(long, value_name = "FILE")]
    pub headers_file: Option<PathBuf>,
    /// File with a bearer token; read again at SIGHUP, and when it is refused
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificates (PEM) that sign the receiver's, instead of the well-known ones
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "key")]
    pub certificate: Option<PathBuf>,
    /// Key of the client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "certificate")]
    pub key: Option<PathBuf>,
}

impl CredentialArgs {
    /// The same as words of a command line.
    pub fn words(&self) -> Vec<OsString> {
        let options = [
            ("--headers-file", &self.headers_file),
            ("--token-file", &self.token_file),
            ("--ca", &self.ca),
            ("--certificate", &self.certificate),
            ("--key", &self.key),
        ];
        let given = options
            .into_iter()
            .filter_map(|(name, path)| Some((name, path.as_ref()?)));
        given.flat_map(|(name, path)| [name.into(), path.into()]).collect()
    }
}

/// Bytes of a message: `512k`, `4M`.
fn message_size(text: &str) -> Result<usize, String> {
    let size = size(text)?;
    match usize::try_from(size) {
        Ok(bytes) if (MIN_MESSAGE..=MAX_MESSAGE).contains(&bytes) => Ok(bytes),
        _ => Err("a message has 64KiB to 64MiB".into()),
    }
}

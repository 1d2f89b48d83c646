//! The arguments of `host`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::pid;
use super::push::CredentialArgs;
use super::shared::{self, number_and_unit, seconds, size};
use crate::host::logs::{Log, LogFormat};
use crate::profile::labels::LabelFilter;

#[derive(Debug, Args)]
pub struct Host {
    /// Directory for the history, created if missing
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Samples per second of CPU time, at most: 1 to 1000; --max-cpu lowers it
    #[arg(short, long, value_name = "HZ", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub rate: u64,
    #[command(flatten)]
    pub filter: HostFilterArgs,
    /// Include kernel frames
    #[arg(long)]
    pub kernel: bool,
    /// Label samples by the program's spans: those of `nativeprof.span`, and the OpenTelemetry context of its threads
    #[arg(long)]
    pub spans: bool,
    /// Length of a segment of the history
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = segment)]
    pub segment: f64,
    /// Drop segments that are older
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = age)]
    pub keep: f64,
    /// Drop the oldest segments if the history is larger than this: 500M, 2G
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = large_size)]
    pub max_size: u64,
    /// CPU time that nativeprof may use, of one core, all its processes together: 1%, 0.2%; lowers the rate, to 1 Hz at least
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub max_cpu: Option<f64>,
    /// Memory that nativeprof may use, all its processes together: 250M
    #[arg(long, value_name = "SIZE", value_parser = large_size)]
    pub max_memory: Option<u64>,
    /// Label for all samples of this host
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    pub label: Vec<(String, String)>,
    /// Environment variable of the sampled processes to use as a label; no others are read, except those of OpenTelemetry
    #[arg(long, value_name = "NAME")]
    pub include_env: Vec<String>,
    /// Stop after this time
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<f64>,
    /// Form of the log on standard error
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormatArg::Logfmt)]
    pub log_format: LogFormatArg,
    /// Serve metrics for Prometheus at GET /metrics of a port, such as 127.0.0.1:7071, or of a Unix socket, such as
    /// unix:/run/nativeprof/metrics; they are in DIR/metrics.prom in any case
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
    /// Also send each segment to this receiver, as `push` does; OTEL_EXPORTER_OTLP_* variables are used as well
    #[arg(long, value_name = "URL")]
    pub push: Option<String>,
    #[command(flatten, next_help_heading = "With --push")]
    pub credentials: CredentialArgs,
}

/// Which processes to sample. Without any of these, all.
#[derive(Debug, Default, Args)]
pub struct HostFilterArgs {
    /// Only processes in this cgroup, and in those below it: a path below /sys/fs/cgroup, or as in /proc/PID/cgroup
    #[arg(long, value_name = "PATH")]
    pub cgroup: Vec<PathBuf>,
    /// Only processes of this container: its id, or the beginning of it
    #[arg(long, value_name = "ID")]
    pub container: Vec<String>,
    /// Only processes of this name, which their first threads have: the first 15 bytes count
    #[arg(long, value_name = "NAME")]
    pub comm: Vec<String>,
    /// Only processes that this user runs, a name or a number: by the real user, who started a set-user-ID program
    #[arg(long, value_name = "USER")]
    pub user: Vec<String>,
    /// Only this process and its children
    #[arg(short, long, value_name = "PID", value_parser = pid)]
    pub pid: Vec<u32>,
}

/// How events are logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormatArg {
    /// Words `key=value`
    Logfmt,
    /// An object per line
    Json,
}

impl LogFormatArg {
    /// A log of this form on standard error.
    pub fn log(self) -> Log {
        Log::new(match self {
            LogFormatArg::Logfmt => LogFormat::Logfmt,
            LogFormatArg::Json => LogFormat::Json,
        })
    }
}

/// Bytes of a history, or of memory.
fn large_size(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if bytes >= 1_000_000 => Ok(bytes),
        _ => Err("a size is 1M or more here".into()),
    }
}

/// Part of a core: `1%` is 0.01.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>();
    match number {
        Ok(percent) if (0.01..=1e4).contains(&percent) => Ok(percent / 100.0),
        _ => Err("a share of a core is given in percent, 0.01% or more: 1%, 0.2%".into()),
    }
}

/// Seconds of an age: `7d`, `12h`.
fn age(text: &str) -> Result<f64, String> {
    let days = number_and_unit(text).filter(|(_, unit)| unit == "d");
    let age = match days {
        Some((days, _)) => days * 86_400.0,
        None => seconds(text).map_err(|_| AGE.to_string())?,
    };
    if (1.0..=1e9).contains(&age) {
        Ok(age)
    } else {
        Err(AGE.into())
    }
}

const AGE: &str = "an age is a number with its unit: 90m, 12h, 7d";

/// Seconds of a segment.
fn segment(text: &str) -> Result<f64, String> {
    match seconds(text) {
        Ok(length) if (0.2..=3600.0).contains(&length) => Ok(length),
        _ => Err("a segment is 0.2s to 1h long".into()),
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    let LabelFilter { key, value } = shared::label(text)?;
    if key.is_empty() {
        return Err("the key of a label is missing: KEY=VALUE".into());
    }
    Ok((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities() {
        assert_eq!(large_size("250M"), Ok(250_000_000));
        assert!(large_size("10").is_err() && large_size("-1G").is_err());
        for (text, expected) in [("1%", 0.01), ("0.2%", 0.002), ("50", 0.5)] {
            assert!(
                percent(text).is_ok_and(|share| (share - expected).abs() < 1e-12),
                "{text}"
            );
        }
        for text in ["0", "-1%", "%", "much"] {
            assert!(percent(text).is_err(), "{text}");
        }
        for (text, expected) in [("7d", 604_800.0), ("12h", 43_200.0), ("90", 90.0)] {
            assert_eq!(age(text), Ok(expected), "{text}");
        }
        assert!(age("d").is_err() && age("0d").is_err() && age("1 week").is_err());
        assert!(segment("60s").is_ok() && segment("0.1").is_err() && segment("2h").is_err());
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(label("a").is_err() && label("=a").is_err());
    }
}

//! `push`: sends a history to a receiver.

use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::cli::args::{CredentialArgs, LogFormatArg, PushCommand};
use crate::cli::print_status;
use crate::error::{Error, ErrorKind, Result};
use crate::history;
use crate::host::logs::Log;
use crate::host::metrics_server::{self, MetricsListener};
use crate::privileges::phases;
use crate::push::{self, Backoff, CredentialFiles, Endpoint, Event, PushMetrics, PushOptions, Surroundings};
use crate::sys;

/// The wait before the second attempt.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// How often a directory is looked at: segments have a minute each.
const POLL: Duration = Duration::from_secs(1);
/// Bytes of the recorder's metrics that are read.
const MAX_METRICS: u64 = 1 << 20;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends until a signal ends it, or with `--once` what is there. Whether all was accepted.
pub fn push(options: &PushCommand) -> Result<bool> {
    phases::drop_all()?;
    sys::interrupts::install_interrupt_handler();
    sys::interrupts::renew_at_hangup();
    let stop =
        || sys::interrupts::interrupted() || options.with_parent && sys::files::is_hung_up(std::io::stdin().as_fd());
    let log = options.log_format.map(LogFormatArg::log);
    if let (Some(address), true) = (&options.metrics, options.metrics_only) {
        let address = serve_metrics(address, &options.directory, String::new)?;
        print_address(log.as_ref(), &address);
        while !stop() {
            wait(POLL);
        }
        return Ok(true);
    }
    // Empty ones count as not set (specification of OpenTelemetry's environment variables).
    let variable = |name: &str| {
        let value = std::env::var(format!("OTEL_EXPORTER_OTLP_{name}")).ok();
        value.filter(|value| !value.is_empty())
    };
    let of_profiles = |name: &str| variable(&format!("PROFILES_{name}")).or_else(|| variable(name));
    let endpoint = match &options.to {
        Some(url) => Endpoint::parse(url)?,
        None => Endpoint::of_environment(&variable)?.ok_or_else(|| {
            Error::new(ErrorKind::Usage, "no receiver is given")
                .why("there is no --to, and OTEL_EXPORTER_OTLP_ENDPOINT is not set")
                .hint("nativeprof push DIR --to http://localhost:4318")
        })?,
    };
    let timeout = match (options.timeout, of_profiles("TIMEOUT")) {
        (Some(seconds), _) => Duration::from_secs_f64(seconds),
        (None, Some(text)) => {
            let milliseconds = text.parse().ok().filter(|milliseconds| *milliseconds > 0);
            Duration::from_millis(milliseconds.ok_or_else(|| {
                Error::new(ErrorKind::Usage, format!("OTEL_EXPORTER_OTLP_TIMEOUT is `{text}`"))
                    .why("it has to be a number of milliseconds")
                    .hint("nativeprof push DIR --timeout 10s")
            })?)
        }
        (None, None) => DEFAULT_TIMEOUT,
    };
    let CredentialArgs {
        headers_file: headers,
        token_file: token,
        ca,
        certificate,
        key,
    } = options.credentials.clone();
    let files = CredentialFiles {
        headers,
        token,
        ca,
        certificate,
        key,
        variable: None,
    };
    let files = files.or_of_environment(&variable);
    let compress = of_profiles("COMPRESSION").as_deref() != Some("none");
    let mut receiver = push::connect(&endpoint, files, timeout, compress)?;
    let longest = Duration::from_secs_f64(options.longest_wait);
    let metrics = Arc::new(Mutex::new(PushMetrics::default()));
    if let Some(address) = &options.metrics {
        let metrics = metrics.clone();
        let address = serve_metrics(address, &options.directory, move || {
            let metrics = metrics.lock().unwrap_or_else(PoisonError::into_inner).clone();
            metrics.text(SystemTime::now())
        })?;
        print_address(log.as_ref(), &address);
    }
    push::run(
        &options.directory,
        &endpoint,
        &mut *receiver,
        &PushOptions {
            once: options.once,
            max_message: options.max_message,
            backoff: Backoff {
                first: FIRST_WAIT.min(longest),
                longest,
            },
            poll: POLL.min(longest),
        },
        &Surroundings {
            metrics: &metrics,
            stop: &stop,
            renewals: &sys::interrupts::hangups,
            wait: &wait,
            print: &|event| print_event(log.as_ref(), event),
        },
    )
}

/// Waits so long; a signal ends it.
fn wait(wait: Duration) {
    // It fails only without memory; then the wait is short.
    let _ = sys::files::poll(&[], wait);
}

/// Prints an event: in the log, or for people.
fn print_event(log: Option<&Log>, event: &Event<'_>) {
    let Event {
        kind, text, repeated, ..
    } = event;
    let fields: [(_, &dyn Display); 2] = [("kind", kind), ("text", text)];
    match log {
        Some(log) if event.is_error => log.counted_error("push", *repeated, &fields),
        Some(log) => log.event("push", &fields),
        None if *repeated > 0 => print_status(&format!("{text} ({repeated} times more since the last line)")),
        None => print_status(text),
    }
}

fn print_address(log: Option<&Log>, address: &str) {
    match log {
        Some(log) => log.event("metrics", &[("address", &address)]),
        None => print_status(&format!("metrics are served at {address}")),
    }
}

/// Serves metrics at the address until the process ends: those that the recorder last wrote to the directory, and `more`.
/// Returns where.
fn serve_metrics(address: &str, directory: &Path, more: impl Fn() -> String + Send + 'static) -> Result<String> {
    let of_recorder = directory.join(history::METRICS);
    let text = move || {
        let file = File::open(&of_recorder).map(|file| file.take(MAX_METRICS));
        let mut text = Vec::new();
        if file.is_ok_and(|mut file| file.read_to_end(&mut text).is_err()) {
            text.clear();
        }
        String::from_utf8_lossy(&text).into_owned() + &more()
    };
    let serve = || {
        let listener = MetricsListener::bind(address)?;
        let address = listener.address()?;
        metrics_server::serve(listener, text)?;
        Ok(address)
    };
    serve().map_err(|e| {
        Error::io(format!("cannot serve metrics at {address}"), e)
            .hint("name a free port or a socket: --metrics 127.0.0.1:7071, --metrics unix:/run/nativeprof/metrics")
    })
}

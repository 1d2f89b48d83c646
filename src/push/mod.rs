//! Sends the closed segments of a history to a receiver, in their order.
//!
//! The history is the queue: a cursor file says what the receiver has accepted. What the history drops before that is counted.
//! A message counts as accepted when its answer was read and the cursor was written. A message whose answer did not arrive is
//! sent again, since the receiver may not have had it: no profile is lost by that, and one may arrive twice.

mod answer;
mod credentials;
mod cursor;
mod endpoint;
#[cfg(feature = "push")]
mod grpc;
#[cfg(feature = "push")]
mod http;
mod metrics;
mod pyroscope;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

pub use answer::{Answer, Verdict};
pub use credentials::{CredentialFiles, Credentials};
pub use endpoint::{Endpoint, Protocol};
pub use metrics::PushMetrics;

use crate::error::{Error, ErrorKind, Result};
use crate::history::{Directory, Entry};
use crate::host::repetitions::Repetitions;
use crate::profile::otlp_parts::{OtlpParts, PartEnd};
pub use cursor::largest_sequence;
use cursor::{Cursor, Position};

/// Messages are not halved below this, in bytes.
pub const MIN_MESSAGE: usize = 64 << 10;
/// How often a message is tried with `once`.
const ATTEMPTS_ONCE: u32 = 5;
/// The longest wait that a receiver can ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// The waits between attempts: each twice the one before, and half of it random.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    /// Before the second attempt.
    pub first: Duration,
    pub longest: Duration,
}

impl Backoff {
    /// The wait after so many attempts. `random` is below 1.
    fn wait(&self, attempts: u32, random: f64) -> Duration {
        let doubled = self.first.saturating_mul(1 << attempts.saturating_sub(1).min(20));
        doubled.min(self.longest).mul_f64(0.5 + random / 2.0)
    }
}

/// How to send.
#[derive(Clone, Debug)]
pub struct PushOptions {
    /// Ends when everything is sent.
    pub once: bool,
    /// Largest message before compression, in bytes.
    pub max_message: usize,
    pub backoff: Backoff,
    /// How often the directory is looked at for new segments.
    pub poll: Duration,
}

/// What a receiver is: something that takes messages.
pub trait Receiver {
    /// Sends a message of this protocol. Ends in bounded time.
    fn send(&mut self, message: &[u8]) -> Answer;

    /// Reads headers and certificates again. Whether they are others now.
    ///
    /// # Errors
    /// A file cannot be read; the receiver is used as before.
    fn renew(&mut self) -> Result<bool>;
}

/// The receiver at an endpoint. `variable`: of the environment.
///
/// # Errors
/// Files of credentials cannot be read; or this build has no client.
#[cfg(feature = "push")]
pub fn connect<'a>(
    endpoint: &Endpoint,
    files: CredentialFiles,
    timeout: Duration,
    compress: bool,
) -> Result<Box<dyn Receiver + 'a>> {
    Ok(match endpoint.protocol {
        Protocol::Grpc => Box::new(grpc::GrpcReceiver::new(endpoint, files, timeout, compress)?),
        _ => Box::new(http::HttpReceiver::new(endpoint, files, timeout, compress)?),
    })
}

/// The same without a client.
///
/// # Errors
/// Always.
#[cfg(not(feature = "push"))]
pub fn connect<'a>(_: &Endpoint, _: CredentialFiles, _: Duration, _: bool) -> Result<Box<dyn Receiver + 'a>> {
    Err(Error::new(
        ErrorKind::Unsupported,
        "sending profiles is not supported by this build",
    )
    .why("it was built without the feature `push`")
    .hint("cargo build --release --features push"))
}

/// What the process that sends is told, and tells.
pub struct Surroundings<'a> {
    pub metrics: &'a Mutex<PushMetrics>,
    /// Whether to end.
    pub stop: &'a dyn Fn() -> bool,
    /// How often credentials were to be read again so far.
    pub renewals: &'a dyn Fn() -> u32,
    /// Waits; signals end it.
    pub wait: &'a dyn Fn(Duration),
    /// Prints an event.
    pub print: &'a dyn Fn(&Event<'_>),
}

/// What happened while segments are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    /// A word for events of its kind.
    pub kind: &'static str,
    /// One line.
    pub text: &'a str,
    /// How often such an event happened since the last one was printed.
    pub repeated: u64,
    /// Whether something is wrong.
    pub is_error: bool,
}

/// Sends until it is to stop, or with `once` until everything is sent. False if, with `once`, some of it was not accepted.
///
/// # Errors
/// The directory or the cursor cannot be read, another process sends to the same receiver, or, with `once`, the receiver did not
/// answer.
pub fn run(
    directory: &Path,
    endpoint: &Endpoint,
    receiver: &mut dyn Receiver,
    options: &PushOptions,
    surroundings: &Surroundings<'_>,
) -> Result<bool> {
    let mut cursor = Cursor::open(directory, &endpoint.url)?;
    let mut push = Push {
        directory,
        endpoint,
        receiver,
        options,
        surroundings,
        limit: options.max_message,
        renewals: (surroundings.renewals)(),
        is_complete: true,
        printed: RefCell::default(),
    };
    if options.once {
        let is_all = push.send_all(&mut cursor)?;
        return Ok(is_all && push.is_complete);
    }
    let mut seen = None;
    while !(surroundings.stop)() {
        // A directory has another time of change when a segment is added or removed.
        let changed = changed(directory);
        if changed.is_none() || changed != seen {
            seen = match push.send_all(&mut cursor) {
                Ok(true) => changed,
                Ok(false) => None,
                // What runs for months goes on when the directory can be read again.
                Err(e) => {
                    push.print("failed", &format!("{}: {}", e.what, e.why));
                    None
                }
            };
        }
        (surroundings.wait)(options.poll);
    }
    Ok(true)
}

/// What became of a message.
enum Sent {
    Accepted,
    /// It is not sent again.
    Refused,
    TooLarge,
    Stopped,
}

/// What became of a segment.
enum SegmentSent {
    /// Nothing of it is to be sent any more.
    Done,
    Stopped,
    /// The history has dropped it.
    Gone,
}

struct Push<'a> {
    directory: &'a Path,
    endpoint: &'a Endpoint,
    receiver: &'a mut dyn Receiver,
    options: &'a PushOptions,
    surroundings: &'a Surroundings<'a>,
    /// Largest message, as far as is known.
    limit: usize,
    renewals: u32,
    /// Nothing was refused, damaged or dropped.
    is_complete: bool,
    /// By kind.
    printed: RefCell<Repetitions<&'static str>>,
}

impl Push<'_> {
    fn count(&self, change: impl FnOnce(&mut PushMetrics)) {
        change(&mut self.surroundings.metrics.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Prints an error, unless one of its kind was printed in the last minute; then it is counted.
    fn print(&self, kind: &'static str, text: &str) {
        self.print_event(kind, text, true);
    }

    /// The same for what is no error.
    fn inform(&self, kind: &'static str, text: &str) {
        self.print_event(kind, text, false);
    }

    fn print_event(&self, kind: &'static str, text: &str, is_error: bool) {
        if let Some(repeated) = self.printed.borrow_mut().count(kind, Instant::now()) {
            (self.surroundings.print)(&Event {
                kind,
                text,
                repeated,
                is_error,
            });
        }
    }

    /// Sends the segments that are there. False if it was stopped before.
    fn send_all(&mut self, cursor: &mut Cursor) -> Result<bool> {
        loop {
            let history = Directory::open(self.directory)?;
            let all = history.segments();
            let is_other = (all.last()).is_some_and(|last| cursor.position().sequence > last.name.sequence + 1);
            if is_other {
                self.inform(
                    "new",
                    "the history is another one than before: it is sent from its beginning",
                );
            }
            let begin = if is_other { 0 } else { cursor.position().sequence };
            self.measure_queue(begin, all);
            let first = all.partition_point(|segment| segment.name.sequence < begin);
            if first == all.len() {
                return Ok(true);
            }
            // What is not known of a receiver is not missing there.
            let mut is_known = !is_other && !cursor.is_new();
            for (at, segment) in all.iter().enumerate().skip(first) {
                let position = cursor.position();
                let sequence = segment.name.sequence;
                if is_known && sequence > position.sequence {
                    self.count_dropped(sequence - position.sequence);
                }
                is_known = true;
                match self.send_segment(&history, segment, cursor)? {
                    SegmentSent::Done => self.measure_queue(sequence + 1, all.get(at..).unwrap_or_default()),
                    SegmentSent::Stopped => return Ok(false),
                    // The next list says what else was dropped.
                    SegmentSent::Gone => break,
                }
            }
        }
    }

    fn count_dropped(&mut self, segments: u64) {
        self.is_complete = false;
        self.count(|metrics| metrics.dropped_segments += segments);
        self.print(
            "dropped",
            &format!("the history has dropped {segments} segments that were not sent"),
        );
    }

    /// Sends what remains of a segment.
    fn send_segment(&mut self, history: &Directory, segment: &Entry, cursor: &mut Cursor) -> Result<SegmentSent> {
        let sequence = segment.name.sequence;
        let mut position = cursor.position();
        if position.sequence != sequence {
            position = Position { sequence, samples: 0 };
        }
        let done = Position {
            sequence: sequence + 1,
            samples: 0,
        };
        let path = history.path_of(&segment.name);
        let damaged = |push: &mut Self, why: &dyn std::fmt::Display| {
            push.is_complete = false;
            push.count(|metrics| metrics.damaged_segments += 1);
            push.print("damaged", &format!("{} is not sent: {why}", path.display()));
        };
        let parts = match history.read(&segment.name) {
            Ok(bytes) => OtlpParts::new(bytes).map_err(|e| e.to_string()),
            Err(e) => match e.kind() {
                io::ErrorKind::NotFound => return Ok(SegmentSent::Gone),
                // What decompression finds wrong.
                io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                    Err(e.to_string())
                }
                _ => {
                    return Err(Error::io(format!("cannot read {}", path.display()), e)
                        .hint("run it as the user who owns the history"));
                }
            },
        };
        let parts = match parts {
            Ok(parts) => parts,
            Err(why) => {
                damaged(self, &why);
                self.advance(cursor, done)?;
                return Ok(SegmentSent::Done);
            }
        };
        let ends = match self.endpoint.protocol {
            Protocol::Otlp | Protocol::Grpc => PartEnd::File,
            Protocol::Pyroscope => PartEnd::Resource,
        };
        let mut limit = self.limit;
        loop {
            let part = match parts.part(position.samples, limit, ends) {
                Ok(Some(part)) => part,
                Ok(None) => break,
                Err(why) => {
                    damaged(self, &why);
                    break;
                }
            };
            let size = part.message.len();
            let message = match self.endpoint.protocol {
                Protocol::Otlp | Protocol::Grpc => Ok(part.message),
                Protocol::Pyroscope => pyroscope::message(&part, position),
            };
            let message = match message {
                Ok(message) => message,
                Err(why) => {
                    damaged(self, &why);
                    break;
                }
            };
            match self.send(&message, part.profiles, position)? {
                Sent::Stopped => return Ok(SegmentSent::Stopped),
                Sent::TooLarge if size > MIN_MESSAGE && part.end > position.samples + 1 => {
                    limit = (limit.min(size) / 2).max(MIN_MESSAGE);
                    self.inform(
                        "size",
                        &format!(
                            "the receiver takes no messages of {} bytes: sending smaller ones",
                            message.len()
                        ),
                    );
                    continue;
                }
                Sent::TooLarge | Sent::Refused => {
                    self.is_complete = false;
                    self.count(|metrics| metrics.refused_profiles += part.profiles as u64);
                }
                // Other segments need not try the sizes again.
                Sent::Accepted => self.limit = limit,
            }
            position.samples = part.end;
            self.advance(cursor, if part.end >= parts.samples() { done } else { position })?;
        }
        if cursor.position() != done {
            self.advance(cursor, done)?;
        }
        self.count(|metrics| metrics.segments += 1);
        Ok(SegmentSent::Done)
    }

    /// Remembers what was accepted. If it cannot be written, it is known until this process ends: the next one would send it
    /// again.
    fn advance(&self, cursor: &mut Cursor, position: Position) -> Result<()> {
        match cursor.write(position) {
            Err(e) if !self.options.once => {
                self.print("cursor", &format!("{}: {}", e.what, e.why));
                Ok(())
            }
            done => done,
        }
    }

    /// Sends a message until it is accepted or refused. `position`: of its segment.
    fn send(&mut self, message: &[u8], profiles: usize, position: Position) -> Result<Sent> {
        let mut attempts = 0;
        let (mut is_renewed, mut is_delayed) = (false, false);
        loop {
            if (self.surroundings.stop)() {
                return Ok(Sent::Stopped);
            }
            self.renew_if_asked();
            let answer = self.receiver.send(message);
            attempts += 1;
            self.count(|metrics| *metrics.messages.entry(answer.code.clone()).or_default() += 1);
            let said = answer.said();
            let after = match answer.verdict {
                Verdict::Accepted { refused } => {
                    if is_delayed {
                        self.printed.borrow_mut().forget(&"later");
                        self.inform("again", &format!("{} accepts messages again", self.endpoint.url));
                    }
                    let refused = refused.min(profiles as u64);
                    if refused > 0 {
                        self.is_complete = false;
                        self.print(
                            "partial",
                            &format!("the receiver refused {refused} of {profiles} profiles: {said}"),
                        );
                    }
                    self.count(|metrics| {
                        metrics.accepted_profiles += profiles as u64 - refused;
                        metrics.refused_profiles += refused;
                        metrics.accepted_bytes += message.len() as u64;
                        metrics.last_accepted = Some(SystemTime::now());
                    });
                    return Ok(Sent::Accepted);
                }
                Verdict::TooLarge => {
                    self.print("large", &format!("the receiver answered {said}"));
                    return Ok(Sent::TooLarge);
                }
                // Tokens change: this is no repetition if there is another one now.
                Verdict::Credentials if !is_renewed && self.renew() => {
                    is_renewed = true;
                    continue;
                }
                Verdict::Credentials | Verdict::Refused => {
                    self.print(
                        "refused",
                        &format!("a message of {profiles} profiles is dropped, the receiver answered {said}"),
                    );
                    return Ok(Sent::Refused);
                }
                Verdict::Later(after) => after,
            };
            if self.options.once && attempts >= ATTEMPTS_ONCE {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!("{} did not accept a message in {attempts} attempts", self.endpoint.url),
                )
                .why(said)
                .hint("run the same command again: it continues where it stopped"));
            }
            let own = self.options.backoff.wait(attempts, random());
            let wait = after.map_or(own, |after| after.min(MAX_RETRY_AFTER).max(own));
            self.print(
                "later",
                &format!(
                    "{} is tried again in {:.1} s: {said}",
                    self.endpoint.url,
                    wait.as_secs_f64()
                ),
            );
            self.count(|metrics| metrics.retries += 1);
            is_delayed = true;
            // The history goes on meanwhile.
            if let Ok(history) = Directory::open(self.directory) {
                self.measure_queue(position.sequence, history.segments());
            }
            if !self.wait(wait) {
                return Ok(Sent::Stopped);
            }
        }
    }

    /// Waits so long; false if it is to stop.
    fn wait(&mut self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        loop {
            if (self.surroundings.stop)() {
                return false;
            }
            self.renew_if_asked();
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return true;
            }
            (self.surroundings.wait)(rest);
        }
    }

    fn renew_if_asked(&mut self) {
        let asked = (self.surroundings.renewals)();
        if asked != self.renewals {
            self.renewals = asked;
            self.renew();
        }
    }

    fn renew(&mut self) -> bool {
        self.receiver.renew().unwrap_or_else(|e| {
            self.print(
                "renew",
                &format!("{}: {}; the ones from before are used", e.what, e.why),
            );
            false
        })
    }

    /// `begin`: the sequence of the first segment that waits.
    fn measure_queue(&self, begin: u64, all: &[Entry]) {
        let waiting = || all.iter().filter(|segment| segment.name.sequence >= begin);
        let oldest = waiting().map(|segment| segment.name.end()).min();
        self.count(|metrics| {
            metrics.queue_segments = waiting().count() as u64;
            metrics.queue_bytes = waiting().map(|segment| segment.size).sum();
            metrics.queue_oldest = oldest.and_then(|end| UNIX_EPOCH.checked_add(Duration::from_millis(end)));
        });
    }
}

/// When a name in the directory was added or removed; `None` if it cannot be known.
fn changed(directory: &Path) -> Option<(i64, i64)> {
    let metadata = fs::metadata(directory).ok()?;
    Some((metadata.mtime(), metadata.mtime_nsec()))
}

/// A number from 0 to 1, for waits that differ between machines.
fn random() -> f64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let bits = RandomState::new().build_hasher().finish();
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

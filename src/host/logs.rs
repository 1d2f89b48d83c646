//! What a recorder that runs for months says: one line of text for each event, for programs that collect such lines.

use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::repetitions::Repetitions;
use crate::escape;
use crate::history::name::date;

/// Maximum number of errors that are told from each other; more count as one of the kind `other`.
const MAX_ERRORS: usize = 64;
/// Maximum number of bytes of a value before it is escaped.
const MAX_VALUE: usize = 1024;
/// The end of a value that was longer.
const CUT: &str = "...";

/// The format of the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// `key=value`, separated by spaces. Values with other characters than the visible ones of ASCII, and those with `=`, `"` or
    /// `\`, are quoted, and escaped as in JSON.
    Logfmt,
    /// An object of JSON. All values but `repeated` are strings.
    Json,
}

/// A writer of events. Each line has the keys `time` (RFC 3339, UTC), `level` and `event`, then those of the event.
///
/// What cannot be written is lost: a full disk must not end the recording.
pub struct Log {
    format: LogFormat,
    state: Mutex<State>,
}

struct State {
    out: Box<dyn Write + Send>,
    clock: Box<dyn Fn() -> Now + Send>,
    errors: Repetitions<Key>,
}

/// Event and kind of an error.
type Key = (&'static str, String);

/// The time, by a clock that can be set and by one that cannot.
#[derive(Clone, Copy)]
struct Now {
    time: SystemTime,
    instant: Instant,
}

impl Log {
    /// A log that writes to standard error.
    pub fn new(format: LogFormat) -> Log {
        let now = || Now {
            time: SystemTime::now(),
            instant: Instant::now(),
        };
        Log::with(format, Box::new(io::stderr()), Box::new(now))
    }

    fn with(format: LogFormat, out: Box<dyn Write + Send>, clock: Box<dyn Fn() -> Now + Send>) -> Log {
        Log {
            format,
            state: Mutex::new(State {
                out,
                clock,
                errors: Repetitions::default(),
            }),
        }
    }

    /// Writes an event. The keys are words without spaces; values longer than 1 KiB are cut.
    pub fn event(&self, name: &'static str, fields: &[(&'static str, &dyn Display)]) {
        let fields = self.fields(fields);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (state.clock)();
        let old = state.errors.take_old(now.instant, None);
        self.write_repeated(&mut state, now, old);
        self.write(&mut state, now.time, "info", name, &fields, 0);
    }

    /// Writes an error as an event with its `kind`, at most once a minute for each event and kind. The next line of it says in
    /// `repeated` how often it happened meanwhile; if it does not happen again, a line without other fields says so.
    pub fn error(&self, name: &'static str, kind: &str, fields: &[(&'static str, &dyn Display)]) {
        let fields = self.fields(&[&[("kind", &kind as &dyn Display)], fields].concat());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (state.clock)();
        let mut key = (name, cut(&kind));
        let old = state.errors.take_old(now.instant, Some(&key));
        self.write_repeated(&mut state, now, old);
        if !state.errors.has_room_for(&key, MAX_ERRORS) {
            key = ("errors", "other".into());
        }
        if let Some(more) = state.errors.count(key, now.instant) {
            self.write(&mut state, now.time, "error", name, &fields, more);
        }
    }

    /// Writes an error that happened `repeated` times since it was written last, as the caller has counted.
    pub fn counted_error(&self, name: &'static str, repeated: u64, fields: &[(&'static str, &dyn Display)]) {
        let fields = self.fields(fields);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (state.clock)();
        self.write(&mut state, now.time, "error", name, &fields, repeated);
    }

    /// Writes how often errors happened that were not written.
    fn write_repeated(&self, state: &mut State, now: Now, repeated: Vec<(Key, u64)>) {
        for ((name, kind), more) in repeated {
            let fields = self.fields(&[("kind", &kind)]);
            self.write(state, now.time, "error", name, &fields, more);
        }
    }

    fn write(&self, state: &mut State, time: SystemTime, level: &str, name: &str, fields: &[u8], repeated: u64) {
        let mut line = Vec::new();
        let head: [(&str, &dyn Display); 3] = [("time", &Time(time)), ("level", &level), ("event", &name)];
        line.extend(self.fields(&head));
        line.extend_from_slice(fields);
        if repeated > 0 {
            // Writing to memory does not fail.
            let _ = match self.format {
                LogFormat::Logfmt => write!(line, " repeated={repeated}"),
                LogFormat::Json => write!(line, ",\"repeated\":{repeated}"),
            };
        }
        // Each field begins with a separator.
        match self.format {
            LogFormat::Logfmt => drop(line.drain(..1)),
            LogFormat::Json => {
                line.splice(..1, *b"{");
                line.push(b'}');
            }
        }
        line.push(b'\n');
        let _ = state.out.write_all(&line);
    }

    /// Fields as text, each with a separator before it.
    fn fields(&self, fields: &[(&str, &dyn Display)]) -> Vec<u8> {
        let mut out = Vec::new();
        for (key, value) in fields {
            let value = cut(value);
            let is_plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'=' | b'"' | b'\\');
            // Writing to memory does not fail.
            let _ = match self.format {
                LogFormat::Logfmt if !value.is_empty() && value.bytes().all(is_plain) => write!(out, " {key}={value}"),
                LogFormat::Logfmt => write!(out, " {key}=").and_then(|()| escape::write_json(&value, &mut out)),
                LogFormat::Json => write!(out, ",\"{key}\":").and_then(|()| escape::write_json(&value, &mut out)),
            };
        }
        out
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (state.clock)();
        let all = state.errors.take_all();
        self.write_repeated(&mut state, now, all);
    }
}

/// The text of a value, with at most [`MAX_VALUE`] bytes and [`CUT`].
fn cut(value: &dyn Display) -> String {
    struct Bounded(String);
    impl fmt::Write for Bounded {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            for c in text.chars() {
                if self.0.len() + c.len_utf8() > MAX_VALUE {
                    return Err(fmt::Error);
                }
                self.0.push(c);
            }
            Ok(())
        }
    }
    let mut bounded = Bounded(String::new());
    if write!(bounded, "{value}").is_err() {
        bounded.0.push_str(CUT);
    }
    bounded.0
}

/// A time as RFC 3339 has it: `2026-11-28T03:14:00.123Z`.
struct Time(SystemTime);

impl Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = since.as_secs();
        let (year, month, day) = date(seconds / 86_400);
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        let ms = since.subsec_millis();
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z"
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("not poisoned").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        /// The lines since the last call, without the time.
        fn take(&self) -> Vec<String> {
            let bytes = std::mem::take(&mut *self.0.lock().expect("not poisoned"));
            let text = String::from_utf8(bytes).expect("UTF-8");
            assert!(text.is_empty() || text.ends_with('\n'), "{text}");
            let line = |line: &str| line.split_once(' ').map_or(line, |(_, rest)| rest).to_string();
            text.lines().map(line).collect()
        }
    }

    /// A log, its lines, and its clock in seconds.
    fn log(format: LogFormat) -> (Log, Lines, Arc<AtomicU64>) {
        let (lines, seconds) = (Lines::default(), Arc::new(AtomicU64::new(0)));
        let (start, clock) = (Instant::now(), seconds.clone());
        let now = move || {
            let since = Duration::from_secs(clock.load(Ordering::Relaxed));
            Now {
                time: UNIX_EPOCH + Duration::from_millis(1_795_835_640_123) + since,
                instant: start + since,
            }
        };
        (
            Log::with(format, Box::new(lines.clone()), Box::new(now)),
            lines,
            seconds,
        )
    }

    #[test]
    fn an_event_is_one_line_of_logfmt() {
        let (log, lines, _) = log(LogFormat::Logfmt);
        log.event(
            "segment",
            &[
                ("sequence", &7),
                ("path", &"/a b/\"c\"\n"),
                ("empty", &""),
                ("sum", &"a=b"),
                ("name", &"é\u{202e}"),
            ],
        );
        let bytes = lines.0.lock().expect("not poisoned").clone();
        assert_eq!(
            String::from_utf8_lossy(&bytes),
            "time=2026-11-28T03:14:00.123Z level=info event=segment sequence=7 path=\"/a b/\\\"c\\\"\\n\" empty=\"\" \
             sum=\"a=b\" name=\"é\\u202e\"\n"
        );
    }

    #[test]
    fn an_event_is_one_object_of_json() {
        let (log, lines, seconds) = log(LogFormat::Json);
        for _ in 0..3 {
            log.error("write", "ENOSPC", &[("path", &"a\"\u{1}")]);
        }
        seconds.store(60, Ordering::Relaxed);
        log.error("write", "ENOSPC", &[]);
        let bytes = lines.0.lock().expect("not poisoned").clone();
        let objects: Vec<serde_json::Value> = bytes
            .split_inclusive(|byte| *byte == b'\n')
            .map(|line| serde_json::from_slice(line).expect("an object"))
            .collect();
        let expected = [
            serde_json::json!({"time": "2026-11-28T03:14:00.123Z", "level": "error", "event": "write", "kind": "ENOSPC",
                "path": "a\"\u{1}"}),
            serde_json::json!({"time": "2026-11-28T03:15:00.123Z", "level": "error", "event": "write", "kind": "ENOSPC",
                "repeated": 2}),
        ];
        assert_eq!(objects, expected);
    }

    #[test]
    fn the_same_error_is_written_once_a_minute_and_counted() {
        let (log, lines, seconds) = log(LogFormat::Logfmt);
        for second in 0..130 {
            seconds.store(second, Ordering::Relaxed);
            log.error("write", "ENOSPC", &[("second", &second)]);
        }
        log.error("write", "EROFS", &[]);
        assert_eq!(
            lines.take(),
            [
                "level=error event=write kind=ENOSPC second=0",
                "level=error event=write kind=ENOSPC second=60 repeated=59",
                "level=error event=write kind=ENOSPC second=120 repeated=59",
                "level=error event=write kind=EROFS",
            ]
        );
        seconds.store(200, Ordering::Relaxed);
        log.event("segment", &[]);
        assert_eq!(
            lines.take(),
            [
                "level=error event=write kind=ENOSPC repeated=9",
                "level=info event=segment"
            ]
        );
        for _ in 0..2 {
            log.error("write", "EROFS", &[]);
        }
        drop(log);
        assert_eq!(
            lines.take(),
            [
                "level=error event=write kind=EROFS",
                "level=error event=write kind=EROFS repeated=1",
            ]
        );
    }

    #[test]
    fn values_and_kinds_are_bounded() {
        let (log, lines, _) = log(LogFormat::Logfmt);
        log.event("long", &[("value", &"é".repeat(MAX_VALUE))]);
        let long = format!("value=\"{}{CUT}\"", "é".repeat(MAX_VALUE / 2));
        assert_eq!(lines.take(), [format!("level=info event=long {long}")]);
        for kind in 0..1000 {
            log.error("many", &kind.to_string(), &[]);
        }
        assert_eq!(lines.take().len(), MAX_ERRORS + 1);
        drop(log);
        assert_eq!(
            lines.take(),
            [format!(
                "level=error event=errors kind=other repeated={}",
                1000 - MAX_ERRORS - 1
            )]
        );
    }
}

//! What a receiver's answer means.
//!
//! Source: "OTLP/HTTP Response", "Failures" and "Bad Data" of the OpenTelemetry protocol's specification 1.11.0.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;

use crate::history::name::days;

/// Bytes of an answer's text that are kept.
const MAX_TEXT: usize = 300;

/// What is to be done after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The message was accepted, except for so many profiles, which are not sent again.
    Accepted { refused: u64 },
    /// The same message may be sent again, not before so long.
    Later(Option<Duration>),
    /// It is larger than the receiver takes.
    TooLarge,
    /// Something is wrong with the token, or it may not send here.
    Credentials,
    /// The message must not be sent again.
    Refused,
}

/// An answer, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status, such as `503`, or the kind of failure: `timeout`, `connection`, `name`, `tls`.
    pub code: String,
    pub verdict: Verdict,
    /// What the receiver says about it, or the failure.
    pub text: String,
}

impl Answer {
    /// No answer: the message may not have arrived.
    pub fn none(kind: &str, text: impl Into<String>) -> Answer {
        Answer {
            code: kind.into(),
            verdict: Verdict::Later(None),
            text: text.into(),
        }
    }

    /// Code and text, as they are printed.
    pub fn said(&self) -> String {
        if self.text.is_empty() {
            self.code.clone()
        } else {
            format!("{}, {}", self.code, self.text)
        }
    }

    /// What an answer of HTTP means. `retry_after`: the header, if there is one. `body`: of the answer, bounded.
    pub fn of_http(status: u16, retry_after: Option<&str>, body: &[u8]) -> Answer {
        let (verdict, text) = match status {
            200..=299 => {
                let partial = Response::decode(body)
                    .unwrap_or_default()
                    .partial_success
                    .unwrap_or_default();
                let refused = u64::try_from(partial.rejected_profiles).unwrap_or(0);
                (Verdict::Accepted { refused }, shortened(&partial.error_message))
            }
            429 | 502 | 503 | 504 => {
                let after = retry_after.and_then(|text| wait_of(text, SystemTime::now()));
                (Verdict::Later(after), text_of(body))
            }
            413 => (Verdict::TooLarge, text_of(body)),
            401 | 403 => (Verdict::Credentials, text_of(body)),
            _ => (Verdict::Refused, text_of(body)),
        };
        Answer {
            code: status.to_string(),
            verdict,
            text,
        }
    }
}

/// `ExportProfilesServiceResponse` of `profiles_service.proto` (opentelemetry-proto 1.11.0).
#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(message, optional, tag = "1")]
    partial_success: Option<PartialSuccess>,
}

/// `ExportProfilesPartialSuccess`.
#[derive(Clone, PartialEq, Message)]
struct PartialSuccess {
    #[prost(int64, tag = "1")]
    rejected_profiles: i64,
    #[prost(string, tag = "2")]
    error_message: String,
}

/// `google.rpc.Status`, the body of failures.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

/// What the body of a failure says: a status, or a text of a proxy.
fn text_of(body: &[u8]) -> String {
    match Status::decode(body) {
        Ok(status) if !status.message.is_empty() => shortened(&status.message),
        _ => shortened(&String::from_utf8_lossy(body)),
    }
}

/// The first line of a text, if it is not too long.
pub fn shortened(text: &str) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    let end = (0..=MAX_TEXT.min(line.len()))
        .rev()
        .find(|end| line.is_char_boundary(*end));
    line[..end.unwrap_or(0)].to_string()
}

/// The wait that a header `Retry-After` asks for (RFC 9110, 10.2.3): seconds, or a date.
fn wait_of(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let then = UNIX_EPOCH + Duration::from_secs(seconds_of_date(text)?);
    Some(then.duration_since(now).unwrap_or_default())
}

/// Seconds since the epoch of a date such as `Sun, 06 Nov 1994 08:49:37 GMT` (`IMF-fixdate` of RFC 9110, 5.6.7).
fn seconds_of_date(text: &str) -> Option<u64> {
    let [_, day, month, year, time, "GMT"] = text.split(' ').collect::<Vec<_>>()[..] else {
        return None;
    };
    let months = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let month = months.iter().position(|name| *name == month)? as u64;
    let [hour, minute, second] = time.split(':').map(|part| part.parse::<u64>().ok()).collect::<Vec<_>>()[..] else {
        return None;
    };
    let (day, year): (u64, u64) = (day.parse().ok()?, year.parse().ok()?);
    let since_epoch = days(year, month + 1, day)?;
    Some(since_epoch * 86_400 + hour?.min(24) * 3600 + minute?.min(60) * 60 + second?.min(60))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_seconds_or_dates() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_700);
        for (text, expected) in [
            ("120", Some(120)),
            (" 0 ", Some(0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(77)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
            ("Thu, 29 Feb 1996 00:00:00 GMT", Some(825_552_000 - 784_111_700)),
            ("Fri, 01 Mar 1996 00:00:00 GMT", Some(825_638_400 - 784_111_700)),
            ("Sun, 06 Nov 1994 08:49:37", None),
            ("Sun, 99 Nov 1994 08:49:37 GMT", None),
            ("Sun, 06 Nov 99999999999999999999 08:49:37 GMT", None),
            ("-1", None),
            ("soon", None),
            ("", None),
        ] {
            assert_eq!(wait_of(text, now), expected.map(Duration::from_secs), "{text}");
        }
    }

    #[test]
    fn answers_mean_what_the_specification_says() {
        let partial = Response {
            partial_success: Some(PartialSuccess {
                rejected_profiles: 2,
                error_message: "too old".into(),
            }),
        };
        let status = Status {
            code: 3,
            message: "no\nmore".into(),
        };
        for (code, after, body, verdict, text) in [
            (200, None, Vec::new(), Verdict::Accepted { refused: 0 }, ""),
            (202, None, b"\xff<html>".to_vec(), Verdict::Accepted { refused: 0 }, ""),
            (
                200,
                None,
                partial.encode_to_vec(),
                Verdict::Accepted { refused: 2 },
                "too old",
            ),
            (
                429,
                Some("7"),
                Vec::new(),
                Verdict::Later(Some(Duration::from_secs(7))),
                "",
            ),
            (502, None, Vec::new(), Verdict::Later(None), ""),
            (503, Some("x"), status.encode_to_vec(), Verdict::Later(None), "no"),
            (504, None, Vec::new(), Verdict::Later(None), ""),
            (413, None, Vec::new(), Verdict::TooLarge, ""),
            (401, None, Vec::new(), Verdict::Credentials, ""),
            (400, None, b"bad\n".to_vec(), Verdict::Refused, "bad"),
            (404, None, Vec::new(), Verdict::Refused, ""),
            (301, None, Vec::new(), Verdict::Refused, ""),
            (500, Some("7"), Vec::new(), Verdict::Refused, ""),
        ] {
            let answer = Answer::of_http(code, after, &body);
            let expected = Answer {
                code: code.to_string(),
                verdict,
                text: text.into(),
            };
            assert_eq!(answer, expected);
        }
        let long = Answer::of_http(400, None, "ä".repeat(500).as_bytes()).text;
        assert_eq!(long.len(), MAX_TEXT);
    }
}

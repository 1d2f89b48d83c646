//! Names of segments: `0000001234-20261128T031400.123Z-60000.otlp.gz`.

use std::fmt;

/// What follows the parts of the name.
pub const SUFFIX: &str = ".otlp.gz";
/// Digits of the sequence.
const SEQUENCE_DIGITS: usize = 10;
const DAY: u64 = 86_400_000;
/// Ends the range of times, ms: the year 10000.
const END_OF_TIME: u64 = 253_402_300_800_000;

/// What the name of a segment says, so that it is chosen without being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentName {
    /// Its place in the order of segments: clocks may be stepped, this is not.
    pub sequence: u64,
    /// When it began, ms since the Unix epoch.
    pub start: u64,
    /// Its length, ms.
    pub duration: u64,
}

impl SegmentName {
    /// The largest sequence that a name has room for.
    pub const MAX_SEQUENCE: u64 = 9_999_999_999;

    /// What a file name says; `None` if it is not one of a segment. Only names as they are written are accepted.
    pub fn parse(name: &str) -> Option<SegmentName> {
        let mut parts = name.strip_suffix(SUFFIX)?.splitn(3, '-');
        let (sequence, start, duration) = (parts.next()?, parts.next()?, parts.next()?);
        let parsed = SegmentName {
            sequence: digits(sequence)?,
            start: time(start)?,
            duration: digits(duration)?,
        };
        (parsed.to_string() == name).then_some(parsed)
    }

    /// When it ended, ms since the Unix epoch.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.duration)
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.start.min(END_OF_TIME - 1);
        let (year, month, day) = date(start / DAY);
        let time = start % DAY;
        let (hour, minute, second) = (time / 3_600_000, time / 60_000 % 60, time / 1000 % 60);
        write!(
            f,
            "{:0SEQUENCE_DIGITS$}-{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}.{:03}Z-{}{SUFFIX}",
            self.sequence,
            time % 1000,
            self.duration
        )
    }
}

fn digits(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_number)
}

/// `20261128T031400.123Z`, as ms since the Unix epoch.
fn time(text: &str) -> Option<u64> {
    let part = |range: std::ops::Range<usize>| digits(text.get(range)?);
    let days = days(part(0..4)?, part(4..6)?, part(6..8)?)?;
    let seconds = part(9..11)? * 3600 + part(11..13)? * 60 + part(13..15)?;
    Some(days * DAY + seconds * 1000 + part(16..19)?)
}

/// Days from the Unix epoch to a date of the Gregorian calendar; `None` if there is no such date after it.
pub fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    let is_valid = (1970..10_000).contains(&year) && (1..=12).contains(&month) && day >= 1;
    let first = |month: u64| first_of_month(year + month / 12, month % 12);
    let start = is_valid.then(|| first(month - 1))?;
    (day <= first(month) - start).then_some(start + day - 1)
}

/// Days from the Unix epoch to the first day of a month, which counts from 0.
fn first_of_month(year: u64, month: u64) -> u64 {
    const BEFORE: [u64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let is_leap = year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let leap_days = |years: u64| years / 4 - years / 100 + years / 400;
    let before = (year - 1970) * 365 + leap_days(year - 1) - leap_days(1969);
    before + BEFORE.get(month as usize).unwrap_or(&0) + u64::from(is_leap && month > 1)
}

/// Year, month and day of a day since the Unix epoch.
pub fn date(day: u64) -> (u64, u64, u64) {
    let mut year = 1970 + day / 366;
    while first_of_month(year + 1, 0) <= day {
        year += 1;
    }
    let month = (0..12)
        .rev()
        .find(|month| first_of_month(year, *month) <= day)
        .unwrap_or(0);
    (year, month + 1, day - first_of_month(year, month) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_again() {
        let name = SegmentName {
            sequence: 1234,
            start: 1_795_835_640_123,
            duration: 60_000,
        };
        assert_eq!(name.to_string(), "0000001234-20261128T031400.123Z-60000.otlp.gz");
        for start in (0..END_OF_TIME).step_by(86_400_000 * 13 + 7_654_321) {
            let name = SegmentName { start, ..name };
            assert_eq!(SegmentName::parse(&name.to_string()), Some(name));
        }
    }

    #[test]
    fn other_names_are_refused() {
        for name in [
            "",
            "lock",
            "0000001234-20261128T031400.123Z-60000.otlp",
            "1234-20261128T031400.123Z-60000.otlp.gz",
            "0000001234-20261328T031400.123Z-60000.otlp.gz",
            "0000001234-20260229T031400.123Z-60000.otlp.gz",
            "0000001234-20261128T251400.123Z-60000.otlp.gz",
            "0000001234-20261128T031400.123Z-+60000.otlp.gz",
            "0000001234-20261128T031400.123Z-060000.otlp.gz",
            "0000001234-20261128é31400.123Z-60000.otlp.gz",
            "0000001234-20261128T031400.123Z-99999999999999999999999.otlp.gz",
        ] {
            assert_eq!(SegmentName::parse(name), None, "{name}");
        }
    }

    #[test]
    fn leap_days() {
        for (date_of, day) in [((1970, 1, 1), 0), ((2000, 2, 29), 11_016), ((2100, 3, 1), 47_541)] {
            assert_eq!(days(date_of.0, date_of.1, date_of.2), Some(day));
            assert_eq!(date(day), date_of);
        }
        assert_eq!(days(2100, 2, 29), None);
    }
}

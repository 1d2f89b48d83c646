//! Which rows of a table are shown: filters as those of `pstats`, applied in order.

use regex_lite::Regex;

use crate::error::{Error, ErrorKind, Result};

/// One filter argument.
#[derive(Clone, Debug)]
pub enum RowFilter {
    /// The first rows.
    Count(usize),
    /// The first part of the rows, in 0 to 1.
    Fraction(f64),
    /// Rows whose text matches.
    Pattern(Regex),
}

/// Parses a filter: `20` rows, `0.1` or `10%` of the rows, else a regular expression.
///
/// # Errors
/// `Usage` for an invalid expression, or a fraction above 1.
pub fn parse(word: &str) -> Result<RowFilter> {
    if let Ok(count) = word.parse() {
        return Ok(RowFilter::Count(count));
    }
    let percent = word.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
    if let Some(part) = percent.map(|p| p / 100.0).or_else(|| word.parse().ok()) {
        return match part {
            0.0..=1.0 => Ok(RowFilter::Fraction(part)),
            _ => Err(Error::new(ErrorKind::Usage, format!("invalid fraction `{word}`"))
                .why("a fraction of the rows is a number from 0.0 to 1.0, or from 0% to 100%")
                .hint("use 20 for the first 20 rows, 0.1 for the first tenth")),
        };
    }
    pattern(word).map(RowFilter::Pattern)
}

/// A regular expression.
///
/// # Errors
/// `Usage` if it is not one.
pub fn pattern(word: &str) -> Result<Regex> {
    Regex::new(word).map_err(|e| {
        Error::new(ErrorKind::Usage, format!("invalid regular expression `{word}`"))
            .why(e.to_string())
            .hint(format!(
                "to search for the literal text: '{}'",
                regex_lite::escape(word)
            ))
    })
}

/// Applies the filters in order; patterns are matched against `text`.
pub fn apply<T>(rows: &mut Vec<T>, filters: &[RowFilter], text: impl Fn(&T) -> String) {
    for filter in filters {
        match filter {
            RowFilter::Count(count) => rows.truncate(*count),
            RowFilter::Fraction(part) => rows.truncate((rows.len() as f64 * part).round() as usize),
            RowFilter::Pattern(pattern) => rows.retain(|row| pattern.is_match(&text(row))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restrictions_are_applied_in_order() {
        for (words, expected) in [
            (&[][..], "a b ab c ba"),
            (&["2"], "a b"),
            (&["0.4"], "a b"),
            (&["40%"], "a b"),
            (&["0.5"], "a b ab"),
            (&["b"], "b ab ba"),
            (&["b", "1"], "b"),
            (&["1", "b"], ""),
            (&["^a", "b$"], "ab"),
            (&["0"], ""),
            (&["1.0", "9999999"], "a b ab c ba"),
        ] {
            let words: Vec<_> = words.iter().map(|word| parse(word).unwrap()).collect();
            let mut rows = vec!["a", "b", "ab", "c", "ba"];
            apply(&mut rows, &words, |row| row.to_string());
            assert_eq!(rows.join(" "), expected, "{words:?}");
        }
        for (word, why) in [("1.5", "fraction"), ("200%", "fraction"), ("a(", "open group")] {
            let e = parse(word).unwrap_err();
            assert!(e.kind == ErrorKind::Usage && e.why.contains(why), "{e}");
        }
    }
}

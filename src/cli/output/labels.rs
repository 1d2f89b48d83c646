//! Labels of samples: filters by them, and the rows of a table.

use std::path::Path;

use super::table_rows::ReportRow;
use crate::cli::args::LabelArgs;
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::export::select;
use crate::profile::labels::{LabelFilter, SPAN};
use crate::profile::model::Profile;

/// Labels that an error lists.
const LISTED: usize = 10;

/// The samples of a profile that have the labels requested.
///
/// # Errors
/// `Data`: none has them.
pub fn select(profile: Profile, options: &LabelArgs, file: &Path) -> Result<Profile> {
    let filters = options.filters();
    if filters.is_empty() {
        return Ok(profile);
    }
    check(&profile, file)?;
    let is_in = |set: &Vec<(String, String)>| filters.iter().all(|filter| filter.matches(set));
    if !profile.labels.sets.iter().any(is_in) {
        let shown = |LabelFilter { key, value }: &LabelFilter| format!("{key}={value}");
        let wanted: Vec<String> = filters.iter().map(shown).collect();
        let rows = profile.by_label(0).into_iter();
        let known: Vec<String> = rows
            .filter_map(|row| row.label)
            .map(|(key, value)| format!("{key}={value}"))
            .take(LISTED)
            .collect();
        return Err(Error::new(
            ErrorKind::Data,
            format!("no sample has {}", line(&wanted.join(" and "))),
        )
        .why(format!("most samples have {}", line(&known.join(", "))))
        .hint(format!(
            "list all labels with `nativeprof report {} --by label`",
            file.display()
        )));
    }
    Ok(select::by_labels(&profile, &filters))
}

/// # Errors
/// `Data`: the profile has no labels.
fn check(profile: &Profile, file: &Path) -> Result<()> {
    if profile.labels.is_empty() {
        Err(Error::new(
            ErrorKind::Data,
            format!("{} has no labels", line(&file.to_string_lossy())),
        )
        .why("no span was active in its samples, or it was recorded without --spans")
        .hint("mark parts of the program with `with nativeprof.span(\"NAME\"):`, and record it with --spans"))
    } else {
        Ok(())
    }
}

/// Samples by label. A sample in nested spans is in the TOTAL of each, and in the SELF of the innermost one.
///
/// # Errors
/// `Data`: the profile has no labels.
pub fn rows(profile: &Profile, file: &Path) -> Result<Vec<ReportRow>> {
    check(profile, file)?;
    let rows = profile.by_label(0).into_iter().filter(|row| row.total > 0);
    Ok(rows
        .map(|row| ReportRow {
            name: match row.label {
                Some((key, name)) if key == SPAN => name,
                Some((key, value)) => format!("{key}={value}"),
                None => "[no label]".into(),
            },
            self_count: row.self_count,
            total: row.total,
            ..ReportRow::default()
        })
        .collect())
}

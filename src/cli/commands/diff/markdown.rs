//! The comparison as Markdown: for the summary of a job, or a comment on a pull request.

use super::gate::{Gate, Verdict};
use super::text::{MAKES_UP, Text};
use crate::cli::args::DiffBy;
use crate::cli::output::row_filter::RowFilter;
use crate::cli::output::table::{Overflow, shortened};
use crate::cli::output::table_rows::{ReportRow, kind_name};
use crate::escape::{line, markdown_block, markdown_code};
use crate::profile::diff::Change;
use crate::profile::summary::counted;

/// Bytes of the text, at most: GitHub refuses comments of more than 65,536 characters.
const MAX_BYTES: usize = 65_000;
/// Bytes that are kept for what follows the last row.
const END: usize = 1000;
/// Rows that are not folded.
const OPEN_ROWS: usize = 20;
/// Columns of a name, of a place and of a line about the recordings.
const NAME: usize = 120;
const PLACE: usize = 80;
const LINE: usize = 600;
/// Lines of the verdict, and about the recordings.
const HEADLINES: usize = 5;
const ABOUT: usize = 10;

impl Text<'_> {
    /// What `--markdown` prints: the verdict, the largest changes, and the others folded.
    pub fn markdown(&self, filters: &[RowFilter], verdict: Option<&Verdict<'_>>) -> String {
        let mut out = self.headline(verdict);
        let rows = self.rows_with_all(filters);
        let lines: Vec<String> = rows.iter().map(|row| self.line(row)).collect();
        let (open, folded) = lines.split_at(lines.len().min(OPEN_ROWS));
        let about = [self.about(), self.renamed()].concat();
        let about = block(&about[..about.len().min(ABOUT)]);
        let room = MAX_BYTES.saturating_sub(about.len() + END);
        let mut left_out: u64 = 0;
        let head = self.head();
        let mut table = |lines: &[String], out: &mut String| {
            out.push_str(&head);
            for line in lines {
                if out.len() + line.len() <= room {
                    out.push_str(line);
                } else {
                    left_out += 1;
                }
            }
        };
        if !open.is_empty() {
            table(open, &mut out);
        }
        if !folded.is_empty() {
            out.push_str(&format!("\n<details><summary>{} more</summary>\n\n", folded.len()));
            table(folded, &mut out);
            out.push_str("\n</details>\n");
        }
        if left_out > 0 {
            let rows = counted(left_out, "rows");
            out.push_str(&format!("\n{rows} left out: this text would be too long.\n"));
        }
        if rows.iter().any(|(change, _)| change.makes_up) {
            out.push_str(&format!("\n\\*: {MAKES_UP}\n"));
        }
        out + "\n" + &about
    }

    /// The verdict as a heading, and what it means for which rows.
    fn headline(&self, verdict: Option<&Verdict<'_>>) -> String {
        let significant = self.found.rows.iter().filter(|row| row.is_significant()).count() as u64;
        let (heading, mut lines) = match verdict {
            None if significant == 0 => ("no change".into(), vec![format!("no {}", self.nothing_significant())]),
            None => (format!("{} changed", counted(significant, "rows")), Vec::new()),
            Some(verdict) => match verdict.gate {
                Gate::Passed => (
                    "passed".into(),
                    vec![format!("nothing grew by more than {}", verdict.limit)],
                ),
                Gate::Grown => {
                    let heading = match verdict.grown().count() {
                        0 => "failed".into(),
                        grown => format!("failed, {} grew", counted(grown as u64, "rows")),
                    };
                    (heading, verdict.lines().collect())
                }
                Gate::Undecided => ("undecided".into(), verdict.lines().collect()),
            },
        };
        if lines.len() > HEADLINES {
            let more = lines.len() - HEADLINES;
            lines.truncate(HEADLINES);
            lines.push(format!("and {more} more"));
        }
        let block = match &lines[..] {
            [] => String::new(),
            lines => block(lines) + "\n",
        };
        format!("### nativeprof: {heading}\n\n{block}")
    }

    /// The titles of the columns.
    fn head(&self) -> String {
        let unit = self.unit();
        let mut titles = vec![format!("Before, {unit}"), format!("After, {unit}"), "Change".into()];
        let numbers = titles.len();
        titles.extend(self.intervals().map(sentence_case));
        if self.options.by == DiffBy::Function {
            titles.push("Kind".into());
        }
        titles.push(sentence_case(self.title_of_rows()));
        if self.options.by == DiffBy::Function {
            titles.push("Where".into());
        }
        let rule: String = (0..titles.len())
            .map(|at| if at < numbers { " ---: |" } else { " --- |" })
            .collect();
        format!("| {} |\n|{rule}\n", titles.join(" | "))
    }

    /// A row of the table, with a significant change in bold type.
    fn line(&self, (change, row): &(&Change<'_>, ReportRow)) -> String {
        let is_marked = change.is_significant() && !change.makes_up;
        let amount = self.amount(change.change(), true);
        let mut cells = vec![
            self.amount(change.before, false),
            self.amount(change.after, false),
            if is_marked { format!("**{amount}**") } else { amount },
        ];
        cells.extend(self.intervals().map(|_| self.interval(change)));
        if self.options.by == DiffBy::Function {
            cells.push(row.kind.map_or("", kind_name).into());
        }
        let mark = if change.makes_up { "\\* " } else { "" };
        cells.push(format!("{mark}{}", name(row)));
        if self.options.by == DiffBy::Function {
            cells.push(match &*row.place {
                "" => String::new(),
                place => markdown_code(&cut(place, PLACE, Overflow::End)),
            });
        }
        format!("| {} |\n", cells.join(" | "))
    }
}

fn name(row: &ReportRow) -> String {
    markdown_code(&cut(&row.name, NAME, Overflow::Start))
}

fn block(lines: &[String]) -> String {
    let lines: Vec<String> = lines.iter().map(|text| cut(text, LINE, Overflow::Start)).collect();
    markdown_block(lines.iter().map(String::as_str))
}

/// `text` in so many columns; what takes no columns is limited, too.
fn cut(text: &str, width: usize, fit: Overflow) -> String {
    let text = shortened(&line(text), width, fit);
    text.chars().take(2 * width).collect()
}

fn sentence_case(title: &str) -> String {
    let lower = title.to_ascii_lowercase();
    let first = lower.chars().next().map(|c| c.to_ascii_uppercase());
    first.into_iter().chain(lower.chars().skip(1)).collect()
}

//! Text tables for a terminal or a pipe.

use std::borrow::Cow;
use std::io::{self, Write};

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::style::{Color, TerminalStyle};
use crate::escape::line;
use crate::export::short_paths::{place_within, without_tags};

/// Widest column that later columns are aligned to, where the width is unlimited.
const ALIGNED: usize = 60;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// A number: right-aligned, never shortened.
    Number,
    /// A word: left-aligned, never shortened.
    Word,
    /// Text that may lose its end.
    Start,
    /// A place, or several: paths lose their middle first, then the text its start. The line matters.
    End,
}

#[derive(Debug, Default)]
pub struct Cell {
    pub text: String,
    pub color: Color,
}

/// A cell without color.
pub fn plain(text: impl Into<String>) -> Cell {
    Cell {
        text: text.into(),
        color: Color::Plain,
    }
}

/// The table with its headings, ending in a newline. Cells are escaped for terminals.
pub fn draw(columns: &[(&str, Overflow)], rows: &[Vec<Cell>], style: &TerminalStyle) -> String {
    let heading = |(title, _): &(&str, Overflow)| Cell {
        text: title.to_string(),
        color: Color::Bold,
    };
    let heading: Vec<Cell> = columns.iter().map(heading).collect();
    let fits: Vec<Overflow> = columns.iter().map(|(_, fit)| *fit).collect();
    draw_rows(&fits, std::iter::once(&heading).chain(rows), style)
}

/// [`draw`] below an empty line; nothing without rows.
pub fn section(columns: &[(&str, Overflow)], rows: &[Vec<Cell>], style: &TerminalStyle) -> String {
    if rows.is_empty() {
        return String::new();
    }
    format!("\n{}", draw(columns, rows, style))
}

/// The table without headings.
pub fn rows(columns: &[Overflow], rows: &[Vec<Cell>], style: &TerminalStyle) -> String {
    draw_rows(columns, rows.iter(), style)
}

fn draw_rows<'a>(
    fits: &[Overflow],
    rows: impl Iterator<Item = &'a Vec<Cell>> + Clone,
    style: &TerminalStyle,
) -> String {
    let widths = widths(fits, rows.clone(), style);
    let mut out = String::new();
    for row in rows {
        let mut gap = 0;
        for ((cell, fit), width) in row.iter().zip(fits).zip(&widths) {
            if *width == 0 {
                continue;
            }
            let text = text_of(cell, *fit);
            let text = match fit {
                Overflow::Start | Overflow::End if style.width.is_some() => shortened(&text, *width, *fit),
                _ => text.into_owned(),
            };
            let room = width.saturating_sub(text.width());
            let (before, after) = if *fit == Overflow::Number { (room, 0) } else { (0, room) };
            if !text.is_empty() {
                out.extend(std::iter::repeat_n(' ', gap + before));
                out.push_str(&style.paint(cell.color, &text));
                gap = 0;
            } else {
                gap += before;
            }
            gap += after + 2;
        }
        out.push('\n');
    }
    out
}

/// The text of a cell, as it may be sent to a terminal, in full.
fn text_of(cell: &Cell, fit: Overflow) -> Cow<'_, str> {
    let text = line(&cell.text);
    match (fit, text) {
        (Overflow::End, Cow::Borrowed(text)) => without_tags(text),
        (Overflow::End, Cow::Owned(text)) => without_tags(&text).into_owned().into(),
        (_, text) => text,
    }
}

/// How wide each column is; 0: left out.
fn widths<'a>(fits: &[Overflow], rows: impl Iterator<Item = &'a Vec<Cell>>, style: &TerminalStyle) -> Vec<usize> {
    let mut widths = vec![0; fits.len()];
    for row in rows {
        for ((width, cell), fit) in widths.iter_mut().zip(row).zip(fits) {
            *width = (*width).max(text_of(cell, *fit).width());
        }
    }
    let elastic: Vec<usize> = (0..fits.len())
        .filter(|i| matches!(fits[*i], Overflow::Start | Overflow::End))
        .collect();
    let Some(screen) = style.width else {
        for i in elastic {
            widths[i] = widths[i].min(ALIGNED);
        }
        return widths;
    };
    let fixed: usize = (0..fits.len())
        .filter(|i| !elastic.contains(i))
        .map(|i| widths[i] + 2)
        .sum();
    let mut room = screen.saturating_sub(fixed);
    // Each column takes what it needs of its part; the first ones get the remaining width.
    let mut needs: Vec<usize> = elastic.iter().map(|i| widths[*i]).collect();
    if elastic.len() > 1 && room < 12 * elastic.len() {
        // Too narrow for two: the name matters.
        for i in &elastic[1..] {
            widths[*i] = 0;
        }
        needs.truncate(1);
    }
    room = room.saturating_sub(2 * needs.len().saturating_sub(1));
    let count = needs.len();
    for at in (0..count).rev() {
        let others: usize = needs[..at].iter().sum();
        let part = room / (at + 1);
        let mine = needs[at].min(part.max(room.saturating_sub(others))).max(1);
        widths[elastic[at]] = mine;
        room = room.saturating_sub(mine);
    }
    widths
}

/// `text` in so many columns, with `…` where something was left out.
pub fn shortened(text: &str, width: usize, fit: Overflow) -> String {
    if text.width() <= width {
        return text.into();
    }
    if fit == Overflow::End {
        return place_within(text, &|text| text.width() <= width).into_owned();
    }
    let room = width.saturating_sub(1);
    let mut used = 0;
    let fits = |c: &char| {
        used += c.width().unwrap_or(0);
        used <= room
    };
    let mut kept: String = text.chars().take_while(fits).collect();
    kept.push('…');
    kept
}

/// Writes to standard output; a pipe closed by its reader is not an error.
///
/// # Errors
/// Any other one.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_shortened_by_their_width_on_the_screen() {
        for (text, width, fit, expected) in [
            ("abcdef", 6, Overflow::Start, "abcdef"),
            ("abcdef", 5, Overflow::Start, "abcd…"),
            ("abcdef", 5, Overflow::End, "…cdef"),
            ("数値計算", 8, Overflow::Start, "数値計算"),
            ("数値計算", 7, Overflow::Start, "数値計…"),
            ("数値計算", 6, Overflow::Start, "数値…"),
            ("数値計算", 6, Overflow::End, "…計算"),
            (
                "e\u{301}e\u{301}e\u{301}",
                3,
                Overflow::Start,
                "e\u{301}e\u{301}e\u{301}",
            ),
            ("abc", 1, Overflow::End, "…"),
            (
                "serve (/srv/app/web/server.py:7)",
                21,
                Overflow::End,
                "serve (…/server.py:7)",
            ),
            ("serve (/srv/app/web/server.py:7)", 15, Overflow::End, "…/server.py:7)"),
        ] {
            assert_eq!(shortened(text, width, fit), expected, "{text} in {width}");
        }
    }

    fn table(width: Option<usize>) -> String {
        let columns = [
            ("N", Overflow::Number),
            ("NAME", Overflow::Start),
            ("WHERE", Overflow::End),
        ];
        let row = |n: &str, name: &str, place: &str| vec![plain(n), plain(name), plain(place)];
        let rows = [
            row("7", "計算", "/srv/app/solver.py:31"),
            row("1234", "a_long_name_of_a_function\x1b[2J", ""),
        ];
        draw(
            &columns,
            &rows,
            &TerminalStyle {
                width,
                ..TerminalStyle::default()
            },
        )
    }

    #[test]
    fn tables_fit() {
        let wide = "   N  NAME                              WHERE\n   \
                    7  計算                              /srv/app/solver.py:31\n\
                    1234  a_long_name_of_a_function\\x1b[2J\n";
        assert_eq!(table(None), wide);
        assert_eq!(table(Some(100)), wide);
        assert_eq!(
            table(Some(44)),
            "   N  NAME                WHERE\n   \
             7  計算                …/solver.py:31\n\
             1234  a_long_name_of_a_…\n"
        );
        assert_eq!(table(Some(24)), "   N  NAME\n   7  計算\n1234  a_long_name_of_a_…\n");
        for width in 1..60 {
            let widest = table(Some(width)).lines().map(UnicodeWidthStr::width).max();
            assert!(widest <= Some(width.max(8)), "{width}\n{}", table(Some(width)));
        }
    }
}

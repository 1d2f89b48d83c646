//! What the terminal can show: width, color, Unicode.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;

use crate::cli::args::ColorWhen;
use crate::profile::model::FrameKind;

/// Columns below which a table is not squeezed: rows get longer than the terminal instead.
const MIN_WIDTH: usize = 40;

/// What standard output can show. The default is plain text of any width.
#[derive(Clone, Copy, Debug, Default)]
pub struct TerminalStyle {
    /// Columns; `None`: unlimited.
    pub width: Option<usize>,
    pub color: bool,
    /// Characters other than ASCII, going by the locale.
    pub unicode: bool,
}

impl TerminalStyle {
    /// The style for standard output. `COLUMNS` sets the width, for a pipe too; `NO_COLOR` disables color.
    pub fn of_stdout(color: ColorWhen) -> TerminalStyle {
        TerminalStyle::of(io::stdout(), color)
    }

    /// The same for standard error.
    pub fn of_stderr() -> TerminalStyle {
        TerminalStyle::of(io::stderr(), ColorWhen::Auto)
    }

    fn of(stream: impl IsTerminal + AsFd, color: ColorWhen) -> TerminalStyle {
        let terminal = stream.is_terminal();
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let columns = set("COLUMNS").and_then(|text| text.parse().ok());
        let size = || terminal_size::terminal_size_of(&stream).map(|(width, _)| width.0.into());
        let is_dumb = set("TERM").is_some_and(|term| term == "dumb");
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
            .into_iter()
            .find_map(set)
            .unwrap_or_default();
        TerminalStyle {
            width: columns
                .or_else(|| if terminal { size().or(Some(80)) } else { None })
                .filter(|width| *width > 0)
                .map(|width: usize| width.max(MIN_WIDTH)),
            color: match color {
                ColorWhen::Always => true,
                ColorWhen::Never => false,
                ColorWhen::Auto => terminal && set("NO_COLOR").is_none() && !is_dumb,
            },
            unicode: terminal && locale.to_ascii_lowercase().replace('-', "").contains("utf8"),
        }
    }

    /// `text` between the escape sequences of a color.
    pub fn paint(&self, color: Color, text: &str) -> String {
        match color {
            Color::Plain => text.into(),
            _ if !self.color || text.is_empty() => text.into(),
            color => format!("\x1b[{}m{text}\x1b[0m", color as u8),
        }
    }
}

/// Colors of the terminal's own palette, which its user chose to be readable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Color {
    #[default]
    Plain = 0,
    Bold = 1,
    Dim = 2,
    Red = 31,
    Green = 32,
    Yellow = 33,
    Magenta = 35,
    Cyan = 36,
}

/// The color of a kind of frames.
pub fn color(kind: FrameKind) -> Color {
    match kind {
        FrameKind::Python => Color::Cyan,
        FrameKind::Native | FrameKind::Inlined => Color::Yellow,
        FrameKind::Kernel => Color::Magenta,
        FrameKind::Truncated => Color::Red,
        FrameKind::Unknown | FrameKind::State => Color::Dim,
        FrameKind::Root | FrameKind::Process | FrameKind::Thread | FrameKind::Task | FrameKind::Worker => Color::Green,
    }
}

//! Draws the screen: three lines of metadata, a table, a line of keys. Names are escaped.

use ratatui::Frame as Screen;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row as TableRow, Table};
use unicode_width::UnicodeWidthStr;

use super::SINCE_START;
use super::app::{App, Page, Prompt};
use super::rows::{TopOrder, TopRow};
use crate::escape::line;
use crate::export::short_paths::{place_within, without_tags};
use crate::profile::lags::LagSite;
use crate::profile::model::{FrameKind, Profile};
use crate::profile::resident::ResidentMemory;
use crate::profile::summary::percent;
use crate::profile::values::Unit;
use crate::profile::waits::WaitSite;

/// Narrower screens have fewer columns; the table of waits has more than others.
const WIDE: u16 = 90;
const WIDE_WAITS: u16 = 120;
const NARROW: u16 = 50;
/// Maximum indentation of a name.
const MAX_DEPTH: usize = 40;

/// Keys, and what they do.
const HELP: &[(&str, &str)] = &[
    (
        "1 2 3 4 5 Tab",
        "functions, merged stacks, threads, waits (--mode wall), what blocked event loops (--lag)",
    ),
    ("Up Down PgUp PgDn Home End", "move"),
    (
        "Enter",
        "callers and callees of a function; one thread's samples; what kept a loop, and the stack there",
    ),
    ("Esc", "back; then clear filter and thread"),
    ("s", "sort by self, total, name"),
    ("/", "filter by a regular expression"),
    ("+ -", "a longer or shorter time"),
    ("f  Space", "freeze / resume"),
    ("a", "all threads"),
    ("i", "the interpreter's own frames, or not"),
    ("n", "native functions, or as part of the Python ones"),
    ("w", "save the shown samples as a profile (.html .svg ...)"),
    ("q  Ctrl-C", "quit"),
    (
        "",
        "Your functions come first: self is their time with the libraries and C code that they run. Of other functions, self is the \
         samples with the function innermost. total: anywhere on the stack. Percentages are of the samples shown.",
    ),
];

/// Columns of the keys, and of the whole.
const KEYS: usize = 16;
const HELP_WIDTH: u16 = 76;

const NO_THREADS: &str = " no samples of single threads in this time; a history has none";
const NO_WAITS: &str = " no waits in this time; `nativeprof top --mode wall` samples them";

const NO_LAGS: &str = " nothing blocked an event loop for long; `nativeprof top --lag 50ms` watches them";

pub fn draw(screen: &mut Screen<'_>, app: &mut App) {
    let area = screen.area();
    if area.width < 20 || area.height < 6 {
        screen.render_widget(Paragraph::new("terminal too small"), area);
        return;
    }
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(3), Constraint::Min(2), Constraint::Length(1)]).areas(area);
    screen.render_widget(Paragraph::new(facts(app)), head);
    app.page_rows = usize::from(body.height.saturating_sub(1)).max(1);
    let table = match app.page {
        Page::Waits => waits(app, body.width),
        Page::Lags => lags(app, body.width),
        _ => table(app, body.width),
    };
    screen.render_stateful_widget(table, body, &mut app.table);
    let none = match app.page {
        Page::Waits => NO_WAITS,
        Page::Lags => NO_LAGS,
        Page::Threads if app.profile().timeline.is_empty() => NO_THREADS,
        _ => "",
    };
    if !none.is_empty() && app.rows.is_empty() && body.height > 1 {
        let at = Rect {
            y: body.y + 1,
            height: body.height - 1,
            ..body
        };
        screen.render_widget(Paragraph::new(none), at);
    }
    screen.render_widget(Paragraph::new(keys(app)), foot);
    if app.help {
        help(screen, area);
    }
}

fn help(screen: &mut Screen<'_>, area: Rect) {
    let width = HELP_WIDTH.min(area.width);
    let lines = help_lines(usize::from(width.saturating_sub(2)));
    let height = (lines.len() as u16 + 2).min(area.height);
    let at = Rect {
        x: (area.width - width) / 2,
        y: (area.height - height) / 2,
        width,
        height,
    };
    screen.render_widget(Clear, at);
    let block = Block::bordered().title(" Keys ");
    let lines: Vec<Line<'_>> = lines.into_iter().map(Line::from).collect();
    screen.render_widget(Paragraph::new(lines).block(block), at);
}

/// The help in so many columns: each text is wrapped to the right of its keys, or below long ones.
fn help_lines(width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for (keys, text) in HELP {
        let indent = if keys.is_empty() { 1 } else { KEYS };
        let mut line = format!(" {keys:<0$}", indent - 1);
        if line.len() > indent {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
        }
        let mut is_first = true;
        for word in text.split(' ') {
            if !is_first && line.len() + 1 + word.len() > width {
                lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
                is_first = true;
            }
            if !is_first {
                line.push(' ');
            }
            line += word;
            is_first = false;
        }
        lines.push(line);
    }
    lines
}

/// Seconds that the shown samples span: less than the window right after the start.
fn span(p: &Profile, seconds: u64) -> f64 {
    (seconds as f64).min(p.meta.duration).max(0.1)
}

/// A part of the time that was sampled: last 30 s, last 10 min, last 6 h.
fn length(seconds: u64) -> String {
    match seconds {
        SINCE_START => "since the start".into(),
        3600.. if seconds.is_multiple_of(3600) => format!("last {} h", seconds / 3600),
        61.. if seconds.is_multiple_of(60) => format!("last {} min", seconds / 60),
        _ => format!("last {seconds} s"),
    }
}

/// What resident memory of the process is now, and how it became so.
fn memory(account: &ResidentMemory) -> String {
    let total = account.total();
    let show = |bytes: u64| Unit::Bytes.show(bytes);
    format!(
        "RSS {} now: {} at the start + {} grown - {} given back",
        show(total.end()),
        show(total.start),
        show(total.all_grown()),
        show(total.all_returned())
    )
}

fn facts(app: &App) -> Vec<Line<'static>> {
    let p = app.profile();
    let (m, q) = (&p.meta, &p.meta.quality);
    let samples = p.nodes.first().map_or(0, |root| root.count);
    let seconds = span(p, app.seconds);
    let account = m.memory.iter().rfind(|account| account.pid == m.pid);
    let all = match app.value() {
        (kind, bytes) if kind.unit == Unit::Bytes => {
            format!(
                "{} of what grew is still resident, {samples} samples",
                kind.unit.show(bytes)
            )
        }
        (kind, time) if kind.unit == Unit::Nanoseconds => {
            format!("{} {} of all threads", kind.unit.show(time), line(&kind.name))
        }
        _ => format!("{:.0} samples/s", samples as f64 / seconds),
    };
    let mut first = vec![match m.pid {
        // Of many processes.
        0 => "nativeprof".bold(),
        pid => format!("nativeprof {pid}").bold(),
    }];
    if app.ended {
        first.push("  [ended]".red());
    }
    if app.frozen {
        first.push("  [frozen]".yellow());
    }
    first.push(Span::raw(format!("  {}", line(&m.command))));
    let python = if m.python.is_empty() { "no Python" } else { &m.python };
    let mut second = match account {
        Some(account) => format!("{}   {}, {}, {}", memory(account), line(python), m.backend, m.event),
        None => format!("{}  {}, {} at {} Hz", line(python), m.backend, m.event, m.rate),
    };
    if let Some(stopped) = &m.stopped {
        second += &format!(
            ", stops: median {} µs, longest {} µs",
            stopped.median_us, stopped.max_us
        );
    }
    // With other modes than CPU time most samples are of threads that wait.
    let cores = match p.find_value("cpu") {
        Some(cpu) => p.amounts(cpu).first().map_or(0.0, |ns| *ns as f64 / 1e9 / seconds),
        None => samples as f64 / seconds / m.rate.max(1) as f64,
    };
    let cpu = match account {
        Some(_) => String::new(),
        None => format!(", CPU {:.0} %", 100.0 * cores),
    };
    let third = format!(
        "{}: {all}{cpu}   exact {}, repaired {}, partial {}, lost {}",
        length(app.seconds),
        percent(q.exact, q.taken),
        q.repaired,
        q.partial,
        q.lost
    );
    vec![Line::from(first), Line::from(second), Line::from(third)]
}

fn color(kind: FrameKind) -> Style {
    match kind {
        FrameKind::Python => Style::new().fg(Color::Cyan),
        FrameKind::Kernel => Style::new().fg(Color::Magenta),
        FrameKind::Task => Style::new().fg(Color::Green),
        FrameKind::Truncated => Style::new().fg(Color::Red),
        FrameKind::Native | FrameKind::Inlined => Style::new().fg(Color::Yellow),
        FrameKind::Root => Style::new().add_modifier(Modifier::BOLD),
        _ => Style::new(),
    }
}

fn table(app: &App, width: u16) -> Table<'static> {
    let (kind, all) = app.value();
    let unit = kind.unit;
    let seconds = span(app.profile(), app.seconds);
    let (rates, places) = (width >= WIDE, width >= NARROW);
    let used = if rates { 2 * 8 + 2 * 11 + 1 } else { 2 * 8 + 1 };
    let place_width = width.saturating_sub(used) * 2 / 5;
    let mark = |title: &str, by: TopOrder| {
        let arrow = if app.sort == by && app.page != Page::Stacks {
            "v"
        } else {
            " "
        };
        format!("{title}{arrow}")
    };
    let title = match &app.page {
        Page::Functions => mark("FUNCTION", TopOrder::Name),
        Page::Stacks => "STACK".into(),
        Page::Threads => mark("THREAD", TopOrder::Name),
        Page::Waits | Page::Lags => String::new(),
        Page::Lag(_) => "STACK".into(),
        Page::CallersAndCallees(_) => mark("CALLS", TopOrder::Name),
    };
    let mut titles = vec![
        format!("{:>7}", mark("SELF%", TopOrder::SelfCount)),
        format!("{:>7}", mark("TOTAL%", TopOrder::Total)),
    ];
    let mut widths = vec![Constraint::Length(7), Constraint::Length(7)];
    if rates {
        titles.extend(match unit {
            Unit::Nanoseconds => [" SELF TIME".to_string(), "TOTAL TIME".into()],
            Unit::Bytes => ["      SELF".into(), "     TOTAL".into()],
            Unit::Count => ["   SELF/s".into(), "  TOTAL/s".into()],
        });
        widths.extend([Constraint::Length(if unit == Unit::Count { 9 } else { 10 }); 2]);
    }
    titles.push(title);
    widths.push(Constraint::Fill(1));
    if places {
        titles.push("WHERE".into());
        widths.push(Constraint::Length(place_width));
    }
    let share = |n: u64| format!("{:>6.1} ", 100.0 * n as f64 / all.max(1) as f64);
    let rate = |n: u64| match unit {
        Unit::Count => format!("{:>8.1} ", n as f64 / seconds),
        Unit::Nanoseconds | Unit::Bytes => format!("{:>10}", unit.show(n)),
    };
    let row = |r: &TopRow| {
        let numbers = r.kind != FrameKind::Root || r.counts.total > 0;
        let number = |text: String| if numbers { text } else { String::new() };
        let mut cells = vec![number(share(r.counts.self_count)), number(share(r.counts.total))];
        if rates {
            cells.extend([number(rate(r.counts.self_count)), number(rate(r.counts.total))]);
        }
        let mut cells: Vec<Cell<'static>> = cells.into_iter().map(Cell::from).collect();
        let indent = " ".repeat(r.depth.min(MAX_DEPTH).min(usize::from(width) / 4));
        cells.push(Cell::from(format!("{indent}{}", line(&r.name))).style(color(r.kind)));
        if places {
            cells.push(Cell::from(place_in(&r.place, place_width)).dim());
        }
        TableRow::new(cells)
    };
    let rows = app.rows.iter().map(row);
    Table::new(rows, widths)
        .header(TableRow::new(titles).style(Modifier::REVERSED))
        .row_highlight_style(Modifier::REVERSED)
        .column_spacing(1)
}

/// Where threads waited: share of all threads' time, number and lengths of the waits.
fn waits(app: &App, width: u16) -> Table<'static> {
    let p = app.profile();
    let value = p.waiting_time();
    let all = value.and_then(|value| p.amounts(value).first().copied()).unwrap_or(0);
    let seconds = span(p, app.seconds);
    let (is_narrow, is_wide) = (width < NARROW, width >= WIDE_WAITS);
    let mut titles = vec!["TOTAL%".to_string(), "     TOTAL".into()];
    let mut widths = vec![Constraint::Length(6), Constraint::Length(10)];
    if is_wide {
        titles.push("   WAITS/s".into());
    }
    if !is_narrow {
        titles.push("       MAX".into());
    }
    if is_wide {
        titles.extend(["       P50".to_string(), "       P99".into()]);
    }
    widths.resize(titles.len(), Constraint::Length(10));
    let used: u16 = 6 + 10 * (titles.len() as u16 - 1) + titles.len() as u16 + 1;
    let room = width.saturating_sub(used);
    titles.extend(["KIND".to_string(), "WHERE".into()]);
    widths.extend([Constraint::Fill(1), Constraint::Length(room * 3 / 5)]);
    let time = |ns: u64| format!("{:>10}", Unit::Nanoseconds.show(ns));
    let row = |(row, site): (&TopRow, &WaitSite)| {
        let share = 100.0 * site.total as f64 / all.max(1) as f64;
        let mut cells = vec![format!("{share:>6.1}"), time(site.total)];
        if is_wide {
            cells.push(format!("{:>10.1}", site.count / seconds));
        }
        if !is_narrow {
            cells.push(time(site.longest));
        }
        if is_wide {
            cells.extend([time(site.median), time(site.p99)]);
        }
        let mut cells: Vec<Cell<'static>> = cells.into_iter().map(Cell::from).collect();
        cells.push(Cell::from(line(&row.name).into_owned()).style(color(row.kind)));
        cells.push(Cell::from(place_in(&row.place, room * 3 / 5)).dim());
        TableRow::new(cells)
    };
    Table::new(app.rows.iter().zip(&app.sites).map(row), widths)
        .header(TableRow::new(titles).style(Modifier::REVERSED))
        .row_highlight_style(Modifier::REVERSED)
        .column_spacing(1)
}

/// What blocked event loops for long: how often, for how long, in which task and function.
fn lags(app: &App, width: u16) -> Table<'static> {
    let is_narrow = width < NARROW;
    let (mut titles, mut widths) = (Vec::new(), Vec::new());
    if !is_narrow {
        titles.extend(["COUNT".to_string(), "     TOTAL".into()]);
        widths.extend([Constraint::Length(5), Constraint::Length(10)]);
    }
    titles.extend(["   LONGEST".to_string(), "TASK".into(), "WHERE".into()]);
    let used = if is_narrow { 10 + 2 } else { 10 + 2 + 5 + 10 + 2 };
    let room = width.saturating_sub(used);
    widths.extend([
        Constraint::Length(10),
        Constraint::Fill(1),
        Constraint::Length(room * 2 / 3),
    ]);
    let time = |ns: u64| format!("{:>10}", Unit::Nanoseconds.show(ns));
    let row = |(row, site): (&TopRow, &LagSite)| {
        let mut cells = Vec::new();
        if !is_narrow {
            cells.extend([format!("{:>5}", site.count), time(site.total)]);
        }
        cells.push(time(site.longest.length));
        let mut cells: Vec<Cell<'static>> = cells.into_iter().map(Cell::from).collect();
        cells.push(Cell::from(line(&row.name).into_owned()).style(color(row.kind)));
        cells.push(Cell::from(place_in(&row.place, room * 2 / 3)));
        TableRow::new(cells)
    };
    Table::new(app.rows.iter().zip(&app.lag_sites).map(row), widths)
        .header(TableRow::new(titles).style(Modifier::REVERSED))
        .row_highlight_style(Modifier::REVERSED)
        .column_spacing(1)
}

/// A place in so many columns.
fn place_in(place: &str, width: u16) -> String {
    let width = usize::from(width);
    let text = line(place);
    let text = without_tags(&text);
    place_within(&text, &|text| text.width() <= width).into_owned()
}

fn keys(app: &App) -> Line<'static> {
    if let Some(input) = &app.input {
        let prompt = match input.prompt {
            Prompt::Filter => "filter (regular expression): ",
            Prompt::Save => "save to: ",
        };
        let text = Span::raw(line(&input.text).into_owned());
        let text = if input.is_proposed { text.reversed() } else { text };
        return Line::from(vec![prompt.bold(), text, Span::raw("_")]);
    }
    if !app.message.is_empty() {
        return Line::from(line(&app.message).into_owned().bold());
    }
    let mut words = vec![Span::raw(
        " ? help  Tab view  Enter open  s sort  / filter  f freeze  w save  q quit",
    )];
    if !app.filter.is_empty() {
        words.insert(0, format!("[/{}] ", line(&app.filter)).yellow());
    }
    if let Some(tid) = app.thread {
        words.insert(0, format!("[thread {tid}] ").yellow());
    }
    Line::from(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_fits_its_width() {
        let wide = help_lines(74);
        assert!(wide.iter().all(|line| line.len() <= 74), "{wide:#?}");
        assert_eq!(
            wide[0],
            " 1 2 3 4 5 Tab  functions, merged stacks, threads, waits (--mode wall),"
        );
        assert_eq!(wide[1], "                what blocked event loops (--lag)");
        assert!(wide.len() < 23, "a small terminal has 24 lines");
        let narrow = help_lines(40);
        assert!(narrow.iter().all(|line| line.len() <= 40), "{narrow:#?}");
        let words = |lines: &[String]| lines.join(" ").split_whitespace().map(String::from).collect::<Vec<_>>();
        assert_eq!(words(&narrow), words(&wide));
    }
}

//! A profile as a flame graph: an SVG to open in a web browser, drawn by the inferno crate.
//!
//! Colors depend on the kind and name of a frame only, so that two graphs of one program can be compared. A legend is
//! at the bottom.

use std::io::{self, Write};

pub use inferno::flamegraph::color::Color;
use inferno::flamegraph::color::{BackgroundColor, PaletteMap};
use inferno::flamegraph::{Direction, Options, TextTruncateDirection};

use super::collapsed::{NO_STACK, NO_STACK_BELOW, field};
use super::short_paths::ShortPaths;
use crate::escape;
use crate::model::{Frame, FrameKind, Meta, Profile};
use crate::values::Unit;
use crate::view::View;
use crate::view::is_group;

/// Deeper frames are drawn as one, because the text grows with the square of the depth.
const MAX_DEPTH: usize = 1000;
/// Frames narrower than this part of the flame graph are not drawn.
const MIN_WIDTH_PERCENT: f64 = 0.02;
/// Sums above this are scaled down: the flame graph is computed in floating point.
const MAX_TOTAL: u128 = 1 << 53;
/// Characters of the title: those of a window 800 pixels wide, with room for the buttons next to it.
const MAX_TITLE: usize = 56;
const DEEPER: &str = "[truncated]";
const NARROW: &str = "[too narrow to draw]";

const PYTHON: Color = Color { r: 96, g: 165, b: 222 };
const NATIVE: Color = Color { r: 240, g: 138, b: 60 };
const INLINED: Color = Color { r: 250, g: 200, b: 128 };
const KERNEL: Color = Color { r: 176, g: 132, b: 214 };
const TRUNCATED: Color = Color { r: 128, g: 128, b: 128 };
const UNKNOWN: Color = Color { r: 190, g: 186, b: 180 };
const STATE: Color = Color { r: 150, g: 176, b: 196 };
const GROUP: Color = Color { r: 150, g: 200, b: 170 };

/// The controls look like some, at full strength: inferno shows the one for the search at a tenth of it until the pointer is
/// on it. In dark windows texts are light; blocks keep their colors, with dark text on them.
const MORE_STYLE: &str = "#search, #unzoom { opacity:1; text-decoration:underline; }
@media (prefers-color-scheme: dark) {
svg:root { background:#14171c }
rect[fill='url(#background)'] { fill:#14171c }
#title, #subtitle, #details, #matched, #search, #unzoom, #legend text { fill:#e6e9ee }
}
";

const LEGEND: &[(&str, Color)] = &[
    ("Python", PYTHON),
    ("native", NATIVE),
    ("inlined", INLINED),
    ("kernel", KERNEL),
    ("truncated stack", TRUNCATED),
    ("no symbol", UNKNOWN),
    ("process, thread", GROUP),
];

/// Texts and colors of a flame graph.
pub struct FlamegraphStyle<'a> {
    /// The title.
    pub title: String,
    /// The line below the title.
    pub subtitle: String,
    /// What is counted, and how much of it a count of the profile is.
    pub count_name: &'a str,
    /// How much of `count_name` one count of the profile is.
    pub factor: f64,
    /// Text and color of a block. Blocks with the same text have the same color.
    pub paint: &'a dyn Fn(&Frame) -> (String, Color),
    /// Texts and colors of the legend, in their order.
    pub legend: &'a [(&'a str, Color)],
}

/// Writes the profile as a flame graph.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let total = profile.nodes.first().map_or(0, |root| root.count);
    let paths = ShortPaths::new(&profile.frames);
    let paint = |frame: &Frame| {
        let text = block_text(frame, &paths);
        let color = shade(color(frame.kind), &text);
        (text, color)
    };
    let kind = profile.count_type();
    let (count_name, factor) = match kind.unit {
        Unit::Count => (&*kind.name, 1.0),
        Unit::Nanoseconds => ("ms", 1e-6),
        Unit::Bytes => ("KiB", 1.0 / 1024.0),
    };
    let style = FlamegraphStyle {
        title: title(
            &profile.meta,
            &format!("{} {}", kind.unit.show(total), escape::text(&kind.name)),
        ),
        subtitle: subtitle(&profile.meta),
        count_name,
        factor,
        paint: &paint,
        legend: LEGEND,
    };
    draw(profile, &style, out)
}

/// Writes the profile as a flame graph with other texts and colors.
pub fn draw(profile: &Profile, style: &FlamegraphStyle<'_>, out: &mut dyn Write) -> io::Result<()> {
    let mut palette = PaletteMap::default();
    let (lines, total) = draw_lines(profile, style.paint, &mut palette);
    if total == 0 {
        return write_empty(&style.title, out);
    }
    let mut options = Options::default();
    options.title = style.title.clone();
    options.subtitle = Some(style.subtitle.clone());
    options.count_name = style.count_name.to_string();
    options.factor = style.factor;
    options.font_type = "monospace".to_string();
    options.min_width = MIN_WIDTH_PERCENT;
    options.bgcolors = Some(BackgroundColor::Flat(Color { r: 252, g: 252, b: 250 }));
    // From the top down: a flame graph opens at its top, and where some stack is much deeper than the rest (imports are)
    // the other way round shows nothing but that stack's end.
    options.direction = Direction::Inverted;
    // Names come first in our frames, so the end can be shortened.
    options.text_truncate_direction = TextTruncateDirection::Right;
    options.palette_map = Some(&mut palette);
    // Lines are in order of the drawing already; of the ways in, only the one for flame charts takes them so (it
    // reverses them first). Sorting them as text would tear `f` and `f;g` apart when there is an `f (x)`.
    options.flame_chart = true;
    let mut svg = Vec::new();
    inferno::flamegraph::from_lines(&mut options, lines.iter().rev().map(String::as_str), &mut svg)?;
    out.write_all(with_legend(&String::from_utf8_lossy(&svg), style.legend).as_bytes())?;
    out.flush()
}

/// The stacks in drawing order (siblings by name), each a collapsed line, and the sum of their counts.
///
/// Siblings with the same text are combined. Functions too narrow to draw are counted as their caller.
fn draw_lines(
    profile: &Profile,
    paint: &dyn Fn(&Frame) -> (String, Color),
    palette: &mut PaletteMap,
) -> (Vec<String>, u64) {
    let view = View::new(profile);
    let self_counts = view.self_counts();
    let sum: u128 = self_counts.iter().map(|count| u128::from(*count)).sum();
    let shift = (u128::BITS - (sum / MAX_TOTAL).leading_zeros()).min(63);
    let narrow = (sum as f64 * MIN_WIDTH_PERCENT / 100.0) as u64;

    let mut lines = Vec::new();
    let mut total = 0;
    let mut emit = |line: &str, count: u64| {
        let count = count >> shift;
        if count > 0 {
            total += count;
            lines.push(format!("{line} {count}"));
        }
    };
    // What inferno draws itself: the frame around everything, whose name is empty here.
    palette.insert("", GROUP);
    for (name, color) in [(NO_STACK, TRUNCATED), (DEEPER, TRUNCATED), (NARROW, UNKNOWN)] {
        palette.insert(name, color);
    }
    emit(NO_STACK, self_counts[0]);

    // A block to draw: the items with the same text and parent, and where the path to it ends in `line`.
    struct Block {
        items: Vec<u32>,
        text: String,
        base: usize,
        depth: usize,
    }
    let blocks_of = |items: &[u32], base: usize, depth: usize, palette: &mut PaletteMap| -> (Vec<Block>, u64) {
        let mut children: Vec<(String, u32)> = Vec::new();
        let mut hidden = 0u64;
        for &child in items.iter().flat_map(|item| view.children(*item)) {
            let item = &view.items[child as usize];
            let Some(frame) = view.frame(child) else { continue };
            if item.count < narrow {
                hidden = hidden.saturating_add(item.count);
                continue;
            }
            let (text, color) = paint(frame);
            if palette.get(&text).is_none() {
                palette.insert(&text, color);
            }
            children.push((text, child));
        }
        children.sort_unstable();
        let mut blocks: Vec<Block> = Vec::new();
        for (text, child) in children {
            match blocks.last_mut() {
                Some(last) if last.text == text => last.items.push(child),
                _ => blocks.push(Block {
                    items: vec![child],
                    text,
                    base,
                    depth,
                }),
            }
        }
        (blocks, hidden)
    };

    let mut line = String::new();
    let (blocks, hidden) = blocks_of(&[0], 0, 1, palette);
    emit(NARROW, hidden);
    let mut stack: Vec<Block> = blocks.into_iter().rev().collect();
    while let Some(block) = stack.pop() {
        line.truncate(block.base);
        if block.base > 0 {
            line.push(';');
        }
        line.push_str(&block.text);
        let end = line.len();
        let here = block
            .items
            .iter()
            .fold(0u64, |sum, item| sum.saturating_add(self_counts[*item as usize]));
        if block.depth >= MAX_DEPTH {
            emit(&line, here);
            let all = block
                .items
                .iter()
                .fold(0u64, |sum, item| sum.saturating_add(view.items[*item as usize].count));
            line.push(';');
            line.push_str(DEEPER);
            emit(&line, all.saturating_sub(here));
            continue;
        }
        let (blocks, hidden) = blocks_of(&block.items, end, block.depth + 1, palette);
        let group = view.frame(block.items[0]).is_some_and(is_group);
        if group {
            line.push_str(NO_STACK_BELOW);
            emit(&line, here);
            line.truncate(end);
            line.push(';');
            line.push_str(NARROW);
            emit(&line, hidden);
        } else {
            emit(&line, here.saturating_add(hidden));
        }
        stack.extend(blocks.into_iter().rev());
    }
    (lines, total)
}

/// As in collapsed text, with short paths; `_[i]` is not shown, it only keeps an inlined function apart from one that was
/// called.
fn block_text(frame: &Frame, paths: &ShortPaths<'_>) -> String {
    let mut text = match paths.of(&frame.filename) {
        Some(short) if frame.kind == FrameKind::Python => field(&Frame {
            filename: short.to_string(),
            ..frame.clone()
        }),
        _ => field(frame),
    };
    if frame.kind == FrameKind::Inlined {
        text.push_str("_[i]");
    }
    text
}

fn color(kind: FrameKind) -> Color {
    match kind {
        FrameKind::Python => PYTHON,
        FrameKind::Native => NATIVE,
        FrameKind::Inlined => INLINED,
        FrameKind::Kernel => KERNEL,
        FrameKind::Truncated => TRUNCATED,
        FrameKind::State => STATE,
        FrameKind::Unknown => UNKNOWN,
        FrameKind::Root | FrameKind::Process | FrameKind::Thread | FrameKind::Task | FrameKind::Worker => GROUP,
    }
}

/// A tint of `base` that depends on the name only, so that neighbors differ and runs can be compared.
fn shade(base: Color, name: &str) -> Color {
    // FNV-1a: a fixed function, unlike the hashers of the standard library.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
    });
    let lighter = (hash >> 32) % 17;
    let tint = |c: u8| (u64::from(c) + (255 - u64::from(c)) * lighter / 48) as u8;
    Color {
        r: tint(base.r),
        g: tint(base.g),
        b: tint(base.b),
    }
}

/// What was run, and how much there is of it: short, so that it is not below the button for the search in a small window.
fn title(meta: &Meta, amount: &str) -> String {
    let command = if meta.command.is_empty() {
        "nativeprof"
    } else {
        &meta.command
    };
    // Of the program's path the name: `python3 app.py`.
    let (program, arguments) = command.split_once(' ').unwrap_or((command, ""));
    let program = program.rsplit('/').next().unwrap_or(program);
    let command = format!("{program} {arguments}");
    let command = escape::text(command.trim_end());
    let room = MAX_TITLE.saturating_sub(amount.chars().count() + 3);
    let mut title: String = command.chars().take(room).collect();
    if command.chars().nth(room).is_some() {
        title.push('…');
    }
    format!("{title} · {amount}")
}

fn subtitle(meta: &Meta) -> String {
    let q = &meta.quality;
    let parts = [
        ("exact", q.exact),
        ("repaired", q.repaired),
        ("partial", q.partial),
        ("lost", q.lost),
    ];
    let all: u128 = parts.iter().map(|(_, count)| u128::from(*count)).sum();
    let mut facts = Vec::new();
    if meta.pid != 0 {
        facts.push(format!("pid {}", meta.pid));
    }
    if meta.rate != 0 {
        facts.push(format!("{} Hz", meta.rate));
    }
    if all == 0 {
        facts.push("stack quality unknown".to_string());
        return facts.join(" · ");
    }
    let percent = |count: u64| 100.0 * count as f64 / all as f64;
    facts.extend(
        parts
            .iter()
            .map(|(name, count)| format!("{name} {:.1} %", percent(*count))),
    );
    facts.join(" · ")
}

/// Adds a row with the meaning of the colors.
///
/// If a version of inferno writes the surrounding SVG differently, it is left unchanged.
fn with_legend(svg: &str, legend: &[(&str, Color)]) -> String {
    const ROW: usize = 26;
    /// Where inferno writes of a block, above the blocks.
    const DETAILS: usize = 64;
    let height = svg
        .split_once("height=\"")
        .and_then(|(_, rest)| rest.split_once('"')?.0.parse::<usize>().ok());
    let (Some(height), Some(body)) = (height, svg.trim_end().strip_suffix("</svg>")) else {
        return svg.to_string();
    };
    let taller = height + ROW;
    // The SVG, its view box and its background; below the legend, all blocks and the details of the block under the
    // pointer.
    let mut out = body
        .replacen(&format!("height=\"{height}\""), &format!("height=\"{taller}\""), 2)
        .replacen(&format!(" {height}\" xmlns"), &format!(" {taller}\" xmlns"), 1)
        .replacen("</style>", &format!("{MORE_STYLE}</style>"), 1)
        .replacen("<svg id=\"frames\"", &format!("<svg id=\"frames\" y=\"{ROW}\""), 1)
        .replacen(
            &format!("x=\"10\" y=\"{DETAILS}.00\""),
            &format!("x=\"10\" y=\"{}.00\"", DETAILS + ROW),
            1,
        );
    out.push_str("<g id=\"legend\">");
    let mut x = 10;
    let y = DETAILS - 4;
    for (name, color) in legend {
        let text = x + 17;
        let baseline = y + 10;
        out.push_str(&format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"rgb({},{},{})\"/>\
             <text x=\"{text}\" y=\"{baseline}\">{name}</text>",
            color.r, color.g, color.b
        ));
        x = text + 8 * name.len() + 20;
    }
    out.push_str("</g></svg>\n");
    out
}

/// inferno draws an error instead of a profile without samples, which is rare but in order.
fn write_empty(title: &str, out: &mut dyn Write) -> io::Result<()> {
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    writeln!(
        out,
        "<?xml version=\"1.0\"?>\n<svg version=\"1.1\" width=\"1200\" height=\"60\" xmlns=\"http://www.w3.org/2000/svg\">\
         <text x=\"600\" y=\"34\" text-anchor=\"middle\" font-family=\"monospace\" font-size=\"17\">{title}</text></svg>"
    )?;
    out.flush()
}

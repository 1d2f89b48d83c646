//! Source of a function or a file, with the samples of each line.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Value, json};

use super::{RenderedList, ReportContext, several, share};
use crate::cli::input;
use crate::cli::output::style::Color;
use crate::cli::output::table_rows::{ID, function_id};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::profile::function_names::{Named, named};
use crate::profile::model::{Frame, FrameKind, Profile};
use crate::profile::stats::{FunctionId, SelfTotal, source_file};

/// Lines that a function is shown before its first one with samples, where its definition is further away.
const BEFORE: u32 = 3;

/// Functions of one file.
struct FileOfSource<'a> {
    path: &'a str,
    /// First and last line to show.
    range: (u32, u32),
    counts: BTreeMap<u32, SelfTotal>,
}

/// The source of the functions with a name (or its last parts), or of a file: a path, or the end of one. Self samples of
/// Python lines include the C code that they run.
///
/// # Errors
/// `Data` if the profile has no such function or file, or does not know lines, or if the word ends several names.
pub fn source(context: &ReportContext<'_>, word: &str) -> Result<RenderedList> {
    let files = files(context, word)?;
    if files.is_empty() {
        let file = input::shown(context.file);
        return Err(Error::new(
            ErrorKind::Data,
            format!("no function or source file of the profile is called `{}`", line(word)),
        )
        .why("expected a function's name, or a path, or the end of one, such as clean, Job.run, geo::nearest or app/views.py")
        .hint(format!(
            "list functions and files with `nativeprof report {file} --by line`"
        )));
    }
    let (mut list, mut text) = (Vec::new(), String::new());
    let whole = context.stats.samples();
    for file in &files {
        let total = |counts: &SelfTotal| (counts.self_count, counts.total);
        let (self_sum, most) = file
            .counts
            .values()
            .map(total)
            .fold((0, 0), |a: (u64, u64), b| (a.0.saturating_add(b.0), a.1.max(b.1)));
        let title = format!("{}: self {}", line(file.path), context.amount(self_sum));
        text += &format!("{}\n", context.style.paint(Color::Bold, &title));
        let titles = ["SELF", "TOTAL"].map(|word| format!("{:>8}", context.amounts_title(word) + " %"));
        let [self_width, total_width] = titles.each_ref().map(String::len);
        let heading = format!("{}      LINE\n", titles.join(" "));
        text += &context.style.paint(Color::Dim, &heading);
        let excerpt = context
            .profile
            .excerpts
            .iter()
            .find(|excerpt| excerpt.path == file.path);
        let mut lines: BTreeMap<u32, Option<&str>> = file.counts.keys().map(|at| (*at, None)).collect();
        for (at, source) in excerpt.iter().flat_map(|excerpt| &excerpt.lines) {
            if (file.range.0..=file.range.1).contains(at) {
                lines.insert(*at, Some(source));
            }
        }
        let mut before = None;
        for (at, source) in &lines {
            if before.is_some_and(|before: u32| before > 0 && before + 1 < *at) {
                text += &context.style.paint(Color::Dim, "                       ...\n");
            }
            before = Some(*at);
            let shown = if *at == 0 { "[no line]".into() } else { at.to_string() };
            let counts = file.counts.get(at);
            let column = |amount: Option<u64>| match amount {
                Some(amount) if amount > 0 => share(amount, whole),
                _ => String::new(),
            };
            let row = format!(
                "{:>self_width$} {:>total_width$} {shown:>9}  {}",
                column(counts.map(|c| c.self_count)),
                column(counts.map(|c| c.total)),
                line(source.unwrap_or_default())
            );
            let is_hot = counts.is_some_and(|c| c.total > 0 && c.total * 2 >= most);
            text += &if is_hot {
                context.style.paint(Color::Bold, row.trim_end())
            } else {
                row.trim_end().to_string()
            };
            text.push('\n');
            list.push(json!({
                "file": file.path,
                "line": at,
                "self": counts.map_or(0, |c| c.self_count),
                "total": counts.map_or(0, |c| c.total),
                "source": source.map_or(Value::Null, |source| source.into()),
            }));
        }
        if excerpt.is_none() {
            let why = "the file cannot be read, or does not look like source code";
            text += &context
                .style
                .paint(Color::Dim, &format!("{why}: lines with samples only\n"));
        }
        text.push('\n');
    }
    text.pop();
    Ok(("source", list.into(), text))
}

/// Whether the word names a Python function or file of the profile; else it may be a native one.
pub fn is_python(profile: &Profile, word: &str) -> bool {
    let frames = &profile.frames;
    let is_python = |frame: &Frame| frame.kind == FrameKind::Python;
    if frames.iter().any(|frame| is_python(frame) && is_in_file(frame, word)) {
        return true;
    }
    match functions(frames, word) {
        Named::Frames(all) => frames
            .iter()
            .zip(all)
            .any(|(frame, is_named)| is_named && is_python(frame)),
        _ => false,
    }
}

/// The functions with this name or identifier.
fn functions(frames: &[Frame], word: &str) -> Named {
    if word.starts_with(ID) {
        return Named::Frames(frames.iter().map(|frame| function_id(frame) == word).collect());
    }
    named(frames, word, |_| true)
}

fn is_in_file(frame: &Frame, word: &str) -> bool {
    let path = source_file(frame);
    path == word || path.strip_suffix(word).is_some_and(|rest| rest.ends_with('/'))
}

/// What the word names, with its lines' samples.
fn files<'a>(context: &ReportContext<'a>, word: &str) -> Result<Vec<FileOfSource<'a>>> {
    let stats = context.stats;
    let all: Vec<&Frame> = (0..stats.functions().len())
        .map(|id| stats.frame(id as FunctionId))
        .collect();
    let in_file = all.iter().filter(|frame| is_in_file(frame, word));
    let paths: HashSet<&str> = in_file.map(|frame| source_file(frame)).collect();
    let frames = &context.profile.frames;
    let wanted: Vec<bool> = match functions(frames, word) {
        Named::Several(names) if paths.is_empty() => return Err(several(context.file, "--source", word, &names)),
        Named::Frames(wanted) => wanted,
        _ => Vec::new(),
    };
    let wanted = frames.iter().zip(&wanted).filter(|(_, is_wanted)| **is_wanted);
    let wanted: HashSet<(&str, &str)> = wanted.map(|(frame, _)| full_name(frame)).collect();
    let mut files: Vec<FileOfSource<'a>> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    let totals = stats.file_lines().into_iter();
    let totals: HashMap<(&str, u32), SelfTotal> = totals.map(|row| ((row.file, row.line), row.counts)).collect();
    // The lines of the functions; their amounts are those of the file.
    for row in stats.lines() {
        let frame = all[row.function as usize];
        let path = source_file(frame);
        let is_wanted = if paths.is_empty() {
            wanted.contains(&full_name(frame))
        } else {
            paths.contains(path)
        };
        if !is_wanted || path.is_empty() {
            continue;
        }
        let range = match (paths.is_empty(), frame.kind) {
            (false, _) => (0, u32::MAX),
            // No line widens the range.
            (true, _) if row.line == 0 => (u32::MAX, 0),
            (true, FrameKind::Python) => (frame.first_line, row.line),
            (true, _) => (row.line.saturating_sub(BEFORE), row.line + 1),
        };
        let at = *known.entry(path).or_insert_with(|| {
            let counts = BTreeMap::new();
            files.push(FileOfSource { path, range, counts });
            files.len() - 1
        });
        let file = &mut files[at];
        file.range = (file.range.0.min(range.0), file.range.1.max(range.1));
        if let Some(counts) = totals.get(&(path, row.line)) {
            file.counts.insert(row.line, *counts);
        }
    }
    Ok(files)
}

fn full_name(frame: &Frame) -> (&str, &str) {
    (&frame.name, &frame.qualname)
}

//! What a notebook shows of a profile: a flame graph of its cells, the user's functions, the lines of the cells.

use std::collections::{BTreeMap, HashMap};
use std::io;

use nativeprof::export::{self, select};
use nativeprof::profile::model::{Frame, FrameKind, Profile};
use nativeprof::profile::stats::Stats;
use nativeprof::profile::views::{self, ViewOptions};
use nativeprof::profile::your_functions::{InnermostFunctions, function_name};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::profiler;

/// Functions that are listed.
const FUNCTIONS: usize = 10;

/// Whether a file is a cell of IPython: the names are those of IPython 7 to 9 and of ipykernel.
fn is_cell_file(file: &str) -> bool {
    file.starts_with("<ipython-input-") || file.contains("/ipykernel_")
}

/// Whether a frame is the code of a cell, not of a function in it.
fn is_cell(frame: &Frame) -> bool {
    frame.kind == FrameKind::Python
        && (frame.name == "<module>" || frame.name.starts_with("<cell line: "))
        && is_cell_file(&frame.filename)
}

/// Whether a frame is our magic, which runs a cell from within a cell.
fn is_magic(frame: &Frame) -> bool {
    frame.kind == FrameKind::Python && frame.filename.ends_with("/nativeprof/magics.py")
}

/// The files of the cells of IPython that a profile has functions of.
#[pyfunction]
pub fn cell_files(profile: &profiler::Profile) -> Vec<String> {
    let python = profile
        .inner()
        .frames
        .iter()
        .filter(|frame| frame.kind == FrameKind::Python);
    let mut files: Vec<String> = python
        .map(|frame| &frame.filename)
        .filter(|file| is_cell_file(file))
        .cloned()
        .collect();
    files.sort();
    files.dedup();
    files
}

/// Name, place, self amount with libraries and native code, that of libraries, that of native code, total.
type FunctionRow = (String, String, u64, u64, u64, u64);

/// Line, self samples with native code, total samples.
type LineRow = (u32, u64, u64);

/// What a notebook shows.
#[derive(IntoPyObject)]
pub struct NotebookView {
    /// An SVG of the samples in cells; of all where no cell is on any stack.
    graph: Py<PyBytes>,
    /// Number of these samples.
    shown: u64,
    /// The user's functions, those with most of the default value first.
    functions: Vec<FunctionRow>,
    /// The amount of that value in all.
    whole: u64,
    /// The lines of each cell that have samples, by the cell's file.
    lines: BTreeMap<String, Vec<LineRow>>,
}

/// What a notebook shows of a profile; `names` has the names of cells by their files.
#[pyfunction]
pub fn notebook_view(
    py: Python<'_>,
    profile: &profiler::Profile,
    names: HashMap<String, String>,
) -> PyResult<NotebookView> {
    let mut svg = Vec::new();
    let (shown, (functions, whole), lines) = py.detach(|| {
        let all = profile.inner();
        let cells = views::from_innermost(all, is_cell, is_magic);
        let has_cells = cells.nodes.first().is_some_and(|root| root.count > 0);
        let profile = if has_cells { cells } else { all.clone() };
        let lines = cell_lines(&profile);
        let named = with_names(profile, &names);
        let format = export::by_name("svg").map_err(io::Error::other)?;
        format.write_default(&named, &mut svg)?;
        let shown = named.nodes.first().map_or(0, |root| root.count);
        Ok::<_, io::Error>((shown, functions(named), lines))
    })?;
    Ok(NotebookView {
        graph: PyBytes::new(py, &svg).unbind(),
        shown,
        functions,
        whole,
        lines,
    })
}

/// The profile with the names of cells instead of their files, and of the code of a cell itself.
fn with_names(mut profile: Profile, names: &HashMap<String, String>) -> Profile {
    for frame in &mut profile.frames {
        let Some(name) = names.get(&frame.filename).filter(|_| frame.kind == FrameKind::Python) else {
            continue;
        };
        if is_cell(frame) {
            (frame.name, frame.qualname) = (name.clone(), String::new());
        }
        frame.filename.clone_from(name);
    }
    profile
}

/// The rows, and the amount in all.
fn functions(profile: Profile) -> (Vec<FunctionRow>, u64) {
    let value = profile.default_value();
    let profile = ViewOptions::default().folded(select::by_value(profile, value));
    let stats = Stats::new(&profile);
    let found = InnermostFunctions::of(&profile, &stats);
    let rows = found.innermost().take(FUNCTIONS).map(|row| {
        let frame = stats.frame(row.function);
        let (name, place) = (function_name(frame).into_owned(), row.short_place(frame));
        (name, place, row.amount, row.in_libraries, row.in_native, row.total)
    });
    (rows.collect(), stats.samples())
}

/// The lines with samples of each cell: a sample counts once for a line.
fn cell_lines(profile: &Profile) -> BTreeMap<String, Vec<LineRow>> {
    let profile = views::without_native(profile);
    let stats = Stats::new(&profile);
    let mut lines: BTreeMap<String, Vec<LineRow>> = BTreeMap::new();
    for row in stats.file_lines() {
        if row.line > 0 && is_cell_file(row.file) {
            let counts = (row.line, row.counts.self_count, row.counts.total);
            lines.entry(row.file.into()).or_default().push(counts);
        }
    }
    lines.values_mut().for_each(|lines| lines.sort_unstable());
    lines
}

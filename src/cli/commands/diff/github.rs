//! The verdict as workflow commands of GitHub Actions, which its runner makes annotations of.

use std::env;
use std::path::{Component, Path, PathBuf};

use super::gate::{Gate, Verdict};
use super::text::Text;
use crate::cli::args::DiffBy;
use crate::cli::output::table::{Overflow, shortened};
use crate::escape::{workflow_message, workflow_property};
use crate::profile::diff::{DiffOptions, GrownLines};
use crate::profile::model::Frame;
use crate::profile::stats::source_file;
use crate::profile::your_functions::function_name;

/// Annotations that GitHub keeps of each kind and step.
const MAX_ANNOTATIONS: usize = 10;
/// Rows whose places are looked for, those with the largest changes.
const MAX_PLACED: usize = 100;
/// Columns of a title.
const TITLE: usize = 200;

impl Text<'_> {
    /// Workflow commands, one a line; none if the gate has passed. `options` are those of the comparison.
    pub fn annotations(&self, verdict: &Verdict<'_>, options: &DiffOptions) -> Vec<String> {
        match verdict.gate {
            Gate::Passed => Vec::new(),
            Gate::Undecided => {
                let lines = verdict.lines();
                lines
                    .map(|line| command("warning", "undecided", None, &[&line]))
                    .collect()
            }
            Gate::Grown => {
                let mut all = self.of_grown(verdict, options);
                if all.is_empty() {
                    // It was seen before, and these runs do not say where.
                    all.extend(
                        verdict
                            .lines()
                            .next()
                            .map(|line| command("error", "grown", None, &[&line])),
                    );
                }
                let not_placed = verdict.grown().count().saturating_sub(MAX_PLACED);
                if all.len() > MAX_ANNOTATIONS {
                    let more = all.len() - (MAX_ANNOTATIONS - 1) + not_placed;
                    all.truncate(MAX_ANNOTATIONS - 1);
                    all.push(command(
                        "error",
                        &format!("{more} more"),
                        None,
                        &["print them with nativeprof diff"],
                    ));
                }
                all
            }
        }
    }

    /// Annotations of what grew: first those with a place in the workspace, of the function and of the line that calls it.
    fn of_grown(&self, verdict: &Verdict<'_>, options: &DiffOptions) -> Vec<String> {
        let workspace = workspace();
        let of_functions = self.options.by == DiffBy::Function;
        let lines = of_functions.then(|| GrownLines::new(self.sides[0], self.sides[1], options));
        let (mut placed, mut others) = (Vec::new(), Vec::new());
        for (row, growth) in verdict.grown().take(MAX_PLACED) {
            let what = format!("{} {growth}", row.text());
            let title = format!("{} {growth}", row.row.name);
            let said = [&*what, &self.words(row.change)];
            let frame = row.change.frame;
            let lines = lines.as_ref().filter(|_| row.row.kind.is_some());
            let place = lines.and_then(|lines| in_workspace(frame, lines.of(frame), &workspace));
            match &place {
                Some(_) => placed.push(command("error", &title, place.as_ref(), &said)),
                None => others.push(command("error", &title, None, &said)),
            }
            let caller = lines.and_then(|lines| lines.of_caller(frame));
            if let Some((caller, line)) = caller
                && let Some(place) = in_workspace(caller, Some(line), &workspace)
            {
                let title = format!("{} calls {title}", function_name(caller));
                placed.push(command("error", &title, Some(&place), &said));
            }
        }
        placed.extend(others);
        placed
    }
}

/// The file of a function in the workspace, with that line, or else that of its definition.
fn in_workspace(frame: &Frame, line: Option<u32>, workspace: &Path) -> Option<(String, u32)> {
    let line = line.or((frame.first_line > 0).then_some(frame.first_line))?;
    Some((within(source_file(frame), workspace)?, line))
}

fn command(kind: &str, title: &str, place: Option<&(String, u32)>, lines: &[&str]) -> String {
    let lines: Vec<String> = lines.iter().map(|line| workflow_message(line)).collect();
    let place = place.map_or(String::new(), |(file, line)| {
        format!("file={},line={line},", workflow_property(file))
    });
    let title = workflow_property(&shortened(&format!("nativeprof: {title}"), TITLE, Overflow::Start));
    format!("::{kind} {place}title={title}::{}", lines.join("%0A"))
}

/// The directory that paths of annotations are relative to: that of the checkout, or else the current one.
fn workspace() -> PathBuf {
    let of_job = env::var_os("GITHUB_WORKSPACE").map(PathBuf::from);
    of_job
        .filter(|path| path.is_absolute())
        .or_else(|| env::current_dir().ok())
        .unwrap_or_default()
}

/// The path of a source file in the workspace; `None` for one elsewhere.
fn within(path: &str, workspace: &Path) -> Option<String> {
    let below = Path::new(path);
    let below = if below.is_absolute() {
        below.strip_prefix(workspace).ok()?
    } else {
        below.strip_prefix(".").unwrap_or(below)
    };
    let is_below = below.components().all(|part| matches!(part, Component::Normal(_)));
    let is_file = || workspace.join(below).is_file();
    (is_below && !path.is_empty() && is_file()).then(|| below.to_string_lossy().into_owned())
}

//! The verdict as workflow commands of GitHub Actions, which its runner makes annotations of.

use std::env;
use std::path::{Component, Path, PathBuf};

use super::gate::{Gate, Judged, Verdict};
use super::text::Text;
use crate::cli::args::DiffBy;
use crate::cli::output::table::{Overflow, shortened};
use crate::escape::{workflow_message, workflow_property};
use crate::profile::diff::{DiffOptions, GrownLines};
use crate::profile::model::FrameKind;
use crate::profile::stats::source_file;

/// Annotations that GitHub keeps of each kind and step.
const MAX_ANNOTATIONS: usize = 10;
/// Columns of a title.
const TITLE: usize = 200;

impl Text<'_> {
    /// Workflow commands, one a line; none if the gate has passed. `options` are those of the comparison.
    pub fn annotations(&self, verdict: &Verdict<'_>, options: &DiffOptions) -> Vec<String> {
        let workspace = workspace();
        let lines = (self.options.by == DiffBy::Function && verdict.gate == Gate::Grown)
            .then(|| GrownLines::new(self.sides[0], self.sides[1], options));
        let place = |row: &Judged<'_>| {
            let frame = row.change.frame;
            let lines = lines.as_ref().filter(|_| row.row.kind.is_some())?;
            let file = within(source_file(frame), &workspace)?;
            let line = lines.of(frame).unwrap_or(match frame.kind {
                FrameKind::Python => frame.first_line,
                _ => 0,
            });
            Some((file, line.max(1)))
        };
        match verdict.gate {
            Gate::Passed => Vec::new(),
            Gate::Undecided => verdict
                .lines()
                .map(|line| command("error", "undecided", None, &[&line]))
                .collect(),
            Gate::Grown => {
                let grown: Vec<_> = verdict.grown().collect();
                // Those with a place, of which it has more than a name to say, come first.
                let (placed, others): (Vec<_>, Vec<_>) = grown
                    .iter()
                    .map(|(row, growth)| (*row, *growth, place(row)))
                    .partition(|(.., place)| place.is_some());
                let shown = placed.iter().chain(&others);
                let mut out: Vec<String> = shown
                    .map(|(row, growth, place)| {
                        let what = format!("{} {growth}", row.text());
                        let title = format!("{} {growth}", row.row.name);
                        command("error", &title, place.as_ref(), &[&what, &self.words(row.change)])
                    })
                    .take(MAX_ANNOTATIONS)
                    .collect();
                if grown.len() > MAX_ANNOTATIONS {
                    let more = grown.len() - (MAX_ANNOTATIONS - 1);
                    out.truncate(MAX_ANNOTATIONS - 1);
                    let text = format!("{more} more rows grew by more than {}", verdict.limit);
                    out.push(command("error", &text, None, &[&text]));
                }
                out
            }
        }
    }
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

//! `diff`: what changed between two profiles, or runs of both sides, and which changes are significant.

use std::io::{self, Write};
use std::path::Path;

use crate::cli::args::{Browse, DiffBy, DiffCommand as Options, DiffFormat, Normalize};
use crate::cli::input;
use crate::cli::output::atomic_file::{OutputFile, PUBLIC};
use crate::cli::output::browser;
use crate::cli::output::no_such_function;
use crate::cli::output::row_filter;
use crate::cli::output::style::TerminalStyle;
use crate::cli::output::table;
use crate::cli::{print_line, print_status};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::workflow_log;
use crate::export::diff_flamegraph;
use crate::export::html;
use crate::export::html::Comparison;
use crate::privileges::credentials::Caps;
use crate::privileges::phases;
use crate::profile::diff;
use crate::profile::diff::{Metric, Normalization, RowKind, Run, Side};
use crate::profile::machine;
use crate::profile::merge;
use crate::profile::model::{Meta, Profile};
use crate::profile::values::{Unit, ValueType};
use crate::resolve::source_lines;

mod census;
mod comparable;
mod gate;
mod github;
mod inputs;
mod json;
mod junit;
mod markdown;
mod text;

use comparable::{Compared, check_comparable, sampled_time};
pub use gate::Gate;
use text::Text;

/// Compares. Without `--fail-above`, everything has passed. `seen_after`: growth by more than that was seen when there were so
/// many runs of each side, which is the answer.
///
/// # Errors
/// Those of [`inputs::read`]; `Usage` for invalid arguments; `Data` if a profile does not have what the
/// normalization needs.
pub fn diff(options: &Options, seen_after: Option<usize>) -> Result<Gate> {
    let words = options.filters();
    let words = words.iter().map(|word| row_filter::parse(word));
    let filters = words.collect::<Result<Vec<_>>>()?;
    let style = TerminalStyle::of_stdout(options.color);
    phases::switch_to_invoking_user()?;
    if let Some(done) = census::diff(options) {
        return done.map(|()| Gate::Passed);
    }
    let output = options.output.as_ref().map(|path| {
        if path.is_dir() {
            path.join(match options.format {
                Some(DiffFormat::Svg) => "nativeprof-diff.svg",
                _ => "nativeprof-diff.html",
            })
        } else {
            path.clone()
        }
    });
    let image = image_format(options.format, output.as_deref())?;
    if image.is_none() && options.browser.when == Browse::On {
        return Err(Error::new(ErrorKind::Usage, "--browser needs an output file")
            .why("without -o, the comparison is printed as a table")
            .hint("nativeprof diff A B -o diff.html --browser"));
    }
    let place = match (&output, image) {
        (Some(path), Some(_)) if !input::is_standard(path) => Some(OutputFile::new(path, PUBLIC)?),
        _ => None,
    };
    let results = options.junit.as_deref().map(results_file).transpose()?;
    let files = [&place, &results].into_iter().flatten();
    let kept = files.fold(Caps::NONE, |kept, file| Caps(kept.0 | file.needs().0));
    let inputs = inputs::read(options, kept)?;
    inputs::report_programs(&inputs);
    let files = inputs
        .each_ref()
        .map(|inputs| inputs.iter().map(|input| input.path.clone()).collect::<Vec<_>>());
    let compared = comparable::by_value(inputs, options.value.as_deref(), &options.labels)?;
    let runs = Runs::new(viewed(options, compared)?);
    let [a, b] = runs.sides();
    let of_all = || runs.all.iter().flatten();
    let is_traced = of_all().all(|compared| compared.is_traced);
    let normalization = normalization(options, a.sum, is_traced)?;
    for (compared, path) in of_all().zip(files.iter().flatten()) {
        check_comparable(&compared.profile, path, normalization)?;
    }
    gate::check(options, normalization)?;
    if let (Some(one), Some(other)) = (sampled_time(a.sum), sampled_time(b.sum))
        && one != other
    {
        print_status(&format!(
            "the first profile has {one} time, the second {other} time; to compare the same: --value cpu"
        ));
    }
    // A function has as many calls as it was called, not those of what it calls.
    let is_self = options.self_count || image == Some(DiffFormat::Svg) || normalization == Normalization::Number;
    let diff_options = diff::DiffOptions {
        normalization,
        by: match options.by {
            // Labels are the functions of their profile.
            DiffBy::Function | DiffBy::Label => RowKind::Function,
            DiffBy::Module => RowKind::Module,
        },
        metric: if is_self { Metric::SelfCount } else { Metric::Total },
        confidence: options.confidence / 100.0,
        interpreter: options.interpreter,
    };
    let found = diff::diff(&a, &b, &diff_options);
    let metas = runs.metas();
    let machines = match normalization {
        Normalization::Time | Normalization::Rate if !options.any_machine => {
            machine::differences([&metas[0], &metas[1]])
        }
        _ => Vec::new(),
    };
    let text = Text {
        options,
        files: &files,
        self_count: is_self,
        is_traced,
        normalization,
        sides: [&a, &b],
        machines: &machines,
        found: &found,
    };
    let verdict = options.fail_above.map(|limit| text.verdict(limit, seen_after));
    if let Some(image) = image {
        text.write_image(image, &diff_options, place.as_ref())?;
    } else {
        let said = if options.json {
            format!("{:#}\n", text.json(&filters, verdict.as_ref()))
        } else if options.markdown {
            text.markdown(&filters, verdict.as_ref())
        } else if options.github {
            workflow_log(&text.table(&filters, &style))
        } else {
            text.table(&filters, &style)
        };
        table::print(&said).map_err(|e| Error::io("cannot write the table", e).hint("free some disk space"))?;
    }
    let Some(verdict) = verdict else {
        return Ok(Gate::Passed);
    };
    if options.github {
        let annotations = text.annotations(&verdict, &diff_options);
        annotations.iter().for_each(|command| print_line(command));
    } else {
        verdict.lines().for_each(|line| print_status(&line));
    }
    if let Some(file) = results {
        let written = file.write(&|out| out.write_all(text.junit(&verdict).as_bytes()));
        written
            .map_err(|e| Error::io("cannot write the test results", e).hint("choose another file with --junit FILE"))?;
        print_status(&format!("written: {}", file.path().display()));
    }
    Ok(verdict.gate)
}

/// The file of `--junit`.
///
/// # Errors
/// `Usage` for standard output; those of [`OutputFile::new`].
pub fn results_file(path: &Path) -> Result<OutputFile> {
    if input::is_standard(path) {
        return Err(Error::new(ErrorKind::Usage, "--junit needs a file")
            .why("standard output has the comparison")
            .hint("--junit nativeprof.xml"));
    }
    OutputFile::new(path, PUBLIC)
}

impl Text<'_> {
    /// Writes the comparison as a flame graph to that file, or to standard output.
    fn write_image(
        &self,
        image: DiffFormat,
        diff_options: &diff::DiffOptions,
        place: Option<&OutputFile>,
    ) -> Result<()> {
        let Text {
            options,
            found,
            sides: [a, b],
            normalization,
            ..
        } = *self;
        let mut both = diff::both(a, b, diff_options);
        if image == DiffFormat::Html && !options.no_source {
            source_lines::add(&mut both, &mut source_lines::open_local);
        }
        let make = |out: &mut dyn Write| match image {
            DiffFormat::Svg => diff_flamegraph::svg(&both, found, &self.title(), normalization, out),
            DiffFormat::Html => html::write_comparison(
                &Comparison {
                    both: &both,
                    found,
                    names: self.names().each_ref().map(String::as_str),
                    amounts: &self.amounts(),
                    normalization,
                    is_self: self.self_count,
                    confidence: options.confidence,
                },
                options.no_source,
                out,
            ),
        };
        let failed =
            |e: io::Error| Error::io("cannot write the flame graph", e).hint("choose another file with -o FILE");
        match place {
            Some(place) => {
                place.write(&make).map_err(failed)?;
                print_status(&format!("written: {}", place.path().display()));
                if let Some(said) = browser::open(options.browser.when, place.path(), false) {
                    print_status(&said);
                }
            }
            None => {
                let mut bytes = Vec::new();
                make(&mut bytes).map_err(failed)?;
                table::print(&String::from_utf8_lossy(&bytes)).map_err(failed)?;
                if options.browser.when == Browse::On {
                    print_status(browser::NOT_STANDARD_OUTPUT);
                }
            }
        }
        Ok(())
    }
}

/// The recordings as they are to be seen.
///
/// # Errors
/// `Data`: none of them has the function to focus on.
fn viewed(options: &Options, compared: [Vec<Compared>; 2]) -> Result<[Vec<Compared>; 2]> {
    let [mut before, mut after] = compared;
    let profiles = before.iter_mut().chain(&mut after);
    let profiles = profiles.map(|compared| std::mem::take(&mut compared.profile));
    let viewed = if options.by == DiffBy::Label {
        profiles.map(|profile| profile.of_labels()).collect()
    } else {
        let view = options.frames.view(options.no_native);
        view.apply_to_all(profiles.collect()).map_err(no_such_function)?
    };
    for (compared, profile) in before.iter_mut().chain(&mut after).zip(viewed) {
        compared.profile = profile;
    }
    Ok([before, after])
}

/// The recordings of both sides, and their sums.
struct Runs {
    all: [Vec<Compared>; 2],
    /// Of a side with several runs.
    sums: [Option<Profile>; 2],
}

impl Runs {
    fn new(mut all: [Vec<Compared>; 2]) -> Runs {
        let sums = all.each_mut().map(|side| {
            if side.len() == 1 {
                return None;
            }
            let runs = side.iter_mut().enumerate().map(|(at, compared)| {
                // Only their counts are compared.
                compared.profile.forget_samples();
                (at.to_string(), std::mem::take(&mut compared.profile))
            });
            let runs: Vec<(String, Profile)> = runs.collect();
            let sum = merge::combine(&runs);
            for (compared, (_, profile)) in side.iter_mut().zip(runs) {
                compared.profile = profile;
            }
            Some(sum)
        });
        Runs { all, sums }
    }

    /// What is known of the recordings of the older and of the newer side.
    fn metas(&self) -> [Vec<&Meta>; 2] {
        self.all
            .each_ref()
            .map(|side| side.iter().map(|compared| &compared.profile.meta).collect())
    }

    fn sides(&self) -> [Side<'_>; 2] {
        [0, 1].map(|i| {
            let runs: Vec<Run<'_>> = self.all[i]
                .iter()
                .map(|compared| Run {
                    profile: &compared.profile,
                    grain: compared.grain,
                    clock: compared.clock,
                })
                .collect();
            match &self.sums[i] {
                Some(sum) => Side { sum, runs },
                // One run is its own sum.
                None => Side::of_one(runs[0]),
            }
        })
    }
}

/// How the amounts of this profile, and of those that are compared with it, are normalized.
///
/// # Errors
/// `Usage`: calls have no other unit than their number.
fn normalization(options: &Options, profile: &Profile, is_traced: bool) -> Result<Normalization> {
    let kind = profile.count_type();
    if *kind == ValueType::CALLS {
        return match options.normalize {
            None | Some(Normalize::Time) => Ok(Normalization::Number),
            Some(Normalize::Share | Normalize::Rate) => Err(Error::new(
                ErrorKind::Usage,
                "calls are compared as numbers, without --normalize",
            )
            .why("they are counted exactly, and mean the same in both profiles only if both did the same work")
            .hint("omit --normalize, or compare the times of the calls: --value wall")),
        };
    }
    Ok(match options.normalize {
        // Traces are of all calls of a program, so that their times need no common measure.
        None if is_traced && kind.unit == Unit::Nanoseconds => Normalization::Time,
        None | Some(Normalize::Share) => Normalization::Share,
        Some(Normalize::Rate) => Normalization::Rate,
        Some(Normalize::Time) => Normalization::Time,
    })
}

/// The format of the flame graph; `None` for a table.
fn image_format(format: Option<DiffFormat>, output: Option<&Path>) -> Result<Option<DiffFormat>> {
    let Some(path) = output.filter(|_| format.is_none()) else {
        return Ok(format);
    };
    let name = path.to_string_lossy().to_lowercase();
    match name.rsplit('.').next() {
        Some("svg") => Ok(Some(DiffFormat::Svg)),
        Some("html" | "htm") => Ok(Some(DiffFormat::Html)),
        _ => Err(Error::new(
            ErrorKind::Usage,
            format!("cannot tell the flame graph format from the extension of `{name}`"),
        )
        .why("supported extensions: .svg, .html")
        .hint("nativeprof diff A B -o diff.svg   (without -o, a table goes to standard output)")),
    }
}

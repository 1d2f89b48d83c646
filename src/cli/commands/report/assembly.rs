//! Machine code of native functions, with the samples of each instruction.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::{RenderedList, ReportContext, several, share};
use crate::cli::input;
use crate::cli::output::style::Color;
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::profile::function_names::{Named, named};
use crate::profile::model::{Assembly, Frame, FrameKind, Profile, SampledInstruction};
use crate::profile::summary::counted;
use crate::resolve::assembly;

/// Functions that are shown if several have the name.
const FUNCTIONS: usize = 10;

/// The native functions with a name (or its last parts) or at an address: complete in JSON, else the instructions around
/// those with samples.
///
/// # Errors
/// `Data` if the profile has no such function, the word ends several names, or the file is not available.
pub fn assembly(context: &ReportContext<'_>, profile: &Profile, word: &str) -> Result<RenderedList> {
    let functions = match Address::parse(word) {
        Some(address) => address.functions(profile),
        None => functions(context, profile, word)?,
    };
    if functions.is_empty() {
        return Err(Error::new(
            ErrorKind::Data,
            format!("no native function with samples is called `{}`", line(word)),
        )
        .why(match Address::parse(word) {
            Some(_) => "expected the address of a function, or of an instruction with samples, as it is in its file",
            None => {
                "only native functions with samples have machine code to show; Python functions have none of their own"
            }
        })
        .hint(format!(
            "list functions with `nativeprof report {} --by function`",
            input::shown(context.file)
        )));
    }
    let (mut list, mut text, mut failed) = (Vec::new(), String::new(), None);
    for frame in functions.into_iter().take(FUNCTIONS) {
        match assembly::of_function(profile, frame, &mut assembly::open_local) {
            Ok(mut found) => {
                list.push(as_json(&found));
                let all = found.instructions.len();
                assembly::quote(&mut found.instructions);
                text += &draw(context, &found, all);
                text.push('\n');
            }
            Err(why) => failed = Some((frame, why)),
        }
    }
    match failed {
        Some((frame, why)) if list.is_empty() => Err(Error::new(
            ErrorKind::Data,
            format!(
                "the code of {} ({}) is not available",
                line(&frame.name),
                line(&frame.module)
            ),
        )
        .why(line(&why).into_owned())
        .hint("run this on the machine of the recording, with the same files")),
        _ => {
            text.pop();
            Ok(("assembly", list.into(), text))
        }
    }
}

/// Native functions with this name; of inlined ones, those that they are in.
fn functions<'a>(context: &ReportContext<'_>, profile: &'a Profile, word: &str) -> Result<Vec<&'a Frame>> {
    let has_code = |frame: &Frame| frame.address > 0 && !matches!(frame.kind, FrameKind::Python | FrameKind::Kernel);
    let wanted = match named(&profile.frames, word, has_code) {
        Named::Several(names) => return Err(several(context.file, "--assembly", word, &names)),
        Named::Frames(wanted) => wanted,
        Named::Nothing => Vec::new(),
    };
    let wanted = profile.frames.iter().zip(wanted).filter(|(_, is_wanted)| *is_wanted);
    let wanted: HashSet<(u64, &str)> = wanted.map(|(frame, _)| place(frame)).collect();
    let frames = profile.frames.iter();
    Ok(each_once(frames.filter(|frame| wanted.contains(&place(frame)))))
}

fn place(frame: &Frame) -> (u64, &str) {
    (frame.address, &frame.module)
}

/// Functions that have code, by file and address.
fn each_once<'a>(frames: impl Iterator<Item = &'a Frame>) -> Vec<&'a Frame> {
    let mut found: Vec<&Frame> = frames.filter(|frame| assembly::is_function(frame)).collect();
    found.sort_by_key(|frame| (&frame.module, frame.address));
    found.dedup_by_key(|frame| (&frame.module, frame.address));
    found
}

/// An address in a file, as other lists have it: `0x1234` or `geo.so+0x1234`.
struct Address<'a> {
    file: Option<&'a str>,
    address: u64,
}

impl Address<'_> {
    fn parse(word: &str) -> Option<Address<'_>> {
        let (file, digits) = match word.rsplit_once('+') {
            Some((file, digits)) => (Some(base_name(file)), digits),
            None => (None, word),
        };
        let address = u64::from_str_radix(digits.strip_prefix("0x")?, 16).ok()?;
        Some(Address { file, address })
    }

    /// The functions that begin there, or have a sampled instruction there: in each file one at most.
    fn functions<'a>(&self, profile: &'a Profile) -> Vec<&'a Frame> {
        let frames = profile.frames.iter();
        let in_file = each_once(frames.filter(|frame| self.file.is_none_or(|file| file == frame.module)));
        let is_sampled = |module: &str| {
            let mut rows = profile.meta.modules.iter();
            rows.any(|row| assembly::file_name(row) == module && row.instructions.contains_key(&self.address))
        };
        let files = in_file.chunk_by(|a, b| a.module == b.module);
        let nearest = files.filter_map(|functions| functions.iter().rfind(|frame| frame.address <= self.address));
        let nearest = nearest.filter(|frame| frame.address == self.address || is_sampled(&frame.module));
        nearest.copied().collect()
    }
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn as_json(found: &Assembly) -> Value {
    let row = |row: &SampledInstruction| {
        json!({
            "address": row.address,
            "text": row.text,
            "self": row.samples,
            "source": row.source.as_ref().map(|(file, _)| file),
            "line": row.source.as_ref().map(|(_, line)| line),
        })
    };
    json!({
        "name": found.name,
        "module": found.module,
        "address": found.address,
        "checked": found.is_checked,
        "instructions": found.instructions.iter().map(row).collect::<Vec<_>>(),
    })
}

fn draw(context: &ReportContext<'_>, found: &Assembly, all: usize) -> String {
    let rows = &found.instructions;
    let sum: u64 = rows.iter().map(|row| row.samples).sum();
    let most = rows.iter().map(|row| row.samples).max().unwrap_or(0);
    let title = format!(
        "{} ({}+{:#x}): {} ended in its {}",
        line(&found.name),
        line(&found.module),
        found.address,
        counted(sum, "samples"),
        counted(all as u64, "instructions")
    );
    let mut text = format!("{}\n", context.style.paint(Color::Bold, &title));
    if !found.is_checked {
        let why = "not checked: the file has no build ID to verify that it is the one that was recorded\n";
        text += &context.style.paint(Color::Yellow, why);
    }
    if sum == 0 {
        let why = "none of them was sampled, or the profile is of an earlier version, which did not keep them\n";
        return text + &context.style.paint(Color::Dim, why);
    }
    text += &context
        .style
        .paint(Color::Dim, " SAMPLES      %   ADDRESS  INSTRUCTION\n");
    let (mut end, mut place) = (found.address, None);
    for row in rows {
        if row.address != end {
            text += &context.style.paint(Color::Dim, "                           ...\n");
        }
        end = row.address + u64::from(row.length);
        if row.source != place && row.source.is_some() {
            place.clone_from(&row.source);
            let shown = place
                .as_ref()
                .map_or(String::new(), |(file, number)| format!("{}:{number}", base_name(file)));
            text += &context.style.paint(Color::Dim, &format!("{:26}{}\n", "", line(&shown)));
        }
        let (samples, part) = match row.samples {
            0 => (String::new(), String::new()),
            n => (n.to_string(), share(n, sum)),
        };
        let shown = format!("{samples:>8} {part:>6} {:>9x}  {}", row.address, row.text);
        text += &if row.samples > 0 && row.samples * 2 >= most {
            context.style.paint(Color::Bold, &shown)
        } else {
            shown
        };
        text.push('\n');
    }
    text
}

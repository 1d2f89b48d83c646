//! Machine code of native functions, with the samples that ended at each instruction.
//!
//! It is read again from the module's file, which must have the build ID of the recording: a profile has samples by address
//! only. A file without a build ID must not have changed since the recording, and the result says that it is not checked: it
//! may be another machine's. Only x86-64 code is disassembled.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter};
use symbolize::Module;

use crate::escape;
use crate::profile::model::{Assembly, Frame, FrameKind, ModuleMeta, Profile, SampledInstruction};

/// Maximum bytes of code of one function.
const MAX_CODE: u64 = 1 << 20;
/// Maximum number of instructions of one function.
const MAX_ROWS: usize = 1 << 16;
/// Characters of the names of functions that are called.
const MAX_NAME: usize = 200;
/// Bytes shown after the last instruction with samples, where the end of a function is not known.
const REST: u64 = 64;

/// Functions that [`add`] quotes, at most: those with the most samples of their own.
const MAX_FUNCTIONS: usize = 30;
/// Instructions that it quotes, over all functions.
const MAX_QUOTED: usize = 6000;
/// Instructions before and after one with samples.
const CONTEXT: usize = 8;

/// Fills [`Profile::assembly`] with the functions that most samples ended in: the surroundings of their instructions with
/// samples. `open` returns a file by its path.
pub fn add(profile: &mut Profile, open: &mut dyn FnMut(&str) -> Option<File>) {
    let mut candidates: Vec<(u64, usize, Range<u64>)> = Vec::new();
    for (index, row) in profile.meta.modules.iter().enumerate() {
        let mut starts: Vec<u64> = functions_of(profile, row).map(|frame| frame.address).collect();
        starts.sort_unstable();
        starts.dedup();
        for (at, start) in starts.iter().enumerate() {
            let end = starts.get(at + 1).copied().unwrap_or(u64::MAX);
            let samples: u64 = row.instructions.range(*start..end).map(|(_, samples)| samples).sum();
            if samples > 0 {
                candidates.push((samples, index, *start..end));
            }
        }
    }
    candidates.sort_by_key(|(samples, index, range)| (u64::MAX - samples, *index, range.start));
    candidates.truncate(MAX_FUNCTIONS);
    let mut room = MAX_QUOTED;
    let mut files: Vec<(usize, Option<Module>)> = Vec::new();
    let mut found = Vec::new();
    for (_, index, range) in candidates {
        let row = &profile.meta.modules[index];
        let known = files.iter().position(|(known, _)| *known == index).unwrap_or_else(|| {
            files.push((index, module(row, profile.meta.start, open).ok()));
            files.len() - 1
        });
        let Some(file) = &mut files[known].1 else { continue };
        let Some(frame) = functions_of(profile, row).find(|frame| frame.address == range.start) else {
            continue;
        };
        let Ok(assembly) = disassemble(file, frame, row, quote) else {
            continue;
        };
        if assembly.instructions.len() > room {
            break;
        }
        room -= assembly.instructions.len();
        found.push(assembly);
    }
    profile.assembly = found;
}

/// Keeps instructions near those with samples.
pub fn quote(instructions: &mut Vec<SampledInstruction>) {
    let hot: Vec<usize> = (0..instructions.len())
        .filter(|at| instructions[*at].samples > 0)
        .collect();
    let mut at = 0;
    instructions.retain(|_| {
        let next = hot.partition_point(|hot| *hot + CONTEXT < at);
        let is_near = hot.get(next).is_some_and(|hot| *hot <= at + CONTEXT);
        at += 1;
        is_near
    });
}

/// The machine code of a native function of a profile, complete.
///
/// # Errors
/// Why there is none, as text.
pub fn of_function(
    profile: &Profile,
    frame: &Frame,
    open: &mut dyn FnMut(&str) -> Option<File>,
) -> Result<Assembly, String> {
    let rows = &profile.meta.modules;
    let row = rows
        .iter()
        .find(|row| file_name(row) == frame.module && row.instructions.range(frame.address..).next().is_some())
        .or_else(|| rows.iter().find(|row| file_name(row) == frame.module))
        .ok_or("the profile does not say which file it is in")?;
    disassemble(&mut module(row, profile.meta.start, open)?, frame, row, |_| ())
}

/// Functions whose code is in the file, with its address: not those that were inlined.
fn functions_of<'a>(profile: &'a Profile, row: &'a ModuleMeta) -> impl Iterator<Item = &'a Frame> {
    let frames = profile.frames.iter();
    frames.filter(move |frame| is_function(frame) && frame.module == file_name(row))
}

/// Whether a frame is native code at the address it states.
pub fn is_function(frame: &Frame) -> bool {
    matches!(frame.kind, FrameKind::Native | FrameKind::Unknown) && frame.address > 0
}

/// The name of a row's file, as frames have it.
pub fn file_name(row: &ModuleMeta) -> &str {
    let path = row.path.strip_suffix(" (deleted)").unwrap_or(&row.path);
    path.rsplit('/').next().unwrap_or(path)
}

/// The file of a row, if it is still the one that was recorded; `start`: of the recording, seconds since the epoch.
fn module(row: &ModuleMeta, start: f64, open: &mut dyn FnMut(&str) -> Option<File>) -> Result<Module, String> {
    let file = open(&row.path).ok_or_else(|| format!("{} cannot be read", row.path))?;
    let changed = file
        .metadata()
        .map_or(i64::MAX, |found| found.mtime().max(found.ctime()));
    if row.build_id.is_empty() && start > 0.0 && changed as f64 > start {
        return Err(format!(
            "{} has changed since the recording, and has no build ID",
            row.path
        ));
    }
    let module = Module::from_file(file).map_err(|e| e.to_string())?;
    let build_id: String = module
        .build_id()
        .unwrap_or_default()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    if build_id == row.build_id {
        Ok(module.with_files(path_of(&row.path), Arc::new(|path: &Path| open_file(path))))
    } else {
        Err(format!(
            "{} is not the file that was recorded: its build ID differs",
            row.path
        ))
    }
}

/// The path that a profile has spelled so.
fn path_of(text: &str) -> PathBuf {
    OsString::from_vec(escape::name_bytes(text)).into()
}

/// Opens a regular file of this machine, by its path in a profile.
pub fn open_local(path: &str) -> Option<File> {
    open_file(&path_of(path))
}

fn open_file(path: &Path) -> Option<File> {
    if !path.is_absolute() {
        return None;
    }
    // Opening a pipe would wait for its other end.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .ok()?;
    file.metadata().ok()?.is_file().then_some(file)
}

/// As GNU tools print it.
fn formatter() -> GasFormatter {
    let mut formatter = GasFormatter::new();
    let options = formatter.options_mut();
    options.set_uppercase_hex(false);
    options.set_branch_leading_zeros(false);
    options.set_space_after_operand_separator(false);
    formatter
}

/// `keep` takes out what is not wanted.
fn disassemble(
    file: &mut Module,
    frame: &Frame,
    row: &ModuleMeta,
    keep: fn(&mut Vec<SampledInstruction>),
) -> Result<Assembly, String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("only x86-64 code can be disassembled".into());
    }
    let start = frame.address;
    let symbol = file
        .symbol_at(start)
        .filter(|symbol| symbol.start == start && symbol.size > 0);
    let size = match symbol.map(|symbol| symbol.size) {
        Some(size) => size,
        None => {
            let near = row.instructions.range(start..start.saturating_add(MAX_CODE));
            near.last().map_or(0, |(last, _)| last - start) + REST
        }
    };
    let size = size.min(MAX_CODE);
    let code = file.code(start, size).map_err(|e| e.to_string())?;
    let (mut formatter, mut text) = (formatter(), String::new());
    let mut instructions: Vec<SampledInstruction> = Vec::new();
    for instruction in Decoder::with_ip(64, &code, start, DecoderOptions::NONE)
        .iter()
        .take(MAX_ROWS)
    {
        text.clear();
        formatter.format(&instruction, &mut text);
        let target = instruction.near_branch_target();
        if target != 0
            && !(start..start + size).contains(&target)
            && let Some(function) = file.symbol_at(target)
        {
            let name: String = function.raw.chars().take(MAX_NAME).collect();
            text += &format!(" <{name}>");
        }
        let range = instruction.ip()..instruction.next_ip();
        instructions.push(SampledInstruction {
            address: instruction.ip(),
            length: instruction.len() as u8,
            text: text.clone(),
            samples: row.instructions.range(range).map(|(_, samples)| samples).sum(),
            source: None,
        });
    }
    keep(&mut instructions);
    let addresses: Vec<u64> = instructions.iter().map(|instruction| instruction.address).collect();
    for (instruction, found) in instructions.iter_mut().zip(file.lookup_many(&addresses)) {
        let innermost = found.ok().and_then(|symbols| symbols.into_iter().next());
        instruction.source = innermost.and_then(|symbol| Some((symbol.file?.to_string(), symbol.line?)));
    }
    Ok(Assembly {
        name: frame.name.clone(),
        module: frame.module.clone(),
        address: start,
        is_checked: !row.build_id.is_empty(),
        instructions,
    })
}

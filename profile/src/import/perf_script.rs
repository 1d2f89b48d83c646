//! The output of `perf script`, with its default fields or more of them.
//!
//! ```text
//! python3  4242/4243 [001] 100.250000:     250000 cpu-clock:ppp:
//!         ffffffff8100 do_syscall_64+0x40 ([kernel.kallsyms])
//!             7f0012a4 py::work:/srv/app.py+0x8 (/tmp/perf-4242.map)
//!             7f0012f0 main+0x10 (/usr/bin/python3)
//! ```
//!
//! Each event is a value type, in what a sample of it stands for (its period): CPU time for `cpu-clock`, else a count.
//! Addresses are those of the process, not of the file, and are only kept of code without a file.

use std::collections::HashMap;

use super::Damage;
use super::frames;
use super::stacks::{MAX_VALUE_TYPES, Stacks};
use crate::model::{Frame, FrameKind, Meta, Profile};
use crate::values::{Unit, ValueType};

/// Lines by which the format is recognized.
const EXAMINED: usize = 20;
/// The first address that is the kernel's on all CPUs of 64 bits.
const KERNEL_START: u64 = 1 << 63;

/// The line that begins a sample.
struct Header<'a> {
    command: &'a str,
    pid: u32,
    tid: u32,
    /// ns
    time: u64,
    period: Option<u64>,
    event: &'a str,
    /// What follows the event: without call chains, the only frame.
    rest: &'a str,
}

/// Whether one of the first lines begins a sample.
pub fn is(bytes: &[u8]) -> bool {
    lines(bytes)
        .take(EXAMINED)
        .any(|line| header(&frames::text(line)).is_some())
}

/// Reads such a file.
///
/// # Errors
/// A limit is exceeded.
pub fn read(bytes: &[u8]) -> Result<Profile, Damage> {
    let (mut events, mut start, mut has_period): (Vec<String>, u64, bool) = (Vec::new(), u64::MAX, false);
    for line in lines(bytes) {
        let line = frames::text(line);
        let Some(header) = header(&line) else { continue };
        start = start.min(header.time);
        has_period |= header.period.is_some();
        if !events.iter().any(|known| known == header.event) {
            events.push(header.event.to_string());
        }
        if events.len() > MAX_VALUE_TYPES {
            break;
        }
    }
    let mut reader = ScriptReader::new(&events, has_period || events.len() > 1, start)?;
    for (number, line) in (1..).zip(lines(bytes)) {
        let read = reader.line(&frames::text(line));
        read.map_err(|damage| Damage::new(format!("line {number}"), damage.reason))?;
    }
    reader.end_sample()?;
    let event = match &events[..] {
        [only] => only.clone(),
        _ => String::new(),
    };
    let mut threads: Vec<(u32, u32, String)> = reader.threads.into_iter().map(|((p, t), name)| (p, t, name)).collect();
    threads.sort();
    Ok(reader.out.finish(Meta {
        event,
        threads,
        ..Meta::default()
    }))
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end)
}

/// `COMMAND TID TIME: EVENT:`, with `PID/TID` and `[CPU]` before the time and a period after it where they are printed. A command
/// may contain spaces.
fn header(line: &str) -> Option<Header<'_>> {
    // Frames, and what is no time.
    if line.starts_with('#') || !line.contains(": ") && !line.ends_with(':') {
        return None;
    }
    let mut words = words(line);
    loop {
        let (at, word) = words.next()?;
        let command = line.get(..at)?.trim();
        let (pid, tid) = word.split_once('/').unwrap_or(("0", word));
        let (Ok(pid), Ok(tid), false) = (pid.parse(), tid.parse(), command.is_empty()) else {
            continue;
        };
        let mut ahead = words.clone();
        let mut next = ahead.next()?;
        if next.1.starts_with('[') && next.1.ends_with(']') {
            next = ahead.next()?;
        }
        let Some(time) = time(next.1) else { continue };
        let (mut at, mut event) = ahead.next()?;
        let period = event.parse().ok();
        if period.is_some() {
            (at, event) = ahead.next()?;
        }
        return Some(Header {
            command,
            pid,
            tid,
            time,
            period,
            event: without_modifiers(event.strip_suffix(':')?),
            rest: line.get(at + event.len()..)?.trim(),
        });
    }
}

/// Words with where they begin.
fn words(line: &str) -> impl Iterator<Item = (usize, &str)> + Clone {
    line.split_ascii_whitespace()
        .map(move |word| (word.as_ptr() as usize - line.as_ptr() as usize, word))
}

/// `SECONDS.FRACTION:` in ns.
fn time(word: &str) -> Option<u64> {
    let (seconds, fraction) = word.strip_suffix(':')?.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(seconds) || !digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let scale = 10u64.pow(9 - fraction.len() as u32);
    let ns = fraction.parse::<u64>().ok()?.checked_mul(scale)?;
    seconds.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(ns)
}

/// `cycles` of `cycles:ppp`: which rings are counted, and how precisely.
fn without_modifiers(event: &str) -> &str {
    match event.rsplit_once(':') {
        Some((name, modifiers)) if modifiers.bytes().all(|byte| b"ukhGHpPSDWeIb".contains(&byte)) => name,
        _ => event,
    }
}

/// What a period of an event is.
fn value_type(event: &str) -> ValueType {
    match event {
        "cpu-clock" | "task-clock" => ValueType::CPU,
        _ => ValueType::new(event, Unit::Count),
    }
}

struct ScriptReader {
    out: Stacks,
    /// By name, the value type of each event.
    values: HashMap<String, usize>,
    types: usize,
    start: u64,
    /// The sample that is being read: time, thread, amounts.
    sample: Option<(u64, (u32, u32), Vec<u64>)>,
    /// Its frames with their lines, innermost first.
    stack: Vec<(Frame, u32)>,
    threads: HashMap<(u32, u32), String>,
}

impl ScriptReader {
    fn new(events: &[String], has_values: bool, start: u64) -> Result<ScriptReader, Damage> {
        let (mut types, mut values) = (vec![ValueType::SAMPLES], HashMap::new());
        for event in events.iter().filter(|_| has_values) {
            let kind = value_type(event);
            let at = types.iter().position(|known| *known == kind).unwrap_or(types.len());
            if at == types.len() {
                types.push(kind);
            }
            values.insert(event.clone(), at);
        }
        Ok(ScriptReader {
            out: Stacks::new(&types)?,
            values,
            types: types.len(),
            start,
            sample: None,
            stack: Vec::new(),
            threads: HashMap::new(),
        })
    }

    fn line(&mut self, line: &str) -> Result<(), Damage> {
        if let Some(header) = header(line) {
            self.end_sample()?;
            let mut amounts = vec![0; self.types];
            amounts[0] = 1;
            if let Some(amount) = self.values.get(header.event).and_then(|at| amounts.get_mut(*at)) {
                *amount = header.period.unwrap_or(1);
            }
            let thread = (header.pid, header.tid);
            self.threads.entry(thread).or_insert_with(|| header.command.to_string());
            self.sample = Some((header.time.saturating_sub(self.start), thread, amounts));
            self.frame(header.rest);
        } else if line.is_empty() {
            self.end_sample()?;
        } else if self.sample.is_some() {
            self.frame(line.trim());
        }
        Ok(())
    }

    /// `ADDRESS SYMBOL+OFFSET (FILE)`, `SYMBOL (inlined)`, or the source line of the frame before. What a tracepoint
    /// prints is neither.
    fn frame(&mut self, text: &str) {
        let (address, rest) = text.split_once(' ').unwrap_or((text, ""));
        let address = frames::hexadecimal(address);
        match (frames::split_place(text), address) {
            (Some((symbol, "inlined")), _) => {
                let frame = Frame::new(FrameKind::Inlined, symbol);
                self.stack.push((frame, 0));
            }
            (Some(_), Some(address)) => {
                if let Some((symbol, file)) = frames::split_place(rest.trim_start()) {
                    self.stack.push((frame(address, symbol, file), 0));
                }
            }
            _ => {
                if let Some((file, line)) = frames::split_line(text)
                    && frames::is_source(file)
                    && let Some((frame, of_frame)) = self.stack.last_mut()
                    && matches!(frame.kind, FrameKind::Native | FrameKind::Inlined)
                {
                    frame.source = file.into();
                    *of_frame = line;
                }
            }
        }
    }

    fn end_sample(&mut self) -> Result<(), Damage> {
        let mut stack = std::mem::take(&mut self.stack);
        let Some((time, thread, amounts)) = self.sample.take() else {
            return Ok(());
        };
        let mut place = Stacks::ROOT;
        let mut module = String::new();
        for (mut frame, line) in stack.drain(..).rev() {
            if frame.kind == FrameKind::Inlined {
                // It is in the code of the function around it.
                frame.module.clone_from(&module);
            } else {
                module.clone_from(&frame.module);
            }
            let frame = self.out.frame(frame);
            place = self.out.place(place, frame, line)?;
        }
        self.stack = stack;
        self.out.sample(time, thread, place, &amounts)
    }
}

fn frame(address: u64, symbol: &str, file: &str) -> Frame {
    // The offset in the function follows its name.
    let name = match symbol.rsplit_once("+0x") {
        Some((name, offset)) if offset.bytes().all(|byte| byte.is_ascii_hexdigit()) => name,
        _ => symbol,
    };
    let has_file = file != "[unknown]";
    if address >= KERNEL_START {
        return frames::kernel(name, file);
    }
    // Python's trampolines, with `-X perf`.
    if let Some((name, file)) = name.strip_prefix("py::").and_then(|rest| rest.rsplit_once(':')) {
        return frames::python(name, file);
    }
    match name {
        "[unknown]" if !has_file => Frame {
            address,
            ..Frame::new(FrameKind::Unknown, name)
        },
        _ => frames::native(name, "", if has_file { file } else { "" }),
    }
}

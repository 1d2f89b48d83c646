//! Collapsed stacks: our own, those of py-spy (`raw`), async-profiler and the `stackcollapse` scripts, and Austin's.
//!
//! ```text
//! main (app.py:1);work (app.py:10);sort (libc.so.6);do_syscall_64_[k] 12        ours, py-spy
//! main;java/util/HashMap.get_[j];__memcpy_avx 12                                the others
//! P42;T0:42;/srv/app.py:main:7;/srv/app.py:work:12 10000                        Austin: microseconds
//! ```
//!
//! The number of a Python function is the line of its definition, as we write it, or the line that was executed, as py-spy
//! does: those have `<module>` at other lines than the first. Of Austin's mode `full` the time is read, and the part of it that
//! was not idle as CPU time.

use std::collections::{HashMap, HashSet};

use super::frames::{self, base_name};
use super::stacks::{Stacks, amount};
use super::{Damage, frames::KERNEL};
use crate::escape;
use crate::export::collapsed::NO_STACK;
use crate::model::{Frame, FrameId, FrameKind, Meta, Profile};
use crate::values::{Unit, ValueType};

/// Lines by which the format is recognized.
const EXAMINED: usize = 20;

/// How a kind of code is marked at the end of a name: `_[k]` by all, the others by async-profiler.
const SUFFIXES: &[(&str, FrameKind)] = &[
    ("_[k]", FrameKind::Kernel),
    ("_[i]", FrameKind::Inlined),
    ("_[j]", FrameKind::Native),
    ("_[0]", FrameKind::Native),
    ("_[1]", FrameKind::Native),
];

/// What the number behind a Python function's file is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LineMeaning {
    Definition,
    Executed,
}

/// How Austin measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AustinMode {
    Wall,
    Cpu,
    Memory,
    Full,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Dialect {
    Plain(LineMeaning),
    Austin(AustinMode),
}

/// Whether the first lines end in numbers, and are text.
pub fn is(bytes: &[u8]) -> bool {
    let mut first = stacks(bytes).take(EXAMINED).peekable();
    first.peek().is_some()
        && first.all(|(_, line)| {
            let is_text = !line.iter().any(|byte| *byte < b' ' && *byte != b'\t');
            is_text && split_amounts(line).is_some()
        })
}

/// Reads such a file.
///
/// # Errors
/// A line has no number, or two; or a limit is exceeded.
pub fn read(bytes: &[u8]) -> Result<Profile, Damage> {
    if is_difference(bytes) {
        return Err(Damage::whole(
            "its lines end in two numbers, so it compares two profiles; read these instead",
        ));
    }
    let dialect = dialect(bytes);
    let mut out = Stacks::new(&dialect.types())?;
    // Names are not trusted: a hasher that resists collision attacks.
    let mut known: HashMap<&[u8], Option<(FrameId, u32)>> = HashMap::new();
    for (number, line) in stacks(bytes) {
        let at = || format!("line {number}");
        let (stack, amounts) = split_amounts(line).ok_or_else(|| Damage::new(at(), "no number at its end"))?;
        let mut place = Stacks::ROOT;
        for (depth, field) in stack.split(|byte| *byte == b';').enumerate() {
            // Processes and threads are the outermost frames.
            let cached = if depth < 2 { None } else { known.get(field).copied() };
            let frame = match cached {
                Some(frame) => frame,
                None => {
                    let frame = dialect.frame(&frames::text(field), depth);
                    let frame = frame.map(|(frame, line)| (out.frame(frame), line));
                    if depth >= 2 {
                        known.insert(field, frame);
                    }
                    frame
                }
            };
            if let Some((frame, line)) = frame {
                place = out
                    .place(place, frame, line)
                    .map_err(|damage| Damage { at: at(), ..damage })?;
            }
        }
        out.add(place, &dialect.amounts(&amounts));
    }
    let microseconds = match dialect {
        Dialect::Austin(_) => metadata(bytes, "duration").and_then(|text| text.parse::<u64>().ok()),
        Dialect::Plain(_) => None,
    };
    Ok(out.finish(Meta {
        duration: microseconds.unwrap_or(0) as f64 / 1e6,
        ..Meta::default()
    }))
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    (1..).zip(bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end))
}

/// Number and text of each line that is a stack.
fn stacks(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    lines(bytes).filter(|(_, line)| !line.is_empty() && !line.starts_with(b"#"))
}

/// A fact of Austin's, `# KEY: VALUE`.
fn metadata<'a>(bytes: &'a [u8], key: &str) -> Option<&'a str> {
    lines(bytes).find_map(|(_, line)| {
        let rest = line.strip_prefix(b"# ")?.strip_prefix(key.as_bytes())?;
        Some(std::str::from_utf8(rest.strip_prefix(b":")?).ok()?.trim())
    })
}

/// A stack, and the number behind it: of Austin's mode `full` three of them.
fn split_amounts(line: &[u8]) -> Option<(&[u8], [f64; 3])> {
    let space = line.iter().rposition(|byte| *byte == b' ')?;
    let (stack, numbers) = (line.get(..space)?, line.get(space + 1..)?);
    let mut amounts = [0.0; 3];
    let mut parts = numbers.split(|byte| *byte == b',');
    for amount in &mut amounts {
        let Some(part) = parts.next() else { break };
        let is_number = part.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'-'));
        *amount = std::str::from_utf8(part).ok().filter(|_| is_number)?.parse().ok()?;
    }
    parts.next().is_none().then_some((stack.trim_ascii_end(), amounts))
}

/// Whether each line ends in two numbers.
fn is_difference(bytes: &[u8]) -> bool {
    stacks(bytes).all(|(_, line)| split_amounts(line).is_some_and(|(stack, _)| split_amounts(stack).is_some()))
}

fn dialect(bytes: &[u8]) -> Dialect {
    if metadata(bytes, "austin").is_some() {
        return Dialect::Austin(match metadata(bytes, "mode") {
            Some("cpu") => AustinMode::Cpu,
            Some("memory") => AustinMode::Memory,
            Some("full") => AustinMode::Full,
            _ => AustinMode::Wall,
        });
    }
    Dialect::Plain(if has_executed_lines(bytes) {
        LineMeaning::Executed
    } else {
        LineMeaning::Definition
    })
}

/// Whether modules are at other lines than that of their definition, which is the first one; without modules, whether a named
/// function is at several lines.
fn has_executed_lines(bytes: &[u8]) -> bool {
    // Names are not trusted: hashers that resist collision attacks.
    let mut seen: HashSet<&[u8]> = HashSet::new();
    let mut lines: HashMap<(&str, &str), u32> = HashMap::new();
    let (mut has_modules, mut has_several) = (false, false);
    for field in bytes.split(|byte| matches!(byte, b'\n' | b';')) {
        let field = split_amounts(field.trim_ascii_end()).map_or(field, |(stack, _)| stack);
        if !field.ends_with(b")") || !seen.insert(field) {
            continue;
        }
        let parts = std::str::from_utf8(field).ok().and_then(frames::split_place);
        let Some((name, place)) = parts else { continue };
        let Some((file, line)) = frames::split_line(place) else {
            continue;
        };
        if name == "<module>" {
            has_modules = true;
            if line > 1 {
                return true;
            }
        } else if !name.ends_with('>') {
            has_several |= *lines.entry((name, file)).or_insert(line) != line;
        }
    }
    has_several && !has_modules
}

impl Dialect {
    fn types(self) -> Vec<ValueType> {
        let more = match self {
            Dialect::Plain(_) => vec![],
            Dialect::Austin(AustinMode::Wall) => vec![ValueType::WALL],
            Dialect::Austin(AustinMode::Cpu) => vec![ValueType::CPU],
            Dialect::Austin(AustinMode::Full) => vec![ValueType::WALL, ValueType::CPU],
            Dialect::Austin(AustinMode::Memory) => vec![ValueType::new("memory", Unit::Bytes)],
        };
        std::iter::once(ValueType::SAMPLES).chain(more).collect()
    }

    /// By value type. A line of Austin's is one sample; times are in microseconds.
    fn amounts(self, [first, idle, _]: &[f64; 3]) -> Vec<u64> {
        let time = amount(first * 1000.0);
        match self {
            Dialect::Plain(_) => vec![amount(*first)],
            Dialect::Austin(AustinMode::Wall | AustinMode::Cpu) => vec![1, time],
            Dialect::Austin(AustinMode::Memory) => vec![1, amount(*first)],
            Dialect::Austin(AustinMode::Full) => vec![1, time, if *idle == 0.0 { time } else { 0 }],
        }
    }

    /// The frame of a field, and its line; `None` for a field that says that there is no frame.
    fn frame(self, field: &str, depth: usize) -> Option<(Frame, u32)> {
        match self {
            Dialect::Plain(meaning) => plain(&escape::unescaped(field), depth, meaning),
            Dialect::Austin(_) => Some(austin(field, depth)),
        }
    }
}

fn plain(field: &str, depth: usize, meaning: LineMeaning) -> Option<(Frame, u32)> {
    if field == NO_STACK {
        return None;
    }
    if depth < 2
        && let Some(kind) = group(field)
    {
        return Some((Frame::new(kind, field), 0));
    }
    if let Some(frame) = frames::special(field) {
        return Some((frame, 0));
    }
    let marked = SUFFIXES
        .iter()
        .find_map(|(suffix, kind)| Some((field.strip_suffix(suffix)?, *kind)));
    Some(match (marked, frames::split_place(field)) {
        (Some((name, FrameKind::Kernel)), _) => (frames::kernel(name, KERNEL), 0),
        (Some((name, kind)), _) => (
            Frame {
                kind,
                ..frames::native(name, "", "")
            },
            0,
        ),
        (None, None) => (frames::native(field, "", ""), 0),
        (None, Some((name, place))) => match frames::split_line(place) {
            Some((file, line)) if frames::is_source(file) => (frames::native(name, file, ""), line),
            Some((file, line)) if meaning == LineMeaning::Executed => (frames::python(name, file), line),
            Some((file, line)) => (frames::python_defined(name, file, line), 0),
            None => (frames::in_file(name, place), 0),
        },
    })
}

/// What is no function, as py-spy and async-profiler write it: `process 42:"python3 app.py"`, `thread (0x7F12): worker`,
/// `[worker tid=42]`.
fn group(field: &str) -> Option<FrameKind> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((number, _)) = field.strip_prefix("process ").and_then(|rest| rest.split_once(':')) {
        return is_number(number).then_some(FrameKind::Process);
    }
    if field.starts_with("thread (") {
        return Some(FrameKind::Thread);
    }
    let tid = field.strip_prefix('[')?.strip_suffix(']')?.rsplit_once(" tid=")?.1;
    is_number(tid).then_some(FrameKind::Thread)
}

/// `P42`, `T0:42`, `/srv/app.py:main:7`, or with more numbers: last line, columns.
fn austin(field: &str, depth: usize) -> (Frame, u32) {
    let group = match depth {
        0 => Some(('P', FrameKind::Process, "process")),
        1 => Some(('T', FrameKind::Thread, "thread")),
        _ => None,
    };
    if let Some((letter, kind, word)) = group
        && let Some(number) = field.strip_prefix(letter)
        && number.starts_with(|c: char| c.is_ascii_digit())
        && !number.contains(['/', '.'])
    {
        return (Frame::new(kind, format!("{word} {number}")), 0);
    }
    // `:GC:` and the like.
    if let Some(name) = field.strip_prefix(':').and_then(|rest| rest.strip_suffix(':')) {
        return (frames::native(name, "", ""), 0);
    }
    let (mut rest, mut line) = (field, 0);
    for _ in 0..4 {
        let Some((before, number)) = rest.rsplit_once(':') else {
            break;
        };
        match number.parse() {
            Ok(number) => (rest, line) = (before, number),
            Err(_) => break,
        }
    }
    match rest.rsplit_once(':') {
        Some((file, name)) if frames::is_python(file) || !base_name(file).contains('.') => {
            (frames::python(name, file), line)
        }
        Some((file, name)) => (frames::in_file(name, file), line),
        None => (frames::native(field, "", ""), 0),
    }
}

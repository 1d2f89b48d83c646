//! The Firefox Profiler's own JSON ("processed profile"), of that viewer, of samply, and ours.
//!
//! Tables of strings, functions, frames and stacks are those of a thread, in earlier versions of the format, or shared by all
//! threads. Samples have a time, and the amount that they weigh: a number, a time or bytes. Markers and counters are not read.
//!
//! Sources: `src/types/profile.ts` of the Firefox Profiler (versions 24 to 60 of the format), and what samply 0.13 writes.

use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

use super::Damage;
use super::frames::{self, base_name};
use super::stacks::{Stacks, amount};
use crate::export::collapsed::NO_STACK;
use crate::json::JsonError;
use crate::json::lexer::{Lexer, Members};
use crate::model::{Frame, FrameId, FrameKind, Meta, PlaceId, Profile};
use crate::values::{Unit, ValueType};

/// Maximum number of threads.
const MAX_THREADS: usize = 1 << 16;

/// Where values of an object begin, by their keys.
type Offsets<'a> = HashMap<Cow<'a, str>, usize>;

/// Numbers of a table; what is none is not a number.
type Column = Vec<f64>;

/// Whether the metadata at the lexer are those of a raw profile, as Firefox itself writes it. They are read.
pub fn is_raw(lexer: &mut Lexer<'_>) -> Result<bool, JsonError> {
    let (mut is_processed, mut members) = (false, Members::default());
    if lexer.peek() != Some(b'{') {
        lexer.skip_value()?;
        return Ok(false);
    }
    while let Some(key) = lexer.key(&mut members)? {
        is_processed |= key == "preprocessedProfileVersion";
        lexer.skip_value()?;
    }
    Ok(!is_processed)
}

/// Reads such a file.
///
/// # Errors
/// It is damaged, or exceeds a limit.
pub fn read(bytes: &[u8]) -> Result<Profile, Damage> {
    let mut lexer = Lexer::new(bytes)?;
    let parts = offsets(&mut lexer)?;
    let (start, kernel) = read_meta(&mut lexer, parts.get("meta").copied())?;
    let mut shared = Tables::default();
    if let Some(at) = parts.get("libs") {
        lexer.at = *at;
        shared.libs = Rc::new(read_libs(&mut lexer)?);
    }
    if let Some(at) = parts.get("shared") {
        lexer.at = *at;
        let parts = offsets(&mut lexer)?;
        shared = shared.with(&mut lexer, &parts)?;
    }
    let mut threads = Vec::new();
    let mut items = Members::default();
    lexer.at = *parts.get("threads").ok_or_else(|| Damage::whole("it has no threads"))?;
    while lexer.item(&mut items)? {
        if threads.len() == MAX_THREADS {
            return Err(Damage::whole(format!(
                "more than {MAX_THREADS} threads; that is the limit"
            )));
        }
        threads.push(FirefoxThread::read(&mut lexer, &shared)?);
    }
    let mut types = vec![ValueType::SAMPLES];
    for (kind, _) in threads.iter().filter_map(FirefoxThread::weighs) {
        if !types.contains(&kind) {
            types.push(kind);
        }
    }
    let mut out = Stacks::new(&types)?;
    let mut names = Vec::new();
    // Of the table that threads share, once.
    let mut of_shared: Option<Rc<Vec<PlaceId>>> = None;
    for (number, thread) in (1..).zip(&threads) {
        let at = |damage: Damage| Damage::new(format!("thread {number}"), damage.reason);
        let is_shared = Rc::ptr_eq(&thread.tables.stacks, &shared.stacks);
        let places = match (&of_shared, is_shared) {
            (Some(known), true) => Rc::clone(known),
            (None, true) => Rc::clone(of_shared.insert(Rc::new(shared.places(&kernel, &mut out)?))),
            (_, false) => Rc::new(thread.tables.places(&kernel, &mut out).map_err(at)?),
        };
        thread.add_samples(&places, &types, &mut out).map_err(at)?;
        names.push((thread.pid, thread.tid, thread.name.clone()));
    }
    Ok(out.finish(Meta {
        start,
        threads: names,
        ..Meta::default()
    }))
}

/// The keys of an object, and where their values begin.
fn offsets<'a>(lexer: &mut Lexer<'a>) -> Result<Offsets<'a>, JsonError> {
    let (mut offsets, mut members) = (Offsets::new(), Members::default());
    while let Some(key) = lexer.key(&mut members)? {
        lexer.space();
        offsets.insert(key, lexer.at);
        lexer.skip_value()?;
    }
    Ok(offsets)
}

/// When the recording began, seconds since the Unix epoch; and which categories of frames are the kernel.
fn read_meta(lexer: &mut Lexer<'_>, at: Option<usize>) -> Result<(f64, Vec<bool>), Damage> {
    let (mut start, mut kernel) = (0.0, Vec::new());
    let Some(at) = at else { return Ok((start, kernel)) };
    lexer.at = at;
    let mut members = Members::default();
    while let Some(key) = lexer.key(&mut members)? {
        match (&*key, lexer.peek()) {
            ("startTime", _) => start = lexer.number()?.unwrap_or(0.0) / 1e3,
            ("categories", Some(b'[')) => {
                let mut items = Members::default();
                while lexer.item(&mut items)? {
                    kernel.push(name_of(lexer, &["name"])? == "Kernel");
                }
            }
            _ => lexer.skip_value()?,
        }
    }
    Ok((if start.is_finite() { start } else { 0.0 }, kernel))
}

/// Names of libraries.
fn read_libs(lexer: &mut Lexer<'_>) -> Result<Vec<String>, JsonError> {
    let (mut libs, mut items) = (Vec::new(), Members::default());
    while lexer.item(&mut items)? {
        let name = name_of(lexer, &["name", "path"])?;
        libs.push(base_name(&name).to_string());
    }
    Ok(libs)
}

/// The text of the first of these keys that an object has.
fn name_of<'a>(lexer: &mut Lexer<'a>, keys: &[&str]) -> Result<Cow<'a, str>, JsonError> {
    let (mut found, mut members) = ((usize::MAX, Cow::Borrowed("")), Members::default());
    while let Some(key) = lexer.key(&mut members)? {
        match keys.iter().position(|known| *known == key) {
            Some(rank) if rank < found.0 && lexer.peek() == Some(b'"') => found = (rank, lexer.string()?),
            _ => lexer.skip_value()?,
        }
    }
    Ok(found.1)
}

/// Some columns of a table.
fn columns<const N: usize>(lexer: &mut Lexer<'_>, names: [&str; N]) -> Result<[Column; N], JsonError> {
    let (mut columns, mut members) = ([const { Vec::new() }; N], Members::default());
    while let Some(key) = lexer.key(&mut members)? {
        match names.iter().position(|name| *name == key) {
            Some(at) if lexer.peek() == Some(b'[') => columns[at] = column(lexer)?,
            _ => lexer.skip_value()?,
        }
    }
    Ok(columns)
}

fn column(lexer: &mut Lexer<'_>) -> Result<Column, JsonError> {
    let (mut column, mut items) = (Vec::new(), Members::default());
    while lexer.item(&mut items)? {
        column.push(lexer.number()?.unwrap_or(f64::NAN));
    }
    Ok(column)
}

fn strings(lexer: &mut Lexer<'_>) -> Result<Vec<String>, JsonError> {
    let (mut strings, mut items) = (Vec::new(), Members::default());
    while lexer.item(&mut items)? {
        if lexer.peek() == Some(b'"') {
            strings.push(lexer.string()?.into_owned());
        } else {
            lexer.skip_value()?;
            strings.push(String::new());
        }
    }
    Ok(strings)
}

/// A number as an index.
fn index(number: f64) -> Option<usize> {
    (number >= 0.0).then_some(number as usize)
}

/// What a column has in a row, if it is an index.
fn at(column: &Column, row: usize) -> Option<usize> {
    index(*column.get(row)?)
}

/// A line of a column; 0 if it is unknown.
fn line_at(column: &Column, row: usize) -> u32 {
    at(column, row).and_then(|line| u32::try_from(line).ok()).unwrap_or(0)
}

#[derive(Default)]
struct FunctionTable {
    name: Column,
    /// In the table of strings, in earlier versions of the format.
    file: Column,
    source: Column,
    line: Column,
    resource: Column,
}

#[derive(Default)]
struct FrameTable {
    function: Column,
    line: Column,
    inline_depth: Column,
    category: Column,
}

#[derive(Default)]
struct StackTable {
    frame: Column,
    prefix: Column,
}

/// The tables of a thread.
#[derive(Clone, Default)]
struct Tables {
    libs: Rc<Vec<String>>,
    strings: Rc<Vec<String>>,
    /// By source, the string of its file's name.
    sources: Rc<Column>,
    /// By resource, its library.
    resources: Rc<Column>,
    functions: Rc<FunctionTable>,
    frames: Rc<FrameTable>,
    stacks: Rc<StackTable>,
}

impl Tables {
    /// These tables, but for those that an object has.
    fn with(&self, lexer: &mut Lexer<'_>, parts: &Offsets<'_>) -> Result<Tables, JsonError> {
        let mut tables = self.clone();
        for (key, at) in parts {
            lexer.at = *at;
            match (&**key, lexer.peek()) {
                ("libs", Some(b'[')) => tables.libs = Rc::new(read_libs(lexer)?),
                ("stringArray" | "stringTable", Some(b'[')) => tables.strings = Rc::new(strings(lexer)?),
                ("sources", Some(b'{')) => {
                    let [file] = columns(lexer, ["filename"])?;
                    tables.sources = Rc::new(file);
                }
                ("resourceTable", Some(b'{')) => {
                    let [lib] = columns(lexer, ["lib"])?;
                    tables.resources = Rc::new(lib);
                }
                ("funcTable", Some(b'{')) => {
                    let names = ["name", "fileName", "source", "lineNumber", "resource"];
                    let [name, file, source, line, resource] = columns(lexer, names)?;
                    tables.functions = Rc::new(FunctionTable {
                        name,
                        file,
                        source,
                        line,
                        resource,
                    });
                }
                ("frameTable", Some(b'{')) => {
                    let names = ["func", "line", "inlineDepth", "category"];
                    let [function, line, inline_depth, category] = columns(lexer, names)?;
                    tables.frames = Rc::new(FrameTable {
                        function,
                        line,
                        inline_depth,
                        category,
                    });
                }
                ("stackTable", Some(b'{')) => {
                    let [frame, prefix] = columns(lexer, ["frame", "prefix"])?;
                    tables.stacks = Rc::new(StackTable { frame, prefix });
                }
                _ => {}
            }
        }
        Ok(tables)
    }

    fn text(&self, at: Option<usize>) -> &str {
        at.and_then(|at| self.strings.get(at)).map_or("", |text| text)
    }

    /// By row of the stacks, the place where it ends. `kernel`: which categories are the kernel.
    fn places(&self, kernel: &[bool], out: &mut Stacks) -> Result<Vec<PlaceId>, Damage> {
        let mut known: Vec<Option<Option<(FrameId, u32)>>> = vec![None; self.frames.function.len()];
        let mut places: Vec<PlaceId> = Vec::with_capacity(self.stacks.frame.len());
        for row in 0..self.stacks.frame.len() {
            let caller = match at(&self.stacks.prefix, row) {
                None => Stacks::ROOT,
                Some(prefix) => *places
                    .get(prefix)
                    .ok_or_else(|| Damage::whole("a stack that comes before its caller"))?,
            };
            let frame = at(&self.stacks.frame, row);
            let cached = frame.and_then(|frame| Some((frame, known.get_mut(frame)?)));
            let (number, cached) = cached.ok_or_else(|| Damage::whole("a frame that does not exist"))?;
            let frame = match cached {
                Some(frame) => *frame,
                None => {
                    let frame = self.frame(number, kernel);
                    *cached.insert(frame.map(|frame| (out.frame(frame), line_at(&self.frames.line, number))))
                }
            };
            places.push(match frame {
                Some((frame, line)) => out.place(caller, frame, line)?,
                None => caller,
            });
        }
        Ok(places)
    }

    /// A row of the frames; `None`: it says that there is no frame.
    fn frame(&self, row: usize, kernel: &[bool]) -> Option<Frame> {
        let of = &self.functions;
        let function = at(&self.frames.function, row).unwrap_or(usize::MAX);
        let name = self.text(at(&of.name, function));
        if name == NO_STACK {
            return None;
        }
        if let Some(frame) = frames::special(name) {
            return Some(frame);
        }
        let source = at(&of.source, function).and_then(|source| at(&self.sources, source));
        let file = self.text(at(&of.file, function).or(source));
        let lib = at(&of.resource, function).and_then(|resource| at(&self.resources, resource));
        let module = lib.and_then(|lib| self.libs.get(lib)).map_or("", |lib| lib);
        let is_kernel = at(&self.frames.category, row).and_then(|category| kernel.get(category));
        Some(match line_at(&of.line, function) {
            0 if frames::is_python(file) => frames::python(name, file),
            line if frames::is_python(file) => frames::python_defined(name, file, line),
            _ if is_kernel == Some(&true) => frames::kernel(name, module),
            _ => match name.strip_prefix("0x").and_then(frames::hexadecimal) {
                // Without a symbol the name is the address in the library.
                Some(address) => Frame {
                    module: module.into(),
                    address,
                    ..Frame::new(FrameKind::Unknown, "[unknown]")
                },
                None => {
                    let is_inlined = at(&self.frames.inline_depth, row).is_some_and(|depth| depth > 0);
                    let frame = frames::native(name, file, module);
                    match frame.kind {
                        FrameKind::Native if is_inlined => Frame {
                            kind: FrameKind::Inlined,
                            ..frame
                        },
                        _ => frame,
                    }
                }
            },
        })
    }
}

/// A thread, with its samples.
#[derive(Default)]
struct FirefoxThread {
    pid: u32,
    tid: u32,
    name: String,
    tables: Tables,
    stack: Column,
    /// ms
    time: Column,
    /// ms between samples, where they have no time.
    deltas: Column,
    /// Empty: each is 1.
    weight: Column,
    weight_type: String,
}

impl FirefoxThread {
    fn read(lexer: &mut Lexer<'_>, shared: &Tables) -> Result<FirefoxThread, Damage> {
        let parts = offsets(lexer)?;
        let end = lexer.at;
        let mut thread = FirefoxThread {
            tables: shared.with(lexer, &parts)?,
            ..FirefoxThread::default()
        };
        for (key, at) in &parts {
            lexer.at = *at;
            match (&**key, lexer.peek()) {
                ("name", Some(b'"')) => thread.name = lexer.string()?.into_owned(),
                ("pid", _) => thread.pid = id(lexer)?,
                ("tid", _) => thread.tid = id(lexer)?,
                ("samples", Some(b'{')) => {
                    let names = ["stack", "time", "timeDeltas", "weight"];
                    [thread.stack, thread.time, thread.deltas, thread.weight] = columns(lexer, names)?;
                    lexer.at = *at;
                    thread.weight_type = name_of(lexer, &["weightType"])?.into_owned();
                }
                _ => {}
            }
        }
        lexer.at = end;
        Ok(thread)
    }

    /// What samples weigh, if it is no number of samples, and what their weights are multiplied with.
    fn weighs(&self) -> Option<(ValueType, f64)> {
        match &*self.weight_type {
            _ if self.weight.is_empty() => None,
            "tracing-ms" => Some((ValueType::new("time", Unit::Nanoseconds), 1e6)),
            "bytes" => Some((ValueType::new("bytes", Unit::Bytes), 1.0)),
            _ => None,
        }
    }

    fn add_samples(&self, places: &[PlaceId], types: &[ValueType], out: &mut Stacks) -> Result<(), Damage> {
        let weighs = self.weighs();
        let value = weighs
            .as_ref()
            .and_then(|(kind, scale)| Some((types.iter().position(|known| known == kind)?, *scale)));
        let mut now = 0.0;
        for (row, stack) in self.stack.iter().enumerate() {
            now = match (self.time.get(row), self.deltas.get(row)) {
                (Some(time), _) => *time,
                (None, Some(delta)) => now + delta,
                (None, None) => now,
            };
            let place = match index(*stack) {
                None => Stacks::ROOT,
                Some(stack) => *places
                    .get(stack)
                    .ok_or_else(|| Damage::whole("a sample of a stack that does not exist"))?,
            };
            let weight = self.weight.get(row).copied().unwrap_or(1.0);
            let mut amounts = vec![0; types.len()];
            match (value, amounts.first_mut()) {
                (None, Some(count)) => *count = amount(weight),
                (Some((value, scale)), Some(count)) => {
                    *count = 1;
                    amounts[value] = amount(weight * scale);
                }
                (_, None) => {}
            }
            out.sample(amount(now * 1e6), (self.pid, self.tid), place, &amounts)?;
        }
        Ok(())
    }
}

/// The number of a process or thread: a number, or text that begins with it.
fn id(lexer: &mut Lexer<'_>) -> Result<u32, JsonError> {
    if lexer.peek() != Some(b'"') {
        return Ok(lexer.number()?.map_or(0, |number| number as u32));
    }
    let text = lexer.string()?;
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    Ok(text.get(..digits).and_then(|digits| digits.parse().ok()).unwrap_or(0))
}

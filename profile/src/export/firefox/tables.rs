//! The tables that all threads share: strings, sources, stacks, frames, functions, libraries and native symbols.

use std::collections::HashMap;
use std::io::{self, Write};

use rustc_hash::FxHashMap;

use super::{base_name, category, column};
use crate::escape::write_json;
use crate::export::thread_tracks::{NONE, StackRows};
use crate::json::write::comma;
use crate::model::{FrameKind, ModuleMeta, Profile};

/// A row of the table of frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct FrameRow {
    function: u32,
    line: u32,
    inline_depth: u32,
    /// Function whose code it is in.
    symbol: u32,
}

pub struct FirefoxTables {
    strings: Vec<String>,
    pub libs: Vec<ModuleMeta>,
    /// By function: name, file (or -1), library (or -1).
    functions: Vec<(usize, i64, i64)>,
    sources: Vec<usize>,
    frames: Vec<FrameRow>,
    /// By row of the stacks.
    frame: Vec<u32>,
    /// By function, its row among the native symbols, or `NONE`.
    symbol: Vec<u32>,
}

impl FirefoxTables {
    pub fn new(profile: &Profile, stacks: &StackRows<'_>) -> FirefoxTables {
        // Names come from the target: use a hasher that resists collision attacks.
        let mut known: HashMap<&str, usize> = HashMap::new();
        let mut strings = Vec::new();
        let mut string = |text| {
            *known.entry(text).or_insert_with_key(|text| {
                strings.push(text.to_string());
                strings.len() - 1
            })
        };
        let rows = profile.meta.modules.iter().rev();
        let rows: HashMap<&str, &ModuleMeta> = rows.map(|row| (base_name(&row.path), row)).collect();
        let (mut libs, mut lib_of): (Vec<ModuleMeta>, HashMap<&str, i64>) = Default::default();
        let (mut sources, mut source_of): (Vec<usize>, HashMap<usize, i64>) = Default::default();
        let mut functions = Vec::with_capacity(stacks.functions.len());
        for function in &stacks.functions {
            let name = string(&*function.name);
            let frame = function.frame;
            let is_source = frame.is_some_and(|f| f.kind == FrameKind::Python || !f.source.is_empty());
            let source = match function.file {
                file if is_source && !file.is_empty() => {
                    let file = string(file);
                    *source_of.entry(file).or_insert_with(|| {
                        sources.push(file);
                        sources.len() as i64 - 1
                    })
                }
                _ => -1,
            };
            let lib = match frame.map_or("", |frame| frame.module.as_str()) {
                "" => -1,
                module => *lib_of.entry(module).or_insert_with(|| {
                    string(module);
                    let bare = || ModuleMeta {
                        path: module.to_string(),
                        ..ModuleMeta::default()
                    };
                    libs.push(rows.get(module).map_or_else(bare, |row| (*row).clone()));
                    libs.len() as i64 - 1
                }),
            };
            functions.push((name, source, lib));
        }
        // The name of a library is the module's, wherever it lies.
        for lib in &libs {
            string(base_name(&lib.path));
        }
        let mut tables = FirefoxTables {
            strings: Vec::new(),
            libs: Vec::new(),
            functions,
            sources,
            frames: Vec::new(),
            frame: Vec::with_capacity(stacks.item.len()),
            symbol: vec![NONE; stacks.functions.len()],
        };
        tables.strings = strings;
        tables.libs = libs;
        tables.add_frames(stacks);
        tables
    }

    fn add_frames(&mut self, stacks: &StackRows<'_>) {
        let mut known: FxHashMap<FrameRow, u32> = FxHashMap::default();
        for (at, function) in stacks.function.iter().enumerate() {
            let function = *function;
            let kind = stacks.functions[function as usize].frame.map(|frame| frame.kind);
            let caller = stacks.caller[at];
            let outer = match kind {
                Some(FrameKind::Inlined) if caller != NONE => Some(self.frames[self.frame[caller as usize] as usize]),
                _ => None,
            };
            let (inline_depth, symbol) = match (kind, outer) {
                (_, Some(outer)) if outer.symbol != NONE => (outer.inline_depth + 1, outer.symbol),
                (Some(FrameKind::Native), _) if self.functions[function as usize].2 >= 0 => (0, function),
                _ => (0, NONE),
            };
            let row = FrameRow {
                function,
                line: stacks.line[at],
                inline_depth,
                symbol,
            };
            let frames = &mut self.frames;
            let at = *known.entry(row).or_insert_with(|| {
                frames.push(row);
                frames.len() as u32 - 1
            });
            self.frame.push(at);
            if symbol != NONE {
                self.symbol[symbol as usize] = 0;
            }
        }
        let rows = self.symbol.iter_mut().filter(|row| **row != NONE);
        (0..).zip(rows).for_each(|(at, row)| *row = at);
    }

    /// Writes the tables that all threads share.
    pub fn write(&self, stacks: &StackRows<'_>, out: &mut impl Write) -> io::Result<()> {
        out.write_all(b"\"stringArray\":[")?;
        for (at, text) in self.strings.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            write_json(text, out)?;
        }
        write!(out, "],\n\"sources\":{{\"length\":{}", self.sources.len())?;
        column("id", self.sources.iter().map(|_| None), out)?;
        column("filename", self.sources.iter().map(|at| Some(*at as i64)), out)?;

        write!(out, "}},\n\"stackTable\":{{\"length\":{}", self.frame.len())?;
        column("frame", self.frame.iter().map(|at| Some(i64::from(*at))), out)?;
        let callers = stacks.caller.iter().map(|up| (*up != NONE).then_some(i64::from(*up)));
        column("prefix", callers, out)?;

        let kind = |row: &FrameRow| stacks.functions[row.function as usize].frame.map(|frame| frame.kind);
        let address = |function: u32| {
            stacks.functions[function as usize]
                .frame
                .map_or(0, |frame| frame.address)
        };
        // The range of JavaScript's integers.
        let exact = |address: u64| i64::try_from(address).ok().filter(|n| *n < 1 << 53).unwrap_or(-1);
        let some = |n: u32| (n > 0).then_some(i64::from(n));
        let rows = || self.frames.iter();
        let start = |row: &FrameRow| {
            if row.symbol == NONE {
                -1
            } else {
                exact(address(row.symbol))
            }
        };
        let symbol = |row: &FrameRow| self.symbol.get(row.symbol as usize).map(|at| i64::from(*at));
        write!(out, "}},\n\"frameTable\":{{\"length\":{}", self.frames.len())?;
        column("address", rows().map(|row| Some(start(row))), out)?;
        column("inlineDepth", rows().map(|row| Some(row.inline_depth.into())), out)?;
        column("category", rows().map(|row| Some(category(kind(row)).into())), out)?;
        column("subcategory", rows().map(|_| Some(0)), out)?;
        column("func", rows().map(|row| Some(row.function.into())), out)?;
        column("nativeSymbol", rows().map(symbol), out)?;
        column("innerWindowID", rows().map(|_| Some(0)), out)?;
        column("line", rows().map(|row| some(row.line)), out)?;
        column("column", rows().map(|_| None), out)?;

        let rows = || self.functions.iter();
        let python = stacks
            .functions
            .iter()
            .map(|f| f.frame.is_some_and(|frame| frame.kind == FrameKind::Python));
        write!(out, "}},\n\"funcTable\":{{\"length\":{}", self.functions.len())?;
        column("name", rows().map(|row| Some(row.0 as i64)), out)?;
        flags("isJS", python, out)?;
        flags("relevantForJS", rows().map(|_| false), out)?;
        column("resource", rows().map(|row| Some(row.2)), out)?;
        column("source", rows().map(|row| (row.1 >= 0).then_some(row.1)), out)?;
        column(
            "lineNumber",
            stacks.functions.iter().map(|function| some(function.first_line)),
            out,
        )?;
        column("columnNumber", rows().map(|_| None), out)?;

        let libs = || self.libs.iter();
        let names: HashMap<&str, i64> = (0..).zip(&self.strings).map(|(at, text)| (text.as_str(), at)).collect();
        write!(out, "}},\n\"resourceTable\":{{\"length\":{}", self.libs.len())?;
        column("type", libs().map(|_| Some(1)), out)?;
        column("lib", (0..self.libs.len()).map(|at| Some(at as i64)), out)?;
        column("name", libs().map(|lib| names.get(base_name(&lib.path)).copied()), out)?;
        column("host", libs().map(|_| None), out)?;

        let symbols = || {
            (0..)
                .zip(&self.symbol)
                .filter(|(_, row)| **row != NONE)
                .map(|(function, _)| function)
        };
        let of = |function: u32| self.functions[function as usize];
        write!(out, "}},\n\"nativeSymbols\":{{\"length\":{}", symbols().count())?;
        column("libIndex", symbols().map(|f| Some(of(f).2)), out)?;
        column("address", symbols().map(|f| Some(exact(address(f)))), out)?;
        column("name", symbols().map(|f| Some(of(f).0 as i64)), out)?;
        column("functionSize", symbols().map(|_| None), out)?;
        out.write_all(b"}")
    }
}

fn flags(name: &str, values: impl Iterator<Item = bool>, out: &mut impl Write) -> io::Result<()> {
    write!(out, ",\"{name}\":[")?;
    for (at, value) in values.enumerate() {
        out.write_all(comma(at).as_bytes())?;
        out.write_all(if value { b"true" } else { b"false" })?;
    }
    out.write_all(b"]")
}

//! Stacks and their locations.

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use super::dictionary::Dictionary;
use crate::export::thread_tracks::{NONE, StackRows};
use crate::model::{Frame, FrameKind, ModuleMeta, Profile};
use crate::otlp;
use crate::otlp::messages::{Function, Line, Location, Mapping};
use crate::view::View;

/// The stacks of a profile, as they are needed.
pub struct StackTables<'a> {
    view: &'a View<'a>,
    rows: &'a StackRows<'a>,
    /// By file name without the directory.
    files: HashMap<&'a str, &'a ModuleMeta>,
    /// By module.
    mappings: HashMap<&'a str, i32>,
    /// By row, its location, and the row that called that location.
    locations: FxHashMap<u32, (i32, u32)>,
    /// By row.
    stacks: FxHashMap<u32, i32>,
}

impl<'a> StackTables<'a> {
    pub fn new(profile: &'a Profile, view: &'a View<'a>, rows: &'a StackRows<'a>) -> StackTables<'a> {
        let files = profile.meta.modules.iter().rev();
        StackTables {
            view,
            rows,
            files: files
                .map(|row| (row.path.rsplit('/').next().unwrap_or(""), row))
                .collect(),
            mappings: HashMap::new(),
            locations: FxHashMap::default(),
            stacks: FxHashMap::default(),
        }
    }

    /// The index of the stack that ends in a row.
    pub fn stack(&mut self, dictionary: &mut Dictionary, row: u32) -> i32 {
        if let Some(known) = self.stacks.get(&row) {
            return *known;
        }
        let rows = self.rows;
        let (mut path, is_deeper) = rows.path(row);
        let mut locations = Vec::new();
        if is_deeper {
            locations.push(self.deeper(dictionary));
        }
        let mut at = path.next().unwrap_or(NONE);
        while at != NONE {
            let (location, caller) = self.location(dictionary, at);
            locations.push(location);
            at = caller;
        }
        let stack = dictionary.stack(locations);
        self.stacks.insert(row, stack);
        stack
    }

    /// The location of a row and of those that it is inlined into, and the row that called it.
    fn location(&mut self, dictionary: &mut Dictionary, row: u32) -> (i32, u32) {
        if let Some(known) = self.locations.get(&row) {
            return *known;
        }
        let mut lines = Vec::new();
        let mut at = row;
        loop {
            lines.extend(self.line(dictionary, at));
            if !self.is_inlined(at) {
                break;
            }
            at = self.rows.caller[at as usize];
        }
        let frame = self.rows.functions[self.rows.function[at as usize] as usize].frame;
        let location = Location {
            mapping_index: frame.map_or(0, |frame| self.mapping(dictionary, &frame.module)),
            address: frame.map_or(0, |frame| frame.address),
            lines,
            attribute_indices: frame.map(|frame| frame_type(dictionary, frame)).into_iter().collect(),
        };
        let found = (dictionary.location(location), self.rows.caller[at as usize]);
        self.locations.insert(row, found);
        found
    }

    /// The line of a row; an address without a symbol has none.
    fn line(&self, dictionary: &mut Dictionary, row: u32) -> Option<Line> {
        let function = &self.rows.functions[self.rows.function[row as usize] as usize];
        if (function.frame).is_some_and(|frame| frame.kind == FrameKind::Unknown) {
            return None;
        }
        let mut entry = Function {
            name_strindex: dictionary.string(&function.name),
            start_line: function.first_line.into(),
            ..Function::default()
        };
        match function.frame {
            Some(frame) if frame.kind == FrameKind::Python => {
                entry.filename_strindex = dictionary.string(&frame.filename);
                if frame.name != function.name {
                    entry.system_name_strindex = dictionary.string(&frame.name);
                }
            }
            Some(frame) => entry.filename_strindex = dictionary.string(&frame.source),
            None => {}
        }
        Some(Line {
            function_index: dictionary.function(entry),
            line: self.rows.line[row as usize].into(),
        })
    }

    fn is_inlined(&self, row: u32) -> bool {
        let kind = |row: u32| {
            let item = self.rows.item.get(row as usize)?;
            Some(self.view.frame(*item)?.kind)
        };
        kind(row) == Some(FrameKind::Inlined)
            && matches!(
                kind(self.rows.caller[row as usize]),
                Some(FrameKind::Native | FrameKind::Inlined)
            )
    }

    /// What a stack that is too deep ends in.
    fn deeper(&self, dictionary: &mut Dictionary) -> i32 {
        let name = &self.rows.functions[self.rows.deeper() as usize].name;
        let entry = Function {
            name_strindex: dictionary.string(name),
            ..Function::default()
        };
        let lines = vec![Line {
            function_index: dictionary.function(entry),
            line: 0,
        }];
        let frame = Frame::new(FrameKind::Truncated, &**name);
        let attribute_indices = vec![frame_type(dictionary, &frame)];
        dictionary.location(Location {
            lines,
            attribute_indices,
            ..Location::default()
        })
    }

    fn mapping(&mut self, dictionary: &mut Dictionary, module: &'a str) -> i32 {
        if module.is_empty() {
            return 0;
        }
        if let Some(known) = self.mappings.get(module) {
            return *known;
        }
        let mut attribute_indices = Vec::new();
        let row = self.files.get(module);
        if let Some(row) = row {
            let texts = [
                (otlp::BUILD_ID, &row.build_id),
                (otlp::SYMBOLS_FROM, &row.symbols_from),
                (otlp::SYMBOLS_MISSING, &row.symbols_missing),
            ];
            for (key, text) in texts.into_iter().filter(|(_, text)| !text.is_empty()) {
                attribute_indices.push(dictionary.attribute(key, text.as_str()));
            }
            let numbers = [
                (otlp::FRAMES, row.frames, "{frame}"),
                (otlp::UNNAMED, row.unnamed, "{frame}"),
                (otlp::SAMPLES, row.samples, "{sample}"),
            ];
            // Even those of 0: a mapping without attributes is a module of which no more is known.
            for (key, number, unit) in numbers {
                attribute_indices.push(dictionary.attribute_in(key, number, unit));
            }
        }
        let entry = Mapping {
            filename_strindex: dictionary.string(row.map_or(module, |row| &row.path)),
            attribute_indices,
            ..Mapping::default()
        };
        let mapping = dictionary.mapping(entry);
        self.mappings.insert(module, mapping);
        mapping
    }
}

fn frame_type(dictionary: &mut Dictionary, frame: &Frame) -> i32 {
    let is_of = |(_, kind): &&(&str, FrameKind)| *kind == frame.kind;
    let name = otlp::FRAME_TYPES.iter().find(is_of).map_or("native", |(name, _)| name);
    dictionary.attribute(otlp::FRAME_TYPE, name)
}

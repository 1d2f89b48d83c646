//! Stacks of a file as places of a profile.

use std::collections::HashMap;
use std::rc::Rc;

use super::tables::{Table, Tables};
use crate::export::collapsed::NO_STACK;
use crate::import::Damage;
use crate::import::frames::{self, base_name};
use crate::import::stacks::Stacks;
use crate::model::{Frame, FrameId, FrameKind, PlaceId};
use crate::otlp::messages::{Function, Location, Mapping, Stack};
use crate::otlp::{FRAME_TYPE, FRAME_TYPES};

/// The functions of a location and their lines, outermost first.
type Calls = Rc<[(FrameId, u32)]>;

/// Places of stacks, each made once.
#[derive(Default)]
pub struct Locations {
    /// Whether nativeprof wrote the file: names have their parts, and addresses are those of functions in files.
    is_own: bool,
    locations: HashMap<i32, Calls>,
    /// By the place that a stack is below, and the index of the stack.
    stacks: HashMap<(PlaceId, i32), PlaceId>,
    /// By place and location.
    calls: HashMap<(PlaceId, i32), PlaceId>,
}

impl Locations {
    /// None yet. `is_own`: nativeprof wrote the file.
    pub fn new(is_own: bool) -> Locations {
        Locations {
            is_own,
            ..Locations::default()
        }
    }

    /// The innermost place of a stack below another place.
    pub fn place(
        &mut self,
        base: PlaceId,
        stack: i32,
        tables: &Tables<'_>,
        out: &mut Stacks,
    ) -> Result<PlaceId, Damage> {
        if let Some(known) = self.stacks.get(&(base, stack)) {
            return Ok(*known);
        }
        let Stack { location_indices } = tables.entry(Table::Stacks, stack)?;
        let mut place = base;
        for location in location_indices.iter().rev() {
            if let Some(known) = self.calls.get(&(place, *location)) {
                place = *known;
                continue;
            }
            let calls = match self.locations.get(location) {
                Some(known) => Rc::clone(known),
                None => {
                    let calls: Calls = self.calls_of(*location, tables, out)?.into();
                    self.locations.insert(*location, Rc::clone(&calls));
                    calls
                }
            };
            if location_indices.len() == 1 && calls.is_empty() {
                break;
            }
            let outer = place;
            for (frame, line) in calls.iter() {
                place = out.place(place, *frame, *line)?;
            }
            self.calls.insert((outer, *location), place);
        }
        self.stacks.insert((base, stack), place);
        Ok(place)
    }

    /// The functions of a location; none of a stack without frames.
    fn calls_of(&self, index: i32, tables: &Tables<'_>, out: &mut Stacks) -> Result<Vec<(FrameId, u32)>, Damage> {
        let location: Location = tables.entry(Table::Locations, index)?;
        let mapping: Mapping = tables.entry(Table::Mappings, location.mapping_index)?;
        let file = tables.text(mapping.filename_strindex)?;
        let mut of_code = Code {
            is_own: self.is_own,
            kind: None,
            module: match &*file {
                // A module of which no more is known than its name.
                name if self.is_own && mapping.attribute_indices.is_empty() => name,
                path => base_name(path),
            },
            address: location.address,
        };
        for attribute in &location.attribute_indices {
            if let (key, Some(value)) = tables.attribute(*attribute)?
                && key == FRAME_TYPE
            {
                let name = tables.text_of(Some(&value))?.unwrap_or_default();
                let known = FRAME_TYPES.iter().find(|(known, _)| *known == name);
                of_code.kind = Some(known.map_or(FrameKind::Native, |(_, kind)| *kind));
            }
        }
        if location.lines.is_empty() {
            let frame = of_code.unknown();
            return Ok(vec![(out.frame(frame), 0)]);
        }
        let mut calls = Vec::with_capacity(location.lines.len());
        for (at, line) in location.lines.iter().rev().enumerate() {
            let function: Function = tables.entry(Table::Functions, line.function_index)?;
            let name = tables.text(function.name_strindex)?;
            let system_name = tables.text(function.system_name_strindex)?;
            let file = tables.text(function.filename_strindex)?;
            if name == NO_STACK && file.is_empty() && location.lines.len() == 1 {
                return Ok(Vec::new());
            }
            let first_line = u32::try_from(function.start_line).unwrap_or(0);
            let name = if name.is_empty() { &system_name } else { &name };
            let mut frame = of_code.frame(name, &system_name, &file, first_line);
            if at > 0 && frame.kind == FrameKind::Native {
                frame.kind = FrameKind::Inlined;
            }
            calls.push((out.frame(frame), u32::try_from(line.line).unwrap_or(0)));
        }
        Ok(calls)
    }
}

/// What a location says of all its functions.
struct Code<'a> {
    is_own: bool,
    /// By the type of the frame, if it has one.
    kind: Option<FrameKind>,
    module: &'a str,
    address: u64,
}

impl Code<'_> {
    fn frame(&self, name: &str, system_name: &str, file: &str, first_line: u32) -> Frame {
        if !self.is_own {
            return self.foreign(name, file, first_line);
        }
        match self.kind {
            Some(FrameKind::Python) => match system_name {
                "" => Frame::python(frames::named(name), "", file, first_line),
                system_name => Frame::python(system_name, name, file, first_line),
            },
            Some(kind @ (FrameKind::Native | FrameKind::Kernel)) => Frame {
                source: file.into(),
                module: self.module.into(),
                address: self.address,
                ..Frame::new(kind, frames::named(name))
            },
            Some(kind) => Frame::new(kind, name),
            None => Frame::native(name, self.module, self.address),
        }
    }

    /// A function as other tools have it.
    fn foreign(&self, name: &str, file: &str, first_line: u32) -> Frame {
        let python = || match first_line {
            0 => frames::python(name, file),
            line => frames::python_defined(name, file, line),
        };
        // Files that are no source are libraries.
        let (source, library) = if frames::is_source(file) {
            (file, "")
        } else {
            ("", file)
        };
        let module = if self.module.is_empty() { library } else { self.module };
        match self.kind {
            Some(FrameKind::Python) => python(),
            Some(FrameKind::Kernel) => frames::kernel(name, self.kernel_module()),
            None if frames::is_python(file) => python(),
            _ => frames::native(name, source, module),
        }
    }

    fn kernel_module(&self) -> &str {
        if self.module.is_empty() {
            frames::KERNEL
        } else {
            self.module
        }
    }

    /// Code without a name.
    fn unknown(&self) -> Frame {
        match self.kind {
            Some(FrameKind::Kernel) => frames::kernel("[unknown]", self.kernel_module()),
            // Addresses of other tools are those of a process, as a rule.
            _ if !self.is_own && !self.module.is_empty() => frames::native("[unknown]", "", self.module),
            _ => Frame {
                module: self.module.into(),
                address: self.address,
                ..Frame::new(FrameKind::Unknown, "[unknown]")
            },
        }
    }
}

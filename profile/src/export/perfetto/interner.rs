//! Numbers for what samples share: frames, call stacks, mappings and tasks.

use std::collections::HashMap;

use rustc_hash::FxHashMap;

use super::messages::{
    AsyncContext, Callstack, FrameOrigin, FrameOriginField, InternedData, InternedFrame, InternedString,
    PerfettoMapping, StackSample, TaskContext, TracePacket,
};
use crate::escape;
use crate::export::thread_tracks::StackRows;
use crate::model::{Frame, FrameKind, Profile};
use crate::view::View;

/// Numbers for what samples share, and what of it the trace has yet to be given.
pub struct Interner<'a> {
    view: &'a View<'a>,
    stacks: &'a StackRows<'a>,
    /// By name of a module: path and build ID.
    files: HashMap<&'a str, (&'a str, &'a str)>,
    // Names come from the target: hashers that resist collision attacks.
    functions: HashMap<String, u64>,
    sources: HashMap<String, u64>,
    mappings: HashMap<&'a str, u64>,
    /// (function, line) -> frame.
    frames: FxHashMap<(u32, u32), u64>,
    /// By row whose call stack is in the trace: the number of its innermost task, or 0.
    task_of_row: Vec<Option<u64>>,
    /// (name, outer task) -> task.
    tasks: HashMap<(&'a str, u64), u64>,
    contexts: FxHashMap<(u32, u32, u64), u64>,
    new: InternedData,
}

impl<'a> Interner<'a> {
    pub fn new(profile: &'a Profile, view: &'a View<'a>, stacks: &'a StackRows<'a>) -> Self {
        let rows = profile.meta.modules.iter().rev();
        let file = |path: &'a str| path.rsplit('/').next().unwrap_or("");
        Interner {
            view,
            stacks,
            files: rows
                .map(|row| (file(&row.path), (&*row.path, &*row.build_id)))
                .collect(),
            functions: HashMap::new(),
            sources: HashMap::new(),
            mappings: HashMap::new(),
            frames: FxHashMap::default(),
            task_of_row: vec![None; stacks.item.len()],
            tasks: HashMap::new(),
            contexts: FxHashMap::default(),
            new: InternedData::default(),
        }
    }

    /// The packet of a sample without its time, with all that it is the first to use.
    pub fn sample(&mut self, row: u32, (pid, tid): (u32, u32), amounts: Vec<u64>) -> TracePacket {
        let task = self.callstack(row);
        let task_context_iid = self.context((pid, tid, task));
        let sample = StackSample {
            task_context_iid,
            callstack_iid: u64::from(row) + 1,
            primary_weight: amounts.first().copied().unwrap_or(0),
            follower_weights: amounts.into_iter().skip(1).collect(),
        };
        let new = std::mem::take(&mut self.new);
        TracePacket {
            interned_data: (new != InternedData::default()).then_some(new),
            stack_sample: Some(sample),
            ..TracePacket::default()
        }
    }

    /// Adds the row's call stack if it is not in the trace yet, and returns the number of its innermost task, or 0.
    fn callstack(&mut self, row: u32) -> u64 {
        if let Some(task) = self.task_of_row[row as usize] {
            return task;
        }
        let stacks = self.stacks;
        let (path, is_deeper) = stacks.path(row);
        let mut rows: Vec<u32> = path.collect();
        rows.reverse();
        let mut task = 0;
        for row in &rows {
            if let Some(frame) = self.frame_of(*row).filter(|frame| frame.kind == FrameKind::Task) {
                task = self.task(&frame.name, task);
            }
        }
        let mut frame_ids: Vec<u64> = rows
            .iter()
            .map(|row| self.frame(stacks.function[*row as usize], stacks.line[*row as usize]))
            .collect();
        if is_deeper {
            frame_ids.push(self.frame(stacks.deeper(), 0));
        }
        self.new.callstacks.push(Callstack {
            iid: u64::from(row) + 1,
            frame_ids,
        });
        self.task_of_row[row as usize] = Some(task);
        task
    }

    fn frame_of(&self, row: u32) -> Option<&'a Frame> {
        self.view.frame(self.stacks.item[row as usize])
    }

    fn frame(&mut self, function: u32, line: u32) -> u64 {
        let next = self.frames.len() as u64 + 1;
        let iid = *self.frames.entry((function, line)).or_insert(next);
        if iid == next {
            let function = &self.stacks.functions[function as usize];
            let name = intern(&mut self.functions, &function.name, &mut self.new.function_names);
            let module = function.frame.map_or("", |frame| frame.module.as_str());
            // The source of a native function; a function without one has its module there.
            let source = if function.file == module { "" } else { function.file };
            let source = match source {
                "" => 0,
                source => intern(&mut self.sources, source, &mut self.new.source_paths),
            };
            let mapping = function.frame.map_or(0, |frame| self.mapping(frame));
            self.new.frames.push(InternedFrame {
                iid,
                function_name_id: name,
                mapping_id: mapping,
                rel_pc: function.frame.filter(|_| mapping != 0).map(|frame| frame.address),
                source_path_iid: source,
                line_number: line,
                kind: function.frame.map(|frame| kind(frame.kind)),
            });
        }
        iid
    }

    fn mapping(&mut self, frame: &'a Frame) -> u64 {
        let module = frame.module.as_str();
        if module.is_empty() {
            return 0;
        }
        let next = self.mappings.len() as u64 + 1;
        let iid = *self.mappings.entry(module).or_insert(next);
        if iid == next {
            let (path, build_id) = self.files.get(module).copied().unwrap_or((module, ""));
            // One of each per mapping, so that they share its number.
            self.new.mapping_paths.push(InternedString {
                iid,
                str: escape::line(path).into_owned().into_bytes(),
            });
            let build_id = from_hex(build_id);
            let has_build_id = !build_id.is_empty();
            if has_build_id {
                self.new.build_ids.push(InternedString { iid, str: build_id });
            }
            self.new.mappings.push(PerfettoMapping {
                iid,
                build_id: if has_build_id { iid } else { 0 },
                path_string_ids: vec![iid],
            });
        }
        iid
    }

    /// A task that another one, or none (0), awaits.
    fn task(&mut self, name: &'a str, outer: u64) -> u64 {
        let next = self.tasks.len() as u64 + 1;
        let iid = *self.tasks.entry((name, outer)).or_insert(next);
        if iid == next {
            let name = name
                .strip_prefix("[task: ")
                .and_then(|name| name.strip_suffix(']'))
                .unwrap_or(name);
            self.new.stack_sample_async_context_descriptors.push(AsyncContext {
                iid,
                name: escape::line(name).into_owned(),
                kind: "task".into(),
                parent_iid: outer,
            });
        }
        iid
    }

    fn context(&mut self, key: (u32, u32, u64)) -> u64 {
        let next = self.contexts.len() as u64 + 1;
        let iid = *self.contexts.entry(key).or_insert(next);
        if iid == next {
            let (pid, tid, async_id) = key;
            self.new.stack_sample_task_contexts.push(TaskContext {
                iid,
                pid,
                tid,
                async_id,
            });
        }
        iid
    }
}

fn intern(known: &mut HashMap<String, u64>, text: &str, new: &mut Vec<InternedString>) -> u64 {
    if let Some(iid) = known.get(text) {
        return *iid;
    }
    let iid = known.len() as u64 + 1;
    known.insert(text.to_string(), iid);
    new.push(InternedString {
        iid,
        str: escape::line(text).into_owned().into_bytes(),
    });
    iid
}

/// The bytes of a build ID; none if it is not valid.
fn from_hex(text: &str) -> Vec<u8> {
    let digits: Option<Vec<u8>> = text
        .chars()
        .map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect();
    match digits.unwrap_or_default().as_chunks::<2>() {
        (pairs, []) => pairs.iter().map(|[high, low]| high << 4 | low).collect(),
        _ => Vec::new(),
    }
}

fn kind(kind: FrameKind) -> FrameOriginField {
    let known = match kind {
        FrameKind::Python => FrameOrigin::Interpreted,
        FrameKind::Native | FrameKind::Inlined | FrameKind::Unknown => FrameOrigin::Native,
        FrameKind::Kernel => FrameOrigin::Kernel,
        FrameKind::Task => return FrameOriginField::Other("task".into()),
        FrameKind::State => return FrameOriginField::Other("state".into()),
        FrameKind::Worker => return FrameOriginField::Other("worker".into()),
        FrameKind::Truncated => return FrameOriginField::Other("truncated".into()),
        FrameKind::Root | FrameKind::Process | FrameKind::Thread => FrameOrigin::Unknown,
    };
    FrameOriginField::Known(known.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_ids_are_bytes() {
        for (text, expected) in [("", &[][..]), ("0aff", &[0x0a, 0xff]), ("xy", &[]), ("abc", &[])] {
            assert_eq!(from_hex(text), expected, "{text}");
        }
    }
}

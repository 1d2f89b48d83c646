//! Tasks that the program gave no name: what people read shows them grouped by what they run.
//!
//! An event loop names them by a number (`Task-2531`), or by the address of an object. Each has few samples and no meaning of its
//! own, so that one frame represents all that run the same function: `[task: handle ×2531]`.

use std::collections::hash_map::Entry;

use rustc_hash::{FxHashMap, FxHashSet};

use super::fold::{DROPPED, Folding};
use super::model::{Frame, FrameId, FrameKind, NodeId, Profile};

/// Of tasks whose own frames are in no sample.
const UNKNOWN: &str = "Task-N";

/// What the name of a task that the program gave none says of what it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DefaultName<'a> {
    /// Nothing, it is a number: `Task-7` (Lib/asyncio/tasks.py, CPython 3.15), `Greenlet-7` (`Greenlet.name`, gevent 25.9).
    Number,
    /// `handle at 0x7f2d3e565300`: how a greenlet without a name is shown here.
    Function(&'a str),
}

fn default_name(frame: &Frame) -> Option<DefaultName<'_>> {
    let name = frame.name.strip_prefix("[task: ")?.strip_suffix(']')?;
    let numbered = ["Task-", "Greenlet-"]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix));
    if numbered.is_some_and(|number| !number.is_empty() && number.bytes().all(|c| c.is_ascii_digit())) {
        return Some(DefaultName::Number);
    }
    let (function, address) = name.rsplit_once(" at 0x")?;
    let is_address = !address.is_empty() && address.bytes().all(|c| c.is_ascii_hexdigit());
    is_address.then_some(DefaultName::Function(function))
}

/// A task, with the frame of its process: numbers repeat from process to process.
type Task = (Option<FrameId>, FrameId);

/// The tasks of a profile that the program gave no name.
#[derive(Default)]
struct Tasks<'a> {
    /// By node, the process that it is in.
    processes: Vec<Option<FrameId>>,
    /// What each task runs, if that is known.
    functions: FxHashMap<Task, Option<&'a str>>,
}

impl<'a> Tasks<'a> {
    fn new(profile: &'a Profile) -> Tasks<'a> {
        let mut tasks = Tasks::default();
        for (at, node) in profile.nodes.iter().enumerate() {
            let parent = Folding::parent(profile, at);
            let Some(frame) = profile.frames.get(node.frame as usize) else {
                tasks.processes.push(None);
                continue;
            };
            let above = parent.and_then(|parent| tasks.processes[parent]);
            let process = if frame.kind == FrameKind::Process {
                Some(node.frame)
            } else {
                above
            };
            tasks.processes.push(process);
            match frame.kind {
                FrameKind::Task => {
                    if let (Some(name), Entry::Vacant(new)) =
                        (default_name(frame), tasks.functions.entry((process, node.frame)))
                    {
                        new.insert(match name {
                            DefaultName::Function(function) => Some(function),
                            DefaultName::Number => None,
                        });
                    }
                }
                // The outermost function of a task is its coroutine.
                FrameKind::Python => {
                    let task = parent.map(|parent| (process, profile.nodes[parent].frame));
                    if let Some(function @ None) = task.and_then(|task| tasks.functions.get_mut(&task)) {
                        *function = Some(frame.full_name());
                    }
                }
                _ => {}
            }
        }
        tasks
    }

    /// The frame that represents each task, which is added to a new tree; tasks that are alone and run nothing known keep theirs.
    fn groups(&self, out: &mut Folding<'_>) -> FxHashMap<Task, FrameId> {
        let mut members: FxHashMap<&str, FxHashSet<Task>> = FxHashMap::default();
        for (task, function) in &self.functions {
            members.entry(function.unwrap_or(UNKNOWN)).or_default().insert(*task);
        }
        members.retain(|function, tasks| *function != UNKNOWN || tasks.len() > 1);
        // In the order of their names: frames have the same numbers each time.
        let mut members: Vec<(&str, FxHashSet<Task>)> = members.into_iter().collect();
        members.sort_by_key(|(function, _)| *function);
        let mut groups = FxHashMap::default();
        for (function, tasks) in members {
            let frame = out.add_frame(Frame {
                qualname: match tasks.len() {
                    1 => String::new(),
                    count => format!("[task: {function} ×{count}]"),
                },
                ..Frame::new(FrameKind::Task, format!("[task: {function}]"))
            });
            groups.extend(tasks.into_iter().map(|task| (task, frame)));
        }
        groups
    }
}

/// The profile with one frame for all tasks that the program gave no name and that run the same function: its name is that of a
/// task with the function's name, its qualified name has the number of tasks. `None` if there are no such tasks.
pub fn fold(profile: &Profile) -> Option<Profile> {
    let tasks = Tasks::new(profile);
    if tasks.functions.is_empty() {
        return None;
    }
    let mut out = Folding::new(profile);
    let groups = tasks.groups(&mut out);
    for (at, node) in profile.nodes.iter().enumerate() {
        let into = match Folding::parent(profile, at).map(|parent| out.target(parent as NodeId)) {
            _ if at == 0 => Folding::ROOT,
            None | Some(DROPPED) => DROPPED,
            Some(parent) => {
                let group = groups.get(&(tasks.processes[at], node.frame));
                out.child(parent, group.copied().unwrap_or(node.frame))
            }
        };
        out.keep(into);
    }
    Some(out.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::diff::RowMap;
    use crate::model::Meta;
    use crate::stats::Stats;
    use crate::values::ValueType;
    use crate::view::frame_text;

    /// Stacks of the folded profile, outermost frame first, with their samples.
    fn folded(stacks: &[&[&str]]) -> Option<Vec<String>> {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        for stack in stacks {
            let frame = |name: &&str| match name.as_bytes()[0] {
                b'[' if name.starts_with("[task") => Frame::new(FrameKind::Task, *name),
                b'[' => Frame::new(FrameKind::State, *name),
                b'@' => Frame::new(FrameKind::Process, *name),
                _ => Frame::python(*name, format!("App.{name}"), "app.py", 1),
            };
            let frames: Vec<(FrameId, u32)> = stack.iter().map(|name| (builder.frame(frame(name)), 0)).collect();
            builder.sample(0, (1, 1), &frames, &[1]);
        }
        let folded = fold(&builder.finish(Meta::default()))?;
        let rows = folded
            .self_counts()
            .into_iter()
            .enumerate()
            .filter(|(_, count)| *count > 0);
        let mut texts: Vec<String> = rows
            .map(|(at, count)| {
                let (mut names, mut at) = (Vec::new(), at);
                while at > 0 {
                    let node = &folded.nodes[at];
                    names.push(frame_text(&folded.frames[node.frame as usize]).replace(" (app.py:1)", ""));
                    at = node.parent as usize;
                }
                names.reverse();
                format!("{} {count}", names.join(";"))
            })
            .collect();
        texts.sort();
        Some(texts)
    }

    #[test]
    fn tasks_without_names_are_grouped_by_what_they_run() {
        let rows = folded(&[
            &["main", "[task: Task-1]", "serve", "read"],
            &["main", "[task: Task-2]", "handle", "read"],
            &["main", "[task: Task-3]", "handle", "[awaiting sleep]"],
            &["main", "[task: Task-2]", "handle"],
            &["main", "[task: job]", "handle"],
            // One that awaits another, and is never seen to run anything itself.
            &["main", "[task: Task-1]", "[task: Task-3]", "handle"],
            &["main", "[task: Task-8]", "[task: Task-3]", "handle"],
            &["main", "[task: Task-9]", "[task: Task-3]", "handle"],
            &["[task: run at 0x7f00]", "inner"],
            &["[task: run at 0x7f08]", "inner"],
            &["[task: Task-x]", "inner"],
        ]);
        let expected = [
            "App.main;[task: App.handle ×2];App.handle 1",
            "App.main;[task: App.handle ×2];App.handle;App.read 1",
            "App.main;[task: App.handle ×2];App.handle;[awaiting sleep] 1",
            "App.main;[task: App.serve];App.serve;App.read 1",
            "App.main;[task: App.serve];[task: App.handle ×2];App.handle 1",
            "App.main;[task: Task-N ×2];[task: App.handle ×2];App.handle 2",
            "App.main;[task: job];App.handle 1",
            "[task: Task-x];App.inner 1",
            "[task: run ×2];App.inner 2",
        ];
        assert_eq!(rows.as_deref(), Some(&expected.map(String::from)[..]));
    }

    #[test]
    fn each_process_numbers_its_tasks() {
        let rows = folded(&[
            &["@1", "[task: Task-2]", "handle"],
            &["@2", "[task: Task-2]", "handle"],
            &["@2", "[task: Task-3]", "other"],
        ]);
        let expected = [
            "@1;[task: App.handle ×2];App.handle 1",
            "@2;[task: App.handle ×2];App.handle 1",
            "@2;[task: App.other];App.other 1",
        ];
        assert_eq!(rows.as_deref(), Some(&expected.map(String::from)[..]));
    }

    /// In a comparison a group is the same function, however many tasks it has.
    #[test]
    fn groups_are_found_again() {
        let profile = |tasks: u32| {
            let mut builder = Builder::new(&[ValueType::SAMPLES]);
            let handle = builder.frame(Frame::python("handle", "handle", "app.py", 1));
            for number in 0..tasks {
                let task = builder.frame(Frame::new(FrameKind::Task, format!("[task: Task-{number}]")));
                builder.sample(0, (1, 1), &[(task, 0), (handle, 2)], &[1]);
            }
            fold(&builder.finish(Meta::default())).expect("tasks without names")
        };
        let profiles = [profile(2), profile(3)];
        let stats = profiles.each_ref().map(Stats::new);
        let rows = RowMap::of_functions(&stats[0], &stats[1]);
        let groups = rows.frames.iter().filter(|frame| frame.name == "[task: handle]");
        assert_eq!(groups.count(), 1);
    }

    #[test]
    fn other_profiles_stay_as_they_are() {
        assert_eq!(folded(&[&["main", "[task: job]", "handle"], &["main"]]), None);
        assert_eq!(
            folded(&[&["[task: Task-7]", "[awaiting sleep]"]]).expect("a task"),
            ["[task: Task-7];[awaiting sleep] 1"]
        );
    }
}

//! Tasks as text: a tree in which each task is below the coroutine that awaits it.

use std::fmt::Write as _;

use super::tasks::{ShownTask, TaskKind, TaskReport, TaskState};
use crate::cli::output::style::{Color, TerminalStyle};
use crate::escape::line;

/// Maximum depth of the tree, lines.
const MAX_DEPTH: usize = 800;
/// Maximum length of the text, bytes: a task that several others await is shown below each of them.
const MAX_TEXT: usize = 64 << 20;

/// What is printed below a line.
enum TreeEntry<'a> {
    /// Frame `n` of a task, and what follows it.
    Frame(usize, usize),
    Task(usize),
    Note(&'a str),
}

struct Tree<'a> {
    report: &'a TaskReport,
    style: TerminalStyle,
    /// The tasks that each task awaits.
    children: Vec<Vec<usize>>,
    shown: Vec<bool>,
    /// Tasks from the root to here.
    path: Vec<usize>,
    depth: usize,
    out: String,
}

/// The report as text.
pub fn text(report: &TaskReport, style: TerminalStyle) -> String {
    let mut children = vec![Vec::new(); report.tasks.len()];
    for (i, task) in report.tasks.iter().enumerate() {
        for by in &task.awaited_by {
            children[*by].push(i);
        }
    }
    // In the order of their creation, as far as names say.
    let by_name = |tasks: &mut Vec<usize>| tasks.sort_by_key(|i| natural(&report.tasks[*i].name));
    children.iter_mut().for_each(by_name);
    let running = report.tasks.iter().filter(|t| matches!(t.state, TaskState::Running(_)));
    let running = running.count();
    let counted = [
        (TaskKind::Asyncio, "asyncio task"),
        (TaskKind::Trio, "trio task"),
        (TaskKind::Greenlet, "greenlet"),
    ];
    let plural = |n: usize, of: &str| format!("{n} {of}{}", if n == 1 { "" } else { "s" });
    let counts = counted.map(|(kind, name)| (report.tasks.iter().filter(|t| t.kind == kind).count(), name));
    let mut counts: Vec<String> = counts
        .into_iter()
        .filter(|(n, _)| *n > 0)
        .map(|(n, of)| plural(n, of))
        .collect();
    if counts.is_empty() {
        counts.push(plural(0, "asyncio task"));
    }
    let counts = counts.join(", ");
    let mut tree = Tree {
        report,
        style,
        children,
        shown: vec![false; report.tasks.len()],
        path: Vec::new(),
        depth: 0,
        out: String::new(),
    };
    let _ = writeln!(tree.out, "Process {}: {}", report.pid, line(&report.command));
    let _ = writeln!(tree.out, "{}; {counts}, {running} running\n", line(&report.python));
    let mut roots: Vec<usize> = (0..report.tasks.len())
        .filter(|i| report.tasks[*i].awaited_by.is_empty())
        .collect();
    by_name(&mut roots);
    for root in roots {
        tree.top(root);
    }
    // Tasks that await each other in a circle have no root.
    for task in 0..report.tasks.len() {
        if !tree.shown[task] {
            tree.top(task);
        }
    }
    if tree.out.len() >= MAX_TEXT {
        let _ = writeln!(
            tree.out,
            "\nThe tree is too large to be shown in full; --json has all tasks."
        );
    }
    for gap in &report.gaps {
        let _ = writeln!(tree.out, "\nTasks may be missing: {gap}.");
    }
    tree.out
}

/// A name in parts, so that `Task-10` comes after `Task-9`.
fn natural(name: &str) -> (String, u64, String) {
    let start = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = name[start.len()..].parse().unwrap_or(0);
    (start.to_string(), number, name.to_string())
}

impl Tree<'_> {
    fn top(&mut self, task: usize) {
        self.entry(&TreeEntry::Task(task), "", "");
    }

    /// Prints an entry and what is below it. `first`: what its line begins with; `rest`: what the lines below begin with.
    fn entry(&mut self, entry: &TreeEntry<'_>, first: &str, rest: &str) {
        if self.out.len() >= MAX_TEXT {
            return;
        }
        let below = match entry {
            TreeEntry::Note(note) => {
                let _ = writeln!(self.out, "{first}{}", self.style.paint(Color::Dim, note));
                return;
            }
            TreeEntry::Task(task) => {
                let _ = writeln!(self.out, "{first}{}", self.task(*task));
                if self.path.contains(task) {
                    return self.below(vec![TreeEntry::Note("(awaits itself, see above)")], rest);
                }
                self.shown[*task] = true;
                self.path.push(*task);
                self.below(self.after(*task, 0), rest);
                self.path.pop();
                return;
            }
            TreeEntry::Frame(task, n) => {
                let frame = &self.report.tasks[*task].frames[*n];
                let place = match (&*frame.file, frame.line) {
                    ("", _) => String::new(),
                    (file, at) => format!(" ({}:{at})", line(file)),
                };
                let name = line(&frame.name);
                let _ = writeln!(self.out, "{first}{}{place}", self.style.paint(Color::Cyan, &name));
                self.after(*task, n + 1)
            }
        };
        self.below(below, rest);
    }

    /// What is below a task, or below the frame before `next`.
    fn after<'b>(&self, task: usize, next: usize) -> Vec<TreeEntry<'b>> {
        if next < self.report.tasks[task].frames.len() {
            return vec![TreeEntry::Frame(task, next)];
        }
        self.children[task]
            .iter()
            .map(|child| TreeEntry::Task(*child))
            .collect()
    }

    fn below(&mut self, mut entries: Vec<TreeEntry<'_>>, indent: &str) {
        if self.depth >= MAX_DEPTH && !entries.is_empty() {
            entries = vec![TreeEntry::Note("(not shown: too many levels)")];
        }
        self.depth += 1;
        let last = entries.len().saturating_sub(1);
        for (i, entry) in entries.iter().enumerate() {
            let (own, below) = if i == last {
                ("└── ", "    ")
            } else {
                ("├── ", "│   ")
            };
            self.entry(entry, &format!("{indent}{own}"), &format!("{indent}{below}"));
        }
        self.depth -= 1;
    }

    fn task(&self, task: usize) -> String {
        let ShownTask { name, state, .. } = &self.report.tasks[task];
        let name = format!("[task: {}]", line(name));
        let state = match state {
            TaskState::Suspended => return name,
            TaskState::New => " not started".to_string(),
            TaskState::Running(None) => " running".to_string(),
            TaskState::Running(Some(tid)) => format!(" running in thread {tid}"),
        };
        name + &self.style.paint(Color::Green, &state)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tasks::ShownFrame;
    use super::*;

    fn task(name: &str, frames: &[(&str, u32)], awaited_by: &[usize], state: TaskState) -> ShownTask {
        let frame = |(name, line): &(&str, u32)| ShownFrame {
            name: (*name).into(),
            file: "/a.py".into(),
            line: *line,
        };
        ShownTask {
            address: 0,
            kind: TaskKind::Asyncio,
            name: name.into(),
            event_loop: Some(0),
            frames: frames.iter().map(frame).collect(),
            awaited: None,
            state,
            awaited_by: awaited_by.into(),
        }
    }

    fn check(tasks: Vec<ShownTask>, expected: &str) {
        let report = TaskReport {
            pid: 7,
            command: "python3 a.py".into(),
            python: "CPython 3.14.0 (python3.14)".into(),
            tasks,
            gaps: Vec::new(),
        };
        let text = text(&report, TerminalStyle::default());
        let tree = text.split_once("\n\n").map(|(_, tree)| tree);
        assert_eq!(tree, Some(expected), "{text}");
    }

    #[test]
    fn tasks_are_below_what_awaits_them() {
        let s = TaskState::Suspended;
        check(
            vec![
                task("Task-10", &[("late", 9)], &[], s),
                task("Task-9", &[("main", 3), ("gather", 4)], &[], s),
                task("b\x1b[2J", &[("leaf", 5)], &[1], TaskState::Running(Some(12))),
                task("a", &[("mid", 1), ("leaf", 5)], &[1], s),
            ],
            "\
[task: Task-9]
└── main (/a.py:3)
    └── gather (/a.py:4)
        ├── [task: a]
        │   └── mid (/a.py:1)
        │       └── leaf (/a.py:5)
        └── [task: b\\x1b[2J] running in thread 12
            └── leaf (/a.py:5)
[task: Task-10]
└── late (/a.py:9)
",
        );
    }

    #[test]
    fn tasks_that_await_each_other_end() {
        let s = TaskState::Suspended;
        check(
            vec![task("a", &[("f", 1)], &[1], s), task("b", &[("g", 2)], &[0], s)],
            "\
[task: a]
└── f (/a.py:1)
    └── [task: b]
        └── g (/a.py:2)
            └── [task: a]
                └── (awaits itself, see above)
",
        );
    }

    #[test]
    fn long_chains_of_tasks_are_bounded() {
        let chain = |i: usize| task("t", &[], &Vec::from_iter(i.checked_sub(1)), TaskState::Suspended);
        let report = TaskReport {
            pid: 7,
            command: String::new(),
            python: String::new(),
            tasks: (0..2 * MAX_DEPTH).map(chain).collect(),
            gaps: vec!["memory could not be read"],
        };
        let text = text(&report, TerminalStyle::default());
        assert!(text.contains("(not shown: too many levels)"), "{text}");
        assert!(
            text.ends_with("Tasks may be missing: memory could not be read.\n"),
            "{text}"
        );
    }
}

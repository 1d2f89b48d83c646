//! Callbacks and task steps that blocked an event loop for long.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Pid, Tid};
use crate::waits::is_of_library;

/// A callback or a step of a task that blocked an event loop for long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    /// The process of the event loop.
    pub pid: Pid,
    /// The thread of the event loop.
    pub tid: Tid,
    /// When it began: CLOCK_MONOTONIC of the machine that ran it, ns.
    pub start: u64,
    /// The same, ns since the start of the profile.
    pub time: u64,
    /// How long it took, ns.
    pub length: u64,
    /// Name of the task; empty for a callback without one.
    pub task: String,
    /// The stack in which it spent most of this time, outermost first, `name (file:line)`; empty if none is known.
    pub stack: Vec<String>,
    /// The innermost Python function in it.
    pub function: String,
}

/// Name and file of a Python function, `name (file:line)`; `None` of other functions, which have no line.
fn name_and_file(frame: &str) -> Option<(&str, &str)> {
    let (place, line) = frame.strip_suffix(')')?.rsplit_once(':')?;
    let is_line = !line.is_empty() && line.bytes().all(|c| c.is_ascii_digit());
    is_line.then(|| place.split_once(" (")).flatten()
}

/// Whether the program has the function, and not the standard library or a package.
fn is_of_program(frame: &str) -> bool {
    name_and_file(frame).is_some_and(|(_, file)| !is_of_library(file))
}

impl Lag {
    /// Index in the stack of the program's function that it was in, the innermost one; else of `function`, if that is there.
    pub fn program_function(&self) -> Option<usize> {
        let program = self.stack.iter().rposition(|frame| is_of_program(frame));
        program.or_else(|| self.stack.iter().rposition(|frame| *frame == self.function))
    }

    /// That function, `name (file:line)`; the innermost Python function where the stack does not say.
    pub fn place(&self) -> &str {
        let at = self.program_function().and_then(|at| self.stack.get(at));
        at.unwrap_or(&self.function)
    }

    /// Whether both were in the same function of the program, at whichever line.
    pub fn has_same_function(&self, other: &Lag) -> bool {
        site_key(self.place()) == site_key(other.place())
    }

    /// The callers of the program's function, outermost first, from the task on, or without one from the program's outermost
    /// function on: the start of the interpreter is not among them.
    pub fn callers(&self) -> &[String] {
        let outer = self
            .program_function()
            .and_then(|at| self.stack.get(..at))
            .unwrap_or_default();
        let task = outer.iter().position(|frame| frame.starts_with("[task"));
        let first = task.or_else(|| outer.iter().position(|frame| is_of_program(frame)));
        first.and_then(|first| outer.get(first..)).unwrap_or_default()
    }
}

/// A function without the line.
fn site_key(place: &str) -> (&str, &str) {
    name_and_file(place).unwrap_or((place, ""))
}

/// What blocked event loops in one function of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LagSite {
    /// How often.
    pub count: u64,
    /// For how long in all, ns.
    pub total: u64,
    /// The names of the tasks; of callbacks without one there is none.
    pub tasks: BTreeSet<String>,
    /// The longest, whose function and line represent all.
    pub longest: Lag,
}

impl LagSite {
    /// As filters see it.
    pub fn text(&self) -> String {
        let tasks: Vec<&str> = self.tasks.iter().map(String::as_str).collect();
        format!("{} {}", tasks.join(" "), self.place())
    }

    /// The function of the program, as [`Lag::place`] has it; `[no function]` where none is known.
    pub fn place(&self) -> &str {
        match self.longest.place() {
            "" => "[no function]",
            place => place,
        }
    }

    /// The name of the task, or how many there are: `2531 tasks`; empty if there is none.
    pub fn tasks_text(&self) -> String {
        let mut names = self.tasks.iter();
        match (self.tasks.len(), names.next()) {
            (1, Some(name)) => name.clone(),
            (0, _) | (_, None) => String::new(),
            (count, _) => format!("{count} tasks"),
        }
    }
}

/// The same by function, the longest one first.
pub fn sites(lags: &[Lag]) -> Vec<LagSite> {
    let mut sites: BTreeMap<(&str, &str), (LagSite, &Lag)> = BTreeMap::new();
    for lag in lags {
        let (site, longest) = sites.entry(site_key(lag.place())).or_insert((LagSite::default(), lag));
        site.count += 1;
        site.total = site.total.saturating_add(lag.length);
        if !lag.task.is_empty() {
            site.tasks.insert(lag.task.clone());
        }
        if lag.length > longest.length {
            *longest = lag;
        }
    }
    let with_longest = |(site, longest): (LagSite, &Lag)| LagSite {
        longest: longest.clone(),
        ..site
    };
    let mut sites: Vec<LagSite> = sites.into_values().map(with_longest).collect();
    sites.sort_by_key(|site| std::cmp::Reverse(site.longest.length));
    sites
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lag(length: u64, task: &str, stack: &[&str]) -> Lag {
        Lag {
            length,
            task: task.into(),
            stack: stack.iter().map(|frame| frame.to_string()).collect(),
            function: stack.last().map_or(String::new(), |frame| frame.to_string()),
            ..Lag::default()
        }
    }

    const START: &str = "_start (python3.12)";
    const MODULE: &str = "<module> (/srv/app.py:99)";
    const LOOP: &str = "BaseEventLoop._run_once (/usr/lib/python3.12/asyncio/base_events.py:1987)";
    const ENCODE: &str = "JSONEncoder.encode (/usr/lib/python3.12/json/encoder.py:200)";

    #[test]
    fn lags_are_grouped_by_the_functions_of_the_program() {
        let lags = [
            lag(
                5,
                "Task-1",
                &[START, MODULE, LOOP, "[task: Task-1]", "view (/srv/app.py:7)", ENCODE],
            ),
            lag(
                9,
                "Task-2",
                &[START, MODULE, LOOP, "[task: Task-2]", "view (/srv/app.py:8)", ENCODE],
            ),
            lag(2, "", &[START, MODULE, LOOP, "view (/srv/other.py:8)"]),
            lag(1, "job", &[START, LOOP]),
            lag(1, "", &[]),
        ];
        let sites = sites(&lags);
        let rows: Vec<_> = sites
            .iter()
            .map(|site| {
                (
                    site.place(),
                    site.count,
                    site.total,
                    site.longest.length,
                    site.tasks_text(),
                )
            })
            .collect();
        let expected = [
            ("view (/srv/app.py:8)", 2, 14, 9, "2 tasks".to_string()),
            ("view (/srv/other.py:8)", 1, 2, 2, String::new()),
            ("[no function]", 1, 1, 1, String::new()),
            (LOOP, 1, 1, 1, "job".to_string()),
        ];
        assert_eq!(rows, expected);
        assert_eq!(sites[0].longest.callers(), ["[task: Task-2]"]);
        assert_eq!(sites[1].longest.callers(), [MODULE, LOOP]);
        assert_eq!(sites[3].longest.callers(), [""; 0]);
        assert!(lags[0].has_same_function(&lags[1]) && !lags[0].has_same_function(&lags[2]));
    }

    #[test]
    fn only_python_functions_have_lines() {
        assert_eq!(name_and_file("f (/a b (1)/x.py:3)"), Some(("f", "/a b (1)/x.py")));
        for other in [
            "list_sort (libpython3.12.so.1.0)",
            "[task: Task-1]",
            "",
            ")",
            "f (x:)",
            "x:3)",
        ] {
            assert_eq!(name_and_file(other), None, "{other}");
        }
    }
}

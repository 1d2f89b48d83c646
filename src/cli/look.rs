//! A look at a process and its children before anything is sampled: do they run Python?

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::interp::{self, Runtime};
use crate::process::host::Live;
use crate::process::modules::{Module, Modules};
use crate::process::rights::facts;
use crate::process::{self, Process};
use crate::sample::{ModuleId, Pid};

/// Descendants that are looked at.
const MAX_FAMILY: usize = 1000;
/// Python processes that are offered.
const MAX_OFFERED: usize = 3;

/// Looks at processes; what several of them map is read once.
#[derive(Default)]
pub struct Look {
    modules: Modules,
    runtimes: FxHashMap<ModuleId, Option<Arc<Runtime>>>,
}

/// Files with code in a process, in the order of their addresses: the program first, as a rule.
pub struct Seen {
    pub files: Vec<Arc<Module>>,
    pub python: Option<(Arc<Module>, Arc<Runtime>)>,
}

impl Look {
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn at(&mut self, pid: Pid) -> Result<Seen> {
        let process = Process::open(&Live, pid, &mut self.modules, &mut |_| {})?;
        let mut ids: Vec<ModuleId> = Vec::new();
        for (id, _) in process.code().iter().filter_map(|c| c.file) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        let mut python = None;
        for id in &ids {
            let module = self.modules.get(*id);
            let runtime = self
                .runtimes
                .entry(*id)
                .or_insert_with(|| interp::find_runtime(module).map(Arc::new));
            python = python.or(runtime.clone().map(|r| (module.clone(), r)));
        }
        let files = ids.iter().map(|id| self.modules.get(*id).clone()).collect();
        Ok(Seen { files, python })
    }
}

/// Children of a process, their children and so on, parents first.
pub fn descendants(pid: Pid) -> Vec<Pid> {
    let mut children: BTreeMap<Pid, Vec<Pid>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Some(child) = entry.file_name().to_str().and_then(|n| n.parse().ok())
            && let Some(parent) = process::parent(child)
        {
            children.entry(parent).or_default().push(child);
        }
    }
    let (mut all, mut next, mut seen) = (Vec::new(), 0, BTreeSet::from([pid]));
    let mut at = Some(pid);
    while let Some(parent) = at.filter(|_| all.len() < MAX_FAMILY) {
        let new = children.remove(&parent).unwrap_or_default();
        all.extend(new.into_iter().filter(|child| seen.insert(*child)));
        at = all.get(next).copied();
        next += 1;
    }
    all
}

/// For a process without Python: which of its descendants have it, in a line; `None` if none has.
pub fn offer(pid: Pid) -> Option<String> {
    let mut look = Look::default();
    let has = |child: &Pid| look.at(*child).is_ok_and(|seen| seen.python.is_some());
    let found: Vec<Pid> = descendants(pid).into_iter().filter(has).take(MAX_OFFERED).collect();
    let (first, more) = found.split_first()?;
    let name = process::thread_name(pid, pid).unwrap_or_default();
    let more = match more.len() {
        0 => String::new(),
        n if n + 1 < MAX_OFFERED => format!(" (and {n} more)"),
        _ => " (and more)".into(),
    };
    Some(format!(
        "process {pid} is {name}, without Python; its child {first} ({}){more} has it: nativeprof attach {first}, or \
         --subprocesses",
        process::command_line(*first)
    ))
}

/// A process by its number here and, where that differs, by the one that it knows itself by.
pub fn numbers(pid: Pid) -> String {
    match facts::own_number(pid).filter(|own| *own != pid) {
        Some(own) => format!("{pid} (pid {own} in its own namespace)"),
        None => pid.to_string(),
    }
}

//! Checks of the target before sampling: that it can be sampled, and which of its processes run Python.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::cli::args::ProcessRef;
use crate::cli::print_status;
use crate::cpython;
use crate::cpython::Runtime;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::frame::ModuleId;
use crate::privileges::facts;
use crate::process::AddressSpace;
use crate::process::modules::{Module, Modules};
use crate::process::system::LiveSystem;
use crate::sys::procfs;

/// Descendants that are inspected.
const MAX_FAMILY: usize = 1000;
/// Processes of one name that are listed.
const MAX_LISTED: usize = 8;
/// Python processes that are suggested.
const MAX_SUGGESTED: usize = 3;

/// Reads which files and interpreters processes run; files mapped by several processes are read once.
#[derive(Default)]
pub struct ProcessInspector {
    modules: Modules,
    runtimes: FxHashMap<ModuleId, Option<Arc<Runtime>>>,
}

/// Files with code in a process, in order of their addresses: usually the program first.
pub struct ProcessSummary {
    pub files: Vec<Arc<Module>>,
    pub python: Option<(Arc<Module>, Arc<Runtime>)>,
}

impl ProcessInspector {
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn inspect(&mut self, pid: Pid) -> Result<ProcessSummary> {
        let process = AddressSpace::open(&LiveSystem, pid, &mut self.modules, &mut |_| {})?;
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
                .or_insert_with(|| cpython::find_runtime(module).map(Arc::new));
            python = python.or(runtime.clone().map(|r| (module.clone(), r)));
        }
        let files = ids.iter().map(|id| self.modules.get(*id).clone()).collect();
        Ok(ProcessSummary { files, python })
    }
}

/// Children of a process, their children and so on, parents first.
pub fn descendants(pid: Pid) -> Vec<Pid> {
    let mut children: BTreeMap<Pid, Vec<Pid>> = BTreeMap::new();
    for child in procfs::processes() {
        if let Some(parent) = procfs::parent(child) {
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

/// For a process without Python: a line that names its descendants with Python; `None` if there are none.
pub fn suggest_python_child(pid: Pid) -> Option<String> {
    let mut inspector = ProcessInspector::default();
    let has = |child: &Pid| inspector.inspect(*child).is_ok_and(|process| process.python.is_some());
    let found: Vec<Pid> = descendants(pid).into_iter().filter(has).take(MAX_SUGGESTED).collect();
    let (first, more) = found.split_first()?;
    let name = procfs::thread_name(pid, pid).unwrap_or_default();
    let more = match more.len() {
        0 => String::new(),
        n if n + 1 < MAX_SUGGESTED => format!(" (and {n} more)"),
        _ => " (and more)".into(),
    };
    Some(format!(
        "process {pid} ({name}) does not run Python, but its child {first} ({}){more} does: nativeprof attach {first}, or add --subprocesses",
        procfs::command_line(*first)
    ))
}

/// CPU time that the descendants of a process use from a moment on.
pub struct FamilyCpu {
    pid: Pid,
    before: Duration,
}

impl FamilyCpu {
    pub fn start(pid: Pid) -> FamilyCpu {
        FamilyCpu {
            pid,
            before: descendants_cpu(pid),
        }
    }

    /// CPU time since then, as far as it can be known: descendants that the process has not waited for are gone when it
    /// exits.
    pub fn used(&self) -> Duration {
        descendants_cpu(self.pid).saturating_sub(self.before)
    }
}

fn descendants_cpu(pid: Pid) -> Duration {
    let waited = |pid| procfs::cpu_times(pid).map(|(_, waited)| waited);
    let both = |pid| procfs::cpu_times(pid).map(|(own, waited)| own + waited);
    waited(pid)
        .into_iter()
        .chain(descendants(pid).into_iter().filter_map(both))
        .sum()
}

/// The process that is meant. A name is that of the program (the file name of its first argument, or the name of the
/// main thread) or of the script or module that an interpreter runs.
///
/// # Errors
/// `NoSuchProcess` if there is none of this name; `Usage` if there are several.
pub fn find(process: &ProcessRef) -> Result<Pid> {
    let name = match process {
        ProcessRef::Pid(pid) => return Ok(*pid),
        ProcessRef::Name(name) => name,
    };
    let own = std::process::id();
    let is_meant = |pid: &Pid| {
        *pid != own
            && (procfs::thread_name(*pid, *pid).as_ref() == Some(name) || names_program(&procfs::arguments(*pid), name))
    };
    let found: Vec<Pid> = procfs::processes().into_iter().filter(is_meant).collect();
    match found[..] {
        [pid] => {
            print_status(&format!("{name} is process {pid}: {}", procfs::command_line(pid)));
            Ok(pid)
        }
        [] => Err(
            Error::new(ErrorKind::NoSuchProcess, format!("no process is named {name}"))
                .why("no program, script or module of a running process has this name, and it is not a PID")
                .hint("list Python processes with `pgrep -af python`"),
        ),
        [first, ..] => {
            let listed = found.iter().take(MAX_LISTED);
            let mut list: Vec<String> = listed
                .map(|pid| format!("{pid} ({})", procfs::command_line(*pid)))
                .collect();
            list.extend((found.len() > MAX_LISTED).then(|| "...".into()));
            Err(
                Error::new(ErrorKind::Usage, format!("{} processes are named {name}", found.len()))
                    .why(list.join(", "))
                    .hint(format!("give the PID of one, such as {first}")),
            )
        }
    }
}

/// Whether a command line runs a program, script or module of this name.
fn names_program(arguments: &[String], name: &str) -> bool {
    let file = |path: &str| path.rsplit('/').next() == Some(name);
    let Some((program, rest)) = arguments.split_first() else {
        return false;
    };
    let script = match rest.iter().position(|word| word == "-m" || !word.starts_with('-')) {
        Some(at) if rest[at] == "-m" => rest.get(at + 1),
        Some(at) => rest.get(at),
        None => None,
    };
    file(program) || script.is_some_and(|script| file(script))
}

/// The PID and, where it differs, the PID in the process's own namespace.
pub fn pid_label(pid: Pid) -> String {
    match facts::namespace_pid(pid).filter(|inner| *inner != pid) {
        Some(own) => format!("{pid} (PID {own} in its namespace)"),
        None => pid.to_string(),
    }
}

/// Refuses targets that cannot be sampled, before anything is set up.
///
/// # Errors
/// `NoSuchProcess`, `Unsupported`.
pub fn check_target(pid: Pid) -> Result<()> {
    if procfs::threads(pid).is_empty() {
        return Err(Error::no_process(pid));
    }
    let state = procfs::stat_state(pid);
    if state == Some('Z') {
        return Err(
            Error::new(ErrorKind::NoSuchProcess, format!("process {pid} has exited"))
                .why("it is a zombie: only its exit status is left")
                .hint("choose a running process"),
        );
    }
    if procfs::is_kernel_thread(pid) {
        return Err(Error::new(ErrorKind::Unsupported, format!("{pid} is a kernel thread"))
            .why("it has no user memory and no user stack")
            .hint("choose a user process; --kernel adds the kernel's frames to its stacks"));
    }
    if procfs::elf_class(pid) == Some(1) {
        return Err(
            Error::new(ErrorKind::Unsupported, format!("process {pid} is a 32-bit program"))
                .why("only 64-bit programs are supported")
                .hint("choose a 64-bit process"),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_scripts_and_modules_have_names() {
        for (line, name, expected) in [
            ("/usr/bin/python3 -u /srv/app.py --port 1", "app.py", true),
            ("/usr/bin/python3 -u /srv/app.py --port 1", "python3", true),
            ("python3 -m gunicorn app:main", "gunicorn", true),
            ("python3 -m gunicorn app:main", "app:main", false),
            ("vim app.py", "app.py", true),
            ("grep -r python3", "python", false),
            ("python3", "python3", true),
            ("python3 -u", "-u", false),
            ("", "", false),
        ] {
            let words: Vec<String> = line.split_whitespace().map(String::from).collect();
            assert_eq!(names_program(&words, name), expected, "{line}: {name}");
        }
    }
}

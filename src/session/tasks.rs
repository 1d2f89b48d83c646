//! The asyncio tasks of a session's processes.

use super::Session;
use crate::cpython::tasks::{DEBUG_SECTION, NoTasks, TaskReader};
use crate::event::Pid;
use crate::target::system::ProcessMemory;

impl Session {
    /// Reads the tasks of a process that runs Python.
    ///
    /// # Errors
    /// Why they cannot be read; `UnknownVersion` also for a process without Python.
    pub fn task_reader(&self, pid: Pid) -> Result<TaskReader, NoTasks> {
        let target = self.targets.get(&pid).ok_or(NoTasks::UnknownVersion)?;
        let python = target.python.as_ref().ok_or(NoTasks::UnknownVersion)?;
        let interpreter = python.interpreter.ok_or(NoTasks::UnknownVersion)?;
        let files = target.process.code().iter().filter_map(|c| c.file);
        // The module is a file of its own, or built into the interpreter.
        let may_hold = |name: &str| name.starts_with("_asyncio") || name.contains("python");
        let published = files.map(|(id, _)| self.modules.get(id)).find_map(|module| {
            may_hold(&module.name()).then_some(())?;
            module.section(DEBUG_SECTION)
        });
        let memory = ProcessMemory(&*self.system, pid);
        TaskReader::new(
            &memory,
            &python.runtime,
            &interpreter,
            published.as_ref().map(|s| &*s.bytes),
        )
    }
}

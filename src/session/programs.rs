//! Where programs have their interpreters: of a whole host, processes that are not known yet are sampled by this.

use rustc_hash::FxHashMap;

use super::files::Files;
use super::process::Process;
use crate::code_map::CodeMap;
use crate::cpython_layout::{Interpreter, InterpreterPlace};
use crate::event::{CodeCopy, NewProcess, Pid, ProgramId};

/// As many programs as backends know.
const MAX_PROGRAMS: usize = 1024;

/// Code objects of processes that are not known which are kept.
const MAX_COPIES: usize = 4096;

/// Programs that run Python, and what is known of processes before they are opened.
#[derive(Default)]
pub(super) struct Programs {
    /// The interpreters of programs whose places the backend knows; `_PyRuntime` is that of the process in which each was found
    /// last.
    known: FxHashMap<ProgramId, Interpreter>,
    /// Code objects that were copied with samples which follow.
    copies: Vec<(Pid, Box<CodeCopy>)>,
}

impl Programs {
    /// Keeps a code object for the sample that follows.
    pub(super) fn keep_copy(&mut self, pid: Pid, copy: Box<CodeCopy>) {
        if self.copies.len() >= MAX_COPIES {
            // Their samples have been lost. What is missing here is read from the processes.
            self.copies.clear();
        }
        self.copies.push((pid, copy));
    }

    /// The code objects that came before a sample of a process.
    pub(super) fn take_copies(&mut self, pid: Pid) -> Vec<CodeCopy> {
        let own = self.copies.extract_if(.., |(of, _)| *of == pid);
        own.map(|(_, copy)| *copy).collect()
    }

    /// Whether a process has the interpreter that it was taken to have when it was sampled.
    pub(super) fn is_right(&self, new: &NewProcess, process: &Process) -> bool {
        match (process.interpreter(), self.known.get(&new.program)) {
            (Some(now), Some(known)) => is_same(now, known) && now.runtime == new.runtime,
            _ => false,
        }
    }

    /// Drops the code objects whose samples were lost.
    pub(super) fn clear_copies(&mut self) {
        self.copies.clear();
    }

    /// The backend does not know where this program has its interpreter.
    pub(super) fn forget(&mut self, program: ProgramId) {
        self.known.remove(&program);
    }

    /// Where the program of a process has its interpreter, if that is not known, or is another one now. Again if the backend
    /// has not found it: it keeps those that were used last.
    pub(super) fn find_new(
        &mut self,
        new: &NewProcess,
        process: &Process,
        files: &Files,
    ) -> Option<(ProgramId, InterpreterPlace)> {
        let (now, program) = (process.interpreter()?, new.program);
        let is_known = new.runtime != 0 && self.known.get(&program).is_some_and(|known| is_same(now, known));
        if program == ProgramId::default() || is_known {
            return None;
        }
        let place = place(process, now, files)?;
        if self.known.len() >= MAX_PROGRAMS {
            self.known.clear();
        }
        self.known.insert(program, *now);
        Some((program, place))
    }
}

/// Whether two interpreters differ in nothing but their addresses.
fn is_same(one: &Interpreter, other: &Interpreter) -> bool {
    Interpreter {
        runtime: other.runtime,
        ..*one
    } == *other
}

fn place(process: &Process, interpreter: &Interpreter, files: &Files) -> Option<InterpreterPlace> {
    let start = files.system.code_start(process.pid());
    let (program, program_bias) = process.space.find(start)?;
    let library = process.python.as_ref()?.module;
    if program == library {
        return Some(InterpreterPlace::Program {
            runtime: interpreter.runtime.wrapping_sub(start),
        });
    }
    let mut mapped = process.space.code().iter().filter_map(|code| code.file);
    let (_, bias) = mapped.find(|(module, _)| *module == library)?;
    let list = files.modules.get(program).loader_list()?.wrapping_add(program_bias);
    Some(InterpreterPlace::Library {
        runtime: interpreter.runtime.wrapping_sub(bias),
        dynamic: files.modules.get(library).dynamic_section()?,
        list: list.wrapping_sub(start),
    })
}

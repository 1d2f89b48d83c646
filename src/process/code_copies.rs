//! Code of a file that a process runs from anonymous memory at the same addresses: some programs copy their code to
//! huge pages (`node --use-largepages=on`), which takes its file from it.

use super::modules::Modules;
use super::system::System;
use crate::event::Pid;
use crate::frame::ModuleId;

/// Maximum number of copies per process that are not compared yet.
const MAX_COPIES: usize = 64;
/// Samples after which a copy that differs from the file counts as other code: it may not be finished at first.
const MAX_SAMPLES: u32 = 1 << 16;
/// Pieces of a copy that are compared, and bytes of each.
const PIECES: u64 = 32;
const PIECE: u64 = 256;

/// Anonymous executable memory where a file's code should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeCopy {
    /// avma of the first byte, and of the one after the last.
    pub start: u64,
    pub end: u64,
    /// The file and its load bias.
    pub file: (ModuleId, u64),
    /// Samples taken since it was mapped.
    samples: u32,
}

/// Copies that are not compared with their files yet.
#[derive(Clone, Debug, Default)]
pub struct CodeCopies(Vec<CodeCopy>);

impl CodeCopies {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds anonymous memory mapped where `file` should be.
    pub fn add(&mut self, start: u64, end: u64, file: (ModuleId, u64)) {
        if self.0.len() < MAX_COPIES {
            let samples = 0;
            self.0.push(CodeCopy {
                start,
                end,
                file,
                samples,
            });
        }
    }

    /// The file that has the code at all of these addresses.
    pub fn file_for(&self, start: u64, end: u64) -> Option<(ModuleId, u64)> {
        let copy = self.0.iter().find(|copy| copy.start <= start && end <= copy.end)?;
        Some(copy.file)
    }

    /// Something else is mapped there.
    pub fn remove(&mut self, start: u64, end: u64) {
        self.0.retain(|copy| copy.end <= start || end <= copy.start);
    }

    /// Compares them, more and more seldom; returns those that have the bytes of their files. To be called for each
    /// sample.
    pub fn compare(&mut self, system: &dyn System, pid: Pid, modules: &Modules) -> Vec<CodeCopy> {
        let mut same = Vec::new();
        self.0.retain_mut(|copy| {
            copy.samples += 1;
            if copy.samples.is_power_of_two() && is_same(system, pid, modules, copy) {
                same.push(*copy);
                return false;
            }
            copy.samples < MAX_SAMPLES
        });
        same
    }
}

/// Whether pieces all over the copy have the bytes of the file.
fn is_same(system: &dyn System, pid: Pid, modules: &Modules, copy: &CodeCopy) -> bool {
    let (id, bias) = copy.file;
    let module = modules.get(id);
    let length = copy.end - copy.start;
    let step = (length / PIECES).max(PIECE);
    let mut compared = 0;
    for at in (0..length).step_by(step as usize).map(|at| copy.start + at) {
        let (mut bytes, mut expected) = ([0; PIECE as usize], [0; PIECE as usize]);
        // The last page may be only partly of the file.
        if !module.read_code(at.wrapping_sub(bias), &mut expected) {
            continue;
        }
        if system.read_memory(pid, at, &mut bytes) != bytes.len() || expected != bytes {
            return false;
        }
        compared += 1;
    }
    compared > 0
}

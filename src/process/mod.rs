//! Live processes: what is mapped where, their threads, their memory.
//!
//! Knows no capture backend and no Python.

use std::fs;
use std::sync::Arc;

use crate::code::CodeMap;
use crate::error::Result;
use crate::sample::{ModuleId, Pid, Tid};

pub mod content;
pub mod credentials;
pub mod host;
pub mod landmarks;
pub mod launch;
pub mod maps;
pub mod memory;
pub mod modules;
pub mod own;
pub mod privilege;
pub mod rights;
pub mod root;
pub mod spawn;
pub mod sys;
pub mod task;
pub mod trace;

use host::Host;
use modules::Modules;
use root::Root;

/// Executable memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    pub start: u64,
    pub end: u64,
    /// File and load bias; `None` for anonymous memory.
    pub file: Option<(ModuleId, u64)>,
}

/// What is known of one process, kept fresh by events.
#[derive(Debug)]
pub struct Process {
    pub pid: Pid,
    /// Sorted by address, not overlapping.
    code: Vec<Code>,
    /// Changes whenever `code` does.
    pub generation: u64,
    /// avma just past the main thread's frames; 0 if unknown.
    pub stack_end: u64,
    /// Its files as it sees them.
    pub root: Option<Arc<Root>>,
    /// The jitdump files that it has mapped at some time.
    pub jitdumps: Vec<ModuleId>,
}

/// Bytes of a program's arguments and environment, mostly.
const ARGUMENTS: u64 = 64 << 10;
/// Jitdump files of one process that are noted.
const MAX_JITDUMPS: usize = 16;

impl Process {
    /// Reads what is mapped now. Files that were not seen before are handed to `new_module`.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn open(
        host: &dyn Host,
        pid: Pid,
        modules: &mut Modules,
        new_module: &mut dyn FnMut(ModuleId),
    ) -> Result<Process> {
        let text = host.maps(pid)?;
        let mut p = Process {
            pid,
            code: Vec::new(),
            generation: 0,
            stack_end: host.stack_end(pid),
            root: modules.root(host, pid),
            jitdumps: Vec::new(),
        };
        for m in maps::parse(&text) {
            if m.executable {
                p.map(host, m.start, m.end, m.offset, &m.path, modules, new_module);
            }
        }
        Ok(p)
    }

    /// Finds `stack_end` anew for a stack that could not be followed beyond a frame near it: where the process was opened
    /// while it was being executed, the kernel had not yet put its arguments there, or not even set it. True if it is
    /// another.
    pub fn find_stack_end(&mut self, host: &dyn Host, sp: u64) -> bool {
        if self.stack_end != 0 && !(1..=ARGUMENTS).contains(&sp.abs_diff(self.stack_end)) {
            return false;
        }
        let now = host.stack_end(self.pid);
        let other = now != 0 && now != self.stack_end;
        if other {
            self.stack_end = now;
        }
        other
    }

    /// A process that ended before it could be looked at.
    pub fn gone(pid: Pid) -> Process {
        Process {
            pid,
            code: Vec::new(),
            generation: 0,
            stack_end: 0,
            root: None,
            jitdumps: Vec::new(),
        }
    }

    /// A child right after `fork`: the same memory.
    pub fn forked(&self, pid: Pid) -> Process {
        Process {
            pid,
            code: self.code.clone(),
            generation: self.generation,
            stack_end: self.stack_end,
            root: self.root.clone(),
            jitdumps: self.jitdumps.clone(),
        }
    }

    /// Notes executable memory; what was there before is gone.
    #[allow(clippy::too_many_arguments)] // a mapping is what it is
    pub fn map(
        &mut self,
        host: &dyn Host,
        start: u64,
        end: u64,
        offset: u64,
        path: &[u8],
        modules: &mut Modules,
        new_module: &mut dyn FnMut(ModuleId),
    ) {
        if start >= end {
            return;
        }
        self.unmap(start, end);
        let mut file = None;
        // `//anon`: how perf events call anonymous memory
        if path == b"[vdso]" || (path.starts_with(b"/") && path != b"//anon") {
            let (id, new) = modules.open(host, self.pid, start, end, path);
            if new {
                new_module(id);
            }
            let module = modules.get(id);
            if let Some(root) = &self.root {
                module.root.get_or_init(|| root.clone());
            }
            if module.is_jitdump() && !self.jitdumps.contains(&id) && self.jitdumps.len() < MAX_JITDUMPS {
                self.jitdumps.push(id);
            }
            // Without segments (an unreadable file) offsets stand in for addresses.
            let bias = modules
                .get(id)
                .bias(start, offset)
                .unwrap_or_else(|| start.wrapping_sub(offset));
            file = Some((id, bias));
        }
        let at = self.code.partition_point(|c| c.start < start);
        self.code.insert(at, Code { start, end, file });
        self.generation += 1;
    }

    fn unmap(&mut self, start: u64, end: u64) {
        let mut tails = Vec::new();
        self.code.retain_mut(|c| {
            if c.end <= start || end <= c.start {
                return true;
            }
            if c.end > end {
                tails.push(Code { start: end, ..*c });
            }
            c.end = start;
            c.start < start
        });
        self.code.extend(tails);
        self.code.sort_by_key(|c| c.start);
    }

    pub fn code(&self) -> &[Code] {
        &self.code
    }

    fn at(&self, avma: u64) -> Option<&Code> {
        let i = self.code.partition_point(|c| c.end <= avma);
        self.code.get(i).filter(|c| c.start <= avma)
    }
}

impl CodeMap for Process {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        self.at(avma)?.file
    }

    fn is_code(&self, avma: u64) -> bool {
        self.at(avma).is_some()
    }
}

/// Where `argc` lies: `startstack`, field 28 of /proc/PID/stat (0 if we may not see it).
pub fn stack_end(pid: Pid) -> u64 {
    stat_field(pid, 28).unwrap_or(0)
}

/// A numeric field of /proc/PID/stat, numbered as in proc(5).
fn stat_field(pid: Pid, field: usize) -> Option<u64> {
    stat_text(pid, field)?.parse().ok()
}

fn stat_text(pid: Pid, field: usize) -> Option<String> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // the name, field 2, may hold spaces and brackets
    let after = text.iter().rposition(|c| *c == b')')? + 2;
    let rest = std::str::from_utf8(text.get(after..)?).ok()?;
    Some(rest.split(' ').nth(field.checked_sub(3)?)?.trim().to_string())
}

/// State of a process (`R`, `S`, `Z` ...), field 3 of /proc/PID/stat.
pub fn stat_state(pid: Pid) -> Option<char> {
    stat_text(pid, 3)?.chars().next()
}

/// A thread of the kernel, which has no memory of its own.
pub fn is_of_kernel(pid: Pid) -> bool {
    // PF_KTHREAD (include/linux/sched.h, Linux 6.18) among the flags, field 9 of proc_pid_stat(5)
    const KERNEL_THREAD: u64 = 0x0020_0000;
    stat_field(pid, 9).is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

/// Parent of a process; `None` if it has ended.
pub fn parent(pid: Pid) -> Option<Pid> {
    stat_text(pid, 4)?.parse().ok()
}

/// ELF class of a process's executable: 1 for 32 bits, 2 for 64.
pub fn elf_class(pid: Pid) -> Option<u8> {
    use std::io::Read;
    let mut head = [0; 5];
    fs::File::open(format!("/proc/{pid}/exe"))
        .ok()?
        .read_exact(&mut head)
        .ok()?;
    head.starts_with(b"\x7fELF").then_some(head[4])
}

/// Thread ids of a process; none if it has ended.
pub fn threads(pid: Pid) -> Vec<Tid> {
    let dir = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    dir.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// Name of a thread (`comm`), without control characters.
pub fn thread_name(pid: Pid, tid: Tid) -> Option<String> {
    let raw = fs::read(format!("/proc/{pid}/task/{tid}/comm")).ok()?;
    Some(String::from_utf8_lossy(raw.strip_suffix(b"\n").unwrap_or(&raw)).into_owned())
}

/// Words of the command line of a process, separated by blanks; its name if it has none.
pub fn command_line(pid: Pid) -> String {
    let raw = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = raw
        .split(|c| *c == 0)
        .filter(|w| !w.is_empty())
        .map(String::from_utf8_lossy)
        .collect();
    if words.is_empty() {
        thread_name(pid, pid).unwrap_or_default()
    } else {
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_over_code_replaces_it() {
        let mut p = Process {
            pid: 1,
            code: Vec::new(),
            generation: 0,
            stack_end: 0,
            root: None,
            jitdumps: Vec::new(),
        };
        let (mut modules, mut new) = (Modules::default(), |_| {});
        let mut map = |p: &mut Process, start, end| p.map(&host::Live, start, end, 0, b"", &mut modules, &mut new);
        map(&mut p, 0x1000, 0x9000);
        map(&mut p, 0x3000, 0x5000);
        let ranges = |p: &Process| p.code().iter().map(|c| (c.start, c.end)).collect::<Vec<_>>();
        assert_eq!(ranges(&p), [(0x1000, 0x3000), (0x3000, 0x5000), (0x5000, 0x9000)]);
        map(&mut p, 0x2000, 0x6000);
        assert_eq!(ranges(&p), [(0x1000, 0x2000), (0x2000, 0x6000), (0x6000, 0x9000)]);
        assert!(p.is_code(0x8fff) && !p.is_code(0x9000) && !p.is_code(0xfff));
        map(&mut p, 0, 0x10000);
        assert_eq!(ranges(&p), [(0, 0x10000)]);
    }
}

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
pub mod jit;
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

/// Executable memory that is no code of an ELF file: what the kernel maps of it side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// avma of the first byte, and behind the last one.
    pub start: u64,
    pub end: u64,
    /// The file that is mapped there, if it is one of another kind (.NET's assemblies).
    pub file: Option<ModuleId>,
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
    /// Executable memory that is no code of an ELF file, in order of appearance.
    regions: Vec<Region>,
    /// Code in it that has tables of its own: start, end and whose tables. Sorted, not overlapping.
    registered: Vec<(u64, u64, ModuleId)>,
}

/// Bytes of a program's arguments and environment, mostly.
const ARGUMENTS: u64 = 64 << 10;
/// Jitdump files of one process that are noted.
const MAX_JITDUMPS: usize = 16;
/// Regions of code without a file in one process that are told apart.
const MAX_REGIONS: usize = 4096;

/// Whether the path of a mapping may be that of a file. `//anon`: how perf events call anonymous memory.
pub fn is_file_path(path: &[u8]) -> bool {
    path.starts_with(b"/") && path != b"//anon"
}

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
            stack_end: host.stack_end(pid),
            root: modules.root(host, pid),
            ..Process::gone(pid)
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
            regions: Vec::new(),
            registered: Vec::new(),
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
            regions: self.regions.clone(),
            registered: self.registered.clone(),
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
        let opened = (path == b"[vdso]" || is_file_path(path))
            .then(|| modules.open(host, self.pid, start, end, path, self.root.as_deref()));
        if let Some((id, new)) = opened.filter(|(id, _)| modules.get(*id).is_file) {
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
        } else if path != b"[vsyscall]" {
            // It is the same in all processes, and seen only where mappings are read from a list.
            let other = opened.map(|(id, _)| id);
            self.add_region(start, end, other.filter(|id| modules.get(*id).has_file_name()));
        }
        let at = self.code.partition_point(|c| c.start < start);
        self.code.insert(at, Code { start, end, file });
        self.generation += 1;
    }

    /// Notes a mapping of code without a file. What it touches is one region with it: programs that make code change
    /// the rights of its pages piece by piece, and the kernel joins mappings that are alike.
    fn add_region(&mut self, start: u64, end: u64, file: Option<ModuleId>) {
        let full = self.regions.len() >= MAX_REGIONS;
        let touches = |r: &&mut Region| r.file == file && start <= r.end && r.start <= end;
        match self.regions.iter_mut().find(touches) {
            Some(region) => (region.start, region.end) = (region.start.min(start), region.end.max(end)),
            None if full => {}
            None => self.regions.push(Region { start, end, file }),
        }
    }

    /// Executable memory that is no code of an ELF file, in order of appearance.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Sets which code without a file has tables of its own, and whose; they replace those set before. Ranges that
    /// overlap an earlier one are left out.
    pub fn set_registered(&mut self, mut ranges: Vec<(u64, u64, ModuleId)>) {
        ranges.retain(|(start, end, _)| start < end);
        ranges.sort_by_key(|r| r.0);
        ranges.dedup_by(|next, before| next.0 < before.1);
        self.registered = ranges;
        self.generation += 1;
    }

    fn registered_at(&self, avma: u64) -> Option<ModuleId> {
        let i = self.registered.partition_point(|r| r.1 <= avma);
        self.registered.get(i).filter(|r| r.0 <= avma).map(|r| r.2)
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
        let code = self.at(avma)?;
        // The addresses of registered code are its own.
        code.file.or_else(|| Some((self.registered_at(avma)?, 0)))
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
        let mut p = Process::gone(1);
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

    #[test]
    fn code_without_a_file_keeps_its_region() {
        let mut p = Process::gone(1);
        let (mut modules, mut new) = (Modules::default(), |_| {});
        let mut map =
            |p: &mut Process, start, end| p.map(&host::Live, start, end, 0, b"//anon", &mut modules, &mut new);
        map(&mut p, 0x9000, 0xa000);
        map(&mut p, 0x1000, 0x3000);
        // The same piece again, one that goes on where it ends, and one around both.
        map(&mut p, 0x9000, 0xa000);
        map(&mut p, 0x3000, 0x4000);
        map(&mut p, 0x1000, 0x5000);
        let regions: Vec<_> = p.regions().iter().map(|r| (r.start, r.end, r.file)).collect();
        assert_eq!(regions, [(0x9000, 0xa000, None), (0x1000, 0x5000, None)]);

        // A file that is no ELF file is told by its name, memory that looks like a file is not.
        let file = std::env::temp_dir().join(format!("nativeprof-region-{}.dll", std::process::id()));
        fs::write(&file, "MZ").expect("written");
        p.pid = std::process::id();
        let mut named = |path: &[u8], start| {
            p.map(&host::Live, start, start + 0x1000, 0, path, &mut modules, &mut new);
            let region = p.regions.last().copied();
            region.and_then(|r| Some((r.start, modules.get(r.file?).name())))
        };
        assert_eq!(named(b"/memfd:doublemapper (deleted)", 0x2_0000), None);
        let found = named(file.as_os_str().as_encoded_bytes(), 0x2_1000);
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        assert_eq!(found, Some((0x2_1000, name)));
        fs::remove_file(file).expect("removed");

        let id = ModuleId(7);
        p.set_registered(vec![
            (0x2000, 0x2800, id),
            (0x2400, 0x3000, id),
            (0x1000, 0x1000, id),
            (0x7000, 0x7100, id),
        ]);
        for (at, expected) in [
            (0x1fff, None),
            (0x2000, Some((id, 0))),
            (0x27ff, Some((id, 0))),
            (0x2800, None),
            (0x7000, None), // nothing is mapped there
        ] {
            assert_eq!(p.find(at), expected, "{at:#x}");
        }
    }
}

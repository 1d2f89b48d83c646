//! What is read from the system about processes. One trait, so that a tape can give the same answers later and
//! elsewhere: all code outside of capture backends uses it.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file_content::Content;
use super::maps;
use super::maps::Mapping;
use super::memory::{Memory, UseLog, UsedMemory};
use super::root::Root;
use crate::error::{Error, Result};
use crate::event::{Pid, Sample, Tid};
use crate::privileges::checks;
use crate::sys;
use crate::sys::procfs;

/// Bytes that are read of a table of sockets, at most: some 6000 of them.
const MAX_TABLE: u64 = 1 << 20;

/// Identity of a file, independent of its name: device and inode.
pub type FileKey = (u64, u64);

pub trait System {
    /// Text of `/proc/PID/maps`.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    fn maps(&self, pid: Pid) -> Result<Vec<u8>>;

    /// avma just past the main thread's frames; 0 if unknown.
    fn stack_end(&self, pid: Pid) -> u64;

    /// avma of the code of the program that a process runs; 0 if unknown. Not on tapes.
    fn code_start(&self, _pid: Pid) -> u64 {
        0
    }

    /// Which of a process's pages (avma) are resident; `None`: it has ended, or that may not be read. Not on tapes.
    fn resident_pages(&self, _pid: Pid, _pages: &[u64]) -> Option<Vec<bool>> {
        None
    }

    /// When a process was started, clock ticks since the machine was: tells it from a later one with the same number.
    /// Not on tapes.
    fn start_time(&self, _pid: Pid) -> Option<u64> {
        None
    }

    /// Thread ids of a process; none if it has ended.
    fn threads(&self, pid: Pid) -> Vec<Tid>;

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String>;

    /// The ID of a thread in its own PID namespace. Tapes are of processes for which that is the same.
    fn namespace_tid(&self, _pid: Pid, tid: Tid) -> Option<Tid> {
        Some(tid)
    }

    /// The file mapped at `start..end` of a process. `root`: its file system as seen while it ran, for after it has
    /// exited.
    fn open(&self, pid: Pid, start: u64, end: u64, path: &[u8], root: Option<&Root>) -> Option<(Content, FileKey)>;

    /// Identity of the file of a mapping, by the device (major and minor number) and inode that lists of mappings have: that of
    /// the opened file, if any file has it. Not where a tape is made or replayed, which has each opening.
    fn file_of(&self, _device: (u32, u32), _inode: u64) -> Option<FileKey> {
        None
    }

    /// Copies memory of a process, as much as is readable from `avma` on; returns the bytes copied.
    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize;

    /// Copies pieces of memory of a process (address and length each) one after the other, up to the first that is not readable;
    /// returns the bytes copied.
    fn read_memory_pieces(&self, pid: Pid, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        let mut copied = 0;
        for (at, length) in pieces {
            let room = buf.get_mut(copied..copied + length);
            let read = room.map_or(0, |room| self.read_memory(pid, *at, room));
            copied += read;
            if read < *length {
                break;
            }
        }
        copied
    }

    /// Where to note what of the memory is used, if that is wanted.
    fn used_memory(&self) -> Option<&RefCell<UsedMemory>> {
        None
    }

    /// The file system as a process sees it; `None` where there are no files.
    fn root(&self, pid: Pid) -> Option<Root>;

    /// Text of `/proc/kallsyms`.
    fn kernel_symbols(&self) -> Option<String>;

    /// CLOCK_MONOTONIC, ns.
    fn now(&self) -> u64 {
        sys::clock::now()
    }

    /// CPU time that nativeprof has used, ns.
    fn own_cpu_time(&self) -> u64 {
        sys::clock::process_cpu_time()
    }

    /// The number of the system call that a thread sleeps in, `u64::MAX` if it is in none. `None`: it does not sleep, or that is
    /// not known.
    fn blocked_call(&self, _pid: Pid, _tid: Tid) -> Option<u64> {
        None
    }

    /// A thread that sleeps, as `read` reads it now.
    fn sleeping_thread(&self, _pid: Pid, _tid: Tid, read: &mut dyn FnMut() -> Option<Sample>) -> Option<Sample> {
        read()
    }

    /// Takes note of a sample that comes from no backend, before the session handles it. Of use for tapes only.
    fn notify_sample(&self, _sample: &Sample) {}

    /// Takes note that the events which a backend had have been handled, and what else was due. Of use for tapes only.
    fn end_turn(&self) {}

    /// Takes note that sampling has ended, and all samples of open intervals have been handled. Of use for tapes only.
    fn end_sampling(&self) {}

    /// What a file descriptor of a process refers to: a path, `pipe:[...]`, `socket:[...]`.
    fn descriptor(&self, _pid: Pid, _fd: u32) -> Option<String> {
        None
    }

    /// A table of the sockets in the network of a process (`/proc/PID/net/NAME`), its first megabyte.
    fn network_table(&self, _pid: Pid, _name: &str) -> Option<String> {
        None
    }
}

/// The memory of one process of a system.
pub struct ProcessMemory<'a>(pub &'a dyn System, pub Pid);

impl Memory for ProcessMemory<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        self.0.read_memory(self.1, avma, buf) == buf.len()
    }

    fn read_pieces(&self, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        self.0.read_memory_pieces(self.1, pieces, buf)
    }

    fn use_log(&self) -> Option<UseLog<'_>> {
        let log = self.0.used_memory()?;
        Some(UseLog { log, pid: self.1 })
    }
}

/// This machine, now.
#[derive(Clone, Copy, Debug, Default)]
pub struct LiveSystem;

impl System for LiveSystem {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        procfs::read_bytes(format!("/proc/{pid}/maps")).map_err(|e| maps_error(pid, e))
    }

    fn stack_end(&self, pid: Pid) -> u64 {
        procfs::stack_end(pid)
    }

    fn code_start(&self, pid: Pid) -> u64 {
        procfs::code_start(pid)
    }

    fn resident_pages(&self, pid: Pid, pages: &[u64]) -> Option<Vec<bool>> {
        procfs::resident_pages(pid, pages)
    }

    fn start_time(&self, pid: Pid) -> Option<u64> {
        procfs::start_time(pid)
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        procfs::threads(pid)
    }

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String> {
        procfs::thread_name(pid, tid)
    }

    fn namespace_tid(&self, pid: Pid, tid: Tid) -> Option<Tid> {
        procfs::namespace_tid(pid, tid)
    }

    /// Opens the file itself (even if it was deleted or replaced), or else the file that now has its name in the
    /// target's root, which stays open after the target exits. Only regular files: opening a device or a pipe can block
    /// or do harm.
    fn open(&self, pid: Pid, start: u64, end: u64, path: &[u8], root: Option<&Root>) -> Option<(Content, FileKey)> {
        let checked = |f: File| {
            let meta = f.metadata().ok()?;
            meta.is_file().then(|| (f, (meta.dev(), meta.ino())))
        };
        let open = |p: PathBuf| {
            let f = File::options()
                .read(true)
                .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC)
                .open(p);
            checked(f.ok()?)
        };
        // Another file may be mapped there by now: programs that unload libraries get the same addresses again. Its
        // names and tables must not be taken for those of the file in the event.
        let mapped = open(format!("/proc/{pid}/map_files/{start:x}-{end:x}").into());
        let opened = mapped.filter(|(file, _)| has_name(file, path)).or_else(|| {
            let is_program = || {
                let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                plain(program.as_os_str().as_bytes()).ends_with(plain(path))
            };
            // Some programs map thousands of files without a name.
            if path.ends_with(DELETED) && !is_program() {
                return None;
            }
            // Opening `map_files` needs CAP_CHECKPOINT_RESTORE. What is mapped there now is the file of the event if it
            // has the same name; its line says whether it still is the file of that name.
            let text = procfs::read_bytes(format!("/proc/{pid}/maps")).unwrap_or_default();
            let now = maps::find(&text, start).filter(|now| plain(&now.path) == plain(path));
            let is_deleted = now.as_ref().map_or(path, |now| &now.path).ends_with(DELETED);
            if is_deleted {
                let program = open(format!("/proc/{pid}/exe").into());
                return program
                    .filter(|(file, key)| now.is_some_and(|now| has_name(file, path) && is_file_of(&now, *key)));
            }
            path.starts_with(b"/").then_some(())?;
            let path = Path::new(OsStr::from_bytes(path));
            let mut full = OsString::from(format!("/proc/{pid}/root"));
            full.push(path);
            let named = open(full.into()).or_else(|| checked(root?.open_mapped(path)?));
            named.filter(|(_, key)| now.is_none_or(|now| is_file_of(&now, *key)))
        });
        opened.map(|(file, key)| (Content::File(Arc::new(file)), key))
    }

    fn file_of(&self, (major, minor): (u32, u32), inode: u64) -> Option<FileKey> {
        (inode != 0).then(|| (libc::makedev(major, minor), inode))
    }

    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize {
        sys::memory::read_memory(pid, avma, buf)
    }

    fn read_memory_pieces(&self, pid: Pid, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        sys::memory::read_memory_pieces(pid, pieces, buf)
    }

    fn root(&self, pid: Pid) -> Option<Root> {
        Root::of(pid)
    }

    fn kernel_symbols(&self) -> Option<String> {
        procfs::read_text("/proc/kallsyms").ok()
    }

    fn blocked_call(&self, pid: Pid, tid: Tid) -> Option<u64> {
        let file = File::open(format!("/proc/{pid}/task/{tid}/syscall")).ok()?;
        let blocked = procfs::read_blocked(&file).ok()??;
        Some(blocked.call.map_or(u64::MAX, |(call, _)| call))
    }

    fn descriptor(&self, pid: Pid, fd: u32) -> Option<String> {
        let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
        Some(link.to_string_lossy().into_owned())
    }

    fn network_table(&self, pid: Pid, name: &str) -> Option<String> {
        let mut bytes = Vec::new();
        let table = File::open(format!("/proc/{pid}/net/{name}")).ok()?;
        table.take(MAX_TABLE).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The error of a list of mappings that could not be read.
pub fn maps_error(pid: Pid, e: io::Error) -> Error {
    match e.raw_os_error() {
        // ESRCH if it has exited since the file was opened (fs/proc/task_mmu.c, m_start).
        Some(libc::ENOENT | libc::ESRCH) => Error::no_process(pid),
        _ => {
            let what = format!("cannot read the memory map of process {pid}");
            match checks::memory(pid) {
                Some(missing) => missing.error(what),
                None => Error::io(what, e).hint("check `sudo dmesg | tail` for a security module that forbids it"),
            }
        }
    }
}

/// What the kernel appends to the path of a file that has no name any more (d_path, fs/d_path.c).
const DELETED: &[u8] = b" (deleted)";

fn plain(path: &[u8]) -> &[u8] {
    path.strip_suffix(DELETED).unwrap_or(path)
}

/// Whether an open file has this path. In another mount namespace our path may be longer than the target's.
fn has_name(file: &File, path: &[u8]) -> bool {
    let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    name.is_ok_and(|name| plain(name.as_os_str().as_bytes()).ends_with(plain(path)))
}

/// Whether a file that has the name of a mapped one is that file. btrfs and overlayfs have one device in the list of
/// mappings and another in what stat returns (`show_map_vma`, fs/proc/task_mmu.c, Linux 6.1), and overlayfs also inodes
/// of its own: only on the same device is another inode another file.
fn is_file_of(mapping: &Mapping, (device, inode): FileKey) -> bool {
    let (major, minor) = mapping.device;
    inode == mapping.inode || device != libc::makedev(major, minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_inode_on_the_same_device_is_another_file() {
        let mapping = maps::find(b"1000-3000 r-xp 0 fd:01 42 /bin/a", 0x2000).expect("a line");
        let (same, other) = (libc::makedev(0xfd, 1), libc::makedev(0, 40));
        for (key, expected) in [
            ((same, 42), true),
            ((same, 43), false),
            ((other, 42), true),
            ((other, 43), true),
        ] {
            assert_eq!(is_file_of(&mapping, key), expected, "{key:?}");
        }
    }
}

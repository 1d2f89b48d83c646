//! Allocations that processes sample themselves: the program at the probes (USDT) where they publish them.
//!
//! What is read there says sample/allocations.h.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use aya::Ebpf;
use aya::maps::{HashMap as BpfHash, MapData, PerCpuArray};
use aya::programs::UProbe;
use rustc_hash::FxHashMap;

use super::abi::{PROBE_WORDS, encode_probe};
use super::errors::bpf_error;
use super::object;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::event::probes::{ALLOCATION_PROVIDER, AllocationProbe, MAX_PROBES, ProbeEvent, ProbedFile};
use crate::privileges::credentials;
use crate::privileges::credentials::Caps;
use crate::privileges::phases::PROBING;
use crate::sys;
use crate::sys::perf::Uprobes;

const LOAD: &str = "cannot load the BPF program for published allocations";
const ATTACH: &str = "cannot attach to a probe";
const PROGRAM: &str = "published";
/// Events of ended processes that are kept open.
const MAX_ENDED: usize = 1024;
/// Entries of `LOST_ALLOCATIONS`.
const LOST_BLOCKS: u32 = 0;
const LOST_FREES: u32 = 1;

/// `struct probe_key` of the program: address and process.
type ProbeKey = [u64; 2];

/// What the program is attached to in one process. It remains attached when the process executes the same file again.
#[derive(Default)]
struct Attached {
    probes: Vec<AllocationProbe>,
    /// The event at each instruction, by file and offset; none for what cannot be attached to, which is not tried again.
    events: Vec<(ProbedFile, u64, Option<OwnedFd>)>,
}

/// The program at probes for allocations.
pub struct PublishedAllocations {
    program: OwnedFd,
    uprobes: Uprobes,
    probes: BpfHash<MapData, ProbeKey, [u64; PROBE_WORDS]>,
    lost: PerCpuArray<MapData, u64>,
    attached: FxHashMap<Pid, Attached>,
    /// Events of processes that have ended. Closing one takes long, and these have no effect any more.
    ended: Vec<OwnedFd>,
    /// Whether what is published is taken.
    is_running: bool,
    /// Any was attached to.
    is_any: bool,
    /// A process has more than are attached to.
    are_too_many: bool,
    refused: u64,
    refusal: Option<Error>,
}

impl PublishedAllocations {
    /// Loads the program.
    ///
    /// # Errors
    /// The kernel refuses it, or has no uprobes.
    pub fn load(bpf: &mut Ebpf) -> Result<PublishedAllocations> {
        const WHAT: &str = "cannot read published allocations";
        let is_permitted = credentials::current().is_ok_and(|(_, effective)| effective.holds(Caps::of(PROBING)));
        if !is_permitted {
            return Err(Error::new(ErrorKind::NotPermitted, WHAT)
                .why("probes in programs need CAP_SYS_ADMIN")
                .hint("run as root: sudo nativeprof ..."));
        }
        let uprobes = Uprobes::of_kernel().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, WHAT)
                .why("this kernel has no uprobes with counters of observers (CONFIG_UPROBE_EVENTS)")
                .hint("use --mode rss, or python -m nativeprof --alloc")
        })?;
        let program: &mut UProbe = object::program(bpf, PROGRAM)?;
        program.load().map_err(|e| bpf_error(LOAD, e))?;
        let program = program.fd().map_err(|e| bpf_error(LOAD, e))?;
        let program = program.as_fd().try_clone_to_owned().map_err(|e| Error::io(LOAD, e))?;
        let map_error = |e| bpf_error(LOAD, e);
        Ok(PublishedAllocations {
            program,
            uprobes,
            probes: object::take_map(bpf, "ALLOCATION_PROBES")?
                .try_into()
                .map_err(map_error)?,
            lost: object::take_map(bpf, "LOST_ALLOCATIONS")?
                .try_into()
                .map_err(map_error)?,
            attached: FxHashMap::default(),
            ended: Vec::new(),
            is_running: false,
            is_any: false,
            are_too_many: false,
            refused: 0,
            refusal: None,
        })
    }

    /// Attaches to the probes of a process that are new, and detaches from those that are not there any more.
    pub fn update(&mut self, pid: Pid, found: &[AllocationProbe]) {
        self.are_too_many |= found.len() > MAX_PROBES;
        let mut wanted: Vec<AllocationProbe> = found.iter().take(MAX_PROBES).cloned().collect();
        // Frees first: of a block whose allocation is seen, the end is seen too.
        wanted.sort_by_key(|probe| matches!(probe.event, ProbeEvent::Allocation(_)));
        let mut attached = self.attached.remove(&pid).unwrap_or_default();
        if attached.probes == wanted {
            if !wanted.is_empty() {
                self.attached.insert(pid, attached);
            }
            return;
        }
        let mut gone = std::mem::replace(&mut attached.probes, wanted);
        gone.retain(|probe| attached.probes.iter().all(|other| other.avma != probe.avma));
        self.forget(pid, &gone);
        let is_there = |file: &ProbedFile, offset: u64| {
            let mut probes = attached.probes.iter();
            probes.any(|probe| probe.file == *file && probe.offset == offset)
        };
        attached.events.retain(|(file, offset, _)| is_there(file, *offset));
        if self.is_running {
            self.take_of(pid, &attached.probes);
        }
        for probe in &attached.probes {
            let mut events = attached.events.iter();
            if events.any(|(file, offset, _)| *file == probe.file && *offset == probe.offset) {
                continue;
            }
            let event = match self.attach(pid, probe) {
                Ok(event) => Some(event),
                // It has ended.
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => break,
                Err(e) => {
                    self.refused += 1;
                    self.refusal.get_or_insert_with(|| Error::io(ATTACH, e));
                    None
                }
            };
            self.is_any |= event.is_some();
            attached.events.push((probe.file.clone(), probe.offset, event));
        }
        if !attached.probes.is_empty() {
            self.attached.insert(pid, attached);
        }
    }

    fn attach(&self, pid: Pid, probe: &AllocationProbe) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", probe.file.0.as_raw_fd());
        let event = self.uprobes.open(pid, &path, probe.offset, probe.semaphore)?;
        sys::perf::perf_set_bpf(event.as_fd(), self.program.as_fd())?;
        Ok(event)
    }

    /// Has the program take what is published at these probes.
    fn take_of(&mut self, pid: Pid, probes: &[AllocationProbe]) {
        for probe in probes {
            if let Err(e) = self.probes.insert(key(pid, probe), encode_probe(&probe.event), 0) {
                self.refused += 1;
                self.refusal.get_or_insert_with(|| bpf_error(ATTACH, e));
            }
        }
    }

    /// Removes probes from those that the program knows.
    fn forget(&mut self, pid: Pid, probes: &[AllocationProbe]) {
        for probe in probes {
            let _ = self.probes.remove(&key(pid, probe)); // absent: nothing to remove
        }
    }

    /// Takes what is published from now on.
    pub fn start(&mut self) {
        self.is_running = true;
        for (pid, attached) in std::mem::take(&mut self.attached) {
            self.take_of(pid, &attached.probes);
            self.attached.insert(pid, attached);
        }
    }

    /// Takes nothing any more.
    pub fn stop(&mut self) {
        self.is_running = false;
        for (pid, attached) in std::mem::take(&mut self.attached) {
            self.forget(pid, &attached.probes);
            self.attached.insert(pid, attached);
        }
    }

    /// A process has ended.
    pub fn remove_process(&mut self, pid: Pid) {
        if let Some(attached) = self.attached.remove(&pid) {
            self.forget(pid, &attached.probes);
            if self.ended.len() >= MAX_ENDED {
                self.ended.clear();
            }
            self.ended
                .extend(attached.events.into_iter().filter_map(|(.., event)| event));
        }
    }

    fn lost(&self, what: u32) -> u64 {
        self.lost.get(&what, 0).map_or(0, |lost| lost.iter().sum())
    }

    /// Sampled blocks that were published and not taken.
    pub fn lost_blocks(&self) -> u64 {
        self.lost(LOST_BLOCKS)
    }

    /// Why there can be no samples, if no process has probes that could be attached to.
    pub fn missing_source(&self) -> Option<Error> {
        if self.is_any {
            return None;
        }
        let nothing = || {
            Error::new(
                ErrorKind::Unsupported,
                "no process publishes the allocations that it samples",
            )
            .why(format!(
                "no file that is mapped has the probes {ALLOCATION_PROVIDER}:alloc and free (USDT)"
            ))
            .hint(
                "--mode rss for what makes resident memory grow; of Python programs, allocations are sampled by \
                     `python -m nativeprof --alloc`, `nativeprof record --alloc -- python3 ...`",
            )
        };
        Some(self.refusal.clone().unwrap_or_else(nothing))
    }

    /// Limits that were exceeded, as text.
    pub fn exceeded(&self) -> Vec<String> {
        let frees = self.lost(LOST_FREES);
        let frees =
            (frees > 0).then(|| format!("frees of sampled blocks were lost ({frees}): these blocks count as live"));
        let refused = self.refusal.as_ref().filter(|_| self.refused > 0).map(|e| {
            let refused = self.refused;
            format!(
                "probes for allocations could not be attached to ({refused}): {} ({})",
                e.what, e.why
            )
        });
        let others = self.are_too_many.then(|| {
            format!("a process has more than {MAX_PROBES} probes for allocations: what it publishes at the others is missing")
        });
        frees.into_iter().chain(refused).chain(others).collect()
    }
}

fn key(pid: Pid, probe: &AllocationProbe) -> ProbeKey {
    [probe.avma, pid.into()]
}

//! Off-CPU time: the programs at context switches, and what threads were doing when sampling starts and ends.
//!
//! The account itself is kept by sample.bpf.c, thread by thread. Here the programs are prepared and attached, and threads
//! that already exist are entered.

#![allow(unsafe_code)]

use std::fs;

use aya::Btf;
use aya::maps::{HashMap as BpfHash, MapData};
use aya::programs::BtfTracePoint;
use aya_obj::btf::BtfKind;

use super::bpf_error;
use super::object::{self, FORCED_BY, NO_EXIST, Variant};
use crate::capture::OpenInterval;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Pid, Tid, TimeSpent};
use crate::sys;

const LOAD: &str = "cannot load the BPF programs for off-CPU time";
/// Takes a stack in the thread that is switched in: since Linux 6.18 (kernel/bpf/helpers.c).
const SCHEDULE_RESUME: &str = "bpf_task_work_schedule_resume_impl";
/// Its name in Linux 7.2, which lists the older one too, for a function that programs may not call. With it the verifier
/// there does not accept the programs: it is at work on them for minutes under emulation.
const NEWER_SCHEDULE_RESUME: &str = "bpf_task_work_schedule_resume";
/// `SCHEDULE_RESUME` of sample.bpf.c.
const PLACEHOLDER: [u8; 4] = 0x4b46_0001u32.to_le_bytes();
/// Operation code of a call, and the register field that makes it one to a kernel function (include/uapi/linux/bpf.h).
const CALL: u8 = 0x85;
const KERNEL_FUNCTION: u8 = 2 << 4;
/// `WORK_SLOTS` of sample.bpf.c.
pub const WORK_SLOTS: u32 = 8;
/// Threads accounted for at the same time, at most.
pub const MAX_THREADS: u32 = 16384;

/// `RUNNING` and `BLOCKED` of sample.bpf.c.
const RUNNING: u32 = 0;
const BLOCKED: u32 = 2;

const MAX_KERNEL: usize = 127;

/// Mirrors `struct thread` of the program.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Thread {
    since: u64,
    woken: u64,
    cpu: u64,
    until_runnable: i64,
    until_blocked: i64,
    step_runnable: u64,
    step_blocked: u64,
    take_runnable: u64,
    take_blocked: u64,
    runnable_length: u64,
    blocked_length: u64,
    take_woken: u64,
    futex: u64,
    pending: u64,
    late: u64,
    began: u64,
    state: u32,
    scheduled: u32,
    tgid: u32,
    waker: u32,
    waker_pid: u32,
    take_waker: u32,
    take_waker_pid: u32,
    timed_out: u32,
    kernel: u32,
    pad: u32,
    stack: [u64; MAX_KERNEL + 1],
    work: u64,
}

// SAFETY: plain integers without padding, any bit pattern is valid.
unsafe impl aya::Pod for Thread {}

/// How stacks of threads that were off the CPU are taken here.
///
/// # Errors
/// They cannot be taken.
pub fn check() -> Result<&'static str> {
    prepare(Variant::candidates()?).map(|_| SCHEDULE_RESUME)
}

/// The object with the number of the kernel's function in it, and the kernel's types.
///
/// # Errors
/// The kernel has no BTF, or not the function; the object is not among those that may be used.
pub fn prepare(variants: &[Variant]) -> Result<(Vec<u8>, Btf)> {
    let unsupported = |why: String| {
        Error::new(
            ErrorKind::Unsupported,
            "eBPF cannot sample off-CPU time on this machine",
        )
        .why(why)
        .hint("use --backend ptrace, or omit --mode to sample CPU time")
    };
    if !variants.contains(&Variant::Current) {
        return Err(unsupported(format!("{FORCED_BY} excludes it")));
    }
    let btf = Btf::from_sys_fs()
        .map_err(|_| unsupported("the kernel has no type information (/sys/kernel/btf/vmlinux)".into()))?;
    let number = |name| btf.id_by_type_name_kind(name, BtfKind::Func).ok();
    if number(NEWER_SCHEDULE_RESUME).is_some() {
        return Err(unsupported(format!(
            "this kernel is too new: its {NEWER_SCHEDULE_RESUME} is not that of Linux 6.18"
        )));
    }
    let function = number(SCHEDULE_RESUME)
        .ok_or_else(|| unsupported(format!("this kernel has no {SCHEDULE_RESUME}; Linux 6.18 is needed")))?;
    let mut object = Variant::Current.object().to_vec();
    // Instructions lie on multiples of their size.
    for instruction in object.as_chunks_mut::<8>().0 {
        if instruction[0] == CALL && instruction[4..] == PLACEHOLDER {
            instruction[1] = KERNEL_FUNCTION;
            instruction[4..].copy_from_slice(&function.to_le_bytes());
        }
    }
    Ok((object, btf))
}

/// The programs at context switches.
pub struct OffCpu {
    threads: BpfHash<MapData, u32, Thread>,
    /// After the end: intervals that were not over.
    pub open: Vec<OpenInterval>,
}

impl OffCpu {
    /// Loads and attaches the programs. The account begins when `period` is set in the program's facts.
    ///
    /// # Errors
    /// The kernel refuses them.
    pub fn attach(bpf: &mut aya::Ebpf, btf: &Btf) -> Result<OffCpu> {
        for (name, event) in [("waking", "sched_waking"), ("switched", "sched_switch")] {
            let program: &mut BtfTracePoint = object::program(bpf, name)?;
            program.load(event, btf).map_err(|e| bpf_error(LOAD, e))?;
            program.attach().map_err(|e| bpf_error(LOAD, e))?;
        }
        let threads = object::take_map(bpf, "THREADS")?;
        Ok(OffCpu {
            threads: threads.try_into().map_err(|e| bpf_error(LOAD, e))?,
            open: Vec::new(),
        })
    }

    /// Notes which threads are off the CPU now, and for how long no sample represents their time. Time of less than half a
    /// `period` is no sample, and blocked intervals shorter than `min_blocked` are left out.
    pub fn end(&mut self, period: u64, min_blocked: u64) {
        let end = sys::clock::now();
        for (tid, t) in self.threads.iter().flatten() {
            if t.state == RUNNING {
                continue;
            }
            let since = |start: u64| end.saturating_sub(start);
            let blocked = match (t.state, t.woken) {
                (BLOCKED, 0) => since(t.since),
                (BLOCKED, woken) => woken.saturating_sub(t.since),
                _ => 0,
            };
            let runnable = since(t.since).saturating_sub(blocked);
            let blocked = blocked + t.pending;
            let enough = |time: u64| if time * 2 >= period { time } else { 0 };
            // Since the last tick of the clock of short intervals.
            let rest = |step: u64, until: i64| step.saturating_sub(u64::try_from(until).unwrap_or(0));
            let time = TimeSpent {
                cpu: 0,
                runnable: enough(runnable + rest(t.step_runnable, t.until_runnable)),
                blocked: match blocked < min_blocked {
                    true => 0,
                    false => enough(blocked + rest(t.step_blocked, t.until_blocked) + t.late),
                },
                runnable_length: runnable,
                blocked_length: blocked,
            };
            if time.runnable + time.blocked > 0 {
                self.open.push(OpenInterval {
                    pid: t.tgid,
                    tid,
                    end,
                    time,
                    runs: 0,
                    call: None,
                });
            }
        }
    }

    /// Enters the threads of a process that exist already: what they do now began now.
    pub fn add_process(&mut self, pid: Pid) {
        for tid in threads_of(pid) {
            let thread = Thread {
                since: sys::clock::now(),
                woken: 0,
                cpu: 0,
                until_runnable: 1,
                until_blocked: 1,
                step_runnable: 1,
                step_blocked: 1,
                take_runnable: 0,
                take_blocked: 0,
                runnable_length: 0,
                blocked_length: 0,
                take_woken: 0,
                futex: 0,
                pending: 0,
                late: 0,
                began: sys::clock::now(),
                state: if is_running(pid, tid) { RUNNING } else { BLOCKED },
                scheduled: 0,
                tgid: pid,
                waker: 0,
                waker_pid: 0,
                take_waker: 0,
                take_waker_pid: 0,
                timed_out: 0,
                kernel: 0,
                pad: 0,
                stack: [0; MAX_KERNEL + 1],
                work: 0,
            };
            // One that has been switched meanwhile is known better by the program.
            let _ = self.threads.insert(tid, thread, NO_EXIST);
        }
    }
}

fn threads_of(pid: Pid) -> Vec<Tid> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"));
    let names = entries.into_iter().flatten().flatten();
    names.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// Does it run or want to? In doubt, yes.
fn is_running(pid: Pid, tid: Tid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
    // The name is in parentheses and may hold anything.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_none_or(|s| s == 'R')
}

//! What takes the stacks of threads that were off the CPU, when they are switched in again: which of the kernel's ways there is,
//! and the programs for it.

use std::borrow::Cow;
use std::{fmt, fs};

use aya::programs::{BtfTracePoint, KProbe, RawTracePoint};
use aya::{Btf, Ebpf};
use aya_obj::btf::BtfKind;

use super::errors::bpf_error;
use super::object::{self, FORCED_BY, MapSizes, Variant};
use crate::error::{Error, ErrorKind, Result};
use crate::privileges::facts::KERNEL_TYPES;
use crate::sys;

pub(super) const LOAD: &str = "cannot load the BPF programs for off-CPU time";
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
/// The kernel's function (kernel/sched/core.c) that runs first in a thread that is switched in. Compilers give it a suffix.
const SWITCHED_IN: &str = "finish_task_switch";
/// The kernel's number for events at probes; it is missing where the kernel has no probes.
const PROBES: &str = "/sys/bus/event_source/devices/kprobe/type";
const SYMBOLS: &str = "/proc/kallsyms";

/// What takes the stack of a thread that was off the CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwitchInHook {
    /// A task work, before the thread returns to user code; scheduled by the kernel's function of this number.
    TaskWork(u32),
    /// A probe at this function of the kernel, in the thread that is switched in.
    Kprobe(String),
}

impl fmt::Display for SwitchInHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SwitchInHook::TaskWork(_) => write!(f, "a task work ({SCHEDULE_RESUME})"),
            SwitchInHook::Kprobe(function) => write!(f, "a kprobe at {function}"),
        }
    }
}

/// What can take stacks of threads that were off the CPU here.
///
/// # Errors
/// Nothing can.
pub fn check() -> Result<SwitchInHook> {
    let hooks = hooks(Variant::candidates()?, &kernel_types());
    let (found, missing): (Vec<_>, Vec<_>) = hooks.into_iter().partition(HookResult::is_ok);
    let found = found.into_iter().flatten().next();
    found.ok_or_else(|| unsupported(&missing.into_iter().filter_map(HookResult::err).collect::<Vec<_>>()))
}

/// A hook, or why it is missing.
type HookResult = std::result::Result<SwitchInHook, String>;
/// The kernel's type information, or why there is none. It has some megabytes: one read is enough.
type KernelTypes = std::result::Result<Btf, String>;

/// The better one first.
fn hooks(variants: &[Variant], types: &KernelTypes) -> [HookResult; 2] {
    let task_work = if variants.contains(&Variant::Current) {
        types.as_ref().map_err(String::clone).and_then(task_work)
    } else {
        Err(format!("{FORCED_BY} excludes task works"))
    };
    [task_work, kprobe()]
}

fn unsupported(missing: &[String]) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "eBPF cannot sample off-CPU time on this machine",
    )
    .why(missing.join("; "))
    .hint("use --backend ptrace, or omit --mode to sample CPU time")
}

fn kernel_types() -> KernelTypes {
    Btf::from_sys_fs().map_err(|_| format!("the kernel has no type information ({KERNEL_TYPES})"))
}

fn task_work(types: &Btf) -> HookResult {
    let number = |name| types.id_by_type_name_kind(name, BtfKind::Func).ok();
    if number(NEWER_SCHEDULE_RESUME).is_some() {
        return Err(format!(
            "this kernel's {NEWER_SCHEDULE_RESUME} differs from that of Linux 6.18"
        ));
    }
    let missing = || format!("this kernel has no {SCHEDULE_RESUME} (Linux 6.18 has it)");
    number(SCHEDULE_RESUME).map(SwitchInHook::TaskWork).ok_or_else(missing)
}

fn kprobe() -> HookResult {
    if fs::metadata(PROBES).is_err() {
        return Err("this kernel has no kprobes (CONFIG_KPROBE_EVENTS)".into());
    }
    let symbols = sys::procfs::read_text(SYMBOLS).map_err(|e| format!("{SYMBOLS} cannot be read: {e}"))?;
    let function = switched_in(&symbols);
    let missing = || format!("no function {SWITCHED_IN} is in {SYMBOLS}");
    function.map(|f| SwitchInHook::Kprobe(f.into())).ok_or_else(missing)
}

/// The name of [`SWITCHED_IN`] in the kernel's list of symbols.
fn switched_in(symbols: &str) -> Option<&str> {
    let names = symbols.lines().filter_map(|line| line.split_ascii_whitespace().nth(2));
    let mut clones = names.filter(|name| {
        let suffix = name.strip_prefix(SWITCHED_IN);
        suffix.is_some_and(|s| s.is_empty() || s.starts_with('.') && !s.contains("cold"))
    });
    clones.next()
}

/// The object of a hook; for a task work with the number of the kernel's function in it.
fn object(hook: &SwitchInHook) -> Cow<'static, [u8]> {
    let SwitchInHook::TaskWork(function) = hook else {
        return Cow::Borrowed(Variant::Linux5_8.object());
    };
    let mut object = Variant::Current.object().to_vec();
    // Instructions lie on multiples of their size.
    for instruction in object.as_chunks_mut::<8>().0 {
        if instruction[0] == CALL && instruction[4..] == PLACEHOLDER {
            instruction[1] = KERNEL_FUNCTION;
            instruction[4..].copy_from_slice(&function.to_le_bytes());
        }
    }
    Cow::Owned(object)
}

/// Programs that the kernel accepted.
pub struct LoadedSwitchIn {
    pub bpf: Ebpf,
    pub hook: SwitchInHook,
    /// Why no better hook is used.
    pub missing: Vec<String>,
}

/// Loads the programs for CPU time and those for off-CPU time, with the first hook that this kernel accepts.
///
/// # Errors
/// There is none: what each is missing, or what the kernel said of the last.
pub fn load_first(variants: &[Variant], sizes: MapSizes, children: bool) -> Result<LoadedSwitchIn> {
    let mut missing = Vec::new();
    let mut refusal = None;
    let types = kernel_types();
    for hook in hooks(variants, &types) {
        let hook = match hook {
            Ok(hook) => hook,
            Err(why) => {
                missing.push(why);
                continue;
            }
        };
        let loaded = object::load(&object(&hook), sizes, children).and_then(|mut bpf| {
            load(&mut bpf, &hook, &types)?;
            Ok(bpf)
        });
        match loaded {
            Ok(bpf) => return Ok(LoadedSwitchIn { bpf, hook, missing }),
            Err(e) => {
                missing.push(format!("{hook} is refused: {}", e.why));
                refusal = Some(e);
            }
        }
    }
    Err(refusal.unwrap_or_else(|| unsupported(&missing)))
}

/// Programs of both objects, and their events.
const AT_SWITCHES: [(&str, &str); 2] = [("waking", "sched_waking"), ("switched", "sched_switch")];
/// Only of the one for a kprobe.
const AT_END: (&str, &str) = ("freed", "sched_process_free");
const AT_PROBE: &str = "switched_in";

fn load(bpf: &mut Ebpf, hook: &SwitchInHook, types: &KernelTypes) -> Result<()> {
    if let SwitchInHook::TaskWork(_) = hook {
        let types = types
            .as_ref()
            .map_err(|e| Error::new(ErrorKind::Unsupported, LOAD).why(e.clone()))?;
        for (name, event) in AT_SWITCHES {
            let program: &mut BtfTracePoint = object::program(bpf, name)?;
            program.load(event, types).map_err(|e| bpf_error(LOAD, e))?;
        }
        return Ok(());
    }
    for (name, _) in AT_SWITCHES.into_iter().chain([AT_END]) {
        let program: &mut RawTracePoint = object::program(bpf, name)?;
        program.load().map_err(|e| bpf_error(LOAD, e))?;
    }
    let program: &mut KProbe = object::program(bpf, AT_PROBE)?;
    program.load().map_err(|e| bpf_error(LOAD, e))
}

/// Attaches the programs that [`load_first`] has loaded.
///
/// # Errors
/// The kernel refuses it.
pub(super) fn attach(bpf: &mut Ebpf, hook: &SwitchInHook) -> Result<()> {
    let SwitchInHook::Kprobe(function) = hook else {
        for (name, _) in AT_SWITCHES {
            let program: &mut BtfTracePoint = object::program(bpf, name)?;
            program.attach().map_err(|e| bpf_error(LOAD, e))?;
        }
        return Ok(());
    };
    for (name, event) in AT_SWITCHES.into_iter().chain([AT_END]) {
        let program: &mut RawTracePoint = object::program(bpf, name)?;
        program.attach(event).map_err(|e| bpf_error(LOAD, e))?;
    }
    let program: &mut KProbe = object::program(bpf, AT_PROBE)?;
    program.attach(function, 0).map_err(|e| bpf_error(LOAD, e))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_function_has_any_suffix_but_that_of_its_cold_part() {
        let symbols = "0000000000000000 t __pfx_finish_task_switch.isra.0\n\
                       0000000000000000 t finish_task_switch.isra.0.cold\n\
                       0000000000000000 t finish_task_switch_not\n\
                       0000000000000000 t finish_task_switch.isra.0\n\
                       0000000000000000 t schedule_tail [module]\n";
        assert_eq!(switched_in(symbols), Some("finish_task_switch.isra.0"));
        assert_eq!(
            switched_in("ffffffffab0b5b80 t finish_task_switch"),
            Some("finish_task_switch")
        );
        assert_eq!(switched_in("ffffffffab0b5b80 t schedule"), None);
        assert_eq!(switched_in("finish_task_switch"), None);
    }
}

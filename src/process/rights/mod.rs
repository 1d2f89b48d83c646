//! Rights: what this user lacks, which feature that stops, and what to type.
//!
//! The one place of such knowledge: `doctor` shows all of it, and every refusal of the kernel is explained from here.
//! The rules are pure functions of [`Facts`] and [`Target`].

use std::io;

use super::credentials::{Cap, Caps};
use crate::error::{Error, Kind};
use crate::sample::Pid;

pub mod facts;

pub use facts::{Facts, Lockdown, Target};

/// Oldest kernel on which the BPF program loads: it calls `bpf_ringbuf_reserve_dynptr`.
const OLDEST_FOR_BPF: (u32, u32) = (5, 19);

/// Something that is lacking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// The feature that does not work without it.
    pub stops: &'static str,
    pub why: String,
    /// What to type or to change.
    pub mend: String,
}

impl Lack {
    fn new(stops: &'static str, why: impl Into<String>, mend: impl Into<String>) -> Lack {
        Lack {
            stops,
            why: why.into(),
            mend: mend.into(),
        }
    }

    /// The lack as a failure of `what`.
    pub fn error(self, what: impl Into<String>) -> Error {
        Error::new(Kind::NotPermitted, what).why(self.why).hint(self.mend)
    }
}

/// Features as doctor names them.
pub const EBPF: &str = "eBPF sampling";
pub const OTHERS: &str = "reading other processes";
pub const PTRACE: &str = "ptrace sampling";
pub const KERNEL_NAMES: &str = "names of kernel functions";

/// What stops eBPF sampling, the first cause first.
pub fn ebpf(f: &Facts) -> Vec<Lack> {
    let mut lacks = Vec::new();
    if f.perf_event_paranoid.is_none() {
        lacks.push(Lack::new(
            EBPF,
            "this kernel has no perf events (or /proc is not mounted)",
            "use a kernel with CONFIG_PERF_EVENTS",
        ));
    }
    if f.kernel < OLDEST_FOR_BPF {
        lacks.push(Lack::new(
            EBPF,
            format!("Linux {}.{} is too old: 5.19 is needed", f.kernel.0, f.kernel.1),
            "use a newer kernel",
        ));
    }
    let missing = missing(f, &[Cap::Bpf, Cap::Perfmon]);
    lacks.extend(get_caps(f, EBPF, &missing));
    if f.lockdown == Lockdown::Confidentiality {
        lacks.push(Lack::new(
            EBPF,
            "the kernel is locked down (confidentiality): BPF programs may not read kernel memory",
            "boot with lockdown=integrity on the kernel's command line",
        ));
    }
    // Programs in the kernel see the host's process numbers, and would take no sample of the numbers that are known here.
    if f.inner_pid_ns && lacks.is_empty() {
        lacks.push(Lack::new(
            EBPF,
            "nativeprof runs in a PID namespace of its own (a container), where process numbers are not those of the kernel",
            "nativeprof attach PID   on the host, or in a container that has the host's PID namespace",
        ));
    }
    lacks
}

/// What explains that the kernel refused a call that eBPF sampling needs, with this error.
pub fn refused(f: &Facts, error: &io::Error) -> Lack {
    if let Some(lack) = ebpf(f).into_iter().next() {
        return lack;
    }
    let paranoid = f.perf_event_paranoid.unwrap_or(0);
    if paranoid >= 3 && !f.permitted.has(Cap::SysAdmin) {
        return Lack::new(
            EBPF,
            format!("kernel.perf_event_paranoid is {paranoid}, at which this kernel asks for CAP_SYS_ADMIN"),
            "sudo sysctl kernel.perf_event_paranoid=2",
        );
    }
    if f.seccomp {
        return Lack::new(
            EBPF,
            format!("a seccomp filter forbids the system call ({error})"),
            match f.container {
                Some("Docker" | "Podman") => "start the container with --security-opt seccomp=unconfined",
                Some("Kubernetes") => "give the pod securityContext.seccompProfile.type: Unconfined",
                _ => "start it outside of this sandbox",
            },
        );
    }
    let locked = f.memlock.is_some_and(|kb| kb < 1024) && !f.permitted.has(Cap::IpcLock);
    if locked && error.raw_os_error() == Some(libc::EPERM) {
        return Lack::new(
            EBPF,
            format!("only {} KB of memory may be locked", f.memlock.unwrap_or(0)),
            "ulimit -l 8192",
        );
    }
    Lack::new(
        EBPF,
        format!("{error}, though all capabilities are there: a security module (SELinux, AppArmor) may forbid it"),
        "sudo dmesg | tail   tells which one",
    )
}

/// What stops us from reading memory of processes that are not our own.
pub fn others(f: &Facts) -> Option<Lack> {
    get_caps(f, OTHERS, &missing(f, &[Cap::SysPtrace]))
}

/// What stops us from seeing the addresses in /proc/kallsyms (`kallsyms_show_value`, kernel/ksyms_common.c, Linux 6.18).
pub fn kernel_names(f: &Facts) -> Option<Lack> {
    if f.kptr_restrict == 0 && f.perf_event_paranoid.is_some_and(|p| p <= 1) {
        return None;
    }
    if f.kptr_restrict > 1 {
        let why = format!(
            "kernel.kptr_restrict is {}: addresses are hidden from everyone",
            f.kptr_restrict
        );
        return Some(Lack::new(KERNEL_NAMES, why, "sudo sysctl kernel.kptr_restrict=1"));
    }
    get_caps(f, KERNEL_NAMES, &missing(f, &[Cap::Syslog]))
}

/// What stops us from reading the memory of this process; asked of a live one.
pub fn memory(pid: Pid) -> Option<Lack> {
    memory_of(&Facts::read(), &Target::read(pid)?)
}

/// As [`memory`], of facts that are at hand.
pub fn memory_of(f: &Facts, t: &Target) -> Option<Lack> {
    access(f, t, OTHERS)
}

/// What stops us from tracing this process; asked of a live one. `None` if it may be traced, or has ended.
pub fn ptrace(pid: Pid) -> Option<Lack> {
    ptrace_of(&Facts::read(), &Target::read(pid)?)
}

/// As [`ptrace`], of facts that are at hand.
pub fn ptrace_of(f: &Facts, t: &Target) -> Option<Lack> {
    if t.kernel_thread {
        let why = format!("{} is a thread of the kernel", t.pid);
        return Some(Lack::new(PTRACE, why, "choose a process"));
    }
    if t.tracer != 0 {
        return Some(Lack::new(
            PTRACE,
            format!(
                "process {} is traced by process {}, and there can be one tracer only",
                t.pid, t.tracer
            ),
            "end that debugger, or use --backend ebpf",
        ));
    }
    access(f, t, PTRACE)
}

/// The kernel's rules of PTRACE_MODE_ATTACH_REALCREDS (ptrace(2); `__ptrace_may_access`, kernel/ptrace.c, and
/// `yama_ptrace_access_check`, security/yama/yama_lsm.c, Linux 6.18), which guard tracing and process_vm_readv alike.
fn access(f: &Facts, t: &Target, stops: &'static str) -> Option<Lack> {
    let pid = t.pid;
    if f.inner_user_ns && t.other_user_ns {
        return Some(Lack::new(
            stops,
            format!("process {pid} lives in another user namespace, where our rights do not count"),
            "start it outside of the container, with sudo",
        ));
    }
    let scope = f.ptrace_scope.unwrap_or(0);
    if scope >= 3 && !t.descends {
        return Some(Lack::new(
            stops,
            "kernel.yama.ptrace_scope is 3: no process may look into another, until the next boot",
            "set kernel.yama.ptrace_scope to 1 in /etc/sysctl.d and boot again",
        ));
    }
    if f.permitted.has(Cap::SysPtrace) {
        return None;
    }
    let why = if t.uids != [f.uid; 3] {
        format!("process {pid} belongs to another user (uid {})", t.uids[0])
    } else if !t.dumpable {
        format!("process {pid} is protected from its own user (it has a file with privileges, or asked for it)")
    } else if !f.permitted.holds(t.permitted) {
        format!("process {pid} has capabilities that we lack")
    } else if scope == 2 || (scope == 1 && !t.descends) {
        let only = if scope == 1 {
            "only a parent"
        } else {
            "only CAP_SYS_PTRACE"
        };
        let why = format!("kernel.yama.ptrace_scope is {scope}: {only} may look into process {pid}");
        let mend = format!(
            "sudo {} attach {pid}   or, for all: sudo sysctl kernel.yama.ptrace_scope=0",
            f.exe
        );
        let reachable = f.bounding.has(Cap::SysPtrace) && !f.no_new_privs;
        return Some(match get_caps(f, stops, &[Cap::SysPtrace]) {
            Some(lack) if !reachable => Lack { why, ..lack },
            _ => Lack::new(stops, why, mend),
        });
    } else {
        return None;
    };
    let lack = get_caps(f, stops, &[Cap::SysPtrace])?;
    let plain = f.bounding.has(Cap::SysPtrace) && !f.no_new_privs && f.uid != 0;
    Some(Lack {
        mend: if plain {
            format!("sudo {} attach {pid}", f.exe)
        } else {
            lack.mend
        },
        why: format!("{why}; that takes CAP_SYS_PTRACE"),
        ..lack
    })
}

/// Those of the capabilities that are lacking. CAP_SYS_ADMIN stands for the newer two (capabilities(7)). Those of an
/// inner user namespace do not count for what belongs to the whole machine.
fn missing(f: &Facts, wanted: &[Cap]) -> Vec<Cap> {
    let stands_for = |cap| matches!(cap, Cap::Bpf | Cap::Perfmon) && f.permitted.has(Cap::SysAdmin);
    let whole_machine = |cap| !matches!(cap, Cap::SysPtrace);
    let lacks = |cap: &Cap| {
        let has = f.permitted.has(*cap) || stands_for(*cap);
        !has || (f.inner_user_ns && whole_machine(*cap))
    };
    wanted.iter().copied().filter(lacks).collect()
}

/// How to get these capabilities; `None` if the list is empty.
fn get_caps(f: &Facts, stops: &'static str, caps: &[Cap]) -> Option<Lack> {
    let first = caps.first()?;
    let names: Vec<_> = caps.iter().map(|c| c.name()).collect();
    let names = match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => first.name().to_string(),
    };
    let lack = |why: String, mend: String| Some(Lack::new(stops, why, mend));
    if f.inner_user_ns && *first != Cap::SysPtrace {
        let mend = match f.container {
            Some("Podman") => "run the container as root: sudo podman run --cap-add=BPF,PERFMON,SYS_PTRACE ...",
            Some("Docker") => {
                "run the container with --userns=host --cap-add=BPF --cap-add=PERFMON --cap-add=SYS_PTRACE"
            }
            _ => "start it outside of the container, with sudo",
        };
        return lack(
            format!("{names} do not count in a user namespace (a rootless container, or unshare)"),
            mend.into(),
        );
    }
    if !f.bounding.holds(Caps::of(caps)) {
        // All that sampling needs, so that one start of the container is enough.
        let mut add = vec!["BPF", "PERFMON", "SYS_PTRACE"];
        for name in caps.iter().map(|c| c.name().trim_start_matches("CAP_")) {
            if !add.contains(&name) {
                add.push(name);
            }
        }
        return match f.container {
            Some(kind) => lack(
                format!("this {kind} container was started without {names}"),
                match kind {
                    "Kubernetes" => format!("securityContext: {{capabilities: {{add: [{}]}}}}", add.join(", ")),
                    "LXC" => "take them off lxc.cap.drop, or start it outside of the container".into(),
                    _ => {
                        let add: Vec<_> = add.iter().map(|name| format!("--cap-add={name}")).collect();
                        format!("{} run {} ...", kind.to_lowercase(), add.join(" "))
                    }
                },
            ),
            None => lack(
                format!("{names} cannot be had in this session, even with sudo (they are not in its bounding set)"),
                "start it from a login shell; a systemd unit needs CapabilityBoundingSet=CAP_BPF CAP_PERFMON CAP_SYS_PTRACE"
                    .into(),
            ),
        };
    }
    if f.uid == 0 {
        return lack(
            format!("root has given up {names} here"),
            "start it from a login shell of root".into(),
        );
    }
    if f.no_new_privs {
        return lack(
            format!("this user lacks {names}, and no_new_privs keeps this session from getting them"),
            "start it with sudo from another session".into(),
        );
    }
    lack(
        format!("this user lacks {names}"),
        format!(
            "sudo {exe} ...   or, for good: sudo setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_syslog+ep $(command -v {exe})",
            exe = f.exe
        ),
    )
}

#[cfg(test)]
mod tests;

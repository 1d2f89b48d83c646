//! Privileges: which ones this user is missing, which features need them, and how to get them.
//!
//! The only place with this knowledge: `doctor` shows all of it, and every refusal of the kernel is explained from
//! here.
//! The rules are pure functions of [`SystemFacts`] and [`TargetFacts`].

use std::io;

use super::credentials::{Cap, Caps};
use crate::error::{Error, ErrorKind};
use crate::event::Pid;

pub mod host;

pub use crate::privileges::facts::{Lockdown, SystemFacts, TargetFacts};

/// A missing privilege.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingPrivilege {
    /// The feature that does not work without it.
    pub feature: &'static str,
    pub reason: String,
    /// What to type or to change.
    pub fix: String,
}

impl MissingPrivilege {
    fn new(feature: &'static str, reason: impl Into<String>, fix: impl Into<String>) -> MissingPrivilege {
        MissingPrivilege {
            feature,
            reason: reason.into(),
            fix: fix.into(),
        }
    }

    /// An error for `what`, which fails because of this.
    pub fn error(self, what: impl Into<String>) -> Error {
        Error::new(ErrorKind::NotPermitted, what)
            .why(self.reason)
            .hint(self.fix)
    }
}

/// Capabilities of the file with which every user can sample every process.
const FILE_CAPABILITIES: &str = "cap_bpf,cap_perfmon,cap_sys_ptrace,cap_syslog+ep";

/// What a user wants to run, for the advice on how to get capabilities: all that it needs is named at once, so that a container
/// has to be restarted only once.
struct Purpose {
    feature: &'static str,
    /// Capabilities that it needs in any case.
    all: &'static [Cap],
    /// Its command, after `sudo nativeprof `.
    command: &'static str,
    /// Whether ordinary users run it: capabilities of the file are an alternative then.
    by_users: bool,
}

/// Sampling of a process, for this feature.
const fn sampling(feature: &'static str) -> Purpose {
    Purpose {
        feature,
        all: &[Cap::Bpf, Cap::Perfmon, Cap::SysPtrace],
        command: "...",
        by_users: true,
    }
}

/// Features as doctor names them.
pub const EBPF: &str = "eBPF sampling";
pub const OTHER_PROCESSES: &str = "reading other processes";
pub const PTRACE: &str = "ptrace sampling";
pub const KERNEL_NAMES: &str = "kernel symbols";

/// What prevents eBPF sampling, the first cause first.
pub fn ebpf(f: &SystemFacts) -> Vec<MissingPrivilege> {
    let mut found = kernel(f);
    let missing = missing(f, &[Cap::Bpf, Cap::Perfmon]);
    found.extend(capability_advice(f, &sampling(EBPF), &missing));
    if found.is_empty() {
        found.extend(inner_pids(
            f,
            "run `nativeprof attach PID` on the host, or in a container that shares the host's PID namespace",
        ));
    }
    found
}

/// What prevents eBPF sampling in this kernel, whatever the user may do.
fn kernel(f: &SystemFacts) -> Vec<MissingPrivilege> {
    let mut found = Vec::new();
    if f.perf_event_paranoid.is_none() {
        found.push(MissingPrivilege::new(
            EBPF,
            "this kernel has no perf events (or /proc is not mounted)",
            "use a kernel built with CONFIG_PERF_EVENTS, and mount /proc",
        ));
    }
    if f.lockdown == Lockdown::Confidentiality {
        found.push(MissingPrivilege::new(
            EBPF,
            "kernel lockdown is in confidentiality mode, so BPF programs may not read kernel memory",
            "boot with the kernel parameter lockdown=integrity",
        ));
    }
    found
}

/// Programs in the kernel see the process numbers of the host, and would sample no process by the numbers known here.
fn inner_pids(f: &SystemFacts, fix: &str) -> Option<MissingPrivilege> {
    f.inner_pid_ns.then(|| {
        MissingPrivilege::new(
            EBPF,
            "nativeprof runs in its own PID namespace (a container), so its PIDs differ from the kernel's",
            fix,
        )
    })
}

/// Explains why the kernel refused a call that eBPF sampling needs with this error.
pub fn explain_refusal(f: &SystemFacts, error: &io::Error) -> MissingPrivilege {
    if let Some(first) = ebpf(f).into_iter().next() {
        return first;
    }
    let paranoid = f.perf_event_paranoid.unwrap_or(0);
    if paranoid >= 3 && !f.permitted.has(Cap::SysAdmin) {
        return MissingPrivilege::new(
            EBPF,
            format!("kernel.perf_event_paranoid is {paranoid}, for which this kernel requires CAP_SYS_ADMIN"),
            "sudo sysctl kernel.perf_event_paranoid=2",
        );
    }
    if f.seccomp {
        return MissingPrivilege::new(
            EBPF,
            format!("a seccomp filter blocks the system call ({error})"),
            match f.container {
                Some("Docker" | "Podman") => "start the container with --security-opt seccomp=unconfined",
                Some("Kubernetes") => "set securityContext.seccompProfile.type: Unconfined in the pod",
                _ => "run nativeprof outside of this sandbox",
            },
        );
    }
    let refused = error.raw_os_error() == Some(libc::EPERM);
    if refused && bpf_maps_are_locked_memory(f) && !f.permitted.has(Cap::SysResource) {
        return MissingPrivilege::new(
            EBPF,
            format!(
                "BPF maps count as locked memory here, of which only {} KB are permitted; CAP_SYS_RESOURCE is needed",
                f.memlock.unwrap_or(0)
            ),
            "ulimit -l unlimited   (as root, before starting nativeprof)",
        );
    }
    let locked = f.memlock.is_some_and(|kb| kb < 1024) && !f.permitted.has(Cap::IpcLock);
    if refused && locked {
        return MissingPrivilege::new(
            EBPF,
            format!("the locked-memory limit is only {} KB", f.memlock.unwrap_or(0)),
            "ulimit -l 8192",
        );
    }
    MissingPrivilege::new(
        EBPF,
        format!("{error} despite all capabilities; a security module (SELinux, AppArmor) may forbid it"),
        "check `sudo dmesg | tail`",
    )
}

/// Do BPF maps count towards a limit of locked memory? Before Linux 5.11 (kernel/bpf/syscall.c, bpf_map_charge_init).
pub fn bpf_maps_are_locked_memory(f: &SystemFacts) -> bool {
    f.kernel < (5, 11) && f.memlock.is_some()
}

/// What prevents reading memory of processes of other users.
pub fn other_processes(f: &SystemFacts) -> Option<MissingPrivilege> {
    capability_advice(f, &sampling(OTHER_PROCESSES), &missing(f, &[Cap::SysPtrace]))
}

/// What hides the addresses in /proc/kallsyms (`kallsyms_show_value`, kernel/ksyms_common.c, Linux 6.18).
pub fn kernel_names(f: &SystemFacts) -> Option<MissingPrivilege> {
    if f.kptr_restrict == 0 && f.perf_event_paranoid.is_some_and(|p| p <= 1) {
        return None;
    }
    if f.kptr_restrict > 1 {
        let reason = format!(
            "kernel.kptr_restrict is {}, which hides kernel addresses from all users",
            f.kptr_restrict
        );
        return Some(MissingPrivilege::new(
            KERNEL_NAMES,
            reason,
            "sudo sysctl kernel.kptr_restrict=1",
        ));
    }
    capability_advice(f, &sampling(KERNEL_NAMES), &missing(f, &[Cap::Syslog]))
}

/// What prevents reading the memory of this live process.
pub fn memory(pid: Pid) -> Option<MissingPrivilege> {
    memory_of(&SystemFacts::read(), &TargetFacts::read(pid)?)
}

/// As [`memory`], from given facts.
pub fn memory_of(f: &SystemFacts, t: &TargetFacts) -> Option<MissingPrivilege> {
    check_access(f, t, OTHER_PROCESSES)
}

/// What prevents tracing this live process. `None` if it may be traced, or has exited.
pub fn ptrace(pid: Pid) -> Option<MissingPrivilege> {
    ptrace_of(&SystemFacts::read(), &TargetFacts::read(pid)?)
}

/// As [`ptrace`], from given facts.
pub fn ptrace_of(f: &SystemFacts, t: &TargetFacts) -> Option<MissingPrivilege> {
    if t.kernel_thread {
        let reason = format!("{} is a kernel thread", t.pid);
        return Some(MissingPrivilege::new(PTRACE, reason, "choose a user process"));
    }
    if t.tracer != 0 {
        return Some(MissingPrivilege::new(
            PTRACE,
            format!(
                "process {} is already traced by process {}, and only one tracer is possible",
                t.pid, t.tracer
            ),
            "stop that tracer, or use --backend ebpf",
        ));
    }
    check_access(f, t, PTRACE)
}

/// The kernel's rules of PTRACE_MODE_ATTACH_REALCREDS (ptrace(2); `__ptrace_may_access`, kernel/ptrace.c, and
/// `yama_ptrace_access_check`, security/yama/yama_lsm.c, Linux 6.18), which apply to tracing and process_vm_readv
/// alike.
fn check_access(f: &SystemFacts, t: &TargetFacts, feature: &'static str) -> Option<MissingPrivilege> {
    let pid = t.pid;
    if f.inner_user_ns && t.other_user_ns {
        return Some(MissingPrivilege::new(
            feature,
            format!("process {pid} is in another user namespace, where our privileges do not apply"),
            "run nativeprof outside of the container, with sudo",
        ));
    }
    let scope = f.ptrace_scope.unwrap_or(0);
    if scope >= 3 && !t.descends {
        return Some(MissingPrivilege::new(
            feature,
            "kernel.yama.ptrace_scope is 3: no process may trace another until the next reboot",
            "set kernel.yama.ptrace_scope to 1 in /etc/sysctl.d and reboot",
        ));
    }
    if f.permitted.has(Cap::SysPtrace) {
        return None;
    }
    let reason = if t.uids != [f.uid; 3] {
        format!("process {pid} belongs to another user (uid {})", t.uids[0])
    } else if !t.dumpable {
        format!("process {pid} is not dumpable (its program has privileges, or it called prctl)")
    } else if !f.permitted.holds(t.permitted) {
        format!("process {pid} has capabilities that nativeprof does not have")
    } else if scope == 2 || (scope == 1 && !t.descends) {
        let only = if scope == 1 {
            "only an ancestor"
        } else {
            "only a process with CAP_SYS_PTRACE"
        };
        let reason = format!("kernel.yama.ptrace_scope is {scope}: {only} may trace process {pid}");
        let fix = format!(
            "sudo {} attach {pid}   or, for all processes: sudo sysctl kernel.yama.ptrace_scope=0",
            f.exe
        );
        let reachable = f.bounding.has(Cap::SysPtrace) && !f.no_new_privs;
        return Some(match capability_advice(f, &sampling(feature), &[Cap::SysPtrace]) {
            Some(missing) if !reachable => MissingPrivilege { reason, ..missing },
            _ => MissingPrivilege::new(feature, reason, fix),
        });
    } else {
        return None;
    };
    let missing = capability_advice(f, &sampling(feature), &[Cap::SysPtrace])?;
    let plain = f.bounding.has(Cap::SysPtrace) && !f.no_new_privs && f.uid != 0;
    Some(MissingPrivilege {
        fix: if plain {
            format!("sudo {} attach {pid}", f.exe)
        } else {
            missing.fix
        },
        reason: format!("{reason}; CAP_SYS_PTRACE is needed"),
        ..missing
    })
}

/// Those of the capabilities that are missing. CAP_SYS_ADMIN includes the newer two (capabilities(7)). Capabilities in
/// an inner user namespace do not count for what belongs to the machine.
fn missing(f: &SystemFacts, wanted: &[Cap]) -> Vec<Cap> {
    let implied = |cap| matches!(cap, Cap::Bpf | Cap::Perfmon) && f.permitted.has(Cap::SysAdmin);
    let needs_init_ns = |cap| !matches!(cap, Cap::SysPtrace);
    let is_missing = |cap: &Cap| {
        let has = f.permitted.has(*cap) || implied(*cap);
        !has || (f.inner_user_ns && needs_init_ns(*cap))
    };
    wanted.iter().copied().filter(is_missing).collect()
}

/// How to get these capabilities for a purpose; `None` if the list is empty.
fn capability_advice(f: &SystemFacts, purpose: &Purpose, caps: &[Cap]) -> Option<MissingPrivilege> {
    let first = caps.first()?;
    let names: Vec<_> = caps.iter().map(|c| c.name()).collect();
    let names = match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => first.name().to_string(),
    };
    let advice = |reason: String, fix: String| Some(MissingPrivilege::new(purpose.feature, reason, fix));
    let others = caps.iter().filter(|cap| !purpose.all.contains(cap));
    let wanted: Vec<&str> = purpose.all.iter().chain(others).map(|cap| cap.name()).collect();
    let short: Vec<&str> = wanted.iter().map(|name| name.trim_start_matches("CAP_")).collect();
    let options = || {
        short
            .iter()
            .map(|name| format!("--cap-add={name}"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    if f.inner_user_ns && *first != Cap::SysPtrace {
        let fix = match f.container {
            Some("Podman") => format!(
                "run the container as root: sudo podman run --cap-add={} ...",
                short.join(",")
            ),
            Some("Docker") => format!("run the container with --userns=host {}", options()),
            _ => "run nativeprof outside of the container, with sudo".into(),
        };
        return advice(
            format!("{names} have no effect in a user namespace (a rootless container, or unshare)"),
            fix,
        );
    }
    if !f.bounding.holds(Caps::of(caps)) {
        return match f.container {
            Some(kind) => advice(
                format!("this {kind} container was started without {names}"),
                match kind {
                    "Kubernetes" => format!("securityContext: {{capabilities: {{add: [{}]}}}}", short.join(", ")),
                    "LXC" => "remove them from lxc.cap.drop, or run nativeprof outside of the container".into(),
                    _ => format!("{} run {} ...", kind.to_lowercase(), options()),
                },
            ),
            None => advice(
                format!(
                    "{names} cannot be obtained in this session, even with sudo (not in its capability bounding set)"
                ),
                format!(
                    "run it from a login shell, or in a systemd unit set CapabilityBoundingSet={}",
                    wanted.join(" ")
                ),
            ),
        };
    }
    if f.uid == 0 {
        return advice(
            format!("root does not have {names} here"),
            "run it from a root login shell".into(),
        );
    }
    if f.no_new_privs {
        return advice(
            format!("this user does not have {names}, and no_new_privs prevents this session from gaining them"),
            "run it with sudo from another session".into(),
        );
    }
    let mut fix = format!("sudo {} {}", f.exe, purpose.command);
    if purpose.by_users {
        fix += &format!(
            "   or, permanently: sudo setcap {FILE_CAPABILITIES} {path}",
            path = f.exe_path()
        );
    }
    advice(format!("this user does not have {names}"), fix)
}

/// The error for a program that is setuid or setgid: all who may execute it could read and write files, and run
/// commands, as another user. Capabilities permit nothing but sampling.
pub fn setuid_refused(f: &SystemFacts) -> Error {
    let path = f.exe_path();
    Error::new(ErrorKind::NotPermitted, "a setuid nativeprof does nothing")
        .why("every user could read and write files, and run commands, with the privileges of another user")
        .hint(format!(
            "sudo chmod ug-s {path}; sudo setcap {FILE_CAPABILITIES} {path}   or use sudo"
        ))
}

/// The error for a process that the kernel does not let us trace.
pub fn trace_refused(pid: Pid, e: &io::Error) -> Error {
    let what = format!("cannot trace process {pid}");
    match ptrace(pid) {
        Some(missing) => missing.error(what),
        None => Error::new(ErrorKind::NotPermitted, what)
            .why(format!("{e}: a security module or a sandbox may forbid it"))
            .hint("run `nativeprof doctor` to see what works on this machine"),
    }
}

#[cfg(test)]
mod tests;

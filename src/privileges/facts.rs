//! Facts that decide about privileges, read from /proc and /sys.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::event::Pid;
use crate::privileges::credentials::Caps;
use crate::sys;
use crate::sys::procfs::{field, innermost_id, is_kernel_thread, parent, read_text, user_ids};

/// The kernel's type information (BTF), from which offsets in its structures are filled in.
pub const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";
/// Inodes of the initial namespaces (`PROC_USER_INIT_INO`, `PROC_PID_INIT_INO`, include/linux/proc_ns.h, Linux 6.18).
const FIRST_USER_NS: &str = "user:[4026531837]";
const FIRST_PID_NS: &str = "pid:[4026531836]";
/// Maximum number of ancestors that are read.
const MAX_ANCESTORS: usize = 1000;

/// How far the kernel is locked down against root (kernel_lockdown(7)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lockdown {
    #[default]
    None,
    Integrity,
    Confidentiality,
}

/// This machine and this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemFacts {
    /// Effective user.
    pub uid: u32,
    pub permitted: Caps,
    pub bounding: Caps,
    pub no_new_privs: bool,
    /// A seccomp filter is active.
    pub seccomp: bool,
    /// Not the initial user or PID namespace: a container, or `unshare`.
    pub inner_user_ns: bool,
    pub inner_pid_ns: bool,
    /// The likely kind of container.
    pub container: Option<&'static str>,
    pub kernel: (u32, u32),
    /// `None`: a kernel without perf events.
    pub perf_event_paranoid: Option<i32>,
    /// `None`: a kernel without Yama.
    pub ptrace_scope: Option<u32>,
    pub kptr_restrict: u32,
    pub lockdown: Lockdown,
    /// The kernel has BTF.
    pub btf: bool,
    /// Kibibytes of memory that this process may lock; `None`: unlimited.
    pub memlock: Option<u64>,
    /// This program's file, as one would type it.
    pub exe: String,
}

impl SystemFacts {
    /// Reads all facts; what cannot be read has the usual setting.
    pub fn read() -> SystemFacts {
        let text = |path: &str| read_text(path).unwrap_or_default();
        let status = text("/proc/self/status");
        let caps = |name| Caps(u64::from_str_radix(field(&status, name).unwrap_or_default(), 16).unwrap_or(0));
        let link = |path: &str| fs::read_link(path).map(|l| l.to_string_lossy().into_owned()).ok();
        let number = |path: &str| text(path).trim().parse::<u32>().ok();
        SystemFacts {
            uid: sys::process::effective_uid(),
            permitted: caps("CapPrm"),
            bounding: caps("CapBnd"),
            no_new_privs: field(&status, "NoNewPrivs") == Some("1"),
            seccomp: field(&status, "Seccomp") == Some("2"),
            inner_user_ns: link("/proc/self/ns/user").is_some_and(|ns| ns != FIRST_USER_NS),
            inner_pid_ns: link("/proc/self/ns/pid").is_some_and(|ns| ns != FIRST_PID_NS),
            container: container(
                &|path| fs::symlink_metadata(path).is_ok(),
                std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(),
                &text("/proc/self/cgroup"),
            ),
            kernel: kernel_version(&text("/proc/sys/kernel/osrelease")),
            perf_event_paranoid: sys::perf::paranoid_level(),
            ptrace_scope: number("/proc/sys/kernel/yama/ptrace_scope"),
            kptr_restrict: number("/proc/sys/kernel/kptr_restrict").unwrap_or(0),
            lockdown: lockdown(&text("/sys/kernel/security/lockdown")),
            btf: fs::metadata(KERNEL_TYPES).is_ok(),
            memlock: memlock(&text("/proc/self/limits")),
            exe: typed_name(),
        }
    }
}

impl SystemFacts {
    /// This program's file, as an argument in a shell.
    pub fn exe_path(&self) -> String {
        if self.exe.contains('/') {
            self.exe.clone()
        } else {
            format!("$(command -v {})", self.exe)
        }
    }
}

/// What to type after `sudo` to run this program: sudo has its own PATH.
fn typed_name() -> String {
    let typed = std::env::args_os().next().unwrap_or_else(|| "nativeprof".into());
    let typed = typed.to_string_lossy().into_owned();
    let path = std::env::current_exe().unwrap_or_default();
    let common = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin"];
    let found = path
        .parent()
        .is_some_and(|directory| common.iter().any(|c| directory.ends_with(c)));
    if typed.contains('/') || found || path.as_os_str().is_empty() {
        typed
    } else {
        path.to_string_lossy().into_owned()
    }
}

/// A process to be sampled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetFacts {
    pub pid: Pid,
    /// Real, effective and saved user, then group.
    pub uids: [u32; 3],
    pub gids: [u32; 3],
    pub permitted: Caps,
    /// The process that traces it; 0: none.
    pub tracer: Pid,
    /// Its number in its own PID namespace, if different.
    pub inner_pid: Option<Pid>,
    /// It is in another namespace than we are; false if unknown.
    pub other_user_ns: bool,
    pub other_mount_ns: bool,
    /// Its own user may read it (no `PR_SET_DUMPABLE`, and no file with privileges).
    pub dumpable: bool,
    /// We are one of its ancestors.
    pub descends: bool,
    pub kernel_thread: bool,
}

impl TargetFacts {
    /// Reads the facts; `None` if there is no such process.
    pub fn read(pid: Pid) -> Option<TargetFacts> {
        let status = fs::read(format!("/proc/{pid}/status")).ok()?;
        let status = String::from_utf8_lossy(&status);
        let other_ns = |kind: &str| {
            let link = |who: String| fs::read_link(format!("/proc/{who}/ns/{kind}")).ok();
            link(pid.to_string()).is_some_and(|ns| Some(ns) != link("self".into()))
        };
        let uids = user_ids(&status, "Uid");
        let owner = fs::metadata(format!("/proc/{pid}/stat")).ok()?.uid();
        Some(TargetFacts {
            pid,
            uids,
            gids: user_ids(&status, "Gid"),
            permitted: Caps(u64::from_str_radix(field(&status, "CapPrm").unwrap_or_default(), 16).unwrap_or(0)),
            tracer: field(&status, "TracerPid").and_then(|t| t.parse().ok()).unwrap_or(0),
            inner_pid: innermost_id(&status).filter(|inner| *inner != pid),
            other_user_ns: other_ns("user"),
            other_mount_ns: other_ns("mnt"),
            // The kernel gives the files, but not the directory, of a process that is not dumpable to root
            // (`task_dump_owner`, fs/proc/base.c, Linux 6.18).
            dumpable: owner == uids[1],
            descends: descends(pid),
            kernel_thread: is_kernel_thread(pid),
        })
    }
}

/// The number that a process has in its own PID namespace.
pub fn namespace_pid(pid: Pid) -> Option<Pid> {
    let status = fs::read(format!("/proc/{pid}/status")).ok()?;
    innermost_id(&String::from_utf8_lossy(&status))
}

fn descends(pid: Pid) -> bool {
    let mut at = pid;
    for _ in 0..MAX_ANCESTORS {
        if at == std::process::id() {
            return true;
        }
        match parent(at) {
            None | Some(0) => return false,
            Some(parent) => at = parent,
        }
    }
    false
}

fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The chosen one of `none [integrity] confidentiality`.
fn lockdown(text: &str) -> Lockdown {
    if text.contains("[confidentiality]") {
        Lockdown::Confidentiality
    } else if text.contains("[integrity]") {
        Lockdown::Integrity
    } else {
        Lockdown::None
    }
}

/// `Max locked memory         8388608              8388608              bytes`
fn memlock(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max locked memory"))?;
    let bytes: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    Some(bytes / 1024)
}

fn container(there: &dyn Fn(&str) -> bool, kubernetes: bool, cgroup: &str) -> Option<&'static str> {
    if kubernetes || cgroup.contains("kubepods") {
        Some("Kubernetes")
    } else if there("/run/.containerenv") || cgroup.contains("libpod") {
        Some("Podman")
    } else if there("/.dockerenv") || cgroup.contains("/docker") {
        Some("Docker")
    } else if cgroup.contains("/lxc") {
        Some("LXC")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_kernel_are_parsed() {
        assert_eq!(kernel_version("6.18.44-fc-v595\n"), (6, 18));
        assert_eq!(kernel_version("5.4\n"), (5, 4));
        assert_eq!(kernel_version(""), (0, 0));
        assert_eq!(lockdown("none [integrity] confidentiality\n"), Lockdown::Integrity);
        assert_eq!(
            lockdown("none integrity [confidentiality]\n"),
            Lockdown::Confidentiality
        );
        assert_eq!(lockdown("[none] integrity confidentiality\n"), Lockdown::None);
        let limits = "Max processes             unlimited            unlimited            processes\n\
                      Max locked memory         65536                65536                bytes\n";
        assert_eq!(memlock(limits), Some(64));
        assert_eq!(
            memlock("Max locked memory         unlimited            unlimited            bytes\n"),
            None
        );
        let status = "Name:\tx\nUid:\t1000\t0\t7\t0\nNSpid:\t814\t12\nNoNewPrivs:\t1\n";
        assert_eq!(user_ids(status, "Uid"), [1000, 0, 7]);
        assert_eq!(innermost_id(status), Some(12));
        assert_eq!(field(status, "NoNewPrivs"), Some("1"));
        assert_eq!(field(status, "NoNew"), None);
    }

    #[test]
    fn containers() {
        let check = |file: &str, kubernetes, cgroup, expected| {
            assert_eq!(
                container(&|path| path == file, kubernetes, cgroup),
                expected,
                "{file} {cgroup}"
            );
        };
        check("", false, "0::/user.slice/session-1.scope\n", None);
        check("/.dockerenv", false, "0::/\n", Some("Docker"));
        check("", false, "5:cpu:/docker/0123abcd\n", Some("Docker"));
        check("/run/.containerenv", false, "0::/\n", Some("Podman"));
        check("/.dockerenv", true, "0::/\n", Some("Kubernetes"));
        check("", false, "0::/kubepods/burstable/pod1\n", Some("Kubernetes"));
        check("", false, "0::/lxc.payload.web\n", Some("LXC"));
    }

    #[test]
    fn a_child_and_an_unrelated_process() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let target = TargetFacts::read(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(target.descends && target.dumpable && !target.kernel_thread && target.tracer == 0);
        assert_eq!((target.pid, target.inner_pid), (child.id(), None));
        assert_eq!(target.uids, [sys::process::effective_uid(); 3]);
        assert!(!TargetFacts::read(1).unwrap().descends);
        assert_eq!(TargetFacts::read(0), None);
        assert_eq!(TargetFacts::read(child.id()), None, "it has exited");
    }
}

//! The rules as tables: facts in, lines for the user out.

use super::*;

const ALL: Caps = Caps((1 << 41) - 1);

/// An ordinary user of an ordinary machine.
fn user() -> SystemFacts {
    SystemFacts {
        uid: 1000,
        permitted: Caps::NONE,
        bounding: ALL,
        kernel: (6, 1),
        perf_event_paranoid: Some(2),
        ptrace_scope: Some(1),
        kptr_restrict: 1,
        btf: true,
        memlock: Some(8192),
        exe: "nativeprof".into(),
        ..SystemFacts::default()
    }
}

fn root() -> SystemFacts {
    SystemFacts {
        uid: 0,
        permitted: ALL,
        ..user()
    }
}

/// An ordinary process of the user.
fn own_process() -> TargetFacts {
    TargetFacts {
        pid: 12,
        uids: [1000; 3],
        gids: [1000; 3],
        dumpable: true,
        ..TargetFacts::default()
    }
}

fn text(missing: impl IntoIterator<Item = MissingPrivilege>) -> String {
    let lines: Vec<_> = missing
        .into_iter()
        .map(|m| format!("{} => {}", m.reason, m.fix))
        .collect();
    lines.join("\n")
}

#[track_caller]
fn check(missing: impl IntoIterator<Item = MissingPrivilege>, expected: &str) {
    assert_eq!(text(missing), expected);
}

const DOCKER: &str = "docker run --cap-add=BPF --cap-add=PERFMON --cap-add=SYS_PTRACE ...";
const SUDO: &str = "sudo nativeprof ...   or, permanently: \
                    sudo setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_syslog+ep $(command -v nativeprof)";

#[test]
fn sampling_with_ebpf() {
    check(ebpf(&root()), "");
    let missing = "this user does not have CAP_BPF and CAP_PERFMON";
    check(ebpf(&user()), &format!("{missing} => {SUDO}"));
    let capable = SystemFacts {
        permitted: Caps::of(&[Cap::Bpf, Cap::Perfmon]),
        ..user()
    };
    check(ebpf(&capable), "");
    let old_style = SystemFacts {
        permitted: Caps::of(&[Cap::SysAdmin]),
        ..user()
    };
    check(ebpf(&old_style), "");
    let half = SystemFacts {
        permitted: Caps::of(&[Cap::Bpf]),
        ..user()
    };
    check(ebpf(&half), &format!("this user does not have CAP_PERFMON => {SUDO}"));
    check(
        ebpf(&SystemFacts {
            no_new_privs: true,
            ..user()
        }),
        "this user does not have CAP_BPF and CAP_PERFMON, and no_new_privs prevents this session from gaining them \
         => run it with sudo from another session",
    );
    let old_kernel = SystemFacts {
        kernel: (5, 10),
        ..root()
    };
    check(ebpf(&old_kernel), ""); // tried, not concluded from the version
    check(
        ebpf(&SystemFacts {
            perf_event_paranoid: None,
            lockdown: Lockdown::Confidentiality,
            ..root()
        }),
        "this kernel has no perf events (or /proc is not mounted) => use a kernel built with CONFIG_PERF_EVENTS, and mount /proc\n\
         kernel lockdown is in confidentiality mode, so BPF programs may not read kernel memory \
         => boot with the kernel parameter lockdown=integrity",
    );
    check(
        ebpf(&SystemFacts {
            lockdown: Lockdown::Integrity,
            ..root()
        }),
        "",
    );
}

#[test]
fn containers() {
    // Capabilities that Docker and Podman leave to root.
    let few = Caps(0xa804_25fb);
    let docker = SystemFacts {
        permitted: few,
        bounding: few,
        seccomp: true,
        inner_pid_ns: true,
        container: Some("Docker"),
        ..root()
    };
    let without = "container was started without CAP_BPF and CAP_PERFMON";
    check(ebpf(&docker), &format!("this Docker {without} => {DOCKER}"));
    let all_permitted = SystemFacts {
        permitted: root().permitted,
        bounding: root().bounding,
        ..docker.clone()
    };
    check(
        ebpf(&all_permitted),
        "nativeprof runs in its own PID namespace (a container), so its PIDs differ from the kernel's \
         => run `nativeprof attach PID` on the host, or in a container that shares the host's PID namespace",
    );
    check(
        other_processes(&docker),
        &format!("this Docker container was started without CAP_SYS_PTRACE => {DOCKER}"),
    );
    check(
        kernel_names(&docker),
        "this Docker container was started without CAP_SYSLOG \
         => docker run --cap-add=BPF --cap-add=PERFMON --cap-add=SYS_PTRACE --cap-add=SYSLOG ...",
    );
    let in_container = |kind| SystemFacts {
        container: Some(kind),
        ..docker.clone()
    };
    check(
        ebpf(&in_container("Podman")),
        &format!("this Podman {without} => {}", DOCKER.replace("docker", "podman")),
    );
    check(
        ebpf(&in_container("Kubernetes")),
        &format!("this Kubernetes {without} => securityContext: {{capabilities: {{add: [BPF, PERFMON, SYS_PTRACE]}}}}"),
    );
    check(
        ebpf(&in_container("LXC")),
        &format!("this LXC {without} => remove them from lxc.cap.drop, or run nativeprof outside of the container"),
    );
    let unit = SystemFacts {
        container: None,
        ..docker.clone()
    };
    check(
        ebpf(&unit),
        "CAP_BPF and CAP_PERFMON cannot be obtained in this session, even with sudo (not in its capability bounding set) \
         => run it from a login shell, or in a systemd unit set CapabilityBoundingSet=CAP_BPF CAP_PERFMON CAP_SYS_PTRACE",
    );
    // All capabilities, but only inside the namespace.
    let rootless = SystemFacts {
        inner_user_ns: true,
        container: Some("Podman"),
        ..root()
    };
    check(
        ebpf(&rootless),
        "CAP_BPF and CAP_PERFMON have no effect in a user namespace (a rootless container, or unshare) \
         => run the container as root: sudo podman run --cap-add=BPF,PERFMON,SYS_PTRACE ...",
    );
    check(other_processes(&rootless), "");
    let gave_up = SystemFacts {
        permitted: Caps::NONE,
        ..root()
    };
    check(
        ebpf(&gave_up),
        "root does not have CAP_BPF and CAP_PERFMON here => run it from a root login shell",
    );
}

#[test]
fn refusals() {
    let eperm = io::Error::from_raw_os_error(libc::EPERM);
    let check = |f: SystemFacts, expected: &str| assert_eq!(text([explain_refusal(&f, &eperm)]), expected);
    check(
        user(),
        &format!("this user does not have CAP_BPF and CAP_PERFMON => {SUDO}"),
    );
    let capable = SystemFacts {
        permitted: Caps::of(&[Cap::Bpf, Cap::Perfmon]),
        ..user()
    };
    check(
        SystemFacts {
            perf_event_paranoid: Some(4),
            ..capable.clone()
        },
        "kernel.perf_event_paranoid is 4, for which this kernel requires CAP_SYS_ADMIN \
         => sudo sysctl kernel.perf_event_paranoid=2",
    );
    check(
        SystemFacts {
            seccomp: true,
            container: Some("Docker"),
            ..capable.clone()
        },
        "a seccomp filter blocks the system call (Operation not permitted (os error 1)) \
         => start the container with --security-opt seccomp=unconfined",
    );
    check(
        SystemFacts {
            memlock: Some(64),
            ..capable.clone()
        },
        "the locked-memory limit is only 64 KB => ulimit -l 8192",
    );
    check(
        SystemFacts {
            kernel: (5, 10),
            ..capable
        },
        "BPF maps count as locked memory here, of which only 8192 KB are permitted; CAP_SYS_RESOURCE is needed \
         => ulimit -l unlimited   (as root, before starting nativeprof)",
    );
    check(
        root(),
        "Operation not permitted (os error 1) despite all capabilities; \
         a security module (SELinux, AppArmor) may forbid it => check `sudo dmesg | tail`",
    );
}

#[test]
fn access_to_processes() {
    let check = |f: SystemFacts, t: TargetFacts, expected: &str| {
        assert_eq!(text(memory_of(&f, &t)), expected);
        assert_eq!(text(ptrace_of(&f, &t)), expected);
    };
    let yama = "kernel.yama.ptrace_scope is";
    check(root(), own_process(), "");
    check(
        user(),
        own_process(),
        &format!(
            "{yama} 1: only an ancestor may trace process 12 \
             => sudo nativeprof attach 12   or, for all processes: sudo sysctl kernel.yama.ptrace_scope=0"
        ),
    );
    let child = TargetFacts {
        descends: true,
        ..own_process()
    };
    check(user(), child.clone(), "");
    let open = SystemFacts {
        ptrace_scope: None,
        ..user()
    };
    check(open.clone(), own_process(), "");
    let scope = |n| SystemFacts {
        ptrace_scope: Some(n),
        ..user()
    };
    check(
        scope(2),
        child,
        &format!(
            "{yama} 2: only a process with CAP_SYS_PTRACE may trace process 12 \
             => sudo nativeprof attach 12   or, for all processes: sudo sysctl kernel.yama.ptrace_scope=0"
        ),
    );
    check(
        SystemFacts {
            ptrace_scope: Some(3),
            ..root()
        },
        own_process(),
        &format!(
            "{yama} 3: no process may trace another until the next reboot \
             => set kernel.yama.ptrace_scope to 1 in /etc/sysctl.d and reboot"
        ),
    );
    let of = |uid| TargetFacts {
        uids: [uid; 3],
        ..own_process()
    };
    check(
        open.clone(),
        of(33),
        "process 12 belongs to another user (uid 33); CAP_SYS_PTRACE is needed => sudo nativeprof attach 12",
    );
    check(
        open.clone(),
        TargetFacts {
            uids: [1000, 0, 0],
            ..own_process()
        },
        "process 12 belongs to another user (uid 1000); CAP_SYS_PTRACE is needed => sudo nativeprof attach 12",
    );
    check(
        open.clone(),
        TargetFacts {
            dumpable: false,
            ..own_process()
        },
        "process 12 is not dumpable (its program has privileges, or it called prctl); \
         CAP_SYS_PTRACE is needed => sudo nativeprof attach 12",
    );
    check(
        open.clone(),
        TargetFacts {
            permitted: Caps::of(&[Cap::Syslog]),
            ..own_process()
        },
        "process 12 has capabilities that nativeprof does not have; CAP_SYS_PTRACE is needed => sudo nativeprof attach 12",
    );
    let docker = SystemFacts {
        uid: 0,
        bounding: Caps::NONE,
        container: Some("Docker"),
        ..open.clone()
    };
    check(
        docker,
        own_process(),
        &format!("process 12 belongs to another user (uid 1000); CAP_SYS_PTRACE is needed => {DOCKER}"),
    );
    check(
        SystemFacts {
            no_new_privs: true,
            ..scope(1)
        },
        own_process(),
        &format!("{yama} 1: only an ancestor may trace process 12 => run it with sudo from another session"),
    );
    check(
        SystemFacts {
            inner_user_ns: true,
            ..root()
        },
        TargetFacts {
            other_user_ns: true,
            ..own_process()
        },
        "process 12 is in another user namespace, where our privileges do not apply \
         => run nativeprof outside of the container, with sudo",
    );
}

#[test]
fn what_prevents_tracing_only() {
    let check = |t: TargetFacts, expected: &str| assert_eq!(text(ptrace_of(&root(), &t)), expected);
    check(
        TargetFacts {
            tracer: 77,
            ..own_process()
        },
        "process 12 is already traced by process 77, and only one tracer is possible \
         => stop that tracer, or use --backend ebpf",
    );
    check(
        TargetFacts {
            kernel_thread: true,
            ..own_process()
        },
        "12 is a kernel thread => choose a user process",
    );
}

#[test]
fn names_of_kernel_functions() {
    let with = |f: SystemFacts, restrict, paranoid| SystemFacts {
        kptr_restrict: restrict,
        perf_event_paranoid: Some(paranoid),
        ..f
    };
    check(kernel_names(&with(root(), 1, 2)), "");
    check(kernel_names(&with(user(), 0, 1)), "");
    check(
        kernel_names(&with(user(), 0, 2)),
        &format!("this user does not have CAP_SYSLOG => {SUDO}"),
    );
    check(
        kernel_names(&with(root(), 2, 2)),
        "kernel.kptr_restrict is 2, which hides kernel addresses from all users => sudo sysctl kernel.kptr_restrict=1",
    );
}

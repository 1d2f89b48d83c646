//! The rules as tables: facts in, the lines that a user reads out.

use super::*;

const ALL: Caps = Caps((1 << 41) - 1);

/// A plain user of a plain machine.
fn user() -> Facts {
    Facts {
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
        ..Facts::default()
    }
}

fn root() -> Facts {
    Facts {
        uid: 0,
        permitted: ALL,
        ..user()
    }
}

/// The user's own, plain process.
fn own() -> Target {
    Target {
        pid: 12,
        uids: [1000; 3],
        gids: [1000; 3],
        dumpable: true,
        ..Target::default()
    }
}

fn text(lacks: impl IntoIterator<Item = Lack>) -> String {
    let lines: Vec<_> = lacks.into_iter().map(|l| format!("{} => {}", l.why, l.mend)).collect();
    lines.join("\n")
}

#[track_caller]
fn check(lacks: impl IntoIterator<Item = Lack>, expected: &str) {
    assert_eq!(text(lacks), expected);
}

const DOCKER: &str = "docker run --cap-add=BPF --cap-add=PERFMON --cap-add=SYS_PTRACE ...";
const SUDO: &str = "sudo nativeprof ...   or, for good: \
                    sudo setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_syslog+ep $(command -v nativeprof)";

#[test]
fn sampling_with_ebpf() {
    check(ebpf(&root()), "");
    let lacks = "this user lacks CAP_BPF and CAP_PERFMON";
    check(ebpf(&user()), &format!("{lacks} => {SUDO}"));
    let capable = Facts {
        permitted: Caps::of(&[Cap::Bpf, Cap::Perfmon]),
        ..user()
    };
    check(ebpf(&capable), "");
    let old_style = Facts {
        permitted: Caps::of(&[Cap::SysAdmin]),
        ..user()
    };
    check(ebpf(&old_style), "");
    let half = Facts {
        permitted: Caps::of(&[Cap::Bpf]),
        ..user()
    };
    check(ebpf(&half), &format!("this user lacks CAP_PERFMON => {SUDO}"));
    check(
        ebpf(&Facts {
            no_new_privs: true,
            ..user()
        }),
        "this user lacks CAP_BPF and CAP_PERFMON, and no_new_privs keeps this session from getting them \
         => start it with sudo from another session",
    );
    check(
        ebpf(&Facts {
            kernel: (5, 10),
            ..root()
        }),
        "Linux 5.10 is too old: 5.19 is needed => use a newer kernel",
    );
    check(
        ebpf(&Facts {
            perf_event_paranoid: None,
            lockdown: Lockdown::Confidentiality,
            ..root()
        }),
        "this kernel has no perf events (or /proc is not mounted) => use a kernel with CONFIG_PERF_EVENTS\n\
         the kernel is locked down (confidentiality): BPF programs may not read kernel memory \
         => boot with lockdown=integrity on the kernel's command line",
    );
    check(
        ebpf(&Facts {
            lockdown: Lockdown::Integrity,
            ..root()
        }),
        "",
    );
}

#[test]
fn containers() {
    // What Docker and Podman leave to root.
    let few = Caps(0xa804_25fb);
    let docker = Facts {
        permitted: few,
        bounding: few,
        seccomp: true,
        inner_pid_ns: true,
        container: Some("Docker"),
        ..root()
    };
    let without = "container was started without CAP_BPF and CAP_PERFMON";
    check(ebpf(&docker), &format!("this Docker {without} => {DOCKER}"));
    let all_permitted = Facts {
        permitted: root().permitted,
        bounding: root().bounding,
        ..docker.clone()
    };
    check(
        ebpf(&all_permitted),
        "nativeprof runs in a PID namespace of its own (a container), where process numbers are not those of the kernel \
         => nativeprof attach PID   on the host, or in a container that has the host's PID namespace",
    );
    check(
        others(&docker),
        &format!("this Docker container was started without CAP_SYS_PTRACE => {DOCKER}"),
    );
    check(
        kernel_names(&docker),
        "this Docker container was started without CAP_SYSLOG \
         => docker run --cap-add=BPF --cap-add=PERFMON --cap-add=SYS_PTRACE --cap-add=SYSLOG ...",
    );
    let inside = |kind| Facts {
        container: Some(kind),
        ..docker.clone()
    };
    check(
        ebpf(&inside("Podman")),
        &format!("this Podman {without} => {}", DOCKER.replace("docker", "podman")),
    );
    check(
        ebpf(&inside("Kubernetes")),
        &format!("this Kubernetes {without} => securityContext: {{capabilities: {{add: [BPF, PERFMON, SYS_PTRACE]}}}}"),
    );
    check(
        ebpf(&inside("LXC")),
        &format!("this LXC {without} => take them off lxc.cap.drop, or start it outside of the container"),
    );
    let unit = Facts {
        container: None,
        ..docker.clone()
    };
    check(
        ebpf(&unit),
        "CAP_BPF and CAP_PERFMON cannot be had in this session, even with sudo (they are not in its bounding set) \
         => start it from a login shell; a systemd unit needs CapabilityBoundingSet=CAP_BPF CAP_PERFMON CAP_SYS_PTRACE",
    );
    // All capabilities, but only within.
    let rootless = Facts {
        inner_user_ns: true,
        container: Some("Podman"),
        ..root()
    };
    check(
        ebpf(&rootless),
        "CAP_BPF and CAP_PERFMON do not count in a user namespace (a rootless container, or unshare) \
         => run the container as root: sudo podman run --cap-add=BPF,PERFMON,SYS_PTRACE ...",
    );
    check(others(&rootless), "");
    let gave_up = Facts {
        permitted: Caps::NONE,
        ..root()
    };
    check(
        ebpf(&gave_up),
        "root has given up CAP_BPF and CAP_PERFMON here => start it from a login shell of root",
    );
}

#[test]
fn refusals() {
    let eperm = io::Error::from_raw_os_error(libc::EPERM);
    let check = |f: Facts, expected: &str| assert_eq!(text([refused(&f, &eperm)]), expected);
    check(user(), &format!("this user lacks CAP_BPF and CAP_PERFMON => {SUDO}"));
    let capable = Facts {
        permitted: Caps::of(&[Cap::Bpf, Cap::Perfmon]),
        ..user()
    };
    check(
        Facts {
            perf_event_paranoid: Some(4),
            ..capable.clone()
        },
        "kernel.perf_event_paranoid is 4, at which this kernel asks for CAP_SYS_ADMIN \
         => sudo sysctl kernel.perf_event_paranoid=2",
    );
    check(
        Facts {
            seccomp: true,
            container: Some("Docker"),
            ..capable.clone()
        },
        "a seccomp filter forbids the system call (Operation not permitted (os error 1)) \
         => start the container with --security-opt seccomp=unconfined",
    );
    check(
        Facts {
            memlock: Some(64),
            ..capable
        },
        "only 64 KB of memory may be locked => ulimit -l 8192",
    );
    check(
        root(),
        "Operation not permitted (os error 1), though all capabilities are there: \
         a security module (SELinux, AppArmor) may forbid it => sudo dmesg | tail   tells which one",
    );
}

#[test]
fn looking_into_processes() {
    let check = |f: Facts, t: Target, expected: &str| {
        assert_eq!(text(memory_of(&f, &t)), expected);
        assert_eq!(text(ptrace_of(&f, &t)), expected);
    };
    let yama = "kernel.yama.ptrace_scope is";
    check(root(), own(), "");
    check(
        user(),
        own(),
        &format!(
            "{yama} 1: only a parent may look into process 12 \
             => sudo nativeprof attach 12   or, for all: sudo sysctl kernel.yama.ptrace_scope=0"
        ),
    );
    let child = Target {
        descends: true,
        ..own()
    };
    check(user(), child.clone(), "");
    let open = Facts {
        ptrace_scope: None,
        ..user()
    };
    check(open.clone(), own(), "");
    let scope = |n| Facts {
        ptrace_scope: Some(n),
        ..user()
    };
    check(
        scope(2),
        child,
        &format!(
            "{yama} 2: only CAP_SYS_PTRACE may look into process 12 \
             => sudo nativeprof attach 12   or, for all: sudo sysctl kernel.yama.ptrace_scope=0"
        ),
    );
    check(
        Facts {
            ptrace_scope: Some(3),
            ..root()
        },
        own(),
        &format!(
            "{yama} 3: no process may look into another, until the next boot \
             => set kernel.yama.ptrace_scope to 1 in /etc/sysctl.d and boot again"
        ),
    );
    let of = |uid| Target {
        uids: [uid; 3],
        ..own()
    };
    check(
        open.clone(),
        of(33),
        "process 12 belongs to another user (uid 33); that takes CAP_SYS_PTRACE => sudo nativeprof attach 12",
    );
    check(
        open.clone(),
        Target {
            uids: [1000, 0, 0],
            ..own()
        },
        "process 12 belongs to another user (uid 1000); that takes CAP_SYS_PTRACE => sudo nativeprof attach 12",
    );
    check(
        open.clone(),
        Target {
            dumpable: false,
            ..own()
        },
        "process 12 is protected from its own user (it has a file with privileges, or asked for it); \
         that takes CAP_SYS_PTRACE => sudo nativeprof attach 12",
    );
    check(
        open.clone(),
        Target {
            permitted: Caps::of(&[Cap::Syslog]),
            ..own()
        },
        "process 12 has capabilities that we lack; that takes CAP_SYS_PTRACE => sudo nativeprof attach 12",
    );
    let docker = Facts {
        uid: 0,
        bounding: Caps::NONE,
        container: Some("Docker"),
        ..open.clone()
    };
    check(
        docker,
        own(),
        &format!("process 12 belongs to another user (uid 1000); that takes CAP_SYS_PTRACE => {DOCKER}"),
    );
    check(
        Facts {
            no_new_privs: true,
            ..scope(1)
        },
        own(),
        &format!("{yama} 1: only a parent may look into process 12 => start it with sudo from another session"),
    );
    check(
        Facts {
            inner_user_ns: true,
            ..root()
        },
        Target {
            other_user_ns: true,
            ..own()
        },
        "process 12 lives in another user namespace, where our rights do not count \
         => start it outside of the container, with sudo",
    );
}

#[test]
fn tracing_only() {
    let check = |t: Target, expected: &str| assert_eq!(text(ptrace_of(&root(), &t)), expected);
    check(
        Target { tracer: 77, ..own() },
        "process 12 is traced by process 77, and there can be one tracer only \
         => end that debugger, or use --backend ebpf",
    );
    check(
        Target {
            kernel_thread: true,
            ..own()
        },
        "12 is a thread of the kernel => choose a process",
    );
}

#[test]
fn names_of_kernel_functions() {
    let with = |f: Facts, restrict, paranoid| Facts {
        kptr_restrict: restrict,
        perf_event_paranoid: Some(paranoid),
        ..f
    };
    check(kernel_names(&with(root(), 1, 2)), "");
    check(kernel_names(&with(user(), 0, 1)), "");
    check(
        kernel_names(&with(user(), 0, 2)),
        &format!("this user lacks CAP_SYSLOG => {SUDO}"),
    );
    check(
        kernel_names(&with(root(), 2, 2)),
        "kernel.kptr_restrict is 2: addresses are hidden from everyone => sudo sysctl kernel.kptr_restrict=1",
    );
}

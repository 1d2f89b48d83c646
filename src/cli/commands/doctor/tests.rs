use super::*;
use crate::privileges::credentials::Caps;

const PLAIN: TerminalStyle = TerminalStyle {
    width: None,
    color: false,
    unicode: false,
};
const BOTH: UsableBackends = UsableBackends {
    ebpf: true,
    ptrace: true,
};

fn root() -> SystemFacts {
    SystemFacts {
        permitted: Caps((1 << 41) - 1),
        bounding: Caps((1 << 41) - 1),
        kernel: (6, 1),
        perf_event_paranoid: Some(2),
        ptrace_scope: Some(1),
        exe: "nativeprof".into(),
        ..SystemFacts::default()
    }
}

fn user() -> SystemFacts {
    SystemFacts {
        uid: 1000,
        permitted: Caps::NONE,
        ..root()
    }
}

fn own_process() -> TargetFacts {
    TargetFacts {
        pid: 12,
        uids: [1000; 3],
        dumpable: true,
        ..TargetFacts::default()
    }
}

fn trial(event: &str, why_older_program: Option<&str>) -> Result<EbpfTrial> {
    Ok(EbpfTrial {
        event: event.into(),
        why_older_program: why_older_program.map(String::from),
    })
}

fn refusal() -> Result<EbpfTrial> {
    Err(Error::new(ErrorKind::NotPermitted, "what").why("why").hint("type this"))
}

#[test]
fn root_on_a_virtual_machine() {
    let (findings, usable) = check_system(&root(), trial("ebpf, cpu-clock", None), BOTH);
    assert_eq!(usable, BOTH);
    assert_eq!(
        section("Here", &findings, &PLAIN),
        "\
Here
  ok eBPF sampling            the BPF program loads and runs
  -- hardware counters        none (a virtual machine?); the CPU clock is used instead
  ok ptrace sampling          all processes
  ok ptrace and system calls  stops do not change the results of system calls
  ok reading other processes  CAP_SYS_PTRACE
  ok kernel symbols           for --kernel
"
    );
    let (findings, _) = check_system(&root(), trial("ebpf, cycles", None), BOTH);
    assert_eq!(findings[1], Finding::ok("hardware counters", "cycles"));
    let (findings, usable) = check_system(&root(), trial("ebpf, cpu-clock", Some("this kernel has no x")), BOTH);
    let text = "the BPF program for Linux 5.8 and newer loads and runs; this kernel has no x";
    assert_eq!(findings[0], Finding::ok(checks::EBPF, text));
    assert_eq!(usable, BOTH);
}

#[test]
fn a_plain_user() {
    let (findings, usable) = check_system(&user(), refusal(), BOTH);
    assert_eq!(
        usable,
        UsableBackends {
            ebpf: false,
            ptrace: true
        }
    );
    let sudo = "sudo nativeprof ...   or, permanently: \
                sudo setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_syslog+ep $(command -v nativeprof)";
    assert_eq!(
        section("Here", &findings, &PLAIN),
        format!(
            "\
Here
  NO eBPF sampling            this user does not have CAP_BPF and CAP_PERFMON
                              try: {sudo}
  -- ptrace sampling          only commands started by nativeprof (kernel.yama.ptrace_scope)
  ok ptrace and system calls  stops do not change the results of system calls
  -- reading other processes  this user does not have CAP_SYS_PTRACE
  -- kernel symbols           this user does not have CAP_SYSLOG
"
        )
    );
    // Where there is no other backend, nothing works.
    let ebpf_only = UsableBackends { ptrace: false, ..BOTH };
    let (findings, usable) = check_system(&user(), refusal(), ebpf_only);
    assert_eq!(usable, UsableBackends::default());
    assert!(findings.iter().all(|f| f.subject != checks::PTRACE));
}

#[test]
fn failures_of_the_trial_are_reported() {
    let (findings, usable) = check_system(&root(), refusal(), BOTH);
    assert!(!usable.ebpf && usable.ptrace);
    let found = (findings[0].status, findings[0].text.as_str(), findings[0].fix.as_str());
    assert_eq!(found, (Status::Missing, "what: why", "type this"));
}

#[test]
fn access_to_a_process() {
    let check = |f: &SystemFacts, t: &TargetFacts, usable, ways: Option<&str>, state: Option<Status>| {
        let (findings, now) = check_access(f, t, usable);
        let way = findings.iter().find(|f| f.subject == "can be sampled");
        assert_eq!(way.map(|f| f.text.as_str()), ways, "{findings:?}");
        let missing = findings.iter().find(|f| !f.fix.is_empty());
        assert_eq!(missing.map(|f| f.status), state, "{findings:?}");
        assert_eq!(now.ebpf || now.ptrace, ways.is_some());
    };
    check(&root(), &own_process(), BOTH, Some("with eBPF and ptrace"), None);
    // Yama
    check(&user(), &own_process(), BOTH, None, Some(Status::Missing));
    let child = TargetFacts {
        descends: true,
        ..own_process()
    };
    let ptrace_only = UsableBackends { ebpf: false, ..BOTH };
    check(&user(), &child, ptrace_only, Some("with ptrace"), None);
    check(&user(), &child, UsableBackends::default(), None, None);
    // A debugger stops only one of the two.
    let traced = TargetFacts {
        tracer: 7,
        ..own_process()
    };
    check(&root(), &traced, BOTH, Some("with eBPF"), Some(Status::Limited));
    check(&root(), &traced, ptrace_only, None, Some(Status::Missing));
}

#[test]
fn marks() {
    let style = |unicode, color| TerminalStyle {
        unicode,
        color,
        ..PLAIN
    };
    assert_eq!(mark(&style(true, false), Status::Ok), "✓");
    assert_eq!(mark(&style(true, true), Status::Missing), "\x1b[31m✗\x1b[0m");
    assert_eq!(mark(&style(false, false), Status::Limited), "--");
}

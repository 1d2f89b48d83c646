use super::*;
use crate::process::credentials::Caps;

const PLAIN: Style = Style {
    unicode: false,
    colour: false,
};
const BOTH: Usable = Usable {
    ebpf: true,
    ptrace: true,
};

fn root() -> Facts {
    Facts {
        permitted: Caps((1 << 41) - 1),
        bounding: Caps((1 << 41) - 1),
        kernel: (6, 1),
        perf_event_paranoid: Some(2),
        ptrace_scope: Some(1),
        exe: "nativeprof".into(),
        ..Facts::default()
    }
}

fn user() -> Facts {
    Facts {
        uid: 1000,
        permitted: Caps::NONE,
        ..root()
    }
}

fn own() -> Target {
    Target {
        pid: 12,
        uids: [1000; 3],
        dumpable: true,
        ..Target::default()
    }
}

fn refusal() -> Result<String> {
    Err(Error::new(Kind::NotPermitted, "what").why("why").hint("type this"))
}

#[test]
fn root_on_a_virtual_machine() {
    let (findings, usable) = machine(&root(), Ok("ebpf, cpu-clock".into()), BOTH);
    assert_eq!(usable, BOTH);
    assert_eq!(
        section("Here", &findings, PLAIN),
        "\
Here
  ok eBPF sampling              the program loads and runs
  -- hardware counters          none (a virtual machine?): the CPU clock is used instead
  ok ptrace sampling            of all processes
  ok ptrace and system calls    none is interrupted on purpose; 0 of 8,700 stops at 1000 Hz changed a result when measured with perf events
  ok reading other processes    CAP_SYS_PTRACE
  ok names of kernel functions  for --kernel
"
    );
    let (findings, _) = machine(&root(), Ok("ebpf, cycles".into()), BOTH);
    assert_eq!(findings[1], Finding::good("hardware counters", "cycles"));
}

#[test]
fn a_plain_user() {
    let (findings, usable) = machine(&user(), refusal(), BOTH);
    assert_eq!(
        usable,
        Usable {
            ebpf: false,
            ptrace: true
        }
    );
    let sudo = "sudo nativeprof ...   or, for good: \
                sudo setcap cap_bpf,cap_perfmon,cap_sys_ptrace,cap_syslog+ep $(command -v nativeprof)";
    assert_eq!(
        section("Here", &findings, PLAIN),
        format!(
            "\
Here
  NO eBPF sampling              this user lacks CAP_BPF and CAP_PERFMON
                                try: {sudo}
  -- ptrace sampling            of commands that nativeprof starts (kernel.yama.ptrace_scope)
  ok ptrace and system calls    none is interrupted on purpose; 0 of 8,700 stops at 1000 Hz changed a result when measured with perf events
  -- reading other processes    this user lacks CAP_SYS_PTRACE
  -- names of kernel functions  this user lacks CAP_SYSLOG
"
        )
    );
    // Where there is no other backend, nothing works.
    let ebpf_only = Usable { ptrace: false, ..BOTH };
    let (findings, usable) = machine(&user(), refusal(), ebpf_only);
    assert_eq!(usable, Usable::default());
    assert!(findings.iter().all(|f| f.subject != rights::PTRACE));
}

#[test]
fn what_the_rules_do_not_see_the_trial_tells() {
    let (findings, usable) = machine(&root(), refusal(), BOTH);
    assert!(!usable.ebpf && usable.ptrace);
    let told = (findings[0].state, findings[0].text.as_str(), findings[0].mend.as_str());
    assert_eq!(told, (State::Bad, "what: why", "type this"));
}

#[test]
fn access_to_a_process() {
    let check = |f: &Facts, t: &Target, usable, ways: Option<&str>, state: Option<State>| {
        let (findings, now) = access(f, t, usable);
        let way = findings.iter().find(|f| f.subject == "may be sampled");
        assert_eq!(way.map(|f| f.text.as_str()), ways, "{findings:?}");
        let lack = findings.iter().find(|f| !f.mend.is_empty());
        assert_eq!(lack.map(|f| f.state), state, "{findings:?}");
        assert_eq!(now.ebpf || now.ptrace, ways.is_some());
    };
    check(&root(), &own(), BOTH, Some("with eBPF and ptrace"), None);
    // Yama
    check(&user(), &own(), BOTH, None, Some(State::Bad));
    let child = Target {
        descends: true,
        ..own()
    };
    let ptrace_only = Usable { ebpf: false, ..BOTH };
    check(&user(), &child, ptrace_only, Some("with ptrace"), None);
    check(&user(), &child, Usable::default(), None, None);
    // A debugger stops only one of the two.
    let traced = Target { tracer: 7, ..own() };
    check(&root(), &traced, BOTH, Some("with eBPF"), Some(State::Less));
    check(&root(), &traced, ptrace_only, None, Some(State::Bad));
}

#[test]
fn marks() {
    let style = |unicode, colour| Style { unicode, colour };
    assert_eq!(style(true, false).mark(State::Good), "✓");
    assert_eq!(style(true, true).mark(State::Bad), "\x1b[31m✗\x1b[0m");
    assert_eq!(style(false, false).mark(State::Less), "--");
}

//! Which processes of a whole host the program samples.

#![allow(unsafe_code)]

use aya::maps::{HashMap as BpfHash, Map, MapData};
use aya::programs::ProgramType;
use aya::sys::{BpfHelper, is_helper_supported};

use super::errors::bpf_error;
use super::object::LOAD;
use crate::capture::HostFilter;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::sys::procfs;

// As `RULE_ALL` and the others of the program.
const ALL: u32 = 0;
const CGROUP: u32 = 1;
const COMM: u32 = 2;
const USER: u32 = 3;
const PROCESS: u32 = 4;
const EXCLUDED: u32 = 5;

/// Mirrors `struct rule` of the program.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    kind: u64,
    value: [u64; 2],
}

// SAFETY: plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for Rule {}

impl Rule {
    fn of_number(kind: u32, number: u64) -> Rule {
        Rule {
            kind: kind.into(),
            value: [number, 0],
        }
    }

    fn of_comm(comm: &[u8]) -> Rule {
        // As the kernel has it: cut to 15 bytes, and ended by a zero.
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().take(15).zip(comm) {
            *to = *from;
        }
        let (low, high) = bytes.split_at(8);
        let word = |half: &[u8]| half.try_into().map_or(0, u64::from_ne_bytes);
        Rule {
            kind: COMM.into(),
            value: [word(low), word(high)],
        }
    }
}

impl HostFilter {
    fn rules(&self) -> Vec<Rule> {
        let numbers = |kind, list: &[u32]| -> Vec<Rule> {
            list.iter()
                .map(|number| Rule::of_number(kind, (*number).into()))
                .collect()
        };
        let cgroups = self.cgroups.iter().map(|id| Rule::of_number(CGROUP, *id));
        let comms = self.comms.iter().map(|comm| Rule::of_comm(comm));
        let mut rules: Vec<Rule> = cgroups.chain(comms).collect();
        rules.extend(numbers(USER, &self.users));
        rules.extend(numbers(PROCESS, &self.processes));
        rules.extend(numbers(EXCLUDED, &self.excluded));
        rules
    }

    /// `host_rules` of the program.
    pub(super) fn kinds(&self) -> u32 {
        let kinds = self.rules().iter().fold(0, |kinds, rule| kinds | 1 << rule.kind);
        if kinds & !(1 << EXCLUDED) == 0 {
            kinds | 1 << ALL
        } else {
            kinds
        }
    }
}

/// Checks that the kernel can tell the program what a filter needs.
///
/// # Errors
/// `Unsupported`: a cgroup is to be sampled with those below it, which such programs cannot ask for before Linux 5.14
/// (`bpf_tracing_func_proto`, kernel/trace/bpf_trace.c).
pub fn check_kernel(filter: &HostFilter) -> Result<()> {
    let has = || {
        is_helper_supported(
            ProgramType::PerfEvent,
            BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id,
        )
    };
    if filter.cgroups.is_empty() || has().unwrap_or(true) {
        return Ok(());
    }
    Err(no_ancestors())
}

fn no_ancestors() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "cannot sample the processes of a cgroup or container alone",
    )
    .why("this kernel does not tell BPF programs which cgroups are around one (Linux 5.14 does)")
    .hint(
        "without --cgroup and --container all processes are recorded: select with `report --container`; \
             or use --pid, --user or --comm",
    )
}

/// The map `RULES`.
pub struct HostRules(BpfHash<MapData, Rule, u32>);

impl HostRules {
    /// # Errors
    /// It is a map of another kind; there are more rules than it has room for.
    pub fn new(map: Map, filter: &HostFilter) -> Result<HostRules> {
        let mut map: BpfHash<_, _, _> = map.try_into().map_err(|e| bpf_error(LOAD, e))?;
        for rule in filter.rules() {
            map.insert(rule, 1, 0)
                .map_err(|e| bpf_error("cannot tell the BPF program which processes to sample", e))?;
        }
        Ok(HostRules(map))
    }

    /// The first thread of a process has exited. If the process has with it, another one may get its number.
    pub fn end_process(&mut self, pid: Pid) {
        for rule in [PROCESS, EXCLUDED].map(|kind| Rule::of_number(kind, pid.into())) {
            if self.0.remove(&rule).is_ok() && runs(pid) {
                let _ = self.0.insert(rule, 1, 0); // there was room for it
            }
        }
    }
}

/// Whether a process runs whose first thread has exited.
fn runs(pid: Pid) -> bool {
    let has_first = !matches!(procfs::stat_state(pid), None | Some('Z' | 'X'));
    has_first || procfs::threads(pid).iter().any(|tid| *tid != pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_rules() {
        let all = HostFilter::default();
        let excluded = HostFilter {
            excluded: vec![1],
            ..HostFilter::default()
        };
        let users = HostFilter {
            users: vec![0],
            ..excluded.clone()
        };
        let kinds = [all.kinds(), excluded.kinds(), users.kinds()];
        assert_eq!(kinds, [1 << ALL, 1 << ALL | 1 << EXCLUDED, 1 << USER | 1 << EXCLUDED]);
    }

    #[test]
    fn only_cgroups_need_a_newer_kernel() {
        assert!(check_kernel(&HostFilter::default()).is_ok());
        let error = no_ancestors();
        assert!(error.kind == ErrorKind::Unsupported && error.hint.contains("--pid"));
    }

    #[test]
    fn names_are_cut_as_the_kernel_cuts_them() {
        let rule = |comm: &[u8]| Rule::of_comm(comm).value.map(u64::to_ne_bytes).concat();
        assert_eq!(rule(b"sh"), *b"sh\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(rule(b"a_name_of_20_bytes__"), *b"a_name_of_20_by\0");
    }
}

//! What is known of this machine, for recordings that are made on it.

use std::collections::BTreeSet;
use std::fs;

use crate::event::Pid;
use crate::profile::machine::Machine;
use crate::sys::procfs;

/// Bytes of `/proc/cpuinfo` that are read: the kernel makes its text as far as it is read, which takes long for all of many CPUs.
const CPUINFO: u64 = 4096;
/// Bytes of other files.
const LINE: u64 = 256;
/// Where the kernel has the governors of groups of CPUs.
const POLICIES: &str = "/sys/devices/system/cpu/cpufreq";
/// Groups that are looked at.
const MAX_POLICIES: usize = 1024;

/// This machine; how many CPUs a target may use is asked for separately, see [`allowed_cpus`].
pub fn this_machine() -> Machine {
    let line =
        |path: &str| procfs::read_at_most(path, LINE).map(|bytes| String::from_utf8_lossy(&bytes).trim().to_string());
    let cpuinfo = procfs::read_at_most("/proc/cpuinfo", CPUINFO).unwrap_or_default();
    let policies = fs::read_dir(POLICIES)
        .into_iter()
        .flatten()
        .flatten()
        .take(MAX_POLICIES);
    let governors: BTreeSet<String> = policies
        .filter_map(|policy| line(policy.path().join("scaling_governor").to_str()?).ok())
        .filter(|governor| !governor.is_empty())
        .collect();
    let machine = Machine {
        cpu: procfs::cpu_model(&String::from_utf8_lossy(&cpuinfo)).unwrap_or_default(),
        cores: 0,
        kernel: line("/proc/sys/kernel/osrelease").unwrap_or_default(),
        governor: governors.into_iter().collect::<Vec<_>>().join(", "),
    };
    machine.bounded()
}

/// The CPUs that a target may run on, also one that has exited and was not waited for; of a whole host (0), ours. 0 if unknown.
pub fn allowed_cpus(pid: Pid) -> u32 {
    let pid = if pid == 0 { std::process::id() } else { pid };
    procfs::allowed_cpus(pid).unwrap_or(0)
}

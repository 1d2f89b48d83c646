//! What a recording of all processes of a machine needs: capabilities, the kernel, cgroups, the directory of the history.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::{
    MissingPrivilege, Purpose, SystemFacts, bpf_maps_are_locked_memory, capability_advice, inner_pids, kernel, missing,
};
use crate::privileges::credentials::Cap;
use crate::privileges::phases::SAMPLING;
use crate::sys::{cgroup, files};

/// Space for a history with the usual limit of 2 GB.
const USUAL_SIZE: u64 = 2_000_000_000;
/// Space without which nothing is recorded: some minutes of a busy machine.
const LEAST_SIZE: u64 = 10_000_000;
/// What maps and rings of a large machine have, in KB.
const MOST_LOCKED: u64 = 64 << 10;
/// The highest level of `kernel.perf_event_paranoid` (Documentation/admin-guide/sysctl/kernel.rst, Linux 6.18); distributions
/// add higher ones.
const USUAL_PARANOID: i32 = 2;
/// Files of a directory that are looked at.
const MAX_FILES: usize = 100_000;

/// A capability, and what a recording of a host does with it.
#[derive(Clone, Copy, Debug)]
struct Need {
    cap: Cap,
    purpose: &'static str,
    /// What is not there without it; `None`: nothing can be recorded.
    without: Option<&'static str>,
}

/// Those of [`SAMPLING`], which `deploy/` gives, and no others.
const NEEDS: [Need; 6] = [
    Need {
        cap: Cap::Bpf,
        purpose: "loads the programs that take samples",
        without: None,
    },
    Need {
        cap: Cap::Perfmon,
        purpose: "opens the events that make samples due",
        without: None,
    },
    Need {
        cap: Cap::SysPtrace,
        purpose: "reads mappings and memory of processes",
        without: Some("processes of other users, and those with capabilities, have neither names nor Python functions"),
    },
    Need {
        cap: Cap::DacReadSearch,
        purpose: "opens files in directories that are closed to this user",
        without: Some("files in directories that are closed to this user have no names"),
    },
    Need {
        cap: Cap::CheckpointRestore,
        purpose: "opens mapped files that were replaced or deleted",
        without: Some("files that were replaced or deleted while they are mapped have no names"),
    },
    Need {
        cap: Cap::Syslog,
        purpose: "reads the addresses of kernel functions",
        without: Some("kernel functions have no names (--kernel)"),
    },
];
/// Before Linux 5.11.
const LOCKED_MEMORY: Need = Need {
    cap: Cap::SysResource,
    purpose: "raises the limit of locked memory, which BPF maps count towards before Linux 5.11",
    without: None,
};
const COMMAND: &str = "host --dir DIR";

/// Subjects besides capabilities.
const KERNEL: &str = "kernel";
const CGROUPS: &str = "cgroups";
const DIRECTORY: &str = "directory";

/// A need of a recording of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostNeed {
    /// A capability by its name, or what else is needed.
    pub subject: &'static str,
    pub state: State,
}

/// Whether a need is met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// What it is for, or what was found.
    Met(String),
    /// Recordings have less in them.
    Limited(MissingPrivilege),
    /// Nothing can be recorded.
    Missing(MissingPrivilege),
}

/// What is visible of the cgroups of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisibleCgroups {
    None,
    /// Those of a container.
    Part,
    All,
}

impl VisibleCgroups {
    /// Looks at the usual places.
    pub fn read() -> VisibleCgroups {
        match cgroup::unified_root() {
            None => VisibleCgroups::None,
            // Only the root of the hierarchy does not have this file (Documentation/admin-guide/cgroup-v2.rst, Linux 6.18).
            Some(root) if root.join("cgroup.type").exists() => VisibleCgroups::Part,
            Some(_) => VisibleCgroups::All,
        }
    }
}

/// The directory of a history, as this process may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryFacts {
    pub path: PathBuf,
    /// If it does not exist, the rest is of the nearest directory above it.
    pub exists: bool,
    pub is_directory: bool,
    /// Why nothing can be written there.
    pub refusal: Option<io::ErrorKind>,
    /// Bytes that can be written there, with those that the files of the directory have.
    pub room: u64,
}

impl DirectoryFacts {
    /// Reads the facts with the privileges of the moment.
    pub fn read(path: &Path) -> DirectoryFacts {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
        let nearest = absolute
            .ancestors()
            .find(|path| path.exists())
            .unwrap_or(Path::new("/"));
        DirectoryFacts {
            path: path.into(),
            exists: nearest == absolute,
            is_directory: nearest.is_dir(),
            refusal: files::may_write(nearest).err().map(|e| e.kind()),
            room: files::free_space(nearest)
                .unwrap_or(0)
                .saturating_add(if nearest == absolute { used(nearest) } else { 0 }),
        }
    }
}

/// Bytes of the files in a directory, of the first 100,000 ones.
fn used(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().take(MAX_FILES);
    let sizes = entries
        .filter_map(|entry| entry.metadata().ok().filter(fs::Metadata::is_file))
        .map(|file| file.len());
    sizes.fold(0, u64::saturating_add)
}

/// The needs of a recording of a host, capabilities first. `directory`: of the history, if one is named.
pub fn needs(f: &SystemFacts, cgroups: VisibleCgroups, directory: Option<&DirectoryFacts>) -> Vec<HostNeed> {
    let mut all = capabilities(f);
    all.push(of_kernel(f));
    all.push(of_cgroups(f, cgroups));
    all.extend(directory.map(|directory| of_directory(f, directory)));
    all
}

/// The capabilities of a recording of a host.
pub fn capabilities(f: &SystemFacts) -> Vec<HostNeed> {
    let is_short = f.memlock.is_some_and(|kb| kb < MOST_LOCKED);
    let locked = (bpf_maps_are_locked_memory(f) && is_short).then_some(LOCKED_MEMORY);
    let state = |need: &Need| {
        let subject = need.cap.name();
        let purpose = Purpose {
            feature: subject,
            all: SAMPLING,
            command: COMMAND,
            by_users: false,
        };
        let Some(advice) = capability_advice(f, &purpose, &missing(f, &[need.cap])) else {
            return State::Met(need.purpose.into());
        };
        match need.without {
            None => State::Missing(advice),
            Some(without) => State::Limited(MissingPrivilege {
                reason: format!("{}: {without}", advice.reason),
                ..advice
            }),
        }
    };
    (NEEDS.iter().chain(&locked))
        .map(|need| HostNeed {
            subject: need.cap.name(),
            state: state(need),
        })
        .collect()
}

fn of_kernel(f: &SystemFacts) -> HostNeed {
    let fix = match f.container {
        Some("Kubernetes") => "set hostPID: true in the pod",
        Some(_) => "start the container with --pid=host",
        None => "run nativeprof on the host",
    };
    let advice = kernel(f).into_iter().chain(inner_pids(f, fix)).next();
    let paranoid = f.perf_event_paranoid.unwrap_or(0);
    let types = if f.btf { "with" } else { "without" };
    HostNeed {
        subject: KERNEL,
        state: match advice {
            Some(advice) => State::Missing(advice),
            // Without CAP_SYS_ADMIN, the trial shows whether this kernel asks for it.
            None if paranoid > USUAL_PARANOID && f.permitted.has(Cap::SysAdmin) => {
                State::Limited(MissingPrivilege::new(
                    KERNEL,
                    format!(
                        "kernel.perf_event_paranoid is {paranoid}, at which kernels of Debian and Ubuntu require CAP_SYS_ADMIN: this user \
                     has it, services with few capabilities do not"
                    ),
                    format!(
                        "sudo sysctl kernel.perf_event_paranoid={USUAL_PARANOID}, or deploy/60-nativeprof.conf in /etc/sysctl.d"
                    ),
                ))
            }
            None => State::Met(format!(
                "Linux {}.{}, kernel.perf_event_paranoid {paranoid}, {types} type information (BTF)",
                f.kernel.0, f.kernel.1
            )),
        },
    }
}

fn of_cgroups(f: &SystemFacts, visible: VisibleCgroups) -> HostNeed {
    let limited = |reason: &str, fix: &str| State::Limited(MissingPrivilege::new(CGROUPS, reason, fix));
    HostNeed {
        subject: CGROUPS,
        state: match visible {
            VisibleCgroups::All => State::Met("version 2: labels of containers, --cgroup and --container".into()),
            VisibleCgroups::Part => limited(
                "only those of this container are visible: processes that have exited have no label of their container, and \
                 --cgroup and --container find nothing",
                match f.container {
                    Some("Kubernetes") => {
                        "mount the host's /sys/fs/cgroup there, read-only (hostPath), as deploy/daemonset.yaml does"
                    }
                    _ => "start the container with -v /sys/fs/cgroup:/sys/fs/cgroup:ro",
                },
            ),
            VisibleCgroups::None => limited(
                "none of version 2 below /sys/fs/cgroup: processes that have exited have no label of their container, and \
                 --cgroup and --container find nothing",
                "boot with systemd.unified_cgroup_hierarchy=1, or sudo mount -t cgroup2 none /sys/fs/cgroup/unified",
            ),
        },
    }
}

fn of_directory(f: &SystemFacts, directory: &DirectoryFacts) -> HostNeed {
    let shown = directory.path.display();
    let missing = |reason: String, fix: String| State::Missing(MissingPrivilege::new(DIRECTORY, reason, fix));
    let room = size(directory.room);
    let state = if !directory.is_directory {
        missing(
            format!("{shown} is not a directory"),
            "nativeprof host --dir with a directory, or one that can be made".into(),
        )
    } else if let Some(refusal) = directory.refusal {
        match refusal {
            io::ErrorKind::ReadOnlyFilesystem => missing(
                format!("{shown} is on a file system that is mounted read-only"),
                "nativeprof host --dir with a directory on another file system".into(),
            ),
            _ => missing(
                match f.uid {
                    0 => format!("{shown} belongs to another user, and `host` does not keep CAP_DAC_OVERRIDE"),
                    uid => format!("this user (uid {uid}) may not write to {shown}"),
                },
                format!("sudo install -d -m 750 -o {} {shown}", f.uid),
            ),
        }
    } else if directory.room < LEAST_SIZE {
        missing(
            format!("{shown} has room for {room}"),
            "make room there, or nativeprof host --dir with another directory".into(),
        )
    } else if directory.room < USUAL_SIZE {
        State::Limited(MissingPrivilege::new(
            DIRECTORY,
            format!(
                "{shown} has room for {room}, and a history may have {} (--max-size)",
                size(USUAL_SIZE)
            ),
            format!(
                "nativeprof host --max-size {}, or make room: segments that do not fit are lost",
                size(directory.room / 2)
            ),
        ))
    } else if directory.exists {
        State::Met(format!("{shown} is writable and has room for {room}"))
    } else {
        State::Met(format!("{shown} will be made, and has room for {room}"))
    };
    HostNeed {
        subject: DIRECTORY,
        state,
    }
}

/// Bytes as `--max-size` takes them.
fn size(bytes: u64) -> String {
    if bytes >= 1_000_000_000 {
        format!("{:.1}G", bytes as f64 / 1e9)
    } else {
        format!("{}M", bytes / 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::privileges::checks::Lockdown;
    use crate::privileges::credentials::Caps;

    const ALL: Caps = Caps((1 << 41) - 1);

    fn root() -> SystemFacts {
        SystemFacts {
            permitted: ALL,
            bounding: ALL,
            kernel: (6, 1),
            perf_event_paranoid: Some(2),
            btf: true,
            exe: "nativeprof".into(),
            ..SystemFacts::default()
        }
    }

    /// CAP_SYS_ADMIN would include some of the others.
    fn without(cap: Cap) -> Caps {
        Caps(ALL.0 & !Caps::of(&[cap, Cap::SysAdmin]).0)
    }

    /// Subject, state, text and advice of each need that is not met.
    fn unmet(f: &SystemFacts, cgroups: VisibleCgroups, directory: Option<&DirectoryFacts>) -> Vec<[String; 4]> {
        let unmet = |need: HostNeed| {
            let (state, advice) = match need.state {
                State::Met(_) => return None,
                State::Limited(advice) => ("limited", advice),
                State::Missing(advice) => ("missing", advice),
            };
            Some([need.subject.into(), state.into(), advice.reason, advice.fix])
        };
        needs(f, cgroups, directory).into_iter().filter_map(unmet).collect()
    }

    #[test]
    fn each_capability_is_asked_for_in_the_terms_of_the_place() {
        assert_eq!(unmet(&root(), VisibleCgroups::All, None), [[""; 4]; 0]);
        assert_eq!(NEEDS.map(|need| need.cap), SAMPLING);
        let names = NEEDS.map(|need| need.cap.name());
        for need in NEEDS {
            let name = need.cap.name();
            let unit = SystemFacts {
                permitted: without(need.cap),
                bounding: without(need.cap),
                ..root()
            };
            let pod = SystemFacts {
                container: Some("Kubernetes"),
                ..unit.clone()
            };
            let user = SystemFacts {
                uid: 1000,
                permitted: without(need.cap),
                ..root()
            };
            let state = if need.without.is_some() { "limited" } else { "missing" };
            for (facts, advice) in [
                (unit, format!("CapabilityBoundingSet={}", names.join(" "))),
                (
                    pod,
                    format!(
                        "add: [{}]",
                        names.map(|name| name.trim_start_matches("CAP_")).join(", ")
                    ),
                ),
                (user, "sudo nativeprof host --dir DIR".into()),
            ] {
                let all = unmet(&facts, VisibleCgroups::All, None);
                let [[subject, found, reason, fix]] = &all[..] else {
                    panic!("{name}: {all:?}")
                };
                assert_eq!((subject.as_str(), found.as_str()), (name, state));
                assert!(reason.contains(name) && fix.contains(&advice), "{all:?}");
            }
        }
    }

    #[test]
    fn older_kernels_need_a_capability_for_locked_memory() {
        let old = SystemFacts {
            permitted: without(Cap::SysResource),
            bounding: without(Cap::SysResource),
            kernel: (5, 10),
            memlock: Some(64),
            ..root()
        };
        let all = unmet(&old, VisibleCgroups::All, None);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(
            all[0][0] == "CAP_SYS_RESOURCE" && all[0][1] == "missing" && all[0][3].ends_with(" CAP_SYS_RESOURCE"),
            "{all:?}"
        );
        let newer = SystemFacts {
            kernel: (5, 11),
            ..old.clone()
        };
        let enough = SystemFacts {
            memlock: Some(1 << 20),
            ..old
        };
        for facts in [newer, enough] {
            assert!(unmet(&facts, VisibleCgroups::All, None).is_empty());
        }
    }

    #[test]
    fn kernel_cgroups_and_directory() {
        let locked = SystemFacts {
            lockdown: Lockdown::Confidentiality,
            ..root()
        };
        let inside = SystemFacts {
            inner_pid_ns: true,
            container: Some("Kubernetes"),
            ..root()
        };
        for (facts, advice) in [(locked, "lockdown=integrity"), (inside, "hostPID: true")] {
            let all = unmet(&facts, VisibleCgroups::All, None);
            assert!(
                all.len() == 1 && all[0][0] == KERNEL && all[0][1] == "missing" && all[0][3].contains(advice),
                "{all:?}"
            );
        }
        let paranoid = SystemFacts {
            perf_event_paranoid: Some(3),
            ..root()
        };
        let all = unmet(&paranoid, VisibleCgroups::All, None);
        assert!(
            all.len() == 1 && all[0][1] == "limited" && all[0][3].contains("perf_event_paranoid=2"),
            "{all:?}"
        );
        for (visible, advice) in [
            (VisibleCgroups::Part, "/sys/fs/cgroup:ro"),
            (VisibleCgroups::None, "mount -t cgroup2"),
        ] {
            let all = unmet(&root(), visible, None);
            assert!(
                all.len() == 1 && all[0][0] == CGROUPS && all[0][1] == "limited" && all[0][3].contains(advice),
                "{all:?}"
            );
        }
        let good = DirectoryFacts {
            path: "/var/lib/nativeprof".into(),
            exists: true,
            is_directory: true,
            refusal: None,
            room: 3_000_000_000,
        };
        assert!(unmet(&root(), VisibleCgroups::All, Some(&good)).is_empty());
        let refused = |kind| DirectoryFacts {
            refusal: Some(kind),
            ..good.clone()
        };
        let with_room = |room| DirectoryFacts { room, ..good.clone() };
        let file = DirectoryFacts {
            is_directory: false,
            ..good.clone()
        };
        for (directory, state, text) in [
            (refused(io::ErrorKind::ReadOnlyFilesystem), "missing", "read-only"),
            (
                refused(io::ErrorKind::PermissionDenied),
                "missing",
                "belongs to another user",
            ),
            (file, "missing", "is not a directory"),
            (with_room(1_000_000_000), "limited", "room for 1.0G"),
            (with_room(9_000_000), "missing", "room for 9M"),
        ] {
            let all = unmet(&root(), VisibleCgroups::All, Some(&directory));
            assert!(
                all.len() == 1
                    && all[0][0] == DIRECTORY
                    && all[0][1] == state
                    && all[0][2].contains(text)
                    && !all[0][3].is_empty(),
                "{all:?}"
            );
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_judged_by_the_one_above_it() {
        let here = DirectoryFacts::read(&std::env::temp_dir());
        assert!(
            here.exists && here.is_directory && here.refusal.is_none() && here.room > 0,
            "{here:?}"
        );
        let new = DirectoryFacts::read(&std::env::temp_dir().join("no such directory/below it"));
        assert!(!new.exists && new.is_directory && new.refusal.is_none(), "{new:?}");
        let file = DirectoryFacts::read(Path::new("/proc/self/status/x"));
        assert!(!file.exists && !file.is_directory, "{file:?}");
    }
}

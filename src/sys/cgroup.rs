//! What control groups do to processes: whether they are frozen, and for how long they were throttled. Both versions, where they
//! are usually mounted (cgroups(7)).

use std::fs::{self, File};
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::path::{Path, PathBuf};

use crate::event::{Pid, Suspension};
use crate::sys::procfs::{self, read_text};

/// Where cgroups are usually mounted; those of version 1 are below it.
pub const MOUNT: &str = "/sys/fs/cgroup";
/// Where version 2 is mounted: together with version 1 (as systemd's hybrid hierarchy is), or alone.
pub const UNIFIED_MOUNTS: [&str; 2] = ["/sys/fs/cgroup/unified", MOUNT];
/// Cgroups that are read in one search.
const MAX_GROUPS: usize = 65_536;
/// Groups around a process that are read, itself included.
const MAX_DEPTH: usize = 32;

/// The root of the hierarchy of version 2; `None` if it is not mounted in a usual place.
pub fn unified_root() -> Option<PathBuf> {
    UNIFIED_MOUNTS.iter().map(PathBuf::from).find(|mount| is_unified(mount))
}

/// Whether a directory is a cgroup of version 2.
pub fn is_unified(path: &Path) -> bool {
    path.join("cgroup.controllers").exists()
}

/// Calls `found` with the path and the number (inode of the directory) of each cgroup below `root`, 65,536 at most. It
/// says whether those below it are to be found, too: they are listed after it was called.
pub fn each_below(root: &Path, found: &mut dyn FnMut(&Path, u64) -> bool) {
    let mut left = vec![root.to_path_buf()];
    let mut groups = 0;
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            groups += 1;
            if groups > MAX_GROUPS {
                return;
            }
            let path = entry.path();
            if found(&path, entry.ino()) {
                left.push(path);
            }
        }
    }
}

/// Whether a process is stopped or frozen as a whole.
pub fn suspension(pid: Pid) -> Option<Suspension> {
    match procfs::stat_state(pid)? {
        'T' | 't' => Some(Suspension::Stopped),
        _ => is_frozen(pid).then_some(Suspension::Frozen),
    }
}

/// Is the process in a frozen group?
pub fn is_frozen(pid: Pid) -> bool {
    let text = read_text(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    groups(&text).any(|(controllers, path)| {
        let read = |mount: &str, file: &str| read_text(format!("{MOUNT}{mount}{path}/{file}")).ok();
        match controllers {
            // Alone, or together with version 1.
            "" => {
                let events = read("", "cgroup.events").or_else(|| read("/unified", "cgroup.events"));
                events.is_some_and(|events| events.lines().any(|line| line == "frozen 1"))
            }
            "freezer" => read("/freezer", "freezer.state").is_some_and(|state| state.trim() == "FROZEN"),
            _ => false,
        }
    })
}

/// Controllers and path of each group, from the text of `/proc/PID/cgroup`. Not of those that lie outside of our namespace.
fn groups(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let group = |line| {
        let (_, rest) = str::split_once(line, ':')?;
        rest.split_once(':')
    };
    let is_inside = |(_, path): &(&str, &str)| path.starts_with('/') && path.split('/').all(|name| name != "..");
    text.lines().filter_map(group).filter(is_inside)
}

/// The groups around a process whose CPU time is limited.
#[derive(Debug, Default)]
pub struct CpuQuotas {
    groups: Vec<LimitedGroup>,
}

#[derive(Debug)]
struct LimitedGroup {
    path: String,
    stat: File,
    /// As it was read last, ns.
    throttled: u64,
}

impl CpuQuotas {
    /// Finds the groups of a process. What is known of those that it was in before remains.
    pub fn find(&mut self, pid: Pid) {
        let text = read_text(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let mut before = std::mem::take(&mut self.groups);
        for path in groups(&text).flat_map(|(controllers, path)| cpu_groups(controllers, path)) {
            let read = |file: &str| read_text(format!("{path}/{file}")).ok();
            if !read("cpu.max").is_some_and(|limit| has_limit(&limit))
                && !read("cpu.cfs_quota_us").is_some_and(|limit| has_limit(&limit))
            {
                continue;
            }
            if let Some(at) = before.iter().position(|group| group.path == path) {
                self.groups.push(before.swap_remove(at));
            } else if let Ok(stat) = File::open(format!("{path}/cpu.stat"))
                && let Some(throttled) = read_throttled(&stat)
            {
                self.groups.push(LimitedGroup { path, stat, throttled });
            }
        }
    }

    /// For how long the process was throttled since the last call, summed over CPUs, ns: by the group for which it was longest.
    pub fn read(&mut self) -> u64 {
        let groups = self.groups.iter_mut();
        let times = groups.filter_map(|group| {
            let throttled = read_throttled(&group.stat)?;
            Some(throttled.saturating_sub(std::mem::replace(&mut group.throttled, throttled)))
        });
        times.max().unwrap_or(0)
    }
}

/// Where a group and those around it may be, if it is one of the controller for CPU time.
fn cpu_groups(controllers: &str, path: &str) -> Vec<String> {
    let mounts: &[&str] = match controllers {
        "" => &["", "/unified"],
        other if other.split(',').any(|controller| controller == "cpu") => &["/cpu", "/cpu,cpuacct"],
        _ => return Vec::new(),
    };
    let path = path.trim_end_matches('/');
    let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
    let around: Vec<&str> = ends.filter_map(|end| path.get(..end)).collect();
    let around = around.into_iter().rev().take(MAX_DEPTH);
    let at_mounts = around.flat_map(|path| mounts.iter().map(move |mount| format!("{MOUNT}{mount}{path}")));
    at_mounts.collect()
}

/// Does `cpu.max` (`20000 100000`, `max 100000`) or `cpu.cfs_quota_us` (`20000`, `-1`) limit the time?
fn has_limit(text: &str) -> bool {
    let quota = text.split_whitespace().next();
    quota.is_some_and(|quota| quota.parse::<u64>().is_ok())
}

fn read_throttled(stat: &File) -> Option<u64> {
    let mut text = [0; 1024];
    let length = stat.read_at(&mut text, 0).ok()?;
    throttled(&String::from_utf8_lossy(text.get(..length)?))
}

/// The time in `cpu.stat` for which the group was throttled, ns.
fn throttled(text: &str) -> Option<u64> {
    text.lines().find_map(|line| match line.split_once(' ')? {
        ("throttled_usec", time) => time.trim().parse::<u64>().ok()?.checked_mul(1000),
        ("throttled_time", time) => time.trim().parse().ok(),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_process() {
        let text = "9:name=systemd:/\n4:cpu,cpuacct:/a:b/c\n6:freezer:/../x\n0::/user.slice\nx\n3:pids:\n";
        assert_eq!(
            groups(text).collect::<Vec<_>>(),
            [("name=systemd", "/"), ("cpu,cpuacct", "/a:b/c"), ("", "/user.slice")]
        );
        assert!(!is_frozen(std::process::id()) && !is_frozen(0));
    }

    #[test]
    fn groups_with_cpu_time() {
        for (controllers, path, expected) in [
            ("cpu", "/", "/cpu /cpu,cpuacct"),
            ("cpu,cpuacct", "/a", "/cpu/a /cpu,cpuacct/a /cpu /cpu,cpuacct"),
            ("", "/a/b", "/a/b /unified/a/b /a /unified/a  /unified"),
            ("cpuacct", "/a", ""),
            ("cpuset", "/a", ""),
        ] {
            let found = cpu_groups(controllers, path);
            let found: Vec<&str> = found.iter().filter_map(|path| path.strip_prefix(MOUNT)).collect();
            assert_eq!(found.join(" "), expected, "{controllers}:{path}");
        }
        assert_eq!(cpu_groups("cpu", &"/x".repeat(10_000)).len(), 2 * MAX_DEPTH);
    }

    #[test]
    fn limits() {
        for (text, limited) in [
            ("20000 100000\n", true),
            ("max 100000\n", false),
            ("20000\n", true),
            ("-1\n", false),
            ("", false),
        ] {
            assert_eq!(has_limit(text), limited, "{text:?}");
        }
    }

    #[test]
    fn times_of_both_versions() {
        for (text, expected) in [
            (
                "usage_usec 5\nuser_usec 3\nsystem_usec 2\nnr_periods 40\nnr_throttled 31\nthrottled_usec 2345\nnr_bursts 0\n",
                Some(2_345_000),
            ),
            (
                "nr_periods 40\nnr_throttled 31\nthrottled_time 2345678\nnr_bursts 0\nburst_time 0\n",
                Some(2_345_678),
            ),
            // Without the controller.
            ("usage_usec 5\nuser_usec 3\nsystem_usec 2\n", None),
            ("throttled_usec 18446744073709551615\n", None),
            ("throttled_usec -1\n", None),
            ("throttled_usec", None),
            ("", None),
        ] {
            assert_eq!(throttled(text), expected, "{text:?}");
        }
    }
}

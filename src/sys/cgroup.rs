//! Whether processes are stopped, or frozen with their control groups. Both versions, where they are usually mounted (cgroups(7)).

use crate::event::{Pid, Suspension};
use crate::sys::procfs::{self, read_text};

const MOUNT: &str = "/sys/fs/cgroup";

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
            // Alone, or beside version 1.
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
}

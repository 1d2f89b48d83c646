//! Which privileges are kept when.
//!
//! | phase | user | capabilities |
//! |---|---|---|
//! | set-up: load, open, attach | the invoking user (sudo, doas) | [`SET_UP`] |
//! | sampling: new processes and files | the same | [`SAMPLING`] |
//! | symbolization and writing: the large parsers of untrusted input | the same | none |
//!
//! All files that symbolization needs are open by then (see `session::Recording::finish`), and output is
//! written with the privileges of the user who gets it. Such a process is not dumpable: that user cannot trace it. A
//! root user who did not use sudo stays root, without capabilities.

use super::checks;
use super::checks::SystemFacts;
use super::credentials;
use super::credentials::{Cap, Caps, User, UserQuery};
use crate::error::{Error, Result};
use crate::sys;

/// Capabilities for loading the BPF program, opening events and reading the target.
pub const SET_UP: &[Cap] = &[
    Cap::Bpf,
    Cap::Perfmon,
    Cap::SysPtrace,
    // files in directories that are closed to us, and /proc/PID/map_files
    Cap::DacReadSearch,
    Cap::CheckpointRestore,
    Cap::Syslog,
    // rings of many CPUs
    Cap::IpcLock,
    // the priority of the tracer thread
    Cap::SysNice,
];

/// Capabilities for what is opened during sampling.
pub const SAMPLING: &[Cap] = &[
    Cap::Bpf,
    Cap::Perfmon,
    Cap::SysPtrace,
    Cap::DacReadSearch,
    Cap::CheckpointRestore,
    Cap::Syslog,
];

/// What both need besides where programs are attached to probes in files: the kernel requires it for uprobes of other processes
/// (perf_uprobe_event_init, kernel/events/core.c).
pub const PROBING: &[Cap] = &[Cap::SysAdmin];

/// What root needs to write to directories of other users.
pub const WRITING: &[Cap] = &[Cap::DacOverride, Cap::Fowner];

/// The user who became root by sudo or doas; never root itself.
///
/// `uid` is our effective user: the environment of users other than root is not trusted.
pub fn caller(
    uid: u32,
    variable: &dyn Fn(&str) -> Option<String>,
    find: &dyn Fn(UserQuery) -> Option<User>,
) -> Option<User> {
    if uid != 0 {
        return None;
    }
    let number = |name| variable(name)?.parse::<u32>().ok();
    // sudo(8), "ENVIRONMENT"; doas(1), "ENVIRONMENT"
    let user = if let (Some(uid), Some(gid)) = (number("SUDO_UID"), number("SUDO_GID")) {
        // The system may not know a user of a container, or of an unreachable directory service.
        let known = find(UserQuery::Uid(uid));
        User {
            uid,
            gid,
            ..known.unwrap_or(User {
                uid,
                gid,
                name: variable("SUDO_USER").unwrap_or_else(|| uid.to_string()),
                home: String::new(),
                shell: String::new(),
            })
        }
    } else {
        find(UserQuery::Name(&variable("DOAS_USER")?))?
    };
    // -1 means "unchanged" to the system calls
    (user.uid != 0 && user.uid != u32::MAX && user.gid != u32::MAX).then_some(user)
}

/// The user who became root, if there is one: whose processes and files are meant.
pub fn invoking_user() -> Option<User> {
    let variable = |name: &str| std::env::var(name).ok();
    caller(sys::process::effective_uid(), &variable, &credentials::find_user)
}

/// Switches to the user who became root, if there is one, keeping what set-up needs. Must be called before anything
/// else; returns that user.
///
/// # Errors
/// `NotPermitted`; the caller must not continue then.
pub fn switch_to_invoking_user() -> Result<Option<User>> {
    switch_to_invoking_user_with(Caps::NONE)
}

/// The same, keeping these capabilities as well.
///
/// # Errors
/// As [`switch_to_invoking_user`].
pub fn switch_to_invoking_user_with(also: Caps) -> Result<Option<User>> {
    let Some(user) = invoking_user() else {
        return Ok(None);
    };
    credentials::become_user(&user, Caps(setup_capabilities().0 | also.0))?;
    Ok(Some(user))
}

/// The same with CAP_SYS_ADMIN, if that is all we have of CAP_BPF or CAP_PERFMON, which it includes (capabilities(7)):
/// `docker run --cap-add=SYS_ADMIN`.
fn or_admin(caps: &[Cap], permitted: Caps) -> Caps {
    let missing = |cap: &Cap| matches!(cap, Cap::Bpf | Cap::Perfmon) && !permitted.has(*cap);
    let admin: &[Cap] = if caps.iter().any(missing) {
        &[Cap::SysAdmin]
    } else {
        &[]
    };
    Caps(Caps::of(caps).0 | Caps::of(admin).0)
}

fn setup_capabilities() -> Caps {
    let facts = SystemFacts::read();
    let mut caps = or_admin(SET_UP, facts.permitted);
    // Debian and Ubuntu have levels above 2, at which perf events need CAP_SYS_ADMIN.
    if facts.perf_event_paranoid.is_some_and(|level| level > 2) {
        caps.0 |= Caps::of(&[Cap::SysAdmin]).0;
    }
    // To raise the limit of locked memory, which BPF maps count towards.
    if checks::bpf_maps_are_locked_memory(&facts) {
        caps.0 |= Caps::of(&[Cap::SysResource]).0;
    }
    caps
}

/// Drops what set-up does not need.
///
/// # Errors
/// If the kernel refuses, for which it has no reason.
pub fn restrict_to_setup(also: Caps) -> Result<()> {
    restrict(Caps(setup_capabilities().0 | also.0))
}

/// Drops what only set-up needed, and any way to regain it. To be called after the command was forked, which may gain
/// privileges.
///
/// # Errors
/// As [`restrict_to_setup`].
pub fn restrict_to_sampling(also: Caps) -> Result<()> {
    credentials::no_new_privileges().map_err(|e| Error::io("cannot set no_new_privs", e))?;
    let (permitted, _) = credentials::current().map_err(|e| Error::io("cannot read our capabilities", e))?;
    restrict(Caps(or_admin(SAMPLING, permitted).0 | also.0))
}

/// Drops everything except `kept`, which should be nothing.
///
/// # Errors
/// As [`restrict_to_setup`].
pub fn drop_for_symbolization(kept: Caps) -> Result<()> {
    restrict(kept)
}

/// Drops everything, and any way to regain it: for what needs no privileges at all.
///
/// # Errors
/// As [`restrict_to_setup`].
pub fn drop_all() -> Result<()> {
    credentials::no_new_privileges().map_err(|e| Error::io("cannot set no_new_privs", e))?;
    restrict(Caps::NONE)
}

fn restrict(kept: Caps) -> Result<()> {
    credentials::keep(kept).map_err(|e| Error::io("cannot drop privileges that are not needed", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_includes_missing_capabilities_is_kept() {
        for (permitted, is_kept) in [
            (&[Cap::SysAdmin, Cap::SysPtrace][..], true),
            (&[Cap::SysAdmin, Cap::Bpf], true),
            (&[Cap::SysAdmin, Cap::Bpf, Cap::Perfmon], false),
        ] {
            for phase in [SET_UP, SAMPLING] {
                let kept = or_admin(phase, Caps::of(permitted));
                assert_eq!(kept.has(Cap::SysAdmin), is_kept, "{permitted:?}");
                assert!(kept.holds(Caps::of(phase)));
            }
        }
    }

    #[test]
    fn the_invoking_user() {
        let user = |uid, name: &str| User {
            uid,
            gid: 100,
            name: name.into(),
            home: "/home/alice".into(),
            shell: "/bin/zsh".into(),
        };
        let find = |query: UserQuery| match query {
            UserQuery::Uid(1000) | UserQuery::Name("alice") => Some(user(1000, "alice")),
            UserQuery::Name("root") => Some(user(0, "root")),
            _ => None,
        };
        let check = |uid, variables: &[(&str, &str)], expected: Option<(u32, u32, &str, &str)>| {
            let variable = |name: &str| {
                let found = variables.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| value.to_string())
            };
            let got = caller(uid, &variable, &find);
            let got = got.as_ref().map(|u| (u.uid, u.gid, u.name.as_str(), u.home.as_str()));
            assert_eq!(got, expected, "{uid} {variables:?}");
        };
        let sudo = |uid, gid| [("SUDO_UID", uid), ("SUDO_GID", gid), ("SUDO_USER", "bob")];
        check(0, &[], None);
        // The group is the one that sudo was called with.
        check(0, &sudo("1000", "7"), Some((1000, 7, "alice", "/home/alice")));
        check(0, &sudo("2000", "7"), Some((2000, 7, "bob", "")));
        check(1000, &sudo("2000", "7"), None);
        check(0, &sudo("0", "0"), None);
        check(0, &sudo("-1", "7"), None);
        check(0, &sudo("4294967295", "7"), None);
        check(0, &sudo("x", "7"), None);
        check(0, &[("SUDO_UID", "1000")], None);
        check(0, &[("DOAS_USER", "alice")], Some((1000, 100, "alice", "/home/alice")));
        check(0, &[("DOAS_USER", "nobody at all")], None);
        check(0, &[("DOAS_USER", "root")], None);
    }
}

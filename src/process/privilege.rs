//! Which rights are kept when.
//!
//! | phase | user | capabilities |
//! |---|---|---|
//! | set-up: load, open, attach | whoever called for root (sudo, doas) | [`SET_UP`] |
//! | sampling: new processes and files | the same | [`SAMPLING`] |
//! | naming and writing: the big parsers of foreign bytes | the same | none |
//!
//! All files that naming needs are open by then (see `session::Session::open_for_names`), and what is written is
//! written with the rights of the user who gets it. Such a process is not dumpable: that user cannot trace it.
//! Root who did not come by sudo stays root, without capabilities.

use super::credentials::{self, Cap, Caps, User, Who};
use super::rights::Facts;
use super::sys;
use crate::error::{Error, Result};

/// Capabilities for loading the BPF program, opening events and looking at the target.
pub const SET_UP: &[Cap] = &[
    Cap::Bpf,
    Cap::Perfmon,
    Cap::SysPtrace,
    // files in folders that are closed to us, and /proc/PID/map_files
    Cap::DacReadSearch,
    Cap::CheckpointRestore,
    Cap::Syslog,
    // rings of many CPUs
    Cap::IpcLock,
    // the priority of the thread that traces
    Cap::SysNice,
];

/// Capabilities for what is opened while sampling goes on.
pub const SAMPLING: &[Cap] = &[
    Cap::Bpf,
    Cap::Perfmon,
    Cap::SysPtrace,
    Cap::DacReadSearch,
    Cap::CheckpointRestore,
    Cap::Syslog,
];

/// What root needs to write where others own the folder.
pub const WRITING: &[Cap] = &[Cap::DacOverride, Cap::Fowner];

/// The user who called for root: by sudo or doas, never root itself.
///
/// `uid` is our effective user: what others than root say in their environment is of no interest.
pub fn caller(uid: u32, variable: &dyn Fn(&str) -> Option<String>, find: &dyn Fn(Who) -> Option<User>) -> Option<User> {
    if uid != 0 {
        return None;
    }
    let number = |name| variable(name)?.parse::<u32>().ok();
    // sudo(8), "ENVIRONMENT"; doas(1), "ENVIRONMENT"
    let user = if let (Some(uid), Some(gid)) = (number("SUDO_UID"), number("SUDO_GID")) {
        // The system may not know a user of a container or of a directory that is out of reach.
        let known = find(Who::Uid(uid));
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
        find(Who::Name(&variable("DOAS_USER")?))?
    };
    // -1 means "leave it" to the system calls
    (user.uid != 0 && user.uid != u32::MAX && user.gid != u32::MAX).then_some(user)
}

/// Becomes the user who called for root, if there is one, and keeps what set-up needs. To be called before anything
/// else; gives that user.
///
/// # Errors
/// `NotPermitted`; nothing should be done then.
pub fn become_caller() -> Result<Option<User>> {
    become_caller_with(Caps::NONE)
}

/// The same; keeps these capabilities too.
///
/// # Errors
/// As [`become_caller`].
pub fn become_caller_with(also: Caps) -> Result<Option<User>> {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(user) = caller(sys::effective_uid(), &variable, &credentials::find_user) else {
        return Ok(None);
    };
    credentials::become_user(&user, Caps(for_set_up().0 | also.0))?;
    Ok(Some(user))
}

fn for_set_up() -> Caps {
    let mut caps = Caps::of(SET_UP);
    // Debian and Ubuntu have levels above 2, at which perf events take CAP_SYS_ADMIN.
    if Facts::read().perf_event_paranoid.is_some_and(|level| level > 2) {
        caps.0 |= Caps::of(&[Cap::SysAdmin]).0;
    }
    caps
}

/// Gives up what set-up does not need.
///
/// # Errors
/// If the kernel refuses, which it has no reason to.
pub fn for_setting_up(also: Caps) -> Result<()> {
    narrow(Caps(for_set_up().0 | also.0))
}

/// Gives up what only set-up needed, and the way to ever get it back. To be called after the command was forked, which
/// may gain rights.
///
/// # Errors
/// As [`for_setting_up`].
pub fn for_sampling(also: Caps) -> Result<()> {
    credentials::no_new_privileges().map_err(|e| Error::io("cannot give up new rights", e))?;
    narrow(Caps(Caps::of(SAMPLING).0 | also.0))
}

/// Gives up everything but `kept`, which should be nothing.
///
/// # Errors
/// As [`for_setting_up`].
pub fn for_naming(kept: Caps) -> Result<()> {
    narrow(kept)
}

fn narrow(kept: Caps) -> Result<()> {
    credentials::keep(kept).map_err(|e| Error::io("cannot give up rights that are not needed", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_called_for_root() {
        let user = |uid, name: &str| User {
            uid,
            gid: 100,
            name: name.into(),
            home: "/home/alice".into(),
            shell: "/bin/zsh".into(),
        };
        let find = |who: Who| match who {
            Who::Uid(1000) | Who::Name("alice") => Some(user(1000, "alice")),
            Who::Name("root") => Some(user(0, "root")),
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

//! Our identity: capabilities, user and groups, and how they are dropped.
//!
//! Capabilities belong to threads. The functions that change them act on the calling thread only, so they are called
//! while there is no other thread, or by the only thread that still has privileges.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;

use crate::error::{Error, ErrorKind, Result};

/// A capability by its number (include/uapi/linux/capability.h, Linux 6.18).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cap {
    DacOverride = 1,
    DacReadSearch = 2,
    Fowner = 3,
    IpcLock = 14,
    SysPtrace = 19,
    SysAdmin = 21,
    SysNice = 23,
    SysResource = 24,
    Syslog = 34,
    Perfmon = 38,
    Bpf = 39,
    CheckpointRestore = 40,
}

impl Cap {
    /// `CAP_SYS_PTRACE`
    pub fn name(self) -> &'static str {
        match self {
            Cap::DacOverride => "CAP_DAC_OVERRIDE",
            Cap::DacReadSearch => "CAP_DAC_READ_SEARCH",
            Cap::Fowner => "CAP_FOWNER",
            Cap::IpcLock => "CAP_IPC_LOCK",
            Cap::SysPtrace => "CAP_SYS_PTRACE",
            Cap::SysAdmin => "CAP_SYS_ADMIN",
            Cap::SysNice => "CAP_SYS_NICE",
            Cap::SysResource => "CAP_SYS_RESOURCE",
            Cap::Syslog => "CAP_SYSLOG",
            Cap::Perfmon => "CAP_PERFMON",
            Cap::Bpf => "CAP_BPF",
            Cap::CheckpointRestore => "CAP_CHECKPOINT_RESTORE",
        }
    }
}

/// A set of capabilities, a bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps(pub u64);

impl Caps {
    pub const NONE: Caps = Caps(0);

    pub fn of(caps: &[Cap]) -> Caps {
        Caps(caps.iter().fold(0, |set, cap| set | 1 << *cap as u32))
    }

    pub fn has(self, cap: Cap) -> bool {
        self.0 & 1 << cap as u32 != 0
    }

    pub fn holds(self, other: Caps) -> bool {
        other.0 & !self.0 == 0
    }

    pub fn and(self, other: Caps) -> Caps {
        Caps(self.0 & other.0)
    }
}

/// `struct __user_cap_header_struct` and two of `struct __user_cap_data_struct` (include/uapi/linux/capability.h).
#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const CAP_VERSION_3: u32 = 0x2008_0522;

fn check(r: i64) -> io::Result<()> {
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Permitted and effective capabilities of this thread.
pub fn current() -> io::Result<(Caps, Caps)> {
    let mut header = CapHeader {
        version: CAP_VERSION_3,
        pid: 0,
    };
    let mut data = [CapData::default(); 2];
    // SAFETY: the header requests version 3, for which the kernel writes two structures.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) })?;
    let set = |low: u32, high: u32| Caps(u64::from(low) | u64::from(high) << 32);
    Ok((
        set(data[0].permitted, data[1].permitted),
        set(data[0].effective, data[1].effective),
    ))
}

fn set(permitted: Caps, effective: Caps) -> io::Result<()> {
    let header = CapHeader {
        version: CAP_VERSION_3,
        pid: 0,
    };
    let half = |shift: u32| CapData {
        effective: (effective.0 >> shift) as u32,
        permitted: (permitted.0 >> shift) as u32,
        inheritable: 0,
    };
    let data = [half(0), half(32)];
    // SAFETY: the header announces version 3, for which the kernel reads two structures.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) })
}

/// Drops all capabilities of this thread except these, permanently; these become effective.
///
/// A program executed later has what the kernel gives its user: the bounding set is unchanged.
pub fn keep(wanted: Caps) -> io::Result<()> {
    let (permitted, _) = current()?;
    let kept = permitted.and(wanted);
    set(kept, kept)
}

/// Runs `f` with only these capabilities effective in this thread; afterwards all permitted ones are effective again.
pub fn with_only<R>(wanted: Caps, f: impl FnOnce() -> R) -> io::Result<R> {
    let (permitted, _) = current()?;
    set(permitted, permitted.and(wanted))?;
    let result = f();
    set(permitted, permitted)?;
    Ok(result)
}

/// From now on no `execve` of this thread gains privileges. Does not affect processes that were forked earlier.
pub fn no_new_privileges() -> io::Result<()> {
    // SAFETY: five integers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())
}

/// A user of this system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub name: String,
    /// Home directory and shell; empty if the system does not know the user.
    pub home: String,
    pub shell: String,
}

/// Which user of the system database: by number or by name.
#[derive(Clone, Copy, Debug)]
pub enum UserQuery<'a> {
    Uid(u32),
    Name(&'a str),
}

/// Finds a user in whatever database the system uses.
pub fn find_user(query: UserQuery<'_>) -> Option<User> {
    let name = match query {
        UserQuery::Name(name) => CString::new(name).ok()?,
        UserQuery::Uid(_) => CString::default(),
    };
    let mut room = vec![0u8; 64 << 10];
    let mut entry = MaybeUninit::<libc::passwd>::uninit();
    let mut found = std::ptr::null_mut();
    // SAFETY: `entry`, `room` with its length and `found` are places to write to; `name` ends in a NUL.
    let failed = unsafe {
        let (text, len) = (room.as_mut_ptr().cast(), room.len());
        match query {
            UserQuery::Uid(uid) => libc::getpwuid_r(uid, entry.as_mut_ptr(), text, len, &mut found),
            UserQuery::Name(_) => libc::getpwnam_r(name.as_ptr(), entry.as_mut_ptr(), text, len, &mut found),
        }
    };
    if failed != 0 || found.is_null() {
        return None;
    }
    // SAFETY: found: the entry is filled, and its strings lie in `room`, which lives until the end.
    unsafe {
        let e = entry.assume_init();
        let text = |p: *const libc::c_char| {
            if p.is_null() {
                String::new()
            } else {
                CStr::from_ptr(p).to_string_lossy().into_owned()
            }
        };
        Some(User {
            uid: e.pw_uid,
            gid: e.pw_gid,
            name: text(e.pw_name),
            home: text(e.pw_dir),
            shell: text(e.pw_shell),
        })
    }
}

/// All groups of a user, including the primary one.
fn groups(user: &User) -> Vec<libc::gid_t> {
    let Ok(name) = CString::new(user.name.as_str()) else {
        return vec![user.gid];
    };
    let mut groups = vec![0; 256];
    for _ in 0..2 {
        let mut count = groups.len() as i32;
        // SAFETY: `groups` has room for `count` ids, and `count` is a place to write to.
        let r = unsafe { libc::getgrouplist(name.as_ptr(), user.gid, groups.as_mut_ptr(), &mut count) };
        groups.resize(count.clamp(0, 65536) as usize, 0);
        if r >= 0 {
            return groups;
        }
    }
    vec![user.gid]
}

/// Switches to this user and its groups permanently, and keeps no capabilities except these. A program executed then
/// has that user's privileges and no others.
///
/// # Errors
/// `NotPermitted` if the system refuses; the caller must not continue then.
pub fn become_user(user: &User, kept: Caps) -> Result<()> {
    let groups = groups(user);
    let done = || -> io::Result<()> {
        let (permitted, _) = current()?;
        // SAFETY: integers, and a list of groups with its length. The C library changes all threads of the process.
        unsafe {
            check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0).into())?;
            check(libc::setgroups(groups.len(), groups.as_ptr()).into())?;
            check(libc::setresgid(user.gid, user.gid, user.gid).into())?;
            check(libc::setresuid(user.uid, user.uid, user.uid).into())?;
            check(libc::prctl(libc::PR_SET_KEEPCAPS, 0, 0, 0, 0).into())?;
        }
        let kept = permitted.and(kept);
        set(kept, kept)
    };
    done().map_err(|e| {
        Error::new(
            ErrorKind::NotPermitted,
            format!("cannot switch to user {}, who ran sudo", user.name),
        )
        .why(e.to_string())
        .hint("use --as-root to stay root")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let set = Caps::of(&[Cap::Bpf, Cap::SysPtrace]);
        assert_eq!(set, Caps(1 << 39 | 1 << 19));
        assert!(set.has(Cap::Bpf) && !set.has(Cap::Perfmon));
        assert!(set.holds(Caps::of(&[Cap::Bpf])) && !Caps::of(&[Cap::Bpf]).holds(set));
    }

    /// In a separate thread: capabilities are dropped permanently.
    #[test]
    fn dropped_capabilities_cannot_be_regained() {
        let test = || {
            let (permitted, _) = current().unwrap();
            let one = Caps::of(&[Cap::Syslog]);
            with_only(Caps::NONE, || assert_eq!(current().unwrap(), (permitted, Caps::NONE))).unwrap();
            assert_eq!(current().unwrap(), (permitted, permitted));
            keep(one).unwrap();
            assert_eq!(current().unwrap(), (permitted.and(one), permitted.and(one)));
            keep(permitted).unwrap();
            assert_eq!(current().unwrap().0, permitted.and(one));
        };
        std::thread::spawn(test).join().unwrap();
    }

    #[test]
    fn users_are_found() {
        let root = find_user(UserQuery::Uid(0)).expect("every system has a root");
        assert_eq!((root.uid, root.name.as_str()), (0, "root"));
        assert_eq!(find_user(UserQuery::Name("root")), Some(root.clone()));
        assert_eq!(find_user(UserQuery::Name("no such user")), None);
        assert_eq!(find_user(UserQuery::Name("a\0b")), None);
        assert!(groups(&root).contains(&root.gid));
    }
}

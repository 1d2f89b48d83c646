//! System calls behind safe functions, and the parsers of /proc. Most of the project's `unsafe` is here.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub mod cgroup;
pub mod clock;
pub mod directory_watch;
pub mod files;
pub mod interrupts;
pub mod memory;
pub mod pagemap;
pub mod perf;
pub mod process;
pub mod procfs;
pub mod ptrace;
pub mod sandbox;
pub mod sockets;
pub mod spawn;
pub mod threads;

fn check(r: i64) -> io::Result<i64> {
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r) }
}

/// A path as system calls take it.
///
/// # Errors
/// It has a NUL.
fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

//! System calls behind safe functions, and the parsers of /proc. Most of the project's `unsafe` is here.

use std::io;

pub mod cgroup;
pub mod clock;
pub mod directory_watch;
pub mod files;
pub mod interrupts;
pub mod memory;
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

//! perf_event_open(2) and its ioctls.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::check;

pub use perf_event_open_sys::bindings as perf;

/// Opens a perf event; `tid` -1 means every thread, `cpu` -1 every CPU. The descriptor is close-on-exec.
pub fn perf_event_open(attr: &mut perf::perf_event_attr, tid: i32, cpu: i32) -> io::Result<OwnedFd> {
    attr.size = size_of::<perf::perf_event_attr>() as u32;
    // SAFETY: `attr` is a valid attribute structure whose size field is set.
    let fd = unsafe { perf_event_open_sys::perf_event_open(attr, tid, cpu, -1, perf::PERF_FLAG_FD_CLOEXEC.into()) };
    check(fd.into())?;
    // SAFETY: the kernel has just returned this descriptor; it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What ordinary users may do with perf events, kernel.perf_event_paranoid; `None`: this kernel has none.
pub fn paranoid_level() -> Option<i32> {
    let text = super::procfs::read_text("/proc/sys/kernel/perf_event_paranoid").ok()?;
    text.trim().parse().ok()
}

fn perf_ioctl(fd: BorrowedFd<'_>, request: u32, arg: u64) -> io::Result<()> {
    // SAFETY: perf ioctls used here take an integer argument, no pointer.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, arg) }.into()).map(drop)
}

/// Attaches a BPF program to a perf event.
pub fn perf_set_bpf(event: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::SET_BPF, program.as_raw_fd() as u64)
}

/// Makes an event write to the ring of another one of the same thread.
pub fn perf_set_output(event: BorrowedFd<'_>, ring: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::SET_OUTPUT, ring.as_raw_fd() as u64)
}

/// Sends each tick of an event to a thread, as a signal that carries the event's descriptor.
pub fn signal_ticks(event: BorrowedFd<'_>, tid: u32, signal: i32) -> io::Result<()> {
    // include/uapi/asm-generic/fcntl.h
    const F_SETSIG: i32 = 10;
    const F_SETOWN_EX: i32 = 15;
    const F_OWNER_TID: i32 = 0;
    let fd = event.as_raw_fd();
    let owner = [F_OWNER_TID, tid as i32]; // struct f_owner_ex
    // SAFETY: the first reads the two numbers above, the others take integers.
    unsafe {
        check(libc::fcntl(fd, F_SETOWN_EX, owner.as_ptr()).into())?;
        check(libc::fcntl(fd, F_SETSIG, signal).into())?;
        let flags = check(libc::fcntl(fd, libc::F_GETFL).into())? as i32;
        check(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC).into())?;
    }
    Ok(())
}

/// Sets the period up to the next tick, and between those after it.
pub fn perf_set_period(event: BorrowedFd<'_>, period: u64) -> io::Result<()> {
    // SAFETY: the kernel reads one u64 at the address, which lives as long as the call.
    let r = unsafe { libc::ioctl(event.as_raw_fd(), perf::PERIOD as libc::Ioctl, &raw const period) };
    check(r.into()).map(drop)
}

pub fn perf_enable(event: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::ENABLE, 0)
}

pub fn perf_disable(event: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::DISABLE, 0)
}

/// Enables an event for one tick more; it is disabled at that tick.
pub fn perf_enable_once(event: BorrowedFd<'_>) -> io::Result<()> {
    perf_ioctl(event, perf::REFRESH, 1)
}

/// The kernel's number of an event, which no other one has.
///
/// # Errors
/// ENOTTY, EBADF: the descriptor is not (any more) that of an event.
pub fn perf_event_number(event: BorrowedFd<'_>) -> io::Result<u64> {
    let mut number = 0u64;
    // SAFETY: the kernel writes one u64 at the address.
    check(unsafe { libc::ioctl(event.as_raw_fd(), perf::ID as libc::Ioctl, &raw mut number) }.into())?;
    Ok(number)
}

/// The count of an event.
pub fn read_count(event: BorrowedFd<'_>) -> io::Result<u64> {
    let mut value = [0u8; 8];
    // SAFETY: `value` holds the eight bytes that an event without read_format returns.
    check(unsafe { libc::read(event.as_raw_fd(), value.as_mut_ptr().cast(), 8) } as i64)?;
    Ok(u64::from_le_bytes(value))
}

/// The kernel's events at instructions of user programs.
#[derive(Clone, Copy, Debug)]
pub struct Uprobes {
    kind: u32,
    /// Lowest bit of the semaphore's offset in the event's number.
    semaphore_bit: u32,
}

impl Uprobes {
    /// `None`: the kernel has none, or none with semaphores.
    pub fn of_kernel() -> Option<Uprobes> {
        const DEVICE: &str = "/sys/bus/event_source/devices/uprobe";
        let read = |name: &str| super::procfs::read_text(format!("{DEVICE}/{name}")).ok();
        let kind = read("type")?.trim().parse().ok()?;
        // `config:32-63`
        let format = read("format/ref_ctr_offset")?;
        let (first, last) = format.trim().strip_prefix("config:")?.split_once('-')?;
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        (first < last && last < 64).then_some(Uprobes {
            kind,
            semaphore_bit: first,
        })
    }

    /// Opens the event at an instruction of a file that a process has mapped. Offsets are those in the file; `semaphore`: of a
    /// counter of observers, 0 if there is none.
    ///
    /// # Errors
    /// Those of the kernel; `InvalidInput` for offsets that it cannot be given.
    pub fn open(self, pid: u32, path: &str, offset: u64, semaphore: u64) -> io::Result<OwnedFd> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let path = std::ffi::CString::new(path).map_err(|_| invalid())?;
        let config = semaphore << self.semaphore_bit;
        if config >> self.semaphore_bit != semaphore {
            return Err(invalid());
        }
        let mut attr = perf::perf_event_attr {
            type_: self.kind,
            config,
            ..Default::default()
        };
        // (The kernel copies the path during the call.)
        attr.__bindgen_anon_3.uprobe_path = path.as_ptr() as u64;
        attr.__bindgen_anon_4.probe_offset = offset;
        perf_event_open(&mut attr, pid as i32, -1)
    }
}

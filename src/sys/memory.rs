//! Memory of other processes and of this one.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Copies memory of another process, as much as is readable from `avma` on; returns the bytes copied (0 if none).
pub fn read_memory(pid: u32, avma: u64, buf: &mut [u8]) -> usize {
    let local = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    let remote = libc::iovec {
        iov_base: avma as *mut _,
        iov_len: buf.len(),
    };
    // SAFETY: the local iovec covers exactly `buf`; only the kernel accesses the remote address.
    let n = unsafe { libc::process_vm_readv(pid as i32, &local, 1, &remote, 1, 0) };
    n.max(0) as usize
}

/// Writes memory of another process, which must be writable there. True if all of it was written.
pub fn write_memory(pid: u32, avma: u64, bytes: &[u8]) -> bool {
    let local = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: avma as *mut _,
        iov_len: bytes.len(),
    };
    // SAFETY: the local iovec covers exactly `bytes`, which the kernel only reads; only it accesses the remote address.
    let n = unsafe { libc::process_vm_writev(pid as i32, &local, 1, &remote, 1, 0) };
    n == bytes.len() as isize
}

/// Copies pieces of memory of another process (address and length each), one after the other, up to the first that is
/// not readable; returns the bytes copied. Allocates nothing.
pub fn read_memory_pieces(pid: u32, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
    let mut copied = 0;
    for pieces in pieces.chunks(64) {
        let mut remote = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; 64];
        for (iovec, (at, len)) in remote.iter_mut().zip(pieces) {
            (iovec.iov_base, iovec.iov_len) = (*at as *mut _, *len);
        }
        let rest = &mut buf[copied..];
        let local = libc::iovec {
            iov_base: rest.as_mut_ptr().cast(),
            iov_len: rest.len(),
        };
        let count = pieces.len() as libc::c_ulong;
        // SAFETY: the local iovec covers exactly `rest`, and `remote` holds `count` of them; only the kernel accesses
        // the remote addresses.
        let n = unsafe { libc::process_vm_readv(pid as i32, &local, 1, remote.as_ptr(), count, 0) }.max(0) as usize;
        copied += n;
        if n < pieces.iter().map(|(_, len)| len).sum() {
            break;
        }
    }
    copied
}

/// Keeps up to 32 MiB of freed memory instead of returning it to the kernel: samples are freed constantly, and getting
/// a page again costs more than processing it.
pub fn keep_freed_memory() {
    // SAFETY: sets two numbers of the allocator.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 16 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 32 << 20);
    }
}

pub fn page_size() -> usize {
    // SAFETY: no pointers.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Maps a file that the kernel shares with us, for the ring buffer in `capture::common::perf_ring`, which unmaps it.
pub(crate) fn map_shared(file: BorrowedFd<'_>, bytes: usize) -> io::Result<*mut u8> {
    // SAFETY: a fresh mapping chosen by the kernel; the caller unmaps it.
    let p = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if p == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(p.cast())
    }
}

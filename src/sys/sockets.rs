//! Open files over Unix sockets (`SCM_RIGHTS`, unix(7)), which the standard library cannot send yet.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use super::check;
use crate::event::Pid;

/// Bytes of a control message with one descriptor, and the same as an aligned buffer.
const ONE: u32 = size_of::<RawFd>() as u32;
const CONTROL: usize = 8;
type Control = [u64; CONTROL];

/// Sends bytes, and with the first of them an open file. Returns how many bytes were sent.
///
/// # Errors
/// Those of sendmsg(2).
pub fn send_with_file(stream: &UnixStream, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control: Control = [0; CONTROL];
    // SAFETY: a zeroed header is valid. All pointers lead to values that live here. The control buffer has room for one
    // message with one descriptor (24 bytes), so the first header exists and its data is inside.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(ONE) as _;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(ONE) as _;
        libc::CMSG_DATA(header)
            .cast::<RawFd>()
            .write_unaligned(file.as_raw_fd());
        let sent = libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL);
        Ok(check(sent as i64)? as usize)
    }
}

/// Receives bytes, and the open file that was sent with them. Returns the number of bytes; 0 at the end.
///
/// # Errors
/// Those of recvmsg(2).
pub fn receive_with_file(stream: &UnixStream, buffer: &mut [u8]) -> io::Result<(usize, Option<File>)> {
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut control: Control = [0; CONTROL];
    // SAFETY: a zeroed header is valid. All pointers lead to values that live here. With room for one descriptor, the
    // kernel writes at most one control message, and closes what does not fit; the descriptor has no other owner.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_LEN(ONE) as _;
        let received = libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let received = check(received as i64)? as usize;
        let header = libc::CMSG_FIRSTHDR(&message);
        let is_file = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len as u64 >= u64::from(libc::CMSG_LEN(ONE));
        let file = is_file.then(|| {
            let descriptor = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            OwnedFd::from_raw_fd(descriptor).into()
        });
        Ok((received, file))
    }
}

/// The process at the other end, as its number was when it connected. `None`: it has no number here.
pub fn peer(stream: &UnixStream) -> Option<Pid> {
    // SAFETY: plain integers, for which zero is valid; pointer and size describe the structure that the kernel fills.
    let credentials = unsafe {
        let mut credentials: libc::ucred = std::mem::zeroed();
        let mut size = size_of::<libc::ucred>() as libc::socklen_t;
        check(i64::from(libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut size,
        )))
        .ok()?;
        credentials
    };
    Pid::try_from(credentials.pid).ok().filter(|pid| *pid != 0)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_peer_has_a_number() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(peer(&ours), Some(std::process::id()));
    }

    #[test]
    fn a_file_arrives_with_its_message() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (read, mut write) = crate::sys::files::pipe().unwrap();
        assert_eq!(send_with_file(&ours, b"one", read.as_fd()).unwrap(), 3);
        (&ours).write_all(b"two").unwrap();
        drop((read, ours));
        let mut buffer = [0; 3];
        let (n, file) = receive_with_file(&theirs, &mut buffer).unwrap();
        assert_eq!((n, &buffer), (3, b"one"));
        write.write_all(b"x").unwrap();
        drop(write);
        let mut text = String::new();
        file.expect("a file").read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        let (n, file) = receive_with_file(&theirs, &mut buffer).unwrap();
        assert_eq!((n, &buffer, file.is_none()), (3, b"two", true));
        assert_eq!(receive_with_file(&theirs, &mut buffer).unwrap().0, 0);
        assert_eq!(theirs.read(&mut buffer).unwrap(), 0);
    }
}

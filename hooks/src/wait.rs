//! Hooks on the system calls that event loops wait in.
//!
//! Threads may be cancelled in them, which unwinds the stack: hence `C-unwind`, and the end of the wait is reported from
//! a destructor.

use std::ffi::{c_int, c_void};

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use crate::got::{self, Which};
use crate::{MASKS, Wait, notify};

/// A wait that is being reported.
struct WaitGuard;

impl WaitGuard {
    fn begin() -> WaitGuard {
        notify(&MASKS.waits, |handler, cache| handler.on_wait(cache, Wait::Enter));
        WaitGuard
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        notify(&MASKS.waits, |handler, cache| handler.on_wait(cache, Wait::Leave));
    }
}

macro_rules! wait {
    ($($hook:ident($($argument:ident: $type:ty),*) is $which:ident;)*) => {$(
        /// # Safety
        /// As the function of this name.
        pub unsafe extern "C-unwind" fn $hook($($argument: $type),*) -> c_int {
            let real = got::real(Which::$which);
            // SAFETY: the function of this name, as the loader found it.
            let real: unsafe extern "C-unwind" fn($($type),*) -> c_int = unsafe { std::mem::transmute(real) };
            let _waiting = WaitGuard::begin();
            // SAFETY: the caller's own arguments.
            unsafe { real($($argument),*) }
        }
    )*};
}

wait! {
    epoll_wait(fd: c_int, events: *mut epoll_event, most: c_int, timeout: c_int) is EpollWait;
    epoll_pwait(fd: c_int, events: *mut epoll_event, most: c_int, timeout: c_int, mask: *const sigset_t) is EpollPwait;
    epoll_pwait2(fd: c_int, events: *mut epoll_event, most: c_int, timeout: *const timespec, mask: *const sigset_t)
        is EpollPwait2;
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) is Poll;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) is Ppoll;
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) is Select;
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t) is Pselect;
    poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, length: usize) is PollChk;
    ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, length: usize)
        is PpollChk;
}

/// The hooks' addresses, for the table in `got.rs`.
pub fn address(which: Which) -> Option<*const c_void> {
    Some(match which {
        Which::EpollWait => epoll_wait as *const c_void,
        Which::EpollPwait => epoll_pwait as *const c_void,
        Which::EpollPwait2 => epoll_pwait2 as *const c_void,
        Which::Poll => poll as *const c_void,
        Which::Ppoll => ppoll as *const c_void,
        Which::Select => select as *const c_void,
        Which::Pselect => pselect as *const c_void,
        Which::PollChk => poll_chk as *const c_void,
        Which::PpollChk => ppoll_chk as *const c_void,
        _ => return None,
    })
}

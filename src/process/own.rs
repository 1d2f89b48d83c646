//! Threads of our own process: who they are, their clocks and timers, signals to them. System calls behind safe
//! functions; those that a signal handler may use say so.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::sys;
use crate::sample::{Pid, Tid};

/// `pthread_self()`: the thread pointer, and how Python calls a thread (`threading.get_ident`). For signal handlers too.
pub fn thread_pointer() -> u64 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::pthread_self() as u64 }
}

/// Bytes of a thread descriptor that are searched for the thread's id: glibc 2.36 has it at 720, musl 1.2.3 at 48.
const DESCRIPTOR: usize = 2048;

/// Where the C library keeps a thread's id in its descriptor: at the same place in two threads.
fn tid_offset() -> Option<usize> {
    fn places() -> Vec<usize> {
        let (mut bytes, tid) = ([0; DESCRIPTOR], sys::own_tid());
        let n = sys::read_memory(std::process::id(), thread_pointer(), &mut bytes);
        let words = bytes[..n].chunks_exact(4).enumerate();
        words
            .filter(|(_, w)| w == &tid.to_le_bytes())
            .map(|(i, _)| 4 * i)
            .collect()
    }
    static OFFSET: OnceLock<Option<usize>> = OnceLock::new();
    *OFFSET.get_or_init(|| {
        let here = places();
        let there = std::thread::spawn(places).join().unwrap_or_default();
        here.into_iter().find(|at| there.contains(at))
    })
}

/// The kernel's number of the thread with this pointer (`pthread_t`); `None` if there is no such thread. Any number may
/// be asked for: nothing is taken for a descriptor that does not look like one.
pub fn tid_of(pointer: u64) -> Option<Tid> {
    if pointer == thread_pointer() {
        return Some(sys::own_tid() as Tid);
    }
    let (pid, offset) = (std::process::id(), tid_offset()?);
    let mut word = [0; 8];
    // The descriptor's first word points to itself (glibc: tcbhead_t.tcb; musl: pthread.self).
    let is_own = sys::read_memory(pid, pointer, &mut word) == 8 && u64::from_le_bytes(word) == pointer;
    let mut tid = [0; 4];
    let read = is_own && sys::read_memory(pid, pointer.checked_add(offset as u64)?, &mut tid) == 4;
    // The kernel clears it when the thread ends.
    let tid = u32::from_le_bytes(tid);
    (read && tid != 0 && thread_exists(pid, tid)).then_some(tid)
}

/// Finds the descriptor of a thread on its stack, which lies below `end`, the end of the mapping around it.
pub fn pointer_on_stack(tid: Tid, end: u64) -> Option<u64> {
    /// Bytes below the end: the descriptor and the thread-local variables of libraries lie there.
    const SEARCHED: u64 = 64 << 10;
    let start = end.checked_sub(SEARCHED)?;
    let (mut bytes, offset) = (vec![0; SEARCHED as usize], tid_offset()?);
    let n = sys::read_memory(std::process::id(), start, &mut bytes);
    let at = |at: usize| {
        bytes
            .get(at..at + 8)
            .map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")))
    };
    (0..n).step_by(16).rev().find_map(|i| {
        let pointer = start + i as u64;
        let is = at(i) == Some(pointer) && at(i + offset)? as u32 == tid;
        is.then_some(pointer)
    })
}

/// Is this a thread of the process (now)? For signal handlers too.
pub fn thread_exists(pid: Pid, tid: Tid) -> bool {
    // SAFETY: integers only; signal 0 is not sent.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, 0) == 0 }
}

/// `siginfo_t` of a queued signal, or of a timer's, as the kernel has it (include/uapi/asm-generic/siginfo.h, Linux 6.18).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Info {
    signal: i32,
    errno: i32,
    /// SI_QUEUE or SI_TIMER.
    pub code: i32,
    _pad: i32,
    /// Who sent it; number of the timer.
    pub pid: i32,
    /// User of who sent it; how often the timer ticked unheard.
    pub uid: u32,
    pub value: u64,
    _rest: [u64; 12],
}

/// Sends a signal with a value to one thread of this process.
///
/// # Errors
/// ESRCH: it has ended. EAGAIN: too many signals wait to be delivered.
pub fn send(pid: Pid, tid: Tid, signal: i32, value: u64) -> io::Result<()> {
    let info = Info {
        signal,
        errno: 0,
        code: libc::SI_QUEUE,
        _pad: 0,
        pid: pid as i32,
        uid: sys::effective_uid(),
        value,
        _rest: [0; 12],
    };
    // SAFETY: the structure has the kernel's layout and size (128 bytes) and lives as long as the call.
    let r = unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, &raw const info) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// From now on no signal is delivered to the calling thread.
pub fn block_signals() {
    // SAFETY: the set is filled before it is used, and lives as long as the call.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

/// Does any signal but this one wait to be delivered to the calling thread or its process? For signal handlers too.
pub fn other_signal_waits(but: i32) -> bool {
    let mut set = 0u64;
    // SAFETY: the kernel writes eight bytes, the size of its set.
    let r = unsafe { libc::syscall(libc::SYS_rt_sigpending, &raw mut set, size_of::<u64>()) };
    r != 0 || set & !(1 << (but - 1)) != 0
}

/// The kernel's name of a thread's CPU clock (include/linux/posix-timers.h: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED).
fn cpu_clock(tid: Tid) -> libc::clockid_t {
    (!(tid as i32) << 3) | 6
}

/// CPU time of a thread of ours, ns; `None` if it has ended.
pub fn cpu_time(tid: Tid) -> Option<u64> {
    sys::read_clock(cpu_clock(tid))
}

/// A timer of a thread's CPU time that sends the thread a signal; deleted when dropped.
#[derive(Debug)]
pub struct CpuTimer(i32);

impl CpuTimer {
    /// A timer that does not run yet.
    ///
    /// # Errors
    /// EINVAL: the thread has ended. EAGAIN: too many timers and signals wait (RLIMIT_SIGPENDING).
    pub fn new(tid: Tid, signal: i32, value: u64) -> io::Result<CpuTimer> {
        // SAFETY: plain integers, for which zero is valid; the structure has fields that cannot be named.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        event.sigev_value.sival_ptr = value as *mut _;
        event.sigev_notify_thread_id = tid as i32;
        let mut id = 0i32;
        // The kernel's own number (int), which the C library would hide in an address.
        // SAFETY: both structures live as long as the call, and the kernel writes an int.
        let r = unsafe { libc::syscall(libc::SYS_timer_create, cpu_clock(tid), &raw const event, &raw mut id) };
        if r < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(CpuTimer(id))
        }
    }

    /// Lets it tick after `first` ns of CPU time, then every `period` ns; `(0, 0)` stops it.
    pub fn set(&self, first: u64, period: u64) {
        let time = |ns: u64| libc::timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        };
        let times = libc::itimerspec {
            it_interval: time(period),
            it_value: time(first),
        };
        // SAFETY: the structure lives as long as the call. The timer is ours; if its thread has ended, nothing happens.
        unsafe {
            let none: *mut libc::itimerspec = std::ptr::null_mut();
            libc::syscall(libc::SYS_timer_settime, self.0, 0, &raw const times, none)
        };
    }
}

impl Drop for CpuTimer {
    fn drop(&mut self) {
        // SAFETY: an integer only; the timer is ours.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.0) };
    }
}

/// Waits until the word is no longer `value`, at most so long; may return early.
pub fn wait_while(word: &AtomicU32, value: u32, most: Duration) {
    let time = libc::timespec {
        tv_sec: most.as_secs() as i64,
        tv_nsec: most.subsec_nanos().into(),
    };
    // SAFETY: the word and the time live as long as the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            value,
            &raw const time,
        )
    };
}

/// Wakes who waits for the word. For signal handlers too.
pub fn wake(word: &AtomicU32) {
    // SAFETY: the address is only looked at by the kernel.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        )
    };
}

/// Gives the memory of whole pages in `bytes` back; what was there reads as zeros.
pub fn give_back(bytes: &mut [u8]) {
    let page = sys::page_size();
    let skip = bytes.as_ptr().align_offset(page);
    let Some(whole) = bytes.get_mut(skip..).map(|b| (b.as_mut_ptr(), b.len() / page * page)) else {
        return;
    };
    // SAFETY: whole pages of plain bytes, which are borrowed for writing; anonymous memory reads as zeros afterwards
    // (the allocator has it from an anonymous mapping).
    unsafe { libc::madvise(whole.0.cast(), whole.1, libc::MADV_DONTNEED) };
}

/// Counts the libraries that were loaded and unloaded so far.
pub fn loads() -> u64 {
    extern "C" fn first(info: *mut libc::dl_phdr_info, _: usize, out: *mut libc::c_void) -> i32 {
        // SAFETY: `info` is valid during the call, and `out` is the `u64` given below.
        unsafe { *out.cast::<u64>() = (*info).dlpi_adds.wrapping_mul(31).wrapping_add((*info).dlpi_subs) };
        1 // enough
    }
    let mut count = 0u64;
    // SAFETY: the callback keeps to its arguments.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut count).cast()) };
    count
}

/// Set in a child after `fork`, once it was asked for in the parent.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A number that is another one in each process after `fork`.
pub fn generation() -> u32 {
    static ASKED: OnceLock<()> = OnceLock::new();
    extern "C" fn forked() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    ASKED.get_or_init(|| {
        // SAFETY: the function only adds to a number.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_known_by_their_pointers() {
        let (tell, told) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            tell.send((thread_pointer(), sys::own_tid() as Tid))
                .expect("a receiver");
            let _ = wait.recv();
        });
        let (pointer, tid) = told.recv().expect("the thread tells");
        assert_eq!(tid_of(pointer), Some(tid));
        assert_eq!(tid_of(thread_pointer()), Some(sys::own_tid() as Tid));
        assert!(cpu_time(tid).is_some());
        drop(go);
        other.join().expect("it ends");
        for wrong in [pointer, 0, 1, 8, u64::MAX, u64::MAX - 7, &raw const tid as u64] {
            assert_eq!(tid_of(wrong), None, "{wrong:x}");
        }
        assert_eq!(cpu_time(tid), None);
        assert_eq!(
            send(std::process::id(), tid, 0, 0).unwrap_err().raw_os_error(),
            Some(libc::ESRCH)
        );
    }
}

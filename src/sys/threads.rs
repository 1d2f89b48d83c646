//! Threads of our own process: their IDs, clocks and timers, and signals to them. System calls behind safe functions;
//! those that a signal handler may use say so.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::arch::DESCRIPTOR_BEGINS_WITH_ADDRESS;
use crate::event::{Pid, Tid};
use crate::sys;

/// `pthread_self()`: the thread pointer, and Python's ID of a thread (`threading.get_ident`). For signal handlers too.
pub fn thread_pointer() -> u64 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::pthread_self() as u64 }
}

/// Bytes of a thread descriptor that are searched for the thread ID: it is at 720 in glibc 2.36, at 48 in musl 1.2.3.
const DESCRIPTOR: usize = 2048;

/// Where the C library keeps the thread ID in the descriptor: at the same offset in two threads.
fn tid_offset() -> Option<usize> {
    fn offsets() -> Vec<usize> {
        let (mut bytes, tid) = ([0; DESCRIPTOR], sys::process::current_tid());
        let n = sys::memory::read_memory(std::process::id(), thread_pointer(), &mut bytes);
        let words = bytes[..n].chunks_exact(4).enumerate();
        words
            .filter(|(_, w)| w == &tid.to_le_bytes())
            .map(|(i, _)| 4 * i)
            .collect()
    }
    static OFFSET: OnceLock<Option<usize>> = OnceLock::new();
    if let Some(known) = OFFSET.get() {
        return *known;
    }
    // Later there may be room for another thread.
    let other = std::thread::Builder::new().spawn(offsets).ok()?;
    let (here, there) = (offsets(), other.join().unwrap_or_default());
    *OFFSET.get_or_init(|| here.into_iter().find(|at| there.contains(at)))
}

/// The kernel's ID of the thread with this thread pointer (`pthread_t`); `None` if there is no such thread. Any number may be
/// passed: memory that does not look like a descriptor is not used.
pub fn tid_of(pthread: u64) -> Option<Tid> {
    if pthread == thread_pointer() {
        return Some(sys::process::current_tid() as Tid);
    }
    let (pid, offset) = (std::process::id(), tid_offset()?);
    let mut word = [0; 8];
    let is_descriptor = sys::memory::read_memory(pid, pthread, &mut word) == 8
        && (!DESCRIPTOR_BEGINS_WITH_ADDRESS || u64::from_le_bytes(word) == pthread);
    let mut tid = [0; 4];
    let read = is_descriptor && sys::memory::read_memory(pid, pthread.checked_add(offset as u64)?, &mut tid) == 4;
    // The kernel clears it when the thread exits.
    let tid = u32::from_le_bytes(tid);
    (read && tid != 0 && thread_exists(pid, tid)).then_some(tid)
}

/// Finds the descriptor of a thread on its stack, below `end`, the end of the mapping that holds the stack.
pub fn thread_pointer_on_stack(tid: Tid, end: u64) -> Option<u64> {
    /// Bytes searched below the end: they hold the descriptor and the thread-local variables of libraries.
    const SEARCHED: u64 = 64 << 10;
    let start = end.checked_sub(SEARCHED)?;
    let (mut bytes, offset) = (vec![0; SEARCHED as usize], tid_offset()?);
    let n = sys::memory::read_memory(std::process::id(), start, &mut bytes);
    let at = |at: usize| {
        bytes
            .get(at..at + 8)
            .map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")))
    };
    (0..n).step_by(16).rev().find_map(|i| {
        let pthread = start + i as u64;
        // Elsewhere the list that all descriptors are in is just before the thread's number (glibc, nptl/descr.h).
        let is_pointer = |word: usize| at(word).is_some_and(|p| p > 1 << 16 && p % 8 == 0);
        let is = if DESCRIPTOR_BEGINS_WITH_ADDRESS {
            at(i) == Some(pthread)
        } else {
            offset >= 16 && is_pointer(i + offset - 16) && is_pointer(i + offset - 8)
        };
        let is = is && at(i + offset)? as u32 == tid;
        is.then_some(pthread)
    })
}

/// Is this a thread of the process (now)? For signal handlers too.
pub fn thread_exists(pid: Pid, tid: Tid) -> bool {
    // SAFETY: integers only; signal 0 is not sent.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, 0) == 0 }
}

/// `siginfo_t` of a queued signal, or of a timer's, in the kernel's layout (include/uapi/asm-generic/siginfo.h, Linux
/// 6.18).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SigInfo {
    signal: i32,
    errno: i32,
    /// SI_QUEUE or SI_TIMER.
    pub code: i32,
    _pad: i32,
    /// Its sender, or the ID of the timer.
    pub pid: i32,
    /// User of the sender, or the overrun count of the timer.
    pub uid: u32,
    pub value: u64,
    _rest: [u64; 12],
}

/// Sends a signal with a value to one thread of this process.
///
/// # Errors
/// ESRCH: it has exited. EAGAIN: too many signals are queued.
pub fn send(pid: Pid, tid: Tid, signal: i32, value: u64) -> io::Result<()> {
    let info = SigInfo {
        signal,
        errno: 0,
        code: libc::SI_QUEUE,
        _pad: 0,
        pid: pid as i32,
        uid: sys::process::effective_uid(),
        value,
        _rest: [0; 12],
    };
    // SAFETY: the structure has the kernel's layout and size (128 bytes) and lives as long as the call.
    let r = unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, &raw const info) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// All signals but those of faults: one that is blocked would end the process without a word, since the kernel then ignores
/// the handlers that print a traceback or write a crash report.
pub fn all_but_faults() -> libc::sigset_t {
    // SAFETY: the set is filled before it is used.
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut signals);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
            libc::sigdelset(&mut signals, fault);
        }
        signals
    }
}

/// Blocks all signals but those of faults in the calling thread.
pub fn block_signals() {
    // SAFETY: the set lives as long as the call.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &all_but_faults(), std::ptr::null_mut()) };
}

/// Is any signal other than this one pending for the calling thread or its process? For signal handlers too.
pub fn other_signal_waits(but: i32) -> bool {
    let mut set = 0u64;
    // SAFETY: the kernel writes eight bytes, the size of its set.
    let r = unsafe { libc::syscall(libc::SYS_rt_sigpending, &raw mut set, size_of::<u64>()) };
    r != 0 || set & !(1 << (but - 1)) != 0
}

/// The kernel's clock ID of a thread's CPU time (include/linux/posix-timers.h: CPUCLOCK_PERTHREAD_MASK |
/// CPUCLOCK_SCHED).
fn cpu_clock(tid: Tid) -> libc::clockid_t {
    (!(tid as i32) << 3) | 6
}

/// CPU time of a thread of ours, ns; `None` if it has exited.
pub fn cpu_time(tid: Tid) -> Option<u64> {
    sys::clock::read_clock(cpu_clock(tid))
}

/// A timer of a thread's CPU time that sends the thread a signal; deleted when dropped.
#[derive(Debug)]
pub struct CpuTimer(i32);

impl CpuTimer {
    /// Creates a disarmed timer.
    ///
    /// # Errors
    /// EINVAL: the thread has exited. EAGAIN: too many timers and queued signals (RLIMIT_SIGPENDING).
    pub fn new(tid: Tid, signal: i32, value: u64) -> io::Result<CpuTimer> {
        // SAFETY: plain integers, for which zero is valid; the structure has fields that cannot be named.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        event.sigev_value.sival_ptr = value as *mut _;
        event.sigev_notify_thread_id = tid as i32;
        let mut id = 0i32;
        // The kernel's own ID (int), which the C library would hide in an address.
        // SAFETY: both structures live as long as the call, and the kernel writes an int.
        let r = unsafe { libc::syscall(libc::SYS_timer_create, cpu_clock(tid), &raw const event, &raw mut id) };
        if r < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(CpuTimer(id))
        }
    }

    /// Arms it: it ticks after `first` ns of CPU time, then every `period` ns; `(0, 0)` disarms it.
    pub fn set(&self, first: u64, period: u64) {
        let time = |ns: u64| libc::timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        };
        let times = libc::itimerspec {
            it_interval: time(period),
            it_value: time(first),
        };
        // SAFETY: the structure lives as long as the call. The timer is ours; if its thread has exited, nothing
        // happens.
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
pub fn wait_while(word: &AtomicU32, value: u32, timeout: Duration) {
    let time = libc::timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
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

/// Wakes the threads that wait for the word. For signal handlers too.
pub fn wake(word: &AtomicU32) {
    // SAFETY: only the kernel accesses the address.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        )
    };
}

/// Returns the memory of all complete pages in `bytes` to the kernel; they read as zeros afterwards.
pub fn release_pages(bytes: &mut [u8]) {
    let page = sys::memory::page_size();
    let skip = bytes.as_ptr().align_offset(page);
    let Some(pages) = bytes.get_mut(skip..).map(|b| (b.as_mut_ptr(), b.len() / page * page)) else {
        return;
    };
    // SAFETY: complete pages of plain bytes, which are borrowed for writing; anonymous memory reads as zeros afterwards
    // (the allocator has it from an anonymous mapping).
    unsafe { libc::madvise(pages.0.cast(), pages.1, libc::MADV_DONTNEED) };
}

/// Number of libraries loaded and unloaded so far.
pub fn library_load_count() -> u64 {
    extern "C" fn first(info: *mut libc::dl_phdr_info, _: usize, out: *mut libc::c_void) -> i32 {
        // SAFETY: `info` is valid during the call, and `out` is the `u64` given below.
        unsafe { *out.cast::<u64>() = (*info).dlpi_adds.wrapping_mul(31).wrapping_add((*info).dlpi_subs) };
        1 // one is enough
    }
    let mut count = 0u64;
    watch_forks();
    in_loader();
    // SAFETY: the callback uses its arguments as specified.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut count).cast()) };
    out_of_loader();
    count
}

/// Changed in a child after `fork`, once [`watch_forks`] was called in the parent.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A number that differs in each process after `fork`.
pub fn generation() -> u32 {
    watch_forks();
    GENERATION.load(Ordering::Relaxed)
}

/// A lock of the C library, since it is held across `fork`.
struct ForkLock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: it is made for several threads.
unsafe impl Sync for ForkLock {}

/// Held by a thread of ours that calls the loader, and by one that forks: in a child that was forked while another thread was in
/// the loader, the loader's lock stays taken (glibc 2.36), and the program could load no library there.
static LOADER: ForkLock = ForkLock(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

extern "C" fn in_loader() {
    // SAFETY: a mutex that was initialized statically and is never moved.
    unsafe { libc::pthread_mutex_lock(LOADER.0.get()) };
}

extern "C" fn out_of_loader() {
    // SAFETY: as above; the calling thread, or the one of the parent that it is a copy of, holds it.
    unsafe { libc::pthread_mutex_unlock(LOADER.0.get()) };
}

/// Has what is to be done at each `fork` of this process done from now on.
fn watch_forks() {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    extern "C" fn in_child() {
        out_of_loader();
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    REGISTERED.get_or_init(|| {
        // SAFETY: the functions use a lock and a number.
        unsafe { libc::pthread_atfork(Some(in_loader), Some(out_of_loader), Some(in_child)) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child would wait forever for a lock that a thread of its parent has taken. In a process of its own: threads of other
    /// tests are in the loader too, whenever a panic unwinds their stack.
    #[test]
    fn a_child_that_was_forked_during_a_count_can_call_the_loader() {
        const NAME: &str = "sys::threads::tests::a_child_that_was_forked_during_a_count_can_call_the_loader";
        const ALONE: &str = "NATIVEPROF_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let mut alone = std::process::Command::new(std::env::current_exe().expect("our file"));
            alone.args(["--exact", NAME, "--test-threads=1"]).env(ALONE, "");
            let output = alone.output().expect("it starts");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    library_load_count();
                }
            });
            let failed = (0..100).filter(|_| {
                // SAFETY: the child calls nothing that allocates, and ends at once.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: no preconditions.
                    unsafe { libc::alarm(60) };
                    library_load_count();
                    // SAFETY: no preconditions.
                    unsafe { libc::_exit(0) };
                }
                let mut status = -1;
                // SAFETY: the status is written to.
                let waited = unsafe { libc::waitpid(child, &mut status, 0) };
                (waited, status) != (child, 0)
            });
            let failed = failed.count();
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(failed, 0);
        });
    }

    #[test]
    fn threads_are_found_by_their_pointers() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            sender
                .send((thread_pointer(), sys::process::current_tid() as Tid))
                .expect("a receiver");
            let _ = wait.recv();
        });
        let (pthread, tid) = receiver.recv().expect("the thread sends");
        assert_eq!(tid_of(pthread), Some(tid));
        assert_eq!(tid_of(thread_pointer()), Some(sys::process::current_tid() as Tid));
        assert!(cpu_time(tid).is_some());
        drop(go);
        other.join().expect("it ends");
        for wrong in [pthread, 0, 1, 8, u64::MAX, u64::MAX - 7, &raw const tid as u64] {
            assert_eq!(tid_of(wrong), None, "{wrong:x}");
        }
        assert_eq!(cpu_time(tid), None);
        assert_eq!(
            send(std::process::id(), tid, 0, 0).unwrap_err().raw_os_error(),
            Some(libc::ESRCH)
        );
    }
}

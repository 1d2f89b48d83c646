//! Sampling the current process: this test program samples itself. tests/python.rs does so with Python.

use std::hint::black_box;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nativeprof::capture::signal::SamplingClock;
use nativeprof::in_process::thread_stack::{StackEntry, StackSampler, TIMEOUT, ThreadStack};
use nativeprof::in_process::{ProfilerConfig, Recorder};
use nativeprof::profile::model::Profile;
use nativeprof::sys::{files, procfs, threads};

use common::chance::{assert_likely, patience, repeated};
mod common;

#[inline(never)]
fn spin(until: &AtomicBool) -> u64 {
    let mut n = 0u64;
    while !until.load(Ordering::Relaxed) {
        n = black_box(n.wrapping_mul(7) + 1);
    }
    n
}

#[inline(never)]
fn around(until: &AtomicBool) -> u64 {
    spin(until) + 1
}

/// Threads that run until this is dropped, with their `pthread_self`.
struct Crowd {
    ended: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
    thread_pointers: Vec<u64>,
}

impl Crowd {
    fn new(count: usize, work: fn(&AtomicBool)) -> Crowd {
        Crowd::prepared(count, || {}, work)
    }

    /// Threads that have done the first before this returns.
    fn prepared(count: usize, first: fn(), work: fn(&AtomicBool)) -> Crowd {
        let ended = Arc::new(AtomicBool::new(false));
        let (mut threads, mut thread_pointers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let thread_pointer = Arc::new(AtomicU64::new(0));
            let (ended, shared) = (ended.clone(), thread_pointer.clone());
            threads.push(thread::spawn(move || {
                first();
                shared.store(threads::thread_pointer(), Ordering::Release);
                work(&ended);
            }));
            while thread_pointer.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            thread_pointers.push(thread_pointer.load(Ordering::Acquire));
        }
        Crowd {
            ended,
            threads,
            thread_pointers,
        }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn stack(stacks: &StackSampler, thread_pointer: u64) -> Vec<StackEntry> {
    match stacks.get(thread_pointer, 100) {
        ThreadStack::Stack(entries) => entries,
        ThreadStack::Late(tid) => stacks.later(tid, 100, 10 * TIMEOUT),
    }
}

/// The stack of a thread once this function is on it.
fn stack_with(stacks: &StackSampler, thread_pointer: u64, function: &str) -> Vec<StackEntry> {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let found = stack(stacks, thread_pointer);
        if names(&found).iter().any(|name| name.contains(function)) {
            return found;
        }
        assert!(Instant::now() < end, "{function} is not on the stack: {found:#?}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[inline(never)]
fn current_stack(stacks: &StackSampler) -> Vec<StackEntry> {
    black_box(stack(stacks, threads::thread_pointer()))
}

fn names(entries: &[StackEntry]) -> Vec<&str> {
    entries
        .iter()
        .map(|e| e.name.rsplit("::").next().unwrap_or_default())
        .collect()
}

#[test]
fn stacks_of_threads_that_run_and_sleep() {
    let _live = common::live();
    let stacks = StackSampler::new().expect("stacks can be had");
    let busy = Crowd::new(1, |ended| {
        black_box(around(ended));
    });
    let found = stack_with(&stacks, busy.thread_pointers[0], "spin");
    assert_eq!(names(&found)[..2], ["spin", "around"], "{found:#?}");
    for e in &found {
        assert!(e.address >= e.start, "{e:?}");
    }
    let asleep = Crowd::new(1, |ended| {
        while !ended.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let found = stack_with(&stacks, asleep.thread_pointers[0], "nanosleep");
    assert!(names(&found).contains(&"sleep"), "{found:#?}");
    // the current thread
    let found = current_stack(&stacks);
    assert!(names(&found).contains(&"current_stack"), "{found:#?}");
    // no such thread, an exited thread, and a limit of frames
    for wrong in [0, 1, 0x1000, u64::MAX] {
        assert_eq!(stacks.get(wrong, 100), ThreadStack::Stack(Vec::new()));
    }
    let thread_pointer = busy.thread_pointers[0];
    drop(busy);
    assert_eq!(stacks.get(thread_pointer, 100), ThreadStack::Stack(Vec::new()));
    let ThreadStack::Stack(few) = stacks.get(threads::thread_pointer(), 2) else {
        panic!("oneself is never late")
    };
    assert_eq!(few.len(), 2);
}

/// Most of these threads wait for a CPU when their stack is requested: they respond when they have one, which is not
/// lost.
#[test]
fn threads_that_wait_for_a_cpu_have_stacks_too() {
    repeated(|| {
        let _live = common::live();
        let stacks = StackSampler::new().expect("stacks can be had");
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let crowd = Crowd::new(8 * cpus, |ended| {
            black_box(around(ended));
        });
        let (mut requested, mut empty) = (0, 0);
        for _ in 0..10 {
            for thread_pointer in &crowd.thread_pointers {
                let found = match stacks.get(*thread_pointer, 100) {
                    ThreadStack::Late(tid) => stacks.later(tid, 100, TIMEOUT),
                    ThreadStack::Stack(found) => found,
                };
                requested += 1;
                empty += usize::from(found.is_empty());
                let names = names(&found);
                assert!(found.is_empty() || names.contains(&"around"), "{names:?}");
            }
        }
        assert_likely!(empty <= requested / 100, "{empty} of {requested} without a stack");
    });
}

#[test]
fn a_thread_that_blocks_signals_delays_no_one() {
    let _live = common::live();
    let stacks = StackSampler::new().expect("stacks can be had");
    let deaf = Crowd::prepared(1, threads::block_signals, |ended| {
        black_box(around(ended));
    });
    let began = Instant::now();
    for _ in 0..20 {
        let found = match stacks.get(deaf.thread_pointers[0], 100) {
            ThreadStack::Late(tid) => stacks.later(tid, 100, TIMEOUT),
            ThreadStack::Stack(found) => found,
        };
        assert_eq!(found, []);
    }
    // Nor does it get a signal that it did not ask for, once it waits for all of them.
    let tid = threads::tid_of(deaf.thread_pointers[0]).expect("a thread that runs");
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).expect("its status");
    let pending = procfs::field(&status, "SigPnd").expect("pending signals");
    assert_eq!(u64::from_str_radix(pending, 16), Ok(0), "{status}");
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "bounded, however busy the machine is"
    );
}

fn record(clock: SamplingClock, threads: Option<Vec<u64>>, work: impl FnOnce()) -> Profile {
    record_at(100, clock, threads, work).0
}

/// A profile, and why it has fewer samples per second than this.
fn record_at(
    rate: u64,
    clock: SamplingClock,
    threads: Option<Vec<u64>>,
    work: impl FnOnce(),
) -> (Profile, Option<String>) {
    let config = ProfilerConfig {
        rate,
        clock,
        threads,
        native: true,
        by_thread: false,
        allocations: None,
    };
    let recorder = Recorder::start(config).expect("a recording");
    let limitation = recorder.limitation().map(ToString::to_string);
    work();
    (recorder.stop().expect("a profile"), limitation)
}

/// Samples with a function of this name on their stack.
fn samples(profile: &Profile, name: &str) -> u64 {
    let is = |node: usize| {
        let frame = &profile.frames[profile.nodes[node].frame as usize];
        frame.name.rsplit("::").next() == Some(name)
    };
    let mut under = vec![false; profile.nodes.len()];
    let self_counts = profile.self_counts();
    (0..profile.nodes.len())
        .map(|i| {
            under[i] = is(i) || under[profile.nodes[i].parent as usize];
            if under[i] { self_counts[i] } else { 0 }
        })
        .sum()
}

#[test]
fn a_recording_shows_where_cpu_time_goes() {
    repeated(|| {
        let _live = common::live();
        let busy = Crowd::new(1, |ended| {
            black_box(around(ended));
        });
        let profile = record(SamplingClock::Cpu, None, || {
            thread::sleep(Duration::from_millis(300));
            // Short-lived threads are sampled, too.
            for _ in 0..5 {
                drop(Crowd::new(2, |ended| {
                    let began = Instant::now();
                    while began.elapsed() < Duration::from_millis(40) && !ended.load(Ordering::Relaxed) {
                        black_box(began);
                    }
                }));
            }
        });
        drop(busy);
        let q = &profile.meta.quality;
        assert_likely!(q.taken > 5 && q.exact + q.repaired == q.taken, "{q:?}");
        let spun = samples(&profile, "spin");
        assert_likely!(spun * 10 > q.taken * 7, "{spun} of {q:?}");
        assert_eq!(samples(&profile, "around"), spun);
    });
}

#[test]
fn wall_time_includes_sleeping_threads() {
    repeated(|| {
        let _live = common::live();
        let asleep = Crowd::new(3, |ended| {
            while !ended.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(50));
            }
        });
        let profile = record(SamplingClock::Wall, Some(asleep.thread_pointers.clone()), || {
            thread::sleep(Duration::from_millis(500));
        });
        let q = &profile.meta.quality;
        assert_likely!(q.taken > 30 && q.exact + q.repaired == q.taken, "{q:?}");
        assert_likely!(samples(&profile, "sleep") * 10 >= q.taken * 9, "{q:?}");
        // All of it is wall time off the CPU, in that state.
        let of = |name: &str| {
            let value = profile.find_value(name).expect("recorded");
            profile.amounts(value)[0]
        };
        let waiting = samples(&profile, "[waiting: sleep]");
        assert_likely!(waiting * 10 >= q.taken * 9, "{waiting} of {q:?}");
        assert_likely!(
            of("off_cpu") * 10 >= of("wall") * 9,
            "{} of {} ns",
            of("off_cpu"),
            of("wall")
        );
        assert_eq!(of("cpu") + of("off_cpu"), of("wall"));
    });
}

/// As from outside: what polls one descriptor waits for that.
#[test]
fn a_poll_of_one_descriptor_is_a_wait_for_it() {
    repeated(|| {
        let _live = common::live();
        let asleep = Crowd::new(2, |ended| {
            let (reader, _writer) = std::io::pipe().expect("a pipe");
            while !ended.load(Ordering::Relaxed) {
                files::poll(&[reader.as_fd()], Duration::from_millis(50)).expect("it can be polled");
            }
        });
        let profile = record(SamplingClock::Wall, Some(asleep.thread_pointers.clone()), || {
            thread::sleep(Duration::from_millis(300));
        });
        let (waiting, taken) = (samples(&profile, "[waiting: read pipe]"), profile.meta.quality.taken);
        assert_likely!(waiting * 10 >= taken * 9 && taken > 0, "{waiting} of {taken}");
    });
}

#[test]
fn one_recording_at_a_time() {
    let _live = common::live();
    record(SamplingClock::Cpu, None, || {
        let config = ProfilerConfig {
            rate: 100,
            clock: SamplingClock::Wall,
            threads: None,
            native: true,
            by_thread: false,
            allocations: None,
        };
        let refused = Recorder::start(config).err().expect("a second one is refused");
        assert!(refused.to_string().contains("already being sampled"), "{refused}");
    });
    record(SamplingClock::Wall, None, || {});
}

fn spins(ended: &AtomicBool) {
    black_box(around(ended));
}

/// The kernel's clock ticks 100 to 1000 times a second; most have 250.
#[test]
fn the_rate_is_kept_above_that_of_the_kernels_clock() {
    repeated(|| {
        let _live = common::live();
        let tick_rate = nativeprof::sys::clock::tick_rate();
        let rate = 4 * tick_rate;
        for threads in [1, 8] {
            let crowd = Crowd::new(threads, spins);
            let only = Some(crowd.thread_pointers.clone());
            let (profile, limitation) = record_at(rate, SamplingClock::Cpu, only, || {
                thread::sleep(patience() * Duration::from_millis(600));
            });
            let q = &profile.meta.quality;
            match limitation {
                None => assert_eq!(profile.meta.rate, rate),
                Some(limitation) => {
                    assert_eq!(profile.meta.rate, tick_rate, "{limitation}");
                    assert!(limitation.contains(&format!("rate={tick_rate}")), "{limitation}");
                }
            }
            assert_eq!(q.expected, q.taken + q.lost, "{q:?}");
            // Of the ticks of timers a quarter would come. Eight threads leave the recorder little time, and slots fill.
            let least = if threads == 1 { 7 } else { 4 };
            assert_likely!(q.taken * 10 >= q.expected * least, "{threads} threads: {q:?}");
            assert_eq!(samples(&profile, "around"), samples(&profile, "spin"));
        }
    });
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

#[test]
fn threads_that_come_and_go_leave_no_descriptors() {
    let _live = common::live();
    let before = open_descriptors();
    let mut most = 0;
    record_at(1000, SamplingClock::Cpu, None, || {
        for _ in 0..20 {
            drop(Crowd::new(50, |ended| {
                while !ended.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
            }));
            most = most.max(open_descriptors());
        }
    });
    // Threads that have ended are noticed after some time; 1000 have been there.
    assert!(most < before + 500, "{most}, {before} before");
    assert_eq!(open_descriptors(), before);
}

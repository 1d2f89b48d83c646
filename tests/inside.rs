//! Sampling the own process: this test program samples itself. Python is sampled from inside in tests/python.rs.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nativeprof::capture::signal::Clock;
use nativeprof::inside::stack::{Entry, Found, LONG, Stacks};
use nativeprof::inside::{Recorder, Settings};
use nativeprof::process::own;
use nativeprof::tree::profile::Profile;

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

/// Threads that run until this is dropped, known by their pointers.
struct Crowd {
    ended: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
    pointers: Vec<u64>,
}

impl Crowd {
    fn new(count: usize, work: fn(&AtomicBool)) -> Crowd {
        let ended = Arc::new(AtomicBool::new(false));
        let (mut threads, mut pointers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let pointer = Arc::new(AtomicU64::new(0));
            let (ended, tell) = (ended.clone(), pointer.clone());
            threads.push(thread::spawn(move || {
                tell.store(own::thread_pointer(), Ordering::Release);
                work(&ended);
            }));
            while pointer.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            pointers.push(pointer.load(Ordering::Acquire));
        }
        Crowd {
            ended,
            threads,
            pointers,
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

fn stack(stacks: &Stacks, pointer: u64) -> Vec<Entry> {
    match stacks.get(pointer, 100) {
        Found::Stack(entries) => entries,
        Found::Late(tid) => stacks.later(tid, 100, 10 * LONG),
    }
}

#[inline(never)]
fn own_stack(stacks: &Stacks) -> Vec<Entry> {
    black_box(stack(stacks, own::thread_pointer()))
}

fn names(entries: &[Entry]) -> Vec<&str> {
    entries
        .iter()
        .map(|e| e.name.rsplit("::").next().unwrap_or_default())
        .collect()
}

#[test]
fn stacks_of_threads_that_run_and_sleep() {
    let _live = common::live();
    let stacks = Stacks::new().expect("stacks can be had");
    let busy = Crowd::new(1, |ended| {
        black_box(around(ended));
    });
    let found = stack(&stacks, busy.pointers[0]);
    assert_eq!(names(&found)[..2], ["spin", "around"], "{found:#?}");
    for e in &found {
        assert!(e.address >= e.start, "{e:?}");
    }
    let asleep = Crowd::new(1, |ended| {
        while !ended.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
    });
    thread::sleep(Duration::from_millis(5));
    let found = stack(&stacks, asleep.pointers[0]);
    assert!(names(&found).iter().any(|n| n.contains("nanosleep")), "{found:#?}");
    assert!(names(&found).contains(&"sleep"), "{found:#?}");
    // oneself
    let found = own_stack(&stacks);
    assert!(names(&found).contains(&"own_stack"), "{found:#?}");
    // no thread, not any more, and not so deep
    for wrong in [0, 1, 0x1000, u64::MAX] {
        assert_eq!(stacks.get(wrong, 100), Found::Stack(Vec::new()));
    }
    let pointer = busy.pointers[0];
    drop(busy);
    assert_eq!(stacks.get(pointer, 100), Found::Stack(Vec::new()));
    let Found::Stack(few) = stacks.get(own::thread_pointer(), 2) else {
        panic!("oneself is never late")
    };
    assert_eq!(few.len(), 2);
}

/// Most of these threads wait for a CPU whenever they are asked: they answer when they have one, and that is not lost.
#[test]
fn threads_that_wait_for_a_cpu_have_stacks_too() {
    let _live = common::live();
    let stacks = Stacks::new().expect("stacks can be had");
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let crowd = Crowd::new(8 * cpus, |ended| {
        black_box(around(ended));
    });
    let (mut asked, mut empty) = (0, 0);
    for _ in 0..10 {
        for pointer in &crowd.pointers {
            let found = match stacks.get(*pointer, 100) {
                Found::Late(tid) => stacks.later(tid, 100, LONG),
                Found::Stack(found) => found,
            };
            asked += 1;
            empty += usize::from(found.is_empty());
            let names = names(&found);
            assert!(found.is_empty() || names.contains(&"around"), "{names:?}");
        }
    }
    assert!(empty <= asked / 100, "{empty} of {asked} without a stack");
}

#[test]
fn a_thread_that_blocks_signals_keeps_nobody() {
    let _live = common::live();
    let stacks = Stacks::new().expect("stacks can be had");
    let deaf = Crowd::new(1, |ended| {
        own::block_signals();
        black_box(around(ended));
    });
    let began = Instant::now();
    for _ in 0..20 {
        let found = match stacks.get(deaf.pointers[0], 100) {
            Found::Late(tid) => stacks.later(tid, 100, LONG),
            Found::Stack(found) => found,
        };
        assert_eq!(found, []);
    }
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "bounded, however busy the machine is"
    );
}

fn record(clock: Clock, threads: Option<Vec<u64>>, work: impl FnOnce()) -> Profile {
    let settings = Settings {
        rate: 100,
        clock,
        threads,
        native: true,
        by_thread: false,
    };
    let recorder = Recorder::start(settings).expect("a recording");
    work();
    recorder.stop().expect("a profile")
}

/// Samples with a function of this name on their stack.
fn samples(profile: &Profile, name: &str) -> u64 {
    let is = |node: usize| {
        let frame = &profile.frames[profile.nodes[node].frame as usize];
        frame.name.rsplit("::").next() == Some(name)
    };
    let mut under = vec![false; profile.nodes.len()];
    let own = profile.own_counts();
    (0..profile.nodes.len())
        .map(|i| {
            under[i] = is(i) || under[profile.nodes[i].parent as usize];
            if under[i] { own[i] } else { 0 }
        })
        .sum()
}

#[test]
fn a_recording_shows_where_cpu_time_goes() {
    let _live = common::live();
    let busy = Crowd::new(1, |ended| {
        black_box(around(ended));
    });
    let profile = record(Clock::Cpu, None, || {
        thread::sleep(Duration::from_millis(300));
        // Threads that come and go are sampled too.
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
    assert!(q.taken > 5 && q.exact + q.repaired == q.taken, "{q:?}");
    let spun = samples(&profile, "spin");
    assert!(spun * 10 > q.taken * 7, "{spun} of {q:?}");
    assert_eq!(samples(&profile, "around"), spun);
}

#[test]
fn wall_time_is_that_of_sleeping_threads_too() {
    let _live = common::live();
    let asleep = Crowd::new(3, |ended| {
        while !ended.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(50));
        }
    });
    let profile = record(Clock::Wall, Some(asleep.pointers.clone()), || {
        thread::sleep(Duration::from_millis(500));
    });
    let q = &profile.meta.quality;
    assert!(q.taken > 30 && q.exact + q.repaired == q.taken, "{q:?}");
    assert!(samples(&profile, "sleep") * 10 >= q.taken * 9, "{q:?}");
}

#[test]
fn one_recording_at_a_time() {
    let _live = common::live();
    record(Clock::Cpu, None, || {
        let settings = Settings {
            rate: 100,
            clock: Clock::Wall,
            threads: None,
            native: true,
            by_thread: false,
        };
        let refused = Recorder::start(settings).err().expect("a second one is refused");
        assert!(refused.to_string().contains("sampled already"), "{refused}");
    });
    record(Clock::Wall, None, || {});
}

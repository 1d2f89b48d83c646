use super::*;

const MS: u64 = 1_000_000;

#[test]
fn samples_narrow_the_times_of_a_callback() {
    let callback = Callback {
        began: (100 * MS, 104 * MS),
        ended: (180 * MS, 184 * MS),
        node: 7,
        ..Callback::default()
    };
    let sample = |from, to, node| LoopSample {
        from: from * MS,
        to: to * MS,
        node,
    };
    let finished = |samples: &[LoopSample]| {
        let lag = callback.finish(samples.iter());
        (lag.start / MS, lag.length / MS, lag.node)
    };
    assert_eq!(finished(&[]), (102, 80, 7));
    // A sleep that is the callback, after and before waits for events.
    let samples = [
        sample(50, 101, None),
        sample(101, 182, Some(3)),
        sample(182, 200, None),
        sample(20, 30, Some(9)),
    ];
    assert_eq!(finished(&samples), (101, 81, 3));
    // CPU samples.
    let samples: Vec<LoopSample> = (0..20)
        .map(|i| sample(100 + 5 * i, 100 + 5 * i, Some(2 + i as u32 / 12)))
        .collect();
    assert_eq!(finished(&samples).2, 2);
}

#[test]
fn long_callbacks_of_loops_that_end_are_kept() {
    let watched = |tid: Tid, is_long, thread| WatchedLoop {
        event_loop: u64::from(tid),
        queue: 1,
        tid,
        thread,
        begun: 1,
        read: 180 * MS,
        current: Callback {
            tid,
            began: (100 * MS, 104 * MS),
            ..Callback::default()
        },
        is_long,
        sleeps: false,
    };
    let mut process = ProcessLags::default();
    process.loops.push(watched(1, true, Some(9)));
    process.loops.push(watched(2, false, Some(9)));
    process.loops.push(watched(3, true, None));
    process.loops.push(watched(4, true, Some(9)));
    let mut ended = VecDeque::new();
    process.retain(184 * MS, &mut ended, |known| known.tid == 4);
    process.retain(190 * MS, &mut ended, |_| false);
    let times: Vec<_> = ended.iter().map(|c| (c.tid, c.began.0 / MS, c.ended.1 / MS)).collect();
    assert_eq!((process.loops.len(), times), (0, vec![(1, 100, 184), (4, 100, 190)]));
}

#[test]
fn loops_wait_in_epoll() {
    assert!(waits_for_events(Sysno::epoll_pwait.id() as u64));
    assert!(!waits_for_events(Sysno::ppoll.id() as u64));
    assert!(!waits_for_events(u64::MAX));
}

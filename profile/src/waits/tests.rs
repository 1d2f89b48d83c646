use super::*;
use crate::build::Builder;
use crate::model::{Frame, Meta};
use crate::values::ValueType;

/// Samples (label, weight, length) of one function that waits.
fn profile(samples: &[(&str, u64, u64)]) -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
    let f = builder.frame(Frame::python("f", "C.f", "a.py", 1));
    let read = builder.frame(Frame::native("read", "libc.so.6", 16));
    for (time, (label, weight, _)) in (0..).zip(samples) {
        let state = builder.frame(Frame::new(FrameKind::State, *label));
        builder.sample(time, (1, 2), &[(f, 7), (read, 0), (state, 0)], &[1, *weight]);
    }
    let mut profile = builder.finish(Meta::default());
    profile.waits.lengths = samples.iter().map(|(.., length)| *length).collect();
    profile
}

#[test]
fn sampled_intervals_count_for_all_like_them() {
    let pipe = "[waiting: read pipe]";
    let profile = profile(&[
        (pipe, 1000, 10),
        (pipe, 1000, 500),
        (pipe, 3000, 3000),
        ("[runnable]", 50, 50),
    ]);
    let sites = sites(&profile, 1);
    let shown: Vec<_> = sites
        .iter()
        .map(|s| (&*s.kind, &*s.object, &*s.site, s.total))
        .collect();
    assert_eq!(
        shown,
        [
            ("read", "pipe", "C.f (a.py:7)", 5000),
            ("runnable", "", "C.f (a.py:7)", 50)
        ]
    );
    // 100 of 10 ns, 2 of 500 ns, one of 3000 ns.
    let read = &sites[0];
    assert_eq!(
        (read.count, read.median, read.p99, read.longest),
        (103.0, 10, 500, 3000)
    );
}

#[test]
fn waits_in_libraries_belong_to_the_program_that_calls_them() {
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
    let threading = "/usr/lib/python3.12/threading.py";
    let own = builder.frame(Frame::python("serve", "serve", "/app.py", 1));
    let get = builder.frame(Frame::python("get", "Queue.get", "/usr/lib/python3.12/queue.py", 1));
    let wait = builder.frame(Frame::python("wait", "Condition.wait", threading, 300));
    let futex = builder.frame(Frame::native("futex_wait", "libc.so.6", 16));
    let state = builder.frame(Frame::new(FrameKind::State, "[waiting: condition]"));
    let inner = [(get, 170), (wait, 355), (futex, 0), (state, 0)];
    builder.sample(1, (1, 2), &[&[(own, 7)], &inner[..]].concat(), &[1, 10]);
    builder.sample(2, (1, 3), &inner, &[1, 9]);
    builder.sample(3, (1, 4), &[(futex, 0), (state, 0)], &[1, 8]);
    builder.sample(4, (1, 5), &[(own, 9), (futex, 0), (state, 0)], &[1, 7]);
    let found = sites(&builder.finish(Meta::default()), 1);
    let texts: Vec<&str> = found.iter().map(|site| &*site.site).collect();
    assert_eq!(
        texts,
        [
            "serve (/app.py:7) in Condition.wait (threading.py:355)",
            "Condition.wait (/usr/lib/python3.12/threading.py:355)",
            "futex_wait (libc.so.6)",
            "serve (/app.py:9)",
        ]
    );
}

#[test]
fn labels_have_kind_and_object() {
    for (label, kind, object) in [
        ("[waiting: gil]", "gil", ""),
        ("[waiting: write socket]", "write", "socket"),
        ("[waiting: read socket 127.0.0.1:80]", "read", "socket 127.0.0.1:80"),
        ("[waiting: accept 0.0.0.0:80]", "accept", "0.0.0.0:80"),
        ("[waiting: page fault]", "page fault", ""),
        ("[waiting: lock threading.RLock]", "lock", "threading.RLock"),
        ("[waiting: lock table_lock (t.so)]", "lock", "table_lock (t.so)"),
        ("[waiting: condition queue.Queue]", "condition", "queue.Queue"),
        ("[waiting: futex t.so+0x4010]", "futex", "t.so+0x4010"),
        ("[runnable]", "runnable", ""),
        ("[throttled]", "throttled", ""),
    ] {
        assert_eq!(split_label(label), (kind, object));
    }
}

#[test]
fn waits_are_divided_among_holders() {
    let mut profile = profile(&[("[waiting: gil]", 2000, 1000), ("[waiting: gil]", 1000, 1000)]);
    let waker = |tid| Waker {
        pid: 1,
        tid,
        ..Waker::default()
    };
    profile.waits.known = vec![waker(8), waker(9)];
    profile.waits.wakers = vec![1, 2];
    profile.waits.shares = vec![(0, 1, 250), (0, 2, 750)];
    let tids = |sample, amount| -> Vec<(Option<Tid>, u64)> {
        let parts = profile.waits.divided(sample, amount).into_iter();
        parts.map(|(waker, part)| (waker.map(|w| w.tid), part)).collect()
    };
    assert_eq!(tids(0, 2000), [(Some(8), 500), (Some(9), 1500)]);
    assert_eq!(tids(1, 1000), [(Some(9), 1000)]);
    let gil = crate::gil_waits::of(&profile, 1);
    let pairs: Vec<_> = gil
        .pairs
        .iter()
        .map(|p| (p.waiter.1, p.holder.map(|h| h.1), p.waited))
        .collect();
    assert_eq!(pairs, [(2, Some(9), 2500), (2, Some(8), 500)]);
    assert_eq!(
        (gil.threads[0].waited, gil.threads[0].count, gil.threads[0].held),
        (3000, 3.0, 0)
    );
}

#[test]
fn what_is_known_survives_a_file_and_a_merge() {
    let mut one = profile(&[("[waiting: gil]", 2000, 1000), ("[runnable]", 5, 5)]);
    one.waits.known = vec![Waker {
        pid: 1,
        tid: 8,
        function: "hold (b.py:3)".into(),
        stack: vec!["main (b.py:9)".into(), "hold (b.py:3)".into()],
    }];
    one.waits.wakers = vec![1, 0];
    one.waits.holding = vec![false, true];
    one.waits.shares = vec![(0, 1, 600), (0, 0, 400)];
    let mut bytes = Vec::new();
    crate::json::write(&one, &mut bytes).expect("a vector");
    let read = crate::json::read(&bytes).expect("what was written");
    assert_eq!(read.waits, one.waits);
    let both = crate::merge::combine(&[("a".into(), one.clone()), ("b".into(), one.clone())]);
    assert_eq!(both.waits.lengths, [1000, 1000, 5, 5]);
    assert_eq!(both.waits.known.len(), 2);
    assert_eq!(both.waits.shares.len(), 4);
    assert_eq!(both.waits.holding, [false, false, true, true]);
}

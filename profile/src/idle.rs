//! Idle pools: threads that wait for work. Their time is most of a server's, and says nothing about it, so that what people read
//! shows each pool as one frame.
//!
//! A wait is idle by the functions that wait: the innermost Python function is the loop of a worker, or one that takes from
//! a queue for such a loop. Time in which a worker works is not idle, wherever it waits then.

use rustc_hash::FxHashMap;

use super::build::Builder;
use super::model::{Frame, FrameId, FrameKind, NO_PLACE, NodeId, PlaceId, Profile};
use super::view::is_group;
use super::waits;

/// Loops of workers: function, end of its file's path, what the pool is called. They wait themselves, or in one of [`WAITS`].
const LOOPS: &[(&str, &str, &str)] = &[
    ("_worker", "concurrent/futures/thread.py", "ThreadPoolExecutor"),
    (
        "_process_worker",
        "concurrent/futures/process.py",
        "ProcessPoolExecutor",
    ),
    ("worker", "multiprocessing/pool.py", "multiprocessing.Pool"),
    ("_handle_workers", "multiprocessing/pool.py", "multiprocessing.Pool"),
    ("_handle_tasks", "multiprocessing/pool.py", "multiprocessing.Pool"),
    ("_handle_results", "multiprocessing/pool.py", "multiprocessing.Pool"),
    ("_feed", "multiprocessing/queues.py", "multiprocessing.Queue"),
    ("_run_once", "asyncio/base_events.py", "asyncio event loop"),
    ("serve_forever", "socketserver.py", "socketserver"),
    ("_monitor", "logging/handlers.py", "QueueListener"),
    ("run", "gunicorn/arbiter.py", "gunicorn arbiter"),
    ("wait", "gunicorn/workers/sync.py", "gunicorn worker"),
    ("run", "gunicorn/workers/gthread.py", "gunicorn worker"),
    ("handler_thread", "waitress/task.py", "waitress"),
    ("serve", "cheroot/workers/threadpool.py", "cheroot"),
];
/// Functions through which loops wait: function and end of its file's path.
const WAITS: &[(&str, &str)] = &[
    ("get", "/queue.py"),
    ("wait", "/threading.py"),
    ("select", "/selectors.py"),
    ("poll", "multiprocessing/connection.py"),
    ("_poll", "multiprocessing/connection.py"),
    ("wait", "multiprocessing/connection.py"),
    ("recv", "multiprocessing/connection.py"),
    ("recv_bytes", "multiprocessing/connection.py"),
    ("_recv", "multiprocessing/connection.py"),
    ("_recv_bytes", "multiprocessing/connection.py"),
    ("_wait_for_updates", "multiprocessing/pool.py"),
    ("dequeue", "logging/handlers.py"),
    ("get", "multiprocessing/queues.py"),
    ("get_request", "cheroot/workers/threadpool.py"),
    ("sleep", "gunicorn/arbiter.py"),
];
/// Native threads that wait for work, without Python: beginnings of functions.
const NATIVE_LOOPS: &[(&str, &str)] = &[
    ("blas_thread_server", "OpenBLAS"),
    ("gomp_thread_start", "OpenMP"),
    ("__kmp_launch_worker", "OpenMP"),
    ("rayon_core::", "rayon"),
    ("tokio::runtime::", "tokio"),
    ("uv__io_poll", "uv event loop"),
];

/// What a frame says about the pool of a thread that waits below it.
enum PoolEvidence {
    /// A way to wait: the caller decides.
    Waits,
    Pool(String),
    Busy,
}

/// The state frames that represent idle pools begin with this.
pub const LABEL: &str = "[idle: ";

fn verdict(frame: &Frame, waits_in_queue: bool) -> PoolEvidence {
    let is = |(name, file): &(&str, &str)| frame.name == *name && frame.filename.ends_with(file);
    if let Some((.., pool)) = LOOPS.iter().find(|(name, file, _)| is(&(name, file))) {
        return PoolEvidence::Pool((*pool).into());
    }
    if WAITS.iter().any(is) {
        return PoolEvidence::Waits;
    }
    if waits_in_queue {
        // A worker of the program's own: it takes from a queue.
        PoolEvidence::Pool(format!("queue.get in {}", frame.name))
    } else {
        PoolEvidence::Busy
    }
}

/// The pool that a thread waiting in the state at node `state` belongs to; `None`: it is not idle.
fn pool(profile: &Profile, state: NodeId) -> Option<String> {
    let label = &profile.frames[profile.nodes[state as usize].frame as usize].name;
    let (kind, _) = waits::split_label(label);
    // Ways to wait for work. The interpreter lock, files and sleep are none.
    if !matches!(
        kind,
        "lock" | "condition" | "futex" | "poll" | "read" | "accept" | "sleep"
    ) {
        return None;
    }
    let mut waits_in_queue = false;
    let mut native = None;
    let mut at = profile.nodes[state as usize].parent;
    while at != 0 {
        let node = &profile.nodes[at as usize];
        let frame = &profile.frames[node.frame as usize];
        match frame.kind {
            FrameKind::Python => {
                let sleeps = kind == "sleep" && !frame.filename.contains("gunicorn");
                match verdict(frame, waits_in_queue) {
                    _ if sleeps => return None,
                    PoolEvidence::Pool(pool) => return Some(pool),
                    PoolEvidence::Waits => waits_in_queue |= frame.filename.ends_with("/queue.py"),
                    PoolEvidence::Busy => return None,
                }
            }
            FrameKind::Native | FrameKind::Inlined if native.is_none() => {
                let known = NATIVE_LOOPS.iter().find(|(begin, _)| frame.name.starts_with(begin));
                native = known.map(|(_, pool)| (*pool).to_string());
            }
            _ => {}
        }
        at = node.parent;
    }
    native
}

/// The pool of each state that a thread of an idle pool waits in, by the state's node; `states` as [`waits::states`] has them.
pub fn pools(profile: &Profile, states: &[NodeId]) -> FxHashMap<NodeId, String> {
    let mut pools: FxHashMap<NodeId, Option<String>> = FxHashMap::default();
    for state in states.iter().filter(|state| **state != 0) {
        pools.entry(*state).or_insert_with(|| pool(profile, *state));
    }
    let idle = pools.into_iter().filter_map(|(state, pool)| Some((state, pool?)));
    idle.collect()
}

/// The profile with each idle pool as one frame, below the process and thread that it is in if there are nodes for
/// them. All counts and amounts stay. `None` if there is nothing to fold, or the timeline does not hold all samples.
pub fn fold(profile: &Profile) -> Option<Profile> {
    let states = waits::states(profile);
    let pools = pools(profile, &states);
    if pools.is_empty() || !profile.is_timed() || profile.sample_places.is_empty() {
        return None;
    }
    let types: Vec<_> = profile.value_types().iter().map(|value| value.kind.clone()).collect();
    let mut builder = Builder::new(&types);
    let mut id = |frame: &Frame| match frame.kind {
        FrameKind::Root => 0,
        _ => builder.frame(frame.clone()),
    };
    let ids: Vec<FrameId> = profile.frames.iter().map(&mut id).collect();
    let mut stack: Vec<(FrameId, u32)> = Vec::new();
    for (at, sample) in profile.timeline.iter().enumerate() {
        let state = states.get(sample.node as usize).copied().unwrap_or(0);
        let pool = pools.get(&state);
        stack.clear();
        let mut add = |node: NodeId, line: u32| {
            let frame = profile.nodes.get(node as usize).map_or(0, |node| node.frame);
            if pool.is_none() || is_group(&profile.frames[frame as usize]) {
                stack.push((ids[frame as usize], line));
            }
        };
        let mut place = profile.sample_places.get(at).copied().unwrap_or(NO_PLACE);
        if place == NO_PLACE {
            // Without its lines.
            let mut node = sample.node;
            while node != 0 {
                add(node, 0);
                node = profile.nodes.get(node as usize).map_or(0, |node| node.parent);
            }
        }
        while let Some(p) = profile.places.get(place as usize).filter(|_| place != 0) {
            add(p.node, p.line);
            place = p.parent as PlaceId;
        }
        stack.reverse();
        if let Some(pool) = pool {
            stack.push((
                builder.frame(Frame::new(FrameKind::State, format!("{LABEL}{pool}]"))),
                0,
            ));
        }
        let amounts: Vec<u64> = (0..types.len()).map(|value| profile.sample_amount(value, at)).collect();
        builder.sample(sample.time, (sample.pid, sample.tid), &stack, &amounts);
    }
    let mut folded = builder.finish(profile.meta.clone());
    let mut texts: FxHashMap<(FrameId, u32), &str> = FxHashMap::default();
    for node in profile.nodes.iter().filter(|node| !node.line_text.is_empty()) {
        texts.insert((ids[node.frame as usize], node.first_seen_line), &node.line_text);
    }
    for node in &mut folded.nodes {
        if let Some(text) = texts.get(&(node.frame, node.first_seen_line)) {
            node.line_text = text.to_string();
        }
    }
    folded.excerpts.clone_from(&profile.excerpts);
    folded.assembly.clone_from(&profile.assembly);
    // Samples are in the same order.
    folded.waits.clone_from(&profile.waits);
    folded.labels.clone_from(&profile.labels);
    Some(folded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labels::Labels;
    use crate::model::Meta;
    use crate::values::ValueType;

    type Call<'a> = (&'a str, &'a str);

    /// The pool of a thread that waits in the last of these Python functions.
    fn of(stack: &[Call<'_>], label: &str) -> Option<String> {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        let mut frames: Vec<(FrameId, u32)> = Vec::new();
        for (name, file) in stack {
            frames.push((builder.frame(Frame::python(*name, *name, *file, 1)), 2));
        }
        frames.push((builder.frame(Frame::native("do_futex_wait", "libc.so.6", 1)), 0));
        frames.push((builder.frame(Frame::new(FrameKind::State, label)), 0));
        let state = builder.sample(1, (1, 1), &frames, &[1]);
        pool(&builder.finish(Meta::default()), state)
    }

    #[test]
    fn pools_are_known_by_their_loops() {
        let threading = "/usr/lib/python3.12/threading.py";
        let run = ("run", threading);
        let executor = ("_worker", "/usr/lib/python3.12/concurrent/futures/thread.py");
        let queue = ("get", "/usr/lib/python3.12/queue.py");
        let wait = ("wait", threading);
        let once = ("_run_once", "/usr/lib/python3.12/asyncio/base_events.py");
        let select = ("select", "/usr/lib/python3.12/selectors.py");
        for (stack, label, expected) in [
            (&[run, executor][..], "[waiting: lock]", Some("ThreadPoolExecutor")),
            (&[run, executor, ("task", "/app.py")], "[waiting: lock]", None),
            (&[run, executor], "[waiting: gil]", None),
            (&[run, executor], "[runnable]", None),
            (
                &[run, ("serve", "/app.py"), queue, wait],
                "[waiting: condition]",
                Some("queue.get in serve"),
            ),
            (&[run, ("serve", "/app.py"), wait], "[waiting: condition]", None),
            (&[once, select], "[waiting: poll]", Some("asyncio event loop")),
            (&[once, ("handler", "/app.py"), select], "[waiting: poll]", None),
            (&[run, executor], "[waiting: sleep]", None),
        ] {
            assert_eq!(of(stack, label).as_deref(), expected, "{stack:?} {label}");
        }
    }

    #[test]
    fn a_pool_becomes_one_bar() {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
        let main = builder.frame(Frame::python("main", "main", "/app.py", 1));
        let run = builder.frame(Frame::python("run", "Thread.run", "/lib/threading.py", 1));
        let worker = builder.frame(Frame::python(
            "_worker",
            "_worker",
            "/lib/concurrent/futures/thread.py",
            1,
        ));
        let task = builder.frame(Frame::python("task", "task", "/app.py", 9));
        let wait = builder.frame(Frame::new(FrameKind::State, "[waiting: lock]"));
        builder.sample(1, (1, 1), &[(main, 3)], &[1, 10]);
        builder.sample(2, (1, 2), &[(run, 4), (worker, 5), (wait, 0)], &[3, 300]);
        builder.sample(3, (1, 3), &[(run, 4), (worker, 5), (wait, 0)], &[2, 200]);
        builder.sample(4, (1, 2), &[(run, 4), (worker, 6), (task, 10)], &[1, 7]);
        let mut profile = builder.finish(Meta::default());
        let load = vec![("span".to_string(), "load".to_string())];
        profile.labels = Labels::new(&[vec![], load], vec![1, 0, 0, 1]);
        let folded = fold(&profile).expect("there is a pool");
        let shown: Vec<(&str, u64, u64)> = (1..folded.nodes.len())
            .map(|at| {
                let node = &folded.nodes[at];
                (
                    &*folded.frames[node.frame as usize].name,
                    node.count,
                    folded.amounts(1)[at],
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("main", 1, 10),
                ("[idle: ThreadPoolExecutor]", 5, 500),
                ("run", 1, 7),
                ("_worker", 1, 7),
                ("task", 1, 7)
            ]
        );
        assert_eq!(folded.nodes[0].count, profile.nodes[0].count);
        assert_eq!(folded.amounts(1)[0], profile.amounts(1)[0]);
        let times: Vec<u64> = folded.timeline.iter().map(|sample| sample.time).collect();
        assert_eq!((times, &folded.labels), (vec![1, 2, 3, 4], &profile.labels));
        assert_eq!(fold(&folded), None);
        // Where the lines of a sample are not known, its functions are.
        profile.sample_places[3] = NO_PLACE;
        let without_lines = fold(&profile).expect("there is a pool");
        let counts = |profile: &Profile| profile.nodes.iter().map(|node| node.count).collect::<Vec<u64>>();
        assert_eq!(counts(&without_lines), counts(&folded));
    }
}

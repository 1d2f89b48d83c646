//! What a suspended task awaits, by the functions of asyncio that await it.

use crate::cpython::tasks::Awaited;
use crate::event::AwaitKind;

/// Innermost functions that are examined.
const MAX_FUNCTIONS: usize = 6;

/// Beginning of a function's qualified name, and its file in the package asyncio.
const KNOWN: &[(&str, &str, AwaitKind)] = &[
    ("sleep", "tasks.py", AwaitKind::Sleep),
    ("", "tasks.py", AwaitKind::Task),
    ("", "taskgroups.py", AwaitKind::Task),
    ("Lock.", "locks.py", AwaitKind::Lock),
    ("Semaphore.", "locks.py", AwaitKind::Semaphore),
    ("BoundedSemaphore.", "locks.py", AwaitKind::Semaphore),
    ("Condition.", "locks.py", AwaitKind::Condition),
    ("Barrier.", "locks.py", AwaitKind::Condition),
    ("Event.", "locks.py", AwaitKind::Event),
    ("", "queues.py", AwaitKind::Queue),
    ("", "streams.py", AwaitKind::Stream),
    ("", "selector_events.py", AwaitKind::Socket),
    ("", "base_events.py", AwaitKind::Socket),
    ("", "subprocess.py", AwaitKind::Child),
    ("", "base_subprocess.py", AwaitKind::Child),
    ("", "unix_events.py", AwaitKind::Child),
    ("to_thread", "threads.py", AwaitKind::Thread),
];
/// What is built on others of these, and counts instead.
const OUTER: &[AwaitKind] = &[AwaitKind::Queue, AwaitKind::Child];

/// The kind of what a task awaits. `functions`: qualified names and files of the coroutines' functions, innermost first.
pub(super) fn await_kind<'a>(awaited: Awaited, functions: impl Iterator<Item = (String, &'a str)>) -> AwaitKind {
    let by_object = match awaited {
        Awaited::Turn => return AwaitKind::Turn,
        Awaited::Task => AwaitKind::Task,
        Awaited::Gather => AwaitKind::Gather,
        Awaited::Future => AwaitKind::Future,
        Awaited::Other => AwaitKind::Other,
    };
    let mut found = None;
    for (name, file) in functions.take(MAX_FUNCTIONS) {
        let Some((directory, file)) = file.rsplit_once('/') else {
            break;
        };
        if !directory.ends_with("asyncio") {
            break;
        }
        let mut known = KNOWN.iter();
        let known = known.find(|(begin, of, _)| *of == file && name.starts_with(begin));
        if let Some((.., kind)) = known
            && (found.is_none() || OUTER.contains(kind))
        {
            found = Some(*kind);
        }
    }
    found.unwrap_or(by_object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_asyncio_say_what_is_awaited() {
        let tasks = "/usr/lib/python3.12/asyncio/tasks.py";
        let locks = "/usr/lib/python3.12/asyncio/locks.py";
        let queues = "/usr/lib/python3.12/asyncio/queues.py";
        for (awaited, functions, expected) in [
            (
                Awaited::Future,
                &[("sleep", tasks), ("f", "/app.py")][..],
                AwaitKind::Sleep,
            ),
            (Awaited::Turn, &[("sleep", tasks)], AwaitKind::Turn),
            (Awaited::Future, &[("Lock.acquire", locks)], AwaitKind::Lock),
            (
                Awaited::Future,
                &[("Event.wait", locks), ("wait_for", tasks)],
                AwaitKind::Event,
            ),
            (
                Awaited::Future,
                &[("Event.wait", locks), ("Queue.join", queues)],
                AwaitKind::Queue,
            ),
            (
                Awaited::Gather,
                &[("f", "/app.py"), ("sleep", tasks)],
                AwaitKind::Gather,
            ),
            (Awaited::Future, &[("_wait", tasks), ("wait", tasks)], AwaitKind::Task),
            (Awaited::Future, &[("sleep", "/app/tasks.py")], AwaitKind::Future),
            (Awaited::Task, &[], AwaitKind::Task),
            (Awaited::Other, &[("f", "<string>")], AwaitKind::Other),
        ] {
            let named = functions.iter().map(|(name, file)| ((*name).to_string(), *file));
            assert_eq!(await_kind(awaited, named), expected, "{functions:?}");
        }
    }
}

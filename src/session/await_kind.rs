//! What a suspended task awaits, by the functions of asyncio, or of another library, that await it.

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

/// Innermost functions that are examined where a library's functions call each other.
const MAX_OF_LIBRARY: usize = 24;
/// The last directory of a file and its name, and the beginning of a function's qualified name, or of its plain one,
/// which is all that is known before CPython 3.11. Of the standard library the directory is `python3`, with any
/// version.
const OTHERS: &[(&str, &str, AwaitKind)] = &[
    ("gevent/hub.py", "sleep", AwaitKind::Sleep),
    ("gevent/thread.py", "LockType.", AwaitKind::Lock),
    ("gevent/thread.py", "acquire", AwaitKind::Lock),
    ("gevent/lock.py", "RLock.", AwaitKind::Lock),
    ("gevent/lock.py", "", AwaitKind::Semaphore),
    ("gevent/_semaphore.py", "", AwaitKind::Semaphore),
    ("gevent/event.py", "", AwaitKind::Event),
    ("gevent/queue.py", "", AwaitKind::Queue),
    ("gevent/_socketcommon.py", "", AwaitKind::Socket),
    ("gevent/_socket3.py", "", AwaitKind::Socket),
    ("gevent/ssl.py", "", AwaitKind::Socket),
    ("gevent/_ssl3.py", "", AwaitKind::Socket),
    ("gevent/select.py", "", AwaitKind::Socket),
    ("gevent/selectors.py", "", AwaitKind::Socket),
    ("gevent/subprocess.py", "", AwaitKind::Child),
    ("gevent/os.py", "waitpid", AwaitKind::Child),
    ("gevent/greenlet.py", "Greenlet.join", AwaitKind::Task),
    ("gevent/greenlet.py", "Greenlet.get", AwaitKind::Task),
    ("gevent/greenlet.py", "joinall", AwaitKind::Task),
    ("gevent/threadpool.py", "ThreadPool.", AwaitKind::Thread),
    ("eventlet/greenthread.py", "sleep", AwaitKind::Sleep),
    ("eventlet/greenthread.py", "GreenThread.wait", AwaitKind::Task),
    ("eventlet/greenthread.py", "wait", AwaitKind::Task),
    ("eventlet/greenpool.py", "GreenPool.", AwaitKind::Task),
    ("eventlet/greenpool.py", "waitall", AwaitKind::Task),
    ("eventlet/semaphore.py", "", AwaitKind::Semaphore),
    ("eventlet/event.py", "", AwaitKind::Event),
    ("eventlet/queue.py", "", AwaitKind::Queue),
    ("hubs/__init__.py", "trampoline", AwaitKind::Socket),
    ("greenio/base.py", "", AwaitKind::Socket),
    ("green/ssl.py", "", AwaitKind::Socket),
    ("green/select.py", "", AwaitKind::Socket),
    ("green/subprocess.py", "", AwaitKind::Child),
    ("green/os.py", "waitpid", AwaitKind::Child),
    ("eventlet/tpool.py", "execute", AwaitKind::Thread),
    ("trio/_timeouts.py", "sleep", AwaitKind::Sleep),
    ("trio/_sync.py", "Event.", AwaitKind::Event),
    ("trio/_sync.py", "Condition.", AwaitKind::Condition),
    ("trio/_sync.py", "Semaphore.", AwaitKind::Semaphore),
    ("trio/_sync.py", "CapacityLimiter.", AwaitKind::Semaphore),
    ("trio/_sync.py", "", AwaitKind::Lock),
    ("trio/_channel.py", "", AwaitKind::Queue),
    ("trio/_socket.py", "", AwaitKind::Socket),
    ("_core/_io_epoll.py", "", AwaitKind::Socket),
    ("trio/_ssl.py", "", AwaitKind::Stream),
    ("trio/_unix_pipes.py", "", AwaitKind::Stream),
    ("trio/_subprocess.py", "", AwaitKind::Child),
    ("trio/_threads.py", "", AwaitKind::Thread),
    ("_core/_run.py", "Nursery", AwaitKind::Task),
    ("python3/threading.py", "Condition.", AwaitKind::Condition),
    ("python3/threading.py", "Barrier.", AwaitKind::Condition),
    ("python3/threading.py", "Event.", AwaitKind::Event),
    ("python3/threading.py", "Semaphore.", AwaitKind::Semaphore),
    ("python3/threading.py", "BoundedSemaphore.", AwaitKind::Semaphore),
    ("python3/threading.py", "_RLock.", AwaitKind::Lock),
    ("python3/threading.py", "Thread.join", AwaitKind::Thread),
    ("python3/threading.py", "join", AwaitKind::Thread),
    ("python3/threading.py", "wait", AwaitKind::Condition),
    ("python3/queue.py", "", AwaitKind::Queue),
    ("python3/subprocess.py", "", AwaitKind::Child),
    ("python3/socket.py", "", AwaitKind::Socket),
    ("python3/ssl.py", "", AwaitKind::Socket),
    ("python3/selectors.py", "", AwaitKind::Socket),
];
/// Directories of packages whose functions do not themselves say that something else is awaited.
const LIBRARIES: &[&str] = &["gevent", "eventlet", "trio", "anyio"];

/// Beginnings of the names of gevent's compiled modules that themselves say what is awaited. They have no Python functions.
const COMPILED: &[(&str, AwaitKind)] = &[
    ("_gevent_cqueue.", AwaitKind::Queue),
    ("_gevent_cevent.", AwaitKind::Event),
    ("_gevent_c_semaphore.", AwaitKind::Semaphore),
];

/// The kind of what is awaited in a compiled function, by the name of its file.
pub(super) fn compiled_kind(file: &str) -> Option<AwaitKind> {
    let known = COMPILED.iter().find(|(begin, _)| file.starts_with(begin));
    known.map(|(_, kind)| *kind)
}

/// The kind of what a greenlet or a task of trio awaits: what the program's own innermost function has called of a library.
/// `functions`: qualified names and files, innermost first.
pub(super) fn library_kind<'a>(functions: impl Iterator<Item = (&'a str, &'a str)>) -> AwaitKind {
    let mut found = AwaitKind::Other;
    for (name, path) in functions.take(MAX_OF_LIBRARY) {
        let mut parts = path.rsplit('/');
        let (Some(file), Some(directory)) = (parts.next(), parts.next()) else {
            break;
        };
        let is_standard = directory.starts_with("python3");
        let is_library = parts.take(2).chain([directory]).any(|part| LIBRARIES.contains(&part));
        if !is_standard && !is_library {
            break;
        }
        let directory = if is_standard { "python3" } else { directory };
        let of_file = |known: &str| known.strip_prefix(directory).and_then(|rest| rest.strip_prefix('/')) == Some(file);
        let mut known = OTHERS.iter();
        if let Some((.., kind)) = known.find(|(of, begin, _)| name.starts_with(begin) && of_file(of)) {
            found = *kind;
        }
    }
    found
}

/// The kind of what a task awaits. `functions`: qualified names and files of the coroutines' functions, innermost first.
pub(super) fn await_kind<'a>(awaited: Awaited, functions: impl Iterator<Item = (&'a str, &'a str)>) -> AwaitKind {
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
            assert_eq!(
                await_kind(awaited, functions.iter().copied()),
                expected,
                "{functions:?}"
            );
        }
    }

    #[test]
    fn functions_of_libraries_say_what_is_awaited() {
        fn check(functions: &[(&str, &str)], expected: AwaitKind) {
            let files = functions.iter().map(|(name, file)| (*name, format!("/lib/{file}.py")));
            let files: Vec<(&str, String)> = files.collect();
            let kind = library_kind(files.iter().map(|(name, file)| (*name, &**file)));
            assert_eq!(kind, expected, "{functions:?}");
        }
        let switch = ("BaseHub.switch", "eventlet/hubs/hub");
        let acquire = ("Semaphore.acquire", "eventlet/semaphore");
        let wait = ("Condition.wait", "python3.12/threading");
        let park = ("ParkingLot.park", "trio/_core/_parking_lot");
        check(&[("sleep", "gevent/hub"), ("f", "app/app")], AwaitKind::Sleep);
        check(&[("f", "app/app"), ("sleep", "gevent/hub")], AwaitKind::Other);
        check(&[("sleep", "app/hub")], AwaitKind::Other);
        check(&[switch, acquire, ("f", "app/app")], AwaitKind::Semaphore);
        check(&[switch, acquire, wait], AwaitKind::Condition);
        check(
            &[switch, acquire, wait, ("Queue.get", "python3.12/queue")],
            AwaitKind::Queue,
        );
        check(&[switch, acquire, ("Queue.get", "app/queue")], AwaitKind::Semaphore);
        check(&[("LockType.acquire", "gevent/thread")], AwaitKind::Lock);
        check(&[("acquire", "gevent/thread")], AwaitKind::Lock);
        check(
            &[("acquire", "eventlet/semaphore"), ("wait", "python3.10/threading")],
            AwaitKind::Condition,
        );
        check(
            &[("SocketMixin.recv", "gevent/_socketcommon"), ("f", "app/app")],
            AwaitKind::Socket,
        );
        check(&[switch, ("trampoline", "eventlet/hubs/__init__")], AwaitKind::Socket);
        check(&[park, ("_LockImpl.acquire", "trio/_sync")], AwaitKind::Lock);
        check(&[park, ("Event.wait", "trio/_sync")], AwaitKind::Event);
        check(
            &[("Nursery._nested_child_finished", "trio/_core/_run")],
            AwaitKind::Task,
        );
        check(&[], AwaitKind::Other);
    }

    #[test]
    fn files_of_compiled_functions_say_what_is_awaited() {
        for (file, expected) in [
            ("_gevent_cqueue.cpython-312-x86_64-linux-gnu.so", Some(AwaitKind::Queue)),
            ("_gevent_cevent.so", Some(AwaitKind::Event)),
            (
                "_gevent_c_semaphore.cpython-39-x86_64-linux-gnu.so",
                Some(AwaitKind::Semaphore),
            ),
            // What all waits go through.
            ("_gevent_c_waiter.cpython-312-x86_64-linux-gnu.so", None),
            ("_gevent_cqueues.so", None),
            ("libc.so.6", None),
        ] {
            assert_eq!(compiled_kind(file), expected, "{file}");
        }
    }
}

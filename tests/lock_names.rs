//! `--mode wall`: which lock or condition variable a thread waits for. With variables of libraries that have symbols, and that
//! have none; and with those of Python's own modules.
//!
//! Needs what the other live tests need.

use nativeprof::capture::ebpf::switch_in;
use nativeprof::profile::waits;

use common::chance::{assert_likely, fail, repeated};
use common::recording::{Recording, attach};
use common::{Program, live, newest_python, programs};

mod common;

/// Variables of named_locks.c: how they are called in names of functions, the kind of wait and what they are called. (Both parts
/// of `pool` are in one variable. Without symbols of the C library, it is not known that a semaphore is one.)
const VARIABLES: &[(&str, &[&str], &str)] = &[
    ("table_lock", &["lock"], "table_lock"),
    ("table_ready", &["condition"], "table_ready"),
    ("pool_lock", &["lock"], "pool+0x"),
    ("pool_ready", &["condition"], "pool ("),
    ("free_slots", &["lock", "futex"], "free_slots"),
];
/// Functions that wait for objects of Python's modules.
const OF_PYTHON: &[(&str, &str)] = &[
    ("w_queue", "[waiting: condition queue.Queue]"),
    ("w_event", "[waiting: condition threading.Event]"),
    ("w_semaphore", "[waiting: condition threading.Semaphore]"),
    ("w_barrier", "[waiting: condition threading.Barrier]"),
    ("w_own", "[waiting: condition threading.Condition]"),
];
/// Bytes of a condition variable, at least those before its last futex.
const CONDITION: u64 = 48;

/// The state that a function spends nearly all of its time in.
fn state(r: &Recording, function: &str) -> String {
    let states = r.states_below(function);
    let all: u64 = states.values().sum();
    let longest = states.iter().max_by_key(|(_, time)| **time);
    let (state, time) = longest.unwrap_or_else(|| fail(&format!("no time of {function}\n{}", r.stderr)));
    assert_likely!(time * 10 > all * 9, "{function}: {states:?}\n{}", r.stderr);
    state.clone()
}

/// Where the program says that a variable of the library without symbols is in its file.
fn place(program: &Program, variable: &str) -> u64 {
    let word = format!("{variable} 0x");
    let place = program.said.iter().find_map(|line| line.strip_prefix(&word));
    hexadecimal(place.expect("the program says where it is"))
}

fn hexadecimal(text: &str) -> u64 {
    u64::from_str_radix(text, 16).expect("a hexadecimal number")
}

fn check(r: &Recording, program: &Program) {
    for (variable, kinds, name) in VARIABLES {
        let state_of = |library: &str| {
            let state = state(r, &format!("{library}_{variable}"));
            let inner = state
                .strip_prefix("[waiting: ")
                .and_then(|state| state.strip_suffix(']'));
            let (kind, object) = inner.and_then(|inner| inner.split_once(' ')).unwrap_or_default();
            assert!(kinds.contains(&kind), "{state}");
            object.to_string()
        };
        let named = state_of("named");
        assert!(
            named.starts_with(name) && named.ends_with(" (named_locks.so)"),
            "{named}"
        );
        // Without symbols, where it is in the file.
        let stripped = state_of("stripped");
        let at = stripped.strip_prefix("stripped_locks.so+0x").map(hexadecimal);
        let start = place(program, variable);
        let size = if kinds.contains(&"condition") { CONDITION } else { 1 };
        assert!(
            at.is_some_and(|at| (start..start + size).contains(&at)),
            "{stripped} is not at {start:#x}"
        );
    }
    for library in ["named", "stripped"] {
        let of_heap = state(r, &format!("{library}_of_heap"));
        assert_eq!(of_heap, "[waiting: lock pthread_mutex]");
    }
    for (function, expected) in OF_PYTHON {
        assert_eq!(state(r, function), *expected, "{function}");
    }
    // In tables of waits, which the page has, too.
    let wall = r.profile.find_value("wall").expect("wall time is recorded");
    let sites = waits::sites(&r.profile, wall);
    let is = |kind: &str, object: &str| sites.iter().any(|s| s.kind == kind && s.object == object);
    assert!(is("lock", "table_lock (named_locks.so)"), "{sites:?}");
    assert!(is("condition", "queue.Queue"), "{sites:?}");
}

fn each_backend(test: impl Fn(&[&str])) {
    let _live = live();
    let mut backends = vec!["ptrace"];
    backends.extend(switch_in::check().is_ok().then_some("ebpf"));
    for backend in backends {
        repeated(|| test(&["--backend", backend, "--mode", "wall", "-d", "1"]));
    }
}

#[test]
fn locks_and_conditions_have_names() {
    each_backend(|words| {
        let mut script = newest_python().script("named_locks.py");
        script.args(programs::named_locks());
        let mut program = Program::start(script);
        let r = attach(program.pid(), words);
        drop(program.finish());
        check(&r, &program);
    });
}

//! Objects of Python counted from outside, in every supported version: as many as the program made, with what they own.
//!
//! Needs root and CPython; fails with a message where one is missing.

use std::ops::Range;
use std::time::Duration;

use nativeprof::heap::estimate::Estimate;
use nativeprof::heap::python::{self, PythonCensus, ResidentPages};
use nativeprof::process::maps;
use nativeprof::process::system::{LiveSystem, ProcessMemory, System};
use nativeprof::session::Inspection;

use common::Program;
use common::pythons::{each_of, with_known_heap};

mod common;

/// A small heap is in memory.
struct AllResident;

impl ResidentPages for AllResident {
    fn bytes_in(&self, range: Range<u64>) -> u64 {
        range.end - range.start
    }
}

fn census(pid: u32, budget: Option<Duration>) -> (PythonCensus, u64) {
    let (inspection, _) = Inspection::open(pid, false).expect("it runs");
    let (runtime, interpreter) = inspection.python().expect("it runs Python");
    let mappings = maps::parse(&LiveSystem.maps(pid).expect("it runs"));
    let memory = ProcessMemory(&LiveSystem, pid);
    let interpreter = interpreter.expect("a known version");
    let heap = python::find(&memory, &mappings, &runtime, &interpreter).expect("a heap");
    let size = heap.arenas.iter().map(|arena| arena.end - arena.start).sum();
    (heap.census(&memory, &AllResident, budget), size)
}

#[test]
fn objects_with_what_they_own() {
    each_of(with_known_heap(), |python| {
        let mut program = Program::start(python.script("heap_types.py"));
        let (full, size) = census(program.pid(), None);
        let (part, _) = census(program.pid(), Some(Duration::ZERO));
        assert!(full.is_full && full.torn == 0 && !full.is_truncated, "{full:?}");
        let sum: Estimate = [full.used, full.free_blocks, full.free_pools].into_iter().sum();
        assert_eq!(sum, Estimate::exact(size));
        let mut kinds = 0;
        for line in &program.said {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |n: usize| words[n].parse::<u64>().expect("a number");
            let row = |census: &PythonCensus| {
                let found = census.types.iter().find(|row| row.name == words[1].as_bytes());
                found.cloned()
            };
            match words.first() {
                Some(&"TYPE") => {
                    let (count, low, high) = (number(2), number(3), number(4));
                    let row = row(&full).unwrap_or_else(|| panic!("no {line}"));
                    assert!(row.is_object);
                    assert_eq!(row.count, Estimate::exact(count), "{line}");
                    // The blocks of debug builds have a header, and those of buffers, too.
                    let high = if python.flags.contains('d') { high + 100 } else { high };
                    let bytes = row.bytes.value;
                    assert!((count * low..=count * high).contains(&bytes), "{line}: {bytes}");
                    kinds += 1;
                }
                Some(&"LEAST") => {
                    let count = row(&full).map_or(0, |row| row.count.value);
                    // The interpreter has some ten thousand.
                    assert!((number(2)..2 * number(2) + 20_000).contains(&count), "{line}: {count}");
                    kinds += 1;
                }
                Some(&"LARGE") => {
                    let index = full.types.iter().position(|row| row.name == words[1].as_bytes());
                    let is_it = |large: &&python::LargeBuffer| Some(large.type_index) == index;
                    let largest = full.large.iter().filter(is_it).map(|large| large.bytes).max();
                    // Free-threaded builds have it among the other bytes.
                    let least = row(&full)
                        .map(|row| row.bytes.value)
                        .filter(|_| python.is_free_threaded());
                    assert!(
                        largest == Some(number(2)) || least >= Some(number(2)),
                        "{line}: {largest:?}"
                    );
                    kinds += 1;
                }
                _ => {}
            }
        }
        assert_eq!(kinds, if python.minor < 12 { 12 } else { 13 });
        assert!(!part.is_full && part.read < part.pools);
        let ordered = |e: &Estimate| e.low <= e.value && e.value <= e.high;
        assert!(part.types.iter().all(|row| ordered(&row.count) && ordered(&row.bytes)));
        program.finish();
    });
}

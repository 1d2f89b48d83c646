#![no_main]
//! The heap of Python in memory that is anything: arenas, pools, pages of mimalloc, types, and what objects own.

use std::ops::Range;

use libfuzzer_sys::fuzz_target;
use nativeprof::cpython::{DEFAULT_DESCRIPTOR, Runtime, versions};
use nativeprof::cpython_layout::{Interpreter, ThreadStateLocation};
use nativeprof::heap::estimate::Estimate;
use nativeprof::heap::python::{self, ResidentPages};
use nativeprof::process::maps;
use nativeprof::process::memory::Memory;
use nativeprof_fuzz::Bytes;

/// Where pools, and segments of mimalloc, may begin. The page below has the interpreter's variables.
const BASE: u64 = 32 << 20;
const START: u64 = BASE - 4096;
const END: u64 = BASE + (128 << 10);

/// The same pages again and again.
struct Image(Vec<u8>);

impl Memory for Image {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let is_inside = avma >= START && avma.checked_add(buf.len() as u64).is_some_and(|end| end <= END);
        let length = self.0.len() as u64;
        if is_inside {
            let first = (avma + length - 4096) % length;
            let bytes = self.0.iter().cycle().skip(first as usize);
            buf.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        }
        is_inside
    }
}

impl ResidentPages for Image {
    fn bytes_in(&self, range: Range<u64>) -> u64 {
        range.end.min(END).saturating_sub(range.start.max(START))
    }
}

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let facts = versions::ALL[usize::from(b.u8()) % versions::ALL.len()];
    let free_threaded = facts.free_threaded.filter(|_| b.u8() & 1 == 1);
    let layout = free_threaded.unwrap_or(facts.layout);
    let runtime = Runtime {
        version: (3, facts.minor, 255),
        facts: Some(facts),
        runtime: 0,
        layout: Some(layout),
        thread_state: ThreadStateLocation::InterpreterList,
        free_threaded: free_threaded.is_some(),
        newer_than_known: false,
        eval: Vec::new(),
    };
    let python = Interpreter {
        runtime: BASE - 8,
        layout,
        thread_state: ThreadStateLocation::InterpreterList,
        descriptor: DEFAULT_DESCRIPTOR,
    };
    let mut image = b.0.to_vec();
    image.resize(image.len().next_multiple_of(4096).max(4096), 0);
    let memory = Image(image);
    let mappings = maps::parse(b"1fff000-2000000 rw-p 0 00:00 7 /python\n2000000-2020000 rw-p 0 00:00 0");
    let Ok(heap) = python::find(&memory, &mappings, &runtime, &python) else {
        return;
    };
    assert!(heap.arenas.windows(2).all(|pair| pair[0].end <= pair[1].start), "arenas overlap");
    let census = heap.census(&memory, &memory, None);
    let is_ordered = |e: &Estimate| e.low <= e.value && e.value <= e.high;
    assert!(census.types.iter().all(|row| !row.name.is_empty() && is_ordered(&row.count) && is_ordered(&row.bytes)));
    assert!(census.large.iter().all(|large| large.type_index < census.types.len()));
    assert!(census.large.iter().all(|large| large.bytes <= END - START));
    if census.torn == 0 {
        let parts: Estimate = [census.used, census.free_blocks, census.free_pools].into_iter().sum();
        let resident = heap.arenas.iter().map(|arena| memory.bytes_in(arena.clone())).sum();
        assert_eq!(parts, Estimate::exact(resident));
    }
});

//! Rows of a log as a timeline: in chronological order, with the function that made each, its caller, and the sizes of
//! what was freed.

use std::collections::{HashMap, HashSet};

use super::log::{Contents, EventRow};
use crate::engine::Clock;
use crate::engine::clock::monotonic;

/// Event codes, those of cpyquickhelper 0.3.412 (`cpyquickhelper/profiling/event_profiler.py`).
pub mod code {
    pub const CALL: u64 = 1;
    pub const RETURN: u64 = 2;
    pub const C_CALL: u64 = 3;
    pub const C_RETURN: u64 = 4;
    pub const C_EXCEPTION: u64 = 6;
    pub const PROFILER_START: u64 = 100;
    pub const PROFILER_STOP: u64 = 101;
    pub const MALLOC: u64 = 1000;
    pub const CALLOC: u64 = 1001;
    pub const REALLOC: u64 = 1002;
    pub const FREE: u64 = 1003;
    pub const REALLOC_FREE: u64 = 1004;
    /// Ours: a thread waits in `epoll_wait`, `poll`, `select` or one of their variants.
    pub const WAIT: u64 = 1100;
    pub const WAIT_END: u64 = 1101;
    /// Ours, and not shown: the thread continues with the stack of another greenlet. `key`: that greenlet; `address`: the one
    /// that it was in.
    pub const SWITCH: u64 = 1200;
}

/// Above an event's code: whose allocator it was, 1 + the number of Python's domain, or this.
pub const NATIVE: u64 = 4;
/// Added to that: a request to Python's allocator that reached the C library's.
pub const REACHED: u64 = 16;
pub const DOMAIN_SHIFT: u32 = 16;

/// From a clock's ticks to nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Copy)]
pub struct Scale {
    clock: Clock,
    ticks: i64,
    nanoseconds: i64,
    /// Nanoseconds per tick, once it is settled.
    each: Option<f64>,
}

impl Scale {
    pub fn new(clock: Clock) -> Scale {
        Scale {
            clock,
            each: None,
            ticks: clock.now(),
            nanoseconds: monotonic(),
        }
    }

    /// Settles the clock's rate, which is known the better the later: times are the same whenever rows are read.
    pub fn settle(&mut self) {
        self.each = Some(self.clock.nanoseconds());
    }

    fn converter(self) -> impl Fn(i64) -> i64 {
        let each = self.each.unwrap_or_else(|| self.clock.nanoseconds());
        move |ticks| self.nanoseconds + ((ticks.wrapping_sub(self.ticks)) as f64 * each) as i64
    }
}

/// What was on the stacks when a recording started.
pub struct Base {
    /// Ticks.
    at: i64,
    /// By ident of the thread: keys of code objects, outermost first.
    pub stacks: HashMap<u64, Vec<u64>>,
}

impl Base {
    pub fn new(at: i64) -> Base {
        Base {
            at,
            stacks: HashMap::new(),
        }
    }
}

/// Keeps the first of the functions with the same key.
pub fn unique<T>(functions: &mut Vec<(u64, T)>) {
    let mut seen = HashSet::new();
    functions.retain(|(key, _)| seen.insert(*key));
}

/// Code objects that have ended, by the address that they had: until when (ticks), and the key of the function, oldest first.
#[derive(Clone, Default)]
pub struct EndedKeys(HashMap<u64, Vec<(i64, u64)>>);

impl EndedKeys {
    /// What is known already changes nothing.
    pub fn add(&mut self, address: u64, until: i64, key: u64) {
        let list = self.0.entry(address).or_default();
        match list.last_mut() {
            Some((known, _)) if until <= *known => {}
            Some((known, last)) if *last == key => *known = until,
            _ => list.push((until, key)),
        }
    }

    pub fn add_all(&mut self, other: &EndedKeys) {
        for (address, list) in &other.0 {
            for (until, key) in list {
                self.add(*address, *until, *key);
            }
        }
    }

    /// The key of the function that had this one at a time.
    fn key(&self, key: u64, time: i64) -> u64 {
        let Some(list) = self.0.get(&key) else { return key };
        let at = list.partition_point(|(until, _)| *until < time);
        list.get(at).map_or(key, |(_, ended)| *ended)
    }
}

/// What one thread is doing.
#[derive(Default)]
struct OpenSpans {
    /// The recording that it belongs to.
    run: usize,
    /// Key, and whether it is a code object.
    open: Vec<(u64, bool)>,
    /// Of other greenlets.
    parked: HashMap<u64, Vec<(u64, bool)>>,
}

impl OpenSpans {
    /// Continues with the stack of greenlet `to`.
    fn switch(&mut self, from: u64, to: u64) {
        let next = self.parked.remove(&to).unwrap_or_default();
        let open = std::mem::replace(&mut self.open, next);
        if !open.is_empty() {
            self.parked.insert(from, open);
        }
    }

    /// The innermost Python function, and the one that called it.
    fn code(&self) -> (u64, u64) {
        let mut codes = self.open.iter().rev().filter(|f| f.1).map(|f| f.0);
        (codes.next().unwrap_or(0), codes.next().unwrap_or(0))
    }

    /// Ends a call, and those above it.
    fn leave(&mut self, key: u64) {
        if let Some(at) = self.open.iter().rposition(|f| f.0 == key) {
            self.open.truncate(at);
        }
    }
}

/// Columns of a row and their bytes: frame, arg, event, time, value1, value2, thread, domain; and of its function and
/// caller.
type Raw = [i64; 8];

/// The rows as 64-bit integers, eight each, and two each for the function that is to be shown and its caller. Calls of the
/// functions in `left_out` are left out.
pub fn arrange(
    contents: Contents,
    bases: &[Base],
    scale: Scale,
    ended: &EndedKeys,
    left_out: &HashSet<u64>,
) -> (Vec<u8>, Vec<u8>) {
    let nanoseconds = scale.converter();
    let Contents { mut rows, threads, .. } = contents;
    // Stable: rows of one thread keep their order.
    rows.sort_by_key(|(_, row)| row.time);
    let mut stacks: Vec<OpenSpans> = Vec::new();
    stacks.resize_with(threads.len(), || OpenSpans {
        run: usize::MAX,
        ..OpenSpans::default()
    });
    let mut live: HashMap<u64, (i64, u64)> = HashMap::new();
    let (mut run, mut raw, mut callers) = (
        0,
        Vec::with_capacity(rows.len() * 64),
        Vec::with_capacity(rows.len() * 16),
    );
    for (number, mut row) in rows {
        if row.event < code::PROFILER_START {
            row.key = ended.key(row.key, row.time);
        }
        if left_out.contains(&row.key) && row.event != code::SWITCH {
            continue;
        }
        while bases.get(run + 1).is_some_and(|next| next.at <= row.time) {
            run += 1;
        }
        let (Some(stack), Some(thread)) = (stacks.get_mut(number as usize), threads.get(number as usize)) else {
            continue;
        };
        if stack.run != run {
            let open = bases.get(run).and_then(|base| base.stacks.get(&thread.ident));
            let open = open.map(|keys| keys.iter().map(|key| (*key, true)).collect());
            *stack = OpenSpans {
                run,
                open: open.unwrap_or_default(),
                ..OpenSpans::default()
            };
        }
        let mut domain = row.event >> DOMAIN_SHIFT;
        let event = row.event & ((1 << DOMAIN_SHIFT) - 1);
        if event == code::SWITCH {
            stack.switch(row.address, row.key);
            continue;
        }
        let size = size_of_row(&mut live, &row, event, &mut domain);
        let (frame, arg, caller) = place(stack, &row, event);
        let values: Raw = [
            frame as i64,
            arg as i64,
            event as i64,
            nanoseconds(row.time),
            row.address as i64,
            size,
            i64::from(thread.native_id),
            domain as i64,
        ];
        raw.extend(values.iter().flat_map(|v| v.to_ne_bytes()));
        let shown = if arg == 0 { frame } else { arg };
        callers.extend([shown, caller].iter().flat_map(|v| v.to_ne_bytes()));
    }
    (raw, callers)
}

/// What was requested, or minus that where it is freed; 0 where the block is not known.
fn size_of_row(live: &mut HashMap<u64, (i64, u64)>, row: &EventRow, event: u64, domain: &mut u64) -> i64 {
    match event {
        code::MALLOC | code::CALLOC | code::REALLOC => {
            live.insert(row.address, (row.size, *domain & REACHED));
            row.size
        }
        code::FREE | code::REALLOC_FREE => match live.remove(&row.address) {
            Some((size, reached)) => {
                *domain |= reached;
                -size
            }
            None => 0,
        },
        _ => row.size,
    }
}

/// Frame, arg and caller of a row, whose event is applied to the thread's stack.
fn place(stack: &mut OpenSpans, row: &EventRow, event: u64) -> (u64, u64, u64) {
    match event {
        code::CALL => {
            let caller = stack.code().0;
            stack.open.push((row.key, true));
            (row.key, 0, caller)
        }
        code::RETURN => {
            stack.leave(row.key);
            (row.key, 0, stack.code().0)
        }
        code::C_CALL => {
            let frame = stack.code().0;
            stack.open.push((row.key, false));
            (frame, row.key, frame)
        }
        code::C_RETURN | code::C_EXCEPTION => {
            stack.leave(row.key);
            let frame = stack.code().0;
            (frame, row.key, frame)
        }
        _ => {
            let (frame, caller) = stack.code();
            match stack.open.last() {
                Some((key, false)) => (frame, *key, frame),
                _ => (frame, 0, caller),
            }
        }
    }
}

//! A profile as CPython's `pstats` has it, the file of `python -m cProfile -o`: a table of functions with their
//! callers.
//!
//! ```text
//! {(file, line, name): (direct, all, self, cumulative, {(file, line, name): (all, direct, self, cumulative)})}
//! ```
//!
//! A profile of calls has in it what `cProfile` would have: calls, those of them that are not recursive (primitive), and
//! times.
//!
//! A sampled profile has samples in the place of calls: *all* of them with the function on the stack (`ncalls`), and
//! those in which it was itself running (primitive calls), as CPython 3.15's own sampler has it. Times are samples by
//! the period, in seconds: of CPU time if nothing else was sampled, of wall time where there are samples of waits
//! (`--mode wall` and `off-cpu`); where the rate is not known a sample is a second. The sum of primitive calls is the
//! number of samples. A text after the dictionary says so, with the clock, to our own reader; Python's readers stop
//! before it.
//!
//! Native functions have their module for a file and 0 for a line.
//!
//! Sources: `Lib/pstats.py` (`load_stats`), `Lib/cProfile.py` (`snapshot_stats`), `Python/marshal.c` (type codes of
//! format 2, without references, which every version reads).

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

use rustc_hash::FxHashMap;

use super::thread_tracks::{NONE, StackRows, period};
use crate::escape;
use crate::model::{FrameKind, Profile};
use crate::pstats::{BUILTIN, SAMPLES_MARK};
use crate::values::ValueType;
use crate::view::View;

/// Figures of a function, or of a pair of caller and callee: as the file has them, times in their unit.
#[derive(Clone, Copy, Default)]
struct PstatsTimes {
    calls: u64,
    primitive: u64,
    self_time: u64,
    total: u64,
}

/// What an item of the view has itself, and with what is below it.
struct SelfAndTotal {
    is_sampled: bool,
    self_counts: Vec<u64>,
    counts: Vec<u64>,
    self_time: Vec<u64>,
    total: Vec<u64>,
}

impl SelfAndTotal {
    fn new(profile: &Profile, view: &View<'_>, stacks: &StackRows<'_>) -> SelfAndTotal {
        let is_sampled = *profile.count_type() != ValueType::CALLS;
        let self_counts = stacks.self_counts.clone();
        let counts: Vec<u64> = view.items.iter().map(|item| item.count).collect();
        let time = profile.find_value("wall").or_else(|| profile.find_value("cpu"));
        let (self_time, total) = match (is_sampled, time) {
            (true, _) => (self_counts.clone(), counts.clone()),
            (false, Some(time)) => (view.self_amounts(profile, time), view.amounts(profile, time)),
            (false, None) => (vec![0; counts.len()], vec![0; counts.len()]),
        };
        SelfAndTotal {
            is_sampled,
            self_counts,
            counts,
            self_time,
            total,
        }
    }

    /// Adds an item to the figures of its function, or of its pair. `is_outermost`: no other one of them is above it.
    fn add(&self, item: u32, is_outermost: bool, figures: &mut PstatsTimes) {
        let at = item as usize;
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut figures.self_time, self.self_time[at]);
        if is_outermost {
            add(&mut figures.total, self.total[at]);
        }
        if self.is_sampled {
            add(&mut figures.primitive, self.self_counts[at]);
            add(&mut figures.calls, if is_outermost { self.counts[at] } else { 0 });
        } else {
            add(&mut figures.calls, self.self_counts[at]);
            add(
                &mut figures.primitive,
                if is_outermost { self.self_counts[at] } else { 0 },
            );
        }
    }

    /// Adds what a thread or process has itself, outside of all functions.
    fn add_group(&self, item: u32, figures: &mut PstatsTimes) {
        let at = item as usize;
        let amounts = [
            self.self_counts[at],
            self.self_counts[at],
            self.self_time[at],
            self.self_time[at],
        ];
        let sums = [
            &mut figures.calls,
            &mut figures.primitive,
            &mut figures.self_time,
            &mut figures.total,
        ];
        sums.into_iter()
            .zip(amounts)
            .for_each(|(sum, more)| *sum = sum.saturating_add(more));
    }
}

/// Writes the profile as marshalled statistics.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let stacks = StackRows::by_function(&view);
    let (keys, key_of) = keys(&stacks);
    let mut functions = vec![PstatsTimes::default(); keys.len()];
    let mut edges: FxHashMap<(u32, u32), PstatsTimes> = FxHashMap::default();
    let amounts = SelfAndTotal::new(profile, &view, &stacks);
    count(&view, &stacks, &amounts, &key_of, &mut functions, &mut edges);

    let mut callers: Vec<Vec<(u32, PstatsTimes)>> = vec![Vec::new(); keys.len()];
    for ((caller, callee), figures) in edges {
        callers[callee as usize].push((caller, figures));
    }
    let seconds = if amounts.is_sampled {
        period(profile).map_or(1.0, |ns| ns as f64 * 1e-9)
    } else {
        1e-9
    };
    let mut out = BufWriter::with_capacity(64 << 10, out);
    out.write_all(b"{")?;
    for (key, callers) in callers.iter_mut().enumerate() {
        let figures = functions[key];
        if figures.calls == 0 && figures.total == 0 {
            continue;
        }
        out.write_all(&keys[key])?;
        out.write_all(b"(\x05\0\0\0")?;
        numbers([figures.primitive, figures.calls], &figures, seconds, &mut out)?;
        out.write_all(b"{")?;
        callers.sort_unstable_by_key(|(caller, _)| *caller);
        for (caller, figures) in callers {
            out.write_all(&keys[*caller as usize])?;
            out.write_all(b"(\x04\0\0\0")?;
            numbers([figures.calls, figures.primitive], figures, seconds, &mut out)?;
        }
        out.write_all(b"0")?;
    }
    out.write_all(b"0")?;
    if amounts.is_sampled {
        let mut mark = Vec::new();
        text(&format!("{SAMPLES_MARK} {}", clock(profile)), &mut mark);
        out.write_all(&mark)?;
    }
    out.flush()
}

/// The clock of a sampled profile's times, which are all its samples by the period; empty if they are of no clock.
fn clock(profile: &Profile) -> &'static str {
    let types = profile.value_types();
    let is_per_count = |name: &str| profile.find_value(name).map(|value| types[value].is_per_count());
    match (period(profile), is_per_count("cpu"), is_per_count("wall")) {
        (None, ..) => "",
        (_, Some(true), _) => "cpu",
        // Also where samples are weighted: CPU time is that of some of them.
        (_, _, Some(_)) => "wall",
        _ => "",
    }
}

/// The key of each function, marshalled, and which of them each one has: some have the same.
fn keys(stacks: &StackRows<'_>) -> (Vec<Vec<u8>>, Vec<u32>) {
    let mut keys = Vec::new();
    // Names come from the target: use a hasher that resists collision attacks.
    let mut known: HashMap<Vec<u8>, u32> = HashMap::new();
    let of_function = stacks.functions.iter().map(|function| {
        let python = function.frame.filter(|frame| frame.kind == FrameKind::Python);
        let (file, line, name) = match (python, function.frame) {
            (Some(frame), _) => (&*frame.filename, frame.first_line, &*frame.name),
            // The location of built-in functions for the readers.
            (_, None) => ("~", 0, &*function.name),
            (_, Some(frame)) if matches!(&*frame.module, "" | BUILTIN) => ("~", 0, &*function.name),
            (_, Some(frame)) => (&*frame.module, 0, &*function.name),
        };
        let mut key = b"(\x03\0\0\0".to_vec();
        text(file, &mut key);
        integer(line.into(), &mut key);
        text(name, &mut key);
        *known.entry(key).or_insert_with_key(|key| {
            keys.push(key.clone());
            keys.len() as u32 - 1
        })
    });
    let of_function = of_function.collect();
    (keys, of_function)
}

/// Adds up the figures of each function, and of each pair of caller and callee.
fn count(
    view: &View<'_>,
    stacks: &StackRows<'_>,
    amounts: &SelfAndTotal,
    key_of: &[u32],
    functions: &mut [PstatsTimes],
    edges: &mut FxHashMap<(u32, u32), PstatsTimes>,
) {
    let key = |item: u32| key_of[stacks.function[item as usize] as usize];
    let mut on_path = vec![0u32; functions.len()];
    let mut edges_on_path: FxHashMap<(u32, u32), u32> = FxHashMap::default();
    // (item, whether it is being left)
    let mut walk = vec![(0u32, false)];
    while let Some((item, leaving)) = walk.pop() {
        let (here, caller) = (key(item), stacks.caller[item as usize]);
        let edge = (caller != NONE).then(|| (key(caller), here));
        // Threads and processes are not functions: only their self samples count.
        let group = stacks.function[item as usize] == 0;
        if leaving {
            on_path[here as usize] -= u32::from(!group);
            if let Some(depth) = edge.and_then(|edge| edges_on_path.get_mut(&edge)) {
                *depth -= 1;
            }
            continue;
        }
        if group {
            amounts.add_group(item, &mut functions[here as usize]);
        } else {
            amounts.add(item, on_path[here as usize] == 0, &mut functions[here as usize]);
        }
        on_path[here as usize] += u32::from(!group);
        if let Some(edge) = edge {
            let depth = edges_on_path.entry(edge).or_default();
            amounts.add(item, *depth == 0, edges.entry(edge).or_default());
            *depth += 1;
        }
        walk.push((item, true));
        walk.extend(view.children(item).iter().map(|child| (*child, false)));
    }
}

fn numbers(calls: [u64; 2], figures: &PstatsTimes, seconds: f64, out: &mut impl Write) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(40);
    calls.into_iter().for_each(|n| integer(n, &mut bytes));
    for time in [figures.self_time, figures.total] {
        bytes.push(b'g');
        bytes.extend((time as f64 * seconds).to_le_bytes());
    }
    out.write_all(&bytes)
}

fn integer(n: u64, out: &mut Vec<u8>) {
    if let Ok(small) = i32::try_from(n) {
        out.push(b'i');
        out.extend(small.to_le_bytes());
        return;
    }
    // Digits of 15 bits, lowest first.
    let digits = n.ilog2() / 15 + 1;
    out.push(b'l');
    out.extend(digits.to_le_bytes());
    (0..digits).for_each(|at| out.extend(((n >> (15 * at)) as u16 & 0x7fff).to_le_bytes()));
}

/// Readers print names as they are.
fn text(text: &str, out: &mut Vec<u8>) {
    let text = escape::line(text);
    out.push(b'u');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::measure::Measure;
    use crate::model::{Frame, Meta};

    #[test]
    fn times_are_of_the_clock_that_was_sampled() {
        let weighted = [ValueType::SAMPLES, ValueType::WALL, ValueType::CPU, ValueType::OFF_CPU];
        for (types, event, rate, clock) in [
            (&[][..], "cpu-clock", 100, "cpu"),
            (&[], "wall-clock", 100, "wall"),
            (&[], "page-faults", 100, ""),
            (&[], "cpu-clock", 0, ""),
            (&weighted, "", 100, "wall"),
            (&weighted, "", 0, ""),
            (&[ValueType::SAMPLES, ValueType::CPU], "", 100, ""),
        ] {
            let mut builder = Builder::new(types);
            let function = builder.frame(Frame::python("f", "f", "/a.py", 1));
            builder.sample(1, (1, 1), &[(function, 2)], &[1, 10, 10, 0]);
            let mut profile = builder.finish(Meta {
                rate,
                ..Meta::default()
            });
            if types.is_empty() {
                profile.values = Measure::of_event(event, rate).values();
            }
            let mut out = Vec::new();
            write(&profile, &mut out).unwrap();
            let mark = format!("{SAMPLES_MARK} {clock}");
            assert!(out.ends_with(mark.as_bytes()), "{types:?} {event} {rate}");
        }
    }

    #[test]
    fn integers_of_every_size() {
        for (n, expected) in [
            (0, "i\0\0\0\0"),
            (0x7fff_ffff, "i\u{7f}"),
            (0x8000_0000, "l\x03\0\0\0\0\0\0\0\x02\0"),
            (u64::MAX, "l\x05\0\0\0"),
        ] {
            let mut out = Vec::new();
            integer(n, &mut out);
            let text: String = out.iter().map(|b| *b as char).collect();
            assert!(text.starts_with(&expected[..1]), "{n}");
            match out[0] {
                b'i' => assert_eq!(u64::from(u32::from_le_bytes(out[1..].try_into().unwrap())), n),
                _ => {
                    let digits = out[5..].chunks(2).rev();
                    let value = digits.fold(0u64, |v, d| v << 15 | u64::from(u16::from_le_bytes([d[0], d[1]])));
                    assert_eq!(value, n);
                }
            }
        }
    }
}

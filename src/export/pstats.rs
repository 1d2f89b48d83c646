//! A profile as CPython's `pstats` has it, the file of `python -m cProfile -o`: a table of functions with their
//! callers.
//!
//! ```text
//! {(file, line, name): (direct, all, self, cumulative, {(file, line, name): (all, direct, own, cumulative)})}
//! ```
//!
//! Where a tracer counts calls there are samples here: *all* of them with the function on the stack (`ncalls`), and
//! those in which it was itself running (primitive calls), as CPython 3.15's own sampler has it. Times are samples by
//! the period, in seconds of CPU time; where the rate is not known a sample is a second. The sum of primitive calls is
//! the number of samples. Native functions have their module for a file and 0 for a line.
//!
//! Sources: `Lib/pstats.py` (`load_stats`), `Lib/cProfile.py` (`snapshot_stats`), `Python/marshal.c` (type codes of
//! format 2, without references, which every version reads).

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};

use rustc_hash::FxHashMap;

use super::thread_tracks::{NONE, Stacks, period};
use crate::escape;
use crate::profile::model::{FrameKind, Profile};
use crate::profile::view::View;

/// Samples with something on the stack, and at its end.
#[derive(Clone, Copy, Default)]
struct Count {
    all: u64,
    direct: u64,
}

/// Writes the profile as marshalled statistics.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let stacks = Stacks::by_function(&view);
    let (keys, key_of) = keys(&stacks);
    let mut functions = vec![Count::default(); keys.len()];
    let mut edges: FxHashMap<(u32, u32), Count> = FxHashMap::default();
    count(&view, &stacks, &key_of, &mut functions, &mut edges);

    let mut callers: Vec<Vec<(u32, Count)>> = vec![Vec::new(); keys.len()];
    for ((caller, callee), count) in edges {
        callers[callee as usize].push((caller, count));
    }
    let seconds = period(profile).map_or(1.0, |ns| ns as f64 * 1e-9);
    let mut out = BufWriter::with_capacity(64 << 10, out);
    out.write_all(b"{")?;
    for (key, callers) in callers.iter_mut().enumerate() {
        let Count { all, direct } = functions[key];
        if all == 0 {
            continue;
        }
        out.write_all(&keys[key])?;
        out.write_all(b"(\x05\0\0\0")?;
        numbers([direct, all], seconds, [direct, all], &mut out)?;
        out.write_all(b"{")?;
        callers.sort_unstable_by_key(|(caller, _)| *caller);
        for (caller, Count { all, direct }) in callers {
            out.write_all(&keys[*caller as usize])?;
            out.write_all(b"(\x04\0\0\0")?;
            numbers([*all, *direct], seconds, [*direct, *all], &mut out)?;
        }
        out.write_all(b"0")?;
    }
    out.write_all(b"0")?;
    out.flush()
}

/// The key of each function, marshalled, and which of them each one has: some have the same.
fn keys(stacks: &Stacks<'_>) -> (Vec<Vec<u8>>, Vec<u32>) {
    let mut keys = Vec::new();
    // Names come from the target: use a hasher that resists collision attacks.
    let mut known: HashMap<Vec<u8>, u32> = HashMap::new();
    let of_function = stacks.functions.iter().map(|function| {
        let python = function.frame.filter(|frame| frame.kind == FrameKind::Python);
        let (file, line, name) = match (python, function.frame) {
            (Some(frame), _) => (&*frame.filename, frame.first_line, &*frame.name),
            // The location of built-in functions for the readers.
            (_, None) => ("~", 0, &*function.name),
            (_, Some(frame)) if frame.module.is_empty() => ("~", 0, &*function.name),
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

/// Counts each function, and each pair of caller and callee, once for every sample that has it on the stack, however
/// often.
fn count(
    view: &View<'_>,
    stacks: &Stacks<'_>,
    key_of: &[u32],
    functions: &mut [Count],
    edges: &mut FxHashMap<(u32, u32), Count>,
) {
    let key = |item: u32| key_of[stacks.function[item as usize] as usize];
    let add = |count: &mut u64, more: u64| *count = count.saturating_add(more);
    let mut on_path = vec![0u32; functions.len()];
    let mut edges_on_path: FxHashMap<(u32, u32), u32> = FxHashMap::default();
    // (item, whether it is being left)
    let mut walk = vec![(0u32, false)];
    while let Some((item, leaving)) = walk.pop() {
        let (here, caller) = (key(item), stacks.caller[item as usize]);
        let edge = (caller != NONE).then(|| (key(caller), here));
        // Threads and processes are not functions: only their self samples count.
        let group = stacks.function[item as usize] == 0;
        let (all, self_count) = (view.items[item as usize].count, stacks.self_counts[item as usize]);
        if leaving {
            on_path[here as usize] -= u32::from(!group);
            if let Some(depth) = edge.and_then(|edge| edges_on_path.get_mut(&edge)) {
                *depth -= 1;
            }
            continue;
        }
        add(&mut functions[here as usize].direct, self_count);
        if group {
            add(&mut functions[here as usize].all, self_count);
        } else if on_path[here as usize] == 0 {
            add(&mut functions[here as usize].all, all);
        }
        on_path[here as usize] += u32::from(!group);
        if let Some(edge) = edge {
            let count = edges.entry(edge).or_default();
            let depth = edges_on_path.entry(edge).or_default();
            add(&mut count.direct, self_count);
            if *depth == 0 {
                add(&mut count.all, all);
            }
            *depth += 1;
        }
        walk.push((item, true));
        walk.extend(view.children(item).iter().map(|child| (*child, false)));
    }
}

fn numbers(calls: [u64; 2], seconds: f64, times: [u64; 2], out: &mut impl Write) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(40);
    calls.into_iter().for_each(|n| integer(n, &mut bytes));
    for samples in times {
        bytes.push(b'g');
        bytes.extend((samples as f64 * seconds).to_le_bytes());
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

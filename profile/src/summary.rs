//! The summary at the end of a recording: samples expected, taken and lost, quality of the stacks, overhead.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::escape::{self, line};
use crate::idle;
use crate::lags::Lag;
use crate::model::{Frame, FrameKind, Meta, ModuleMeta, Profile, Quality};
use crate::resident::MemoryChanges;
use crate::values::{Unit, ValueType};
use crate::waits;

/// The block as text, a line each. `written`: where the profile is; `is_verbose`: with a line for each file with samples,
/// which says what symbols it has.
pub fn block(meta: &Meta, written: &str, is_verbose: bool) -> String {
    let (meta, written) = (&printable(meta), line(written));
    let q = &meta.quality;
    let mut out = String::new();
    let expected = if q.expected > 0 {
        format!("{} expected, ", q.expected)
    } else {
        String::new()
    };
    // Of samples by CPU time: others are not due at a rate.
    let rate = if q.expected > 0 && meta.target_cpu > 0.0 {
        format!("; rate {:.1} of {} Hz", q.taken as f64 / meta.target_cpu, meta.rate)
    } else {
        String::new()
    };
    let _ = writeln!(
        out,
        "nativeprof: {} in {:.1} s ({expected}{} lost){rate}",
        counted(q.taken, "samples"),
        meta.duration,
        q.lost
    );
    let stacks = if q.taken == 0 && meta.is_of_gil_holders() {
        "none: no sampled thread held the GIL".into()
    } else if q.taken == 0 && !meta.memory.is_empty() {
        "none: resident memory did not change, or too little for a sample; try a smaller --interval".into()
    } else {
        stacks(q)
    };
    let _ = writeln!(out, "  stacks:   {stacks}");
    if let Some(stopped) = &meta.stopped {
        let (median, longest) = (stopped.median_us, stopped.max_us);
        let _ = writeln!(out, "  stopped:  median {median} µs, longest {longest} µs");
    }
    let python = if meta.python.is_empty() {
        "none found (CPython 3.6 and later)"
    } else {
        &meta.python
    };
    let _ = writeln!(out, "  python:   {python}");
    let symbols = if is_verbose {
        symbols(meta)
    } else {
        symbols_in_short(meta)
    };
    let _ = writeln!(out, "  symbols:  {symbols}");
    let _ = writeln!(out, "  overhead: {}", overhead(meta));
    let _ = write!(out, "  written:  {written}");
    out
}

/// CPU time of nativeprof: of sampling, which grows with the samples, and of the rest.
fn overhead(meta: &Meta) -> String {
    let per_sample = |seconds: f64, more: &str| match meta.quality.taken {
        0 => String::new(),
        taken => format!(" ({:.0} µs per sample{more})", seconds * 1e6 / taken as f64),
    };
    match meta.sampling_cpu {
        sampling if sampling > 0.0 => format!(
            "{sampling:.2} s CPU to sample{}, {:.2} s to start and to write",
            per_sample(sampling, ""),
            (meta.profiler_cpu - sampling).max(0.0)
        ),
        _ => format!(
            "{:.2} s CPU{}",
            meta.profiler_cpu,
            per_sample(meta.profiler_cpu, ", including startup and shutdown")
        ),
    }
}

/// What to do where little was seen of a recording of CPU time, because the target seldom ran or its children did the
/// work; `None` elsewhere and for other events. `children`: CPU time of child processes that were not sampled.
pub fn advice(meta: &Meta, children: Duration) -> Option<String> {
    let own = meta.target_cpu;
    let children = children.as_secs_f64();
    if children > own && children > 0.1 * meta.duration {
        return Some(format!(
            "  hint:     its child processes used {children:.2} s of CPU time, the process itself {own:.2} s: add --subprocesses"
        ));
    }
    let is_idle = meta.duration >= 0.5 && own < 0.1 * meta.duration;
    is_idle.then(|| {
        format!(
            "  hint:     the target used {own:.2} s of CPU time in {:.1} s; to see what it waited for, add --mode wall",
            meta.duration
        )
    })
}

/// `  time:     on CPU 3.10 s, runnable 0.21 s, waiting 17.30 s (sleep 12.20 s, gil 5.10 s)`, summed over threads; `None`
/// for a profile of CPU time. Idle pools are listed by their names, unless `idle` says that what they wait for is shown.
pub fn thread_states(profile: &Profile, idle: bool) -> Option<String> {
    let wall = profile.find_value("wall")?;
    profile.find_value("off_cpu")?;
    let (mut running, mut runnable, mut throttled) = (0u64, 0u64, 0u64);
    let mut waiting = BTreeMap::<String, u64>::new();
    // Stacks of wakers may be below a state.
    let states = waits::states(profile);
    let pools = if idle {
        FxHashMap::default()
    } else {
        idle::pools(profile, &states)
    };
    for ((at, state), amount) in profile.nodes.iter().zip(states).zip(profile.self_amounts(wall)) {
        let node = if state == 0 { at } else { &profile.nodes[state as usize] };
        let frame = &profile.frames[node.frame as usize];
        let label = frame.name.trim_matches(['[', ']']);
        match label.strip_prefix("waiting: ").unwrap_or(label) {
            _ if pools.contains_key(&state) => *waiting.entry(format!("idle {}", pools[&state])).or_default() += amount,
            _ if frame.kind != FrameKind::State => running += amount,
            "runnable" => runnable += amount,
            "throttled" => throttled += amount,
            kind => *waiting.entry(without_peer(kind).into()).or_default() += amount,
        }
    }
    let mut kinds: Vec<(String, u64)> = waiting.into_iter().collect();
    kinds.sort_by_key(|(_, time)| Reverse(*time));
    let show = |time: u64| Unit::Nanoseconds.show(time);
    let total = kinds.iter().map(|(_, time)| time).sum();
    let named: Vec<String> = kinds
        .iter()
        .map(|(kind, time)| format!("{kind} {}", show(*time)))
        .collect();
    let (running, runnable, waiting) = (show(running), show(runnable), show(total));
    let kinds = if named.is_empty() {
        String::new()
    } else {
        format!(" ({})", named.join(", "))
    };
    let throttled = match throttled {
        0 => String::new(),
        time => format!(", throttled {}", show(time)),
    };
    Some(format!(
        "  time:     on CPU {running}, runnable {runnable}{throttled}, waiting {waiting}{kinds}"
    ))
}

/// `read socket 127.0.0.1:5432` -> `read socket`, `accept 0.0.0.0:80` -> `accept`, `lock threading.RLock` -> `lock`.
fn without_peer(kind: &str) -> &str {
    let words = match kind.split(' ').next() {
        Some("read" | "write") => 2,
        Some("connect" | "accept" | "lock" | "condition" | "futex") => 1,
        _ => return kind,
    };
    let end = kind.match_indices(' ').nth(words - 1).map(|(at, _)| at);
    end.and_then(|at| kind.get(..at)).unwrap_or(kind)
}

/// `  names:    2 functions have names or files longer than 4096 characters: they are cut ...`; `None` if there are none.
pub fn cut_names(profile: &Profile) -> Option<String> {
    let is_cut = |frame: &&Frame| escape::is_cut(&frame.name) || escape::is_cut(&frame.filename);
    let cut = profile.frames.iter().filter(is_cut).count() as u64;
    (cut > 0).then(|| {
        let functions = counted(cut, "functions");
        format!("  names:    {functions} with a name or file longer than 4096 characters: cut, with length and hash at the end")
    })
}

/// `  lag:      3 callbacks blocked an event loop for 50.00 ms or more; the longest: 80.12 ms in [task: job] block (a.py:7)`
pub fn lags(lags: &[Lag], threshold: u64) -> String {
    let show = |time| Unit::Nanoseconds.show(time);
    let Some(longest) = lags.iter().max_by_key(|lag| lag.length) else {
        return format!(
            "  lag:      no callback blocked an event loop for {} or more",
            show(threshold)
        );
    };
    let task = match &*longest.task {
        "" => String::new(),
        name => format!("[task: {name}] "),
    };
    format!(
        "  lag:      {} callback{} blocked an event loop for {} or more; the longest: {} in {}",
        lags.len(),
        if lags.len() == 1 { "" } else { "s" },
        show(threshold),
        show(longest.length),
        line(&format!("{task}{}", longest.place()))
    )
}

/// What became of the resident memory of the recorded processes, a line for each kind; `None` for other recordings.
///
/// `  memory:   resident 20.1 MiB, +341.4 MiB grown, -124.8 MiB given back = 236.7 MiB; measured 20.1 -> 236.7 MiB`
pub fn memory(meta: &Meta) -> Option<String> {
    let show = |amount: u64| Unit::Bytes.show(amount);
    let account = |changes: &MemoryChanges| {
        let mut text = format!(
            "{} + {} grown - {} given back",
            show(changes.start),
            show(changes.grown),
            show(changes.returned)
        );
        if changes.grown_by_others > 0 {
            let _ = write!(text, " + {} grown by other tasks", show(changes.grown_by_others));
        }
        if changes.returned_by_others > 0 {
            let _ = write!(text, " - {} taken by other tasks", show(changes.returned_by_others));
        }
        format!("{text} = {}", show(changes.end()))
    };
    let mut lines = Vec::new();
    for memory in meta.memory.iter().take(MAX_ACCOUNTS) {
        let whose = if meta.memory.len() > 1 {
            format!("process {}: ", memory.pid)
        } else {
            String::new()
        };
        let measured = match memory.measured {
            None => String::new(),
            Some((start, end)) => format!(" (measured: {} to {})", show(start), show(end)),
        };
        lines.push(format!("  memory:   {whose}{}{measured}", account(&memory.total())));
        if let Some(peak) = memory.peak {
            let time = Unit::Nanoseconds.show(peak.time);
            lines.push(format!("            peak: {} at {time}", show(peak.bytes)));
        }
        for (kind, changes) in [
            ("anonymous", &memory.anonymous),
            ("file", &memory.file),
            ("shared", &memory.shared),
        ] {
            if changes.end() > 0 || changes.all_grown() > 0 {
                lines.push(format!("            {kind}: {}", account(changes)));
            }
        }
    }
    if meta.memory.len() > MAX_ACCOUNTS {
        let more = counted((meta.memory.len() - MAX_ACCOUNTS) as u64, "accounts");
        lines.push(format!("            {more} more: in the profile (json)"));
    }
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// What a profile of allocations amounts to, all of it estimated, and the modules whose own allocators it did not see; `None` for
/// other profiles.
///
/// `  memory:   about 1.20 GiB allocated, 20.1 MiB of it not freed (half of that older than 3.2 s), at most 64.0 MiB at a
/// time; 12.0 MiB mapped`
pub fn allocations(profile: &Profile) -> Option<String> {
    let amount = |kind: &ValueType| Some(profile.total_amount(profile.find_value(&kind.name)?));
    let show = |kind: &ValueType| Some(Unit::Bytes.show(amount(kind)?));
    let mut text = format!(
        "  memory:   about {} allocated, {} of it not freed{}, at most {} at a time",
        show(&ValueType::ALLOC_BYTES)?,
        show(&ValueType::LIVE_BYTES)?,
        live_age(profile).map_or(String::new(), |age| format!(" (half of that older than {age:.1} s)")),
        show(&ValueType::PEAK_BYTES)?,
    );
    // Programs do not publish what they map.
    if let Some(mapped) = show(&ValueType::MAPPED_BYTES) {
        let _ = write!(text, "; {mapped} mapped");
    }
    let own = own_allocators(profile);
    for (module, bytes) in own.iter().take(MAX_OWN_ALLOCATORS) {
        let _ = write!(
            text,
            "\n            {} mapped {} and did not call malloc: blocks of an allocator in it are not seen; --mode rss sees its memory",
            line(module),
            Unit::Bytes.show(*bytes)
        );
    }
    if own.len() > MAX_OWN_ALLOCATORS {
        let more = own.len() - MAX_OWN_ALLOCATORS;
        let _ = write!(text, "\n            and {more} more such modules");
    }
    Some(text)
}

/// The age of which half of the live bytes were at least, in seconds before the end; `None`: nothing was live.
fn live_age(profile: &Profile) -> Option<f64> {
    let live = profile.find_value(&ValueType::LIVE_BYTES.name)?;
    let samples = profile.timeline.iter().enumerate();
    let mut bytes: Vec<(u64, u64)> = samples
        .map(|(at, sample)| (sample.time, profile.sample_amount(live, at)))
        .filter(|(_, amount)| *amount > 0)
        .collect();
    bytes.sort_unstable();
    let half = bytes.iter().map(|(_, amount)| amount).sum::<u64>().div_ceil(2);
    let mut older = 0;
    let (time, _) = bytes.into_iter().find(|(_, amount)| {
        older += amount;
        older >= half
    })?;
    Some((profile.meta.duration - time as f64 / 1e9).max(0.0))
}

/// Modules that mapped memory and called no allocator in any sample, with the bytes, most first: they have one of their own.
fn own_allocators(profile: &Profile) -> Vec<(&str, u64)> {
    let of_modules = |kind: &ValueType| {
        let mut bytes: FxHashMap<&str, u64> = FxHashMap::default();
        let amounts = profile.find_value(&kind.name).map(|value| profile.self_amounts(value));
        for (node, amount) in profile.nodes.iter().zip(amounts.unwrap_or_default()) {
            let frame = profile.frames.get(node.frame as usize);
            if let Some(frame) = frame.filter(|frame| amount > 0 && frame.kind == FrameKind::Native) {
                *bytes.entry(&frame.module).or_default() += amount;
            }
        }
        bytes
    };
    let calls = of_modules(&ValueType::ALLOCS);
    let mut found: Vec<(&str, u64)> = of_modules(&ValueType::MAPPED_BYTES)
        .into_iter()
        .filter(|(module, bytes)| *bytes >= MIN_OWN_ALLOCATOR && !calls.contains_key(module))
        .collect();
    found.sort_by_key(|(module, bytes)| (Reverse(*bytes), *module));
    found
}

/// Bytes that a module has mapped, from which on it is named, and how many are.
const MIN_OWN_ALLOCATOR: u64 = 1 << 20;
const MAX_OWN_ALLOCATORS: usize = 5;

/// Accounts of processes that a summary shows, at most.
const MAX_ACCOUNTS: usize = 8;

/// `  tasks:    99.8% of 1204 samples in coroutines and greenlets have their task`; the others ran a task that was gone
/// when it was read, or a coroutine of another library.
pub fn tasks(with: u64, without: u64) -> String {
    match with + without {
        0 => "  tasks:    no sample was in a coroutine or greenlet".into(),
        all => format!(
            "  tasks:    {} of {} in coroutines and greenlets have their task",
            percent(with, all),
            counted(all, "samples")
        ),
    }
}

/// `  GIL:      held in 1204 of 1530 samples; the others are not in the profile`: for recordings of its holders only.
/// `unknown`: of the samples that are left out, those for which it is not known. `python` is [`Meta::python`].
pub fn gil(held: u64, left_out: u64, unknown: u64, python: &str) -> String {
    let all = held + left_out;
    let mut line = format!(
        "  GIL:      held in {held} of {}; the others are not in the profile",
        counted(all, "samples")
    );
    if unknown > 0 {
        line += &format!(" ({unknown} without a known GIL: not CPython 3.7 or later, or starting)");
    }
    let is_free_threaded = python.split(' ').nth(1).is_some_and(|version| version.ends_with('t'));
    if held == 0 && is_free_threaded {
        line += "\nnativeprof: this is a free-threaded build of CPython, which has no GIL unless PYTHON_GIL=1 or an extension \
                 module turns it on: record without --gil";
    }
    line
}

/// The same with names escaped for terminals.
fn printable(meta: &Meta) -> Meta {
    let mut meta = meta.clone();
    meta.python = line(&meta.python).into_owned();
    for module in &mut meta.modules {
        module.path = line(&module.path).into_owned();
        module.symbols_from = line(&module.symbols_from).into_owned();
        module.symbols_missing = line(&module.symbols_missing).into_owned();
    }
    meta
}

/// `exact 1998 (99.90 %), repaired 1, partial 1 (stack page not present: 1)`
pub fn stacks(q: &Quality) -> String {
    if q.taken == 0 {
        let why = match (q.expected, q.lost) {
            (0, _) => "the target used no CPU time, or too little for a sample; try a higher --rate",
            (_, 0) => "the target used too little CPU time for a sample; try a higher --rate",
            _ => "all samples were lost",
        };
        return format!("none: {why}");
    }
    let mut text = format!("exact {} ({})", q.exact, percent(q.exact, q.taken));
    let _ = write!(text, ", repaired {}, partial {}", q.repaired, q.partial);
    if !q.reasons.is_empty() {
        let reasons: Vec<_> = q.reasons.iter().map(|(why, n)| format!("{why}: {n}")).collect();
        let _ = write!(text, " ({})", reasons.join(", "));
    }
    text
}

/// A number and what it counts, a noun with the plural in -s: `1 sample`, `2 samples`.
pub fn counted(count: impl Into<u64>, plural: &str) -> String {
    match count.into() {
        1 => format!("1 {}", plural.strip_suffix('s').unwrap_or(plural)),
        count => format!("{count} {plural}"),
    }
}

/// An amount of a value type: `1 sample`, `1.20 s cpu`.
pub fn amount(kind: &ValueType, amount: u64) -> String {
    match kind.unit {
        Unit::Count => counted(amount, &kind.name),
        unit => format!("{} {}", unit.show(amount), kind.name),
    }
}

/// Share in percent, rounded down, so that 100 means all.
pub fn percent(part: u64, total: u64) -> String {
    let hundredths = (u128::from(part) * 10_000 / u128::from(total.max(1))) as u64;
    format!("{}.{:02} %", hundredths / 100, hundredths % 100)
}

/// Whether samples in a file have no name.
fn has_unnamed(module: &ModuleMeta) -> bool {
    // Earlier versions recorded missing symbols only for files that had none.
    module.unnamed > 0 || module.symbols_from.starts_with("none")
}

/// `complete for 12 of 30 files; -v lists them`
fn symbols_in_short(meta: &Meta) -> String {
    let all = meta.modules.len();
    match meta.modules.iter().filter(|module| has_unnamed(module)).count() {
        0 if all == 0 => "not needed: no sample is in a file".into(),
        0 => format!("complete for {}", counted(all as u64, "files")),
        unnamed => format!(
            "complete for {} of {}; -v lists the others",
            all - unnamed,
            counted(all as u64, "files")
        ),
    }
}

/// The number of files, then a line for each.
fn symbols(meta: &Meta) -> String {
    let mut text = format!("from {}", counted(meta.modules.len() as u64, "files"));
    for module in &meta.modules {
        let _ = write!(text, "\n            {}", row(module));
    }
    text
}

/// `libssl.so.3: 812 samples; exported symbols; no /usr/lib/debug/.build-id/ab/cdef.debug`
fn row(m: &ModuleMeta) -> String {
    let name = m.path.rsplit('/').next().unwrap_or(&m.path);
    let mut text = format!("{name}: {}; {}", counted(m.samples, "samples"), m.symbols_from);
    if m.unnamed > 0 && !m.symbols_from.starts_with("none") {
        let _ = write!(
            text,
            "; {} of {} without a symbol",
            m.unnamed,
            counted(m.frames, "frames")
        );
    }
    if !m.symbols_missing.is_empty() {
        let _ = write!(text, "; {}", m.symbols_missing);
    }
    if m.symbols_from.starts_with("none") && !m.build_id.is_empty() {
        let _ = write!(text, "; build id {}", m.build_id);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Builder;
    use crate::model::{Node, TimelineSample};
    use crate::values::{Amounts, Value};

    #[test]
    fn percent_is_never_rounded_up() {
        assert_eq!(percent(999_999, 1_000_000), "99.99 %");
        assert_eq!(percent(5, 5), "100.00 %");
        assert_eq!(percent(0, 0), "0.00 %");
        assert_eq!(
            [0u64, 1, 2].map(|n| counted(n, "calls")),
            ["0 calls", "1 call", "2 calls"]
        );
    }

    #[test]
    fn sockets_are_summed_up() {
        for (kind, sum) in [
            ("read socket 127.0.0.1:5432", "read socket"),
            ("write socket", "write socket"),
            ("read", "read"),
            ("accept 0.0.0.0:80", "accept"),
            ("page fault", "page fault"),
        ] {
            assert_eq!(without_peer(kind), sum);
        }
    }

    #[test]
    fn idle_pools_are_listed_by_name() {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL, ValueType::OFF_CPU]);
        let file = "/usr/lib/python3.12/concurrent/futures/thread.py";
        let worker = builder.frame(Frame::python("_worker", "_worker", file, 1));
        let main = builder.frame(Frame::python("main", "main", "app.py", 1));
        let lock = builder.frame(Frame::new(FrameKind::State, "[waiting: lock]"));
        builder.sample(0, (1, 1), &[(main, 2), (lock, 0)], &[1, 2_000_000_000, 2_000_000_000]);
        builder.sample(0, (1, 2), &[(worker, 2), (lock, 0)], &[1, 7_000_000_000, 7_000_000_000]);
        let profile = builder.finish(Meta::default());
        let line = |idle| thread_states(&profile, idle).expect("it has waiting time");
        assert!(
            line(false).ends_with("waiting 9.00 s (idle ThreadPoolExecutor 7.00 s, lock 2.00 s)"),
            "{}",
            line(false)
        );
        assert!(line(true).ends_with("waiting 9.00 s (lock 9.00 s)"), "{}", line(true));
    }

    #[test]
    fn half_of_the_live_bytes_are_older() {
        let check = |live: &[(u64, u64)], age| {
            let sample = |(time, _): &(u64, u64)| TimelineSample {
                time: time * 1_000_000_000,
                pid: 1,
                tid: 1,
                node: 0,
            };
            let mut profile = Profile {
                nodes: vec![Node::new(0, 0)],
                timeline: live.iter().map(sample).collect(),
                ..Profile::default()
            };
            profile.meta.duration = 10.0;
            let amounts = Amounts::Each {
                nodes: vec![live.iter().map(|(_, bytes)| bytes).sum()],
                samples: live.iter().map(|(_, bytes)| *bytes).collect(),
            };
            profile.values = vec![Value {
                kind: ValueType::LIVE_BYTES,
                amounts,
            }];
            assert_eq!(live_age(&profile), age, "{live:?}");
        };
        check(&[], None);
        check(&[(3, 0)], None);
        check(&[(3, 5)], Some(7.0));
        check(&[(1, 0), (2, 5), (4, 1), (9, 5)], Some(6.0));
        check(&[(9, 5), (2, 6)], Some(8.0));
        check(&[(2, 1), (12, 6)], Some(0.0));
    }

    #[test]
    fn modules_with_an_allocator_of_their_own_are_named() {
        let frame = |module: &str| Frame {
            module: module.into(),
            ..Frame::new(FrameKind::Native, "f")
        };
        let value = |kind, nodes: [u64; 4]| Value {
            kind,
            amounts: Amounts::Each {
                nodes: nodes.to_vec(),
                samples: Vec::new(),
            },
        };
        let mut profile = Profile {
            frames: vec![
                Frame::new(FrameKind::Root, ""),
                frame("own.so"),
                frame("both.so"),
                frame("small.so"),
            ],
            nodes: vec![Node::new(0, 0), Node::new(1, 0), Node::new(2, 0), Node::new(3, 0)],
            ..Profile::default()
        };
        assert_eq!(allocations(&profile), None);
        profile.values = vec![
            Value::per_count(ValueType::SAMPLES, 1),
            value(ValueType::ALLOC_BYTES, [3 << 20, 0, 3 << 20, 0]),
            value(ValueType::ALLOCS, [5, 0, 5, 0]),
            value(ValueType::LIVE_BYTES, [1 << 20, 0, 1 << 20, 0]),
            value(ValueType::PEAK_BYTES, [2 << 20, 0, 2 << 20, 0]),
            value(ValueType::MAPPED_BYTES, [(9 << 20) + 5, 4 << 20, 5 << 20, 5]),
        ];
        let text = allocations(&profile).expect("a profile of allocations");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "  memory:   about 3.00 MiB allocated, 1.00 MiB of it not freed, at most 2.00 MiB at a time; 9.00 MiB mapped"
        );
        assert!(
            lines.len() == 2 && lines[1].contains("own.so mapped 4.00 MiB"),
            "{text}"
        );
    }

    #[test]
    fn no_samples_have_a_reason() {
        let check = |expected, lost, why| {
            let q = Quality {
                expected,
                lost,
                ..Quality::default()
            };
            assert!(stacks(&q).contains(why), "{}", stacks(&q));
        };
        check(0, 0, "used no CPU time");
        check(275, 0, "too little CPU time");
        check(275, 275, "all samples were lost");
    }

    #[test]
    fn no_samples_have_no_cost_each() {
        let shown = |taken, sampling_cpu| {
            let mut meta = Meta {
                profiler_cpu: 0.03,
                sampling_cpu,
                ..Meta::default()
            };
            meta.quality.taken = taken;
            overhead(&meta)
        };
        assert_eq!(shown(0, 0.01), "0.01 s CPU to sample, 0.02 s to start and to write");
        assert_eq!(shown(0, 0.0), "0.03 s CPU");
        assert_eq!(
            shown(100, 0.01),
            "0.01 s CPU to sample (100 µs per sample), 0.02 s to start and to write"
        );
    }

    #[test]
    fn builds_without_a_gil_are_explained() {
        let explains = |held, python| gil(held, 7, 0, python).contains("free-threaded");
        assert!(explains(0, "CPython 3.14.7t (python3.14t)"));
        assert!(!explains(3, "CPython 3.14.7t (python3.14t)"));
        assert!(!explains(0, "CPython 3.14.7 (python3.14)"));
        assert!(!explains(0, ""));
    }

    #[test]
    fn little_seen_has_an_explanation() {
        let check = |target_cpu, duration, children, words: Option<&str>| {
            let meta = Meta {
                event: "cpu-clock".into(),
                rate: 100,
                duration,
                target_cpu,
                ..Meta::default()
            };
            let said = advice(&meta, Duration::from_secs_f64(children));
            match words {
                Some(words) => assert!(said.as_ref().is_some_and(|s| s.contains(words)), "{said:?}"),
                None => assert_eq!(said, None),
            }
        };
        check(0.04, 1.8, 0.0, Some("used 0.04 s of CPU time in 1.8 s"));
        check(1.0, 1.8, 0.5, None);
        check(0.04, 0.3, 0.0, None);
        check(
            0.04,
            1.8,
            1.5,
            Some("used 1.50 s of CPU time, the process itself 0.04 s: add --subprocesses"),
        );
        check(1.6, 1.8, 3.0, Some("--subprocesses"));
        check(0.0, 0.0, 0.0, None);
    }

    #[test]
    fn symbols_are_one_line_or_a_table() {
        let module = |path: &str, names: &str, unnamed| ModuleMeta {
            path: path.into(),
            build_id: "abcd".into(),
            symbols_from: names.into(),
            symbols_missing: if names == "DWARF" { "" } else { "no /usr/lib/debug/x" }.into(),
            frames: 90,
            unnamed,
            samples: 80,
            ..ModuleMeta::default()
        };
        let complete = module("/usr/bin/a", "DWARF", 0);
        let partial = module("/lib/b", "exported symbols", 9);
        let none = module("/lib/c", "none: no symbols in the file", 90);
        for (modules, short, lines) in [
            (vec![], "not needed: no sample is in a file", vec!["from 0 files"]),
            (
                vec![complete.clone()],
                "complete for 1 file",
                vec!["from 1 file", "a: 80 samples; DWARF"],
            ),
            (
                vec![complete, partial, none],
                "complete for 1 of 3 files; -v lists the others",
                vec![
                    "from 3 files",
                    "a: 80 samples; DWARF",
                    "b: 80 samples; exported symbols; 9 of 90 frames without a symbol; no /usr/lib/debug/x",
                    "c: 80 samples; none: no symbols in the file; no /usr/lib/debug/x; build id abcd",
                ],
            ),
        ] {
            let meta = Meta {
                modules,
                ..Meta::default()
            };
            assert_eq!(symbols_in_short(&meta), short);
            assert_eq!(symbols(&meta), lines.join("\n            "));
        }
    }
}

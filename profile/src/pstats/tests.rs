//! Tables against the trees that are made of them, and damaged files.

use std::collections::BTreeMap;

use super::table::PstatsTable;
use super::*;
use crate::model::FrameKind;
use crate::stats::Stats;

type Figures = (u64, u64);

/// A caller: its name, and calls, self and cumulative time where they are known.
type Caller<'a> = (&'a str, Option<(i32, f64, f64)>);

/// A file, as Python writes it but without references.
#[derive(Default)]
struct File(Vec<u8>);

impl File {
    fn function(&mut self, name: &str, figures: (i32, i32, f64, f64), callers: &[Caller<'_>]) {
        let (primitive, calls, self_time, total) = figures;
        self.key(name)
            .tag(b'(', 5)
            .int(primitive)
            .int(calls)
            .float(self_time)
            .float(total);
        self.0.push(b'{');
        for (caller, figures) in callers {
            self.key(caller);
            match figures {
                Some((calls, self_time, total)) => self
                    .tag(b'(', 4)
                    .int(*calls)
                    .int(*calls)
                    .float(*self_time)
                    .float(*total),
                None => self.int(calls),
            };
        }
        self.0.push(b'0');
    }

    fn bytes(&self) -> Vec<u8> {
        [b"{", &self.0[..], b"0"].concat()
    }

    fn key(&mut self, name: &str) -> &mut File {
        self.tag(b'(', 3).text("/a.py").int(7).text(name)
    }

    fn text(&mut self, text: &str) -> &mut File {
        self.tag(b'u', text.len() as u32);
        self.0.extend(text.as_bytes());
        self
    }

    fn int(&mut self, number: i32) -> &mut File {
        self.tag(b'i', number as u32)
    }

    fn float(&mut self, number: f64) -> &mut File {
        self.0.push(b'g');
        self.0.extend(number.to_le_bytes());
        self
    }

    fn tag(&mut self, code: u8, number: u32) -> &mut File {
        self.0.push(code);
        self.0.extend(number.to_le_bytes());
        self
    }
}

/// Names of files that are not UTF-8, as Python writes them (`surrogatepass`).
#[test]
fn names_that_are_not_utf8_stay_different() {
    let mut file = File::default();
    for (name, calls) in [
        (&b"/caf\xed\xb3\xa9.py"[..], 1),
        (b"/caf\xed\xb3\xa8.py", 3),
        (b"/caf\xc3\xa9.py", 5),
    ] {
        file.tag(b'(', 3).tag(b'u', name.len() as u32);
        file.0.extend(name);
        file.int(7).text("f");
        file.tag(b'(', 5).int(calls).int(calls).float(0.0).float(0.0);
        file.0.extend(b"{0");
    }
    let profile = read(&file.bytes()).expect("a table");
    let mut found: Vec<_> = profile.frames.iter().map(|frame| &*frame.filename).collect();
    found.retain(|name| !name.is_empty());
    found.sort_unstable();
    assert_eq!(found, [r"/caf\udce8.py", r"/caf\udce9.py", "/café.py"]);
}

/// By function: calls and self time.
fn of_functions(profile: &Profile) -> BTreeMap<String, Figures> {
    let mut sums = BTreeMap::new();
    let times = profile.self_amounts(1);
    for ((node, calls), time) in profile.nodes.iter().zip(profile.self_counts()).zip(times) {
        let frame = &profile.frames[node.frame as usize];
        if frame.kind != FrameKind::Root {
            let sum: &mut Figures = sums.entry(frame.name.clone()).or_default();
            *sum = (sum.0 + calls, sum.1 + time);
        }
    }
    sums
}

/// By caller and callee: calls and self time of the callee.
fn of_edges(profile: &Profile) -> BTreeMap<(String, String), Figures> {
    let mut sums = BTreeMap::new();
    let name = |node: u32| profile.frames[profile.nodes[node as usize].frame as usize].name.clone();
    let times = profile.self_amounts(1);
    for (at, (calls, time)) in profile.self_counts().into_iter().zip(times).enumerate().skip(1) {
        let parent = profile.nodes[at].parent;
        if parent != 0 {
            let sum: &mut Figures = sums.entry((name(parent), name(at as u32))).or_default();
            *sum = (sum.0 + calls, sum.1 + time);
        }
    }
    sums
}

fn totals(profile: &Profile) -> BTreeMap<String, u64> {
    let mut stats = Stats::new(profile);
    stats.select(profile.self_amounts(1));
    let rows = stats.functions().into_iter().enumerate();
    rows.map(|(at, counts)| (stats.frame(at as u32).name.clone(), counts.total))
        .collect()
}

fn check(bytes: &[u8]) -> Profile {
    let table: PstatsTable<'_> = table::read(bytes).unwrap();
    let profile = read(bytes).unwrap();
    let found = of_functions(&profile);
    for function in &table.functions {
        let calls = if table.is_sampled {
            function.primitive
        } else {
            function.calls
        };
        assert_eq!(found[&*function.name], (calls, function.self_time), "{}", function.name);
    }
    profile
}

#[test]
fn calls_and_times_of_stacks() {
    let mut file = File::default();
    file.function("main", (1, 1, 1.0, 20.0), &[]);
    file.function("a", (1, 1, 2.0, 11.0), &[("main", Some((1, 2.0, 11.0)))]);
    file.function("b", (2, 2, 2.0, 8.0), &[("main", Some((2, 2.0, 8.0)))]);
    let of_both = [("a", Some((6, 9.0, 9.0))), ("b", Some((4, 6.0, 6.0)))];
    file.function("leaf", (10, 10, 15.0, 15.0), &of_both);
    let profile = check(&file.bytes());
    assert_eq!(profile.count_type().key(), "calls");
    assert_eq!(profile.find_value("wall_ns"), Some(1));
    let edges = of_edges(&profile);
    assert_eq!(edges[&("a".to_string(), "leaf".to_string())], (6, 9_000_000_000));
    assert_eq!(edges[&("b".to_string(), "leaf".to_string())], (4, 6_000_000_000));
    let seconds = totals(&profile)
        .into_iter()
        .map(|(name, ns)| (name, ns / 1_000_000_000));
    let expected = [("a", 11), ("b", 8), ("leaf", 15), ("main", 20)];
    assert_eq!(
        seconds.collect::<Vec<_>>(),
        expected.map(|(name, s)| (name.to_string(), s))
    );
}

#[test]
fn recursion_ends_where_a_function_is_on_the_stack() {
    let mut file = File::default();
    file.function("main", (1, 1, 1.0, 10.0), &[]);
    let of_fib = [("main", Some((1, 2.0, 9.0))), ("fib", Some((24, 5.0, 8.0)))];
    file.function("fib", (1, 25, 7.0, 9.0), &of_fib);
    file.function(
        "odd",
        (1, 9, 1.0, 2.0),
        &[("fib", Some((5, 0.5, 2.0))), ("even", Some((4, 0.5, 1.0)))],
    );
    file.function("even", (4, 4, 1.0, 1.5), &[("odd", Some((4, 1.0, 1.5)))]);
    let profile = check(&file.bytes());
    let edges = of_edges(&profile);
    assert_eq!(edges[&("fib".to_string(), "fib".to_string())], (24, 5_000_000_000));
    assert_eq!(edges[&("even".to_string(), "odd".to_string())], (4, 500_000_000));
    assert_eq!(totals(&profile)["main"], 10_000_000_000);
    assert_eq!(
        profile.nodes.len(),
        7,
        "root, main, fib, fib in fib, odd, even, odd in even"
    );
}

#[test]
fn callers_without_times_share_by_calls() {
    let mut file = File::default();
    file.function("a", (1, 1, 1.0, 4.0), &[]);
    file.function("b", (1, 1, 1.0, 2.0), &[]);
    // A number of calls for each caller is that of all calls in this helper: of both, half.
    file.function("leaf", (2, 2, 4.0, 4.0), &[("a", None), ("b", None)]);
    let profile = check(&file.bytes());
    let edges = of_edges(&profile);
    assert_eq!(edges[&("a".to_string(), "leaf".to_string())], (1, 2_000_000_000));
    assert_eq!(edges[&("b".to_string(), "leaf".to_string())], (1, 2_000_000_000));
}

/// Pseudo-random numbers, always the same.
struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A file of random figures, which need not fit each other, with callers of any kind and cycles.
fn random_file(random: &mut Rng) -> Vec<u8> {
    let names: Vec<String> = (0..1 + random.below(12)).map(|at| format!("f{at}")).collect();
    let mut file = File::default();
    let seconds = |random: &mut Rng| match random.below(4) {
        0 => 0.0,
        1 => random.below(100) as f64 * 1e-9,
        _ => random.below(1000) as f64 * 0.001,
    };
    for name in &names {
        let mut callers = Vec::new();
        for caller in &names {
            if random.below(3) == 0 {
                let figures = (random.below(50) as i32, seconds(random), seconds(random));
                callers.push((caller.as_str(), (random.below(8) > 0).then_some(figures)));
            }
        }
        let calls = random.below(100) as i32;
        file.function(name, (calls / 2, calls, seconds(random), seconds(random)), &callers);
    }
    file.bytes()
}

#[test]
fn sums_by_function_are_those_of_the_file() {
    let mut random = Rng(7);
    for _ in 0..1000 {
        let bytes = random_file(&mut random);
        check(&bytes);
        let mark = format!("{SAMPLES_MARK} cpu");
        let mut sampled = File(bytes);
        sampled.text(&mark);
        assert_eq!(check(&sampled.0).count_type().key(), "samples");
    }
}

/// Figures that fit each other, as a profiler of a random program without recursion has them, come out as they are:
/// by function and by pair, cumulative times included.
#[test]
fn consistent_tables_stay_as_they_are() {
    let mut random = Rng(11);
    for _ in 0..300 {
        let count = 2 + random.below(8) as usize;
        // Calls and self nanoseconds by (caller, callee), where callers come first; of stacks without regard to what is
        // above the caller, so that cumulative times are in proportion.
        let mut weight = vec![0.0; count];
        let mut below = vec![0.0; count];
        let mut parts = vec![vec![0.0; count]; count];
        for caller in (0..count).rev() {
            weight[caller] = 1.0 + random.below(9) as f64;
            for callee in caller + 1..count {
                if random.below(2) == 0 || callee == caller + 1 {
                    parts[caller][callee] = 1.0 + random.below(3) as f64;
                    below[caller] += parts[caller][callee] * (weight[callee] + below[callee]);
                }
            }
        }
        let mut calls = vec![0.0; count];
        calls[0] = 1.0;
        let mut file = File::default();
        let mut expected = BTreeMap::new();
        for callee in 0..count {
            let mut callers = Vec::new();
            for caller in 0..callee {
                let times = calls[caller] * parts[caller][callee];
                if times > 0.0 {
                    calls[callee] += times;
                    let total = times * (weight[callee] + below[callee]);
                    callers.push((
                        format!("f{caller}"),
                        Some((times as i32, times * weight[callee], total)),
                    ));
                }
            }
            let callers: Vec<_> = callers
                .iter()
                .map(|(name, figures)| (name.as_str(), *figures))
                .collect();
            let (n, name) = (calls[callee], format!("f{callee}"));
            let total = n * (weight[callee] + below[callee]);
            file.function(&name, (n as i32, n as i32, n * weight[callee], total), &callers);
            expected.insert(name, total);
        }
        let profile = check(&file.bytes());
        for (name, total) in totals(&profile) {
            let difference = (total as f64 * 1e-9 - expected[&name]).abs();
            assert!(
                difference < 1e-6 * expected[&name] + 1e-6,
                "{name}: {total} {}",
                expected[&name]
            );
        }
    }
}

/// Damaged files are read or refused, in bounded time.
#[test]
fn damaged_files() {
    let mut random = Rng(3);
    for _ in 0..5000 {
        let mut bytes = random_file(&mut random);
        for _ in 0..1 + random.below(6) {
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(6) {
                0 => bytes.truncate(at.max(1)),
                1 => bytes[at] = random.below(256) as u8,
                2 => bytes[at] ^= 0x80,
                3 => bytes[at] = b"(){0risugflzr["[random.below(14) as usize],
                4 => {
                    let piece = bytes[at..(at + 9).min(bytes.len())].to_vec();
                    let to = random.below(bytes.len() as u64) as usize;
                    bytes.splice(to..to, piece);
                }
                _ => bytes[at] = 0xff,
            }
        }
        if let Ok(profile) = read(&bytes) {
            let mut out = Vec::new();
            crate::json::write(&profile, &mut out).unwrap();
        }
    }
}

#[test]
fn many_functions_in_cycles_are_bounded() {
    let mut file = File::default();
    let names: Vec<String> = (0..300).map(|at| format!("f{at}")).collect();
    for name in &names {
        let callers: Vec<_> = names
            .iter()
            .map(|caller| (caller.as_str(), Some((1, 0.001, 1.0))))
            .collect();
        file.function(name, (300, 300, 0.3, 300.0), &callers);
    }
    let profile = check(&file.bytes());
    assert!(profile.nodes.len() < 400_000, "{}", profile.nodes.len());
    // A chain that is deeper than the tree may be.
    let mut file = File::default();
    let names: Vec<String> = (0..3000).map(|at| format!("f{at}")).collect();
    file.function(&names[0], (1, 1, 0.5, 3000.0), &[]);
    for (caller, name) in names.iter().zip(&names[1..]) {
        file.function(name, (1, 1, 0.5, 2000.0), &[(caller, Some((1, 0.5, 2000.0)))]);
    }
    check(&file.bytes());
}

#[test]
fn other_contents_are_errors() {
    let key = |line: &[u8]| [b"{(\x03\0\0\0u\x01\0\0\0a", line, b"u\x01\0\0\0f"].concat();
    let good = key(b"i\x01\0\0\0");
    let row = |figures: &[u8]| [&good[..], b"(\x05\0\0\0", figures, b"0"].concat();
    let zero = b"g\0\0\0\0\0\0\0\0";
    let one = b"i\x01\0\0\0";
    let nan = [b"g".as_slice(), &f64::NAN.to_le_bytes()].concat();
    for (bytes, reason) in [
        (b"{0".to_vec(), ""),
        (row(&[&one[..], one, zero, zero, b"{0"].concat()), ""),
        (good.clone(), "truncated"),
        (b"{)\x01Ni\0\0\0\x000".to_vec(), "key that is not"),
        ([&key(b"N")[..], b"N0"].concat(), "key that is not"),
        ([&good[..], b"N0"].concat(), "five figures"),
        (row(&[&one[..], one, zero, zero, b"N"].concat()), "not a dictionary"),
        (
            row(&[&one[..], b"i\xff\xff\xff\xff", zero, zero, b"{0"].concat()),
            "calls that is none",
        ),
        (row(&[&one[..], one, &nan, zero, b"{0"].concat()), "time that is not"),
        (
            row(&[&one[..], one, zero, zero, b"{", &good[1..], b"N0"].concat()),
            "four figures",
        ),
    ] {
        assert!(is_pstats(&bytes));
        match read(&bytes) {
            Ok(_) => assert_eq!(reason, "", "{bytes:?}"),
            Err(e) => assert!(!reason.is_empty() && e.reason.contains(reason), "{bytes:?}: {e}"),
        }
    }
    for text in ["{}", "{\"identifier\": 1}", "{ ", "", "{", "(", "x"] {
        assert!(!is_pstats(text.as_bytes()), "{text}");
    }
}

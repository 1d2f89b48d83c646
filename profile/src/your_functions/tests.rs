use super::*;
use crate::build::Builder;
use crate::model::{FrameId, Meta};
use crate::values::ValueType;

const LIBRARY: &str = "/v/lib/python3.12/site-packages/lib/core.py";

struct Stacks {
    builder: Builder,
}

impl Stacks {
    fn new() -> Stacks {
        Stacks {
            builder: Builder::new(&[ValueType::SAMPLES]),
        }
    }

    /// `NAME:LINE`: in capitals of native code, after a dot of a library, else the user's own.
    fn frame(&mut self, word: &str) -> (FrameId, u32) {
        let (name, line) = word.split_once(':').unwrap_or((word, "0"));
        let frame = match name {
            _ if name.starts_with('.') => Frame::python(name, name, LIBRARY, 1),
            "wait" => Frame::new(FrameKind::State, "[waiting: sleep]"),
            _ if name.chars().all(char::is_uppercase) => Frame::native(name, "libm.so", 1),
            _ => Frame::python(name, name, "/srv/demo.py", 1),
        };
        (self.builder.frame(frame), line.parse().unwrap())
    }

    fn add(&mut self, stack: &str, samples: u64) {
        let stack: Vec<_> = stack.split_whitespace().map(|word| self.frame(word)).collect();
        self.builder.add(&stack, &[samples]);
    }

    fn finish(self) -> Profile {
        self.builder.finish(Meta::default())
    }
}

/// `WHOSE outside N`, then `NAME place own libraries native total` of each function.
fn shown(stacks: &[(&str, u64)]) -> Vec<String> {
    let mut all = Stacks::new();
    for (stack, samples) in stacks {
        all.add(stack, *samples);
    }
    let profile = all.finish();
    let stats = Stats::new(&profile);
    let found = InnermostFunctions::of(&profile, &stats);
    let assigned: u64 = found.rows.iter().map(|row| row.amount).sum();
    assert_eq!(assigned + found.outside, stats.samples(), "each sample counts once");
    let mut out = vec![format!("{:?} outside {}", found.whose, found.outside)];
    out.extend(found.rows.iter().map(|row| {
        let frame = stats.frame(row.function);
        let (name, place) = (function_name(frame), row.short_place(frame));
        format!(
            "{name} {place} {} {} {} {}",
            row.amount, row.in_libraries, row.in_native, row.total
        )
    }));
    out
}

#[test]
fn samples_belong_to_the_innermost_function_of_the_user() {
    let stacks = [
        ("main:9 work:3", 1),
        ("main:9 work:4 SORT", 2),
        ("main:9 work:4 .dumps:7 ENCODE", 4),
        ("main:9 work:3 SORT .key:1", 8),
        ("main:9 work:4 SORT rank:5", 16),
        ("main:9 wait", 32),
        ("main:9 work:4 SORT wait", 64),
        (".loop:8 POLL", 128),
        ("outer:2 work:3", 4),
    ];
    assert_eq!(
        shown(&stacks),
        [
            "Yours outside 128",
            "work demo.py:4 83 12 66 99",
            "main demo.py:9 32 0 0 127",
            "rank demo.py:5 16 0 0 16",
            "outer demo.py:2 0 0 0 4",
        ]
    );
}

#[test]
fn without_functions_of_the_user_others_follow() {
    assert_eq!(
        shown(&[(".loop:8 POLL", 2), (".loop:8 .read:2", 1), ("START", 4)]),
        ["Python outside 4", ".loop core.py:8 2 0 2 3", ".read core.py:2 1 0 0 1"]
    );
    assert_eq!(
        shown(&[("MAIN SORT", 2), ("MAIN", 1), ("wait", 4)]),
        ["Native outside 4", "SORT libm.so 2 0 0 2", "MAIN libm.so 1 0 0 3"]
    );
    assert_eq!(shown(&[]), ["Native outside 0"]);
}

#[test]
fn recursion_counts_once_and_ties_go_by_name() {
    assert_eq!(
        shown(&[("walk:2 walk:2 walk:3", 2), ("walk:2 b:1", 2), ("a:1", 2)]),
        [
            "Yours outside 0",
            "walk demo.py:2 2 0 0 4",
            "a demo.py:1 2 0 0 2",
            "b demo.py:1 2 0 0 2"
        ]
    );
}

#[test]
fn the_hottest_line_is_that_of_the_functions_own_time() {
    let mut stacks = Stacks::new();
    for (stack, samples) in [("main:3 .import:1", 5), ("main:9 work:4", 9), ("main:9", 1)] {
        let stack: Vec<_> = stack.split(' ').map(|word| stacks.frame(word)).collect();
        for time in 0..samples {
            stacks.builder.sample(time, (1, 1), &stack, &[1]);
        }
    }
    let profile = stacks.finish();
    let stats = Stats::new(&profile);
    let found = InnermostFunctions::of(&profile, &stats);
    let shown: Vec<_> = found
        .rows
        .iter()
        .map(|row| (row.amount, row.total, row.hottest_line))
        .collect();
    assert_eq!(shown, [(9, 9, 4), (6, 15, 3)]);
}

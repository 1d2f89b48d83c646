use super::*;
use crate::model::{Node, Profile, TimelineSample};

/// Pseudo-random numbers.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    /// In 0 to 1.
    pub(super) fn roll(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58476d1ce4e5b9);
        (mixed >> 11) as f64 / (1u64 << 53) as f64
    }

    /// With this mean, exponentially distributed.
    fn wait(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.roll()).ln()
    }
}

fn frame(name: &str, line: u32) -> Frame {
    Frame {
        kind: FrameKind::Python,
        name: name.into(),
        qualname: String::new(),
        filename: "/srv/a.py".into(),
        first_line: line,
        address: 0,
        module: String::new(),
        source: String::new(),
    }
}

/// A profile of functions called from the root, from the function that each sample of a run was taken in.
pub(super) fn profile(functions: usize, run: &[usize]) -> Profile {
    let root = Frame {
        kind: FrameKind::Root,
        ..frame("root", 0)
    };
    let named = (0..functions).map(|i| frame(&format!("f{i}"), i as u32));
    let frames = std::iter::once(root).chain(named).collect();
    let node = |frame: u32, count: usize| Node {
        count: count as u64,
        ..Node::new(frame, 0)
    };
    let count = |i: usize| run.iter().filter(|f| **f == i).count();
    let nodes = std::iter::once(node(0, run.len())).chain((0..functions).map(|i| node(i as u32 + 1, count(i))));
    let sample = |(at, f): (usize, &usize)| TimelineSample {
        time: at as u64 * 1_000_000,
        pid: 1,
        tid: 1,
        node: *f as u32 + 1,
    };
    let mut profile = Profile {
        frames,
        nodes: nodes.collect(),
        timeline: run.iter().enumerate().map(sample).collect(),
        ..Profile::default()
    };
    (profile.meta.rate, profile.meta.duration) = (1000, run.len() as f64 / 1000.0);
    profile
}

/// A program that stays in each function for a while and continues to the next of a random choice: the longer the stay
/// (in samples), the more alike are neighbors in time. `slow` is how much longer it stays in function 1.
fn run(dice: &mut Dice, functions: usize, stay: f64, samples: usize, slow: f64) -> Vec<usize> {
    let mut run = Vec::with_capacity(samples);
    let (mut now, mut at) = (0.0, 0);
    while run.len() < samples {
        // Function 1 has about a third of the time, others less and less.
        let choice = dice.roll();
        at = if choice < 0.33 {
            1
        } else {
            (at + 1 + (dice.roll().powi(2) * functions as f64) as usize) % functions
        };
        now += dice.wait(stay) * if at == 1 { slow } else { 1.0 };
        while run.len() < samples && (run.len() as f64) < now {
            run.push(at);
        }
    }
    run
}

pub(super) const BY_SHARE: DiffOptions = DiffOptions {
    normalization: Normalization::Share,
    by: RowKind::Function,
    metric: Metric::SelfCount,
    confidence: 0.99,
    interpreter: false,
};

/// A single run whose samples are independent.
pub(super) fn one(profile: &Profile) -> Side<'_> {
    several(std::slice::from_ref(profile), profile)
}

/// Runs with their sum.
pub(super) fn several<'a>(runs: &'a [Profile], sum: &'a Profile) -> Side<'a> {
    let run = |profile| Run {
        profile,
        grain: 1.0,
        clock: None,
    };
    Side {
        sum,
        runs: runs.iter().map(run).collect(),
    }
}

/// What differs between two runs of a program.
fn diff_by(runs: &[Profile; 2], normalization: Normalization) -> Diff<'_> {
    let options = DiffOptions {
        normalization,
        ..BY_SHARE
    };
    diff(&one(&runs[0]), &one(&runs[1]), &options)
}

#[test]
fn a_function_that_got_slower_by_a_tenth_is_named() {
    for (normalization, stay, samples) in [
        (Normalization::Share, 0.2, 60_000),
        (Normalization::Share, 1.0, 100_000),
    ] {
        let mut dice = Dice(4);
        let mut named = 0;
        for _ in 0..50 {
            let runs = [1.0, 1.1].map(|slow| profile(20, &run(&mut dice, 20, stay, samples, slow)));
            let found = diff_by(&runs, normalization);
            let first = &found.rows[0];
            named += u32::from(first.is_significant() && first.frame.name == "f1" && first.change() > 0.0);
        }
        assert!(
            named >= 48,
            "{normalization:?}, stays of {stay}: named in {named} of 50"
        );
    }
}

/// Load, compute, write: each phase once. Its length is no noise if the other run has it too.
#[test]
fn phases_that_both_runs_have_are_no_noise() {
    let phases = |lengths: [usize; 3]| -> Vec<usize> { (0..3).flat_map(|f| vec![f; lengths[f]]).collect() };
    let runs = [
        profile(3, &phases([3000, 6000, 1000])),
        profile(3, &phases([3000, 6000, 1000])),
    ];
    let found = diff_by(&runs, Normalization::Share);
    for row in &found.rows {
        let (low, high) = row.interval.unwrap();
        assert!(low < 0.0 && high < 0.03, "{row:?}");
    }
}

#[test]
fn cpu_time_of_the_same_work() {
    let mut dice = Dice(6);
    let run_a = run(&mut dice, 5, 0.2, 20_000, 1.0);
    let more: Vec<usize> = run_a
        .iter()
        .flat_map(|f| vec![*f; if *f == 2 { 2 } else { 1 }])
        .collect();
    let runs = [profile(5, &run_a), profile(5, &more)];
    let found = diff_by(&runs, Normalization::Time);
    let significant: Vec<_> = found.rows.iter().filter(|row| row.is_significant()).collect();
    assert_eq!(significant.len(), 1, "{significant:?}");
    let row = significant[0];
    assert_eq!(row.frame.name, "f2");
    assert!((row.after / row.before - 2.0).abs() < 1e-9 && (row.before - row.samples.0 as f64 / 1000.0).abs() < 1e-9);
    let all = found.all.unwrap();
    assert!(all.is_significant() && (all.before - 20.0).abs() < 1e-9, "{all:?}");
    let shares = diff_by(&runs, Normalization::Share);
    assert!(shares.all.is_none() && shares.rows[0].frame.name == "f2");
}

#[test]
fn few_samples_show_nothing_and_break_nothing() {
    for (a, b) in [(0, 0), (0, 5), (3, 3), (9, 0), (200, 1)] {
        for normalization in [Normalization::Share, Normalization::Rate, Normalization::Time] {
            let runs = [profile(2, &vec![0; a]), profile(2, &vec![1; b])];
            let found = diff_by(&runs, normalization);
            let sure = found.rows.iter().filter(|row| row.is_significant()).count();
            assert!(sure == 0 || a + b > 100, "{a} {b} {normalization:?}: {found:?}");
            for row in &found.rows {
                let (low, high) = row.interval.unwrap_or_default();
                assert!(
                    low.is_finite() && high.is_finite() && row.change().is_finite(),
                    "{row:?}"
                );
            }
        }
    }
}

#[test]
fn functions_are_found_again() {
    let python = |name: &str, file: &str, line| Frame {
        filename: file.into(),
        ..frame(name, line)
    };
    let native = |name: &str, module: &str, address| Frame {
        kind: FrameKind::Native,
        filename: "<low-level>".into(),
        module: module.into(),
        address,
        ..frame(name, 0)
    };
    let of = |frames: &[Frame]| Profile {
        frames: frames.to_vec(),
        ..Profile::default()
    };
    let a = of(&[
        python("same", "/srv/a.py", 3),
        python("moved", "/srv/a.py", 5),
        python("<lambda>", "/srv/a.py", 7),
        python("<lambda>", "/srv/a.py", 9),
        python("elsewhere", "/old/b.py", 1),
        native("rebuilt", "m.so", 0x100),
        native("gone", "m.so", 0x200),
    ]);
    let b = of(&[
        native("rebuilt", "m.so", 0x180),
        python("elsewhere", "/new/b.py", 2),
        python("<lambda>", "/srv/a.py", 9),
        python("<lambda>", "/srv/a.py", 17),
        python("same", "/srv/a.py", 3),
        python("moved", "/srv/a.py", 6),
    ]);
    let (a, b) = (Stats::new(&a), Stats::new(&b));
    let units = RowMap::of_functions(&a, &b);
    // The other lambda of a pair is the only one left on both sides.
    assert_eq!(units.of, [vec![4, 5, 3, 2, 1, 0, 6], vec![0, 1, 2, 3, 4, 5]]);
    assert_eq!(units.frames.len(), 7);
    assert_eq!(RowMap::of_modules(&a, &b).frames.len(), 3);
}

#[test]
fn functions_of_another_python_are_found_again() {
    let python = |name: &str, qualname: &str, file: &str| Frame::python(name, qualname, file, 1);
    let of = |frames: Vec<Frame>| Profile {
        frames,
        ..Profile::default()
    };
    let a = of(vec![
        python("encode", "", "/usr/lib/python3.10/json/encoder.py"),
        python("__init__", "", "/usr/lib/python3.10/json/__init__.py"),
        python("__init__", "", "/usr/lib/python3.10/email/__init__.py"),
        Frame::native("PyObject_Call", "libpython3.10.so.1.0", 0x100),
        Frame::native("c_make_encoder", "_json.cpython-310-x86_64-linux-gnu.so", 0x200),
        Frame::native("deflate", "libz.so.1.2.13", 0x300),
    ]);
    let b = of(vec![
        python("encode", "JSONEncoder.encode", "/opt/lib/python3.13/json/encoder.py"),
        python("__init__", "A.__init__", "/opt/lib/python3.13/json/__init__.py"),
        python("__init__", "B.__init__", "/opt/lib/python3.13/email/__init__.py"),
        Frame::native("PyObject_Call", "python3.13", 0x180),
        Frame::native("c_make_encoder", "_json.cpython-313-x86_64-linux-gnu.so", 0x280),
        Frame::native("deflate", "libz.so.1.3.1", 0x380),
    ]);
    let (a, b) = (Stats::new(&a), Stats::new(&b));
    for units in [RowMap::of_functions(&a, &b), RowMap::of_modules(&a, &b)] {
        assert_eq!(units.of[0], units.of[1]);
        assert_eq!(units.renamed, []);
    }
}

#[test]
fn renamed_files_are_found() {
    let file = |path: &str, names: &[&str]| -> Vec<Frame> {
        let function = |name: &&str| Frame::python(*name, "", path, 1);
        names.iter().map(function).collect()
    };
    let of = |files: &[Vec<Frame>]| Profile {
        frames: files.concat(),
        ..Profile::default()
    };
    let other = file("/srv/other.py", &["<module>", "other"]);
    let a = of(&[file("/srv/old.py", &["<module>", "main", "work"]), other.clone()]);
    for (files, expected) in [
        (vec![file("/srv/new.py", &["<module>", "main", "work"])], true),
        (vec![file("/srv/new.py", &["<module>", "main", "rest"])], true),
        // Another program.
        (vec![file("/srv/new.py", &["<module>", "main", "a", "b"])], false),
        (vec![file("/srv/new.py", &["<module>"])], false),
        // Either could be it.
        (
            vec![
                file("/srv/x.py", &["<module>", "main"]),
                file("/srv/y.py", &["<module>", "main"]),
            ],
            false,
        ),
        // Still there.
        (
            vec![
                file("/srv/old.py", &["work"]),
                file("/srv/new.py", &["<module>", "main"]),
            ],
            false,
        ),
    ] {
        let b = of(&[files.concat(), other.clone()]);
        let (a, b) = (Stats::new(&a), Stats::new(&b));
        let found = [("/srv/old.py", "/srv/new.py")];
        let expected = if expected { &found[..] } else { &[] };
        let units = RowMap::of_functions(&a, &b);
        assert_eq!(units.renamed, expected);
        // `<module>` and `main`.
        assert_eq!(units.of[0][..2] == units.of[1][..2], !expected.is_empty());
        assert_eq!(RowMap::of_modules(&a, &b).frames.len() == 2, !expected.is_empty());
    }
}

/// What all samples have is all of them, of 17,663 as of 17,821.
#[test]
fn what_is_everything_does_not_change() {
    for samples in [(17_663, 17_821), (49, 98), (3, 100_003)] {
        let runs = [samples.0, samples.1].map(|n| profile(1, &vec![0; n]));
        let found = diff_by(&runs, Normalization::Share);
        assert!(found.rows.iter().all(|row| !row.is_significant()), "{found:?}");
    }
}

#[test]
fn interpreter_internal_functions_are_tested_on_request() {
    let runs = [1000, 5000].map(|n| {
        let run: Vec<usize> = (0..10_000).map(|i| usize::from(i % 10_000 < n)).collect();
        let mut profile = profile(2, &run);
        for (frame, name) in profile.frames[1..]
            .iter_mut()
            .zip(["_PyEval_EvalFrameDefault", "unicode_hash"])
        {
            (frame.kind, frame.name, frame.module) = (FrameKind::Native, name.into(), "libpython3.12.so.1.0".into());
        }
        profile.timeline.clear();
        profile
    });
    let found = diff_by(&runs, Normalization::Share);
    assert!(
        found
            .rows
            .iter()
            .all(|row| row.interpreter_internal && row.interval.is_none()),
        "{found:?}"
    );
    let interpreter = true;
    let found = diff(
        &one(&runs[0]),
        &one(&runs[1]),
        &DiffOptions {
            interpreter,
            ..BY_SHARE
        },
    );
    assert!(found.rows.iter().all(Change::is_significant), "{found:?}");
    // A sum has no frames without samples: runs say which module is the interpreter.
    let [a, b] = runs.each_ref().map(|run| {
        let mut sum = run.clone();
        sum.frames[1].name = "other".into();
        sum
    });
    let sides = [several(&runs[..1], &a), several(&runs[1..], &b)];
    let found = diff(&sides[0], &sides[1], &BY_SHARE);
    assert!(found.rows.iter().all(|row| row.interpreter_internal), "{found:?}");
}

/// Runs of the same functions with these counts.
fn counts(all: &[&[u64]]) -> Vec<Profile> {
    let run = |counts: &&[u64]| {
        let mut out = profile(counts.len(), &[]);
        out.nodes[0].count = counts.iter().sum();
        out.nodes[1..]
            .iter_mut()
            .zip(*counts)
            .for_each(|(node, count)| node.count = *count);
        out.meta.rate = 1000;
        out
    };
    all.iter().map(run).collect()
}

fn row<'a>(found: &'a Diff<'_>, name: &str) -> &'a Change<'a> {
    let is_it = |row: &&Change<'_>| row.frame.name == name;
    found.rows.iter().find(is_it).expect("a row of this name")
}

/// One phase of a program got much faster.
#[test]
fn shares_that_only_make_up_for_others_are_marked() {
    let runs = counts(&[&[1200, 1130, 727, 740], &[1200, 1130, 81, 740]]);
    let options = BY_SHARE;
    let found = diff(&one(&runs[0]), &one(&runs[1]), &options);
    assert_eq!(found.question, Question::Recordings);
    let first = &found.rows[0];
    assert!(
        first.frame.name == "f2" && first.change() < 0.0 && first.is_significant() && !first.makes_up,
        "{found:?}"
    );
    for other in &found.rows[1..] {
        assert!(
            other.change() > 0.0 && other.makes_up == other.is_significant(),
            "{other:?}"
        );
    }
    assert!(found.rows.iter().any(|row| row.makes_up));
    let found = diff(
        &one(&runs[0]),
        &one(&runs[1]),
        &DiffOptions {
            normalization: Normalization::Time,
            ..options
        },
    );
    let significant: Vec<_> = found.rows.iter().filter(|row| row.is_significant()).collect();
    assert!(
        significant.len() == 1 && significant[0].frame.name == "f2",
        "{significant:?}"
    );

    // Two got faster, each by itself.
    let runs = counts(&[&[9000, 7000, 3000, 3000], &[9000, 7000, 300, 1000]]);
    let found = diff(&one(&runs[0]), &one(&runs[1]), &BY_SHARE);
    let marks = ["f0", "f1", "f2", "f3"].map(|name| row(&found, name).makes_up);
    assert_eq!(marks, [true, true, false, false], "{found:?}");
    // Which one of two changed cannot be known.
    let runs = counts(&[&[5000, 5000], &[5000, 1000]]);
    let found = diff(&one(&runs[0]), &one(&runs[1]), &BY_SHARE);
    assert!(
        found.rows.iter().all(|row| row.is_significant() && !row.makes_up),
        "{found:?}"
    );
}

/// A row that had little cannot fall by more, and one that is gone has fallen.
#[test]
fn intervals_are_within_what_is_possible() {
    let runs = counts(&[&[727, 3000], &[0, 3000]]);
    for normalization in [Normalization::Share, Normalization::Time] {
        let found = diff(
            &one(&runs[0]),
            &one(&runs[1]),
            &DiffOptions {
                normalization,
                ..BY_SHARE
            },
        );
        let gone = row(&found, "f0");
        let (low, high) = gone.interval.unwrap();
        assert!(high < -0.7 * gone.before && -1.3 * gone.before < low, "{gone:?}");
    }
    let runs = counts(&[&[40, 3000], &[900, 3000], &[2, 3000], &[1, 2999], &[0, 3001]]);
    let sums = counts(&[&[940, 6000], &[3, 9000]]);
    let (a, b) = (several(&runs[..2], &sums[0]), several(&runs[2..], &sums[1]));
    let found = diff(
        &a,
        &b,
        &DiffOptions {
            normalization: Normalization::Time,
            ..BY_SHARE
        },
    );
    let (low, high) = row(&found, "f0").interval.unwrap();
    assert!(low.is_finite() && high > 0.0, "two runs prove nothing: {low} to {high}");
}

/// The clock says how much CPU time there was, though half of the samples are lost.
#[test]
fn time_by_the_clock_of_the_process() {
    let runs = counts(&[&[1000, 1000], &[500, 500]]);
    let clock = |count| Some(CpuClock { seconds: 2.0, count });
    let [mut a, mut b] = [0, 1].map(|i| one(&runs[i]));
    (a.runs[0].clock, b.runs[0].clock) = (clock(2000), clock(1000));
    let options = DiffOptions {
        normalization: Normalization::Time,
        ..BY_SHARE
    };
    let found = diff(&a, &b, &options);
    let all = found.all.unwrap();
    assert!(
        (all.before, all.after) == (2.0, 2.0) && !all.is_significant(),
        "{all:?}"
    );
    assert!(all.detectable().unwrap() < 0.01, "{all:?}");
    assert!(
        found.rows.iter().all(|row| !row.is_significant() && row.before == 1.0),
        "{found:?}"
    );
    // A part of the samples is as random as they are.
    b.runs[0].clock = clock(5000);
    assert!(diff(&a, &b, &options).all.unwrap().detectable().unwrap() > 0.03);
}

#[test]
fn numbers_are_compared_exactly() {
    let options = DiffOptions {
        normalization: Normalization::Number,
        ..BY_SHARE
    };
    for (a, b, change, significant) in [
        (&[5000][..], &[5001][..], 1.0, true),
        (&[5000], &[5000], 0.0, false),
        (&[5000], &[4999], -1.0, true),
        (&[5000, 5004], &[5003], 0.0, false),
        (&[5000, 5004], &[5006, 5005], 1.0, true),
        (&[5000, 5004], &[4990], -10.0, true),
        (&[0], &[1], 1.0, true),
    ] {
        let [before, after] = [a, b].map(|side| counts(&side.iter().map(std::slice::from_ref).collect::<Vec<_>>()));
        let sums = [a, b].map(|side: &[u64]| counts(&[&[side.iter().sum()]]).remove(0));
        let found = diff(&several(&before, &sums[0]), &several(&after, &sums[1]), &options);
        assert_eq!(found.question, Question::Numbers);
        for row in found.rows.iter().chain(&found.all) {
            assert_eq!(
                (row.proved(), row.is_significant(), row.interval),
                (change, significant, None),
                "{a:?} {b:?}"
            );
            assert_eq!(row.varies(), a.len() + b.len() > 2);
        }
    }
}

/// Runs that began one after the other on both sides are pairs, in the order of their times.
#[test]
fn runs_that_alternate_are_pairs() {
    for (a, b, paired) in [
        (
            &[1.0, 3.0, 5.0][..],
            &[2.0, 4.0, 6.0][..],
            Some(vec![[0, 0], [1, 1], [2, 2]]),
        ),
        (&[5.0, 1.0], &[2.0, 4.0], Some(vec![[1, 0], [0, 1]])),
        (&[1.0, 2.0], &[3.0, 4.0], None),
        (&[1.0, 3.0], &[2.0], None),
        (&[1.0, 3.0], &[0.0, 0.0], None),
        (&[1.0], &[2.0], None),
    ] {
        let runs = [a, b].map(|starts: &[f64]| {
            let mut runs = counts(&vec![&[1][..]; starts.len()]);
            runs.iter_mut()
                .zip(starts)
                .for_each(|(run, start)| run.meta.start = *start);
            runs
        });
        let sides = runs.each_ref().map(|runs| several(runs, &runs[0]));
        assert_eq!(runs::pairs([&sides[0], &sides[1]]), paired, "{a:?} {b:?}");
    }
}

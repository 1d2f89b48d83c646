use super::*;
use crate::build::Builder;
use crate::model::Meta;
use crate::values::ValueType;

/// `main` calls `glue` (a native function) calls `work`; one sample ends in each, `main` being at another line each time.
fn profile() -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
    let main = builder.frame(Frame::python("main", "main", "a.py", 1));
    let glue = builder.frame(Frame::native("glue", "lib.so", 16));
    let work = builder.frame(Frame::python("work", "work", "a.py", 20));
    builder.sample(1, (1, 1), &[(main, 2)], &[1, 10]);
    builder.sample(2, (1, 1), &[(main, 3), (glue, 7)], &[1, 20]);
    builder.sample(3, (1, 2), &[(main, 4), (glue, 8), (work, 21)], &[1, 40]);
    builder.sample(4, (1, 2), &[(main, 4), (work, 22)], &[1, 80]);
    builder.finish(Meta::default())
}

fn without_glue(profile: &Profile) -> Profile {
    let mut out = Folding::new(profile);
    out.keep(Folding::ROOT);
    for node in &profile.nodes[1..] {
        let under = out.target(node.parent);
        if profile.frames[node.frame as usize].name == "glue" {
            out.fold(under);
        } else {
            let into = out.child(under, node.frame);
            out.keep(into);
        }
    }
    out.finish()
}

#[test]
fn samples_of_a_folded_frame_go_to_its_caller_and_its_line() {
    let folded = without_glue(&profile());
    let names: Vec<_> = folded
        .nodes
        .iter()
        .map(|node| &*folded.frames[node.frame as usize].name)
        .collect();
    assert_eq!(names, ["root", "main", "work"]);
    assert_eq!(folded.amounts(0), [4, 4, 2]);
    assert_eq!(folded.self_amounts(1), [0, 30, 120]);
    let main = &folded.nodes[1];
    assert_eq!(main.lines, BTreeMap::from([(2, 1), (3, 1), (4, 2)]));
    assert_eq!(main.self_lines_of(2), &BTreeMap::from([(2, 1), (3, 1)]));
    assert_eq!(folded.nodes[2].lines, BTreeMap::from([(21, 1), (22, 1)]));
    let ends: Vec<_> = folded
        .timeline
        .iter()
        .map(|sample| (sample.time, sample.tid, sample.node))
        .collect();
    assert_eq!(ends, [(1, 1, 1), (2, 1, 1), (3, 2, 2), (4, 2, 2)]);
    let lines = |sample: usize| {
        let mut at = folded.sample_places[sample] as usize;
        let mut lines = Vec::new();
        while at != 0 {
            lines.insert(0, folded.places[at].line);
            at = folded.places[at].parent as usize;
        }
        lines
    };
    assert_eq!(
        (0..4).map(lines).collect::<Vec<_>>(),
        [vec![2], vec![3], vec![4, 21], vec![4, 22]]
    );
}

#[test]
fn without_a_timeline_the_only_line_is_known() {
    let mut profile = profile();
    for node in &mut profile.nodes[1..2] {
        node.lines = BTreeMap::from([(4, 4)]);
        node.self_lines = BTreeMap::from([(4, 1)]);
    }
    (profile.timeline, profile.places, profile.sample_places) = (Vec::new(), Vec::new(), Vec::new());
    let folded = without_glue(&profile);
    assert_eq!(folded.nodes[1].self_lines_of(2), &BTreeMap::from([(4, 2)]));
}

#[test]
fn dropped_samples_leave_the_timeline_and_all_values() {
    let profile = profile();
    let mut out = Folding::new(&profile);
    out.keep(Folding::ROOT);
    let main = out.child(Folding::ROOT, profile.nodes[1].frame);
    out.fold(DROPPED);
    out.keep(main);
    let folded = out.finish();
    assert_eq!((folded.timeline.len(), folded.nodes.len()), (1, 2));
    assert_eq!((folded.amounts(0), folded.amounts(1)), (vec![1, 1], vec![20, 20]));
    assert!(folded.is_timed());
}

/// Whatever is folded, no sample, amount, time or thread changes.
#[test]
fn folding_conserves() {
    let mut state = 7u64;
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..200 {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
        let frames: Vec<_> = (0..6)
            .map(|at| builder.frame(Frame::native(format!("f{at}"), "m.so", at)))
            .collect();
        for time in 0..random(60) {
            let stack: Vec<_> = (0..random(8))
                .map(|_| (frames[random(6) as usize], random(3) as u32))
                .collect();
            match random(4) {
                0 => drop(builder.add(&stack, &[1 + random(3), random(100)])),
                _ => drop(builder.sample(time, (1, random(3) as u32), &stack, &[1, random(100)])),
            }
        }
        let profile = builder.finish(Meta::default());
        let mut out = Folding::new(&profile);
        out.keep(Folding::ROOT);
        for node in &profile.nodes[1..] {
            let under = out.target(node.parent);
            match random(2) {
                0 => out.fold(under),
                _ => {
                    let into = out.child(under, node.frame);
                    out.keep(into);
                }
            }
        }
        let folded = out.finish();
        for value in 0..2 {
            assert_eq!(folded.amounts(value)[0], profile.amounts(value)[0]);
            assert_eq!(
                folded.self_amounts(value).iter().sum::<u64>(),
                profile.self_amounts(value).iter().sum::<u64>()
            );
            let samples = |p: &Profile| {
                let amounts = (0..p.timeline.len()).map(|at| p.sample_amount(value, at));
                let times = p.timeline.iter().map(|sample| (sample.time, sample.pid, sample.tid));
                times.zip(amounts).collect::<Vec<_>>()
            };
            assert_eq!(samples(&folded), samples(&profile));
        }
        let self_counts = folded.self_counts();
        for (node, self_count) in folded.nodes.iter().zip(&self_counts) {
            let lines = |lines: &BTreeMap<u32, u64>| lines.values().sum::<u64>();
            assert!(lines(&node.lines) <= node.count && lines(node.self_lines_of(*self_count)) <= *self_count);
        }
        for (sample, place) in folded.timeline.iter().zip(&folded.sample_places) {
            let place = folded.places.get(*place as usize);
            assert!(place.is_none_or(|place| place.node == sample.node));
        }
        for (at, place) in folded.places.iter().enumerate().skip(1) {
            let parent = &folded.places[place.parent as usize];
            assert!((place.parent as usize) < at && folded.nodes[place.node as usize].parent == parent.node);
        }
    }
}

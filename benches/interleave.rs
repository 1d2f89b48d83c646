//! Cost of interleaving native and Python frames: by the addresses of anchors, by order, and Python only.
//!
//! `cargo bench --bench interleave`

use std::hint::black_box;
use std::time::Instant;

use nativeprof::frame::{CodeId, ModuleId, NativeFrame, UnwindMethod};
use nativeprof::frame::{EvalGroups, PyFrame};
use nativeprof::interleave::{InterleaveInput, interleave, python_only};

const RUNS: u32 = 9;
const EVAL: u64 = 7;

/// Every fourth native frame is a call of the bytecode loop.
fn native(frames: u64) -> Vec<NativeFrame> {
    (0..frames)
        .map(|i| {
            let svma = if i % 4 == 2 { EVAL } else { 1000 + i % 90 };
            let sp = 0x7fff_0000_0000 + 100 * i;
            NativeFrame {
                lookup: svma,
                sp,
                cfa: sp + 100,
                location: Some((ModuleId(0), svma)),
                method: UnwindMethod::Cfi,
            }
        })
        .collect()
}

/// A group for each call of the loop: one frame each, or three if there are anchors.
fn groups(native: &[NativeFrame], anchors: bool) -> EvalGroups {
    let mut groups = EvalGroups::default();
    for (i, f) in native.iter().filter(|f| f.lookup == EVAL).enumerate() {
        let frame = PyFrame::Code {
            code: CodeId(i as u32),
            instr: 2,
        };
        groups.begin(anchors.then_some(f.sp + 50));
        groups.extend(std::iter::repeat_n(frame, if anchors { 3 } else { 1 }));
    }
    groups
}

fn best(frames: usize, rounds: usize, mut f: impl FnMut()) -> f64 {
    let run = |_| {
        let start = Instant::now();
        for _ in 0..rounds {
            f();
        }
        start.elapsed().as_secs_f64() * 1e9 / (rounds * frames) as f64
    };
    (0..RUNS).map(run).fold(f64::MAX, f64::min)
}

fn main() {
    println!("ns per native frame, best of {RUNS}");
    println!(
        "{:>8} {:>12} {:>9} {:>12}",
        "frames", "by address", "by order", "Python only"
    );
    for frames in [20, 200, 2000] {
        let native = native(frames);
        let is_eval = |f: &NativeFrame| Some(f.lookup == EVAL);
        let mut out = Vec::new();
        let rounds = 400_000 / native.len();
        let [by_address, by_order] = [true, false].map(|anchors| {
            let groups = groups(&native, anchors);
            let input = InterleaveInput {
                pid: 1,
                native: &native,
                native_truncation: None,
                groups: &groups,
                python_truncation: None,
                attached: true,
                is_eval: &is_eval,
            };
            best(native.len(), rounds, || {
                out.clear();
                black_box(interleave(black_box(&input), &mut out));
            })
        });
        let groups = groups(&native, true);
        let alone = best(native.len(), rounds, || {
            out.clear();
            black_box(python_only(black_box(&groups), None, &mut out));
        });
        println!("{frames:>8} {by_address:>12.1} {by_order:>9.1} {alone:>12.1}");
    }
}

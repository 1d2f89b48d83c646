//! Cost of grouping the Python frames of a sample, for each CPython version and stacks of two depths; all code objects
//! known.
//!
//! `cargo bench --bench walk`

use std::hint::black_box;
use std::time::Instant;

use nativeprof::cpython::code_object::CodeTable;
use nativeprof::cpython::frame_groups;
use nativeprof::cpython::frame_groups::LastFrames;
use nativeprof::cpython::versions;
use nativeprof::cpython_layout::{ABSENT, Anchor, InstructionEncoding, Layout};
use nativeprof::event::{RawPyFrame, Sample, StackBytes, WalkStatus};
use nativeprof::frame::EvalGroups;
use nativeprof::process::memory::Memory;

/// Distinct code objects.
const CODES: u64 = 40;
const RUNS: u32 = 9;

/// Memory with code objects and a text at every address.
struct Made(Vec<u8>);

const CODE_AT: u64 = 0x10000;
const TEXT_AT: u64 = 0x1000;
const CODE_SIZE: u64 = 1024;

impl Made {
    fn new(l: &Layout) -> Made {
        let mut bytes = vec![0; (CODE_AT + CODES * CODE_SIZE) as usize];
        let mut put =
            |at: u64, v: u64, n: usize| bytes[at as usize..at as usize + n].copy_from_slice(&v.to_le_bytes()[..n]);
        put(TEXT_AT + u64::from(l.str_length), 4, 8);
        put(TEXT_AT + u64::from(l.str_state), 1 << 2 | 1 << 5 | 1 << 6, 4);
        for code in 0..CODES {
            let at = CODE_AT + code * CODE_SIZE;
            let pointers = [l.code_name, l.code_qualname, l.code_filename, l.code_linetable];
            for offset in pointers.into_iter().filter(|o| *o != ABSENT) {
                put(at + u64::from(offset), TEXT_AT, 8);
            }
            put(at + u64::from(l.code_firstlineno), code, 4);
        }
        Made(bytes)
    }
}

impl Memory for Made {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let found = usize::try_from(avma)
            .ok()
            .and_then(|at| self.0.get(at..at.checked_add(buf.len())?));
        found.is_some_and(|bytes| {
            buf.copy_from_slice(bytes);
            true
        })
    }
}

/// A stack of Python frames, three to one native call of the loop if the version can have that.
fn sample(l: &Layout, depth: u64) -> Sample {
    let (mut python, mut anchors) = (Vec::new(), Vec::new());
    for i in 0..depth {
        let code = CODE_AT + i % CODES * CODE_SIZE;
        let instr = match l.instruction_encoding {
            InstructionEncoding::Bytes | InstructionEncoding::Units => 10,
            InstructionEncoding::Pointer => code + u64::from(l.code_adaptive) + 10,
        };
        let (frame, entry) = (0x7000_0000 + i * 64, i % 3 == 2);
        python.push(RawPyFrame {
            frame,
            code,
            instr,
            fingerprint: 0,
            owner: 0,
            entry,
        });
        match l.anchor {
            Anchor::EvalRange => {}
            Anchor::CFramePerFrame => anchors.push(RawPyFrame {
                frame,
                instr: frame,
                ..RawPyFrame::default()
            }),
            Anchor::CFramePerEntry if i % 3 == 0 => anchors.push(RawPyFrame {
                frame,
                instr: frame,
                ..RawPyFrame::default()
            }),
            Anchor::CFramePerEntry => {}
            Anchor::Shim if entry => python.push(RawPyFrame {
                frame: frame + 32,
                owner: 3,
                ..RawPyFrame::default()
            }),
            Anchor::Shim => {}
        }
    }
    Sample {
        pid: 1,
        tid: 1,
        time: 0,
        regs: None,
        stack: StackBytes::default(),
        kernel: Vec::new(),
        python,
        anchors,
        walk: WalkStatus::Complete,
        ..Sample::default()
    }
}

fn main() {
    println!("ns per Python frame, best of {RUNS}");
    println!("{:<8} {:>8} {:>8} {:>8}", "CPython", "20 deep", "900 deep", "ratio");
    for facts in versions::ALL {
        let layout = &facts.layout;
        let memory = Made::new(layout);
        let per_frame = [20, 900].map(|depth| {
            let sample = sample(layout, depth);
            let mut codes = CodeTable::default();
            let (mut last, mut groups) = (LastFrames::default(), EvalGroups::default());
            frame_groups::groups(&sample, layout, &mut codes, &memory, &mut last, &mut groups);
            let frames: usize = groups.list.iter().map(|g| groups.frames(g).len()).sum();
            assert_eq!(frames as u64, depth, "all frames are found");
            let rounds = 200_000 / depth;
            let run = |_| {
                let start = Instant::now();
                for _ in 0..rounds {
                    last = LastFrames::default(); // all frames are new
                    frame_groups::groups(black_box(&sample), layout, &mut codes, &memory, &mut last, &mut groups);
                    black_box(&groups);
                }
                start.elapsed().as_secs_f64() * 1e9 / (rounds * depth) as f64
            };
            (0..RUNS).map(run).fold(f64::MAX, f64::min)
        });
        let [few, many] = per_frame;
        println!(
            "{:<8} {few:>8.1} {many:>8.1} {:>8.2}",
            format!("3.{}", facts.minor),
            many / few
        );
    }
}

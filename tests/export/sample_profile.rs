//! A handmade profile: every kind of frame, several threads and processes, a deep chain, hostile names.

use std::collections::BTreeMap;

use nativeprof::profile::measure::Measure;
use nativeprof::profile::memory_over_time::MemoryOverTime;
use nativeprof::profile::model::{
    Frame, FrameKind, MergedRecording, Meta, ModuleMeta, Node, NodeId, Profile, Quality, StopSummary, TimelineSample,
};

pub fn frame(kind: FrameKind, name: &str) -> Frame {
    let python = kind == FrameKind::Python;
    let grouping = matches!(kind, FrameKind::Root | FrameKind::Process | FrameKind::Thread);
    Frame {
        kind,
        name: name.to_string(),
        qualname: String::new(),
        filename: if python || grouping {
            String::new()
        } else {
            "<low-level>".to_string()
        },
        first_line: 0,
        address: 0,
        module: if kind == FrameKind::Kernel {
            "[kernel]".to_string()
        } else {
            String::new()
        },
        source: String::new(),
    }
}

pub fn python(name: &str, qualname: &str, filename: &str, first_line: u32) -> Frame {
    let (qualname, filename) = (qualname.to_string(), filename.to_string());
    Frame {
        qualname,
        filename,
        first_line,
        ..frame(FrameKind::Python, name)
    }
}

fn native(kind: FrameKind, name: &str, module: &str, address: u64, source: &str) -> Frame {
    Frame {
        module: module.to_string(),
        address,
        source: source.to_string(),
        ..frame(kind, name)
    }
}

/// Grows a profile stack by stack, as a recording does.
pub struct Builder {
    pub profile: Profile,
}

impl Builder {
    pub fn new() -> Self {
        let mut builder = Builder {
            profile: Profile::default(),
        };
        builder.profile.frames.push(frame(FrameKind::Root, "root"));
        builder.node(0, 0, 0);
        builder
    }

    pub fn node(&mut self, parent: NodeId, frame: u32, line: u32) -> NodeId {
        self.profile.nodes.push(Node {
            first_seen_line: line,
            ..Node::new(frame, parent)
        });
        (self.profile.nodes.len() - 1) as NodeId
    }

    /// Adds `count` samples of a stack, root first, each frame with its line and the text of that line.
    pub fn stack(&mut self, thread: (u32, u32), count: u64, stack: &[(Frame, u32, &str)]) {
        let mut at = 0;
        self.profile.nodes[0].count += count;
        for (depth, (frame, line, text)) in stack.iter().enumerate() {
            let frames = &mut self.profile.frames;
            let id = frames.iter().position(|known| known == frame).unwrap_or_else(|| {
                frames.push(frame.clone());
                frames.len() - 1
            }) as u32;
            let known = self
                .profile
                .nodes
                .iter()
                .skip(1)
                .position(|node| node.parent == at && node.frame == id);
            at = match known {
                Some(found) => found as NodeId + 1,
                None => self.node(at, id, *line),
            };
            let node = &mut self.profile.nodes[at as usize];
            node.count += count;
            if *line != 0 {
                *node.lines.entry(*line).or_default() += count;
                if depth + 1 == stack.len() {
                    *node.self_lines.entry(*line).or_default() += count;
                }
            }
            if node.line_text.is_empty() {
                node.line_text = text.to_string();
            }
        }
        let time = self.profile.timeline.len() as u64 * 10_101_010;
        self.profile.timeline.push(TimelineSample {
            time,
            pid: thread.0,
            tid: thread.1,
            node: at,
        });
    }
}

/// Every kind of frame, several threads and processes, a deep chain, and hostile names.
pub fn golden() -> Profile {
    use FrameKind::{Inlined, Kernel, Native, Process, Thread, Truncated, Unknown};
    let mut builder = Builder::new();
    let process = (frame(Process, "python 4242"), 0, "");
    let main_thread = (frame(Thread, "MainThread 4242"), 0, "");
    let worker = (frame(Thread, "worker 7"), 0, "");
    let start = (native(Native, "_start", "python3.13", 0x4021d0, ""), 0, "");
    let eval = (
        native(
            Native,
            "_PyEval_EvalFrameDefault",
            "libpython3.13.so.1.0",
            0x1a2b30,
            "Python/ceval.c",
        ),
        812,
        "",
    );
    let module = (python("<module>", "<module>", "/srv/app/main.py", 1), 88, "main()\n");
    let run = (
        python("run", "Solver.run", "/srv/app/solver.py", 31),
        40,
        "x = self.step(x)\n",
    );
    let run_later = (run.0.clone(), 44, "");
    let dot = (
        native(Native, "cblas_dgemm", "libopenblas.so.0", 0x33b0, "interface/gemm.c"),
        512,
        "",
    );
    let kernel_fn = (
        native(Native, "dgemm_kernel_HASWELL", "libopenblas.so.0", 0x8c5a40, ""),
        0,
        "",
    );
    let sort = (
        native(
            Native,
            "npy_quicksort",
            "_multiarray_umath.so",
            0x5100,
            "npysort/quicksort.cpp",
        ),
        210,
        "",
    );
    let less = (
        native(
            Inlined,
            "npy::less<double, long; 2>(a, b)",
            "_multiarray_umath.so",
            0x5100,
            "npy/tag.h",
        ),
        33,
        "",
    );
    let syscall = (
        native(Kernel, "do_syscall_64", "[kernel]", 0xffff_ffff_8120_0000, ""),
        0,
        "",
    );
    let read = (native(Kernel, "vfs_read", "[kernel]", 0xffff_ffff_8134_0040, ""), 0, "");
    let key = (
        python("<lambda>", "Solver.run.<locals>.<lambda>", "/srv/app/solver.py", 38),
        38,
        "key=lambda p: p.größe\n",
    );

    let base = [
        process.clone(),
        main_thread.clone(),
        start.clone(),
        eval.clone(),
        module.clone(),
    ];
    let on = |rest: &[&(Frame, u32, &'static str)]| {
        let mut stack = base.to_vec();
        stack.extend(rest.iter().map(|frame| (*frame).clone()));
        stack
    };
    let main = (4242, 4242);
    builder.stack(main, 120, &on(&[&run, &dot, &kernel_fn]));
    builder.stack(main, 14, &on(&[&run, &dot]));
    builder.stack(main, 60, &on(&[&run_later, &sort, &less]));
    builder.stack(main, 22, &on(&[&run_later, &sort]));
    builder.stack(main, 35, &on(&[&run_later, &sort, &key]));
    builder.stack(main, 18, &on(&[&run, &syscall, &read]));
    builder.stack(main, 6, &on(&[&run]));
    builder.stack(main, 4, &on(&[]));

    // Recursion stays a chain.
    let walk = (
        python("walk", "walk", "/srv/app/größe/数.py", 7),
        9,
        "return walk(n - 1)\n",
    );
    let mut deep = base.to_vec();
    deep.extend(std::iter::repeat_n(walk, 40));
    builder.stack(main, 12, &deep);

    // Two native functions with the same identifier become one node.
    let twin = |source: &str| (native(Native, "twin", "libtwin.so", 0x1000, source), 5, "");
    builder.stack(main, 8, &on(&[&twin("a.c")]));
    builder.stack(main, 9, &on(&[&twin("b.c")]));

    // The worker thread: incomplete and nameless.
    let on_worker = |rest: &[(Frame, u32, &'static str)]| {
        let mut stack = vec![process.clone(), worker.clone()];
        stack.extend_from_slice(rest);
        stack
    };
    let unknown = (native(Unknown, "[unknown]", "libsecret.so", 0x1f00, ""), 0, "");
    let jit = (native(Unknown, "[unknown]", "", 0x7f00_dead_b000, ""), 0, "");
    let truncated = (frame(Truncated, "[truncated: stack page not present]"), 0, "");
    builder.stack(
        (4242, 4250),
        20,
        &on_worker(&[truncated.clone(), dot.clone(), kernel_fn.clone()]),
    );
    builder.stack((4242, 4250), 16, &on_worker(&[start.clone(), unknown, jit]));
    builder.stack((4242, 4250), 3, &on_worker(&[]));

    // A second process, with hostile names.
    let other = (frame(Process, "sh 4300"), 0, "");
    for (at, name) in HOSTILE.iter().enumerate() {
        let function = (python(name, "", &format!("/srv/{name}.py"), 1), at as u32, *name);
        let library = (native(Native, name, name, at as u64, name), 0, "");
        builder.stack((4300, 4300), 5, &[other.clone(), function, library]);
    }

    let mut profile = builder.profile;
    let taken = profile.nodes[0].count;
    let reason = "stack page not present".to_string();
    profile.values = Measure::of_event("cpu-clock", 99).values();
    profile.meta = Meta {
        version: "0.1.0".to_string(),
        rate: 99,
        event: "cpu-clock".to_string(),
        backend: "ebpf".to_string(),
        start: 1_795_190_400.25,
        duration: 4.75,
        command: "python main.py --name '</script><b>&' \u{1b}[31m".to_string(),
        pid: 4242,
        python: "3.13.0".to_string(),
        machine: Default::default(),
        stopped: Some(StopSummary {
            median_us: 31,
            max_us: 210,
        }),
        quality: Quality {
            expected: taken + 2,
            taken,
            exact: taken - 56,
            repaired: 36,
            partial: 20,
            lost: 2,
            reasons: BTreeMap::from([(reason, 20)]),
        },
        target_cpu: 0.0,
        profiler_cpu: 0.011,
        sampling_cpu: 0.0,
        modules: vec![ModuleMeta {
            path: "/usr/lib/libopenblas.so.0".to_string(),
            build_id: "0123456789abcdef".to_string(),
            symbols_from: "symbol table".to_string(),
            symbols_missing: "no /usr/lib/debug/.build-id/01/23456789abcdef.debug".to_string(),
            frames: 154,
            unnamed: 7,
            samples: 120,
            instructions: BTreeMap::from([(0x1000, 3), (0x1004, 1), (0x20_0000, 40)]),
        }],
        threads: vec![
            (4242, 4242, "MainThread".to_string()),
            (4242, 4250, "worker 7".to_string()),
        ],
        lags: Vec::new(),
        memory: Vec::new(),
        memory_over_time: MemoryOverTime::default(),
        merged_from: vec![MergedRecording {
            name: "a </script>.json".to_string(),
            command: "python \u{1b}a.py".to_string(),
            rate: 99,
            start: 1_795_190_400.25,
            duration: 4.75,
            samples: 407,
        }],
    };
    profile
}

const HOSTILE: &[&str] = &[
    "</script><script>alert(1)</script>",
    "]]><!--",
    "\"quoted\" 'single' & <b>",
    "semi;colon",
    "new\nline\r\ttab",
    "\u{1b}]0;title\u{7}\u{1b}[2J",
    "\u{202e}gnp.exe\u{2066}",
    "back\\slash\\x3b",
    " ends with a number 17",
    "# comment",
    "nul\0 \u{85}\u{2028}\u{feff}\u{ffff}",
    "",
];

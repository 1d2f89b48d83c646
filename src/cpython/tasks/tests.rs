use std::collections::BTreeMap;

use super::layout::{CoroutineFrame, FrameState, StackTop};
use super::objects::{Kind, Objects};
use super::registry::FoundTasks;
use super::*;
use crate::cpython::DEFAULT_DESCRIPTOR;
use crate::cpython::versions;
use crate::cpython_layout::ThreadStateLocation;
use crate::process::maps::Mapping;

/// Memory in words; what is not there is unreadable.
#[derive(Default)]
struct WordMemory(BTreeMap<u64, u64>);

impl Memory for WordMemory {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        buf.iter_mut().zip(avma..).all(|(byte, at)| {
            let word = self.0.get(&(at & !7));
            word.is_some_and(|word| {
                *byte = word.to_le_bytes()[(at & 7) as usize];
                true
            })
        })
    }
}

impl WordMemory {
    fn text(&mut self, at: u64, text: &str) {
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(bytes.len() / 8 * 8 + 88, 0); // a type's name is read in full
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            let word = word.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
            self.0.insert(at + 8 * i as u64, word);
        }
    }
}

fn runtime(minor: u8) -> Runtime {
    let facts = versions::find((3, minor, 1)).expect("a row");
    Runtime {
        version: (3, minor, 1),
        facts: Some(facts),
        runtime: 0,
        layout: Some(facts.layout),
        thread_state: ThreadStateLocation::Key,
        free_threaded: false,
        newer_than_known: false,
        eval: Vec::new(),
    }
}

/// Published offsets of 3.14.
fn published() -> Vec<u8> {
    let words: [u64; 13] = [168, 136, 96, 108, 109, 128, 152, 0, 10880, 936, 864, 872, 880];
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Each version's layout, with that of its objects.
fn layouts_of_all() -> Vec<(Runtime, ObjectLayout, TaskLayout)> {
    let layout = |minor| {
        let runtime = runtime(minor);
        let interpreter = runtime.in_process(0, DEFAULT_DESCRIPTOR).expect("a layout");
        let tasks = TaskLayout::of(&runtime, &interpreter.layout, Some(&published())).expect("a known version");
        let objects = ObjectLayout::of(&runtime, &interpreter.layout).expect("a known version");
        (runtime, objects, tasks)
    };
    let with_tasks = versions::ALL.iter().filter(|facts| facts.tasks.is_some());
    with_tasks.map(|facts| layout(facts.minor)).collect()
}

/// Numbers that are the same in each run.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

const ARENA: u64 = 0x10_0000;
const ARENA_WORDS: u64 = 4096;
const TYPES: u64 = 0x20_0000;
const TYPE_SIZE: u64 = 0x1000;

/// Memory full of objects of known types whose fields are random: they refer to each other, to the middle of others, to
/// nothing, and have random sizes.
fn malicious(seed: u64) -> WordMemory {
    let mut random = Rng(seed);
    let mut memory = WordMemory::default();
    let names = [
        "_asyncio.Task",
        "_asyncio.Future",
        "coroutine",
        "generator",
        "coroutine_wrapper",
        "function",
        "method",
        "builtin_function_or_method",
        "functools.partial",
        "cell",
        "TaskWakeupMethWrapper",
        "TaskGroup",
        "str",
        "dict",
        "greenlet.greenlet",
        "frame",
        "Task",
        "Nursery",
    ];
    for (i, name) in (0..).zip(names) {
        let at = TYPES + i * TYPE_SIZE;
        for offset in (0..0x400).step_by(8) {
            memory.0.insert(at + offset, ARENA + 8 * random.below(ARENA_WORDS));
        }
        memory.0.insert(at + 24, at + 0x800); // tp_name
        memory.0.insert(at + 168, 1 << 4 | 1 << 2); // tp_flags
        memory.text(at + 0x800, name);
    }
    for i in 0..ARENA_WORDS {
        let word = match random.below(8) {
            0..=2 => TYPES + TYPE_SIZE * random.below(names.len() as u64),
            3..=5 => ARENA + 8 * random.below(ARENA_WORDS),
            6 => random.below(300),
            _ => random.below(u64::MAX) << 20,
        };
        memory.0.insert(ARENA + 8 * i, word);
    }
    memory
}

#[test]
fn malicious_objects_are_bounded() {
    let mut chains = 0;
    for (runtime, objects, tasks) in layouts_of_all() {
        let layout = runtime.layout.expect("a layout");
        for seed in 0..3 {
            let memory = malicious(seed);
            let reader = Objects::new(&memory, &layout, &objects, &tasks, Rc::default());
            for at in (ARENA..ARENA + 8 * ARENA_WORDS).step_by(64) {
                chains += reader.await_chain(at).frames.len();
                reader.awaiters(at, true, &|_| Vec::new());
                reader.awaiters(at, false, &|_| Vec::new());
                reader.attribute(at, "data");
                reader.set(at, 100);
                reader.dict(at);
                reader.frames_down_to(at, 1);
                if let Some(lists) = &tasks.lists {
                    let state = PyThreadState {
                        state: at,
                        interpreter: at - 10880,
                        thread: 0,
                    };
                    FoundTasks::default().read_lists(&reader, lists, &[state]);
                }
            }
        }
    }
    assert!(chains > 100, "coroutines were found: {chains}");
}

fn mapping(start: u64, end: u64, path: &str) -> Mapping {
    Mapping {
        start,
        end,
        readable: true,
        shared: false,
        writable: true,
        executable: false,
        offset: 0,
        device: (0, 0),
        inode: 0,
        path: path.into(),
    }
}

#[test]
fn malicious_greenlets_are_bounded() {
    for (runtime, offsets, tasks) in layouts_of_all() {
        let reader = OtherTasks {
            layout: runtime.layout.expect("a layout"),
            offsets,
            tasks,
            types: Rc::default(),
        };
        let maps = [
            mapping(ARENA, ARENA + 8 * ARENA_WORDS, ""),
            mapping(TYPES, TYPES + 32 * TYPE_SIZE, "/lib/_greenlet.so"),
        ];
        for seed in 0..3 {
            let memory = malicious(seed);
            let (listed, _) = reader.all_greenlets(&memory, &maps, &[]);
            let mut search = GreenletSearch::default();
            search.begin(maps.to_vec());
            while !search.is_complete() {
                reader.find_greenlets(&memory, &mut search, 1);
                reader.refresh_greenlets(&memory, &mut search);
            }
            assert!(search.found().len() >= listed.len());
            let state = PyThreadState {
                state: ARENA,
                interpreter: ARENA,
                thread: ARENA,
            };
            reader.suspended_greenlets(&memory, &search, &[state]);
            reader.trio_schedulers(&memory, &[state], &mut |raw| {
                let is_scheduler = raw.code.is_multiple_of(16);
                Some(if is_scheduler {
                    TrioFunction::Scheduler
                } else {
                    TrioFunction::Runner
                })
            });
            let words = (ARENA..ARENA + 8 * ARENA_WORDS).step_by(8);
            reader.greenlet_of_stack(&memory, words.clone(), ARENA);
            for at in words.step_by(64) {
                if let Some(offsets) = reader.trio_offsets(&memory, at, at + 8) {
                    let scheduler = TrioScheduler {
                        thread: 0,
                        frame: at,
                        code: at + 8,
                    };
                    for read in reader.trio_chains(&memory, &offsets, &scheduler) {
                        reader.trio_parent(&memory, &offsets, &read.task);
                    }
                }
            }
        }
    }
}

#[test]
fn greenlets_are_pairs_of_objects() {
    let (runtime, offsets, tasks) = layouts_of_all().remove(5);
    let reader = OtherTasks {
        layout: runtime.layout.expect("a layout"),
        offsets,
        tasks,
        types: Rc::default(),
    };
    let (table, stop) = (0x30_0000, 0x7000_0010);
    let mut memory = WordMemory::default();
    memory.0.extend((0..ARENA_WORDS).map(|i| (ARENA + 8 * i, 0)));
    memory.0.extend((0..TYPE_SIZE / 8).map(|i| (TYPES + 8 * i, 0)));
    memory.0.insert(TYPES + 24, TYPES + 0x800);
    memory.text(TYPES + 0x800, "greenlet.greenlet");
    // One that has not begun, one that runs, and one whose objects do not belong together.
    for (n, back, stop) in [(0, 0x100, 0), (1, 0x100, stop), (2, 0x108, 0)] {
        let python = ARENA + 0x1000 * n;
        let object = python + 0x100;
        for (at, word) in [
            (python + 8, TYPES),
            (python + 32, python + back),
            (object, table),
            (object + 8, python),
            (object + 56, u64::from(stop != 0)),
            (object + 64, stop),
        ] {
            memory.0.insert(at, word);
        }
    }
    let maps = [
        mapping(ARENA, ARENA + 8 * ARENA_WORDS, "[heap]"),
        mapping(table, table + 0x1000, "/lib/_greenlet.cpython-312.so"),
    ];
    let (found, gaps) = reader.all_greenlets(&memory, &maps, &[]);
    let found: Vec<(u64, GreenletState)> = found.into_iter().map(|g| (g.greenlet.address, g.state)).collect();
    let expected = [
        (ARENA, GreenletState::New(None)),
        (ARENA + 0x1000, GreenletState::Running(None)),
    ];
    assert_eq!((&found[..], gaps), (&expected[..], vec![]));
    let mut search = GreenletSearch::default();
    search.begin(maps.to_vec());
    assert_eq!(reader.find_greenlets(&memory, &mut search, 1), None);
    assert!(
        search.is_complete() && search.found().len() == 2,
        "one part of a megabyte has them"
    );
    memory.0.insert(ARENA + 0x1100 + 8, ARENA);
    let new = ARENA + 0x800;
    let words = [
        (new + 8, TYPES),
        (new + 32, new + 0x100),
        (new + 0x100, table),
        (new + 0x108, new),
    ];
    memory.0.extend(words);
    reader.refresh_greenlets(&memory, &mut search);
    let expected = [(ARENA + 0x100, ARENA), (new + 0x100, new)];
    assert_eq!(search.found(), expected, "one is gone, and one is new near another");
    memory.0.insert(ARENA + 0x1100 + 8, ARENA + 0x1000);
    let on_stack = |end: u64| {
        let words = [7, ARENA + 0x100, ARENA + 0x2100, ARENA + 0x1100].into_iter();
        let found = reader.greenlet_of_stack(&memory, words, end);
        found.map(|(at, greenlet)| (at, greenlet.address))
    };
    assert_eq!(on_stack(stop - 16), Some((3, ARENA + 0x1000)));
    assert_eq!(on_stack(stop + 16), None, "it begins elsewhere");
}

/// A list of tasks: (next of each node), the first is the head.
fn listed(next: &[u64]) -> (usize, Vec<Gap>) {
    let (runtime, objects, tasks) = layouts_of_all().remove(7);
    let layout = runtime.layout.expect("a layout");
    let lists = tasks.lists.expect("3.14 has lists");
    let mut memory = WordMemory::default();
    memory.0.insert(TYPES + 24, TYPES + 0x800);
    memory.0.insert(TYPES + 168, 0);
    memory.text(TYPES + 0x800, "_asyncio.Task");
    let state = PyThreadState {
        state: ARENA,
        interpreter: 0,
        thread: 0,
    };
    let head = ARENA + u64::from(lists.thread_head);
    let node = |n: u64| {
        let task = ARENA + 0x1000 * n;
        if n == 0 { head } else { task + u64::from(lists.node) }
    };
    for (n, to) in (0..).zip(next) {
        memory.0.insert(node(n), node(*to));
        memory.0.insert(ARENA + 0x1000 * n + 8, TYPES);
    }
    memory.0.insert(ARENA + u64::from(lists.thread_running), 0);
    let reader = Objects::new(&memory, &layout, &objects, &tasks, Rc::default());
    let mut found = FoundTasks::default();
    found.read_lists(&reader, &lists, &[state]);
    let gaps = found.gaps.into_iter().filter(|gap| *gap != Gap::Unreadable).collect();
    (found.tasks.len(), gaps)
}

#[test]
fn lists_of_tasks_end() {
    assert_eq!(listed(&[0]), (0, vec![]));
    assert_eq!(listed(&[1, 2, 3, 0]), (3, vec![]));
    // It does not come back to its head, or leads to something else.
    assert_eq!(listed(&[1, 2, 3, 2]), (3, vec![Gap::Changed]));
    assert_eq!(listed(&[1, 1]), (1, vec![Gap::Changed]));
    assert_eq!(listed(&[1, 2, 9]), (2, vec![Gap::Changed]));
}

#[test]
fn layouts_follow_the_version() {
    for (runtime, _, tasks) in layouts_of_all() {
        let minor = runtime.version.1;
        assert_eq!(tasks.name.is_some(), minor >= 8, "3.{minor}");
        assert_eq!(tasks.lists.is_some(), minor >= 14, "3.{minor}");
        let inline = matches!(tasks.coroutine_frame, CoroutineFrame::Inline(_));
        assert_eq!(inline, minor >= 11, "3.{minor}");
        let in_coroutine = matches!(tasks.frame_state, FrameState::InCoroutine(..));
        assert_eq!(in_coroutine, minor >= 11, "3.{minor}");
        assert_eq!(matches!(tasks.stack_top, StackTop::Below(..)), minor >= 14, "3.{minor}");
    }
}

#[test]
fn unknown_versions_and_wild_offsets_have_no_layouts() {
    let known = runtime(15);
    let layout = known.layout.expect("a layout");
    // Published, for a header that is shorter than any.
    let wild = Layout {
        bytes_size: 8,
        ..layout
    };
    let unknown = Runtime {
        facts: versions::find((3, 99, 0)),
        newer_than_known: true,
        ..known.clone()
    };
    for (runtime, layout, expected) in [
        (&known, &layout, true),
        (&known, &wild, false),
        (&unknown, &layout, false),
    ] {
        assert_eq!(ObjectLayout::of(runtime, layout).is_some(), expected);
        assert_eq!(TaskLayout::of(runtime, layout, None).is_some(), expected);
    }
    let interpreter = unknown.in_process(0, DEFAULT_DESCRIPTOR).expect("read like the newest");
    let reason = |published| TaskReader::new(&unknown, &interpreter, published).err();
    assert_eq!(reason(None), Some(NoTasks::NoAsyncio));
    assert_eq!(reason(Some(&published())), Some(NoTasks::UnknownVersion));
}

#[test]
fn unknown_objects_are_no_tasks() {
    let (runtime, objects, tasks) = layouts_of_all().remove(0);
    let memory = WordMemory::default();
    let layout = runtime.layout.expect("a layout");
    let reader = Objects::new(&memory, &layout, &objects, &tasks, Rc::default());
    assert_eq!(reader.kind(0x1000), None::<Kind>);
    assert!(reader.await_chain(0x1000).is_truncated);
}

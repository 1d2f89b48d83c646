use super::*;
use crate::profile::model::{FrameKind, Node, TimelineSample};
use crate::profile::values::{Amounts, Value, ValueType};
use crate::tui::SINCE_START;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

/// `root -> a -> b (3 samples), a (1 sample), c\x1b (2 samples)`
fn profile() -> Profile {
    let frame = |kind, name: &str| Frame {
        kind,
        name: name.into(),
        qualname: String::new(),
        filename: "/x.py".into(),
        first_line: 1,
        address: 0,
        module: String::new(),
        source: String::new(),
    };
    let node = |frame, parent, count| Node {
        count,
        ..Node::new(frame, parent)
    };
    let mut p = Profile {
        frames: vec![
            frame(FrameKind::Root, "root"),
            frame(FrameKind::Python, "a"),
            frame(FrameKind::Python, "b"),
            frame(FrameKind::Python, "c\x1b[2J"),
        ],
        nodes: vec![node(0, 0, 6), node(1, 0, 4), node(2, 1, 3), node(3, 0, 2)],
        ..Profile::default()
    };
    p.timeline = [2, 2, 2, 1, 3, 3]
        .into_iter()
        .map(|node| TimelineSample {
            time: 0,
            pid: 7,
            tid: if node == 3 { 8 } else { 7 },
            node,
        })
        .collect();
    p.meta.pid = 7;
    p.meta.rate = 99;
    p.meta.duration = 1.0;
    p
}

fn press(app: &mut App, keys: &str) -> Action {
    let mut last = Action::Nothing;
    for c in keys.chars() {
        let code = match c {
            '\n' => KeyCode::Enter,
            '<' => KeyCode::Esc,
            'v' => KeyCode::Down,
            c => KeyCode::Char(c),
        };
        last = app.key(KeyEvent::new(code, KeyModifiers::NONE));
    }
    last
}

/// Names of the rows, with self and total.
fn shown(app: &App) -> Vec<String> {
    let row = |r: &TopRow| {
        format!(
            "{}{} {}/{}",
            " ".repeat(r.depth),
            r.name,
            r.counts.self_count,
            r.counts.total
        )
    };
    app.rows.iter().map(row).collect()
}

fn app() -> App {
    let mut app = App::default();
    app.show(profile());
    app
}

#[test]
fn tables_and_keys() {
    let mut app = app();
    assert_eq!(shown(&app), ["b 3/3", "c\x1b[2J 2/2", "a 1/4"]);
    press(&mut app, "s");
    assert_eq!(shown(&app), ["a 1/4", "b 3/3", "c\x1b[2J 2/2"]);
    press(&mut app, "2");
    assert_eq!(shown(&app), ["a 1/4", " b 3/3", "c\x1b[2J 2/2"]);
    assert_eq!(press(&mut app, "3"), Action::Refresh);
    assert_eq!(shown(&app), ["7  4/4", "8  2/2"]);
    assert_eq!(press(&mut app, "\n"), Action::Refresh);
    assert_eq!((app.thread, &app.page), (Some(7), &Page::Functions));
    press(&mut app, "a");
    assert_eq!(app.thread, None);
    press(&mut app, "\n"); // callers of `a`
    assert_eq!(
        shown(&app),
        [
            "called by 0/0",
            " (no caller) 1/4",
            "the function 0/0",
            " a 1/4",
            "calls 0/0",
            " b 3/3"
        ]
    );
    press(&mut app, "<");
    assert_eq!(app.page, Page::Functions);
    assert_eq!(press(&mut app, "q"), Action::Quit);
    let ctrl_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    press(&mut app, "/x");
    assert_eq!(app.key(ctrl_c), Action::Quit, "also while something is typed");
}

#[test]
fn functions_of_the_user_come_first() {
    use crate::profile::build::Builder;
    use crate::profile::model::Meta;
    use crate::profile::values::ValueType;
    let shown_of = |stacks: &[(&[&str], u64)]| {
        let mut builder = Builder::new(&[ValueType::SAMPLES]);
        for (stack, samples) in stacks {
            let frame = |name: &&str| match name.chars().next() {
                Some('.') => Frame::python(*name, *name, "/v/site-packages/lib.py", 1),
                Some('A'..='Z') => Frame::native(*name, "libm.so", 1),
                _ => Frame::python(*name, *name, "/srv/a.py", 1),
            };
            let stack: Vec<_> = stack.iter().map(|name| (builder.frame(frame(name)), 7)).collect();
            builder.add(&stack, &[*samples]);
        }
        let mut app = App::default();
        app.show(builder.finish(Meta::default()));
        shown(&app)
    };
    let stacks: &[(&[&str], u64)] = &[
        (&["main", "work", ".dump", "ENCODE"], 5),
        (&["main", "SORT"], 2),
        (&[".loop", "POLL"], 9),
    ];
    assert_eq!(
        shown_of(stacks),
        [
            "work 5/5",
            "main 2/7",
            "other functions: libraries, C code 0/0",
            "POLL 9/9",
            "ENCODE 5/5",
            "SORT 2/2",
            ".loop 0/9",
            ".dump 0/5",
        ]
    );
    assert_eq!(shown_of(&stacks[2..]), [".loop 9/9", "other functions 0/0", "POLL 9/9"]);
    assert_eq!(shown_of(&[(&["MAIN", "SORT"], 3)]), ["SORT 3/3", "MAIN 0/3"]);
}

#[test]
fn waits_have_a_page() {
    use crate::profile::build::Builder;
    let mut app = app();
    press(&mut app, "4");
    assert!(render(&mut app, 120, 12).contains("top --mode wall"), "no waits");
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
    let f = builder.frame(Frame::python("f", "C.f", "a.py", 1));
    for (time, label, weight) in [(1, "[waiting: read pipe]", 6_000_000), (2, "[waiting: gil]", 2_000_000)] {
        let state = builder.frame(Frame::new(FrameKind::State, label));
        builder.sample(time, (1, 2), &[(f, 7), (state, 0)], &[1, weight]);
    }
    let mut profile = builder.finish(Default::default());
    profile.meta.duration = 2.0;
    profile.waits.lengths = vec![3_000_000, 2_000_000];
    app.show(profile);
    let text = render(&mut app, 120, 12);
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip(4)
        .take(2)
        .map(|l| l.split_whitespace().collect())
        .collect();
    let read = [
        "75.0", "6.00", "ms", "1.0", "3.00", "ms", "3.00", "ms", "3.00", "ms", "read", "pipe", "C.f", "(a.py:7)",
    ];
    assert_eq!(rows[0], read, "{text}");
    assert_eq!(rows[1][10..], ["gil", "C.f", "(a.py:7)"], "{text}");
    press(&mut app, "/pipe\n");
    assert_eq!(app.rows.len(), 1);
    press(&mut app, "<");
    press(&mut app, "s1");
    assert_eq!(app.page, Page::Functions);
}

#[test]
fn filters() {
    let mut app = app();
    press(&mut app, "/^B$\n");
    assert_eq!(shown(&app), ["b 3/3"]);
    press(&mut app, "2");
    assert_eq!(shown(&app), ["a 0/3", " b 3/3"], "stacks with a match, whole");
    press(&mut app, "/(\n");
    assert!(app.message.contains("invalid regular expression"), "{}", app.message);
    press(&mut app, "<<");
    assert_eq!(shown(&app).len(), 3);
}

#[test]
fn the_selection_stays_with_its_function() {
    let mut app = app();
    press(&mut app, "v"); // the second: c
    let mut next = profile();
    next.nodes[3].count = 9;
    next.nodes[0].count = 13;
    app.show(next);
    assert_eq!(app.table.selected(), Some(0), "{:?}", shown(&app));
    assert_eq!(press(&mut app, "w\n"), Action::Save("nativeprof-7.html".into()));
}

/// The screen as text.
fn render(app: &mut App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal in memory");
    terminal
        .draw(|screen| super::super::draw::draw(screen, app))
        .expect("drawn");
    let buffer = terminal.backend().buffer();
    let lines = buffer.content.chunks(usize::from(width));
    let text = |cells: &[ratatui::buffer::Cell]| cells.iter().map(|c| c.symbol()).collect::<String>();
    lines.map(|cells| text(cells).trim_end().to_string() + "\n").collect()
}

#[test]
fn names_are_drawn_as_text_on_any_screen() {
    let mut app = app();
    app.profile.meta.command = "python3 \x1b]0;x\x07".into();
    for (width, height) in [(1, 1), (20, 6), (40, 10), (60, 20), (120, 40), (300, 100)] {
        for keys in ["", "?", "2", "3", "1\n", "w"] {
            press(&mut app, keys);
            let text = render(&mut app, width, height);
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        }
        press(&mut app, "<<<");
    }
    app = self::app();
    let text = render(&mut app, 120, 12);
    let row = text.lines().find(|l| l.contains("c\\x1b[2J")).expect("a row");
    let words: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(words, ["33.3", "33.3", "2.0", "2.0", "c\\x1b[2J", "/x.py:1"]);
    assert!(text.contains("6 samples/s, CPU 6 %"), "{text}");
}

#[test]
fn a_letter_replaces_the_proposed_name() {
    let typed = |keys: &[KeyCode]| {
        let mut app = app();
        press(&mut app, "w");
        keys.iter()
            .for_each(|key| drop(app.key(KeyEvent::new(*key, KeyModifiers::NONE))));
        app.key(KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE))
    };
    let save = |name: &str| Action::Save(name.into());
    assert_eq!(typed(&[]), save("nativeprof-7.html"));
    assert_eq!(typed(&[KeyCode::Char('x'), KeyCode::Char('y')]), save("xy"));
    assert_eq!(typed(&[KeyCode::Backspace, KeyCode::Char('x')]), save("x"));
    assert_eq!(typed(&[KeyCode::Right, KeyCode::Char('x')]), save("nativeprof-7.htmlx"));
    assert_eq!(typed(&[KeyCode::Backspace]), Action::Nothing);
}

#[test]
fn times_are_shown_where_they_were_recorded() {
    let mut app = App::default();
    app.show(Profile {
        values: vec![
            Value::per_count(ValueType::SAMPLES, 1),
            Value::per_count(ValueType::WALL, 250_000_000),
        ],
        ..profile()
    });
    let text = render(&mut app, 120, 12);
    for shown in ["1.50 s wall of all threads", "SELF TIME", "750.0 ms", "1.00 s"] {
        assert!(text.contains(shown), "{shown}: {text}");
    }
    press(&mut app, "3");
    let text = render(&mut app, 120, 12);
    assert!(text.contains("500.0 ms") && text.contains("33.3"), "{text}");
}

#[test]
fn resident_memory_is_shown_with_its_account() {
    use crate::profile::resident::{MemoryChanges, ResidentMemory};
    let resident = |nodes: [u64; 4]| Value {
        kind: ValueType::RSS_BYTES,
        amounts: Amounts::Each {
            nodes: nodes.into(),
            samples: vec![0; 6],
        },
    };
    let mut app = App::new(
        ViewOptions::default(),
        Windows {
            seconds: &[10, SINCE_START],
            first: SINCE_START,
        },
    );
    let shown = |nodes| {
        let mut profile = profile();
        profile.values = vec![Value::per_count(ValueType::SAMPLES, 1), resident(nodes)];
        profile.meta.memory = vec![ResidentMemory {
            pid: 7,
            anonymous: MemoryChanges {
                start: 3 << 20,
                grown: 5 << 20,
                returned: 1 << 20,
                ..MemoryChanges::default()
            },
            ..ResidentMemory::default()
        }];
        profile
    };
    app.show(shown([4 << 20, 3 << 20, 1 << 20, 1 << 20]));
    let text = render(&mut app, 120, 12);
    for part in [
        "RSS 7.00 MiB now: 3.00 MiB at the start + 5.00 MiB grown - 1.00 MiB given back",
        "since the start: 4.00 MiB of what grew is still resident, 6 samples",
        "2.00 MiB   3.00 MiB a",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("Hz") && !text.contains("CPU"), "{text}");
    press(&mut app, "-");
    assert!(render(&mut app, 120, 12).contains("last 10 s: "));
    app.show(shown([0; 4]));
    assert!(
        render(&mut app, 120, 12).contains(": 0 B of what grew"),
        "{}",
        render(&mut app, 120, 12)
    );
}

#[test]
fn places_are_readable_in_80_columns() {
    use crate::profile::build::Builder;
    use crate::profile::values::ValueType;
    let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
    let file = "/srv/applications/shop/releases/2031-07-01/web/orders/views.py";
    let f = builder.frame(Frame::python("order", "Orders.order", file, 117));
    let module = "_umath.cpython-312-x86_64-linux-gnu.so";
    let native = builder.frame(Frame::native("add", module, 7));
    let state = builder.frame(Frame::new(FrameKind::State, "[waiting: read socket 127.0.0.1:5432]"));
    builder.sample(1, (1, 2), &[(f, 1234), (native, 0)], &[1, 1]);
    builder.sample(2, (1, 2), &[(f, 1234), (state, 0)], &[1, 6_000_000]);
    let mut profile = builder.finish(Default::default());
    profile.waits.lengths = vec![0, 3_000_000];
    profile.meta.lags = vec![Lag {
        length: 81_000_000,
        task: "Task-25311".into(),
        stack: vec!["_start (python3.12)".into(), format!("Orders.order ({file}:1234)")],
        ..Lag::default()
    }];
    let mut app = app();
    app.show(profile);
    for (keys, expected) in [
        ("1", "views.py:1234"),
        ("1", "_umath.so"),
        ("4", "Orders.order (…/views.py:1234)"),
        ("4", "read socket 127.0.0"),
        ("5", "Orders.order (…/views.py:1234)"),
    ] {
        press(&mut app, keys);
        let text = render(&mut app, 80, 12);
        assert!(text.contains(expected), "{expected}\n{text}");
    }
}

#[test]
fn blocked_event_loops_are_listed_by_function() {
    let mut app = app();
    let lag = |length, task: &str, line: u32| Lag {
        length,
        task: task.into(),
        stack: [
            "_start (python3.12)",
            "<module> (/srv/app.py:99)",
            "[task: report]",
            &format!("render (/srv/app.py:{line})"),
            "JSONEncoder.encode (/usr/lib/python3.12/json/encoder.py:200)",
        ]
        .map(String::from)
        .into(),
        ..Lag::default()
    };
    let mut profile = profile();
    profile.meta.lags = vec![lag(70_000_000, "Task-1", 7), lag(90_000_000, "Task-2", 8)];
    app.show(profile.clone());
    press(&mut app, "5");
    let text = render(&mut app, 100, 12);
    let row: Vec<&str> = text.lines().nth(4).unwrap_or_default().split_whitespace().collect();
    let expected = [
        "2",
        "160.0",
        "ms",
        "90.00",
        "ms",
        "2",
        "tasks",
        "render",
        "(/srv/app.py:8)",
    ];
    assert_eq!(row, expected, "{text}");
    press(&mut app, "\n");
    let names: Vec<(usize, &str)> = app.rows.iter().map(|row| (row.depth, &*row.name)).collect();
    let expected = [
        (0, "render (/srv/app.py:8)"),
        (1, "JSONEncoder.encode (/usr/lib/python3.12/json/encoder.py:200)"),
        (0, "called by"),
        (1, "[task: report]"),
    ];
    assert_eq!(names, expected);
    press(&mut app, "</report\n");
    assert_eq!(app.rows.len(), 0, "no task has that name");
}

#[test]
fn tasks_without_names_and_idle_pools_are_rows_that_stay() {
    use crate::profile::build::Builder;
    use crate::profile::values::ValueType;
    let profile = |tasks: u32| {
        let mut builder = Builder::new(&[ValueType::SAMPLES, ValueType::WALL]);
        let handle = builder.frame(Frame::python("handle", "handle", "/srv/app.py", 1));
        let worker = builder.frame(Frame::python(
            "_worker",
            "_worker",
            "/lib/concurrent/futures/thread.py",
            1,
        ));
        let wait = builder.frame(Frame::new(FrameKind::State, "[waiting: lock]"));
        for number in 0..tasks {
            let task = builder.frame(Frame::new(FrameKind::Task, format!("[task: Task-{number}]")));
            builder.sample(1, (1, 1), &[(task, 0), (handle, 3)], &[1, 5]);
        }
        builder.sample(2, (1, 2), &[(worker, 5), (wait, 0)], &[1, 300]);
        let mut profile = builder.finish(Default::default());
        profile.waits.lengths = vec![0; tasks as usize + 1];
        profile
    };
    let mut app = app();
    app.show(profile(2));
    press(&mut app, "ss");
    assert_eq!(
        shown(&app),
        [
            "handle 10/10",
            "other functions: libraries, C code 0/0",
            "[idle: ThreadPoolExecutor] 300/300",
            "[task: handle ×2] 0/10"
        ]
    );
    press(&mut app, "vvv");
    app.show(profile(3));
    assert_eq!(
        (app.table.selected(), &*app.rows[3].name),
        (Some(3), "[task: handle ×3]")
    );
    press(&mut app, "\n");
    assert_eq!(app.rows[3].name, "[task: handle ×3]");
    press(&mut app, "4");
    assert_eq!((&*app.rows[0].name, app.rows.len()), ("idle ThreadPoolExecutor", 1));
    app.view.task_names = true;
    app.view.idle = true;
    press(&mut app, "1");
    app.show(profile(2));
    let names: Vec<&str> = app.rows.iter().map(|row| &*row.name).collect();
    assert_eq!(
        names,
        [
            "_worker",
            "handle",
            "other functions: libraries, C code",
            "[task: Task-0]",
            "[task: Task-1]",
            "[waiting: lock]",
        ]
    );
}

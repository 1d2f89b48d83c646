use super::*;
use crate::profile::model::{FrameKind, Node, TimelineSample};
use crate::profile::values::{Value, ValueType};
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

use super::*;
use crate::build::Builder;
use crate::model::FrameKind;
use crate::model::Meta;
use crate::values::ValueType;

fn profile() -> Profile {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    let mut frame = |frame| builder.frame(frame);
    let main = frame(Frame::python("main", "main", "a.py", 1));
    let dumps = frame(Frame::python(
        "dumps",
        "dumps",
        "/usr/lib/python3.11/json/__init__.py",
        1,
    ));
    let get = frame(Frame::python(
        "get",
        "Session.get",
        "/v/site-packages/requests/api.py",
        1,
    ));
    let own = frame(Frame::python("default", "default", "a.py", 9));
    let native = frame(Frame::native("dict_get", "python3.11", 16));
    let kernel = frame(Frame::new(FrameKind::Kernel, "read"));
    let blas = frame(Frame::native("gemm", "blas.so", 16));
    for stack in [
        &[main][..],
        &[main, dumps],
        &[main, dumps, native],
        &[main, dumps, own, native],
        &[main, get, native, kernel],
        &[blas, kernel],
        &[dumps, own],
        &[dumps],
    ] {
        let stack: Vec<_> = stack.iter().map(|frame| (*frame, 1)).collect();
        builder.add(&stack, &[1]);
    }
    builder.finish(Meta::default())
}

fn shown(profile: &Profile) -> Vec<String> {
    let self_counts = profile.self_counts();
    let path = |mut at: usize| {
        let mut names = Vec::new();
        while at > 0 {
            names.insert(0, profile.frames[profile.nodes[at].frame as usize].name.clone());
            at = profile.nodes[at].parent as usize;
        }
        names.join(" ")
    };
    let ends = (0..self_counts.len()).filter(|at| self_counts[*at] > 0);
    let mut all: Vec<_> = ends.map(|at| format!("{} {}", self_counts[at], path(at))).collect();
    all.sort();
    all
}

#[test]
fn views_leave_out_frames_and_no_samples() {
    let options = ViewOptions::default();
    for (options, expected) in [
        (
            ViewOptions {
                no_native: true,
                ..options.clone()
            },
            &[
                "1 [native code]",
                "1 dumps",
                "1 dumps default",
                "1 main",
                "1 main dumps default",
                "1 main get",
                "2 main dumps",
            ][..],
        ),
        (
            ViewOptions {
                hide_stdlib: true,
                ..options.clone()
            },
            &[
                "1 [standard library]",
                "1 default",
                "1 gemm read",
                "1 main default dict_get",
                "1 main dict_get",
                "1 main get dict_get read",
                "2 main",
            ],
        ),
        (
            ViewOptions {
                hide_libraries: true,
                hide_stdlib: true,
                no_native: true,
                ..options.clone()
            },
            &[
                "1 [native code]",
                "1 [standard library]",
                "1 default",
                "1 main default",
                "4 main",
            ],
        ),
        (
            ViewOptions {
                focus: Some("dumps".into()),
                ..options.clone()
            },
            &[
                "1 dumps default",
                "1 dumps default dict_get",
                "1 dumps dict_get",
                "2 dumps",
            ],
        ),
        (
            ViewOptions {
                focus: Some("Session.get".into()),
                ..options.clone()
            },
            &["1 get dict_get read"],
        ),
    ] {
        let view = options.apply(profile()).unwrap();
        assert_eq!(shown(&view), expected, "{options:?}");
        if options.focus.is_none() {
            assert_eq!(view.nodes[0].count, 8);
        }
    }
    assert_eq!(ViewOptions::all().apply(profile()).unwrap(), profile());
}

#[test]
fn a_focus_on_nothing_names_what_is_near() {
    let options = ViewOptions {
        focus: Some("DUMP".into()),
        ..ViewOptions::default()
    };
    let error = options.apply(profile()).unwrap_err();
    assert_eq!(error.similar, ["dumps"]);
}

#[test]
fn a_focus_of_a_comparison_may_be_on_what_one_side_has() {
    let options = ViewOptions {
        focus: Some("Session.get".into()),
        ..ViewOptions::default()
    };
    let other = Profile {
        frames: profile()
            .frames
            .into_iter()
            .map(|frame| Frame {
                name: "x".into(),
                qualname: String::new(),
                ..frame
            })
            .collect(),
        ..profile()
    };
    let both = options.apply_to_all(vec![profile(), other.clone()]).unwrap();
    let [with, without] = &both[..] else { panic!("two") };
    assert_eq!(shown(with), ["1 get dict_get read", "7 "]);
    assert_eq!(shown(without), ["8 "]);
    assert!(options.apply_to_all(vec![other.clone(), other]).is_err());
}

#[test]
fn stacks_begin_at_the_innermost_root() {
    let is = |name: &'static str| move |frame: &Frame| frame.name == name;
    let view = from_innermost(&profile(), is("get"), is("main"));
    assert_eq!(shown(&view), ["1 get dict_get read"]);
    let view = from_innermost(&profile(), is("get"), is("dict_get"));
    assert_eq!(shown(&view), Vec::<String>::new());
    let none = from_innermost(&profile(), is("nothing"), is("read"));
    assert_eq!((shown(&none), none.nodes[0].count), (Vec::<String>::new(), 0));
}

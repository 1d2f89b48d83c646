use super::*;
use crate::build::Builder;
use crate::model::{FrameKind, Meta};
use crate::values::ValueType;

const PYTHON: &str = "libpython3.13.so.1.0";

/// A frame of a word: `a.py:f` a Python function, `lib.so:f` a native one, `?lib.so` one without a name, `[cut]`.
/// `~` represents a space.
fn frame(word: &str) -> Frame {
    let word = &*word.replace('~', " ");
    if word.starts_with('[') {
        return Frame::new(FrameKind::Truncated, word);
    }
    if let Some(module) = word.strip_prefix('?') {
        return Frame {
            kind: FrameKind::Unknown,
            ..Frame::native("[unknown]", module, 5)
        };
    }
    let (place, name) = word.rsplit_once(':').unwrap_or((PYTHON, word));
    if place.contains(".py") || place.starts_with('<') {
        Frame::python(name, name, place, 1)
    } else {
        Frame::native(name, place, 16)
    }
}

/// Stacks of the profile without interpreter frames, with their samples.
fn folded(stacks: &[&str]) -> Vec<String> {
    let mut builder = Builder::new(&[ValueType::SAMPLES]);
    for stack in stacks {
        let frames: Vec<_> = stack.split(' ').map(|word| (builder.frame(frame(word)), 0)).collect();
        builder.add(&frames, &[1]);
    }
    let profile = without_interpreter_frames(&builder.finish(Meta {
        python: "CPython 3.13.0 (x)".into(),
        ..Meta::default()
    }));
    let self_counts = profile.self_counts();
    let path = |mut at: usize| {
        let mut names = Vec::new();
        while at > 0 {
            names.insert(0, profile.frames[profile.nodes[at].frame as usize].name.clone());
            at = profile.nodes[at].parent as usize;
        }
        names
            .join(" ")
            .replace("[interpreter start]", "START")
            .replace("[thread start]", "THREAD")
    };
    let ends = (0..self_counts.len()).filter(|at| self_counts[*at] > 0);
    let mut all: Vec<_> = ends.map(|at| format!("{} {}", self_counts[at], path(at))).collect();
    all.sort();
    all
}

#[test]
fn stacks_begin_at_the_users_code() {
    let main = "python3.13:_start libc.so.6:__libc_start_main python3.13:main Py_BytesMain Py_RunMain";
    let thread = "libc.so.6:clone3 libc.so.6:start_thread";
    let start_python = "/usr/lib/python3.13/threading.py:_bootstrap /usr/lib/python3.13/threading.py:run";
    let cases: &[(&[&str], &[&str])] = &[
        // Start-up is one row, and glue goes to the caller.
        (
            &[
                &format!("{main} run_mod a.py:<module> _PyEval_Vector a.py:main"),
                &format!("{main} a.py:<module> PyObject_Call"),
            ],
            &["1 START <module>", "1 START <module> main"],
        ),
        // What start-up does before Python runs is seen, apart from start-up's own functions.
        (
            &[&format!("{main} pymain_init read_config"), main],
            &["1 START", "1 START read_config"],
        ),
        (
            &[&format!("{main} Py_FinalizeEx a.py:<module>")],
            &["1 START Py_FinalizeEx <module>"],
        ),
        // Threads of Python, and others that share their first functions.
        (
            &[
                &format!("{thread} pythread_wrapper thread_run method_vectorcall {start_python} a.py:work"),
                &format!("{thread} blas.so:server"),
                thread,
            ],
            &["1 THREAD", "1 THREAD work", "1 clone3 start_thread server"],
        ),
        // An interpreter and a C library whose functions have no names.
        (
            &[&format!(
                "?libc.so.6 ?libc-2.so ?python3.13 ?python3.13 {start_python} ?python3.13 a.py:work ?python3.13"
            )],
            &["1 THREAD work [unknown]"],
        ),
        (&["?libc.so.6 other.so:f"], &["1 [unknown] f"]),
        // A program that embeds Python keeps its own functions.
        (
            &["app:_start libc.so.6:__libc_start_main app:main app:serve PyRun_SimpleString run_mod a.py:<module>"],
            &["1 _start __libc_start_main main serve <module>"],
        ),
        // Functions that users know stay, once.
        (
            &["a.py:f cfunction_vectorcall_O builtin_sorted list_sort list_sort_impl slot_tp_richcompare a.py:__lt__"],
            &["1 f builtin_sorted list_sort __lt__"],
        ),
        (&["a.py:f _PyEval_EvalFrameDefault take_gil"], &["1 f take_gil"]),
        // An import is one row.
        (
            &[
                "a.py:f PyImport_ImportModuleLevelObject <frozen~importlib._bootstrap>:_find_and_load object_vacall \
                 <frozen~importlib._bootstrap_external>:exec_module builtin_exec b.py:<module>",
                "a.py:f PyImport_ImportModuleLevelObject <frozen~importlib._bootstrap>:_find_and_load os_stat",
            ],
            &["1 f [import] <module>", "1 f [import] os_stat"],
        ),
        // A garbage collection is one row below what began it, above the finalizers and callbacks that it calls.
        (
            &[
                "a.py:f _Py_HandlePending _Py_RunGC gc_collect_main subtract_refs dict_traverse visit_decref",
                "a.py:f _Py_HandlePending _Py_RunGC gc_collect_main subtype_dealloc slot_tp_finalize a.py:__del__ \
                 list_sort",
                "a.py:f list_append _PyObject_GC_New gc_collect_main lib.so:traverse",
                "a.py:f cfunction_vectorcall_O gc_collect gc_collect_impl gc_collect_main invoke_gc_callback a.py:g gc_collect \
                 gc_collect_main libc.so.6:free",
                "gc_collect_main",
            ],
            &[
                "1 [garbage collection]",
                "1 f [garbage collection]",
                "1 f [garbage collection] __del__ list_sort",
                "1 f [garbage collection] g [garbage collection] free",
                "1 f list_append _PyObject_GC_New [garbage collection] traverse",
            ],
        ),
        // Incomplete stacks keep saying so.
        (
            &["[cut] _PyEval_Vector a.py:f PyObject_Call a.py:g"],
            &["1 [cut] START f g"],
        ),
        (&["[cut] lib.so:f"], &["1 [cut] f"]),
    ];
    for (stacks, expected) in cases {
        assert_eq!(folded(stacks), *expected, "{stacks:?}");
    }
}

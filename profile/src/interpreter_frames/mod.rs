//! Which functions are the interpreter's way from one function to another: its start-up, and the glue between a call and
//! the function that it calls. [`super::folded::without_interpreter_frames`] takes them out of stacks.
//!
//! `table.rs` is the only place that names them. A function that a user calls by name stays, even in a file of glue: see
//! [`KNOWN_BY_NAME`].

use super::model::{Frame, FrameKind};
pub use table::{FunctionNames, GLUE_SOURCES, IMPORT_FILES, KNOWN_BY_NAME, NATIVE, PYTHON_START, Role};

mod table;

/// Whether a name is one of a table's, in which `*` represents any text at the front or the end.
pub fn matches_name(name: &str, pattern: &str) -> bool {
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(rest), Some(_)) => name.contains(rest.trim_end_matches('*')),
        (Some(end), None) => name.ends_with(end),
        (None, Some(start)) => name.starts_with(start),
        (None, None) => name == pattern,
    }
}

/// Whether the file is a Python interpreter and holds nothing else: `python3.13`, `libpython3.13.so.1.0`.
pub fn is_interpreter_file(module: &str) -> bool {
    let rest = module.strip_prefix("lib").unwrap_or(module);
    let Some(version) = rest.strip_prefix("python") else {
        return false;
    };
    let version = version.split(".so").next().unwrap_or(version);
    let version = version.strip_suffix(".bin").unwrap_or(version);
    let is_part_of_version = |c: char| c.is_ascii_digit() || c == '.' || "dmtu".contains(c);
    version.chars().all(is_part_of_version)
}

/// The versions of CPython in the text of a profile's `python` (`CPython 3.13.0 (libpython3.13.so.1.0)`, several with
/// commas between), as 3.N; none if it names none.
pub fn versions(python: &str) -> Vec<u8> {
    let mut found = Vec::new();
    for after in python.split("CPython 3.").skip(1) {
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        if let Ok(minor) = digits.parse()
            && !found.contains(&minor)
        {
            found.push(minor);
        }
    }
    found
}

/// Says what frames of a profile are.
pub struct Roles {
    /// Of CPython, as 3.N; empty: any.
    versions: Vec<u8>,
    /// Files that hold an interpreter and other code: programs that embed it.
    embedding: Vec<String>,
}

impl Roles {
    /// For the frames of a profile, and the text of its interpreters' versions.
    pub fn new(frames: &[Frame], python: &str) -> Roles {
        let runs_bytecode = |frame: &&Frame| {
            let is_native = matches!(frame.kind, FrameKind::Native | FrameKind::Inlined);
            let is_loop = frame.name.starts_with("_PyEval_EvalFrameDefault") || frame.name == "PyEval_EvalCode";
            is_native && is_loop && !is_interpreter_file(&frame.module)
        };
        let mut embedding: Vec<String> = frames.iter().filter(runs_bytecode).map(|f| f.module.clone()).collect();
        embedding.sort();
        embedding.dedup();
        Roles {
            versions: versions(python),
            embedding,
        }
    }

    /// The role of a frame.
    pub fn of(&self, frame: &Frame) -> Role {
        match frame.kind {
            FrameKind::Python => python_role(frame),
            FrameKind::Native | FrameKind::Inlined => self.native_role(frame),
            FrameKind::Unknown if is_interpreter_file(&frame.module) => Role::Nameless,
            FrameKind::Unknown if is_c_library(&frame.module) => Role::Outer,
            _ => Role::Other,
        }
    }

    fn native_role(&self, frame: &Frame) -> Role {
        let is_alone = is_interpreter_file(&frame.module);
        let holds_interpreter = is_alone || self.embedding.contains(&frame.module);
        let name = &*frame.name;
        if holds_interpreter && KNOWN_BY_NAME.iter().any(|pattern| matches_name(name, pattern)) {
            return Role::Interpreter;
        }
        // Elsewhere only names that no other program has; `call_function` may be any program's.
        let is_ours =
            holds_interpreter || name.starts_with("Py") || name.starts_with("_Py") || name.starts_with("__Pyx");
        for row in NATIVE {
            let is_version = |minor: &u8| (row.since..=row.until).contains(minor);
            if !self.versions.is_empty() && !self.versions.iter().any(is_version) {
                continue;
            }
            // A program that embeds the interpreter may have a function of its own that is called `collect`.
            if row.role == Role::Collection && !is_alone && name.starts_with("collect") {
                continue;
            }
            if (is_ours || row.role == Role::Outer) && row.names.iter().any(|pattern| matches_name(name, pattern)) {
                return row.role;
            }
        }
        let from = |files: &[&str]| files.iter().any(|file| frame.source.ends_with(file));
        match () {
            () if holds_interpreter && from(GLUE_SOURCES) => Role::Glue,
            // Macros and small functions of headers, inlined.
            () if holds_interpreter && frame.kind == FrameKind::Inlined && frame.source.contains("/Include/") => {
                Role::Glue
            }
            () if is_alone && name.is_empty() => Role::Nameless,
            () if is_alone => Role::Interpreter,
            () => Role::Other,
        }
    }
}

fn python_role(frame: &Frame) -> Role {
    if IMPORT_FILES.contains(&&*frame.filename) {
        return Role::Import;
    }
    let file = frame.filename.rsplit('/').next().unwrap_or_default();
    let is_standard = file.starts_with('<') || super::category::is_standard_library(&frame.filename);
    let mut rows = PYTHON_START.iter().filter(|_| is_standard);
    let found = rows.find(|(name, _, functions)| *name == file && functions.contains(&&*frame.name));
    found.map_or(Role::Other, |(_, role, _)| *role)
}

fn is_c_library(module: &str) -> bool {
    ["libc.so", "libc-", "libc.musl", "libpthread", "ld-linux", "ld-musl"]
        .iter()
        .any(|name| module.starts_with(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn native(name: &str, module: &str, source: &str) -> Frame {
        Frame {
            source: source.into(),
            ..Frame::native(name, module, 16)
        }
    }

    #[test]
    fn functions_have_roles() {
        let python = "libpython3.13.so.1.0";
        let inlined = Frame {
            kind: FrameKind::Inlined,
            ..native("Py_DECREF", python, "/b/./Include/object.h")
        };
        let roles = Roles::new(&[native("_PyEval_EvalFrameDefault", "app", "")], "CPython 3.13.0 (x)");
        for (frame, role) in [
            (native("_start", "python3.13", ""), Role::Outer),
            (native("main", "app", ""), Role::Outer),
            (native("pymain_main", python, ""), Role::Start),
            (native("PyRun_SimpleString", "app", ""), Role::Start),
            (native("pythread_wrapper", python, ""), Role::ThreadStart),
            (native("_PyObject_VectorcallTstate", "_json.so", ""), Role::Glue),
            (native("PyObject_VectorcallMethod", python, ""), Role::Glue),
            (native("method_vectorcall_O", python, ""), Role::Glue),
            (native("slot_tp_call", python, ""), Role::Glue),
            (native("slot_tp_call", "app", ""), Role::Glue),
            (native("slot_tp_call", "other.so", ""), Role::Other),
            (native("brand_new", python, "/b/Objects/call.c"), Role::Glue),
            (native("brand_new", "other.so", "/b/Objects/call.c"), Role::Other),
            (inlined, Role::Glue),
            (native("take_gil", python, "/b/Python/ceval_gil.c"), Role::Interpreter),
            (
                native("mappingproxy_get", python, "/b/Objects/descrobject.c"),
                Role::Interpreter,
            ),
            (native("list_sort", python, ""), Role::Interpreter),
            (native("builtin_sorted", python, ""), Role::Interpreter),
            (native("_sre_SRE_Pattern_sub", python, ""), Role::Interpreter),
            (native("Py_FinalizeEx", python, ""), Role::End),
            (native("gc_collect_main", python, ""), Role::Collection),
            (native("gc_collect_main", "app", ""), Role::Collection),
            (native("gc_collect_main", "other.so", ""), Role::Other),
            (native("_Py_RunGC", python, ""), Role::Collection),
            (native("_PyGC_CollectNoFail", python, ""), Role::Collection),
            (native("gc_is_tracked", python, ""), Role::Interpreter),
            (native("_PyObject_GC_New", python, ""), Role::Interpreter),
            // Not in 3.13.
            (native("collect", python, ""), Role::Interpreter),
            // In 3.13 no function of the interpreter has this name.
            (native("t_bootstrap", python, ""), Role::Interpreter),
            (
                Frame::python("_find_and_load", "", "<frozen importlib._bootstrap>", 1),
                Role::Import,
            ),
            (Frame::python("_run_code", "", "<frozen runpy>", 1), Role::Start),
            (
                Frame::python("run", "", "/usr/lib/python3.13/threading.py", 1),
                Role::ThreadStart,
            ),
            (Frame::python("run", "", "/home/me/threading.py", 1), Role::Other),
        ] {
            assert_eq!(roles.of(&frame), role, "{frame:?}");
        }
        let roles = Roles::new(&[native("_PyEval_EvalFrameDefault", "app", "")], "CPython 3.8.0 (x)");
        assert_eq!(
            roles.of(&native("collect", "libpython3.8.so.1.0", "")),
            Role::Collection
        );
        assert_eq!(roles.of(&native("collect", "app", "")), Role::Other);
    }

    #[test]
    fn versions_are_found_in_text() {
        assert_eq!(versions("CPython 3.13.0 (libpython3.13.so.1.0)"), [13]);
        assert_eq!(versions("CPython 3.8.1 (a), CPython 3.11 (b)"), [8, 11]);
        assert_eq!(versions(""), [0; 0]);
        for (module, is) in [
            ("python3.13", true),
            ("python", true),
            ("python3.14.bin", true),
            ("python3.13t", true),
            ("libpython3.6m.so.1.0", true),
            ("python_parser.so", false),
            ("libpython_helper.so", false),
            ("uwsgi", false),
        ] {
            assert_eq!(is_interpreter_file(module), is, "{module}");
        }
    }

    #[test]
    fn patterns_have_a_star_at_an_end() {
        for row in NATIVE {
            assert!(row.since <= row.until);
            for name in row.names {
                assert!(!name.trim_matches('*').contains('*') && name.len() > 3, "{name}");
            }
        }
    }
}

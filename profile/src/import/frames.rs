//! Functions as other tools name them: kinds of frames from names, files and modules.

use std::borrow::Cow;

use crate::escape;
use crate::model::{Frame, FrameKind};

/// The module of kernel code where a format does not name the kernel's module.
pub const KERNEL: &str = "[kernel]";

/// Extensions of source files of languages that are compiled to native code, or run by other interpreters than Python's.
const SOURCE_EXTENSIONS: &[&str] = &[
    "asm", "c", "c++", "cc", "cpp", "cs", "cu", "cuh", "cxx", "d", "dart", "erl", "ex", "exs", "f", "f90", "f95", "go",
    "h", "hh", "hpp", "hs", "hxx", "inc", "inl", "java", "jl", "js", "jsx", "kt", "lua", "m", "mjs", "ml", "mm", "nim",
    "php", "pl", "pxd", "pxi", "pyx", "rb", "rs", "s", "scala", "swift", "tcc", "ts", "tsx", "zig",
];

/// What follows the last slash of a path.
pub fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether a file is Python source, or what Python calls code without a file: `<string>`, `<frozen importlib._bootstrap>`.
pub fn is_python(file: &str) -> bool {
    is_bracketed(file) || [".py", ".pyw", ".ipynb"].iter().any(|ending| file.ends_with(ending))
}

/// Whether it is in angle brackets, as Python names what has no name.
fn is_bracketed(text: &str) -> bool {
    let inner = text.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
    inner.is_some_and(|inner| !inner.is_empty() && !inner.contains(['<', '>']))
}

/// Whether a name is made of Python's identifiers: `Job.run.<locals>.<lambda>`.
fn is_qualified(name: &str) -> bool {
    let is_identifier = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_');
    name.split('.').all(|part| is_identifier(part) || is_bracketed(part))
}

/// Whether a file is source of another language.
pub fn is_source(file: &str) -> bool {
    let extension = base_name(file).rsplit_once('.').map_or("", |(_, extension)| extension);
    SOURCE_EXTENSIONS.contains(&extension.to_ascii_lowercase().as_str())
}

/// A Python function whose definition is at a line; `name` may be qualified.
pub fn python_defined(name: &str, file: &str, first_line: u32) -> Frame {
    let name = named(name);
    // `Job.run.<locals>.work` is `work`, and `<lambda>` is one, too.
    match name.rsplit_once('.') {
        Some((_, last)) if is_qualified(name) => Frame::python(last, name, file, first_line),
        _ => Frame::python(name, "", file, first_line),
    }
}

/// A Python function whose definition is not stated. Its name stays as it is: it is all that tells it from others in the file.
pub fn python(name: &str, file: &str) -> Frame {
    Frame::python(named(name), "", file, 0)
}

/// A native function of a source file, a module, or both; any of them may be unknown.
pub fn native(name: &str, source: &str, module: &str) -> Frame {
    let module = match module {
        // Functions of one name in two files stay apart.
        "" => base_name(source),
        module => base_name(module),
    };
    if kernel_module(module).is_some() {
        return kernel(name, module);
    }
    Frame {
        source: source.into(),
        ..Frame::native(named(name), module, 0)
    }
}

/// A function of the kernel, or of a module of it: those are in square brackets.
pub fn kernel(name: &str, module: &str) -> Frame {
    let module = match kernel_module(module) {
        None if module.starts_with('[') && module != "[unknown]" => module,
        _ => KERNEL,
    };
    Frame {
        module: module.into(),
        ..Frame::new(FrameKind::Kernel, named(name))
    }
}

/// A function of a file of any kind, whose definition is not stated: source, or else a module; or of none.
pub fn in_file(name: &str, file: &str) -> Frame {
    match special(name) {
        Some(frame) => frame,
        None if is_python(file) => python(name, file),
        None if is_source(file) => native(name, file, ""),
        None => native(name, "", file),
    }
}

/// The module of kernel code, by how perf and we name it; `None`: it is not the kernel's.
fn kernel_module(module: &str) -> Option<&str> {
    match module {
        KERNEL => Some(KERNEL),
        _ if module.starts_with("[kernel.") || module.starts_with("[guest.kernel") => Some(KERNEL),
        _ => None,
    }
}

/// What is no function, by its name in square brackets, as we write it: reasons of incomplete stacks, tasks, workers, states
/// and addresses without a symbol.
pub fn special(name: &str) -> Option<Frame> {
    let inner = |start: &str, end: &str| name.strip_prefix(start)?.strip_suffix(end);
    if let Some(place) = inner("[unknown] (", ")") {
        let (module, address) = place.rsplit_once('+').unwrap_or(("", place));
        let address = hexadecimal(address.strip_prefix("0x")?)?;
        return Some(Frame {
            module: module.into(),
            address,
            ..Frame::new(FrameKind::Unknown, "[unknown]")
        });
    }
    let kind = match name {
        "[runnable]" => FrameKind::State,
        _ if inner("[truncated: ", "]").is_some() => FrameKind::Truncated,
        _ if inner("[waiting: ", "]").is_some() => FrameKind::State,
        _ if inner("[task: ", "]").is_some() => FrameKind::Task,
        _ if inner("[worker thread ", "]").is_some() => FrameKind::Worker,
        _ => return None,
    };
    Some(Frame::new(kind, name))
}

/// A number in hexadecimal digits, and nothing else.
pub fn hexadecimal(digits: &str) -> Option<u64> {
    let number = u64::from_str_radix(digits, 16).ok();
    number.filter(|_| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// A name without what stands for an empty one.
pub fn named(name: &str) -> &str {
    if name == "[unnamed]" { "" } else { name }
}

/// A text, with bytes that are not UTF-8 as in names of Python.
pub fn text(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(escape::name_of_utf8(bytes)),
    }
}

/// The text and the place behind it in brackets, as in `name (place)`. Brackets within either are balanced, as a rule.
pub fn split_place(text: &str) -> Option<(&str, &str)> {
    let inside = text.strip_suffix(')')?;
    let mut depth = 1;
    let balanced = inside.char_indices().rev().find_map(|(at, c)| {
        depth += match c {
            ')' => 1,
            '(' => -1,
            _ => 0,
        };
        (depth == 0).then_some(at)
    });
    let at = balanced.or_else(|| inside.rfind(" (").map(|space| space + 1))?;
    let name = inside.get(..at)?.strip_suffix(' ')?;
    Some((name, inside.get(at + 1..)?))
}

/// A file and the line behind it, as in `/a/b.py:12`.
pub fn split_line(place: &str) -> Option<(&str, u32)> {
    let (file, line) = place.rsplit_once(':')?;
    let is_number = !line.is_empty() && line.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && !file.is_empty()).then_some(())?;
    Some((file, line.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::frame_text;

    #[test]
    fn texts_of_frames_are_read_as_they_were_written() {
        for frame in [
            Frame::new(FrameKind::Truncated, "[truncated: stack page not present]"),
            Frame::new(FrameKind::Task, "[task: Task-1 (a)]"),
            Frame::new(FrameKind::Worker, "[worker thread OpenBLAS]"),
            Frame::new(FrameKind::State, "[waiting: read pipe]"),
            Frame::new(FrameKind::State, "[runnable]"),
            Frame {
                address: 0x1f00,
                module: "lib c++.so".into(),
                ..Frame::new(FrameKind::Unknown, "[unknown]")
            },
            Frame {
                address: 0x7f00_0000,
                ..Frame::new(FrameKind::Unknown, "[unknown]")
            },
        ] {
            assert_eq!(special(&frame_text(&frame)), Some(frame));
        }
        for name in ["[unknown]", "f", "[import]", "[unknown] (libc.so.6)"] {
            assert_eq!(special(name), None, "{name}");
        }
    }

    #[test]
    fn places_follow_names() {
        for (text, expected) in [
            ("f (/a.py:3)", Some(("f", "/a.py:3"))),
            ("less<a, b>(a, b) (lib.so)", Some(("less<a, b>(a, b)", "lib.so"))),
            ("f (/a (copy)/b.py:3)", Some(("f", "/a (copy)/b.py:3"))),
            ("f(int)", None),
            ("f(void (*)(int))", None),
            ("operator() (x.cc:1)", Some(("operator()", "x.cc:1"))),
            ("f (/a)b.py:3)", Some(("f", "/a)b.py:3"))),
            ("()", None),
            (")", None),
        ] {
            assert_eq!(split_place(text), expected, "{text}");
        }
        assert_eq!(split_line("C:\\a.py:12"), Some(("C:\\a.py", 12)));
        for text in ["a.py", "a.py:", ":3", "a.py:x", "a.py:99999999999"] {
            assert_eq!(split_line(text), None, "{text}");
        }
    }

    #[test]
    fn files_tell_the_kind() {
        for (file, kind, module) in [
            ("/app/a.py", FrameKind::Python, ""),
            ("<frozen importlib._bootstrap>", FrameKind::Python, ""),
            ("/src/a.rs", FrameKind::Native, "a.rs"),
            ("/usr/lib/libc.so.6", FrameKind::Native, "libc.so.6"),
            ("[kernel.kallsyms]", FrameKind::Kernel, KERNEL),
            ("", FrameKind::Native, ""),
        ] {
            let frame = in_file("f", file);
            assert_eq!((frame.kind, &*frame.module), (kind, module), "{file}");
        }
        let frame = python_defined("Job.run.<locals>.<lambda>", "a.py", 3);
        assert_eq!(
            (&*frame.name, &*frame.qualname),
            ("<lambda>", "Job.run.<locals>.<lambda>")
        );
    }
}

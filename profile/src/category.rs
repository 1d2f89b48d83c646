//! Whose code a frame is, in the terms of a Python developer: own code, libraries, the standard library, the
//! interpreter, its garbage collections, extensions, C libraries, the kernel.

use std::borrow::Cow;
use std::collections::HashMap;

use super::interpreter_frames::is_interpreter_file;
use super::model::{Frame, FrameKind, Profile};
use super::pstats::BUILTIN;
use super::standard_modules::is_standard_module;

/// The row for the interpreter's start-up, above `<module>`.
pub const START: &str = "[interpreter start]";
/// The same in a thread that Python started.
pub const THREAD_START: &str = "[thread start]";
/// The row for a garbage collection of the interpreter, below the function in which it began.
pub const GARBAGE_COLLECTION: &str = "[garbage collection]";
/// The row for hidden functions of the standard library that nothing else called.
pub const STANDARD_ROW: &str = "[standard library]";
/// The same for those of libraries.
pub const LIBRARIES_ROW: &str = "[libraries]";
/// The same for native code.
pub const NATIVE_ROW: &str = "[native code]";

/// Whose code it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Python code in neither of the two below.
    Yours,
    /// Python code below a `site-packages` or `dist-packages` directory.
    Library,
    /// Modules that come with Python, those written in C too.
    Standard,
    /// The interpreter with the types and modules that it has built in.
    Interpreter,
    /// Garbage collections of the interpreter.
    Collection,
    /// Native code that Python imports, and libraries that come with it.
    Extension,
    /// Other native code in a file.
    CLibrary,
    /// Code of the operating system's kernel.
    Kernel,
    /// No code: what a thread does instead of running.
    Waiting,
    /// Code in no file, and incomplete stacks.
    Unknown,
}

impl Category {
    /// All there are, in the order of their declaration.
    pub const ALL: [Category; 10] = [
        Category::Yours,
        Category::Library,
        Category::Standard,
        Category::Interpreter,
        Category::Collection,
        Category::Extension,
        Category::CLibrary,
        Category::Kernel,
        Category::Waiting,
        Category::Unknown,
    ];

    /// As people read it; of libraries and extensions without their names.
    pub fn name(self) -> &'static str {
        match self {
            Category::Yours => "your code",
            Category::Library => "library",
            Category::Standard => "standard library",
            Category::Interpreter => "interpreter",
            Category::Collection => "garbage collection",
            Category::Extension => "extension",
            Category::CLibrary => "C library",
            Category::Kernel => "kernel",
            Category::Waiting => "waiting",
            Category::Unknown => "unknown",
        }
    }
}

/// Says of frames of a profile whose code they are.
pub struct Categories<'a> {
    /// File name -> path of the files that the profile knows.
    paths: HashMap<&'a str, &'a str>,
}

impl<'a> Categories<'a> {
    /// For the frames of a profile.
    pub fn new(profile: &'a Profile) -> Categories<'a> {
        let modules = profile.meta.modules.iter();
        let paths = modules.map(|module| (file_name(&module.path), &*module.path));
        Categories { paths: paths.collect() }
    }

    /// Whose code a frame is, and the name of the library or extension, empty for all else. `None` for frames that are
    /// no code, but what ran it.
    pub fn of<'f>(&self, frame: &'f Frame) -> Option<(Category, Cow<'f, str>)>
    where
        'a: 'f,
    {
        let plain = |category| Some((category, Cow::Borrowed("")));
        match frame.kind {
            FrameKind::Root | FrameKind::Process | FrameKind::Thread | FrameKind::Task | FrameKind::Worker => None,
            FrameKind::Python => match package(&frame.filename) {
                Some(package) => Some((Category::Library, Cow::Borrowed(package))),
                None if is_standard_library(&frame.filename) => plain(Category::Standard),
                None => plain(Category::Yours),
            },
            FrameKind::Kernel => plain(Category::Kernel),
            FrameKind::State => plain(Category::Waiting),
            FrameKind::Truncated => plain(Category::Unknown),
            // Rows that represent what a view leaves out.
            FrameKind::Native if frame.module.is_empty() => plain(match &*frame.name {
                START | THREAD_START => Category::Interpreter,
                GARBAGE_COLLECTION => Category::Collection,
                STANDARD_ROW => Category::Standard,
                LIBRARIES_ROW => Category::Library,
                _ => Category::Unknown,
            }),
            _ if frame.module.is_empty() => plain(Category::Unknown),
            _ if frame.module == BUILTIN => match builtin_module(&frame.name) {
                "" | "builtins" => plain(Category::Interpreter),
                module if is_standard_module(module) => plain(Category::Standard),
                module => Some((Category::Extension, Cow::Borrowed(module))),
            },
            _ if is_interpreter_file(&frame.module) => plain(Category::Interpreter),
            _ => {
                let path = self.paths.get(&*frame.module).copied().unwrap_or(&frame.module);
                match package(path) {
                    Some(package) => Some((Category::Extension, Cow::Borrowed(package))),
                    None if path.contains("/lib-dynload/") => plain(Category::Standard),
                    None if is_extension(&frame.module) => {
                        let name = frame.module.split('.').next().unwrap_or(&frame.module);
                        Some((Category::Extension, Cow::Borrowed(name)))
                    }
                    None => plain(Category::CLibrary),
                }
            }
        }
    }

    /// Whether a native frame is in an extension that no package installed.
    pub fn is_own_extension(&self, frame: &Frame) -> bool {
        let path = self.paths.get(&*frame.module).copied().unwrap_or(&frame.module);
        is_extension(&frame.module) && package(path).is_none()
    }

    /// As [`Categories::of`], in one text: `your code`, `library requests`, `extension numpy`.
    pub fn label(&self, frame: &Frame) -> Option<String> {
        let (category, name) = self.of(frame)?;
        Some(match &*name {
            "" => category.name().to_string(),
            name => format!("{} {name}", category.name()),
        })
    }
}

/// The top-level module of a function written in C, by its description: `<built-in method zlib.compress>`, `<method 'append'
/// of 'collections.deque' objects>`, `<slot wrapper '__add__' of 'int' objects>`. Empty where there is none.
fn builtin_module(description: &str) -> &str {
    let text = description.trim_start_matches('<').trim_end_matches('>');
    let name = match text.split_once("' of '") {
        Some((_, of)) => of.split('\'').next().unwrap_or_default(),
        None => text.rsplit(' ').next().unwrap_or_default(),
    };
    name.split_once('.').map_or("", |(module, _)| module)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether a Python file comes with the interpreter: `/usr/lib/python3.11/json/decoder.py`, `<frozen importlib>`.
pub fn is_standard_library(path: &str) -> bool {
    if path.starts_with("<frozen ") {
        return true;
    }
    let Some((_, below)) = path
        .split_once("/lib/python")
        .or_else(|| path.split_once("/lib64/python"))
    else {
        return false;
    };
    // `python3.11/`, `python3.13t/`, `python311.zip/`; not `/usr/lib/python-apps/`.
    let Some((version, _)) = below.split_once('/') else {
        return false;
    };
    version.starts_with('3') && package(path).is_none()
}

/// The package that installed a file: what follows `site-packages` or `dist-packages` in its path.
pub fn package(path: &str) -> Option<&str> {
    let after = |directory| path.rsplit_once(directory).map(|(_, rest)| rest);
    let below = after("/site-packages/").or_else(|| after("/dist-packages/"))?;
    let first = below.split('/').next().unwrap_or(below);
    // `six.py`, `_cffi_backend.cpython-311.so`, `numpy.libs`, `Foo-1.2-py3.8.egg`.
    let name = first.split(['.', '-']).next().unwrap_or(first);
    Some(if name.is_empty() { first } else { name })
}

/// Whether the name of a native file is one that Python imports.
fn is_extension(module: &str) -> bool {
    module.contains(".cpython-") || module.ends_with(".abi3.so") || module.contains(".pypy")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Meta, ModuleMeta};

    #[test]
    fn code_belongs_to_a_category() {
        let module = |path: &str| ModuleMeta {
            path: path.into(),
            ..ModuleMeta::default()
        };
        let meta = Meta {
            modules: vec![
                module("/v/lib/python3.11/site-packages/numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so"),
                module("/v/lib/python3.11/site-packages/numpy.libs/libopenblas.so"),
                module("/usr/lib/python3.11/lib-dynload/_json.cpython-311-x86_64-linux-gnu.so"),
                module("/usr/lib/x86_64-linux-gnu/libc.so.6"),
            ],
            ..Meta::default()
        };
        let profile = Profile {
            meta,
            ..Profile::default()
        };
        let python = |path: &str| Frame::python("f", "f", path, 1);
        let native = |module: &str| Frame::native("f", module, 1);
        let builtin = |name: &str| Frame::native(name, BUILTIN, 0);
        for (frame, expected) in [
            (python("demo.py"), "your code"),
            (python("<stdin>"), "your code"),
            (python("/usr/lib/python-apps/tool.py"), "your code"),
            (python("/usr/lib/python3.11/json/encoder.py"), "standard library"),
            (python("<frozen importlib._bootstrap>"), "standard library"),
            (python("/usr/lib/python3/dist-packages/apt/cache.py"), "library apt"),
            (python("/v/lib/python3.11/site-packages/six.py"), "library six"),
            (native("libpython3.13.so.1.0"), "interpreter"),
            (native("python3.11"), "interpreter"),
            (
                native("_multiarray_umath.cpython-311-x86_64-linux-gnu.so"),
                "extension numpy",
            ),
            (native("libopenblas.so"), "extension numpy"),
            (native("_json.cpython-311-x86_64-linux-gnu.so"), "standard library"),
            (native("fast.cpython-313-x86_64-linux-gnu.so"), "extension fast"),
            (native("libc.so.6"), "C library"),
            (builtin("<built-in method builtins.len>"), "interpreter"),
            (builtin("<method 'upper' of 'str' objects>"), "interpreter"),
            (builtin("<slot wrapper '__add__' of 'int' objects>"), "interpreter"),
            (builtin("<built-in method zlib.compress>"), "standard library"),
            (
                builtin("<method 'append' of 'collections.deque' objects>"),
                "standard library",
            ),
            (builtin("<built-in method numpy.array>"), "extension numpy"),
            (builtin("<method 'sum' of 'numpy.ndarray' objects>"), "extension numpy"),
            (Frame::new(FrameKind::Kernel, "read"), "kernel"),
            (Frame::new(FrameKind::State, "[waiting: gil]"), "waiting"),
            (Frame::new(FrameKind::Unknown, "[unknown]"), "unknown"),
            (Frame::new(FrameKind::Native, "[interpreter start]"), "interpreter"),
            (
                Frame::new(FrameKind::Native, "[garbage collection]"),
                "garbage collection",
            ),
        ] {
            assert_eq!(Categories::new(&profile).label(&frame).unwrap(), expected, "{frame:?}");
        }
        assert_eq!(
            Categories::new(&profile).label(&Frame::new(FrameKind::Thread, "t")),
            None
        );
    }
}

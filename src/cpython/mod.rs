//! CPython: which file is the interpreter, the layout of its structures, and the contents of its frames and code
//! objects.
//!
//! Knows no backend and no native frame. One [`Runtime`] per file; an [`Interpreter`] per process.

use crate::arch::{self, DESCRIPTOR_SIZE, PTHREAD_SPECIFIC};
use crate::cpython_layout::{Interpreter, Layout, ThreadDescriptor, ThreadStateLocation, Tls};
use crate::process::modules::Module;
use versions::VersionFacts;

mod code_copy;
mod code_epoch;
pub mod code_object;
mod cold_parts;
mod debug_offsets;
pub mod dict;
pub mod frame_groups;
pub mod frame_walk;
pub mod gil;
pub mod heap_layout;
pub mod line_table;
pub mod object_layout;
mod own_states;
pub mod repr;
pub mod script_request;
pub mod spans;
pub mod strings;
pub mod tasks;
pub mod thread_names;
mod thread_state_tls;
pub mod thread_states;
pub mod validate;
// Public for fuzz/ and benches/.
#[doc(hidden)]
pub mod versions;

/// An ELF file that contains a CPython interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// (major, minor, micro); micro is 255 where it is unknown.
    pub version: (u8, u8, u8),
    /// What is particular to this version; `None` if it is unknown.
    pub facts: Option<&'static VersionFacts>,
    /// svma of `_PyRuntime`; before 3.7, just below the variables that later became its members.
    pub runtime: u64,
    /// `None`: an unsupported version.
    pub layout: Option<Layout>,
    /// Where threads keep their own thread state.
    pub thread_state: ThreadStateLocation,
    /// Built without the global interpreter lock.
    pub free_threaded: bool,
    /// Newer than all known versions: read like the newest of them, if [`validate`] confirms that this is right.
    pub newer_than_known: bool,
    /// svma ranges of the bytecode loop, including parts that compilers split off.
    pub eval: Vec<(u64, u64)>,
}

impl Runtime {
    /// Whether this file has the bytecode loop at this svma.
    pub fn is_eval(&self, svma: u64) -> bool {
        self.eval.iter().any(|(start, end)| (*start..*end).contains(&svma))
    }

    /// `3.11.7`
    pub fn version_text(&self) -> String {
        let t = if self.free_threaded { "t" } else { "" };
        match self.version {
            (major, minor, 255) => format!("{major}.{minor}{t}"),
            (major, minor, micro) => format!("{major}.{minor}.{micro}{t}"),
        }
    }
}

/// The interpreter in this file, if it is one. (`_PyRuntime` is exported since 3.7, by shared libraries and static
/// executables; in a file without symbols it is the section `.PyRuntime` since 3.13. `_PyThreadState_Current` was
/// exported up to 3.6.)
pub fn find_runtime(module: &Module) -> Option<Runtime> {
    let symbol = module.exports("_PyRuntime");
    let section = || {
        let at = module.section(".PyRuntime")?.svma;
        debug_offsets::head(module, at).map(|_| at)
    };
    let Some(runtime) = symbol.or_else(section) else {
        return before_runtime(module);
    };
    let head = debug_offsets::head(module, runtime);
    let version = version(module, head)?;
    let free_threaded = head.is_some_and(|(_, free_threaded)| free_threaded);
    let facts = versions::find(version);
    let layout = versions::nearest(version).and_then(|nearest| {
        let row = nearest.layout(version.2, free_threaded)?;
        match head {
            Some(_) => debug_offsets::published(module, runtime, nearest.debug_offsets.as_ref()?, row),
            None => Some(row),
        }
    });
    let layout = layout.map(|layout| match facts {
        // Validation would not notice if this offset was wrong.
        None => Layout {
            interp_generation: 0,
            ..layout
        },
        Some(facts) => code_epoch::found(module, facts, runtime, layout),
    });
    let thread_state = match layout {
        Some(l) if l.runtime_key == 0 => thread_state_tls::variable(module, runtime),
        _ => ThreadStateLocation::Key,
    };
    Some(Runtime {
        version,
        facts,
        runtime,
        layout,
        thread_state,
        free_threaded,
        newer_than_known: versions::is_newer(version),
        eval: eval(module),
    })
}

/// CPython 3.6: the later members of `_PyRuntime` are separate variables, of which only one is exported
/// (Python/pystate.c, v3.6.15).
fn before_runtime(module: &Module) -> Option<Runtime> {
    let current = module.exports("_PyThreadState_Current")?;
    let version = version(module, None)?;
    let named = |wanted: &str| {
        let found = module.symbols_named(&|name| name == wanted.as_bytes());
        found.first().map(|(_, at, _)| *at)
    };
    let (key, head) = (named("autoTLSkey"), named("interp_head"));
    // Below the lowest variable, so that no offset is zero, which means absent.
    let runtime = key.into_iter().chain(head).chain([current]).min()?.checked_sub(8)?;
    let offset = |at: Option<u64>| at.map_or(Some(0), |at| u32::try_from(at - runtime).ok());
    let facts = versions::find(version);
    let row = facts.and_then(|facts| facts.layout(version.2, false));
    Some(Runtime {
        version,
        facts,
        runtime,
        layout: match row {
            Some(row) => Some(Layout {
                runtime_key: offset(key)?,
                runtime_current: offset(Some(current))?,
                runtime_interpreters: offset(head)?,
                ..row
            }),
            None => None,
        },
        thread_state: if key.is_some() {
            ThreadStateLocation::Key
        } else {
            ThreadStateLocation::InterpreterList
        },
        free_threaded: false,
        newer_than_known: false,
        eval: eval(module),
    })
}

/// Ranges of the bytecode loop.
fn eval(module: &Module) -> Vec<(u64, u64)> {
    let eval = module.symbols_named(&is_eval_name);
    let eval = eval.into_iter().filter(|(_, _, size)| *size > 0);
    let mut eval: Vec<_> = eval.map(|(_, at, size)| (at, at.saturating_add(size))).collect();
    if let [(start, _)] = eval[..] {
        eval.extend(cold_parts::parts(module, start));
    }
    eval
}

/// `_PyEval_EvalFrameDefault` and the parts that compilers split off it (`.cold`, `.part.0`, `.lto_priv.0` ...).
fn is_eval_name(name: &[u8]) -> bool {
    name.strip_prefix(b"_PyEval_EvalFrameDefault")
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

/// `head`: the first words of a runtime that publishes its offsets.
fn version(module: &Module, head: Option<(u64, bool)>) -> Option<(u8, u8, u8)> {
    let unpack = |hex: u64| ((hex >> 24) as u8, (hex >> 16) as u8, (hex >> 8) as u8);
    if let Some((hex, _)) = head {
        return Some(unpack(hex));
    }
    // 3.11: Py_Version (Python/getversion.c)
    if let Some(at) = module.exports("Py_Version")
        && let Some(hex) = module.read_image(at, 8)
    {
        return Some(unpack(u64::from_le_bytes(hex.try_into().ok()?)));
    }
    // Older: the literal PY_VERSION, between two NULs in .rodata.
    let literal = module.section(".rodata").and_then(|s| version_literal(&s.bytes));
    literal.or_else(|| version_of_name(&module.name()))
}

/// Finds `\0` `3.8.18` `\0` for versions without a better source.
fn version_literal(rodata: &[u8]) -> Option<(u8, u8, u8)> {
    rodata
        .split(|c| *c == 0)
        .filter(|s| (5..=9).contains(&s.len()) && s.starts_with(b"3."))
        .find_map(|s| {
            let s = std::str::from_utf8(s).ok()?.trim_end_matches('+');
            let mut parts = s.split('.').map(|p| p.parse::<u8>().ok());
            let v = (parts.next()??, parts.next()??, parts.next()??);
            let is_known = versions::find(v).is_some_and(|facts| facts.has_version_literal);
            (parts.next().is_none() && is_known).then_some(v)
        })
}

/// `libpython3.8.so.1.0`, `python3.8`
fn version_of_name(name: &str) -> Option<(u8, u8, u8)> {
    let rest = name.split_once("python3.")?.1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((3, digits.parse().ok()?, 255))
}

/// Bytes of `pthread_self` that are read.
const PTHREAD_SELF: usize = 16;

/// A stage of starting a program in musl's C library, which is the dynamic loader, too (ldso/dynlink.c, 1.1.13 to
/// 1.2.5). The file has many names: `ld-musl-x86_64.so.1`, `libc.musl-x86_64.so.1`, and `libc.so` in Debian.
const MUSL_LOADER: &str = "__dls3";
/// A note in every program that is linked with glibc's `crt1.o` (csu/abi-note.c, 2.36).
const GLIBC_NOTE: &str = ".note.ABI-tag";

/// Is this an interpreter that musl is linked into? Of the two C libraries, only glibc marks its programs.
fn is_static_musl(module: &Module) -> bool {
    let has_runtime = || module.exports("_PyRuntime").is_some() || module.section(".PyRuntime").is_some();
    module.entry.is_some()
        && has_runtime()
        && module.libraries().is_empty()
        && module.section(".interp").is_none()
        && module.section(GLIBC_NOTE).is_none()
}

/// How the C library finds thread-specific values, from its file; `None` if the file does not say.
pub fn find_descriptor(module: &Module) -> Option<ThreadDescriptor> {
    if module.exports(MUSL_LOADER).is_some() || is_static_musl(module) {
        return Some(ThreadDescriptor {
            tls: Tls::Musl(PTHREAD_SPECIFIC[1]),
            size: DESCRIPTOR_SIZE[1],
        });
    }
    // glibc describes itself for debuggers (nptl_db/structs.def): three u32, bits, count, offset; and one u32
    let number = |name: &str, at: u64| {
        let bytes = module.read_image(module.exports(name)?.checked_add(at)?, 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let specific = number("_thread_db_pthread_specific", 8);
    // That of glibc before 2.34 is in the symbols of another file, and stripped.
    let from_code = || arch::descriptor_size(&module.read_image(module.exports("pthread_self")?, PTHREAD_SELF)?);
    let size = match DESCRIPTOR_SIZE[0] {
        0 => None,
        _ => number("_thread_db_sizeof_pthread", 0).or_else(from_code),
    };
    (specific.is_some() || size.is_some()).then(|| ThreadDescriptor {
        tls: Tls::Glibc(specific.unwrap_or(PTHREAD_SPECIFIC[0])),
        size: size.unwrap_or(DESCRIPTOR_SIZE[0]),
    })
}

/// For a C library that does not say.
pub const DEFAULT_DESCRIPTOR: ThreadDescriptor = ThreadDescriptor {
    tls: Tls::Glibc(PTHREAD_SPECIFIC[0]),
    size: DESCRIPTOR_SIZE[0],
};

impl Runtime {
    /// The interpreter in a process that maps this file with this load bias.
    pub fn in_process(&self, bias: u64, descriptor: ThreadDescriptor) -> Option<Interpreter> {
        Some(Interpreter {
            runtime: self.runtime.wrapping_add(bias),
            layout: self.layout?,
            thread_state: self.thread_state,
            descriptor,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let literal = |s: &[u8]| version_literal(s);
        assert_eq!(literal(b"x\x003.8.18\0y"), Some((3, 8, 18)));
        assert_eq!(literal(b"\x003.10.13+\0"), Some((3, 10, 13)));
        assert_eq!(literal(b"\x003.8.18 (default)\x003.141\x003.3\0"), None);
        assert_eq!(version_of_name("libpython3.9.so.1.0"), Some((3, 9, 255)));
        assert_eq!(version_of_name("libfoo.so"), None);
        assert!(is_eval_name(b"_PyEval_EvalFrameDefault.cold.3"));
        assert!(!is_eval_name(b"_PyEval_EvalFrameDefaultish"));
    }
}

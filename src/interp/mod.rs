//! CPython: which file is the interpreter, where it keeps things, what its frames and code objects say.
//!
//! Knows no backend and no native frame. One [`Runtime`] per file; an [`Interpreter`] per process.

use crate::layout::{Interpreter, Layout, Tls};
use crate::process::modules::Module;

pub mod code;
pub mod frames;
pub mod lines;
mod offsets;
// Public for fuzz/ and benches/.
#[doc(hidden)]
pub mod tables;
mod text;
pub mod threads;

/// An ELF file that contains a CPython interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// (major, minor, micro); micro is 255 where it could not be told.
    pub version: (u8, u8, u8),
    /// svma of `_PyRuntime`.
    pub runtime: u64,
    /// `None`: a version that we do not know.
    pub layout: Option<Layout>,
    /// svma ranges of the bytecode loop, split-off parts included, as far as symbols name them.
    pub eval: Vec<(u64, u64)>,
}

impl Runtime {
    /// Does this file hold the bytecode loop at this svma?
    pub fn is_eval(&self, svma: u64) -> bool {
        self.eval.iter().any(|(start, end)| (*start..*end).contains(&svma))
    }

    /// `3.11.7`
    pub fn version_text(&self) -> String {
        match self.version {
            (major, minor, 255) => format!("{major}.{minor}"),
            (major, minor, micro) => format!("{major}.{minor}.{micro}"),
        }
    }
}

/// Is this file an interpreter? (`_PyRuntime` is exported since 3.7, by shared libraries and static executables.)
pub fn find_runtime(module: &Module) -> Option<Runtime> {
    let runtime = module.exports("_PyRuntime")?;
    let version = version(module, runtime)?;
    let row = tables::ROWS
        .iter()
        .find(|(v, _)| *v == (version.0, version.1))
        .map(|(_, layout)| *layout);
    let layout = row.and_then(|row| {
        if version >= (3, 13, 0) {
            offsets::published(module, runtime, row)
        } else {
            Some(row)
        }
    });
    let eval = module.symbols_named(&is_eval_name);
    let eval = eval
        .into_iter()
        .filter(|(_, _, size)| *size > 0)
        .map(|(_, at, size)| (at, at.saturating_add(size)));
    Some(Runtime {
        version,
        runtime,
        layout,
        eval: eval.collect(),
    })
}

/// `_PyEval_EvalFrameDefault` and the parts that compilers split off it (`.cold`, `.part.0`, `.lto_priv.0` ...).
fn is_eval_name(name: &[u8]) -> bool {
    name.strip_prefix(b"_PyEval_EvalFrameDefault")
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

fn version(module: &Module, runtime: u64) -> Option<(u8, u8, u8)> {
    let unpack = |hex: u64| ((hex >> 24) as u8, (hex >> 16) as u8, (hex >> 8) as u8);
    // 3.13: the offset table begins with a cookie and PY_VERSION_HEX (Include/internal/pycore_debug_offsets.h)
    if let Some(head) = module.read_image(runtime, 16)
        && head.starts_with(b"xdebugpy")
    {
        return Some(unpack(u64::from_le_bytes(head.get(8..16)?.try_into().ok()?)));
    }
    // 3.11: Py_Version (Python/getversion.c)
    if let Some(at) = module.exports("Py_Version")
        && let Some(hex) = module.read_image(at, 8)
    {
        return Some(unpack(u64::from_le_bytes(hex.try_into().ok()?)));
    }
    // Older: the literal PY_VERSION, which stands alone between two NULs in .rodata.
    let literal = module.section(".rodata").and_then(|s| version_literal(&s.bytes));
    literal.or_else(|| version_of_name(&module.name()))
}

/// Finds `\0` `3.8.18` `\0` for a version that has no better mark (3.7 to 3.10).
fn version_literal(rodata: &[u8]) -> Option<(u8, u8, u8)> {
    rodata
        .split(|c| *c == 0)
        .filter(|s| (5..=9).contains(&s.len()) && s.starts_with(b"3."))
        .find_map(|s| {
            let s = std::str::from_utf8(s).ok()?.trim_end_matches('+');
            let mut parts = s.split('.').map(|p| p.parse::<u8>().ok());
            let v = (parts.next()??, parts.next()??, parts.next()??);
            (parts.next().is_none() && (7..=10).contains(&v.1)).then_some(v)
        })
}

/// `libpython3.8.so.1.0`, `python3.8`
fn version_of_name(name: &str) -> Option<(u8, u8, u8)> {
    let rest = name.split_once("python3.")?.1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((3, digits.parse().ok()?, 255))
}

/// The C library's way to thread-specific values, from its file; the numbers of glibc 2.36 if it does not say.
pub fn find_tls(module: &Module) -> Option<Tls> {
    let name = module.name();
    if name.starts_with("ld-musl") || name.starts_with("libc.musl") {
        return Some(Tls::Musl(128)); // musl 1.2.3, src/internal/pthread_impl.h
    }
    // glibc describes itself for debuggers (nptl_db/structs.def): three u32, bits, count, offset
    let at = module.exports("_thread_db_pthread_specific")?;
    let words = module.read_image(at, 12)?;
    Some(Tls::Glibc(u32::from_le_bytes(words.get(8..12)?.try_into().ok()?)))
}

/// `struct pthread.specific` of glibc 2.36 x86-64.
pub const DEFAULT_TLS: Tls = Tls::Glibc(1296);

impl Runtime {
    /// The interpreter in a process that maps this file with this load bias.
    pub fn in_process(&self, bias: u64, tls: Tls) -> Option<Interpreter> {
        Some(Interpreter {
            runtime: self.runtime.wrapping_add(bias),
            layout: self.layout?,
            tls,
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

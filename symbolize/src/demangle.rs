//! Display names: demangled, without the suffixes of compilers and linkers.

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use cpp_demangle::error::Error;
use cpp_demangle::{DemangleOptions, DemangleWrite, ParseOptions, Symbol};

/// Longer mangled names are returned unchanged. Template-heavy C++ reaches a few KiB.
const MAX_MANGLED: usize = 4 << 10;
/// Maximum length of a demangled name: substitutions can double a short mangled name at each step.
const MAX_DEMANGLED: usize = 16 << 10;
/// Maximum number of printed nodes: bounds the time for names that expand into nothing.
const MAX_NODES: u32 = 20_000;
/// Maximum nesting of a C++ name. Each level uses stack.
const MAX_NESTING: u32 = 96;
/// Maximum nesting of names that are parsed without a time limit. The parser tries several interpretations of the same
/// letters, and in each of them of what is nested (cpp_demangle 0.5.1): a hostile name of 70 bytes takes half a minute
/// at the nesting above, 4 ms at this one.
const EASY_NESTING: u32 = 24;
/// Time limit for one name that is nested more deeply.
const MAX_TIME: Duration = Duration::from_millis(250);
/// Names that take longer count as slow; ordinary ones take some microseconds ...
const SLOW: Duration = Duration::from_millis(1);
/// ... and this is the time limit for all slow names of the process together, ns.
const MAX_SLOW: u64 = 1_000_000_000;

/// Turns a symbol's raw name into its display name.
///
/// - A symbol version (`memcpy@@GLIBC_2.14`) is removed.
/// - Parts split off by the compiler have their function's name, so that one function has one name:
///   `.cold`, `.part.N`, `.constprop.N`, `.isra.N`, `.lto_priv.N`, `.llvm.N`, also repeated, and with or without a
///   number.
/// - C++ (Itanium ABI) names are demangled with their parameters, Rust names (legacy and v0) without their hash.
/// - Everything else, and names of more than 4 KiB, are returned unchanged.
///
/// Time, stack and memory are bounded for any input: a C++ name that takes more than 250 ms is returned unchanged, and
/// so are all C++ names once slow ones have taken one second of this process. Deeply nested names are parsed in a
/// separate thread.
pub fn demangle(raw: &str) -> Cow<'_, str> {
    if raw.len() > MAX_MANGLED {
        return Cow::Borrowed(raw);
    }
    let base = strip_suffixes(strip_version(raw));
    if let Some(name) = demangle_rust(base).or_else(|| demangle_cpp(base)) {
        return Cow::Owned(name);
    }
    Cow::Borrowed(base)
}

fn strip_version(raw: &str) -> &str {
    match raw.find('@') {
        Some(at) if at > 0 => &raw[..at],
        _ => raw,
    }
}

/// GCC appends these in `clone_function_name` (gcc/cgraphclones.cc), LLVM `.llvm.N` when it promotes a local for
/// ThinLTO.
fn strip_suffixes(mut name: &str) -> &str {
    const WORDS: [&str; 6] = ["cold", "part", "constprop", "isra", "lto_priv", "llvm"];
    loop {
        let digits = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let word_end = match digits.strip_suffix('.') {
            Some(rest) if digits.len() < name.len() => rest,
            _ => name,
        };
        let stripped = WORDS.iter().find_map(|w| word_end.strip_suffix(w)?.strip_suffix('.'));
        match stripped {
            Some(rest) if !rest.is_empty() => name = rest,
            _ => return name,
        }
    }
}

fn demangle_rust(name: &str) -> Option<String> {
    // `_ZN...17h<16 hex>E` is Rust's older scheme. Without a hash it is C++.
    let legacy = name.starts_with("_ZN") && name.contains("17h");
    if !legacy && !name.starts_with("_R") {
        return None;
    }
    let parsed = rustc_demangle::try_demangle(name).ok()?;
    let mut out = Bounded::default();
    write!(out, "{parsed:#}").ok()?;
    Some(out.text).filter(|text| !text.is_empty()) // nothing but a hash
}

fn demangle_cpp(name: &str) -> Option<String> {
    let body = name.strip_prefix("__Z").or_else(|| name.strip_prefix("_Z"));
    if body.is_none() && !name.starts_with("_GLOBAL_") {
        return None;
    }
    static SPENT: AtomicU64 = AtomicU64::new(0);
    if SPENT.load(Ordering::Relaxed) > MAX_SLOW {
        return None;
    }
    let began = Instant::now();
    let shown = match parse(name, EASY_NESTING) {
        Ok(symbol) => print(&symbol),
        Err(Error::TooMuchRecursion) => watched(name),
        Err(_) => None,
    };
    let took = began.elapsed();
    if took > SLOW {
        SPENT.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }
    shown
}

fn parse(name: &str, nesting: u32) -> Result<Symbol<&str>, Error> {
    Symbol::new_with_options(name, &ParseOptions::default().recursion_limit(nesting))
}

fn print(symbol: &Symbol<&str>) -> Option<String> {
    let mut out = BoundedNodes::default();
    let print = DemangleOptions::new().recursion_limit(MAX_NESTING);
    symbol.structured_demangle(&mut out, &print).ok()?;
    Some(out.out.text).filter(|text| !text.is_empty())
}

/// A name of any nesting, parsed by a thread that is abandoned when it takes too long, since the parser cannot be
/// stopped. Until it ends, no other name is started.
fn watched(name: &str) -> Option<String> {
    static LEFT: AtomicBool = AtomicBool::new(false);
    if LEFT.load(Ordering::Relaxed) {
        return None;
    }
    let (sender, receiver) = sync_channel(0);
    let owned = name.to_string();
    let parser = std::thread::Builder::new().name("demangle".into()).spawn(move || {
        let shown = parse(&owned, MAX_NESTING).ok().and_then(|symbol| print(&symbol));
        if sender.send(shown).is_err() {
            LEFT.store(false, Ordering::Relaxed); // no one waits for the result
        }
    });
    parser.ok()?;
    let answer = receiver.recv_timeout(MAX_TIME);
    LEFT.store(answer == Err(RecvTimeoutError::Timeout), Ordering::Relaxed);
    answer.ok()?
}

/// A string that refuses to grow beyond [`MAX_DEMANGLED`].
#[derive(Default)]
struct Bounded {
    text: String,
}

impl Write for Bounded {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        if self.text.len() + s.len() > MAX_DEMANGLED {
            return Err(fmt::Error);
        }
        self.text.push_str(s);
        Ok(())
    }
}

/// The same for cpp_demangle, which also reports its progress.
#[derive(Default)]
struct BoundedNodes {
    out: Bounded,
    nodes: u32,
}

impl DemangleWrite for BoundedNodes {
    fn push_demangle_node(&mut self, _: cpp_demangle::DemangleNodeType) {
        self.nodes = self.nodes.saturating_add(1);
    }
    fn write_string(&mut self, s: &str) -> fmt::Result {
        if self.nodes > MAX_NODES {
            return Err(fmt::Error);
        }
        self.out.write_str(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let deep = "_Z".to_string() + &"N".repeat(4000);
        let long = "a".repeat(MAX_MANGLED + 1) + ".cold";
        for (raw, display) in [
            ("main", "main"),
            ("", ""),
            ("@", "@"),
            (".cold", ".cold"),
            ("memcpy@@GLIBC_2.14", "memcpy"),
            ("memcpy@GLIBC_2.2.5", "memcpy"),
            ("foo.cold", "foo"),
            ("foo.cold.12", "foo"),
            ("foo.part.0", "foo"),
            ("foo.constprop.0.isra.3.cold", "foo"),
            ("foo.lto_priv.0", "foo"),
            ("foo.llvm.1234567890", "foo"),
            ("foo.cold.x", "foo.cold.x"),
            ("foo.0", "foo.0"),
            ("foocold", "foocold"),
            ("_Z3fooi", "foo(int)"),
            ("_Z3fooi.part.0.cold", "foo(int)"),
            ("_ZN5boost3fooIiEEvT_", "void boost::foo<int>(int)"),
            (
                "_ZNSt6vectorIiSaIiEE9push_backEOi",
                "std::vector<int, std::allocator<int> >::push_back(int&&)",
            ),
            ("_ZNKSs4sizeEv@@GLIBCXX_3.4", "std::string::size() const"),
            (
                "_ZN4core3fmt9Formatter3pad17h0123456789abcdefE",
                "core::fmt::Formatter::pad",
            ),
            (
                "_ZN4core3fmt9Formatter3pad17h0123456789abcdefE.llvm.77",
                "core::fmt::Formatter::pad",
            ),
            ("_ZN17h0123456789abcdefE", "h0123456789abcdef"),
            ("_RNvCskwGfYPst2Cb_7mycrate3foo", "mycrate::foo"),
            ("_Zbogus", "_Zbogus"),
            ("_R", "_R"),
            (&deep, &deep),
            (&long, &long),
        ] {
            assert_eq!(demangle(raw), display, "{raw}");
        }
    }

    #[test]
    fn hostile_names_are_bounded() {
        let start = std::time::Instant::now();
        let mut names = Vec::new();
        // Each level repeats the one before: doubling with plain substitutions, and with empty argument packs.
        let seqs: Vec<String> = (0..120u32)
            .map(|i| {
                if i == 0 {
                    "S_".into()
                } else {
                    format!("S{}_", base36(i - 1))
                }
            })
            .collect();
        names.push(format!(
            "_Z1fIiE{}",
            seqs.iter().map(|s| format!("1tI{s}{s}E")).collect::<String>()
        ));
        names.push(format!(
            "_Z1f1a{}",
            seqs.iter().map(|s| format!("1tI{s}{s}E")).collect::<String>()
        ));
        names.push(format!(
            "_Z1f1a{}",
            seqs.iter().map(|s| format!("F{s}{s}E")).collect::<String>()
        ));
        names.push(format!("_Z1fIJEEv{}", "DpT_".repeat(900)));
        names.push(format!("_Z1f{}", "P".repeat(4000)));
        names.push(format!("_Z1f{}i", "PF".repeat(2000)));
        names.push(format!("_Z1f{}", "I".repeat(4000)));
        names.push(format!("_ZN{}", "1aI".repeat(1300)));
        names.push(format!("_RNvC1a{}", "B_".repeat(2000)));
        names.push(format!("_RINvC1a1b{}E", "TB2_B2_".repeat(500)));
        names.push(format!("_RINvC1a1b{}E", "T".repeat(3000)));
        for name in &names {
            assert!(demangle(name).len() <= MAX_DEMANGLED);
        }
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }

    fn base36(n: u32) -> String {
        let digit = |d: u32| char::from_digit(d, 36).unwrap_or('0').to_ascii_uppercase();
        if n < 36 {
            digit(n).to_string()
        } else {
            format!("{}{}", digit(n / 36), digit(n % 36))
        }
    }
}

//! Display names: demangled, without the suffixes of compilers and linkers.

use std::borrow::Cow;
use std::fmt::{self, Write};

use crate::itanium;

/// Longer mangled names are returned unchanged. Template-heavy C++ (expression templates, ranges) reaches some ten KiB.
const MAX_MANGLED: usize = 32 << 10;
/// Maximum length of a demangled name: substitutions can double a short mangled name at each step.
const MAX_DEMANGLED: usize = 32 << 10;

/// Turns a symbol's raw name into its display name.
///
/// - A symbol version (`memcpy@@GLIBC_2.14`) is removed.
/// - Parts split off by the compiler have their function's name, so that one function has one name:
///   `.cold`, `.part.N`, `.constprop.N`, `.isra.N`, `.lto_priv.N`, `.llvm.N`, `.localalias.N`, also repeated, and with
///   or without a number.
/// - C++ (Itanium ABI) names are demangled with their parameters, Rust names (legacy and v0) without their hash.
/// - Everything else, and names that have more than 32 KiB mangled or demangled, are returned unchanged.
///
/// Time, stack and memory are bounded for any input.
pub fn demangle(raw: &str) -> Cow<'_, str> {
    if raw.len() > MAX_MANGLED {
        return Cow::Borrowed(raw);
    }
    let base = strip_suffixes(strip_version(raw));
    if let Some(name) = demangle_rust(base).or_else(|| itanium::demangle(base, MAX_DEMANGLED)) {
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

/// GCC appends these in `clone_function_name` (gcc/cgraphclones.cc; `localalias` in gcc/symtab.cc), LLVM `.llvm.N` when it
/// promotes a local for ThinLTO.
fn strip_suffixes(mut name: &str) -> &str {
    const WORDS: [&str; 7] = ["cold", "part", "constprop", "isra", "lto_priv", "llvm", "localalias"];
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
            (
                "_RINvNtCs2OpA4fNwd7R_1r3geo7nearestmKj3_NCNvB4_2go0EB4_",
                "r::geo::nearest::<u32, 3, r::go::{closure#0}>",
            ),
            (
                "_RNvXNtCs2OpA4fNwd7R_1r3geoINtB2_4GridhENtB2_4Walk4stepB4_",
                "<r::geo::Grid<u8> as r::geo::Walk>::step",
            ),
            ("_RNvNtCs2OpA4fNwd7R_1r3geou9gre_6ka8i", "r::geo::größe"),
            (
                "_ZN54_$LT$r..geo..Grid$LT$T$GT$$u20$as$u20$r..geo..Walk$GT$4step17h0123456789abcdefE",
                "<r::geo::Grid<T> as r::geo::Walk>::step",
            ),
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
        // What other parsers try in many ways.
        for (unit, times) in [
            ("nw", 26),
            ("nwnw1A", 13),
            ("LDTnwnw", 9),
            ("L1AI", 12),
            ("sr1A", 900),
            ("cvT_I", 500),
        ] {
            names.push(format!("_Z1fIX{}E", unit.repeat(times)));
            names.push(format!("_ZN1f{}E", unit.repeat(times)));
        }
        for unit in ["1tI", "Z1fvE", "UlT_E_", "DpR", "M1a", "KR", "DTcl", "XadL_Z1fI"] {
            names.push(format!("_Z1f{}", unit.repeat(2000)));
            names.push(format!("_Z1f{}i{}v", unit.repeat(120), "E".repeat(120)));
        }
        names.push(format!("_RNvC1a{}", "B_".repeat(2000)));
        names.push(format!("_RINvC1a1b{}E", "TB2_B2_".repeat(500)));
        names.push(format!("_RINvC1a1b{}E", "T".repeat(3000)));
        // A thread of Python's on musl has a stack of this size at least.
        let small = std::thread::Builder::new().stack_size(1 << 20);
        let all = small.spawn(move || {
            for name in &names {
                assert!(demangle(name).len() <= MAX_DEMANGLED, "{}", &name[..20]);
            }
        });
        all.expect("started").join().expect("enough stack");
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }

    /// Of everything that is cut off or changed in real names: nothing fails.
    #[test]
    fn damaged_names_do_no_harm() {
        let names = include_str!("../tests/cpp_names.txt").lines();
        for name in names.filter(|line| line.starts_with("_Z") && line.len() < 400) {
            for at in 2..name.len() {
                demangle(&name[..at]);
                let changed: String = name[..at].chars().chain(['E']).chain(name[at + 1..].chars()).collect();
                demangle(&changed);
            }
        }
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

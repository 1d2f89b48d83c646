//! Functions of a file that mark the beginning of a stack other than the thread's own: those of greenlet, and those
//! that hand-made stacks return to.

use super::modules::Module;
use crate::arch;
use crate::code_map::Landmarks;

/// Functions that create a stack: they put the address of their own code on its top, for the first function to return
/// to (makecontext(3); boost.context, `make_x86_64_sysv_elf_gas.S`, `make_arm64_aapcs_elf_gas.S`).
const MAKERS: [&str; 2] = ["makecontext", "make_fcontext"];
/// Maximum size of such a function, bytes; that of glibc 2.36 has 500.
const MAX_MAKER: u64 = 1 << 12;
/// Maximum size of the code that is returned to, bytes.
const MAX_FIRST: u64 = 64;

/// Maximum number of code bytes at a program's entry point up to its call.
const MAX_ENTRY: u64 = 64;

/// Maximum number of functions used of one file; greenlet 3 has about 20, including split-off parts.
const MAX_FUNCTIONS: usize = 64;

/// The landmarks of this file. Reads symbols only of files that may have some.
pub fn find(module: &Module) -> Landmarks {
    let name = module.name();
    if name.contains("greenlet") {
        return greenlet(module);
    }
    let entry = module.entry.map(|at| (at, at.saturating_add(MAX_ENTRY)));
    let mut landmarks = Landmarks {
        entry: entry.into_iter().collect(),
        ..Landmarks::default()
    };
    if name.starts_with("libc.so") || name.starts_with("libc-") || name.contains("boost_context") {
        let named = module.symbols_named(&|name| MAKERS.iter().any(|m| m.as_bytes() == name));
        for (_, at, size) in named.into_iter().take(MAX_FUNCTIONS) {
            landmarks.first.extend(first(module, at, size.min(MAX_MAKER)));
        }
        landmarks.first.dedup();
    }
    landmarks
}

/// The functions of greenlet's extension module, by their names. Up to 1.1 it is C (`greenlet.c`), from 2.0 on C++
/// (`TUserGreenlet.cpp`, `TGreenlet.cpp`, v3.0), whose names are exported.
fn greenlet(module: &Module) -> Landmarks {
    let mut landmarks = Landmarks::default();
    let named = module.symbols_named(&|name| role(name).is_some());
    for (name, at, size) in named.into_iter().take(MAX_FUNCTIONS) {
        let range = (at, at.saturating_add(size));
        match role(name.as_bytes()) {
            Some(SymbolRole::Stub) => landmarks.stub.push(range),
            Some(SymbolRole::Bootstrap) => landmarks.bootstrap.push(range),
            Some(SymbolRole::Switch) => landmarks.switch.push(range),
            None => {}
        }
    }
    landmarks
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SymbolRole {
    Stub,
    Bootstrap,
    Switch,
}

/// The role of the function with this symbol, including parts that compilers split off (`.cold`).
fn role(name: &[u8]) -> Option<SymbolRole> {
    // The name itself, and as part of a nested name: length and text of each part (Itanium C++ ABI 5.1.2).
    const NAMES: [(&str, &str, SymbolRole); 7] = [
        ("g_initialstub", "13g_initialstubE", SymbolRole::Stub),
        ("inner_bootstrap", "15inner_bootstrapE", SymbolRole::Bootstrap),
        ("g_switchstack", "13g_switchstackE", SymbolRole::Switch),
        ("g_switchstack_success", "21g_switchstack_successE", SymbolRole::Switch),
        ("slp_switch", "10slp_switchE", SymbolRole::Switch),
        ("slp_save_state", "14slp_save_stateE", SymbolRole::Switch),
        ("slp_restore_state", "17slp_restore_stateE", SymbolRole::Switch),
    ];
    let name = std::str::from_utf8(name).ok()?;
    let is_nested = name.starts_with("_ZN");
    let base = name.split('.').next().unwrap_or(name);
    let base = base.strip_suffix("_trampoline").unwrap_or(base);
    NAMES
        .iter()
        .find(|(plain, nested, _)| base == *plain || is_nested && name.contains(nested))
        .map(|(.., role)| *role)
}

/// Where a stack's first function returns to: code whose address the function at `svma` loads. Starts one byte earlier,
/// because return addresses are looked up there.
fn first(module: &Module, svma: u64, size: u64) -> Vec<(u64, u64)> {
    let code = module.read_image(svma, size as usize).unwrap_or_default();
    let is_code = |at: u64| {
        let mut segments = module.segments.iter();
        segments.any(|s| at >= s.svma && at - s.svma < s.size)
    };
    let loaded = arch::loaded_addresses(&code, svma).into_iter();
    loaded
        .filter(|at| *at > 0 && is_code(*at))
        .map(|at| (at - 1, at.saturating_add(extent(module, at))))
        .collect()
}

/// Bytes of the code at `svma`, which never returns.
fn extent(module: &Module, svma: u64) -> u64 {
    let code = module.read_image(svma, MAX_FIRST as usize).unwrap_or_default();
    arch::extent_to_halt(&code, svma).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_greenlet() {
        let check = |name: &str, expected: Option<SymbolRole>| assert_eq!(role(name.as_bytes()), expected, "{name}");
        check("g_initialstub", Some(SymbolRole::Stub));
        check("g_initialstub.cold", Some(SymbolRole::Stub));
        check("_ZN8greenlet12UserGreenlet13g_initialstubEPv", Some(SymbolRole::Stub));
        check(
            "_ZN8greenlet12UserGreenlet15inner_bootstrapEP9_greenletP7_object.cold",
            Some(SymbolRole::Bootstrap),
        );
        check("_ZN8greenlet8Greenlet13g_switchstackEv", Some(SymbolRole::Switch));
        check(
            "_ZN8greenlet8Greenlet21g_switchstack_successEv",
            Some(SymbolRole::Switch),
        );
        check("slp_restore_state_trampoline.cold", Some(SymbolRole::Switch));
        check("g_switch", None);
        check("ts__g_switchstack_use_tracing", None);
        check("_ZN8greenlet12UserGreenlet8g_switchEv", None);
        check(
            "_ZN8greenlet8Greenlet38on_switchstack_or_initialstub_failureEPS0_RKNS0_20switchstack_result_tEbb",
            None,
        );
        check("_ZNK8greenlet8Greenlet22force_slp_switch_errorEv", None);
    }
}

//! Names of the variables of files that threads wait for: locks, condition variables and other futexes.

use std::collections::{BTreeMap, BTreeSet};

use symbolize::{DataObject, Module};

use super::naming::protocol::{FileFormat, NamedFrame};
use super::symbols::names_in;
use super::{NameCache, ResolveInput};
use crate::frame::ModuleId;

/// Objects of at most so many bytes are one lock or condition variable (POSIX ones have 32 to 56 bytes): where in it the futex
/// lies says nothing. Longer ones may contain several locks.
const MAX_LOCK: u64 = 64;
/// Condition variables begin at a multiple of this and have several futexes of half the size (nptl/pthread_cond_common.c).
const ALIGNMENT: u64 = 8;

/// The text of a variable: for a lock there, and for a condition variable. Of the latter the place in a larger variable is left
/// out: each thread of a pool may have its own, and all of them wait for work.
#[derive(Clone, Default)]
pub(super) struct VariableText {
    pub(super) lock: String,
    pub(super) condition: String,
}

/// The names of variables at these addresses (svma), for the process that reads names.
pub(super) fn look_up(module: &mut Module, svmas: &[u64]) -> Vec<Vec<NamedFrame>> {
    let found = module.data_objects(svmas).into_iter().zip(svmas);
    found
        .map(|(object, svma)| object.map(|object| named(&object, *svma)).into_iter().collect())
        .collect()
}

/// `raw`: without the place in the object.
fn named(object: &DataObject, svma: u64) -> NamedFrame {
    let name = match svma - object.start {
        offset if offset > 0 && object.size > MAX_LOCK => format!("{}+{offset:#x}", object.name).into(),
        _ => object.name.clone(),
    };
    NamedFrame {
        name,
        raw: Some(object.name.clone()),
        start: object.start,
        file: None,
        line: 0,
        inlined: false,
    }
}

/// The texts of all futexes of the input, in their order.
pub(super) fn texts(input: &mut ResolveInput<'_>, names: &mut NameCache) -> Vec<VariableText> {
    let mut missing: BTreeMap<ModuleId, BTreeSet<u64>> = BTreeMap::new();
    for (module, svma) in input.futexes {
        if !names.variables.contains_key(&(*module, *svma)) {
            missing.entry(*module).or_default().insert(*svma);
        }
    }
    for (id, svmas) in missing {
        let svmas: Vec<u64> = svmas.into_iter().collect();
        let found = names_in(input, &mut names.files, (id, FileFormat::ElfVariables), &svmas).found;
        let module = input.modules.get(id).name();
        for (svma, symbols) in svmas.iter().zip(found) {
            let text = text(symbols.first(), &module, *svma);
            names.variables.insert((id, *svma), text);
        }
    }
    let known = input.futexes.iter().map(|futex| names.variables.get(futex).cloned());
    known.map(Option::unwrap_or_default).collect()
}

/// `table_lock (tables.so)`, or `tables.so+0x4010` without a symbol.
fn text(symbol: Option<&NamedFrame>, module: &str, svma: u64) -> VariableText {
    match symbol {
        Some(symbol) => VariableText {
            lock: format!("{} ({module})", symbol.name),
            condition: format!("{} ({module})", symbol.raw.as_ref().unwrap_or(&symbol.name)),
        },
        None => VariableText {
            lock: format!("{module}+{svma:#x}"),
            condition: format!("{module}+{:#x}", svma & !(ALIGNMENT - 1)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_shown_of_locks_in_larger_variables() {
        let object = |size| DataObject {
            name: "table".into(),
            start: 0x4000,
            size,
        };
        for (size, svma, lock, condition) in [
            (40, 0x4000, "table (t.so)", "table (t.so)"),
            (48, 0x4028, "table (t.so)", "table (t.so)"),
            (192, 0x4000, "table (t.so)", "table (t.so)"),
            (192, 0x4038, "table+0x38 (t.so)", "table (t.so)"),
            (0, 0x402c, "t.so+0x402c", "t.so+0x4028"),
            (0, 0x4028, "t.so+0x4028", "t.so+0x4028"),
        ] {
            let symbol = (size > 0).then(|| named(&object(size), svma));
            let text = text(symbol.as_ref(), "t.so", svma);
            assert_eq!((&*text.lock, &*text.condition), (lock, condition), "{size} {svma:#x}");
        }
    }
}

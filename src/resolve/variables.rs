//! Names of the variables of files that threads wait for: locks, condition variables and other futexes.

use std::collections::{BTreeMap, BTreeSet};

use symbolize::{DataObject, Module};

use super::naming::protocol::{FileFormat, NamedFrame};
use super::symbols::names_in;
use super::{NameCache, ResolveInput};
use crate::frame::ModuleId;

/// Objects of at most so many bytes are one lock or condition variable (POSIX ones have 32 to 56 bytes): where in it the futex
/// lies says nothing. Longer ones may contain several.
const MAX_LOCK: u64 = 64;
/// Condition variables begin at a multiple of this and have several futexes of half the size (nptl/pthread_cond_common.c).
const ALIGNMENT: u64 = 8;

/// The text of a variable: where a lock is, and where a condition variable is that has its futex there.
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

fn named(object: &DataObject, svma: u64) -> NamedFrame {
    let name = match svma - object.start {
        offset if offset > 0 && object.size > MAX_LOCK => format!("{}+{offset:#x}", object.name).into(),
        _ => object.name.clone(),
    };
    NamedFrame {
        name,
        raw: None,
        start: object.start,
        file: None,
        line: 0,
        inlined: false,
    }
}

/// The texts of all futexes of the input, in their order: `table_lock (tables.so)`, or `tables.so+0x4010` without a symbol.
pub(super) fn texts(input: &mut ResolveInput<'_>, names: &mut NameCache) -> Vec<VariableText> {
    let mut missing: BTreeMap<ModuleId, BTreeSet<u64>> = BTreeMap::new();
    for (module, svma) in input.futexes {
        for svma in [*svma, in_condition(*svma)] {
            if !names.variables.contains_key(&(*module, svma)) {
                missing.entry(*module).or_default().insert(svma);
            }
        }
    }
    for (id, svmas) in missing {
        let svmas: Vec<u64> = svmas.into_iter().collect();
        let found = names_in(input, &mut names.files, (id, FileFormat::ElfVariables), &svmas).found;
        let module = input.modules.get(id).name();
        for (svma, symbols) in svmas.iter().zip(found) {
            let text = match symbols.first() {
                Some(symbol) => format!("{} ({module})", symbol.name),
                None => format!("{module}+{svma:#x}"),
            };
            names.variables.insert((id, *svma), text);
        }
    }
    let text = |module, svma| names.variables.get(&(module, svma)).cloned().unwrap_or_default();
    let futexes = input.futexes.iter();
    futexes
        .map(|(module, svma)| VariableText {
            lock: text(*module, *svma),
            condition: text(*module, in_condition(*svma)),
        })
        .collect()
}

fn in_condition(svma: u64) -> u64 {
    svma & !(ALIGNMENT - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_shown_in_what_is_more_than_one_lock() {
        let object = |size| DataObject {
            name: "table".into(),
            start: 0x4000,
            size,
        };
        for (size, svma, expected) in [
            (40, 0x4000, "table"),
            (48, 0x4028, "table"),
            (192, 0x4000, "table"),
            (192, 0x4038, "table+0x38"),
        ] {
            assert_eq!(&*named(&object(size), svma).name, expected, "{size} {svma:#x}");
        }
        assert_eq!((in_condition(0x402c), in_condition(0x4028)), (0x4028, 0x4028));
    }
}

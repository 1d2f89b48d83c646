//! Keys, kinds and names that earlier versions wrote differently.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::model::FrameKind;

type JsonObject = Map<String, Value>;

/// Old and present name of keys of the root's `nativeprof`.
const META: &[(&str, &str)] = &[
    ("own_cpu", "profiler_cpu"),
    ("held", "stopped"),
    ("parts", "merged_from"),
];
const STOPPED: &[(&str, &str)] = &[("longest_us", "max_us")];
const QUALITY: &[(&str, &str)] = &[("asked", "expected")];
const MODULE: &[(&str, &str)] = &[("names", "symbols_from"), ("missing", "symbols_missing")];

/// Kinds of frames under their old names.
pub(super) const KINDS: &[(&str, FrameKind)] = &[("cut", FrameKind::Truncated)];

/// The name of a frame where a stack is truncated: `[cut: REASON]` in files of earlier versions.
pub(super) fn truncated_name(name: Cow<'_, str>) -> Cow<'_, str> {
    match name.strip_prefix("[cut: ") {
        Some(reason) => Cow::Owned(format!("[truncated: {reason}")),
        None => name,
    }
}

/// Gives the metadata of a recording its present keys, whichever version wrote it.
pub(super) fn rename(meta: &mut JsonObject) {
    rename_keys(meta, META);
    for (key, names) in [("stopped", STOPPED), ("quality", QUALITY)] {
        if let Some(object) = meta.get_mut(key).and_then(Value::as_object_mut) {
            rename_keys(object, names);
        }
    }
    let modules = meta.get_mut("modules").and_then(Value::as_array_mut);
    for module in modules.into_iter().flatten().filter_map(Value::as_object_mut) {
        rename_keys(module, MODULE);
    }
}

fn rename_keys(object: &mut JsonObject, names: &[(&str, &str)]) {
    for (old, new) in names {
        if !object.contains_key(*new)
            && let Some(value) = object.remove(*old)
        {
            object.insert((*new).into(), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn old_keys_get_their_present_names_and_present_ones_stay() {
        let mut meta = json!({
            "own_cpu": 0.5,
            "held": {"median_us": 20, "longest_us": 90},
            "quality": {"asked": 7, "taken": 6},
            "modules": [{"path": "/a", "names": "DWARF", "missing": ""}, 3],
            "parts": [{"name": "a.json"}],
        });
        let expected = json!({
            "profiler_cpu": 0.5,
            "stopped": {"median_us": 20, "max_us": 90},
            "quality": {"expected": 7, "taken": 6},
            "modules": [{"path": "/a", "symbols_from": "DWARF", "symbols_missing": ""}, 3],
            "merged_from": [{"name": "a.json"}],
        });
        for _ in 0..2 {
            rename(meta.as_object_mut().expect("an object"));
            assert_eq!(meta, expected);
        }
    }
}

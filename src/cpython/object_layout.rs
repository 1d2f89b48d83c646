//! Offsets of objects that are read rarely: values of local variables, the holder of the global interpreter lock (GIL),
//! names of threads.
//!
//! On x86-64, from the DWARF of the releases named in `versions`: Include/object.h, longintrepr.h, listobject.h,
//! tupleobject.h, floatobject.h, cellobject.h, code.h and frameobject.h, object.h, later below Include/cpython;
//! Objects/dict-common.h, Objects/moduleobject.c, Include/internal/pycore_dict.h, pycore_gil.h, pycore_interp.h.

use super::Runtime;
use crate::cpython_layout::Layout;

/// Where the names of local variables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalNames {
    /// Three tuples of the code object: variables, cells, free variables.
    Three(u16, u16, u16),
    /// One tuple.
    One(u16),
}

/// Where instances of classes keep their attributes if `Py_TPFLAGS_MANAGED_DICT` is set; negative offsets from the object
/// (Include/internal/pycore_object.h). Without the flag, a pointer to a dict lies at the type's `tp_dictoffset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceDict {
    /// Pointers to values and to a dict, of which one is set (3.11).
    ValuesAndDict { values: u16, dict: u16 },
    /// One word: a dict, or values if the lowest bit is set; the values begin one byte further (3.12).
    ValuesOrDict(u16),
    /// A pointer to a dict; while it is null, the values follow the object's `tp_basicsize` bytes (3.13 and later).
    DictOrInline(u16),
}

/// Where the holder of the lock is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GilLocation {
    /// `_PyThreadState_Current`, `_PyRuntime.gilstate.tstate_current`: `Layout::runtime_current`. The lock itself is
    /// `_PyRuntime.ceval.gil` (Include/internal/pycore_runtime.h, 3.7 and later).
    Current { lock: Option<u32> },
    /// Each interpreter points to its lock, `struct _gil_runtime_state`, here. Free-threaded builds have one that is
    /// usually not in use, and has a flag for that.
    Interpreter { at: u16, free_threaded: bool },
}

/// Offsets in bytes, from the start of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectLayout {
    pub lock: GilLocation,
    pub names: LocalNames,
    /// First local variable in a frame.
    pub frame_locals: u16,
    /// The low bits of references in frames are tags (Include/internal/pycore_stackref.h, v3.14.0).
    pub tagged: bool,
    pub ob_type: u16,
    pub type_name: u16,
    pub type_flags: u16,
    pub type_basicsize: u16,
    pub type_dictoffset: u16,
    /// Keys that the instances of a class share (`ht_cached_keys`).
    pub type_keys: u16,
    /// `None`: no type has the flag (3.10 and earlier).
    pub instance_dict: Option<InstanceDict>,
    /// Namespace of a module (`md_dict`).
    pub module_dict: u16,
    /// `ob_size` of variable-size objects, `lv_tag` of integers, the value of others.
    pub body: u16,
    pub tuple_items: u16,
    /// Pointer to the items.
    pub list_items: u16,
    /// The sign of an integer is in the two low bits of the word with the number of digits (3.12 and later).
    pub tagged_int: bool,
    pub dict_used: u16,
    pub dict_keys: u16,
    pub dict_values: u16,
    /// First value, relative to where `dict_values` points.
    pub values_first: u16,
    /// The keys object has the size of its index in bytes, and its kind (3.11 and later).
    pub dict_kinds: bool,
}

impl ObjectLayout {
    /// `None` for an unsupported version, and where published offsets make no sense.
    pub fn of(runtime: &Runtime, layout: &Layout) -> Option<ObjectLayout> {
        let row = &runtime.facts?.objects;
        // By so many bytes the header is longer than in the row: 0, or 16 in free-threaded builds.
        let longer = layout.bytes_size.checked_sub(row.body)?;
        Some(ObjectLayout {
            lock: match row.lock {
                GilLocation::Interpreter { at, .. } => GilLocation::Interpreter {
                    at,
                    free_threaded: runtime.free_threaded,
                },
                current => current,
            },
            names: match row.names {
                LocalNames::One(at) => LocalNames::One(at + longer),
                three => three,
            },
            ob_type: row.ob_type + longer,
            type_name: row.type_name + longer,
            type_flags: row.type_flags + longer,
            type_basicsize: row.type_basicsize + longer,
            type_dictoffset: row.type_dictoffset + longer,
            type_keys: row.type_keys + longer,
            instance_dict: match row.instance_dict {
                // There is no header of the garbage collector before the object.
                Some(InstanceDict::DictOrInline(_)) if runtime.free_threaded => Some(InstanceDict::DictOrInline(8)),
                found => found,
            },
            module_dict: row.module_dict + longer,
            body: row.body + longer,
            tuple_items: row.tuple_items + longer,
            list_items: row.list_items + longer,
            dict_used: row.dict_used + longer,
            dict_keys: row.dict_keys + longer,
            dict_values: row.dict_values + longer,
            ..*row
        })
    }
}

//! Offsets of objects that are read rarely: values of local variables, the holder of the global interpreter lock (GIL),
//! names of threads.
//!
//! On x86-64, from the DWARF of the releases named in layouts.rs: Include/object.h, longintrepr.h, listobject.h,
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
    /// `_PyThreadState_Current`, `_PyRuntime.gilstate.tstate_current`: `Layout::runtime_current`.
    Current,
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
    /// `None` for an unsupported version.
    pub fn of(runtime: &Runtime, layout: &Layout) -> Option<ObjectLayout> {
        let (3, minor @ 6..=15, _) = runtime.version else {
            return None;
        };
        // Bytes of the object header: 16, or 32 in free-threaded builds.
        let head = layout.bytes_size;
        let longer = head - 16;
        Some(ObjectLayout {
            lock: match minor {
                ..=11 => GilLocation::Current,
                12 => GilLocation::Interpreter {
                    at: 384,
                    free_threaded: false,
                },
                _ => GilLocation::Interpreter {
                    at: 16,
                    free_threaded: runtime.free_threaded,
                },
            },
            names: match minor {
                ..=7 => LocalNames::Three(64, 80, 72),
                8..=10 => LocalNames::Three(72, 88, 80),
                _ => LocalNames::One(96 + longer),
            },
            frame_locals: match minor {
                6 => 376,
                7..=9 => 360,
                10 => 352,
                11..=13 => 72,
                _ => 80,
            },
            tagged: minor >= 14,
            ob_type: head - 8,
            type_name: head + 8,
            type_flags: head + 152,
            type_basicsize: head + 16,
            type_dictoffset: head + 272,
            type_keys: longer
                + match minor {
                    6 | 7 => 856,
                    9 => 864,
                    8 | 10 | 11 => 872,
                    12..=14 => 880,
                    _ => 888,
                },
            instance_dict: match minor {
                ..=10 => None,
                11 => Some(InstanceDict::ValuesAndDict { values: 32, dict: 24 }),
                12 => Some(InstanceDict::ValuesOrDict(24)),
                _ => Some(InstanceDict::DictOrInline(if runtime.free_threaded { 8 } else { 24 })),
            },
            module_dict: head,
            body: head,
            tuple_items: head + if minor >= 14 { 16 } else { 8 },
            list_items: head + 8,
            tagged_int: minor >= 12,
            dict_used: head,
            dict_keys: head + 16,
            dict_values: head + 24,
            values_first: if minor >= 13 { 8 } else { 0 },
            dict_kinds: minor >= 11,
        })
    }
}

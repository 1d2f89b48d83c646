//! Where each CPython keeps what is looked at once, while a thread stands still: values of local variables, and who holds
//! the lock of the interpreter (the GIL).
//!
//! On x86-64, from the DWARF of the releases named in tables.rs: Include/object.h, longintrepr.h, listobject.h,
//! tupleobject.h, floatobject.h, cellobject.h, code.h and frameobject.h, later below Include/cpython; Objects/dict-common.h,
//! Include/internal/pycore_dict.h, pycore_gil.h, pycore_interp.h.

use super::Runtime;
use crate::layout::Layout;

/// How local variables are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Three tuples of the code object: variables, cells, free variables.
    Three(u16, u16, u16),
    /// One tuple.
    One(u16),
}

/// Where the holder of the lock is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// `_PyThreadState_Current`, `_PyRuntime.gilstate.tstate_current`: `Layout::runtime_current`.
    Current,
    /// Each interpreter points to its lock, `struct _gil_runtime_state`, here. Free-threaded builds have one that is not
    /// in use, as a rule, and says so.
    Interpreter { at: u16, free_threaded: bool },
}

/// Offsets in bytes; those of objects begin at the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Objects {
    pub lock: Lock,
    pub names: Names,
    /// First local variable in a frame.
    pub frame_locals: u16,
    /// The low bits of references in frames are tags (Include/internal/pycore_stackref.h, v3.14.0).
    pub tagged: bool,
    pub ob_type: u16,
    pub type_name: u16,
    pub type_flags: u16,
    /// `ob_size` of objects that vary in size, `lv_tag` of integers, the value of others.
    pub body: u16,
    pub tuple_items: u16,
    /// Pointer to the items.
    pub list_items: u16,
    /// The sign of an integer stands in two low bits beside the number of digits (3.12 and later).
    pub tagged_int: bool,
    pub dict_used: u16,
    pub dict_keys: u16,
    pub dict_values: u16,
    /// First value, from what `dict_values` points to.
    pub values_first: u16,
    /// Keys tell the size of their index in bytes, and their kind (3.11 and later).
    pub dict_kinds: bool,
}

impl Objects {
    /// `None` for a version that is not known.
    pub fn of(runtime: &Runtime, layout: &Layout) -> Option<Objects> {
        let (3, minor @ 6..=15, _) = runtime.version else {
            return None;
        };
        // What stands before an object's own fields: 16 bytes, 32 in free-threaded builds.
        let head = layout.bytes_size;
        let longer = head - 16;
        Some(Objects {
            lock: match minor {
                ..=11 => Lock::Current,
                12 => Lock::Interpreter {
                    at: 384,
                    free_threaded: false,
                },
                _ => Lock::Interpreter {
                    at: 16,
                    free_threaded: runtime.free_threaded,
                },
            },
            names: match minor {
                ..=7 => Names::Three(64, 80, 72),
                8..=10 => Names::Three(72, 88, 80),
                _ => Names::One(96 + longer),
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

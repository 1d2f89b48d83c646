//! What minor versions differ in where objects lie in memory, and which buffers they own.

/// Facts of one version. Objects and offsets of other kinds: object_layout.rs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// Bytes of a pool of Python's allocator (`POOL_SIZE`): a page up to 3.9, 16 KiB with the radix tree of later versions
    /// (Objects/obmalloc.c, v3.9.18 and v3.10.13; Include/internal/pycore_obmalloc.h, v3.12.1 to v3.15.0).
    pub pool: u32,
    /// Flags of types, any of which puts two words ahead of an object and of its header of the garbage collector:
    /// `Py_TPFLAGS_MANAGED_DICT`, and from 3.12 on `Py_TPFLAGS_MANAGED_WEAKREF` (`_PyType_PreHeaderSize`,
    /// Include/internal/pycore_object.h, v3.12.1; `Py_TPFLAGS_MANAGED_DICT` alone, Objects/typeobject.c, v3.11.7).
    pub pre_header: u64,
    /// A `bytearray` keeps its bytes in an object of the type `bytes` (Include/cpython/bytearrayobject.h, v3.15.0),
    /// which has a row
    /// of its own.
    pub bytearray_has_bytes: bool,
}

/// `Py_TPFLAGS_MANAGED_WEAKREF`
pub(super) const MANAGED_WEAKREF: u64 = 1 << 3;
/// `Py_TPFLAGS_MANAGED_DICT`
pub const MANAGED_DICT: u64 = 1 << 4;

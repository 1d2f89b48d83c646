//! What is particular to the version of the interpreter that this runs in.

use std::sync::OnceLock;

use nativeprof::cpython::versions::{self, OwnInterpreter};
use pyo3::prelude::*;

/// One that is newer than all known versions is taken for the newest of these.
pub fn interpreter(py: Python<'_>) -> &'static OwnInterpreter {
    static OWN: OnceLock<&OwnInterpreter> = OnceLock::new();
    OWN.get_or_init(|| {
        let version = py.version_info();
        let facts = versions::nearest((version.major, version.minor, version.patch));
        &facts.unwrap_or_else(versions::newest).own
    })
}

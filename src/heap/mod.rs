//! What the memory of a process is made of, read from outside while it runs.
//!
//! - `census` has the order of the steps.
//! - `present` says which pages are in memory. Only these are read: reading another one would bring it into the target.
//!   What a file has of the others is read there, by `files`.
//! - `mappings` divides the resident memory of a process into parts that sum to it; `stacks` finds the stacks of its threads.
//! - `glibc` finds the arenas of the C library and walks their chunks.
//! - `blocks` counts those chunks that are no objects of Python by size; `classes` names the classes of C++ objects there.
//! - `estimate` has what is known from a sample: a value with its interval.
//! - `python` counts the objects of Python by type.

pub mod blocks;
pub mod census;
mod classes;
pub mod estimate;
pub mod files;
pub mod glibc;
pub mod mappings;
pub mod present;
pub mod python;
pub mod stacks;

//! What the memory of a process is made of, read from outside while it runs.
//!
//! - `estimate` has what is known from a sample: a value with its interval.
//! - `python` counts the objects of Python by type.

pub mod estimate;
pub mod python;

//! nativeprof: native and CPython stacks of live processes in one count tree.

pub mod arch;
pub mod export;
pub mod sample;
pub mod tree;
pub mod unwind;

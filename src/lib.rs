//! nativeprof: native and CPython stacks of live processes in one count tree.

pub mod arch;
pub mod capture;
pub mod code;
pub mod error;
pub mod export;
pub mod layout;
pub mod process;
pub mod sample;
pub mod tree;
pub mod unwind;

//! nativeprof: native and CPython stacks of live processes in one count tree.

pub mod arch;
pub mod capture;
pub mod cli;
pub mod code;
pub mod error;
pub mod export;
pub mod interp;
pub mod layout;
pub mod merge;
pub mod process;
pub mod replay;
pub mod resolve;
pub mod sample;
pub mod session;
pub mod tree;
pub mod unwind;

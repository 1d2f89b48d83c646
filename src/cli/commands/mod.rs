//! One file per command.

pub mod allocations;
pub mod compare;
pub mod completions;
pub mod diff;
pub mod doctor;
pub mod dump;
pub mod export;
pub mod heap;
pub mod host;
pub mod mcp;
pub mod merge;
pub mod push;
pub mod record;
pub mod replay;
pub mod report;
pub mod selftest;
pub mod top;

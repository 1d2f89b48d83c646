//! nativeprof: native and CPython stacks of live processes in one count tree.
//!
//! ```text
//! capture ─► session: unwind ─► merge ─► tree ─► resolve ─► export
//!               ▲ process, interp
//! ```
//!
//! - [`capture`] turns live threads (or a tape) into a stream of [`sample::Event`]s. It knows nothing of unwinding,
//!   names or trees; what it must know to walk Python frames comes in as plain numbers ([`layout`]).
//! - [`process`] knows what is mapped where, and asks the machine through one trait ([`process::host::Host`]).
//! - [`unwind`] makes native frames with their stack intervals from registers and a stack copy; it knows no process.
//! - [`interp`] finds the interpreter, reads code objects and groups Python frames; it knows no native frame.
//! - [`merge`] puts both into calling order by stack address; it is pure.
//! - [`tree`] counts stacks as prefixes; [`resolve`] names each frame once, at the end; [`export`] writes the result.
//! - [`combine`] makes one profile of several.
//! - [`session`] calls the stages in order, [`replay`] does so for a tape, [`inside`] for the process that it runs in,
//!   [`cli`] for people; [`tui`] is the live view.
//!
//! Imports go one way, `unsafe` stays in few files: `tests/layers.rs` holds both.

pub mod arch;
pub mod capture;
pub mod cli;
pub mod code;
pub mod combine;
pub mod error;
pub mod export;
pub mod inside;
pub mod interp;
pub mod layout;
pub mod merge;
pub mod process;
pub mod replay;
pub mod resolve;
pub mod sample;
pub mod session;
pub mod tree;
pub mod tui;
pub mod unwind;

//! nativeprof: native and CPython stacks of live processes in one count tree.
//!
//! ```text
//! capture ─► session: unwind ─► interleave ─► count tree ─► resolve ─► export
//!               ▲ target, cpython
//! ```
//!
//! The API for other programs is the finished profile: [`profile`] reads, compares and merges it, [`export`] writes the
//! formats of other tools, [`error`] and [`frame`] have their types. Everything else is internal. What is public of it serves
//! the command, the Python package, tests and benches, which are crates of their own; it may change in any version.
//!
//! - `capture` turns live threads (or a tape) into a stream of `event::Event`s. It knows nothing of unwinding,
//!   names or trees; what it needs to walk Python frames comes in as plain numbers (`cpython_layout`).
//! - `sys` has all system calls and parsers of `/proc`; `privileges` what this user may do.
//! - `process` knows what is mapped where, and reads the system through one trait (`process::system::System`).
//! - `unwind` makes native frames with their stack intervals from registers and a stack copy; it knows no process.
//! - `edges` judges those frames by the machine code: can a caller have called its callee?
//! - `cpython` finds the interpreter, reads code objects and groups Python frames; it knows no native frame.
//! - `interleave` puts both into calling order by stack address; it is pure.
//! - `counts` counts raw stacks as prefixes, and `resolve` names each frame once, at the end.
//! - `profile` holds, compares, merges, reads and writes finished profiles; `export` writes the formats of other tools.
//! - `heap` says what the memory of a process is made of.
//! - `history` writes and lists directories of segments.
//! - `mcp` answers the requests of language models, by running the program's own commands.
//! - `push` sends the segments of a history to receivers.
//! - `session` calls the stages in order: for a live `Recording`, a `Replay` of a `tape`, or an `Inspection` of one process.
//!   `in_process` records the process that it runs in, `host` all processes for months, `cli` does all of this for people;
//!   `tui` is the live view.
//!
//! A profile that `nativeprof record -o profile.json` wrote, read by a program:
//!
//! ```
//! use nativeprof::export;
//! use nativeprof::profile::{json, stats::Stats};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let profile = json::read(&std::fs::read("fixtures/golden/profile.json")?)?;
//! let stats = Stats::new(&profile);
//! let hottest = (0..).zip(stats.functions()).max_by_key(|(_, counts)| counts.self_count);
//! if let Some((function, counts)) = hottest {
//!     println!("{}: {} of {} samples", stats.frame(function).name, counts.self_count, stats.samples());
//! }
//! export::by_name("speedscope")?.write_default(&profile, &mut std::io::sink())?;
//! # Ok(())
//! # }
//! ```
//!
//! Imports go one way, `unsafe` stays in few files: `tests/layers.rs` checks both.

pub use nativeprof_profile as profile;
#[doc(hidden)]
pub use nativeprof_profile::escape;
pub use nativeprof_profile::{error, export};

pub mod frame;

#[doc(hidden)]
pub mod arch;
mod bytes;
#[doc(hidden)]
pub mod capture;
#[doc(hidden)]
pub mod cli;
mod code_map;
mod codec;
mod counts;
#[doc(hidden)]
pub mod cpython;
#[doc(hidden)]
pub mod cpython_layout;
#[doc(hidden)]
pub mod edges;
#[doc(hidden)]
pub mod event;
#[doc(hidden)]
pub mod heap;
#[doc(hidden)]
pub mod history;
#[doc(hidden)]
pub mod host;
#[doc(hidden)]
pub mod in_process;
#[doc(hidden)]
pub mod interleave;
mod limits;
#[doc(hidden)]
pub mod mcp;
mod privileges;
#[doc(hidden)]
pub mod process;
#[doc(hidden)]
pub mod push;
#[doc(hidden)]
pub mod resolve;
#[doc(hidden)]
pub mod session;
#[doc(hidden)]
pub mod sys;
#[doc(hidden)]
pub mod tape;
#[doc(hidden)]
pub mod truncation;
mod tui;
#[doc(hidden)]
pub mod unwind;

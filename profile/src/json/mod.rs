//! Profiles as JSON: the count tree of Dask's `distributed.profile`, with the timeline and metadata of the
//! recording.

pub(crate) mod lexer;
pub mod read;
pub mod write;

pub use read::{JsonError, read};
pub use write::{FORMAT_VERSION, write, write_expanded, write_gz};

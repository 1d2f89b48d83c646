//! Profiles of nativeprof: what other programs need to read, write, compare and merge them. No samples are taken here.
//!
//! [`model::Profile`] is a finished profile. [`json`] reads and writes it, [`import`] reads it from the files of other tools
//! and from our pages, [`build::Builder`] makes one without a recording, [`stats`] makes tables of it, [`diff`] compares two,
//! [`merge`] sums several up, and [`export`] writes the formats of other tools.
//!
//! ```
//! use nativeprof_profile::{export, json, stats::Stats};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let profile = json::read(&std::fs::read("../fixtures/golden/profile.json")?)?;
//! println!("{} samples", Stats::new(&profile).samples());
//! export::by_name("speedscope")?.write_default(&profile, &mut std::io::sink())?;
//! # Ok(())
//! # }
//! ```

pub mod build;
pub mod category;
pub mod diff;
pub mod error;
pub mod escape;
pub mod export;
pub mod fold;
pub mod folded;
pub mod function_names;
pub mod gil_waits;
pub mod idle;
pub mod import;
pub mod interpreter_frames;
pub mod intervals;
pub mod json;
pub mod labels;
pub mod lags;
pub mod machine;
pub mod measure;
pub mod memory_over_time;
pub mod merge;
pub mod model;
mod otlp;
pub mod places;
pub mod pstats;
pub mod resident;
pub mod samples;
pub mod stacks_by_line;
mod standard_modules;
pub mod stats;
pub mod summary;
pub mod sums;
pub mod task_groups;
pub mod values;
pub mod view;
pub mod views;
pub mod waits;
pub mod your_functions;

pub use otlp::parts as otlp_parts;

//! Finished profiles: [`model::Profile`] comes out of `resolve`, or of [`build::Builder`] without a recording, and [`stats`] makes
//! tables of it.

pub mod build;
pub mod category;
pub mod diff;
pub mod fold;
pub mod folded;
pub mod gil_waits;
pub mod idle;
pub mod interpreter_frames;
pub mod intervals;
pub mod json;
pub mod labels;
pub mod lags;
pub mod measure;
pub mod merge;
pub mod model;
pub mod places;
pub mod pstats;
pub mod samples;
pub mod stacks_by_line;
mod standard_modules;
pub mod stats;
pub mod summary;
pub mod sums;
pub mod values;
pub mod view;
pub mod views;
pub mod waits;

//! The count tree: raw stacks go in as prefixes, the named [`profile::Profile`] comes out of `resolve`, and [`stats`] makes
//! tables of it. [`build::Builder`] makes a profile without raw stacks.

pub mod build;
pub mod diff;
pub mod places;
pub mod profile;
pub mod raw;
pub mod stats;
pub mod values;

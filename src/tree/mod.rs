//! The count tree: raw stacks go in as prefixes, the named [`profile::Profile`] comes out of `resolve`, and [`stats`] makes
//! tables of it.

pub mod diff;
pub mod profile;
pub mod raw;
pub mod stats;

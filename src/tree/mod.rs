//! The count tree: raw stacks go in as prefixes, the named [`Profile`] comes out of `resolve`.

pub mod profile;
pub mod raw;

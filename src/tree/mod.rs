//! The count tree: raw stacks go in as prefixes, the named [`profile::Profile`] comes out of `resolve`.

pub mod profile;
pub mod raw;

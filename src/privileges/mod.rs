//! What this user may do, and dropping privileges that are not needed.

pub mod checks;
pub mod credentials;
pub mod facts;
pub mod phases;

//! Output formats: pure functions of a finished `Profile`.

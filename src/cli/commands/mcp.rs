//! `mcp`: answers a language model's client.

use std::io::{self, IsTerminal};

use crate::cli::args::McpCommand;
use crate::cli::print_status;
use crate::error::Result;
use crate::mcp;
use crate::mcp::permission::Permission;

/// Answers on standard output until standard input ends.
///
/// # Errors
/// Those of [`Permission::new`] and [`mcp::serve`].
pub fn mcp(options: &McpCommand) -> Result<()> {
    let permission = Permission::new(&options.root, &options.allow_pid, &options.allow_run)?;
    if io::stdin().is_terminal() {
        print_status(
            "waiting for messages of the Model Context Protocol; register this command in a client instead of typing it",
        );
    }
    mcp::serve(permission, io::stdin().lock(), io::stdout())
}

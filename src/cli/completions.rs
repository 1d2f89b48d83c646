//! `completions` and `man`: what shells and `man` know of our words, made from their definitions.

use std::io::{self, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::args::Cli;
use super::place::{PUBLIC, Place};
use super::table;
use crate::error::{Error, Result};
use crate::process::privilege;

const NAME: &str = "nativeprof";

/// Prints the completions for a shell.
///
/// # Errors
/// `Io`.
pub fn completions(shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut text);
    print(&text)
}

/// Prints the main manual page, or writes one for each command into a folder.
///
/// # Errors
/// `Io`, `NotPermitted`.
pub fn man(folder: Option<&Path>) -> Result<()> {
    let mut main = Cli::command().disable_help_subcommand(true);
    main.build();
    let Some(folder) = folder else {
        return print(&page(&main).map_err(unwritten)?);
    };
    privilege::become_caller()?;
    let mut count = 0;
    for command in std::iter::once(&main).chain(main.get_subcommands()) {
        let name = command.get_display_name().unwrap_or(command.get_name());
        let place = Place::new(&folder.join(format!("{name}.1")), PUBLIC)?;
        let bytes = page(command).map_err(unwritten)?;
        place
            .write(&|out: &mut dyn Write| out.write_all(&bytes))
            .map_err(unwritten)?;
        count += 1;
    }
    super::say(&format!("written: {count} pages in {}", folder.display()));
    Ok(())
}

fn page(command: &Command) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    Man::new(command.clone()).render(&mut bytes)?;
    Ok(bytes)
}

fn print(text: &[u8]) -> Result<()> {
    table::print(&String::from_utf8_lossy(text)).map_err(unwritten)
}

fn unwritten(e: io::Error) -> Error {
    Error::io("cannot write it", e).hint("make room, or choose another place")
}

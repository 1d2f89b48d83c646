//! `completions` and `man`: shell completions and manual pages, generated from the definitions of the arguments.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::args::Cli;
use crate::cli::output::atomic_file::{OutputFile, PUBLIC};
use crate::cli::output::table;
use crate::error::{Error, Result};
use crate::privileges::phases;

const NAME: &str = "nativeprof";
/// What to type if the directory cannot be written.
const HINT: &str = "nativeprof man DIR   with another directory";

/// Prints the completions for a shell.
///
/// # Errors
/// `Io`.
pub fn completions(shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut text);
    print(&text)
}

/// Prints the main manual page, or writes one per command into a directory, which is created if missing.
///
/// # Errors
/// `Io`, `NotPermitted`.
pub fn man(directory: Option<&Path>) -> Result<()> {
    let mut main = Cli::command().disable_help_subcommand(true);
    main.build();
    let Some(directory) = directory else {
        return print(&page(&main).map_err(unwritten)?);
    };
    phases::switch_to_invoking_user()?;
    fs::create_dir_all(directory)
        .map_err(|e| Error::io(format!("cannot create the directory {}", directory.display()), e).hint(HINT))?;
    let mut count = 0;
    for command in std::iter::once(&main).chain(main.get_subcommands()) {
        let name = command.get_display_name().unwrap_or(command.get_name());
        let file = OutputFile::new(&directory.join(format!("{name}.1")), PUBLIC).map_err(|e| e.hint(HINT))?;
        let bytes = page(command).map_err(unwritten)?;
        file.write(&|out: &mut dyn Write| out.write_all(&bytes))
            .map_err(unwritten)?;
        count += 1;
    }
    crate::cli::print_status(&format!("written: {count} pages in {}", directory.display()));
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
    Error::io("cannot write the output", e).hint("free some disk space, or write to another file")
}

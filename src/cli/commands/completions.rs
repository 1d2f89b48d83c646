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

/// What bash calls, before the function that clap generates.
const BASH_WRAPPER: &str = r#"
_nativeprof() {
    local word="$2" before="$3" earlier
    COMPREPLY=()
    # Options after `--` are those of the command that is recorded.
    for earlier in "${COMP_WORDS[@]:1:COMP_CWORD-1}" ; do
        if [[ "${earlier}" == "--" ]] ; then
            return 0
        fi
    done
    # `--browser=on` is three words.
    if [[ "${word}" == "=" ]] ; then
        before="${COMP_WORDS[COMP_CWORD-1]}"
        word=""
    elif [[ "${before}" == "=" ]] ; then
        before="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    _nativeprof_words "$1" "${word}" "${before}"
    # All options begin with a dash, which bash would insert.
    if [[ "${word}" != -* ]] ; then
        local all=("${COMPREPLY[@]}") one
        COMPREPLY=()
        for one in "${all[@]}" ; do
            if [[ "${one}" != -* ]] ; then
                COMPREPLY+=("${one}")
            fi
        done
    fi
}
"#;

/// Prints the completions for a shell.
///
/// # Errors
/// `Io`.
pub fn completions(shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut text);
    if shell == Shell::Bash {
        text = wrapped(&String::from_utf8_lossy(&text)).into_bytes();
    }
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

/// The function that clap generates for bash, called by ours.
fn wrapped(script: &str) -> String {
    let renamed = script.replacen("_nativeprof() {", "_nativeprof_words() {", 1);
    let end = renamed.find("\nif [[ \"${BASH_VERSINFO").unwrap_or(renamed.len());
    let (words, rest) = renamed.split_at(end);
    format!("{words}{BASH_WRAPPER}{rest}")
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

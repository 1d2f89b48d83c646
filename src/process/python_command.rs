//! Command lines of Python: which interpreter runs which program, so that another module can run the program instead.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::command::search;

/// Bytes of a script that are read for the name of its interpreter.
const MAX_HEAD: u64 = 4096;
/// Options of Python that have a value, in the same word or the next (`SHORT_OPTS` in Python/getopt.c, CPython 3.9 to 3.15),
/// and those that name the program.
const WITH_VALUE: &str = "WX";
const PROGRAM: &str = "cm";
/// Options that print something and run nothing.
const NO_PROGRAM: &str = "hV?";
/// An option that changes how the script is read, which only the interpreter can do.
const SKIP_LINE: char = 'x';

/// Ends of the names of interpreters: free-threaded and debug builds, as they install themselves and as distributions name them.
const BUILDS: &[&str] = &["", "t", "d", "td", "-dbg", "-debug"];

/// A command line of Python in parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PythonCommand {
    /// The interpreter, as a command.
    pub interpreter: String,
    /// Options of the interpreter.
    pub options: Vec<String>,
    /// The program with its arguments: `-m MODULE ...`, `-c TEXT ...`, or `-- SCRIPT ...`.
    pub program: Vec<String>,
}

/// The reason why a command line is none of Python's with a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPythonCommand {
    /// It runs another program.
    NotPython,
    /// It runs Python without a program.
    NoProgram,
    /// It has an option that cannot be kept.
    SkipsLine,
}

impl PythonCommand {
    /// The parts of a command line: of an interpreter, known by its name, or of a script whose first line names one.
    ///
    /// # Errors
    /// Why it is no command line of Python that runs a program.
    pub fn new(words: &[String]) -> Result<PythonCommand, NoPythonCommand> {
        let (first, rest) = words.split_first().ok_or(NoPythonCommand::NotPython)?;
        if is_python(first) {
            return split(first, rest);
        }
        let script = search(first).ok_or(NoPythonCommand::NotPython)?;
        let mut interpreter = interpreter_of(&script).ok_or(NoPythonCommand::NotPython)?;
        let name = interpreter.remove(0);
        // The kernel runs the interpreter with the path of the script.
        interpreter.push(script.to_string_lossy().into_owned());
        interpreter.extend_from_slice(rest);
        split(&name, &interpreter)
    }

    /// The words that run `module` with some arguments before those of the program.
    pub fn run_by(&self, module: &str, arguments: &[String]) -> Vec<String> {
        let mut words = vec![self.interpreter.clone()];
        words.extend_from_slice(&self.options);
        words.extend(["-m".into(), module.into()]);
        words.extend_from_slice(arguments);
        words.extend_from_slice(&self.program);
        words
    }

    /// The words that run a text.
    pub fn run_text(&self, text: &str) -> Vec<String> {
        let mut words = vec![self.interpreter.clone()];
        words.extend_from_slice(&self.options);
        words.extend(["-c".into(), text.into()]);
        words
    }
}

/// Whether a command has the name of a Python interpreter: `python`, `/usr/bin/python3.14t`.
fn is_python(command: &str) -> bool {
    let name = command.rsplit('/').next().unwrap_or_default();
    name.strip_prefix("python").is_some_and(|rest| {
        let build = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        BUILDS.contains(&build)
    })
}

/// Splits the words after the interpreter into options, and the program with its arguments.
fn split(interpreter: &str, words: &[String]) -> Result<PythonCommand, NoPythonCommand> {
    let found = |options: &[String], program: Vec<String>| {
        Ok(PythonCommand {
            interpreter: interpreter.into(),
            options: options.to_vec(),
            program,
        })
    };
    let script = |at: usize| -> Vec<String> {
        let words = words.get(at..).unwrap_or_default();
        std::iter::once("--".into()).chain(words.iter().cloned()).collect()
    };
    let mut options: Vec<String> = Vec::new();
    let mut at = 0;
    while let Some(word) = words.get(at) {
        if word == "--" && at + 1 < words.len() {
            return found(&options, script(at + 1));
        }
        if word == "-" || !word.starts_with('-') {
            return found(&options, script(at));
        }
        if let Some(long) = word.strip_prefix("--") {
            match long {
                "check-hash-based-pycs" => options.extend(words.get(at..at + 2).unwrap_or_default().iter().cloned()),
                _ => return Err(NoPythonCommand::NoProgram),
            }
            at += 2;
            continue;
        }
        let mut letters = word.char_indices().skip(1);
        let has_value = letters.find(|(_, letter)| {
            *letter == SKIP_LINE
                || [WITH_VALUE, PROGRAM, NO_PROGRAM]
                    .iter()
                    .any(|some| some.contains(*letter))
        });
        match has_value {
            None => options.push(word.clone()),
            Some((_, SKIP_LINE)) => return Err(NoPythonCommand::SkipsLine),
            Some((_, letter)) if NO_PROGRAM.contains(letter) => return Err(NoPythonCommand::NoProgram),
            Some((place, letter)) => {
                let rest = &word[place + 1..];
                let after = at + 1 + usize::from(rest.is_empty());
                let value = if rest.is_empty() {
                    words.get(at + 1).ok_or(NoPythonCommand::NoProgram)?
                } else {
                    rest
                };
                if PROGRAM.contains(letter) {
                    if place > 1 {
                        options.push(word[..place].into());
                    }
                    let own = [format!("-{letter}"), value.into()];
                    let arguments = words.get(after..).unwrap_or_default();
                    return found(&options, own.into_iter().chain(arguments.iter().cloned()).collect());
                }
                options.extend(words[at..after].iter().cloned());
                at = after;
                continue;
            }
        }
        at += 1;
    }
    Err(NoPythonCommand::NoProgram)
}

/// The Python interpreter that a script names in its first line, with its options. Installers write long paths, and paths with
/// spaces, into a second line that a shell executes: `'''exec' "/path of/python" "$0" "$@"`.
fn interpreter_of(script: &Path) -> Option<Vec<String>> {
    let mut head = Vec::new();
    File::open(script).ok()?.take(MAX_HEAD).read_to_end(&mut head).ok()?;
    let mut lines = head.split(|byte| *byte == b'\n');
    let text = |line: &[u8]| std::str::from_utf8(line).ok().map(|line| line.trim().to_string());
    let first = text(lines.next()?.strip_prefix(b"#!")?)?;
    let (program, rest) = first.split_once([' ', '\t']).unwrap_or((&first, ""));
    let rest = rest.trim();
    let words: Vec<String> = match program.rsplit('/').next()? {
        "env" => {
            let words = rest.split_ascii_whitespace();
            // `env -S python3 -X dev`; one that sets variables is not followed.
            let words = words.skip_while(|word| ["-S", "--split-string"].contains(word));
            words.map(String::from).collect()
        }
        "sh" if rest.is_empty() => {
            let second = text(lines.next()?)?;
            let path = second.strip_prefix("'''exec' ")?.strip_suffix(" \"$0\" \"$@\"")?;
            vec![path.trim_matches('"').to_string()]
        }
        // The kernel passes what follows as one word.
        _ if rest.is_empty() => vec![program.to_string()],
        _ => vec![program.to_string(), rest.to_string()],
    };
    words.first().is_some_and(|first| is_python(first)).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn command_lines_have_options_and_a_program() {
        for (line, expected) in [
            ("python3 a.py -m x", Ok(("", "-- a.py -m x"))),
            ("/opt/python3.14t -X dev -Bu a.py 1", Ok(("-X dev -Bu", "-- a.py 1"))),
            ("python3-dbg -Xdev -Werror a.py", Ok(("-Xdev -Werror", "-- a.py"))),
            ("python3 -BXdev -BW error a.py", Ok(("-BXdev -BW error", "-- a.py"))),
            ("python -m pkg.mod -c 1", Ok(("", "-m pkg.mod -c 1"))),
            ("python -Im pkg", Ok(("-I", "-m pkg"))),
            ("python -cpass 1", Ok(("", "-c pass 1"))),
            ("python -Bcpass", Ok(("-B", "-c pass"))),
            ("python - 1", Ok(("", "-- - 1"))),
            ("python -B -- -a.py", Ok(("-B", "-- -a.py"))),
            (
                "python --check-hash-based-pycs always a.py",
                Ok(("--check-hash-based-pycs always", "-- a.py")),
            ),
            ("python", Err(NoPythonCommand::NoProgram)),
            ("python -B", Err(NoPythonCommand::NoProgram)),
            ("python -c", Err(NoPythonCommand::NoProgram)),
            ("python -X", Err(NoPythonCommand::NoProgram)),
            ("python --", Err(NoPythonCommand::NoProgram)),
            ("python --version", Err(NoPythonCommand::NoProgram)),
            ("python --check-hash-based-pycs", Err(NoPythonCommand::NoProgram)),
            ("python -BV a.py", Err(NoPythonCommand::NoProgram)),
            ("python -x a.py", Err(NoPythonCommand::SkipsLine)),
            ("pythonic a.py", Err(NoPythonCommand::NotPython)),
            ("sleep 1", Err(NoPythonCommand::NotPython)),
            ("/no/such/file", Err(NoPythonCommand::NotPython)),
            ("", Err(NoPythonCommand::NotPython)),
        ] {
            let found = PythonCommand::new(&words(line));
            let found = found.map(|found| (found.options.join(" "), found.program.join(" ")));
            let expected = expected.map(|(options, program)| (options.to_string(), program.to_string()));
            assert_eq!(found, expected, "{line}");
        }
    }

    #[test]
    fn scripts_name_their_interpreter() {
        let directory = std::env::temp_dir().join(format!("nativeprof-python-command-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let script = directory.join("script");
        for (text, expected) in [
            ("#!/opt/bin/python3\n", Some("/opt/bin/python3 -m run 1 -- S x")),
            (
                "#! /opt/bin/python3 -sE \n",
                Some("/opt/bin/python3 -sE -m run 1 -- S x"),
            ),
            ("#!/usr/bin/env python3.12\n", Some("python3.12 -m run 1 -- S x")),
            (
                "#!/usr/bin/env -S python3 -X dev\n",
                Some("python3 -X dev -m run 1 -- S x"),
            ),
            (
                "#!/bin/sh\n'''exec' \"/a b/python3\" \"$0\" \"$@\"\n",
                Some("/a b/python3 -m run 1 -- S x"),
            ),
            ("#!/usr/bin/env A=1 python3\n", None),
            ("#!/bin/sh\nexec python3\n", None),
            ("#!/bin/bash\n", None),
            ("#!\n", None),
            ("\x7fELF", None),
        ] {
            std::fs::write(&script, text).expect("written");
            let path = script.to_str().expect("UTF-8").to_string();
            let found = PythonCommand::new(&[path.clone(), "x".into()]).ok();
            let found = found.map(|found| found.run_by("run", &["1".into()]).join(" "));
            assert_eq!(found, expected.map(|line| line.replace('S', &path)), "{text}");
        }
        std::fs::remove_dir_all(&directory).expect("removed");
    }
}

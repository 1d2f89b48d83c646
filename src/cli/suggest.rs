//! Answers to what people type who know other profilers, or forget a part.

use std::path::Path;

use clap::error::{ContextKind, ContextValue};

use crate::error::{Error, ErrorKind, Result};

/// Options of other profilers, and what is used for them here.
const OTHER_OPTIONS: &[(&str, &str)] = &[
    (
        "--native",
        "native frames are always included; --no-native leaves them out",
    ),
    ("-n", "native frames are always included; --no-native leaves them out"),
    (
        "--nonblocking",
        "eBPF never stops the target, and is used where it is permitted",
    ),
    ("--idle", "time in which threads wait is sampled with --mode wall"),
    ("-i", "time in which threads wait is sampled with --mode wall"),
    ("--follow-forks", "child processes are sampled with --subprocesses"),
    ("--children", "child processes are sampled with --subprocesses"),
    ("-C", "child processes are sampled with --subprocesses"),
    ("-F", "the rate is set with -r HZ"),
    ("--frequency", "the rate is set with -r HZ"),
    ("--call-graph", "complete stacks are always recorded"),
];

/// Our message where the first word is no command but can be understood: a PID, a script, a profile, a program.
pub fn instead_of_command(e: &clap::Error) -> Option<Error> {
    if e.kind() != clap::error::ErrorKind::InvalidSubcommand {
        return None;
    }
    let Some(ContextValue::String(word)) = e.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let (is, hint) = meaning(word, Path::new(word).is_file())?;
    let what = format!("{word} is no command of nativeprof");
    Some(Error::new(ErrorKind::Usage, what).why(is).hint(hint))
}

/// What a word looks like, and the command that fits; `None` if it is more likely a misspelled command.
fn meaning(word: &str, is_file: bool) -> Option<(String, String)> {
    let ends = |endings: &[&str]| endings.iter().any(|e| word.ends_with(e));
    if word.bytes().all(|c| c.is_ascii_digit()) {
        let hint =
            format!("nativeprof attach {word} -d 10 -o out.svg   or: nativeprof dump {word}, nativeprof top {word}");
        return Some(("it looks like a PID".into(), hint));
    }
    if ends(&[".py"]) {
        let hint = format!("nativeprof record -o out.svg -- python3 {word}");
        return Some(("it looks like a Python script".into(), hint));
    }
    if ends(&[".json", ".json.gz"]) {
        let hint = format!("nativeprof report {word}   or: nativeprof export {word} -o out.html");
        return Some(("it looks like a profile".into(), hint));
    }
    if ends(&[".tape"]) {
        return Some((
            "it looks like a tape".into(),
            format!("nativeprof replay {word} -o out.svg"),
        ));
    }
    if word.contains('/') || is_file {
        let hint = format!("nativeprof record -o out.svg -- {word}");
        return Some(("it looks like a program".into(), hint));
    }
    None
}

/// Refuses a command to record that is an option which we do not have: clap takes it for the first word of the command.
///
/// # Errors
/// `Usage`.
pub fn check_command(command: &[String]) -> Result<()> {
    let Some(word) = command.first().filter(|word| word.starts_with('-')) else {
        return Ok(());
    };
    let name = word.split('=').next().unwrap_or(word);
    let known = OTHER_OPTIONS.iter().find(|(option, _)| *option == name);
    let why = known.map_or("`record` has no such option", |(_, instead)| instead);
    let what = format!("unknown option {name}");
    let hint = "nativeprof record --help   (options come first, then `--` and the command)";
    Err(Error::new(ErrorKind::Usage, what).why(why).hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_are_no_commands() {
        for (word, is_file, expected) in [
            ("1234", false, Some("nativeprof attach 1234")),
            ("app.py", false, Some("-- python3 app.py")),
            ("out.json.gz", true, Some("nativeprof report out.json.gz")),
            ("bug.tape", true, Some("nativeprof replay bug.tape")),
            ("./a.out", false, Some("-- ./a.out")),
            ("recrod", false, None),
        ] {
            let hint = meaning(word, is_file).map(|(_, hint)| hint);
            match expected {
                Some(part) => assert!(hint.as_ref().is_some_and(|h| h.contains(part)), "{word}: {hint:?}"),
                None => assert_eq!(hint, None, "{word}"),
            }
        }
    }

    #[test]
    fn options_of_other_profilers() {
        let check = |word: &str| check_command(&[word.to_string(), "x".into()]);
        assert!(check("python3").is_ok());
        let e = check("--native").expect_err("refused");
        assert!(e.what.ends_with("--native") && e.why.contains("--no-native"), "{e}");
        let e = check("--speed=5").expect_err("refused");
        assert_eq!((e.what.as_str(), e.kind), ("unknown option --speed", ErrorKind::Usage));
    }
}

//! Answers to what people type who know other profilers, or forget a part.

use std::path::Path;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory};

use super::args::{Cli, RecordCommand};
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
    ("-F", "the rate is set with --rate HZ"),
    ("--frequency", "the rate is set with --rate HZ"),
    ("-g", "complete stacks are always recorded"),
    ("--call-graph", "complete stacks are always recorded"),
];

/// Options without which others have no effect.
const NEEDED: &[(&str, &str)] = &[("--waits", "--kind"), ("--save-tape", "--tape-samples")];

/// Our message where the first word is not a command but can be understood: a PID, a script, a profile, a program.
pub fn instead_of_command(e: &clap::Error) -> Option<Error> {
    if e.kind() != clap::error::ErrorKind::InvalidSubcommand {
        return None;
    }
    let Some(ContextValue::String(word)) = e.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let (is, hint) = meaning(word, Path::new(word).is_file())?;
    let what = format!("{word} is not a command");
    Some(Error::new(ErrorKind::Usage, what).why(is).hint(hint))
}

/// What clap says about wrong arguments, in our style: what is wrong, why, and what to type. `None` for help and versions,
/// which are no errors.
pub fn usage_error(e: &clap::Error) -> Option<Error> {
    use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand as MissingCommand;
    if !e.use_stderr() || e.kind() == MissingCommand {
        return None;
    }
    let is_command = |word: &String| !word.starts_with('-') && e.kind() != clap::error::ErrorKind::InvalidSubcommand;
    let word = std::env::args_os().nth(1).and_then(|word| word.into_string().ok());
    let command = word.filter(is_command);
    let command = command.map_or("nativeprof".into(), |word| format!("nativeprof {word}"));
    Some(in_our_style(&e.render().to_string(), &command))
}

/// The error in a text of clap for a command: a sentence with details below it, tips, the usage, and a line on --help.
fn in_our_style(text: &str, command: &str) -> Error {
    let (mut what, mut why, mut usage) = (String::new(), Vec::new(), String::new());
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(line) = line.strip_prefix("error: ") {
            let (sentence, reason) = line.split_once("': ").map_or((line, None), |(a, b)| (a, Some(b)));
            what = match reason {
                Some(_) => format!("{sentence}'"),
                None => sentence
                    .trim_end_matches(':')
                    .replace("unrecognized subcommand", "unknown command"),
            };
            // Ranges as Rust writes them.
            why.extend(reason.map(|reason| {
                reason
                    .replace(" is not in ", " is not in the range ")
                    .replace("..=", " to ")
            }));
        } else if let Some(tip) = line.strip_prefix("tip: ") {
            // One about `--` would send the word to another argument.
            if !tip.starts_with("to pass ") {
                why.push(tip.replace("subcommand", "command"));
            }
        } else if let Some(line) = line.strip_prefix("Usage: ") {
            usage = line.to_string();
        } else if let Some(values) = line.strip_prefix("[possible values: ") {
            why.push(format!("possible values: {}", values.trim_end_matches(']')));
        } else if !line.starts_with("For more information") {
            why.push(line.to_string());
        }
    }
    if why.is_empty() && what.contains("cannot be used with") {
        why.push("only one of the two can be given".into());
        // It names both.
        usage.clear();
    }
    if what.contains("required arguments were not provided") {
        let missing = why.join(", ");
        let needing = NEEDED.iter().find(|(needed, _)| missing.starts_with(needed));
        (what, why) = match (why.len(), needing) {
            (1, Some((needed, needing))) => {
                usage.clear();
                (
                    format!("{needing} needs {needed}"),
                    vec![format!("{needed} is missing")],
                )
            }
            (1, None) if missing == "<COMMAND>..." => {
                usage = format!("{command} -o out.svg -- COMMAND, or {command} --pid PID");
                (
                    "no command to run".into(),
                    vec!["neither a command nor a PID is given".into()],
                )
            }
            (1, None) if command == "nativeprof top" => {
                usage = format!("{command} PID, or {command} -- COMMAND");
                (
                    "no program to show".into(),
                    vec!["neither a PID nor a command is given".into()],
                )
            }
            (1, None) => (format!("missing argument {missing}"), vec!["it is required".into()]),
            _ => (format!("missing arguments {missing}"), vec!["they are required".into()]),
        };
    }
    if why.is_empty() {
        why.extend(replacement(&what, command).or(reason_of(&what)).map(String::from));
    }
    let help = format!("{command} --help");
    let hint = match usage.as_str() {
        "" => help,
        usage => format!("{usage}   (all options: {help})"),
    };
    Error::new(ErrorKind::Usage, what).why(why.join("; ")).hint(hint)
}

/// What a command has instead of the option of another profiler that clap's sentence refuses.
fn replacement(what: &str, command: &str) -> Option<&'static str> {
    let option = what.strip_prefix("unexpected argument '")?.split('\'').next()?;
    let (_, instead) = OTHER_OPTIONS.iter().find(|(other, _)| *other == option)?;
    let cli = Cli::command();
    let ours = cli.find_subcommand(command.strip_prefix("nativeprof ")?)?;
    let has = |option: &str| ours.get_arguments().any(|argument| argument.get_long() == Some(option));
    let mut named = instead.split(' ').filter_map(|word| word.strip_prefix("--"));
    named.all(has).then_some(*instead)
}

/// Why a sentence of clap that comes without a reason is so.
fn reason_of(what: &str) -> Option<&'static str> {
    [
        ("unexpected argument '-", "the command has no such option"),
        ("unexpected argument '", "the command does not take that many arguments"),
        ("unknown command ", "no command has this name or a similar one"),
        ("a value is required ", "the option does not work without a value"),
    ]
    .iter()
    .find_map(|(start, reason)| what.starts_with(start).then_some(*reason))
}

/// What a word seems to be, and the command that fits; `None` if it is more likely a misspelled command.
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
    let ours = RecordCommand::augment_args(clap::Command::new("record"));
    let similar = ours.get_arguments().filter_map(clap::Arg::get_long).find(|long| {
        let typed = name.trim_start_matches('-');
        typed.len() >= 3 && (typed.starts_with(long) || long.starts_with(typed))
    });
    let why = match (known, similar) {
        (Some((_, instead)), _) => (*instead).to_string(),
        (None, Some(long)) => format!("a similar option exists: --{long}"),
        (None, None) => "`record` has no such option".into(),
    };
    let what = format!("unknown option {name}");
    let hint = "nativeprof record --help   (options come first, then `--` and the command)";
    Err(Error::new(ErrorKind::Usage, what).why(why).hint(hint))
}

/// Refuses a command where a PID is given too.
///
/// # Errors
/// `Usage`.
pub fn check_no_command(pid: u32, command: &[String]) -> Result<()> {
    check_command(command)?;
    if command.is_empty() {
        return Ok(());
    }
    Err(
        Error::new(ErrorKind::Usage, "`record` takes a PID or a command, not both")
            .why(format!("--pid {pid} and the command {} are given", command.join(" ")))
            .hint(format!(
                "nativeprof record --pid {pid} -o out.svg, or nativeprof record -o out.svg -- COMMAND"
            )),
    )
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
    fn wrong_arguments_in_our_style() {
        for (text, expected) in [
            (
                "error: the following required arguments were not provided:\n  <PID|NAME>\n\nUsage: nativeprof dump --json \
                 <PID|NAME>\n\nFor more information, try '--help'.\n",
                "missing argument <PID|NAME>\n  why: it is required\n  try: nativeprof dump --json <PID|NAME>   (all \
                 options: nativeprof dump --help)",
            ),
            (
                "error: the following required arguments were not provided:\n  --output <FILE>\n  <FILE>...\n",
                "missing arguments --output <FILE>, <FILE>...\n  why: they are required\n  try: nativeprof dump --help",
            ),
            (
                "error: the following required arguments were not provided:\n  --waits\n\nUsage: nativeprof report --waits \
                 <FILE>\n",
                "--kind needs --waits\n  why: --waits is missing\n  try: nativeprof dump --help",
            ),
            (
                "error: the following required arguments were not provided:\n  <COMMAND>...\n\nUsage: nativeprof record\n",
                "no command to run\n  why: neither a command nor a PID is given\n  try: nativeprof dump -o out.svg -- \
                 COMMAND, or nativeprof dump --pid PID   (all options: nativeprof dump --help)",
            ),
            (
                "error: the argument '--tree' cannot be used with '--by <BY>'\n\nUsage: nativeprof report --tree <FILE>\n",
                "the argument '--tree' cannot be used with '--by <BY>'\n  why: only one of the two can be given\n  \
                 try: nativeprof dump --help",
            ),
            (
                "error: unexpected argument '--native' found\n",
                "unexpected argument '--native' found\n  why: native frames are always included; --no-native leaves them \
                 out\n  try: nativeprof dump --help",
            ),
            (
                "error: unexpected argument '--children' found\n",
                "unexpected argument '--children' found\n  why: the command has no such option\n  try: nativeprof dump --help",
            ),
            (
                "error: unexpected argument '-f' found\n\n  tip: to pass '-f' as a value, use '-- -f'\n",
                "unexpected argument '-f' found\n  why: the command has no such option\n  try: nativeprof dump --help",
            ),
            (
                "error: invalid value '0' for '--pairs <N>': 0 is not in 1..=9\n",
                "invalid value '0' for '--pairs <N>'\n  why: 0 is not in the range 1 to 9\n  try: nativeprof dump --help",
            ),
            (
                "error: unrecognized subcommand 'recrod'\n\n  tip: a similar subcommand exists: 'record'\n",
                "unknown command 'recrod'\n  why: a similar command exists: 'record'\n  try: nativeprof dump --help",
            ),
            (
                "error: invalid value 'lin' for '--by <BY>'\n  [possible values: function, line]\n\n  tip: a similar value \
                 exists: 'line'\n\nFor more information, try '--help'.\n",
                "invalid value 'lin' for '--by <BY>'\n  why: possible values: function, line; a similar value exists: \
                 'line'\n  try: nativeprof dump --help",
            ),
        ] {
            assert_eq!(in_our_style(text, "nativeprof dump").to_string(), expected);
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
        assert!(check("--output-file").expect_err("refused").why.ends_with(": --output"));
        assert!(check_no_command(7, &[]).is_ok());
        let with_pid = |word: &str| check_no_command(7, &[word.into()]).expect_err("refused").what;
        assert_eq!(with_pid("-g"), "unknown option -g");
        assert_eq!(with_pid("python3"), "`record` takes a PID or a command, not both");
    }
}

//! Answers to what people type who know other profilers, or forget a part.

use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind as Kind};
use clap::{Args, CommandFactory};

use super::args::{Cli, RecordCommand};
use super::quoted_words;
use crate::error::{Error, ErrorKind, Result};

/// Options of other profilers (perf 6.1, py-spy 0.4), and what is used for them here. Of several answers to one option, the
/// first is given whose own options the command has.
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
    ("-s", "py-spy's -s is --subprocesses here"),
    ("-t", "py-spy's -t is --threads here"),
    ("-l", "py-spy's -l is --locals here"),
    (
        "-l",
        "functions are not split by line, as with py-spy's -F; with --lines they are",
    ),
    ("-F", "the rate is set with --rate HZ"),
    ("--frequency", "the rate is set with --rate HZ"),
    ("-g", "complete stacks are always recorded; py-spy's -g is --gil here"),
    ("-g", "complete stacks are always recorded"),
    ("--call-graph", "complete stacks are always recorded"),
];

/// Options without which others have no effect.
const NEEDED: &[(&str, &str)] = &[("--waits", "--kind"), ("--save-tape", "--tape-samples")];

/// Our message where the first word is not a command but can be understood: a PID, a script, a profile, a program.
pub fn instead_of_command(e: &clap::Error) -> Option<Error> {
    if e.kind() != Kind::InvalidSubcommand {
        return None;
    }
    let Some(ContextValue::String(word)) = e.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let (is, hint) = meaning(word, Path::new(word).is_file())?;
    let what = format!("{word} is not a command");
    Some(Error::new(ErrorKind::Usage, what).why(is).hint(hint))
}

/// The error for arguments that clap refuses: what is wrong, why, and what to type. `None` for help and versions, which are no
/// errors.
pub fn usage_error(e: &clap::Error) -> Option<Error> {
    let word = std::env::args_os().nth(1).and_then(|word| word.into_string().ok());
    usage_error_of(e, word.as_deref())
}

/// The same, where the first argument is `word`.
fn usage_error_of(e: &clap::Error, word: Option<&str>) -> Option<Error> {
    if !e.use_stderr() || e.kind() == Kind::DisplayHelpOnMissingArgumentOrSubcommand {
        return None;
    }
    let is_command = |word: &&str| !word.starts_with('-') && e.kind() != Kind::InvalidSubcommand;
    let command = word.filter(is_command);
    let command = command.map_or("nativeprof".into(), |word| format!("nativeprof {word}"));
    let WrongUse { what, why, usage } = wrong_use(e, &command);
    let help = format!("{command} --help");
    let hint = match usage {
        None => help,
        Some(usage) => format!("{usage}   (all options: {help})"),
    };
    Some(Error::new(ErrorKind::Usage, what).why(why).hint(hint))
}

/// A wrong use of a command.
struct WrongUse {
    what: String,
    why: String,
    /// What to type, if that says more than the rest.
    usage: Option<String>,
}

fn wrong_use(e: &clap::Error, command: &str) -> WrongUse {
    let context = |kind| e.get(kind).map(values).unwrap_or_default();
    let first = |kind| context(kind).into_iter().next().unwrap_or_default();
    let (argument, value) = (first(ContextKind::InvalidArg), first(ContextKind::InvalidValue));
    // With a title.
    let usage = first(ContextKind::Usage);
    let usage = usage
        .split_once(": ")
        .map(|(_, usage)| usage.lines().next().unwrap_or(usage).trim().to_string());
    let with_usage = |what: String, why: String| WrongUse {
        what,
        why,
        usage: usage.clone(),
    };
    let without_usage = |what: String, why: String| WrongUse { what, why, usage: None };
    let reasons = || {
        let possible = context(ContextKind::ValidValue);
        let possible = (!possible.is_empty()).then(|| format!("possible values: {}", possible.join(", ")));
        let similar = [
            ("command", ContextKind::SuggestedSubcommand),
            ("argument", ContextKind::SuggestedArg),
            ("value", ContextKind::SuggestedValue),
        ];
        let similar = similar
            .into_iter()
            .filter_map(|(name, kind)| similar_exist(name, &context(kind)));
        let all: Vec<String> = possible.into_iter().chain(similar).collect();
        (!all.is_empty()).then(|| all.join("; "))
    };
    match e.kind() {
        Kind::UnknownArgument => {
            let what = format!("unexpected argument '{argument}' found");
            let similar = first(ContextKind::SuggestedArg);
            // A similar option may mean the opposite.
            let instead = replacement(&argument, command).map(String::from);
            if let Some(why) = instead.or_else(|| opposite(&argument, &similar, command)) {
                let usage =
                    usage.map(|usage| usage.replacen(&format!(" {similar}"), "", usize::from(!similar.is_empty())));
                return WrongUse { what, why, usage };
            }
            let why = reasons().unwrap_or_else(|| {
                if argument.starts_with('-') {
                    "the command has no such option".into()
                } else {
                    "the command does not take that many arguments".into()
                }
            });
            with_usage(what, why)
        }
        Kind::InvalidSubcommand => {
            let word = first(ContextKind::InvalidSubcommand);
            let why = reasons().unwrap_or_else(|| "no command has this name or a similar one".into());
            with_usage(format!("unknown command '{word}'"), why)
        }
        Kind::InvalidValue if value.is_empty() => {
            let why = reasons().unwrap_or_else(|| "the option does not work without a value".into());
            with_usage(
                format!("a value is required for '{argument}' but none was supplied"),
                why,
            )
        }
        Kind::InvalidValue | Kind::ValueValidation => {
            let source = std::error::Error::source(e).map(|source| source.to_string());
            // Ranges as Rust writes them.
            let source = source.map(|text| {
                text.replace(" is not in ", " is not in the range ")
                    .replace("..=", " to ")
            });
            let why = source
                .or_else(reasons)
                .unwrap_or_else(|| "the option does not take it".into());
            with_usage(format!("invalid value '{value}' for '{argument}'"), why)
        }
        Kind::ArgumentConflict => match &context(ContextKind::PriorArg)[..] {
            [prior] if *prior == argument => with_usage(
                format!("the argument '{argument}' cannot be used multiple times"),
                "it is given twice".into(),
            ),
            // The sentence names both.
            [prior] => without_usage(
                format!("the argument '{argument}' cannot be used with '{prior}'"),
                "only one of the two can be given".into(),
            ),
            others => with_usage(
                format!("the argument '{argument}' cannot be used with others that are given"),
                others.join(", "),
            ),
        },
        Kind::MissingRequiredArgument => missing(&context(ContextKind::InvalidArg), command, usage),
        // Nothing that we use makes any other.
        kind => {
            let what = kind.as_str().unwrap_or("the arguments are wrong");
            with_usage(what.into(), argument)
        }
    }
}

/// The error for arguments that are not given.
fn missing(arguments: &[String], command: &str, usage: Option<String>) -> WrongUse {
    let missing = arguments.join(", ");
    let (what, why, usage) = match arguments {
        [one] => {
            let needing = NEEDED.iter().find(|(needed, _)| one.starts_with(needed));
            if let Some((needed, needing)) = needing {
                (
                    format!("{needing} needs {needed}"),
                    format!("{needed} is missing"),
                    None,
                )
            } else if one == "<COMMAND>..." {
                (
                    "no command to run".into(),
                    "neither a command nor a PID is given".into(),
                    Some(format!("{command} -o out.svg -- COMMAND, or {command} --pid PID")),
                )
            } else if command == "nativeprof top" {
                (
                    "no program to show".into(),
                    "neither a PID nor a command is given".into(),
                    Some(format!("{command} PID, or {command} -- COMMAND")),
                )
            } else {
                (format!("missing argument {missing}"), "it is required".into(), usage)
            }
        }
        _ => (
            format!("missing arguments {missing}"),
            "they are required".into(),
            usage,
        ),
    };
    WrongUse { what, why, usage }
}

/// The texts of a context.
fn values(value: &ContextValue) -> Vec<String> {
    match value {
        ContextValue::String(text) => vec![text.clone()],
        ContextValue::Strings(texts) => texts.clone(),
        ContextValue::StyledStr(text) => vec![text.to_string()],
        _ => Vec::new(),
    }
}

/// A sentence on similar words that exist, if there are any.
fn similar_exist(name: &str, words: &[String]) -> Option<String> {
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    match &quoted[..] {
        [] => None,
        [one] => Some(format!("a similar {name} exists: {one}")),
        several => Some(format!("similar {name}s exist: {}", several.join(", "))),
    }
}

/// What a command has instead of an option of another profiler.
fn replacement(option: &str, command: &str) -> Option<&'static str> {
    let cli = Cli::command();
    let ours = cli.find_subcommand(command.strip_prefix("nativeprof ")?)?;
    let has = |option: &str| ours.get_arguments().any(|argument| argument.get_long() == Some(option));
    let is_possible = |instead: &str| {
        let mut named = instead.split(' ').filter_map(|word| word.strip_prefix("--"));
        named.all(|word| has(word.trim_end_matches(';')))
    };
    let answers = OTHER_OPTIONS.iter().filter(|(other, _)| *other == option);
    answers
        .map(|(_, instead)| *instead)
        .find(|instead| is_possible(instead))
}

/// The answer to an option whose opposite exists: `--kernel` or `--no-kernel`. `similar` is what clap suggests.
fn opposite(option: &str, similar: &str, command: &str) -> Option<String> {
    let cli = Cli::command();
    let ours = cli.find_subcommand(command.strip_prefix("nativeprof ")?)?;
    let typed = option.strip_prefix("--")?;
    let negated = match typed.strip_prefix("no-") {
        Some(rest) => rest.to_string(),
        None => format!("no-{typed}"),
    };
    let similar = similar.strip_prefix("--").unwrap_or("");
    let is_opposite =
        |long: &str| long == negated || long == similar && long.starts_with("no-") != typed.starts_with("no-");
    let mut flags = ours
        .get_arguments()
        .filter(|argument| !argument.get_action().takes_values());
    let found = flags.find_map(|flag| flag.get_long().filter(|long| is_opposite(long)))?;
    Some(format!("that is the default; --{found} is the opposite"))
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
    let command = "nativeprof record";
    let known = replacement(name, command).map(String::from);
    let known = known.or_else(|| opposite(name, "", command));
    let ours = RecordCommand::augment_args(clap::Command::new("record"));
    let similar = ours.get_arguments().filter_map(clap::Arg::get_long).find(|long| {
        let typed = name.trim_start_matches('-');
        typed.len() >= 3 && (typed.starts_with(long) || long.starts_with(typed))
    });
    let why = match (known, similar) {
        (Some(instead), _) => instead,
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
            .why(format!(
                "--pid {pid} and the command {} are given",
                quoted_words(command)
            ))
            .hint(format!(
                "nativeprof record --pid {pid} -o out.svg, or nativeprof record -o out.svg -- COMMAND"
            )),
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

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
        for (words, what, why, hint) in [
            (
                "dump",
                "missing argument <PID|NAME>",
                "it is required",
                "nativeprof dump <PID|NAME>   (all options: nativeprof dump --help)",
            ),
            (
                "dump --json",
                "missing argument <PID|NAME>",
                "it is required",
                "nativeprof dump --json <PID|NAME>   (all options: nativeprof dump --help)",
            ),
            (
                "merge",
                "missing arguments --output <FILE>, <FILE>...",
                "they are required",
                "nativeprof merge --output <FILE> <FILE>...   (all options: nativeprof merge --help)",
            ),
            (
                "report --kind io x.json",
                "--kind needs --waits",
                "--waits is missing",
                "nativeprof report --help",
            ),
            (
                "record",
                "no command to run",
                "neither a command nor a PID is given",
                "nativeprof record -o out.svg -- COMMAND, or nativeprof record --pid PID   (all options: nativeprof record --help)",
            ),
            (
                "top",
                "no program to show",
                "neither a PID nor a command is given",
                "nativeprof top PID, or nativeprof top -- COMMAND   (all options: nativeprof top --help)",
            ),
            (
                "report --tree --by line x",
                "the argument '--tree' cannot be used with '--by <BY>'",
                "only one of the two can be given",
                "nativeprof report --help",
            ),
            (
                "report --tree --tree x",
                "the argument '--tree' cannot be used multiple times",
                "it is given twice",
                "nativeprof report [OPTIONS] <FILE> [FILTER]...   (all options: nativeprof report --help)",
            ),
            (
                "report --nativ x",
                "unexpected argument '--nativ' found",
                "that is the default; --no-native is the opposite",
                "nativeprof report <FILE> [FILTER]...   (all options: nativeprof report --help)",
            ),
            (
                "attach --native 1",
                "unexpected argument '--native' found",
                "native frames are always included; --no-native leaves them out",
                "nativeprof attach [PID|NAME]   (all options: nativeprof attach --help)",
            ),
            (
                "attach --frequency 5 1",
                "unexpected argument '--frequency' found",
                "the rate is set with --rate HZ",
                "nativeprof attach [OPTIONS] [PID|NAME]   (all options: nativeprof attach --help)",
            ),
            (
                "dump --children 1",
                "unexpected argument '--children' found",
                "the command has no such option",
                "nativeprof dump [OPTIONS] [PID|NAME]   (all options: nativeprof dump --help)",
            ),
            (
                "dump -f 1",
                "unexpected argument '-f' found",
                "the command has no such option",
                "nativeprof dump [OPTIONS] [PID|NAME]   (all options: nativeprof dump --help)",
            ),
            (
                "dump 1 2",
                "unexpected argument '2' found",
                "the command does not take that many arguments",
                "nativeprof dump [OPTIONS] [PID|NAME]   (all options: nativeprof dump --help)",
            ),
            (
                "selftest --pairs 0",
                "invalid value '0' for '--pairs <N>'",
                "0 is not in the range 1 to 4294967295",
                "nativeprof selftest --help",
            ),
            (
                "record --rate x -- y",
                "invalid value 'x' for '--rate <HZ>'",
                "a rate is a whole number of samples per second, 1 or more: 99, 250hz, 10khz",
                "nativeprof record --help",
            ),
            (
                "report --by lin x",
                "invalid value 'lin' for '--by <BY>'",
                "possible values: function, category, line, module, thread, process, label; a similar value exists: 'line'",
                "nativeprof report --help",
            ),
            (
                "record --event",
                "a value is required for '--event <EVENT>' but none was supplied",
                "possible values: auto, cpu-clock, cycles, page-faults, context-switches",
                "nativeprof record --help",
            ),
            (
                "recrod",
                "unknown command 'recrod'",
                "a similar command exists: 'record'",
                "nativeprof <COMMAND>   (all options: nativeprof --help)",
            ),
            (
                "xyzzy",
                "unknown command 'xyzzy'",
                "no command has this name or a similar one",
                "nativeprof <COMMAND>   (all options: nativeprof --help)",
            ),
        ] {
            let words = words.split(' ');
            let refused = Cli::try_parse_from(["nativeprof"].into_iter().chain(words.clone()));
            let refused = refused.err().unwrap_or_else(|| panic!("{what}: accepted"));
            let error = usage_error_of(&refused, words.clone().next()).expect("an error");
            assert_eq!(error.to_string(), format!("{what}\n  why: {why}\n  try: {hint}"));
        }
        let help = Cli::try_parse_from(["nativeprof", "--help"]).expect_err("no command");
        assert!(usage_error_of(&help, Some("--help")).is_none());
    }

    /// What is suggested for each command: never the opposite of what is typed.
    #[test]
    fn answers_to_options_that_do_not_exist() {
        for (words, expected) in [
            (
                "record attach",
                &[
                    ("-s", "py-spy's -s is --subprocesses here"),
                    ("-t", "py-spy's -t is --threads here"),
                    ("-l", "with --lines they are"),
                    ("-n", "native frames are always included"),
                    ("-g", "py-spy's -g is --gil here"),
                    ("-i", "--mode wall"),
                    ("--no-kernel", "that is the default; --kernel is the opposite"),
                    ("--no-threads", "that is the default; --threads is the opposite"),
                    ("--source", "that is the default; --no-source is the opposite"),
                ][..],
            ),
            (
                "dump",
                &[
                    ("--native", "native frames are always included"),
                    ("-l", "py-spy's -l is --locals here"),
                    ("--no-locals", "that is the default; --locals is the opposite"),
                    ("--no-kernel", "that is the default; --kernel is the opposite"),
                ],
            ),
            (
                "top",
                &[
                    ("--native", "native frames are always included"),
                    ("-g", "py-spy's -g is --gil here"),
                    ("--no-gil", "that is the default; --gil is the opposite"),
                ],
            ),
            (
                "report",
                &[("--no-waits", "that is the default; --waits is the opposite")],
            ),
            ("replay", &[("--native", "--no-native leaves them out")]),
        ] {
            for command in words.split(' ') {
                for (option, why) in expected {
                    let refused = Cli::try_parse_from(["nativeprof", command, option, "1"]);
                    let error = match refused {
                        Err(e) => usage_error_of(&e, Some(command)).expect("an error"),
                        // It is taken for the first word of a command.
                        Ok(_) => check_command(&[(*option).to_string(), "x".into()]).expect_err("refused"),
                    };
                    assert!(error.why.contains(why), "{command} {option}: {error}");
                    let suggested = error.hint.split("   (").next().unwrap_or("");
                    assert!(!suggested.contains("--no-"), "{command} {option}: {error}");
                }
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
        assert!(check("--output-file").expect_err("refused").why.ends_with(": --output"));
        assert!(check_no_command(7, &[]).is_ok());
        let with_pid = |word: &str| check_no_command(7, &[word.into()]).expect_err("refused").what;
        assert_eq!(with_pid("-g"), "unknown option -g");
        assert_eq!(with_pid("python3"), "`record` takes a PID or a command, not both");
    }
}

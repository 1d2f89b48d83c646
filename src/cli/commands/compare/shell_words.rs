//! The words of a command that is given in one string.

/// Characters that mean something to a shell, where they are not quoted (POSIX.1-2024, Shell Command Language, 2.2); `[`,
/// `]`, `!`, `{` and `}` do in some places.
const SPECIAL: &str = "|&;<>()$`*?[]{}#~!\n";

/// Words that a shell does not look up as programs where a command begins with them, or that do something else in it.
const SHELL_WORDS: &[&str] = &[
    ".", ":", "alias", "bg", "break", "case", "cd", "command", "continue", "do", "done", "elif", "else", "esac",
    "eval", "exec", "exit", "export", "fg", "fi", "for", "function", "getopts", "hash", "if", "jobs", "local", "read",
    "readonly", "return", "set", "shift", "source", "then", "time", "times", "trap", "type", "ulimit", "umask",
    "unalias", "unset", "until", "wait", "while",
];

/// The program and its arguments: the words of a simple command as a shell would have them, or a shell that runs the text. Its
/// own start would be a part of each run. Whether it is a shell is the second result.
pub fn command(text: &str) -> (Vec<String>, bool) {
    match simple(text) {
        Some(words) if !words.is_empty() => (words, false),
        _ => (["sh", "-c", text].map(String::from).to_vec(), true),
    }
}

/// The words, if they follow from quotes and backslashes alone.
fn simple(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match c {
            ' ' | '\t' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match characters.next()? {
                        '\'' => break,
                        c => word.push(c),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match characters.next()? {
                        '"' => break,
                        '$' | '`' => return None,
                        '\\' => match characters.next()? {
                            c @ ('"' | '\\' | '$' | '`') => word.push(c),
                            '\n' => {}
                            c => word.extend(['\\', c]),
                        },
                        c => word.push(c),
                    }
                }
            }
            '\\' => word
                .get_or_insert_default()
                .push(characters.next().filter(|c| *c != '\n')?),
            // An assignment.
            '=' if words.is_empty() => return None,
            c if SPECIAL.contains(c) => return None,
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    let is_of_shell = |word: &String| SHELL_WORDS.contains(&word.as_str());
    (!words.first().is_some_and(is_of_shell)).then_some(words)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn words_are_those_of_a_shell() {
        for text in [
            "printf %s, a  b\tc",
            "printf %s, 'a b' \"c d\" e\\ f",
            "printf %s, 'a'\"b\"c '' \"\"",
            r#"printf %s, "\"x\" \\ \$ \n" 'a\b' \'"#,
            "printf %s, --x=1 a=b 100% caf\u{e9} a^b a,b @x +y",
            "  printf %s, x  ",
            r#"printf %s, '$HOME `x` * ; # ~'"#,
        ] {
            let (words, is_shell) = command(text);
            assert!(!is_shell, "{text}");
            let ours = Command::new(&words[0]).args(&words[1..]).output().unwrap();
            let of_shell = Command::new("sh").args(["-c", text]).output().unwrap();
            assert_eq!(ours.stdout, of_shell.stdout, "{text}");
        }
        for text in [
            "a | b",
            "a; b",
            "a && b",
            "a > x",
            "a $HOME",
            "a \"$HOME\"",
            "X=1 a",
            "a *.py",
            "a ~/x",
            "a # b",
            "cd x",
            "time a",
            "a 'b",
            "a \"b",
            "a \\",
            "a\nb",
            "(a)",
            "! a",
            "",
        ] {
            let (words, is_shell) = command(text);
            assert!(is_shell && words == ["sh", "-c", text], "{text}: {words:?}");
        }
    }
}

//! Functions by a name that someone types: complete, or only its last parts.

use std::collections::BTreeSet;

use crate::model::Frame;

/// Longer names are taken as they are, bytes.
const MAX_NAME: usize = 4 << 10;

/// What a word names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// No function.
    Nothing,
    /// By frame, whether it has the name.
    Frames(Vec<bool>),
    /// The word is the last part of several names: these, each of which names one function or its variants.
    Several(Vec<String>),
}

/// The frames that a word names, among those that `is_function` accepts.
///
/// The first of these ways that finds any is taken: the complete name or qualified name; the name without parameters; the
/// name without template arguments too; the last parts of one of these, such as `nearest` or `Grid::nearest` of
/// `geo::Grid<double>::nearest(double)`. The last way must lead to one name.
pub fn named(frames: &[Frame], word: &str, is_function: impl Fn(&Frame) -> bool) -> Named {
    if word.is_empty() {
        return Named::Nothing;
    }
    let select = |is_named: &dyn Fn(&Frame) -> bool| -> Option<Vec<bool>> {
        let all: Vec<bool> = frames.iter().map(|f| is_function(f) && is_named(f)).collect();
        all.contains(&true).then_some(all)
    };
    let complete = |f: &Frame| f.name == word || f.qualname == word;
    let short = |f: &Frame| without_parameters(&f.name) == word;
    let shorter = |f: &Frame| plain(&f.name) == word;
    if let Some(all) = select(&complete)
        .or_else(|| select(&short))
        .or_else(|| select(&shorter))
    {
        return Named::Frames(all);
    }
    let ends = |f: &Frame| {
        ends_with(&f.qualname, word) || ends_with(without_parameters(&f.name), word) || ends_with(&plain(&f.name), word)
    };
    let Some(all) = select(&ends) else {
        return Named::Nothing;
    };
    let matching = frames.iter().zip(&all).filter(|(_, is_named)| **is_named);
    let names: BTreeSet<String> = matching
        .map(|(f, _)| match (f.qualname.as_str(), plain(&f.name)) {
            ("", name) if name.is_empty() => f.name.clone(),
            ("", name) => name,
            (qualname, _) => qualname.into(),
        })
        .collect();
    if names.len() > 1 {
        return Named::Several(names.into_iter().collect());
    }
    Named::Frames(all)
}

/// Whether a name ends with these parts.
fn ends_with(name: &str, parts: &str) -> bool {
    let before = name.strip_suffix(parts);
    before.is_some_and(|before| before.ends_with("::") || before.ends_with('.'))
}

/// A name up to its parameters.
fn without_parameters(name: &str) -> &str {
    let mut from = 0;
    if name.len() > MAX_NAME {
        return name;
    }
    while let Some(at) = name[from..].find('(').map(|at| from + at) {
        let Some((inside, after)) = split_closed(&name[at..], '(', ')') else {
            return name;
        };
        let is_part = inside == "(anonymous namespace)" || name[..at].ends_with("operator");
        if !is_part && !continues(after) {
            return &name[..at];
        }
        from = name.len() - after.len();
    }
    name
}

/// Whether something local to a function is named after its parameters.
fn continues(after: &str) -> bool {
    let qualifiers = after.split("::").next().unwrap_or("");
    after.len() > qualifiers.len() && qualifiers.chars().all(|c| c.is_alphabetic() || " &".contains(c))
}

/// A native name without its result, template arguments and parameters: `geo::Grid::nearest` of
/// `double geo::Grid<double>::nearest<int>(int) const`, and `geo::Grid::next` of `<geo::Grid as Iterator>::next` (Rust).
/// Names of more than 4 KiB stay as they are.
pub fn plain(name: &str) -> String {
    if name.len() > MAX_NAME {
        return name.into();
    }
    let mut rest = name;
    // Of `<Type as Trait>::next`, also nested, the types' names remain.
    let mut members = Vec::new();
    while let Some((of, after)) = split_closed(rest, '<', '>')
        && after.starts_with("::")
    {
        members.push(after);
        let of = of.get(1..of.len() - 1).unwrap_or("");
        rest = self_type(of);
    }
    let mut out = plain_path(String::new(), rest);
    while let Some(after) = members.pop() {
        out = plain_path(out, after);
    }
    out
}

/// What precedes ` as `, outside of brackets.
fn self_type(of: &str) -> &str {
    let mut depth = 0usize;
    for (at, c) in of.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            ' ' if depth == 0 && of[at..].starts_with(" as ") => return &of[..at],
            _ => {}
        }
    }
    of
}

/// Appends a name to a scope.
fn plain_path(mut out: String, mut rest: &str) -> String {
    while let Some(c) = rest.chars().next() {
        let operator = rest.strip_prefix("operator").filter(|_| is_start_of_word(&out));
        let sign = operator.map(operator_sign).filter(|sign| !sign.is_empty());
        let closed = match c {
            '<' => split_closed(rest, '<', '>'),
            '{' => split_closed(rest, '{', '}'),
            '(' => split_closed(rest, '(', ')'),
            _ => None,
        };
        match (sign, closed, c) {
            (Some(sign), ..) => {
                let (operator, after) = rest.split_at("operator".len() + sign.len());
                out += operator;
                rest = after;
            }
            (_, Some((_, after)), '<') => {
                rest = after;
                // `<impl Type>` is a part of its own, and arguments can follow `::`.
                out.truncate(out.strip_suffix("::").map_or(out.len(), str::len));
            }
            (_, Some((inside, after)), '{') => {
                out += inside;
                rest = after;
            }
            (_, Some((inside, after)), '(') if inside == "(anonymous namespace)" => {
                out += inside;
                rest = after;
            }
            // Parameters, at the end or of a function that something is local to.
            (_, Some((_, after)), '(') => match after.find("::") {
                Some(at) if continues(after) => rest = &after[at..],
                _ => return out,
            },
            // What precedes is the result, unless it is a conversion operator.
            (_, _, ' ') => {
                rest = &rest[1..];
                if out.ends_with("operator") {
                    out.push(' ');
                } else if !rest.starts_with('<') {
                    out.clear();
                }
            }
            _ => {
                out.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    out
}

fn is_start_of_word(before: &str) -> bool {
    !before.ends_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// The sign after `operator`; empty for conversions and words.
fn operator_sign(after: &str) -> &str {
    for sign in ["()", "[]"] {
        if after.starts_with(sign) {
            return sign;
        }
    }
    let is_sign = |c: char| "<>=-+*/%^&|~!,".contains(c);
    let end = after.find(|c| !is_sign(c)).unwrap_or(after.len());
    &after[..end]
}

/// A bracket at the start with what it encloses, and what follows; `None` if there is none or it is not closed.
fn split_closed(text: &str, open: char, close: char) -> Option<(&str, &str)> {
    if !text.starts_with(open) {
        return None;
    }
    let mut depth = 0usize;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        if c == open {
            depth += 1;
        } else if c == close && (c, before) != ('>', '-') {
            depth -= 1;
            if depth == 0 {
                return Some(text.split_at(at + c.len_utf8()));
            }
        }
        before = c;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::FrameKind;

    #[test]
    fn plain_names() {
        for (name, expected) in [
            ("nearest", "nearest"),
            ("geo::nearest(double, std::vector<int> const&)", "geo::nearest"),
            (
                "double geo::Grid<double>::nearest<int>(int) const",
                "geo::Grid::nearest",
            ),
            (
                "std::vector<int, std::allocator<int> >::push_back(int&&)",
                "std::vector::push_back",
            ),
            ("(anonymous namespace)::f(int)", "(anonymous namespace)::f"),
            (
                "f(int)::{lambda(int)#1}::operator()(int) const",
                "f::{lambda(int)#1}::operator()",
            ),
            (
                "f() const::{lambda()#1}::operator()() const",
                "f::{lambda()#1}::operator()",
            ),
            ("geo::operator<< <char>(int)", "geo::operator<<"),
            ("geo::operator<(geo::P const&)", "geo::operator<"),
            ("P::operator->() const", "P::operator->"),
            ("P::operator int() const", "P::operator int"),
            ("co_operator<int>()", "co_operator"),
            ("<geo::Grid as geo::Walk>::step", "geo::Grid::step"),
            (
                "<alloc::vec::Vec<T,A> as core::ops::Drop>::drop",
                "alloc::vec::Vec::drop",
            ),
            ("<<geo::Grid<T> as A>::Item as B>::step", "geo::Grid::Item::step"),
            ("geo::walk::{closure#0}", "geo::walk::{closure#0}"),
            ("core::slice::<impl [T]>::iter", "core::slice::iter"),
            ("geo::nearest::<u32, 3, geo::go::{closure#0}>", "geo::nearest"),
            ("geo::Grid::<u8>::step", "geo::Grid::step"),
            ("vtable for A<int>", "A"),
            ("<module>", ""),
            ("", ""),
            ("(", "("),
            ("<", "<"),
            ("a<b>>c", "a>c"),
            ("a>b", "a>b"),
            ("a)b(c", "a)b(c"),
            ("é<ü>(ö)", "é"),
        ] {
            assert_eq!(plain(name), expected, "{name}");
            // Parts of names do no harm.
            let at: Vec<usize> = name.char_indices().map(|(at, _)| at).collect();
            for (from, to) in at.iter().flat_map(|from| at.iter().map(move |to| (*from, *to))) {
                let part = name.get(from..to).unwrap_or("");
                assert!(plain(part).len() + without_parameters(part).len() <= 2 * part.len());
            }
        }
        // Hostile names are bounded.
        for unit in ["<", "(", "f(", "<a>::", "{", "operator"] {
            for count in [500, 100_000] {
                let name = unit.repeat(count);
                assert!(plain(&name).len() <= name.len());
                assert!(without_parameters(&name).len() <= name.len());
            }
        }
        let nested = "<".repeat(600) + "a" + &">::b".repeat(600);
        assert_eq!(plain(&nested), "a".to_string() + &"::b".repeat(600));
    }

    #[test]
    fn names_that_are_typed() {
        let native = |name: &str| Frame::new(FrameKind::Native, name);
        let python = |name: &str, qualname: &str| Frame {
            qualname: qualname.into(),
            ..Frame::new(FrameKind::Python, name)
        };
        let frames = [
            native("geo::nearest(int)"),
            native("geo::Grid<int>::walk(int)"),
            native("geo::Grid<double>::walk(double)"),
            native("tree::nearest"),
            python("run", "Outer.Job.run"),
            native("main"),
            native("far::main"),
            native("main(int)::{lambda()#1}::operator()() const"),
        ];
        for (word, expected) in [
            ("geo::nearest", Ok(vec![0])),
            ("geo::nearest(int)", Ok(vec![0])),
            ("tree::nearest", Ok(vec![3])),
            ("nearest", Err(vec!["geo::nearest", "tree::nearest"])),
            // Variants of one function.
            ("walk", Ok(vec![1, 2])),
            ("Grid::walk", Ok(vec![1, 2])),
            ("Grid<int>::walk", Ok(vec![1])),
            ("geo::Grid<double>::walk", Ok(vec![2])),
            ("run", Ok(vec![4])),
            ("Job.run", Ok(vec![4])),
            // The complete name, though another ends with it.
            ("main", Ok(vec![5])),
            ("arest", Ok(vec![])),
            ("", Ok(vec![])),
        ] {
            let found = match named(&frames, word, |_| true) {
                Named::Nothing => Ok(Vec::new()),
                Named::Frames(all) => Ok((0..all.len()).filter(|at| all[*at]).collect()),
                Named::Several(names) => Err(names),
            };
            let expected = expected.map_err(|names| names.into_iter().map(String::from).collect::<Vec<_>>());
            assert_eq!(found, expected, "{word}");
        }
    }
}

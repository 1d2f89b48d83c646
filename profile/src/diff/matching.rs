//! Which functions and modules of two profiles are the same: those of another version of Python, of another build of a module
//! and of a renamed file too.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::interpreter_frames::is_interpreter_file;
use crate::model::{Frame, FrameKind};
use crate::stats::{FunctionId, Stats, module};

/// Maximum number of files of each profile that are compared to find renamed ones.
const MAX_FILES: usize = 1000;

/// One number for what is the same in both profiles.
pub struct RowMap<'a> {
    /// By function of the older and of the newer profile.
    pub of: [Vec<u32>; 2],
    /// A frame of each number, by number: of the newer profile if it is there.
    pub frames: Vec<&'a Frame>,
    /// Python files whose functions are in another file of the newer profile: both paths.
    pub renamed: Vec<(&'a str, &'a str)>,
}

/// A key that is the same for frames of one function; the later kinds ignore more differences.
type KeyOf = fn(&Frame) -> Option<String>;

const FUNCTIONS: &[KeyOf] = &[
    |f| {
        Some(format!(
            "{:?};{};{};{};{};{}",
            f.kind,
            f.name,
            f.filename,
            f.module,
            f.first_line,
            address(f)
        ))
    },
    // Moved within its file; another build of the module.
    |f| Some(format!("{:?};{};{};{}", f.kind, full_name(f), f.filename, f.module)),
    // Of another version of Python, or of the module.
    |f| {
        Some(format!(
            "{:?};{};{};{}",
            f.kind,
            full_name(f),
            unversioned(&f.filename),
            plain_module(&f.module)
        ))
    },
    // Before 3.11 there are no qualified names.
    |f| (f.kind == FrameKind::Python).then(|| format!("{};{}", f.name, unversioned(&f.filename))),
    // Its file is in another directory.
    |f| (f.kind == FrameKind::Python).then(|| format!("{};{}", full_name(f), base(&f.filename))),
    |f| (f.kind == FrameKind::Python).then(|| format!("{};{}", f.name, base(&f.filename))),
];

const MODULES: &[KeyOf] = &[
    |f| Some(module(f).to_string()),
    |f| match f.kind {
        FrameKind::Python => Some(unversioned(&f.filename).to_string()),
        _ => Some(plain_module(module(f))),
    },
    |f| (f.kind == FrameKind::Python).then(|| base(&f.filename).to_string()),
];

/// That of an inlined function is where it was inlined.
fn address(frame: &Frame) -> u64 {
    if frame.kind == FrameKind::Inlined {
        0
    } else {
        frame.address
    }
}

/// Of a task that represents several, the name without their number.
fn full_name(frame: &Frame) -> &str {
    match frame.kind {
        FrameKind::Task => &frame.name,
        _ => frame.full_name(),
    }
}

fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The part of a path below Python's own directory (`.../lib/python3.11/`), which has another name in each version.
fn unversioned(path: &str) -> &str {
    let below = path.match_indices("/python3.").last().and_then(|(at, found)| {
        let rest = &path[at + found.len()..];
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        rest.trim_start_matches('t').strip_prefix('/')
    });
    below.unwrap_or(path)
}

/// A module's name without what differs between versions of Python and of the module: `libpython3.11.so.1.0` and
/// `python3.13` are `python`, `_json.cpython-311-x86_64-linux-gnu.so` is `_json.so`, `libz.so.1.2.13` is `libz.so`.
fn plain_module(name: &str) -> String {
    if is_interpreter_file(name) {
        return "python".into();
    }
    let Some((stem, _)) = name.split_once(".so") else {
        return name.into();
    };
    let tag = stem.find(".cpython-").or_else(|| stem.find(".abi3"));
    format!("{}.so", &stem[..tag.unwrap_or(stem.len())])
}

impl<'a> RowMap<'a> {
    /// The functions of `a` and of the newer `b`, those that are the same paired.
    pub fn of_functions(a: &Stats<'a>, b: &Stats<'a>) -> RowMap<'a> {
        let mut things = Things::new(a, b, FUNCTIONS[0]);
        FUNCTIONS.iter().for_each(|key| things.pair(*key));
        let renamed = things.renamed_files();
        let of_file: BTreeMap<&str, usize> = renamed.iter().enumerate().map(|(i, (old, _))| (*old, i)).collect();
        let to_file: BTreeMap<&str, usize> = renamed.iter().enumerate().map(|(i, (_, new))| (*new, i)).collect();
        things.pair_sides(&|side, f| {
            let files = if side == 0 { &of_file } else { &to_file };
            let file = files.get(&*f.filename).filter(|_| f.kind == FrameKind::Python)?;
            Some(format!("{file};{}", full_name(f)))
        });
        things.numbered(renamed)
    }

    /// The modules of `a` and of the newer `b`, those that are the same paired.
    pub fn of_modules(a: &Stats<'a>, b: &Stats<'a>) -> RowMap<'a> {
        let renamed = RowMap::of_functions(a, b).renamed;
        let mut things = Things::new(a, b, MODULES[0]);
        MODULES.iter().for_each(|key| things.pair(*key));
        things.pair_sides(&|side, f| {
            let of = |(old, new): &&(&str, &str)| if side == 0 { *old } else { *new } == f.filename;
            let (_, new) = renamed.iter().find(of).filter(|_| f.kind == FrameKind::Python)?;
            Some(new.to_string())
        });
        things.numbered(renamed)
    }
}

const NONE: u32 = u32::MAX;

/// What has one first key is one thing of a profile; those of both are paired.
struct Things<'a> {
    /// The first function of each, in the older and in the newer profile.
    frames: [Vec<&'a Frame>; 2],
    /// By function.
    of: [Vec<u32>; 2],
    /// By thing of the older profile, that of the newer one; by thing of the newer one, whether it has a partner.
    pairs: Vec<u32>,
    paired: Vec<bool>,
}

impl<'a> Things<'a> {
    fn new(a: &Stats<'a>, b: &Stats<'a>, key: KeyOf) -> Things<'a> {
        let stats = [a, b];
        let mut frames: [Vec<&'a Frame>; 2] = Default::default();
        let mut of: [Vec<u32>; 2] = Default::default();
        for i in 0..2 {
            let mut known: HashMap<Option<String>, u32> = HashMap::new();
            for id in 0..stats[i].len() as FunctionId {
                let frame = stats[i].frame(id);
                let thing = *known.entry(key(frame)).or_insert_with(|| {
                    frames[i].push(frame);
                    frames[i].len() as u32 - 1
                });
                of[i].push(thing);
            }
        }
        Things {
            pairs: vec![NONE; frames[0].len()],
            paired: vec![false; frames[1].len()],
            frames,
            of,
        }
    }

    fn is_free(&self, side: usize, thing: usize) -> bool {
        match side {
            0 => self.pairs[thing] == NONE,
            _ => !self.paired[thing],
        }
    }

    /// Pairs what has no partner so far, as far as the key is unique on both sides.
    fn pair(&mut self, key: KeyOf) {
        self.pair_sides(&|_, frame| key(frame));
    }

    /// The same with a key for each side.
    fn pair_sides(&mut self, key: &dyn Fn(usize, &Frame) -> Option<String>) {
        let mut having: HashMap<String, [Vec<u32>; 2]> = HashMap::new();
        for (side, frames) in self.frames.iter().enumerate() {
            for (at, frame) in frames.iter().enumerate() {
                if self.is_free(side, at)
                    && let Some(key) = key(side, frame)
                {
                    having.entry(key).or_default()[side].push(at as u32);
                }
            }
        }
        for [left, right] in having.into_values() {
            if let ([left], [right]) = (&left[..], &right[..]) {
                self.pairs[*left as usize] = *right;
                self.paired[*right as usize] = true;
            }
        }
    }

    /// Files of which no function has a partner, with the names of their functions.
    fn files_without_partner(&self, side: usize) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
        let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut others = BTreeSet::new();
        for (at, frame) in self.frames[side].iter().enumerate() {
            if frame.kind != FrameKind::Python {
                continue;
            }
            if self.is_free(side, at) {
                files.entry(&frame.filename).or_default().insert(full_name(frame))
            } else {
                others.insert(&*frame.filename)
            };
        }
        files.retain(|file, _| !others.contains(file));
        files
    }

    /// Pairs of files that have more than half of their functions in common, two at least, each with no other file.
    fn renamed_files(&self) -> Vec<(&'a str, &'a str)> {
        let [old, new] = [0, 1].map(|side| self.files_without_partner(side));
        if old.len().max(new.len()) > MAX_FILES {
            return Vec::new();
        }
        let mut candidates: Vec<(&str, &str)> = Vec::new();
        for (old, functions) in &old {
            for (new, others) in &new {
                let common = functions.intersection(others).count();
                if common >= 2 && 2 * common > functions.len().max(others.len()) {
                    candidates.push((old, new));
                }
            }
        }
        let count = |is_it: &dyn Fn(&(&str, &str)) -> bool| candidates.iter().filter(|pair| is_it(pair)).count();
        let is_unique = |(old, new): &&(&str, &str)| {
            count(&|(other, _)| other == old) == 1 && count(&|(_, other)| other == new) == 1
        };
        candidates.iter().filter(is_unique).copied().collect()
    }

    /// Units are the things of the newer profile, then those that only the older one has.
    fn numbered(self, renamed: Vec<(&'a str, &'a str)>) -> RowMap<'a> {
        let [old, mut frames] = self.frames;
        let mut unit_of_left = self.pairs;
        for (left, unit) in unit_of_left.iter_mut().enumerate() {
            if *unit == NONE {
                *unit = frames.len() as u32;
                frames.push(old[left]);
            }
        }
        let [left, right] = self.of;
        let left = left.into_iter().map(|thing| unit_of_left[thing as usize]).collect();
        RowMap {
            of: [left, right],
            frames,
            renamed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_versions() {
        for (module, expected) in [
            ("libpython3.11.so.1.0", "python"),
            ("libpython3.13.so.1.0", "python"),
            ("python3.13", "python"),
            ("_json.cpython-311-x86_64-linux-gnu.so", "_json.so"),
            ("_json.cpython-313d-x86_64-linux-gnu.so", "_json.so"),
            ("_rust.abi3.so", "_rust.so"),
            ("libz.so.1.2.13", "libz.so"),
            ("libz.so.1.3.1", "libz.so"),
            ("server", "server"),
        ] {
            assert_eq!(plain_module(module), expected, "{module}");
        }
        for (path, expected) in [
            ("/usr/lib/python3.11/json/encoder.py", "json/encoder.py"),
            ("/opt/3.13/lib/python3.13t/json/encoder.py", "json/encoder.py"),
            ("/venv/lib/python3.9/site-packages/a/b.py", "site-packages/a/b.py"),
            ("/srv/python3.11-app/main.py", "/srv/python3.11-app/main.py"),
            ("/srv/main.py", "/srv/main.py"),
        ] {
            assert_eq!(unversioned(path), expected, "{path}");
        }
    }
}

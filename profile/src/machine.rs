//! The machine of a recording, and whether times of two sides are from the same kind of machine and interpreter.

use std::collections::{BTreeMap, BTreeSet};

use crate::interpreter_frames::is_interpreter_file;
use crate::model::Meta;

/// Characters of a text that is kept: files may have any.
const MAX_TEXT: usize = 120;
/// Values of one side that a difference names.
const MAX_VALUES: usize = 3;
/// What a merged profile has where its parts differ.
const MIXED: &str = "mixed";

/// What is known of the machine that a recording was made on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The model of its CPU; empty if unknown.
    pub cpu: String,
    /// CPUs that the target might run on; 0 if unknown, or not the same for all parts of a merged profile.
    pub cores: u32,
    /// The release of its kernel; empty if unknown.
    pub kernel: String,
    /// How it chose the clock rates of its CPUs (cpufreq); empty if unknown.
    pub governor: String,
}

impl Machine {
    /// The texts, by the keys that files have, for reading and writing.
    pub(crate) fn texts(&mut self) -> [(&'static str, &mut String); 3] {
        [
            ("cpu", &mut self.cpu),
            ("kernel", &mut self.kernel),
            ("governor", &mut self.governor),
        ]
    }

    /// The same with texts of a length that can be shown.
    pub fn bounded(mut self) -> Machine {
        for (_, text) in self.texts() {
            if let Some((end, _)) = text.char_indices().nth(MAX_TEXT) {
                text.truncate(end);
            }
        }
        self
    }

    /// That of a merged profile: what is not the same for all is `mixed` (of a number, unknown), and what one of them does not
    /// know is unknown.
    pub(crate) fn merged<'a>(machines: impl Iterator<Item = &'a Machine>) -> Machine {
        let mut machines = machines.cloned();
        let mut all = machines.next().unwrap_or_default();
        for mut other in machines {
            if all.cores != other.cores {
                all.cores = 0;
            }
            for ((_, known), (_, here)) in all.texts().into_iter().zip(other.texts()) {
                if known.is_empty() || here.is_empty() {
                    known.clear();
                } else if known != here {
                    *known = MIXED.into();
                }
            }
        }
        all
    }
}

/// A fact of a recording as text; empty if it is not known.
type Fact = fn(&Meta) -> String;

/// How the recordings of the older and of the newer side differ in what their times depend on: a line for each fact, such as
/// `CPUs allowed: 4 before, 2 after`. What one side does not know makes no difference. Texts are not escaped.
pub fn differences(sides: [&[&Meta]; 2]) -> Vec<String> {
    let facts: [(&str, Fact); 5] = [
        ("CPU", |meta| meta.machine.cpu.clone()),
        ("CPUs allowed", |meta| match meta.machine.cores {
            0 => String::new(),
            cores => cores.to_string(),
        }),
        ("kernel", |meta| meta.machine.kernel.clone()),
        ("governor", |meta| meta.machine.governor.clone()),
        ("Python", |meta| meta.python.clone()),
    ];
    let mut found = Vec::new();
    for (name, get) in facts {
        let values = sides.map(|metas| metas.iter().map(|meta| get(meta)).collect::<BTreeSet<String>>());
        let is_known = |values: &BTreeSet<String>| !values.is_empty() && !values.contains("");
        if values.iter().all(is_known) && values[0] != values[1] {
            found.push(difference(name, &values));
        }
    }
    // A sampled file may be missing on one side, where no stack was in it.
    let builds = sides.map(builds);
    for (file, before) in &builds[0] {
        if let Some(after) = builds[1].get(file)
            && before != after
        {
            found.push(difference(
                &format!("build of {file}"),
                &[before.clone(), after.clone()],
            ));
        }
    }
    found
}

/// By file name, the build IDs of interpreters.
fn builds(metas: &[&Meta]) -> BTreeMap<String, BTreeSet<String>> {
    let mut builds: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for module in metas.iter().flat_map(|meta| &meta.modules) {
        let file = module.path.rsplit('/').next().unwrap_or_default();
        if is_interpreter_file(file) && !module.build_id.is_empty() {
            builds.entry(file.into()).or_default().insert(module.build_id.clone());
        }
    }
    builds
}

fn difference(name: &str, sides: &[BTreeSet<String>; 2]) -> String {
    let [before, after] = sides.each_ref().map(|values| {
        let shown = values.iter().take(MAX_VALUES);
        let mut shown: Vec<String> = shown.map(|value| value.chars().take(MAX_TEXT).collect()).collect();
        if values.len() > MAX_VALUES {
            shown.push(format!("{} others", values.len() - MAX_VALUES));
        }
        shown.join(", ")
    });
    format!("{name}: {before} before, {after} after")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModuleMeta;

    fn machine(cpu: &str, cores: u32, kernel: &str, governor: &str) -> Machine {
        let [cpu, kernel, governor] = [cpu, kernel, governor].map(str::to_string);
        Machine {
            cpu,
            cores,
            kernel,
            governor,
        }
    }

    fn meta(machine: Machine, python: &str, build_id: &str) -> Meta {
        Meta {
            machine,
            python: python.into(),
            modules: vec![ModuleMeta {
                path: "/usr/lib/libpython3.13.so.1.0".into(),
                build_id: build_id.into(),
                ..ModuleMeta::default()
            }],
            ..Meta::default()
        }
    }

    #[test]
    fn differences_are_named_where_both_sides_know() {
        let here = || meta(machine("A", 4, "6.1", "performance"), "CPython 3.13.0", "aa");
        let unknown = Meta::default();
        for (after, expected) in [
            (here(), &[][..]),
            (unknown.clone(), &[]),
            (
                meta(machine("B", 2, "6.2", "powersave"), "CPython 3.13.1", "bb"),
                &[
                    "CPU: A before, B after",
                    "CPUs allowed: 4 before, 2 after",
                    "kernel: 6.1 before, 6.2 after",
                    "governor: performance before, powersave after",
                    "Python: CPython 3.13.0 before, CPython 3.13.1 after",
                    "build of libpython3.13.so.1.0: aa before, bb after",
                ],
            ),
            (
                meta(machine("", 0, "6.1", ""), "", "bb"),
                &["build of libpython3.13.so.1.0: aa before, bb after"],
            ),
        ] {
            assert_eq!(differences([&[&here()], &[&after]]), expected);
        }
        // Pairs of runs on two machines.
        let other = meta(machine("B", 4, "6.1", "performance"), "CPython 3.13.0", "aa");
        assert_eq!(differences([&[&here(), &other], &[&other, &here()]]), [""; 0]);
        assert_eq!(
            differences([&[&here(), &other], &[&here(), &here()]]),
            ["CPU: A, B before, A after"]
        );
        assert_eq!(
            differences([&[&here(), &unknown], &[&other, &other]]),
            [""; 0],
            "one run does not say"
        );
        // Of any length, and many.
        let many: Vec<Meta> = (0..9)
            .map(|at| meta(machine(&format!("{at}{}", "x".repeat(5000)), 4, "6.1", ""), "", ""))
            .collect();
        let many: Vec<&Meta> = many.iter().collect();
        let said = differences([&many, &[&here()]]);
        assert!(
            said.len() == 1 && said[0].len() < 500 && said[0].contains(", 6 others before, A after"),
            "{said:?}"
        );
    }

    #[test]
    fn merged_machines_are_mixed() {
        let [one, other] = [machine("A", 4, "6.1", ""), machine("A", 2, "6.2", "performance")];
        assert_eq!(Machine::merged([&one, &one].into_iter()), one);
        assert_eq!(Machine::merged([&one, &other].into_iter()), machine("A", 0, MIXED, ""));
        assert_eq!(Machine::merged([].into_iter()), Machine::default());
        let long = machine(&"é".repeat(500), 1, "", "").bounded();
        assert_eq!(long.cpu.chars().count(), MAX_TEXT);
    }
}

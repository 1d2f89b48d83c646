//! What of two profiles is compared, and whether it can be.

use std::path::Path;

use super::inputs::Input;
use crate::cli::args::LabelArgs;
use crate::cli::output::{labels, value_of};
use crate::error::{Error, ErrorKind, Result};
use crate::escape::line;
use crate::export::select;
use crate::profile::diff::{self, CpuClock, Normalization};
use crate::profile::measure::Measure;
use crate::profile::model::Profile;
use crate::profile::values::{Unit, ValueType};

/// A profile with the value to compare as its count.
pub struct Compared {
    pub profile: Profile,
    /// How much of the value one independent sample represents.
    pub grain: f64,
    /// The CPU time of the recording, if the value is CPU time and its clock was read.
    pub clock: Option<CpuClock>,
    /// It has exact calls, not samples.
    pub is_traced: bool,
}

/// The recordings of both sides with the value to compare; without a name, the one that each of them shows by default.
///
/// # Errors
/// `Data` if a profile is empty or does not have the value, or if they do not have the same one, or no sample has the requested
/// labels.
pub fn by_value(inputs: [Vec<Input>; 2], value: Option<&str>, labels: &LabelArgs) -> Result<[Vec<Compared>; 2]> {
    for input in inputs.iter().flatten() {
        check_not_empty(&input.profile, &input.path)?;
    }
    let mut first = None;
    let mut chosen = [Vec::new(), Vec::new()];
    for (chosen, side) in chosen.iter_mut().zip(&inputs) {
        for input in side {
            let here = chosen_of(input, value)?;
            check_same([*first.get_or_insert((input, here)), (input, here)], value)?;
            chosen.push(here);
        }
    }
    let compared = |(input, chosen): (Input, usize)| {
        let Input {
            path,
            profile,
            is_recording,
        } = input;
        let clock = cpu_clock(&profile, chosen).filter(|_| is_recording);
        let profile = labels::select(profile, labels, &path)?;
        Ok(Compared {
            grain: diff::grain(&profile, chosen),
            clock,
            is_traced: *profile.count_type() == ValueType::CALLS,
            profile: select::by_value(profile, chosen),
        })
    };
    let [before, after] = inputs;
    let [of_before, of_after] = chosen;
    let side = |inputs: Vec<Input>, chosen| inputs.into_iter().zip(chosen).map(compared).collect::<Result<Vec<_>>>();
    Ok([side(before, of_before)?, side(after, of_after)?])
}

/// The value of a profile that is compared.
fn chosen_of(input: &Input, value: Option<&str>) -> Result<usize> {
    match value {
        Some(value) => value_of(&input.profile, value, &line(&input.path.to_string_lossy())),
        None => Ok(input.profile.default_value()),
    }
}

/// The CPU time that the samples of a recording stand for by the clock of its processes; `chosen` is the value that is compared.
fn cpu_clock(profile: &Profile, chosen: usize) -> Option<CpuClock> {
    /// How many times the clock's time samples may stand for by chance: in short recordings on a busy machine, and in any. If
    /// it is more, the clock is that of a part of the processes.
    const EXCESS: f64 = 1.5;
    const LASTING_EXCESS: f64 = 1.05;
    let (types, meta) = (profile.value_types(), &profile.meta);
    let cpu = profile.find_value(&ValueType::CPU.name)?;
    let is_cpu = types.get(cpu)?.is_per_count() && (chosen == cpu || types.get(chosen)?.kind == ValueType::SAMPLES);
    // Of a merged profile, some parts may not have a clock; of holders of the GIL, it is that of all threads.
    let is_known = meta.target_cpu > 0.0 && meta.merged_from.is_empty() && !meta.is_of_gil_holders();
    let sampled = profile.total_amount(cpu) as f64 / 1e9;
    let clock = CpuClock {
        seconds: meta.target_cpu,
        count: profile.total_amount(chosen),
    };
    let by_chance = 4.0 / (profile.total_amount(0).max(1) as f64).sqrt();
    let excess = (LASTING_EXCESS + by_chance).min(EXCESS);
    (is_cpu && is_known && clock.count > 0 && sampled <= clock.seconds * excess).then_some(clock)
}

/// # Errors
/// `Data` if the values that are compared of the two profiles are not the same.
fn check_same(inputs: [(&Input, usize); 2], value: Option<&str>) -> Result<()> {
    let profiles = inputs.map(|(input, _)| &input.profile);
    let names = inputs.map(|(input, _)| line(&input.path.to_string_lossy()).into_owned());
    let kind = |i: usize| &profiles[i].value_types()[inputs[i].1].kind;
    match value {
        Some(value) if kind(0) != kind(1) => {
            let what = format!("the two profiles' values `{}` cannot be compared", line(value));
            Err(Error::new(ErrorKind::Data, what)
                .why("their names or units differ")
                .hint("choose a value that both profiles have, with --value"))
        }
        None if kind(0) != kind(1) || !count_the_same(&profiles) => {
            Err(different(&profiles, &names, [kind(0), kind(1)]))
        }
        _ => Ok(()),
    }
}

/// Whether samples are taken by a clock in both profiles, or by events in both, as far as that is known.
fn count_the_same(profiles: &[&Profile; 2]) -> bool {
    let events = profiles.map(|profile| &*profile.meta.event);
    let [a, b] = events.map(|event| matches!(Measure::of_event(event, 0), Measure::Event));
    a == b || events.iter().any(|event| event.is_empty())
}

/// The error about profiles that do not show the same by default.
fn different(profiles: &[&Profile; 2], names: &[String; 2], shown: [&ValueType; 2]) -> Error {
    let kinds = |i: usize| profiles[i].value_types().iter().map(|value| &value.kind);
    let list = |kinds: &mut dyn Iterator<Item = &ValueType>| {
        let names: Vec<String> = kinds.map(|kind| line(&kind.name).into_owned()).collect();
        match names.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
            None => "nothing".into(),
        }
    };
    let both: Vec<&ValueType> = kinds(0).filter(|kind| kinds(1).any(|other| other == *kind)).collect();
    let sampled = |i: usize| match &*profiles[i].meta.event {
        event if *shown[i] == ValueType::SAMPLES && !event.is_empty() => format!("samples ({})", line(event)),
        _ => line(&shown[i].name).into_owned(),
    };
    let has = [0, 1].map(|i| format!("{} has {}", names[i], list(&mut kinds(i))));
    let what = format!(
        "the first profile is one of {}, the second one of {}",
        sampled(0),
        sampled(1)
    );
    // A time means the same however it was measured.
    let best = both.iter().find(|kind| kind.unit == Unit::Nanoseconds).or(both.first());
    let error = Error::new(ErrorKind::Data, what);
    match best {
        Some(best) => error
            .why(format!(
                "{}, {}; both have {}",
                has[0],
                has[1],
                list(&mut both.iter().copied())
            ))
            .hint(format!("--value {}", line(&best.name))),
        None => error
            .why(format!("{}, {}; both have none of these", has[0], has[1]))
            .hint("record both in the same way"),
    }
}

fn not_comparable(path: &Path, why: &str, hint: &str) -> Error {
    let what = format!("{} cannot be compared", path.display());
    Error::new(ErrorKind::Data, what).why(why).hint(hint)
}

fn check_not_empty(profile: &Profile, path: &Path) -> Result<()> {
    match profile.nodes.first() {
        Some(root) if root.count > 0 => Ok(()),
        _ => Err(not_comparable(
            path,
            "it has no samples",
            "record again while the program is using the CPU",
        )),
    }
}

/// # Errors
/// `Data` if the profile has nothing of the value that is its count, or not what the normalization needs.
pub fn check_comparable(profile: &Profile, path: &Path, normalization: Normalization) -> Result<()> {
    let bad = |why: &str, hint: &str| Err(not_comparable(path, why, hint));
    check_not_empty(profile, path)?;
    let kind = profile.count_type();
    match normalization {
        Normalization::Share | Normalization::Number => Ok(()),
        _ if *kind != ValueType::SAMPLES && kind.unit != Unit::Nanoseconds => bad(
            &format!("{} are no time", line(&kind.name)),
            "--normalize share, or --value wall where the profile has it",
        ),
        _ if profile.meta.rate > 0 && sampled_time(profile).is_none() => {
            bad("its samples are events, not times", "--normalize share")
        }
        _ if profile.meta.rate == 0 && kind.unit != Unit::Nanoseconds => {
            bad("its sampling rate is not recorded", "--normalize share")
        }
        Normalization::Rate if profile.meta.duration <= 0.0 => bad("its duration is not recorded", "--normalize share"),
        _ => Ok(()),
    }
}

/// The time that the counts of a profile represent, such as `CPU` or `wall`; `None` if they are no times.
pub fn sampled_time(profile: &Profile) -> Option<&str> {
    let kind = profile.count_type();
    if kind.unit == Unit::Nanoseconds {
        return Some(if *kind == ValueType::CPU { "CPU" } else { &kind.name });
    }
    let values = profile.value_types();
    let cpu = profile.find_value(&ValueType::CPU.name).and_then(|at| values.get(at));
    match cpu {
        _ if *kind != ValueType::SAMPLES => None,
        Some(cpu) if cpu.is_per_count() => Some("CPU"),
        // Of a recording with waiting time, whose samples represent both.
        _ => profile.find_value(&ValueType::WALL.name).map(|_| "wall"),
    }
}

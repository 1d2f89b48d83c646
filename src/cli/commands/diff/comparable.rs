//! What the counts of a profile represent, and whether they can be compared.

use std::path::Path;

use crate::error::{Error, ErrorKind, Result};
use crate::profile::diff::Normalization;
use crate::profile::model::Profile;
use crate::profile::values::{Unit, ValueType};

/// # Errors
/// `Data` if the profile has no samples, or not what the normalization needs.
pub fn check_comparable(profile: &Profile, path: &Path, normalization: Normalization) -> Result<()> {
    let bad = |why: &str, hint: &str| {
        let what = format!("{} cannot be compared", path.display());
        Err(Error::new(ErrorKind::Data, what).why(why).hint(hint))
    };
    if profile.nodes.first().is_none_or(|root| root.count == 0) {
        return bad("it has no samples", "record again while the program is using the CPU");
    }
    match normalization {
        Normalization::Share => Ok(()),
        _ if profile.meta.rate > 0 && sampled_time(profile).is_none() => {
            bad("its samples are events, not times", "--normalize share")
        }
        _ if profile.meta.rate == 0 && profile.count_type().unit != Unit::Nanoseconds => {
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

//! The values of several profiles, summed.

use crate::model::{NodeId, Profile};
use crate::values::{Amounts, Unit, Value, ValueType};

/// The value types of all profiles, with their sums. `places` has the node of the sum for each node of a profile, and
/// `origins` the profile and the index in its timeline for each sample of the sum.
pub(super) fn sum(
    profiles: &[(String, Profile)],
    places: &[Vec<Option<NodeId>>],
    nodes: usize,
    origins: &[(usize, usize)],
) -> Vec<Value> {
    let profiles: Vec<&Profile> = profiles.iter().map(|(_, profile)| profile).collect();
    let mut counts = profiles.iter().map(|profile| profile.count_type());
    let Some(first) = counts.next() else { return Vec::new() };
    let plain = |profile: &Profile| profile.value_types()[0].amounts == Amounts::PerCount(1);
    let same = counts.all(|kind| kind == first);
    let mut kinds: Vec<ValueType> = Vec::new();
    if !same {
        kinds.push(ValueType::new("count", Unit::Count));
    }
    for value in profiles.iter().flat_map(|profile| profile.value_types()) {
        if kinds.iter().all(|kind| kind.key() != value.kind.key()) {
            kinds.push(value.kind.clone());
        }
    }
    let of_kind = |(at, kind): (usize, ValueType)| {
        // By profile, which of its values it is.
        let key = kind.key();
        let index: Vec<Option<usize>> = profiles
            .iter()
            .map(|profile| match at {
                0 => Some(0),
                _ => profile.value_types().iter().position(|value| value.kind.key() == key),
            })
            .collect();
        let parts = || profiles.iter().zip(&index).enumerate();
        let amounts = if at == 0 && profiles.iter().all(|profile| plain(profile)) {
            Amounts::PerCount(1)
        } else if let Some(per) = common(&profiles, &index).filter(|_| at > 0 && same) {
            Amounts::PerCount(per)
        } else {
            let mut sums = vec![0u64; if at == 0 { 0 } else { nodes }];
            for (from, (profile, value)) in parts().filter(|_| at > 0) {
                let Some(value) = value else { continue };
                for (place, amount) in places[from].iter().zip(profile.amounts(*value)) {
                    if let Some(sum) = place.and_then(|place| sums.get_mut(place as usize)) {
                        *sum = sum.saturating_add(amount);
                    }
                }
            }
            let sample =
                |(from, at): &(usize, usize)| index[*from].map_or(0, |value| profiles[*from].sample_amount(value, *at));
            Amounts::Each {
                nodes: sums,
                samples: origins.iter().map(sample).collect(),
            }
        };
        Value { kind, amounts }
    };
    kinds.into_iter().enumerate().map(of_kind).collect()
}

/// The multiple of the count that a value is in all profiles.
fn common(profiles: &[&Profile], index: &[Option<usize>]) -> Option<u64> {
    let mut multiples =
        profiles
            .iter()
            .zip(index)
            .map(|(profile, value)| match profile.value_types().get((*value)?)?.amounts {
                Amounts::PerCount(per) => Some(per),
                Amounts::Each { .. } => None,
            });
    let first = multiples.next()??;
    multiples.all(|other| other == Some(first)).then_some(first)
}

//! The columns that a profile has of its samples.

use super::labels::Labels;
use super::model::{PlaceId, Profile, TimelineSample};
use super::values::Amounts;
use super::waits::Waits;

/// What a profile knows of some of its samples: a row each, in every column that is not empty.
pub struct SampleColumns {
    /// The samples, as in [`Profile::timeline`].
    pub timeline: Vec<TimelineSample>,
    /// Their places, as in [`Profile::sample_places`].
    pub places: Vec<PlaceId>,
    /// What is known of their waits.
    pub waits: Waits,
    /// Their labels.
    pub labels: Labels,
    /// By value type; empty where the amounts follow from the counts.
    pub amounts: Vec<Vec<u64>>,
}

impl Profile {
    /// Drops what is known of single samples; what nodes have stays.
    pub fn forget_samples(&mut self) {
        self.timeline = Vec::new();
        self.sample_places = Vec::new();
        (self.waits, self.labels) = (Waits::default(), Labels::default());
        for value in &mut self.values {
            if let Amounts::Each { samples, .. } = &mut value.amounts {
                *samples = Vec::new();
            }
        }
    }

    /// The rows of these samples (indices in the timeline), in this order.
    pub fn pick_samples(&self, rows: &[usize]) -> SampleColumns {
        let origins: Vec<(usize, usize)> = rows.iter().map(|row| (0, *row)).collect();
        let amounts = self.values.iter().map(|value| match &value.amounts {
            Amounts::PerCount(_) => Vec::new(),
            Amounts::Each { samples, .. } => pick(samples, rows, 0),
        });
        SampleColumns {
            timeline: rows.iter().map(|row| self.timeline[*row]).collect(),
            places: if self.sample_places.is_empty() {
                Vec::new()
            } else {
                pick(&self.sample_places, rows, super::model::NO_PLACE)
            },
            waits: if self.waits.is_empty() {
                Waits::default()
            } else {
                Waits::merge(&[&self.waits], &origins, &|_, pid| pid)
            },
            labels: if self.labels.is_empty() {
                Labels::default()
            } else {
                Labels::merge(&[&self.labels], &origins)
            },
            amounts: amounts.collect(),
        }
    }
}

/// The values of a column in these rows; `missing` beyond its end.
fn pick<T: Copy>(column: &[T], rows: &[usize], missing: T) -> Vec<T> {
    rows.iter()
        .map(|row| column.get(*row).copied().unwrap_or(missing))
        .collect()
}

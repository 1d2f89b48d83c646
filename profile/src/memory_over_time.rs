//! How much memory a program had, over time.

/// Points that are kept, at most.
pub const MAX_POINTS: usize = 1000;
/// Time that a point stands for at first, ns.
const FIRST_STEP: u64 = 1 << 20;

/// A kind of memory that is observed over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedMemory {
    /// Resident memory that belongs to no file.
    Anonymous,
    /// Resident pages of files.
    File,
    /// Resident shared memory.
    Shared,
    /// Memory that was allocated since the recording began and is not freed, as estimated from samples.
    Live,
}

/// All, each with its key in JSON.
pub const OBSERVED: [(ObservedMemory, &str); 4] = [
    (ObservedMemory::Anonymous, "anonymous_bytes"),
    (ObservedMemory::File, "file_bytes"),
    (ObservedMemory::Shared, "shared_bytes"),
    (ObservedMemory::Live, "live_bytes"),
];

/// What the recorded processes had of each kind of memory, together. Pages that processes share count in each of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryOverTime {
    /// ns since the start of the profile, in ascending order; at most [`MAX_POINTS`].
    pub times: Vec<u64>,
    /// Bytes of each kind at these times.
    pub amounts: Vec<(ObservedMemory, Vec<u64>)>,
}

impl MemoryOverTime {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// The same for a profile that began at `began` (ns, as the times are) and lasted for `duration` (ns): what was observed a
    /// little earlier or later counts as its beginning and its end.
    #[must_use]
    pub fn of_profile(mut self, began: u64, duration: u64) -> MemoryOverTime {
        for time in &mut self.times {
            *time = time.saturating_sub(began).min(duration);
        }
        self
    }

    /// What there was between two times (ns), whose first one becomes 0.
    #[must_use]
    pub fn between(&self, from: u64, to: u64) -> MemoryOverTime {
        let first = self.times.partition_point(|time| *time < from);
        let last = self.times.partition_point(|time| *time <= to).max(first);
        let kept = |column: &Vec<u64>| column.get(first..last).unwrap_or_default().to_vec();
        MemoryOverTime {
            times: kept(&self.times).into_iter().map(|time| time - from).collect(),
            amounts: self
                .amounts
                .iter()
                .map(|(kind, column)| (*kind, kept(column)))
                .collect(),
        }
    }
}

/// Observes memory any number of times, and keeps a bounded number of points: of each step of time the one with the
/// most memory, so that peaks stay as high as they were. Steps become longer as time goes on.
#[derive(Clone, Debug)]
pub struct MemoryObserver<const N: usize> {
    kinds: [ObservedMemory; N],
    step: u64,
    points: Vec<Point<N>>,
    last: Option<Point<N>>,
}

/// A time, and the amounts at it.
type Point<const N: usize> = (u64, [u64; N]);

impl<const N: usize> MemoryObserver<N> {
    /// An observer of these kinds of memory.
    pub fn new(kinds: [ObservedMemory; N]) -> MemoryObserver<N> {
        MemoryObserver {
            kinds,
            step: FIRST_STEP,
            points: Vec::new(),
            last: None,
        }
    }

    /// The time that one point stands for now, ns.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Adds a point. Times (ns) must not descend.
    pub fn add(&mut self, time: u64, amounts: [u64; N]) {
        self.last = Some((time, amounts));
        self.keep((time, amounts));
        // There is room for the last one as well.
        while self.points.len() >= MAX_POINTS {
            self.step = self.step.saturating_mul(2);
            for point in std::mem::take(&mut self.points) {
                self.keep(point);
            }
        }
    }

    fn keep(&mut self, point: Point<N>) {
        let total = |point: &Point<N>| point.1.iter().fold(0u64, |sum, amount| sum.saturating_add(*amount));
        let step = self.step;
        match self.points.last_mut().filter(|last| last.0 / step == point.0 / step) {
            Some(last) if total(last) < total(&point) => *last = point,
            Some(_) => {}
            None => self.points.push(point),
        }
    }

    /// Nothing has changed until this time (ns).
    pub fn extend_to(&mut self, time: u64) {
        if let Some((_, amounts)) = self.last.filter(|last| last.0 < time) {
            self.last = Some((time, amounts));
        }
    }

    /// What was observed; the last point is where it ended.
    pub fn finish(mut self) -> MemoryOverTime {
        let ended = self.points.last().map(|point| point.0);
        self.points.extend(self.last.filter(|last| Some(last.0) > ended));
        let column = |(at, kind): (usize, &ObservedMemory)| {
            (*kind, self.points.iter().map(|(_, amounts)| amounts[at]).collect())
        };
        MemoryOverTime {
            times: self.points.iter().map(|(time, _)| *time).collect(),
            amounts: self.kinds.iter().enumerate().map(column).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_few_and_keep_peaks() {
        const SECOND: u64 = 1_000_000_000;
        for observations in [0, 1, 10, 5_000, 200_000] {
            let mut observer = MemoryObserver::new([ObservedMemory::Anonymous, ObservedMemory::File]);
            for at in 0..observations {
                let peak = if at == observations / 3 { 1 << 40 } else { 0 };
                observer.add(SECOND + at * SECOND / 20, [at + peak, 7]);
            }
            let kept = observer.finish();
            assert!(
                kept.times.len() <= MAX_POINTS && kept.times.is_sorted(),
                "{observations}"
            );
            assert_eq!(kept.is_empty(), observations == 0);
            let [(ObservedMemory::Anonymous, anonymous), (ObservedMemory::File, file)] = &kept.amounts[..] else {
                panic!("the kinds in their order");
            };
            assert_eq!((anonymous.len(), file.len()), (kept.times.len(), kept.times.len()));
            if observations > 1 {
                assert!(anonymous.contains(&(observations / 3 + (1 << 40))), "the peak");
                assert_eq!(anonymous.last(), Some(&(observations - 1)), "the end");
                assert_eq!(kept.times.last(), Some(&(SECOND + (observations - 1) * SECOND / 20)));
                let enough = usize::try_from(observations).unwrap_or(MAX_POINTS).min(MAX_POINTS / 2);
                assert!(kept.times.len() >= enough, "{observations}: {}", kept.times.len());
            }
        }
    }

    #[test]
    fn a_part_begins_at_its_own_time() {
        let whole = MemoryOverTime {
            times: vec![10, 20, 30],
            amounts: vec![(ObservedMemory::Live, vec![1, 2, 3])],
        };
        let part = whole.between(15, 30);
        assert_eq!(part.times, [5, 15]);
        assert_eq!(part.amounts, [(ObservedMemory::Live, vec![2, 3])]);
        assert_eq!(whole.clone().of_profile(15, 10).times, [0, 5, 10]);
        for (from, to) in [(31, 40), (25, 5), (u64::MAX, 0)] {
            assert!(whole.between(from, to).is_empty());
        }
        // A column that is too short is empty, and not read past its end.
        let short = MemoryOverTime {
            amounts: vec![(ObservedMemory::Live, vec![1])],
            ..whole
        };
        assert_eq!(short.between(0, 40).amounts, [(ObservedMemory::Live, vec![])]);
    }
}

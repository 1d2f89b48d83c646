//! When suspended tasks are read, and for how long each reading stands.

use crate::capture::common::rng::Rng;

/// Mean time between two readings of a process's tasks, as a multiple of the time that one takes.
const PAUSE_FACTOR: u64 = 20;
/// Readings over which that time is averaged. Readings at which more happens take longer: if the pause after each depended on
/// itself, they would represent more time than others.
const AVERAGED: u64 = 8;

/// Pauses between readings.
#[derive(Default)]
pub(super) struct Pauses {
    /// What a reading takes, ns. It begins at 0: the first reading, which searches much memory, must not cause a long pause.
    average: u64,
}

impl Pauses {
    /// The pause after a reading that took so long, at least `least` on average; ns. It is random, so that readings are not in
    /// step with the program.
    pub(super) fn next(&mut self, took: u64, least: u64, rng: &mut Rng) -> u64 {
        self.average = (self.average.saturating_mul(AVERAGED - 1).saturating_add(took)) / AVERAGED;
        let mean = self.average.saturating_mul(PAUSE_FACTOR).max(least).max(2);
        mean / 2 + rng.below(mean)
    }
}

/// The times of readings. Each represents the time that is nearer to it than to another one, from the beginning to the end.
#[derive(Default)]
pub(super) struct ReadingTimes {
    last: Option<u64>,
    /// The time until then belongs to earlier readings.
    counted: u64,
}

impl ReadingTimes {
    pub(super) fn since(beginning: u64) -> ReadingTimes {
        ReadingTimes {
            last: None,
            counted: beginning,
        }
    }

    /// There is a reading: for how long the one before it stands.
    pub(super) fn read(&mut self, time: u64) -> u64 {
        let last = self.last.replace(time);
        last.map_or(0, |last| self.count_until(last + time.saturating_sub(last) / 2))
    }

    /// No reading follows until this time: for how long the last one stands.
    pub(super) fn end(&mut self, time: u64) -> u64 {
        let last = self.last.take();
        let counted = self.count_until(time);
        last.map_or(0, |_| counted)
    }

    fn count_until(&mut self, time: u64) -> u64 {
        let counted = time.saturating_sub(self.counted);
        self.counted = self.counted.max(time);
        counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_stand_for_the_time_around_them() {
        /// Time that each reading represents, from 100 to `end`.
        fn check(readings: &[u64], end: u64, expected: &[u64]) {
            let mut times = ReadingTimes::since(100);
            let mut counted: Vec<u64> = readings.iter().map(|at| times.read(*at)).collect();
            counted.push(times.end(end));
            // The first reading has none before it.
            assert_eq!(counted[1..], *expected, "{readings:?} {end}");
            assert_eq!(counted[0], 0, "{readings:?} {end}");
            assert_eq!(times.end(end), 0, "{readings:?} {end}");
        }
        check(&[100], 150, &[50]);
        check(&[140], 150, &[50]);
        check(&[100, 120, 160], 200, &[10, 30, 60]);
        check(&[110, 120, 190], 192, &[15, 40, 37]);
        check(&[150, 150], 150, &[50, 0]);
        // Clocks that are read out of order.
        check(&[150, 140], 140, &[50, 0]);
    }

    #[test]
    fn nothing_stands_for_the_time_after_the_end_until_the_next_reading() {
        let mut times = ReadingTimes::since(100);
        assert_eq!(times.end(200), 0);
        assert_eq!(times.read(250), 0);
        assert_eq!(times.end(300), 100);
    }

    #[test]
    fn pauses_are_around_a_multiple_of_the_average_cost() {
        let mut rng = Rng::new(1);
        fn check(took: &[u64], least: u64, mean: u64, rng: &mut Rng) {
            let mut pauses = Pauses::default();
            let last = took.iter().map(|took| pauses.next(*took, least, rng)).last();
            let last = last.unwrap_or_default();
            assert!((mean / 2..mean / 2 + mean).contains(&last), "{took:?}: {last}");
        }
        for _ in 0..100 {
            check(&[0], 0, 2, &mut rng);
            check(&[0], 1000, 1000, &mut rng);
            check(&[100], 0, 240, &mut rng);
            check(&[800], 1000, 2000, &mut rng);
            check(&[800, 1600], 1000, 5740, &mut rng);
            check(&[100; 100], 1000, 1860, &mut rng);
            check(&[100; 3], 10_000, 10_000, &mut rng);
        }
    }
}

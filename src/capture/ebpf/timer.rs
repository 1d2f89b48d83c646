//! The times between samples: by chance, at the rate asked for.

use crate::capture::random::Random;

/// Of so many samples one is left out, at random, and the timer is that much faster (see sample.bpf.c).
pub const LEAVE_OUT: u32 = 27;

/// After so many samples of a thread its timer starts anew, with another time between ticks, half the average to one and a
/// half: a loop of the target that keeps step with the timer does so only that long. What keeps step need not have its
/// length: a sample delays the program, and where some of a loop is dearer to sample than the rest, what comes one tick
/// after its beginning is seen too often, and what comes one tick after its end too seldom. (To start anew is not enough:
/// it is done when samples are read, which follows what the thread does where that fills the ring.)
const RUN: u32 = 16;

/// Ticks of the timer for one sample. A tick that is not taken costs the target 2 us on some machines, 13 us on others
/// (virtual ones, where the host sets the timer).
pub fn ticks(rate: u64) -> u32 {
    match rate {
        0..=500 => 2,
        _ => 1,
    }
}

/// Time between ticks, ns: so short that the rate is the one asked for when only some of the ticks are taken.
pub fn period(rate: u64) -> u64 {
    let (left, ticks) = (u64::from(LEAVE_OUT), u64::from(ticks(rate)));
    let period = 1_000_000_000 * (left - 1) / (left * ticks * rate.max(1));
    period.max(1)
}

/// What is known of the timer of one thread.
pub struct Timer {
    /// Time between ticks, ns: of the last run, and of the one before, which ended at this time.
    period: u64,
    before: u64,
    start: u64,
    /// Samples read since then.
    run: u32,
    /// The samples so far have taken so much more time than they should, ns.
    over: i64,
}

impl Timer {
    pub fn new(rate: u64) -> Timer {
        Timer {
            period: period(rate),
            before: period(rate),
            start: 0,
            run: 0,
            over: 0,
        }
    }

    /// A sample of the thread, of this time, is read at `now`. Returns the period to set, if the timer is to start anew.
    pub fn sampled(&mut self, time: u64, now: u64, rate: u64, random: &mut Random) -> Option<u64> {
        let (period, ticks) = (period(rate) as i64, i64::from(ticks(rate)));
        let taken = if time < self.start { self.before } else { self.period };
        self.over += (taken as i64 - period) * ticks;
        self.run += 1;
        if self.run < RUN {
            return None;
        }
        self.run = 0;
        // The time since the last tick counts for nothing when the timer starts anew.
        self.over += (now.saturating_sub(time) % self.period) as i64;
        // What was too much is made up for: the rate is right soon, however late samples are read.
        let by_chance = random.below(period as u64 * 3 / 4) as i64 - period * 3 / 8;
        let off = by_chance - self.over / (i64::from(RUN) * ticks);
        self.before = self.period;
        self.period = (period + off.clamp(-period * 3 / 4, period * 3 / 4)).max(1) as u64;
        self.start = now;
        Some(self.period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rate of a thread that runs all the time, in thousandths of the one asked for; `batch` samples are read together.
    fn got(rate: u64, batch: usize) -> u64 {
        let mut random = Random::new(7);
        let mut timer = Timer::new(rate);
        let (mut now, mut period, mut taken) = (0, super::period(rate), 0);
        let mut unread = Vec::new();
        while now < 20_000_000_000 {
            now += period * u64::from(ticks(rate));
            if random.below(u64::from(LEAVE_OUT)) == 0 {
                continue;
            }
            taken += 1;
            unread.push(now);
            if unread.len() >= batch {
                now += period / 3; // until it is read
                let mut next = None;
                for time in unread.drain(..) {
                    next = timer.sampled(time, now, rate, &mut random).or(next);
                }
                match next {
                    Some(next) => period = next,
                    None => now -= period / 3,
                }
            }
        }
        taken * 1_000_000_000 / (now / 1000) / rate
    }

    #[test]
    fn the_rate_is_the_one_asked_for_however_late_samples_are_read() {
        for rate in [100, 1000, 4000] {
            for batch in [1, 5, 40] {
                let got = got(rate, batch);
                assert!(
                    (980..=1020).contains(&got),
                    "{rate} Hz, {batch} at once: {got} thousandths"
                );
            }
        }
    }
}

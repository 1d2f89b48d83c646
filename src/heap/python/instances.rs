//! Some objects of a type, drawn at random from all that are met.

use crate::capture::common::rng::Rng;
use crate::sys::clock;

/// Draws from objects whose number is not known before: each is kept with the same probability (reservoir sampling).
#[derive(Debug)]
pub struct Instances {
    name: Vec<u8>,
    most: usize,
    met: u64,
    addresses: Vec<u64>,
    rng: Rng,
}

impl Instances {
    /// Draws `most` objects of a type at most. `name`: of the type, or the part of it behind one of its dots.
    pub fn new(name: &[u8], most: usize) -> Instances {
        Instances {
            name: name.to_vec(),
            most,
            met: 0,
            addresses: Vec::new(),
            rng: Rng::new(clock::now()),
        }
    }

    /// Takes in an object that was met, if it is of the type.
    pub fn offer(&mut self, type_name: &[u8], address: u64) {
        let Some(before) = type_name.strip_suffix(&self.name[..]) else {
            return;
        };
        if before.last().is_some_and(|c| *c != b'.') {
            return;
        }
        self.met += 1;
        if self.addresses.len() < self.most {
            self.addresses.push(address);
        } else if let Some(place) = self.addresses.get_mut(self.rng.below(self.met) as usize) {
            *place = address;
        }
    }

    /// How many objects of the type were met.
    pub fn met(&self) -> u64 {
        self.met
    }

    /// avmas of those that were drawn, in ascending order.
    pub fn into_addresses(mut self) -> Vec<u64> {
        self.addresses.sort_unstable();
        self.addresses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_drawn_equally_often() {
        let mut drawn = [0u32; 20];
        let mut instances = Vec::new();
        for seed in 0..2000 {
            let mut sample = Instances::new(b"Point", 5);
            sample.rng = Rng::new(seed * 0x9e37_79b9);
            for at in 0..20 {
                sample.offer(b"int", at);
                sample.offer(if at % 2 == 0 { b"Point" } else { b"geo.Point" }, at);
                sample.offer(b"NotPoint", at);
                sample.offer(b"Point.Inner", at);
            }
            assert_eq!(sample.met(), 20);
            instances = sample.into_addresses();
            assert!(instances.len() == 5 && instances.is_sorted());
            instances.iter().for_each(|at| drawn[*at as usize] += 1);
        }
        // 500 each are expected, with a standard deviation of 19.
        assert!(
            drawn.iter().all(|times| (400..600).contains(times)),
            "{drawn:?} {instances:?}"
        );
        let mut few = Instances::new(b"Point", 0);
        few.offer(b"Point", 1);
        assert!(few.met() == 1 && few.into_addresses().is_empty());
    }
}

//! Generic code that keeps the compiler busy.
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;

trait Step {
    fn step(&self, x: u64) -> u64;
}

macro_rules! steps {
    ($($name:ident = $n:literal),*) => {
        $(#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        struct $name<T>(Vec<T>, BTreeMap<String, T>);
        impl<T: Clone + Debug + Ord> Step for $name<T> {
            fn step(&self, x: u64) -> u64 {
                let mut all: Vec<_> = self.1.iter().map(|(k, v)| (v.clone(), format!("{k:?}{v:?}"))).collect();
                all.sort();
                all.iter().fold(x + $n, |x, (v, k)| x.wrapping_mul(31) + k.len() as u64 + format!("{v:?}").len() as u64)
            }
        })*
        fn all() -> Vec<Box<dyn Step>> {
            vec![$(Box::new($name::<u64>::default()), Box::new($name::<String>::default()), Box::new($name::<Vec<(u8, char)>>::default())),*]
        }
    };
}
steps!(A = 1, B = 2, C = 3, D = 4, E = 5, F = 6, G = 7, H = 8, I = 9, J = 10, K = 11, L = 12, M = 13, N = 14, O = 15, P = 16);

fn main() {
    let mut counts: HashMap<u64, usize> = HashMap::new();
    for step in all() {
        *counts.entry(step.step(1)).or_default() += 1;
    }
    println!("{counts:?}");
}

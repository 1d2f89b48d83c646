//! Inclusive amounts of nodes.

/// Adds to the amount of each node those of all nodes below it. `parent` returns the parent of a node, both as indices;
/// a node comes after its parent, and one whose parent does not is a root.
#[inline]
pub fn sum_upwards(amounts: &mut [u64], parent: impl Fn(usize) -> Option<usize>) {
    for at in (1..amounts.len()).rev() {
        let Some(parent) = parent(at).filter(|parent| *parent < at) else {
            continue;
        };
        amounts[parent] = amounts[parent].saturating_add(amounts[at]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_of_nodes_below_are_added() {
        let parents = [None, Some(0), Some(1), Some(0), Some(9), None];
        let mut amounts = [1, 2, 4, u64::MAX, 16, 32];
        sum_upwards(&mut amounts, |at| parents[at]);
        assert_eq!(amounts, [u64::MAX, 6, 4, u64::MAX, 16, 32]);
    }
}

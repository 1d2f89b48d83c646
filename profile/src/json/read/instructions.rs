//! Samples by instruction: columns of distances of addresses, and of samples.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::model::MAX_INSTRUCTIONS;

/// Address -> samples; empty if the columns are not ones of numbers, or too long.
pub fn instructions(value: Option<&Value>) -> BTreeMap<u64, u64> {
    let column = |key: &str| {
        let list = value?.get(key)?.as_array()?;
        list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()
    };
    let (Some(distances), Some(samples)) = (column("address"), column("samples")) else {
        return BTreeMap::new();
    };
    if distances.len() > MAX_INSTRUCTIONS {
        return BTreeMap::new();
    }
    let mut address = 0u64;
    let addresses = distances.into_iter().map_while(|distance| {
        address = address.checked_add(distance)?;
        Some(address)
    });
    addresses.zip(samples).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_become_a_map() {
        let read = |value: Value| instructions(Some(&value)).into_iter().collect::<Vec<_>>();
        assert_eq!(
            read(json!({"address": [4096, 4, 60], "samples": [3, 1, 2]})),
            [(4096, 3), (4100, 1), (4160, 2)]
        );
        assert_eq!(read(json!({"address": [1, "x"], "samples": [1, 2]})), []);
        assert_eq!(
            read(json!({"address": [u64::MAX, 1], "samples": [1, 2]})),
            [(u64::MAX, 1)]
        );
        assert_eq!(read(json!([])), []);
    }
}

//! Reads the accounts of resident memory.

use serde_json::{Map, Value};

use super::number;
use crate::resident::{MemoryChanges, ResidentMemory};

/// One entry of the list; what is missing is 0.
pub fn read(map: &mut Map<String, Value>) -> ResidentMemory {
    let changes = |kind: &str| {
        let of = |key: &str| number(map.get(kind).and_then(|changes| changes.get(key)));
        MemoryChanges {
            start: of("start_bytes"),
            grown: of("grown_bytes"),
            returned: of("returned_bytes"),
            grown_by_others: of("grown_by_others_bytes"),
            returned_by_others: of("returned_by_others_bytes"),
        }
    };
    let measured = |key: &str| map.get(key).and_then(Value::as_u64);
    ResidentMemory {
        pid: number(map.get("pid")),
        measured: measured("rss_start_bytes").zip(measured("rss_end_bytes")),
        anonymous: changes("anonymous"),
        file: changes("file"),
        shared: changes("shared"),
    }
}

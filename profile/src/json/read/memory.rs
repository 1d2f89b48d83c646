//! Reads the accounts of resident memory.

use serde_json::{Map, Value};

use super::number;
use crate::resident::{MemoryChanges, MemoryPeak, ResidentMemory};

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
        began: number(map.get("began_ns")),
        peak: measured("peak_bytes").map(|bytes| MemoryPeak {
            bytes,
            time: number(map.get("peak_ns")),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;
    use crate::model::{Frame, FrameKind, Meta, Node, Profile};

    #[test]
    fn accounts_are_read_as_they_were_written() {
        let changes = |n: u64| MemoryChanges {
            start: n,
            grown: n + 1,
            returned: n + 2,
            grown_by_others: n + 3,
            returned_by_others: n + 4,
        };
        let account = ResidentMemory {
            pid: 7,
            measured: Some((1, 2)),
            anonymous: changes(10),
            file: changes(20),
            shared: changes(30),
            began: 40,
            peak: Some(MemoryPeak { bytes: 50, time: 60 }),
        };
        let ended = ResidentMemory {
            measured: None,
            peak: None,
            ..account
        };
        let profile = Profile {
            meta: Meta {
                memory: vec![account, ended],
                ..Meta::default()
            },
            frames: vec![Frame::new(FrameKind::Root, "root")],
            nodes: vec![Node::new(0, 0)],
            ..Profile::default()
        };
        let mut bytes = Vec::new();
        json::write(&profile, &mut bytes).expect("a vector can be written");
        let read = json::read(&bytes).expect("what was written can be read");
        assert_eq!(read.meta.memory, profile.meta.memory);
        assert_eq!(account.total().end(), 60 + 63 + 69 - 66 - 72);
    }
}

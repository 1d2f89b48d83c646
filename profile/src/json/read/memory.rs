//! Reads the accounts of resident memory, and memory over time.

use serde_json::{Map, Value};

use super::number;
use crate::memory_over_time::{MAX_POINTS, MemoryOverTime, OBSERVED};
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

/// Memory over time; nothing if times descend, or columns do not fit them.
pub fn read_over_time(value: Option<Value>) -> MemoryOverTime {
    let column = |key: &str| {
        let numbers = value.as_ref()?.get(key)?.as_array()?;
        numbers.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()
    };
    let times = column("time_ns").filter(|times| times.is_sorted() && times.len() <= MAX_POINTS);
    let Some(times) = times else {
        return MemoryOverTime::default();
    };
    let amounts = OBSERVED.iter().filter_map(|(kind, key)| {
        let column = column(key).filter(|column| column.len() == times.len())?;
        Some((*kind, column))
    });
    MemoryOverTime {
        amounts: amounts.collect(),
        times,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;
    use crate::memory_over_time::ObservedMemory;
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
                memory_over_time: MemoryOverTime {
                    times: vec![0, 5, 5],
                    amounts: vec![
                        (ObservedMemory::Anonymous, vec![1, 2, 3]),
                        (ObservedMemory::Shared, vec![4, 5, u64::MAX]),
                    ],
                },
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
        assert_eq!(read.meta.memory_over_time, profile.meta.memory_over_time);
        assert_eq!(account.total().end(), 60 + 63 + 69 - 66 - 72);
    }

    #[test]
    fn forged_memory_over_time_is_not_taken() {
        let read = |text: &str| read_over_time(serde_json::from_str(text).ok());
        for text in [
            "[]",
            "{}",
            r#"{"time_ns":7}"#,
            r#"{"time_ns":[2,1],"live_bytes":[1,2]}"#,
            r#"{"time_ns":[-1]}"#,
            r#"{"time_ns":["1"]}"#,
        ] {
            assert!(read(text).is_empty(), "{text}");
        }
        let long = vec!["1"; MAX_POINTS + 1].join(",");
        assert!(read(&format!(r#"{{"time_ns":[{long}]}}"#)).is_empty());
        let read = read(r#"{"time_ns":[1,2],"live_bytes":[1],"file_bytes":[3,4],"other_bytes":[5,6]}"#);
        assert_eq!(read.amounts, [(ObservedMemory::File, vec![3, 4])]);
    }
}

//! Reads what kept event loops for long.

use serde_json::{Map, Value};

use super::{number, take_string};
use crate::lags::Lag;

/// Maximum number of frames of a stack.
const MAX_FRAMES: usize = 1 << 15;

/// One entry of the list; what is missing is 0 or empty.
pub fn read(map: &mut Map<String, Value>) -> Lag {
    let stack = match map.remove("stack") {
        Some(Value::Array(frames)) => frames,
        _ => Vec::new(),
    };
    let text = |frame| match frame {
        Value::String(text) => Some(text),
        _ => None,
    };
    Lag {
        pid: number(map.get("pid")),
        tid: number(map.get("tid")),
        start: number(map.get("start_ns")),
        time: number(map.get("time_ns")),
        length: number(map.get("length_ns")),
        task: take_string(map, "task"),
        function: take_string(map, "function"),
        stack: stack.into_iter().take(MAX_FRAMES).filter_map(text).collect(),
    }
}

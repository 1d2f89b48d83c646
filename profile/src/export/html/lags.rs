//! What the page of a recording with `--lag` adds: what blocked event loops, the longest first.
//!
//! ```text
//! [[begin, length, task, function, number of the function or 0, number of the thread or -1], ...], times in µs
//! ```

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};

use super::data::{list, short};
use crate::escape::write_json;
use crate::lags::Lag;
use crate::model::FrameKind;
use crate::model::{Pid, Tid};
use crate::view::{View, frame_text_at};

/// Rows of the table, at most.
const ROWS: usize = 2000;

/// Writes `,"lags":[...]`; functions are numbered as in the view, threads as in `threads`.
pub fn write(lags: &[Lag], view: &View<'_>, threads: &[(Pid, Tid)], out: &mut Vec<u8>) -> io::Result<()> {
    let mut rows: Vec<&Lag> = lags.iter().collect();
    rows.sort_by_key(|lag| (Reverse(lag.length), lag.time));
    rows.truncate(ROWS);
    // A lag has its function as text, with the line that ran.
    let mut functions: HashMap<String, usize> = HashMap::new();
    if !rows.is_empty() {
        for identifier in 1..view.identifiers.len() {
            let frame = view.function(identifier as u32);
            if let Some(frame) = frame.filter(|frame| frame.kind == FrameKind::Python) {
                functions.entry(frame_text_at(frame, 0)).or_insert(identifier);
            }
        }
    }
    list("lags", rows.into_iter(), out, |lag, out| {
        write!(out, "[{},{}", lag.time / 1000, lag.length / 1000)?;
        for text in [&lag.task, &lag.function] {
            out.push(b',');
            write_json(&short(text), out)?;
        }
        let function = lag
            .function
            .rsplit_once(':')
            .and_then(|(text, _)| functions.get(&format!("{text})")));
        let thread = threads.iter().position(|thread| *thread == (lag.pid, lag.tid));
        let thread = thread.map_or(-1, |at| at as i64);
        write!(out, ",{},{thread}]", function.copied().unwrap_or(0))
    })
}

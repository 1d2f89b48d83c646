//! Writes what kept event loops for long.

use std::io::{self, Write};

use super::{comma, key_string};
use crate::escape::write_json;
use crate::lags::Lag;

/// Writes `,"lags":[...]`, if there are any.
pub fn write(lags: &[Lag], out: &mut impl Write) -> io::Result<()> {
    for (at, lag) in lags.iter().enumerate() {
        out.write_all(if at == 0 { b",\"lags\":[{" } else { b",\n{" })?;
        let Lag {
            pid,
            tid,
            start,
            time,
            length,
            ..
        } = lag;
        write!(
            out,
            "\"pid\":{pid},\"tid\":{tid},\"start_ns\":{start},\"time_ns\":{time},\"length_ns\":{length},"
        )?;
        for (key, text) in [("task", &lag.task), ("function", &lag.function)] {
            key_string(key, text, out)?;
            out.write_all(b",")?;
        }
        out.write_all(b"\"stack\":[")?;
        for (at, frame) in lag.stack.iter().enumerate() {
            out.write_all(comma(at).as_bytes())?;
            write_json(frame, out)?;
        }
        out.write_all(b"]}")?;
    }
    out.write_all(if lags.is_empty() { b"" } else { b"]" })
}

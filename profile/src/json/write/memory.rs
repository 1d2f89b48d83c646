//! Writes the accounts of resident memory.

use std::io::{self, Write};

use crate::resident::{MemoryChanges, ResidentMemory};

/// Writes `,"memory":[...]`, if there are any.
pub fn write(accounts: &[ResidentMemory], out: &mut impl Write) -> io::Result<()> {
    for (at, account) in accounts.iter().enumerate() {
        out.write_all(if at == 0 { b",\"memory\":[{" } else { b",{" })?;
        write!(out, "\"pid\":{}", account.pid)?;
        if let Some((start, end)) = account.measured {
            write!(out, ",\"rss_start_bytes\":{start},\"rss_end_bytes\":{end}")?;
        }
        write!(out, ",\"began_ns\":{}", account.began)?;
        if let Some(peak) = account.peak {
            write!(out, ",\"peak_bytes\":{},\"peak_ns\":{}", peak.bytes, peak.time)?;
        }
        let kinds = [
            ("anonymous", account.anonymous),
            ("file", account.file),
            ("shared", account.shared),
        ];
        for (kind, changes) in kinds {
            let MemoryChanges {
                start,
                grown,
                returned,
                grown_by_others,
                returned_by_others,
            } = changes;
            write!(
                out,
                ",\"{kind}\":{{\"start_bytes\":{start},\"grown_bytes\":{grown},\"returned_bytes\":{returned},\
                 \"grown_by_others_bytes\":{grown_by_others},\"returned_by_others_bytes\":{returned_by_others}}}"
            )?;
        }
        out.write_all(b"}")?;
    }
    out.write_all(if accounts.is_empty() { b"" } else { b"]" })
}

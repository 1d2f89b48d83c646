//! Writes the accounts of resident memory, and memory over time.

use std::io::{self, Write};

use crate::memory_over_time::{MemoryOverTime, OBSERVED};
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

/// Writes `,"memory_over_time":{...}`, if anything is known.
pub fn write_over_time(observed: &MemoryOverTime, out: &mut impl Write) -> io::Result<()> {
    if observed.is_empty() {
        return Ok(());
    }
    out.write_all(b",\"memory_over_time\":{\"time_ns\":[")?;
    write_numbers(&observed.times, out)?;
    for (kind, key) in OBSERVED {
        for (_, column) in observed.amounts.iter().filter(|(of, _)| *of == kind).take(1) {
            write!(out, "],\"{key}\":[")?;
            write_numbers(column, out)?;
        }
    }
    out.write_all(b"]}")
}

fn write_numbers(numbers: &[u64], out: &mut impl Write) -> io::Result<()> {
    for (at, number) in numbers.iter().enumerate() {
        write!(out, "{}{number}", if at == 0 { "" } else { "," })?;
    }
    Ok(())
}

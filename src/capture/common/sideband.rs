//! Sideband records of perf events: mappings, forks, names, exits.

use rustc_hash::FxHashSet;

use crate::event::Event;
use crate::sys::perf::perf;

/// A sideband record with its time.
pub struct SidebandRecord {
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    pub event: Event,
}

/// Makes an event write sideband records, in the form that [`decode`] reads.
pub fn request_sideband(attr: &mut perf::perf_event_attr) {
    attr.sample_type = (perf::PERF_SAMPLE_TID | perf::PERF_SAMPLE_TIME).into();
    attr.clockid = libc::CLOCK_MONOTONIC;
    attr.set_use_clockid(1);
    attr.set_mmap(1);
    attr.set_mmap2(1);
    attr.set_comm(1);
    attr.set_comm_exec(1);
    attr.set_task(1);
    attr.set_sample_id_all(1);
}

/// Makes an event that writes to the ring of another one record only its ticks.
pub fn disable_sideband(attr: &mut perf::perf_event_attr) {
    attr.set_mmap(0);
    attr.set_mmap2(0);
    attr.set_comm(0);
    attr.set_comm_exec(0);
    attr.set_task(0);
}

/// Time of a tick: [`request_sideband`] says what a sample's record holds (process and thread, time).
pub fn time_of_sample(body: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(body.get(8..16)?.try_into().ok()?))
}

/// Removes the exits of first threads whose processes go on: another thread executes a program, which ends all others, and takes
/// the first one's number. `records` are in chronological order.
pub fn remove_exits_by_exec(records: &mut Vec<SidebandRecord>) {
    let mut executes = FxHashSet::default();
    let mut kept = Vec::with_capacity(records.len());
    for record in records.drain(..).rev() {
        match record.event {
            Event::Exec { pid, .. } => drop(executes.insert(pid)),
            Event::Fork { pid, .. } => drop(executes.remove(&pid)),
            Event::Exit { pid, tid } if pid == tid && executes.contains(&pid) => continue,
            _ => {}
        }
        kept.push(record);
    }
    kept.reverse();
    *records = kept;
}

/// `Err` counts lost records; `None` is a record that is not used.
pub fn decode(kind: u32, misc: u16, b: &[u8]) -> Option<Result<SidebandRecord, u64>> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
    if kind == perf::PERF_RECORD_LOST {
        return Some(Err(u64_at(8)?));
    }
    let text = |from: usize| {
        let raw = b.get(from..b.len().checked_sub(16)?)?;
        Some(raw.split(|c| *c == 0).next().unwrap_or(raw).to_vec())
    };
    let (pid, tid) = (u32_at(0)?, u32_at(4)?);
    // With sample_id_all every record ends in pid, tid, time.
    let time = u64_at(b.len().checked_sub(8)?)?;
    let event = match kind {
        perf::PERF_RECORD_MMAP2 => {
            let (start, len) = (u64_at(8)?, u64_at(16)?);
            Event::Mmap {
                pid,
                start,
                end: start.saturating_add(len),
                offset: u64_at(24)?,
                path: text(64)?,
            }
        }
        perf::PERF_RECORD_COMM if u32::from(misc) & perf::PERF_RECORD_MISC_COMM_EXEC != 0 => {
            Event::Exec { pid, comm: text(8)? }
        }
        perf::PERF_RECORD_COMM => Event::Comm {
            pid,
            tid,
            comm: text(8)?,
        },
        // pid, parent pid, tid, parent tid
        perf::PERF_RECORD_FORK => {
            let (parent, tid) = (u32_at(4)?, u32_at(8)?);
            if pid == parent {
                Event::Thread { pid, tid }
            } else {
                Event::Fork { pid, parent }
            }
        }
        perf::PERF_RECORD_EXIT => Event::Exit { pid, tid: u32_at(8)? },
        _ => return None,
    };
    Some(Ok(SidebandRecord { time, event }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_of_first_threads_by_an_exec() {
        // Letters: exit of thread 7, the first of process 7; Other exit in it; Fork of process 7; its eXec; x of process 8.
        let check = |records: &str, expected: &str| {
            let event = |letter| match letter {
                'e' => Event::Exit { pid: 7, tid: 7 },
                'o' => Event::Exit { pid: 7, tid: 9 },
                'f' => Event::Fork { pid: 7, parent: 1 },
                'X' => Event::Exec {
                    pid: 7,
                    comm: Vec::new(),
                },
                _ => Event::Exec {
                    pid: 8,
                    comm: Vec::new(),
                },
            };
            let record = |(time, letter)| SidebandRecord {
                time: time as u64,
                event: event(letter),
            };
            let mut batch: Vec<_> = records.chars().enumerate().map(record).collect();
            remove_exits_by_exec(&mut batch);
            let left: String = batch
                .iter()
                .filter_map(|t| records.chars().nth(t.time as usize))
                .collect();
            assert_eq!(left, expected, "{records}");
        };
        check("", "");
        check("oe", "oe");
        check("oeX", "oX");
        check("eXe", "Xe");
        check("efX", "efX");
        check("ex", "ex");
        check("Xe", "Xe");
        check("efXeX", "efXX");
    }
}

//! The stacks of a process's threads.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::event::Pid;
use crate::process::smaps::{Area, Smaps};
use crate::sys::procfs;

/// Threads whose stack pointer is read.
const MAX_THREADS: usize = 4096;
/// The part of a mapping above a stack pointer that is taken for a stack where no guard page bounds it, bytes.
const MAX_UNBOUNDED: u64 = 8 << 20;

/// Stacks of threads, those included that the C library keeps for later threads. In ascending order.
///
/// The kernel names the main thread's. Another one is the mapping that has the stack pointer of a sleeping thread; or one above a
/// guard area, where both together have the size of such a stack or of the limit (`RLIMIT_STACK`), which is the default.
pub fn find(pid: Pid, smaps: &Smaps) -> Vec<Range<u64>> {
    let tids = procfs::threads(pid);
    let pointers = tids.iter().take(MAX_THREADS).filter_map(|tid| {
        let blocked = procfs::blocked(pid, *tid).ok()??;
        Some(blocked.sp)
    });
    let pointers: Vec<u64> = pointers.collect();
    among(smaps, &pointers, procfs::stack_limit(pid))
}

fn among(smaps: &Smaps, pointers: &[u64], limit: Option<u64>) -> Vec<Range<u64>> {
    let mut stacks = Vec::new();
    let mut sizes: BTreeSet<u64> = limit.into_iter().collect();
    for pointer in pointers {
        let Some(index) = smaps.index_of(*pointer) else {
            continue;
        };
        let area = &smaps.areas[index];
        match guarded_size(smaps, index) {
            Some(size) => {
                sizes.insert(size);
                stacks.push(area.start..area.end);
            }
            None if is_private(area) => {
                let start = pointer & !0xfff;
                stacks.push(start..area.end.min(start.saturating_add(MAX_UNBOUNDED)));
            }
            None => {}
        }
    }
    for (index, area) in smaps.areas.iter().enumerate() {
        let is_main = smaps.name(area) == b"[stack]";
        if is_main || guarded_size(smaps, index).is_some_and(|size| sizes.contains(&size)) {
            stacks.push(area.start..area.end);
        }
    }
    stacks.sort_unstable_by_key(|range| (range.start, range.end));
    let mut end = 0;
    stacks.retain(|range| {
        let is_new = range.start >= end;
        end = end.max(range.end);
        is_new
    });
    stacks
}

fn is_private(area: &Area) -> bool {
    area.is_writable && !area.is_shared && !area.is_file
}

/// Bytes of a writable mapping and of the guard area below it; `None` if it has none.
fn guarded_size(smaps: &Smaps, index: usize) -> Option<u64> {
    let area = smaps.areas.get(index)?;
    let guard = smaps.areas.get(index.checked_sub(1)?)?;
    let is_guard = guard.end == area.start && !guard.is_readable && !guard.is_writable && !guard.is_file;
    (is_private(area) && is_guard).then(|| area.end - guard.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_by_pointer_and_by_size() {
        let text = b"1000000-1001000 ---p 0 00:00 0\n1001000-1011000 rw-p 0 00:00 0\n\
            2000000-2001000 ---p 0 00:00 0\n2001000-2011000 rw-p 0 00:00 0\n\
            3000000-3001000 ---p 0 00:00 0\n3001000-3111000 rw-p 0 00:00 0\n\
            4000000-4100000 rw-p 0 00:00 0\n\
            5000000-5001000 ---p 0 00:00 0\n5001000-5031000 rw-p 0 00:00 0\n\
            7000000-7021000 rw-p 0 00:00 0 [stack]\n";
        let smaps = Smaps::read(&text[..]).expect("text");
        let starts = |pointers: &[u64], limit: Option<u64>| {
            let stacks = among(&smaps, pointers, limit);
            stacks.iter().map(|range| range.start).collect::<Vec<_>>()
        };
        assert_eq!(starts(&[], None), [0x7000000]);
        assert_eq!(starts(&[0x1002000, 0x7000100], None), [0x1001000, 0x2001000, 0x7000000]);
        assert_eq!(starts(&[0x9000000], Some(0x31000)), [0x5001000, 0x7000000]);
        assert_eq!(starts(&[0x4000010, 0x4000f00], None), [0x4000000, 0x7000000]);
    }
}

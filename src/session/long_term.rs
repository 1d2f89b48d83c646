//! The end of a segment in a recording of a whole host, which goes on for months: what is known of processes and files
//! that are of no use any more is dropped, so that no table grows without a limit.
//!
//! At that time only what is cleared here refers to nodes, code objects and files by number, so numbers are used again.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use super::processes::KnownProcess;
use super::{Files, Session};
use crate::event::Pid;
use crate::frame::RawFrame;
use crate::resolve::{NameCache, OpenFiles};

/// Processes that are kept open, and segments without a sample after which one is not.
const MAX_PROCESSES: usize = 4096;
const UNUSED_SEGMENTS: u32 = 60;
/// Names of frames from which on only those of the last segment are kept: some 300 bytes each.
const MAX_NAMES: usize = 1 << 15;
/// Ranges of executable memory from which on they are compared with the list of mappings: that something is unmapped is no event.
const MANY_RANGES: usize = 1024;

/// What the end of a segment has dropped, and what is left.
#[derive(Clone, Debug, Default)]
pub struct SegmentEnd {
    /// Processes that are not known any more.
    pub gone: Vec<Pid>,
    /// What was dropped although it may be needed again, by kind.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Entries of each table, by kind.
    pub kept: BTreeMap<&'static str, u64>,
}

/// Ends the segment, as [`Session::close_segment`], and drops what is of no use any more.
pub(super) fn close(session: &mut Session) -> SegmentEnd {
    let mut end = SegmentEnd::default();
    forget_unused_processes(session, &mut end);
    let frames = session.segment.tree.nodes().iter().filter_map(|(_, frame, _)| *frame);
    let frames: FxHashSet<RawFrame> = frames.collect();
    session.names.retain_sampled();
    session.programs.clear_copies();
    session.close_segment();
    if session.files.unwinder.is_nearly_full() {
        start_over(session, &mut end);
    }
    drop_unused(session, &frames, &mut end);
    end.kept = table_sizes(session);
    end
}

/// Forgets processes that have ended without a word of it, and those that have had no sample for long.
fn forget_unused_processes(session: &mut Session, end: &mut SegmentEnd) {
    session.period = session.period.wrapping_add(1);
    let sampled: FxHashSet<Pid> = session.segment.timeline.iter().map(|sample| sample.pid).collect();
    for known in session.processes.iter_mut() {
        if known.last_used.is_none() || sampled.contains(&known.process.pid()) {
            known.last_used = Some(session.period);
        }
    }
    let system = &*session.files.system;
    let is_gone = |known: &KnownProcess| {
        let process = &known.process;
        // One of which something is missing is opened again.
        process.space.is_full() || process.started.is_none() || system.start_time(process.pid()) != process.started
    };
    let age = |known: &KnownProcess| session.period.wrapping_sub(known.last_used.unwrap_or(session.period));
    let mut running = Vec::new();
    for known in session.processes.iter() {
        let pid = known.process.pid();
        if is_gone(known) {
            end.gone.push(pid);
        } else {
            running.push((age(known), pid));
        }
    }
    running.sort_unstable_by(|a, b| b.cmp(a));
    let old = running.partition_point(|(age, _)| *age > UNUSED_SEGMENTS);
    let many = running.len().saturating_sub(MAX_PROCESSES);
    let unused = running.iter().take(old.max(many)).map(|(_, pid)| *pid);
    end.count("processes", old.max(many));
    end.gone.extend(unused);
    for pid in &end.gone {
        session.forget(*pid);
    }
    session.processes.forget_ended_code();
}

/// Drops what no process needs and no stack of the segment had: `frames` are its frames.
fn drop_unused(session: &mut Session, frames: &FxHashSet<RawFrame>, end: &mut SegmentEnd) {
    let files = &mut session.files;
    let codes = frames.iter().filter_map(|frame| match frame {
        RawFrame::Python { code, .. } => Some(*code),
        _ => None,
    });
    let codes = files.codes.end_period(codes);
    end.count("code_objects", codes.len());
    let system = files.system.clone();
    for known in session.processes.iter_mut() {
        let process = &mut known.process;
        process.jit.forget_ended();
        process.code_copies.clear();
        let many = process.space.ranges() > MANY_RANGES;
        let text = many.then(|| system.maps(process.pid()).ok()).flatten();
        process.space.forget_unmapped(text.as_deref());
    }
    files
        .jit
        .count(session.processes.iter().map(|known| &known.process.jit));
    let futexes = session.activities.states.futexes.all().iter().map(|(id, _)| *id);
    let used = futexes.chain(session.processes.files()).collect();
    end.count("files", files.close_unused(&used));
    session.activities.spans.forget_closed(&files.modules);
    // Frames of the last stacks have numbers of code objects and files.
    session.stacks.forget_last();
    let has_many = session.naming.cache.len() > MAX_NAMES;
    let is_kept = |frame: &RawFrame| match frame {
        RawFrame::Python { code, .. } if codes.contains(code) => false,
        _ => !has_many || frames.contains(frame),
    };
    let names = session.naming.cache.retain(&is_kept, &files.modules);
    end.count("names", names);
    files.modules.reuse_closed();
    let OpenFiles { perf_maps, sources, .. } = &mut files.open;
    perf_maps.retain(|pid, _| session.processes.get(*pid).is_some());
    sources.retain_roots(&|pid| session.processes.get(pid).is_some());
    if let Some(naming) = &mut session.naming.process {
        naming.begin_period();
    }
}

/// Forgets all processes and files, which are opened again: what was read of them cannot be dropped one by one.
fn start_over(session: &mut Session, end: &mut SegmentEnd) {
    let pids: Vec<Pid> = session.processes.iter().map(|known| known.process.pid()).collect();
    for pid in &pids {
        session.forget(*pid);
    }
    end.count("processes", pids.len());
    end.gone.extend(pids);
    let system = session.files.system.clone();
    session.files = Files::new(system, true);
    session.naming.cache = NameCache::default();
}

/// Entries of the tables that live on.
fn table_sizes(session: &Session) -> BTreeMap<&'static str, u64> {
    let files = &session.files;
    let (codes, addresses) = files.codes.size();
    let sizes = [
        ("processes", session.processes.iter().count()),
        ("files", files.modules.open_ones().count()),
        ("file_numbers", files.modules.len()),
        ("files_not_opened", files.modules.refusals()),
        ("code_objects", codes),
        ("code_addresses", addresses),
        ("jit_objects", files.jit.len()),
        ("names", session.naming.cache.len()),
        ("frames", session.naming.cache.frames()),
        (
            "threads",
            session.names.threads.len() + session.names.python_threads.len(),
        ),
        ("perf_maps", files.open.perf_maps.len()),
    ];
    sizes.into_iter().map(|(kind, size)| (kind, size as u64)).collect()
}

impl SegmentEnd {
    fn count(&mut self, kind: &'static str, number: usize) {
        if number > 0 {
            *self.dropped.entry(kind).or_default() += number as u64;
        }
    }
}

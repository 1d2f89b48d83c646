//! Tapes that are run through a session: replays, and the last step of a recording.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::pump::{EventPump, PumpEnd};
use super::stacks::VisitedCode;
use super::{Grouping, Session, SessionOptions};
use crate::capture::Backend;
use crate::edges::{EdgeAccesses, EdgeCounts, EdgeJudge};
use crate::error::Result;
use crate::event::Event;
use crate::frame::ModuleId;
use crate::process::file_content::Content;
use crate::process::modules::Modules;
use crate::profile::measure::Measure;
use crate::profile::model::{Meta, Profile};
use crate::resolve::Fetch;
use crate::resolve::naming::NamingProcess;
use crate::tape::prune::{PruneRequest, prune};
use crate::tape::{Mark, Tape, TapeBackend, TapeOptions, TapeSystem, TapeUse};

/// What a tape says of the options of a session; `wakers`: it shows them, with the kernel's functions or without.
pub fn recorded_options(options: &SessionOptions, wakers: Option<bool>) -> TapeOptions {
    TapeOptions {
        weighted: match options.measure {
            Measure::Time(period) => Some(period),
            Measure::Event | Measure::Period(..) | Measure::Bytes(_) => None,
        },
        gil_only: options.gil_only,
        tasks: options.tasks,
        lag: options.lag,
        workers: options.workers,
        spans: options.spans,
        thread_context: options.thread_context,
        wakers,
    }
}

/// A session that has processed all of a tape, with the options of the recording.
pub struct Replay {
    tape: Rc<Tape>,
    session: Session,
}

/// What is wanted of a replay besides its session.
#[derive(Default)]
struct Logs {
    visited: Option<VisitedCode>,
    edges: Option<EdgeJudge>,
    used: Option<Rc<TapeUse>>,
}

impl Replay {
    /// `options` say what is shown of it.
    ///
    /// # Errors
    /// Those of the session for an event; never errors of the machine, which are on the tape.
    pub fn new(tape: &Rc<Tape>, options: SessionOptions) -> Result<Replay> {
        Replay::run(tape, options, Logs::default())
    }

    /// The same, with the edges of the native stacks judged.
    ///
    /// # Errors
    /// As [`Replay::new`].
    pub fn with_edges(tape: &Rc<Tape>, options: SessionOptions) -> Result<Replay> {
        let edges = Some(EdgeJudge::default());
        let logs = Logs {
            edges,
            ..Logs::default()
        };
        Replay::run(tape, options, logs)
    }

    fn run(tape: &Rc<Tape>, options: SessionOptions, logs: Logs) -> Result<Replay> {
        let (header, recorded) = (&tape.header, &tape.header.options);
        let options = SessionOptions {
            measure: match recorded.weighted {
                Some(period) => Measure::Time(period),
                None => Measure::of_event(&header.event, header.rate),
            },
            gil_only: recorded.gil_only,
            tasks: recorded.tasks,
            lag: recorded.lag,
            workers: recorded.workers,
            spans: recorded.spans,
            thread_context: recorded.thread_context,
            ..options
        };
        let mut system = TapeSystem::new(tape);
        if let Some(used) = logs.used {
            system.log_use(used);
        }
        let position = system.position();
        let mut session = Session::new(options, Box::new(system));
        (session.stacks.visited, session.stacks.edges) = (logs.visited, logs.edges);
        if let Some(kernel) = recorded.wakers {
            session.show_wakers(kernel);
        }
        let mut backend = TapeBackend::new(tape.clone());
        if tape.header.attached {
            let _ = session.open(tape.header.pid, &mut |_, _| Ok(())); // the samples will show what is missing
        }
        let (mut pump, mut has_ended) = (EventPump::default(), false);
        let mut advance = |_: &Event| position.advance();
        while let Some(mark) = backend.next_mark() {
            match mark {
                Mark::Turn => {
                    pump.pump(
                        &mut backend,
                        &mut session,
                        &mut advance,
                        Duration::ZERO,
                        PumpEnd::default(),
                    )?;
                }
                Mark::End => {
                    // Samples of intervals that were open.
                    for event in backend.take() {
                        advance(&event);
                        session.event(event, &mut |_, _| Ok(()))?;
                    }
                    session.add_open_intervals(&mut backend)?;
                    has_ended = true;
                }
            }
        }
        if !has_ended {
            session.add_open_intervals(&mut backend)?;
        }
        if !tape.marks.is_empty() {
            session.update_thread_names();
        }
        Ok(Replay {
            tape: tape.clone(),
            session,
        })
    }

    /// Has names read by another process; `fetch` provides the line numbers and inlined functions that files on a tape no longer
    /// have.
    pub fn name_apart(&mut self, fetch: Option<Fetch>, naming: Option<NamingProcess>) {
        (self.session.naming.fetch, self.session.naming.process) = (fetch, naming);
    }

    /// The profile of the tape.
    pub fn profile(&mut self) -> Profile {
        let header = &self.tape.header;
        let lost = TapeBackend::new(self.tape.clone()).counts().lost;
        let quality = self.session.segment.quality.quality(0, lost);
        let meta = Meta {
            version: env!("CARGO_PKG_VERSION").into(),
            rate: header.rate,
            event: header.event.clone(),
            backend: header.backend.clone(),
            start: header.start,
            duration: header.duration,
            command: header.command.clone(),
            pid: header.pid,
            quality,
            ..Meta::default()
        };
        self.session.resolve(header.began, meta)
    }

    /// Verdicts on the edges of the native stacks, if they were judged.
    pub fn edges(&self) -> Option<&EdgeCounts> {
        self.session.stacks.edges.as_ref().map(|edges| &edges.counts)
    }

    /// The files of all processes.
    pub fn modules(&self) -> &Modules {
        &self.session.files.modules
    }
}

/// The profile of a tape.
///
/// # Errors
/// As [`Replay::new`].
pub fn profile(tape: &Rc<Tape>, options: SessionOptions) -> Result<Profile> {
    profile_with(tape, options, None, None)
}

/// The same, with names as [`Replay::name_apart`] says.
///
/// # Errors
/// As [`Replay::new`].
pub fn profile_with(
    tape: &Rc<Tape>,
    options: SessionOptions,
    fetch: Option<Fetch>,
    naming: Option<NamingProcess>,
) -> Result<Profile> {
    let mut replay = Replay::new(tape, options)?;
    replay.name_apart(fetch, naming);
    Ok(replay.profile())
}

/// Prunes the files of a freshly recorded tape to what its replay needs. False if the pruned tape does not give the
/// same stacks, with the same edges, as the complete files: it still replays, but with other results.
///
/// # Errors
/// As [`Replay::new`].
pub fn finish(mut tape: Tape) -> Result<(Tape, bool)> {
    let options = SessionOptions {
        grouping: Grouping {
            processes: true,
            threads: true,
        },
        ..SessionOptions::default()
    };
    let complete = Rc::new(tape.clone());
    let mut edges = EdgeJudge::default();
    edges.log = Some(EdgeAccesses::default());
    let used = Rc::new(TapeUse::default());
    let logs = Logs {
        visited: Some(VisitedCode::default()),
        edges: Some(edges),
        used: Some(used.clone()),
    };
    let recorded = Replay::run(&complete, options, logs)?;
    used.clear_unused(&mut tape.responses.reads);
    let (stacks, modules) = (&recorded.session.stacks, recorded.modules());
    let mut by_module: FxHashMap<ModuleId, PruneRequest> = FxHashMap::default();
    for ((module, svma), analyzed) in stacks.visited.iter().flatten() {
        let wanted = by_module.entry(*module).or_default();
        wanted.svmas.insert(*svma);
        if *analyzed {
            wanted.analyzed.insert(*svma);
        }
    }
    if let Some(read) = stacks.edges.as_ref().and_then(|edges| edges.log.as_ref()) {
        for (module, svma, length) in &read.code {
            by_module.entry(*module).or_default().code.insert((*svma, *length));
        }
        for (module, svma) in &read.functions {
            by_module.entry(*module).or_default().functions.insert(*svma);
        }
    }
    for i in 0..modules.len() {
        let id = ModuleId(i as u32);
        let module = modules.get(id);
        let Content::File(file) = &module.content else { continue };
        let is_this = |c: &Content| matches!(c, Content::File(f) if Arc::ptr_eq(f, file));
        let Some(slot) = tape.files.iter().position(is_this) else {
            continue;
        };
        let mut wanted = by_module.remove(&id).unwrap_or_default();
        wanted.accesses = module.accesses();
        tape.files[slot] = prune(&module.content, &wanted).map_or(Content::Missing, |s| Content::Bytes(Arc::new(s)));
    }
    for file in &mut tape.files {
        if let Content::File(_) = file {
            *file = Content::Missing; // the session never read it
        }
    }
    tape.kernel = tape.kernel.map(|text| kernel_lines(&tape.events, &text));
    let small = Rc::new(tape);
    let replayed = Replay::with_edges(&small, options)?;
    let (tree, of_replay) = (&recorded.session.segment.tree, &replayed.session.segment.tree);
    let same = of_replay.nodes() == tree.nodes() && replayed.edges() == recorded.edges();
    drop(replayed);
    Ok((Rc::unwrap_or_clone(small), same))
}

/// The lines of `/proc/kallsyms` that name the functions at the kernel addresses on the tape.
fn kernel_lines(events: &[Event], text: &str) -> String {
    let address = |line: &str| u64::from_str_radix(line.split(' ').next()?, 16).ok();
    let mut lines: Vec<(u64, &str)> = text.lines().filter_map(|l| Some((address(l)?, l))).collect();
    lines.sort();
    let mut keep = BTreeSet::new();
    for event in events {
        let Event::Sample(s) = event else { continue };
        for a in &s.kernel {
            let after = lines.partition_point(|(start, _)| start <= a);
            let Some(before) = after.checked_sub(1) else { continue };
            // The function's names, and the symbol that it ends at.
            let first = lines.partition_point(|(start, _)| *start < lines[before].0);
            keep.extend(first..(after + 1).min(lines.len()));
        }
    }
    keep.into_iter().map(|i| format!("{}\n", lines[i].1)).collect()
}

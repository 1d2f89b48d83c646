//! Tapes through the session: replays them, and finishes recorded ones.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::capture::Source;
use crate::capture::tape::prune::{Wanted, prune};
use crate::capture::tape::{Tape, TapeHost, TapeSource};
use crate::error::Result;
use crate::process::content::Content;
use crate::resolve::Fetch;
use crate::sample::{Event, ModuleId};
use crate::session::{Grouping, Options, Session, Touched};
use crate::tree::profile::{Meta, Profile, Quality};

/// A session that has taken the whole tape.
///
/// # Errors
/// What the session says of an event; never the machine's errors, which are on the tape.
pub fn session(tape: &Rc<Tape>, options: Options) -> Result<Session> {
    run(tape, options, None)
}

fn run(tape: &Rc<Tape>, options: Options, touched: Option<Touched>) -> Result<Session> {
    let mut session = Session::new(options, Box::new(TapeHost::new(tape)));
    session.touched = touched;
    let mut source = TapeSource::new(tape.clone());
    if tape.head.attached {
        let _ = session.open(tape.head.pid, &mut |_, _| Ok(())); // samples will say what is missing
    }
    let mut events = Vec::new();
    while source.poll(Duration::ZERO, &mut events)? || !events.is_empty() {
        session.open_files(&events);
        session.see_codes(&events);
        for event in events.drain(..) {
            session.event(event, &mut |_, _| Ok(()))?;
        }
    }
    Ok(session)
}

/// The profile of a tape.
///
/// # Errors
/// As [`session`].
pub fn profile(tape: &Rc<Tape>, options: Options) -> Result<Profile> {
    profile_with(tape, options, None)
}

/// The same; `fetch` is asked for the lines and inlined functions that the files on a tape have lost.
///
/// # Errors
/// As [`session`].
pub fn profile_with(tape: &Rc<Tape>, options: Options, fetch: Option<Fetch>) -> Result<Profile> {
    let mut session = session(tape, options)?;
    session.fetch = fetch;
    let (head, t) = (&tape.head, &session.tally);
    let quality = Quality {
        asked: 0,
        taken: t.taken(),
        exact: t.exact,
        repaired: t.repaired,
        partial: t.partial,
        lost: TapeSource::new(tape.clone()).counts().lost,
        reasons: t
            .reasons
            .iter()
            .map(|(why, n)| (why.reason().to_string(), *n))
            .collect(),
    };
    let meta = Meta {
        version: env!("CARGO_PKG_VERSION").into(),
        rate: head.rate,
        event: head.clock.clone(),
        backend: head.backend.clone(),
        start: head.start,
        duration: head.duration,
        command: head.command.clone(),
        pid: head.pid,
        quality,
        ..Meta::default()
    };
    Ok(session.resolve(head.began, meta))
}

/// Cuts the files of a freshly recorded tape down to what its replay needs. False if the small tape does not give the
/// same stacks as the whole files do: it still replays, but not as it was.
///
/// # Errors
/// As [`session`].
pub fn finish(mut tape: Tape) -> Result<(Tape, bool)> {
    let options = Options {
        grouping: Grouping {
            processes: true,
            threads: true,
        },
        native: true,
        weighted: None,
    };
    let whole = Rc::new(tape.clone());
    let session = run(&whole, options, Some(Touched::default()))?;
    let mut by_module: FxHashMap<ModuleId, Wanted> = FxHashMap::default();
    for ((module, svma), followed) in session.touched.iter().flatten() {
        let wanted = by_module.entry(*module).or_default();
        wanted.svmas.insert(*svma);
        if *followed {
            wanted.followed.insert(*svma);
        }
    }
    for i in 0..session.modules.len() {
        let id = ModuleId(i as u32);
        let module = session.modules.get(id);
        let Content::File(file) = &module.content else { continue };
        let is_this = |c: &Content| matches!(c, Content::File(f) if Arc::ptr_eq(f, file));
        let Some(slot) = tape.files.iter().position(is_this) else {
            continue;
        };
        let mut wanted = by_module.remove(&id).unwrap_or_default();
        wanted.asked = module.asked();
        tape.files[slot] = prune(&module.content, &wanted).map_or(Content::Missing, |s| Content::Bytes(Arc::new(s)));
    }
    for file in &mut tape.files {
        if let Content::File(_) = file {
            *file = Content::Missing; // the session never came to ask for it
        }
    }
    tape.kernel = tape.kernel.map(|text| kernel_lines(&tape.events, &text));
    let small = Rc::new(tape);
    let again = run(&small, options, None)?;
    let same = again.tree.nodes() == session.tree.nodes();
    drop(again);
    Ok((Rc::unwrap_or_clone(small), same))
}

/// The lines of `/proc/kallsyms` that tell the functions of the kernel addresses on the tape.
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
            // The function's names, and what it ends at.
            let first = lines.partition_point(|(start, _)| *start < lines[before].0);
            keep.extend(first..(after + 1).min(lines.len()));
        }
    }
    keep.into_iter().map(|i| format!("{}\n", lines[i].1)).collect()
}

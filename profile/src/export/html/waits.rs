//! What the page of a profile with off-CPU time adds: where threads waited, and the interpreter lock.
//!
//! ```text
//! {"value": index of the time in "values", "sites": [[kind, object, where]],
//!  "gil": {"threads": [[thread, waited, count, longest, held]], "pairs": [[thread, holder, waited, count, longest]],
//!          "functions": [[name, held, waited for]]}, times in ns, each list with its greatest times first}
//! ```
//!
//! A thread is its name and number: `worker (thread 71)`, of several processes `worker (process 70 · thread 71)`. Two
//! columns follow those of the samples: site (from 1; 0: running), and the length of the interval in ns.

use std::io::{self, Write};

use super::data::{list, short};
use crate::escape::write_json;
use crate::gil_waits;
use crate::model::Profile;
use crate::model::{Pid, Tid};
use crate::waits::{places, split_label};

/// Rows of a table, at most.
const ROWS: usize = 200;

/// The value that has the time of samples of a profile with waits, as an index of the profile.
pub fn value(profile: &Profile) -> Option<usize> {
    let value = profile.waiting_time();
    value.filter(|_| !profile.waits.is_empty())
}

/// Writes the JSON object, and returns the two columns of samples. `value`: of the profile; `shown`: the same of the page;
/// `threads`: those that the page shows.
pub fn write(
    profile: &Profile,
    value: usize,
    shown: usize,
    threads: &[(Pid, Tid)],
    out: &mut Vec<u8>,
) -> io::Result<[Vec<u64>; 2]> {
    let (sites, of_sample) = places(profile);
    write!(out, "{{\"value\":{shown}")?;
    list("sites", sites.iter(), out, |(frame, site), out| {
        let (kind, object) = split_label(&profile.frames[*frame as usize].name);
        strings(&[kind, object, site], out)?;
        out.write_all(b"]")
    })?;
    let gil = gil_waits::of(profile, value);
    let mut pids = threads.iter().map(|(pid, _)| pid);
    let first = pids.next();
    let has_processes = pids.any(|pid| Some(pid) != first);
    let thread = |id| thread(profile, id, has_processes);
    out.extend(b",\"gil\":{\"rows\":0");
    list("threads", gil.threads.iter().take(ROWS), out, |t, out| {
        strings(&[&thread((t.pid, t.tid))], out)?;
        write!(out, ",{},{:.1},{},{}]", t.waited, t.count, t.longest, t.held)
    })?;
    list("pairs", gil.pairs.iter().take(ROWS), out, |pair, out| {
        let holder = pair.holder.map_or("?".into(), thread);
        strings(&[&thread(pair.waiter), &holder], out)?;
        write!(out, ",{},{:.1},{}]", pair.waited, pair.count, pair.longest)
    })?;
    list("functions", gil.functions.iter().take(ROWS), out, |function, out| {
        strings(&[&function.function], out)?;
        write!(out, ",{},{}]", function.held, function.waited_for)
    })?;
    out.extend(b"}}");
    let lengths = (0..of_sample.len()).map(|sample| profile.waits.lengths.get(sample).copied().unwrap_or(0));
    Ok([
        of_sample.iter().map(|site| u64::from(*site)).collect(),
        lengths.collect(),
    ])
}

/// Opens a list with strings.
fn strings(texts: &[&str], out: &mut Vec<u8>) -> io::Result<()> {
    for (at, text) in texts.iter().enumerate() {
        out.push(if at == 0 { b'[' } else { b',' });
        write_json(&short(text), out)?;
    }
    Ok(())
}

/// As the page labels threads, with their processes if there are several.
fn thread(profile: &Profile, (pid, tid): (Pid, Tid), has_processes: bool) -> String {
    let number = match has_processes {
        true if pid == tid => format!("process {pid}"),
        true => format!("process {pid} · thread {tid}"),
        false => format!("thread {tid}"),
    };
    let known = profile.meta.threads.iter().find(|(p, t, _)| (*p, *t) == (pid, tid));
    match known.map_or("", |(.., name)| name) {
        "" => number,
        name => format!("{name} ({number})"),
    }
}

//! The block at the end: what was asked, what was got, how good it is.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use crate::export::escape::line;
use crate::tree::profile::{FrameKind, Meta, ModuleMeta, Profile, Quality};
use crate::tree::values::Unit;

/// The block as text, a line each.
pub fn block(meta: &Meta, written: &str) -> String {
    let (meta, written) = (&printable(meta), line(written));
    let q = &meta.quality;
    let mut out = String::new();
    let asked = if q.asked > 0 {
        format!(", {} asked", q.asked)
    } else {
        String::new()
    };
    let rate = if q.asked > 0 {
        format!(
            "; rate {:.1} of {} Hz",
            meta.rate as f64 * q.taken as f64 / q.asked as f64,
            meta.rate
        )
    } else {
        String::new()
    };
    let _ = writeln!(
        out,
        "nativeprof: {} samples in {:.1} s{asked}, {} lost{rate}",
        q.taken, meta.duration, q.lost
    );
    let _ = writeln!(out, "  stacks:   {}", stacks(q));
    if let Some(held) = &meta.held {
        let (median, longest) = (held.median_us, held.longest_us);
        let _ = writeln!(out, "  held:     median {median} us, longest {longest} us");
    }
    let python = if meta.python.is_empty() {
        "none found"
    } else {
        &meta.python
    };
    let _ = writeln!(out, "  python:   {python}");
    let _ = writeln!(out, "  names:    {}", names(meta));
    let per_sample = meta.own_cpu * 1e6 / q.taken.max(1) as f64;
    let _ = writeln!(
        out,
        "  own CPU:  {:.2} s ({per_sample:.0} us a sample, start and end included)",
        meta.own_cpu
    );
    let _ = write!(out, "  written:  {written}");
    out
}

/// `  time:     on CPU 3.10 s, runnable 0.21 s, waiting 17.30 s (sleep 12.20 s, gil 5.10 s)`, summed over threads; `None`
/// for a profile of CPU time.
pub fn thread_states(profile: &Profile) -> Option<String> {
    let wall = profile.find_value("wall")?;
    profile.find_value("off_cpu")?;
    let (mut running, mut runnable, mut waiting) = (0u64, 0u64, BTreeMap::<&str, u64>::new());
    for (node, amount) in profile.nodes.iter().zip(profile.own_amounts(wall)) {
        let frame = &profile.frames[node.frame as usize];
        match frame
            .name
            .strip_prefix("[waiting: ")
            .and_then(|kind| kind.strip_suffix(']'))
        {
            _ if frame.kind != FrameKind::State => running += amount,
            Some(kind) => *waiting.entry(kind).or_default() += amount,
            None => runnable += amount,
        }
    }
    let mut kinds: Vec<(&str, u64)> = waiting.into_iter().collect();
    kinds.sort_by_key(|(kind, time)| (Reverse(*time), *kind));
    let show = |time: u64| Unit::Nanoseconds.show(time);
    let total = kinds.iter().map(|(_, time)| time).sum();
    let named: Vec<String> = kinds
        .iter()
        .map(|(kind, time)| format!("{kind} {}", show(*time)))
        .collect();
    let (running, runnable, waiting) = (show(running), show(runnable), show(total));
    Some(format!(
        "  time:     on CPU {running}, runnable {runnable}, waiting {waiting} ({})",
        named.join(", ")
    ))
}

/// The same with names that may be sent to a terminal.
fn printable(meta: &Meta) -> Meta {
    let mut meta = meta.clone();
    meta.python = line(&meta.python).into_owned();
    for module in &mut meta.modules {
        module.path = line(&module.path).into_owned();
        module.names = line(&module.names).into_owned();
        module.missing = line(&module.missing).into_owned();
    }
    meta
}

/// `exact 1998 (99.90 %), repaired 1, partial 1 (stack page not present: 1)`
pub fn stacks(q: &Quality) -> String {
    if q.taken == 0 {
        let why = match (q.asked, q.lost) {
            (0, _) => "the target used no CPU time while it was sampled",
            (_, 0) => "no tick met it in the little CPU time that it used; a higher --rate sees more",
            _ => "all were lost",
        };
        return format!("none: {why}");
    }
    let mut text = format!("exact {} ({})", q.exact, percent(q.exact, q.taken));
    let _ = write!(text, ", repaired {}, partial {}", q.repaired, q.partial);
    if !q.reasons.is_empty() {
        let reasons: Vec<_> = q.reasons.iter().map(|(why, n)| format!("{why}: {n}")).collect();
        let _ = write!(text, " ({})", reasons.join(", "));
    }
    text
}

/// Share in percent, rounded down, so that 100 means all.
pub fn percent(part: u64, whole: u64) -> String {
    let hundredths = (u128::from(part) * 10_000 / u128::from(whole.max(1))) as u64;
    format!("{}.{:02} %", hundredths / 100, hundredths % 100)
}

/// Rows shown of files with the most samples, whether they lack names or not.
const ROWS: usize = 3;

/// How many files, then a line for each of those that matter: with the most samples, or with some that have no name. The
/// whole table is in the profile.
fn names(meta: &Meta) -> String {
    let count = meta.modules.len();
    let mut text = format!("from {count} file{}", if count == 1 { "" } else { "s" });
    // Profiles of earlier versions say so only of files without any name.
    let is_unnamed = |m: &&ModuleMeta| m.unnamed > 0 || m.names.starts_with("none");
    let rest = meta.modules.iter().skip(ROWS).filter(is_unnamed);
    for m in meta.modules.iter().take(ROWS).chain(rest) {
        let _ = write!(text, "\n            {}", row(m));
    }
    text
}

/// `libssl.so.3: 812 samples; exported symbols; no /usr/lib/debug/.build-id/ab/cdef.debug`
fn row(m: &ModuleMeta) -> String {
    let name = m.path.rsplit('/').next().unwrap_or(&m.path);
    let mut text = format!("{name}: {} samples; {}", m.samples, m.names);
    if m.unnamed > 0 && !m.names.starts_with("none") {
        let _ = write!(text, "; {} of {} frames without a name", m.unnamed, m.frames);
    }
    if !m.missing.is_empty() {
        let _ = write!(text, "; {}", m.missing);
    }
    if m.names.starts_with("none") && !m.build_id.is_empty() {
        let _ = write!(text, "; build id {}", m.build_id);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_is_never_rounded_up() {
        assert_eq!(percent(999_999, 1_000_000), "99.99 %");
        assert_eq!(percent(5, 5), "100.00 %");
        assert_eq!(percent(0, 0), "0.00 %");
    }

    #[test]
    fn no_samples_have_a_reason() {
        let check = |asked, lost, why| {
            let q = Quality {
                asked,
                lost,
                ..Quality::default()
            };
            assert!(stacks(&q).contains(why), "{}", stacks(&q));
        };
        check(0, 0, "used no CPU time");
        check(275, 0, "no tick met it");
        check(275, 275, "all were lost");
    }

    #[test]
    fn the_table_shows_what_matters() {
        let module = |path: &str, samples, names: &str| ModuleMeta {
            path: path.into(),
            build_id: "abcd".into(),
            names: names.into(),
            missing: if names == "DWARF" { "" } else { "no /usr/lib/debug/x" }.into(),
            frames: samples,
            unnamed: if names == "DWARF" { 0 } else { samples / 10 + 1 },
            samples,
        };
        let mut modules = vec![
            module("/usr/bin/a", 90, "DWARF"),
            module("/lib/b", 80, "exported symbols"),
            module("/lib/c", 70, "none: no symbols in the file"),
            module("/lib/d", 60, "DWARF"),
            module("/lib/f", 50, "exported symbols"),
        ];
        modules.extend((0..5).map(|i| module(&format!("/lib/e{i}"), 9 - i, "none: no symbols in the file")));
        let text = names(&Meta {
            modules,
            ..Meta::default()
        });
        let lacking = "none: no symbols in the file; no /usr/lib/debug/x; build id abcd";
        let expected = [
            "from 10 files".to_string(),
            "a: 90 samples; DWARF".into(),
            "b: 80 samples; exported symbols; 9 of 80 frames without a name; no /usr/lib/debug/x".into(),
            format!("c: 70 samples; {lacking}"),
            "f: 50 samples; exported symbols; 6 of 50 frames without a name; no /usr/lib/debug/x".into(),
            format!("e0: 9 samples; {lacking}"),
            format!("e1: 8 samples; {lacking}"),
            format!("e2: 7 samples; {lacking}"),
            format!("e3: 6 samples; {lacking}"),
            format!("e4: 5 samples; {lacking}"),
        ];
        assert_eq!(text, expected.join("\n            "));
    }
}

//! The block at the end: what was asked, what was got, how good it is.

use std::fmt::Write;

use crate::export::escape::line;
use crate::tree::profile::{Meta, Quality};

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

/// The same with names that may be sent to a terminal.
fn printable(meta: &Meta) -> Meta {
    let mut meta = meta.clone();
    meta.python = line(&meta.python).into_owned();
    for module in &mut meta.modules {
        module.path = line(&module.path).into_owned();
        module.names = line(&module.names).into_owned();
    }
    meta
}

/// `exact 1998 (99.90 %), repaired 1, partial 1 (stack page not present: 1)`
pub fn stacks(q: &Quality) -> String {
    if q.taken == 0 {
        return "none: the target used no CPU time while it was sampled".into();
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

fn names(meta: &Meta) -> String {
    let bare: Vec<_> = meta.modules.iter().filter(|m| m.names.starts_with("none")).collect();
    let count = meta.modules.len();
    let mut text = format!("from {count} file{}", if count == 1 { "" } else { "s" });
    if let Some(worst) = bare.iter().max_by_key(|m| m.frames) {
        let others = if bare.len() > 1 {
            format!(" and {} more", bare.len() - 1)
        } else {
            String::new()
        };
        let _ = write!(text, "; without names: {}{others} ({})", worst.path, worst.names);
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
}

//! Tables of waits: where threads waited, for how long, and for which thread.

use serde_json::{Value, json};

use super::{RenderedList, ReportContext, share};
use crate::cli::output::row_filter;
use crate::cli::output::style::Color;
use crate::cli::output::table;
use crate::cli::output::table::{Cell, Overflow, plain};
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Pid, Tid};
use crate::profile::gil_waits::{self, GIL, GilPair};
use crate::profile::values::Unit;
use crate::profile::waits::{self, WaitSite};

/// Columns of a screen from which shares and quantiles fit in addition to the place.
const WIDE: usize = 120;

/// The table of waits; `kind`: of one kind alone.
///
/// # Errors
/// `Data` where the profile has no off-CPU time, or no wait of that kind.
pub fn waits(context: &ReportContext<'_>, kind: Option<&str>) -> Result<RenderedList> {
    let profile = context.profile;
    let file = context.file_name();
    let value = profile.waiting_time();
    let Some(value) = value.filter(|_| !profile.waits.is_empty()) else {
        return Err(Error::new(ErrorKind::Data, format!("{file} has no waits"))
            .why("it was recorded without --mode off-cpu or wall, or by an earlier version")
            .hint("record again with `nativeprof record --mode wall -o out.json ...`"));
    };
    let mut sites = waits::sites(profile, value);
    let sum = |sites: &[WaitSite]| sites.iter().fold(0u64, |sum, site| sum.saturating_add(site.total));
    let whole = sum(&sites);
    if let Some(kind) = kind {
        let mut known: Vec<String> = sites.iter().map(|site| site.kind.clone()).collect();
        sites.retain(|site| site.kind == kind || kind.split_once(' ') == Some((&*site.kind, &*site.object)));
        if sites.is_empty() {
            known.sort();
            known.dedup();
            return Err(
                Error::new(ErrorKind::Data, format!("{file} has no waits of kind `{kind}`"))
                    .why(format!("it has: {}", known.join(", ")))
                    .hint(format!("list all waits with `nativeprof report {file} --waits`")),
            );
        }
    }
    let wanted = sum(&sites);
    row_filter::apply(&mut sites, context.filters, WaitSite::text);
    context.limit(&mut sites);
    let list: Value = sites.iter().map(json_of).collect();
    let mut text = draw(context, &sites, whole);
    if kind == Some(GIL) {
        let (tables, drawn) = gil_tables(context, value, wanted);
        return Ok((
            "gil",
            json!({"sites": list, "threads": tables[0], "pairs": tables[1], "functions": tables[2]}),
            text + &drawn,
        ));
    }
    text += &context.style.paint(Color::Dim, backend_note(&profile.meta.backend));
    Ok(("waits", list, text))
}

/// What to know of the table.
fn backend_note(backend: &str) -> &'static str {
    match backend {
        "ebpf" => "COUNT is an estimate: intervals shorter than the sampling period are sampled\n",
        _ => {
            "Waiting threads were counted at the sampling rate. For the number and length of waits, and the threads that \
             ended them, use --backend ebpf\n"
        }
    }
}

fn json_of(site: &WaitSite) -> Value {
    json!({
        "kind": site.kind,
        "object": site.object,
        "site": site.site,
        "total_ns": site.total,
        "count": site.count,
        "p50_ns": site.median,
        "p99_ns": site.p99,
        "max_ns": site.longest,
    })
}

/// Lengths of intervals are not known with every backend.
fn time(ns: u64) -> Cell {
    plain(match ns {
        0 => "-".into(),
        ns => Unit::Nanoseconds.show(ns),
    })
}

fn count(count: f64) -> Cell {
    plain(match count {
        0.0 => "-".into(),
        c if c >= 10.0 => format!("{c:.0}"),
        c => format!("{c:.1}"),
    })
}

fn draw(context: &ReportContext<'_>, sites: &[WaitSite], whole: u64) -> String {
    let is_wide = context.style.width.is_none_or(|width| width >= WIDE);
    let columns = [
        ("TOTAL", Overflow::Number),
        ("%", Overflow::Number),
        ("COUNT", Overflow::Number),
        ("P50", Overflow::Number),
        ("P99", Overflow::Number),
        ("MAX", Overflow::Number),
        ("KIND", if is_wide { Overflow::Word } else { Overflow::Start }),
        ("WHERE", Overflow::End),
    ];
    let is_shown = columns.map(|(title, _)| is_wide || !["%", "P50", "P99"].contains(&title));
    let row = |site: &WaitSite| {
        // An address says that it is one of a socket.
        let address = site.object.strip_prefix("socket ").filter(|_| !is_wide);
        let kind = format!("{} {}", site.kind, address.unwrap_or(&site.object));
        let cells = [
            time(site.total),
            plain(share(site.total, whole)),
            count(site.count),
            time(site.median),
            time(site.p99),
            time(site.longest),
            plain(kind.trim_end()),
            plain(&site.site),
        ];
        let shown = cells.into_iter().zip(is_shown).filter(|(_, is_shown)| *is_shown);
        shown.map(|(cell, _)| cell).collect()
    };
    let shown = columns.into_iter().zip(is_shown).filter(|(_, is_shown)| *is_shown);
    let columns: Vec<_> = shown.map(|(column, _)| column).collect();
    table::draw(&columns, &sites.iter().map(row).collect::<Vec<_>>(), &context.style)
}

/// Who waited for the interpreter lock and who held it, as lists for programs and as text. `whole`: all waits for it, ns.
fn gil_tables(context: &ReportContext<'_>, value: usize, whole: u64) -> ([Value; 3], String) {
    let profile = context.profile;
    let gil = gil_waits::of(profile, value);
    let name = |(pid, tid): (Pid, Tid)| {
        let known = profile.meta.threads.iter().find(|(p, t, _)| (*p, *t) == (pid, tid));
        known.map_or("", |(.., name)| name).to_string()
    };
    let label = |thread: (Pid, Tid)| match name(thread) {
        name if name.is_empty() => format!("thread {}", thread.1),
        name => format!("{name} ({})", thread.1),
    };
    let heading = |title: &str| format!("\n{}\n", context.style.paint(Color::Bold, title));
    let duration = (profile.meta.duration * 1e9) as u64;

    let mut text = heading("Threads: time spent waiting for the GIL, and holding it");
    let columns = [
        ("WAITED", Overflow::Number),
        ("COUNT", Overflow::Number),
        ("MAX", Overflow::Number),
        ("HELD (estimate)", Overflow::Number),
        ("%", Overflow::Number),
        ("THREAD", Overflow::Start),
    ];
    let rows = gil.threads.iter().map(|t| {
        let held = share(t.held, duration);
        vec![
            time(t.waited),
            count(t.count),
            time(t.longest),
            time(t.held),
            plain(held),
            plain(label((t.pid, t.tid))),
        ]
    });
    text += &table::draw(&columns, &rows.collect::<Vec<_>>(), &context.style);

    text += &heading("Which thread waited for which");
    let columns = [
        ("WAITED", Overflow::Number),
        ("%", Overflow::Number),
        ("MAX", Overflow::Number),
        ("WAITER", Overflow::Start),
        ("HOLDER", Overflow::Start),
        ("RELEASED IN", Overflow::End),
    ];
    let rows = gil.pairs.iter().map(|p: &GilPair| {
        vec![
            time(p.waited),
            plain(share(p.waited, whole)),
            time(p.longest),
            plain(label(p.waiter)),
            plain(p.holder.map_or_else(|| "not known".into(), label)),
            plain(p.functions.first().map_or("", |(function, _)| function)),
        ]
    });
    text += &table::draw(&columns, &rows.collect::<Vec<_>>(), &context.style);

    text += &heading("Functions that held the GIL: time that others waited for it, and time they held it");
    let columns = [
        ("WAITED FOR", Overflow::Number),
        ("HELD (estimate)", Overflow::Number),
        ("FUNCTION", Overflow::End),
    ];
    let rows = gil
        .functions
        .iter()
        .map(|f| vec![time(f.waited_for), time(f.held), plain(&f.function)]);
    text += &table::draw(&columns, &rows.collect::<Vec<_>>(), &context.style);

    let thread = |(pid, tid): (Pid, Tid)| json!({"pid": pid, "tid": tid, "name": name((pid, tid))});
    let threads = gil.threads.iter().map(|t| {
        let mut value = thread((t.pid, t.tid));
        value["waited_ns"] = t.waited.into();
        value["count"] = t.count.into();
        value["max_ns"] = t.longest.into();
        value["held_estimate_ns"] = t.held.into();
        value
    });
    let pairs = gil.pairs.iter().map(|p| {
        json!({
            "waiter": thread(p.waiter),
            "holder": p.holder.map(thread),
            "waited_ns": p.waited,
            "count": p.count,
            "max_ns": p.longest,
            "functions": p.functions.iter().map(|(f, ns)| json!({"function": f, "waited_ns": ns})).collect::<Vec<_>>(),
        })
    });
    let functions = gil
        .functions
        .iter()
        .map(|f| json!({"function": f.function, "held_estimate_ns": f.held, "waited_for_ns": f.waited_for}));
    ([threads.collect(), pairs.collect(), functions.collect()], text)
}

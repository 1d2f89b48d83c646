//! A census as text for people.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use super::Report;
use crate::cli::output::style::{Color, TerminalStyle};
use crate::cli::output::table::{self, Cell, Overflow, plain};
use crate::escape::line;
use crate::heap::blocks::{self, BlockUse};
use crate::heap::census::{Census, Owner};
use crate::heap::estimate::Estimate;
use crate::heap::glibc::{ArenaUse, Glibc};
use crate::heap::mappings::{Account, Part};
use crate::profile::values::Unit;

/// Rows of the tables of files and of anonymous mappings.
const MAX_ROWS: usize = 8;
/// Rows of the table of types.
const MAX_TYPES: usize = 20;

/// The report as text; names are escaped for terminals.
pub fn text(report: &Report, style: &TerminalStyle) -> String {
    let account = &report.census.account;
    let process = style.paint(Color::Bold, &format!("Process {}", report.pid));
    let mut out = format!("{process}: {}\n", line(&report.command));
    let python = report.census.interpreter.as_deref().unwrap_or("no Python found");
    let _ = writeln!(out, "{}{}", line(python), pools(&report.census));
    let _ = writeln!(
        out,
        "resident {}, {} of it in no other process; swapped out {}, huge pages {}\n",
        bytes(account.rss),
        bytes(account.private),
        bytes(account.swap),
        bytes(account.hugetlb)
    );
    out += &parts(account, style);
    out += &types(&report.census, style);
    out += &blocks(&report.census, style);
    out += &large(&report.census, style);
    if let Some(glibc) = &report.census.glibc {
        out += &arenas(glibc, style);
    }
    out += &files(account, style);
    out += &anonymous(account, style);
    if let Some(sample) = &report.census.sample {
        let _ = writeln!(
            out,
            "\n{} of {} objects that were read:",
            sample.objects.len(),
            sample.met
        );
        for (address, value) in &sample.objects {
            let _ = writeln!(out, "  {address:#x}  {}", line(value));
        }
    }
    for note in &report.census.notes {
        let _ = write!(out, "\n{}", line(note));
    }
    if !report.census.notes.is_empty() {
        out.push('\n');
    }
    out
}

fn bytes(amount: u64) -> String {
    Unit::Bytes.show(amount)
}

fn percent(amount: u64, all: u64) -> String {
    format!("{:.1} %", 100.0 * amount as f64 / (all as f64).max(1.0))
}

fn parts(account: &Account, style: &TerminalStyle) -> String {
    let row = |part: &Part| {
        let amount = account.parts.get(part).copied().filter(|amount| *amount > 0)?;
        Some(vec![
            plain(bytes(amount)),
            plain(percent(amount, account.rss)),
            plain(part.text()),
        ])
    };
    let rows: Vec<Vec<Cell>> = Part::ALL.iter().filter_map(row).collect();
    table::rows(&[Overflow::Number, Overflow::Number, Overflow::Start], &rows, style)
}

/// How much of Python's heap was read.
fn pools(census: &Census) -> String {
    let Some(pools) = &census.python else {
        return String::new();
    };
    let torn = if pools.torn > 0 {
        format!("; {} changed while they were read", pools.torn)
    } else {
        String::new()
    };
    if pools.is_full {
        format!("; all {} pools were read{torn}", pools.all)
    } else {
        format!("; {} of {} pools were read{torn}", pools.read, pools.all)
    }
}

fn types(census: &Census, style: &TerminalStyle) -> String {
    let row = |count: Estimate, amount: Estimate, name: String| {
        let interval = if amount.is_exact() {
            String::new()
        } else {
            format!("{} to {}", bytes(amount.low), bytes(amount.high))
        };
        vec![
            plain(count.value.to_string()),
            plain(bytes(amount.value)),
            plain(interval),
            plain(name),
        ]
    };
    let shown = census.types.iter().take(MAX_TYPES);
    let mut rows: Vec<Vec<Cell>> = shown
        .map(|kind| row(kind.count, kind.bytes, String::from_utf8_lossy(&kind.name).into_owned()))
        .collect();
    let others = census.types.get(MAX_TYPES..).unwrap_or_default();
    if !others.is_empty() {
        let count = others.iter().map(|kind| kind.count.value).sum();
        let amount = others.iter().map(|kind| kind.bytes.value).sum();
        rows.push(row(
            Estimate::exact(count),
            Estimate::exact(amount),
            format!("{} other types", others.len()),
        ));
    }
    let columns = [
        ("COUNT", Overflow::Number),
        ("BYTES", Overflow::Number),
        ("99 % INTERVAL", Overflow::Number),
        ("TYPE", Overflow::Start),
    ];
    table::section(&columns, &rows, style)
}

/// Blocks of the C heap by size and class.
fn blocks(census: &Census, style: &TerminalStyle) -> String {
    let row = |count: u64, amount: u64, text: String| vec![plain(count.to_string()), plain(bytes(amount)), plain(text)];
    let shown = census.blocks.iter().take(MAX_ROWS);
    let mut rows: Vec<Vec<Cell>> = shown
        .map(|block| {
            row(
                block.count,
                block.bytes,
                blocks::text(block.usable, block.class.as_deref()),
            )
        })
        .collect();
    let others = census.blocks.get(MAX_ROWS..).unwrap_or_default();
    if !others.is_empty() {
        let sum = |of: fn(&BlockUse) -> u64| others.iter().map(of).sum();
        let text = format!("of {} other sizes", others.len());
        rows.push(row(sum(|block| block.count), sum(|block| block.bytes), text));
    }
    let what = if census.python.is_none() {
        "BLOCKS OF THE C HEAP"
    } else {
        "BLOCKS OF THE C HEAP THAT ARE NO OBJECTS OF PYTHON"
    };
    let columns = [
        ("COUNT", Overflow::Number),
        ("BYTES", Overflow::Number),
        (what, Overflow::Start),
    ];
    table::section(&columns, &rows, style)
}

/// Large blocks by what they belong to.
fn large(census: &Census, style: &TerminalStyle) -> String {
    let mut groups: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for block in &census.large {
        let name = match &block.owner {
            Owner::Itself(name) => format!("objects of {}", String::from_utf8_lossy(name)),
            Owner::Object(name) => format!("owned by {}", String::from_utf8_lossy(name)),
            Owner::Unknown if census.python.is_none() => "blocks of C code".into(),
            Owner::Unknown if census.has_all_owners => "owned by no object of Python that is known".into(),
            Owner::Unknown => "owner not sampled (--owners searches for it)".into(),
        };
        let sums = groups.entry(name).or_default();
        *sums = (sums.0 + 1, sums.1.saturating_add(block.bytes));
    }
    let mut groups: Vec<(String, (u64, u64))> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (_, amount))| Reverse(*amount));
    let rows: Vec<Vec<Cell>> = groups
        .into_iter()
        .take(MAX_ROWS)
        .map(|(name, (count, amount))| vec![plain(count.to_string()), plain(bytes(amount)), plain(name)])
        .collect();
    let columns = [
        ("COUNT", Overflow::Number),
        ("BYTES", Overflow::Number),
        ("LARGE BLOCKS OF THE C HEAP", Overflow::Start),
    ];
    table::section(&columns, &rows, style)
}

fn arenas(glibc: &Glibc, style: &TerminalStyle) -> String {
    let mut arenas: Vec<&ArenaUse> = glibc.arenas.iter().collect();
    arenas.sort_by_key(|arena| Reverse(arena.system));
    let row = |amounts: [u64; 4], name: String| {
        let cells = amounts.into_iter().map(|amount| plain(bytes(amount)));
        cells.chain([plain(name)]).collect::<Vec<Cell>>()
    };
    let amounts = |arena: &ArenaUse| [arena.in_use, arena.free, arena.free_resident, arena.returnable];
    let mut rows: Vec<Vec<Cell>> = arenas
        .iter()
        .take(MAX_ROWS)
        .map(|arena| {
            let name = if arena.is_main {
                "main".into()
            } else {
                format!("{:#x}", arena.address)
            };
            row(amounts(arena), name)
        })
        .collect();
    let others = arenas.get(MAX_ROWS..).unwrap_or_default();
    if !others.is_empty() {
        let mut sums = [0; 4];
        for arena in others {
            sums.iter_mut()
                .zip(amounts(arena))
                .for_each(|(sum, amount)| *sum += amount);
        }
        rows.push(row(sums, format!("{} others", others.len())));
    }
    let columns = [
        ("IN USE", Overflow::Number),
        ("FREE", Overflow::Number),
        ("RESIDENT", Overflow::Number),
        ("FOR MALLOC_TRIM", Overflow::Number),
        ("C ARENA", Overflow::Start),
    ];
    table::section(&columns, &rows, style)
}

fn files(account: &Account, style: &TerminalStyle) -> String {
    let shown = account.files.iter().take(MAX_ROWS);
    let row =
        |(private, shared, name): (u64, u64, String)| vec![plain(bytes(private)), plain(bytes(shared)), plain(name)];
    let mut rows: Vec<Vec<Cell>> = shown
        .map(|file| {
            row((
                file.private,
                file.shared,
                String::from_utf8_lossy(&file.name).into_owned(),
            ))
        })
        .collect();
    let others = account.files.get(MAX_ROWS..).unwrap_or_default();
    if !others.is_empty() {
        let sum = |of: fn(&crate::heap::mappings::FileUse) -> u64| others.iter().map(of).sum();
        rows.push(row((
            sum(|f| f.private),
            sum(|f| f.shared),
            format!("{} others", others.len()),
        )));
    }
    let columns = [
        ("PRIVATE", Overflow::Number),
        ("SHARED", Overflow::Number),
        ("FILE", Overflow::End),
    ];
    table::section(&columns, &rows, style)
}

fn anonymous(account: &Account, style: &TerminalStyle) -> String {
    let shown = account.anonymous.iter().take(MAX_ROWS);
    let mut rows: Vec<Vec<Cell>> = shown
        .map(|area| {
            let (range, name) = (&area.range, String::from_utf8_lossy(&area.name));
            vec![
                plain(bytes(area.rss)),
                plain(bytes(range.end - range.start)),
                plain(format!("{:#x} {name}", range.start).trim_end()),
            ]
        })
        .collect();
    let others = account.anonymous.get(MAX_ROWS..).unwrap_or_default();
    if !others.is_empty() {
        rows.push(vec![
            plain(bytes(others.iter().map(|area| area.rss).sum())),
            plain(bytes(others.iter().map(|area| area.range.end - area.range.start).sum())),
            plain(format!("{} others", others.len())),
        ]);
    }
    let columns = [
        ("RESIDENT", Overflow::Number),
        ("MAPPED", Overflow::Number),
        ("OTHER ANONYMOUS MEMORY AT", Overflow::Start),
    ];
    table::section(&columns, &rows, style)
}

//! Tables of a profile: functions, callers and callees of one, stacks as a tree, threads. Pure.

use std::borrow::Cow;
use std::collections::BTreeMap;

use regex_lite::Regex;

use crate::event::Tid;
use crate::profile::lags::{Lag, LagSite};
use crate::profile::model::{Frame, FrameKind, NodeId, Profile};
use crate::profile::stats::{FunctionId, SelfTotal, Stats};
use crate::profile::waits::WaitSite;
use crate::profile::your_functions::{InnermostFunctions, Whose};

/// Nodes with less than this fraction (1/N) of the samples are not shown.
const MIN_FRACTION: u64 = 200;
/// Maximum number of rows: more are of no use on a screen.
pub const MAX_ROWS: usize = 2000;

/// What a row represents; stays the same between updates, unlike its index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowTarget {
    Function(Box<Frame>),
    Thread(Tid),
    /// What blocked an event loop.
    Lag(Box<Lag>),
    /// A heading.
    None,
}

impl RowTarget {
    /// Whether both are the same function, thread or blocked place, perhaps of different profiles. Headings are not.
    pub fn is_same(&self, other: &RowTarget) -> bool {
        match (self, other) {
            (RowTarget::Function(a), RowTarget::Function(b)) => same(a, b),
            (RowTarget::Thread(a), RowTarget::Thread(b)) => a == b,
            (RowTarget::Lag(a), RowTarget::Lag(b)) => a.has_same_function(b),
            _ => false,
        }
    }
}

/// A line of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopRow {
    pub counts: SelfTotal,
    /// Indentation of the name.
    pub depth: usize,
    pub name: String,
    /// File or module, and line.
    pub place: String,
    pub kind: FrameKind,
    pub target: RowTarget,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopOrder {
    #[default]
    SelfCount,
    Total,
    Name,
}

fn name(frame: &Frame) -> Cow<'_, str> {
    match frame.kind {
        FrameKind::Unknown => format!("{}+{:#x}", frame.name, frame.address).into(),
        _ => frame.full_name().into(),
    }
}

fn place(frame: &Frame) -> String {
    match frame.kind {
        FrameKind::Python => format!("{}:{}", frame.filename, frame.first_line),
        _ if frame.source.is_empty() => frame.module.clone(),
        _ => format!(
            "{} {}",
            frame.source.rsplit('/').next().unwrap_or_default(),
            frame.module
        ),
    }
}

fn row(frame: &Frame, counts: SelfTotal, depth: usize) -> TopRow {
    TopRow {
        counts,
        depth,
        name: name(frame).into(),
        place: place(frame),
        kind: frame.kind,
        target: RowTarget::Function(Box::new(frame.clone())),
    }
}

fn heading(text: &str) -> TopRow {
    TopRow {
        counts: SelfTotal::default(),
        depth: 0,
        name: text.into(),
        place: String::new(),
        kind: FrameKind::Root,
        target: RowTarget::None,
    }
}

fn matches_filter(filter: Option<&Regex>, frame: &Frame) -> bool {
    filter.is_none_or(|f| f.is_match(&name(frame)) || f.is_match(&place(frame)))
}

fn sort(rows: &mut [TopRow], by: TopOrder) {
    let key = |r: &TopRow| match by {
        TopOrder::SelfCount => (r.counts.self_count, r.counts.total),
        TopOrder::Total | TopOrder::Name => (r.counts.total, r.counts.self_count),
    };
    match by {
        TopOrder::Name => rows.sort_by(|a, b| (&a.name, &a.place).cmp(&(&b.name, &b.place))),
        _ => rows.sort_by(|a, b| key(b).cmp(&key(a)).then_with(|| a.name.cmp(&b.name))),
    }
}

/// The user's own functions, each with the libraries and C code that it runs, then all others. Without functions of the
/// user's own, Python functions come first.
pub fn functions(profile: &Profile, filter: Option<&Regex>, by: TopOrder) -> Vec<TopRow> {
    let stats = Stats::new(profile);
    let first = InnermostFunctions::of(profile, &stats);
    let is_shown = |frame: &Frame, total: u64| total > 0 && matches_filter(filter, frame);
    let mut is_first = vec![false; stats.len()];
    let mut rows = Vec::new();
    for function in &first.rows {
        let frame = stats.frame(function.function);
        is_first[function.function as usize] = true;
        if is_shown(frame, function.total) {
            let counts = SelfTotal {
                self_count: function.amount,
                total: function.total,
            };
            rows.push(TopRow {
                place: function.place(frame),
                ..row(frame, counts, 0)
            });
        }
    }
    let counts = (0..).zip(stats.functions());
    let mut others: Vec<TopRow> = counts
        .filter(|(id, _)| !is_first[*id as usize])
        .map(|(id, counts)| (stats.frame(id), counts))
        .filter(|(frame, counts)| is_shown(frame, counts.total))
        .map(|(frame, counts)| row(frame, counts, 0))
        .collect();
    sort(&mut rows, by);
    sort(&mut others, by);
    if !rows.is_empty() && !others.is_empty() {
        rows.push(heading(match first.whose {
            Whose::Yours => "other functions: libraries, C code",
            Whose::Python | Whose::Native => "other functions",
        }));
    }
    rows.append(&mut others);
    rows.truncate(MAX_ROWS);
    rows
}

/// Is it the same function, perhaps of another profile?
fn same(a: &Frame, b: &Frame) -> bool {
    let address = |f: &Frame| if f.kind == FrameKind::Inlined { 0 } else { f.address };
    (a.kind, &a.name, &a.module, &a.filename, a.first_line, address(a))
        == (b.kind, &b.name, &b.module, &b.filename, b.first_line, address(b))
}

/// Callers and callees of a function.
pub fn around(profile: &Profile, function: &Frame, by: TopOrder) -> Vec<TopRow> {
    let stats = Stats::new(profile);
    let id = (0..stats.len() as FunctionId).find(|id| same(stats.frame(*id), function));
    let counts = id.map_or(SelfTotal::default(), |id| stats.functions()[id as usize]);
    let (mut callers, mut callees) = (Vec::new(), Vec::new());
    for call in stats.calls() {
        if Some(call.callee) == id {
            match call.caller {
                Some(caller) => callers.push(row(stats.frame(caller), call.counts, 1)),
                None => callers.push(TopRow {
                    depth: 1,
                    counts: call.counts,
                    ..heading("(no caller)")
                }),
            }
        }
        if id.is_some() && call.caller == id {
            callees.push(row(stats.frame(call.callee), call.counts, 1));
        }
    }
    sort(&mut callers, by);
    sort(&mut callees, by);
    let mut rows = vec![heading("called by")];
    rows.append(&mut callers);
    rows.push(heading("the function"));
    rows.push(row(id.map_or(function, |id| stats.frame(id)), counts, 1));
    rows.push(heading("calls"));
    rows.append(&mut callees);
    rows.truncate(MAX_ROWS);
    rows
}

/// The merged stacks as a tree, callers above callees, the heaviest first; with a filter only stacks with a match.
pub fn stacks(profile: &Profile, filter: Option<&Regex>) -> Vec<TopRow> {
    let mut stats = Stats::new(profile);
    if filter.is_some() {
        let mut matches: Vec<bool> = Vec::with_capacity(profile.nodes.len());
        for node in &profile.nodes {
            let above = matches.get(node.parent as usize).copied().unwrap_or(false);
            let frame = profile.frames.get(node.frame as usize);
            matches.push(above || frame.is_some_and(|f| f.kind != FrameKind::Root && matches_filter(filter, f)));
        }
        let self_counts = profile.self_counts();
        stats.select(
            self_counts
                .iter()
                .zip(&matches)
                .map(|(n, hit)| if *hit { *n } else { 0 })
                .collect(),
        );
    }
    let least = (profile.nodes.first().map_or(0, |root| root.count) / MIN_FRACTION).max(1);
    let mut rows = Vec::new();
    let mut open: Vec<(NodeId, usize)> = Vec::new();
    // What starts a program is on all its stacks.
    let mut shared = 0;
    let descend = |node: NodeId, depth: usize, open: &mut Vec<(NodeId, usize)>| {
        let mut children: Vec<NodeId> = stats.children(node).to_vec();
        children.retain(|c| stats.node(*c).total >= least);
        children.sort_by_key(|c| stats.node(*c).total); // the last one is taken first
        open.extend(children.into_iter().map(|c| (c, depth)));
    };
    if !profile.nodes.is_empty() {
        descend(0, 0, &mut open);
    }
    while let Some((node, depth)) = open.pop() {
        if rows.len() >= MAX_ROWS {
            break;
        }
        let n = &profile.nodes[node as usize];
        let frame = &profile.frames[n.frame as usize];
        let alone = open.is_empty() && rows.len() == usize::from(shared > 0) && stats.node(node).self_count == 0;
        if alone && frame.kind != FrameKind::Python && stats.children(node).len() == 1 {
            shared += 1;
            rows.clear();
            rows.push(heading(&format!("({shared} outermost functions shared by all stacks)")));
            descend(node, 0, &mut open);
            continue;
        }
        let mut line = row(frame, stats.node(node), depth);
        if frame.kind == FrameKind::Python && n.first_seen_line > 0 {
            line.place = format!("{}:{}", frame.filename, n.first_seen_line);
        }
        rows.push(line);
        descend(node, depth + 1, &mut open);
    }
    rows
}

/// Threads that have samples. `gil_holders` are marked.
pub fn threads(profile: &Profile, filter: Option<&Regex>, by: TopOrder, gil_holders: &[Tid]) -> Vec<TopRow> {
    let mut counts: BTreeMap<Tid, u64> = BTreeMap::new();
    for (at, sample) in profile.timeline.iter().enumerate() {
        let count = counts.entry(sample.tid).or_default();
        *count = count.saturating_add(profile.sample_amount(0, at));
    }
    let named = |tid: &Tid| profile.meta.threads.iter().find(|(_, t, _)| t == tid);
    let mut rows: Vec<TopRow> = counts
        .into_iter()
        .map(|(tid, n)| TopRow {
            counts: SelfTotal {
                self_count: n,
                total: n,
            },
            name: format!("{tid} {}", named(&tid).map_or("", |(_, _, name)| name)),
            place: if gil_holders.contains(&tid) {
                "holds the GIL"
            } else {
                ""
            }
            .into(),
            kind: FrameKind::Thread,
            target: RowTarget::Thread(tid),
            ..heading("")
        })
        .filter(|r| filter.is_none_or(|f| f.is_match(&r.name)))
        .collect();
    sort(&mut rows, by);
    rows
}

/// A row for each place where event loops were blocked for long: its counts are the longest time and the time in all, in ns.
pub fn lags(sites: &[LagSite]) -> Vec<TopRow> {
    let row = |site: &LagSite| {
        let tasks = site.tasks_text();
        TopRow {
            counts: SelfTotal {
                self_count: site.longest.length,
                total: site.total,
            },
            name: if tasks.is_empty() { "-".into() } else { tasks },
            place: site.place().into(),
            kind: FrameKind::Task,
            target: RowTarget::Lag(Box::new(site.longest.clone())),
            ..heading("")
        }
    };
    sites.iter().map(row).collect()
}

/// The stack of one of them: the program's function and what it called, then its callers, innermost first.
pub fn lag_stack(lag: &Lag) -> Vec<TopRow> {
    let row = |depth: usize, name: &String| TopRow {
        depth,
        kind: FrameKind::State,
        ..heading(name)
    };
    let first = lag.program_function().unwrap_or(0);
    let inner = lag.stack.iter().skip(first).enumerate();
    let mut rows: Vec<TopRow> = inner.map(|(depth, name)| row(depth, name)).collect();
    if rows.is_empty() {
        rows.push(heading("(no stack: no sample was taken meanwhile)"));
    }
    let callers = lag.callers();
    if !callers.is_empty() {
        rows.push(heading("called by"));
        rows.extend(callers.iter().rev().map(|name| row(1, name)));
    }
    rows.truncate(MAX_ROWS);
    rows
}

/// A row for each place where threads waited: its counts are the time, in ns.
pub fn waits(sites: &[WaitSite]) -> Vec<TopRow> {
    let row = |site: &WaitSite| TopRow {
        counts: SelfTotal {
            self_count: site.total,
            total: site.total,
        },
        name: format!("{} {}", site.kind, site.object).trim_end().to_string(),
        place: site.site.clone(),
        kind: FrameKind::State,
        ..heading("")
    };
    sites.iter().map(row).collect()
}

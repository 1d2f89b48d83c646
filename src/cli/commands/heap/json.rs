//! A census as JSON for programs; `docs/heap.schema.json` describes it.

use serde_json::{Map, Value, json};

use super::{KIND, MAX_LISTED, Report};
use crate::cli::output::JSON_VERSION;
use crate::heap::census::{ObjectSample, Owner, Pools, TypeUse};
use crate::heap::estimate::Estimate;
use crate::heap::glibc::{ArenaUse, Glibc};
use crate::heap::mappings::Part;

/// The report as JSON. `diff` knows it by its first key. Names are text: what is not UTF-8 in them becomes U+FFFD.
pub fn json(report: &Report) -> Value {
    let account = &report.census.account;
    let amount = |part: &Part| account.parts.get(part).copied().unwrap_or(0);
    let parts = Part::ALL
        .iter()
        .map(|part| json!({"name": part.name(), "bytes": amount(part)}));
    let large = report.census.large.iter().take(MAX_LISTED).map(|block| {
        let (relation, owner) = match &block.owner {
            Owner::Itself(name) => ("itself", Some(name)),
            Owner::Object(name) => ("object", Some(name)),
            Owner::Unknown => ("unknown", None),
        };
        json!({
            "address": block.address,
            "bytes": block.bytes,
            "is_mapped": block.is_mapped,
            "owner": relation,
            "type": owner.map(|name| String::from_utf8_lossy(name)),
        })
    });
    let blocks = report.census.blocks.iter().take(MAX_LISTED).map(|block| {
        json!({
            "usable_bytes": block.usable,
            "class": block.class.as_deref(),
            "count": block.count,
            "bytes": block.bytes,
        })
    });
    let files = account.files.iter().take(MAX_LISTED).map(|file| {
        json!({
            "name": String::from_utf8_lossy(&file.name),
            "private_bytes": file.private,
            "shared_bytes": file.shared,
        })
    });
    let anonymous = account.anonymous.iter().take(MAX_LISTED).map(|area| {
        json!({
            "address": area.range.start,
            "mapped_bytes": area.range.end - area.range.start,
            "rss_bytes": area.rss,
            "name": String::from_utf8_lossy(&area.name),
        })
    });
    json!({
        "kind": KIND,
        "version": JSON_VERSION,
        "time_ms": report.time_ms(),
        "pid": report.pid,
        "command": report.command,
        "rss_bytes": account.rss,
        "private_bytes": account.private,
        "swap_bytes": account.swap,
        "hugetlb_bytes": account.hugetlb,
        "python": report.census.interpreter,
        "parts": parts.collect::<Vec<_>>(),
        "pools": report.census.python.as_ref().map(pools),
        "types": report.census.types.iter().map(row).collect::<Vec<_>>(),
        "c_blocks": blocks.collect::<Vec<_>>(),
        "large": large.collect::<Vec<_>>(),
        "sample": report.census.sample.as_ref().map(sample),
        "glibc": report.census.glibc.as_ref().map(glibc),
        "files": files.collect::<Vec<_>>(),
        "anonymous": anonymous.collect::<Vec<_>>(),
        "notes": report.census.notes,
    })
}

fn pools(pools: &Pools) -> Value {
    json!({
        "all": pools.all,
        "read": pools.read,
        "torn": pools.torn,
        "is_full": pools.is_full,
    })
}

fn row(row: &TypeUse) -> Value {
    let estimate = |e: &Estimate| json!([e.value, e.low, e.high]);
    json!({
        "name": String::from_utf8_lossy(&row.name),
        "count": estimate(&row.count),
        "bytes": estimate(&row.bytes),
        "parts": row.parts.iter().map(|(part, bytes)| (part.name().into(), json!(bytes))).collect::<Map<_, _>>(),
        "is_object": row.is_object,
    })
}

fn sample(sample: &ObjectSample) -> Value {
    let object = |(address, value): &(u64, String)| json!({"address": address, "value": value});
    json!({
        "met": sample.met,
        "objects": sample.objects.iter().map(object).collect::<Vec<_>>(),
    })
}

fn glibc(heap: &Glibc) -> Value {
    let sum = |of: fn(&ArenaUse) -> u64| heap.arenas.iter().map(of).sum::<u64>();
    let arenas = heap.arenas.iter().map(|arena| {
        json!({
            "address": arena.address,
            "is_main": arena.is_main,
            "system": arena.system,
            "in_use": arena.in_use,
            "free": arena.free,
            "free_resident": arena.free_resident,
            "returnable": arena.returnable,
            "not_read": arena.lost,
        })
    });
    json!({
        "system": sum(|arena| arena.system) + heap.mapped,
        "in_use": sum(|arena| arena.in_use),
        "free": sum(|arena| arena.free),
        "free_resident": sum(|arena| arena.free_resident),
        "returnable": sum(|arena| arena.returnable),
        "not_read": sum(|arena| arena.lost),
        "mapped": heap.mapped,
        "arenas": arenas.collect::<Vec<_>>(),
    })
}

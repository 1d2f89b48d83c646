//! Metadata of a recording as JSON.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::{FORMAT_VERSION, comma, key_string, lags, memory, write_column};
use crate::escape::write_json;
use crate::machine::Machine;
use crate::model::{Meta, StopSummary};

/// The facts of a recording, without braces.
pub(crate) fn write_meta(meta: &Meta, out: &mut impl Write) -> io::Result<()> {
    write!(out, "\"format\":{FORMAT_VERSION}")?;
    for (key, text) in [
        ("version", &meta.version),
        ("event", &meta.event),
        ("backend", &meta.backend),
        ("python", &meta.python),
    ] {
        out.write_all(b",")?;
        key_string(key, text, out)?;
    }
    out.write_all(b",")?;
    key_string("command", &meta.command, out)?;
    write!(out, ",\"pid\":{},\"rate\":{}", meta.pid, meta.rate)?;
    for (key, seconds) in [
        ("start", meta.start),
        ("duration", meta.duration),
        ("profiler_cpu", meta.profiler_cpu),
    ] {
        write!(out, ",\"{key}\":{:?}", finite(seconds))?;
    }
    for (key, seconds) in [("sampling_cpu", meta.sampling_cpu), ("target_cpu", meta.target_cpu)] {
        if seconds > 0.0 {
            write!(out, ",\"{key}\":{:?}", finite(seconds))?;
        }
    }
    write_machine(&meta.machine, out)?;
    if let Some(StopSummary { median_us, max_us }) = meta.stopped {
        write!(out, ",\"stopped\":{{\"median_us\":{median_us},\"max_us\":{max_us}}}")?;
    }
    let q = &meta.quality;
    out.write_all(b",\"quality\":{")?;
    let counts = [
        ("expected", q.expected),
        ("taken", q.taken),
        ("exact", q.exact),
        ("repaired", q.repaired),
        ("partial", q.partial),
        ("lost", q.lost),
    ];
    for (key, count) in counts {
        write!(out, "\"{key}\":{count},")?;
    }
    out.write_all(b"\"reasons\":{")?;
    for (at, (reason, count)) in q.reasons.iter().enumerate() {
        write!(out, "{}", comma(at))?;
        write_json(reason, out)?;
        write!(out, ":{count}")?;
    }
    out.write_all(b"}},\"modules\":[")?;
    for (at, module) in meta.modules.iter().enumerate() {
        write!(out, "{}{{", comma(at))?;
        for (key, text) in [
            ("path", &module.path),
            ("build_id", &module.build_id),
            ("symbols_from", &module.symbols_from),
            ("symbols_missing", &module.symbols_missing),
        ] {
            key_string(key, text, out)?;
            out.write_all(b",")?;
        }
        let (frames, unnamed, samples) = (module.frames, module.unnamed, module.samples);
        write!(out, "\"frames\":{frames},\"unnamed\":{unnamed},\"samples\":{samples}")?;
        write_instructions(&module.instructions, out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"],\"threads\":[")?;
    for (at, (pid, tid, name)) in meta.threads.iter().enumerate() {
        write!(out, "{}{{\"pid\":{pid},\"tid\":{tid},", comma(at))?;
        key_string("name", name, out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"]")?;
    for (at, part) in meta.merged_from.iter().enumerate() {
        out.write_all(if at == 0 { b",\"merged_from\":[{" } else { b",{" })?;
        key_string("name", &part.name, out)?;
        out.write_all(b",")?;
        key_string("command", &part.command, out)?;
        write!(out, ",\"rate\":{},\"start\":{:?}", part.rate, finite(part.start))?;
        write!(
            out,
            ",\"duration\":{:?},\"samples\":{}}}",
            finite(part.duration),
            part.samples
        )?;
    }
    out.write_all(if meta.merged_from.is_empty() { b"" } else { b"]" })?;
    lags::write(&meta.lags, out)?;
    memory::write(&meta.memory, out)?;
    memory::write_over_time(&meta.memory_over_time, out)
}

/// What is known of the machine; nothing if nothing is.
fn write_machine(machine: &Machine, out: &mut impl Write) -> io::Result<()> {
    if *machine == Machine::default() {
        return Ok(());
    }
    let mut machine = machine.clone();
    write!(out, ",\"machine\":{{\"cores\":{}", machine.cores)?;
    for (key, text) in machine.texts() {
        if !text.is_empty() {
            out.write_all(b",")?;
            key_string(key, text, out)?;
        }
    }
    out.write_all(b"}")
}

/// Addresses as distances, which are short.
fn write_instructions(instructions: &BTreeMap<u64, u64>, out: &mut impl Write) -> io::Result<()> {
    if instructions.is_empty() {
        return Ok(());
    }
    out.write_all(b",\"instructions\":{\"address\":[")?;
    let mut before = 0;
    let distances = instructions.keys().map(|address| {
        let distance = address - before;
        before = *address;
        distance
    });
    write_column(distances, out)?;
    out.write_all(b"],\"samples\":[")?;
    write_column(instructions.values().copied(), out)?;
    out.write_all(b"]}")
}

/// JSON cannot represent infinity and NaN.
fn finite(n: f64) -> f64 {
    if n.is_finite() { n } else { 0.0 }
}

//! What the writer and the reader of OTLP profiles share: the messages, and the names of attributes.
//!
//! Keys without `nativeprof.` are of OpenTelemetry's semantic conventions 1.43. The others are ours, for what the
//! format does not have.

pub mod messages;
pub mod parts;

use crate::model::{FrameKind, Meta};
use messages::{Any, AnyValue};

/// The name of the scope of profiles that nativeprof made.
pub const SCOPE: &str = "nativeprof";

/// What a location is: the names in [`FRAME_TYPES`].
pub const FRAME_TYPE: &str = "profile.frame.type";
/// Hexadecimal, of a mapping.
pub const BUILD_ID: &str = "process.executable.build_id.gnu";
/// A number, of a sample or a resource.
pub const PID: &str = "process.pid";
/// A number, of a sample.
pub const TID: &str = "thread.id";
/// Of a sample.
pub const THREAD_NAME: &str = "thread.name";
/// The file name of the executable, of a resource, or of a sample in a segment.
pub const EXECUTABLE: &str = "process.executable.name";
/// Of a resource.
pub const RUNTIME_NAME: &str = "process.runtime.name";
/// Of a resource.
pub const RUNTIME_VERSION: &str = "process.runtime.version";
/// The value of [`RUNTIME_NAME`] whose version is that of Python.
pub const CPYTHON: &str = "cpython";

/// The process that the sample is below in the tree, of a sample.
pub const PROCESS_FRAME: &str = "nativeprof.process";
/// The thread that the sample is below in the tree, of a sample.
pub const THREAD_FRAME: &str = "nativeprof.thread";
/// What precedes the key of a label that could be mistaken for another attribute.
pub const LABEL_PREFIX: &str = "nativeprof.label.";
/// Reasons of partial stacks and their numbers of samples, of a profile.
pub const REASONS: &str = "nativeprof.quality.reasons";
/// The processes of a resource, of a profile in a segment: an array of lists with [`PROCESS_PID`], [`PROCESS_NAME`], and the
/// numbers and reasons of their samples' quality under the keys of profiles.
pub const PROCESSES: &str = "nativeprof.processes";
/// A number, in [`PROCESSES`].
pub const PROCESS_PID: &str = "pid";
/// In [`PROCESSES`].
pub const PROCESS_NAME: &str = "name";
/// The version of what segments have, a number in [`SEGMENT`].
pub const SEGMENT_VERSION: &str = "nativeprof.segment.version";
/// The first version that is not read; the one before it is written.
pub const NEXT_SEGMENT_VERSION: u64 = 2;
/// Of a resource.
pub const SERVICE_NAME: &str = "service.name";
/// In hexadecimal, of a resource.
pub const CONTAINER_ID: &str = "container.id";
/// Names of the container, of a resource.
pub const CONTAINER_NAMES: &[&str] = &["container.name", "k8s.container.name"];
/// What is known of the whole segment, of a profile: a list of the numbers and reasons that the recording has, and of
/// [`COUNTS`].
pub const SEGMENT: &str = "nativeprof.segment";
/// Further numbers by name, in [`SEGMENT`].
pub const COUNTS: &str = "nativeprof.counts";
/// Where symbols came from, of a mapping.
pub const SYMBOLS_FROM: &str = "nativeprof.symbols_from";
/// Symbol files that were not found, of a mapping.
pub const SYMBOLS_MISSING: &str = "nativeprof.symbols_missing";
/// Frames in the file, of a mapping.
pub const FRAMES: &str = "nativeprof.frames";
/// Those of them without a symbol.
pub const UNNAMED: &str = "nativeprof.unnamed";
/// Samples with a frame in the file, of a mapping.
pub const SAMPLES: &str = "nativeprof.samples";

/// Labels of a sample that together are its link.
pub const TRACE_ID: &str = "trace_id";
/// See [`TRACE_ID`].
pub const SPAN_ID: &str = "span_id";
/// Bytes of a trace's identifier.
pub const TRACE_ID_LENGTH: usize = 16;
/// Bytes of a span's identifier.
pub const SPAN_ID_LENGTH: usize = 8;

/// Values of [`FRAME_TYPE`]. The first of a kind is the one that is written; those after `kernel` are ours.
pub const FRAME_TYPES: &[(&str, FrameKind)] = &[
    ("cpython", FrameKind::Python),
    ("native", FrameKind::Native),
    ("kernel", FrameKind::Kernel),
    ("truncated", FrameKind::Truncated),
    ("task", FrameKind::Task),
    ("worker", FrameKind::Worker),
    ("state", FrameKind::State),
];

/// A text of the metadata, as an attribute of profiles.
pub struct TextFact {
    pub key: &'static str,
    pub get: fn(&Meta) -> &str,
    pub set: fn(&mut Meta, String),
}

/// Texts that are attributes; empty ones are not.
pub const TEXTS: &[TextFact] = &[
    TextFact {
        key: "nativeprof.event",
        get: |meta| &meta.event,
        set: |meta, text| meta.event = text,
    },
    TextFact {
        key: "nativeprof.backend",
        get: |meta| &meta.backend,
        set: |meta, text| meta.backend = text,
    },
    TextFact {
        key: "nativeprof.command",
        get: |meta| &meta.command,
        set: |meta, text| meta.command = text,
    },
    TextFact {
        key: "nativeprof.machine.cpu",
        get: |meta| &meta.machine.cpu,
        set: |meta, text| meta.machine.cpu = text,
    },
    TextFact {
        key: "nativeprof.machine.kernel",
        get: |meta| &meta.machine.kernel,
        set: |meta, text| meta.machine.kernel = text,
    },
    TextFact {
        key: "nativeprof.machine.governor",
        get: |meta| &meta.machine.governor,
        set: |meta, text| meta.machine.governor = text,
    },
];

/// A number of the metadata, as an attribute of profiles.
pub struct NumberFact {
    pub key: &'static str,
    /// In UCUM.
    pub unit: &'static str,
    pub get: fn(&Meta) -> u64,
    pub set: fn(&mut Meta, u64),
}

impl NumberFact {
    const fn of_samples(key: &'static str, get: fn(&Meta) -> u64, set: fn(&mut Meta, u64)) -> NumberFact {
        let unit = "{sample}";
        NumberFact { key, unit, get, set }
    }

    const fn of_time(key: &'static str, get: fn(&Meta) -> u64, set: fn(&mut Meta, u64)) -> NumberFact {
        let unit = "ns";
        NumberFact { key, unit, get, set }
    }
}

/// Numbers that are attributes; those of 0 are not.
pub const NUMBERS: &[NumberFact] = &[
    NumberFact {
        key: "nativeprof.rate",
        unit: "Hz",
        get: |meta| meta.rate,
        set: |meta, n| meta.rate = n,
    },
    NumberFact::of_samples(
        "nativeprof.quality.expected",
        |meta| meta.quality.expected,
        |meta, n| meta.quality.expected = n,
    ),
    NumberFact::of_samples(
        "nativeprof.quality.taken",
        |meta| meta.quality.taken,
        |meta, n| meta.quality.taken = n,
    ),
    NumberFact::of_samples(
        "nativeprof.quality.exact",
        |meta| meta.quality.exact,
        |meta, n| meta.quality.exact = n,
    ),
    NumberFact::of_samples(
        "nativeprof.quality.repaired",
        |meta| meta.quality.repaired,
        |meta, n| meta.quality.repaired = n,
    ),
    NumberFact::of_samples(
        "nativeprof.quality.partial",
        |meta| meta.quality.partial,
        |meta, n| meta.quality.partial = n,
    ),
    NumberFact::of_samples(
        "nativeprof.quality.lost",
        |meta| meta.quality.lost,
        |meta, n| meta.quality.lost = n,
    ),
    NumberFact::of_time(
        "nativeprof.duration",
        |meta| nanoseconds(meta.duration),
        |meta, n| meta.duration = seconds(n),
    ),
    NumberFact::of_time(
        "nativeprof.profiler_cpu",
        |meta| nanoseconds(meta.profiler_cpu),
        |meta, n| meta.profiler_cpu = seconds(n),
    ),
    NumberFact::of_time(
        "nativeprof.sampling_cpu",
        |meta| nanoseconds(meta.sampling_cpu),
        |meta, n| meta.sampling_cpu = seconds(n),
    ),
    NumberFact::of_time(
        "nativeprof.target_cpu",
        |meta| nanoseconds(meta.target_cpu),
        |meta, n| meta.target_cpu = seconds(n),
    ),
    NumberFact {
        key: "nativeprof.stopped.median",
        unit: "us",
        get: |meta| meta.stopped.map_or(0, |stopped| stopped.median_us),
        set: |meta, n| meta.stopped.get_or_insert_default().median_us = n,
    },
    NumberFact {
        key: "nativeprof.stopped.max",
        unit: "us",
        get: |meta| meta.stopped.map_or(0, |stopped| stopped.max_us),
        set: |meta, n| meta.stopped.get_or_insert_default().max_us = n,
    },
    NumberFact {
        key: "nativeprof.machine.cores",
        unit: "{cpu}",
        get: |meta| u64::from(meta.machine.cores),
        set: |meta, n| meta.machine.cores = u32::try_from(n).unwrap_or(0),
    },
];

const SECOND: u64 = 1_000_000_000;

/// Seconds as ns. Times before the epoch, and what is no number, are 0.
pub fn nanoseconds(seconds: f64) -> u64 {
    // The parts alone, since times since the epoch have more digits than a number of this type. Conversion saturates.
    let fraction = (seconds.fract() * 1e9).round() as u64;
    (seconds.trunc() as u64).saturating_mul(SECOND).saturating_add(fraction)
}

/// ns as seconds.
pub fn seconds(nanoseconds: u64) -> f64 {
    (nanoseconds / SECOND) as f64 + (nanoseconds % SECOND) as f64 / 1e9
}

impl From<&str> for AnyValue {
    fn from(text: &str) -> AnyValue {
        AnyValue {
            value: Some(Any::Text(text.into())),
        }
    }
}

impl From<u64> for AnyValue {
    /// The value of a number; what exceeds the format's range is its largest one.
    fn from(number: u64) -> AnyValue {
        AnyValue {
            value: Some(Any::Int(i64::try_from(number).unwrap_or(i64::MAX))),
        }
    }
}

/// Whether a label's key could be mistaken for an attribute of another meaning: those of processes, threads and services, and
/// ours.
pub fn is_reserved(key: &str) -> bool {
    let namespaces = ["nativeprof.", "process.", "service.", "thread."];
    key.is_empty() || namespaces.iter().any(|namespace| key.starts_with(namespace))
}

/// Whether segments are selected by this attribute of a resource.
pub fn is_selected_by(key: &str) -> bool {
    [SERVICE_NAME, CONTAINER_ID].contains(&key) || CONTAINER_NAMES.contains(&key)
}

/// The bytes of an identifier, lower-case hexadecimal of so many bytes that are not all zero.
pub fn identifier_of_hex(hex: &str, length: usize) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = hex.as_bytes().as_chunks();
    let bytes: Option<Vec<u8>> = pairs
        .iter()
        .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?))
        .collect();
    bytes.filter(|bytes| rest.is_empty() && bytes.len() == length && bytes.iter().any(|byte| *byte != 0))
}

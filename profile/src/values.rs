//! What a profile measures: its value types, and how much of each belongs to a node and to a sample.
//!
//! The first value type of a profile is what [`Node::count`](super::model::Node::count) counts, samples or calls. Of
//! the others a node has an inclusive amount: its own and that of all nodes below it. An amount that is the count times
//! a constant (CPU time at a fixed sampling period) is not stored for each node.
//!
//! [`super::build::Builder`] makes a profile of stacks and amounts without a sampling session.

use std::borrow::Cow;

use super::model::Profile;

/// The unit of a value type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// A number of things.
    Count,
    /// A time.
    Nanoseconds,
    /// An amount of memory.
    Bytes,
}

/// Names of units, as pprof has them.
const UNITS: &[(Unit, &str)] = &[
    (Unit::Count, "count"),
    (Unit::Nanoseconds, "nanoseconds"),
    (Unit::Bytes, "bytes"),
];

impl Unit {
    /// `count`, `nanoseconds` or `bytes`.
    pub fn name(self) -> &'static str {
        UNITS
            .iter()
            .find(|(unit, _)| *unit == self)
            .map_or("count", |(_, name)| name)
    }

    /// The unit of a name that [`Unit::name`] gives.
    pub fn by_name(name: &str) -> Option<Unit> {
        UNITS.iter().find(|(_, known)| *known == name).map(|(unit, _)| *unit)
    }

    /// An amount as text: `1234`, `1.234 s`, `5.67 MiB`; three to four digits, except for counts.
    pub fn show(self, amount: u64) -> String {
        let scaled = |steps: &[(&str, f64)]| {
            let fitting = steps.iter().rev().find(|(_, size)| amount as f64 >= *size);
            let (unit, size) = fitting.or(steps.first()).copied().unwrap_or(("", 1.0));
            match amount as f64 / size {
                bytes if size == 1.0 => format!("{bytes:.0} {unit}"),
                part if part >= 100.0 => format!("{part:.1} {unit}"),
                part => format!("{part:.2} {unit}"),
            }
        };
        match self {
            Unit::Count => amount.to_string(),
            Unit::Nanoseconds => scaled(&[("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)]),
            Unit::Bytes => scaled(&[
                ("B", 1.0),
                ("KiB", 1024.0),
                ("MiB", 1_048_576.0),
                ("GiB", 1_073_741_824.0),
            ]),
        }
    }
}

/// Something that is measured.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ValueType {
    /// `samples`, `calls`, `cpu`, `alloc_bytes`, the name of an event, ...
    pub name: Cow<'static, str>,
    /// The unit of the amounts.
    pub unit: Unit,
}

/// Value types of allocations, and their names in profiles of Go programs.
static PPROF_NAMES: [(ValueType, &str); 4] = [
    (ValueType::ALLOCS, "alloc_objects"),
    (ValueType::ALLOC_BYTES, "alloc_space"),
    (ValueType::LIVE_ALLOCS, "inuse_objects"),
    (ValueType::LIVE_BYTES, "inuse_space"),
];

impl ValueType {
    /// Samples.
    pub const SAMPLES: ValueType = ValueType::fixed("samples", Unit::Count);
    /// Calls of functions.
    pub const CALLS: ValueType = ValueType::fixed("calls", Unit::Count);
    /// CPU time, ns.
    pub const CPU: ValueType = ValueType::fixed("cpu", Unit::Nanoseconds);
    /// Wall-clock time, ns.
    pub const WALL: ValueType = ValueType::fixed("wall", Unit::Nanoseconds);
    /// Time of threads that did not run, ns.
    pub const OFF_CPU: ValueType = ValueType::fixed("off_cpu", Unit::Nanoseconds);
    /// Time of tasks that were suspended, ns.
    pub const AWAIT: ValueType = ValueType::fixed("await", Unit::Nanoseconds);
    /// Allocations of memory.
    pub const ALLOCS: ValueType = ValueType::fixed("allocs", Unit::Count);
    /// Memory allocated, bytes.
    pub const ALLOC_BYTES: ValueType = ValueType::fixed("alloc_bytes", Unit::Bytes);
    /// Memory allocated and not freed, bytes.
    pub const LIVE_BYTES: ValueType = ValueType::fixed("live_bytes", Unit::Bytes);
    /// Allocations of memory that was not freed.
    pub const LIVE_ALLOCS: ValueType = ValueType::fixed("live_allocs", Unit::Count);
    /// Memory that was allocated when most was, bytes.
    pub const PEAK_BYTES: ValueType = ValueType::fixed("peak_bytes", Unit::Bytes);
    /// Memory that was allocated again and again by the same code and not freed, bytes.
    pub const LEAKED_BYTES: ValueType = ValueType::fixed("leaked_bytes", Unit::Bytes);
    /// Anonymous memory that was mapped and is still mapped, bytes, whether it is resident or not.
    pub const MAPPED_BYTES: ValueType = ValueType::fixed("mapped_bytes", Unit::Bytes);
    /// Resident memory of the process, bytes; by stack, what grew there and is still resident.
    pub const RSS_BYTES: ValueType = ValueType::fixed("rss_bytes", Unit::Bytes);
    /// Resident memory of the process when most was, bytes; by stack, what grew there and was resident then.
    pub const RSS_PEAK_BYTES: ValueType = ValueType::fixed("rss_peak_bytes", Unit::Bytes);
    /// Growth of resident memory, bytes, whether it is still resident or not.
    pub const RSS_GROWN_BYTES: ValueType = ValueType::fixed("rss_grown_bytes", Unit::Bytes);
    /// Resident memory that was given back, bytes.
    pub const RSS_RETURNED_BYTES: ValueType = ValueType::fixed("rss_returned_bytes", Unit::Bytes);

    const fn fixed(name: &'static str, unit: Unit) -> ValueType {
        ValueType {
            name: Cow::Borrowed(name),
            unit,
        }
    }

    /// A value type of any name, an event for example.
    pub fn new(name: impl Into<String>, unit: Unit) -> ValueType {
        ValueType {
            name: Cow::Owned(name.into()),
            unit,
        }
    }

    /// The name that programs which read profiles of memory in the format of pprof know it by.
    pub(crate) fn pprof_name(&self) -> &str {
        let known = PPROF_NAMES.iter().find(|(kind, _)| kind == self);
        known.map_or(&self.name, |(_, name)| name)
    }

    /// The name with its unit, as the keys of a node's `values` in JSON have it: `cpu_ns`, `alloc_bytes`, `calls`.
    pub fn key(&self) -> String {
        let suffix = match self.unit {
            Unit::Count => "",
            Unit::Nanoseconds => "_ns",
            Unit::Bytes => "_bytes",
        };
        if self.name.ends_with(suffix) {
            self.name.to_string()
        } else {
            format!("{}{suffix}", self.name)
        }
    }
}

/// How much of a value belongs to each node and sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Amounts {
    /// The count times this.
    PerCount(u64),
    /// What the columns have; missing rows are 0.
    Each {
        /// Inclusive amount of each node, by its index. Empty for the first value type: there the counts are the
        /// amounts.
        nodes: Vec<u64>,
        /// Amount of each sample in [`Profile::timeline`], by its index.
        samples: Vec<u64>,
    },
}

/// A value type of a profile, with its amounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// What is measured.
    pub kind: ValueType,
    /// The amounts of nodes and samples.
    pub amounts: Amounts,
}

impl Value {
    /// A value that is so much for each count.
    pub const fn per_count(kind: ValueType, amount: u64) -> Value {
        Value {
            kind,
            amounts: Amounts::PerCount(amount),
        }
    }

    /// Whether every amount follows from the count.
    pub fn is_per_count(&self) -> bool {
        matches!(self.amounts, Amounts::PerCount(_))
    }
}

/// Value types of a profile that declares none.
static SAMPLES_ALONE: &[Value] = &[Value::per_count(ValueType::SAMPLES, 1)];

impl Profile {
    /// Index in [`Profile::value_types`] of the time in which threads waited, with that in which they ran if it was sampled.
    /// `None`: time off the CPU was not sampled.
    pub fn waiting_time(&self) -> Option<usize> {
        self.find_value(&ValueType::WALL.name)
            .or_else(|| self.find_value(&ValueType::OFF_CPU.name))
    }

    /// The value types, that of the count first; never empty.
    pub fn value_types(&self) -> &[Value] {
        if self.values.is_empty() {
            SAMPLES_ALONE
        } else {
            &self.values
        }
    }

    /// Index in [`Profile::value_types`] of what views of the profile show unless another value is chosen: wall-clock
    /// time, or another time of what is no sample, such as calls; bytes, of which each sample stands for a different
    /// number: memory that grew and is still resident first, or was when most was ([`Profile::show_peak`]); the events
    /// that samples stand for; else the count. Samples of CPU time remain samples: these stand for the same time each,
    /// and say how much they prove.
    pub fn default_value(&self) -> usize {
        let types = self.value_types();
        let is_shown = |at: &usize| types[*at].is_per_count() || self.total_amount(*at) > 0;
        let wall = self.find_value(&ValueType::WALL.name).filter(is_shown);
        if self.find_value(&ValueType::RSS_GROWN_BYTES.name).is_some() {
            let memory = [
                ValueType::RSS_BYTES,
                ValueType::RSS_PEAK_BYTES,
                ValueType::RSS_GROWN_BYTES,
                ValueType::RSS_RETURNED_BYTES,
            ];
            // In the order of the profile, whose first one is that which it is about.
            let is_of_memory = |at: &usize| memory.contains(&types[*at].kind);
            return (0..types.len()).filter(is_of_memory).find(is_shown).unwrap_or(0);
        }
        // Samples of events stand for different numbers of them.
        if let Some(events) = self.find_value(self.meta.event_alone()).filter(|at| *at > 0) {
            return events;
        }
        let is_time = |at: &usize| types[*at].kind.unit == Unit::Nanoseconds;
        let mut times = (0..types.len()).filter(|at| is_time(at) && is_shown(at));
        let is_bytes = |at: &usize| types[*at].kind.unit == Unit::Bytes;
        let mut bytes = (0..types.len()).filter(|at| is_bytes(at) && is_shown(at));
        match wall {
            None if *self.count_type() != ValueType::SAMPLES => times.next().unwrap_or(0),
            wall => wall.or_else(|| bytes.next()).unwrap_or(0),
        }
    }

    /// Lets views show by default what was resident when most was, instead of what is in the end. No effect on a profile that has
    /// only one of the two.
    pub fn show_peak(&mut self) {
        let (end, peak) = (
            self.find_value(&ValueType::RSS_BYTES.name),
            self.find_value(&ValueType::RSS_PEAK_BYTES.name),
        );
        if let (Some(end), Some(peak)) = (end, peak)
            && end < peak
        {
            self.values[end..=peak].rotate_right(1);
        }
    }

    /// Index in [`Profile::value_types`] of the time that formats open with whose viewers are made for times: the default value,
    /// else the time that the counts stand for. `None`: the profile has no time.
    pub fn default_time(&self) -> Option<usize> {
        let is_time = |value: &Value| value.kind.unit == Unit::Nanoseconds;
        let (types, default) = (self.value_types(), self.default_value());
        if is_time(&types[default]) {
            return Some(default);
        }
        types.iter().position(is_time)
    }

    /// The value type of the count.
    pub fn count_type(&self) -> &ValueType {
        &self.value_types()[0].kind
    }

    /// Index in [`Profile::value_types`] of a name, with its unit (`cpu_ns`) or without (`cpu`), or as a mode (`off-cpu`).
    pub fn find_value(&self, name: &str) -> Option<usize> {
        let types = self.value_types();
        let named = |is: &dyn Fn(&ValueType) -> bool| types.iter().position(|value| is(&value.kind));
        let by_mode = name.replace('-', "_"); // as `--mode` spells it
        named(&|kind| kind.name == name)
            .or_else(|| named(&|kind| kind.key() == name))
            .or_else(|| named(&|kind| kind.name == by_mode))
    }

    /// Inclusive amount of a value (an index in [`Profile::value_types`]) by node; 0 for a value that does not exist.
    pub fn amounts(&self, value: usize) -> Vec<u64> {
        let of = self.value_types().get(value).map(|value| &value.amounts);
        let nodes = self.nodes.iter();
        match of {
            None => vec![0; self.nodes.len()],
            Some(Amounts::PerCount(per)) => nodes.map(|node| node.count.saturating_mul(*per)).collect(),
            Some(Amounts::Each { .. }) if value == 0 => nodes.map(|node| node.count).collect(),
            Some(Amounts::Each { nodes: column, .. }) => (0..nodes.len())
                .map(|at| column.get(at).copied().unwrap_or(0))
                .collect(),
        }
    }

    /// Amount of a value (an index in [`Profile::value_types`]) in the whole profile.
    pub fn total_amount(&self, value: usize) -> u64 {
        let Some(root) = self.nodes.first() else { return 0 };
        match self.value_types().get(value).map(|value| &value.amounts) {
            None => 0,
            Some(Amounts::PerCount(per)) => root.count.saturating_mul(*per),
            Some(Amounts::Each { .. }) if value == 0 => root.count,
            Some(Amounts::Each { nodes, .. }) => nodes.first().copied().unwrap_or(0),
        }
    }

    /// Self amount of a value by node. Nodes without a valid parent are roots.
    pub fn self_amounts(&self, value: usize) -> Vec<u64> {
        self.self_of(self.amounts(value))
    }

    /// What of inclusive amounts by node is not that of nodes below.
    pub(super) fn self_of(&self, mut amounts: Vec<u64>) -> Vec<u64> {
        let inclusive = amounts.clone();
        for (at, node) in self.nodes.iter().enumerate().skip(1) {
            if (node.parent as usize) < at {
                let parent = &mut amounts[node.parent as usize];
                *parent = parent.saturating_sub(inclusive[at]);
            }
        }
        amounts
    }

    /// Amount of a value that belongs to a sample of the timeline, by its index there.
    pub fn sample_amount(&self, value: usize, sample: usize) -> u64 {
        match self.value_types().get(value).map(|value| &value.amounts) {
            None => 0,
            Some(Amounts::PerCount(per)) => self.sample_count(value, sample).saturating_mul(*per),
            Some(Amounts::Each { samples, .. }) => samples.get(sample).copied().unwrap_or(0),
        }
    }

    /// What a sample adds to the counts: 1, unless the count is another value.
    fn sample_count(&self, value: usize, sample: usize) -> u64 {
        match self.value_types()[0].amounts {
            Amounts::Each { .. } if value > 0 => self.sample_amount(0, sample),
            _ => 1,
        }
    }

    /// Whether the timeline holds every sample of the profile.
    pub fn is_timed(&self) -> bool {
        let counted =
            (0..self.timeline.len()).fold(0u64, |sum, sample| sum.saturating_add(self.sample_amount(0, sample)));
        self.nodes.first().map_or(0, |root| root.count) == counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Node;

    #[test]
    fn keys_have_their_unit_once() {
        for (kind, key) in [
            (ValueType::SAMPLES, "samples"),
            (ValueType::OFF_CPU, "off_cpu_ns"),
            (ValueType::ALLOC_BYTES, "alloc_bytes"),
            (ValueType::ALLOCS, "allocs"),
            (ValueType::new("rss", Unit::Bytes), "rss_bytes"),
            (ValueType::new("cache-misses", Unit::Count), "cache-misses"),
        ] {
            assert_eq!(kind.key(), key);
        }
    }

    #[test]
    fn values_are_found_by_name_key_and_mode() {
        let kinds = [
            ValueType::SAMPLES,
            ValueType::OFF_CPU,
            ValueType::new("cache-misses", Unit::Count),
        ];
        let profile = Profile {
            values: kinds.map(|kind| Value::per_count(kind, 1)).to_vec(),
            ..Profile::default()
        };
        for (name, found) in [
            ("off_cpu", Some(1)),
            ("off_cpu_ns", Some(1)),
            ("off-cpu", Some(1)),
            ("cache-misses", Some(2)),
            ("cache_misses", None),
            ("cpu", None),
        ] {
            assert_eq!(profile.find_value(name), found, "{name}");
        }
    }

    #[test]
    fn times_are_shown_by_default() {
        let per_count = |kind| Value::per_count(kind, 10);
        let each = |kind, amount| Value {
            kind,
            amounts: Amounts::Each {
                nodes: vec![amount],
                samples: Vec::new(),
            },
        };
        let (samples, calls) = (per_count(ValueType::SAMPLES), per_count(ValueType::CALLS));
        for (what, values, shown) in [
            (
                "CPU samples",
                vec![samples.clone(), per_count(ValueType::CPU)],
                "samples",
            ),
            (
                "wall samples",
                vec![samples.clone(), per_count(ValueType::WALL)],
                "wall",
            ),
            (
                "times on and off the CPU",
                vec![
                    each(ValueType::SAMPLES, 0),
                    each(ValueType::WALL, 9),
                    each(ValueType::CPU, 4),
                ],
                "wall",
            ),
            (
                "traced calls",
                vec![calls.clone(), each(ValueType::WALL, 9), each(ValueType::AWAIT, 3)],
                "wall",
            ),
            (
                "calls with CPU time",
                vec![calls.clone(), each(ValueType::CPU, 9)],
                "cpu",
            ),
            (
                "a time of another name",
                vec![calls.clone(), each(ValueType::new("gpu", Unit::Nanoseconds), 9)],
                "gpu",
            ),
            ("counted calls", vec![calls.clone(), each(ValueType::WALL, 0)], "calls"),
            (
                "calls, and CPU samples",
                vec![samples, each(ValueType::CPU, 9), each(ValueType::CALLS, 9)],
                "samples",
            ),
            (
                "memory",
                vec![per_count(ValueType::ALLOCS), each(ValueType::ALLOC_BYTES, 9)],
                "allocs",
            ),
            (
                "growth of memory",
                vec![
                    per_count(ValueType::SAMPLES),
                    each(ValueType::RSS_BYTES, 4),
                    each(ValueType::RSS_GROWN_BYTES, 9),
                ],
                "rss_bytes",
            ),
            (
                "growth of memory, shown at the peak",
                vec![
                    per_count(ValueType::SAMPLES),
                    each(ValueType::RSS_PEAK_BYTES, 6),
                    each(ValueType::RSS_BYTES, 4),
                    each(ValueType::RSS_GROWN_BYTES, 9),
                ],
                "rss_peak_bytes",
            ),
            (
                "growth of memory that was all given back",
                vec![
                    per_count(ValueType::SAMPLES),
                    each(ValueType::RSS_BYTES, 0),
                    each(ValueType::RSS_GROWN_BYTES, 9),
                ],
                "rss_grown_bytes",
            ),
            (
                "samples of memory",
                vec![per_count(ValueType::SAMPLES), each(ValueType::ALLOC_BYTES, 9)],
                "alloc_bytes",
            ),
            ("nothing declared", Vec::new(), "samples"),
        ] {
            let profile = Profile {
                nodes: vec![Node {
                    count: 1,
                    ..Node::new(0, 0)
                }],
                values,
                ..Profile::default()
            };
            let kind = &profile.value_types()[profile.default_value()].kind;
            assert_eq!(kind.name, shown, "{what}");
        }
        assert_eq!(Profile::default().default_value(), 0);
    }

    #[test]
    fn amounts_are_shown_with_their_unit() {
        for (unit, amount, shown) in [
            (Unit::Count, 1_234_567, "1234567"),
            (Unit::Nanoseconds, 0, "0 ns"),
            (Unit::Nanoseconds, 999, "999 ns"),
            (Unit::Nanoseconds, 12_340, "12.34 us"),
            (Unit::Nanoseconds, 123_400_000, "123.4 ms"),
            (Unit::Nanoseconds, 61_000_000_000, "61.00 s"),
            (Unit::Bytes, 2048, "2.00 KiB"),
            (Unit::Bytes, u64::MAX, "17179869184.0 GiB"),
        ] {
            assert_eq!(unit.show(amount), shown);
        }
    }
}

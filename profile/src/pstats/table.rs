//! The table of a file: functions, and who called them.

use std::borrow::Cow;
use std::collections::HashMap;

use super::marshal::{MarshalValue, MarshalValues, ValueId};
use super::{PstatsError, SAMPLES_MARK};
use crate::values::ValueType;

/// Key that Python 3.15's sampling profiler adds to its files.
const SAMPLED_KEY: &str = "__sampled__";

/// What a file states.
pub struct PstatsTable<'a> {
    pub functions: Vec<PstatsFunction<'a>>,
    /// Calls are samples: a function has those that ended in it, not those that it was part of.
    pub is_sampled: bool,
    /// The clock of the times; `None` if they are no times.
    pub clock: Option<ValueType>,
}

/// A function. Times are in ns.
#[derive(Default)]
pub struct PstatsFunction<'a> {
    pub file: Cow<'a, str>,
    pub line: u32,
    pub name: Cow<'a, str>,
    pub primitive: u64,
    pub calls: u64,
    pub self_time: u64,
    pub total: u64,
    pub callers: Vec<Caller>,
}

/// What a function did for one of its callers.
#[derive(Clone, Copy)]
pub struct Caller {
    /// Index in [`PstatsTable::functions`].
    pub function: u32,
    pub primitive: u64,
    pub calls: u64,
    /// Own and cumulative time, where the file has it.
    pub times: Option<(u64, u64)>,
}

/// Reads the table.
///
/// # Errors
/// As [`super::read`].
pub fn read(bytes: &[u8]) -> Result<PstatsTable<'_>, PstatsError> {
    let mut values = MarshalValues::new(bytes);
    let root = values.read()?;
    let mark = (values.position() < bytes.len()).then(|| values.read().ok()).flatten();
    let mark = mark.and_then(|id| values.text(values.get(id)));
    let mut reader = TableReader {
        values: &values,
        functions: Vec::new(),
        known: HashMap::new(),
        by_id: HashMap::new(),
        edges: HashMap::new(),
        at: 0,
    };
    let is_marked = reader.table(root)?;
    let mut table = PstatsTable {
        functions: reader.functions,
        is_sampled: is_marked,
        clock: Some(ValueType::WALL),
    };
    if let Some(clock) = mark.as_deref().and_then(|mark| mark.strip_prefix(SAMPLES_MARK)) {
        table.is_sampled = true;
        table.clock = match clock.trim() {
            "cpu" => Some(ValueType::CPU),
            "wall" => Some(ValueType::WALL),
            _ => None,
        };
    }
    Ok(table)
}

struct TableReader<'v, 'a> {
    values: &'v MarshalValues<'a>,
    functions: Vec<PstatsFunction<'a>>,
    // Names are not trusted: hashers that resist collision attacks.
    known: HashMap<(Cow<'a, str>, u32, Cow<'a, str>), u32>,
    /// Keys that have been read; most of them are referred to many times.
    by_id: HashMap<ValueId, u32>,
    /// (callee, caller) to the index in the callee's list.
    edges: HashMap<(u32, u32), u32>,
    /// Functions read, for messages.
    at: usize,
}

impl<'a> TableReader<'_, 'a> {
    /// Reads all functions; returns whether the file is marked as that of a sampling profiler.
    fn table(&mut self, root: ValueId) -> Result<bool, PstatsError> {
        let values = self.values;
        let root = values.get(root);
        if !matches!(root, MarshalValue::Dictionary { .. }) {
            return Err(self.error("no dictionary"));
        }
        let mut is_sampled = false;
        for pair in values.items(root).chunks_exact(2) {
            let &[key, row] = pair else { continue };
            if self.is_mark(key) {
                is_sampled = true;
                continue;
            }
            self.at += 1;
            let function = self.function(key)?;
            self.row(function, row)?;
        }
        Ok(is_sampled)
    }

    fn is_mark(&self, key: ValueId) -> bool {
        match self.values.items(self.values.get(key)) {
            [only] => self.values.text(self.values.get(*only)).as_deref() == Some(SAMPLED_KEY),
            _ => false,
        }
    }

    fn error(&self, what: &str) -> PstatsError {
        PstatsError {
            at: self.values.position(),
            reason: match self.at {
                0 => what.to_string(),
                at => format!("{what} (function {at} of the table)"),
            },
        }
    }

    /// The function of a key, a new one if it is not known.
    fn function(&mut self, id: ValueId) -> Result<u32, PstatsError> {
        if let Some(known) = self.by_id.get(&id) {
            return Ok(*known);
        }
        let values = self.values;
        let parts = match values.items(values.get(id)) {
            &[file, line, name] => (
                values.text(values.get(file)),
                values.get(line),
                values.text(values.get(name)),
            ),
            _ => (None, MarshalValue::Constant, None),
        };
        let (Some(file), MarshalValue::Integer { is_negative, magnitude }, Some(name)) = parts else {
            return Err(self.error("a key that is not a file, a line and a name"));
        };
        let line = if is_negative {
            0
        } else {
            u32::try_from(magnitude).unwrap_or(0)
        };
        let next = self.functions.len() as u32;
        let function = *self.known.entry((file.clone(), line, name.clone())).or_insert(next);
        if function == next {
            self.functions.push(PstatsFunction {
                file,
                line,
                name,
                ..PstatsFunction::default()
            });
        }
        self.by_id.insert(id, function);
        Ok(function)
    }

    /// Adds the figures of a function.
    fn row(&mut self, function: u32, row: ValueId) -> Result<(), PstatsError> {
        let values = self.values;
        let &[primitive, calls, self_time, total, callers] = values.items(values.get(row)) else {
            return Err(self.error("a function without five figures"));
        };
        let counts = (self.count(primitive)?, self.count(calls)?);
        let times = (self.time(self_time)?, self.time(total)?);
        if !matches!(values.get(callers), MarshalValue::Dictionary { .. }) {
            return Err(self.error("callers that are not a dictionary"));
        }
        if let Some(sum) = self.functions.get_mut(function as usize) {
            sum.primitive = sum.primitive.saturating_add(counts.0);
            sum.calls = sum.calls.saturating_add(counts.1);
            sum.self_time = sum.self_time.saturating_add(times.0);
            sum.total = sum.total.saturating_add(times.1);
        }
        for pair in values.items(values.get(callers)).chunks_exact(2) {
            let &[key, figures] = pair else { continue };
            let caller = self.caller(key, figures)?;
            self.add(function, caller);
        }
        Ok(())
    }

    fn caller(&mut self, key: ValueId, figures: ValueId) -> Result<Caller, PstatsError> {
        let function = self.function(key)?;
        let values = self.values;
        match (values.get(figures), values.items(values.get(figures))) {
            (MarshalValue::Integer { .. } | MarshalValue::Float(_), _) => {
                let calls = self.count(figures)?;
                Ok(Caller {
                    function,
                    primitive: calls,
                    calls,
                    times: None,
                })
            }
            (_, &[calls, primitive, self_time, total]) => Ok(Caller {
                function,
                primitive: self.count(primitive)?,
                calls: self.count(calls)?,
                times: Some((self.time(self_time)?, self.time(total)?)),
            }),
            _ => Err(self.error("a caller with neither a number of calls nor four figures")),
        }
    }

    /// Adds a caller, to what the function has of the same one if it is there twice.
    fn add(&mut self, function: u32, caller: Caller) {
        let Some(callers) = self.functions.get_mut(function as usize).map(|f| &mut f.callers) else {
            return;
        };
        let next = callers.len() as u32;
        let at = *self.edges.entry((function, caller.function)).or_insert(next);
        match callers.get_mut(at as usize) {
            None => callers.push(caller),
            Some(sum) => {
                sum.primitive = sum.primitive.saturating_add(caller.primitive);
                sum.calls = sum.calls.saturating_add(caller.calls);
                sum.times = match (sum.times, caller.times) {
                    (Some(a), Some(b)) => Some((a.0.saturating_add(b.0), a.1.saturating_add(b.1))),
                    _ => None,
                };
            }
        }
    }

    fn count(&self, id: ValueId) -> Result<u64, PstatsError> {
        match self.values.get(id) {
            MarshalValue::Integer {
                is_negative: false,
                magnitude,
            } => Ok(magnitude),
            // Converters of other formats have divided them.
            MarshalValue::Float(number) if number >= 0.0 && number.is_finite() => Ok(number.round() as u64),
            _ => Err(self.error("a number of calls that is none")),
        }
    }

    /// Seconds as nanoseconds. Negative ones, which `profile` has where its bias is too large, are 0.
    fn time(&self, id: ValueId) -> Result<u64, PstatsError> {
        let seconds = match self.values.get(id) {
            MarshalValue::Integer { is_negative: true, .. } => 0.0,
            MarshalValue::Integer { magnitude, .. } => magnitude as f64,
            MarshalValue::Float(seconds) if seconds.is_finite() => seconds,
            _ => return Err(self.error("a time that is not a number")),
        };
        Ok((seconds * 1e9).round() as u64)
    }
}

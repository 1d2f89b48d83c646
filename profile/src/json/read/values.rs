//! Value types, and what nodes and samples have of them.

use serde_json::{Map, Value as Json};

use super::{JsonError, JsonReader, number, objects, take_string};
use crate::measure::Measure;
use crate::model::NodeId;
use crate::values::{Amounts, Unit, Value, ValueType};

/// Value types of a profile, at most.
const MAX_VALUES: usize = 64;

/// What was read of values, until the value types of the profile are known.
#[derive(Default)]
pub(super) struct ReadValues {
    /// Keys that nodes have.
    keys: Vec<String>,
    /// (node, index of the key, inclusive amount).
    amounts: Vec<(NodeId, u8, u64)>,
    /// As the file declares them; `None` where it does not.
    types: Option<Vec<Value>>,
    /// Columns of the timeline by key.
    samples: Vec<(String, Vec<u64>)>,
}

impl JsonReader<'_> {
    /// Reads what a node has of the values.
    pub(super) fn node_values(&mut self, node: NodeId) -> Result<(), JsonError> {
        if self.peek() != Some(b'{') {
            return self.skip_value();
        }
        self.object(|reader, key| {
            let Some(amount) = reader.integer()? else { return Ok(()) };
            let keys = &mut reader.values.keys;
            let at = keys.iter().position(|known| known == key).unwrap_or_else(|| {
                if keys.len() < MAX_VALUES {
                    keys.push(key.to_string());
                }
                keys.len() - 1
            });
            if keys[at] == key {
                reader.values.amounts.push((node, at as u8, amount));
            }
            Ok(())
        })
    }

    /// Reads the columns of the timeline.
    pub(super) fn sample_values(&mut self) -> Result<(), JsonError> {
        self.object(|reader, key| {
            if reader.values.samples.len() >= MAX_VALUES || reader.peek() != Some(b'[') {
                return reader.skip_value();
            }
            let column = reader.column()?;
            reader.values.samples.push((key.to_string(), column));
            Ok(())
        })
    }

    /// Reads the value types from the metadata.
    pub(super) fn take_value_types(&mut self, facts: &mut Map<String, Json>) {
        let Some(list) = facts.remove("value_types") else {
            return;
        };
        let read = objects(Some(list), |value| {
            let unit = value.get("unit").and_then(Json::as_str).and_then(Unit::by_name);
            let per_count = value.get("per_count").map(|amount| number(Some(amount)));
            Value {
                kind: ValueType::new(take_string(value, "name"), unit.unwrap_or(Unit::Count)),
                amounts: per_count.map_or_else(each, Amounts::PerCount),
            }
        });
        let mut types: Vec<Value> = Vec::new();
        for value in read {
            if types.len() < MAX_VALUES && types.iter().all(|other| other.kind.key() != value.kind.key()) {
                types.push(value);
            }
        }
        self.values.types = Some(types);
    }

    /// Sets the values of the profile when all nodes and the timeline have been read.
    pub(super) fn take_values(&mut self) -> Result<(), JsonError> {
        let read = std::mem::take(&mut self.values);
        let meta = &self.profile.meta;
        let mut types = match read.types {
            Some(types) => types,
            None => Measure::of_event(&meta.event, meta.rate).values(),
        };
        let stored = types.iter().skip(1).filter(|value| !value.is_per_count()).count();
        // A node takes some hundred bytes of a file, so this bounds memory by the size of the file.
        if 8 * stored * self.profile.nodes.len() > 4 * self.text.len() + (1 << 20) {
            return Err(self.error("too many value types"));
        }
        // By key of the nodes, the value type.
        let type_of: Vec<Option<usize>> = read
            .keys
            .iter()
            .map(|key| (1..types.len()).find(|at| types[*at].kind.key() == *key))
            .collect();
        for (at, value) in types.iter_mut().enumerate() {
            let key = value.kind.key();
            let Amounts::Each { nodes, samples } = &mut value.amounts else {
                continue;
            };
            if at > 0 {
                *nodes = vec![0; self.profile.nodes.len()];
            }
            let column = read.samples.iter().find(|(name, _)| *name == key);
            let column = column.map_or(&[][..], |(_, column)| column);
            *samples = self
                .kept_samples
                .iter()
                .map(|row| column.get(*row as usize).copied().unwrap_or(0))
                .collect();
        }
        for value in types.iter_mut().skip(1) {
            if let Amounts::Each { nodes, samples } = &mut value.amounts {
                self.add_omitted(nodes, &|sample| samples.get(sample).copied().unwrap_or(0));
            }
        }
        for (node, key, amount) in read.amounts {
            let Some(value) = type_of[usize::from(key)] else {
                continue;
            };
            if let Amounts::Each { nodes, .. } = &mut types[value].amounts {
                nodes[node as usize] = amount;
            }
        }
        self.profile.values = types;
        Ok(())
    }
}

fn each() -> Amounts {
    Amounts::Each {
        nodes: Vec::new(),
        samples: Vec::new(),
    }
}

//! The tables that profiles refer to. Each entry is there once, and only if something refers to it.

use std::collections::HashMap;
use std::hash::Hash;

use crate::otlp::messages::{
    AnyValue, Function, KeyValueAndUnit, Link, Location, Mapping, OtlpValueType, ProfilesDictionary, Stack,
};
use crate::values::ValueType;

/// Entries by index, the zero value first.
struct Table<T> {
    all: Vec<T>,
    // Names come from the target: use a hasher that resists collision attacks.
    known: HashMap<T, i32>,
}

impl<T: Clone + Default + Eq + Hash> Default for Table<T> {
    fn default() -> Table<T> {
        Table {
            all: vec![T::default()],
            known: HashMap::from([(T::default(), 0)]),
        }
    }
}

impl<T: Clone + Default + Eq + Hash> Table<T> {
    fn index(&mut self, entry: T) -> i32 {
        let all = &mut self.all;
        *self.known.entry(entry).or_insert_with_key(|entry| {
            all.push(entry.clone());
            all.len() as i32 - 1
        })
    }
}

#[derive(Default)]
pub struct Dictionary {
    strings: Table<String>,
    attributes: Table<KeyValueAndUnit>,
    mappings: Table<Mapping>,
    functions: Table<Function>,
    locations: Table<Location>,
    links: Table<Link>,
    stacks: Table<Stack>,
}

impl Dictionary {
    pub fn string(&mut self, text: &str) -> i32 {
        match self.strings.known.get(text) {
            Some(known) => *known,
            None => self.strings.index(text.into()),
        }
    }

    pub fn attribute(&mut self, key: &str, value: impl Into<AnyValue>) -> i32 {
        self.attribute_in(key, value, "")
    }

    /// An attribute with a unit, in UCUM.
    pub fn attribute_in(&mut self, key: &str, value: impl Into<AnyValue>, unit: &str) -> i32 {
        let entry = KeyValueAndUnit {
            key_strindex: self.string(key),
            value: Some(value.into()),
            unit_strindex: self.string(unit),
        };
        self.attributes.index(entry)
    }

    pub fn value_type(&mut self, kind: &ValueType) -> OtlpValueType {
        OtlpValueType {
            type_strindex: self.string(&kind.name),
            unit_strindex: self.string(kind.unit.name()),
        }
    }

    pub fn mapping(&mut self, entry: Mapping) -> i32 {
        self.mappings.index(entry)
    }

    pub fn function(&mut self, entry: Function) -> i32 {
        self.functions.index(entry)
    }

    pub fn location(&mut self, entry: Location) -> i32 {
        self.locations.index(entry)
    }

    pub fn link(&mut self, entry: Link) -> i32 {
        self.links.index(entry)
    }

    pub fn stack(&mut self, location_indices: Vec<i32>) -> i32 {
        self.stacks.index(Stack { location_indices })
    }

    pub fn finish(self) -> ProfilesDictionary {
        ProfilesDictionary {
            mapping_table: self.mappings.all,
            location_table: self.locations.all,
            function_table: self.functions.all,
            // The specification would rather have zeros as identifiers here, but its checker wants an empty message.
            link_table: self.links.all,
            string_table: self.strings.all,
            attribute_table: self.attributes.all,
            stack_table: self.stacks.all,
        }
    }
}

//! The dictionary of a file: entries are decoded where something refers to them.

use std::borrow::Cow;
use std::cell::Cell;

use prost::Message;

use super::DICTIONARY;
use crate::import::Damage;
use crate::import::frames;
use crate::import::wire::{Fields, Malformed};
use crate::otlp::messages::{Any, AnyValue, KeyValue, KeyValueAndUnit};

/// Maximum number of bytes of entries, counted as often as they are decoded: small references to large entries would take much
/// time and memory.
pub const MAX_DECODED: usize = 1 << 30;

/// A table, by its field of `ProfilesDictionary`.
#[derive(Clone, Copy)]
pub enum Table {
    Mappings = 1,
    Locations = 2,
    Functions = 3,
    Links = 4,
    Strings = 5,
    Attributes = 6,
    Stacks = 7,
}

impl Table {
    /// An entry of it, as text.
    fn entry(self) -> &'static str {
        match self {
            Table::Mappings => "mapping",
            Table::Locations => "location",
            Table::Functions => "function",
            Table::Links => "link",
            Table::Strings => "string",
            Table::Attributes => "attribute",
            Table::Stacks => "stack",
        }
    }
}

/// The tables of a file.
#[derive(Default)]
pub struct Tables<'a> {
    /// By field, the entries. The first one is not used.
    all: [Vec<&'a [u8]>; 8],
    /// Bytes of entries so far.
    decoded: Cell<usize>,
}

impl<'a> Tables<'a> {
    /// The tables of all dictionaries of a message `ProfilesData`.
    ///
    /// # Errors
    /// The message is malformed.
    pub fn of(message: &'a [u8]) -> Result<Tables<'a>, Malformed> {
        let mut tables = Tables::default();
        for field in Fields(message) {
            if let (DICTIONARY, dictionary) = field? {
                tables.add(dictionary.bytes())?;
            }
        }
        Ok(tables)
    }

    /// Adds the tables of a `ProfilesDictionary`.
    pub fn add(&mut self, dictionary: &'a [u8]) -> Result<(), Malformed> {
        for field in Fields(dictionary) {
            let (number, entry) = field?;
            let table = usize::try_from(number).ok().and_then(|number| self.all.get_mut(number));
            if let Some(table) = table {
                table.push(entry.bytes());
            }
        }
        Ok(())
    }

    /// The number of entries.
    pub fn len(&self, table: Table) -> usize {
        self.bytes(table).len()
    }

    fn bytes(&self, table: Table) -> &[&'a [u8]] {
        self.all.get(table as usize).map_or(&[], |entries| entries)
    }

    fn find(&self, table: Table, index: i32) -> Result<&'a [u8], Damage> {
        let entry = usize::try_from(index)
            .ok()
            .and_then(|index| self.bytes(table).get(index));
        let missing = || Damage::whole(format!("{} {index} does not exist", table.entry()));
        let entry = entry.copied().ok_or_else(missing)?;
        self.count(entry.len())?;
        Ok(entry)
    }

    /// Counts bytes that are decoded or copied.
    ///
    /// # Errors
    /// They are more than [`MAX_DECODED`] in all.
    pub fn count(&self, bytes: usize) -> Result<(), Damage> {
        let decoded = self.decoded.get().saturating_add(bytes);
        self.decoded.set(decoded);
        if decoded > MAX_DECODED {
            let gib = MAX_DECODED >> 30;
            let reason = format!("its references are to more than {gib} GiB of the dictionary; that is the limit");
            return Err(Damage::whole(reason));
        }
        Ok(())
    }

    /// An entry.
    pub fn entry<T: Message + Default>(&self, table: Table, index: i32) -> Result<T, Damage> {
        decode(self.find(table, index)?)
    }

    pub fn text(&self, index: i32) -> Result<Cow<'a, str>, Damage> {
        Ok(frames::text(self.find(Table::Strings, index)?))
    }

    /// The key and the value of an attribute.
    pub fn attribute(&self, index: i32) -> Result<(Cow<'a, str>, Option<AnyValue>), Damage> {
        let entry: KeyValueAndUnit = self.entry(Table::Attributes, index)?;
        Ok((self.text(entry.key_strindex)?, entry.value))
    }

    /// The key of an attribute that stands where it applies.
    pub fn key<'b>(&self, attribute: &'b KeyValue) -> Result<Cow<'b, str>, Damage>
    where
        'a: 'b,
    {
        match attribute.key_strindex {
            0 => Ok(Cow::Borrowed(&attribute.key)),
            index => self.text(index),
        }
    }

    /// A value that is a text.
    pub fn text_of(&self, value: Option<&AnyValue>) -> Result<Option<String>, Damage> {
        Ok(match value.and_then(|value| value.value.as_ref()) {
            Some(Any::Text(text)) => Some(text.clone()),
            Some(Any::TextIndex(index)) => Some(self.text(*index)?.into_owned()),
            _ => None,
        })
    }
}

/// A message.
pub fn decode<T: Message + Default>(bytes: &[u8]) -> Result<T, Damage> {
    // In earlier versions, fields of these numbers had other types.
    T::decode(bytes).map_err(|_| {
        Damage::whole("a part of it is not as in version 1.11 of the protocol; it is damaged, or of an earlier version")
    })
}

/// A value that is a number, not negative.
pub fn number_of(value: Option<&AnyValue>) -> Option<u64> {
    match value?.value.as_ref()? {
        Any::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

//! The messages that a file of OTLP profiles is sent as, none larger than a receiver takes.
//!
//! A message has a part of the samples, and of the dictionary what these refer to. Profiles and resources are divided only where
//! one of them alone is too large. Fields that this version does not know are kept in resources, scopes and values of attributes.
//!
//! Files may come from anywhere: entries stay encoded until something refers to them, and each is decoded once for a message.

#[cfg(test)]
mod tests;

use std::fmt;

use prost::Message;
use prost::bytes::Bytes;

use super::messages::{
    Any, AnyValue, Function, KeyValue, Link, Location, Mapping, OtlpSample, OtlpValueType, Resource, Stack,
};

/// What the length of a message in another one takes at most, with its tag: for those whose length is not known yet.
const PREFIX: usize = 6;

/// What an entry takes in the message that it is in.
fn size(entry: &Bytes) -> usize {
    1 + prost::length_delimiter_len(entry.len()) + entry.len()
}

/// `ProfilesData` with its parts still encoded. The message that receivers take, `ExportProfilesServiceRequest` of
/// `opentelemetry/proto/collector/profiles/v1development/profiles_service.proto` (opentelemetry-proto 1.11.0), has the same
/// fields.
#[derive(Clone, PartialEq, Message)]
struct Data {
    #[prost(message, repeated, tag = "1")]
    resources: Vec<ResourceBytes>,
    #[prost(message, optional, tag = "2")]
    dictionary: Option<DictionaryBytes>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceBytes {
    #[prost(bytes = "bytes", optional, tag = "1")]
    resource: Option<Bytes>,
    #[prost(message, repeated, tag = "2")]
    scopes: Vec<ScopeBytes>,
    #[prost(bytes = "bytes", tag = "3")]
    schema_url: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeBytes {
    #[prost(bytes = "bytes", optional, tag = "1")]
    scope: Option<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    profiles: Vec<Bytes>,
    #[prost(bytes = "bytes", tag = "3")]
    schema_url: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct ProfileBytes {
    #[prost(message, optional, tag = "1")]
    sample_type: Option<OtlpValueType>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    samples: Vec<Bytes>,
    #[prost(fixed64, tag = "3")]
    time_unix_nano: u64,
    #[prost(uint64, tag = "4")]
    duration_nano: u64,
    #[prost(message, optional, tag = "5")]
    period_type: Option<OtlpValueType>,
    #[prost(int64, tag = "6")]
    period: i64,
    #[prost(bytes = "bytes", tag = "7")]
    profile_id: Bytes,
    #[prost(uint32, tag = "8")]
    dropped_attributes_count: u32,
    #[prost(bytes = "bytes", tag = "9")]
    original_payload_format: Bytes,
    #[prost(bytes = "bytes", tag = "10")]
    original_payload: Bytes,
    #[prost(int32, repeated, tag = "11")]
    attribute_indices: Vec<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct DictionaryBytes {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    mappings: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    locations: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    functions: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "4")]
    links: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "5")]
    strings: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "6")]
    attributes: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "7")]
    stacks: Vec<Bytes>,
}

/// A scope, with what its attributes may refer to.
#[derive(Clone, PartialEq, Message)]
struct Scope {
    #[prost(bytes = "bytes", tag = "1")]
    name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    version: Bytes,
    #[prost(message, repeated, tag = "3")]
    attributes: Vec<KeyValue>,
    #[prost(uint32, tag = "4")]
    dropped_attributes_count: u32,
}

/// An attribute of the dictionary with its value still encoded.
#[derive(Clone, PartialEq, Message)]
struct AttributeBytes {
    #[prost(int32, tag = "1")]
    key_strindex: i32,
    #[prost(bytes = "bytes", optional, tag = "2")]
    value: Option<Bytes>,
    #[prost(int32, tag = "3")]
    unit_strindex: i32,
}

/// Why a file cannot be divided, or cannot be read at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedOtlp(String);

impl fmt::Display for DamagedOtlp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DamagedOtlp {}

impl From<prost::DecodeError> for DamagedOtlp {
    fn from(e: prost::DecodeError) -> DamagedOtlp {
        DamagedOtlp(e.to_string())
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpPart {
    /// `ProfilesData`, which is an `ExportProfilesServiceRequest` as well; not compressed.
    pub message: Vec<u8>,
    /// The first sample that it does not have, by its number in the file.
    pub end: usize,
    /// How many profiles it has, in whole or in part.
    pub profiles: usize,
    /// The text attributes of its first resource, key and value.
    pub resource: Vec<(String, String)>,
}

/// Where parts end besides their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartEnd {
    /// With the file.
    File,
    /// With the resource: a part has only one.
    Resource,
}

/// A file of OTLP profiles that is divided into messages. Its samples are numbered in the order of the file.
pub struct OtlpParts {
    resources: Vec<ResourceBytes>,
    dictionary: DictionaryBytes,
    profiles: Vec<ProfilePlace>,
    samples: usize,
}

/// A profile of the file, without its samples, and where it belongs.
struct ProfilePlace {
    resource: usize,
    scope: usize,
    head: ProfileBytes,
    samples: Vec<Bytes>,
    /// Number of its first sample.
    first: usize,
}

impl ProfilePlace {
    fn end(&self) -> usize {
        self.first + self.samples.len()
    }
}

impl OtlpParts {
    /// Reads the decompressed bytes of a file, `ProfilesData`.
    ///
    /// # Errors
    /// The bytes are no such message.
    pub fn new(bytes: Vec<u8>) -> Result<OtlpParts, DamagedOtlp> {
        let mut data = Data::decode(Bytes::from(bytes))?;
        let mut profiles = Vec::new();
        let mut samples = 0;
        for (resource, of_resource) in data.resources.iter_mut().enumerate() {
            for (scope, of_scope) in of_resource.scopes.iter_mut().enumerate() {
                for encoded in std::mem::take(&mut of_scope.profiles) {
                    let mut head = ProfileBytes::decode(encoded)?;
                    let of_profile = std::mem::take(&mut head.samples);
                    let first = samples;
                    samples += of_profile.len();
                    // One without samples says nothing, and parts are found by their samples.
                    if samples > first {
                        profiles.push(ProfilePlace {
                            resource,
                            scope,
                            head,
                            samples: of_profile,
                            first,
                        });
                    }
                }
            }
        }
        Ok(OtlpParts {
            resources: data.resources,
            dictionary: data.dictionary.unwrap_or_default(),
            profiles,
            samples,
        })
    }

    /// The number of samples in the file.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// The part that begins with sample `from`, of at most `max_bytes`; larger only if its one sample needs more. `None` if the
    /// file has no such sample.
    ///
    /// # Errors
    /// An entry that is referred to does not exist or is malformed.
    pub fn part(&self, from: usize, max_bytes: usize, ends: PartEnd) -> Result<Option<OtlpPart>, DamagedOtlp> {
        let Some(first) = self.profile_of(from) else {
            return Ok(None);
        };
        let mut builder = PartBuilder::new(self, max_bytes);
        let (mut at, mut next) = (first, from);
        while let Some(profile) = self.profiles.get(at) {
            let is_other = self.profiles[first].resource != profile.resource;
            if is_other && ends == PartEnd::Resource {
                break;
            }
            // All that remains of the resource, else of the profile, else what fits.
            let rest = &self.profiles[at..];
            let of_resource = rest.iter().take_while(|other| other.resource == profile.resource);
            let after = at + of_resource.count();
            if builder.add_whole(at..after, next)? {
                at = after;
            } else if next > from {
                break;
            } else if builder.add_whole(at..at + 1, next)? {
                at += 1;
            } else {
                next = builder.add_some(at, next)?;
                break;
            }
            next = self.profiles.get(at).map_or(self.samples, |profile| profile.first);
        }
        builder.finish(next).map(Some)
    }

    /// Index of the profile that has the sample.
    fn profile_of(&self, sample: usize) -> Option<usize> {
        let at = self.profiles.partition_point(|profile| profile.end() <= sample);
        (at < self.profiles.len()).then_some(at)
    }
}

/// A table of the part.
#[derive(Default)]
struct PartTable {
    /// Index in the part by index in the file; 0: not there yet, or the zero value.
    known: Vec<i32>,
    /// Indices in the file, in the order of the part, without the zero value.
    order: Vec<usize>,
    entries: Vec<Bytes>,
    bytes: usize,
}

impl PartTable {
    fn new(entries: &[Bytes]) -> PartTable {
        PartTable {
            known: vec![0; entries.len()],
            // The zero value: no bytes, as a message and as a text.
            entries: vec![Bytes::new()],
            bytes: size(&Bytes::new()),
            ..PartTable::default()
        }
    }

    /// The index in the part of this one in the file, if it is there already.
    ///
    /// # Errors
    /// The file has no such entry.
    fn find(&self, index: i32, table: &str) -> Result<Option<i32>, DamagedOtlp> {
        let known = usize::try_from(index).ok().and_then(|index| self.known.get(index));
        match known {
            _ if index == 0 => Ok(Some(0)),
            Some(0) => Ok(None),
            Some(known) => Ok(Some(*known)),
            None => Err(DamagedOtlp(format!("{table} {index} does not exist"))),
        }
    }

    /// Adds an entry; `index`: as in the file, which [`PartTable::find`] has checked.
    fn add(&mut self, index: i32, entry: Bytes) -> i32 {
        let new = self.entries.len() as i32;
        let index = index as usize;
        if let Some(known) = self.known.get_mut(index) {
            *known = new;
        }
        self.order.push(index);
        self.bytes += size(&entry);
        self.entries.push(entry);
        new
    }

    /// Removes all but the first `entries`.
    fn truncate(&mut self, entries: usize) {
        for index in self.order.drain(entries.saturating_sub(1)..) {
            if let Some(known) = self.known.get_mut(index) {
                *known = 0;
            }
        }
        for removed in self.entries.drain(entries..) {
            self.bytes -= size(&removed);
        }
    }
}

/// A profile, or what of it is in the part.
struct PartProfile {
    place: usize,
    head: ProfileBytes,
}

/// The state that a part goes back to if what was added is too much.
struct Mark {
    bytes: usize,
    profiles: usize,
    samples_of_last: usize,
    tables: [usize; 7],
}

struct PartBuilder<'a> {
    file: &'a OtlpParts,
    max_bytes: usize,
    profiles: Vec<PartProfile>,
    /// Resource and scope of the last profile, re-encoded.
    heads: Vec<(Option<Bytes>, Option<Bytes>)>,
    /// Of profiles, resources and scopes.
    bytes: usize,
    mappings: PartTable,
    locations: PartTable,
    functions: PartTable,
    links: PartTable,
    strings: PartTable,
    attributes: PartTable,
    stacks: PartTable,
}

impl<'a> PartBuilder<'a> {
    fn new(file: &'a OtlpParts, max_bytes: usize) -> PartBuilder<'a> {
        let of = &file.dictionary;
        PartBuilder {
            file,
            max_bytes,
            profiles: Vec::new(),
            heads: Vec::new(),
            // The dictionary.
            bytes: PREFIX,
            mappings: PartTable::new(&of.mappings),
            locations: PartTable::new(&of.locations),
            functions: PartTable::new(&of.functions),
            links: PartTable::new(&of.links),
            strings: PartTable::new(&of.strings),
            attributes: PartTable::new(&of.attributes),
            stacks: PartTable::new(&of.stacks),
        }
    }

    fn tables(&mut self) -> [&mut PartTable; 7] {
        [
            &mut self.mappings,
            &mut self.locations,
            &mut self.functions,
            &mut self.links,
            &mut self.strings,
            &mut self.attributes,
            &mut self.stacks,
        ]
    }

    fn mark(&mut self) -> Mark {
        Mark {
            bytes: self.bytes,
            profiles: self.profiles.len(),
            samples_of_last: self.profiles.last().map_or(0, |last| last.head.samples.len()),
            tables: self.tables().map(|table| table.entries.len()),
        }
    }

    fn back_to(&mut self, mark: &Mark) {
        self.bytes = mark.bytes;
        self.profiles.truncate(mark.profiles);
        self.heads.truncate(mark.profiles);
        if let Some(last) = self.profiles.last_mut() {
            last.head.samples.truncate(mark.samples_of_last);
        }
        for (table, entries) in self.tables().into_iter().zip(mark.tables) {
            table.truncate(entries);
        }
    }

    fn is_too_large(&mut self) -> bool {
        let of_tables: usize = self.tables().iter().map(|table| table.bytes).sum();
        self.bytes + of_tables > self.max_bytes
    }

    /// Adds these profiles from sample `from` on. False if they do not fit: then nothing is added.
    fn add_whole(&mut self, places: std::ops::Range<usize>, from: usize) -> Result<bool, DamagedOtlp> {
        let file = self.file;
        let mark = self.mark();
        for place in places {
            let profile = &file.profiles[place];
            self.add_head(place)?;
            for sample in profile.first.max(from)..profile.end() {
                self.add_sample(place, sample)?;
                if self.is_too_large() {
                    self.back_to(&mark);
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Adds samples of one profile from sample `from` on while they fit, and at least one. Returns the first that is not added.
    fn add_some(&mut self, place: usize, from: usize) -> Result<usize, DamagedOtlp> {
        self.add_head(place)?;
        for sample in from..self.file.profiles[place].end() {
            let mark = self.mark();
            self.add_sample(place, sample)?;
            if self.is_too_large() && sample > from {
                self.back_to(&mark);
                return Ok(sample);
            }
        }
        Ok(self.file.profiles[place].end())
    }

    fn add_head(&mut self, place: usize) -> Result<(), DamagedOtlp> {
        let file = self.file;
        let of = &file.profiles[place];
        let last = self.profiles.last().map(|last| &file.profiles[last.place]);
        let same_resource = last.is_some_and(|last| last.resource == of.resource);
        let same_scope = same_resource && last.is_some_and(|last| last.scope == of.scope);
        let resource = &file.resources[of.resource];
        let scope = &resource.scopes[of.scope];
        let (mut resource_head, mut scope_head) = (None, None);
        if !same_resource {
            resource_head = resource
                .resource
                .clone()
                .map(|bytes| self.resource(bytes))
                .transpose()?;
            self.bytes += 2 * PREFIX + resource_head.as_ref().map_or(0, Bytes::len) + resource.schema_url.len();
        }
        if !same_scope {
            scope_head = scope.scope.clone().map(|bytes| self.scope(bytes)).transpose()?;
            self.bytes += 2 * PREFIX + scope_head.as_ref().map_or(0, Bytes::len) + scope.schema_url.len();
        }
        let mut head = of.head.clone();
        head.sample_type = head.sample_type.map(|kind| self.value_type(kind)).transpose()?;
        head.period_type = head.period_type.map(|kind| self.value_type(kind)).transpose()?;
        self.replace_attributes(&mut head.attribute_indices)?;
        self.bytes += PREFIX + head.encoded_len();
        self.profiles.push(PartProfile { place, head });
        self.heads.push((resource_head, scope_head));
        Ok(())
    }

    fn add_sample(&mut self, place: usize, number: usize) -> Result<(), DamagedOtlp> {
        let of = &self.file.profiles[place];
        let mut sample = OtlpSample::decode(of.samples[number - of.first].clone())?;
        sample.stack_index = self.stack(sample.stack_index)?;
        sample.link_index = self.link(sample.link_index)?;
        self.replace_attributes(&mut sample.attribute_indices)?;
        let encoded = Bytes::from(sample.encode_to_vec());
        self.bytes += size(&encoded);
        if let Some(last) = self.profiles.last_mut() {
            last.head.samples.push(encoded);
        }
        Ok(())
    }

    fn finish(self, end: usize) -> Result<OtlpPart, DamagedOtlp> {
        let file = self.file;
        let mut resources: Vec<ResourceBytes> = Vec::new();
        let mut before = None;
        let mut first_resource = Vec::new();
        let profiles = self.profiles.len();
        for (PartProfile { place, head }, (resource_head, scope_head)) in self.profiles.into_iter().zip(self.heads) {
            let of = &file.profiles[place];
            let of_resource = &file.resources[of.resource];
            if before.is_none_or(|(resource, _)| resource != of.resource) {
                if before.is_none() {
                    first_resource = texts(of_resource.resource.clone().unwrap_or_default(), &file.dictionary)?;
                }
                resources.push(ResourceBytes {
                    resource: resource_head,
                    scopes: Vec::new(),
                    schema_url: of_resource.schema_url.clone(),
                });
            }
            let Some(resource) = resources.last_mut() else {
                continue;
            };
            if before.is_none_or(|before| before != (of.resource, of.scope)) {
                resource.scopes.push(ScopeBytes {
                    scope: scope_head,
                    profiles: Vec::new(),
                    schema_url: of_resource.scopes[of.scope].schema_url.clone(),
                });
            }
            if let Some(scope) = resource.scopes.last_mut() {
                scope.profiles.push(Bytes::from(head.encode_to_vec()));
            }
            before = Some((of.resource, of.scope));
        }
        let data = Data {
            resources,
            dictionary: Some(DictionaryBytes {
                mappings: self.mappings.entries,
                locations: self.locations.entries,
                functions: self.functions.entries,
                links: self.links.entries,
                strings: self.strings.entries,
                attributes: self.attributes.entries,
                stacks: self.stacks.entries,
            }),
        };
        Ok(OtlpPart {
            message: data.encode_to_vec(),
            end,
            profiles,
            resource: first_resource,
        })
    }

    fn string(&mut self, index: i32) -> Result<i32, DamagedOtlp> {
        if let Some(known) = self.strings.find(index, "string")? {
            return Ok(known);
        }
        let entry = self.file.dictionary.strings[index as usize].clone();
        // Strings of the format are UTF-8: a receiver would refuse the whole message.
        std::str::from_utf8(&entry).map_err(|_| DamagedOtlp(format!("string {index} is not UTF-8")))?;
        Ok(self.strings.add(index, entry))
    }

    fn value_type(&mut self, kind: OtlpValueType) -> Result<OtlpValueType, DamagedOtlp> {
        Ok(OtlpValueType {
            type_strindex: self.string(kind.type_strindex)?,
            unit_strindex: self.string(kind.unit_strindex)?,
        })
    }

    fn replace_attributes(&mut self, indices: &mut [i32]) -> Result<(), DamagedOtlp> {
        for index in indices {
            *index = self.attribute(*index)?;
        }
        Ok(())
    }

    fn attribute(&mut self, index: i32) -> Result<i32, DamagedOtlp> {
        if let Some(known) = self.attributes.find(index, "attribute")? {
            return Ok(known);
        }
        let mut attribute = AttributeBytes::decode(self.file.dictionary.attributes[index as usize].clone())?;
        attribute.key_strindex = self.string(attribute.key_strindex)?;
        attribute.unit_strindex = self.string(attribute.unit_strindex)?;
        if let Some(bytes) = &attribute.value {
            let mut value = AnyValue::decode(bytes.clone())?;
            if self.replace_texts(&mut value)? {
                attribute.value = Some(value.encode_to_vec().into());
            }
        }
        Ok(self.attributes.add(index, attribute.encode_to_vec().into()))
    }

    fn link(&mut self, index: i32) -> Result<i32, DamagedOtlp> {
        if let Some(known) = self.links.find(index, "link")? {
            return Ok(known);
        }
        let entry = self.file.dictionary.links[index as usize].clone();
        Link::decode(entry.clone())?;
        Ok(self.links.add(index, entry))
    }

    fn mapping(&mut self, index: i32) -> Result<i32, DamagedOtlp> {
        if let Some(known) = self.mappings.find(index, "mapping")? {
            return Ok(known);
        }
        let mut mapping = Mapping::decode(self.file.dictionary.mappings[index as usize].clone())?;
        mapping.filename_strindex = self.string(mapping.filename_strindex)?;
        self.replace_attributes(&mut mapping.attribute_indices)?;
        Ok(self.mappings.add(index, mapping.encode_to_vec().into()))
    }

    fn function(&mut self, index: i32) -> Result<i32, DamagedOtlp> {
        if let Some(known) = self.functions.find(index, "function")? {
            return Ok(known);
        }
        let mut function = Function::decode(self.file.dictionary.functions[index as usize].clone())?;
        function.name_strindex = self.string(function.name_strindex)?;
        function.system_name_strindex = self.string(function.system_name_strindex)?;
        function.filename_strindex = self.string(function.filename_strindex)?;
        Ok(self.functions.add(index, function.encode_to_vec().into()))
    }

    fn location(&mut self, index: i32) -> Result<i32, DamagedOtlp> {
        if let Some(known) = self.locations.find(index, "location")? {
            return Ok(known);
        }
        let mut location = Location::decode(self.file.dictionary.locations[index as usize].clone())?;
        location.mapping_index = self.mapping(location.mapping_index)?;
        for line in &mut location.lines {
            line.function_index = self.function(line.function_index)?;
        }
        self.replace_attributes(&mut location.attribute_indices)?;
        Ok(self.locations.add(index, location.encode_to_vec().into()))
    }

    fn stack(&mut self, index: i32) -> Result<i32, DamagedOtlp> {
        if let Some(known) = self.stacks.find(index, "stack")? {
            return Ok(known);
        }
        let mut stack = Stack::decode(self.file.dictionary.stacks[index as usize].clone())?;
        for location in &mut stack.location_indices {
            *location = self.location(*location)?;
        }
        Ok(self.stacks.add(index, stack.encode_to_vec().into()))
    }

    fn resource(&mut self, bytes: Bytes) -> Result<Bytes, DamagedOtlp> {
        let mut resource = Resource::decode(bytes.clone())?;
        let is_changed = self.replace_keys(&mut resource.attributes)?;
        Ok(if is_changed {
            resource.encode_to_vec().into()
        } else {
            bytes
        })
    }

    fn scope(&mut self, bytes: Bytes) -> Result<Bytes, DamagedOtlp> {
        let mut scope = Scope::decode(bytes.clone())?;
        let is_changed = self.replace_keys(&mut scope.attributes)?;
        Ok(if is_changed {
            scope.encode_to_vec().into()
        } else {
            bytes
        })
    }

    /// Replaces indices of texts in attributes; false if there are none.
    fn replace_keys(&mut self, attributes: &mut [KeyValue]) -> Result<bool, DamagedOtlp> {
        let mut is_changed = false;
        for attribute in attributes {
            is_changed |= attribute.key_strindex != 0;
            attribute.key_strindex = self.string(attribute.key_strindex)?;
            if let Some(value) = &mut attribute.value {
                is_changed |= self.replace_texts(value)?;
            }
        }
        Ok(is_changed)
    }

    /// The same in a value. Values are nested as deeply as the decoder accepts, which is 100 levels.
    fn replace_texts(&mut self, value: &mut AnyValue) -> Result<bool, DamagedOtlp> {
        match &mut value.value {
            Some(Any::TextIndex(index)) => {
                *index = self.string(*index)?;
                Ok(true)
            }
            Some(Any::Array(array)) => {
                let mut is_changed = false;
                for value in &mut array.values {
                    is_changed |= self.replace_texts(value)?;
                }
                Ok(is_changed)
            }
            Some(Any::List(list)) => self.replace_keys(&mut list.values),
            _ => Ok(false),
        }
    }
}

/// The attributes of a resource of the file whose values are texts.
fn texts(resource: Bytes, dictionary: &DictionaryBytes) -> Result<Vec<(String, String)>, DamagedOtlp> {
    let string = |index: i32| {
        let entry = usize::try_from(index)
            .ok()
            .and_then(|index| dictionary.strings.get(index));
        entry.map_or(String::new(), |entry| String::from_utf8_lossy(entry).into_owned())
    };
    let mut texts = Vec::new();
    for KeyValue {
        key,
        value,
        key_strindex,
    } in Resource::decode(resource)?.attributes
    {
        let key = if key.is_empty() { string(key_strindex) } else { key };
        match value.and_then(|value| value.value) {
            Some(Any::Text(text)) => texts.push((key, text)),
            Some(Any::TextIndex(index)) => texts.push((key, string(index))),
            _ => {}
        }
    }
    Ok(texts)
}

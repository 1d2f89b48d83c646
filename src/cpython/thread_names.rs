//! Names of Python threads (`threading.Thread.name`), read from a running process.
//!
//! The module `threading` registers its threads by `pthread_self` in a dict, `_active`. The process changes its objects
//! meanwhile, so a name counts only if the thread object names the same thread and a second reading, of memory that is
//! not cached from the first one, gives the same.

use std::collections::BTreeMap;

use super::Runtime;
use super::dict::{DictEntry, KeysTable};
use super::object_layout::{InstanceDict, ObjectLayout};
use super::repr::ValueReader;
use super::strings;
use super::thread_states::{self, PyThreadState};
use crate::cpython_layout::{Interpreter, Layout};
use crate::event::Tid;
use crate::process::memory::Memory;

/// Maximum number of entries read of `sys.modules`, of a module's namespace, and of the registered threads.
const MAX_ENTRIES: usize = 1 << 16;
/// Maximum number of attributes of a thread object.
const MAX_ATTRIBUTES: usize = 256;
/// Maximum length of a name, code points; longer ones are truncated.
const MAX_NAME: u64 = 100;

/// `Py_TPFLAGS_INLINE_VALUES` (3.13 and later) and `Py_TPFLAGS_MANAGED_DICT` (3.11 and later) in Include/object.h.
const INLINE_VALUES: u64 = 1 << 2;
const MANAGED_DICT: u64 = 1 << 4;

/// Reads names of threads of one process.
pub struct ThreadNameReader<'a> {
    memory: &'a dyn Memory,
    python: &'a Interpreter,
    objects: ObjectLayout,
}

/// What stays the same in a process while no thread starts, so that it is read once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedThreads {
    /// Addresses of `threading._active`, that of the oldest interpreter first. Empty: none has imported `threading`.
    registries: Vec<u64>,
    /// `pthread_self`, by the thread's ID in the process's own PID namespace.
    thread_pointers: BTreeMap<Tid, u64>,
}

impl NamedThreads {
    /// Whether an interpreter had imported `threading`, without which threads have no names.
    pub fn have_names(&self) -> bool {
        !self.registries.is_empty()
    }

    /// Threads with these IDs, and a registry or none.
    #[cfg(test)]
    pub fn example(tids: &[Tid], registry: Option<u64>) -> NamedThreads {
        NamedThreads {
            registries: registry.into_iter().collect(),
            thread_pointers: tids.iter().map(|tid| (*tid, 0)).collect(),
        }
    }

    /// Whether the thread had a thread state.
    pub fn contain(&self, tid: Tid) -> bool {
        self.thread_pointers.contains_key(&tid)
    }
}

impl<'a> ThreadNameReader<'a> {
    /// `None` for an unsupported version.
    pub fn new(memory: &'a dyn Memory, runtime: &Runtime, python: &'a Interpreter) -> Option<ThreadNameReader<'a>> {
        let objects = ObjectLayout::of(runtime, &python.layout)?;
        Some(ThreadNameReader {
            memory,
            python,
            objects,
        })
    }

    /// The threads of the process's interpreters.
    pub fn threads(&self) -> NamedThreads {
        let states = thread_states::states(self.memory, self.python);
        let thread_pointers = thread_states::thread_pointers(self.memory, self.python, &states);
        NamedThreads {
            registries: self.registries(&states),
            thread_pointers: thread_pointers.into_iter().collect(),
        }
    }

    /// Interpreters are listed newest first. A thread that runs several has the name that its first one knows.
    fn registries(&self, states: &[PyThreadState]) -> Vec<u64> {
        let mut interpreters: Vec<u64> = states.iter().map(|s| s.interpreter).collect();
        interpreters.dedup();
        let registries = interpreters.iter().rev();
        registries
            .filter_map(|interpreter| self.registry(*interpreter))
            .collect()
    }

    fn registry(&self, interpreter: u64) -> Option<u64> {
        let modules = self.read_pointer(interpreter, self.layout().interp_modules.into())?;
        let threading = self.item(modules, "threading")?;
        self.is(threading, "module").then_some(())?;
        let registry = self.item(
            self.read_pointer(threading, self.objects.module_dict.into())?,
            "_active",
        )?;
        self.is(registry, "dict").then_some(registry)
    }

    /// The name of a thread as one reading gives it, by the thread's ID in the process's own PID namespace. `None`: it has
    /// none, or it could not be read.
    pub fn name(&self, threads: &NamedThreads, tid: Tid) -> Option<String> {
        let thread_pointer = *threads.thread_pointers.get(&tid)?;
        let owner = thread_states::thread_id(self.memory, self.python, thread_pointer)?;
        let registered = |registry: &u64| self.name_in(*registry, thread_pointer);
        let name = threads.registries.iter().find_map(registered)?;
        (owner == tid).then_some(name)
    }

    fn name_in(&self, registry: u64, thread_pointer: u64) -> Option<String> {
        // Integers are their own hashes.
        let entries = self.entries(registry)?.into_iter();
        let mut own = entries.filter(|e| e.hash == thread_pointer && self.int(e.key) == Some(thread_pointer));
        let attributes = self.attributes(own.next()?.value)?;
        let ident = self.named(&attributes, "_ident")?;
        let name = self.named(&attributes, "_name")?;
        (self.int(ident) == Some(thread_pointer) && self.is(name, "str")).then_some(())?;
        let (mut text, length) = strings::read_str_start(self.memory, self.layout(), name, MAX_NAME)?;
        if length > MAX_NAME {
            text.push_str("...");
        }
        Some(text)
    }

    fn layout(&self) -> &Layout {
        &self.python.layout
    }

    fn read_pointer(&self, address: u64, offset: u64) -> Option<u64> {
        self.memory.u64(address.checked_add(offset)?)
    }

    fn values(&self) -> ValueReader<'_> {
        ValueReader {
            memory: self.memory,
            layout: self.layout(),
            objects: &self.objects,
            over: &|| false,
        }
    }

    /// Whether an object is of this built-in type.
    fn is(&self, object: u64, name: &str) -> bool {
        let found = self.values().type_of(object);
        found.is_some_and(|(found, plain)| plain && found == name)
    }

    /// The value of an `int` that fits.
    fn int(&self, object: u64) -> Option<u64> {
        self.is(object, "int").then_some(())?;
        let (negative, digits) = self.values().digits(object)?;
        let add = |sum: u64, digit: &u32| sum.checked_mul(1 << 30)?.checked_add((*digit).into());
        let value = digits.iter().rev().try_fold(0, add)?;
        (!negative).then_some(value)
    }

    fn entries(&self, dict: u64) -> Option<Vec<DictEntry>> {
        self.is(dict, "dict").then_some(())?;
        KeysTable::of_dict(self.memory, &self.objects, dict)?.entries(self.memory, MAX_ENTRIES)
    }

    /// The value of a string key.
    fn item(&self, dict: u64, key: &str) -> Option<u64> {
        self.named(&self.entries(dict)?, key)
    }

    fn named(&self, entries: &[DictEntry], wanted: &str) -> Option<u64> {
        let length = wanted.len() as u64;
        let is_wanted = |key: u64| {
            strings::read_str_start(self.memory, self.layout(), key, length).is_some_and(|(text, _)| text == wanted)
        };
        let mut lengths = self.key_lengths(entries).into_iter().zip(entries);
        let found = lengths.find(|(found, entry)| *found == Some(length) && is_wanted(entry.key));
        found.map(|(_, entry)| entry.value)
    }

    /// The lengths of keys that are strings, code points; `None` for those that cannot be read. The keys lie on as many
    /// pages, so they are read together.
    fn key_lengths(&self, entries: &[DictEntry]) -> Vec<Option<u64>> {
        let of_length = |entry: &DictEntry| (entry.key.saturating_add(self.layout().str_length.into()), 8);
        let pieces: Vec<(u64, usize)> = entries.iter().map(of_length).collect();
        let mut lengths = Vec::with_capacity(entries.len());
        let mut raw = vec![0; 8 * entries.len()];
        while lengths.len() < pieces.len() {
            let done = lengths.len();
            let read = self.memory.read_pieces(&pieces[done..], &mut raw[8 * done..]) / 8;
            let words = raw[8 * done..8 * (done + read)].chunks_exact(8);
            lengths.extend(words.map(|word| word.try_into().map(u64::from_le_bytes).ok()));
            // The one that ended the reading.
            if lengths.len() < pieces.len() {
                lengths.push(None);
            }
        }
        lengths
    }

    /// Attributes of an instance of a class.
    fn attributes(&self, object: u64) -> Option<Vec<DictEntry>> {
        let class = self.read_pointer(object, self.objects.ob_type.into())?;
        let flags = self.read_pointer(class, self.objects.type_flags.into())?;
        let before = |offset: u16| self.memory.u64(object.checked_sub(offset.into())?);
        let dict = |dict: u64| self.entries(dict);
        let split = |values: u64| {
            let keys = self.read_pointer(class, self.objects.type_keys.into())?;
            KeysTable::of_keys(self.memory, &self.objects, keys, Some(values))?.entries(self.memory, MAX_ATTRIBUTES)
        };
        match self.objects.instance_dict.filter(|_| flags & MANAGED_DICT != 0) {
            None => {
                let offset = self.read_pointer(class, self.objects.type_dictoffset.into())?;
                dict(self.read_pointer(object, offset)?)
            }
            Some(InstanceDict::ValuesAndDict { values, dict: at }) => match before(values)? {
                0 => dict(before(at)?),
                values => split(values),
            },
            Some(InstanceDict::ValuesOrDict(at)) => match before(at)? {
                word if word & 1 == 1 => split(word.checked_add(1)?),
                word => dict(word),
            },
            Some(InstanceDict::DictOrInline(at)) => match before(at)? {
                0 if flags & INLINE_VALUES != 0 => {
                    let size = self.read_pointer(class, self.objects.type_basicsize.into())?;
                    split(
                        object
                            .checked_add(size)?
                            .checked_add(self.objects.values_first.into())?,
                    )
                }
                found => dict(found),
            },
        }
    }
}

/// Names of a thread as one text: Python's, then that of the system in brackets, unless it is the same or its beginning
/// (CPython 3.14 and later set it).
pub fn both_names(python: &str, system: &str) -> String {
    match system {
        "" => python.to_string(),
        _ if python == system || (system.len() >= 15 && python.starts_with(system)) => python.to_string(),
        _ => format!("{python} [{system}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names_are_shown_unless_they_say_the_same() {
        for (python, system, expected) in [
            ("MainThread", "python3", "MainThread [python3]"),
            ("worker", "worker", "worker"),
            ("worker", "", "worker"),
            (
                "a-worker-with-a-long-name",
                "a-worker-with-a",
                "a-worker-with-a-long-name",
            ),
            ("python3-helper", "python3", "python3-helper [python3]"),
        ] {
            assert_eq!(both_names(python, system), expected);
        }
    }
}

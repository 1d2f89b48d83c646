//! Objects of the target's Python code, as far as finding tasks needs them: types, attributes, items of containers.
//! Everything is bounded; what cannot be read is missing.

use std::cell::RefCell;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::layout::TaskLayout;
use crate::cpython::object_layout::{InstanceDict, ObjectLayout};
use crate::cpython::strings;
use crate::cpython_layout::Layout;
use crate::process::memory::Memory;

/// Maximum length of a type's name, bytes.
const MAX_TYPE: usize = 80;
/// Maximum number of base types followed.
const MAX_BASES: usize = 16;
/// Maximum number of types remembered.
const MAX_TYPES: usize = 4096;
/// Maximum number of slots of a dictionary's or set's table.
const MAX_SLOTS: u64 = 1 << 20;
/// Maximum number of items of a small container (closure, arguments, callbacks).
const MAX_ITEMS: u64 = 64;

/// `Py_TPFLAGS_INLINE_VALUES` (3.13) and `Py_TPFLAGS_MANAGED_DICT` (3.11; Include/object.h).
const INLINE_VALUES: u64 = 1 << 2;
const MANAGED_DICT: u64 = 1 << 4;

/// What an object is, by its type or the nearest known base of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `_asyncio.Task`
    Task,
    /// `_asyncio.Future`
    Future,
    Coroutine,
    Generator,
    AsyncGenerator,
    /// The object that `__await__` of a coroutine, or `__anext__` of an asynchronous generator, returns: it refers to
    /// the coroutine or generator with its first word.
    Wrapper,
    Function,
    Method,
    BuiltinMethod,
    Partial,
    Cell,
    /// A task's own callback of a future that it awaits.
    Wakeup,
    /// `PyGreenlet`
    Greenlet,
    /// A frame object; from 3.11 on it refers to the frame.
    Frame,
    Str,
    Int,
    Other,
}

/// Known types by the name in the type object.
const KINDS: &[(&str, Kind)] = &[
    ("_asyncio.Task", Kind::Task),
    ("_asyncio.Future", Kind::Future),
    ("coroutine", Kind::Coroutine),
    ("generator", Kind::Generator),
    ("async_generator", Kind::AsyncGenerator),
    ("coroutine_wrapper", Kind::Wrapper),
    ("async_generator_asend", Kind::Wrapper),
    ("async_generator_athrow", Kind::Wrapper),
    ("function", Kind::Function),
    ("method", Kind::Method),
    ("builtin_function_or_method", Kind::BuiltinMethod),
    ("functools.partial", Kind::Partial),
    ("cell", Kind::Cell),
    ("TaskWakeupMethWrapper", Kind::Wakeup),
    ("TaskStepMethWrapper", Kind::Wakeup),
    ("_asyncio.TaskStepMethWrapper", Kind::Wakeup),
    ("greenlet.greenlet", Kind::Greenlet),
    ("frame", Kind::Frame),
    ("str", Kind::Str),
    ("int", Kind::Int),
];

/// A type of the target.
#[derive(Debug, PartialEq, Eq)]
pub struct Type {
    pub name: String,
    pub kind: Kind,
    at: u64,
    flags: u64,
    base: Option<u64>,
}

/// Types that were read before, each with the reading in which it was compared with memory the last time: another type may have
/// taken its place.
#[derive(Default)]
pub struct Types {
    known: FxHashMap<u64, (Rc<Type>, u64)>,
    readings: u64,
}

/// Reads objects of one process.
pub struct Objects<'a> {
    pub memory: &'a dyn Memory,
    /// Where types are read.
    of_types: &'a dyn Memory,
    pub layout: &'a Layout,
    pub offsets: &'a ObjectLayout,
    pub tasks: &'a TaskLayout,
    types: Rc<RefCell<Types>>,
    reading: u64,
}

impl<'a> Objects<'a> {
    /// `types` may be known already.
    pub fn new(
        memory: &'a dyn Memory,
        layout: &'a Layout,
        offsets: &'a ObjectLayout,
        tasks: &'a TaskLayout,
        types: Rc<RefCell<Types>>,
    ) -> Objects<'a> {
        let reading = {
            let mut types = types.borrow_mut();
            types.readings += 1;
            types.readings
        };
        Objects {
            memory,
            of_types: memory,
            layout,
            offsets,
            tasks,
            types,
            reading,
        }
    }

    /// Reads objects from `memory`, but their types from where these read them.
    pub fn with_memory<'b>(&'b self, memory: &'b dyn Memory) -> Objects<'b> {
        Objects {
            memory,
            types: self.types.clone(),
            ..*self
        }
    }

    pub fn word(&self, object: u64, offset: u16) -> Option<u64> {
        self.memory.u64(object.checked_add(offset.into())?)
    }

    /// A word that is not null.
    pub fn pointer(&self, object: u64, offset: u16) -> Option<u64> {
        self.word(object, offset).filter(|to| *to != 0)
    }

    pub fn byte(&self, object: u64, offset: u16) -> Option<u8> {
        let mut byte = [0];
        let read = self.memory.read(object.checked_add(offset.into())?, &mut byte);
        read.then_some(byte[0])
    }

    pub fn text(&self, object: u64) -> Option<String> {
        strings::read_str(self.memory, self.layout, object)
    }

    /// The first word after the header: what a cell contains, a weak reference refers to, a method runs.
    pub fn first(&self, object: u64) -> Option<u64> {
        self.pointer(object, self.tasks.head)
    }

    pub fn second(&self, object: u64) -> Option<u64> {
        self.pointer(object, self.tasks.head + 8)
    }

    /// The type of an object. `None` if this cannot be an object.
    pub fn type_of(&self, object: u64) -> Option<Rc<Type>> {
        object.is_multiple_of(8).then_some(())?;
        let at = self.pointer(object, self.offsets.ob_type)?;
        let mut types = self.types.borrow_mut();
        if let Some((known, reading)) = types.known.get_mut(&at)
            && (*reading == self.reading || self.is_unchanged(known))
        {
            *reading = self.reading;
            return Some(known.clone());
        }
        let new = Rc::new(self.read_type(at)?);
        if types.known.len() >= MAX_TYPES {
            types.known.clear();
        }
        types.known.insert(at, (new.clone(), self.reading));
        Some(new)
    }

    fn read_type(&self, at: u64) -> Option<Type> {
        Some(Type {
            name: self.type_name(at)?,
            kind: self.kind_of_type(at),
            at,
            flags: self.of_type(at, self.offsets.type_flags)?,
            base: self.type_base(at),
        })
    }

    /// Whether there is still this type. Its bases live as long as it does.
    fn is_unchanged(&self, known: &Type) -> bool {
        self.of_type(known.at, self.offsets.type_flags) == Some(known.flags)
            && self.type_base(known.at) == known.base
            && self.type_name(known.at).as_deref() == Some(&known.name)
    }

    /// A word of a type.
    fn of_type(&self, at: u64, offset: u16) -> Option<u64> {
        self.of_types.u64(at.checked_add(offset.into())?)
    }

    /// `tp_base`
    fn type_base(&self, at: u64) -> Option<u64> {
        self.of_type(at, self.tasks.head + 240)
    }

    pub fn kind(&self, object: u64) -> Option<Kind> {
        Some(self.type_of(object)?.kind)
    }

    /// Size of an object, without what varies among those of its type (`tp_basicsize`); at most 4096 bytes.
    pub fn size_of(&self, object: u64) -> Option<u16> {
        let size = self.word(self.type_of(object)?.at, self.tasks.head + 16)?;
        Some(size.min(4096) as u16)
    }

    fn kind_of_type(&self, at: u64) -> Kind {
        let mut at = Some(at);
        for _ in 0..MAX_BASES {
            let Some(name) = at.and_then(|at| self.type_name(at)) else {
                break;
            };
            if let Some((_, kind)) = KINDS.iter().find(|(known, _)| *known == name) {
                return *kind;
            }
            at = at.and_then(|at| self.type_base(at)).filter(|base| *base != 0);
        }
        Kind::Other
    }

    fn type_name(&self, at: u64) -> Option<String> {
        let name = self.of_type(at, self.offsets.type_name).filter(|name| *name != 0)?;
        let mut raw = [0; MAX_TYPE];
        // A name may end right before an unmapped page.
        let room = (4096 - (name % 4096) as usize).min(MAX_TYPE);
        self.of_types.read(name, &mut raw[..room]).then_some(())?;
        let end = raw.iter().position(|c| *c == 0).unwrap_or(MAX_TYPE);
        Some(String::from_utf8_lossy(&raw[..end]).into_owned())
    }

    /// The value of a small `int` that is not negative.
    pub fn int(&self, object: u64) -> Option<u64> {
        let tag = self.word(object, self.tasks.head)?;
        let digits = if self.offsets.tagged_int { tag >> 3 } else { tag };
        let digit = |i: u64| {
            let at = object.checked_add(u64::from(self.tasks.head) + 8 + 4 * i)?;
            Some(u64::from(self.memory.u32(at)? & 0x3fff_ffff))
        };
        match digits {
            0 => Some(0),
            1 => digit(0),
            2 => Some(digit(0)? | digit(1)? << 30),
            _ => None,
        }
    }

    /// Items of a `tuple`, at most [`MAX_ITEMS`].
    pub fn tuple(&self, object: u64) -> Option<Vec<u64>> {
        let n = self.word(object, self.offsets.body)?;
        self.words(object.checked_add(self.offsets.tuple_items.into())?, n.min(MAX_ITEMS))
    }

    /// Items of a `list`, at most [`MAX_ITEMS`].
    pub fn list(&self, object: u64) -> Option<Vec<u64>> {
        let n = self.word(object, self.offsets.body)?;
        self.words(self.word(object, self.offsets.list_items)?, n.min(MAX_ITEMS))
    }

    /// `n` words; the caller bounds their number.
    fn words(&self, at: u64, n: u64) -> Option<Vec<u64>> {
        let mut raw = vec![0; 8 * usize::try_from(n).ok()?];
        self.memory.read(at, &mut raw).then_some(())?;
        let word = |b: &[u8]| b.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        Some(raw.chunks_exact(8).map(word).collect())
    }

    /// Items of a `set`, at most `max`.
    pub fn set(&self, object: u64, max: usize) -> Option<Vec<u64>> {
        let head = self.tasks.head;
        let slots = self
            .word(object, head + 16)?
            .checked_add(1)
            .filter(|n| *n <= MAX_SLOTS)?;
        let table = self.word(object, head + 24)?;
        let entries = self.words(table, 2 * slots)?;
        // Removed items leave an entry whose hash no object has.
        let used = |entry: &[u64]| (entry[0] != 0 && entry[1] != u64::MAX).then_some(entry[0]);
        Some(entries.chunks_exact(2).filter_map(used).take(max).collect())
    }

    /// Keys and values of a `dict`.
    pub fn dict(&self, object: u64) -> Option<Vec<(u64, u64)>> {
        let keys = self.pointer(object, self.offsets.dict_keys)?;
        let entries = self.keys(keys)?;
        let Some(values) = self.pointer(object, self.offsets.dict_values) else {
            return Some(entries.into_iter().filter(|(k, v)| *k != 0 && *v != 0).collect());
        };
        self.with_values(&entries, values.checked_add(self.offsets.values_first.into())?)
    }

    /// Keys with the values that an array has for them.
    fn with_values(&self, entries: &[(u64, u64)], first: u64) -> Option<Vec<(u64, u64)>> {
        let values = self.words(first, entries.len() as u64)?;
        let pairs = entries.iter().zip(values).map(|((key, _), value)| (*key, value));
        Some(pairs.filter(|(k, v)| *k != 0 && *v != 0).collect())
    }

    /// Entries of a keys object (Objects/dict-common.h, v3.7 to v3.10; pycore_dict.h, v3.11 and later).
    fn keys(&self, keys: u64) -> Option<Vec<(u64, u64)>> {
        let (first, count, bare) = if self.offsets.dict_kinds {
            let index = 1u64.checked_shl(self.byte(keys, 9)?.into()).filter(|n| *n < 1 << 32)?;
            let first = keys.checked_add(32)?.checked_add(index)?;
            (first, self.word(keys, 24)?, self.byte(keys, 10)? != 0)
        } else {
            let size = self.word(keys, 8)?;
            let width = match size {
                0..=0xff => 1,
                0x100..=0xffff => 2,
                0x1_0000..=0xffff_ffff => 4,
                _ => 8,
            };
            let first = keys.checked_add(40)?.checked_add(size.checked_mul(width)?)?;
            (first, self.word(keys, 32)?, false)
        };
        (count <= MAX_SLOTS).then_some(())?;
        let (width, key) = if bare { (2, 0) } else { (3, 1) };
        let words = self.words(first, count * width)?;
        let entry = |e: &[u64]| (e[key], e[key + 1]);
        Some(words.chunks_exact(width as usize).map(entry).collect())
    }

    /// The value of a string key.
    pub fn item(&self, dict: u64, name: &str) -> Option<u64> {
        self.find(&self.dict(dict)?, name)
    }

    fn find(&self, items: &[(u64, u64)], name: &str) -> Option<u64> {
        let is_meant = |key: u64| {
            self.word(key, self.layout.str_length) == Some(name.len() as u64)
                && self.kind(key) == Some(Kind::Str)
                && self.text(key).as_deref() == Some(name)
        };
        items.iter().find(|(key, _)| is_meant(*key)).map(|(_, value)| *value)
    }

    /// An attribute of an instance.
    pub fn attribute(&self, object: u64, name: &str) -> Option<u64> {
        self.find(&self.attributes(object)?, name)
    }

    /// The attributes of an instance, by their names. (Layouts: `_PyObject_GetDictPtr` and its relatives,
    /// Objects/object.c and pycore_object.h.)
    fn attributes(&self, object: u64) -> Option<Vec<(u64, u64)>> {
        let kind = self.type_of(object)?;
        let offsets = self.offsets;
        let before = |n: u16| self.memory.u64(object.checked_sub(n.into())?);
        let inline = |values: u64| {
            let keys = self.keys(self.pointer(kind.at, offsets.type_keys)?)?;
            self.with_values(&keys, values)
        };
        match offsets.instance_dict.filter(|_| kind.flags & MANAGED_DICT != 0) {
            None => {
                // The dictionary is created with the first attribute.
                let at = self.word(kind.at, offsets.type_dictoffset);
                let at = at.filter(|at| (1..4096).contains(at))?;
                self.dict(self.pointer(object, at as u16)?)
            }
            Some(InstanceDict::ValuesAndDict { values, dict }) => match before(values)? {
                0 => self.dict(before(dict)?),
                values => inline(values),
            },
            Some(InstanceDict::ValuesOrDict(at)) => match before(at)? {
                tagged if tagged & 1 == 1 => inline(tagged.checked_add(1)?),
                dict => self.dict(dict),
            },
            Some(InstanceDict::DictOrInline(at)) => match before(at)? {
                0 if kind.flags & INLINE_VALUES != 0 => {
                    let size = self.word(kind.at, offsets.type_basicsize);
                    let end = object.checked_add(size.filter(|size| *size < 1 << 16)?)?;
                    inline(end.checked_add(offsets.values_first.into())?)
                }
                dict => self.dict(dict),
            },
        }
    }

    /// An attribute of an instance of a class with `__slots__`: its type lists them as members (`PyMemberDef`,
    /// Include/structmember.h, later Include/descrobject.h: name, type, offset, flags, documentation).
    pub fn member(&self, object: u64, name: &str) -> Option<u64> {
        self.pointer(object, self.member_offset(object, name)?)
    }

    /// Where an instance has such an attribute.
    pub fn member_offset(&self, object: u64, name: &str) -> Option<u16> {
        let mut at = Some(self.type_of(object)?.at);
        for _ in 0..MAX_BASES {
            let members = self.pointer(at?, self.tasks.head + 224); // `tp_members`
            for n in 0..MAX_ITEMS {
                let Some(member) = members.and_then(|first| first.checked_add(40 * n)) else {
                    break;
                };
                let Some(found) = self.pointer(member, 0) else { break };
                if self.is_text(found, name) {
                    let offset = self.word(member, 16).filter(|offset| *offset < 4096)?;
                    return Some(offset as u16);
                }
            }
            at = self.pointer(at?, self.tasks.head + 240); // `tp_base`
        }
        None
    }

    /// Is there this text, with a zero at its end?
    fn is_text(&self, at: u64, text: &str) -> bool {
        let mut raw = [0; MAX_TYPE];
        let Some(raw) = raw.get_mut(..text.len() + 1) else {
            return false;
        };
        self.memory.read(at, raw)
            && raw
                .split_last()
                .is_some_and(|(end, raw)| *end == 0 && raw == text.as_bytes())
    }

    /// The name of a function, or of the function of a bound method.
    pub fn function_name(&self, object: u64) -> Option<String> {
        let function = match self.kind(object)? {
            Kind::Function => object,
            Kind::Method => self.first(object)?,
            _ => return None,
        };
        self.text(self.word(function, self.tasks.function_name)?)
    }

    /// What the cells of a function's closure contain.
    pub fn closure(&self, function: u64) -> Vec<u64> {
        let cells = self
            .pointer(function, self.tasks.closure)
            .and_then(|cells| self.tuple(cells));
        let contents = cells.unwrap_or_default().into_iter();
        contents
            .filter(|cell| self.kind(*cell) == Some(Kind::Cell))
            .filter_map(|cell| self.first(cell))
            .collect()
    }
}

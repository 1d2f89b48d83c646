//! Code objects, copied when first seen: they can be freed, and their addresses reused.

use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{line_table, strings};
use crate::cpython_layout::{Layout, LineTable};
use crate::event::{CodeCopy, Pid};
use crate::frame::CodeId;
use crate::process::memory::Memory;
use crate::truncation::Truncation;

/// Contents of a code object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    pub name: String,
    /// Empty before 3.11.
    pub qualname: String,
    pub filename: String,
    pub first_line: u32,
    line_kind: LineTable,
    /// `None`: it could not be read, so lines are unknown.
    line_table: Option<Vec<u8>>,
    /// Byte offset of the first instruction after which the frame counts as started (3.11+), else 0.
    pub first_traceable: i32,
}

impl Code {
    /// What takes the place of one that was dropped.
    fn empty() -> Code {
        Code {
            name: String::new(),
            qualname: String::new(),
            filename: String::new(),
            first_line: 0,
            line_kind: LineTable::Locations,
            line_table: None,
            first_traceable: 0,
        }
    }

    /// Bytes that it takes.
    fn bytes(&self) -> usize {
        size_of::<Code>() + self.text_bytes() + self.line_table.as_ref().map_or(0, Vec::len)
    }

    /// Total length of its names, bytes.
    pub fn text_bytes(&self) -> usize {
        self.name.len() + self.qualname.len() + self.filename.len()
    }

    /// The same when written in JSON, at most: a control byte takes six.
    pub fn written_bytes(&self) -> usize {
        let names = [&self.name, &self.qualname, &self.filename];
        let escaped = |text: &str| text.bytes().filter(u8::is_ascii_control).count();
        self.text_bytes() + names.map(|name| 5 * escaped(name)).iter().sum::<usize>()
    }

    /// Line of the instruction at a byte offset; `None` where the line table has none, or could not be read.
    pub fn line(&self, offset: i32) -> Option<u32> {
        line_table::line(self.line_kind, self.line_table.as_deref()?, self.first_line, offset)
    }
}

/// Maximum size of the stored names and line tables, bytes: large programs have some megabytes of them.
const MAX_BYTES: usize = 48 << 20;
/// Maximum number of known addresses of code objects, over all processes.
const MAX_KNOWN: usize = 1 << 19;
/// Part of both that one process of many may have.
const SHARE: usize = 4;
/// Periods after which a code object without samples is dropped; one, if half of the table is used.
const UNUSED_PERIODS: u32 = 60;

/// All code objects seen, in all processes, each stored once.
pub struct CodeTable {
    codes: Vec<Rc<Code>>,
    by_code: FxHashMap<Rc<Code>, CodeId>,
    /// The period in which each was last on a stack.
    last_used: Vec<u32>,
    period: u32,
    /// Numbers that are not in use, all of them of one empty object.
    free: Vec<CodeId>,
    empty: Rc<Code>,
    /// What is known of each process.
    known: FxHashMap<Pid, KnownCodes>,
    /// Part of the table that one process may have: one in so many.
    share: usize,
    /// The most recently seen of these by address: most frames of a stack are found here.
    recent: RecentCodes,
    /// Forked child -> its parent: what was at an address in the parent is there in the child, too.
    parents: FxHashMap<Pid, Pid>,
    /// Bytes in `codes`.
    bytes: usize,
    /// Entries of `known`, over all processes.
    addresses: usize,
    generation: u64,
}

/// Code objects of one process.
#[derive(Default)]
struct KnownCodes {
    /// By address and fingerprint.
    at: FxHashMap<(u64, u32), CodeId>,
    /// Bytes of those that it was the first to have.
    bytes: usize,
}

impl Default for CodeTable {
    fn default() -> CodeTable {
        CodeTable {
            codes: Vec::new(),
            by_code: FxHashMap::default(),
            last_used: Vec::new(),
            period: 0,
            free: Vec::new(),
            empty: Rc::new(Code::empty()),
            known: FxHashMap::default(),
            share: 1,
            recent: RecentCodes::default(),
            parents: FxHashMap::default(),
            bytes: 0,
            addresses: 0,
            generation: 0,
        }
    }
}

impl CodeTable {
    /// A table of which each process may have a part only.
    pub fn of_many_processes() -> CodeTable {
        CodeTable {
            share: SHARE,
            ..CodeTable::default()
        }
    }

    /// Number of code objects, and of their known addresses.
    pub fn size(&self) -> (usize, usize) {
        (self.codes.len() - self.free.len(), self.addresses)
    }

    /// Whether one process may have no more, or the table is full.
    fn is_full(&self, pid: Pid) -> bool {
        let own = self
            .known
            .get(&pid)
            .map_or((0, 0), |known| (known.at.len(), known.bytes));
        self.bytes >= MAX_BYTES
            || self.addresses >= MAX_KNOWN
            || own.0 >= MAX_KNOWN / self.share
            || own.1 >= MAX_BYTES / self.share
    }

    /// Ends a period in which stacks had the `used` code objects. Drops those that no stack has had for long; their numbers are
    /// used again. Returns those.
    pub fn end_period(&mut self, used: impl Iterator<Item = CodeId>) -> FxHashSet<CodeId> {
        self.period = self.period.wrapping_add(1);
        for id in used {
            if let Some(last) = self.last_used.get_mut(id.0 as usize) {
                *last = self.period;
            }
        }
        let is_half = |share: usize, (addresses, bytes): (usize, usize)| {
            addresses > MAX_KNOWN / share / 2 || bytes > MAX_BYTES / share / 2
        };
        let of_one = |known: &KnownCodes| is_half(self.share, (known.at.len(), known.bytes));
        let is_tight = is_half(1, (self.addresses, self.bytes)) || self.known.values().any(of_one);
        let most = if is_tight { 0 } else { UNUSED_PERIODS };
        let is_old = |id: &CodeId| {
            let last = self.last_used.get(id.0 as usize);
            last.is_some_and(|last| self.period.wrapping_sub(*last) > most)
        };
        let dropped: FxHashSet<CodeId> = self.by_code.values().copied().filter(is_old).collect();
        if !dropped.is_empty() {
            self.remove(&dropped);
        }
        dropped
    }

    fn remove(&mut self, ids: &FxHashSet<CodeId>) {
        self.by_code.retain(|_, id| !ids.contains(id));
        for id in ids {
            if let Some(code) = self.codes.get_mut(id.0 as usize) {
                self.bytes -= code.bytes();
                *code = self.empty.clone();
            }
        }
        self.free.extend(ids);
        for known in self.known.values_mut() {
            let before = known.at.len();
            known.at.retain(|_, id| !ids.contains(id));
            // Which of them are gone is not known: as large a part as of the addresses.
            known.bytes = (known.bytes as u64 * known.at.len() as u64 / before.max(1) as u64) as usize;
        }
        self.addresses = self.known.values().map(|known| known.at.len()).sum();
        self.recent = RecentCodes::default();
        self.generation += 1;
    }

    #[inline]
    pub fn get(&self, id: CodeId) -> &Code {
        &self.codes[id.0 as usize]
    }

    /// Changes when code objects seen at an address may be outdated.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The code object at `avma`, read now if it is new.
    ///
    /// # Errors
    /// `CodeObjectFreed` if it is not, or no longer, the one the sample saw; `CodeObjectLimit` if there is no room for another
    /// one.
    #[inline]
    pub fn observe(
        &mut self,
        pid: Pid,
        memory: &dyn Memory,
        layout: &Layout,
        avma: u64,
        print: u32,
    ) -> Result<CodeId, Truncation> {
        if let Some(id) = self.recent.get(pid, avma, print) {
            return Ok(id);
        }
        let id = self.find(pid, memory, layout, avma, print)?;
        self.recent.put(pid, avma, print, id);
        Ok(id)
    }

    fn find(
        &mut self,
        pid: Pid,
        memory: &dyn Memory,
        layout: &Layout,
        avma: u64,
        print: u32,
    ) -> Result<CodeId, Truncation> {
        let key = (avma, print);
        if let Some(known) = self.known.get(&pid).and_then(|k| k.at.get(&key)) {
            return Ok(*known);
        }
        if self.is_full(pid) {
            return Err(Truncation::CodeObjectLimit);
        }
        // The child's own memory first: after the fork, parent and child may have put different objects at one address.
        let id = match read(memory, layout, avma, print) {
            Some(code) => self.intern(pid, code),
            None => {
                let parent = self.parents.get(&pid).filter(|_| print != 0);
                let inherited = parent.and_then(|parent| self.known.get(parent)?.at.get(&key));
                *inherited.ok_or(Truncation::CodeObjectFreed)?
            }
        };
        self.insert(pid, key, id);
        Ok(id)
    }

    fn insert(&mut self, pid: Pid, key: (u64, u32), id: CodeId) {
        self.known.entry(pid).or_default().at.insert(key, id);
        self.addresses += 1;
    }

    /// Adds a code object that was copied when it was sampled. `memory` is read for what the copy does not contain.
    pub fn update_process(&mut self, pid: Pid, memory: &dyn Memory, layout: &Layout, copy: &CodeCopy) {
        let key = (copy.code, copy.fingerprint);
        let is_known = self.known.get(&pid).is_some_and(|k| k.at.contains_key(&key));
        if is_known || self.is_full(pid) {
            return;
        }
        // The fingerprint was computed from the same object that was copied while a thread ran it.
        let Some(mut code) = read_once(&CopiedCode(copy), layout, copy.code, 0) else {
            return;
        };
        if code.line_table.is_none()
            && let Some(complete) = read(memory, layout, copy.code, copy.fingerprint)
        {
            code = complete;
        }
        let id = self.intern(pid, code);
        self.insert(pid, key, id);
    }

    /// The number of a code object that a process has.
    fn intern(&mut self, pid: Pid, code: Code) -> CodeId {
        if let Some(id) = self.by_code.get(&code) {
            return *id;
        }
        self.bytes += code.bytes();
        self.known.entry(pid).or_default().bytes += code.bytes();
        let id = self.free.pop().unwrap_or(CodeId(self.codes.len() as u32));
        let (at, code) = (id.0 as usize, Rc::new(code));
        if at == self.codes.len() {
            self.codes.push(code.clone());
            self.last_used.push(self.period);
        } else {
            (self.codes[at], self.last_used[at]) = (code.clone(), self.period);
        }
        self.by_code.insert(code, id);
        id
    }

    /// A process was forked: it has a copy of the parent's memory.
    pub fn on_fork(&mut self, child: Pid, parent: Pid) {
        self.remove_process(child); // its number may have been reused
        self.parents.insert(child, parent);
    }

    /// A process has ended or executes another program: its addresses are invalid.
    pub fn remove_process(&mut self, pid: Pid) {
        self.addresses -= self.known.remove(&pid).map_or(0, |k| k.at.len());
        self.parents.remove(&pid);
        self.recent = RecentCodes::default();
        self.generation += 1;
    }
}

/// A copied code object as memory.
struct CopiedCode<'a>(&'a CodeCopy);

impl Memory for CopiedCode<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let found = self.0.parts.iter().find_map(|part| {
            let at = usize::try_from(avma.checked_sub(part.avma)?).ok()?;
            part.bytes.get(at..at.checked_add(buf.len())?)
        });
        found.is_some_and(|bytes| {
            buf.copy_from_slice(bytes);
            true
        })
    }
}

/// A direct-mapped cache of code objects, at most 100 KB, so that a lookup does not go to main memory.
struct RecentCodes(Box<[(u64, u32, Pid, CodeId)]>);

impl RecentCodes {
    const BITS: u32 = 12;
    /// Marks an empty entry; a malformed sample may contain this number all the same.
    const NO_PROCESS: Pid = Pid::MAX;

    #[inline]
    fn slot(avma: u64) -> usize {
        ((avma >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - Self::BITS)) as usize
    }

    #[inline]
    fn get(&self, pid: Pid, avma: u64, print: u32) -> Option<CodeId> {
        let (a, p, of, id) = self.0[Self::slot(avma)];
        ((a, p, of) == (avma, print, pid) && pid != Self::NO_PROCESS).then_some(id)
    }

    #[inline]
    fn put(&mut self, pid: Pid, avma: u64, print: u32, id: CodeId) {
        self.0[Self::slot(avma)] = (avma, print, pid, id);
    }
}

impl Default for RecentCodes {
    fn default() -> RecentCodes {
        RecentCodes(vec![(0, 0, Self::NO_PROCESS, CodeId(0)); 1 << Self::BITS].into())
    }
}

/// Same hash as in code_objects.h of the BPF program: addresses of name and file name, first line, and the object's
/// version number. Without a version number: length and first letters of the name, and for names shared by many objects
/// (`<module>`) the end of the file name. `None` if it cannot be read.
fn fingerprint(
    memory: &dyn Memory,
    layout: &Layout,
    version: u32,
    (name, filename): (u64, u64),
    first_line: u32,
) -> Option<u32> {
    const A: u64 = 0x9e37_79b9_7f4a_7c15;
    const B: u64 = 0xc2b2_ae3d_27d4_eb4f;
    let at = |text: u64, offset: u64| memory.u64(text.checked_add(offset)?);
    let (len, data) = (u64::from(layout.str_length), u64::from(layout.str_ascii_data));
    let mut hash = name.wrapping_mul(A) ^ filename.wrapping_mul(B);
    if version != 0 {
        hash = hash.wrapping_add(version.into()).wrapping_mul(A);
        return Some((hash.wrapping_add(first_line.into()) >> 32) as u32 | 1);
    }
    let letters = at(name, data)?;
    hash = hash.wrapping_add(at(name, len)?).wrapping_mul(A);
    hash = (hash ^ letters).wrapping_mul(B);
    hash = (hash ^ at(name, data + 8)?).wrapping_mul(A);
    if letters as u8 == b'<' {
        let length = at(filename, len)?;
        let end = if (16..=4096).contains(&length) { length - 16 } else { 0 };
        hash = hash.wrapping_add(length);
        hash = (hash ^ at(filename, data + end)?).wrapping_mul(B);
        hash = (hash ^ at(filename, data + end + 8)?).wrapping_mul(A);
    }
    Some((hash.wrapping_add(first_line.into()) >> 32) as u32 | 1)
}

/// Fingerprint of a code object. Its fields lie close together: one read.
pub(super) fn fingerprint_of(memory: &dyn Memory, l: &Layout, code: u64) -> Option<u32> {
    let mut raw = [0; 256];
    let first = l.code_firstlineno.min(l.code_name).min(l.code_filename);
    let end = l
        .code_firstlineno
        .max(l.code_name)
        .max(l.code_filename)
        .checked_add(8)?;
    let raw = raw.get_mut(..usize::from(end - first))?;
    let read = memory.read(code.checked_add(first.into())?, raw);
    read.then_some(())?;
    let field = |offset: u16| {
        let bytes = raw.get(usize::from(offset.checked_sub(first)?)..)?.get(..8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    let line = field(l.code_firstlineno)? as u32;
    let version = if l.code_version == crate::cpython_layout::ABSENT {
        0
    } else {
        field(l.code_version)? as u32
    };
    let names = (field(l.code_name)?, field(l.code_filename)?);
    fingerprint(memory, l, version, names, line)
}

/// Whether this looks like a code object: it has a name, a file name and a line table.
pub fn looks_like_code_object(memory: &dyn Memory, layout: &Layout, avma: u64) -> bool {
    let named = |text: &str| !text.is_empty() && !text.contains(char::is_control);
    read_once(memory, layout, avma, 0).is_some_and(|c| {
        named(&c.name) && named(&c.qualname) && named(&c.filename) && c.line_table.is_some_and(|t| !t.is_empty())
    })
}

fn read(memory: &dyn Memory, layout: &Layout, avma: u64, print: u32) -> Option<Code> {
    let code = read_once(memory, layout, avma, print)?;
    (read_once(memory, layout, avma, print)? == code).then_some(code)
}

fn read_once(memory: &dyn Memory, layout: &Layout, avma: u64, print: u32) -> Option<Code> {
    let at = |offset: u16| avma.checked_add(offset.into());
    let name = memory.u64(at(layout.code_name)?)?;
    let filename = memory.u64(at(layout.code_filename)?)?;
    let first_line = memory.u32(at(layout.code_firstlineno)?)?;
    let has = |offset: u16| offset != crate::cpython_layout::ABSENT;
    let version = if has(layout.code_version) {
        memory.u32(at(layout.code_version)?)?
    } else {
        0
    };
    if print != 0 && fingerprint(memory, layout, version, (name, filename), first_line) != Some(print) {
        return None;
    }
    let qualname = if has(layout.code_qualname) {
        strings::read_str(memory, layout, memory.u64(at(layout.code_qualname)?)?)?
    } else {
        String::new()
    };
    let table = memory.u64(at(layout.code_linetable)?)?;
    let first_traceable = if has(layout.code_firsttraceable) {
        memory.u32(at(layout.code_firsttraceable)?)?.min(1 << 20) as i32 * 2
    } else {
        0
    };
    Some(Code {
        name: strings::read_str(memory, layout, name)?,
        qualname,
        filename: strings::read_str(memory, layout, filename)?,
        first_line,
        line_kind: layout.line_table,
        line_table: strings::read_bytes(memory, layout, table),
        first_traceable,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpython::versions;
    use crate::event::Part;
    use crate::process::memory::NoMemory;

    /// A code object of 3.11, in parts as a backend copies them: the object, its name (`f`), its file (`/x.py`) and its
    /// line table.
    fn copied(layout: &Layout, with_lines: bool) -> CodeCopy {
        let text = |text: &str| {
            let mut raw = vec![0; usize::from(layout.str_ascii_data)];
            put(&mut raw, layout.str_length, &(text.len() as u64).to_le_bytes());
            put(
                &mut raw,
                layout.str_state,
                &(0b11001u32 << layout.str_kind_bit).to_le_bytes(),
            );
            raw.extend(text.as_bytes());
            raw
        };
        fn put(raw: &mut [u8], at: u16, bytes: &[u8]) {
            raw[usize::from(at)..][..bytes.len()].copy_from_slice(bytes);
        }
        let mut object = vec![0; usize::from(layout.code_copied())];
        for (at, to) in [
            (layout.code_name, 0x2000u64),
            (layout.code_qualname, 0x2000),
            (layout.code_filename, 0x3000),
            (layout.code_linetable, 0x4000),
        ] {
            put(&mut object, at, &to.to_le_bytes());
        }
        put(&mut object, layout.code_firstlineno, &7u32.to_le_bytes());
        let mut lines = vec![0; usize::from(layout.bytes_data)];
        put(&mut lines, layout.bytes_size, &2u64.to_le_bytes());
        lines.extend([0xe8, 2]); // a code unit on the next line (Objects/locations.md)
        let part = |avma, bytes| Part { avma, bytes };
        let mut parts = vec![
            part(0x1000, object),
            part(0x2000, text("f")),
            part(0x3000, text("/x.py")),
        ];
        parts.extend(with_lines.then(|| part(0x4000, lines)));
        CodeCopy {
            code: 0x1000,
            fingerprint: 5,
            parts,
        }
    }

    #[test]
    fn lines_of_large_tables_are_right_or_unknown() {
        let layout = &versions::find((3, 11, 0)).expect("a row").layout;
        // Each code unit is on a line of its own.
        for (size, line) in [
            (2_000, Some(1007)),
            (3 << 20, Some(7 + (3 << 19))),
            ((16 << 20) + 2, None),
        ] {
            let mut object = copied(layout, false);
            let head = [&[0; 16][..], &(size as u64).to_le_bytes(), &[0; 8]].concat();
            object.parts.push(Part {
                avma: 0x4000,
                bytes: [head, [0xe8, 2].repeat(size / 2)].concat(),
            });
            let mut codes = CodeTable::default();
            let id = codes
                .observe(1, &CopiedCode(&object), layout, 0x1000, 0)
                .expect("readable");
            assert_eq!(codes.get(id).line(size as i32 - 2), line, "{size} bytes");
        }
    }

    #[test]
    fn copied_code_objects_are_named_after_they_are_freed() {
        let layout = &versions::find((3, 11, 0)).expect("a row").layout;
        for (with_lines, line) in [(true, Some(8)), (false, None)] {
            let mut codes = CodeTable::default();
            codes.update_process(1, &NoMemory, layout, &copied(layout, with_lines));
            let id = codes.observe(1, &NoMemory, layout, 0x1000, 5).expect("it was copied");
            let code = codes.get(id);
            assert_eq!((&*code.name, &*code.qualname, &*code.filename), ("f", "f", "/x.py"));
            assert_eq!(code.line(0), line, "{with_lines}");
            // Another object at this address, or the same address in another process, is not confused with it.
            assert_eq!(
                codes.observe(1, &NoMemory, layout, 0x1000, 7),
                Err(Truncation::CodeObjectFreed)
            );
            assert_eq!(
                codes.observe(2, &NoMemory, layout, 0x1000, 5),
                Err(Truncation::CodeObjectFreed)
            );
        }
        // A copy without a name is useless.
        let mut copy = copied(layout, true);
        copy.parts.remove(1);
        let mut codes = CodeTable::default();
        codes.update_process(1, &NoMemory, layout, &copy);
        assert_eq!(
            codes.observe(1, &NoMemory, layout, 0x1000, 5),
            Err(Truncation::CodeObjectFreed)
        );
    }

    /// A code object of its own for each number.
    fn numbered(layout: &Layout, number: u64) -> CodeCopy {
        let mut copy = copied(layout, true);
        copy.parts[0].bytes[usize::from(layout.code_firstlineno)..][..4]
            .copy_from_slice(&(number as u32).to_le_bytes());
        copy.fingerprint = number as u32 + 1;
        copy
    }

    #[test]
    fn what_is_on_no_stack_for_long_is_dropped() {
        let layout = &versions::find((3, 11, 0)).expect("a row").layout;
        let mut codes = CodeTable::of_many_processes();
        let add = |codes: &mut CodeTable, pid, number| {
            codes.update_process(pid, &NoMemory, layout, &numbered(layout, number));
            codes.observe(pid, &NoMemory, layout, 0x1000, number as u32 + 1)
        };
        let kept = add(&mut codes, 1, 0).expect("there is room");
        let mut most = 0;
        for period in 1..5 * u64::from(UNUSED_PERIODS) {
            for number in 0..10 {
                add(&mut codes, 2, 10 * period + number).expect("there is room");
            }
            codes.end_period(std::iter::once(kept));
            most = most.max(codes.size().0);
        }
        assert!(most <= 10 * (UNUSED_PERIODS as usize + 2), "{most}");
        assert!(codes.codes.len() <= most + 10, "numbers are used again");
        assert_eq!(codes.size().0, codes.size().1);
        assert_eq!(add(&mut codes, 1, 0), Ok(kept));
        assert_eq!(codes.get(kept).first_line, 0);
        // What was dropped is read again under another number, with its own contents.
        let again = add(&mut codes, 2, 15).expect("there is room");
        assert_eq!(codes.get(again).first_line, 15);
        let bytes: usize = codes.by_code.keys().map(|code| code.bytes()).sum();
        assert_eq!(codes.bytes, bytes);
    }

    #[test]
    fn one_process_of_many_has_a_part_of_the_table() {
        let layout = &versions::find((3, 11, 0)).expect("a row").layout;
        let mut codes = CodeTable::of_many_processes();
        let is_added = |codes: &mut CodeTable, pid, number| {
            codes.update_process(pid, &NoMemory, layout, &numbered(layout, number));
            codes.observe(pid, &NoMemory, layout, 0x1000, number as u32 + 1).is_ok()
        };
        let count = (0..).take_while(|number| is_added(&mut codes, 1, *number)).count();
        let part = codes.bytes as f64 / MAX_BYTES as f64;
        assert!(
            part > 0.24 && part < 0.26 || count == MAX_KNOWN / SHARE,
            "{count} {part}"
        );
        assert!(is_added(&mut codes, 2, 1 << 20), "others have room");
        // They are those that no stack had in this period.
        codes.end_period(std::iter::empty());
        codes.end_period(std::iter::empty());
        assert_eq!(codes.size(), (0, 0));
        assert!(is_added(&mut codes, 1, 0) && codes.bytes < 1000);
    }

    #[test]
    fn unreadable_code_objects_are_reported_as_gone() {
        let layout = &versions::ALL[0].layout;
        for pid in [0, 1, Pid::MAX] {
            for (avma, print) in [(0, 0), (0, 1), (16, 0), (u64::MAX, u32::MAX)] {
                let seen = CodeTable::default().observe(pid, &NoMemory, layout, avma, print);
                assert_eq!(seen, Err(Truncation::CodeObjectFreed), "{pid} {avma:#x} {print}");
            }
        }
    }
}

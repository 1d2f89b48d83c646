//! The code and linkage tables of a process, read from its files or, where there are none, from its memory.

use std::collections::BTreeSet;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::code::MAX_INSTRUCTION;
use super::functions::Functions;
use crate::code_map::CodeMap;
use crate::frame::ModuleId;
use crate::process::AddressSpace;
use crate::process::file_content::Content;
use crate::process::modules::{Module, Modules};
use crate::process::system::System;

/// Bytes read at once.
const BLOCK: u64 = 256;

/// What was read of files, for a tape that is to hold the same. Addresses are those of the file (svma).
#[derive(Clone, Debug, Default)]
pub struct EdgeAccesses {
    /// Code: start and length.
    pub code: BTreeSet<(ModuleId, u64, u64)>,
    /// Addresses whose functions were searched for.
    pub functions: BTreeSet<(ModuleId, u64)>,
}

/// What a judgement reads from.
pub struct Image<'a> {
    pub process: &'a AddressSpace,
    pub modules: &'a Modules,
    pub system: &'a dyn System,
    files: &'a mut FxHashMap<ModuleId, Rc<Functions>>,
    log: Option<&'a mut EdgeAccesses>,
    blocks: FxHashMap<u64, Option<Box<[u8]>>>,
}

/// Bytes, and how many of them are known.
pub type Bytes = ([u8; 64], usize);

impl<'a> Image<'a> {
    pub fn new(
        process: &'a AddressSpace,
        modules: &'a Modules,
        system: &'a dyn System,
        files: &'a mut FxHashMap<ModuleId, Rc<Functions>>,
        log: Option<&'a mut EdgeAccesses>,
    ) -> Image<'a> {
        Image {
            process,
            modules,
            system,
            files,
            log,
            blocks: FxHashMap::default(),
        }
    }

    /// File and svma of code.
    pub fn locate(&self, avma: u64) -> Option<(ModuleId, u64)> {
        let (module, bias) = self.process.find(avma)?;
        let is_there = !matches!(self.modules.get(module).content, Content::Missing);
        is_there.then(|| (module, avma.wrapping_sub(bias)))
    }

    /// At most 64 bytes of code at an address. Those after the first that cannot be read are left out.
    pub fn read(&mut self, avma: u64, length: usize) -> Bytes {
        let (mut bytes, mut known) = ([0; 64], 0);
        while known < length.min(bytes.len()) {
            let Some(at) = avma.checked_add(known as u64) else {
                break;
            };
            let Some(block) = self.block(at / BLOCK * BLOCK) else {
                break;
            };
            let rest = &block[(at % BLOCK) as usize..];
            let n = rest.len().min(length.min(64) - known);
            bytes[known..known + n].copy_from_slice(&rest[..n]);
            known += n;
        }
        (bytes, known)
    }

    /// The instruction at an address, with what follows it.
    pub fn instruction(&mut self, avma: u64) -> Bytes {
        self.read(avma, MAX_INSTRUCTION)
    }

    fn block(&mut self, start: u64) -> Option<&[u8]> {
        if !self.blocks.contains_key(&start) {
            let block = self.read_block(start);
            self.blocks.insert(start, block);
        }
        self.blocks[&start].as_deref()
    }

    fn read_block(&self, start: u64) -> Option<Box<[u8]>> {
        let end = start.checked_add(BLOCK)?;
        let mut bytes = [0; BLOCK as usize];
        // Mappings begin and end at pages.
        let found = match self.locate(start) {
            Some((module, svma)) => read_file(self.modules.get(module), svma, &mut bytes),
            None => {
                let is_code = self.process.is_code(start) && self.process.is_code(end - 1);
                is_code && self.system.read_memory(self.process.pid, start, &mut bytes) == bytes.len()
            }
        };
        found.then(|| bytes.into())
    }

    /// The word at an address, from memory: the dynamic linker has put it there.
    pub fn word(&self, avma: u64) -> Option<u64> {
        let mut word = [0; 8];
        let n = self.system.read_memory(self.process.pid, avma, &mut word);
        (n == word.len()).then(|| u64::from_le_bytes(word))
    }

    /// What is known of the functions around an address of code, with its svma and the load bias.
    pub fn functions(&mut self, avma: u64) -> Option<(Rc<Functions>, u64)> {
        let (module, svma) = self.locate(avma)?;
        let read = || Rc::new(Functions::read(self.modules.get(module)));
        Some((self.files.entry(module).or_insert_with(read).clone(), svma))
    }

    /// Does only the dynamic linker write the word at an address that code at `code` reads?
    pub fn is_linkage_slot(&mut self, code: u64, slot: u64) -> bool {
        self.functions(code)
            .is_some_and(|(functions, svma)| functions.is_linkage_slot(slot.wrapping_sub(code.wrapping_sub(svma))))
    }

    /// Does a function, or a linkage stub, begin at an address?
    pub fn is_entry(&mut self, avma: u64) -> bool {
        self.note_function(avma);
        self.functions(avma)
            .is_some_and(|(functions, svma)| functions.is_entry(svma))
    }

    /// May a function begin at an address, or one byte before it?
    pub fn may_begin(&mut self, avma: u64) -> bool {
        let function = self
            .functions(avma.wrapping_sub(1))
            .and_then(|(f, svma)| Some((f.at(svma)?.start, svma)));
        function.is_none_or(|(start, svma)| start >= svma)
    }

    /// Notes that the function around an address was used.
    pub fn note_function(&mut self, avma: u64) {
        if self.log.is_some()
            && let Some(place) = self.locate(avma)
            && let Some(log) = &mut self.log
        {
            log.functions.insert(place);
        }
    }

    /// Notes that code was used.
    pub fn note(&mut self, avma: u64, length: u64) {
        if self.log.is_some()
            && let Some((module, svma)) = self.locate(avma)
            && let Some(log) = &mut self.log
        {
            log.code.insert((module, svma, length));
        }
    }
}

/// Fills `bytes` with those of a file's code around `svma`, and zeros where it has none. False if it has none at all.
fn read_file(module: &Module, svma: u64, bytes: &mut [u8]) -> bool {
    let end = svma.saturating_add(bytes.len() as u64);
    let mut found = false;
    for s in &module.segments {
        let (from, to) = (s.svma.max(svma), s.svma.saturating_add(s.size).min(end));
        if from >= to {
            continue;
        }
        let part = &mut bytes[(from - svma) as usize..(to - svma) as usize];
        let at = s.offset.saturating_add(from - s.svma);
        found |= module.content.read_at(at, part).is_ok_and(|n| n > 0);
    }
    found
}

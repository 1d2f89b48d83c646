//! Relocation tables of loaded modules: those of this program, and broken ones.

#[path = "../src/elf.rs"]
mod elf;

use std::ffi::CStr;

use elf::{LoadedModule, ModuleSegment};
use libc::Elf64_Phdr;

fn page_size() -> usize {
    4096
}

fn address_of(name: &CStr) -> usize {
    // SAFETY: the name ends with a zero.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) as usize }
}

#[test]
fn definitions_are_those_that_the_loader_finds() {
    for name in [c"malloc", c"free", c"realloc", c"dlopen", c"poll", c"epoll_wait"] {
        let mut first = None;
        elf::for_each_module(|module, _, _| first = first.or_else(|| module.definition(name)));
        assert_eq!(first, Some(address_of(name)), "{name:?}");
    }
    let mut found = false;
    elf::for_each_module(|module, _, _| found |= module.definition(c"no_such_function_anywhere").is_some());
    assert!(!found);
}

#[test]
fn slots_of_this_program_hold_the_functions() {
    let (mut modules, mut slots) = (0, Vec::new());
    elf::for_each_module(|module, _, _| {
        modules += 1;
        assert!(module.relro.start.is_multiple_of(page_size()) && module.relro.end.is_multiple_of(page_size()));
        module.slots(&[c"malloc", c"free"], |slot, which| {
            assert!(module.contains(slot.address, 8));
            // SAFETY: a word in a module's data.
            slots.push((which, slot, unsafe { *(slot.address as *const usize) }));
        });
    });
    assert!(modules >= 2, "{modules}");
    let holds = |which: usize, name| {
        slots
            .iter()
            .any(|(w, _, value)| *w == which && *value == address_of(name))
    };
    assert!(holds(0, c"malloc") && holds(1, c"free"), "{slots:x?}");
}

const WORDS: usize = 512;

/// A module in a buffer: a writable segment, its dynamic section at the start.
struct Image {
    words: Box<[u64; WORDS]>,
}

const DYNAMIC: usize = 0;
const SYMBOLS: usize = 64;
const STRINGS: usize = 128;
const RELA: usize = 160;
const HASH: usize = 200;
const SLOT: usize = 400;

impl Image {
    /// One `JUMP_SLOT` relocation, in the slot at `SLOT`, for the symbol 1, `malloc`.
    fn new() -> Image {
        let mut image = Image {
            words: Box::new([0; WORDS]),
        };
        image.dynamic(&[
            (5, STRINGS * 8),
            (10, 64),
            (6, SYMBOLS * 8),
            (23, RELA * 8),
            (2, 24),
            (20, 7),
            (0x6fff_fef5, HASH * 8),
        ]);
        // st_name 1, in section 0.
        image.words[SYMBOLS + 3] = 1 | (0x12 << 32);
        image.words[STRINGS] = u64::from_le_bytes(*b"\0malloc\0");
        image.words[RELA..RELA + 3].copy_from_slice(&[SLOT as u64 * 8, 1 << 32 | 7, 0]);
        image
    }

    fn dynamic(&mut self, entries: &[(u64, usize)]) {
        for (i, (tag, value)) in entries.iter().chain(&[(0, 0)]).enumerate() {
            self.words[DYNAMIC + 2 * i] = *tag;
            self.words[DYNAMIC + 2 * i + 1] = *value as u64;
        }
    }

    fn base(&self) -> usize {
        self.words.as_ptr() as usize
    }

    fn module(&self) -> Option<LoadedModule> {
        // SAFETY: all zeros is a header of no kind.
        let mut headers: [Elf64_Phdr; 2] = unsafe { std::mem::zeroed() };
        headers[0].p_type = 1;
        headers[0].p_flags = 6;
        headers[0].p_memsz = WORDS as u64 * 8;
        headers[1].p_type = 2;
        headers[1].p_memsz = 64 * 8;
        // SAFETY: the buffer lives, and is where the headers say.
        unsafe { LoadedModule::new(self.base(), &headers, page_size()) }
    }

    fn slots(&self) -> Vec<usize> {
        let mut found = Vec::new();
        if let Some(module) = self.module() {
            module.slots(&[c"malloc"], |slot, _| found.push((slot.address - self.base()) / 8));
            module.definition(c"malloc");
        }
        found
    }
}

#[test]
fn a_made_up_module_has_its_slot() {
    assert_eq!(Image::new().slots(), [SLOT]);
}

#[test]
fn broken_tables_are_passed_over() {
    let broken = |change: &dyn Fn(&mut Image)| {
        let mut image = Image::new();
        change(&mut image);
        image.slots()
    };
    let none: &[usize] = &[];
    // A table that is longer than the module, elsewhere, or not aligned.
    assert_eq!(broken(&|i| i.words[9] = 1 << 40), none);
    assert_eq!(broken(&|i| i.words[7] = 1 << 46), none);
    assert_eq!(broken(&|i| i.words[7] += 1), none);
    assert_eq!(broken(&|i| i.words[7] = u64::MAX - 8), none);
    // A symbol, a name or a slot outside of it.
    assert_eq!(broken(&|i| i.words[RELA + 1] = 0xffff_ffff << 32 | 7), none);
    assert_eq!(broken(&|i| i.words[SYMBOLS + 3] = 0xffff_ffff), none);
    assert_eq!(broken(&|i| i.words[RELA] = 1 << 40), none);
    assert_eq!(broken(&|i| i.words[RELA] = u64::MAX), none);
    assert_eq!(broken(&|i| i.words[RELA] += 4), none);
    // No strings; a name without an end.
    assert_eq!(broken(&|i| i.words[3] = 0), none);
    assert_eq!(broken(&|i| i.words[STRINGS..RELA].fill(u64::MAX)), none);
    // A hash table that leads out of the module, or in a circle.
    assert_eq!(broken(&|i| i.words[HASH] = 0xffff_ffff_ffff_ffff), [SLOT]);
    let endless = |i: &mut Image| {
        i.words[HASH..WORDS].fill(0);
        i.words[HASH] = 1 | 1 << 32;
        i.words[HASH + 2] = 1;
        i.words[HASH + 3..SLOT].fill(0x0d39_ad3c_0d39_ad3c);
    };
    assert_eq!(broken(&endless), [SLOT]);
    // Without an end of the dynamic section.
    assert_eq!(broken(&|i| i.words[..SYMBOLS].fill(u64::MAX)), none);
}

#[test]
fn segments_bound_what_is_read() {
    let image = Image::new();
    let module = image.module().expect("a module");
    let end = image.base() + WORDS * 8;
    assert!(module.contains(end - 8, 8) && !module.contains(end - 7, 8) && !module.contains(usize::MAX, 2));
    assert!(
        !module.has_code(image.base()),
        "{:?}",
        module.segments.first().map(|s: &ModuleSegment| s.is_executable)
    );
}

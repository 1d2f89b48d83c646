//! Probes (USDT) in files: the notes of `.note.stapsdt` that name them, and where their arguments are.
//!
//! A note has three addresses (of the probe, of `.stapsdt.base` when the file was linked, of the semaphore), and three
//! strings that end with a zero: the provider, the name, and the arguments as the compiler has placed them, in the syntax of the
//! CPU's assembler.

use object::elf;
use object::read::elf::ProgramHeader;
use object::{Object, ObjectSection};

use super::modules::Module;
use crate::bytes::{u32_at, u64_at};
use crate::event::probes::{ALLOCATION_PROVIDER, ArgumentPlace, MAX_ARGUMENTS, MAX_PROBES, ProbeArgument, ProbeEvent};

const SECTION: &str = ".note.stapsdt";
const BASE: &str = ".stapsdt.base";
const OWNER: &[u8] = b"stapsdt\0";
const KIND: u32 = 3;
/// Longest text of one argument, bytes.
const MAX_TEXT: usize = 64;
/// Bits that an index is shifted by at most: to the size of an argument.
const MAX_SHIFT: u8 = 3;
/// Word of the stack pointer in `struct pt_regs` of aarch64.
const SP_AARCH64: u8 = 31;

/// The syntax of arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assembler {
    X86_64,
    Aarch64,
}

impl Assembler {
    /// That of this machine.
    pub const OURS: Assembler = if cfg!(target_arch = "aarch64") {
        Assembler::Aarch64
    } else {
        Assembler::X86_64
    };
}

/// A note. Addresses are those of the time when the file was linked; the semaphore's is 0 where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeNote<'a> {
    pub address: u64,
    pub base: u64,
    pub semaphore: u64,
    pub provider: &'a [u8],
    pub name: &'a [u8],
    pub arguments: &'a [u8],
}

/// A probe for allocations in a file. `svma` is its address, offsets are those in the file; that of the semaphore is 0 where
/// there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileProbe {
    pub event: ProbeEvent,
    pub svma: u64,
    pub offset: u64,
    pub semaphore: u64,
}

/// The notes in the bytes of the section. What does not have the form of one ends the list, or is left out if it is complete.
pub fn notes(bytes: &[u8]) -> impl Iterator<Item = ProbeNote<'_>> {
    let mut rest = bytes;
    let contents = std::iter::from_fn(move || {
        let (owner_size, size, kind) = (u32_at(rest, 0)?, u32_at(rest, 4)?, u32_at(rest, 8)?);
        let (owner_size, size) = (owner_size as usize, size as usize);
        // (Both sizes are less than 2^32, so sums of them do not overflow.)
        let at = 12 + owner_size.next_multiple_of(4);
        let (owner, content) = (rest.get(12..12 + owner_size)?, rest.get(at..at + size)?);
        rest = rest.get(at + size.next_multiple_of(4)..).unwrap_or(&[]);
        Some((owner == OWNER && kind == KIND).then_some(content))
    });
    contents.flatten().filter_map(note)
}

fn note(content: &[u8]) -> Option<ProbeNote<'_>> {
    let mut texts = content.get(24..)?.splitn(4, |byte| *byte == 0);
    let (provider, name, arguments) = (texts.next()?, texts.next()?, texts.next()?);
    // What follows the last zero.
    texts.next()?;
    Some(ProbeNote {
        address: u64_at(content, 0)?,
        base: u64_at(content, 8)?,
        semaphore: u64_at(content, 16)?,
        provider,
        name,
        arguments,
    })
}

/// The first arguments of a probe, as many as are used; `None` if one of them has a form that is not known.
pub fn arguments(text: &[u8], assembler: Assembler) -> Option<Vec<ProbeArgument>> {
    let words = separated(text, assembler);
    words
        .map(|word| argument(word, assembler))
        .take(MAX_ARGUMENTS)
        .collect()
}

/// The texts of arguments. A space within the brackets of aarch64 belongs to the argument.
fn separated(text: &[u8], assembler: Assembler) -> impl Iterator<Item = &[u8]> {
    let mut is_inside = false;
    let words = text.split(move |byte| {
        match byte {
            b'[' => is_inside = assembler == Assembler::Aarch64,
            b']' => is_inside = false,
            _ => {}
        }
        *byte == b' ' && !is_inside
    });
    words.filter(|word| !word.is_empty())
}

fn argument(word: &[u8], assembler: Assembler) -> Option<ProbeArgument> {
    let word = std::str::from_utf8(word).ok().filter(|word| word.len() <= MAX_TEXT)?;
    let (size, place) = word.split_once('@')?;
    let (is_signed, size) = match size.strip_prefix('-') {
        Some(size) => (true, size),
        None => (false, size),
    };
    let size = size.parse::<u8>().ok().filter(|size| [1, 2, 4, 8].contains(size))?;
    let place = match assembler {
        Assembler::X86_64 => place_x86_64(place),
        Assembler::Aarch64 => place_aarch64(place),
    };
    Some(ProbeArgument {
        place: place?,
        size,
        is_signed,
    })
}

/// `$5`, `%rax`, `(%rax)`, `-16(%rbp)`, `8(%rax,%rbx,8)`.
fn place_x86_64(text: &str) -> Option<ArgumentPlace> {
    if let Some(number) = text.strip_prefix('$') {
        return number_in(number).map(ArgumentPlace::Constant);
    }
    if let Some(name) = text.strip_prefix('%') {
        return register_x86_64(name).map(ArgumentPlace::Register);
    }
    let (offset, inside) = text.strip_suffix(')')?.split_once('(')?;
    let offset = if offset.is_empty() { 0 } else { number_in(offset)? };
    let mut parts = inside.split(',');
    // Addresses are 64 bits wide.
    let mut wide = || {
        let name = parts.next().map(|part| part.trim().strip_prefix('%'))?;
        let name = name.filter(|name| name.starts_with('r') && !name.ends_with(['d', 'w', 'b']));
        Some(name.and_then(register_x86_64))
    };
    let (register, index) = (wide()??, wide());
    let scale = parts.next().map_or(Some(1), |scale| scale.trim().parse::<u8>().ok())?;
    if parts.next().is_some() || ![1, 2, 4, 8].contains(&scale) {
        return None;
    }
    let index = match index {
        None => None,
        Some(register) => Some((register?, scale.trailing_zeros() as u8)),
    };
    Some(ArgumentPlace::Memory {
        register,
        offset,
        index,
    })
}

/// Word of a register in `struct pt_regs`. The parts of a register that have names are its lowest bits, but for those from
/// bit 8 on (`ah`), which are not known here.
fn register_x86_64(name: &str) -> Option<u8> {
    const LEGACY: [(&str, u8); 6] = [("bp", 4), ("ax", 10), ("cx", 11), ("dx", 12), ("si", 13), ("di", 14)];
    const OTHERS: [(&str, u8); 2] = [("bx", 5), ("sp", 19)];
    const BYTES: [(&str, u8); 8] = [
        ("al", 10),
        ("bl", 5),
        ("cl", 11),
        ("dl", 12),
        ("sil", 13),
        ("dil", 14),
        ("bpl", 4),
        ("spl", 19),
    ];
    let of = |name: &str, table: &[(&str, u8)]| table.iter().find(|(known, _)| *known == name).map(|(_, word)| *word);
    if let Some(word) = of(name, &BYTES) {
        return Some(word);
    }
    if let Some(number) = name.strip_prefix('r')
        && number.starts_with(|c: char| c.is_ascii_digit())
    {
        let number = number.strip_suffix(['d', 'w', 'b']).unwrap_or(number);
        return match number.parse::<u8>().ok()? {
            number @ 8..=11 => Some(17 - number),
            number @ 12..=15 => Some(15 - number),
            _ => None,
        };
    }
    let base = name.strip_prefix(['r', 'e']).unwrap_or(name);
    of(base, &LEGACY).or_else(|| of(base, &OTHERS))
}

/// `5`, `x0`, `w0`, `sp`, `[x0]`, `[sp, 16]`, `[x0, x1]`, `[x0, x1, lsl 3]`.
fn place_aarch64(text: &str) -> Option<ArgumentPlace> {
    let Some(inside) = text.strip_prefix('[') else {
        let constant = number_in(text).map(ArgumentPlace::Constant);
        return constant.or_else(|| register_aarch64(text).map(ArgumentPlace::Register));
    };
    // Addresses are 64 bits wide.
    let wide = |name: &str| {
        Some(name)
            .filter(|name| !name.starts_with('w'))
            .and_then(register_aarch64)
    };
    let number = |text: &str| number_in(text.strip_prefix('#').unwrap_or(text));
    let shift_in = |text: &str| {
        let bits = u8::try_from(number(text.strip_prefix("lsl")?.trim_start())?).ok()?;
        Some(bits).filter(|bits| *bits <= MAX_SHIFT)
    };
    let mut parts = inside.strip_suffix(']')?.split(',').map(str::trim);
    let register = wide(parts.next()?)?;
    let (offset, index) = match (parts.next(), parts.next(), parts.next()) {
        (None, ..) => (0, None),
        (Some(second), shift, None) => match wide(second).filter(|index| *index != SP_AARCH64) {
            Some(index) => (0, Some((index, shift.map_or(Some(0), shift_in)?))),
            None if shift.is_none() => (number(second)?, None),
            None => return None,
        },
        _ => return None,
    };
    Some(ArgumentPlace::Memory {
        register,
        offset,
        index,
    })
}

fn register_aarch64(name: &str) -> Option<u8> {
    match name {
        "sp" => Some(SP_AARCH64),
        _ => {
            let number = name.strip_prefix(['x', 'w'])?;
            let number = Some(number).filter(|number| number.starts_with(|c: char| c.is_ascii_digit()))?;
            number.parse::<u8>().ok().filter(|number| *number <= 30)
        }
    }
}

/// A number of the assembler: decimal or, after `0x`, hexadecimal.
fn number_in(text: &str) -> Option<i64> {
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let number = match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => digits.parse::<u64>().ok()?,
    };
    if digits.starts_with('+') || digits.starts_with("0x+") {
        return None;
    }
    let number = number as i64;
    Some(if is_negative { number.wrapping_neg() } else { number })
}

/// Whether a note is that of a probe for allocations that is used.
fn is_of_allocations(note: &ProbeNote<'_>) -> bool {
    note.provider == ALLOCATION_PROVIDER.as_bytes() && [&b"alloc"[..], b"free"].contains(&note.name)
}

/// What a probe for allocations publishes; `None`: its arguments have forms that are not known.
fn event(note: &ProbeNote<'_>, assembler: Assembler) -> Option<ProbeEvent> {
    let arguments = arguments(note.arguments, assembler)?;
    match note.name {
        b"alloc" => Some(ProbeEvent::Allocation(arguments.try_into().ok()?)),
        _ => arguments.first().copied().map(ProbeEvent::Free),
    }
}

/// The probes for allocations in a file, and how many there are besides whose arguments have forms that are not known.
pub fn of_allocations(module: &Module) -> (Vec<FileProbe>, usize) {
    let Some(section) = module.section_untracked(SECTION) else {
        return (Vec::new(), 0);
    };
    let mut unknown = 0;
    let mut events = Vec::new();
    for note in notes(&section.bytes).filter(is_of_allocations) {
        match event(&note, Assembler::OURS) {
            // (One more than are used: then it is known that there are too many.)
            Some(event) if events.len() <= MAX_PROBES => events.push((note, event)),
            Some(_) => {}
            None => unknown += 1,
        }
    }
    if events.is_empty() {
        return (Vec::new(), unknown);
    }
    let places = module.elf(|e| {
        let endian = e.endian();
        let headers = e.elf_program_headers().iter();
        let loaded = headers.filter(|header| header.p_type(endian) == elf::PT_LOAD);
        let ranges = loaded.map(|header| (header.p_vaddr(endian), header.p_filesz(endian), header.p_offset(endian)));
        let base = e.section_by_name(BASE).map(|section| section.address());
        (ranges.collect::<Vec<_>>(), base)
    });
    let (ranges, base) = places.unwrap_or_default();
    let offset_of = |svma: u64| {
        let in_range = |(start, size, _): &&(u64, u64, u64)| svma.wrapping_sub(*start) < *size;
        let (start, _, offset) = ranges.iter().find(in_range)?;
        offset.checked_add(svma - start)
    };
    let probe = |(note, event): (ProbeNote<'_>, ProbeEvent)| {
        // The file may have been moved since it was linked (prelink).
        let moved = base.map_or(0, |base| base.wrapping_sub(note.base));
        let svma = note.address.wrapping_add(moved);
        Some(FileProbe {
            event,
            svma,
            offset: offset_of(svma)?,
            semaphore: match note.semaphore {
                0 => 0,
                semaphore => offset_of(semaphore.wrapping_add(moved))?,
            },
        })
    };
    (events.into_iter().filter_map(probe).collect(), unknown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ArgumentPlace::{Constant, Memory, Register};

    /// A note with these bytes as its owner and content.
    fn note_bytes(owner: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((owner.len() as u32).to_le_bytes());
        bytes.extend((content.len() as u32).to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        for part in [owner, content] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn content(texts: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [0x1000u64, 0x2000, 0x3000]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        bytes.extend(texts);
        bytes
    }

    #[test]
    fn notes_are_read() {
        let texts = b"otel_memory\0alloc\08@%rdi 8@%rsi 8@%rdx\0";
        let expected = ProbeNote {
            address: 0x1000,
            base: 0x2000,
            semaphore: 0x3000,
            provider: b"otel_memory",
            name: b"alloc",
            arguments: b"8@%rdi 8@%rsi 8@%rdx",
        };
        let good = note_bytes(OWNER, KIND, &content(texts));
        let check = |bytes: &[u8], count: usize| {
            assert_eq!(notes(bytes).collect::<Vec<_>>(), vec![expected; count], "{bytes:?}")
        };
        check(&good, 1);
        check(&[&good[..], &good].concat(), 2);
        check(&[note_bytes(b"GNU\0", KIND, b"x"), good.clone()].concat(), 1);
        check(&[note_bytes(OWNER, 4, &content(texts)), good.clone()].concat(), 1);
        check(
            &[note_bytes(OWNER, KIND, &content(b"no end")), good.clone()].concat(),
            1,
        );
        check(&[note_bytes(OWNER, KIND, b"short"), good.clone()].concat(), 1);
        check(&[&good[..], &[255; 12]].concat(), 1);
        for length in 0..good.len() - 3 {
            check(&good[..length], 0);
        }
    }

    #[test]
    fn arguments_have_places() {
        let check = |assembler, text: &str, expected: Option<&[(ArgumentPlace, u8, bool)]>| {
            let found = arguments(text.as_bytes(), assembler);
            let found = found.map(|found| found.iter().map(|a| (a.place, a.size, a.is_signed)).collect::<Vec<_>>());
            assert_eq!(found.as_deref(), expected, "{text}");
        };
        let at = |register, offset| Memory {
            register,
            offset,
            index: None,
        };
        let x86 = |text: &str, expected: Option<&[(ArgumentPlace, u8, bool)]>| check(Assembler::X86_64, text, expected);
        x86("", Some(&[]));
        x86("8@%rdi", Some(&[(Register(14), 8, false)]));
        x86(
            "8@%rdi 8@%r8 -4@%r15d",
            Some(&[
                (Register(14), 8, false),
                (Register(9), 8, false),
                (Register(0), 4, true),
            ]),
        );
        x86(
            "8@%rbx 4@%ecx 1@%al 2@%dx",
            Some(&[
                (Register(5), 8, false),
                (Register(11), 4, false),
                (Register(10), 1, false),
            ]),
        );
        x86(
            "8@-16(%rbp) 8@(%rsp)",
            Some(&[(at(4, -16), 8, false), (at(19, 0), 8, false)]),
        );
        x86(
            "-8@$-5 4@$0x10",
            Some(&[(Constant(-5), 8, true), (Constant(16), 4, false)]),
        );
        let scaled = Memory {
            register: 10,
            offset: 8,
            index: Some((5, 3)),
        };
        x86("8@8(%rax,%rbx,8)", Some(&[(scaled, 8, false)]));
        for unknown in [
            "8@",
            "@%rdi",
            "3@%rdi",
            "8@%xmm0",
            "8@%ah",
            "8@%rip",
            "8@name(%rip)",
            "8@(%rax",
            "8@(%eax)",
            "8@(%rax,%rbx,3)",
            "8@(%rax,%rbx,8,1)",
            "8@$+5",
            "8@$",
            "8@%r16",
            "8@x0",
            "\u{e9}",
        ] {
            x86(unknown, None);
        }
        let arm =
            |text: &str, expected: Option<&[(ArgumentPlace, u8, bool)]>| check(Assembler::Aarch64, text, expected);
        arm(
            "8@x0 8@x30 4@w1",
            Some(&[
                (Register(0), 8, false),
                (Register(30), 8, false),
                (Register(1), 4, false),
            ]),
        );
        arm(
            "8@[sp, 16] 8@[x29] 8@[x1,-8]",
            Some(&[(at(31, 16), 8, false), (at(29, 0), 8, false), (at(1, -8), 8, false)]),
        );
        let indexed = |index, shift| Memory {
            register: 20,
            offset: 0,
            index: Some((index, shift)),
        };
        arm(
            "8@[x20, x19, lsl 3] 4@[x20,x0,lsl #2] 8@[x20, x30]",
            Some(&[
                (indexed(19, 3), 8, false),
                (indexed(0, 2), 4, false),
                (indexed(30, 0), 8, false),
            ]),
        );
        arm(
            "8@5 -4@-5 8@sp",
            Some(&[
                (Constant(5), 8, false),
                (Constant(-5), 4, true),
                (Register(31), 8, false),
            ]),
        );
        for unknown in [
            "8@x31",
            "8@[x0",
            "8@[w0]",
            "8@[x0, w1]",
            "8@[x0, sp]",
            "8@[x0, w1, sxtw 3]",
            "8@[x0, x1, lsl 4]",
            "8@[x0, x1, lsl]",
            "8@[x0, x1, lsl 3, 1]",
            "8@[x0, 8, lsl 3]",
            "8@d0",
            "8@%rax",
            "8@x+1",
        ] {
            arm(unknown, None);
        }
    }

    #[test]
    fn probes_for_allocations_are_known_by_their_names() {
        let check = |provider: &str, name: &str, arguments: &str, is_known: bool| {
            let note = ProbeNote {
                address: 0,
                base: 0,
                semaphore: 0,
                provider: provider.as_bytes(),
                name: name.as_bytes(),
                arguments: arguments.as_bytes(),
            };
            let found = is_of_allocations(&note) && event(&note, Assembler::X86_64).is_some();
            assert_eq!(found, is_known, "{provider} {name} {arguments}");
        };
        check(ALLOCATION_PROVIDER, "alloc", "8@%rdi 8@%rsi 8@%rdx", true);
        check(ALLOCATION_PROVIDER, "alloc", "8@%rdi 8@%rsi", false);
        check(ALLOCATION_PROVIDER, "free", "8@%rdi", true);
        check(ALLOCATION_PROVIDER, "free", "", false);
        check(ALLOCATION_PROVIDER, "mmap", "8@%rdi 8@%rsi", false);
        check("libc", "free", "8@%rdi", false);
    }
}

//! Names for the stubs of the procedure linkage table: `malloc@plt`.
//!
//! A stub has no symbol, but it jumps through a slot of the GOT, and the relocation that fills that slot names the
//! function. So each stub is decoded, and named only if it jumps through a slot that has such a relocation: the
//! linker's order is not assumed. Forms: x86-64 psABI, "Procedure Linkage Table"; binutils `bfd/elf64-x86-64.c`.

use std::collections::HashMap;

use crate::elf::{Elf, SHT_DYNSYM, SHT_RELA, Section, cstr_at, u32_at, u64_at};
use crate::symbols::MAX_NAME;

const R_X86_64_GLOB_DAT: u32 = 6;
const R_X86_64_JUMP_SLOT: u32 = 7;
/// Maximum size of a .plt (that would be a million stubs).
const MAX_PLT: u64 = 16 << 20;

/// One stub.
#[derive(Debug)]
pub(crate) struct Stub {
    pub start: u64,
    pub size: u64,
    /// Index into `Plt::names`.
    name: u32,
}

/// All stubs of a file, by address.
#[derive(Default)]
pub(crate) struct Plt {
    stubs: Vec<Stub>,
    /// With `@plt`.
    names: Vec<String>,
}

impl Plt {
    pub fn load(elf: &Elf) -> Plt {
        Plt::try_load(elf).unwrap_or_default()
    }

    fn try_load(elf: &Elf) -> Option<Plt> {
        if !elf.is_x86_64 {
            return None;
        }
        let tables = || {
            elf.sections
                .iter()
                .filter(|s| s.name.starts_with(".plt") && s.is_code())
        };
        tables().next()?;
        let dynsym = elf.sections.iter().find(|s| s.kind == SHT_DYNSYM)?;
        let strings = elf.raw_data(elf.sections.get(dynsym.link as usize)?).ok()?;
        let dynsym = elf.raw_data(dynsym).ok()?;
        let mut plt = Plt::default();
        // GOT slot -> name; and names in the order of .rela.plt, which lazy stubs push as a number.
        let mut slots: HashMap<u64, u32> = HashMap::new();
        let mut pushed: Vec<Option<u32>> = Vec::new();
        for section in elf.sections.iter().filter(|s| s.kind == SHT_RELA) {
            let in_order = match section.name.as_str() {
                ".rela.plt" => true,
                ".rela.dyn" => false,
                _ => continue,
            };
            // Elf64_Rela: offset, info (symbol << 32 | type), addend.
            for rela in elf.raw_data(section).ok()?.chunks_exact(24) {
                let (kind, symbol) = (u32_at(rela, 8)?, u32_at(rela, 12)? as usize);
                let named = matches!(kind, R_X86_64_GLOB_DAT | R_X86_64_JUMP_SLOT);
                let bytes = dynsym.get(symbol.saturating_mul(24)..).and_then(|entry| {
                    cstr_at(&strings, u32_at(entry, 0)? as usize, MAX_NAME).filter(|n| !n.is_empty() && n.len() < 4096)
                });
                let name = bytes.filter(|_| named).map(|bytes| {
                    plt.names.push(format!("{}@plt", String::from_utf8_lossy(bytes)));
                    plt.names.len() as u32 - 1
                });
                if let Some(name) = name {
                    slots.insert(u64_at(rela, 0)?, name);
                }
                if in_order {
                    pushed.push(name);
                }
            }
        }
        for section in tables() {
            plt.decode(elf, section, &slots, &pushed);
        }
        plt.stubs.sort_unstable_by_key(|s| s.start);
        Some(plt)
    }

    fn decode(&mut self, elf: &Elf, section: &Section, slots: &HashMap<u64, u32>, pushed: &[Option<u32>]) {
        if section.size > MAX_PLT {
            return;
        }
        let Ok(code) = elf.raw_data(section) else { return };
        // Without CET the stubs of .plt.got are 8 bytes (`jmp *slot; xchg %ax,%ax`), all others 16.
        let short = section.name == ".plt.got" && !code.starts_with(&ENDBR64);
        let size = if short { 8 } else { 16 };
        for (i, stub) in code.chunks_exact(size).enumerate() {
            let start = section.addr.wrapping_add((i * size) as u64);
            let name = match target(stub) {
                Some(Target::Slot { behind, displacement }) => {
                    let slot = start
                        .wrapping_add(behind as u64)
                        .wrapping_add_signed(displacement.into());
                    slots.get(&slot).copied()
                }
                Some(Target::Pushed(n)) => pushed.get(n as usize).copied().flatten(),
                None => None,
            };
            if let Some(name) = name {
                self.stubs.push(Stub {
                    start,
                    size: size as u64,
                    name,
                });
            }
        }
    }

    /// The stub that covers an address, and its name.
    pub fn find(&self, svma: u64) -> Option<(&Stub, &str)> {
        let after = self.stubs.partition_point(|s| s.start <= svma);
        let stub = self.stubs.get(after.checked_sub(1)?)?;
        let name = self.names.get(stub.name as usize)?;
        (svma - stub.start < stub.size).then_some((stub, name))
    }
}

const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

#[derive(Debug, PartialEq)]
enum Target {
    /// `jmp *displacement(%rip)`; the instruction ends `behind` bytes into the stub.
    Slot { behind: usize, displacement: i32 },
    /// `push $n; jmp PLT0`: the lazy half of a stub with CET, n counts in .rela.plt.
    Pushed(u32),
}

fn target(stub: &[u8]) -> Option<Target> {
    let mut at = 0;
    if stub.starts_with(&ENDBR64) {
        at = 4;
        if stub.get(4) == Some(&0x68) && matches!(stub.get(9), Some(0xe9 | 0xf2)) {
            return Some(Target::Pushed(u32_at(stub, 5)?));
        }
    }
    if stub.get(at) == Some(&0xf2) {
        at += 1; // bnd, of the late MPX
    }
    if stub.get(at..at + 2)? != [0xff, 0x25] {
        return None; // PLT0 begins with a push (ff 35), TLS descriptors have their own entry
    }
    Some(Target::Slot {
        behind: at + 6,
        displacement: u32_at(stub, at + 2)? as i32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stub_forms() {
        let pad = |head: &[u8]| {
            let mut v = head.to_vec();
            v.resize(16, 0x90);
            v
        };
        let slot = |behind, displacement| Some(Target::Slot { behind, displacement });
        for (bytes, expected) in [
            (pad(&[0xff, 0x25, 0x10, 0, 0, 0, 0x68, 0, 0, 0, 0]), slot(6, 16)),
            (
                pad(&[0xf3, 0x0f, 0x1e, 0xfa, 0xff, 0x25, 0xff, 0xff, 0xff, 0xff]),
                slot(10, -1),
            ),
            (
                pad(&[0xf3, 0x0f, 0x1e, 0xfa, 0xf2, 0xff, 0x25, 1, 0, 0, 0]),
                slot(11, 1),
            ),
            (
                pad(&[0xf3, 0x0f, 0x1e, 0xfa, 0x68, 7, 0, 0, 0, 0xe9]),
                Some(Target::Pushed(7)),
            ),
            (pad(&[0xff, 0x35, 1, 0, 0, 0, 0xff, 0x25]), None),
            (vec![0xff, 0x25], None),
            (vec![], None),
        ] {
            assert_eq!(target(&bytes), expected, "{bytes:02x?}");
        }
    }
}

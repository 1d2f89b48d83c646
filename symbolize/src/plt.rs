//! Names for the stubs of the procedure linkage table: `malloc@plt`.
//!
//! A stub has no symbol, but it jumps through a slot of the GOT, and the relocation that fills that slot names the
//! function. So each stub is decoded, and named only if it jumps through a slot that has such a relocation: the
//! linker's order is not assumed. Forms: x86-64 psABI, "Procedure Linkage Table"; binutils `bfd/elf64-x86-64.c`; ELF for the
//! Arm 64-bit Architecture (AAELF64), "Procedure linkage table"; binutils `bfd/elfnn-aarch64.c`.

use std::collections::HashMap;

use crate::elf::{EM_AARCH64, EM_X86_64, Elf, SHT_DYNSYM, SHT_RELA, SectionHeader, cstr_at, u32_at, u64_at};
use crate::symbols::MAX_NAME;

const R_X86_64_GLOB_DAT: u32 = 6;
const R_X86_64_JUMP_SLOT: u32 = 7;
const R_AARCH64_GLOB_DAT: u32 = 1025;
const R_AARCH64_JUMP_SLOT: u32 = 1026;
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
        let kinds = match elf.machine {
            EM_X86_64 => [R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT],
            EM_AARCH64 => [R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT],
            _ => return None,
        };
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
                let named = kinds.contains(&kind);
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

    fn decode(&mut self, elf: &Elf, section: &SectionHeader, slots: &HashMap<u64, u32>, pushed: &[Option<u32>]) {
        if section.size > MAX_PLT {
            return;
        }
        let Ok(code) = elf.raw_data(section) else { return };
        if elf.machine == EM_AARCH64 {
            for (start, size, slot) in aarch64_stubs(&code, section.addr) {
                if let Some(&name) = slots.get(&slot) {
                    self.stubs.push(Stub { start, size, name });
                }
            }
            return;
        }
        // Without CET the stubs of .plt.got are 8 bytes (`jmp *slot; xchg %ax,%ax`), all others 16.
        let short = section.name == ".plt.got" && !code.starts_with(&ENDBR64);
        let size = if short { 8 } else { 16 };
        for (i, stub) in code.chunks_exact(size).enumerate() {
            let start = section.addr.wrapping_add((i * size) as u64);
            let name = match target(stub) {
                Some(PltTarget::Slot { behind, displacement }) => {
                    let slot = start
                        .wrapping_add(behind as u64)
                        .wrapping_add_signed(displacement.into());
                    slots.get(&slot).copied()
                }
                Some(PltTarget::Pushed(n)) => pushed.get(n as usize).copied().flatten(),
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
enum PltTarget {
    /// `jmp *displacement(%rip)`; the instruction ends `behind` bytes into the stub.
    Slot { behind: usize, displacement: i32 },
    /// `push $n; jmp PLT0`: the lazy half of a stub with CET, n counts in .rela.plt.
    Pushed(u32),
}

fn target(stub: &[u8]) -> Option<PltTarget> {
    let mut at = 0;
    if stub.starts_with(&ENDBR64) {
        at = 4;
        if stub.get(4) == Some(&0x68) && matches!(stub.get(9), Some(0xe9 | 0xf2)) {
            return Some(PltTarget::Pushed(u32_at(stub, 5)?));
        }
    }
    if stub.get(at) == Some(&0xf2) {
        at += 1; // bnd, of the late MPX
    }
    if stub.get(at..at + 2)? != [0xff, 0x25] {
        return None; // PLT0 begins with a push (ff 35), TLS descriptors have their own entry
    }
    Some(PltTarget::Slot {
        behind: at + 6,
        displacement: u32_at(stub, at + 2)? as i32,
    })
}

/// Start, size and slot of each stub: `adrp x16, PAGE; ldr x17, [x16, #N]; add x16, x16, #N; br x17`, optionally after a
/// `bti c`, and with `autia1716` before the jump.
fn aarch64_stubs(code: &[u8], address: u64) -> Vec<(u64, u64, u64)> {
    const BTI_C: u32 = 0xd503_245f;
    const AUTIA1716: u32 = 0xd503_219f;
    const BR_X17: u32 = 0xd61f_0220;
    let words: Vec<u32> = (code.chunks_exact(4))
        .map(|w| w.try_into().map_or(0, u32::from_le_bytes))
        .collect();
    let mut found = Vec::new();
    for (i, window) in words.windows(4).enumerate() {
        let &[adrp, ldr, add, jump] = window else { continue };
        let jumps = jump == BR_X17 || jump == AUTIA1716 && words.get(i + 4) == Some(&BR_X17);
        let is_stub = adrp & 0x9f00_001f == 0x9000_0010
            && ldr & 0xffc0_03ff == 0xf940_0211
            && add & 0xffc0_03ff == 0x9100_0210
            && jumps;
        if !is_stub {
            continue;
        }
        let at = address.wrapping_add(4 * i as u64);
        // 21 bits: the lower two apart from the others.
        let pages = i64::from((adrp << 8) as i32 >> 13) << 2 | i64::from(adrp >> 29 & 3);
        let page = (at & !0xfff).wrapping_add_signed(pages << 12);
        let slot = page.wrapping_add(8 * u64::from(ldr >> 10 & 0xfff));
        let before = u64::from(i > 0 && words[i - 1] == BTI_C);
        let after = u64::from(jump == AUTIA1716);
        found.push((at.wrapping_sub(4 * before), 4 * (4 + before + after), slot));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stubs_of_aarch64() {
        let code = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        // adrp x16, 0x30000 (from 0x10010); ldr x17, [x16, #0x18]; add x16, x16, #0x18; br x17
        let plain = [0x9000_0110, 0xf940_0e11, 0x9100_6210, 0xd61f_0220];
        assert_eq!(aarch64_stubs(&code(&plain), 0x1_0010), [(0x1_0010, 16, 0x3_0018)]);
        let protected = [&[0xd503_245f], &plain[..3], &[0xd503_219f, 0xd61f_0220]].concat();
        assert_eq!(aarch64_stubs(&code(&protected), 0x1_0010), [(0x1_0010, 24, 0x3_0018)]);
        assert_eq!(aarch64_stubs(&code(&plain[..3]), 0), []);
        // A page below.
        let below = [0xf0ff_fff0, plain[1], plain[2], plain[3]];
        assert_eq!(aarch64_stubs(&code(&below), 0x1_0010), [(0x1_0010, 16, 0xf018)]);
    }

    #[test]
    fn stub_forms() {
        let pad = |head: &[u8]| {
            let mut v = head.to_vec();
            v.resize(16, 0x90);
            v
        };
        let slot = |behind, displacement| Some(PltTarget::Slot { behind, displacement });
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
                Some(PltTarget::Pushed(7)),
            ),
            (pad(&[0xff, 0x35, 1, 0, 0, 0, 0xff, 0x25]), None),
            (vec![0xff, 0x25], None),
            (vec![], None),
        ] {
            assert_eq!(target(&bytes), expected, "{bytes:02x?}");
        }
    }
}

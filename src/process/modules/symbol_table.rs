//! Symbols of a file by their names.

use super::MAX_SYMBOLS;

/// Bytes of a symbol table and of its strings.
pub(super) struct SymbolTable {
    pub table: Vec<u8>,
    pub strings: Vec<u8>,
}

impl SymbolTable {
    /// Address of the symbol of this name. Compares without searching the ends of other names: some files have hundreds
    /// of thousands.
    pub fn find(&self, wanted: &[u8]) -> Option<u64> {
        self.table.chunks_exact(24).take(MAX_SYMBOLS).find_map(|s| {
            let name = u32::from_le_bytes(s[..4].try_into().expect("four bytes"));
            let rest = self.strings.get(name as usize..)?.strip_prefix(wanted)?;
            let section = u16::from_le_bytes([s[6], s[7]]);
            (section != 0 && rest.first().is_none_or(|end| *end == 0))
                .then(|| u64::from_le_bytes(s[8..16].try_into().expect("eight bytes")))
        })
    }

    /// Name, address and size of each symbol that is defined here (`Elf64_Sym`, System V ABI, chapter 4).
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], u64, u64)> {
        self.table.chunks_exact(24).take(MAX_SYMBOLS).filter_map(|s| {
            let word = |at: usize| u64::from_le_bytes(s[at..at + 8].try_into().expect("eight bytes"));
            let name = u32::from_le_bytes(s[..4].try_into().expect("four bytes"));
            let section = u16::from_le_bytes([s[6], s[7]]);
            let name = self.strings.get(name as usize..)?.split(|c| *c == 0).next()?;
            (section != 0).then_some((name, word(8), word(16)))
        })
    }
}

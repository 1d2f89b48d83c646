//! Where functions begin and end by the call frame tables (`.eh_frame`, LSB 5.0 core, section 10.6). Linked files have
//! them for all compiled functions, also where the symbols were stripped.

use std::collections::HashMap;

use gimli::{
    BaseAddresses, CieOrFde, EhFrame, EhFrameHdr, EndianSlice, FrameDescriptionEntry, LittleEndian, Pointer,
    UnwindSection,
};

use crate::elf::{Elf, SHT_NOBITS};

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// The functions that have a table, by address.
#[derive(Default)]
pub(crate) struct FrameTables {
    bases: BaseAddresses,
    section: Vec<u8>,
    /// Start of each function, and place of its entry in the section.
    functions: Vec<(u64, usize)>,
}

impl FrameTables {
    /// Reads the linker's table of starts, or else that of the entries. Without either there are no functions.
    pub fn load(elf: &Elf) -> FrameTables {
        FrameTables::try_load(elf).unwrap_or_default()
    }

    fn try_load(elf: &Elf) -> Option<FrameTables> {
        let frame = elf.section(".eh_frame").filter(|s| s.kind != SHT_NOBITS)?;
        let section = elf.raw_data(frame).ok()?;
        let hdr = elf.section(".eh_frame_hdr");
        let bases = BaseAddresses::default()
            .set_eh_frame(frame.addr)
            .set_eh_frame_hdr(hdr.map_or(0, |s| s.addr));
        let hdr = hdr.and_then(|s| elf.raw_data(s).ok());
        let listed = hdr.and_then(|hdr| listed_functions(&hdr, &bases, frame.addr, section.len() as u64));
        let mut functions = listed.unwrap_or_else(|| all_functions(&section, &bases));
        functions.sort_unstable();
        Some(FrameTables {
            bases,
            section,
            functions,
        })
    }

    /// Start and end of the function that has this address.
    pub fn function(&self, svma: u64) -> Option<(u64, u64)> {
        let before = self.functions.partition_point(|(start, _)| *start <= svma);
        let (start, at) = *self.functions.get(before.checked_sub(1)?)?;
        let fde = self.entry(at).filter(|fde| fde.initial_address() == start)?;
        let end = fde.end_address();
        (svma < end).then_some((start, end))
    }

    /// Start of the first function after this address.
    pub fn next(&self, svma: u64) -> Option<u64> {
        let after = self.functions.partition_point(|(start, _)| *start <= svma);
        self.functions.get(after).map(|(start, _)| *start)
    }

    fn entry(&self, at: usize) -> Option<FrameDescriptionEntry<Slice<'_>>> {
        let section = EhFrame::new(&self.section, LittleEndian);
        let entry = section.fde_from_offset(&self.bases, at.into(), EhFrame::cie_from_offset);
        entry.ok()
    }
}

/// The functions of `.eh_frame_hdr`, unless it is not of the form that linkers write.
fn listed_functions(hdr: &[u8], bases: &BaseAddresses, frame: u64, len: u64) -> Option<Vec<(u64, usize)>> {
    let parsed = EhFrameHdr::new(hdr, LittleEndian).parse(bases, 8).ok()?;
    if parsed.eh_frame_ptr() != Pointer::Direct(frame) {
        return None;
    }
    let mut found = Vec::new();
    let table = parsed.table()?;
    let mut entries = table.iter(bases);
    while let Some(pair) = entries.next().ok()? {
        let (Pointer::Direct(start), Pointer::Direct(entry)) = pair else {
            return None;
        };
        let at = entry.checked_sub(frame).filter(|at| *at < len)?;
        found.push((start, at as usize));
    }
    Some(found)
}

/// The functions of all entries, up to the first one that is damaged.
fn all_functions(section: &[u8], bases: &BaseAddresses) -> Vec<(u64, usize)> {
    let section = EhFrame::new(section, LittleEndian);
    let mut found = Vec::new();
    let mut cies = HashMap::new();
    let mut entries = section.entries(bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(|section, bases, at| {
            let known = cies.entry(at.0).or_insert_with(|| section.cie_from_offset(bases, at));
            known.clone()
        });
        // Entries of functions that the linker dropped start at 0.
        if let Ok(fde) = fde
            && fde.initial_address() != 0
            && fde.len() != 0
        {
            found.push((fde.initial_address(), fde.offset()));
        }
    }
    found
}

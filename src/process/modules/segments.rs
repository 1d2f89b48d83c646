//! Segments of files: which one a mapping is of, and where its code is.

use std::ops::Range;

use object::elf;
use object::read::elf::{FileHeader, ProgramHeader};

use super::{Module, ModuleElf};
use crate::event::PAGE;

/// Maximum number of segments used of one file.
const MAX_SEGMENTS: usize = 256;

/// A loadable, executable segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub offset: u64,
    pub svma: u64,
    pub size: u64,
}

impl Module {
    /// Load bias of a mapping of this file: `avma - svma`. Two segments may share a page of the file, which is then
    /// mapped twice: of several, the one with a bias for which `is_known` (another mapping of this file has it), or
    /// with the mapping's length, or the first.
    pub fn bias(&self, start: u64, end: u64, offset: u64, is_known: impl Fn(u64) -> bool) -> Option<u64> {
        let mut candidates = self.segments.iter().filter(|s| {
            let first = page_of(s.offset);
            first <= offset && offset < s.offset.saturating_add(s.size.max(1))
        });
        let bias = |s: &Segment| start.wrapping_sub(page_of(s.svma).wrapping_add(offset - page_of(s.offset)));
        let length = |s: &Segment| {
            let end = s.offset.saturating_add(s.size).saturating_add(PAGE - 1);
            page_of(end).saturating_sub(offset)
        };
        let first = candidates.next()?;
        let others = candidates.clone();
        let all = || std::iter::once(first).chain(others.clone());
        if candidates.next().is_none() {
            return Some(bias(first));
        }
        let chosen = all().find(|s| is_known(bias(s)));
        let chosen = chosen.or_else(|| all().find(|s| length(s) == end.saturating_sub(start)));
        Some(bias(chosen.unwrap_or(first)))
    }

    /// Whether one of its executable segments has all addresses `start..end` (avma), if it is loaded with this bias.
    pub fn has_code(&self, bias: u64, start: u64, end: u64) -> bool {
        self.segments.iter().any(|s| {
            let first = page_of(s.svma).wrapping_add(bias);
            let length = s.svma.saturating_add(s.size).saturating_sub(page_of(s.svma));
            let length = length.saturating_add(PAGE - 1) & !(PAGE - 1);
            start >= first && end >= start && end - first <= length
        })
    }

    /// Fills `buf` with the code at `svma`, without parsing the file; false if not all of it is in one segment.
    pub fn read_code(&self, svma: u64, buf: &mut [u8]) -> bool {
        let at = self.segments.iter().find_map(|s| {
            let skip = svma.checked_sub(s.svma)?;
            let is_inside = skip.saturating_add(buf.len() as u64) <= s.size;
            s.offset.checked_add(skip).filter(|_| is_inside)
        });
        at.is_some_and(|at| self.content.read_at(at, buf).is_ok_and(|read| read == buf.len()))
    }
}

/// The page with this address or offset.
fn page_of(at: u64) -> u64 {
    at & !(PAGE - 1)
}

pub(super) fn executable(e: &ModuleElf<'_>) -> Vec<Segment> {
    let endian = e.endian();
    let header = e.elf_header();
    debug_assert!(header.is_type_64());
    e.elf_program_headers()
        .iter()
        .filter(|p| p.p_type(endian) == elf::PT_LOAD && p.p_flags(endian).0 & elf::PF_X.0 != 0)
        .take(MAX_SEGMENTS)
        .map(|p| Segment {
            offset: p.p_offset(endian),
            svma: p.p_vaddr(endian),
            size: p.p_filesz(endian),
        })
        .collect()
}

/// Addresses of writable segments, as they are in memory: uninitialized variables are not in the file.
pub(super) fn writable(e: &ModuleElf<'_>) -> Vec<Range<u64>> {
    let endian = e.endian();
    e.elf_program_headers()
        .iter()
        .filter(|p| p.p_type(endian) == elf::PT_LOAD && p.p_flags(endian).0 & elf::PF_W.0 != 0)
        .take(MAX_SEGMENTS)
        .map(|p| p.p_vaddr(endian)..p.p_vaddr(endian).saturating_add(p.p_memsz(endian)))
        .collect()
}

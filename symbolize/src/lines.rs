//! One line table: addresses to files and lines.

use std::collections::HashSet;
use std::sync::Arc;

use crate::dwarf_util::{Fuel, Slice};

/// Maximum length of a path: the kernel's own limit (PATH_MAX) is 4096.
const MAX_PATH: usize = 4096;

struct Sequence {
    start: u64,
    end: u64,
    /// Its rows, as a range of `Lines::rows`.
    rows: std::ops::Range<usize>,
}

/// 12 bytes instead of 32: large libraries have millions of rows.
struct LineRow {
    /// Offset from the start of the sequence.
    delta: u32,
    file: u32,
    line: u32,
}

/// A parsed line program (DWARF 5, section 6.2).
pub(crate) struct Lines {
    files: Vec<Option<Arc<str>>>,
    sequences: Vec<Sequence>,
    rows: Vec<LineRow>,
}

/// Paths, each stored once: the same headers occur in every unit.
#[derive(Default)]
pub(crate) struct Paths(HashSet<Arc<str>>);

impl Paths {
    fn intern(&mut self, path: &str) -> Arc<str> {
        if let Some(known) = self.0.get(path) {
            return known.clone();
        }
        let new: Arc<str> = path.into();
        self.0.insert(new.clone());
        new
    }
}

impl Lines {
    /// Runs the line program at `offset`. `None` if it is corrupt or the fuel is used up.
    pub fn parse<'a>(
        dwarf: &gimli::Dwarf<Slice<'a>>,
        unit: &gimli::Unit<Slice<'a>>,
        offset: gimli::DebugLineOffset,
        paths: &mut Paths,
        fuel: &mut Fuel,
    ) -> Option<Lines> {
        let address_size = unit.header.address_size();
        let program = dwarf
            .debug_line
            .program(offset, address_size, unit.comp_dir, unit.name)
            .ok()?;
        // Programs may overlap: the cost of each one is counted where it is read.
        fuel.spend(program.header().header_length() as u64)?;
        let mut lines = Lines {
            files: Vec::new(),
            sequences: Vec::new(),
            rows: Vec::new(),
        };
        let mut rows = program.rows();
        let mut open: Option<(u64, usize)> = None;
        while let Ok(Some((_, row))) = rows.next_row() {
            fuel.spend(4)?;
            let address = row.address();
            if row.end_sequence() {
                if let Some((start, first)) = open.take() {
                    // Linkers leave the code of discarded sections at address 0.
                    if start != 0 && start < address {
                        let rows = first..lines.rows.len();
                        lines.sequences.push(Sequence {
                            start,
                            end: address,
                            rows,
                        });
                    } else {
                        lines.rows.truncate(first);
                    }
                }
                continue;
            }
            let (start, first) = *open.get_or_insert((address, lines.rows.len()));
            let Ok(delta) = u32::try_from(address.wrapping_sub(start)) else {
                continue;
            };
            let line = row.line().map_or(0, |l| u32::try_from(l.get()).unwrap_or(0));
            let new = LineRow {
                delta,
                file: u32::try_from(row.file_index()).unwrap_or(u32::MAX),
                line,
            };
            // Of several rows at one address the last one counts.
            match lines.rows[first..].last_mut() {
                Some(last) if last.delta == delta => *last = new,
                _ => lines.rows.push(new),
            }
        }
        lines.rows.shrink_to_fit();
        lines.sequences.sort_by_key(|s| s.start);
        let header = rows.header();
        let count = header.file_names().len() as u64;
        // Files count from 1 up to DWARF 4, and from 0 in DWARF 5.
        let first = u64::from(header.version() < 5);
        if first == 1 {
            lines.files.push(None);
        }
        let mut path = String::new();
        for i in first..first + count {
            let file = header.file(i).and_then(|file| {
                render(dwarf, unit, header, file, &mut path)?;
                fuel.spend(16 + path.len() as u64)?;
                Some(paths.intern(&path))
            });
            lines.files.push(file);
        }
        Some(lines)
    }

    /// The path of a file index of this table.
    pub fn file(&self, index: u64) -> Option<Arc<str>> {
        self.files.get(usize::try_from(index).ok()?)?.clone()
    }

    /// File and line of the row that covers an address. Line 0 means "no line".
    pub fn find(&self, svma: u64) -> Option<(Option<Arc<str>>, Option<u32>)> {
        let after = self.sequences.partition_point(|s| s.start <= svma);
        // Sequences do not overlap in valid files; check a few.
        let sequence = self.sequences[..after].iter().rev().take(4).find(|s| svma < s.end)?;
        let rows = self.rows.get(sequence.rows.clone())?;
        let delta = svma - sequence.start;
        let after = rows.partition_point(|r| u64::from(r.delta) <= delta);
        let row = rows.get(after.checked_sub(1)?)?;
        Some((self.file(row.file.into()), Some(row.line).filter(|&l| l != 0)))
    }
}

/// Compilation directory, directory and file name, joined as far as they are relative.
fn render<'a>(
    dwarf: &gimli::Dwarf<Slice<'a>>,
    unit: &gimli::Unit<Slice<'a>>,
    header: &gimli::LineProgramHeader<Slice<'a>>,
    file: &gimli::FileEntry<Slice<'a>>,
    path: &mut String,
) -> Option<()> {
    let name = dwarf.attr_string(unit, file.path_name()).ok()?;
    path.clear();
    if !is_absolute(name) {
        // Directory 0 is the compilation directory.
        let directory = match file.directory_index() {
            0 => None,
            _ => file.directory(header).and_then(|d| dwarf.attr_string(unit, d).ok()),
        };
        if let Some(comp_dir) = unit.comp_dir.filter(|_| !directory.is_some_and(is_absolute)) {
            push(path, comp_dir)?;
        }
        if let Some(directory) = directory {
            push(path, directory)?;
        }
    }
    push(path, name)
}

fn is_absolute(part: Slice<'_>) -> bool {
    part.slice().first() == Some(&b'/')
}

fn push(path: &mut String, part: Slice<'_>) -> Option<()> {
    if path.len() + part.len() >= MAX_PATH {
        return None;
    }
    if !path.is_empty() && !path.ends_with('/') {
        path.push('/');
    }
    path.push_str(&part.to_string_lossy());
    Some(())
}

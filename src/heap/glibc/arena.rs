//! Arenas: found by their shape in the data of the C library, and checked.

use std::ops::Range;

use super::Target;
use super::walk::{HEADER, Segment};
use crate::event::PAGE;
use crate::process::memory::Memory;
use crate::process::smaps::{Area, Smaps};

/// Places in `struct malloc_state`, bytes. What is around the bins is the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Lists of small free chunks (`fastbinsY`).
    fastbins: Option<u64>,
    bins: u64,
    /// Bytes of a chunk with a mapping of its own that its size leaves out.
    left_out: u64,
}

/// Those of glibc 2.36, and of 2.43, which has no fastbins. Both are aligned to 16 bytes, so neither is taken for the other.
pub const PLACES: [Places; 2] = [
    Places {
        fastbins: Some(16),
        bins: 112,
        left_out: 0,
    },
    Places {
        fastbins: None,
        bins: 24,
        left_out: HEADER,
    },
];

impl Places {
    fn top(self) -> u64 {
        self.bins - 16
    }

    fn next(self) -> u64 {
        self.bins + 2048
    }

    fn system_mem(self) -> u64 {
        self.bins + 2072
    }

    fn max_system_mem(self) -> u64 {
        self.bins + 2080
    }

    /// Bytes of the structure.
    fn size(self) -> u64 {
        self.bins + 2088
    }
}

const FASTBIN_COUNT: usize = 10;
/// Bins, of two words each: the ends of a list, which point to the bin itself less [`HEADER`] if it is empty.
const BIN_COUNT: usize = 127;
/// How many of the bins of the main arena must be empty, at least.
const MIN_EMPTY: usize = 40;
/// Heaps of arenas other than the main one begin at multiples of this (`HEAP_MAX_SIZE`), with `heap_info`.
const HEAP_SIZE: u64 = 64 << 20;
/// Places in `heap_info`, and the largest that it may be.
const HEAP_ARENA: u64 = 0;
const HEAP_PREVIOUS: u64 = 8;
const HEAP_BYTES: u64 = 16;
const MAX_HEAP_INFO: u64 = 128;

/// Bytes of data that are searched: of one mapping, and of all.
const MAX_DATA: u64 = 16 << 20;
const MAX_ALL_DATA: u64 = 64 << 20;
const MAX_ARENAS: usize = 4096;
/// How often an arena is read, at most, until it makes sense.
const ATTEMPTS: usize = 8;
/// Heaps of one arena: 64 GiB.
const MAX_HEAPS: usize = 1024;
/// Chunks in the fastbins of one arena.
const MAX_QUICK: u32 = 10_000;

const UNKNOWN: &str = "an arena of the C library has structures that are not known";

/// An arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    /// avma of its `malloc_state`.
    pub address: u64,
    pub is_main: bool,
    /// What it got from the kernel, bytes.
    pub system: u64,
    pub segments: Vec<Segment>,
    /// The part of `system` that is in no segment: where that is, is not known.
    pub missing: u64,
    /// Where its `malloc_state` has what is read of it.
    pub places: Places,
}

impl Arena {
    /// Whether it made sense, so that its chunks can be read.
    pub fn is_sound(&self) -> bool {
        self.is_main || !self.segments.is_empty()
    }

    /// Bytes of a chunk with a mapping of its own that its size leaves out.
    pub fn left_out_of_mapped(&self) -> u64 {
        self.places.left_out
    }
}

/// A copy of a `malloc_state`.
struct State<'a> {
    address: u64,
    bytes: &'a [u8],
    places: Places,
}

impl State<'_> {
    fn word(&self, at: u64) -> Option<u64> {
        let bytes = self.bytes.get(usize::try_from(at).ok()?..)?;
        bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }

    fn top(&self) -> Option<u64> {
        self.word(self.places.top())
    }

    fn next(&self) -> Option<u64> {
        self.word(self.places.next())
    }

    fn system(&self) -> Option<u64> {
        self.word(self.places.system_mem())
    }

    /// avma of the list that a bin is when it is empty.
    fn empty(&self, bin: usize) -> u64 {
        (self.address + self.places.bins + 16 * bin as u64).wrapping_sub(HEADER)
    }

    /// Bins that are empty; `None` if one is neither that nor a list of chunks.
    fn empty_bins(&self, smaps: &Smaps) -> Option<usize> {
        let mut count = 0;
        for bin in 0..BIN_COUNT {
            let place = self.places.bins + 16 * bin as u64;
            let (first, last) = (self.word(place)?, self.word(place + 8)?);
            let empty = self.empty(bin);
            if (first, last) == (empty, empty) {
                count += 1;
            } else if ![first, last].into_iter().all(|chunk| is_chunk_address(smaps, chunk)) {
                return None;
            }
        }
        Some(count)
    }

    fn is_sound(&self, smaps: &Smaps) -> bool {
        let most = self.word(self.places.max_system_mem());
        let words = (self.system(), most, self.next(), self.top());
        let (Some(system), Some(most), Some(next), Some(top)) = words else {
            return false;
        };
        // Before its first allocation an arena has no memory, and its top is its first bin.
        let has_top = if system == 0 {
            top == self.empty(0)
        } else {
            is_chunk_address(smaps, top)
        };
        system <= most && next != 0 && has_top && self.empty_bins(smaps).is_some()
    }
}

/// Whether chunks may have this address: there is writable memory, and it is aligned.
fn is_chunk_address(smaps: &Smaps, avma: u64) -> bool {
    avma.is_multiple_of(HEADER)
        && smaps
            .area_of(avma)
            .is_some_and(|area| area.is_writable && !area.is_shared && !area.is_file)
}

/// All arenas, the main one first.
///
/// # Errors
/// Why there are none that can be read, as text.
pub fn find(target: &Target) -> Result<Vec<Arena>, String> {
    let places = data(target.smaps);
    if places.is_empty() {
        return Err(other_library(target.smaps).into());
    }
    let main = places.into_iter().find_map(|range| main_arena(target, range));
    let Some((main, places)) = main else {
        let why =
            "the structures of the C library's heap are not those of glibc 2.36 or 2.43, or they are not in memory";
        return Err(why.into());
    };
    let (mut arenas, mut at, mut unsound) = (Vec::new(), main, 0);
    loop {
        let (arena, next) = read_sound(target, at, at == main, places)?;
        unsound += usize::from(!arena.is_sound());
        arenas.push(arena);
        if next == main {
            let is_known = unsound == 0 || 2 * unsound < arenas.len();
            return if is_known { Ok(arenas) } else { Err(UNKNOWN.into()) };
        }
        if arenas.len() >= MAX_ARENAS || arenas.iter().any(|arena| arena.address == next) {
            return Err("the list of the C library's arenas does not end".into());
        }
        at = next;
    }
}

/// Reads an arena until it makes sense: threads use it meanwhile. Returns also the avma of the next one.
fn read_sound(target: &Target, at: u64, is_main: bool, places: Places) -> Result<(Arena, u64), String> {
    let mut bytes = vec![0; places.size() as usize];
    let mut last = None;
    for _ in 0..ATTEMPTS {
        if !target.memory().read(at, &mut bytes) {
            return Err("an arena of the C library is not in memory".into());
        }
        let state = State {
            address: at,
            bytes: &bytes,
            places,
        };
        let arena = if is_main {
            main_segments(target, &state)
        } else {
            heaps(target, &state)
        };
        let (Some(system), Some(next)) = (state.system(), state.next()) else {
            break;
        };
        if let Some(arena) = arena {
            return Ok((arena, next));
        }
        last = Some((system, next));
    }
    let (system, next) = last.filter(|_| !is_main).ok_or(UNKNOWN)?;
    let arena = Arena {
        address: at,
        is_main,
        system,
        segments: Vec::new(),
        missing: system,
        places,
    };
    Ok((arena, next))
}

/// The writable data of glibc, with what is behind that of the file. A program without a C library may have it inside.
fn data(smaps: &Smaps) -> Vec<Range<u64>> {
    let is_glibc = |name: &[u8]| {
        let base = name.rsplit(|c| *c == b'/').next().unwrap_or(name);
        base.starts_with(b"libc.so.6") || base.starts_with(b"libc-2.")
    };
    let of = |is_meant: &dyn Fn(&Area) -> bool| {
        let mut ranges = Vec::new();
        let mut left = MAX_ALL_DATA;
        for (index, area) in smaps.areas.iter().enumerate() {
            let is_data = area.is_file && is_meant(area);
            let is_behind = smaps.file_before(index).is_some_and(is_meant);
            let size = area.end - area.start;
            if (is_data || is_behind) && area.is_writable && !area.is_shared && size <= MAX_DATA.min(left) {
                left -= size;
                ranges.push(area.start..area.end);
            }
        }
        ranges
    };
    let found = of(&|area| is_glibc(smaps.name(area)));
    let loader = |area: &Area| {
        smaps
            .name(area)
            .windows(4)
            .any(|part| part == b"/ld-" || part == b"/ld.")
    };
    if !found.is_empty() || smaps.areas.iter().any(loader) {
        return found;
    }
    let program = smaps
        .areas
        .iter()
        .find(|area| area.is_file)
        .map(|area| smaps.name(area));
    of(&|area| Some(smaps.name(area)) == program)
}

/// Why there is no glibc.
fn other_library(smaps: &Smaps) -> &'static str {
    let has = |part: &[u8]| {
        let mut names = smaps.areas.iter().map(|area| smaps.name(area));
        names.any(|name| name.windows(part.len()).any(|piece| piece == part))
    };
    if has(b"/ld-musl") {
        "the C library is musl, whose heap is not known here"
    } else {
        "no C library is mapped that is known here"
    }
}

/// avma of the main arena in this range, and what it has where.
fn main_arena(target: &Target, range: Range<u64>) -> Option<(u64, Places)> {
    let memory = target.memory();
    for present in target.present.within(range) {
        let mut bytes = vec![0; usize::try_from(present.end - present.start).ok()?];
        if !memory.read(present.start, &mut bytes) {
            continue;
        }
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .filter_map(|word| word.try_into().ok())
            .map(u64::from_le_bytes)
            .collect();
        let address = |index: usize| present.start + 8 * index as u64;
        let is_empty = |index: usize| {
            let itself = address(index).wrapping_sub(HEADER);
            words.get(index) == Some(&itself) && words.get(index + 1) == Some(&itself)
        };
        // How many of the words before each, two by two, are empty bins.
        let mut before = vec![0usize; words.len() + 2];
        for index in 0..words.len() {
            before[index + 2] = before[index] + usize::from(is_empty(index));
        }
        for start in (0..words.len()).step_by(2) {
            for places in PLACES {
                let first = start + (places.bins / 8) as usize;
                let is_inside = start + (places.size() / 8) as usize <= words.len();
                if !is_inside || before[first + 2 * BIN_COUNT] - before[first] < MIN_EMPTY {
                    continue;
                }
                let state = State {
                    address: address(start),
                    bytes: bytes.get(8 * start..)?,
                    places,
                };
                if state.is_sound(target.smaps) {
                    return Some((state.address, places));
                }
            }
        }
    }
    None
}

/// The main arena, whose memory is what the kernel calls `[heap]`.
fn main_segments(target: &Target, state: &State) -> Option<Arena> {
    let (system, top) = (state.system()?, state.top()?);
    let mut arena = Arena {
        address: state.address,
        is_main: true,
        system,
        segments: Vec::new(),
        missing: system,
        places: state.places,
    };
    // One mapping after the other, where the program has given advice on a part of it: NumPy does for large arrays.
    let areas = target.smaps.areas.iter();
    let heap = areas
        .filter(|area| target.smaps.name(area) == b"[heap]")
        .map(|area| area.start..area.end)
        .reduce(|heap, area| heap.start..if heap.end == area.start { area.end } else { heap.end });
    // The kernel may have refused to extend it; then the rest is in mappings, which nothing says where they are.
    if let Some(heap) = heap.filter(|heap| heap.contains(&top)) {
        let end = top + chunk_size(target, top)?;
        if end > heap.end {
            return None;
        }
        // What the program took of it before: a statically linked one has the variables of its main thread there.
        let start = end.saturating_sub(system).next_multiple_of(HEADER).max(heap.start);
        arena.missing = system.saturating_sub(end - start);
        arena.segments.push(Segment {
            range: start..end,
            first: start,
            top: Some(top),
            is_main: true,
        });
    }
    Some(arena)
}

/// Another arena, which has one heap or more.
fn heaps(target: &Target, state: &State) -> Option<Arena> {
    let memory = target.memory();
    let (system, top) = (state.system()?, state.top()?);
    if !state.is_sound(target.smaps) || !system.is_multiple_of(PAGE) {
        return None;
    }
    // `heap_info` is before the arena in its first heap, and its size is not the same in all versions.
    let first_heap = state.address - state.address % HEAP_SIZE;
    let info = state.address - first_heap;
    if !(HEAP_BYTES + 8..=MAX_HEAP_INFO).contains(&info) {
        return None;
    }
    let mut arena = Arena {
        address: state.address,
        is_main: false,
        system,
        segments: Vec::new(),
        missing: system,
        places: state.places,
    };
    let mut heap = top - top % HEAP_SIZE;
    for _ in 0..MAX_HEAPS {
        let size = memory.u64(heap.checked_add(HEAP_BYTES)?)?;
        let is_sound =
            memory.u64(heap + HEAP_ARENA)? == state.address && size <= HEAP_SIZE && size.is_multiple_of(PAGE);
        let has_top = (heap..heap.saturating_add(size)).contains(&top);
        if !is_sound || has_top && top + chunk_size(target, top)? != heap + size {
            return None;
        }
        let after = if heap == first_heap {
            state.address + state.places.size()
        } else {
            heap + info
        };
        arena.missing = arena.missing.saturating_sub(size);
        arena.segments.push(Segment {
            range: heap..heap + size,
            first: after.checked_next_multiple_of(HEADER)?,
            top: has_top.then_some(top),
            is_main: false,
        });
        if heap == first_heap {
            return Some(arena);
        }
        heap = memory.u64(heap + HEAP_PREVIOUS)?;
        if !heap.is_multiple_of(HEAP_SIZE) || arena.segments.iter().any(|segment| segment.range.start == heap) {
            return None;
        }
    }
    None
}

fn chunk_size(target: &Target, chunk: u64) -> Option<u64> {
    let size = target.memory().u64(chunk.checked_add(8)?)? & !7;
    // A heap is never as large as half of all addresses: sums do not overflow.
    (size < 1 << 47).then_some(size)
}

/// Bytes of the chunks in an arena's fastbins, which are free and look as if they were in use.
pub fn quick_free(target: &Target, arena: &Arena) -> u64 {
    let memory = target.memory();
    let (mut bytes, mut left) = (0u64, MAX_QUICK);
    let Some(fastbins) = arena.places.fastbins else {
        return 0;
    };
    for bin in 0..FASTBIN_COUNT as u64 {
        let mut at = memory.u64(arena.address + fastbins + 8 * bin).unwrap_or(0);
        // Chunks of a bin have one size; the first two sizes are those of no use on 64-bit CPUs.
        let size = (bin + 2) * HEADER;
        while at != 0 && left > 0 && arena.segments.iter().any(|segment| segment.range.contains(&at)) {
            left -= 1;
            if left.is_multiple_of(1 << 10) && target.is_over() {
                return bytes;
            }
            let (Some(head), Some(next)) = (memory.u64(at + 8), memory.u64(at + HEADER)) else {
                break;
            };
            if head & !7 != size {
                break;
            }
            bytes += size;
            // Since glibc 2.32 a link is changed by its own address (`PROTECT_PTR`).
            let plain = next ^ (at + HEADER) >> 12;
            let is_link = |link: u64| link == 0 || link.is_multiple_of(HEADER);
            at = if is_link(plain) { plain } else { next };
        }
    }
    bytes
}

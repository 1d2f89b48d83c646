//! The heap of the GNU C library, read from outside: its arenas, their chunks, and chunks in mappings of their own.
//!
//! Structures are those of `malloc/malloc.c` and `malloc/arena.c`, glibc 2.36 and 2.43, for 64-bit CPUs. `malloc_state` is found
//! by its shape, without symbols: most of its bins are empty, and an empty bin points to itself. Everything about it is
//! checked before it is used, since other versions have other structures: then the heap stays undivided.

mod arena;
mod mapped;
#[cfg(test)]
mod tests;
mod walk;

use std::ops::Range;
use std::time::Duration;

use super::mappings::{Claim, Part};
use super::present::{Present, PresentMemory};
use crate::process::memory::Memory;
use crate::process::smaps::Smaps;
use crate::sys::clock;
pub use arena::{Arena, PLACES, Places};
pub use walk::{Chunks, Segment, Walk};

/// Chunks in use of so many bytes or more are listed one by one.
pub const LARGE: u64 = 64 << 10;
/// Chunks that are listed.
const MAX_LARGE: usize = 1 << 18;

/// A block that the program has got from the C library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LargeBlock {
    /// avma that the program got.
    pub address: u64,
    /// Bytes of its chunk.
    pub bytes: u64,
    /// It has a mapping of its own.
    pub is_mapped: bool,
}

/// A block in use that a walk has met.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// avma that the program got.
    pub address: u64,
    /// Bytes of its chunk.
    pub bytes: u64,
    /// It has a mapping of its own.
    pub is_mapped: bool,
    /// Its first bytes.
    pub head: &'a [u8],
}

impl Block<'_> {
    /// Bytes that the program may use: not the sizes in its chunk, of which one is the next chunk's where there is one.
    pub fn usable(&self) -> u64 {
        self.bytes.saturating_sub(if self.is_mapped { walk::HEADER } else { 8 })
    }
}

/// What an arena has, bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArenaUse {
    /// avma of its `malloc_state`.
    pub address: u64,
    pub is_main: bool,
    /// What it got from the kernel.
    pub system: u64,
    /// The sum of chunks in use. Those that threads keep for themselves (tcache) count as in use, as in mallinfo2(3).
    pub in_use: u64,
    pub free: u64,
    /// The part of `free` that is resident.
    pub free_resident: u64,
    /// The part of it in whole pages, which malloc_trim(3) gives back.
    pub returnable: u64,
    /// What could not be walked.
    pub lost: u64,
}

/// The heap of the C library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Glibc {
    /// The main one first.
    pub arenas: Vec<ArenaUse>,
    /// Bytes of chunks in mappings of their own.
    pub mapped: u64,
    /// Chunks in use of [`LARGE`] bytes and more, in ascending order of addresses.
    pub large: Vec<LargeBlock>,
    /// False: there are more large blocks than are listed, or more pages than were searched for them.
    pub is_complete: bool,
}

/// A process whose C heap is read.
pub struct Target<'a> {
    pub smaps: &'a Smaps,
    pub present: &'a Present,
    pub memory: &'a dyn Memory,
    pub deadline: Deadline,
}

/// When a walk is to end, whether or not everything has been read.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    /// CPU time of this process, ns.
    cpu: u64,
    /// CLOCK_MONOTONIC, ns.
    end: u64,
}

impl Deadline {
    /// After so much CPU time. A machine may have other work: elapsed time may be five times as long.
    pub fn after(cpu: Duration) -> Deadline {
        let ns = u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX);
        Deadline {
            cpu: clock::process_cpu_time().saturating_add(ns),
            end: clock::now().saturating_add(ns.saturating_mul(5)),
        }
    }

    fn is_over(self) -> bool {
        clock::process_cpu_time() >= self.cpu || clock::now() >= self.end
    }
}

impl Target<'_> {
    fn is_over(&self) -> bool {
        self.deadline.is_over()
    }

    fn memory(&self) -> PresentMemory<'_> {
        PresentMemory {
            memory: self.memory,
            present: self.present,
        }
    }
}

/// Finds the arenas, the main one first.
///
/// # Errors
/// Why the heap cannot be divided, as text.
pub fn find(target: &Target) -> Result<Vec<Arena>, String> {
    arena::find(target)
}

/// Reads the heap, and adds what its ranges are to `claims`, which has those of others. `visit` gets each block in use.
pub fn read(target: &Target, arenas: &[Arena], claims: &mut Vec<Claim>, visit: &mut dyn FnMut(Block)) -> Glibc {
    let mut glibc = Glibc::default();
    let mut large = Vec::new();
    let mut each = |block: Block| {
        if block.bytes >= LARGE && large.len() < MAX_LARGE {
            large.push(LargeBlock {
                address: block.address,
                bytes: block.bytes,
                is_mapped: block.is_mapped,
            });
        }
        visit(block);
    };
    for arena in arenas {
        glibc.arenas.push(read_arena(target, arena, claims, &mut each));
    }
    let mut taken: Vec<Range<u64>> = claims.iter().map(|claim| claim.range.clone()).collect();
    taken.sort_unstable_by_key(|range| range.start);
    let left_out = arenas.first().map_or(0, Arena::left_out_of_mapped);
    let (chunks, is_complete) = mapped::find(target, &taken, left_out);
    let mut head = [0; walk::HEAD];
    for range in chunks {
        let bytes = range.end - range.start;
        glibc.mapped = glibc.mapped.saturating_add(bytes);
        let address = range.start + walk::HEADER;
        let has_head = target.memory().read(address, &mut head);
        each(Block {
            address,
            bytes,
            is_mapped: true,
            head: if has_head { &head } else { &[] },
        });
        claims.push(Claim::whole(range, Part::CLarge));
    }
    glibc.is_complete = is_complete && large.len() < MAX_LARGE;
    glibc.large = large;
    glibc.large.sort_unstable();
    glibc
}

fn read_arena(target: &Target, arena: &Arena, claims: &mut Vec<Claim>, visit: &mut dyn FnMut(Block)) -> ArenaUse {
    let mut sum = Chunks::default();
    // Chunks of fastbins look like chunks in use.
    let mut left = arena::quick_free(target, arena);
    let mut quick = 0;
    for segment in &arena.segments {
        let found = Walk::new(target, segment).run(visit);
        let quick_here = left.min(found.used_resident);
        left -= quick_here;
        quick += quick_here;
        claims.push(Claim {
            range: segment.range.clone(),
            amounts: vec![
                (Part::CInUse, found.used_resident - quick_here),
                (Part::CFree, found.free_resident + quick_here),
                (Part::Unknown, found.lost_resident),
            ],
        });
        sum.add(&found);
    }
    let free = sum.free.saturating_add(quick);
    let lost = sum.lost.saturating_add(arena.missing);
    ArenaUse {
        address: arena.address,
        is_main: arena.is_main,
        system: arena.system,
        in_use: arena.system.saturating_sub(free).saturating_sub(lost),
        free,
        free_resident: sum.free_resident.saturating_add(quick),
        returnable: sum.returnable,
        lost,
    }
}

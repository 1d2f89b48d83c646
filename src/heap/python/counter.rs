//! Draws pools at random, and adds up what is in them.
//!
//! A pool is drawn, not a block: blocks of a type lie together. The same goes for windows of the C heap, which the
//! caller draws. What was drawn is a prefix of a random order, so it may end whenever the time is over.

use std::ops::Range;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::mimalloc::{self, MiPage, PageHeader};
use super::owned::{Buffer, Members, block_size};
use super::pools::{self, ALIGNMENT, MAX_BLOCK, PoolHeader, SIZES};
use super::types::{TypeInfo, Types};
use super::{Allocator, Instances, LARGE, LargeBuffer, PythonCensus, PythonHeap, ResidentPages, TypeCensus};
use crate::bytes::u64_at;
use crate::capture::common::rng::Rng;
use crate::event::PAGE;
use crate::heap::estimate::Estimate;
use crate::process::memory::Memory;
use crate::sys::clock;

mod sums;

use sums::{Drawn, Quantity, Row, Source, less};

/// Pools that are read with one call.
const BATCH: usize = 16;
/// Pools that are known at most: 256 GiB of pools of 16 KiB.
const MAX_POOLS: usize = 1 << 24;
/// Bits of a pool's place that are its number in its arena.
const SLOT_BITS: u32 = 8;
/// How often a pool is read again that has changed while it was read: one in constant use should not be left out.
const MAX_RETRIES: u32 = 3;
/// Sizes of buffers that are read with one call.
const PENDING: usize = 64;
/// Bytes that are read for the size of a buffer at most.
const MAX_WANTED: usize = 1024;
/// Large buffers that are kept at most.
const MAX_LARGE: usize = 1 << 18;
/// Bytes of the largest blocks that are read in full, and of what is read of larger ones.
const MAX_READ_BLOCK: u64 = 8 << 10;
const HEAD: usize = 256;
/// Bytes ahead of the data of a block in debug builds, and of all that is added to it.
const DEBUG_HEADER: usize = 16;
const DEBUG_BYTES: u64 = 24;
/// Elapsed time, in multiples of the CPU time that is allowed: a machine may have other work.
const PATIENCE: u32 = 5;

/// A buffer whose size is to be read.
#[derive(Clone, Copy)]
struct Pending {
    owner: u32,
    buffer: Buffer,
    at: u64,
    length: usize,
}

/// Counts objects by type.
pub struct Counter<'a> {
    heap: &'a PythonHeap,
    memory: &'a dyn Memory,
    resident: &'a dyn ResidentPages,
    types: Types<'a>,
    members: Members,
    /// By index of the type.
    rows: Vec<Row>,
    touched: Vec<u32>,
    /// By size: blocks that are no objects, and those of them that objects own.
    others: [Row; SIZES],
    owned: [Row; SIZES],
    pending: Vec<Pending>,
    large: FxHashMap<u64, (u64, u32)>,
    /// Large blocks of mimalloc that are no objects: address and bytes.
    own_large: FxHashMap<u64, u64>,
    pools: Drawn,
    c_heap: Drawn,
    /// Resident bytes of pools in use: all, those of blocks in use, and the others.
    in_use: Quantity,
    used: Quantity,
    idle: Quantity,
    torn: u64,
    has_debug_headers: bool,
    has_read_all: bool,
    /// Bytes of the C heap that were not read: some of its blocks may be objects.
    missed: u64,
    is_truncated: bool,
    /// All bytes that are in memory.
    all_resident: u64,
    /// Of a type of which some objects are wanted.
    instances: Option<Instances>,
}

impl<'a> Counter<'a> {
    pub fn new(heap: &'a PythonHeap, memory: &'a dyn Memory, resident: &'a dyn ResidentPages) -> Counter<'a> {
        let has_pools = matches!(heap.allocator, Allocator::Pools(_));
        let without_types = if has_pools { heap.arenas.clone() } else { Vec::new() };
        Counter {
            heap,
            memory,
            resident,
            types: Types::new(memory, heap.objects, heap.placement, without_types),
            members: Members::new(heap.objects, &heap.layout, has_pools),
            rows: Vec::new(),
            touched: Vec::new(),
            others: [Row::default(); SIZES],
            owned: [Row::default(); SIZES],
            pending: Vec::new(),
            large: FxHashMap::default(),
            own_large: FxHashMap::default(),
            pools: Drawn::default(),
            c_heap: Drawn::default(),
            in_use: Quantity::default(),
            used: Quantity::default(),
            idle: Quantity::default(),
            torn: 0,
            has_debug_headers: false,
            has_read_all: false,
            missed: 0,
            is_truncated: false,
            all_resident: resident.bytes_in(0..u64::MAX),
            instances: None,
        }
    }

    /// Draws some objects from those that are counted from now on.
    pub fn draw_instances(&mut self, instances: Instances) {
        self.instances = Some(instances);
    }

    /// Those that were drawn.
    pub fn take_instances(&mut self) -> Option<Instances> {
        self.instances.take()
    }

    /// Reads pools in random order, until so much CPU time of this process has been used; `None`: all of them. To be
    /// called once.
    pub fn count_pools(&mut self, budget: Option<Duration>) {
        let mut places = self.places();
        let mut rng = Rng::new(clock::now());
        let end = |clock: u64, factor: u32| {
            let budget = budget.map(|budget| u64::try_from((budget * factor).as_nanos()).unwrap_or(u64::MAX));
            budget.map(|budget| clock.saturating_add(budget))
        };
        let (cpu_end, end) = (end(clock::process_cpu_time(), 1), end(clock::now(), PATIENCE));
        let mut buffer = Vec::new();
        let mut read = 0;
        while read < places.len() {
            let batch = BATCH.min(places.len() - read);
            for next in read..read + batch {
                let other = next + rng.below((places.len() - next) as u64) as usize;
                places.swap(next, other);
            }
            // Memory is read faster in ascending order.
            let mut drawn = places.get(read..read + batch).unwrap_or_default().to_vec();
            drawn.sort_unstable();
            self.count_batch(&drawn, &mut buffer);
            read += batch;
            let is_over = |end: Option<u64>, now: fn() -> u64| end.is_some_and(|end| now() >= end);
            if is_over(cpu_end, clock::process_cpu_time) || is_over(end, clock::now) {
                break;
            }
        }
        self.has_read_all = read == places.len() && !self.is_truncated;
        let in_use = match &self.heap.allocator {
            Allocator::Pools(arenas) => arenas.iter().map(|arena| u64::from(arena.in_use)).sum(),
            Allocator::Pages(_) => places.len() as u64,
        };
        let seen = self.pools.units + self.torn;
        self.pools.all = if self.has_read_all { seen } else { seen.max(in_use) };
    }

    /// All that may be drawn: of pools that have headers, the number of the arena and that of the pool in it; of pages,
    /// the index.
    fn places(&mut self) -> Vec<u32> {
        let heap = self.heap;
        let arenas = match &heap.allocator {
            Allocator::Pools(arenas) => arenas,
            Allocator::Pages(pages) => {
                let (small, large): (Vec<_>, Vec<_>) = (0..).zip(pages).partition(|(_, page)| page.block < LARGE);
                // There are few of them, and they may have most of the memory.
                large.into_iter().for_each(|(_, page)| self.count_large(page));
                return small.into_iter().map(|(index, _)| index).collect();
            }
        };
        let mut places = Vec::new();
        for (arena, index) in arenas.iter().zip(0_u32..) {
            let slots = arena.pools.min(1 << SLOT_BITS);
            if places.len() + slots as usize > MAX_POOLS || index >= 1 << (u32::BITS - SLOT_BITS) {
                self.is_truncated = true;
                break;
            }
            places.extend((0..slots).map(|slot| index << SLOT_BITS | slot));
        }
        places
    }

    fn count_batch(&mut self, places: &[u32], buffer: &mut Vec<u8>) {
        let heap = self.heap;
        match &heap.allocator {
            Allocator::Pools(arenas) => {
                let size = u64::from(heap.layout.pool);
                let at = |place: &u32| {
                    let slot = u64::from(place & ((1 << SLOT_BITS) - 1));
                    let arena = arenas.get((place >> SLOT_BITS) as usize)?;
                    arena.first_pool.checked_add(slot * size)
                };
                let pools: Vec<u64> = places.iter().filter_map(at).collect();
                self.count_pool_batch(&pools, buffer);
            }
            Allocator::Pages(pages) => {
                for page in places.iter().filter_map(|place| pages.get(*place as usize)) {
                    let is_counted = (0..=MAX_RETRIES).any(|_| self.count_page(page, buffer).is_some());
                    self.torn += u64::from(!is_counted);
                }
            }
        }
    }

    fn count_pool_batch(&mut self, pools: &[u64], buffer: &mut Vec<u8>) {
        let size = self.heap.layout.pool as usize;
        let is_whole = |at: &u64| self.resident.bytes_in(*at..at.saturating_add(size as u64)) == size as u64;
        let (whole, partial): (Vec<u64>, Vec<u64>) = pools.iter().partition(|at| is_whole(at));
        buffer.resize(size * BATCH, 0);
        let mut rest = whole.as_slice();
        while !rest.is_empty() {
            let pieces: Vec<(u64, usize)> = rest.iter().map(|at| (*at, size)).collect();
            let copied = self.memory.read_pieces(&pieces, buffer) / size;
            for (at, bytes) in rest.iter().take(copied).zip(buffer.chunks_exact(size)) {
                if !self.count_pool(*at, bytes, &[]) {
                    self.count_changing_pool(*at);
                }
            }
            // The one that could not be read has gone.
            self.torn += u64::from(copied < rest.len());
            rest = rest.get(copied + 1..).unwrap_or_default();
        }
        for at in partial {
            let bytes = buffer.get_mut(..size).unwrap_or_default();
            let pages = self.read_resident(at, bytes);
            if pages.first() == Some(&true) && !self.count_pool(at, bytes, &pages) {
                self.torn += 1;
            }
        }
    }

    /// Counts a pool that made no sense when it was read.
    fn count_changing_pool(&mut self, at: u64) {
        let mut bytes = vec![0; self.heap.layout.pool as usize];
        let mut is_counted = || self.memory.read(at, &mut bytes) && self.count_pool(at, &bytes, &[]);
        if !(0..MAX_RETRIES).any(|_| is_counted()) {
            self.torn += 1;
        }
    }

    /// Reads those pages of a range that are in memory, and says which ones; the others are filled with zeros.
    fn read_resident(&self, at: u64, bytes: &mut [u8]) -> Vec<bool> {
        let read = |(index, page): (u64, &mut [u8])| {
            let start = at.saturating_add(index * PAGE);
            let length = page.len() as u64;
            let is_resident = self.resident.bytes_in(start..start.saturating_add(length)) == length;
            let is_read = is_resident && self.memory.read(start, page);
            if !is_read {
                page.fill(0);
            }
            is_read
        };
        (0..).zip(bytes.chunks_mut(PAGE as usize)).map(read).collect()
    }

    /// Counts the blocks of a pool. `pages`: which of them are in memory; none if all are. False: it makes no sense.
    fn count_pool(&mut self, at: u64, bytes: &[u8], pages: &[bool]) -> bool {
        if PoolHeader::parse(bytes).is_some_and(|header| header.count == 0) {
            return true;
        }
        let Some(blocks) = pools::LiveBlocks::of(bytes, at) else {
            return false;
        };
        let offsets = blocks.offsets().map(|offset| offset as u64);
        let used = self.count_blocks(at, bytes, pages, offsets, blocks.block.into(), true);
        self.end_pool(at..at.saturating_add(bytes.len() as u64), used);
        true
    }

    /// Counts blocks of a size that begin at these offsets. Returns the bytes of those that are in memory.
    fn count_blocks(
        &mut self,
        at: u64,
        bytes: &[u8],
        pages: &[bool],
        offsets: impl Iterator<Item = u64>,
        size: u64,
        may_be_objects: bool,
    ) -> u64 {
        let row = self.size_row(size);
        let mut used = 0;
        for offset in offsets {
            let Ok(start) = usize::try_from(offset) else { break };
            if pages.get(start / PAGE as usize) == Some(&false) {
                continue;
            }
            let block = bytes
                .get(start..start.saturating_add(size as usize))
                .unwrap_or_default();
            let (data_at, data) = self.data_of(at.saturating_add(offset), block);
            let is_object = may_be_objects && self.count_block(data_at, size, data).is_some();
            if !is_object && let Some(others) = self.others.get_mut(row) {
                others.add(1, size);
            }
            used += size;
        }
        used
    }

    /// Ends a pool, or a page, of which so many bytes are in use.
    fn end_pool(&mut self, range: Range<u64>, used: u64) {
        let resident = self.resident.bytes_in(range);
        let used = used.min(resident);
        self.in_use.unit = resident;
        self.used.unit = used;
        self.idle.unit = resident - used;
        self.pools.units += 1;
        self.end_unit(Source::Pools);
        for quantity in [&mut self.in_use, &mut self.used, &mut self.idle] {
            quantity.end_unit(Source::Pools);
        }
    }

    /// The row of blocks of a size. Those of mimalloc, which has more sizes, are in one.
    fn size_row(&self, size: u64) -> usize {
        match self.heap.allocator {
            Allocator::Pools(_) => (size / u64::from(ALIGNMENT)).saturating_sub(1) as usize,
            Allocator::Pages(_) => 0,
        }
    }

    /// Counts the blocks of a page of mimalloc. `None`: it has changed, or makes no sense.
    fn count_page(&mut self, page: &MiPage, buffer: &mut Vec<u8>) -> Option<()> {
        let (header, length) = self.page_header(page)?;
        let is_small = page.block <= MAX_READ_BLOCK;
        buffer.resize(if is_small { length } else { 0 }, 0);
        let pages = self.read_resident(page.area.start, buffer);
        let word = |offset: u64| {
            if is_small {
                u64_at(buffer, usize::try_from(offset).ok()?)
            } else {
                self.memory.u64(page.area.start.checked_add(offset)?)
            }
        };
        let blocks = mimalloc::LiveBlocks::of(&header, &page.area, word)?;
        let (at, size) = (page.area.start, blocks.block);
        let used = if is_small {
            self.count_blocks(at, buffer, &pages, blocks.offsets(), size, page.is_object)
        } else {
            let row = self.size_row(size);
            let mut used = 0;
            for offset in blocks.offsets() {
                let start = at.saturating_add(offset);
                let mut head = [0; HEAD];
                let is_read = page.is_object && self.memory.read(start, &mut head);
                let is_object = is_read && self.count_block(start, size, &head).is_some();
                if !is_object && let Some(others) = self.others.get_mut(row) {
                    others.add(1, size);
                }
                used += self.resident.bytes_in(start..start.saturating_add(size));
            }
            used
        };
        self.end_pool(page.area.clone(), used);
        Some(())
    }

    /// The header of a page as it is now, and the bytes up to its last block. `None`: the page is another one.
    fn page_header(&self, page: &MiPage) -> Option<(PageHeader, usize)> {
        let mut bytes = [0; PageHeader::BYTES];
        self.memory.read(page.header, &mut bytes).then_some(())?;
        let header = PageHeader::parse(&bytes)?;
        let is_same = header.block_size(&page.area) == page.block && (header.tag != 0) == page.is_object;
        is_same.then_some(())?;
        Some((header, usize::try_from(header.end(&page.area)?).ok()?))
    }

    /// Counts the blocks of a page of large ones.
    fn count_large(&mut self, page: &MiPage) {
        let word = |offset: u64| self.memory.u64(page.area.start.checked_add(offset)?);
        let header = self.page_header(page);
        let blocks = header.and_then(|(header, _)| mimalloc::LiveBlocks::of(&header, &page.area, word));
        let mut used = 0;
        for offset in blocks.iter().flat_map(|blocks| blocks.offsets()) {
            let start = page.area.start.saturating_add(offset);
            let end = start.saturating_add(page.block);
            let mut head = [0; HEAD];
            let is_read = page.is_object && self.memory.read(start, &mut head);
            let is_object = is_read && self.count_known_block(start, page.block, &head).is_some();
            if !is_object && self.own_large.len() < MAX_LARGE {
                self.own_large.insert(start, page.block);
            }
            used += self.resident.bytes_in(start..end);
        }
        let resident = self.resident.bytes_in(page.area.clone());
        let used = used.min(resident);
        self.in_use.exact += resident;
        self.used.exact += used;
        self.idle.exact += resident - used;
    }

    /// What the program has of a block at an address, and its address. Debug builds, and `PYTHONMALLOC=debug`, put the
    /// size ahead of it,
    /// a letter for the kind of memory and the byte 0xfd seven times (`_PyMem_DebugRawAlloc`, Objects/obmalloc.c,
    /// v3.8.18 to v3.15.0).
    fn data_of<'b>(&mut self, at: u64, head: &'b [u8]) -> (u64, &'b [u8]) {
        match head.get(8..DEBUG_HEADER) {
            Some([b'm' | b'o' | b'r', 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd]) => {
                self.has_debug_headers = true;
                let data = head.get(DEBUG_HEADER..).unwrap_or_default();
                (at.saturating_add(DEBUG_HEADER as u64), data)
            }
            _ => (at, head),
        }
    }

    /// Counts a block, if it is an object. Returns the index of its type.
    fn count_block(&mut self, at: u64, size: u64, head: &[u8]) -> Option<u32> {
        let (index, offset) = self.types.classify(head, size)?;
        self.touch(index)?.add(1, size);
        self.offer(index, at.saturating_add(offset));
        let buffer = self
            .types
            .get(index)
            .and_then(|info| self.members.buffer(info, head, offset, at));
        if let Some(buffer) = buffer {
            match self.members.wanted(buffer) {
                None => self.own(index, buffer, &[]),
                Some((at, length)) if length <= MAX_WANTED => self.pending.push(Pending {
                    owner: index,
                    buffer,
                    at,
                    length,
                }),
                Some(_) => {}
            }
            if self.pending.len() >= PENDING {
                self.read_pending();
            }
        }
        Some(index)
    }

    /// Lets an object be drawn, if some of its type are wanted.
    fn offer(&mut self, index: u32, object: u64) {
        if let (Some(instances), Some(info)) = (&mut self.instances, self.types.get(index)) {
            instances.offer(&info.full_name, object);
        }
    }

    /// The row of a type.
    fn row(&mut self, index: u32) -> Option<&mut Row> {
        let place = index as usize;
        if self.rows.len() <= place {
            self.rows.resize(place + 1, Row::default());
        }
        self.rows.get_mut(place)
    }

    /// The row of a type in the unit that is being counted.
    fn touch(&mut self, index: u32) -> Option<&mut Row> {
        if !self.row(index)?.is_touched {
            self.touched.push(index);
        }
        let row = self.row(index)?;
        row.is_touched = true;
        Some(row)
    }

    fn read_pending(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        let mut buffer = vec![0; pending.iter().map(|wanted| wanted.length).sum()];
        let mut rest = pending.as_slice();
        while !rest.is_empty() {
            let pieces: Vec<(u64, usize)> = rest.iter().map(|wanted| (wanted.at, wanted.length)).collect();
            let copied = self.memory.read_pieces(&pieces, &mut buffer);
            let mut from = 0;
            let mut done = 0;
            for wanted in rest {
                let end = from + wanted.length;
                let Some(bytes) = buffer.get(from..end).filter(|_| end <= copied) else {
                    break;
                };
                self.own(wanted.owner, wanted.buffer, bytes);
                (from, done) = (end, done + 1);
            }
            // What could not be read is skipped.
            rest = rest.get(done + 1..).unwrap_or_default();
        }
        pending.clear();
        self.pending = pending;
    }

    /// Adds a buffer to what the objects of a type own.
    fn own(&mut self, owner: u32, buffer: Buffer, bytes: &[u8]) {
        let Some((at, size)) = self.members.sized(buffer, bytes) else {
            return;
        };
        if let Buffer::Blocks(_, each) = buffer {
            if size <= self.all_resident {
                self.add_owned(owner, size, self.block_size(each).is_none());
            }
            return;
        }
        let end = at.saturating_add(size);
        if size >= LARGE {
            // More than is in memory is not believed.
            let resident = self.resident.bytes_in(at..end);
            if resident > 0 && self.large.len() < MAX_LARGE {
                self.large.insert(at, (size.min(resident), owner));
            } else {
                self.is_truncated |= resident > 0;
            }
        } else if let Some(block) = self.block_size(size) {
            if self.heap.has(at) {
                self.add_owned(owner, block, false);
                let row = self.size_row(block);
                if let Some(owned) = self.owned.get_mut(row) {
                    owned.add(1, block);
                }
            }
        } else if self.resident.bytes_in(at..at.saturating_add(1)) > 0 {
            self.add_owned(owner, size, true);
        }
    }

    /// Bytes of the block that a buffer has in Python's own memory. `None`: it has none there.
    fn block_size(&self, bytes: u64) -> Option<u64> {
        match self.heap.allocator {
            Allocator::Pools(_) if self.has_debug_headers => block_size(bytes.saturating_add(DEBUG_BYTES)),
            Allocator::Pools(_) => block_size(bytes),
            Allocator::Pages(_) => Some(mimalloc::block_size(bytes)),
        }
    }

    fn add_owned(&mut self, owner: u32, bytes: u64, is_in_c_heap: bool) {
        if let Some(row) = self.touch(owner) {
            row.add(0, bytes);
            if is_in_c_heap {
                row.c_bytes.unit = row.c_bytes.unit.saturating_add(bytes);
            }
        }
    }

    fn end_unit(&mut self, source: Source) {
        self.read_pending();
        for index in std::mem::take(&mut self.touched) {
            if let Some(row) = self.rows.get_mut(index as usize) {
                row.end_unit(source);
            }
        }
        for row in self.others.iter_mut().chain(&mut self.owned) {
            row.end_unit(source);
        }
    }

    /// Counts a block of the C heap, if it is an object. `size`: what the program may use of it; `head`: its first
    /// bytes, 128 at least
    /// if it has so many. Returns whether it is an object.
    pub fn count_c_block(&mut self, at: u64, size: u64, head: &[u8]) -> bool {
        let (at, head) = self.data_of(at, head);
        let row = self.count_block(at, size, head).and_then(|index| self.row(index));
        match row {
            Some(row) => {
                row.c_bytes.unit = row.c_bytes.unit.saturating_add(size);
                true
            }
            None => false,
        }
    }

    /// Ends a unit of the C heap: what was counted since the last one was drawn together.
    pub fn end_c_unit(&mut self) {
        self.c_heap.units += 1;
        self.end_unit(Source::CHeap);
    }

    /// Says how many units of the C heap there are.
    pub fn set_c_units(&mut self, all: u64) {
        self.c_heap.all = all.max(self.c_heap.units);
    }

    /// Says how much of the C heap was not read. It matters where objects may be there: mimalloc has them all.
    pub fn miss_c_blocks(&mut self, bytes: u64) {
        self.missed = if self.heap.has_pools() { bytes } else { 0 };
    }

    /// Counts a block that was not drawn, because all of its kind are looked at. Returns the name of its type if it is
    /// an object.
    pub fn count_known_block(&mut self, at: u64, size: u64, head: &[u8]) -> Option<&[u8]> {
        let (at, head) = self.data_of(at, head);
        let (index, offset) = self.types.classify(head, size)?;
        self.offer(index, at.saturating_add(offset));
        let row = self.row(index)?;
        row.count.exact += 1;
        row.bytes.exact = row.bytes.exact.saturating_add(size);
        self.types.get(index).map(|info| info.full_name.as_slice())
    }

    /// What has been counted.
    pub fn finish(mut self) -> PythonCensus {
        let unowned = self.give_large_to_owners();
        let bytes_in = |arena: &Range<u64>| self.resident.bytes_in(arena.clone());
        let resident: u64 = self.heap.arenas.iter().map(bytes_in).sum();
        let mut types = self.type_rows(unowned);
        types.extend(self.other_rows().map(|row| (None, row)));
        types.sort_by(|(_, a), (_, b)| b.bytes.value.cmp(&a.bytes.value).then_with(|| a.name.cmp(&b.name)));
        let placed = types.iter().zip(0..);
        let places: FxHashMap<u32, usize> = placed
            .filter_map(|((index, _), place)| Some(((*index)?, place)))
            .collect();
        let found = |(address, (bytes, owner)): (&u64, &(u64, u32))| {
            Some(LargeBuffer {
                address: *address,
                bytes: *bytes,
                type_index: *places.get(owner)?,
            })
        };
        let mut large: Vec<LargeBuffer> = self.large.iter().filter_map(found).collect();
        large.sort_by_key(|buffer| buffer.address);
        PythonCensus {
            used: self.estimate(&self.used),
            free_blocks: self.estimate(&self.idle),
            free_pools: self.estimate(&self.in_use).rest_of(resident),
            pools: self.pools.all,
            read: self.pools.units,
            torn: self.torn,
            types: types.into_iter().map(|(_, row)| row).collect(),
            large,
            is_full: self.has_read_all && self.torn == 0 && self.missed == 0 && self.c_heap.units == self.c_heap.all,
            is_truncated: self.is_truncated || self.types.is_truncated,
        }
    }

    fn estimate(&self, quantity: &Quantity) -> Estimate {
        quantity.estimate(self.pools, self.c_heap)
    }

    /// Counts the large blocks of mimalloc with their owners, and the others as blocks without one. Returns the bytes
    /// of these that objects may own that were not met.
    fn give_large_to_owners(&mut self) -> u64 {
        let mut unowned = 0;
        let mut buffers: Vec<(u64, u32)> = self.large.iter().map(|(at, (_, owner))| (*at, *owner)).collect();
        buffers.sort_unstable();
        for (address, bytes) in std::mem::take(&mut self.own_large) {
            let first = buffers.partition_point(|(at, _)| *at < address);
            let buffer = buffers.get(first).filter(|(at, _)| at - address < bytes);
            let owner = buffer.map(|(at, owner)| {
                self.large.remove(at);
                *owner
            });
            let row = match owner.and_then(|owner| self.row(owner)) {
                Some(row) => row,
                None => {
                    unowned += bytes;
                    let Some(others) = self.others.first_mut() else {
                        continue;
                    };
                    others.count.exact += 1;
                    others
                }
            };
            row.bytes.exact = row.bytes.exact.saturating_add(bytes);
        }
        if self.has_read_all && self.torn == 0 {
            0
        } else {
            unowned
        }
    }

    /// The types that were met, each with its index. `unowned`: bytes of large blocks that may be those of objects that
    /// were not.
    fn type_rows(&self, unowned: u64) -> Vec<(Option<u32>, TypeCensus)> {
        let mut types = Vec::new();
        for (row, index) in self.rows.iter().zip(0_u32..) {
            let (Some(info), mut count) = (self.types.get(index), self.estimate(&row.count)) else {
                continue;
            };
            if count.value > 0 {
                let mut bytes = self.estimate(&row.bytes);
                if info.may_exceed_pools {
                    count.high = count.high.saturating_add(self.missed / MAX_BLOCK);
                    bytes.high = bytes.high.saturating_add(self.missed);
                }
                if info.owner.may_be_large() {
                    bytes.high = bytes.high.saturating_add(unowned);
                }
                let c_bytes = self.estimate(&row.c_bytes).value;
                types.push((Some(index), type_census(info, count, bytes, c_bytes)));
            }
        }
        types
    }

    /// The blocks that are no objects, without those that objects own.
    fn other_rows(&self) -> impl Iterator<Item = TypeCensus> {
        let sizes = (u64::from(ALIGNMENT)..).step_by(ALIGNMENT as usize);
        let rows = self.others.iter().zip(&self.owned).zip(sizes);
        rows.filter_map(|((others, owned), size)| {
            let rest = |of: fn(&Row) -> &Quantity| less(self.estimate(of(others)), self.estimate(of(owned)));
            let count = rest(|row| &row.count);
            (count.value > 0).then(|| TypeCensus {
                name: match self.heap.allocator {
                    Allocator::Pools(_) => format!("blocks of {size} bytes").into_bytes(),
                    Allocator::Pages(_) => b"blocks that are no objects".to_vec(),
                },
                count,
                bytes: rest(|row| &row.bytes),
                c_bytes: 0,
                may_own_large: false,
                is_object: false,
            })
        })
    }
}

fn type_census(info: &TypeInfo, count: Estimate, bytes: Estimate, c_bytes: u64) -> TypeCensus {
    TypeCensus {
        name: info.full_name.clone(),
        count,
        bytes,
        c_bytes,
        may_own_large: info.owner.may_be_large(),
        is_object: true,
    }
}

#[cfg(test)]
mod tests;

//! Looks at the memory of a process once: the order of the steps.

use std::collections::BTreeMap;
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};

use super::blocks::{BlockCounter, BlockUse};
use super::estimate::Estimate;
use super::files::FileBackedMemory;
use super::glibc::{self, Arena, Block, Deadline, Glibc, LARGE};
use super::mappings::{Account, Amounts, Claim, Part, divide};
use super::present::{Present, PresentMemory, PresentSystem};
use super::python::{self, Counter, Instances, PythonCensus, PythonHeap};
use super::stacks;
use crate::cpython::object_layout::ObjectLayout;
use crate::cpython::repr::ValueReader;
use crate::cpython::{self, Runtime};
use crate::cpython_layout::Interpreter;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Pid;
use crate::process::file_content::Content;
use crate::process::memory::Memory;
use crate::process::modules::Modules;
use crate::process::smaps::{Area, Smaps};
use crate::process::system::{LiveSystem, ProcessMemory, System};
use crate::process::{AddressSpace, maps};
use crate::profile::values::Unit;
use crate::sys::{clock, procfs};

/// How often the mappings are read where the C heap does not fit them: the process may have changed them since.
const ATTEMPTS: usize = 3;
/// CPU time for the walk through the C heap, which goes through some GB in a second: at least, and if everything is read.
const MIN_C_TIME: Duration = Duration::from_secs(1);
const MAX_C_TIME: Duration = Duration::from_secs(600);
/// Longest time to search for the owners of large blocks, ns.
const MAX_OWNER_TIME: u64 = 60_000_000_000;
/// Other allocators, by the names of their files. What they have is not told from what programs map.
const OTHER_ALLOCATORS: [&str; 3] = ["jemalloc", "tcmalloc", "mimalloc"];

/// Objects of a type that are shown.
const MAX_SAMPLE: usize = 20;
/// Longest time to read their values, ns.
const MAX_SAMPLE_TIME: u64 = 200_000_000;

/// How much of a process is read.
#[derive(Clone, Debug)]
pub struct CensusOptions {
    /// CPU time for Python's pools. `None`: everything is read.
    pub budget: Option<Duration>,
    /// The type of which some objects are shown: its name, or the part of it behind one of its dots.
    pub sample: Option<String>,
    /// All pools are searched for the owners of large blocks.
    pub owners: bool,
}

/// What the memory of a process is made of.
#[derive(Debug, Default)]
pub struct Census {
    pub account: Account,
    /// The interpreter as text: `CPython 3.11.7 (libpython3.11.so.1.0)`.
    pub interpreter: Option<String>,
    /// `None`: there is no Python, or its heap was not found.
    pub python: Option<Pools>,
    /// Those with most bytes first.
    pub types: Vec<TypeUse>,
    /// `None`: the C library is another one.
    pub glibc: Option<Glibc>,
    /// Smaller blocks of the C heap that are no objects of Python, by size and class. Objects may own them.
    pub blocks: Vec<BlockUse>,
    /// Blocks of the C heap of [`LARGE`] bytes and more, the largest first.
    pub large: Vec<LargeUse>,
    /// All of Python's heap was read, or searched, for their owners.
    pub has_all_owners: bool,
    /// Of the type that was asked for; `None`: there is no Python.
    pub sample: Option<ObjectSample>,
    /// What could not be told, and why.
    pub notes: Vec<String>,
}

/// What was read of Python's heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pools {
    /// With blocks in use.
    pub all: u64,
    pub read: u64,
    /// Those that changed while they were read.
    pub torn: u64,
    /// Everything was read.
    pub is_full: bool,
}

/// The objects of a type, or blocks of a size that are no objects and whose owner is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeUse {
    pub name: Vec<u8>,
    pub count: Estimate,
    /// With what they own.
    pub bytes: Estimate,
    /// About how many of these bytes are in which part of the process's memory.
    pub parts: Amounts,
    pub is_object: bool,
}

impl TypeUse {
    /// Takes in large blocks whose owners were found by a search. There are about as many objects, but at least one.
    fn add_owned(&mut self, blocks: Blocks) {
        self.count = Estimate {
            value: self.count.value.max(blocks.count),
            low: self.count.low.max(1),
            high: self.count.high.max(blocks.count),
        };
        self.bytes = self.bytes + Estimate::exact(blocks.bytes);
        self.add_part(Part::CLarge, blocks.mapped);
        self.add_part(Part::CInUse, blocks.bytes.saturating_sub(blocks.mapped));
    }

    /// Counts bytes as those of a part.
    fn add_part(&mut self, part: Part, bytes: u64) {
        if bytes > 0 {
            let sum = self.parts.entry(part).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }

    /// What is in no other part is in Python's own memory.
    fn end_parts(&mut self) {
        let others = self.parts.values().fold(0u64, |sum, part| sum.saturating_add(*part));
        self.add_part(Part::PythonObjects, self.bytes.value.saturating_sub(others));
    }
}

/// Some objects of a type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectSample {
    /// How many were met.
    pub met: u64,
    /// Address and value of some of them. They were read a little later: one may have been freed, or be another object then.
    pub objects: Vec<(u64, String)>,
}

/// A large block of the C heap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LargeUse {
    /// avma that the program got.
    pub address: u64,
    /// Bytes of its chunk.
    pub bytes: u64,
    /// It has a mapping of its own.
    pub is_mapped: bool,
    pub owner: Owner,
}

/// What a large block belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// It is an object of this type.
    Itself(Vec<u8>),
    /// An object of this type owns it.
    Object(Vec<u8>),
    /// No object that owns it was met: it may be one that was not read, or C code.
    Unknown,
}

/// What is read of a process at once, before anything else.
struct Mapped {
    smaps: Smaps,
    present: Present,
    arenas: std::result::Result<Vec<Arena>, String>,
}

impl Mapped {
    fn read(pid: Pid, memory: &dyn Memory) -> Result<Mapped> {
        let smaps = Smaps::of(pid)?;
        let present = Present::of(pid, &smaps)?;
        let target = glibc::Target {
            smaps: &smaps,
            present: &present,
            memory,
            deadline: Deadline::after(MIN_C_TIME),
        };
        let arenas = glibc::find(&target);
        Ok(Mapped { smaps, present, arenas })
    }

    /// Arenas of the C heap that cannot be read; all of them where none is known.
    fn unsound_arenas(&self) -> usize {
        let arenas = self.arenas.as_ref();
        arenas.map_or(usize::MAX, |arenas| {
            arenas.iter().filter(|arena| !arena.is_sound()).count()
        })
    }

    /// The same, again while the C heap does not fit the mappings.
    fn read_consistent(pid: Pid, memory: &dyn Memory) -> Result<Mapped> {
        let mut mapped = Mapped::read(pid, memory)?;
        for _ in 1..ATTEMPTS {
            let has_heap = mapped
                .smaps
                .areas
                .iter()
                .any(|area| mapped.smaps.name(area) == b"[heap]");
            let unsound = mapped.unsound_arenas();
            if unsound == 0 || !has_heap {
                break;
            }
            let again = Mapped::read(pid, memory)?;
            if again.unsound_arenas() < unsound {
                mapped = again;
            }
        }
        Ok(mapped)
    }
}

impl Census {
    /// Reads the memory of a process while it runs.
    ///
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    pub fn take(pid: Pid, options: &CensusOptions) -> Result<Census> {
        let live = ProcessMemory(&LiveSystem, pid);
        let Mapped { smaps, present, arenas } = Mapped::read_consistent(pid, &live)?;
        let resident = PresentMemory {
            memory: &live,
            present: &present,
        };
        let open = |area: &Area| {
            let opened = LiveSystem.open(pid, area.start, area.end, smaps.name(area), None);
            opened.map_or(Content::Missing, |(content, _)| content)
        };
        let memory = FileBackedMemory::new(&resident, &smaps, &open);
        let mut notes = Vec::new();
        if !present.is_complete {
            notes.push("too many ranges of pages are in memory to look at all of them: parts may be too small".into());
        }
        let interpreter = FoundInterpreter::of(pid, &present)?;
        let heap = interpreter.as_ref().and_then(|found| match found.heap(&memory, pid) {
            Ok(heap) => Some(heap),
            Err(why) => {
                notes.push(format!("Python's objects are not counted: {why}"));
                None
            }
        });
        let mut counter = heap.as_ref().map(|heap| Counter::new(heap, &memory, &present));
        if let Some(counter) = &mut counter {
            if let Some(name) = &options.sample {
                counter.draw_instances(Instances::new(name.as_bytes(), MAX_SAMPLE));
            }
            counter.count_pools(options.budget);
        }

        let stacks = stacks::find(pid, &smaps).into_iter();
        let mut claims: Vec<Claim> = stacks.map(|range| Claim::whole(range, Part::Stacks)).collect();
        let ranges = heap.iter().flat_map(|heap| heap.arenas.iter().cloned());
        claims.extend(ranges.map(|range| Claim::whole(range, Part::PythonArenas)));
        let target = glibc::Target {
            smaps: &smaps,
            present: &present,
            memory: &live,
            deadline: Deadline::after(options.budget.map_or(MAX_C_TIME, |budget| budget.max(MIN_C_TIME))),
        };
        let mut objects = FxHashMap::default();
        let mut blocks = BlockCounter::new(&memory, &smaps);
        let mut visit = |block: Block| {
            let (address, usable, head) = (block.address, block.usable(), block.head);
            let counter = counter.as_mut();
            if block.bytes < LARGE {
                if !counter.is_some_and(|counter| counter.count_c_block(address, usable, head)) {
                    blocks.count(&block);
                }
            } else if let Some(name) = counter.and_then(|counter| counter.count_known_block(address, usable, head)) {
                objects.insert(address, name.to_vec());
            }
        };
        let glibc = match arenas {
            Ok(arenas) => Some(glibc::read(&target, &arenas, &mut claims, &mut visit)),
            Err(why) => {
                notes.push(format!("the C heap is not divided: {why}"));
                None
            }
        };
        let missed = heap
            .as_ref()
            .map_or(0, |heap| missed(&smaps, &present, heap, glibc.as_ref()));
        notes.extend(glibc.as_ref().and_then(lost));
        if glibc.as_ref().is_some_and(|glibc| !glibc.is_complete) {
            notes.push(
                "not all anonymous memory was searched for large blocks of the C heap: some may be missing".into(),
            );
        }
        if missed > 0 {
            notes.push("objects of more than 512 bytes in what was not read of the C heap are not counted".into());
        }
        notes.extend(other_allocator(&smaps));
        let mut sample = None;
        if let Some(counter) = &mut counter {
            counter.end_c_unit();
            counter.set_c_units(1);
            counter.miss_c_blocks(missed);
            let instances = counter.take_instances();
            sample = instances
                .zip(interpreter.as_ref())
                .map(|(drawn, found)| found.show(&memory, drawn));
        }
        let python = counter.map(Counter::finish);
        let mut account = divide(&smaps, &present, claims);
        let mut large = large(glibc.as_ref(), python.as_ref(), &objects);
        let (mut found, mut has_searched_all) = (OwnedBlocks::new(), false);
        if let Some(heap) = heap.as_ref().filter(|_| options.owners) {
            (found, has_searched_all) = find_owners(heap, &memory, &present, &mut large);
            if !has_searched_all {
                notes.push(owners_missing(heap).into());
            }
        }
        let mut types = Vec::new();
        if let Some(python) = &python {
            account.split_arenas([
                (Part::PythonObjects, python.used.value),
                (Part::PythonFreeBlocks, python.free_blocks.value),
                (Part::PythonFreePools, python.free_pools.value),
            ]);
            types = type_uses(python, &large, glibc.is_some(), found);
            if python.is_truncated {
                notes.push("there are more types or large buffers than are counted".into());
            }
        }
        if memory.is_exceeded() {
            notes.push("not all pages of files that are not in memory were read: types may be missing".into());
        }
        if blocks.is_truncated() {
            notes.push("there are more classes of C++ than are named".into());
        }
        let is_full = python.as_ref().is_some_and(|python| python.is_full);
        check_still_there(pid)?;
        Ok(Census {
            account,
            has_all_owners: is_full || has_searched_all,
            interpreter: interpreter.map(|found| found.text),
            python: python.map(|python| Pools {
                all: python.pools,
                read: python.read,
                torn: python.torn,
                is_full: python.is_full,
            }),
            types,
            glibc,
            blocks: blocks.finish(),
            large,
            sample,
            notes,
        })
    }
}

/// A process that ends loses its memory while it is read, and what was found so far is not what it had.
///
/// # Errors
/// `NoSuchProcess`.
fn check_still_there(pid: Pid) -> Result<()> {
    if procfs::resident(pid).is_some_and(|bytes| bytes > 0) {
        return Ok(());
    }
    let what = format!("process {pid} has ended while its memory was read");
    Err(Error::new(ErrorKind::NoSuchProcess, what)
        .why("a part of its memory was gone by then")
        .hint("nativeprof heap PID, of a process that runs longer"))
}

/// The interpreter in a process.
struct FoundInterpreter {
    runtime: Runtime,
    interpreter: Option<Interpreter>,
    /// `CPython 3.11.7 (libpython3.11.so.1.0)`
    text: String,
}

impl FoundInterpreter {
    /// # Errors
    /// `NoSuchProcess`, `NotPermitted`.
    fn of(pid: Pid, present: &Present) -> Result<Option<FoundInterpreter>> {
        let mut modules = Modules::default();
        let space = AddressSpace::open(&PresentSystem(present), pid, &mut modules, &mut |_| {})?;
        let mut searched = FxHashSet::default();
        for (id, bias) in space.code().iter().filter_map(|code| code.file) {
            if !searched.insert(id) {
                continue;
            }
            let module = modules.get(id);
            if let Some(runtime) = cpython::find_runtime(module) {
                return Ok(Some(FoundInterpreter {
                    // Threads are of no interest here.
                    interpreter: runtime.in_process(bias, cpython::DEFAULT_DESCRIPTOR),
                    text: format!("CPython {} ({})", runtime.version_text(), module.name()),
                    runtime,
                }));
            }
        }
        Ok(None)
    }

    /// Values as `dump` shows those of local variables.
    fn show(&self, memory: &dyn Memory, drawn: Instances) -> ObjectSample {
        let met = drawn.met();
        let python = self.interpreter.as_ref();
        let objects = python.and_then(|python| Some((python, ObjectLayout::of(&self.runtime, &python.layout)?)));
        let Some((python, objects)) = objects else {
            return ObjectSample {
                met,
                objects: Vec::new(),
            };
        };
        let end = clock::now() + MAX_SAMPLE_TIME;
        let reader = ValueReader {
            memory,
            layout: &python.layout,
            objects: &objects,
            over: &|| clock::now() > end,
        };
        let addresses = drawn.into_addresses().into_iter();
        ObjectSample {
            met,
            objects: addresses.map(|at| (at, reader.show(at))).collect(),
        }
    }

    fn heap(&self, memory: &dyn Memory, pid: Pid) -> std::result::Result<PythonHeap, String> {
        let interpreter = self
            .interpreter
            .as_ref()
            .ok_or("this version of CPython is not known")?;
        let mappings = maps::parse(&LiveSystem.maps(pid).map_err(|e| e.what)?);
        python::find(memory, &mappings, &self.runtime, interpreter).map_err(|why| why.to_string())
    }
}

/// How many bytes of memory that may have objects were not read, at most: of the C heap. mimalloc has all objects.
fn missed(smaps: &Smaps, present: &Present, heap: &PythonHeap, glibc: Option<&Glibc>) -> u64 {
    if !heap.has_pools() {
        return 0;
    }
    if let Some(glibc) = glibc.filter(|glibc| glibc.is_complete) {
        return glibc.arenas.iter().fold(0, |sum, arena| arena.lost.saturating_add(sum));
    }
    let is_private = |area: &&Area| area.is_writable && !area.is_shared && !area.is_file;
    let all: u64 = smaps.areas.iter().filter(is_private).map(|area| area.usage.rss).sum();
    let arenas: u64 = heap.arenas.iter().map(|arena| present.bytes_in(arena.clone())).sum();
    all.saturating_sub(arenas)
}

/// What is said of a C heap that was not read as a whole.
fn lost(glibc: &Glibc) -> Option<String> {
    let lost = glibc
        .arenas
        .iter()
        .fold(0u64, |sum, arena| sum.saturating_add(arena.lost));
    (lost > 0).then(|| {
        format!(
            "{} of the C heap were not read: the process changed them, they are not in memory, or the time was over (--all takes longer)",
            Unit::Bytes.show(lost)
        )
    })
}

/// What is said of a program with another allocator.
fn other_allocator(smaps: &Smaps) -> Option<String> {
    let files = smaps.areas.iter().filter(|area| area.is_file);
    let mut names = files.map(|area| String::from_utf8_lossy(smaps.name(area)));
    let name = names.find(|path| {
        let name = path.rsplit('/').next().unwrap_or_default();
        OTHER_ALLOCATORS.iter().any(|other| name.contains(other))
    })?;
    Some(format!(
        "{name} is another allocator: what it has is in other anonymous memory, or in the C heap as not divided"
    ))
}

/// The large blocks of the C heap with their owners, the largest first. `objects`: those that are objects.
fn large(glibc: Option<&Glibc>, python: Option<&PythonCensus>, objects: &FxHashMap<u64, Vec<u8>>) -> Vec<LargeUse> {
    let blocks = glibc.map_or(&[][..], |glibc| &glibc.large);
    let owned = python.map_or(&[][..], |python| &python.large);
    let owner_of = |address: u64, bytes: u64| {
        if let Some(name) = objects.get(&address) {
            return Owner::Itself(name.clone());
        }
        let first = owned.partition_point(|buffer| buffer.address < address);
        let buffer = owned.get(first).filter(|buffer| buffer.address - address < bytes);
        let row = buffer.and_then(|buffer| python?.types.get(buffer.type_index));
        row.map_or(Owner::Unknown, |row| Owner::Object(row.name.clone()))
    };
    let mut large: Vec<LargeUse> = blocks
        .iter()
        .map(|block| LargeUse {
            address: block.address,
            bytes: block.bytes,
            is_mapped: block.is_mapped,
            owner: owner_of(block.address, block.bytes),
        })
        .collect();
    large.sort_by_key(|block| std::cmp::Reverse(block.bytes));
    large
}

/// Blocks by the type of their owner.
type OwnedBlocks = BTreeMap<Vec<u8>, Blocks>;

/// Large blocks of one type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Blocks {
    count: u64,
    bytes: u64,
    /// Those of the bytes that have mappings of their own.
    mapped: u64,
}

impl Blocks {
    fn add(&mut self, block: &LargeUse) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(block.bytes);
        if block.is_mapped {
            self.mapped = self.mapped.saturating_add(block.bytes);
        }
    }
}

/// Why owners may have been missed by a search.
fn owners_missing(heap: &PythonHeap) -> &'static str {
    if heap.has_pools() {
        "not all pools were searched for the owners of large blocks: the time was over"
    } else {
        "owners of large blocks are not searched for in free-threaded builds (--all reads everything)"
    }
}

/// Looks for the owners of those blocks that have none. Returns what was found, and whether everything was searched.
fn find_owners(
    heap: &PythonHeap,
    memory: &dyn Memory,
    present: &Present,
    large: &mut [LargeUse],
) -> (OwnedBlocks, bool) {
    let wanted = large.iter().filter(|block| block.owner == Owner::Unknown);
    let mut wanted: Vec<u64> = wanted.map(|block| block.address).collect();
    wanted.sort_unstable();
    let end = clock::now().saturating_add(MAX_OWNER_TIME);
    let mut owners = heap.owners(memory, present, &wanted, &|| clock::now() > end);
    let mut found = OwnedBlocks::new();
    for block in large {
        if let Some(name) = owners.names.remove(&block.address) {
            found.entry(name.clone()).or_default().add(block);
            block.owner = Owner::Object(name);
        }
    }
    (found, owners.is_complete)
}

/// Where the large buffers of each type are, by its index.
fn parts_of_large(python: &PythonCensus, large: &[LargeUse], has_glibc: bool) -> Vec<Amounts> {
    let mut parts = vec![Amounts::new(); python.types.len()];
    let blocks: BTreeMap<u64, &LargeUse> = large.iter().map(|block| (block.address, block)).collect();
    for buffer in &python.large {
        let before = blocks.range(..=buffer.address).next_back();
        let block = before.filter(|(start, block)| buffer.address - **start < block.bytes);
        let part = match block {
            Some((_, block)) if block.is_mapped => Part::CLarge,
            Some(_) => Part::CInUse,
            // Some libraries map their memory themselves.
            None if has_glibc => Part::Anonymous,
            None => Part::CHeap,
        };
        if let Some(amounts) = parts.get_mut(buffer.type_index) {
            *amounts.entry(part).or_default() += buffer.bytes;
        }
    }
    parts
}

/// The rows of the types, with the large buffers that their objects own. Those whose owner was not met may be of any
/// type that can have such buffers, unless everything was read.
fn type_uses(python: &PythonCensus, large: &[LargeUse], has_glibc: bool, mut found: OwnedBlocks) -> Vec<TypeUse> {
    let unmet = large.iter().filter(|block| block.owner == Owner::Unknown);
    let unmet: u64 = if python.is_full {
        0
    } else {
        unmet.map(|block| block.bytes).sum()
    };
    let mut themselves = OwnedBlocks::new();
    for block in large {
        if let Owner::Itself(name) = &block.owner {
            themselves.entry(name.clone()).or_default().add(block);
        }
    }
    let owned = parts_of_large(python, large, has_glibc);
    let rows = python.types.iter().zip(owned).map(|(row, parts)| {
        let owned = parts.values().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let mut bytes = row.bytes + Estimate::exact(owned);
        if row.may_own_large {
            bytes.high = bytes.high.saturating_add(unmet);
        }
        let mut used = TypeUse {
            name: row.name.clone(),
            count: row.count,
            bytes,
            parts,
            is_object: row.is_object,
        };
        let small = if has_glibc { Part::CInUse } else { Part::CHeap };
        used.add_part(small, row.c_bytes);
        if let Some(blocks) = themselves.remove(&row.name).filter(|_| row.is_object) {
            used.add_part(Part::CLarge, blocks.mapped);
            used.add_part(Part::CInUse, blocks.bytes - blocks.mapped);
        }
        used
    });
    let mut rows: Vec<TypeUse> = rows.collect();
    for row in rows.iter_mut().filter(|row| row.is_object) {
        if let Some(blocks) = found.remove(&row.name) {
            row.add_owned(blocks);
        }
    }
    // Types of which no object was drawn.
    rows.extend(found.into_iter().map(|(name, blocks)| {
        let mut row = TypeUse {
            name,
            count: Estimate::default(),
            bytes: Estimate::default(),
            parts: Amounts::new(),
            is_object: true,
        };
        row.add_owned(blocks);
        row
    }));
    rows.iter_mut().for_each(TypeUse::end_parts);
    rows.sort_by(|a, b| b.bytes.value.cmp(&a.bytes.value).then_with(|| a.name.cmp(&b.name)));
    rows
}

//! Rows of events, written by many threads at once without a lock, in bounded memory.
//!
//! The memory is one mapping, given out in chunks: a thread fills its chunk and takes the next one. When there are none
//! left, a full chunk goes to a file and is filled again, or, without a file, rows are dropped and counted. A thread that
//! comes when nothing is left takes over the chunk of one that has ended, or gets a page of its own.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::mapping::{AnonymousMapping, PAGE};

/// One event.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventRow {
    /// Code object or C function, by address; 0 if there is none.
    pub key: u64,
    /// The event's code, and from bit 16 on the allocator (see [`super::timeline`]).
    pub event: u64,
    /// Ticks.
    pub time: i64,
    pub address: u64,
    pub size: i64,
}

const ROW: usize = size_of::<EventRow>();
/// Rows of a chunk, at most.
///
/// Small, so that many threads with few rows each leave little unused.
const MAX_CHUNK: usize = 256;
/// Threads that one log can have; rows of more are dropped.
const MAX_THREADS: usize = 1 << 18;
/// Ended threads that a late one searches for at a time, to take over their chunks.
const ATTEMPTS: usize = 16;

/// A stretch of rows that one thread fills.
#[repr(C)]
struct Chunk {
    start: AtomicPtr<EventRow>,
    used: AtomicU32,
    capacity: AtomicU32,
    /// Number of the thread + 1.
    thread: AtomicU32,
    /// Of the first row, among the rows of its thread.
    first: AtomicU64,
}

/// A thread that writes. Zero when it is mapped.
#[repr(C, align(128))]
pub struct Writer {
    /// Where it writes now; only it writes there.
    chunk: AtomicPtr<Chunk>,
    native_id: AtomicU32,
    ident: AtomicU64,
    written: AtomicU64,
    dropped: AtomicU64,
    last: AtomicU64,
    /// If there was no other left.
    own: Chunk,
}

/// Precedes the rows of a chunk in the file.
#[repr(C)]
struct Header {
    thread: u32,
    count: u32,
    first: u64,
}

/// See the module.
pub struct Log {
    rows: AnonymousMapping,
    chunks: AnonymousMapping,
    writers: AnonymousMapping,
    chunk_rows: usize,
    chunk_count: usize,
    next_chunk: AtomicUsize,
    next_writer: AtomicUsize,
    next_ended: AtomicUsize,
    file: Option<Spill>,
    dropped: AtomicU64,
}

struct Spill {
    file: File,
    /// What it is: the program may close it and open another under its number.
    identity: (u64, u64),
    /// Keeps `identity` from being reused.
    _inode: AnonymousMapping,
    end: AtomicU64,
    limit: u64,
}

/// A thread of a log.
#[derive(Clone, Copy, Debug)]
pub struct LogThread {
    pub native_id: u32,
    pub ident: u64,
}

/// All that a log holds.
pub struct Contents {
    /// Number of the thread and its rows, oldest first, thread by thread.
    pub rows: Vec<(u32, EventRow)>,
    pub threads: Vec<LogThread>,
    /// Rows that could not be kept.
    pub dropped: u64,
}

fn identity(fd: i32) -> Option<(u64, u64)> {
    let mut facts = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fills the structure if it succeeds.
    unsafe {
        (libc::fstat(fd, facts.as_mut_ptr()) == 0).then(|| {
            let facts = facts.assume_init();
            (facts.st_dev, facts.st_ino)
        })
    }
}

impl Log {
    /// A log of `size` rows in memory, and `limit` bytes of `file`. None if there is no memory for it.
    pub fn new(size: usize, file: Option<File>, limit: u64) -> Option<Log> {
        let size = size.max(1);
        let chunk_rows = (size / 16).clamp(16, MAX_CHUNK).min(size);
        let chunk_count = size / chunk_rows;
        let file = file.and_then(|file| {
            Some(Spill {
                identity: identity(file.as_raw_fd())?,
                _inode: AnonymousMapping::of_file(&file)?,
                file,
                end: AtomicU64::new(0),
                limit,
            })
        });
        Some(Log {
            rows: AnonymousMapping::new(chunk_rows.checked_mul(chunk_count)?.checked_mul(ROW)?)?,
            chunks: AnonymousMapping::new(chunk_count.checked_mul(size_of::<Chunk>())?)?,
            writers: AnonymousMapping::new(MAX_THREADS * size_of::<Writer>())?,
            chunk_rows,
            chunk_count,
            next_chunk: AtomicUsize::new(0),
            next_writer: AtomicUsize::new(0),
            next_ended: AtomicUsize::new(0),
            file,
            dropped: AtomicU64::new(0),
        })
    }

    fn chunk(&self, index: usize) -> &Chunk {
        // SAFETY: an entry of the table, all zero or written by a thread; its fields are atomic.
        unsafe { &*self.chunks.start.as_ptr().cast::<Chunk>().add(index) }
    }

    fn writer(&self, index: usize) -> &Writer {
        // SAFETY: as above.
        unsafe { &*self.writers.start.as_ptr().cast::<Writer>().add(index) }
    }

    /// Adds a row of the calling thread. `word` is that thread's own word for this log, 0 at first; the caller sees to it
    /// that no signal handler comes here on the same thread. Does not allocate from the heap, and takes no lock.
    #[inline]
    pub fn append(&self, word: &mut u64, row: EventRow) {
        if *word == 0 {
            match self.register() {
                Some(index) => *word = index as u64 + 1,
                None => {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                    return;
                }
            }
        }
        let index = *word as usize - 1;
        let writer = self.writer(index);
        let mut chunk = writer.chunk.load(Ordering::Relaxed);
        // SAFETY: null or an entry that lives as long as the log.
        let full = unsafe { chunk.as_ref() }
            .is_none_or(|c| c.used.load(Ordering::Relaxed) >= c.capacity.load(Ordering::Relaxed));
        if full {
            chunk = self.next(index, writer, chunk);
        }
        // SAFETY: as above.
        let Some(chunk) = (unsafe { chunk.as_ref() }) else {
            writer.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let used = chunk.used.load(Ordering::Relaxed);
        // In order even where the clocks of two processors are not quite the same.
        let time = row.time.max(writer.last.load(Ordering::Relaxed) as i64);
        writer.last.store(time as u64, Ordering::Relaxed);
        // SAFETY: below the chunk's capacity, and only this thread writes to this chunk.
        unsafe {
            chunk
                .start
                .load(Ordering::Relaxed)
                .add(used as usize)
                .write(EventRow { time, ..row })
        };
        chunk.used.store(used + 1, Ordering::Release);
        writer
            .written
            .store(writer.written.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    #[cold]
    fn register(&self) -> Option<usize> {
        let index = self.next_writer.fetch_add(1, Ordering::Relaxed);
        if index >= MAX_THREADS {
            self.next_writer.store(MAX_THREADS, Ordering::Relaxed);
            return None;
        }
        let writer = self.writer(index);
        let native_id = nativeprof::sys::process::current_tid();
        // SAFETY: no preconditions.
        let ident = unsafe { libc::pthread_self() };
        writer.native_id.store(native_id as u32, Ordering::Relaxed);
        writer.ident.store(ident as u64, Ordering::Release);
        Some(index)
    }

    /// Where the thread continues, its chunk being full; null if there is no place.
    #[cold]
    fn next(&self, index: usize, writer: &Writer, chunk: *mut Chunk) -> *mut Chunk {
        let free = self.next_chunk.fetch_add(1, Ordering::Relaxed);
        if free < self.chunk_count {
            let next = self.chunk(free);
            // SAFETY: within the mapping.
            let start = unsafe { self.rows.start.as_ptr().cast::<EventRow>().add(free * self.chunk_rows) };
            return self.begin(next, start, self.chunk_rows, index, writer);
        }
        // Not to overflow, in a very long run.
        self.next_chunk.store(self.chunk_count, Ordering::Relaxed);
        // SAFETY: null or an entry that lives as long as the log.
        let Some(full) = (unsafe { chunk.as_ref() }) else {
            if self.file.is_none() {
                return null_mut();
            }
            if let Some(next) = self.take_over(index) {
                let (start, capacity) = (
                    next.start.load(Ordering::Relaxed),
                    next.capacity.load(Ordering::Relaxed),
                );
                next.used.store(0, Ordering::Release);
                return self.begin(next, start, capacity as usize, index, writer);
            }
            let Some(page) = AnonymousMapping::new(PAGE) else {
                return null_mut();
            };
            let start = page.start.as_ptr().cast::<EventRow>();
            // The log unmaps it.
            std::mem::forget(page);
            return self.begin(&writer.own, start, PAGE / ROW, index, writer);
        };
        if !self.spill(full) {
            return null_mut();
        }
        full.used.store(0, Ordering::Release);
        full.first
            .store(writer.written.load(Ordering::Relaxed), Ordering::Release);
        chunk
    }

    /// The chunk of a thread that has ended, its rows written to the file.
    fn take_over(&self, index: usize) -> Option<&Chunk> {
        for _ in 0..ATTEMPTS.min(index) {
            let other = self.writer(self.next_ended.fetch_add(1, Ordering::Relaxed) % index);
            let chunk = other.chunk.load(Ordering::Acquire);
            // SAFETY: no preconditions; signal 0 only checks whether there is such a thread.
            let is_alive = || unsafe {
                libc::syscall(
                    libc::SYS_tgkill,
                    libc::getpid(),
                    other.native_id.load(Ordering::Relaxed),
                    0,
                ) == 0
            };
            if chunk.is_null() || is_alive() {
                continue;
            }
            let taken = other
                .chunk
                .compare_exchange(chunk, null_mut(), Ordering::AcqRel, Ordering::Relaxed);
            // SAFETY: an entry that lives as long as the log.
            let Some(chunk) = (unsafe { chunk.as_ref() }).filter(|_| taken.is_ok()) else {
                continue;
            };
            if chunk.used.load(Ordering::Acquire) == 0 || self.spill(chunk) {
                return Some(chunk);
            }
            other
                .chunk
                .store(std::ptr::from_ref(chunk).cast_mut(), Ordering::Release);
        }
        None
    }

    fn begin(&self, chunk: &Chunk, start: *mut EventRow, capacity: usize, index: usize, writer: &Writer) -> *mut Chunk {
        chunk.start.store(start, Ordering::Relaxed);
        chunk.capacity.store(capacity as u32, Ordering::Relaxed);
        chunk
            .first
            .store(writer.written.load(Ordering::Relaxed), Ordering::Relaxed);
        chunk.thread.store(index as u32 + 1, Ordering::Release);
        let chunk = std::ptr::from_ref(chunk).cast_mut();
        writer.chunk.store(chunk, Ordering::Release);
        chunk
    }

    /// Writes a chunk to the file. False if it cannot be.
    fn spill(&self, chunk: &Chunk) -> bool {
        let Some(spill) = &self.file else { return false };
        let fd = spill.file.as_raw_fd();
        let count = chunk.used.load(Ordering::Relaxed);
        let length = size_of::<Header>() + count as usize * ROW;
        let at = spill.end.load(Ordering::Relaxed);
        if at.saturating_add(length as u64) > spill.limit || identity(fd) != Some(spill.identity) {
            return false;
        }
        let header = Header {
            thread: chunk.thread.load(Ordering::Relaxed) - 1,
            count,
            first: chunk.first.load(Ordering::Relaxed),
        };
        let parts = [
            libc::iovec {
                iov_base: (&raw const header).cast_mut().cast(),
                iov_len: size_of::<Header>(),
            },
            libc::iovec {
                iov_base: chunk.start.load(Ordering::Relaxed).cast(),
                iov_len: count as usize * ROW,
            },
        ];
        // A place of its own, taken only now, so that what others write lies behind no gap for long.
        let at = spill.end.fetch_add(length as u64, Ordering::Relaxed);
        // SAFETY: both parts are readable; the file is the one that was given.
        let written = unsafe { libc::pwritev(fd, parts.as_ptr(), 2, at as libc::off_t) };
        if written != length as isize {
            // Reading ends here.
            let end = [0u8; size_of::<Header>()];
            // SAFETY: a readable array.
            unsafe { libc::pwrite(fd, end.as_ptr().cast(), end.len(), at as libc::off_t) };
        }
        written == length as isize
    }

    /// Rows that could not be kept, as far as is known while threads write, and bytes in the file.
    pub fn counts(&self) -> (u64, u64) {
        let threads = self.next_writer.load(Ordering::Acquire).min(MAX_THREADS);
        let dropped = (0..threads).map(|i| self.writer(i).dropped.load(Ordering::Relaxed));
        let spilled = self.file.as_ref().map_or(0, |f| f.end.load(Ordering::Relaxed));
        (self.dropped.load(Ordering::Relaxed) + dropped.sum::<u64>(), spilled)
    }

    /// All rows. No thread may append meanwhile.
    pub fn contents(&self) -> Contents {
        let threads = self.next_writer.load(Ordering::Acquire).min(MAX_THREADS);
        let mut parts: Vec<(u32, u64, Vec<EventRow>)> = Vec::new();
        let mut add = |chunk: &Chunk| {
            let (thread, start) = (
                chunk.thread.load(Ordering::Acquire),
                chunk.start.load(Ordering::Relaxed),
            );
            if thread == 0 || start.is_null() {
                return;
            }
            let used = chunk.used.load(Ordering::Acquire) as usize;
            // SAFETY: as many rows as have been written.
            let rows = unsafe { std::slice::from_raw_parts(start, used) }.to_vec();
            parts.push((thread - 1, chunk.first.load(Ordering::Relaxed), rows));
        };
        let chunks = self.next_chunk.load(Ordering::Acquire).min(self.chunk_count);
        (0..chunks).for_each(|i| add(self.chunk(i)));
        (0..threads).for_each(|i| add(&self.writer(i).own));
        let mut dropped = self.dropped.load(Ordering::Relaxed);
        if let Some(spill) = &self.file
            && identity(spill.file.as_raw_fd()) == Some(spill.identity)
        {
            self.read_back(spill, spill.end.load(Ordering::Relaxed), &mut parts);
        }
        parts.sort_by_key(|(thread, first, _)| (*thread, *first));
        let rows: Vec<(u32, EventRow)> = parts
            .into_iter()
            .flat_map(|(thread, _, rows)| rows.into_iter().map(move |r| (thread, r)))
            .collect();
        let mut list = Vec::with_capacity(threads);
        let mut written = 0;
        for index in 0..threads {
            let writer = self.writer(index);
            let thread = LogThread {
                native_id: writer.native_id.load(Ordering::Relaxed),
                ident: writer.ident.load(Ordering::Acquire),
            };
            dropped += writer.dropped.load(Ordering::Relaxed);
            written += writer.written.load(Ordering::Relaxed);
            list.push(thread);
        }
        // What the file has lost.
        dropped += written.saturating_sub(rows.len() as u64);
        Contents {
            rows,
            threads: list,
            dropped,
        }
    }

    /// Reads what was written to the file, as far as it is complete.
    fn read_back(&self, spill: &Spill, end: u64, parts: &mut Vec<(u32, u64, Vec<EventRow>)>) {
        use std::os::unix::fs::FileExt;
        let threads = self.next_writer.load(Ordering::Relaxed) as u32;
        let most = MAX_CHUNK.max(PAGE / ROW) as u32;
        let mut at = 0;
        while at < end {
            let mut bytes = [0; size_of::<Header>()];
            if spill.file.read_exact_at(&mut bytes, at).is_err() {
                return;
            }
            let word =
                |from: usize| u32::from_ne_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]]);
            let (thread, count) = (word(0), word(4));
            let first = u64::from(word(8)) | u64::from(word(12)) << 32;
            if count == 0 || count > most || thread >= threads {
                return;
            }
            let mut rows = vec![EventRow::default(); count as usize];
            // SAFETY: plain integers, any bytes will do.
            let place = unsafe { std::slice::from_raw_parts_mut(rows.as_mut_ptr().cast(), count as usize * ROW) };
            if spill.file.read_exact_at(place, at + bytes.len() as u64).is_err() {
                return;
            }
            parts.push((thread, first, rows));
            at += (bytes.len() + count as usize * ROW) as u64;
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let threads = self.next_writer.load(Ordering::Acquire).min(MAX_THREADS);
        for index in 0..threads {
            if let Some(start) = NonNull::new(self.writer(index).own.start.load(Ordering::Acquire)) {
                drop(AnonymousMapping {
                    start: start.cast(),
                    length: PAGE,
                });
            }
        }
    }
}

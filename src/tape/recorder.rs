//! Recording: sits between the session and the machine and records both sides.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::hash::Hash;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::encode::max_size;
use super::responses::{Mapped, MemoryRange, ResponseLog, SleepingThread, SystemResponses};
use super::{MAX_BYTES, MONOTONIC, Mark, OWN_CPU, Tape, TapeHeader};
use crate::error::Result;
use crate::event::{Event, Pid, Sample, Tid};
use crate::process::file_content::Content;
use crate::process::root::Root;
use crate::process::system::{FileKey, LiveSystem, System};

/// Bytes of a tape that are left for what comes last: the pruned files and the names of kernel functions.
const RESERVED: u64 = 64 << 20;
/// Bytes of a response besides its text or list, at most.
const RESPONSE_HEADER_SIZE: usize = 40;
/// Bytes of a mark.
const MARK_SIZE: u64 = 5;

/// Records events and responses until it has its samples, or as many as can be read again.
pub struct TapeRecorder {
    state: RefCell<RecorderState>,
}

#[derive(Default)]
struct RecorderState {
    tape: Tape,
    responses: Responses,
    files: FxHashMap<FileKey, u32>,
    /// Samples still wanted.
    wanted: u64,
    /// Bytes that events and responses may still have, with stacks that repeat the previous one: the reader unpacks them.
    room: u64,
    full: bool,
}

#[derive(Default)]
struct Responses {
    maps: ResponseLog<Pid, Option<Vec<u8>>>,
    stack_ends: ResponseLog<Pid, u64>,
    threads: ResponseLog<Pid, Vec<Tid>>,
    names: ResponseLog<(Pid, Tid), Option<String>>,
    opened: ResponseLog<Mapped, Option<u32>>,
    reads: ResponseLog<MemoryRange, Vec<u8>>,
    clocks: ResponseLog<u8, u64>,
    calls: ResponseLog<(Pid, Tid), Option<u64>>,
    sleeping: ResponseLog<(Pid, Tid), SleepingThread>,
    descriptors: ResponseLog<(Pid, u32), Option<String>>,
    networks: ResponseLog<(Pid, String), Option<String>>,
}

impl Responses {
    fn take(&mut self) -> SystemResponses {
        SystemResponses {
            maps: self.maps.take(),
            stack_ends: self.stack_ends.take(),
            threads: self.threads.take(),
            names: self.names.take(),
            opened: self.opened.take(),
            reads: self.reads.take(),
            clocks: self.clocks.take(),
            calls: self.calls.take(),
            sleeping: self.sleeping.take(),
            descriptors: self.descriptors.take(),
            networks: self.networks.take(),
        }
    }
}

impl RecorderState {
    /// Takes room for so many bytes. False if the recording has ended, or ends here.
    fn has_room(&mut self, size: u64) -> bool {
        match self.room.checked_sub(size) {
            Some(room) => self.room = room,
            None => self.full = true,
        }
        !self.full
    }

    /// The number of events and marks.
    fn position(&self) -> u32 {
        u32::try_from(self.tape.events.len() + self.tape.marks.len()).unwrap_or(u32::MAX)
    }

    fn mark(&mut self, mark: Mark) {
        let events = u32::try_from(self.tape.events.len()).unwrap_or(u32::MAX);
        if self.has_room(MARK_SIZE) {
            self.tape.marks.push((events, mark));
        }
    }

    /// Records a response; `size`: bytes of its text or list.
    fn response<K: Hash + Eq + Ord + Clone, V: PartialEq>(
        &mut self,
        log: impl Fn(&mut Responses) -> &mut ResponseLog<K, V>,
        key: K,
        value: V,
        size: usize,
    ) {
        let (is_new, after) = (log(&mut self.responses).is_new(&key, &value), self.position());
        // The response to a call that was made before takes no room.
        if !self.full && (!is_new || self.has_room((RESPONSE_HEADER_SIZE + size) as u64)) {
            log(&mut self.responses).add(key, after, value);
        }
    }
}

impl TapeRecorder {
    /// Records the first `samples` samples and what goes with them.
    pub fn new(samples: u64) -> Rc<TapeRecorder> {
        let state = RecorderState {
            wanted: samples,
            room: MAX_BYTES - RESERVED,
            ..RecorderState::default()
        };
        Rc::new(TapeRecorder { state: state.into() })
    }

    /// Records an event; call it before the session handles the event.
    pub fn event(&self, event: &Event) {
        let mut state = self.state.borrow_mut();
        if let Event::Sample(_) = event {
            state.full |= state.wanted == 0;
            state.wanted = state.wanted.saturating_sub(1);
        }
        if state.has_room(max_size(event)) {
            state.tape.events.push(event.clone());
        }
    }

    /// Whether nothing more is recorded.
    pub fn is_full(&self) -> bool {
        self.state.borrow().full
    }

    /// The recording, with complete files.
    pub fn finish(&self, header: TapeHeader) -> Tape {
        let mut state = self.state.borrow_mut();
        let mut tape = std::mem::take(&mut state.tape);
        tape.responses = state.responses.take();
        keep_used_sockets(&mut tape.responses);
        tape.header = header;
        tape
    }

    fn record<K: Hash + Eq + Ord + Clone, V: PartialEq>(
        &self,
        log: impl Fn(&mut Responses) -> &mut ResponseLog<K, V>,
        key: K,
        value: V,
        size: usize,
    ) {
        self.state.borrow_mut().response(log, key, value, size);
    }
}

/// Removes the sockets of other processes: of the tables remain the lines with a socket that a descriptor refers to, and with
/// those that accept connections, at a port of such a line.
fn keep_used_sockets(responses: &mut SystemResponses) {
    let descriptors = responses
        .descriptors
        .iter()
        .filter_map(|response| response.value.as_deref());
    let inode = |name: &str| Some(name.strip_prefix("socket:[")?.strip_suffix(']')?.to_string());
    let used: BTreeSet<String> = descriptors.filter_map(inode).collect();
    let is_used = |line: &&str| line.split_ascii_whitespace().any(|word| used.contains(word));
    let port = |line: &str| Some(line.split_ascii_whitespace().nth(1)?.rsplit_once(':')?.1.to_string());
    let texts = responses
        .networks
        .iter()
        .filter_map(|response| response.value.as_deref());
    let ports: BTreeSet<String> = texts.flat_map(str::lines).filter(is_used).filter_map(port).collect();
    for response in &mut responses.networks {
        let Some(text) = &mut response.value else { continue };
        let listens = |line: &str| {
            // As in session/sockets.rs: the state of a line of `/proc/net/tcp`.
            let is_listening = line.split_ascii_whitespace().nth(3) == Some("0A");
            is_listening && port(line).is_some_and(|port| ports.contains(&port))
        };
        let kept = text.lines().filter(|line| is_used(line) || listens(line));
        *text = kept.map(|line| format!("{line}\n")).collect();
    }
}

/// The live machine, recorded.
pub struct RecordingSystem(pub Rc<TapeRecorder>);

impl RecordingSystem {
    /// Records what was read of so many bytes.
    fn record_read(&self, pid: Pid, avma: u64, length: usize, read: &[u8]) {
        let Ok(length) = u32::try_from(length) else { return };
        self.0
            .record(|all| &mut all.reads, (pid, avma, length), read.to_vec(), read.len());
    }
}

impl System for RecordingSystem {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        let response = LiveSystem.maps(pid);
        // Only executable memory is needed; the rest would expose more of the user's machine than a tape needs.
        let code: Option<Vec<u8>> = response.as_ref().ok().map(|text| {
            let lines = text.split_inclusive(|c| *c == b'\n');
            let is_code = |l: &&[u8]| l.split(|c| *c == b' ').nth(1).is_some_and(|r| r.get(2) == Some(&b'x'));
            lines.filter(is_code).flatten().copied().collect()
        });
        let size = code.as_ref().map_or(0, Vec::len);
        self.0.record(|all| &mut all.maps, pid, code, size);
        response
    }

    fn stack_end(&self, pid: Pid) -> u64 {
        let response = LiveSystem.stack_end(pid);
        self.0.record(|all| &mut all.stack_ends, pid, response, 0);
        response
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        let response = LiveSystem.threads(pid);
        let size = 4 * response.len();
        self.0.record(|all| &mut all.threads, pid, response.clone(), size);
        response
    }

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String> {
        let response = LiveSystem.thread_name(pid, tid);
        let size = response.as_ref().map_or(0, String::len);
        self.0.record(|all| &mut all.names, (pid, tid), response.clone(), size);
        response
    }

    fn namespace_tid(&self, pid: Pid, tid: Tid) -> Option<Tid> {
        // Not on the tape: threads of other namespaces are not searched for in memory, so their replay does not either.
        LiveSystem.namespace_tid(pid, tid).filter(|inner| *inner == tid)
    }

    fn open(&self, pid: Pid, start: u64, end: u64, path: &[u8], root: Option<&Root>) -> Option<(Content, FileKey)> {
        let response = LiveSystem.open(pid, start, end, path, root);
        let mut state = self.0.state.borrow_mut();
        let state = &mut *state;
        if state.full {
            return response;
        }
        let file = response.as_ref().map(|(content, key)| {
            *state.files.entry(*key).or_insert_with(|| {
                state.tape.files.push(content.clone());
                state.tape.files.len() as u32 - 1
            })
        });
        state.response(|all| &mut all.opened, (pid, start, path.to_vec()), file, path.len());
        response
    }

    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize {
        let n = LiveSystem.read_memory(pid, avma, buf);
        self.record_read(pid, avma, buf.len(), &buf[..n]);
        n
    }

    fn read_memory_pieces(&self, pid: Pid, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        let n = LiveSystem.read_memory_pieces(pid, pieces, buf);
        let mut left = &buf[..n];
        for (at, length) in pieces {
            let (piece, rest) = left.split_at((*length).min(left.len()));
            self.record_read(pid, *at, *length, piece);
            left = rest;
            if piece.len() < *length {
                break;
            }
        }
        n
    }

    fn now(&self) -> u64 {
        let response = LiveSystem.now();
        self.0.record(|all| &mut all.clocks, MONOTONIC, response, 0);
        response
    }

    fn own_cpu_time(&self) -> u64 {
        let response = LiveSystem.own_cpu_time();
        self.0.record(|all| &mut all.clocks, OWN_CPU, response, 0);
        response
    }

    fn blocked_call(&self, pid: Pid, tid: Tid) -> Option<u64> {
        let response = LiveSystem.blocked_call(pid, tid);
        self.0.record(|all| &mut all.calls, (pid, tid), response, 0);
        response
    }

    fn sleeping_thread(&self, pid: Pid, tid: Tid, read: &mut dyn FnMut() -> Option<Sample>) -> Option<Sample> {
        let response = read();
        let sample = response.clone().map(Box::new);
        let size = sample
            .as_ref()
            .map_or(0, |sample| max_size(&Event::Sample(sample.clone())));
        self.0
            .record(|all| &mut all.sleeping, (pid, tid), sample, size as usize);
        response
    }

    fn notify_sample(&self, sample: &Sample) {
        self.0.event(&Event::Sample(Box::new(sample.clone())));
    }

    fn end_turn(&self) {
        self.0.state.borrow_mut().mark(Mark::Turn);
    }

    fn end_sampling(&self) {
        self.0.state.borrow_mut().mark(Mark::End);
    }

    fn descriptor(&self, pid: Pid, fd: u32) -> Option<String> {
        let response = LiveSystem.descriptor(pid, fd);
        // Of a file it is enough that it is one; terminals are told by their names.
        let is_file = |name: &str| name.starts_with('/') && !name.starts_with("/dev/");
        let name = response.as_deref().map(|name| if is_file(name) { "/" } else { name });
        let (name, size) = (name.map(String::from), name.map_or(0, str::len));
        self.0.record(|all| &mut all.descriptors, (pid, fd), name, size);
        response
    }

    fn network_table(&self, pid: Pid, name: &str) -> Option<String> {
        let response = LiveSystem.network_table(pid, name);
        let size = name.len() + response.as_ref().map_or(0, String::len);
        self.0
            .record(|all| &mut all.networks, (pid, name.into()), response.clone(), size);
        response
    }

    fn root(&self, pid: Pid) -> Option<Root> {
        LiveSystem.root(pid)
    }

    fn kernel_symbols(&self) -> Option<String> {
        let response = LiveSystem.kernel_symbols();
        // Called once, at the end.
        self.0.state.borrow_mut().tape.kernel = response.clone();
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Sample, StackBytes};
    use crate::tape::decode::parse_within;
    use crate::tape::encode::unpacked;

    /// One that another process has mapped, too, would be missing when the tape is replayed.
    #[test]
    fn each_opening_of_a_file_is_on_the_tape() {
        let system = RecordingSystem(TapeRecorder::new(1000));
        assert_eq!(system.file_of((8, 1), 42), None);
        assert!(LiveSystem.file_of((8, 1), 42).is_some());
    }

    /// Stacks that repeat the previous one are short on the tape, and are as long as before when it is read.
    #[test]
    fn recordings_end_before_they_cannot_be_read() {
        let room = 1 << 20;
        let recorder = TapeRecorder::new(1000);
        recorder.state.borrow_mut().room = room;
        let sample = Sample {
            pid: 1,
            tid: 1,
            stack: StackBytes {
                base: 0x1000,
                bytes: vec![7; 64 << 10],
                holes: Vec::new(),
            },
            ..Sample::default()
        };
        let sample = Event::Sample(Box::new(sample));
        let event = |event: &Event| {
            recorder.event(event);
            let number = recorder.state.borrow().tape.events.len() as Pid;
            recorder.record(|all| &mut all.stack_ends, number, 2, 0);
        };
        for _ in 0..100 {
            event(&sample);
        }
        event(&Event::Lost(1));
        let tape = recorder.finish(TapeHeader::default());
        assert_eq!((tape.events.len(), tape.responses.stack_ends.len()), (15, 15));
        let raw = unpacked(&tape);
        assert!(raw.len() < 128 << 10, "{} bytes", raw.len());
        let read = parse_within(&raw, room).expect("within the limit of the reader");
        assert!(read.events == tape.events && read.responses.stack_ends == tape.responses.stack_ends);
        let mut longer = tape;
        longer.events.extend([sample.clone(), sample]);
        assert!(parse_within(&unpacked(&longer), room).is_err());
    }
}

//! Recording: sits between the session and the machine and records both sides.

use std::cell::RefCell;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::encode::max_size;
use super::{MAX_BYTES, Tape, TapeHeader};
use crate::error::Result;
use crate::event::{Event, Pid, Tid};
use crate::process::file_content::Content;
use crate::process::root::Root;
use crate::process::system::{FileKey, LiveSystem, System};

/// Bytes of a tape that are left for what comes last: the pruned files and the names of kernel functions.
const RESERVED: u64 = 64 << 20;
/// Bytes of a response besides its text or list, at most.
const RESPONSE_HEADER_SIZE: usize = 20;

/// Records events and responses until it has its samples, or as many as can be read again.
pub struct TapeRecorder {
    state: RefCell<RecorderState>,
}

#[derive(Default)]
struct RecorderState {
    tape: Tape,
    files: FxHashMap<FileKey, u32>,
    /// Samples still wanted.
    wanted: u64,
    /// Bytes that events and responses may still have, with stacks that repeat the previous one: the reader unpacks them.
    room: u64,
    full: bool,
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
        let mut tape = std::mem::take(&mut self.state.borrow_mut().tape);
        tape.header = header;
        tape
    }

    /// Records a response; `size`: bytes of its text or list.
    fn record(&self, size: usize, record: impl FnOnce(&mut RecorderState)) {
        let mut state = self.state.borrow_mut();
        if state.has_room((RESPONSE_HEADER_SIZE + size) as u64) {
            record(&mut state);
        }
    }
}

/// The live machine, recorded.
pub struct RecordingSystem(pub Rc<TapeRecorder>);

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
        self.0.record(size, |state| state.tape.responses.maps.push((pid, code)));
        response
    }

    fn stack_end(&self, pid: Pid) -> u64 {
        let response = LiveSystem.stack_end(pid);
        self.0
            .record(0, |state| state.tape.responses.stack_ends.push((pid, response)));
        response
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        let response = LiveSystem.threads(pid);
        let size = 4 * response.len();
        self.0
            .record(size, |state| state.tape.responses.threads.push((pid, response.clone())));
        response
    }

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String> {
        let response = LiveSystem.thread_name(pid, tid);
        let size = response.as_ref().map_or(0, String::len);
        self.0.record(size, |state| {
            state.tape.responses.names.push(((pid, tid), response.clone()))
        });
        response
    }

    fn namespace_tid(&self, pid: Pid, tid: Tid) -> Option<Tid> {
        // Not on the tape: threads of other namespaces are not searched for in memory, so their replay does not either.
        LiveSystem.namespace_tid(pid, tid).filter(|inner| *inner == tid)
    }

    fn open(&self, pid: Pid, start: u64, end: u64, path: &[u8], root: Option<&Root>) -> Option<(Content, FileKey)> {
        let response = LiveSystem.open(pid, start, end, path, root);
        self.0.record(path.len(), |state| {
            let file = response.as_ref().map(|(content, key)| {
                *state.files.entry(*key).or_insert_with(|| {
                    state.tape.files.push(content.clone());
                    state.tape.files.len() as u32 - 1
                })
            });
            state.tape.responses.opened.push(((pid, start, path.to_vec()), file));
        });
        response
    }

    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize {
        let n = LiveSystem.read_memory(pid, avma, buf);
        self.0.record(n, |state| {
            let got = buf[..n].to_vec();
            state.tape.responses.reads.push(((pid, avma, buf.len() as u32), got));
        });
        n
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
            recorder.record(0, |state| state.tape.responses.stack_ends.push((1, 2)));
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

//! Recording: sits between the session and the machine and records both sides.

use std::cell::RefCell;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::encode::max_size;
use super::{MAX_BYTES, Tape, TapeHeader};
use crate::error::Result;
use crate::event::{Event, Pid, Tid};
use crate::target::file_content::Content;
use crate::target::root::Root;
use crate::target::system::{FileKey, LiveSystem, System};

/// Bytes of a tape that are left for what comes last: the pruned files and the names of kernel functions.
const RESERVED: u64 = 64 << 20;
/// Bytes of an answer besides its text or list, at most.
const ANSWER_HEAD: usize = 20;

/// Records events and answers until it has its samples, or as many as can be read again.
pub struct TapeRecorder {
    log: RefCell<RecorderState>,
}

#[derive(Default)]
struct RecorderState {
    tape: Tape,
    files: FxHashMap<FileKey, u32>,
    /// Samples still wanted.
    wanted: u64,
    /// Bytes that events and answers may still have, with stacks that repeat the previous one: the reader unpacks them.
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
        let log = RecorderState {
            wanted: samples,
            room: MAX_BYTES - RESERVED,
            ..RecorderState::default()
        };
        Rc::new(TapeRecorder { log: log.into() })
    }

    /// Records an event; call it before the session handles the event.
    pub fn event(&self, event: &Event) {
        let mut log = self.log.borrow_mut();
        if let Event::RunningTask { .. } = event {
            return; // replays show no tasks
        }
        if let Event::Sample(_) = event {
            log.full |= log.wanted == 0;
            log.wanted = log.wanted.saturating_sub(1);
        }
        if log.has_room(max_size(event)) {
            log.tape.events.push(event.clone());
        }
    }

    /// The recording, with complete files.
    pub fn finish(&self, head: TapeHeader) -> Tape {
        let mut tape = std::mem::take(&mut self.log.borrow_mut().tape);
        tape.head = head;
        tape
    }

    /// Records an answer; `size`: bytes of its text or list.
    fn record(&self, size: usize, record: impl FnOnce(&mut RecorderState)) {
        let mut log = self.log.borrow_mut();
        if log.has_room((ANSWER_HEAD + size) as u64) {
            record(&mut log);
        }
    }
}

/// The live machine, recorded.
pub struct RecordingSystem(pub Rc<TapeRecorder>);

impl System for RecordingSystem {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        let answer = LiveSystem.maps(pid);
        // Only executable memory is needed; the rest would expose more of the user's machine than a tape needs.
        let code: Option<Vec<u8>> = answer.as_ref().ok().map(|text| {
            let lines = text.split_inclusive(|c| *c == b'\n');
            let is_code = |l: &&[u8]| l.split(|c| *c == b' ').nth(1).is_some_and(|r| r.get(2) == Some(&b'x'));
            lines.filter(is_code).flatten().copied().collect()
        });
        let size = code.as_ref().map_or(0, Vec::len);
        self.0.record(size, |log| log.tape.answers.maps.push((pid, code)));
        answer
    }

    fn stack_end(&self, pid: Pid) -> u64 {
        let answer = LiveSystem.stack_end(pid);
        self.0.record(0, |log| log.tape.answers.stack_ends.push((pid, answer)));
        answer
    }

    fn threads(&self, pid: Pid) -> Vec<Tid> {
        let answer = LiveSystem.threads(pid);
        let size = 4 * answer.len();
        self.0
            .record(size, |log| log.tape.answers.threads.push((pid, answer.clone())));
        answer
    }

    fn thread_name(&self, pid: Pid, tid: Tid) -> Option<String> {
        let answer = LiveSystem.thread_name(pid, tid);
        let size = answer.as_ref().map_or(0, String::len);
        self.0
            .record(size, |log| log.tape.answers.names.push(((pid, tid), answer.clone())));
        answer
    }

    fn namespace_tid(&self, pid: Pid, tid: Tid) -> Option<Tid> {
        // Not on the tape: threads of other namespaces are not searched for in memory, so their replay does not either.
        LiveSystem.namespace_tid(pid, tid).filter(|inner| *inner == tid)
    }

    fn open(&self, pid: Pid, start: u64, end: u64, path: &[u8], root: Option<&Root>) -> Option<(Content, FileKey)> {
        let answer = LiveSystem.open(pid, start, end, path, root);
        self.0.record(path.len(), |log| {
            let file = answer.as_ref().map(|(content, key)| {
                *log.files.entry(*key).or_insert_with(|| {
                    log.tape.files.push(content.clone());
                    log.tape.files.len() as u32 - 1
                })
            });
            log.tape.answers.opened.push(((pid, start, path.to_vec()), file));
        });
        answer
    }

    fn read_memory(&self, pid: Pid, avma: u64, buf: &mut [u8]) -> usize {
        let n = LiveSystem.read_memory(pid, avma, buf);
        self.0.record(n, |log| {
            let got = buf[..n].to_vec();
            log.tape.answers.reads.push(((pid, avma, buf.len() as u32), got));
        });
        n
    }

    fn root(&self, pid: Pid) -> Option<Root> {
        LiveSystem.root(pid)
    }

    fn kernel_symbols(&self) -> Option<String> {
        let answer = LiveSystem.kernel_symbols();
        // Called once, at the end.
        self.0.log.borrow_mut().tape.kernel = answer.clone();
        answer
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
        recorder.log.borrow_mut().room = room;
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
            recorder.record(0, |log| log.tape.answers.stack_ends.push((1, 2)));
        };
        for _ in 0..100 {
            event(&sample);
        }
        event(&Event::Lost(1));
        let tape = recorder.finish(TapeHeader::default());
        assert_eq!((tape.events.len(), tape.answers.stack_ends.len()), (15, 15));
        let raw = unpacked(&tape);
        assert!(raw.len() < 128 << 10, "{} bytes", raw.len());
        let read = parse_within(&raw, room).expect("within the limit of the reader");
        assert!(read.events == tape.events && read.answers.stack_ends == tape.answers.stack_ends);
        let mut longer = tape;
        longer.events.extend([sample.clone(), sample]);
        assert!(parse_within(&unpacked(&longer), room).is_err());
    }
}

//! Decodes what sample.bpf.c writes. The kernel is trusted, its bytes are bounded all the same.

use rustc_hash::FxHashMap;

use crate::arch::{PT_REGS_WORDS, Regs};
use crate::layout::{NONE, Own, Space, Tls};
use crate::sample::{CodeCopy, Part, Pid, PyRef, PyWalk, Sample, StackBytes, Tid, TimeSpent};

const HEAD: usize = 512;
const REGS_OK: u32 = 1;
const MORE: u32 = 4;
const REST: u32 = 8;
const OFF_CPU: u32 = 32;
/// Index of the system call's number in `struct pt_regs`.
const ORIG_AX: usize = 15;
const CODE_COPY: u32 = 16;

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?))
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(b.get(at..at + 2)?.try_into().ok()?))
}

fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?))
}

// Offsets in `struct head` and, up to the time, `struct code_head`.
const PID: usize = 4;
const TID: usize = 8;
const FLAGS: usize = 12;
const TIME: usize = 16;
const REGS: usize = 24;
const STACK_BASE: usize = REGS + 8 * PT_REGS_WORDS + 8;
const STACK_LEN: usize = STACK_BASE + 8;
const KERNEL: usize = STACK_LEN + 4;
const FRAMES: usize = KERNEL + 2;
const MARKS: usize = FRAMES + 2;
const WALK: usize = MARKS + 2;
const FRAMES_AT: usize = WALK + 2;
const STACK_AT: usize = FRAMES_AT + 4;
const HOLES: usize = STACK_AT + 8; // on a word boundary
const HOLE_WORDS: usize = 5;

const CPU: usize = HOLES + 8 * HOLE_WORDS;
const RUNNABLE: usize = CPU + 8;
const BLOCKED: usize = RUNNABLE + 8;

// Offsets in `struct code_head`.
const CODE: usize = TIME + 8;
const FINGERPRINT: usize = CODE + 8;
const PARTS_AT: usize = FINGERPRINT + 8;
const PART_SIZE: usize = 16;
const PARTS: usize = 5;

const FRAME_SIZE: usize = 32;
const MARK_SIZE: usize = 16;

/// Samples that wait for the rest of their stacks, at most. Rests follow at once, so that more are those whose rests were
/// lost.
const MOST_OPEN: usize = 64;

/// What a record, or several together, say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    Sample(Box<Sample>),
    /// Of a process, at a time: taken with a sample of the same time, which follows.
    Code(Pid, u64, CodeCopy),
}

/// Puts the records of one thread's samples together.
#[derive(Default)]
pub struct Joiner {
    /// Samples whose stacks are not whole yet.
    open: FxHashMap<Tid, Sample>,
}

impl Joiner {
    /// Takes a ring buffer entry in; appends what is whole by it. A record that is not whole is left out.
    pub fn take(&mut self, b: &[u8], out: &mut Vec<Record>) {
        let Some(flags) = u32_at(b, FLAGS) else { return };
        if flags & CODE_COPY != 0 {
            out.extend(decode_code(b));
            return;
        }
        let Some(s) = decode(b) else { return };
        let mut whole = s;
        if flags & REST != 0 {
            let Some(mut sample) = self.open.remove(&whole.tid) else {
                return;
            };
            if sample.time == whole.time {
                sample.stack.append(whole.stack);
            }
            whole = sample;
        } else {
            // A rest that was lost: what came before is a sample all the same.
            out.extend(self.open.remove(&whole.tid).map(|s| Record::Sample(Box::new(s))));
        }
        if self.open.len() >= MOST_OPEN {
            self.finish(out);
        }
        if flags & MORE != 0 {
            self.open.insert(whole.tid, whole);
        } else {
            out.push(Record::Sample(Box::new(whole)));
        }
    }

    /// Appends the samples whose rests were lost; for the end.
    pub fn finish(&mut self, out: &mut Vec<Record>) {
        out.extend(self.open.drain().map(|(_, s)| Record::Sample(Box::new(s))));
    }
}

/// A copy of a code object from one ring buffer entry; `None` if the entry is not whole.
pub fn decode_code(b: &[u8]) -> Option<Record> {
    let mut at = PARTS_AT + PARTS * PART_SIZE;
    let mut parts = Vec::with_capacity(PARTS);
    for i in 0..PARTS {
        let (avma, len) = (
            u64_at(b, PARTS_AT + i * PART_SIZE)?,
            u32_at(b, PARTS_AT + i * PART_SIZE + 8)? as usize,
        );
        let bytes = b.get(at..at + len)?.to_vec();
        at += len;
        if len > 0 {
            parts.push(Part { avma, bytes });
        }
    }
    let copy = CodeCopy {
        code: u64_at(b, CODE)?,
        fingerprint: u32_at(b, FINGERPRINT)?,
        parts,
    };
    Some(Record::Code(u32_at(b, PID)?, u64_at(b, TIME)?, copy))
}

/// A sample from one ring buffer entry; `None` if the entry is not whole.
pub fn decode(b: &[u8]) -> Option<Sample> {
    let flags = u32_at(b, FLAGS)?;
    let regs = if flags & REGS_OK != 0 {
        let mut w = [0; PT_REGS_WORDS];
        for (i, w) in w.iter_mut().enumerate() {
            *w = u64_at(b, REGS + 8 * i)?;
        }
        Some(Regs::from_pt_regs(&w))
    } else {
        None
    };
    let kernel = (0..usize::from(u16_at(b, KERNEL)?))
        .map(|i| u64_at(b, HEAD + 8 * i))
        .collect::<Option<Vec<_>>>()?;
    let frames = usize::from(u16_at(b, FRAMES)?);
    let frames_at = u32_at(b, FRAMES_AT)? as usize;
    let python = b
        .get(frames_at..frames_at + frames * FRAME_SIZE)?
        .chunks_exact(FRAME_SIZE);
    let python = python
        .map(|f| {
            Some(PyRef {
                frame: u64_at(f, 0)?,
                code: u64_at(f, 8)?,
                instr: u64_at(f, 16)?,
                fingerprint: u32_at(f, 24)?,
                owner: f[28],
                entry: f[29] != 0,
            })
        })
        .collect::<Option<Vec<_>>>()?;
    let marks_at = frames_at + frames * FRAME_SIZE;
    let marks = b
        .get(marks_at..marks_at + usize::from(u16_at(b, MARKS)?) * MARK_SIZE)?
        .chunks_exact(MARK_SIZE);
    let marks = marks
        .map(|m| {
            Some(PyRef {
                frame: u64_at(m, 0)?,
                instr: u64_at(m, 8)?,
                ..PyRef::default()
            })
        })
        .collect::<Option<Vec<_>>>()?;
    let stack_at = u32_at(b, STACK_AT)? as usize;
    let bytes = b.get(stack_at..stack_at + u32_at(b, STACK_LEN)? as usize)?.to_vec();
    let holes = (0..HOLE_WORDS)
        .map(|i| u64_at(b, HOLES + 8 * i))
        .collect::<Option<Vec<_>>>()?;
    Some(Sample {
        pid: u32_at(b, PID)?,
        tid: u32_at(b, TID)?,
        time: u64_at(b, TIME)?,
        regs,
        stack: StackBytes {
            base: u64_at(b, STACK_BASE)?,
            bytes,
            holes: if holes.iter().any(|w| *w != 0) {
                holes
            } else {
                Vec::new()
            },
        },
        kernel,
        python,
        marks,
        walk: match u16_at(b, WALK)? {
            0 => PyWalk::NoPython,
            1 => PyWalk::Complete,
            2 => PyWalk::Fault,
            _ => PyWalk::TooDeep,
        },
        time_spent: TimeSpent {
            cpu: u64_at(b, CPU)?,
            runnable: u64_at(b, RUNNABLE)?,
            blocked: u64_at(b, BLOCKED)?,
        },
        // -1 outside system calls
        system_call: (flags & OFF_CPU != 0)
            .then(|| u64_at(b, REGS + 8 * ORIG_AX))
            .flatten()
            .and_then(|n| u16::try_from(n).ok()),
    })
}

/// From the list of interpreters to the main one (`struct pyinterpreters`, Include/internal/pycore_runtime.h, v3.12.1 to
/// v3.13.0; pycore_runtime_structs.h, v3.14.0 and v3.15.0).
const MAIN: u32 = 8;

/// Bytes of `struct layout`.
pub const LAYOUT_SIZE: usize = 112;

/// A process's [`Space`] as the BPF program's `struct layout`.
pub fn encode(space: &Space) -> [u8; LAYOUT_SIZE] {
    let mut out = Vec::with_capacity(LAYOUT_SIZE);
    out.extend(space.stack_end.to_le_bytes());
    if let Some(p) = &space.python {
        let l = &p.layout;
        let (tls, key, specific) = match (p.own, p.tls) {
            (Own::Key, Tls::Glibc(at)) => (1u32, l.runtime_key, at),
            (Own::Key, Tls::Musl(at)) => (2, l.runtime_key, at),
            (Own::Offset(at), _) => (3, 0, at as u32),
            (Own::Block { id, offset }, Tls::Glibc(_)) => (4, id as u32, offset),
            (Own::Block { id, offset }, Tls::Musl(_)) => (5, id as u32, offset),
            (Own::Listed, _) => (0, 0, 0),
        };
        out.extend(p.runtime.to_le_bytes());
        for w in [
            key,
            l.runtime_current,
            tls,
            specific,
            l.runtime_interpreters.wrapping_add(MAIN),
            l.interp_generation,
            l.runtime_generation as u32,
        ] {
            out.extend(w.to_le_bytes());
        }
        let instr_size = if l.position == crate::layout::Position::Pointer {
            8
        } else {
            4
        };
        let cframe_frame = if l.tstate_first == l.tstate_cframe {
            l.cframe_current_frame
        } else {
            NONE
        };
        // Only where the marks lie outside the frame chain does their own chain need walking.
        let cframe = match l.anchor {
            crate::layout::Anchor::CFramePerFrame | crate::layout::Anchor::CFramePerEntry => l.tstate_cframe,
            _ => NONE,
        };
        for h in [
            l.tstate_thread_id,
            l.tstate_first,
            cframe_frame,
            l.cframe_previous,
            l.tstate_root_cframe,
            cframe,
            l.frame_size,
            l.frame_previous,
            l.frame_code,
            l.frame_instr,
            instr_size,
            l.frame_owner,
            l.frame_entry,
            l.code_name,
            l.code_filename,
            l.code_firstlineno,
            l.str_length,
            l.str_ascii_data,
            l.code_version,
            l.tstate_base_frame,
            l.frame_copy,
            l.code_copies,
            l.code_adaptive,
            l.tstate_interp,
            l.code_copied(),
            l.code_qualname,
            l.code_linetable,
            l.str_state,
            l.str_kind_bit,
            l.str_compact_data,
            l.bytes_size,
            l.bytes_data,
        ] {
            out.extend(h.to_le_bytes());
        }
    }
    out.resize(LAYOUT_SIZE, 0);
    out.try_into().expect("resized to the size")
}

#[cfg(test)]
mod tests {
    use super::*;

    const _: () = assert!(BLOCKED + 8 <= HEAD, "the head has outgrown its room");

    #[test]
    fn copies_of_code_objects() {
        let mut b = vec![0u8; PARTS_AT + PARTS * PART_SIZE];
        let mut put = |at: usize, bytes: &[u8]| b[at..at + bytes.len()].copy_from_slice(bytes);
        put(PID, &7u32.to_le_bytes());
        put(FLAGS, &CODE_COPY.to_le_bytes());
        put(TIME, &5u64.to_le_bytes());
        put(CODE, &0x1000u64.to_le_bytes());
        put(FINGERPRINT, &9u32.to_le_bytes());
        for (i, avma, len) in [(0, 0x1000u64, 3u32), (2, 0x2000, 2)] {
            put(PARTS_AT + i * PART_SIZE, &avma.to_le_bytes());
            put(PARTS_AT + i * PART_SIZE + 8, &len.to_le_bytes());
        }
        b.extend([1, 2, 3, 4, 5]);
        let part = |avma, bytes: &[u8]| Part {
            avma,
            bytes: bytes.to_vec(),
        };
        let copy = CodeCopy {
            code: 0x1000,
            fingerprint: 9,
            parts: vec![part(0x1000, &[1, 2, 3]), part(0x2000, &[4, 5])],
        };
        let (mut joiner, mut out) = (Joiner::default(), Vec::new());
        joiner.take(&b, &mut out);
        assert_eq!(out, [Record::Code(7, 5, copy)]);
        for len in 0..b.len() {
            assert_eq!(decode_code(&b[..len]), None, "{len}");
        }
    }

    #[test]
    fn cut_records_are_refused() {
        let mut b = vec![0u8; HEAD];
        b[FRAMES_AT..FRAMES_AT + 4].copy_from_slice(&(HEAD as u32).to_le_bytes());
        b[STACK_AT..STACK_AT + 4].copy_from_slice(&(HEAD as u32).to_le_bytes());
        assert!(decode(&b).is_some());
        for len in 0..HEAD {
            assert_eq!(decode(&b[..len]).is_some(), len >= HEAD, "{len}");
        }
        b[FRAMES..FRAMES + 2].copy_from_slice(&1u16.to_le_bytes());
        assert!(decode(&b).is_none(), "says it has a frame");
    }
}

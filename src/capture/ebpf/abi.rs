//! Decodes the records of sample.bpf.c. The kernel is trusted; the bounds of its bytes are checked nevertheless.

use super::off_cpu;
use crate::arch::{self, PT_REGS_WORDS, Regs, SAVED_REGS_WORDS, SYSTEM_CALL_WORD};
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::cpython_layout::{
    ABSENT, RunningTasks, SpanLocation, TargetLayout, ThreadContext, ThreadStateLocation, Tls,
};
use crate::event::probes::{ArgumentPlace, FreedBlock, MAX_ARGUMENTS, ProbeArgument, ProbeEvent, SampledBlock};
use crate::event::{
    CodeCopy, Dispatcher, Holder, HostSample, MemoryChange, MemoryKind, MemoryRange, NewProcess, PAGE, Part, Pid,
    Polled, ProgramId, RUNNING_TASK, RangeChange, RawPyFrame, Sample, SpanRecords, StackBytes, Tid, TimeSpent, WakeUp,
    WalkStatus,
};

/// `HEAD` of the program.
const HEAD: usize = 576 + 8 * (SAVED_REGS_WORDS - 21);
const REGS_OK: u32 = 1;
pub(super) const MORE: u32 = 4;
pub(super) const REST: u32 = 8;
const OFF_CPU: u32 = 32;
pub(super) const CODE_COPY: u32 = 16;
const WAKER: u32 = 64;
const HOLDS_LOCK: u32 = 128;
const WORKER: u32 = 256;
const UNCHANGED: u32 = 512;
const DETACHED: u32 = 4096;
const HOST: u32 = 8192;
const NEW: u32 = 16384;
const RSS: u32 = 32768;
pub(super) const RANGE: u32 = 65536;
const ALLOCATION: u32 = 131072;
pub(super) const FREED: u32 = 262144;

// Offsets in `struct head` and, up to the time, `struct code_head`.
const PID: usize = 4;
pub(super) const TID: usize = 8;
pub(super) const FLAGS: usize = 12;
pub(super) const TIME: usize = 16;
const REGS: usize = 24;
const STACK_BASE: usize = REGS + 8 * SAVED_REGS_WORDS + 8;
const STACK_LEN: usize = STACK_BASE + 8;
const KERNEL: usize = STACK_LEN + 4;
const FRAMES: usize = KERNEL + 2;
const ANCHORS: usize = FRAMES + 2;
const WALK: usize = ANCHORS + 2;
const FRAMES_AT: usize = WALK + 2;
const STACK_AT: usize = FRAMES_AT + 4;
const HOLES: usize = STACK_AT + 8; // on a word boundary
const HOLE_WORDS: usize = 5;

const CPU: usize = HOLES + 8 * HOLE_WORDS;
const RUNNABLE: usize = CPU + 8;
const BLOCKED: usize = RUNNABLE + 8;
const WAKER_TID: usize = BLOCKED + 8;
const WAKER_PID: usize = WAKER_TID + 4;
const RUNNABLE_LENGTH: usize = WAKER_PID + 4;
const BLOCKED_LENGTH: usize = RUNNABLE_LENGTH + 8;
const WOKEN: usize = BLOCKED_LENGTH + 8;
const HOLDER: usize = WOKEN + 8;
const HOLDERS_AT: usize = HOLDER + 8;
/// `MAX_HOLDERS` of the program.
const MAX_HOLDERS: usize = 10;
const THROTTLED: usize = HOLDERS_AT + 16 * MAX_HOLDERS;
const THROTTLED_LENGTH: usize = THROTTLED + 8;
const POLLED: usize = THROTTLED_LENGTH + 8;
const CGROUP: usize = POLLED + 8;
const COMM: usize = CGROUP + 8;
const COMM_SIZE: usize = 16;
const INODE: usize = COMM + COMM_SIZE;
const DEVICE: usize = INODE + 8;
const RUNTIME: usize = DEVICE + 8;
/// `THREAD_STATE` of it.
const THREAD_STATE: u64 = 1 << 63;

// Offsets in `struct change`, which is in place of the holders, and in `struct memory_range`.
const CHANGED_AT: usize = 0;
const CHANGED_LENGTH: usize = 8;
const CHANGED_PAGES: usize = 16;
const CHANGED_MEMBER: usize = 24;
const CHANGED_AGAIN: usize = 28;
const CHANGED_DOUBLED: usize = 32;
/// `MAX_DOUBLED`
pub const MAX_DOUBLED: u32 = 16;
/// `moved_to` of `struct memory_range`: some of its pages of files, some of its pages, its pages of files were given back.
const SOME_OF_FILES: u64 = u64::MAX;
const SOME_OF_IT: u64 = u64::MAX - 1;
const OF_FILES: u64 = u64::MAX - 2;
const RANGE_FROM: usize = TIME + 8;
const RANGE_TO: usize = RANGE_FROM + 8;
const RANGE_MOVED_TO: usize = RANGE_TO + 8;

// Offsets in `struct allocation`, which is in place of the holders, and in `struct freed_block`.
const BLOCK_AT: usize = 0;
const BLOCK_SIZE: usize = 8;
const BLOCK_BYTES: usize = 16;
const FREED_AT: usize = TIME + 8;

// Offsets in `struct code_head`.
const CODE: usize = TIME + 8;
const FINGERPRINT: usize = CODE + 8;
const PARTS_AT: usize = FINGERPRINT + 8;
const PART_SIZE: usize = 16;
const PARTS: usize = 5;

/// In place of a fingerprint, which is odd: the record is of an active span, or of a thread's OpenTelemetry context.
const ACTIVE_SPAN: u32 = 2;
const THREAD_CONTEXT: u32 = 4;

const FRAME_SIZE: usize = 32;
const ANCHOR_SIZE: usize = 16;

/// A decoded record, or several joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedRecord {
    Sample(Box<Sample>),
    /// Of a process, at a time: taken with a sample of the same time, which follows.
    Code(Pid, u64, CodeCopy),
    /// Memory that was given back or moved.
    Range(MemoryRange),
    /// The end of a sampled block.
    Free(FreedBlock),
}

/// Memory that was given back or moved, from one ring buffer entry; `None` if the entry is truncated.
pub fn decode_range(b: &[u8]) -> Option<DecodedRecord> {
    let range = MemoryRange {
        pid: u32_at(b, PID)?,
        time: u64_at(b, TIME)?,
        from: u64_at(b, RANGE_FROM)?,
        to: u64_at(b, RANGE_TO)?,
        change: match u64_at(b, RANGE_MOVED_TO)? {
            0 => RangeChange::GivenBack,
            SOME_OF_FILES => RangeChange::SomeOfFiles,
            SOME_OF_IT => RangeChange::SomeOfIt,
            OF_FILES => RangeChange::OfFiles,
            at => RangeChange::MovedTo(at),
        },
    };
    Some(DecodedRecord::Range(range))
}

/// The end of a sampled block, from one ring buffer entry; `None` if the entry is truncated.
pub fn decode_freed(b: &[u8]) -> Option<DecodedRecord> {
    Some(DecodedRecord::Free(FreedBlock {
        pid: u32_at(b, PID)?,
        time: u64_at(b, TIME)?,
        address: u64_at(b, FREED_AT)?,
    }))
}

/// The block that a sample was taken for.
fn decode_block(b: &[u8]) -> Option<SampledBlock> {
    Some(SampledBlock {
        address: u64_at(b, HOLDERS_AT + BLOCK_AT)?,
        size: u64_at(b, HOLDERS_AT + BLOCK_SIZE)?,
        bytes: u64_at(b, HOLDERS_AT + BLOCK_BYTES)?,
    })
}

/// The change of resident memory that a sample was taken for.
fn decode_change(b: &[u8]) -> Option<MemoryChange> {
    let pages = u64_at(b, HOLDERS_AT + CHANGED_PAGES)? as i64;
    Some(MemoryChange {
        bytes: pages.saturating_mul(PAGE as i64),
        // As the kernel numbers them (include/linux/mm_types_task.h, v6.18).
        kind: match u32_at(b, HOLDERS_AT + CHANGED_MEMBER)? {
            0 => MemoryKind::File,
            1 => MemoryKind::Anonymous,
            3 => MemoryKind::Shared,
            _ => return None,
        },
        address: u64_at(b, HOLDERS_AT + CHANGED_AT)?,
        length: u64_at(b, HOLDERS_AT + CHANGED_LENGTH)?,
        is_repeated: u32_at(b, HOLDERS_AT + CHANGED_AGAIN)? != 0,
        doubled: u32_at(b, HOLDERS_AT + CHANGED_DOUBLED)?.min(MAX_DOUBLED),
    })
}

/// A copy of a code object from one ring buffer entry; `None` if the entry is truncated.
pub fn decode_code(b: &[u8]) -> Option<DecodedRecord> {
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
    let (pid, time, code) = (u32_at(b, PID)?, u64_at(b, TIME)?, u64_at(b, CODE)?);
    let copy = CodeCopy {
        code,
        fingerprint: u32_at(b, FINGERPRINT)?,
        parts,
    };
    Some(DecodedRecord::Code(pid, time, copy))
}

/// One of the records that come before a sample.
pub enum SamplePart {
    /// Of the active span, if it is one of our package.
    Span(Vec<u8>),
    Context(Vec<u8>),
    /// As the arguments of [`RunningTask::add`](crate::event::RunningTask::add).
    Task(u64, u64, Part),
}

/// `None` if the entry is another one.
pub fn decode_part(b: &[u8]) -> Option<SamplePart> {
    let fingerprint = u32_at(b, FINGERPRINT)?;
    [RUNNING_TASK, ACTIVE_SPAN, THREAD_CONTEXT]
        .contains(&fingerprint)
        .then_some(())?;
    let (avma, len) = (
        u64_at(b, PARTS_AT + PART_SIZE)?,
        u32_at(b, PARTS_AT + PART_SIZE + 8)? as usize,
    );
    let at = PARTS_AT + PARTS * PART_SIZE;
    let bytes = b.get(at..at.checked_add(len)?)?.to_vec();
    Some(match fingerprint {
        ACTIVE_SPAN => SamplePart::Span(bytes),
        THREAD_CONTEXT => SamplePart::Context(bytes),
        _ => SamplePart::Task(u64_at(b, CODE)?, u64_at(b, PARTS_AT)?, Part { avma, bytes }),
    })
}

/// A sample from one ring buffer entry; `None` if the entry is truncated.
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
            Some(RawPyFrame {
                frame: u64_at(f, 0)?,
                code: u64_at(f, 8)?,
                instr: u64_at(f, 16)?,
                fingerprint: u32_at(f, 24)?,
                owner: f[28],
                entry: f[29] != 0,
            })
        })
        .collect::<Option<Vec<_>>>()?;
    let anchors_at = frames_at + frames * FRAME_SIZE;
    let anchors = b
        .get(anchors_at..anchors_at + usize::from(u16_at(b, ANCHORS)?) * ANCHOR_SIZE)?
        .chunks_exact(ANCHOR_SIZE);
    let anchors = anchors
        .map(|m| {
            Some(RawPyFrame {
                frame: u64_at(m, 0)?,
                instr: u64_at(m, 8)?,
                ..RawPyFrame::default()
            })
        })
        .collect::<Option<Vec<_>>>()?;
    let stack_at = u32_at(b, STACK_AT)? as usize;
    let bytes = b.get(stack_at..stack_at + u32_at(b, STACK_LEN)? as usize)?.to_vec();
    let holes = (0..HOLE_WORDS)
        .map(|i| u64_at(b, HOLES + 8 * i))
        .collect::<Option<Vec<_>>>()?;
    let off_cpu = |at| if flags & OFF_CPU != 0 { u64_at(b, at) } else { Some(0) };
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
        anchors,
        walk: match u16_at(b, WALK)? {
            0 => WalkStatus::NoPython,
            1 if flags & DETACHED != 0 => WalkStatus::Detached,
            1 => WalkStatus::Complete,
            2 => WalkStatus::Fault,
            _ => WalkStatus::TooDeep,
        },
        time_spent: TimeSpent {
            cpu: u64_at(b, CPU)?,
            runnable: u64_at(b, RUNNABLE)?,
            throttled: off_cpu(THROTTLED)?,
            blocked: u64_at(b, BLOCKED)?,
            runnable_length: off_cpu(RUNNABLE_LENGTH)?,
            throttled_length: off_cpu(THROTTLED_LENGTH)?,
            blocked_length: off_cpu(BLOCKED_LENGTH)?,
        },
        wake_up: WakeUp {
            time: if flags & WAKER != 0 {
                u64_at(b, WOKEN)?
            } else {
                off_cpu(WOKEN)?
            },
            waker: (flags & OFF_CPU != 0)
                .then_some((u32_at(b, WAKER_PID)?, u32_at(b, WAKER_TID)?))
                .filter(|(_, tid)| *tid != 0),
            holder: off_cpu(HOLDER)?,
            holders: match flags & OFF_CPU {
                0 => Vec::new(),
                _ => (0..MAX_HOLDERS)
                    .map_while(|i| Some((u64_at(b, HOLDERS_AT + 16 * i)?, u64_at(b, HOLDERS_AT + 16 * i + 8)?)))
                    .take_while(|(who, _)| *who != 0)
                    .map(|(who, time)| match who & THREAD_STATE {
                        0 => (Holder::Thread(who as Tid), time),
                        _ => (Holder::State(who & !THREAD_STATE), time),
                    })
                    .collect(),
            },
            wakes: (flags & WAKER != 0).then_some(u32_at(b, WAKER_TID)?),
        },
        dispatcher: match flags & WORKER {
            0 => None,
            _ => Some(Dispatcher {
                tid: u32_at(b, WAKER_TID)?,
                is_unchanged: flags & UNCHANGED != 0,
            }),
        },
        holds_lock: flags & HOLDS_LOCK != 0,
        // -1 outside system calls
        system_call: (flags & OFF_CPU != 0)
            .then(|| u64_at(b, REGS + 8 * SYSTEM_CALL_WORD))
            .flatten()
            .and_then(arch::system_call),
        polled: Polled::from_word(off_cpu(POLLED)?),
        suspended: off_cpu::suspension(flags),
        spans: SpanRecords::default(),
        tasks: Vec::new(),
        memory: match flags & RSS {
            0 => None,
            _ => Some(decode_change(b)?),
        },
        allocation: match flags & ALLOCATION {
            0 => None,
            _ => Some(decode_block(b)?),
        },
        host: match flags & HOST {
            0 => None,
            _ => Some(HostSample {
                cgroup: u64_at(b, CGROUP)?,
                comm: b.get(COMM..COMM + COMM_SIZE)?.try_into().ok()?,
                new: match flags & NEW {
                    0 => None,
                    _ => Some(NewProcess {
                        program: ProgramId {
                            inode: u64_at(b, INODE)?,
                            device: u64_at(b, DEVICE)?,
                        },
                        runtime: u64_at(b, RUNTIME)?,
                        mappings: Vec::new(),
                    }),
                },
            }),
        },
    })
}

/// Words of `struct probe` of the program: whether it is that of frees, and two for each argument.
pub const PROBE_WORDS: usize = 1 + 2 * MAX_ARGUMENTS;

/// `struct probe` of the program.
pub fn encode_probe(event: &ProbeEvent) -> [u64; PROBE_WORDS] {
    /// `NO_INDEX` of it.
    const NO_INDEX: u8 = u8::MAX;
    let argument = |argument: &ProbeArgument| {
        let (offset, place, register, (index, shift)) = match argument.place {
            ArgumentPlace::Constant(value) => (value, 0, 0, (NO_INDEX, 0)),
            ArgumentPlace::Register(register) => (0, 1, register, (NO_INDEX, 0)),
            ArgumentPlace::Memory {
                register,
                offset,
                index,
            } => (offset, 2, register, index.unwrap_or((NO_INDEX, 0))),
        };
        let bytes = [
            place,
            register,
            index,
            shift,
            argument.size,
            argument.is_signed.into(),
            0,
            0,
        ];
        [offset as u64, u64::from_le_bytes(bytes)]
    };
    let mut words = [0; PROBE_WORDS];
    let arguments = match event {
        ProbeEvent::Allocation(arguments) => &arguments[..],
        ProbeEvent::Free(address) => std::slice::from_ref(address),
    };
    words[0] = matches!(event, ProbeEvent::Free(_)).into();
    for (place, word) in words[1..].iter_mut().zip(arguments.iter().flat_map(argument)) {
        *place = word;
    }
    words
}

/// `struct running` of the program.
pub fn encode_running(r: &RunningTasks) -> [u64; 5] {
    let flags = u16::from(r.frame_is_pointer) | u16::from(r.coroutine_has_name) << 1;
    let packed = |offsets: [u16; 4]| {
        let words = offsets.iter().rev();
        words.fold(0, |word, offset| word << 16 | u64::from(*offset))
    };
    [
        r.current,
        packed([r.keys, r.entries, r.task, r.name]),
        packed([r.coroutine, r.frame, flags, r.callback]),
        packed([r.waiter, r.closure, r.items, r.head]),
        packed([r.awaited_by, r.awaited_by_is_set, 0, 0]),
    ]
}

/// `struct spans` of the program.
pub fn encode_spans(spans: Option<&SpanLocation>, context: Option<&ThreadContext>) -> [u64; 7] {
    let mut words = [0; 7];
    if let Some(at) = spans {
        let offsets = [at.context, at.header, at.item, at.data];
        let packed = offsets
            .iter()
            .rev()
            .fold(0, |word, offset| word << 16 | u64::from(*offset));
        let own = [at.variable, at.bitmap_node, at.array_node, at.hash.into(), packed];
        words[..own.len()].copy_from_slice(&own);
    }
    if let Some(at) = context {
        words[5] = at.offset;
        words[6] = 1 << 32 | u64::from(at.block);
    }
    words
}

/// From the list of interpreters to the main one (`struct pyinterpreters`, Include/internal/pycore_runtime.h, v3.12.1
/// to v3.13.0; pycore_runtime_structs.h, v3.14.0 and v3.15.0).
const MAIN: u32 = 8;

/// Bytes of `struct layout`.
pub const LAYOUT_SIZE: usize = 128;

/// A process's [`TargetLayout`] as the BPF program's `struct layout`.
pub fn encode(layout: &TargetLayout) -> [u8; LAYOUT_SIZE] {
    let mut out = Vec::with_capacity(LAYOUT_SIZE);
    out.extend(layout.stack_end.to_le_bytes());
    if let Some(p) = &layout.python {
        let l = &p.layout;
        let (tls, key, specific) = match (p.thread_state, p.descriptor.tls) {
            (ThreadStateLocation::Key, Tls::Glibc(at)) => (1u32, l.runtime_key, at),
            (ThreadStateLocation::Key, Tls::Musl(at)) => (2, l.runtime_key, at),
            (ThreadStateLocation::Offset(at), _) => (3, 0, at as u32),
            (ThreadStateLocation::Block { id, offset }, Tls::Glibc(_)) => (4, id as u32, offset),
            (ThreadStateLocation::Block { id, offset }, Tls::Musl(_)) => (5, id as u32, offset),
            (ThreadStateLocation::InterpreterList, _) => (0, 0, 0),
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
        let instr_size = if l.instruction_encoding == crate::cpython_layout::InstructionEncoding::Pointer {
            8
        } else {
            4
        };
        let cframe_frame = if l.tstate_first == l.tstate_cframe {
            l.cframe_current_frame
        } else {
            ABSENT
        };
        // The anchors have a chain of their own, to be walked, only if they lie outside the frame chain.
        let cframe = match l.anchor {
            crate::cpython_layout::Anchor::CFramePerFrame | crate::cpython_layout::Anchor::CFramePerEntry => {
                l.tstate_cframe
            }
            _ => ABSENT,
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
    if let Some((p, l)) = layout.python.as_ref().map(|p| (p, &p.layout)) {
        let lent = if layout.lent_states.is_empty() {
            0
        } else {
            l.tstate_cframe
        };
        let lists = [l.interp_next, l.interp_threads, l.tstate_next.into(), lent.into()];
        for w in [p.descriptor.size].into_iter().chain(lists) {
            out.extend(w.to_le_bytes());
        }
    }
    out.resize(LAYOUT_SIZE, 0);
    out.try_into().expect("resized to the size")
}

/// A field of a record: its name in the program, its offset and its size.
#[cfg(test)]
type RecordField = (&'static str, usize, usize);

/// Each record as it is read here, with the bytes that there is room for, to be compared with the object's types.
#[cfg(test)]
pub(super) fn record_fields() -> [(&'static str, usize, Vec<RecordField>); 8] {
    let head = vec![
        ("size", 0, 4),
        ("pid", PID, 4),
        ("tid", TID, 4),
        ("flags", FLAGS, 4),
        ("time", TIME, 8),
        ("regs", REGS, 8 * SAVED_REGS_WORDS),
        ("thread_pointer", REGS + 8 * SAVED_REGS_WORDS, 8),
        ("stack_base", STACK_BASE, 8),
        ("stack_len", STACK_LEN, 4),
        ("kernel", KERNEL, 2),
        ("frames", FRAMES, 2),
        ("anchors", ANCHORS, 2),
        ("walk", WALK, 2),
        ("frames_at", FRAMES_AT, 4),
        ("stack_at", STACK_AT, 4),
        ("holes", HOLES, 8 * HOLE_WORDS),
        ("cpu", CPU, 8),
        ("runnable", RUNNABLE, 8),
        ("blocked", BLOCKED, 8),
        ("waker", WAKER_TID, 4),
        ("waker_pid", WAKER_PID, 4),
        ("runnable_length", RUNNABLE_LENGTH, 8),
        ("blocked_length", BLOCKED_LENGTH, 8),
        ("woken", WOKEN, 8),
        ("holder", HOLDER, 8),
        ("holders", HOLDERS_AT, 16 * MAX_HOLDERS),
        ("holders.who", 0, 8),
        ("holders.time", 8, 8),
        ("throttled", THROTTLED, 8),
        ("throttled_length", THROTTLED_LENGTH, 8),
        ("polled", POLLED, 8),
        ("cgroup", CGROUP, 8),
        ("comm", COMM, COMM_SIZE),
        ("inode", INODE, 8),
        ("device", DEVICE, 8),
        ("runtime", RUNTIME, 8),
    ];
    let code_head = vec![
        ("size", 0, 4),
        ("pid", PID, 4),
        ("tid", TID, 4),
        ("flags", FLAGS, 4),
        ("time", TIME, 8),
        ("code", CODE, 8),
        ("fingerprint", FINGERPRINT, 4),
        ("pad", FINGERPRINT + 4, 4),
        ("parts", PARTS_AT, PARTS * PART_SIZE),
        ("parts.at", 0, 8),
        ("parts.len", 8, 4),
        ("parts.pad", 12, 4),
    ];
    let frame = vec![
        ("frame", 0, 8),
        ("code", 8, 8),
        ("instr", 16, 8),
        ("fingerprint", 24, 4),
        ("owner", 28, 1),
        ("entry", 29, 1),
        ("pad", 30, 2),
    ];
    let anchor = vec![("anchor", 0, 8), ("frame", 8, 8)];
    let change = vec![
        ("address", CHANGED_AT, 8),
        ("length", CHANGED_LENGTH, 8),
        ("pages", CHANGED_PAGES, 8),
        ("member", CHANGED_MEMBER, 4),
        ("is_repeated", CHANGED_AGAIN, 4),
        ("doubled", CHANGED_DOUBLED, 4),
        ("pad", CHANGED_DOUBLED + 4, 4),
    ];
    let range = vec![
        ("size", 0, 4),
        ("pid", PID, 4),
        ("tid", TID, 4),
        ("flags", FLAGS, 4),
        ("time", TIME, 8),
        ("from", RANGE_FROM, 8),
        ("to", RANGE_TO, 8),
        ("moved_to", RANGE_MOVED_TO, 8),
    ];
    let block = vec![
        ("address", BLOCK_AT, 8),
        ("size", BLOCK_SIZE, 8),
        ("bytes", BLOCK_BYTES, 8),
    ];
    let freed = vec![
        ("size", 0, 4),
        ("pid", PID, 4),
        ("tid", TID, 4),
        ("flags", FLAGS, 4),
        ("time", TIME, 8),
        ("address", FREED_AT, 8),
    ];
    [
        ("head", HEAD, head),
        ("code_head", PARTS_AT + PARTS * PART_SIZE, code_head),
        ("frame", FRAME_SIZE, frame),
        ("anchor", ANCHOR_SIZE, anchor),
        ("change", CHANGED_DOUBLED + 8, change),
        ("memory_range", RANGE_MOVED_TO + 8, range),
        ("allocation", BLOCK_BYTES + 8, block),
        ("freed_block", FREED_AT + 8, freed),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::reassembler::StackReassembler;
    use super::*;

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
        let (mut reassembler, mut out) = (StackReassembler::default(), Vec::new());
        reassembler.add_entry(&b, &mut out);
        assert_eq!(out, [DecodedRecord::Code(7, 5, copy)]);
        for len in 0..b.len() {
            assert_eq!(decode_code(&b[..len]), None, "{len}");
        }
    }

    #[test]
    fn a_sample_has_the_tasks_before_it() {
        let record = |task: u64, frame: u64, time: u64| {
            let mut b = vec![0u8; PARTS_AT + PARTS * PART_SIZE];
            let mut put = |at: usize, bytes: &[u8]| b[at..at + bytes.len()].copy_from_slice(bytes);
            put(TID, &8u32.to_le_bytes());
            put(FLAGS, &CODE_COPY.to_le_bytes());
            put(TIME, &time.to_le_bytes());
            put(CODE, &task.to_le_bytes());
            put(PARTS_AT, &frame.to_le_bytes());
            put(PARTS_AT + PART_SIZE + 8, &1u32.to_le_bytes());
            b.push(task as u8);
            b
        };
        let mut sample = vec![0u8; HEAD];
        for (at, value) in [(TID, 8), (TIME, 5), (FRAMES_AT, HEAD as u32), (STACK_AT, HEAD as u32)] {
            sample[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let (mut reassembler, mut out) = (StackReassembler::default(), Vec::new());
        // One whose sample was lost, then one that the next one awaits, and one of another event loop.
        for entry in [
            record(9, 1, 4),
            record(1, 2, 5),
            record(2, 0, 5),
            record(3, 4, 5),
            sample,
        ] {
            reassembler.add_entry(&entry, &mut out);
        }
        let [DecodedRecord::Sample(sample)] = &out[..] else {
            panic!("one sample: {out:?}")
        };
        let shown = |task: &crate::event::RunningTask| {
            let awaiters: Vec<u64> = task.awaiters.iter().map(|(at, _)| *at).collect();
            (task.task, task.frame, task.name.bytes.clone(), awaiters)
        };
        let tasks: Vec<_> = sample.tasks.iter().map(shown).collect();
        assert_eq!(tasks, [(1, 2, vec![1], vec![2]), (3, 4, vec![3], vec![])]);
        let short = record(1, 2, 5);
        for len in 0..short.len() {
            assert!(decode_part(&short[..len]).is_none(), "{len}");
        }
    }

    #[test]
    fn truncated_records_are_refused() {
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

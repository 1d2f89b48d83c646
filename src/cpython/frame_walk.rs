//! Walks the interpreter frames of one thread, which is stopped or the calling one. The same walk as in
//! capture/ebpf/sample/frame_walk.h, for backends that do not run in the kernel; tests/tape.rs compares the two.
//!
//! Allocates nothing, so it may run in a signal handler. Every chain is bounded: `limits::MAX_FRAMES`, `MAX_CFRAMES`.

use super::code_copy;
use super::code_object::fingerprint_of;
use super::gil;
use super::own_states::{OwnStates, ReadOrZero};
use super::spans;
use crate::cpython_layout::{ABSENT, Anchor, InstructionEncoding, Layout, TargetLayout};
use crate::event::{PAGE, PythonWalk, RawPyFrame, StoppedThread, WalkStatus};
use crate::limits::{MAX_CFRAMES, MAX_FRAMES, MAX_LOCALS_DISTANCE, MAX_NESTED, MAX_STACK, SHIM};
use crate::process::memory::Memory;
use crate::process::thread_context;

/// Maximum number of bytes read of a frame.
const MAX_FRAME: usize = 0x7f;

/// Walks the frames of a stopped thread into `out`, which is cleared first and must have capacity. Copies the code
/// objects for which `is_new`, given address and fingerprint, returns true.
pub fn walk(
    memory: &dyn Memory,
    layout: &TargetLayout,
    thread: &StoppedThread,
    is_new: &dyn Fn(u64, u32) -> bool,
    out: &mut PythonWalk,
) {
    out.clear();
    if let Some(at) = &layout.thread_context {
        thread_context::copy(memory, at, thread.thread_pointer, &mut out.spans);
    }
    let Some(python) = &layout.python else { return };
    let m = ReadOrZero(memory);
    let l = &python.layout;
    let Some(mut own) = OwnStates::find(&m, layout, python, thread) else {
        return;
    };
    let state = own.list()[0];
    out.walk = WalkStatus::Complete;
    out.holds_lock = gil::is_held_by(memory, &layout.locks, l, own.certain());
    if let Some(at) = &layout.spans {
        spans::copy(memory, at, state, &mut out.spans);
    }
    let mut w = FrameWalk {
        m,
        l,
        out,
        window: [0; WINDOW],
        start: 0,
        end: 0,
        last_frame: 0,
        second: 0,
        base: 0,
    };
    let mut cframes = [0; 1 + MAX_NESTED];
    for (state, cframe) in own.list().iter().zip(&mut cframes) {
        *cframe = w.frames(*state, &thread.registers);
    }
    if own.left_out {
        w.out.walk = WalkStatus::TooDeep;
    }
    // A subinterpreter that the thread runs since the lists were read.
    if w.out.python.is_empty()
        && let Some(other) = own.add_newest(&w.m, python, thread.thread_pointer)
        && let Some(cframe) = cframes.get_mut(own.list().len() - 1)
    {
        *cframe = w.frames(other, &thread.registers);
    }
    // Only anchors outside of the frame chain need a walk of their own chain.
    if matches!(l.anchor, Anchor::CFramePerFrame | Anchor::CFramePerEntry) {
        for (state, cframe) in own.list().iter().zip(cframes) {
            w.anchors(*state, cframe);
        }
    }
    if out.walk == WalkStatus::Complete && !own.attached {
        out.walk = WalkStatus::Detached;
    }
    if let Some(running) = &layout.running_tasks {
        code_copy::running_tasks(memory, running, state, &mut out.codes);
    }
    code_copy::new_codes(memory, l, out.python.iter(), is_new, &mut out.codes);
}

/// A page, and the frame that begins at its end.
const WINDOW: usize = PAGE as usize + MAX_FRAME + 1;

/// How a chain of frames ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Chain {
    /// At its end; true if the chain contains the frame that the next outer CFrame points to.
    Ended(bool),
    Fault,
    TooDeep,
}

struct FrameWalk<'a> {
    m: ReadOrZero<'a>,
    l: &'a Layout,
    out: &'a mut PythonWalk,
    /// Copy of `start..end`, fetched in one read.
    window: [u8; WINDOW],
    start: u64,
    end: u64,
    last_frame: u64,
    /// Innermost frame of the next outer CFrame; 0: none.
    second: u64,
    /// Frame that every chain ends at; 0: none.
    base: u64,
}

impl FrameWalk<'_> {
    /// Appends the frames of one thread state. Returns the CFrame where the walk began.
    fn frames(&mut self, state: u64, registers: &[u64]) -> u64 {
        let l = self.l;
        let first = self.m.word(state, l.tstate_first);
        let (at, mut cframe) = (self.out.python.len(), first);
        self.second = 0;
        self.base = if l.tstate_base_frame == ABSENT {
            0
        } else {
            self.m.word(state, l.tstate_base_frame)
        };
        let chain = if l.tstate_first == l.tstate_cframe {
            // A CFrame is linked some instructions before it is filled (Python/ceval.c, v3.11 and v3.12). Until then it
            // contains the remains of another call, and its caller's CFrame is only in a register, if anywhere.
            let root = state.wrapping_add(l.tstate_root_cframe.into());
            let mut found = None;
            if first == root {
                found = self.complete_chain(at, self.m.word(first, l.cframe_current_frame));
            } else if let Some(frame) = self.start_at(first, root) {
                found = self.complete_chain(at, frame);
            }
            let outer = self.m.word(first, l.cframe_previous);
            let mut tries = 0;
            for (i, candidate) in std::iter::once(&outer).chain(registers).enumerate() {
                if found.is_some() || tries > 2 {
                    break;
                }
                if i > 0 && *candidate == root {
                    self.second = 0;
                    cframe = root;
                    found = self.complete_chain(at, 0);
                } else if (i == 0 || candidate.wrapping_sub(first) < MAX_STACK && candidate % 8 == 0)
                    && *candidate > first
                    && let Some(frame) = self.start_at(*candidate, root)
                {
                    cframe = *candidate;
                    found = self.complete_chain(at, frame);
                    tries += usize::from(i > 0);
                }
            }
            // 3.12 may have the outer CFrame in a vector register only, but by then the new frame, in a register, is
            // linked to the entry frame next to the CFrame.
            for frame in registers.iter().filter(|_| l.frame_entry == ABSENT) {
                if found.is_some() {
                    break;
                }
                let entry = self.m.word(*frame, l.frame_previous);
                let is_near = entry.wrapping_sub(first).wrapping_add(MAX_LOCALS_DISTANCE) < 2 * MAX_LOCALS_DISTANCE;
                let mut owner = [0];
                if is_near && self.m.0.read(entry.wrapping_add(l.frame_owner.into()), &mut owner) && owner == [SHIM] {
                    self.second = 0;
                    cframe = root;
                    found = self.complete_chain(at, *frame);
                }
            }
            found.unwrap_or_else(|| {
                self.second = 0;
                cframe = first;
                self.chain(at, self.m.word(first, l.cframe_current_frame))
            })
        } else {
            self.chain(at, first)
        };
        match chain {
            Chain::Ended(_) => {}
            Chain::Fault => self.out.walk = WalkStatus::Fault,
            Chain::TooDeep => self.out.walk = WalkStatus::TooDeep,
        }
        cframe
    }

    /// The frame that a CFrame points to. `None` if it is not a CFrame: the next outer one must lie a little higher on
    /// the stack, or be the thread state's own.
    fn start_at(&mut self, cframe: u64, root: u64) -> Option<u64> {
        let outer = self.m.word(cframe, self.l.cframe_previous);
        let above = outer > cframe && outer - cframe <= MAX_STACK;
        (outer == root || above).then_some(())?;
        self.second = if outer == root {
            0
        } else {
            self.m.word(outer, self.l.cframe_current_frame)
        };
        Some(self.m.word(cframe, self.l.cframe_current_frame))
    }

    /// The chain from `frame` if it is complete: it ends, and contains the next outer CFrame's frame.
    fn complete_chain(&mut self, at: usize, frame: u64) -> Option<Chain> {
        let chain = self.chain(at, frame);
        matches!(chain, Chain::Ended(passed) if passed || self.second == 0).then_some(chain)
    }

    /// Appends the chain from `frame`, replacing what was appended since `at`.
    fn chain(&mut self, at: usize, frame: u64) -> Chain {
        self.out.python.truncate(at);
        (self.start, self.end, self.last_frame) = (0, 0, 0);
        let (mut frame, mut passed) = (frame, false);
        let (mut code, mut print) = (0, 0);
        let (mut copy, mut copy_at) = (0, 0);
        // Of a thread that exchanges its stack, the chain may lead in a circle (found by Brent's algorithm).
        let (mut before, mut next) = (0, 1);
        for steps in 0..MAX_FRAMES {
            if frame == 0 || frame == self.base {
                // Where there is a base frame, a chain that has begun ends at it.
                let at_end = frame != 0 || self.base == 0 || self.last_frame == 0;
                return if at_end { Chain::Ended(passed) } else { Chain::Fault };
            }
            if frame == before {
                return Chain::Fault;
            }
            if steps == next {
                (before, next) = (frame, 2 * next);
            }
            passed |= frame == self.second;
            if self.out.python.len() == self.out.python.capacity() {
                return Chain::TooDeep;
            }
            let Some((mut f, previous, runs)) = self.frame(frame) else {
                return Chain::Fault;
            };
            // Entry frames have a code object of no interest.
            if f.owner < SHIM {
                // The thread runs its own copy of the bytecode: convert to a position in the code object's.
                if runs != 0 {
                    if f.code != code || runs != copy {
                        let copies = self.m.word(f.code, self.l.code_copies);
                        copy_at = self.m.at(copies.wrapping_add(8 + 8 * u64::from(runs)));
                    }
                    let own = f.code.wrapping_add(self.l.code_adaptive.into());
                    f.instr = f.instr.wrapping_sub(copy_at).wrapping_add(own);
                }
                copy = runs;
                if f.code != code {
                    (code, print) = (f.code, fingerprint_of(self.m.0, self.l, f.code).unwrap_or(0));
                }
                f.fingerprint = print;
            }
            self.out.python.push(f);
            frame = previous;
        }
        Chain::TooDeep
    }

    /// A frame without its fingerprint, the next outer frame, and the number of the bytecode copy that it runs.
    fn frame(&mut self, at: u64) -> Option<(RawPyFrame, u64, u32)> {
        let size = usize::from(self.l.frame_size).min(MAX_FRAME);
        let end = at.checked_add(size as u64)?;
        // From 3.11 on, frames lie next to each other, older ones lower (the data stack): where the last step was a
        // short one, one read fetches everything on this page that may hold the next ones.
        if at < self.start || end > self.end {
            let near = self.last_frame > at && self.last_frame - at < PAGE;
            let start = if near { at & !(PAGE - 1) } else { at };
            self.end = 0;
            let read = self.m.0.read(start, self.window.get_mut(..(end - start) as usize)?);
            read.then_some(())?;
            (self.start, self.end) = (start, end);
        }
        self.last_frame = at;
        let raw = self.window.get((at - self.start) as usize..)?.get(..size)?;
        let l = self.l;
        let word = |offset: u16| {
            let bytes = raw.get(usize::from(offset)..)?.get(..8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let byte = |offset: u16| {
            if offset == ABSENT {
                0
            } else {
                raw.get(usize::from(offset)).copied().unwrap_or(0)
            }
        };
        let half = |offset: u16| {
            let bytes = raw.get(usize::from(offset)..)?.get(..4)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let instr = if l.instruction_encoding == InstructionEncoding::Pointer {
            word(l.frame_instr)?
        } else {
            i64::from(half(l.frame_instr)? as i32) as u64
        };
        let copy = if l.frame_copy == ABSENT { 0 } else { half(l.frame_copy)? };
        let f = RawPyFrame {
            frame: at,
            code: word(l.frame_code)? & !3, // from 3.14 on the low bits of a reference are tags
            instr,
            fingerprint: 0,
            owner: byte(l.frame_owner),
            entry: byte(l.frame_entry) != 0,
        };
        Some((f, word(l.frame_previous)?, copy))
    }

    /// Appends the CFrames of one thread state.
    fn anchors(&mut self, state: u64, from: u64) {
        let l = self.l;
        let root = state.wrapping_add(l.tstate_root_cframe.into());
        let with_frame = l.tstate_first == l.tstate_cframe;
        let mut anchor = if with_frame {
            from
        } else {
            self.m.word(state, l.tstate_cframe)
        };
        let mut ended = WalkStatus::TooDeep;
        for _ in 0..MAX_CFRAMES {
            if anchor == 0 || anchor == root {
                ended = WalkStatus::Complete;
                break;
            }
            if self.out.anchors.len() == self.out.anchors.capacity() {
                break;
            }
            let frame = if with_frame {
                self.m.0.u64(anchor.wrapping_add(l.cframe_current_frame.into()))
            } else {
                Some(0)
            };
            let next = self.m.0.u64(anchor.wrapping_add(l.cframe_previous.into()));
            let (Some(frame), Some(next)) = (frame, next) else {
                ended = WalkStatus::Fault;
                break;
            };
            self.out.anchors.push(RawPyFrame {
                frame: anchor,
                instr: frame,
                ..RawPyFrame::default()
            });
            anchor = next;
        }
        if self.out.walk == WalkStatus::Complete {
            self.out.walk = ended;
        }
    }
}

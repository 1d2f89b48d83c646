//! The frames of a coroutine and of what it awaits.

use super::layout::{CoroutineFrame, FrameState, StackTop};
use super::objects::{Kind, Objects};
use crate::cpython_layout::{ABSENT, InstructionEncoding};
use crate::limits::SHIM;

/// Maximum number of coroutines in one chain.
const MAX_CHAIN: usize = 256;
/// Maximum number of values on a frame's stack.
const MAX_DEPTH: u64 = 1 << 16;
/// Maximum number of frames of a thread that are searched for a task.
const MAX_FRAMES: usize = 4096;

/// A frame of a coroutine or generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawAwaitFrame {
    /// avma of the frame.
    pub frame: u64,
    /// avma of the code object.
    pub code: u64,
    /// Of the coroutine; 0: it has none of its own, because the frame is that of a function.
    pub name: u64,
    /// As in [`crate::event::RawPyFrame`].
    pub instr: u64,
}

/// A chain of coroutines, outermost first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AwaitChain {
    pub frames: Vec<RawAwaitFrame>,
    /// What the innermost one awaits.
    pub awaited: Option<u64>,
    /// The innermost coroutine of the chain runs now: what it calls is on a thread's stack.
    pub is_running: bool,
    /// The innermost coroutine of the chain has not begun to run.
    pub is_new: bool,
    /// The chain continues, but could not be followed.
    pub is_truncated: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CoroutineState {
    Created,
    Suspended,
    Running,
    Ended,
}

impl Objects<'_> {
    /// avma of a coroutine's frame.
    pub fn coroutine_frame(&self, coroutine: u64) -> Option<u64> {
        match self.tasks.coroutine_frame {
            CoroutineFrame::Pointer(at) => self.pointer(coroutine, at),
            CoroutineFrame::Inline(at) => coroutine.checked_add(at.into()),
        }
    }

    /// The frames of a coroutine and of the coroutines and generators that it awaits.
    pub fn await_chain(&self, coroutine: u64) -> AwaitChain {
        let mut chain = AwaitChain::default();
        let mut at = coroutine;
        loop {
            match self.kind(at) {
                Some(Kind::Wrapper) => match self.first(at) {
                    Some(inner) => {
                        // Wrappers do not wrap each other, so this cannot repeat.
                        at = inner;
                        if self.kind(at) == Some(Kind::Wrapper) {
                            chain.is_truncated = true;
                            return chain;
                        }
                        continue;
                    }
                    None => chain.is_truncated = true,
                },
                Some(Kind::Coroutine | Kind::Generator | Kind::AsyncGenerator) => {
                    if chain.frames.len() >= MAX_CHAIN {
                        chain.is_truncated = true;
                        return chain;
                    }
                    match self.coroutine_step(at, &mut chain) {
                        Some(Some(next)) => {
                            at = next;
                            continue;
                        }
                        Some(None) => {}
                        None => chain.is_truncated = true,
                    }
                }
                Some(_) => chain.awaited = Some(at),
                None => chain.is_truncated = true,
            }
            return chain;
        }
    }

    /// Adds the frame of one coroutine; returns what it awaits, if it is suspended. `None`: unreadable.
    fn coroutine_step(&self, coroutine: u64, chain: &mut AwaitChain) -> Option<Option<u64>> {
        let Some(frame) = self.coroutine_frame(coroutine) else {
            return Some(None); // it has ended
        };
        let state = self.state(coroutine, frame)?;
        if state == CoroutineState::Ended {
            return Some(None);
        }
        if chain.frames.iter().any(|f| f.frame == frame) {
            return None;
        }
        let mut raw = self.raw_frame(frame)?;
        raw.name = self.word(coroutine, self.tasks.coroutine_name)?;
        chain.frames.push(raw);
        chain.is_running = state == CoroutineState::Running;
        chain.is_new = state == CoroutineState::Created;
        if state != CoroutineState::Suspended {
            return Some(None);
        }
        let top = self.top_of_stack(frame)?;
        // A coroutine that yields without awaiting anything, such as that of a bare `yield`, has no object there.
        Some((top != 0).then_some(top))
    }

    pub(super) fn raw_frame(&self, frame: u64) -> Option<RawAwaitFrame> {
        let l = self.layout;
        let instr = if l.instruction_encoding == InstructionEncoding::Pointer {
            self.word(frame, l.frame_instr)?
        } else {
            i64::from(self.memory.u32(frame.checked_add(l.frame_instr.into())?)? as i32) as u64
        };
        Some(RawAwaitFrame {
            frame,
            code: self.word(frame, l.frame_code)? & !3,
            name: 0,
            instr,
        })
    }

    fn state(&self, coroutine: u64, frame: u64) -> Option<CoroutineState> {
        let byte = |object, at| Some(self.byte(object, at)? as i8);
        Some(match self.tasks.frame_state {
            FrameState::Executing(at) => match (byte(frame, at)?, self.not_started(frame)?) {
                (0, true) => CoroutineState::Created,
                (0, false) => CoroutineState::Suspended,
                _ => CoroutineState::Running,
            },
            FrameState::InFrame(at) => match byte(frame, at)? {
                -2 => CoroutineState::Created,
                -1 => CoroutineState::Suspended,
                0 => CoroutineState::Running,
                _ => CoroutineState::Ended,
            },
            FrameState::InCoroutine(at, values) => {
                let state = byte(coroutine, at)?;
                if (values.suspended.0..=values.suspended.1).contains(&state) {
                    CoroutineState::Suspended
                } else if state == values.executing {
                    CoroutineState::Running
                } else if state == values.created {
                    CoroutineState::Created
                } else {
                    CoroutineState::Ended
                }
            }
        })
    }

    fn not_started(&self, frame: u64) -> Option<bool> {
        let at = frame.checked_add(self.layout.frame_instr.into())?;
        Some(self.memory.u32(at)? as i32 == -1)
    }

    /// The object on top of a suspended frame's value stack: what it awaits. 0: none.
    fn top_of_stack(&self, frame: u64) -> Option<u64> {
        let slot = match self.tasks.stack_top {
            StackTop::Pointer(at) => self.word(frame, at)?.checked_sub(8)?,
            StackTop::Depth(stack, depth) => {
                let depth = u64::from(self.memory.u32(frame.checked_add(depth.into())?)?);
                (1..MAX_DEPTH).contains(&depth).then_some(())?;
                self.word(frame, stack)?.checked_add(8 * (depth - 1))?
            }
            StackTop::Count(count, first) => {
                let count = u64::from(self.memory.u32(frame.checked_add(count.into())?)?);
                (1..MAX_DEPTH).contains(&count).then_some(())?;
                frame.checked_add(u64::from(first) + 8 * (count - 1))?
            }
            StackTop::Below(at, distance) => self.word(frame, at)?.checked_sub(distance)?,
        };
        Some(self.memory.u64(slot)? & !3)
    }

    /// Frames of a thread, from its innermost one to the frame `end`, innermost first; `None` if `end` is not among
    /// them. The thread may run meanwhile.
    pub fn frames_down_to(&self, state: u64, end: u64) -> Option<Vec<RawAwaitFrame>> {
        let (frames, last) = self.frames_from(self.current_frame(state)?, end);
        (last == Some(end)).then_some(frames)
    }

    /// avma of the frame that a thread runs.
    pub fn current_frame(&self, state: u64) -> Option<u64> {
        let l = self.layout;
        let first = self.word(state, l.tstate_first)?;
        if l.tstate_first == l.tstate_cframe {
            return self.word(first, l.cframe_current_frame);
        }
        Some(first)
    }

    /// A frame and those that called it, up to the frame `end`, innermost first; the address of the last one, if all
    /// could be read.
    pub fn frames_from(&self, first: u64, end: u64) -> (Vec<RawAwaitFrame>, Option<u64>) {
        let l = self.layout;
        let (mut frames, mut frame, mut last) = (Vec::new(), first, 0);
        for _ in 0..MAX_FRAMES {
            if frame == 0 || last == end && end != 0 {
                return (frames, Some(last));
            }
            let is_entry = l.frame_owner != ABSENT && self.byte(frame, l.frame_owner).is_none_or(|owner| owner >= SHIM);
            if !is_entry {
                match self.raw_frame(frame) {
                    Some(raw) => frames.push(raw),
                    None => return (frames, None),
                }
            }
            last = frame;
            match self.word(frame, l.frame_previous) {
                Some(next) => frame = next,
                None => return (frames, None),
            }
        }
        (frames, None)
    }
}

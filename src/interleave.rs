//! Interleaves the native and Python frames of one sample into one stack, in calling order. Pure.
//!
//! Each native call of the eval function has an anchor among its locals (or, up to CPython 3.9, corresponds to exactly
//! one Python frame). The anchor's address identifies the native frame, which is replaced by the Python frames that run
//! in it. Nothing is dropped: where the two sides do not match, both stay and a truncation frame marks the seam.

use crate::event::Pid;
use crate::frame::{EvalGroup, EvalGroups, NativeFrame, PyFrame, RawFrame, UnwindMethod};
use crate::truncation::Truncation;

/// Quality of an interleaved stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StackQuality {
    /// From unwind tables and the interpreter's frames alone.
    Exact,
    /// Complete, but code analysis or a stack scan replaced a missing table.
    Repaired,
    Partial(Truncation),
}

/// Input of [`interleave`].
pub struct InterleaveInput<'a> {
    pub pid: Pid,
    /// Innermost first.
    pub native: &'a [NativeFrame],
    /// Why the native frames end before the thread's first one; `None`: they do not.
    pub native_truncation: Option<Truncation>,
    pub groups: &'a EvalGroups,
    /// Why the Python frames end early.
    pub python_truncation: Option<Truncation>,
    /// Are the innermost Python frames of the thread known to be among the groups? A thread that has released the GIL can run
    /// frames of an interpreter whose thread state was not found.
    pub attached: bool,
    /// Is this native frame a call of the eval function? `None`: not known for this interpreter.
    pub is_eval: &'a dyn Fn(&NativeFrame) -> Option<bool>,
}

/// Appends the interleaved stack to `out`, outermost frame first.
pub fn interleave(input: &InterleaveInput<'_>, out: &mut Vec<RawFrame>) -> StackQuality {
    let start = out.len();
    let has_anchors = input.groups.list.iter().any(|g| g.anchor.is_some());
    let locations = if has_anchors {
        locate_by_address(input)
    } else {
        locate_by_order(input)
    };
    let last_placed = locations.iter().rposition(|l| matches!(l, Location::At(_)));
    let mut m = Interleaver {
        input,
        out,
        next: 0,
        loops: 0,
        python: false,
        truncation: input.native_truncation,
    };
    let mut seam = false;
    let mut left_out = false;
    for (i, (group, location)) in input.groups.list.iter().zip(&locations).enumerate() {
        let mut frames = input.groups.frames(group);
        match location {
            Location::At(at) => {
                // Compiled Python that this call has called: among the native frames that follow, if there are any.
                if m.next < *at && group.compiled < frames.len() {
                    left_out |= group.compiled > 0;
                    frames = &frames[group.compiled..];
                }
                m.natives_to(*at);
                m.next = at + 1;
                if std::mem::take(&mut left_out) {
                    m.leave_out_compiled();
                }
                if input.groups.frames(group).is_empty() {
                    // A call being entered or left: it runs no Python frame now.
                    m.loops += 1;
                    m.out.push(native(input.pid, &input.native[*at]));
                }
            }
            Location::Compiled => {
                left_out = true;
                frames = &[];
            }
            Location::Unknown if !seam => {
                // The native frames around these Python frames are missing, or belong to another stack.
                if Some(i) > last_placed {
                    m.natives_to(input.native.len());
                }
                let why = input.native_truncation.unwrap_or(Truncation::InterleaveMismatch);
                m.truncate_here(why);
                seam = true;
            }
            Location::Unknown => {}
        }
        for f in frames {
            m.python = true;
            m.truncation = m.truncation.or(python_frame(f, m.out));
        }
    }
    // Without a call of the eval function all of the stack is compiled: the innermost function stays the last frame.
    let only_compiled = left_out && m.next == 0;
    if left_out && !only_compiled {
        m.leave_out_compiled();
    }
    if let Some(why) = input.python_truncation {
        m.truncate_here(why);
    }
    m.natives_to(input.native.len());
    if only_compiled {
        m.leave_out_compiled();
    }
    match (input.native_truncation, input.native.last()) {
        (Some(why), _) if !seam => m.truncate_here(why),
        (None, Some(f)) => {
            if let UnwindMethod::Begins(origin) = f.method {
                m.out.push(RawFrame::Origin(origin));
            }
        }
        _ => {}
    }
    let truncation = m.truncation;
    out[start..].reverse();
    match truncation {
        Some(why) => StackQuality::Partial(why),
        None if input.native.iter().all(|f| f.method.is_exact()) => StackQuality::Exact,
        None => StackQuality::Repaired,
    }
}

/// Up to CPython 3.10, the eval function has unlinked its frame when it makes its last call, of `_Py_CheckFunctionResult`, which
/// calls `PyErr_Occurred` (Python/ceval.c, Objects/call.c, v3.10): so many frames are further in, at most.
const AFTER_UNLINKING: usize = 2;

/// State of [`interleave`], innermost frame first.
struct Interleaver<'a, 'b> {
    input: &'a InterleaveInput<'a>,
    out: &'b mut Vec<RawFrame>,
    /// Native frames before this one are in `out`.
    next: usize,
    /// Calls of the eval function so far that run no Python frame.
    loops: u32,
    /// Has there been a Python frame?
    python: bool,
    truncation: Option<Truncation>,
}

impl Interleaver<'_, '_> {
    /// Moves native frames to `out`, up to but excluding `end`.
    fn natives_to(&mut self, end: usize) {
        for i in self.next..end {
            let f = &self.input.native[i];
            if (self.input.is_eval)(f) == Some(true) {
                // One at the leaf is a call being entered or left, by a thread that holds the GIL. Any other should have Python
                // frames.
                let is_near = i == 0 || i <= AFTER_UNLINKING && !self.input.groups.list.is_empty();
                let is_leaf = !self.python && self.loops == 0 && is_near;
                self.loops += 1;
                if !is_leaf || !self.input.attached {
                    self.truncate_here(if self.input.groups.list.is_empty() {
                        Truncation::PythonUnknown
                    } else {
                        Truncation::InterleaveMismatch
                    });
                }
            }
            self.out.push(native(self.input.pid, f));
        }
        self.next = self.next.max(end);
    }

    fn leave_out_compiled(&mut self) {
        self.python = true;
        self.truncate_here(Truncation::CompiledPython);
    }

    fn truncate_here(&mut self, why: Truncation) {
        self.out.push(RawFrame::Truncated(why));
        self.truncation = self.truncation.or(Some(why));
    }
}

/// Appends the Python frames alone, outermost first, for profiles without native frames.
pub fn python_only(
    groups: &EvalGroups,
    python_truncation: Option<Truncation>,
    out: &mut Vec<RawFrame>,
) -> StackQuality {
    let start = out.len();
    let mut truncation = python_truncation;
    for f in groups.list.iter().flat_map(|g| groups.frames(g)) {
        truncation = truncation.or(python_frame(f, out));
    }
    out.extend(python_truncation.map(RawFrame::Truncated));
    out[start..].reverse();
    truncation.map_or(StackQuality::Exact, StackQuality::Partial)
}

/// Appends a Python frame; returns why it is missing, if it is.
fn python_frame(f: &PyFrame, out: &mut Vec<RawFrame>) -> Option<Truncation> {
    let (frame, missing) = match f {
        PyFrame::Code { code, instr } => (
            RawFrame::Python {
                code: *code,
                instr: *instr,
            },
            None,
        ),
        PyFrame::Lost(why) => (RawFrame::Truncated(*why), Some(*why)),
    };
    // Damaged chains can have thousands of frames that say nothing.
    if missing.is_none() || out.last() != Some(&frame) {
        out.push(frame);
    }
    missing
}

fn native(pid: Pid, f: &NativeFrame) -> RawFrame {
    match f.location {
        Some((module, svma)) => RawFrame::Native { module, svma },
        None => RawFrame::Anonymous { pid, avma: f.lookup },
    }
}

/// Where a group's frames run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// In the native frame with this index.
    At(usize),
    /// In native functions that are not the eval function.
    Compiled,
    Unknown,
}

/// The native frame whose stack interval holds each group's anchor.
fn locate_by_address(input: &InterleaveInput<'_>) -> Vec<Location> {
    let mut from = 0;
    let location = |g: &EvalGroup| {
        let Some(anchor) = g.anchor else {
            let is_compiled = g.compiled > 0 && g.compiled == input.groups.frames(g).len();
            return if is_compiled {
                Location::Compiled
            } else {
                Location::Unknown
            };
        };
        let mut further = input.native[from..].iter();
        let Some(at) = further.position(|f| f.sp <= anchor && anchor < f.cfa) else {
            return Location::Unknown;
        };
        from += at + 1;
        Location::At(from - 1)
    };
    input.groups.list.iter().map(location).collect()
}

/// One native call of the eval function per group, counted from the outermost; if the outer part is missing, from the
/// innermost.
fn locate_by_order(input: &InterleaveInput<'_>) -> Vec<Location> {
    let is_eval = |(_, f): &(usize, &NativeFrame)| (input.is_eval)(f) == Some(true);
    let all = input.native.iter().enumerate();
    let evals: Vec<usize> = all.filter(is_eval).map(|(i, _)| i).collect();
    let groups = &input.groups.list;
    let mut locations = vec![Location::Unknown; groups.len()];
    if input.native_truncation.is_none() && input.python_truncation.is_none() {
        // As many as have no call are compiled, if as many look like it.
        let compiled = groups.iter().filter(|g| g.compiled > 0).count();
        let knows_eval = input.native.iter().any(|f| (input.is_eval)(f).is_some());
        let has_compiled = knows_eval && compiled > 0 && groups.len().checked_sub(evals.len()) == Some(compiled);
        let mut from_outermost = evals.iter().rev();
        for (location, group) in locations.iter_mut().zip(groups).rev() {
            if has_compiled && group.compiled > 0 {
                *location = Location::Compiled;
            } else if let Some(at) = from_outermost.next() {
                *location = Location::At(*at);
            }
        }
    } else {
        for (location, at) in locations.iter_mut().zip(&evals) {
            *location = Location::At(*at);
        }
    }
    locations
}

#[cfg(test)]
mod tests;

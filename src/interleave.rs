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
                // One at the leaf is a call being entered or left. Any other should have Python frames.
                let idle = !self.python && self.loops == 0 && (i == 0 || !self.input.groups.list.is_empty());
                self.loops += 1;
                if !idle {
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
mod tests {
    use super::*;
    use crate::frame::{CodeId, ModuleId, Origin};

    const EVAL: u64 = 0xe;

    /// A native stack, innermost first: `e` is the eval function, other letters are functions; frame i lies in `[100 i,
    /// 100 i + 100)`. `!` at the end: truncated; `~`: the last frame was found by code analysis; `.`: a greenlet begins
    /// there.
    fn stack(text: &str) -> (Vec<NativeFrame>, Option<Truncation>) {
        let mut frames: Vec<NativeFrame> = Vec::new();
        let mut truncation = None;
        for c in text.chars() {
            match c {
                '!' => truncation = Some(Truncation::StackTooDeep),
                '~' => frames.last_mut().expect("a frame").method = UnwindMethod::InstructionAnalysis,
                '.' => frames.last_mut().expect("a frame").method = UnwindMethod::Begins(Origin::Greenlet),
                c => {
                    let sp = 100 * frames.len() as u64;
                    let svma = if c == 'e' { EVAL } else { u64::from(u32::from(c)) };
                    let location = Some((ModuleId(0), svma));
                    frames.push(NativeFrame {
                        lookup: svma,
                        sp,
                        cfa: sp + 100,
                        location,
                        method: UnwindMethod::Cfi,
                    });
                }
            }
        }
        (frames, truncation)
    }

    /// Groups as `1,2@250 3@450`: Python frames and the address of the anchor; without `@` no anchor. `c4`: a frame that looks
    /// like one of compiled Python.
    fn groups(text: &str) -> EvalGroups {
        let mut groups = EvalGroups::default();
        for g in text.split_whitespace() {
            let (frames, anchor) = g.split_once('@').unwrap_or((g, ""));
            let frames = frames.split(',').filter(|f| !f.is_empty());
            let frame = |f: &str| match f {
                "gone" => PyFrame::Lost(Truncation::CodeObjectFreed),
                n => PyFrame::Code {
                    code: CodeId(n.parse().expect("number")),
                    instr: 0,
                },
            };
            groups.begin(anchor.parse().ok());
            for f in frames {
                match f.strip_prefix('c') {
                    Some(f) => groups.extend_compiled(Some(frame(f))),
                    None => groups.extend([frame(f)]),
                }
            }
        }
        groups
    }

    #[track_caller]
    fn check(native: &str, python: &str, expected: &str, quality: StackQuality) {
        let ((native, native_truncation), groups) = (stack(native), groups(python));
        let is_eval = |f: &NativeFrame| Some(f.lookup == EVAL);
        let input = InterleaveInput {
            pid: 1,
            native: &native,
            native_truncation,
            groups: &groups,
            python_truncation: None,
            is_eval: &is_eval,
        };
        let mut out = Vec::new();
        let got_quality = interleave(&input, &mut out);
        let word = |f: &RawFrame| match f {
            RawFrame::Python { code, .. } => code.0.to_string(),
            RawFrame::Native { svma: EVAL, .. } => "e".into(),
            RawFrame::Native { svma, .. } => char::from_u32(*svma as u32).expect("letter").to_string(),
            RawFrame::Truncated(c) => format!("[{}]", c.reason()),
            RawFrame::Origin(o) => o.name().into(),
            other => format!("{other:?}"),
        };
        let got: Vec<_> = out.iter().map(word).collect();
        assert_eq!((got.join(" ").as_str(), got_quality), (expected, quality));
    }

    #[test]
    fn by_address() {
        use StackQuality::*;
        check("abecd", "1@250", "d c 1 b a", Exact);
        check("ebec", "1,2@50 3@299", "c 3 b 2 1", Exact);
        // no name needed: a frame not known to be the eval function
        check("axbc", "1@150", "c b 1 a", Exact);
        // entering or leaving a call: one more eval frame at the leaf
        check("eec", "1@150", "c 1 e", Exact);
        check("eec", "@50 1@150", "c 1 e", Exact);
        check("ab~ec", "1@250", "c 1 b a", Repaired);
        // native part only
        check("abc", "", "c b a", Exact);
        check("", "", "", Exact);
    }

    #[test]
    fn greenlets_get_their_own_root() {
        use StackQuality::*;
        check("aebs.", "1@150", "[greenlet] s b 1 a", Exact);
        check("a~ebs.", "1@150", "[greenlet] s b 1 a", Repaired);
        // With an anchor in the stub, which runs no Python.
        check("aes.", "1@150 @250", "[greenlet] s 1 a", Exact);
        // By order.
        check("aeebs.", "1 2", "[greenlet] s b 2 1 a", Exact);
        // A frame of another stack.
        let mismatch = Truncation::InterleaveMismatch;
        let seam = mismatch.reason();
        check(
            "aes.",
            "1@150 2@950",
            &format!("[greenlet] 2 [{seam}] s 1 a"),
            Partial(mismatch),
        );
    }

    #[test]
    fn by_order() {
        use StackQuality::*;
        check("aeebec", "1 2 3", "c 3 b 2 1 a", Exact);
        check("eaec", "1", "c 1 a e", Exact);
        check(
            "eaee!",
            "1 2 3",
            "[stack deeper than the copy] 3 2 a 1",
            Partial(Truncation::StackTooDeep),
        );
    }

    #[test]
    fn compiled_python_is_left_out_unless_its_place_is_certain() {
        let why = Truncation::CompiledPython.reason();
        let partial = StackQuality::Partial(Truncation::CompiledPython);
        // Called by the interpreted frame 2, in a, b or both.
        check("abec", "c1,2@250", &format!("c 2 [{why}] b a"), partial);
        check("abec", "c4,c1,2@250", &format!("c 2 [{why}] b a"), partial);
        // In between two calls of the interpreter, and outside of all.
        check("aebec", "1@150 c2,3@350", &format!("c 3 [{why}] b 1 a"), partial);
        check("aebc", "1@150 c2", &format!("c b [{why}] 1 a"), partial);
        check("abc", "c1,c2", &format!("[{why}] c b a"), partial);
        // No native function that they could belong to: it only looks so.
        check("ebc", "c1,2@50", "c b 2 1", StackQuality::Exact);
        check("aeec", "1@150 c2,3@250", "c 3 2 1 a", StackQuality::Exact);
        check("aebc", "c1@150", "c b 1 a", StackQuality::Exact);
        // By order.
        check("aebec", "1 c2 3", &format!("c 3 [{why}] b 1 a"), partial);
        check("abec", "c1 2", &format!("c 2 [{why}] b a"), partial);
        check("aebc", "1 c2 c3", &format!("c b [{why}] 1 a"), partial);
        check("abc", "c1", &format!("[{why}] c b a"), partial);
        // It has just begun.
        check("eec", "c1 2", "c 2 1", StackQuality::Exact);
        let mismatch = Truncation::InterleaveMismatch;
        check(
            "aebec",
            "1 2 c3 c4 5",
            &format!("c 5 b 4 a 3 2 1 [{}]", mismatch.reason()),
            StackQuality::Partial(mismatch),
        );
    }

    #[test]
    fn mismatches_keep_both_sides() {
        let truncation = StackQuality::Partial(Truncation::StackTooDeep);
        check(
            "aeb!",
            "1@150 2@950",
            "2 [stack deeper than the copy] b 1 a",
            truncation,
        );
        check("aeb!", "1@150", "[stack deeper than the copy] b 1 a", truncation);
        let mismatch = StackQuality::Partial(Truncation::InterleaveMismatch);
        let seam = Truncation::InterleaveMismatch.reason();
        check("aeb", "1@150 2@950", &format!("2 [{seam}] b 1 a"), mismatch);
        check("aebc", "1 2", &format!("c b 2 a 1 [{seam}]"), mismatch);
        // Python frames missing for an eval frame further out, or for all of them
        check("aebec", "1@150", &format!("c e [{seam}] b 1 a"), mismatch);
        check("eebec", "1@350", &format!("c 1 b e [{seam}] e"), mismatch);
        let unknown = Truncation::PythonUnknown;
        check(
            "aeb",
            "",
            &format!("b e [{}] a", unknown.reason()),
            StackQuality::Partial(unknown),
        );
        check("eab", "", "b a e", StackQuality::Exact);
        check(
            "aeb",
            "gone@150",
            "b [code object freed] a",
            StackQuality::Partial(Truncation::CodeObjectFreed),
        );
        check(
            "aebec",
            "1,gone,gone,gone@150 2,gone,gone@350",
            "c [code object freed] 2 b [code object freed] 1 a",
            StackQuality::Partial(Truncation::CodeObjectFreed),
        );
    }
}

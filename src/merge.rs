//! Native frames and Python frames of one sample into one stack, in calling order. Pure.
//!
//! Each native call of the bytecode loop keeps a mark among its locals (or, up to CPython 3.9, stands for exactly one
//! Python frame). The mark's address tells which native frame it is; that frame is replaced by the Python frames that
//! run in it. Nothing is left out: where the two sides do not fit, both stay and the seam says so.

use crate::sample::{Cut, Group, Groups, How, NativeFrame, Pid, PyFrame, RawFrame};

/// How good a merged stack is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// From the tables of compilers and of the interpreter alone.
    Exact,
    /// Complete, but code analysis or a search stood in for a table that is missing.
    Repaired,
    Partial(Cut),
}

/// What goes into a merge.
pub struct Input<'a> {
    pub pid: Pid,
    /// Innermost first.
    pub native: &'a [NativeFrame],
    /// Why the native frames end, if not at the thread's first one.
    pub native_cut: Option<Cut>,
    pub groups: &'a Groups,
    /// Why the Python frames end early.
    pub python_cut: Option<Cut>,
    /// Is this native frame a call of the bytecode loop? `None`: not known for this interpreter.
    pub is_eval: &'a dyn Fn(&NativeFrame) -> Option<bool>,
}

/// Appends the merged stack to `out`, outermost frame first.
pub fn merge(input: &Input<'_>, out: &mut Vec<RawFrame>) -> Verdict {
    let start = out.len();
    let marked = input.groups.list.iter().any(|g| g.anchor.is_some());
    let places = if marked {
        place_by_address(input)
    } else {
        place_by_order(input)
    };
    let last_placed = places.iter().rposition(Option::is_some);
    let mut m = Merge {
        input,
        out,
        next: 0,
        loops: 0,
        python: false,
        cut: input.native_cut,
    };
    let mut seam = false;
    for (i, (group, place)) in input.groups.list.iter().zip(&places).enumerate() {
        match place {
            Some(at) => {
                m.natives_to(*at);
                m.next = at + 1;
                if input.groups.frames(group).is_empty() {
                    // A call being entered or left: it runs no Python frame now.
                    m.loops += 1;
                    m.out.push(native(input.pid, &input.native[*at]));
                }
            }
            None if !seam => {
                // The native frames around these Python frames are lost, or belong to others.
                if Some(i) > last_placed {
                    m.natives_to(input.native.len());
                }
                let why = input.native_cut.unwrap_or(Cut::Unmerged);
                m.cut_here(why);
                seam = true;
            }
            None => {}
        }
        for f in input.groups.frames(group) {
            m.python = true;
            m.cut = m.cut.or(python_frame(f, m.out));
        }
    }
    if let Some(why) = input.python_cut {
        m.cut_here(why);
    }
    m.natives_to(input.native.len());
    match (input.native_cut, input.native.last()) {
        (Some(why), _) if !seam => m.cut_here(why),
        (None, Some(f)) => {
            if let How::Begins(origin) = f.how {
                m.out.push(RawFrame::Origin(origin));
            }
        }
        _ => {}
    }
    let cut = m.cut;
    out[start..].reverse();
    match cut {
        Some(why) => Verdict::Partial(why),
        None if input.native.iter().all(|f| f.how.is_exact()) => Verdict::Exact,
        None => Verdict::Repaired,
    }
}

/// A merge under way, innermost frame first.
struct Merge<'a, 'b> {
    input: &'a Input<'a>,
    out: &'b mut Vec<RawFrame>,
    /// Native frames before this one are in `out`.
    next: usize,
    /// Calls of the bytecode loop so far that run no Python frame.
    loops: u32,
    /// Has there been a Python frame?
    python: bool,
    cut: Option<Cut>,
}

impl Merge<'_, '_> {
    /// Moves native frames over, up to and without `end`.
    fn natives_to(&mut self, end: usize) {
        for i in self.next..end {
            let f = &self.input.native[i];
            if (self.input.is_eval)(f) == Some(true) {
                // One at the leaf is a call being entered or left. Any other should have Python frames.
                let idle = !self.python && self.loops == 0 && (i == 0 || !self.input.groups.list.is_empty());
                self.loops += 1;
                if !idle {
                    self.cut_here(if self.input.groups.list.is_empty() {
                        Cut::PythonUnknown
                    } else {
                        Cut::Unmerged
                    });
                }
            }
            self.out.push(native(self.input.pid, f));
        }
        self.next = self.next.max(end);
    }

    fn cut_here(&mut self, why: Cut) {
        self.out.push(RawFrame::Cut(why));
        self.cut = self.cut.or(Some(why));
    }
}

/// Appends the Python frames alone, outermost first, where native ones are not wanted.
pub fn python_only(groups: &Groups, python_cut: Option<Cut>, out: &mut Vec<RawFrame>) -> Verdict {
    let start = out.len();
    let mut cut = python_cut;
    for f in groups.list.iter().flat_map(|g| groups.frames(g)) {
        cut = cut.or(python_frame(f, out));
    }
    out.extend(python_cut.map(RawFrame::Cut));
    out[start..].reverse();
    cut.map_or(Verdict::Exact, Verdict::Partial)
}

/// Appends a Python frame; says what it lacks.
fn python_frame(f: &PyFrame, out: &mut Vec<RawFrame>) -> Option<Cut> {
    let (frame, lacks) = match f {
        PyFrame::Code { code, instr } => (
            RawFrame::Python {
                code: *code,
                instr: *instr,
            },
            None,
        ),
        PyFrame::Lost(why) => (RawFrame::Cut(*why), Some(*why)),
    };
    out.push(frame);
    lacks
}

fn native(pid: Pid, f: &NativeFrame) -> RawFrame {
    match f.place {
        Some((module, svma)) => RawFrame::Native { module, svma },
        None => RawFrame::Anonymous { pid, avma: f.lookup },
    }
}

/// Index of the native frame whose stack interval holds each group's mark.
fn place_by_address(input: &Input<'_>) -> Vec<Option<usize>> {
    let mut from = 0;
    let place = |g: &Group| {
        let anchor = g.anchor?;
        let at = from
            + input.native[from..]
                .iter()
                .position(|f| f.sp <= anchor && anchor < f.cfa)?;
        from = at + 1;
        Some(at)
    };
    input.groups.list.iter().map(place).collect()
}

/// One native call of the loop per group, counted from the outermost; with the outer part lost, from the innermost.
fn place_by_order(input: &Input<'_>) -> Vec<Option<usize>> {
    let is_eval = |(_, f): &(usize, &NativeFrame)| (input.is_eval)(f) == Some(true);
    let evals: Vec<usize> = input
        .native
        .iter()
        .enumerate()
        .filter(is_eval)
        .map(|(i, _)| i)
        .collect();
    let mut places = vec![None; input.groups.list.len()];
    if input.native_cut.is_none() && input.python_cut.is_none() {
        for (place, at) in places.iter_mut().rev().zip(evals.iter().rev()) {
            *place = Some(*at);
        }
    } else {
        for (place, at) in places.iter_mut().zip(&evals) {
            *place = Some(*at);
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{CodeId, ModuleId, Origin};

    const EVAL: u64 = 0xe;

    /// A native stack, innermost first: `e` is the bytecode loop, other letters are functions; frame i lies in
    /// `[100 i, 100 i + 100)`. `!` at the end: cut; `~`: the last frame was found by code analysis; `.`: a
    /// greenlet begins there.
    fn stack(text: &str) -> (Vec<NativeFrame>, Option<Cut>) {
        let mut frames: Vec<NativeFrame> = Vec::new();
        let mut cut = None;
        for c in text.chars() {
            match c {
                '!' => cut = Some(Cut::StackTooDeep),
                '~' => frames.last_mut().expect("a frame").how = How::Code,
                '.' => frames.last_mut().expect("a frame").how = How::Begins(Origin::Greenlet),
                c => {
                    let sp = 100 * frames.len() as u64;
                    let svma = if c == 'e' { EVAL } else { u64::from(u32::from(c)) };
                    let place = Some((ModuleId(0), svma));
                    frames.push(NativeFrame {
                        lookup: svma,
                        sp,
                        cfa: sp + 100,
                        place,
                        how: How::Cfi,
                    });
                }
            }
        }
        (frames, cut)
    }

    /// Groups as `1,2@250 3@450`: Python frames and the address of the mark; without `@` no mark.
    fn groups(text: &str) -> Groups {
        let mut groups = Groups::default();
        for g in text.split_whitespace() {
            let (frames, anchor) = g.split_once('@').unwrap_or((g, ""));
            let frames = frames.split(',').filter(|f| !f.is_empty());
            let frame = |f: &str| match f {
                "gone" => PyFrame::Lost(Cut::CodeGone),
                n => PyFrame::Code {
                    code: CodeId(n.parse().expect("number")),
                    instr: 0,
                },
            };
            groups.begin(anchor.parse().ok());
            groups.extend(frames.map(frame));
        }
        groups
    }

    #[track_caller]
    fn check(native: &str, python: &str, expected: &str, verdict: Verdict) {
        let ((native, native_cut), groups) = (stack(native), groups(python));
        let is_eval = |f: &NativeFrame| Some(f.lookup == EVAL);
        let input = Input {
            pid: 1,
            native: &native,
            native_cut,
            groups: &groups,
            python_cut: None,
            is_eval: &is_eval,
        };
        let mut out = Vec::new();
        let got_verdict = merge(&input, &mut out);
        let word = |f: &RawFrame| match f {
            RawFrame::Python { code, .. } => code.0.to_string(),
            RawFrame::Native { svma: EVAL, .. } => "e".into(),
            RawFrame::Native { svma, .. } => char::from_u32(*svma as u32).expect("letter").to_string(),
            RawFrame::Cut(c) => format!("[{}]", c.reason()),
            RawFrame::Origin(o) => o.name().into(),
            other => format!("{other:?}"),
        };
        let got: Vec<_> = out.iter().map(word).collect();
        assert_eq!((got.join(" ").as_str(), got_verdict), (expected, verdict));
    }

    #[test]
    fn by_address() {
        use Verdict::*;
        check("abecd", "1@250", "d c 1 b a", Exact);
        check("ebec", "1,2@50 3@299", "c 3 b 2 1", Exact);
        // no name needed: a frame that is not known as the loop
        check("axbc", "1@150", "c b 1 a", Exact);
        // entering or leaving a call: one loop frame more at the leaf
        check("eec", "1@150", "c 1 e", Exact);
        check("eec", "@50 1@150", "c 1 e", Exact);
        check("ab~ec", "1@250", "c 1 b a", Repaired);
        // native part only
        check("abc", "", "c b a", Exact);
        check("", "", "", Exact);
    }

    #[test]
    fn greenlets_have_a_root_of_their_own() {
        use Verdict::*;
        check("aebs.", "1@150", "[greenlet] s b 1 a", Exact);
        check("a~ebs.", "1@150", "[greenlet] s b 1 a", Repaired);
        // Its own mark in the stub, which runs no Python.
        check("aes.", "1@150 @250", "[greenlet] s 1 a", Exact);
        // By order.
        check("aeebs.", "1 2", "[greenlet] s b 2 1 a", Exact);
        // A frame that belongs to somebody else.
        let unmerged = Cut::Unmerged;
        let seam = unmerged.reason();
        check(
            "aes.",
            "1@150 2@950",
            &format!("[greenlet] 2 [{seam}] s 1 a"),
            Partial(unmerged),
        );
    }

    #[test]
    fn by_order() {
        use Verdict::*;
        check("aeebec", "1 2 3", "c 3 b 2 1 a", Exact);
        check("eaec", "1", "c 1 a e", Exact);
        check(
            "eaee!",
            "1 2 3",
            "[stack deeper than the copy] 3 2 a 1",
            Partial(Cut::StackTooDeep),
        );
    }

    #[test]
    fn what_does_not_fit_is_kept_and_marked() {
        let cut = Verdict::Partial(Cut::StackTooDeep);
        check("aeb!", "1@150 2@950", "2 [stack deeper than the copy] b 1 a", cut);
        check("aeb!", "1@150", "[stack deeper than the copy] b 1 a", cut);
        let unmerged = Verdict::Partial(Cut::Unmerged);
        let seam = Cut::Unmerged.reason();
        check("aeb", "1@150 2@950", &format!("2 [{seam}] b 1 a"), unmerged);
        check("aebc", "1 2", &format!("c b 2 a 1 [{seam}]"), unmerged);
        // Python frames missing for a loop frame further out, or for all of them
        check("aebec", "1@150", &format!("c e [{seam}] b 1 a"), unmerged);
        check("eebec", "1@350", &format!("c 1 b e [{seam}] e"), unmerged);
        let unknown = Cut::PythonUnknown;
        check(
            "aeb",
            "",
            &format!("b e [{}] a", unknown.reason()),
            Verdict::Partial(unknown),
        );
        check("eab", "", "b a e", Verdict::Exact);
        check(
            "aeb",
            "gone@150",
            "b [code object gone] a",
            Verdict::Partial(Cut::CodeGone),
        );
    }
}

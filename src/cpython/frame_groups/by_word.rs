//! Python frames by the words that calls of the bytecode loop have: up to CPython 3.9 nothing on the stack says which call runs
//! which frame, but each call has its frame's address in a register that its callees keep, or among its locals.

use rustc_hash::FxHashMap;

use crate::event::RawPyFrame;
use crate::frame::EvalGroups;

/// A call of the bytecode loop.
#[derive(Clone, Debug, Default)]
pub struct EvalCall {
    /// An address in its stack interval.
    pub sp: u64,
    /// What it has in registers, and among its locals.
    pub registers: Vec<u64>,
    pub locals: Vec<u64>,
}

/// What the words of the calls say about the frames: groups with the anchors of their calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placed {
    /// All frames that are left have their calls.
    All(EvalGroups),
    /// Some frames, which come last, have an anchor that no call has.
    Some(EvalGroups),
}

/// An address in no call.
const NOWHERE: u64 = u64::MAX;

/// Gives frames, one in each group, the anchor of the only call that has their address. If each call but the innermost one, which
/// may be about to begin or to end, has a frame, frames without a call are those of other threads and are left out.
/// `calls`: innermost first.
pub fn place(python: &[RawPyFrame], calls: &[EvalCall], groups: &EvalGroups) -> Placed {
    let frames = python.iter().zip(0..groups.list.len());
    let index: FxHashMap<u64, usize> = frames.map(|(f, i)| (f.frame, i)).collect();
    // The only frame that these words point to.
    let only = |words: &[u64]| {
        let mut found = words.iter().filter_map(|word| index.get(word).copied());
        let first = found.next()?;
        found.all(|other| other == first).then_some(first)
    };
    let frame_of = |call: &EvalCall| only(&call.registers).or_else(|| only(&call.locals));
    let frame_of: Vec<Option<usize>> = calls.iter().map(frame_of).collect();
    let mut calls_of = vec![0; groups.list.len()];
    for frame in frame_of.iter().flatten() {
        calls_of[*frame] += 1;
    }
    let mut placed = EvalGroups::default();
    let mut add = |i: usize, anchor| {
        placed.begin(Some(anchor));
        placed.extend(groups.frames(&groups.list[i]).iter().copied());
    };
    let frame_of = frame_of.into_iter().map(|i| i.filter(|i| calls_of[*i] == 1));
    let mut has_all_calls = true;
    for (at, (call, frame)) in calls.iter().zip(frame_of).enumerate() {
        match frame {
            Some(i) => add(i, call.sp),
            None => has_all_calls &= at == 0,
        }
    }
    let is_left = |i: &usize| calls_of[*i] != 1;
    let mut left = (0..groups.list.len()).filter(is_left).peekable();
    let is_whole = left.peek().is_none();
    if is_whole || has_all_calls && left.clone().all(|i| groups.list[i].compiled == 0 && calls_of[i] == 0) {
        return Placed::All(placed);
    }
    for i in left {
        add(i, NOWHERE);
    }
    Placed::Some(placed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{CodeId, PyFrame};

    /// Frames `1 2 3`, innermost first, whose addresses are those numbers; calls as `1,9+2`: words in registers, and locals
    /// after `+`. The result: frame and place of each group.
    fn placed(frames: &str, calls: &str) -> String {
        let number = |text: &str| text.parse::<u64>().expect("a number");
        let mut groups = EvalGroups::default();
        let python = frames.split_whitespace().map(|frame| {
            groups.begin(None);
            groups.extend([PyFrame::Code {
                code: CodeId(number(frame) as u32),
                instr: 0,
            }]);
            RawPyFrame {
                frame: number(frame),
                ..RawPyFrame::default()
            }
        });
        let python: Vec<RawPyFrame> = python.collect();
        let words = |text: &str| text.split(',').filter(|w| !w.is_empty()).map(number).collect();
        let calls = calls.split_whitespace().enumerate().map(|(i, call)| {
            let (registers, locals) = call.split_once('+').unwrap_or((call, ""));
            EvalCall {
                sp: 100 * i as u64,
                registers: words(registers),
                locals: words(locals),
            }
        });
        let calls: Vec<EvalCall> = calls.collect();
        let shown = |groups: &EvalGroups| {
            let text = groups.list.iter().map(|g| match groups.frames(g) {
                [PyFrame::Code { code, .. }] if g.anchor == Some(NOWHERE) => format!("{}@?", code.0),
                [PyFrame::Code { code, .. }] => format!("{}@{}", code.0, g.anchor.expect("an anchor")),
                other => format!("{other:?}"),
            });
            text.collect::<Vec<_>>().join(" ")
        };
        match place(&python, &calls, &groups) {
            Placed::All(groups) => shown(&groups),
            Placed::Some(groups) => format!("{} not all", shown(&groups)),
        }
    }

    #[test]
    fn frames_are_where_their_addresses_are() {
        // In the order of the chain, or of two chains.
        assert_eq!(placed("1 2 3", "9,1 2,8 3"), "1@0 2@100 3@200");
        assert_eq!(placed("2 3 1", "1 2 3"), "1@0 2@100 3@200");
        assert_eq!(placed("1 3 2", "1 2 3"), "1@0 2@100 3@200");
        // A register counts more than what is left over on the stack.
        assert_eq!(placed("1 2", "1+2 2+1"), "1@0 2@100");
        assert_eq!(placed("1 2", "+1 2"), "1@0 2@100");
        // A call that begins has no frame yet.
        assert_eq!(placed("1 2", "7 1 2"), "1@100 2@200");
        // Frames of other threads.
        assert_eq!(placed("1 2 3", "1 3"), "1@0 3@100");
        // A call whose frame is missing, as its place is known.
        assert_eq!(placed("1 3", "1 7 3"), "1@0 3@200");
    }

    #[test]
    fn nothing_is_guessed() {
        // Two candidates, or one frame of two calls.
        assert_eq!(placed("1 2", "1 1,2"), "1@0 2@? not all");
        assert_eq!(placed("1 2", "1 1"), "1@? 2@? not all");
        // Neither the calls nor the frames are complete.
        assert_eq!(placed("1 2", "1 7"), "1@0 2@? not all");
        assert_eq!(placed("1 2", "7 8"), "1@? 2@? not all");
        assert_eq!(placed("", "7 8"), "");
    }
}

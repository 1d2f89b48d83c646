//! Judges the edges of native stacks: can the code of a caller have called its callee?
//!
//! An edge is a frame with its caller, as the unwinder has found them. The instruction before the return address must
//! be a call. If it states what it calls, that must be the callee's function, or lead there by jumps: linkage stubs,
//! tail calls, cold parts of functions, resolved indirect functions. An edge is *proved* if the bytes show such a way,
//! *possible* if a call or jump through a register or variable may be one, *impossible* if there is none, and
//! *unjudged* if bytes are missing.
//!
//! The judge is to find errors of `unwind`, so the two share no code: neither how machine code is read, nor where
//! functions begin. It knows nothing of stack memory. It alone does not say that stacks are right: an unwinder that
//! truncates every stack has no impossible edges. Proved edges per sample show that.
//!
//! What is read is recorded on tapes (`EdgeAccesses`, `System::read_memory`), so a replay judges as the recording did.

mod code;
mod counts;
mod functions;
mod image;
mod search;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use rustc_hash::FxHashMap;

use crate::code_map::CodeMap;
use crate::event::Pid;
use crate::frame::{ModuleId, NativeFrame};
use crate::process::AddressSpace;
use crate::process::modules::Modules;
use crate::process::system::System;
use code::{Callee, LOOK_BACK, Machine, Value, is_blank};
pub use counts::{CodePlace, EdgeCounts, Found, ImpossibleEdge, Verdicts};
use functions::Functions;
pub use image::EdgeAccesses;
use image::Image;
use search::Search;

/// Bytes from the start of the code that signal handlers return to, in which a thread may be interrupted, at most.
const MAX_SIGNAL_RETURN: u64 = 10;
/// Edges whose verdicts are kept.
const MAX_CACHED: usize = 1 << 18;

/// What the machine code says about an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Proved,
    Possible(Doubt),
    Impossible(Fault),
    Unjudged(Lack),
}

/// Why an edge is only possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    IndirectCall,
    IndirectJump,
    CallMayReturn,
    PushedAddress,
    PushedReturn,
    Signal,
}

impl Doubt {
    pub fn reason(self) -> &'static str {
        match self {
            Doubt::IndirectCall => "called through a register or variable",
            Doubt::IndirectJump => "the called function jumps through a register or variable",
            Doubt::CallMayReturn => "the called code leads there if its calls return",
            Doubt::PushedAddress => "the called code has stored an address that leads there",
            Doubt::PushedReturn => "generated code may have pushed the return address",
            Doubt::Signal => "the kernel interrupted the caller",
        }
    }
}

/// Why an edge is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    NoCall,
    OtherFunction,
}

impl Fault {
    pub fn reason(self) -> &'static str {
        match self {
            Fault::NoCall => "no call is before the return address",
            Fault::OtherFunction => "another function is called, which does not jump there",
        }
    }
}

/// Why an edge is not judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lack {
    Caller,
    Called,
    Word,
    TooFar,
}

impl Lack {
    pub fn reason(self) -> &'static str {
        match self {
            Lack::Caller => "the code before the return address is missing",
            Lack::Called => "code that is called or jumped to is missing",
            Lack::Word => "the address in a linkage table is missing",
            Lack::TooFar => "too many instructions or jumps",
        }
    }
}

/// Process, generation of its mappings, return address, and address in the callee.
type EdgeKey = (Pid, u64, u64, u64);

/// Judges stacks and counts the verdicts.
#[derive(Debug, Default)]
pub struct EdgeJudge {
    pub counts: EdgeCounts,
    /// If set: what is read of files.
    pub log: Option<EdgeAccesses>,
    files: FxHashMap<ModuleId, Rc<Functions>>,
    known: FxHashMap<EdgeKey, (Found, Verdict)>,
}

impl EdgeJudge {
    /// Forgets what is known of processes: one runs another program now.
    pub fn forget_processes(&mut self) {
        self.known.clear();
    }

    /// Judges a stack, innermost frame first.
    pub fn judge(&mut self, process: &AddressSpace, modules: &Modules, system: &dyn System, frames: &[NativeFrame]) {
        self.counts.samples += u64::from(!frames.is_empty());
        for edge in frames.windows(2) {
            let [callee, caller] = edge else { continue };
            let key = (process.pid, process.generation, caller.lookup, callee.lookup);
            let judged = match self.known.get(&key) {
                Some(judged) => *judged,
                None => {
                    let (found, verdict, is_fixed) = self.judge_edge(process, modules, system, callee, caller);
                    if is_fixed {
                        if self.known.len() >= MAX_CACHED {
                            self.known.clear();
                        }
                        self.known.insert(key, (found, verdict));
                    }
                    (found, verdict)
                }
            };
            let found = match judged.0 {
                Found::Signal => Found::Signal,
                _ => Found::by(callee.method),
            };
            self.counts.add(found, judged.1);
            if let Verdict::Impossible(fault) = judged.1 {
                let place = |f: &NativeFrame, at: u64| match process.find(at) {
                    Some((module, bias)) => CodePlace::File(module, at.wrapping_sub(bias)),
                    None => CodePlace::Memory(process.pid, f.lookup),
                };
                self.counts.add_impossible(ImpossibleEdge {
                    found,
                    fault,
                    caller: place(caller, caller.lookup),
                    callee: place(callee, callee.lookup),
                });
            }
        }
    }

    /// The verdict on one edge, and whether it is the same as long as the mappings are.
    fn judge_edge(
        &mut self,
        process: &AddressSpace,
        modules: &Modules,
        system: &dyn System,
        callee: &NativeFrame,
        caller: &NativeFrame,
    ) -> (Found, Verdict, bool) {
        let mut image = Image::new(process, modules, system, &mut self.files, self.log.as_mut());
        let in_files = image.locate(caller.lookup).is_some() && image.locate(callee.lookup).is_some();
        let end = caller.lookup.wrapping_add(1);
        // (Nothing called the code that handlers return to, so that its own address is looked up.)
        if is_signal_return(&mut image, caller.lookup, 0)
            || is_signal_return(&mut image, callee.lookup, MAX_SIGNAL_RETURN)
        {
            return (Found::Signal, Verdict::Possible(Doubt::Signal), in_files);
        }
        let (verdict, reads_words) = judge_call(&mut image, end, callee.lookup);
        let is_fixed = in_files && (!reads_words || verdict == Verdict::Proved);
        (Found::by(callee.method), verdict, is_fixed)
    }
}

/// Does the code that signal handlers return to begin at `at`, or so many bytes before it that it has not ended there?
fn is_signal_return(image: &mut Image, at: u64, most: u64) -> bool {
    (0..=most).any(|back| {
        let start = at.wrapping_sub(back);
        let (bytes, known) = image.instruction(start);
        let length = Machine::NATIVE.signal_return(&bytes[..known]);
        let found = length.is_some_and(|length| back <= length);
        if found {
            image.note(start, known as u64);
        }
        found
    })
}

/// May a function begin at this address, or one byte before it, of which only the first byte is known?
fn may_begin_unknown(image: &mut Image, at: u64) -> bool {
    let (bytes, known) = image.instruction(at);
    is_blank(bytes[..known].get(1..).unwrap_or_default()) && image.may_begin(at)
}

/// The verdict on the call that should end at `end`, and whether words of memory were read for it, which may change.
fn judge_call(image: &mut Image, end: u64, callee: u64) -> (Verdict, bool) {
    let machine = Machine::NATIVE;
    // As much as can be read: code in memory may begin shortly before.
    let before = |image: &mut Image| {
        LOOK_BACK.iter().find_map(|length| {
            let (bytes, known) = image.read(end.wrapping_sub(*length as u64), *length);
            (known == *length).then(|| bytes[..known].to_vec())
        })
    };
    let Some(before) = before(image) else {
        return (Verdict::Unjudged(Lack::Caller), false);
    };
    let mut calls = machine.calls_before(&before, end);
    let is_missing = is_blank(&before[before.len().saturating_sub(machine.call_window())..]);
    // Without its bytes, the code that signal handlers return to is not recognized. It is a function of its own.
    if is_missing
        || calls.is_empty()
            && [end.wrapping_sub(1), callee]
                .iter()
                .any(|at| may_begin_unknown(image, *at))
    {
        return (Verdict::Unjudged(Lack::Caller), false);
    }
    // Interpreters in generated code (HotSpot's) push the addresses of code that only returns reach.
    if calls.is_empty() && image.locate(end.wrapping_sub(1)).is_none() && machine.leaves_before(&before, end) {
        return (Verdict::Possible(Doubt::PushedReturn), false);
    }
    let used = match calls[..] {
        [Callee::Direct(_)] | [] => machine.call_window(),
        _ => before.len(),
    };
    image.note(end.wrapping_sub(used as u64), used as u64);
    // Bytes that state the start of a function are not a part of another call.
    let entry = calls.iter().copied().find(|call| match call {
        Callee::Direct(to) => image.is_entry(*to),
        _ => false,
    });
    if let Some(entry) = entry {
        calls = vec![entry];
    }
    let (mut best, mut reads_words) = (Verdict::Impossible(Fault::NoCall), false);
    for call in calls {
        let mut search = Search::new(image, callee);
        let verdict = match call {
            Callee::Direct(to) => search.direct(to),
            Callee::Slot(word) => search.through_word(end, word),
            Callee::Register(Value::Constant(to)) => search.direct(to).or_possible(),
            Callee::Register(Value::Slot(word)) => search.through_word(end, word).or_possible(),
            Callee::Unknown => Verdict::Possible(Doubt::IndirectCall),
        };
        reads_words |= search.reads_words;
        best = best.or(verdict);
    }
    (best, reads_words)
}

impl Verdict {
    /// What is not proved about a register is only possible: other paths may lead to its call.
    fn or_possible(self) -> Verdict {
        match self {
            Verdict::Proved => self,
            _ => Verdict::Possible(Doubt::IndirectCall),
        }
    }

    /// The verdict if the bytes can be read in two ways.
    fn or(self, other: Verdict) -> Verdict {
        let rank = |v: &Verdict| match v {
            Verdict::Proved => 0,
            Verdict::Possible(_) => 1,
            Verdict::Unjudged(_) => 2,
            Verdict::Impossible(Fault::OtherFunction) => 3,
            Verdict::Impossible(Fault::NoCall) => 4,
        };
        if rank(&other) < rank(&self) { other } else { self }
    }
}

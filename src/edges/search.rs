//! Where a called address leads: does execution come to the callee from there, without a further call?

use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use super::code::{Flow, Machine, Registers, Value, is_blank};
use super::image::Image;
use super::{Doubt, Fault, Lack, Verdict};

/// Instructions that are followed for one edge, and jumps from function to function in a row.
const MAX_INSTRUCTIONS: usize = 50_000;
const MAX_JUMPS: u8 = 8;
/// Bytes after a call that a thunk may begin at, or after the storing of its address an exception handler, where the end of the
/// function is not known.
const MAX_THUNK: u64 = 64;

/// How execution comes to a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By jumps, or from one instruction to the next.
    Certain,
    /// If a call returns of which that is not known: the end of its function is not.
    AfterCall,
    /// By an address in the same function that was put on the stack: an exception handler (OCaml).
    Pushed,
    /// Through a linkage stub whose function has not been searched for yet. The jump at the end of that search, to the function,
    /// is known from the word that the stub reads.
    Unbound,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    at: u64,
    way: Way,
    /// Functions that execution has jumped from.
    jumps: u8,
    /// The instructions that lead here: an index in `Search::trail`.
    from: Option<usize>,
}

/// Instructions that follow each other, and those that led to them.
#[derive(Clone, Copy, Debug)]
struct Followed {
    from: Option<usize>,
    start: u64,
    end: u64,
}

/// One search.
pub struct Search<'s, 'a> {
    image: &'s mut Image<'a>,
    /// An address in the callee.
    callee: u64,
    queue: VecDeque<Place>,
    seen: FxHashSet<u64>,
    trail: Vec<Followed>,
    /// How the callee was found, and a jump that may lead anywhere; each with the instructions before.
    found: Option<(Way, Option<usize>)>,
    doubt: Option<(Doubt, Option<usize>)>,
    lack: Option<Lack>,
    /// Whether words of memory were read, which may have changed since the sample.
    pub reads_words: bool,
}

impl<'s, 'a> Search<'s, 'a> {
    pub fn new(image: &'s mut Image<'a>, callee: u64) -> Search<'s, 'a> {
        Search {
            image,
            callee,
            queue: VecDeque::new(),
            seen: FxHashSet::default(),
            trail: Vec::new(),
            found: None,
            doubt: None,
            lack: None,
            reads_words: false,
        }
    }

    /// The verdict on a call of this address.
    pub fn direct(&mut self, called: u64) -> Verdict {
        self.enter(Place {
            at: called,
            way: Way::Certain,
            jumps: 0,
            from: None,
        });
        while !self.is_certain()
            && let Some(place) = self.queue.pop_front()
        {
            self.follow(place);
        }
        self.image.note_function(called);
        self.image.note_function(self.callee);
        let (verdict, last) = match (self.found, self.doubt, self.lack) {
            (Some((Way::AfterCall, last)), ..) => (Verdict::Possible(Doubt::CallMayReturn), last),
            (Some((Way::Pushed, last)), ..) => (Verdict::Possible(Doubt::PushedAddress), last),
            (Some((_, last)), ..) => (Verdict::Proved, last),
            (None, Some((doubt, last)), _) => (Verdict::Possible(doubt), last),
            (None, None, lack) => {
                // All of it is what shows that the callee is not reached.
                (0..self.trail.len()).for_each(|i| self.note(i));
                (
                    lack.map_or(Verdict::Impossible(Fault::OtherFunction), Verdict::Unjudged),
                    None,
                )
            }
        };
        let mut last = last;
        while let Some(i) = last {
            self.note(i);
            last = self.trail[i].from;
        }
        verdict
    }

    /// Notes that these instructions were needed.
    fn note(&mut self, i: usize) {
        let Followed { start, end, .. } = self.trail[i];
        self.image.note(start, end.wrapping_sub(start));
        self.image.note_function(start);
    }

    fn is_certain(&self) -> bool {
        matches!(self.found, Some((Way::Certain | Way::Unbound, _)))
    }

    /// The callee is reached in this way.
    fn find(&mut self, way: Way, from: Option<usize>) {
        if !self.is_certain() && (!matches!(way, Way::AfterCall | Way::Pushed) || self.found.is_none()) {
            self.found = Some((way, from));
        }
    }

    /// The verdict on a call of the address in this word, which code at `call` reads.
    pub fn through_word(&mut self, call: u64, word: u64) -> Verdict {
        let is_fixed = self.image.is_linkage_slot(call, word);
        self.reads_words = true;
        let found = match self.image.word(word) {
            Some(called) => self.direct(called),
            None => Verdict::Unjudged(Lack::Word),
        };
        match found {
            Verdict::Proved => found,
            _ if is_fixed => found,
            _ => Verdict::Possible(Doubt::IndirectCall),
        }
    }

    /// Execution comes to a place by a jump or call.
    fn enter(&mut self, place: Place) {
        if self.is_callee(place.at) {
            self.find(place.way, place.from);
        } else if place.jumps > MAX_JUMPS {
            self.lack.get_or_insert(Lack::TooFar);
        } else {
            self.queue.push_back(place);
        }
    }

    /// Is this address in the function of the callee?
    fn is_callee(&mut self, at: u64) -> bool {
        if at == self.callee {
            return true;
        }
        let (Some((module, at_svma)), Some((other, svma))) = (self.image.locate(at), self.image.locate(self.callee))
        else {
            return false;
        };
        module == other
            && at.wrapping_sub(at_svma) == self.callee.wrapping_sub(svma)
            && self.image.functions(at).is_some_and(|(f, _)| f.is_same(at_svma, svma))
    }

    /// Extent of the function that contains the address.
    fn function(&mut self, at: u64) -> Option<std::ops::Range<u64>> {
        let (functions, svma) = self.image.functions(at)?;
        let bias = at.wrapping_sub(svma);
        let f = functions.at(svma)?;
        Some(f.start.wrapping_add(bias)..f.end.wrapping_add(bias))
    }

    /// Follows the instructions from a place up to the next jump, return or end.
    fn follow(&mut self, mut place: Place) {
        let function = self.function(place.at);
        let mut registers = Registers::default();
        let step = Some(self.trail.len());
        self.trail.push(Followed {
            from: place.from,
            start: place.at,
            end: place.at,
        });
        while self.seen.insert(place.at) {
            if self.seen.len() > MAX_INSTRUCTIONS {
                self.lack.get_or_insert(Lack::TooFar);
                return;
            }
            let (bytes, known) = self.image.instruction(place.at);
            let bytes = &bytes[..known];
            if is_blank(bytes) {
                self.lack.get_or_insert(Lack::Called);
                return;
            }
            let i = Machine::NATIVE.decode(bytes, place.at, &mut registers);
            if i.length == 0 {
                return;
            }
            let next = place.at.wrapping_add(i.length);
            if let Some(last) = self.trail.last_mut() {
                last.end = next;
            }
            if (place.at..next).contains(&self.callee) {
                return self.find(place.way, step);
            }
            let leaves = |to: u64| function.as_ref().is_none_or(|f| !f.contains(&to));
            let Place { way, jumps, .. } = place;
            let jump = |to: u64| Place {
                at: to,
                way,
                jumps: jumps + u8::from(leaves(to)),
                from: step,
            };
            let in_function = |to: u64| match &function {
                Some(f) => f.contains(&to),
                None => to.wrapping_sub(next) < MAX_THUNK,
            };
            if let Some(at) = i.pushed.filter(|at| in_function(*at)) {
                self.enter(Place {
                    way: Way::Pushed,
                    ..jump(at)
                });
            }
            match i.flow {
                Flow::Next => {}
                Flow::Branch(to) => self.enter(jump(to)),
                Flow::Jump(to) => return self.enter(jump(to)),
                Flow::JumpSlot(word) => return self.jump_through(place, step, next, word),
                Flow::JumpRegister(Some(Value::Slot(word))) => return self.jump_through(place, step, next, word),
                Flow::JumpRegister(value) => {
                    if let Some(Value::Constant(to)) = value {
                        self.enter(jump(to));
                    }
                    return self.doubt(place, step);
                }
                Flow::Call(to) => {
                    // A call within the function may be a thunk, which replaces its return address.
                    let is_thunk = |to: u64| match &function {
                        Some(f) => f.contains(&to) && to != f.start,
                        None => to.wrapping_sub(next) < MAX_THUNK,
                    };
                    if let Some(to) = to.filter(|to| is_thunk(*to)) {
                        self.enter(jump(to));
                    }
                    match &function {
                        Some(f) if !f.contains(&next) => return,
                        Some(_) => {}
                        None => place.way = Way::AfterCall,
                    }
                }
                Flow::Return | Flow::End => return,
            }
            if self.is_certain() {
                return;
            }
            place.at = next;
            if function.as_ref().is_some_and(|f| !f.contains(&next)) {
                // Execution goes on in the function that follows.
                return self.enter(jump(next));
            }
        }
    }

    /// A jump to the address in a word.
    fn jump_through(&mut self, place: Place, from: Option<usize>, next: u64, word: u64) {
        let functions = self.image.functions(place.at);
        let unbound = functions.and_then(|(functions, svma)| {
            let bias = place.at.wrapping_sub(svma);
            Some(functions.unbound(svma, next.wrapping_sub(bias))?.wrapping_add(bias))
        });
        if unbound.is_none() && !self.image.is_linkage_slot(place.at, word) {
            self.doubt(place, from);
        }
        self.reads_words = true;
        let to = self.image.word(word);
        let jumps = place.jumps + 1;
        match to {
            Some(to) => self.enter(Place {
                at: to,
                jumps,
                from,
                ..place
            }),
            None => {
                self.lack.get_or_insert(Lack::Word);
            }
        }
        if let Some(at) = unbound.filter(|at| Some(*at) != to) {
            self.enter(Place {
                at,
                jumps,
                way: Way::Unbound,
                from,
            });
        }
    }

    /// A jump may lead anywhere.
    fn doubt(&mut self, place: Place, from: Option<usize>) {
        if place.way != Way::Unbound {
            self.doubt.get_or_insert((Doubt::IndirectJump, from));
        }
    }
}

//! Native unwinding: registers and a stack copy in, frames with their stack intervals out.
//!
//! Knows no process, no file and no symbol name: sections come in through [`Sections`], the map of code through
//! [`CodeMap`]. Never panics and always ends, whatever the bytes are.
//!
//! A frame's caller is looked for in this order: call frame tables (`cfi`), the function's own instructions
//! (`code`), and, marked as such, guesses that are checked (`guess`).

mod cfi;
mod code;
mod expr;
mod follow;
mod guess;
mod memo;
mod memory;
mod rule;
#[cfg(test)]
mod tests;

use crate::arch::Regs;
use crate::sample::{Cut, How, ModuleId, NativeFrame, Origin, StackBytes};
pub use memo::Memo;
use memory::Memory;
use rule::{Kind, Rule, RuleId, Rules, Step};

pub use crate::code::{CodeMap, Landmarks, Section, Sections};

/// Native frames of one stack, at most.
pub const MOST_FRAMES: usize = 1 << 16;
/// Files known, at most.
const MOST_MODULES: usize = 1 << 20;
/// Signal frames may lead to another stack, also a lower one: so often.
const MOST_SWITCHES: u32 = 64;

/// What is known of one file.
struct Module {
    sections: Box<dyn Sections>,
    tables: cfi::Tables,
    code: code::Code,
    landmarks: Landmarks,
}

impl Module {
    fn start(&mut self, svma: u64) -> Option<u64> {
        self.tables.start(svma, &mut *self.sections)
    }

    fn rule(&mut self, svma: u64, rules: &mut Rules, context: &mut cfi::Context) -> RuleId {
        let l = &self.landmarks;
        for (ranges, id) in [
            (&l.switch, Rules::SWITCH),
            (&l.stub, Rules::STUB),
            (&l.first, Rules::FIRST),
        ] {
            if Landmarks::has(ranges, svma) {
                return id;
            }
        }
        self.real_rule(svma, rules, context)
    }

    /// The rule at `svma`, whatever else is known of the function.
    fn real_rule(&mut self, svma: u64, rules: &mut Rules, context: &mut cfi::Context) -> RuleId {
        if let Some(id) = self.tables.rule(svma, &mut *self.sections, rules, context) {
            return id;
        }
        self.code
            .rule(svma, false, &mut *self.sections, &mut self.tables, rules)
            .unwrap_or(Rules::NONE)
    }
}

/// Unwinds stacks; keeps the unwind rules of all files it has seen.
#[derive(Default)]
pub struct Unwinder {
    modules: Vec<Option<Box<Module>>>,
    rules: Rules,
    cache: Cache,
    context: cfi::Context,
    /// Addresses on the stack that lie in frames of code with tables, ascending.
    marks: Vec<u64>,
    greenlets: bool,
    /// Calls of the bytecode loop that the interpreter knows of.
    loops: Option<usize>,
}

/// Where `avma` lies: file and svma.
fn place(code: &dyn CodeMap, avma: u64) -> Option<(ModuleId, u64)> {
    code.find(avma).map(|(module, bias)| (module, avma.wrapping_sub(bias)))
}

/// One stack on its way out.
struct Walk<'a> {
    code: &'a dyn CodeMap,
    memory: Memory<'a>,
    regs: Regs,
    /// `regs.ip` is an interrupted instruction, not a return address.
    interrupted: bool,
    switches: u32,
    /// Frames that may still be tried while searching the stack.
    budget: usize,
    /// No search while trying what a search found.
    searching: bool,
    /// Where among the frames the stack begins.
    first: usize,
}

impl<'a> Walk<'a> {
    fn new(code: &'a dyn CodeMap, regs: &Regs, stack: &'a StackBytes, first: usize) -> Walk<'a> {
        Walk {
            code,
            memory: Memory::new(stack),
            regs: *regs,
            interrupted: true,
            switches: 0,
            budget: 2 * MOST_FRAMES,
            searching: false,
            first,
        }
    }

    fn lookup(&self) -> u64 {
        self.regs.ip.wrapping_sub(u64::from(!self.interrupted))
    }
}

impl Unwinder {
    /// Makes the rules of a file known. Nothing is parsed before a frame needs it.
    pub fn add(&mut self, module: ModuleId, sections: Box<dyn Sections>) {
        let index = module.0 as usize;
        if index >= MOST_MODULES {
            return;
        }
        if index >= self.modules.len() {
            self.modules.resize_with(index + 1, || None);
        }
        if self.modules[index].is_some() {
            self.cache = Cache::default();
        }
        let (tables, code, landmarks) = Default::default();
        self.modules[index] = Some(Box::new(Module {
            sections,
            tables,
            code,
            landmarks,
        }));
    }

    /// Makes the landmarks of a file known, after [`Unwinder::add`].
    pub fn add_landmarks(&mut self, module: ModuleId, landmarks: Landmarks) {
        if let Some(Some(known)) = self.modules.get_mut(module.0 as usize) {
            self.greenlets |= !landmarks.stub.is_empty();
            known.landmarks = landmarks;
            self.cache = Cache::default();
        }
    }

    /// Has one of the files functions of greenlet?
    pub fn has_greenlets(&self) -> bool {
        self.greenlets
    }

    /// Addresses that are known to lie in frames of code with tables, for the stacks that follow: the interpreter's marks.
    /// A guess that steps over one of them, or leaves one out, is wrong. `loops`: the calls of the bytecode loop that
    /// the interpreter knows of, also where it has no marks for them.
    pub fn expect(&mut self, marks: impl Iterator<Item = u64>, loops: Option<usize>) {
        self.loops = loops;
        self.marks.clear();
        self.marks.extend(marks);
        self.marks.sort_unstable();
    }

    /// Start (svma) of the function that holds `svma`, as far as the unwind tables tell; names are not needed for it.
    pub fn function_start(&mut self, module: ModuleId, svma: u64) -> Option<u64> {
        self.modules.get_mut(module.0 as usize)?.as_mut()?.start(svma)
    }

    /// Appends the frames of a stack to `out`, innermost first. `Err` says why it ends before the thread's first
    /// frame; the frames found so far stay, the last of them marked [`How::Lost`].
    pub fn unwind(
        &mut self,
        code: &dyn CodeMap,
        regs: &Regs,
        stack: &StackBytes,
        out: &mut Vec<NativeFrame>,
    ) -> Result<(), Cut> {
        let mut walk = Walk::new(code, regs, stack, out.len());
        self.walk(&mut walk, None, out)
    }

    /// The same, for one stack after the other of one thread: what has not changed since the last one is not unwound
    /// again. `generation` must change whenever `code` does.
    pub fn unwind_next(
        &mut self,
        memo: &mut Memo,
        generation: u64,
        code: &dyn CodeMap,
        regs: &Regs,
        stack: &StackBytes,
        out: &mut Vec<NativeFrame>,
    ) -> Result<(), Cut> {
        let mut walk = Walk::new(code, regs, stack, out.len());
        let first = out.len();
        memo.begin(generation);
        let done = self.walk(&mut walk, Some(memo), out);
        memo.end(out.len() - first, done.is_ok());
        done
    }

    /// The unwind rule at `svma` in words, for tests and for people: `rsp+16 rbp=c-16 ra=c-8`. `None` if there is none.
    pub fn explain(&mut self, module: ModuleId, svma: u64) -> Option<String> {
        let rule = self.rule(module, svma);
        self.rules.describe(&rule)
    }

    fn walk(&mut self, walk: &mut Walk, mut memo: Option<&mut Memo>, out: &mut Vec<NativeFrame>) -> Result<(), Cut> {
        let first = out.len();
        let mut at = place(walk.code, walk.lookup());
        loop {
            if let Some(memo) = memo.as_deref_mut().filter(|m| m.listens())
                && let Some((regs, interrupted)) = memo.reuse(&walk.regs, walk.interrupted, walk.memory.stack, out)
            {
                (walk.regs, walk.interrupted) = (regs, interrupted);
                at = place(walk.code, walk.lookup());
            }
            let (lookup, sp) = (walk.lookup(), walk.regs.sp());
            let mut frame = NativeFrame {
                lookup,
                sp,
                cfa: sp,
                place: at,
                how: How::Lost,
            };
            if out.len() - first >= MOST_FRAMES {
                out.push(frame);
                return Err(Cut::TooManyFrames);
            }
            let mut rule = at.map_or(Rule::NONE, |(module, svma)| self.rule(module, svma));
            // A thread interrupted in sigreturn stands behind that system call, where the restorer's table has ended.
            if walk.interrupted
                && (rule.code || matches!(rule.kind, Kind::None))
                && let Some((module, svma)) = place(walk.code, lookup.wrapping_sub(1))
            {
                let before = self.rule(module, svma);
                if before.signal {
                    rule = before;
                }
            }
            // Nearly every frame goes this way; the rest of the loop is for those that do not.
            if let Some((cfa, ra)) = self.rules.plain(&rule, &walk.regs, &walk.memory)
                && cfa > sp
                && ra != 0
                && let Some(next) = place(walk.code, ra.wrapping_sub(1))
            {
                (frame.cfa, frame.how) = (cfa, How::Cfi);
                out.push(frame);
                if let Some(memo) = memo.as_deref_mut().filter(|m| m.listens()) {
                    let mut words = [(0, 0); 7];
                    let n = rule.words(cfa, ra, walk.memory.stack, &mut words);
                    memo.note(frame, walk.regs, walk.interrupted, n.map(|n| &words[..n]));
                }
                Rules::restore(&rule, &mut walk.regs, &mut walk.memory, cfa, ra);
                (at, walk.interrupted) = (Some(next), false);
                continue;
            }
            if let Some(done) = self.landmark(walk, &mut rule, frame, out) {
                return done;
            }
            let before = walk.regs;
            if let Some(memo) = memo.as_deref_mut().filter(|m| m.listens()) {
                memo.note(frame, before, walk.interrupted, None);
            }
            let no_table = rule.code || matches!(rule.kind, Kind::None);
            if no_table && self.is_made_by_hand(walk) {
                return Err(made_by_hand(walk.first, frame, out));
            }
            let step = self.rules.apply(&rule, &mut walk.regs, &mut walk.memory);
            let failed = match step {
                Step::End { cfa } => {
                    frame.cfa = cfa.unwrap_or(sp).max(sp);
                    frame.how = How::End;
                    out.push(frame);
                    return Ok(());
                }
                Step::Fail { cut, cfa } => {
                    frame.cfa = cfa.unwrap_or(sp).max(sp);
                    // A frame that does not lie above its own stack pointer is the rule's fault, not the stack copy's.
                    if cfa.is_some_and(|cfa| cfa <= sp) {
                        Cut::BadUnwindInfo
                    } else {
                        cut
                    }
                }
                Step::Caller { cfa } => match self.caller(walk, &rule, sp, cfa) {
                    Ok(next) => {
                        frame.cfa = cfa.max(sp);
                        frame.how = if rule.code { How::Code } else { How::Cfi };
                        at = next;
                        if walk.regs.ip == 0 {
                            frame.how = How::End;
                            out.push(frame);
                            return Ok(());
                        }
                        out.push(frame);
                        walk.interrupted = rule.signal;
                        continue;
                    }
                    Err(cut) => cut,
                },
            };
            walk.regs = before;
            if !no_table && self.is_made_by_hand(walk) {
                return Err(made_by_hand(walk.first, frame, out));
            }
            match self.guess(walk, &rule, failed, frame, out) {
                Some(guess::Found::Next(next)) => at = next,
                Some(guess::Found::End) => return Ok(()),
                None => {
                    out.push(frame);
                    return Err(failed);
                }
            }
        }
    }

    /// Ends the stack at a landmark, or gives the function's real rule.
    fn landmark(
        &mut self,
        walk: &mut Walk,
        rule: &mut Rule,
        mut frame: NativeFrame,
        out: &mut Vec<NativeFrame>,
    ) -> Option<Result<(), Cut>> {
        let (module, svma) = frame.place?;
        match rule.kind {
            Kind::Switch => {
                out.push(frame);
                Some(Err(Cut::GreenletSwitch))
            }
            // The code that is returned to was never called: its caller's frame is the first one.
            Kind::First => {
                match out.get_mut(walk.first..).and_then(<[NativeFrame]>::last_mut) {
                    Some(last) if !walk.interrupted && last.how == How::Cfi => {
                        last.how = How::Begins(Origin::Context);
                    }
                    _ => {
                        frame.how = How::Begins(Origin::Context);
                        out.push(frame);
                    }
                }
                Some(Ok(()))
            }
            Kind::Stub => {
                let known = self.modules.get_mut(module.0 as usize)?.as_mut()?;
                let id = known.real_rule(svma, &mut self.rules, &mut self.context);
                *rule = self.rules.get(id);
                let step = self.rules.apply(rule, &mut { walk.regs }, &mut walk.memory);
                if let Step::Caller { cfa } = step {
                    frame.cfa = cfa.max(frame.sp);
                }
                if !self.begins_greenlet(out.get(walk.first..)?, &frame, module) {
                    return None;
                }
                frame.how = How::Begins(Origin::Greenlet);
                out.push(frame);
                Some(Ok(()))
            }
            _ => None,
        }
    }

    /// Is this frame of a greenlet's first function in the greenlet, not in the one that starts it? `inner` are the frames
    /// that it called.
    fn begins_greenlet(&self, inner: &[NativeFrame], frame: &NativeFrame, module: ModuleId) -> bool {
        let landmarks = |id: ModuleId| Some(&self.modules.get(id.0 as usize)?.as_ref()?.landmarks);
        let is_in = |f: &NativeFrame, ranges: fn(&Landmarks) -> &Vec<(u64, u64)>| {
            f.place
                .and_then(|(id, svma)| Some(Landmarks::has(ranges(landmarks(id)?), svma)))
                .unwrap_or(false)
        };
        if inner.last().is_some_and(|f| is_in(f, |l| &l.bootstrap)) {
            return true;
        }
        // The greenlet's Python frames are those that run further in; its starter has others outward.
        match (self.marks.last(), self.loops) {
            (Some(last), _) => *last < frame.cfa,
            (None, Some(loops)) => loops <= inner.iter().filter(|f| is_in(f, |l| &l.eval)).count(),
            (None, None) => landmarks(module).is_some_and(|l| l.bootstrap.is_empty()),
        }
    }

    /// Checks the caller that a rule led to; where its code lies, if in a file.
    #[inline]
    fn caller(&mut self, walk: &mut Walk, rule: &Rule, sp: u64, cfa: u64) -> Result<Option<(ModuleId, u64)>, Cut> {
        // Every call takes stack. Only the kernel moves from one stack to another, also a lower one, when it interrupts;
        // and a function that has popped its return address (vfork) has no stack of its own left.
        let grows = cfa.min(walk.regs.sp()) > sp || cfa == sp && walk.interrupted;
        if rule.signal {
            walk.switches += 1;
        }
        if !grows && !rule.signal || walk.switches > MOST_SWITCHES {
            return Err(Cut::BadUnwindInfo);
        }
        let ip = walk.regs.ip;
        if ip == 0 {
            return Ok(None);
        }
        let lookup = ip.wrapping_sub(u64::from(!rule.signal));
        let at = place(walk.code, lookup);
        if at.is_none() && !rule.signal && !walk.code.is_code(lookup) {
            return Err(Cut::NotCode);
        }
        if rule.code && self.after_call(walk.code, ip) == Some(false) {
            return Err(Cut::NoUnwindInfo);
        }
        Ok(at)
    }

    #[inline]
    fn rule(&mut self, module: ModuleId, svma: u64) -> Rule {
        let slot = Cache::slot(module, svma);
        let entry = self.cache.0[slot];
        if entry.svma == svma && entry.module == module.0 {
            return self.rules.get(entry.rule);
        }
        let Some(Some(known)) = self.modules.get_mut(module.0 as usize) else {
            return Rule::NONE;
        };
        let rule = known.rule(svma, &mut self.rules, &mut self.context);
        self.cache.0[slot] = Entry {
            svma,
            module: module.0,
            rule,
        };
        self.rules.get(rule)
    }
}

/// Cuts a stack before what is no frame: the code of `frame` was never called.
fn made_by_hand(first: usize, frame: NativeFrame, out: &mut Vec<NativeFrame>) -> Cut {
    match out.get_mut(first..).and_then(<[NativeFrame]>::last_mut) {
        Some(last) => last.how = How::Lost,
        None => out.push(frame),
    }
    Cut::OtherStack
}

#[derive(Clone, Copy)]
struct Entry {
    svma: u64,
    module: u32,
    rule: RuleId,
}

/// Rules of the addresses met most recently: a direct-mapped table, so that memory stays bounded and a hit is one
/// cache line. A miss costs two binary searches.
struct Cache(Box<[Entry; 1 << Cache::BITS]>);

impl Cache {
    /// 256 KiB: programs measured met some thousand distinct addresses.
    const BITS: u32 = 14;

    #[inline]
    fn slot(module: ModuleId, svma: u64) -> usize {
        let mixed = (svma ^ u64::from(module.0).rotate_right(24)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> (64 - Self::BITS)) as usize
    }
}

impl Default for Cache {
    fn default() -> Self {
        let empty = Entry {
            svma: u64::MAX,
            module: u32::MAX,
            rule: Rules::NONE,
        };
        let entries = vec![empty; 1 << Self::BITS].into_boxed_slice();
        Cache(entries.try_into().unwrap_or_else(|_| unreachable!()))
    }
}

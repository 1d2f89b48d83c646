//! The loop's body: one event in, one stack into the raw tree. Calls the stages in order and counts; names nothing.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::capture::{Counts, Source};
use crate::code::CodeMap;
use crate::error::Result;
use crate::interp::{code::CodeTable, frames};
use crate::layout::Space;
use crate::merge::{self, Verdict};
use crate::process::Process;
use crate::process::host::Host;
use crate::process::modules::Modules;
use crate::resolve::{self, Fetch, Gathered, Opened};
use crate::sample::{Cut, Event, Groups, How, ModuleId, NativeFrame, Origin, Pid, PyWalk, RawFrame, Sample, Tid};
use crate::tree::profile::{Held, Meta, Profile, Quality};
use crate::tree::raw::{Path, RawTick, RawTree};
use crate::unwind::{Memo, Unwinder};

mod jit;
mod open_intervals;
mod processes;
mod states;
mod window;

use jit::{JitShared, function_start, jit_places};
use processes::{Family, Known, Member, Python, begins_process};
use states::GilLocks;

/// What stands between the root and the frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grouping {
    pub processes: bool,
    pub threads: bool,
}

/// What a session makes of samples.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub grouping: Grouping,
    /// Unwind native stacks; without it only Python (and kernel) frames remain.
    pub native: bool,
    /// The sampling period, ns, where samples have a time of their own to represent: off-CPU time is sampled, too.
    pub weighted: Option<u64>,
}

/// Counts of what became of the samples.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub exact: u64,
    pub repaired: u64,
    pub partial: u64,
    pub reasons: BTreeMap<Cut, u64>,
}

impl Tally {
    pub fn taken(&self) -> u64 {
        self.exact + self.repaired + self.partial
    }

    fn add(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Exact => self.exact += 1,
            Verdict::Repaired => self.repaired += 1,
            Verdict::Partial(why) => {
                self.partial += 1;
                *self.reasons.entry(why).or_default() += 1;
            }
        }
    }
}

/// Everything a recording has gathered.
pub struct Session {
    pub host: Box<dyn Host>,
    options: Options,
    members: FxHashMap<Pid, Member>,
    pub modules: Modules,
    /// What each module is to interpreters.
    known: FxHashMap<ModuleId, Known>,
    unwinder: Unwinder,
    pub codes: CodeTable,
    pub tree: RawTree,
    pub timeline: Vec<RawTick>,
    pub tally: Tally,
    /// Names of threads as last heard.
    pub threads: BTreeMap<(Pid, Tid), String>,
    /// Interpreters found, in words: `CPython 3.11.7 (libpython3.11.so.1.0)`.
    pub pythons: BTreeMap<Pid, String>,
    /// Threads of which there are samples.
    sampled: FxHashSet<(Pid, Tid)>,
    /// Processes in whose samples there is code that is in no file.
    unfiled: FxHashSet<Pid>,
    gil_locks: GilLocks,
    /// Threads that ended lately, and processes whose first thread has ended while others go on.
    ended: FxHashSet<Tid>,
    headless: FxHashSet<Pid>,
    /// Each thread's last stack, and the bytes of all.
    last: FxHashMap<Tid, Last>,
    last_bytes: usize,
    /// When there: the places that the unwinder asked for, and whether the stack needed more than tables.
    pub touched: Option<Touched>,
    opened: Opened,
    jit: JitShared,
    /// Who is asked for debug information that is not on this machine.
    pub fetch: Option<Fetch>,
    groups: Groups,
    native: Vec<NativeFrame>,
    stack: Vec<RawFrame>,
}

/// Bytes that the threads' last stacks may take: a thousand very deep ones would take gigabytes.
const MOST_LAST: usize = 32 << 20;
/// Shortest time between two looks for subinterpreters, ns of the samples' clock.
const LOOK_AGAIN: u64 = 50_000_000;
/// Files and addresses (svma) on stacks; true if tables alone did not lead through.
pub type Touched = FxHashMap<(ModuleId, u64), bool>;

/// The code of a process, noting what is looked up.
struct Watched<'a>(&'a Process, RefCell<Vec<(ModuleId, u64)>>);

impl CodeMap for Watched<'_> {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        let (module, bias) = self.0.find(avma)?;
        self.1.borrow_mut().push((module, avma.wrapping_sub(bias)));
        Some((module, bias))
    }

    fn is_code(&self, avma: u64) -> bool {
        self.0.is_code(avma)
    }
}

/// A thread's last stack, in the stages that it passes.
#[derive(Default)]
struct Last {
    python: frames::Last,
    memo: Memo,
    path: Path,
}

impl Last {
    /// Bytes on the heap.
    fn bytes(&self) -> usize {
        self.python.bytes() + self.memo.bytes() + self.path.bytes()
    }
}

/// What the source must be told after an event.
pub type Learn<'a> = dyn FnMut(Pid, Option<&Space>) -> Result<()> + 'a;

impl Session {
    pub fn new(options: Options, host: Box<dyn Host>) -> Session {
        Session {
            host,
            options,
            members: FxHashMap::default(),
            modules: Modules::default(),
            known: FxHashMap::default(),
            unwinder: Unwinder::default(),
            codes: CodeTable::default(),
            tree: RawTree::default(),
            timeline: Vec::new(),
            tally: Tally::default(),
            threads: BTreeMap::new(),
            pythons: BTreeMap::new(),
            sampled: FxHashSet::default(),
            unfiled: FxHashSet::default(),
            gil_locks: GilLocks::default(),
            ended: FxHashSet::default(),
            headless: FxHashSet::default(),
            last: FxHashMap::default(),
            last_bytes: 0,
            touched: None,
            opened: Opened::default(),
            jit: JitShared::default(),
            fetch: None,
            groups: Groups::default(),
            native: Vec::new(),
            stack: Vec::new(),
        }
    }

    /// Takes one event in.
    pub fn event(&mut self, event: Event, learn: &mut Learn<'_>) -> Result<()> {
        match event {
            Event::Sample(s) => self.sample(&s, learn)?,
            Event::Code { .. } => self.see_codes(std::slice::from_ref(&event)),
            Event::Mmap {
                pid,
                start,
                end,
                offset,
                path,
            } => {
                let Some(m) = self.members.get_mut(&pid) else {
                    return Ok(());
                };
                let mut new = Vec::new();
                let (host, modules) = (&*self.host, &mut self.modules);
                m.process
                    .map(host, start, end, offset, &path, modules, &mut |id| new.push(id));
                for id in new {
                    self.learn_module(id);
                }
                if self.look_for_python(pid) {
                    self.tell(pid, learn)?;
                }
            }
            Event::Exec { pid, comm } => {
                self.codes.forget(pid);
                self.forget_last();
                self.pythons.remove(&pid);
                self.threads
                    .insert((pid, pid), String::from_utf8_lossy(&comm).into_owned());
                self.exec(pid, learn);
            }
            Event::Fork { pid, parent } => self.fork(pid, parent, learn)?,
            Event::Comm { pid, tid, comm } => {
                self.threads
                    .insert((pid, tid), String::from_utf8_lossy(&comm).into_owned());
            }
            Event::Thread { pid, tid } => {
                self.ended.remove(&tid);
                let name = self.host.thread_name(pid, tid);
                self.threads.entry((pid, tid)).or_insert(name.unwrap_or_default());
            }
            Event::Exit { pid, tid } => self.exit(pid, tid, learn)?,
            Event::Lost(_) => {}
        }
        Ok(())
    }

    fn forget_last(&mut self) {
        self.last.clear();
        self.last_bytes = 0;
    }

    fn sample(&mut self, s: &Sample, learn: &mut Learn<'_>) -> Result<()> {
        if !self.members.contains_key(&s.pid) && self.open(s.pid, learn).is_err() {
            // It has ended: without its maps the stack is a row of numbers. Counted, with the reason.
            self.members.insert(s.pid, Member::new(Process::gone(s.pid)));
        }
        if !s.python.is_empty() && self.members[&s.pid].python.as_ref().is_some_and(|p| p.on_trial) {
            self.try_python(s.pid);
            self.tell(s.pid, learn)?;
        }
        let parts = self.time_parts(s);
        let m = &self.members[&s.pid];
        let last = self.last.entry(s.tid).or_default();
        self.last_bytes -= last.bytes();
        let Last { python, memo, path } = last;
        match &m.python {
            Some(Python {
                interpreter: Some(i), ..
            }) => {
                let memory = Family {
                    host: &*self.host,
                    pid: s.pid,
                    parent: m.parent,
                };
                frames::groups(s, &i.layout, &mut self.codes, &memory, python, &mut self.groups);
            }
            _ => self.groups.clear(),
        }
        let groups = &self.groups.list;
        let loops = (s.walk == PyWalk::Complete).then_some(groups.len());
        self.unwinder.expect(groups.iter().filter_map(|g| g.anchor), loops);
        self.sampled.insert((s.pid, s.tid));
        self.native.clear();
        let native_cut = match &s.regs {
            _ if !self.options.native => None,
            None => Some(Cut::NoRegisters),
            Some(regs) => match &mut self.touched {
                None => {
                    let generation = m.process.generation;
                    let native = &mut self.native;
                    self.unwinder
                        .unwind_next(memo, generation, &m.process, regs, &s.stack, native)
                        .err()
                }
                Some(touched) => {
                    let code = Watched(&m.process, RefCell::default());
                    let cut = self.unwinder.unwind(&code, regs, &s.stack, &mut self.native).err();
                    let plain = self.native.iter().all(|f| f.how.is_exact());
                    for place in code.1.into_inner() {
                        *touched.entry(place).or_default() |= !plain;
                    }
                    cut
                }
            },
        };
        self.jit.leave_out(&self.modules, &mut self.native);
        let layout = m.python.as_ref().and_then(|p| Some(p.interpreter?.layout));
        let greenlet = self.native.last().filter(|f| f.how == How::Begins(Origin::Greenlet));
        if let (Some(f), Some(layout)) = (greenlet, &layout) {
            frames::begin_in(s, layout, python, (f.sp, f.cfa), &mut self.groups);
        }
        let in_greenlet = if self.options.native {
            greenlet.is_some() && m.python.as_ref().is_some_and(|p| !p.runtime.eval.is_empty())
        } else {
            self.unwinder.has_greenlets()
        };
        let python_cut = frames::cut(s, layout.as_ref(), in_greenlet);
        let unfiled = self.native.iter().any(|f| f.place.is_none());
        if unfiled {
            self.unfiled.insert(s.pid);
        }
        let mut untold = false;
        if native_cut.is_some()
            && let (Some(last), Some(m)) = (self.native.last(), self.members.get_mut(&s.pid))
        {
            untold = m.process.find_stack_end(&*self.host, last.sp);
        }
        let m = &self.members[&s.pid];
        let native_cut = native_cut.filter(|_| !begins_process(&mut self.native, m.process.stack_end, &self.modules));
        self.stack.clear();
        if self.options.grouping.processes {
            self.stack.push(RawFrame::Process(s.pid));
        }
        if self.options.grouping.threads {
            self.stack.push(RawFrame::Thread(s.tid));
        }
        let is_eval = |f: &NativeFrame| {
            let p = m.python.as_ref().filter(|p| !p.runtime.eval.is_empty())?;
            Some(
                f.place
                    .is_some_and(|(module, svma)| module == p.module && p.runtime.is_eval(svma)),
            )
        };
        let verdict = if self.options.native {
            let input = merge::Input {
                pid: s.pid,
                native: &self.native,
                native_cut,
                groups: &self.groups,
                python_cut,
                is_eval: &is_eval,
            };
            merge::merge(&input, &mut self.stack)
        } else {
            merge::python_only(&self.groups, python_cut, &mut self.stack)
        };
        self.stack.extend(s.kernel.iter().rev().map(|a| RawFrame::Kernel(*a)));
        let names = |f: &RawFrame| match f {
            RawFrame::Python { code, .. } => self.codes.get(*code).written_bytes(),
            _ => 0,
        };
        let thread = self.stack.len();
        for (state, time) in parts {
            let count = match self.options.weighted {
                None if state.is_some() => continue,
                None => 1,
                Some(_) if time == 0 => continue,
                Some(period) => u32::try_from((time + period / 2) / period.max(1))
                    .unwrap_or(u32::MAX)
                    .max(1),
            };
            self.stack.truncate(thread);
            self.stack.extend(state.map(RawFrame::State));
            let (node, whole) = self.tree.add_next(path, &self.stack, count, &names);
            let verdict = match whole {
                true => verdict,
                false => Verdict::Partial(Cut::TreeFull),
            };
            self.tally.add(verdict);
            self.timeline.push(RawTick {
                time: s.time,
                pid: s.pid,
                tid: s.tid,
                node,
                count,
                time_spent: time,
            });
        }
        self.last_bytes += last.bytes();
        if self.last_bytes > MOST_LAST {
            self.forget_last();
        }
        let lacks = [Cut::Unmerged, Cut::PythonUnknown].map(Verdict::Partial);
        if lacks.contains(&verdict) {
            // Perhaps this thread has begun to run a subinterpreter: its own frames are on another chain. Or it is new,
            // and threads of this interpreter are known from its list alone.
            let m = self.members.get_mut(&s.pid).expect("looked at above");
            if m.python.is_some() && s.time.saturating_sub(m.looked) > LOOK_AGAIN {
                m.looked = s.time;
                untold = true;
            }
        }
        if untold {
            self.tell(s.pid, learn)?;
        }
        if unfiled {
            self.look_at_made_code(s.pid, Some(s.time));
        }
        Ok(())
    }

    /// Forgets the samples and keeps what is known of processes and files: another profile begins.
    pub fn begin_again(&mut self) {
        self.forget_last();
        self.tree = RawTree::default();
        self.timeline = Vec::new();
        self.tally = Tally::default();
        self.sampled.clear();
    }

    /// What became of all samples. `counts` are the source's, taken at `rate`.
    pub fn quality(&self, counts: &Counts, rate: u64) -> Quality {
        let t = &self.tally;
        Quality {
            // Off the CPU nothing is expected: intervals are taken by their lengths.
            asked: match self.options.weighted {
                Some(_) => 0,
                None => (u128::from(counts.cpu_time) * u128::from(rate) / 1_000_000_000) as u64,
            },
            taken: t.taken(),
            exact: t.exact,
            repaired: t.repaired,
            partial: t.partial,
            lost: counts.lost,
            reasons: t
                .reasons
                .iter()
                .map(|(why, n)| (why.reason().to_string(), *n))
                .collect(),
        }
    }

    /// What is known of the recording so far: of the source, whose `counts` these are, and of the samples. `pid` is the
    /// first process; the command and our own CPU time are left for the caller to tell.
    pub fn meta(
        &self,
        source: &dyn Source,
        counts: &Counts,
        rate: u64,
        pid: Pid,
        (began, duration): (SystemTime, Duration),
    ) -> Meta {
        let since = began.duration_since(SystemTime::UNIX_EPOCH);
        Meta {
            version: env!("CARGO_PKG_VERSION").into(),
            rate,
            event: source.event().into(),
            backend: source.backend().into(),
            start: since.map_or(0.0, |d| d.as_secs_f64()),
            duration: duration.as_secs_f64(),
            pid,
            held: counts.held.map(|h| Held {
                median_us: h.median / 1000,
                longest_us: h.longest / 1000,
            }),
            quality: self.quality(counts, rate),
            ..Meta::default()
        }
    }

    /// Opens what naming will read, as long as there are rights to; `pid` is the first process. After it `resolve` opens nothing but debug files
    /// below the root that is held.
    pub fn open_for_names(&mut self, pid: Pid) {
        if self.opened.root.is_none() {
            self.opened.root = self.host.root(pid);
        }
        self.look_at_all_made_code();
        self.opened.open(&*self.host, &self.codes, &self.tree);
    }

    /// Names everything gathered. `meta` comes filled but for the modules and threads; `start` is on the clock of samples.
    pub fn resolve(&mut self, start: u64, meta: Meta) -> Profile {
        self.open_for_names(meta.pid);
        let (unwinder, members) = (&mut self.unwinder, &self.members);
        let gathered = Gathered {
            opened: &self.opened,
            modules: &self.modules,
            codes: &self.codes,
            tree: &self.tree,
            timeline: &self.timeline,
            weighted: self.options.weighted.is_some(),
            threads: &self.threads,
            pythons: &self.pythons,
            function_start: &mut |owner, at| function_start(unwinder, members, owner, at),
            jit: &|pid| jit_places(members, pid),
            fetch: self.fetch.clone(),
        };
        resolve::resolve(gathered, start, meta)
    }
}

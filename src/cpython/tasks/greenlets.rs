//! Greenlets (the package greenlet, 2.0 and later; so those of gevent and eventlet), read from outside while the target runs.
//!
//! A greenlet is two objects that refer to each other: one of Python (`PyGreenlet`, greenlet.h), and one of C++ (`Greenlet`,
//! TGreenlet.hpp, v2.0 to v3.5), which begins with a pointer to its table of virtual functions, so into greenlet's own file.
//! No list has them all. Those on a stack are found by the C++ object's address there; all of a process by a search of its
//! memory for such pointers. Only what refers to itself both ways, and has the type, is taken for a greenlet.

use super::chain::RawAwaitFrame;
use super::greenlet_search::{GreenletSearch, MAX_SEARCHED};
use super::layout::TaskLayout;
use super::objects::{Kind, Objects};
use super::{Gap, OtherTasks};
use crate::cpython::thread_states::PyThreadState;
use crate::process::maps::Mapping;
use crate::process::memory::{Memory, Pages};

/// Maximum number of frames read of all greenlets together.
const MAX_FRAMES: usize = 1 << 19;
/// How often a greenlet is read until it does not change meanwhile.
const ATTEMPTS: u32 = 10;
/// `stack_stop` of a thread's main greenlet (`StackState::make_main`).
const MAIN: u64 = u64::MAX;

/// Offsets in the C++ object.
struct Offsets {
    /// `stack_start` (0: not running and not suspended), `stack_stop` (0: not started), the copy of a part of the stack, and its
    /// length.
    stack: u16,
    /// `_top_frame`: a frame object while it is suspended.
    top_frame: u16,
}

impl Offsets {
    /// After the stack (5 words) comes the context.
    fn of(tasks: &TaskLayout) -> Offsets {
        Offsets {
            stack: tasks.greenlet_stack,
            top_frame: tasks.greenlet_stack + 48,
        }
    }
}

/// What is known of a greenlet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greenlet {
    /// avma of the Python object.
    pub address: u64,
    /// That its program gave it.
    name: Option<String>,
    is_hub: bool,
    is_main: bool,
}

/// A greenlet that has begun and does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuspendedGreenlet {
    /// avma of the Python object, and of that of C++.
    pub address: u64,
    object: u64,
    /// `pthread_self` of the thread that it belongs to.
    pub thread: u64,
    /// Outermost first.
    pub frames: Vec<RawAwaitFrame>,
    position: Position,
}

/// What changes with each switch to or from a greenlet: `stack_start`, `stack_stop`, the copy and its length, `_top_frame`.
type Position = [u64; 5];

impl Greenlet {
    /// Whether it is the one that its thread began with.
    pub fn is_main(&self) -> bool {
        self.is_main
    }

    /// Whether it waits for events on behalf of all others, by its type.
    pub fn is_hub(&self) -> bool {
        self.is_hub
    }

    /// How it is shown; `function` is the one that it runs.
    pub fn label(&self, function: Option<&str>) -> String {
        let at = self.address;
        match (&self.name, function) {
            (Some(name), _) => name.clone(),
            (None, _) if self.is_main => format!("main greenlet at {at:#x}"),
            (None, _) if self.is_hub => format!("Hub at {at:#x}"),
            (None, Some(function)) => format!("{function} at {at:#x}"),
            (None, None) => format!("greenlet at {at:#x}"),
        }
    }
}

/// Whether greenlets begin with this function, which calls the one that was given to them: `Greenlet.run` of gevent
/// where it is not compiled, `GreenThread.main` of eventlet.
pub fn is_greenlet_entry(function: &str, file: &str) -> bool {
    let last = function.rsplit('.').next().unwrap_or(function);
    last == "run" && file.ends_with("gevent/greenlet.py") || last == "main" && file.ends_with("eventlet/greenthread.py")
}

/// Whether this function switches to the greenlets that are ready, or waits for events on behalf of them: greenlets in it await
/// nothing themselves.
pub fn is_greenlet_scheduler(function: &str, file: &str) -> bool {
    let last = function.rsplit('.').next().unwrap_or(function);
    last == "run" && (file.ends_with("gevent/hub.py") || file.ends_with("eventlet/hubs/hub.py"))
        || last == "_begin" && file.ends_with("gevent/threadpool.py")
}

/// Whether a hub waits for events in this function, if it is the innermost one.
pub fn is_hub_wait(function: &str, file: &str) -> bool {
    let of_hub = ["/eventlet/hubs/", "/gevent/_ffi/", "/gevent/libev/", "/gevent/libuv/"];
    let is_run = function.rsplit('.').next() == Some("run") && file.ends_with("gevent/hub.py");
    is_run || of_hub.iter().any(|place| file.contains(place))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GreenletState {
    /// With the name of the function that it will run, where that can be read.
    New(Option<String>),
    Suspended,
    /// In the thread with this `pthread_self`, if it was found.
    Running(Option<u64>),
}

/// A greenlet with its Python frames, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedGreenlet {
    pub greenlet: Greenlet,
    pub state: GreenletState,
    pub frames: Vec<RawAwaitFrame>,
}

/// The memory of a greenlet that does not run: a part of its stack has been copied.
pub(super) struct OwnStack<'a> {
    memory: &'a dyn Memory,
    pub(super) start: u64,
    len: u64,
    copy: u64,
}

impl Memory for OwnStack<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        match avma.checked_sub(self.start) {
            Some(at) if at < self.len => {
                let is_inside = at.checked_add(buf.len() as u64).is_some_and(|end| end <= self.len);
                let from = self.copy.checked_add(at);
                is_inside && from.is_some_and(|from| self.memory.read(from, buf))
            }
            _ => self.memory.read(avma, buf),
        }
    }
}

impl SuspendedGreenlet {
    /// Memory with its stack as it was when it was read.
    pub(super) fn stack<'a>(&self, memory: &'a dyn Memory) -> OwnStack<'a> {
        own_stack(memory, self.position)
    }

    /// Where its stack ends; of a thread's main greenlet that is the highest address.
    pub(super) fn stack_stop(&self) -> u64 {
        self.position[1]
    }
}

fn own_stack(memory: &dyn Memory, [start, _, copy, len, _]: Position) -> OwnStack<'_> {
    OwnStack {
        memory,
        start,
        len: if copy == 0 { 0 } else { len },
        copy,
    }
}

impl OtherTasks {
    /// The greenlet that a stack belongs to. `words`: of the frames that begin it, `stub_end`: where the outermost of those ends.
    /// Returns the word's index, too.
    pub fn greenlet_of_stack(
        &self,
        memory: &dyn Memory,
        words: impl Iterator<Item = u64>,
        stub_end: u64,
    ) -> Option<(usize, Greenlet)> {
        /// It is marked by the address of a local variable of the function that started it (`g_switch`).
        const MAX_DISTANCE: u64 = 4096;
        let objects = self.objects(memory);
        let begins_here = |object: u64| {
            let stop = objects.word(object, Offsets::of(&self.tasks).stack + 8);
            stop.is_some_and(|stop| (stub_end..stub_end.saturating_add(MAX_DISTANCE)).contains(&stop))
        };
        let mut words = words.enumerate();
        words.find_map(|(at, word)| {
            let address = python_object(&objects, word)?;
            begins_here(word).then(|| (at, facts(&objects, word, address)))
        })
    }

    /// All greenlets of a process that have not ended.
    pub fn all_greenlets(
        &self,
        live: &dyn Memory,
        maps: &[Mapping],
        states: &[PyThreadState],
    ) -> (Vec<ListedGreenlet>, Vec<Gap>) {
        let mut search = GreenletSearch::default();
        search.begin(maps.to_vec());
        let mut gaps: Vec<Gap> = self
            .find_greenlets(live, &mut search, MAX_SEARCHED)
            .into_iter()
            .collect();
        let mut listed: Vec<ListedGreenlet> = Vec::new();
        let mut left = MAX_FRAMES;
        for (object, address) in search.found() {
            let (read, is_steady) = self.steady_greenlet(live, (object, address), (maps, states));
            if !is_steady && !gaps.contains(&Gap::Changed) {
                gaps.push(Gap::Changed);
            }
            left = left.saturating_sub(1 + read.as_ref().map_or(0, |read| read.frames.len()));
            listed.extend(read);
            if left == 0 {
                gaps.push(Gap::TooMany);
                break;
            }
        }
        (listed, gaps)
    }

    /// Reads a greenlet, again if it changes meanwhile; whether it did not the last time.
    fn steady_greenlet(
        &self,
        live: &dyn Memory,
        which: (u64, u64),
        where_to: (&[Mapping], &[PyThreadState]),
    ) -> (Option<ListedGreenlet>, bool) {
        let mut read = None;
        for _ in 0..ATTEMPTS {
            let before = self.position(live, which.0);
            // Each attempt sees memory as it is then.
            read = self.listed_greenlet(&Pages::new(live), which, where_to);
            if before == self.position(live, which.0) {
                return (read, true);
            }
        }
        (read, false)
    }

    /// Those of the greenlets found that have begun and do not run. One that runs meanwhile is read again.
    pub fn suspended_greenlets(
        &self,
        live: &dyn Memory,
        search: &GreenletSearch,
        states: &[PyThreadState],
    ) -> Vec<SuspendedGreenlet> {
        let memory = Pages::new(live);
        let mut left = MAX_FRAMES;
        let found = search.found().into_iter();
        let mut read: Vec<SuspendedGreenlet> = found
            .filter_map(|which| self.suspended_greenlet(&memory, which, (search.maps(), states)))
            .take_while(|read| {
                left = left.saturating_sub(1 + read.frames.len());
                left > 0
            })
            .collect();
        let after = Pages::new(live);
        read.retain_mut(|read| {
            let mut is_same = self.position(&after, read.object) == Some(read.position);
            for _ in 0..ATTEMPTS {
                if is_same {
                    break;
                }
                let which = (read.object, read.address);
                let again = self.suspended_greenlet(&Pages::new(live), which, (search.maps(), states));
                let Some(again) = again else { return false };
                is_same = self.position(live, again.object) == Some(again.position);
                *read = again;
            }
            is_same
        });
        read
    }

    fn suspended_greenlet(
        &self,
        memory: &dyn Memory,
        (object, address): (u64, u64),
        where_to: (&[Mapping], &[PyThreadState]),
    ) -> Option<SuspendedGreenlet> {
        let objects = self.objects(memory);
        (python_object(&objects, object)? == address).then_some(())?;
        let position = self.position(memory, object)?;
        let [start, stop, ..] = position;
        let state = self.greenlet_state(&objects, (object, address), (start, stop), where_to)?;
        (state == GreenletState::Suspended).then_some(())?;
        let on_stack = if stop == MAIN { start } else { stop };
        Some(SuspendedGreenlet {
            address,
            object,
            thread: thread_of(on_stack, where_to.0, where_to.1)?,
            frames: self.frames_at(memory, object, position),
            position,
        })
    }

    /// What is known of a suspended greenlet.
    pub fn greenlet(&self, memory: &dyn Memory, which: &SuspendedGreenlet) -> Greenlet {
        facts(&self.objects(memory), which.object, which.address)
    }

    /// Python frames of a suspended greenlet, outermost first.
    fn frames_at(&self, memory: &dyn Memory, object: u64, position: Position) -> Vec<RawAwaitFrame> {
        let memory = own_stack(memory, position);
        let mut frames = self.suspended_frames(&self.objects(&memory), object);
        frames.reverse();
        frames
    }

    fn position(&self, live: &dyn Memory, object: u64) -> Option<Position> {
        let Offsets { stack, top_frame } = Offsets::of(&self.tasks);
        let mut words = [0; 5];
        for (word, at) in words
            .iter_mut()
            .zip([stack, stack + 8, stack + 16, stack + 24, top_frame])
        {
            *word = live.u64(object.checked_add(at.into())?)?;
        }
        Some(words)
    }

    fn listed_greenlet(
        &self,
        memory: &dyn Memory,
        (object, address): (u64, u64),
        (maps, states): (&[Mapping], &[PyThreadState]),
    ) -> Option<ListedGreenlet> {
        let objects = self.objects(memory);
        (python_object(&objects, object)? == address).then_some(())?;
        let position = self.position(memory, object)?;
        let [start, stop, ..] = position;
        let greenlet = facts(&objects, object, address);
        let state = self.greenlet_state(&objects, (object, address), (start, stop), (maps, states))?;
        let frames = match &state {
            GreenletState::New(_) => Vec::new(),
            GreenletState::Running(thread) => {
                let state = thread.and_then(|thread| states.iter().find(|s| s.thread == thread));
                let first = state.and_then(|s| objects.current_frame(s.state));
                let mut frames = first.map_or(Vec::new(), |first| objects.frames_from(first, 0).0);
                frames.reverse();
                frames
            }
            GreenletState::Suspended => self.frames_at(memory, object, position),
        };
        Some(ListedGreenlet {
            greenlet,
            state,
            frames,
        })
    }

    /// `None`: it has ended, or is not as a greenlet is.
    fn greenlet_state(
        &self,
        objects: &Objects<'_>,
        (object, address): (u64, u64),
        (start, stop): (u64, u64),
        (maps, states): (&[Mapping], &[PyThreadState]),
    ) -> Option<GreenletState> {
        if stop == 0 {
            let run = objects.attribute(address, "_run");
            return Some(GreenletState::New(run.and_then(|run| objects.function_name(run))));
        }
        (start != 0).then_some(())?;
        match objects.pointer(object, Offsets::of(&self.tasks).top_frame) {
            Some(frame) => (objects.kind(frame) == Some(Kind::Frame)).then_some(GreenletState::Suspended),
            // A main greenlet that runs has no mark on its stack: its thread shows it.
            None if stop == MAIN => None,
            None => Some(GreenletState::Running(thread_of(stop, maps, states))),
        }
    }

    /// Python frames of a suspended greenlet, innermost first.
    fn suspended_frames(&self, objects: &Objects<'_>, object: u64) -> Vec<RawAwaitFrame> {
        let top = objects.pointer(object, Offsets::of(&self.tasks).top_frame);
        let top = top.filter(|top| objects.kind(*top) == Some(Kind::Frame));
        let first = match self.tasks.frame_object_frame {
            Some(at) => top.and_then(|top| objects.pointer(top, at)),
            None => top,
        };
        first.map_or(Vec::new(), |first| objects.frames_from(first, 0).0)
    }
}

/// avma of the Python object that belongs to this object of C++. `None`: it is none.
pub(super) fn python_object(objects: &Objects<'_>, object: u64) -> Option<u64> {
    (object.is_multiple_of(8) && object > 4096).then_some(())?;
    let address = objects.pointer(object, 8).filter(|at| at.is_multiple_of(8))?;
    // After the header: list of weak references, dictionary, the C++ object.
    (objects.word(address, objects.tasks.head + 16) == Some(object)).then_some(())?;
    (objects.kind(address) == Some(Kind::Greenlet)).then_some(address)
}

fn facts(objects: &Objects<'_>, object: u64, address: u64) -> Greenlet {
    let kind = objects.type_of(address);
    let name = objects.attribute(address, "name");
    Greenlet {
        address,
        name: name
            .filter(|name| objects.kind(*name) == Some(Kind::Str))
            .and_then(|name| objects.text(name)),
        is_hub: kind.is_some_and(|kind| kind.name.rsplit('.').next() == Some("Hub")),
        is_main: objects.word(object, Offsets::of(objects.tasks).stack + 8) == Some(MAIN),
    }
}

/// `pthread_self` of the thread whose stack has this address: glibc puts the thread's own structure above its stack, in the same
/// mapping; the main thread's is elsewhere.
fn thread_of(at: u64, maps: &[Mapping], states: &[PyThreadState]) -> Option<u64> {
    let holding = |at: u64| maps.iter().find(|m| (m.start..m.end).contains(&at));
    let stack = holding(at)?;
    let is_in = |s: &&PyThreadState| (stack.start..stack.end).contains(&s.thread);
    if let Some(state) = states.iter().find(is_in) {
        return Some(state.thread);
    }
    (stack.path == b"[stack]").then_some(())?;
    // Interpreters list the newest thread first.
    states.last().map(|s| s.thread)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each byte is the low byte of its address.
    struct Low;

    impl Memory for Low {
        fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
            buf.iter_mut().zip(avma..).for_each(|(byte, at)| *byte = at as u8);
            true
        }
    }

    #[test]
    fn the_copied_part_of_a_stack_is_read_from_the_copy() {
        let own = OwnStack {
            memory: &Low,
            start: 0x1000,
            len: 0x20,
            copy: 0x5080,
        };
        let byte = |at: u64| {
            let mut b = [0; 8];
            own.read(at, &mut b).then_some(b[0])
        };
        assert_eq!(byte(0x1000), Some(0x80));
        assert_eq!(byte(0x1018), Some(0x98));
        assert_eq!(byte(0x1019), None, "one byte is not in it");
        assert_eq!(byte(0x1020), Some(0x20), "the stack itself");
        assert_eq!(byte(0xff8), Some(0xf8));
    }

    #[test]
    fn greenlets_are_named() {
        let greenlet = Greenlet {
            address: 0x10,
            name: None,
            is_hub: false,
            is_main: false,
        };
        assert_eq!(greenlet.label(Some("handle")), "handle at 0x10");
        assert_eq!(greenlet.label(None), "greenlet at 0x10");
        let hub = Greenlet {
            is_hub: true,
            ..greenlet.clone()
        };
        assert_eq!(hub.label(Some("Hub.run")), "Hub at 0x10");
        let named = Greenlet {
            name: Some("fetch".into()),
            ..hub
        };
        assert_eq!(named.label(Some("handle")), "fetch");
        assert!(is_greenlet_entry("GreenThread.main", "/lib/eventlet/greenthread.py"));
        assert!(!is_greenlet_entry("main", "/srv/app.py"));
        assert!(is_hub_wait("Hub.run", "/lib/gevent/hub.py") && !is_hub_wait("sleep", "/lib/gevent/hub.py"));
        assert!(is_hub_wait("wait", "/lib/eventlet/hubs/poll.py"));
    }
}

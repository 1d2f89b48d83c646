//! States of threads that are not running, and the time that samples represent.

use super::{Pid, Tid};

/// State of a thread that is not on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ThreadState {
    /// Ready to run without a CPU: preempted, or woken and not yet switched in.
    Runnable,
    /// Ready to run, but its control group, or one around it, has used up its CPU time.
    Throttled,
    Suspended(Suspension),
    Waiting(WaitKind),
    /// For a socket whose other end has a name.
    WaitingForSocket(WaitKind, SocketId),
    /// For a futex in the data of a file.
    WaitingForFutex(FutexId),
}

/// Why a thread does not run although it waits for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Suspension {
    /// By a signal such as SIGSTOP, or by a tracer.
    Stopped,
    /// With its control group.
    Frozen,
}

/// The number of a futex in the data of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FutexId(pub u16);

/// The number of the name of a socket's other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SocketId(pub u16);

/// What a blocked thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WaitKind {
    /// The global lock of the Python interpreter.
    Gil,
    /// A mutex, semaphore or lock of any library; distinguished from [`WaitKind::Futex`] by the waiting functions.
    Lock,
    /// A condition variable; distinguished in the same way.
    Condition,
    /// A futex of another or unknown use.
    Futex,
    Sleep,
    Read(Descriptor),
    Write(Descriptor),
    Connect,
    Accept,
    /// epoll, poll, select.
    Poll,
    /// The exit of a child process.
    Child,
    /// Data of a file, to be written or read (fsync and the like).
    Disk,
    /// In no system call: a page fault that needs data from a file or from swap.
    PageFault,
    /// A signal: pause, sigwait and the like.
    Signal,
    /// Another system call, by its number.
    Other(u16),
}

/// What a suspended asyncio task awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AwaitKind {
    /// Its event loop: it is ready to run.
    Turn,
    Sleep,
    Lock,
    Semaphore,
    Condition,
    Event,
    Queue,
    Stream,
    Socket,
    Task,
    /// Several tasks, by `asyncio.gather`.
    Gather,
    /// A child process.
    Child,
    /// A function that runs in a thread.
    Thread,
    /// A future of another use.
    Future,
    Other,
}

impl AwaitKind {
    /// Its name in the tree: `[awaiting sleep]`.
    pub fn label(self) -> &'static str {
        match self {
            AwaitKind::Turn => "[awaiting loop]",
            AwaitKind::Sleep => "[awaiting sleep]",
            AwaitKind::Lock => "[awaiting lock]",
            AwaitKind::Semaphore => "[awaiting semaphore]",
            AwaitKind::Condition => "[awaiting condition]",
            AwaitKind::Event => "[awaiting event]",
            AwaitKind::Queue => "[awaiting queue]",
            AwaitKind::Stream => "[awaiting stream]",
            AwaitKind::Socket => "[awaiting socket]",
            AwaitKind::Task => "[awaiting task]",
            AwaitKind::Gather => "[awaiting gather]",
            AwaitKind::Child => "[awaiting child]",
            AwaitKind::Thread => "[awaiting thread]",
            AwaitKind::Future => "[awaiting future]",
            AwaitKind::Other => "[awaiting other]",
        }
    }
}

impl ThreadState {
    /// Is it not ready to run?
    pub fn waits(self) -> bool {
        !matches!(self, ThreadState::Runnable | ThreadState::Throttled)
    }

    /// Its name in the tree: `[runnable]`, `[stopped]`, `[waiting: read pipe]`,
    /// `[waiting: read socket 127.0.0.1:5432]`; `sockets` has the names of sockets by their number. Futexes have names
    /// by the functions that wait.
    pub fn label(self, sockets: &[String]) -> String {
        match self {
            ThreadState::Runnable => "[runnable]".into(),
            ThreadState::Throttled => "[throttled]".into(),
            ThreadState::Suspended(Suspension::Stopped) => "[stopped]".into(),
            ThreadState::Suspended(Suspension::Frozen) => "[frozen]".into(),
            ThreadState::Waiting(kind) => format!("[waiting: {}]", kind.label()),
            ThreadState::WaitingForSocket(kind, id) => match sockets.get(usize::from(id.0)) {
                Some(name) => format!("[waiting: {} {name}]", kind.label()),
                None => format!("[waiting: {}]", kind.label()),
            },
            ThreadState::WaitingForFutex(_) => format!("[waiting: {}]", WaitKind::Futex.label()),
        }
    }
}

impl WaitKind {
    /// `gil`, `read pipe`, `system call 16`
    pub fn label(self) -> String {
        let with = |call: &str, descriptor: Descriptor| match descriptor {
            Descriptor::File => format!("{call} file"),
            Descriptor::Pipe => format!("{call} pipe"),
            Descriptor::Socket => format!("{call} socket"),
            Descriptor::Terminal => format!("{call} terminal"),
            Descriptor::Unknown => call.into(),
        };
        match self {
            WaitKind::Gil => "gil".into(),
            WaitKind::Lock => "lock".into(),
            WaitKind::Condition => "condition".into(),
            WaitKind::Futex => "futex".into(),
            WaitKind::Sleep => "sleep".into(),
            WaitKind::Read(descriptor) => with("read", descriptor),
            WaitKind::Write(descriptor) => with("write", descriptor),
            WaitKind::Connect => "connect".into(),
            WaitKind::Accept => "accept".into(),
            WaitKind::Poll => "poll".into(),
            WaitKind::Child => "child".into(),
            WaitKind::Disk => "disk".into(),
            WaitKind::PageFault => "page fault".into(),
            WaitKind::Signal => "signal".into(),
            WaitKind::Other(number) => match syscalls::Sysno::new(number.into()) {
                Some(call) => call.name().into(),
                None => format!("system call {number}"),
            },
        }
    }
}

/// What a file descriptor refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Descriptor {
    File,
    Pipe,
    Socket,
    Terminal,
    Unknown,
}

/// The only descriptor of a `poll` or `select`, as it was given to the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polled {
    /// Its number in the process.
    pub descriptor: u32,
    /// What is waited for, as in `struct pollfd` (include/uapi/asm-generic/poll.h, Linux 6.18).
    pub events: u16,
}

impl Polled {
    pub(crate) const IN: u16 = 0x1;
    pub(crate) const PRIORITY: u16 = 0x2;
    pub(crate) const OUT: u16 = 0x4;
    const ERROR: u16 = 0x8;
    /// Of the bands of System V, which Linux treats as the first ones.
    const READ_NORMAL: u16 = 0x40;
    const WRITE_NORMAL: u16 = 0x100;

    /// From the first word of a `struct pollfd`; the events found last, in its highest bits, do not count. `None`: it waits for
    /// nothing, or has a negative descriptor, which the kernel ignores.
    pub fn from_word(word: u64) -> Option<Polled> {
        let (descriptor, events) = (word as u32, (word >> 32) as u16);
        (events != 0 && descriptor <= i32::MAX as u32).then_some(Polled { descriptor, events })
    }

    /// The wait for such a descriptor: a read, a write, or, of a socket, that it is connected. `None`: it is more than one
    /// of them, or another one.
    ///
    /// Who connects also waits for the error: so do CPython (`internal_connect`, Modules/socketmodule.c, 3.15) and libpq
    /// (`pqConnectDBComplete`, fe-connect.c, PostgreSQL 17), which both wait for a write in other ways.
    pub fn wait_kind(self, descriptor: Descriptor) -> Option<WaitKind> {
        let waits_for = |events| self.events & events != 0;
        let can_be_socket = matches!(descriptor, Descriptor::Socket | Descriptor::Unknown);
        match (
            waits_for(Polled::IN | Polled::READ_NORMAL),
            waits_for(Polled::OUT | Polled::WRITE_NORMAL),
        ) {
            (true, false) => Some(WaitKind::Read(descriptor)),
            (false, true) if waits_for(Polled::ERROR) && can_be_socket => Some(WaitKind::Connect),
            (false, true) => Some(WaitKind::Write(descriptor)),
            _ => None,
        }
    }
}

/// What an interrupt that woke a thread was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InterruptKind {
    Timer,
    Disk,
    Network,
    Other,
}

impl InterruptKind {
    /// `timer interrupt`
    pub fn label(self) -> &'static str {
        match self {
            InterruptKind::Timer => "timer interrupt",
            InterruptKind::Disk => "disk interrupt",
            InterruptKind::Network => "network interrupt",
            InterruptKind::Other => "interrupt",
        }
    }
}

/// The time of a thread that a sample represents, ns. All 0 if only CPU time is sampled: then it is one period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeSpent {
    /// Of events that are counted, not a time: how many of them the sample stands for.
    pub cpu: u64,
    /// Preempted or woken, without a CPU.
    pub runnable: u64,
    /// The same, while its control group was not permitted to run; no part of `runnable`.
    pub throttled: u64,
    pub blocked: u64,
    /// Lengths of the intervals for which the sample was taken, ns; 0: not known. A sample of many short intervals represents
    /// more time than its own interval took.
    pub runnable_length: u64,
    pub throttled_length: u64,
    pub blocked_length: u64,
}

/// A thread that held the interpreter lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    Thread(Tid),
    /// avma of its Python thread state.
    State(u64),
}

/// How a blocked interval ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WakeUp {
    /// When the thread was woken, CLOCK_MONOTONIC, ns; 0: not known.
    pub time: u64,
    /// The thread that was running when it was woken, and its process.
    pub waker: Option<(Pid, Tid)>,
    /// avma of the Python thread state that held the interpreter lock until then, where the wait was not ended by a
    /// thread; 0: not known.
    pub holder: u64,
    /// Of a wait for the interpreter lock, the threads that held it, the last one first, and for how long, ns. Of a long wait the
    /// first holders may be missing.
    pub holders: Vec<(Holder, u64)>,
    /// The stack is that of the waker of this thread, and represents no time. The sample of the woken thread follows.
    pub wakes: Option<Tid>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_polled_says_what_is_waited_for() {
        use Descriptor::*;
        for (events, descriptor, expected) in [
            (0x1, Socket, Some("read socket")),
            (0x1, Pipe, Some("read pipe")),
            (0xc3, Socket, Some("read socket")), // curl
            (0x9, Socket, Some("read socket")),  // libpq
            (0x4, Socket, Some("write socket")),
            (0x4, File, Some("write file")),
            (0xc, Socket, Some("connect")),
            (0xc, Unknown, Some("connect")), // closed since
            (0xc, Pipe, Some("write pipe")),
            (0x5, Socket, None),
            (0x2, Socket, None),
        ] {
            let polled = Polled::from_word(u64::from(events as u16) << 32 | 3).expect("it waits for something");
            let kind = polled.wait_kind(descriptor).map(WaitKind::label);
            assert_eq!(kind.as_deref(), expected, "{events:x} {descriptor:?}");
        }
        assert_eq!(Polled::from_word(3), None);
        assert_eq!(Polled::from_word(0x1_ffff_ffff), None);
    }
}

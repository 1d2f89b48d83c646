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

//! What threads do while they do not run, and the time that samples represent.

/// What a thread does while it is not on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ThreadState {
    /// It wants a CPU and has none: preempted, or woken and not yet switched in.
    Runnable,
    Waiting(WaitKind),
}

/// What a blocked thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WaitKind {
    /// The global lock of the Python interpreter.
    Gil,
    /// A mutex, semaphore or lock of any library; told from [`WaitKind::Futex`] by the functions that wait.
    Lock,
    /// A condition variable; told in the same way.
    Condition,
    /// A futex of another use, or one that is not told apart.
    Futex,
    Sleep,
    Read(Descriptor),
    Write(Descriptor),
    Connect,
    Accept,
    /// epoll, poll, select.
    Poll,
    /// The end of a child process.
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

impl ThreadState {
    /// As it stands in the tree: `[runnable]`, `[waiting: read pipe]`.
    pub fn label(self) -> String {
        match self {
            ThreadState::Runnable => "[runnable]".into(),
            ThreadState::Waiting(kind) => format!("[waiting: {}]", kind.label()),
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

/// The time of a thread that a sample represents, ns. All 0 where only CPU time is sampled: then it is one period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeSpent {
    pub cpu: u64,
    /// Preempted or woken, without a CPU.
    pub runnable: u64,
    pub blocked: u64,
}

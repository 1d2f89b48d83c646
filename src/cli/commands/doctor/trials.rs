//! Trials of eBPF: what a recording would load and open.

use crate::capture::ebpf::EbpfBackend;
use crate::capture::ebpf::switch_in::SwitchInHook;
use crate::capture::{Backend, EventKind, HostFilter, Mode, OffCpuOptions, SamplingOptions};
use crate::error::Result;

/// What a trial of eBPF found.
pub(super) struct EbpfTrial {
    /// What makes samples due.
    pub event: String,
    /// Why the program for older kernels is used, if it is.
    pub why_older_program: Option<String>,
}

/// What trials of both modes found.
pub(super) struct EbpfTrials {
    pub cpu: Result<EbpfTrial>,
    /// What takes stacks of threads that were off the CPU, and why nothing better does.
    pub off_cpu: Result<String>,
    /// Whether changes of resident memory can be sampled.
    pub rss: Result<()>,
    /// Whether allocations can be read that processes publish.
    pub alloc: Result<()>,
}

impl EbpfTrials {
    /// Tries the larger set of programs first: if the kernel accepts it with task works, the other is a part of it and
    /// need not be verified again.
    pub fn run() -> EbpfTrials {
        let wall = open(Mode::Wall, None).map(|backend| {
            let (mut words, mut is_same) = (Vec::new(), true);
            if let Some((hook, missing)) = backend.off_cpu_hook() {
                words.push(hook.to_string());
                words.extend_from_slice(missing);
                is_same = matches!(hook, SwitchInHook::TaskWork(_));
            }
            (words.join("; "), is_same.then(|| EbpfTrial::of(&backend)))
        });
        let (off_cpu, cpu) = match wall {
            Ok((text, cpu)) => (Ok(text), cpu),
            Err(e) => (Err(e), None),
        };
        EbpfTrials {
            cpu: cpu.map_or_else(|| open(Mode::Cpu, None).map(|backend| EbpfTrial::of(&backend)), Ok),
            off_cpu,
            rss: open(Mode::Rss, None).map(drop),
            alloc: open(Mode::Alloc, None).map(drop),
        }
    }
}

impl EbpfTrial {
    fn of(backend: &EbpfBackend) -> EbpfTrial {
        EbpfTrial {
            event: backend.name(),
            why_older_program: backend.why_older_program(),
        }
    }
}

/// Loads the program and attaches it as a recording of all processes would.
pub(super) fn try_host() -> Result<EbpfTrial> {
    open(Mode::Cpu, Some(HostFilter::default())).map(|backend| EbpfTrial::of(&backend))
}

/// Loads the program and opens the events as a recording would.
fn open(mode: Mode, host: Option<HostFilter>) -> Result<EbpfBackend> {
    EbpfBackend::new(&SamplingOptions {
        rate: 99,
        event: EventKind::Auto,
        kernel: false,
        children: false,
        mode,
        off_cpu: OffCpuOptions::default(),
        interval: 512 << 10,
        max_overhead: 0.01,
        workers: false,
        spans: false,
        host,
    })
}

//! Chooses and opens the backend.

use super::args::BackendChoice;
use crate::capture::{Backend, Mode, SamplingOptions, ebpf::EbpfBackend, ptrace::PtraceBackend};
use crate::cli::{print_line, print_status};
use crate::cpython;
use crate::error::{Error, ErrorKind, Result};
use crate::privileges::checks;
use crate::privileges::checks::SystemFacts;
use crate::sys;

/// Refuses sampling rates above the kernel's limit.
///
/// # Errors
/// `Usage`.
pub fn check_rate(rate: u64) -> Result<()> {
    const LIMIT: &str = "/proc/sys/kernel/perf_event_max_sample_rate";
    let limit = sys::procfs::read_text(LIMIT)
        .ok()
        .and_then(|t| t.trim().parse::<u64>().ok())
        .unwrap_or(u64::MAX);
    if rate <= limit {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Usage,
        format!("{rate} Hz is above this kernel's maximum sampling rate"),
    )
    .why(format!("kernel.perf_event_max_sample_rate is {limit}"))
    .hint(format!("-r {limit} or less; 99 is the default")))
}

/// Opens the backend of `choice`. With `auto` that is eBPF, or ptrace where eBPF is not available.
///
/// # Errors
/// Those of the backend; `Unsupported` if it does not have the mode.
pub fn open_backend(choice: BackendChoice, options: &SamplingOptions) -> Result<Box<dyn Backend>> {
    let ptrace = || PtraceBackend::new(options, cpython::frame_walk::walk);
    let backend = match choice {
        BackendChoice::Ptrace => ptrace()?,
        BackendChoice::Ebpf => return open_ebpf(options),
        BackendChoice::Auto if options.mode.is_of_memory() => return open_ebpf(options),
        BackendChoice::Auto => match open_ebpf(options) {
            Ok(backend) => return Ok(backend),
            Err(e) => {
                // If ptrace fails too, report why the better backend is not available.
                let backend = ptrace().map_err(|_| e.clone())?;
                print_line(&format!(
                    "nativeprof: {}; falling back to ptrace (stops one thread at a time, typically for 45 to 100 µs per sample)",
                    ebpf_unavailable_reason(&e)
                ));
                backend
            }
        },
    };
    if options.kernel {
        print_line("nativeprof: kernel frames are not available with ptrace");
    }
    if options.mode != Mode::Cpu {
        print_line("nativeprof: with ptrace, the length of a wait and what ends it are not recorded");
    }
    Ok(Box::new(backend))
}

/// Opens the eBPF backend, and says why kernel functions will have no names.
fn open_ebpf(options: &SamplingOptions) -> Result<Box<dyn Backend>> {
    let backend = EbpfBackend::new(options)?;
    let hidden = options
        .kernel
        .then(|| checks::kernel_names(&SystemFacts::read()))
        .flatten();
    if let Some(missing) = hidden {
        print_status(&format!(
            "kernel functions will have no names: {}; try: {}",
            missing.reason, missing.fix
        ));
    }
    Ok(Box::new(backend))
}

/// Why eBPF is not available, short enough for half a line.
fn ebpf_unavailable_reason(e: &Error) -> String {
    let why = e.why.lines().next().unwrap_or(&e.what);
    match e.kind {
        ErrorKind::NotPermitted => format!("eBPF is not permitted ({why})"),
        _ => format!("eBPF is not available ({why})"),
    }
}

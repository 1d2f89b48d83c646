//! The two BPF objects, and which of them this kernel loads.
//!
//! Both are compiled from sample.bpf.c and give the same records. What a kernel can do is tried, not concluded from its
//! version: distributions add features to older ones.

use std::path::Path;

use aya::maps::{Map, MapType};
use aya::programs::{PerfEvent, ProgramType, RawTracePoint};
use aya::sys::{BpfHelper, is_helper_supported, is_map_supported};
use aya::{Ebpf, EbpfLoader};

use super::errors::bpf_error;
use crate::error::{Error, ErrorKind, Result};
use crate::privileges::facts::KERNEL_TYPES;

pub const LOAD: &str = "cannot load the BPF program";
/// Leaves what a map has already as it is: `BPF_NOEXIST` (include/uapi/linux/bpf.h).
pub const NO_EXIST: u64 = 1;
/// Bytes of the sample ring: some 20 ms of the deepest stacks on two CPUs, minutes of ordinary ones.
const RING_BYTES: u32 = 32 << 20;
/// The same for whole hosts, which are sampled at 20 Hz and less.
const HOST_RING_BYTES: u32 = 8 << 20;
/// Set to `5.8`, it makes the other object the only choice: to test it on a kernel that loads both.
pub const FORCED_BY: &str = "NATIVEPROF_BPF_OBJECT";

/// The same program for different kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// With what the kernel needs for each feature.
    Current,
    /// For Linux 5.8 and later, without off-CPU time.
    Linux5_8,
}

/// Sizes of maps that are known at run time.
#[derive(Clone, Copy, Debug)]
pub struct MapSizes {
    /// Scratch areas.
    pub slots: u32,
    /// Threads accounted for off the CPU.
    pub threads: u32,
    /// Workers whose dispatchers are known, and parts of dispatchers' stacks. 0: dispatchers are not searched for, and
    /// the verifier leaves out the code that does.
    pub workers: u32,
    /// Whether active spans are read; if not, the verifier leaves out the code that does.
    pub spans: bool,
    /// Address spaces whose resident memory is observed; 0: none.
    pub spaces: u32,
    /// Kinds of rules by which processes are sampled that are not known, as `host_rules` of the program.
    pub host_rules: u32,
}

#[cfg(target_arch = "x86_64")]
const CURRENT: &[u8] = include_bytes!("sample.bpf.o");
#[cfg(target_arch = "x86_64")]
const LINUX_5_8: &[u8] = include_bytes!("sample-5.8.bpf.o");
#[cfg(target_arch = "aarch64")]
const CURRENT: &[u8] = include_bytes!("sample-aarch64.bpf.o");
#[cfg(target_arch = "aarch64")]
const LINUX_5_8: &[u8] = include_bytes!("sample-5.8-aarch64.bpf.o");

impl Variant {
    /// The object file.
    pub fn object(self) -> &'static [u8] {
        match self {
            Variant::Current => CURRENT,
            Variant::Linux5_8 => LINUX_5_8,
        }
    }

    /// Those to try, the better one first.
    ///
    /// # Errors
    /// `Usage`: [`FORCED_BY`] has another value.
    pub fn candidates() -> Result<&'static [Variant]> {
        match std::env::var_os(FORCED_BY) {
            None => Ok(&[Variant::Current, Variant::Linux5_8]),
            Some(value) if value == "5.8" => Ok(&[Variant::Linux5_8]),
            Some(value) => Err(Error::new(
                ErrorKind::Usage,
                format!("invalid value {FORCED_BY}={}", value.to_string_lossy()),
            )
            .why("the only valid value is 5.8")
            .hint(format!("{FORCED_BY}=5.8, or unset it"))),
        }
    }
}

/// Maps and programs that the kernel accepted.
pub struct LoadedObject {
    pub bpf: Ebpf,
    /// Why [`Variant::Current`] was refused, if this is the other one.
    pub refusal: Option<Error>,
}

/// Makes the maps and loads the programs that every recording needs: those of the first variant that this kernel accepts.
///
/// # Errors
/// Why the last variant, which demands the least, was refused.
pub fn load_first(variants: &[Variant], sizes: MapSizes, children: bool) -> Result<LoadedObject> {
    let mut refusal = None;
    for variant in variants {
        match load(variant.object(), sizes, children) {
            Ok(bpf) if *variant == Variant::Current => return Ok(LoadedObject { bpf, refusal: None }),
            Ok(bpf) => {
                let refusal = refusal.or_else(|| Some(Error::new(ErrorKind::Usage, format!("{FORCED_BY} is set"))));
                return Ok(LoadedObject { bpf, refusal });
            }
            Err(e) => refusal = Some(e),
        }
    }
    let refusal = refusal.unwrap_or_else(|| Error::new(ErrorKind::Data, LOAD));
    Err(missing_feature().unwrap_or(refusal))
}

/// Loads one object; `children`: also the program for forks.
///
/// # Errors
/// The kernel refuses it.
pub fn load(object: &[u8], sizes: MapSizes, children: bool) -> Result<Ebpf> {
    let want_workers = u32::from(sizes.workers > 0);
    let want_spans = u32::from(sizes.spans);
    let ring_bytes = if sizes.host_rules == 0 {
        RING_BYTES
    } else {
        HOST_RING_BYTES
    };
    let mut bpf = EbpfLoader::new()
        .override_global("want_workers", &want_workers, true)
        .override_global("want_spans", &want_spans, true)
        .override_global("host_rules", &sizes.host_rules, true)
        .override_global("kernel_types", &u32::from(Path::new(KERNEL_TYPES).exists()), true)
        .map_max_entries("SCRATCH", sizes.slots)
        .map_max_entries("CACHE", sizes.slots)
        .map_max_entries("THREADS", sizes.threads)
        .map_max_entries("WORKERS", sizes.workers.max(1))
        .map_max_entries("PYTHON_STACKS", sizes.workers.max(1))
        .map_max_entries("SPACES", sizes.spaces.max(1))
        .map_max_entries("SPACE_PARTS", sizes.spaces.max(1))
        .map_max_entries("SAMPLES", ring_bytes)
        .load(object)
        .map_err(|e| bpf_error(LOAD, e))?;
    for name in ["sample", "calibrate"] {
        let program: &mut PerfEvent = program(&mut bpf, name)?;
        program.load().map_err(|e| bpf_error(LOAD, e))?;
    }
    let executed: &mut RawTracePoint = program(&mut bpf, "executed")?;
    executed.load().map_err(|e| bpf_error(LOAD, e))?;
    if children {
        let forked: &mut RawTracePoint = program(&mut bpf, "forked")?;
        forked.load().map_err(|e| bpf_error(LOAD, e))?;
    }
    Ok(bpf)
}

/// A program of the object.
///
/// # Errors
/// `Data`: it is not there, or of another type.
pub fn program<'a, T>(bpf: &'a mut Ebpf, name: &str) -> Result<&'a mut T>
where
    &'a mut aya::programs::Program: TryInto<&'a mut T>,
{
    bpf.program_mut(name)
        .and_then(|p| p.try_into().ok())
        .ok_or_else(|| Error::new(ErrorKind::Data, format!("the BPF object has no program {name}")))
}

/// Takes a map out of the object.
///
/// # Errors
/// `Data`: it is not there.
pub fn take_map(bpf: &mut Ebpf, name: &str) -> Result<Map> {
    bpf.take_map(name)
        .ok_or_else(|| Error::new(ErrorKind::Data, format!("the BPF object has no map {name}")))
}

/// The feature that both objects need and this kernel does not have.
fn missing_feature() -> Option<Error> {
    let ring = is_map_supported(MapType::RingBuf).unwrap_or(true);
    (!ring).then(|| {
        Error::new(ErrorKind::Unsupported, LOAD)
            .why("this kernel has no BPF ring buffers (Linux 5.8)")
            .hint("use --backend ptrace, or Linux 5.8 or newer")
    })
}

/// The features that this kernel does not have for [`Variant::Current`], with the versions that brought them; `refusal` says it
/// if that is not known.
pub fn why_not_current(refusal: &Error) -> String {
    let has = |helper| is_helper_supported(ProgramType::PerfEvent, helper).unwrap_or(true);
    let missing: Vec<&str> = [
        (BpfHelper::BPF_FUNC_loop, "bpf_loop (5.17)"),
        (BpfHelper::BPF_FUNC_ringbuf_reserve_dynptr, "dynptrs (5.19)"),
    ]
    .into_iter()
    .filter_map(|(helper, name)| (!has(helper)).then_some(name))
    .collect();
    match missing.as_slice() {
        [] if refusal.why.is_empty() => refusal.what.clone(),
        [] => format!("the one for newer kernels is refused: {}", refusal.why),
        missing => format!("this kernel has no {}", missing.join(" and no ")),
    }
}

//! The sampler of `tests/stress_allocations.c`: it has the C program's functions, and the program starts and removes it.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use nativeprof_hooks::{
    Allocation, BlockSampler, Cache, Handler, HookSet, Installed, Refusal, SampledBlock, Sampling, Slot, install,
    sample, set_mean, slots,
};

/// Functions of the C program; `on_block` gives `u32::MAX` where it does not want the end of a block.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Callbacks {
    on_block: extern "C" fn(usize, c_int) -> u32,
    on_end: extern "C" fn(u32),
    on_resize: extern "C" fn(u32, i64),
    on_overflow: extern "C" fn(u32),
}

impl BlockSampler for Callbacks {
    fn on_block(&self, block: SampledBlock) -> Option<u32> {
        let number = (self.on_block)(block.size, c_int::from(block.is_mapping));
        (number != u32::MAX).then_some(number)
    }

    fn on_end(&self, number: u32) {
        (self.on_end)(number);
    }

    fn on_resize(&self, number: u32, change: i64) {
        (self.on_resize)(number, change);
    }

    fn on_overflow(&self, number: u32) {
        (self.on_overflow)(number);
    }
}

/// A handler that is installed together with the sampler, and is not to be called after it was removed.
struct ExtraHandler(AtomicBool);

impl Handler for ExtraHandler {
    fn on_allocation(&self, _: &mut Cache, _: &Allocation) {
        if !self.0.load(Ordering::SeqCst) {
            std::process::abort();
        }
    }
}

/// A sampler that is in place, perhaps with a handler.
pub struct Recording {
    sampling: Sampling,
    extra: Option<(Arc<ExtraHandler>, Installed)>,
}

fn start(callbacks: Callbacks, mean: u64, with_handler: bool) -> Result<Recording, Refusal> {
    let native = HookSet {
        native: true,
        waits: true,
        ..HookSet::default()
    };
    let extra = with_handler.then(|| {
        let handler = Arc::new(ExtraHandler(AtomicBool::new(true)));
        install(handler.clone(), native).map(|installed| (handler, installed))
    });
    Ok(Recording {
        extra: extra.transpose()?,
        sampling: sample(Arc::new(callbacks), mean, false)?,
    })
}

/// Starts a recording; null if it is refused.
#[unsafe(no_mangle)]
pub extern "C" fn stress_start(callbacks: &Callbacks, mean: u64, with_handler: c_int) -> Option<Box<Recording>> {
    let recording = start(*callbacks, mean, with_handler != 0);
    recording
        .inspect_err(|refusal| drop(writeln!(std::io::stderr(), "stress: {refusal}")))
        .ok()
        .map(Box::new)
}

/// Changes the mean distance of samples.
#[unsafe(no_mangle)]
pub extern "C" fn stress_set_mean(mean: u64) {
    set_mean(mean);
}

/// Removes what was started. 0: nothing of it is running any more.
#[unsafe(no_mangle)]
pub extern "C" fn stress_stop(mut recording: Box<Recording>) -> c_int {
    let mut is_quiet = recording.sampling.remove();
    if let Some((handler, installed)) = &mut recording.extra {
        is_quiet &= installed.remove();
        handler.0.store(false, Ordering::SeqCst);
    }
    c_int::from(!is_quiet)
}

static BEFORE: OnceLock<Vec<Slot>> = OnceLock::new();

/// Remembers what the address slots hold.
#[unsafe(no_mangle)]
pub extern "C" fn stress_remember_slots() {
    BEFORE.get_or_init(slots);
}

/// The module that an address belongs to.
fn module_of(address: *const c_void) -> *mut c_void {
    // SAFETY: plain data, which `dladdr` fills.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for.
    unsafe { libc::dladdr(address, &mut info) };
    info.dli_fbase
}

/// Number of slots that do not hold what they held, or the function itself if they were bound meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn stress_changed_slots() -> usize {
    let before = BEFORE.get().map(Vec::as_slice).unwrap_or_default();
    let before: HashMap<_, _> = before.iter().map(|s| ((&s.module, s.address), s.value)).collect();
    let ours = module_of(stress_changed_slots as *const c_void);
    let is_wrong = |slot: &Slot| {
        let name = CString::new(slot.function).unwrap_or_default();
        // SAFETY: the name ends with a zero.
        let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) } as usize;
        let was = before.get(&(&slot.module, slot.address));
        let is_changed = was.is_some_and(|was| slot.value != *was && slot.value != function);
        is_changed || module_of(slot.value as *const c_void) == ours
    };
    let wrong: Vec<Slot> = slots().into_iter().filter(is_wrong).collect();
    for slot in &wrong {
        let _ = writeln!(std::io::stderr(), "stress: {slot:x?}");
    }
    wrong.len()
}

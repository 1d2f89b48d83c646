//! Cost of unwinding: stacks of a running Python, taken a few hundred times, unwound repeatedly; compared with the same
//! frames' table rows evaluated by gimli each time.
//! `cargo bench --bench unwind [-- PROGRAM ARGS...]`

#![allow(unsafe_code)]

#[path = "../tests/unwind_support/mod.rs"]
mod unwind_support;

use gimli::{BaseAddresses, EhFrame, EhFrameHdr, LittleEndian, UnwindSection};
use nativeprof::arch::Regs;
use nativeprof::event::StackBytes;
use nativeprof::frame::{ModuleId, UnwindMethod};
use nativeprof::unwind::{CodeMap, Sections, Unwinder};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use unwind_support::{Elf, Maps};

const SAMPLES: usize = 300;
const ROUNDS: u32 = 200;
const SCRIPT: &str = "
import functools, re
def down(n):
    if n: return max(map(down, [n - 1]))
    return sum(sorted(range(500), key=functools.cmp_to_key(lambda a, b: b - a)))
while True:
    down(40)
    re.sub('a+', lambda m: str(len(m.group())), 'aab' * 50)
";

/// Sorted mappings, as in a profiler.
struct Sorted(Vec<unwind_support::Mapping>);

impl CodeMap for Sorted {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        let i = self.0.partition_point(|m| m.0 <= avma).checked_sub(1)?;
        if avma < self.0[i].1 { self.0[i].2 } else { None }
    }

    fn is_code(&self, avma: u64) -> bool {
        let i = self.0.partition_point(|m| m.0 <= avma);
        i > 0 && avma < self.0[i - 1].1
    }
}

fn stop(pid: i32) -> Option<(Regs, Vec<u8>)> {
    // SAFETY: interrupts, reads and resumes our own child; all-zero is a valid user_regs_struct, and it is 27 words.
    unsafe {
        if libc::ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0) != 0 || libc::waitpid(pid, &mut 0, 0) != pid {
            return None;
        }
        let mut regs: libc::user_regs_struct = std::mem::zeroed();
        libc::ptrace(libc::PTRACE_GETREGS, pid, 0, &mut regs);
        let words: [u64; 27] = std::mem::transmute(regs);
        let regs = Regs::from_pt_regs(words[..21].try_into().unwrap());
        let mut bytes = vec![0; 256 << 10];
        loop {
            let local = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            let remote = libc::iovec {
                iov_base: regs.sp() as *mut _,
                iov_len: bytes.len(),
            };
            let got = libc::process_vm_readv(pid, &local, 1, &remote, 1, 0);
            if got > 0 {
                bytes.truncate(got as usize);
                break;
            }
            bytes.truncate(bytes.len() / 2);
        }
        libc::ptrace(libc::PTRACE_CONT, pid, 0, 0);
        Some((regs, bytes))
    }
}

fn start() -> Child {
    let mut arguments = std::env::args().skip(1).filter(|a| a != "--bench");
    let mut command = match arguments.next() {
        Some(program) => Command::new(program),
        None => {
            let mut python = Command::new("python3");
            python.args(["-c", SCRIPT]);
            python
        }
    };
    command
        .args(arguments)
        .stdout(Stdio::null())
        .spawn()
        .expect("this benchmark needs python3")
}

fn main() {
    let mut child = start();
    let pid = child.id() as i32;
    std::thread::sleep(Duration::from_millis(500));
    let (mut maps, mut elves, mut unwinder) = (Maps::default(), Vec::<(String, Elf)>::new(), Unwinder::default());
    for line in std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let hex = |s: &str| u64::from_str_radix(s, 16).unwrap();
        let (start, end) = fields[0].split_once('-').unwrap();
        if !fields[1].contains('x') || fields.len() < 6 || !fields[5].starts_with('/') {
            continue;
        }
        let elf = Elf::open(Path::new(fields[5]));
        let (start, offset) = (hex(start), hex(fields[2]));
        let segment = elf
            .executable()
            .iter()
            .find(|s| s.0 & !4095 == offset)
            .map(|s| s.1 & !4095);
        let id = ModuleId(elves.len() as u32);
        unwinder.add(id, Box::new(elf.clone()));
        elves.push((fields[5].into(), elf));
        maps.0.push((start, hex(end), segment.map(|s| (id, start - s))));
    }
    maps.0.sort_unstable();
    let maps = Sorted(maps.0);
    // SAFETY: our own child.
    assert_eq!(
        // SAFETY: integers only.
        unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) },
        0,
        "ptrace is not allowed here"
    );
    let mut samples = Vec::new();
    while samples.len() < SAMPLES {
        std::thread::sleep(Duration::from_micros(1500 + 37 * (samples.len() as u64 % 29)));
        let Some((regs, bytes)) = stop(pid) else { break };
        samples.push((
            regs,
            StackBytes {
                base: regs.sp(),
                bytes,
                holes: vec![],
            },
        ));
    }
    child.kill().ok();
    child.wait().ok();

    let mut frames = Vec::with_capacity(4096);
    let (mut complete, mut methods, mut all) = (0, BTreeMap::<UnwindMethod, u64>::new(), Vec::new());
    let cold = Instant::now();
    for (regs, stack) in &samples {
        frames.clear();
        complete += u32::from(unwinder.unwind(&maps, regs, stack, &mut frames).is_ok());
        for frame in &frames {
            *methods.entry(frame.method).or_default() += 1;
        }
        all.extend(frames.iter().filter_map(|f| f.location));
    }
    let cold = cold.elapsed();
    let count = methods.values().sum::<u64>();
    println!(
        "{} stacks, {complete} complete, {} frames, {methods:?}",
        samples.len(),
        count
    );
    println!(
        "first pass  {:9.1} us per stack (tables parsed)",
        cold.as_secs_f64() * 1e6 / samples.len() as f64
    );

    let mut best = f64::MAX;
    for _ in 0..5 {
        let warm = Instant::now();
        for _ in 0..ROUNDS {
            for (regs, stack) in &samples {
                frames.clear();
                black_box(unwinder.unwind(&maps, regs, stack, &mut frames)).ok();
            }
        }
        best = best.min(warm.elapsed().as_secs_f64() * 1e9 / f64::from(ROUNDS) / count as f64);
    }
    println!("warm        {best:9.1} ns per frame");

    let sections: Vec<_> = elves
        .iter_mut()
        .map(|(_, elf)| {
            (
                elf.section(".eh_frame").unwrap_or_default(),
                elf.section(".eh_frame_hdr").unwrap_or_default(),
            )
        })
        .collect();
    let mut context = gimli::UnwindContext::new();
    let naive = Instant::now();
    let mut evaluated = 0u64;
    for &(module, svma) in all.iter().take(20_000) {
        let (eh, hdr) = &sections[module.0 as usize];
        let bases = BaseAddresses::default()
            .set_eh_frame(eh.svma)
            .set_eh_frame_hdr(hdr.svma);
        let Ok(parsed) = EhFrameHdr::new(&hdr.bytes, LittleEndian).parse(&bases, 8) else {
            continue;
        };
        let eh = EhFrame::new(&eh.bytes, LittleEndian);
        let Some(table) = parsed.table() else { continue };
        evaluated += 1;
        let row = table.unwind_info_for_address(&eh, &bases, &mut context, svma, EhFrame::cie_from_offset);
        black_box(row.is_ok());
    }
    let naive = naive.elapsed().as_secs_f64() * 1e9 / evaluated.max(1) as f64;
    println!(
        "gimli's row {naive:9.1} ns per frame, {:.0} times as much (without applying it)",
        naive / best
    );
}

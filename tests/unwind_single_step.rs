//! The unwinder compared with the truth: a program is single-stepped, a shadow stack is kept from its call and return
//! instructions, and after every instruction the unwound stack must equal the shadow stack: every caller and every CFA,
//! in prologues, epilogues, the dynamic linker, signal handlers and code without tables.

#![allow(unsafe_code)]

mod unwind_support;

use nativeprof::arch::Regs;
use nativeprof::event::StackBytes;
use nativeprof::frame::{ModuleId, UnwindMethod};
use nativeprof::unwind::Unwinder;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use unwind_support::{Elf, Maps};

struct Target {
    pid: libc::pid_t,
}

impl Target {
    /// Starts `program`, stopped before its first instruction.
    fn start(program: &Path) -> Target {
        let path = CString::new(program.to_str().unwrap()).unwrap();
        let argv = [path.as_ptr(), std::ptr::null()];
        // A small environment keeps the stack copies small.
        let envp = [std::ptr::null::<libc::c_char>()];
        // SAFETY: between fork and exec the child makes system calls only.
        let pid = unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong);
                libc::dup2(libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY), 1);
                libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr());
                libc::_exit(127);
            }
            pid
        };
        assert!(pid > 0, "fork");
        let target = Target { pid };
        assert_eq!(target.wait(), Some(libc::SIGTRAP), "the fixture did not start");
        target
    }

    /// The signal that stopped the target, or `None` once it is gone.
    fn wait(&self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: waits for our own child.
        let got = unsafe { libc::waitpid(self.pid, &mut status, 0) };
        (got == self.pid && libc::WIFSTOPPED(status)).then(|| libc::WSTOPSIG(status))
    }

    /// Lets the target run to its next stop.
    fn resume(&self) -> Option<i32> {
        // SAFETY: the target is our stopped child.
        unsafe { libc::ptrace(libc::PTRACE_CONT, self.pid, 0, 0) };
        self.wait()
    }

    fn step(&self, signal: i32) -> Option<i32> {
        // SAFETY: the target is our stopped child.
        unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.pid, 0, signal) };
        self.wait()
    }

    fn regs(&self) -> Regs {
        // SAFETY: all-zero is a valid user_regs_struct; ptrace fills it. It is 27 words that begin as pt_regs.
        let words: [u64; 27] = unsafe {
            let mut regs: libc::user_regs_struct = std::mem::zeroed();
            assert_eq!(libc::ptrace(libc::PTRACE_GETREGS, self.pid, 0, &mut regs), 0);
            std::mem::transmute(regs)
        };
        Regs::from_pt_regs(words[..21].try_into().unwrap())
    }

    fn read(&self, avma: u64, bytes: &mut [u8]) -> bool {
        let local = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let remote = libc::iovec {
            iov_base: avma as *mut _,
            iov_len: bytes.len(),
        };
        // SAFETY: `local` is a live buffer of that length.
        unsafe { libc::process_vm_readv(self.pid, &local, 1, &remote, 1, 0) == bytes.len() as isize }
    }

    fn word(&self, avma: u64) -> u64 {
        let mut word = [0; 8];
        assert!(self.read(avma, &mut word), "unreadable stack at {avma:#x}");
        u64::from_le_bytes(word)
    }

    fn maps(&self) -> String {
        std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // SAFETY: our own child, not yet reaped if it still runs.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, &mut 0, 0);
        }
    }
}

fn build_fixture(options: &[&str], name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/unwind_zoo.c");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let done = Command::new("gcc")
        .args(["-O2", "-Wl,-z,lazy"])
        .args(options)
        .arg("-o")
        .arg(&program)
        .arg(source)
        .status();
    assert!(
        done.expect("this test needs gcc").success(),
        "the fixture does not compile"
    );
    program
}

/// One frame that was called and has not returned.
#[derive(Clone, Copy, Debug)]
struct Call {
    ra: u64,
    /// Address of the return address; the caller's stack pointer at the call.
    slot: u64,
    /// The kernel's signal frame: what it interrupted.
    signal: bool,
}

#[derive(Default)]
struct StackCounts {
    stacks: u64,
    frames: u64,
    wrong: u64,
    methods: BTreeMap<UnwindMethod, u64>,
    /// Stacks that needed more than tables and instructions.
    odd: BTreeMap<String, u64>,
    complaints: Vec<String>,
}

/// Modules are added as they appear; the mappings are read again whenever an address is unknown.
struct World {
    unwinder: Unwinder,
    maps: Maps,
    files: Vec<String>,
    /// Hide the symbols of all files.
    stripped: bool,
    stack_end: u64,
}

impl World {
    fn refresh(&mut self, target: &Target) {
        self.maps.0.clear();
        self.maps.1.clear();
        for line in target.maps().lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (start, end) = fields[0].split_once('-').unwrap();
            let hex = |s: &str| u64::from_str_radix(s, 16).unwrap();
            let (start, end, offset) = (hex(start), hex(end), hex(fields[2]));
            let path = fields.get(5).copied().unwrap_or("");
            if path == "[stack]" {
                self.stack_end = end;
            }
            if !fields[1].contains('x') {
                continue;
            }
            let mut place = None;
            if path.starts_with('/') {
                let mut elf = Elf::open(Path::new(path));
                elf.stripped = self.stripped;
                let bias = elf
                    .executable()
                    .iter()
                    .find(|s| s.0 & !4095 == offset)
                    .map(|s| start - (s.1 & !4095));
                let id = self.files.iter().position(|f| f == path).unwrap_or_else(|| {
                    self.files.push(path.into());
                    self.unwinder.add(ModuleId(self.files.len() as u32 - 1), Box::new(elf));
                    self.files.len() - 1
                });
                place = bias.map(|bias| (ModuleId(id as u32), bias));
            } else {
                let mut bytes = vec![0; (end - start) as usize];
                // Not all that is executable can be read: [vsyscall].
                if target.read(start, &mut bytes) {
                    self.maps.1.push((start, bytes));
                }
            }
            self.maps.0.push((start, end, place));
        }
    }

    fn name(&self, avma: u64) -> String {
        use nativeprof::unwind::CodeMap;
        match self.maps.find(avma) {
            Some((m, bias)) => {
                let file = &self.files[m.0 as usize];
                format!("{}+{:#x}", file.rsplit('/').next().unwrap(), avma - bias)
            }
            None => format!("{avma:#x}"),
        }
    }

    fn compare(&mut self, target: &Target, regs: &Regs, shadow: &[Call], counts: &mut StackCounts) {
        let mut stack = StackBytes {
            base: regs.sp(),
            ..Default::default()
        };
        stack.bytes.resize((self.stack_end - regs.sp()) as usize, 0);
        assert!(target.read(regs.sp(), &mut stack.bytes));
        let mut frames = Vec::new();
        let end = self.unwinder.unwind(&self.maps, regs, &stack, &mut frames);
        counts.stacks += 1;
        counts.frames += frames.len() as u64;
        for frame in &frames {
            *counts.methods.entry(frame.method).or_default() += 1;
            if !matches!(
                frame.method,
                UnwindMethod::Cfi | UnwindMethod::InstructionAnalysis | UnwindMethod::StackEnd
            ) {
                *counts
                    .odd
                    .entry(format!("{:?} {}", frame.method, self.name(frame.lookup)))
                    .or_default() += 1;
            }
        }
        let mut lookup = vec![regs.ip];
        // Nothing called what the kernel interrupted, nor the code that a handler returns to, which is further in.
        let is_called = |i: usize| !shadow[i].signal && i.checked_sub(1).is_none_or(|outer| !shadow[outer].signal);
        lookup.extend((0..shadow.len()).rev().map(|i| shadow[i].ra - u64::from(is_called(i))));
        let callers = shadow.iter().rev().zip(&frames);
        let same = end.is_ok()
            && frames.iter().map(|f| f.lookup).eq(lookup.iter().copied())
            // The kernel's frame spans what the shadow stack does not see.
            && callers.clone().all(|(c, f)| c.signal || c.slot + 8 == f.cfa)
            && frames.iter().all(|f| f.cfa >= f.sp);
        if !same {
            counts.wrong += 1;
            if counts.complaints.len() < 12 {
                let is: Vec<_> = frames
                    .iter()
                    .map(|f| format!("{} {:?} {:x}", self.name(f.lookup), f.method, f.cfa))
                    .collect();
                let slots: Vec<_> = shadow
                    .iter()
                    .rev()
                    .map(|c| format!("{} {:x}", self.name(c.ra), c.slot + 8))
                    .collect();
                let rule = frames
                    .first()
                    .and_then(|f| f.location)
                    .and_then(|(m, a)| self.unwinder.explain(m, a));
                counts.complaints.push(format!(
                    "{end:?} {is:#?}\nshould be {} {slots:#?} rule {rule:?}",
                    self.name(regs.ip)
                ));
            }
        }
    }
}

/// `from_start`: steps from the first instruction, so that the shadow stack does not depend on the unwinder. Otherwise
/// the program runs to its breakpoint in `main`, whose callers are taken from the unwinder.
fn run(program: &Path, from_start: bool, stripped: bool) -> StackCounts {
    let target = Target::start(program);
    let mut world = World {
        unwinder: Unwinder::default(),
        maps: Maps::default(),
        files: Vec::new(),
        stripped,
        stack_end: 0,
    };
    let elf = Elf::open(program);
    let start = target
        .maps()
        .lines()
        .find(|l| l.ends_with(program.to_str().unwrap()))
        .map(|l| u64::from_str_radix(l.split('-').next().unwrap(), 16).unwrap());
    let fixed = object::Object::kind(&elf.file()) == object::ObjectKind::Executable;
    let bias = if fixed { 0 } else { start.unwrap() };
    let handler = if from_start { elf.symbol("handler") + bias } else { 0 };
    let entry = object::Object::entry(&elf.file()) + bias;
    let (mut shadow, mut counts) = (Vec::<Call>::new(), StackCounts::default());
    let (mut comparing, mut signal) = (false, 0);
    if !from_start {
        assert_eq!(target.resume(), Some(libc::SIGTRAP));
        world.refresh(&target);
        comparing = true;
        let regs = target.regs();
        let mut stack = StackBytes {
            base: regs.sp(),
            ..Default::default()
        };
        stack.bytes.resize((world.stack_end - regs.sp()) as usize, 0);
        assert!(target.read(regs.sp(), &mut stack.bytes));
        let mut frames = Vec::new();
        world.unwinder.unwind(&world.maps, &regs, &stack, &mut frames).unwrap();
        shadow.extend(
            frames
                .windows(2)
                .map(|w| Call {
                    ra: w[1].lookup + 1,
                    slot: w[0].cfa - 8,
                    signal: false,
                })
                .rev(),
        );
    }
    let mut before = target.regs();
    for _ in 0..3_000_000 {
        let mut code = [0; 16];
        let readable = target.read(before.ip, &mut code);
        assert!(readable || target.read(before.ip, &mut code[..1]));
        let Some(stop) = target.step(signal) else { break };
        signal = 0;
        let regs = target.regs();
        if stop != libc::SIGTRAP {
            signal = stop;
            continue;
        }
        let (sp, was) = (regs.sp(), before.sp());
        if code[0] == 0xcc {
            comparing = !comparing;
            if !comparing {
                break;
            }
            world.refresh(&target);
        } else if regs.ip == handler && sp < was.wrapping_sub(512) {
            // The kernel has built a frame: the handler returns to the trampoline, which "returns" to the interrupted
            // code.
            shadow.push(Call {
                ra: before.ip,
                slot: 0,
                signal: true,
            });
            shadow.push(Call {
                ra: target.word(sp),
                slot: sp,
                signal: false,
            });
        } else if code[..2] == [0x0f, 0x05]
            && shadow.last().is_some_and(|c| c.signal)
            && regs.ip == shadow.last().unwrap().ra
        {
            shadow.pop();
        } else if sp == was.wrapping_sub(8) && is_call(&code) {
            shadow.push(Call {
                ra: target.word(sp),
                slot: sp,
                signal: false,
            });
        } else if is_return(&code) {
            // The dynamic linker may return to another address than it was called from; nothing here does while
            // comparing.
            if shadow.last().is_some_and(|c| c.slot == was) {
                shadow.pop();
            } else {
                assert!(!comparing, "unbalanced return at {}", world.name(before.ip));
            }
        }
        if regs.ip == entry {
            shadow.clear();
        }
        if comparing {
            world.compare(&target, &regs, &shadow, &mut counts);
        }
        before = regs;
    }
    counts
}

fn is_call(code: &[u8; 16]) -> bool {
    let code = if code[0] == 0x3e { &code[1..] } else { &code[..] };
    let code = if code[0] & 0xf0 == 0x40 { &code[1..] } else { code };
    code[0] == 0xe8 || code[0] == 0xff && code[1] >> 3 & 7 == 2 || code[..2] == [0x67, 0xe8]
}

fn is_return(code: &[u8; 16]) -> bool {
    matches!(code[..2], [0xc3, _] | [0xc2, _] | [0xf3, 0xc3] | [0xf2, 0xc3])
}

/// For experiments with other code, such as OpenBLAS: `TRUTH_PROGRAM` names a program that executes `int3` where the
/// comparison begins and where it ends.
#[test]
#[ignore = "needs a program in TRUTH_PROGRAM"]
fn every_instruction_of_another_program() {
    let program = std::env::var("TRUTH_PROGRAM").expect("TRUTH_PROGRAM");
    report(
        &program,
        &run(Path::new(&program), false, std::env::var_os("TRUTH_STRIPPED").is_some()),
    );
}

fn report(name: &str, counts: &StackCounts) {
    println!(
        "{name}: {} stacks, {} frames, {} wrong, {:?}",
        counts.stacks, counts.frames, counts.wrong, counts.methods
    );
    for (place, count) in &counts.odd {
        println!("  {count} {place}");
    }
    for complaint in &counts.complaints {
        println!("{complaint}");
    }
    assert!(
        counts.stacks > 3000,
        "the program did too little: {} instructions",
        counts.stacks
    );
    assert_eq!(counts.wrong, 0, "of {} stacks", counts.stacks);
}

fn check(options: &[&str], name: &str, stripped: bool) {
    report(name, &run(&build_fixture(options, name), true, stripped));
}

#[test]
fn every_instruction_without_frame_pointers() {
    check(&["-fomit-frame-pointer", "-no-pie"], "zoo-omit", false);
}

#[test]
fn every_instruction_with_frame_pointers() {
    check(&["-fno-omit-frame-pointer", "-fPIE", "-pie"], "zoo-fp", false);
}

#[test]
fn every_instruction_of_code_without_tables() {
    check(
        &[
            "-fno-asynchronous-unwind-tables",
            "-fno-unwind-tables",
            "-fcf-protection=full",
        ],
        "zoo-bare",
        false,
    );
}

#[test]
fn every_instruction_of_assembler_without_symbols() {
    check(&["-fomit-frame-pointer", "-no-pie"], "zoo-stripped", true);
}

//! Edges in code without a file: every byte that decides is in these tables. Edges in files are judged in tests/tape.rs.

use super::*;
use crate::error::{Error, ErrorKind, Result};
use crate::event::Tid;
use crate::frame::UnwindMethod;
use crate::process::file_content::Content;
use crate::process::root::Root;
use crate::process::system::FileKey;

/// Where the code of these tests is, and the words that it reads.
const CODE: u64 = 0x10000;
const WORDS: u64 = 0x11000;

/// A process with some code and words.
struct Memory(Vec<u8>);

impl System for Memory {
    fn maps(&self, pid: Pid) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::NoSuchProcess, format!("no process {pid}")))
    }

    fn stack_end(&self, _: Pid) -> u64 {
        0
    }

    fn threads(&self, _: Pid) -> Vec<Tid> {
        Vec::new()
    }

    fn thread_name(&self, _: Pid, _: Tid) -> Option<String> {
        None
    }

    fn open(&self, _: Pid, _: u64, _: u64, _: &[u8], _: Option<&Root>) -> Option<(Content, FileKey)> {
        None
    }

    fn read_memory(&self, _: Pid, avma: u64, buf: &mut [u8]) -> usize {
        let at = avma.checked_sub(CODE).map(|at| at as usize);
        let rest = at.and_then(|at| self.0.get(at..)).unwrap_or_default();
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        n
    }

    fn root(&self, _: Pid) -> Option<Root> {
        None
    }

    fn kernel_symbols(&self) -> Option<String> {
        None
    }
}

/// The verdict on an edge in code made of these pieces: from 0x200 to the caller that is returned to at `end`.
fn verdict(pieces: &[(u64, &[u8])], word: u64, end: u64) -> (Found, Verdict) {
    let mut bytes = vec![0; (WORDS - CODE) as usize + 0x100];
    for (at, piece) in pieces {
        bytes[*at as usize..*at as usize + piece.len()].copy_from_slice(piece);
    }
    bytes[(WORDS - CODE) as usize..][..8].copy_from_slice(&(CODE + word).to_le_bytes());
    let memory = Memory(bytes);
    let (mut process, mut modules) = (AddressSpace::exited(1), Modules::default());
    process.map(&memory, CODE, WORDS, 0, b"", &mut modules, &mut |_| {});
    let frame = |lookup: u64| NativeFrame {
        lookup,
        sp: 0,
        cfa: 0,
        location: None,
        method: UnwindMethod::FramePointer,
    };
    let mut judge = EdgeJudge::default();
    judge.judge(
        &process,
        &modules,
        &memory,
        &[frame(CODE + 0x204), frame(CODE + end - 1)],
    );
    let counts = &judge.counts;
    assert_eq!((counts.samples, counts.total().all()), (1, 1));
    let found = *counts.by_method.keys().next().expect("a method");
    let total = counts.total();
    let verdict = match (
        counts.doubts.keys().next(),
        counts.lacks.keys().next(),
        counts.impossible.keys().next(),
    ) {
        (Some(doubt), None, None) => Verdict::Possible(*doubt),
        (None, Some(lack), None) => Verdict::Unjudged(*lack),
        (None, None, Some(edge)) => Verdict::Impossible(edge.fault),
        _ => Verdict::Proved,
    };
    assert_eq!(total.proved == 1, verdict == Verdict::Proved, "{counts:?}");
    (found, verdict)
}

#[cfg(target_arch = "x86_64")]
use Doubt::PushedAddress;
use Doubt::{CallMayReturn, IndirectCall, IndirectJump, PushedReturn};
use Fault::{NoCall, OtherFunction};
use Verdict::{Impossible, Possible, Proved, Unjudged};

/// Functions at 0x100 and 0x200; the latter is the callee. A call of the former ends at 0x48.
#[cfg(target_arch = "x86_64")]
#[test]
fn verdicts_on_edges() {
    const CALL: (u64, &[u8]) = (0x43, b"\xe8\xb8\0\0\0\x90");
    const CALLEE: (u64, &[u8]) = (0x200, b"\x90\x90\x90\x90\x90\x90\xc3");
    let through = |called: &[u8], word: u64, expected: Verdict| {
        let (found, verdict) = verdict(&[CALL, (0x100, called), CALLEE], word, 0x48);
        assert_eq!((found, verdict), (Found::FramePointer, expected), "{called:x?}");
    };
    through(b"\xc3", 0, Impossible(OtherFunction));
    through(b"", 0, Unjudged(Lack::Called));
    through(b"\xe9\xfb\0\0\0", 0, Proved); // jmp 0x200
    through(b"\x0f\x84\xfa\0\0\0\xc3", 0, Proved); // je 0x200; ret
    through(
        b"\xeb\x0e\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xcc\xe9\xeb\0\0\0",
        0,
        Proved,
    );
    through(b"\xff\xe0", 0, Possible(IndirectJump));
    through(b"\x48\x8d\x05\xf9\0\0\0\xff\xe0", 0, Proved); // lea 0x200(%rip),%rax; jmp *%rax
    through(b"\x48\x8d\x05\xf9\0\0\0\x50\xc3", 0, Possible(IndirectJump)); // push %rax; ret
    through(b"\xff\x25\xfa\x0e\0\0", 0x200, Proved); // jmp *WORDS(%rip)
    through(b"\xff\x25\xfa\x0e\0\0", 0x300, Possible(IndirectJump));
    // call 1f; 2: jmp 2b; 1: mov %rax,(%rsp); ret
    through(b"\xe8\x02\0\0\0\xeb\xfe\x48\x89\x04\x24\xc3", 0, Possible(IndirectJump));
    // lea 1f(%rip),%rax; push %rax; nop; ret; 1: jmp 0x200
    through(
        b"\x48\x8d\x05\x03\0\0\0\x50\x90\xc3\xe9\xf1\0\0\0",
        0,
        Possible(PushedAddress),
    );
    // A call that may not return; jmp 0x200.
    through(b"\xe8\x5b\x05\0\0\xe9\xf6\0\0\0", 0, Possible(CallMayReturn));

    let by = |code: &[u8], word: u64, expected: Verdict| {
        let pieces = [(0x48 - code.len() as u64, code), (0x48, b"\x90\xc3"), CALLEE];
        assert_eq!(verdict(&pieces, word, 0x48).1, expected, "{code:x?}");
    };
    by(b"\xe8\xb8\x01\0\0", 0, Proved);
    by(b"\xff\xd0", 0, Possible(IndirectCall));
    by(b"\x48\xb8\0\x02\x01\0\0\0\0\0\xff\xd0", 0, Proved); // movabs $0x10200,%rax; call *%rax
    by(b"\x48\xb8\0\x03\x01\0\0\0\0\0\xff\xd0", 0, Possible(IndirectCall));
    by(b"\xff\x15\xb8\x0f\0\0", 0x200, Proved); // call *WORDS(%rip)
    by(b"\xff\x15\xb8\x0f\0\0", 0x300, Possible(IndirectCall));
    by(b"\x90\x90\x90\x90\x90\x90\x90", 0, Impossible(NoCall));
    by(b"\x90\x90\x90\x90\x90\xff\xe0", 0, Possible(PushedReturn));
    by(b"\x90\x90\x90\x90\x90\x90\xc3", 0, Possible(PushedReturn));
    by(b"", 0, Unjudged(Lack::Caller));

    let signal = (0x48, &b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05"[..]);
    let found = verdict(&[(0x40, b"\x90\x90\x90\x90\x90\x90\x90\x90"), signal, CALLEE], 0, 0x49);
    assert_eq!(found, (Found::Signal, Possible(Doubt::Signal)));
    // Interrupted in the middle of it.
    let signal = (0x200, &b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05"[..]);
    assert_eq!(verdict(&[signal], 0, 0x48), (Found::Signal, Possible(Doubt::Signal)));
}

#[cfg(target_arch = "aarch64")]
#[test]
fn verdicts_on_edges() {
    let code = |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
    const NOP: u32 = 0xd503_201f;
    let callee = code(&[NOP, NOP, 0xd65f_03c0]);
    let through = |called: &[u32], word: u64, expected: Verdict| {
        let pieces = [
            (0x40, &code(&[NOP, 0x9400_002f])[..]),
            (0x100, &code(called)),
            (0x200, &callee),
        ];
        assert_eq!(
            verdict(&pieces, word, 0x48),
            (Found::FramePointer, expected),
            "{called:x?}"
        );
    };
    through(&[0xd65f_03c0], 0, Impossible(OtherFunction));
    through(&[], 0, Unjudged(Lack::Called));
    through(&[0xd503_245f, 0x1400_003f], 0, Proved); // bti c; b 0x200
    through(&[0xb400_0800, 0xd65f_03c0], 0, Proved); // cbz x0, 0x200; ret
    through(&[0xd61f_0220], 0, Possible(IndirectJump)); // br x17
    // adrp x16, WORDS; ldr x17, [x16]; br x17
    through(&[0xb000_0010, 0xf940_0211, 0xd61f_0220], 0x200, Proved);
    through(&[0xb000_0010, 0xf940_0211, 0xd61f_0220], 0x300, Possible(IndirectJump));
    through(&[0x9400_0400, 0x1400_003f], 0, Possible(CallMayReturn));

    let by = |words: &[u32], expected: Verdict| {
        let words = code(words);
        let pieces = [
            (0x48 - words.len() as u64, &words[..]),
            (0x48, &callee),
            (0x200, &callee),
        ];
        assert_eq!(verdict(&pieces, 0, 0x48).1, expected, "{words:x?}");
    };
    by(&[0x9400_006f], Proved);
    by(&[0xd63f_0100], Possible(IndirectCall));
    by(&[0xd280_4008, 0xf2a0_0028, 0xd63f_0100], Proved); // mov x8, #0x10200; blr x8
    by(&[NOP], Impossible(NoCall));
    by(&[0xd61f_0220], Possible(PushedReturn)); // br x17
    by(&[], Unjudged(Lack::Caller));
}

#[test]
fn better_readings_of_the_same_bytes_win() {
    let order = [
        Proved,
        Possible(IndirectCall),
        Unjudged(Lack::Called),
        Impossible(OtherFunction),
        Impossible(NoCall),
    ];
    for (i, better) in order.into_iter().enumerate() {
        for worse in &order[i..] {
            assert_eq!(better.or(*worse), better);
            assert_eq!(worse.or(better), better);
        }
    }
}

//! Code that no table covers, and that can be read: that of JIT compilers, and code that is entered by a jump.

use super::super::instruction_analysis::{PathCode, return_rules};
use super::super::rule::Rule;
use super::super::rules::Rules;
use super::*;

/// Code in memory without a file.
const JIT: u64 = 0x50_0000;
/// Return addresses in the file: after a call through a register, and after calls of `JIT` and of `JIT + 0x100`.
const INDIRECT: u64 = BIAS + 0x1012;
const CALLS_JIT: u64 = BIAS + 0x1025;
const CALLS_OTHER: u64 = BIAS + 0x1035;
/// Where the table says that nothing called it; after a call.
const END: u64 = BIAS + 0x10f8;

/// 0x1000 to 0x1100, with a table: CFA = rsp + 8, and no return address from 0x10f0 on. At 0x1100: code without one.
fn file(untabled: &[u8]) -> File {
    let mut code = vec![0x90; 0x100];
    code[0x10..0x12].copy_from_slice(&[0xff, 0xd0]);
    code[0xfe] = 0xc3;
    for (at, target) in [(CALLS_JIT, JIT), (CALLS_OTHER, JIT + 0x100), (END, BIAS + 0x1000)] {
        let from = (at - BIAS - 0x1000) as usize;
        code[from - 5] = 0xe8;
        code[from - 4..from].copy_from_slice(&(target.wrapping_sub(at) as i32).to_le_bytes());
    }
    code.extend(untabled);
    File {
        functions: vec![(0x1100, untabled.len() as u64)],
        code,
        eh_frame: table("zR", 0x1000, 0x100, &[0x02, 0xf0, 0x07, 16]),
    }
}

/// The file at `BIAS`, and code at `JIT` that can be read.
struct JitMap(Vec<u8>);

impl JitMap {
    /// Functions at multiples of 0x100.
    fn new(functions: &[&[u8]]) -> JitMap {
        let mut code = Vec::new();
        for function in functions {
            code.extend(*function);
            code.resize(code.len().next_multiple_of(0x100), 0xcc);
        }
        JitMap(code)
    }
}

impl CodeMap for JitMap {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        Map.find(avma)
    }

    fn is_code(&self, avma: u64) -> bool {
        self.find(avma).is_some() || (JIT..JIT + self.0.len() as u64).contains(&avma)
    }

    fn read(&self, avma: u64, out: &mut [u8]) -> usize {
        let from = avma.checked_sub(JIT).and_then(|at| self.0.get(at as usize..));
        let from = from.unwrap_or_default();
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        len
    }
}

type Unwound = (Result<(), Truncation>, Vec<(u64, UnwindMethod)>);

/// Instruction or return address, and method, of each frame.
fn unwound(untabled: &[u8], jit: &JitMap, regs: &Regs, words: &[u64], anchors: &[u64]) -> Unwound {
    let mut unwinder = unwinder(file(untabled));
    unwinder.set_anchors(anchors.iter().copied(), None);
    let mut frames = Vec::new();
    let end = unwinder.unwind(jit, regs, &stack(words), &mut frames);
    let shown = |(i, f): (usize, &NativeFrame)| (f.lookup + u64::from(i > 0), f.method);
    (end, frames.iter().enumerate().map(shown).collect())
}

struct Bytes<'a>(&'a [u8]);

impl PathCode for Bytes<'_> {
    fn read(&mut self, avma: u64, out: &mut [u8]) -> usize {
        let from = self.0.get(avma as usize..).unwrap_or_default();
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        len
    }

    fn table_rule(&mut self, _: u64) -> Option<Rule> {
        None
    }
}

#[test]
fn code_is_followed_to_its_return() {
    let check = |code: &[u8], interrupted: bool, expected: &[&str]| {
        let mut rules = Rules::default();
        let found = return_rules(&mut Bytes(code), 0, interrupted);
        let found: Vec<_> = found.into_iter().map(|full| rules.intern_full(full)).collect();
        let found: Vec<_> = found.iter().filter_map(|id| rules.describe(&rules.get(*id))).collect();
        assert_eq!(found, expected, "{code:x?}");
    };
    check(&[0xc3], false, &["rsp+8 ra=c-8 code"]);
    check(&[0x48, 0x83, 0xc4, 8, 0xc3], false, &["rsp+16 ra=c-8 code"]); // add $8,%rsp; ret
    check(&[0xc9, 0xc3], false, &["rbp+16 rbp=c-16 ra=c-8 code"]); // leave; ret
    check(&[0x5b, 0x5d, 0xc3], false, &["rsp+24 rbx=c-24 rbp=c-16 ra=c-8 code"]); // pop %rbx; pop %rbp; ret
    check(
        &[0x48, 0x8d, 0x65, 0xf0, 0x5b, 0x5d, 0xc3],
        false,
        &[
            "rbp+8 rbx=c-24 rbp=c-16 ra=c-8 code", // lea -16(%rbp),%rsp; pop %rbx; pop %rbp; ret
        ],
    );
    check(&[0xc2, 0x10, 0], false, &["rsp+24 ra=c-24 code"]); // ret $16
    // Arguments on the stack of a call, which returns: push %rax; push %rax; call; add $16,%rsp; leave; ret
    let call = [0x50, 0x50, 0xe8, 0, 0, 0, 0, 0x48, 0x83, 0xc4, 0x10, 0xc9, 0xc3];
    check(&call, false, &["rbp+16 rbp=c-16 ra=c-8 code"]);
    // js 1f; pop %rcx; ret; 1: ud2, and the same with a return that takes more there, and with a loop.
    check(&[0x78, 2, 0x59, 0xc3, 0x0f, 0x0b], false, &["rsp+16 ra=c-8 code"]);
    check(
        &[0x78, 2, 0x59, 0xc3, 0xc3],
        false,
        &["rsp+16 ra=c-8 code", "rsp+8 ra=c-8 code"],
    );
    check(&[0x78, 0xfe, 0x59, 0xc3], false, &["rsp+16 ra=c-8 code"]);
    // A prologue: push %rbp; mov %rsp,%rbp; nop; leave; ret. After a call that returns, it is another function's.
    let prologue = [0x55, 0x48, 0x89, 0xe5, 0x90, 0xc9, 0xc3];
    check(&prologue, true, &["rsp+8 ra=c-8 code"]);
    check(&prologue, false, &[]);
    check(&[0xff, 0xe0], false, &[]); // jmp *%rax
    check(&[0x48, 0x83, 0xe4, 0xf0, 0xc3], false, &[]); // and $-16,%rsp; ret
    check(&[0xeb, 0xfe], false, &[]);
    check(&[0x90; 1000], false, &[]);
    check(&[], false, &[]);
    // Instructions at all positions of what is read at once.
    for pad in 0..70 {
        let code = [vec![0x90; pad], vec![0x48, 0x81, 0xc4, 0, 1, 0, 0, 0xc3]].concat(); // add $256,%rsp; ret
        check(&code, false, &["rsp+264 ra=c-8 code"]);
    }
}

/// push %rbp; mov %rsp,%rbp; sub $32,%rsp; call of the next function; `rest`
fn framed(rest: &[u8]) -> Vec<u8> {
    [
        &[0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x20, 0xe8, 0xf3, 0, 0, 0],
        rest,
    ]
    .concat()
}

#[test]
fn leftovers_of_earlier_calls_are_no_frames() {
    use UnwindMethod::{FramePointer, InstructionAnalysis, StackEnd};
    // Two frames with 32 bytes that were not written, full of return addresses of the file.
    let first = JIT + 13;
    let fp = |at: u64| STACK + 8 * at;
    let words = [
        END,
        CALLS_OTHER,
        INDIRECT,
        CALLS_JIT,
        fp(10),
        first,
        END,
        INDIRECT,
        END,
        END,
        77,
        CALLS_JIT,
        END,
    ];
    let regs = Regs::from_ip_sp_fp(JIT + 0x10d, STACK, fp(4));
    // leave; ret
    let code = framed(&[0xc9, 0xc3]);
    let expected = |method| {
        let rest = [(CALLS_JIT, UnwindMethod::Cfi), (END, StackEnd)];
        (
            Ok(()),
            [vec![(JIT + 0x10d, method), (first, method)], rest.to_vec()].concat(),
        )
    };
    let map = JitMap::new(&[&code, &code]);
    assert_eq!(unwound(&[], &map, &regs, &words, &[]), expected(InstructionAnalysis));
    // mov %rbp,%rsp; pop %rbp; pop %rcx; jmp *%rcx: nothing is known but the frame pointers.
    let code = framed(&[0x48, 0x89, 0xec, 0x5d, 0x59, 0xff, 0xe1]);
    let map = JitMap::new(&[&code, &code]);
    assert_eq!(unwound(&[], &map, &regs, &words, &[]), expected(FramePointer));
    // A frame pointer that leads down, and one that is not aligned.
    for wrong in [fp(0), fp(10) + 4] {
        let mut words = words;
        words[4] = wrong;
        let (end, frames) = unwound(&[], &map, &regs, &words, &[]);
        assert_eq!((end, frames.len()), (Err(Truncation::NoUnwindInfo), 1), "{wrong:#x}");
    }
}

#[test]
fn a_chain_of_frame_pointers_that_leads_nowhere_is_not_shown() {
    // Code that jumps to where it returns. Its caller called it through a register, and its own caller is no code.
    let map = JitMap::new(&[&[0x90, 0xff, 0xe1]]);
    let regs = Regs::from_ip_sp_fp(JIT + 1, STACK, STACK + 8);
    let of = |words: &[u64]| unwound(&[], &map, &regs, words, &[]);
    let (end, frames) = of(&[0, 0, INDIRECT, END]);
    assert_eq!((end, frames.len()), (Ok(()), 3));
    let (end, frames) = of(&[0, 0, INDIRECT, 0x1234]);
    assert_eq!(
        (end, frames),
        (Err(Truncation::NoUnwindInfo), vec![(JIT + 1, UnwindMethod::Failed)])
    );
    // A call that is proved stays.
    let (end, frames) = of(&[0, 0, CALLS_JIT, 0x1234]);
    assert_eq!((end, frames.len()), (Err(Truncation::ReturnAddressNotInCode), 2));
    // A call of another function, which cannot lead here: ret
    let map = JitMap::new(&[&[0x90, 0xff, 0xe1], &[0xc3]]);
    let (end, frames) = unwound(&[], &map, &regs, &[0, 0, CALLS_OTHER, END], &[]);
    assert_eq!((end, frames.len()), (Err(Truncation::NoUnwindInfo), 1));
}

#[test]
fn a_scan_needs_a_proof() {
    let map = JitMap::new(&[&[0x90, 0xff, 0xe1], &[0xc3]]);
    let regs = Regs::from_ip_sp_fp(JIT + 1, STACK, 3);
    let of = |words: &[u64], anchors: &[u64]| {
        let (end, frames) = unwound(&[], &map, &regs, words, anchors);
        (end, frames.into_iter().map(|f| f.0).collect::<Vec<_>>())
    };
    let failed = (Err(Truncation::NoUnwindInfo), vec![JIT + 1]);
    assert_eq!(
        of(&[0, INDIRECT, END], &[]),
        failed,
        "any function could have been called there"
    );
    assert_eq!(
        of(&[0, CALLS_OTHER, END], &[]),
        failed,
        "another function was called there"
    );
    let right = (Ok(()), vec![JIT + 1, CALLS_JIT, END]);
    assert_eq!(of(&[0, CALLS_JIT, END], &[]), right);
    assert_eq!(of(&[0, INDIRECT, 0, CALLS_OTHER, CALLS_JIT, END], &[]), right);
    // A call of a function that jumps to computed addresses, with this much of a frame as its table has it: jmp *%rax
    let enters = |words: &[u64]| {
        let mut file = file(&[]);
        file.code[..2].copy_from_slice(&[0xff, 0xe0]);
        let (end, frames) = {
            let mut frames = Vec::new();
            let mut unwinder = unwinder(file);
            (unwinder.unwind(&map, &regs, &stack(words), &mut frames), frames)
        };
        (end, frames.len())
    };
    assert_eq!(enters(&[END, END]), (Ok(()), 2));
    assert_eq!(
        enters(&[0, END, END]),
        (Err(Truncation::NoUnwindInfo), 1),
        "of another size"
    );
    // The interpreter's frames confirm it.
    let right = (Ok(()), vec![JIT + 1, INDIRECT, END]);
    assert_eq!(of(&[0, INDIRECT, END], &[STACK + 16]), right);
}

#[test]
fn code_that_is_jumped_to_returns_where_its_jumps_lead() {
    // 0x1100: xor %eax,%eax; jmp 0x1200; 0x1200: add $64,%rsp; ret. The words where its frame would be are zero.
    let mut code = vec![0x31, 0xc0, 0xe9, 0xf9, 0, 0, 0];
    code.resize(0x100, 0x90);
    code.extend([0x48, 0x83, 0xc4, 0x40, 0xc3]);
    let mut words = vec![0; 300];
    words[8..10].copy_from_slice(&[INDIRECT, END]);
    let regs = Regs::from_ip_sp_fp(BIAS + 0x1100, STACK, 0);
    let of = |code: &[u8], words: &[u64]| {
        let mut file = file(code);
        file.functions = vec![(0x1100, 7)];
        let (end, frames) = run(file, &regs, &stack(words));
        (end, frames.into_iter().map(|f| f.lookup - BIAS).collect::<Vec<_>>())
    };
    let right = (Ok(()), vec![0x1100, INDIRECT - BIAS - 1, END - BIAS - 1]);
    assert_eq!(of(&code, &words), right);
    // A zero is no end, even at the end of the stack: jmp *%rax
    code[2..4].copy_from_slice(&[0xff, 0xe0]);
    for end in [1, 8, 300] {
        assert_eq!(
            of(&code, &words[..end]),
            (Err(Truncation::NoUnwindInfo), vec![0x1100]),
            "{end}"
        );
    }
}

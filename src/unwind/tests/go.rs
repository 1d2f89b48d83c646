//! Frames of Go code, by its function table.

use super::*;

/// Values of the stack's size, each with its bytes of code.
type StackSizes = &'static [(u32, u8)];

/// Functions at 0x1000: name, size, flags, sizes of the stack.
const FUNCTIONS: [(&str, u32, u8, StackSizes); 6] = [
    ("runtime.goexit", 16, 1, &[(0, 16)]),
    ("main.outer", 48, 0, &[(0, 4), (24, 40), (0, 4)]),
    ("main.leaf", 16, 0, &[(0, 16)]),
    ("runtime.systemstack", 16, 2, &[(0, 16)]),
    ("runtime.sigreturn__sigaction", 16, 0, &[(0, 16)]),
    ("example.aligned", 16, 2, &[(8, 16)]),
];

/// As Go 1.20 writes it (see symbolize/src/go_table.rs); nothing but what unwinding needs.
fn go_table() -> Vec<u8> {
    let (mut names, mut values, mut list, mut described) = (vec![0], vec![0], Vec::new(), Vec::new());
    let mut start = 0u32;
    let list_size = 8 * FUNCTIONS.len() as u32 + 4;
    for (name, size, flags, stack) in FUNCTIONS {
        list.extend([start, list_size + described.len() as u32]);
        let words = [start, names.len() as u32, 0, 0, values.len() as u32, 0, 0, 0, 0, 1];
        described.extend(words.into_iter().flat_map(u32::to_le_bytes));
        described.extend([0, flags, 0, 0]);
        names.extend(name.bytes().chain([0]));
        let mut last = -1;
        for (value, bytes) in stack {
            let by = *value as i32 - last;
            values.extend([(by << 1 ^ by >> 31) as u8, *bytes]);
            last = *value as i32;
        }
        values.push(0);
        start += size;
    }
    list.push(start);
    let names_at = 8 + 8 * 8;
    let values_at = names_at + names.len() as u64;
    let header = [
        FUNCTIONS.len() as u64,
        0,
        0x1000,
        names_at,
        names_at,
        names_at,
        values_at,
        values_at + values.len() as u64,
    ];
    let mut table = vec![0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8];
    table.extend(header.into_iter().flat_map(u64::to_le_bytes));
    table.extend(names);
    table.extend(values);
    table.extend(list.into_iter().flat_map(u32::to_le_bytes));
    table.extend(described);
    table
}

struct GoFile;

impl Sections for GoFile {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        (name == ".gopclntab").then(|| CodeSection {
            svma: 0x9000,
            bytes: go_table(),
        })
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        vec![(0x1070, 16)]
    }

    fn code(&mut self, svma: u64) -> Option<CodeSection> {
        let mut bytes = vec![0x90; 0x100];
        for call in [0x1b, 0x53] {
            bytes[call..call + 5].copy_from_slice(&[0xe8, 0, 0, 0, 0]);
        }
        // mov $15,%rax; syscall
        bytes[0x60..0x69].copy_from_slice(b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05");
        // push %rbp; mov %rsp,%rbp; and $-32,%rsp
        bytes[0x70..0x78].copy_from_slice(b"\x55\x48\x89\xe5\x48\x83\xe4\xe0");
        let section = CodeSection { svma: 0x1000, bytes };
        section.contains(svma).then_some(section)
    }
}

/// Of a frame: where it was looked up, its CFA relative to the stack, and its method.
type Shown = (u64, u64, UnwindMethod);

fn walk(ip: u64, words: &[u64]) -> (Result<(), Truncation>, Vec<Shown>) {
    let mut unwinder = Unwinder::default();
    unwinder.add(ModuleId(0), Box::new(GoFile));
    let mut frames = Vec::new();
    let regs = Regs::from_ip_sp_fp(BIAS + ip, STACK, 1);
    let end = unwinder.unwind(&Map, &regs, &stack(words), &mut frames);
    let shown = |f: &NativeFrame| (f.lookup - BIAS, f.cfa - STACK, f.method);
    (end, frames.iter().map(shown).collect())
}

#[test]
fn goroutines_begin_with_goexit() {
    // What is above it belongs to no frame, and looks like one here.
    let words = [BIAS + 0x1020, 1, 2, STACK, BIAS + 0x1001, BIAS + 0x1020, 0];
    let (end, frames) = walk(0x1044, &words);
    assert_eq!(end, Ok(()));
    let cfi = UnwindMethod::Cfi;
    let expected = [
        (0x1044, 8, cfi),
        (0x101f, 40, cfi),
        (0x1000, 40, UnwindMethod::StackEnd),
    ];
    assert_eq!(frames, expected);
    // Before it has moved the stack pointer, and after it has moved it back.
    for ip in [0x1010, 0x1013, 0x103c, 0x103f] {
        let (end, frames) = walk(ip, &[BIAS + 0x1001]);
        assert_eq!((end, frames.len(), frames[0].1), (Ok(()), 2, 8), "{ip:x}");
    }
}

#[test]
fn what_switches_stacks_is_the_last_frame() {
    let (end, frames) = walk(0x1044, &[BIAS + 0x1058, BIAS + 0x1001, 0, 0]);
    assert_eq!(end, Err(Truncation::ForeignStack));
    let expected = [(0x1044, 8, UnwindMethod::Cfi), (0x1057, 8, UnwindMethod::Failed)];
    assert_eq!(frames, expected);
}

#[test]
fn other_functions_of_assembler() {
    let mut unwinder = Unwinder::default();
    unwinder.add(ModuleId(0), Box::new(GoFile));
    let mut rule = |svma| unwinder.explain(ModuleId(0), svma).unwrap_or_default();
    assert!(rule(0x1060).ends_with(" signal"), "{}", rule(0x1060));
    // The table does not know how far the stack pointer was aligned.
    assert_eq!(rule(0x1078), "rbp+16 rbp=c-16 ra=c-8 code");
    assert_eq!(rule(0x1044), "rsp+8 ra=c-8");
}

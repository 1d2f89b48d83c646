//! Tables of hand-made code, rules and stacks.

use super::*;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod extents;
#[cfg(target_arch = "x86_64")]
mod go;
#[cfg(target_arch = "x86_64")]
mod handlers;
#[cfg(target_arch = "x86_64")]
mod no_tables;
#[cfg(target_arch = "x86_64")]
mod switched;
#[cfg(target_arch = "x86_64")]
mod x86_64;

/// A file with one code section at 0x1000, tables and symbols as given.
#[derive(Default)]
struct File {
    code: Vec<u8>,
    eh_frame: Vec<u8>,
    functions: Vec<(u64, u64)>,
}

impl Sections for File {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        (name == ".eh_frame").then(|| CodeSection {
            svma: 0x8000,
            bytes: self.eh_frame.clone(),
        })
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        self.functions.clone()
    }

    fn code(&mut self, svma: u64) -> Option<CodeSection> {
        let section = CodeSection {
            svma: 0x1000,
            bytes: self.code.clone(),
        };
        section.contains(svma).then_some(section)
    }
}

const BIAS: u64 = 0x10_0000;
const STACK: u64 = 0x7ffe_0000_0000;

/// The file at `BIAS`, and anonymous code at 0x50_0000.
struct Map;

impl CodeMap for Map {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        (BIAS + 0x1000..BIAS + 0x5000)
            .contains(&avma)
            .then_some((ModuleId(0), BIAS))
    }

    fn is_code(&self, avma: u64) -> bool {
        self.find(avma).is_some() || (0x50_0000..0x50_1000).contains(&avma)
    }
}

fn unwinder(file: File) -> Unwinder {
    let mut unwinder = Unwinder::default();
    unwinder.add(ModuleId(0), Box::new(file));
    unwinder
}

/// The rule that analyzing `code` gives at `offset`.
fn check(code: &[u8], offset: u64, expected: &str) {
    let functions = vec![(0x1000, code.len() as u64)];
    let mut unwinder = unwinder(File {
        code: code.to_vec(),
        functions,
        ..File::default()
    });
    let is = unwinder.explain(ModuleId(0), 0x1000 + offset);
    assert_eq!(is.as_deref(), Some(expected), "at {offset:#x} of {code:x?}");
}

/// What CIEs of this CPU end with: alignment factors 1 and -8, column of the return address, absolute pointers; at a
/// function's start CFA = rsp + 8 and the return address is at CFA - 8, or CFA = sp.
const CIE_END: &[u8] = if cfg!(target_arch = "x86_64") {
    &[0, 1, 0x78, 16, 1, 0, 0x0c, 7, 8, 0x90, 1]
} else {
    &[0, 1, 0x78, 30, 1, 0, 0x0c, 31, 0]
};

/// An entry of call frame information: CIE with `augmentation`, then one FDE for `[start, start + size)`.
fn table(augmentation: &str, start: u64, size: u64, instructions: &[u8]) -> Vec<u8> {
    let mut cie = vec![0, 0, 0, 0, 1];
    cie.extend(augmentation.as_bytes());
    cie.extend(CIE_END);
    cie.resize(cie.len().next_multiple_of(8) + 4, 0);
    let mut fde = Vec::new();
    fde.extend((cie.len() as u32 + 8).to_le_bytes());
    fde.extend(start.to_le_bytes());
    fde.extend(size.to_le_bytes());
    fde.push(0);
    fde.extend(instructions);
    fde.resize(fde.len().next_multiple_of(8) + 4, 0);
    let mut all = Vec::new();
    for entry in [cie, fde] {
        all.extend((entry.len() as u32).to_le_bytes());
        all.extend(entry);
    }
    all.extend([0; 4]);
    all
}

fn stack(words: &[u64]) -> StackBytes {
    StackBytes {
        base: STACK,
        bytes: words.iter().flat_map(|w| w.to_le_bytes()).collect(),
        holes: vec![],
    }
}

fn run(file: File, regs: &Regs, stack: &StackBytes) -> (Result<(), Truncation>, Vec<NativeFrame>) {
    let mut frames = Vec::new();
    let end = unwinder(file).unwind(&Map, regs, stack, &mut frames);
    (end, frames)
}

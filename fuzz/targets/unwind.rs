#![no_main]
//! Tables, code, registers and a stack, all from the input. A second, modified stack is unwound with and without the
//! cache of the first.

use libfuzzer_sys::fuzz_target;
use nativeprof::arch::Regs;
use nativeprof::frame::{UnwindMethod, ModuleId};
use nativeprof::event::StackBytes;
use nativeprof::unwind::{CodeMap, MAX_FRAMES, StackCache, CodeSection, Sections, Unwinder};
use nativeprof_fuzz::Bytes;

#[derive(Clone)]
struct File {
    code: CodeSection,
    tables: [(&'static str, CodeSection); 3],
    functions: Vec<(u64, u64)>,
}

impl Sections for File {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        let found = self.tables.iter().find(|(n, s)| *n == name && !s.bytes.is_empty());
        found.map(|(_, s)| s.clone())
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        self.functions.clone()
    }

    fn code(&mut self, svma: u64) -> Option<CodeSection> {
        (svma.wrapping_sub(self.code.svma) < self.code.bytes.len() as u64).then(|| self.code.clone())
    }
}

impl CodeMap for File {
    fn find(&self, avma: u64) -> Option<(ModuleId, u64)> {
        self.is_code(avma).then_some((ModuleId(0), 0))
    }

    fn is_code(&self, avma: u64) -> bool {
        avma.wrapping_sub(self.code.svma) < self.code.bytes.len() as u64
    }
}

fn section(b: &mut Bytes) -> CodeSection {
    CodeSection {
        svma: b.u32().into(),
        bytes: b.block().to_vec(),
    }
}

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let code = section(&mut b);
    let mut tables = [".eh_frame", ".eh_frame_hdr", ".debug_frame"].map(|name| (name, section(&mut b)));
    if b.u8() & 1 == 1 {
        // all at the end of the address space
        tables.iter_mut().for_each(|t| t.1.svma |= 0xffff_ffff_0000_0000);
    }
    let mut functions: Vec<(u64, u64)> = Vec::new();
    for _ in 0..b.u8() % 8 {
        functions.push((code.svma.wrapping_add(b.u16().into()), b.u16().into()));
    }
    functions.sort_unstable();
    let file = File {
        code,
        tables,
        functions,
    };
    let base = 0x7fff_0000_0000 + u64::from(b.u16());
    let mut regs = Regs {
        gpr: std::array::from_fn(|_| base.wrapping_add(b.u16() as i16 as u64)),
        ip: file.code.svma.wrapping_add(b.u16().into()),
        known: b.u16().into(),
    };
    regs.gpr[7] = base;
    let (repeat, holes) = (usize::from(b.u8()), b.u8());
    // Each word: an address in the code, on the stack, or unchanged.
    let words =
        b.0.chunks_exact(4)
            .cycle()
            .take(b.0.len() / 4 * (1 + repeat))
            .take(2048);
    let bytes = words.enumerate().flat_map(|(i, w)| {
        let n = u64::from(u16::from_le_bytes([w[0], w[1]]));
        let word = match w[3] & 3 {
            0 => file.code.svma.wrapping_add(n),
            1 => (base + 8 * i as u64).wrapping_add(n as i16 as u64),
            _ => n,
        };
        word.to_le_bytes()
    });
    let holes = if holes & 1 == 1 {
        vec![u64::from(holes >> 1)]
    } else {
        Vec::new()
    };
    let mut stack = StackBytes {
        base,
        bytes: bytes.collect(),
        holes,
    };
    let mut unwinder = Unwinder::default();
    unwinder.add(ModuleId(0), Box::new(file.clone()));
    let mut stack_cache = StackCache::default();
    for change in 0..3 {
        let (mut plain, mut next) = (Vec::new(), Vec::new());
        let end = unwinder.unwind(&file, &regs, &stack, &mut plain);
        let next_end = unwinder.unwind_incremental(&mut stack_cache, 0, &file, &regs, &stack, &mut next);
        assert!(
            next == plain && next_end == end,
            "{next_end:?} {next:#?}\n{end:?} {plain:#?}"
        );
        assert!(!plain.is_empty() && plain.len() <= 3 * MAX_FRAMES);
        assert_eq!(end.is_err(), plain.last().expect("a frame").method == UnwindMethod::Failed);
        assert!(plain.iter().all(|f| f.cfa >= f.sp));
        // then another stack below, as with deep calls
        let at = stack.bytes.len() / 8 / (change + 2) * 8;
        if let Some(word) = stack.bytes.get_mut(at..at + 8) {
            word.copy_from_slice(&file.code.svma.wrapping_add(at as u64).to_le_bytes());
        }
    }
    unwinder.explain(ModuleId(0), regs.ip);
    unwinder.function_start(ModuleId(0), regs.ip);
});

//! Damaged tables, code and stacks: the unwinder must neither panic nor run long.

mod unwind_support;

use nativeprof::arch::Regs;
use nativeprof::event::StackBytes;
use nativeprof::frame::{ModuleId, UnwindMethod};
use nativeprof::unwind::{CodeSection, MAX_FRAMES, Sections, Unwinder};
use std::path::Path;
use std::time::Instant;
use unwind_support::{Elf, Maps, Rng};

/// The sections of a file that may be damaged.
#[derive(Clone, Default)]
struct FileSections {
    eh_frame: Option<CodeSection>,
    hdr: Option<CodeSection>,
    debug_frame: Option<CodeSection>,
    functions: Vec<(u64, u64)>,
    code: CodeSection,
}

impl Sections for FileSections {
    fn section(&mut self, name: &str) -> Option<CodeSection> {
        match name {
            ".eh_frame" => self.eh_frame.take(),
            ".eh_frame_hdr" => self.hdr.take(),
            ".debug_frame" => self.debug_frame.take(),
            _ => None,
        }
    }

    fn functions(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.functions)
    }

    fn code(&mut self, svma: u64) -> Option<CodeSection> {
        (svma.wrapping_sub(self.code.svma) < self.code.bytes.len() as u64).then(|| self.code.clone())
    }
}

impl FileSections {
    /// All sections of a small library.
    fn of_this_machine() -> FileSections {
        let places = [
            "/lib/x86_64-linux-gnu/libdl.so.2",
            "/lib/x86_64-linux-gnu/libgcc_s.so.1",
            "/lib64/libgcc_s.so.1",
        ];
        let path = places.iter().skip(1).find(|p| Path::new(p).exists());
        let mut elf = Elf::open(Path::new(path.expect("this test needs libgcc_s.so.1")));
        let entry = elf.executable()[0];
        let svma = (entry.1..entry.1 + entry.2)
            .step_by(64)
            .max_by_key(|&a| elf.code(a).map_or(0, |s| s.bytes.len()));
        FileSections {
            eh_frame: elf.section(".eh_frame"),
            hdr: elf.section(".eh_frame_hdr"),
            debug_frame: None,
            functions: elf.functions(),
            code: elf.code(svma.unwrap()).unwrap(),
        }
    }
}

fn damage(bytes: &mut [u8], random: &mut Rng) {
    if bytes.is_empty() {
        return;
    }
    for _ in 0..1 + random.next() % 12 {
        let at = (random.next() % bytes.len() as u64) as usize;
        match random.next() % 4 {
            0 => bytes[at] = 0xff,
            1 => bytes[at] = 0,
            2 => bytes[at] ^= 1 << (random.next() % 8),
            _ => bytes[at] = random.next() as u8,
        }
    }
}

/// A stack with return addresses, stack addresses and noise.
fn noise(random: &mut Rng, code: &CodeSection) -> (Regs, StackBytes) {
    let base = match random.next() % 16 {
        0 => u64::MAX - 4096,
        1 => 0,
        _ => 0x7fff_0000_0000 + (random.next() % 4096),
    };
    let words = random.next() % 600;
    let mut word = |at: u64| match random.next() % 8 {
        0..3 => code.svma + random.next() % (2 * code.bytes.len() as u64),
        3..6 => at.wrapping_add(random.next() % 256).wrapping_sub(16),
        6 => 0,
        _ => random.next(),
    };
    let bytes = (0..words)
        .flat_map(|i| word(base.wrapping_add(8 * i)).to_le_bytes())
        .collect();
    let mut regs = Regs {
        gpr: [0; 16],
        ip: word(base),
        known: 0xffff,
    };
    regs.gpr = std::array::from_fn(|_| word(base));
    regs.gpr[7] = base;
    let holes = if random.next().is_multiple_of(4) {
        vec![random.next()]
    } else {
        Vec::new()
    };
    (regs, StackBytes { base, bytes, holes })
}

fn probe(sections: FileSections, random: &mut Rng, stacks: usize) {
    let code = sections.code.clone();
    let mut unwinder = Unwinder::default();
    unwinder.add(ModuleId(0), Box::new(sections));
    let bias = random.next() % 2 * 0x5000;
    // Above the file, the same code without one.
    let (start, size) = (code.svma + bias, code.bytes.len() as u64);
    let anonymous = start + size;
    let maps = Maps(
        vec![
            (start, anonymous, Some((ModuleId(0), bias))),
            (anonymous, anonymous + size, None),
        ],
        vec![(anonymous, code.bytes.clone())],
    );
    for _ in 0..stacks {
        let (mut regs, stack) = noise(random, &code);
        regs.ip = start + random.next() % (2 * size);
        let mut frames = Vec::new();
        let end = unwinder.unwind(&maps, &regs, &stack, &mut frames);
        assert!(!frames.is_empty() && frames.len() <= 3 * MAX_FRAMES);
        assert_eq!(end.is_err(), frames.last().unwrap().method == UnwindMethod::Failed);
        assert!(frames.iter().all(|f| f.cfa >= f.sp));
        unwinder.explain(ModuleId(0), random.next());
    }
}

#[test]
fn damaged_tables() {
    let (good, mut random, begun) = (FileSections::of_this_machine(), Rng(1), Instant::now());
    for round in 0..600 {
        let mut sections = good.clone();
        if let Some(section) = &mut sections.eh_frame {
            damage(&mut section.bytes, &mut random);
            section.svma = section.svma.wrapping_add(u64::from(round % 50 == 0).wrapping_neg());
        }
        match (&mut sections.hdr, round % 3) {
            (Some(hdr), 0) => damage(&mut hdr.bytes, &mut random),
            (hdr, 1) => *hdr = None,
            _ => {}
        }
        if round % 5 == 0 {
            sections.debug_frame = sections.eh_frame.take();
        }
        probe(sections, &mut random, 12);
    }
    assert!(begun.elapsed().as_secs() < 60, "took {:?}", begun.elapsed());
}

#[test]
fn damaged_code() {
    let (good, mut random, begun) = (FileSections::of_this_machine(), Rng(2), Instant::now());
    for round in 0..100 {
        let mut sections = FileSections {
            eh_frame: None,
            hdr: None,
            ..good.clone()
        };
        for _ in 0..1 + random.next() % 200 {
            damage(&mut sections.code.bytes, &mut random);
        }
        match round % 4 {
            0 => sections.functions.clear(),
            1 => sections
                .functions
                .iter_mut()
                .for_each(|f| *f = (f.0 ^ (random.next() % 32), random.next() % 100_000)),
            2 => sections.functions = vec![(0, u64::MAX), (u64::MAX, u64::MAX), (sections.code.svma, 0)],
            _ => {}
        }
        probe(sections, &mut random, 12);
    }
    assert!(begun.elapsed().as_secs() < 60, "took {:?}", begun.elapsed());
}

/// Code that makes a careless analysis quadratic or worse.
#[test]
fn code_that_is_slow_to_analyze() {
    let size = 1 << 20;
    let shapes: [&[u8]; 7] = [
        &[0xc3],                         // returns only
        &[0x75, 0x00],                   // jumps to the next instruction
        &[0x75, 0x80],                   // jumps back
        &[0x53, 0x75, 0xfd],             // pushes in loops
        &[0x48, 0x89, 0x1c, 0x24, 0x53], // stores and pushes
        &[0x48, 0x29, 0xc4, 0x75, 0xfb], // alloca in loops
        &[0x0f, 0x85, 0x00, 0x10, 0x00, 0x00, 0x50],
    ];
    for shape in shapes {
        let bytes: Vec<u8> = shape.iter().copied().cycle().take(size).collect();
        let sections = FileSections {
            functions: vec![(0x1000, size as u64)],
            code: CodeSection { svma: 0x1000, bytes },
            ..FileSections::default()
        };
        let begun = Instant::now();
        probe(sections, &mut Rng(3), 3);
        assert!(begun.elapsed().as_secs() < 10, "{shape:x?} took {:?}", begun.elapsed());
    }
}

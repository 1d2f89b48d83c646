//! Malformed files: no panic, no endless work.

mod common;

use std::time::{Duration, Instant};

use common::{Lcg, Scratch};
use symbolize::Module;

const SOURCE: &str = r#"
#include <stdlib.h>
static inline __attribute__((always_inline)) int in(int x) { return x ^ rand(); }
__attribute__((noinline)) int f(int x) { return in(x) + in(x + 1); }
static int counts[16];
int main(int argc, char **argv) { return f(argc) + counts[argc]++; }
"#;

/// Calls every function.
fn use_it(bytes: Vec<u8>) {
    let Ok(mut module) = Module::from_bytes(bytes) else {
        return;
    };
    let starts: Vec<u64> = module.symbols().take(30).map(|f| f.start).collect();
    let _ = module.lookup_many(&starts);
    for svma in (0x1000..0x1300).step_by(7) {
        let _ = module.lookup(svma);
    }
    let _ = (
        module.sources(),
        module.symbol_named("main"),
        module.build_id().map(<[u8]>::len),
    );
    let _ = module.data_objects(&[0, 0x4000, 0x4010, 0x4010, u64::MAX]);
    let _ = (module.lookup(0), module.lookup(u64::MAX), module.svma_of_offset(77));
}

fn small_elf(scratch: &Scratch, flags: &[&str]) -> Option<Vec<u8>> {
    let command: Vec<&str> = ["gcc", "-O2", "-nostartfiles", "-Wl,--entry=main"]
        .iter()
        .chain(flags)
        .copied()
        .collect();
    let path = scratch.compile("small", ("s.c", SOURCE), &command)?;
    std::fs::read(path).ok()
}

#[test]
fn truncated() {
    let scratch = Scratch::new("truncated");
    let Some(elf) = small_elf(&scratch, &["-g"]) else {
        return;
    };
    for len in (0..elf.len()).step_by(1 + elf.len() / 1000) {
        use_it(elf[..len].to_vec());
    }
}

#[test]
fn flipped_bits() {
    let scratch = Scratch::new("flipped");
    for flags in [&["-gdwarf-5"][..], &["-gdwarf-4"], &["-g", "-gz=zlib"]] {
        let Some(elf) = small_elf(&scratch, flags) else { return };
        let mut random = Lcg(7);
        // Half anywhere, half in the headers at both ends.
        for round in 0..1500u64 {
            let mut copy = elf.clone();
            for _ in 0..=random.below(8) {
                let at = match round % 4 {
                    0 => random.below(1024),
                    1 => elf.len() as u64 - 1 - random.below(2600),
                    _ => random.below(elf.len() as u64),
                } as usize;
                let value = random.below(256) as u8;
                copy[at] = if round % 3 == 0 {
                    value
                } else {
                    copy[at] ^ (1 << (value & 7))
                };
            }
            use_it(copy);
        }
    }
}

#[test]
fn noise_in_debug_sections() {
    let scratch = Scratch::new("noise");
    let Some(elf) = small_elf(&scratch, &["-g"]) else {
        return;
    };
    let mut random = Lcg(11);
    // After the loaded part there are mostly debug sections: fill parts of them with small numbers.
    for _ in 0..500 {
        let mut copy = elf.clone();
        let start = 0x3000 + random.below(elf.len() as u64 - 0x3000) as usize;
        let len = random.below(200) as usize;
        for byte in copy.iter_mut().skip(start).take(len) {
            *byte = random.below(40) as u8;
        }
        use_it(copy);
    }
}

/// A minimal ELF file with the given debug sections and one loadable segment.
fn elf_with(sections: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut elf = vec![0u8; 64 + 56];
    let mut names = vec![0u8];
    let mut headers = vec![[0u8; 64]];
    let mut header = |name: u32, kind: u32, offset: u64, size: u64| {
        let mut h = [0u8; 64];
        h[0..4].copy_from_slice(&name.to_le_bytes());
        h[4..8].copy_from_slice(&kind.to_le_bytes());
        h[24..32].copy_from_slice(&offset.to_le_bytes());
        h[32..40].copy_from_slice(&size.to_le_bytes());
        headers.push(h);
    };
    for (name, data) in sections {
        header(names.len() as u32, 1, elf.len() as u64, data.len() as u64);
        names.extend_from_slice(name.as_bytes());
        names.push(0);
        elf.extend_from_slice(data);
    }
    header(0, 3, elf.len() as u64, names.len() as u64);
    elf.extend_from_slice(&names);
    let table = elf.len() as u64;
    for h in &headers {
        elf.extend_from_slice(h);
    }
    elf[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0");
    elf[32..40].copy_from_slice(&64u64.to_le_bytes());
    elf[40..48].copy_from_slice(&table.to_le_bytes());
    for (at, value) in [
        (54, 56),
        (56, 1),
        (58, 64),
        (60, headers.len()),
        (62, headers.len() - 1),
    ] {
        elf[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
    }
    elf[64..68].copy_from_slice(&1u32.to_le_bytes());
    elf[64 + 40..64 + 48].copy_from_slice(&0x10_0000u64.to_le_bytes());
    elf
}

/// One DWARF 4 unit: entry 1 is the unit (0x1000 to 0x9000), the rest as given.
fn unit(body: &[u8]) -> Vec<u8> {
    let mut dies = vec![1];
    dies.extend_from_slice(&0x1000u64.to_le_bytes());
    dies.extend_from_slice(&0x8000u32.to_le_bytes());
    dies.extend_from_slice(body);
    let mut info = (dies.len() as u32 + 7).to_le_bytes().to_vec();
    info.extend_from_slice(&[4, 0, 0, 0, 0, 0, 8]);
    info.extend_from_slice(&dies);
    info
}

/// 1: unit with low_pc, high_pc; 2: function with the same; 3: inlined call with the same as data1 size; 4: function
/// with ranges; 5: inlined call of nothing.
fn abbreviations() -> Vec<u8> {
    vec![
        1, 0x11, 1, 0x11, 0x01, 0x12, 0x06, 0, 0, //
        2, 0x2e, 1, 0x11, 0x01, 0x12, 0x06, 0x03, 0x08, 0, 0, //
        3, 0x1d, 1, 0x11, 0x01, 0x12, 0x06, 0x31, 0x13, 0, 0, //
        4, 0x2e, 0, 0x55, 0x17, 0, 0, //
        5, 0x1d, 1, 0, 0, //
        0,
    ]
}

fn function(name: &str) -> Vec<u8> {
    let mut die = vec![2];
    die.extend_from_slice(&0x1000u64.to_le_bytes());
    die.extend_from_slice(&0x8000u32.to_le_bytes());
    die.extend_from_slice(name.as_bytes());
    die.push(0);
    die
}

fn lookups_take(sections: &[(&str, Vec<u8>)]) -> (Duration, Option<usize>) {
    let begin = Instant::now();
    let mut module = Module::from_bytes(elf_with(sections)).expect("opened");
    let found = module.lookup(0x1234).ok().map(|s| s.len());
    let _ = module.lookup_many(&(0x1000..0x1100).collect::<Vec<u64>>());
    (begin.elapsed(), found)
}

#[test]
fn a_handmade_file_works() {
    let mut body = function("real");
    let origin = 11 + 13; // refers to the function's own entry
    let mut call = vec![3];
    call.extend_from_slice(&0x1200u64.to_le_bytes());
    call.extend_from_slice(&0x100u32.to_le_bytes());
    call.extend_from_slice(&(origin as u32).to_le_bytes());
    body.extend_from_slice(&call);
    let (_, found) = lookups_take(&[(".debug_info", unit(&body)), (".debug_abbrev", abbreviations())]);
    assert_eq!(found, Some(2));
}

#[test]
fn a_million_nested_inlined_calls() {
    let mut body = function("real");
    body.extend(std::iter::repeat_n(5u8, 1 << 20));
    let (time, found) = lookups_take(&[(".debug_info", unit(&body)), (".debug_abbrev", abbreviations())]);
    assert_eq!(found, Some(1));
    assert!(time < Duration::from_secs(10), "{time:?}");
    // The same with code in each: truncated at some depth.
    let mut body = function("real");
    for _ in 0..100_000 {
        body.push(3);
        body.extend_from_slice(&0x1000u64.to_le_bytes());
        body.extend_from_slice(&0x8000u32.to_le_bytes());
        body.extend_from_slice(&24u32.to_le_bytes());
    }
    let (time, found) = lookups_take(&[(".debug_info", unit(&body)), (".debug_abbrev", abbreviations())]);
    assert!(found.is_some_and(|n| n < 1000), "{found:?}");
    assert!(time < Duration::from_secs(10), "{time:?}");
}

#[test]
fn many_functions_share_one_long_range_list() {
    let mut body = Vec::new();
    for _ in 0..50_000 {
        body.extend_from_slice(&[4, 0, 0, 0, 0]);
    }
    let mut ranges = Vec::new();
    for i in 0..50_000u64 {
        ranges.extend_from_slice(&(0x1000 + i).to_le_bytes());
        ranges.extend_from_slice(&(0x1001 + i).to_le_bytes());
    }
    let sections = [
        (".debug_info", unit(&body)),
        (".debug_abbrev", abbreviations()),
        (".debug_ranges", ranges),
    ];
    let (time, _) = lookups_take(&sections);
    assert!(time < Duration::from_secs(20), "{time:?}");
}

#[test]
fn entries_without_bytes_in_their_attributes() {
    // Abbreviation 2 has 60,000 attributes that are present without taking a byte, and 60,000 entries use it.
    let mut abbrev = vec![1, 0x11, 1, 0x11, 0x01, 0x12, 0x06, 0, 0, 2, 0x34, 0];
    for _ in 0..60_000 {
        abbrev.extend_from_slice(&[0x3f, 0x19]);
    }
    abbrev.extend_from_slice(&[0, 0, 0]);
    let (time, _) = lookups_take(&[(".debug_info", unit(&vec![2; 60_000])), (".debug_abbrev", abbrev)]);
    assert!(time < Duration::from_secs(20), "{time:?}");
}

#[test]
fn overlapping_abbreviations() {
    // Every unit starts its table one byte later than the unit before.
    let mut abbrev: Vec<u8> = Vec::new();
    for _ in 0..30_000 {
        abbrev.extend_from_slice(&[1, 0x11, 0, 0, 0]);
    }
    let mut info = Vec::new();
    for i in 0..150_000u32 {
        info.extend_from_slice(&8u32.to_le_bytes());
        info.extend_from_slice(&4u16.to_le_bytes());
        info.extend_from_slice(&i.to_le_bytes());
        info.extend_from_slice(&[8, 1]);
    }
    let (time, _) = lookups_take(&[(".debug_info", info), (".debug_abbrev", abbrev)]);
    assert!(time < Duration::from_secs(20), "{time:?}");
}

#[test]
fn compressed_sections_with_a_false_size() {
    for size in [u64::MAX, 1 << 40, 1 << 30, 1 << 20] {
        let mut data = b"ZLIB".to_vec();
        data.extend_from_slice(&size.to_be_bytes());
        data.extend_from_slice(&[0x78, 0x9c, 0x03, 0, 0, 0, 0, 1]);
        let mut module = Module::from_bytes(elf_with(&[(".zdebug_info", data)])).expect("opened");
        let why = module.lookup(0x1000).expect_err("no symbol");
        assert!(matches!(why, symbolize::Reason::Corrupt(_)), "{why}");
        assert!(
            module
                .dwarf_error()
                .is_some_and(|e| e.kind() == symbolize::ErrorKind::Corrupt)
        );
    }
}

/// A segment that claims more bytes than there are addresses after it.
#[test]
fn endless_segment() {
    let (offset, address) = (0x1000u64, 0x40_0000u64);
    let mut file = vec![0; 64 + 56];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &[3, 0, 62, 0, 1]); // shared object, x86-64
    put(32, &64u64.to_le_bytes()); // program headers
    put(52, &[64, 0, 56, 0, 1, 0]);
    put(64, &[1, 0, 0, 0, 5, 0, 0, 0]); // PT_LOAD, r-x
    for (at, value) in [(8, offset), (16, address), (32, u64::MAX), (40, u64::MAX)] {
        put(64 + at, &value.to_le_bytes());
    }
    let mut module = Module::from_bytes(file).expect("an ELF file");
    assert_eq!(module.svma_of_offset(offset + 5), Some(address + 5));
    assert_eq!(module.svma_of_offset(offset - 1), None);
    assert_eq!(module.svma_of_offset(u64::MAX), None);
    assert_eq!(module.lookup(address - 1), Err(symbolize::Reason::OutsideFile));
}

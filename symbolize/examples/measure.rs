//! Looks up pseudo-random addresses of functions of a file, and prints the cost.
//! `cargo run --release --example measure -- FILE [COUNT]`

use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: measure FILE [COUNT]")?;
    let count: usize = args.next().map_or(Ok(10_000), |n| n.parse())?;
    // The addresses are chosen by another copy, so that the measured one is cold.
    let functions: Vec<(u64, u64)> = symbolize::Module::from_file(std::fs::File::open(&path)?)?
        .symbols()
        .filter(|f| f.size > 0)
        .map(|f| (f.start, f.size))
        .collect();
    let mut state = 42u64;
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below.max(1)
    };
    let svmas: Vec<u64> = (0..count)
        .filter_map(|_| {
            let (start, size) = *functions.get(random(functions.len() as u64) as usize)?;
            Some(start + random(size))
        })
        .collect();

    let start = Instant::now();
    let mut module = symbolize::Module::from_file(std::fs::File::open(&path)?)?;
    let opened = start.elapsed();
    let _ = module.lookup(svmas.first().copied().unwrap_or(0));
    let first = start.elapsed();
    let found = module.lookup_many(&svmas);
    let cold = start.elapsed();
    let warm = Instant::now();
    let again = module.lookup_many(&svmas);
    let warm = warm.elapsed();
    assert!(found == again);
    let frames: usize = found.iter().flatten().map(Vec::len).sum();
    let lines = found.iter().flatten().flatten().filter(|s| s.line.is_some()).count();
    let unknown = found.iter().filter(|f| f.is_err()).count();
    println!(
        "{} addresses, {frames} frames, {lines} with line, {unknown} unknown",
        svmas.len()
    );
    println!("open {opened:?}, first lookup {first:?}, all cold {cold:?}, all again {warm:?}");
    for line in std::fs::read_to_string("/proc/self/status")?
        .lines()
        .filter(|l| l.starts_with("VmHWM"))
    {
        println!("{line}");
    }
    Ok(())
}

//! Cost of names: 10,000 addresses of each large file that this program or Python maps, the first time (tables are
//! read) and again.
//!
//! `cargo bench --bench resolve [-- FILE...]`

use std::fs::File;
use std::hint::black_box;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use symbolize::Module;

const ADDRESSES: usize = 10_000;

/// This program, its C library, and what `python3` maps.
fn files() -> Vec<PathBuf> {
    let named: Vec<PathBuf> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .map(PathBuf::from)
        .collect();
    if !named.is_empty() {
        return named;
    }
    let mut maps = std::fs::read_to_string("/proc/self/maps").expect("our own maps");
    let python = Command::new("python3")
        .args(["-c", "print(open('/proc/self/maps').read())"])
        .output();
    maps.extend(python.iter().map(|out| String::from_utf8_lossy(&out.stdout)));
    let paths = maps
        .lines()
        .filter(|l| l.contains("r-xp"))
        .filter_map(|l| l.find('/').map(|at| PathBuf::from(&l[at..])));
    let mut paths: Vec<_> = paths
        .filter(|p| p.metadata().is_ok_and(|m| m.len() > 1 << 20))
        .collect();
    paths.sort();
    paths.dedup();
    paths
}

fn main() {
    println!("{ADDRESSES} addresses of each file; ms");
    println!(
        "{:<28} {:>8} {:>9} {:>9} {:>7} {:>7}",
        "file", "cold", "warm", "us each", "ratio", "named"
    );
    for path in files() {
        let Ok(mut module) = File::open(&path)
            .map_err(|_| ())
            .and_then(|f| Module::from_file(f).map_err(|_| ()))
        else {
            println!("{}: cannot be read", path.display());
            continue;
        };
        // Addresses in functions, spread over all of them; the timed module has not read its symbols yet.
        let functions: Vec<(u64, u64)> = module.symbols().map(|f| (f.start, f.size.max(1))).collect();
        if functions.is_empty() {
            println!("{}: no symbols", path.display());
            continue;
        }
        let places: Vec<u64> = (0..ADDRESSES)
            .map(|i| {
                let (start, size) = functions[i * functions.len() / ADDRESSES];
                start + (i as u64 * 37) % size
            })
            .collect();
        let file = File::open(&path).expect("opened before");
        let start = Instant::now();
        let mut module = Module::from_file(file).expect("read before");
        let found = module.lookup_many(&places);
        let cold = start.elapsed().as_secs_f64() * 1e3;
        let start = Instant::now();
        black_box(module.lookup_many(&places));
        let warm = start.elapsed().as_secs_f64() * 1e3;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let named = found.iter().filter(|f| f.is_ok()).count();
        println!(
            "{name:<28} {cold:>8.1} {warm:>9.2} {:>9.2} {:>7.1} {named:>7}",
            warm * 1e3 / ADDRESSES as f64,
            cold / warm
        );
    }
}

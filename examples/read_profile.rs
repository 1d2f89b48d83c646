//! A program that reads a profile: prints the functions with the most samples of their own.
//!
//! ```text
//! nativeprof record -o out.json -- python3 script.py
//! cargo run --example read_profile -- out.json
//! ```

use std::error::Error;
use std::fs;

use nativeprof::profile::json;
use nativeprof::profile::stats::Stats;

/// Name of a function, its own samples, and their share of all.
type Row = (String, u64, f64);

/// The functions with the most samples of their own.
pub fn hottest(profile: &[u8], number: usize) -> Result<Vec<Row>, Box<dyn Error>> {
    let profile = json::read(profile)?;
    let stats = Stats::new(&profile);
    let all = stats.samples().max(1) as f64;
    let functions = (0..).zip(stats.functions());
    let mut rows: Vec<_> = functions
        .filter(|(_, counts)| counts.self_count > 0)
        .map(|(function, counts)| {
            let name = stats.frame(function).name.to_string();
            (name, counts.self_count, counts.self_count as f64 / all)
        })
        .collect();
    rows.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    rows.truncate(number);
    Ok(rows)
}

#[allow(dead_code, reason = "the test of this file includes it as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("which profile?")?;
    for (name, samples, share) in hottest(&fs::read(path)?, 20)? {
        println!("{samples:8} {:5.1} %  {name}", share * 100.0);
    }
    Ok(())
}

//! A day of a synthetic host: the size of its segments. `cargo bench --bench history -- DIR` leaves them in DIR, to
//! measure commands that read them.

use std::path::PathBuf;
use std::time::Instant;

use nativeprof::history::Directory;

#[path = "../tests/history/day.rs"]
mod day;

fn main() {
    let arguments = std::env::args_os().skip(1).filter(|word| word != "--bench");
    let temporary = std::env::temp_dir().join(format!("nativeprof-day-{}", std::process::id()));
    let given: Option<PathBuf> = arguments.map(PathBuf::from).next();
    let path = given.as_ref().unwrap_or(&temporary);
    let host = day::Host {
        processes: 200,
        services: 20,
        samples: 2400,
    };
    let (start, minutes) = (Instant::now(), 1440);
    day::write(path, host, minutes, |_| 20);
    let directory = Directory::open(path).expect("segments");
    let size: u64 = directory.segments().iter().map(|segment| segment.size).sum();
    println!(
        "{minutes} segments, {} KB each, {:.1} MB; written in {:.1} s",
        size / minutes / 1000,
        size as f64 / 1e6,
        start.elapsed().as_secs_f64()
    );
    if given.is_none() {
        std::fs::remove_dir_all(path).expect("removed");
    }
}

//! Cost of reading what all suspended tasks of asyncio await, in a program with 10,000 of them: CPU time, the first time and
//! when nothing has changed since.
//!
//! `cargo bench --bench tasks -- [PYTHON...]`

use std::io::Read;
use std::process::{Child, Command, Stdio};

use nativeprof::session::{Session, SessionOptions};
use nativeprof::sys::clock;
use nativeprof::target::memory::Pages;
use nativeprof::target::system::{LiveSystem, ProcessMemory};

const TASKS: usize = 10_000;
const RUNS: usize = 21;

const PROGRAM: &str = "
import asyncio, sys
async def inner():
    await asyncio.sleep(3600)
async def outer():
    await inner()
async def main(n):
    tasks = [asyncio.ensure_future(outer()) for _ in range(n)]
    await asyncio.sleep(0.1)
    print('.', flush=True)
    await asyncio.sleep(3600)
asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main(int(sys.argv[1])))
";

fn start(python: &str) -> Child {
    let mut command = Command::new(python);
    command.args(["-W", "ignore", "-c", PROGRAM, &TASKS.to_string()]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut ready = [0];
    let out = child.stdout.as_mut().expect("a pipe");
    out.read_exact(&mut ready).expect("it has created its tasks");
    child
}

fn median(mut times: Vec<u64>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2] as f64 / 1e6
}

fn measure(python: &str) {
    let mut child = start(python);
    let pid = child.id();
    let mut session = Session::new(SessionOptions::default(), Box::new(LiveSystem));
    session.open(pid, &mut |_, _| Ok(())).expect("it can be read");
    let live = ProcessMemory(&LiveSystem, pid);
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let mut reader = session.task_reader(pid).expect("it has imported asyncio");
        for times in [&mut first, &mut again] {
            let began = clock::process_cpu_time();
            let tasks = reader.suspended(&live, &Pages::new(&live)).expect("it has tasks");
            times.push(clock::process_cpu_time() - began);
            assert_eq!(tasks.len(), TASKS + 1);
        }
    }
    let (first, again) = (median(first), median(again));
    println!("{python}: {TASKS} tasks, first {first:.1} ms, unchanged {again:.1} ms");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
}

fn main() {
    let pythons: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    if pythons.is_empty() {
        return measure("python3");
    }
    pythons.iter().for_each(|python| measure(python));
}

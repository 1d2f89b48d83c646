//! Cost of reading what all suspended tasks of asyncio await, in a program with 10,000 of them: CPU time, the first time and
//! when nothing has changed since; and in a program of 40 tasks of which 15 take turns: CPU time and calls that read its memory.
//!
//! `cargo bench --bench tasks -- [PYTHON...]`

use std::cell::Cell;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nativeprof::process::memory::{Memory, Pages};
use nativeprof::process::system::{LiveSystem, ProcessMemory};
use nativeprof::session::Inspection;
use nativeprof::sys::clock;

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

/// Some tasks wait for the whole time; others work for 100 us, and then yield or sleep.
const BUSY_PROGRAM: &str = "
import asyncio, time
async def waits(event):
    await event.wait()
async def yields():
    await asyncio.sleep(0)
async def rests():
    await asyncio.sleep(0.004)
async def works():
    end = time.perf_counter() + 100e-6
    while time.perf_counter() < end:
        pass
async def takes_turns():
    turn = 0
    while True:
        await works()
        turn += 1
        await (yields() if turn % 5 else rests())
async def main():
    event = asyncio.Event()
    tasks = [asyncio.ensure_future(waits(event)) for _ in range(24)]
    tasks += [asyncio.ensure_future(takes_turns()) for _ in range(15)]
    await asyncio.sleep(0.1)
    print('.', flush=True)
    await event.wait()
asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main())
";
const BUSY_TASKS: usize = 40;
const BUSY_RUNS: usize = 1000;

/// Memory that counts the calls that read it.
struct Counted<'a> {
    memory: ProcessMemory<'a>,
    calls: Cell<usize>,
}

impl Counted<'_> {
    fn count(&self) {
        self.calls.set(self.calls.get() + 1);
    }
}

impl Memory for Counted<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        self.count();
        self.memory.read(avma, buf)
    }

    fn read_pieces(&self, pieces: &[(u64, usize)], buf: &mut [u8]) -> usize {
        self.count();
        self.memory.read_pieces(pieces, buf)
    }
}

fn start(python: &str, program: &str) -> Child {
    let mut command = Command::new(python);
    command.args(["-W", "ignore", "-c", program, &TASKS.to_string()]);
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
    let mut child = start(python, PROGRAM);
    let pid = child.id();
    let (inspection, _) = Inspection::open(pid, true).expect("it can be read");
    let live = ProcessMemory(&LiveSystem, pid);
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let mut reader = inspection.task_reader().expect("it has imported asyncio");
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

fn measure_busy(python: &str) {
    let mut child = start(python, BUSY_PROGRAM);
    let pid = child.id();
    let (inspection, _) = Inspection::open(pid, true).expect("it can be read");
    let live = Counted {
        memory: ProcessMemory(&LiveSystem, pid),
        calls: Cell::default(),
    };
    let mut reader = inspection.task_reader().expect("it has imported asyncio");
    let (mut times, mut calls, mut needed) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..BUSY_RUNS {
        live.calls.set(0);
        let began = clock::process_cpu_time();
        let memory = Pages::with_first(&live, &needed);
        let tasks = reader.suspended(&live, &memory).expect("it has tasks");
        needed = memory.used();
        times.push(clock::process_cpu_time() - began);
        calls.push(live.calls.get() as u64 * 1_000_000);
        assert!(!tasks.is_empty());
        std::thread::sleep(Duration::from_millis(1));
    }
    let (time, calls) = (1000.0 * median(times), median(calls));
    println!("{python}: {BUSY_TASKS} tasks, 15 active: {time:.0} us, {calls} calls");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
}

fn main() {
    let mut pythons: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    if pythons.is_empty() {
        pythons.push("python3".to_string());
    }
    for python in &pythons {
        measure(python);
        measure_busy(python);
    }
}

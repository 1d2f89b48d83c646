//! `top` on a terminal: what it shows compared with what the program prints, its keys, and the state of the terminal
//! afterwards.
//!
//! Needs root, tmux, gcc and CPython; fails with a message where one is missing.

use std::process::Command;
use std::time::Duration;

use common::chance::{assert_likely, repeated};
use common::{Program, Scratch, live, nativeprof, newest_python, programs};

mod common;
#[path = "history/day.rs"]
mod day;

/// A separate terminal.
struct Terminal {
    socket: String,
}

impl Terminal {
    /// Runs `nativeprof top` in a shell that prints the state of the terminal afterwards.
    fn start(words: &str) -> Terminal {
        Terminal::start_after("echo BEFORE", words)
    }

    /// The same, after another command.
    fn start_after(before: &str, words: &str) -> Terminal {
        let socket = format!("nativeprof-test-{}-{words}", std::process::id()).replace([' ', '/'], "_");
        let script = format!(
            "{before}; {} top {words}; echo CODE $?; stty -a | grep -o ' icanon\\| echo '; sleep 1000",
            env!("CARGO_BIN_EXE_nativeprof")
        );
        let terminal = Terminal { socket };
        terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40", &script]);
        terminal
    }

    fn tmux(&self, words: &[&str]) -> String {
        let done = Command::new("tmux").args(["-L", &self.socket]).args(words).output();
        let done = done.expect("tmux is needed to try `top`: install it");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "tmux {words:?}: {said}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// The PID of nativeprof, below the shell.
    fn profiler(&self) -> String {
        let shell = self.tmux(&["display-message", "-p", "#{pane_pid}"]);
        let shell = shell.trim();
        let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).expect("a shell");
        children.split_whitespace().next().expect("a child").to_string()
    }

    /// Waits until the screen is as expected.
    fn wait(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        for _ in 0..300 {
            let screen = self.screen();
            if wanted(&screen) {
                return screen;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("no {what} on the screen:\n{}", self.screen());
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.socket, "kill-server"]).output();
    }
}

/// Total percent of a function on the screen.
fn total(screen: &str, name: &str) -> Option<f64> {
    let row = screen.lines().find(|l| l.split_whitespace().nth(4) == Some(name))?;
    row.split_whitespace().nth(1)?.parse().ok()
}

/// What has grown since the start, in the account on the screen, MiB.
fn grown(screen: &str) -> Option<f64> {
    let (_, rest) = screen.lines().nth(1)?.split_once("at the start + ")?;
    let mut words = rest.split(' ');
    let amount = words.next()?.parse().ok()?;
    (words.next()? == "MiB").then_some(amount)
}

/// Growth of resident memory: bytes by function that are still there, and the account of the process.
#[test]
fn resident_memory_by_function() {
    const MIB: f64 = 1048576.0;
    let _live = live();
    let mut program = Program::start(programs::known_growth(&[]));
    let terminal = Terminal::start(&format!(
        "{} --mode rss --interval 64KiB --max-overhead 100",
        program.pid()
    ));
    terminal.wait("account", |s| s.contains("RSS ") && s.contains("at the start"));
    program.send("go");
    program.wait_for("DONE");
    terminal.keys(&["/", "^(kept|unmapped|given_back_twice|by_thread)$", "Enter"]);
    // Bytes in all, in MiB.
    let total = |screen: &str, name: &str| -> Option<f64> {
        let row = screen
            .lines()
            .find(|line| line.split_whitespace().nth(6) == Some(name))?;
        let words: Vec<&str> = row.split_whitespace().collect();
        let unit = match words[5] {
            "MiB" => 1.0,
            "KiB" => 1.0 / 1024.0,
            _ => 1.0 / MIB,
        };
        words[4].parse::<f64>().ok().map(|amount| amount * unit)
    };
    let screen = terminal.wait("functions", |s| {
        // The last one: the samples of the others are there.
        total(s, "by_thread").is_some_and(|amount| amount > 10.0) && total(s, "unmapped").is_none()
    });
    // Within four standard deviations of samples of 64 KiB.
    for (function, known) in [("kept", 16.0), ("given_back_twice", 8.0)] {
        let (seen, band) = (total(&screen, function).unwrap_or(0.0), 4.0 * f64::sqrt(known / 16.0));
        assert!(
            (seen - known).abs() < band,
            "{function}: {seen} MiB, not {known}\n{screen}"
        );
    }
    assert!(
        screen.contains("since the start: ") && screen.contains("is still resident"),
        "{screen}"
    );
    let grown = grown(&screen).unwrap_or_else(|| panic!("{screen}"));
    assert!((grown - 208.0).abs() < 4.0, "{screen}");
    terminal.keys(&["q"]);
    let end = terminal.wait("end", |s| s.contains("CODE 0"));
    assert!(end.contains("memory: ") && end.contains("given back"), "{end}");
    program.send("end");
    program.finish();
}

/// At the end it says which samples the budget left out.
#[test]
fn the_budget_of_samples() {
    let _live = live();
    let mut program = Program::start(programs::known_growth(&[]));
    let terminal = Terminal::start(&format!(
        "{} --mode rss --interval 16KiB --max-overhead 0.1",
        program.pid()
    ));
    terminal.wait("account", |s| s.contains("at the start"));
    program.send("go");
    program.wait_for("DONE");
    terminal.wait("growth", |s| grown(s).is_some_and(|grown| grown > 200.0));
    terminal.keys(&["q"]);
    let end = terminal.wait("end", |s| s.contains("CODE 0"));
    assert!(end.contains("  budget: ") && end.contains("  memory: "), "{end}");
    program.send("end");
    program.finish();
}

#[test]
fn shares_keys_and_the_terminal() {
    let _live = live();
    repeated(|| {
        let mut program = Program::start(newest_python().script("shares.py"));
        let scratch = Scratch::new();
        let terminal = Terminal::start(&format!("{} -r 500", program.pid()));
        terminal.wait("table", |s| s.contains("burn"));
        terminal.keys(&["s", "+", "/", "^run_", "Enter"]);
        let seconds = |s: &str| s.lines().filter(|l| l.contains(" run_")).count() >= 6 && s.contains("last 10 s");
        std::thread::sleep(Duration::from_secs(3));
        let screen = terminal.wait("parts of the program", seconds);
        let facts = screen.lines().nth(2).expect("a line of facts").to_string();
        let per_second: f64 = facts
            .split_once(": ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("{facts}"));
        assert!(per_second > 0.0, "{facts}");
        let exact: f64 = facts
            .split_once("exact ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("{facts}"));
        assert_likely!(exact > 95.0, "{facts}");

        // Only matching rows; then the callers, and back.
        terminal.keys(&["/"]);
        (0.."^run_".len()).for_each(|_| terminal.keys(&["BSpace"]));
        terminal.keys(&["^run_beta$", "Enter"]);
        terminal.wait("filter", |s| s.contains("[/^run_beta$]") && !s.contains("run_alpha"));
        terminal.keys(&["Enter"]);
        terminal.wait("callers", |s| {
            s.contains("called by") && s.contains("main") && s.contains("the function")
        });
        terminal.keys(&["Escape"]);
        terminal.wait("table", |s| s.contains("FUNCTION"));
        terminal.keys(&["Escape"]);
        terminal.wait("no filter", |s| s.contains("FUNCTION") && !s.contains("[/"));
        terminal.keys(&["2"]);
        terminal.wait("stacks", |s| s.contains("STACK") && s.contains("shared by all stacks"));
        terminal.keys(&["3"]);
        terminal.wait("threads", |s| s.contains("THREAD") && s.contains("holds the GIL"));
        terminal.keys(&["?"]);
        terminal.wait("help", |s| s.contains("callers and callees of a function"));
        terminal.keys(&["?"]);

        // The contents of the screen, as a file.
        let file = scratch.path("now.json");
        let path = file.display().to_string();
        terminal.keys(&["1", "/", "^run_", "Enter", "f"]);
        terminal.wait("a frozen screen", |s| s.contains("[frozen]"));
        terminal.keys(&["w"]);
        terminal.wait("question", |s| s.contains("save to: nativeprof-"));
        terminal.keys(&[&path, "Enter"]);
        let frozen = terminal.wait("answer", |s| s.contains("written: ") && s.contains("FUNCTION"));
        let bytes = std::fs::read(&file).unwrap_or_else(|e| panic!("{e}: {frozen}"));
        let profile = nativeprof::profile::json::read(&bytes).expect("a profile");
        let all = profile.nodes[0].count as f64;
        let stats = nativeprof::profile::stats::Stats::new(&profile);
        for (id, counts) in stats.functions().iter().enumerate() {
            let name = &stats.frame(id as u32).name;
            if name.starts_with("run_") {
                let (shown, saved) = (total(&frozen, name), 100.0 * counts.total as f64 / all);
                assert!(
                    shown.is_some_and(|shown| (shown - saved).abs() < 0.06),
                    "{name}: {shown:?} {saved}"
                );
            }
        }

        // Small and large screens.
        for (width, height) in [("30", "8"), ("10", "3"), ("200", "50"), ("120", "40")] {
            terminal.tmux(&["resize-window", "-x", width, "-y", height]);
            std::thread::sleep(Duration::from_millis(150));
        }
        terminal.wait("table", |s| s.contains("FUNCTION") && s.contains("run_alpha"));

        terminal.keys(&["q"]);
        let left = terminal.wait("shell as it was", |s| {
            s.contains("CODE 0") && s.contains("icanon") && s.contains("echo")
        });
        assert!(left.contains("BEFORE") && !left.contains("SELF%"), "{left}");
        assert!(left.contains(" samples in "), "{left}");

        // The figures compared with the program's own measurements.
        let spent = program.finish();
        let time: f64 = spent.values().sum();
        let samples = per_second * 3.0;
        for (name, ns) in &spent {
            let (shown, truth) = (total(&screen, name).unwrap_or(0.0) / 100.0, ns / time);
            let band = 4.0 * (truth * (1.0 - truth) / samples).sqrt() + 0.02;
            assert_likely!(
                (shown - truth).abs() < band,
                "{name}: {shown} on the screen, {truth} in truth\n{screen}"
            );
        }
    });
}

/// A command that `top` starts does not write on its screen, and ends with it.
/// The task that runs is above its coroutine.
#[test]
fn tasks() {
    let _live = live();
    let program = Program::start(newest_python().script("task_shares.py"));
    let terminal = Terminal::start(&format!("{} -r 500 --tasks", program.pid()));
    terminal.wait("table", |s| s.contains("FUNCTION"));
    terminal.keys(&["2"]);
    terminal.wait("tasks", |s| s.contains("[task: alpha]") && s.contains("[task: parent]"));
    terminal.keys(&["q"]);
    terminal.wait("the end", |s| s.contains("CODE 0"));
}

/// The newest minutes of a history, while segments are added.
#[test]
fn a_history() {
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let host = day::Host {
        processes: 8,
        services: 2,
        samples: 400,
    };
    day::write(&directory, host, 12, |_| 20);
    let words = format!("{} --service service-1", directory.display());
    let terminal = Terminal::start(&words);
    let shown = |s: &str| s.contains("last 10 min") && s.contains("Class1.function_1") && !s.contains("service-0");
    let facts = |screen: &str| screen.lines().nth(2).unwrap_or_default().to_string();
    let first = facts(&terminal.wait("functions of ten minutes", shown));
    // The same selection of another time: more samples, also of a segment that comes while it is shown.
    terminal.keys(&["+"]);
    let second = terminal.wait("half an hour", |s| s.contains("last 30 min"));
    assert_ne!(first, facts(&second));
    day::write(&directory, host, 1, |_| 20);
    terminal.wait("another segment", |s| {
        s.contains("last 30 min") && facts(s) != facts(&second)
    });
    terminal.keys(&["3"]);
    terminal.wait("no threads", |s| s.contains("a history has none"));
    terminal.keys(&["q"]);
    let left = terminal.wait("the end", |s| s.contains("CODE 0"));
    assert!(left.contains("10 segments from"), "{left}");

    for (words, code, why) in [
        (
            "1 --service x",
            2,
            "only the directory of a host's history has services",
        ),
        ("1 --pid 2", 2, "two processes were given"),
        (words.as_str(), 2, "report "),
    ] {
        let done = nativeprof(&["top"]).args(words.split(' ')).output().expect("it runs");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(
            done.status.code() == Some(code) && said.contains(why),
            "{words}: {said}"
        );
    }
}

#[test]
fn what_keeps_the_loop() {
    let _live = live();
    repeated(|| {
        let program = Program::start(newest_python().script("loop_blocks.py"));
        let terminal = Terminal::start(&format!("{} --lag 50ms", program.pid()));
        terminal.wait("table", |s| s.contains("FUNCTION"));
        terminal.keys(&["5"]);
        let row = |s: &str, words: [&str; 2]| {
            let has = |l: &&str| words.iter().all(|word| l.contains(word)) && l.contains("ms");
            s.lines().find(has).map(String::from)
        };
        let screen = terminal.wait("both functions", |s| {
            let rows = [["sleeper", "sleeping"], ["computer", "computing"]];
            s.contains("LONGEST") && rows.iter().all(|words| row(s, *words).is_some())
        });
        let took = row(&screen, ["computer", "computing"]).expect("it is there");
        let took: f64 = took
            .split_whitespace()
            .nth(3) // after the count and the time in all
            .and_then(|n| n.parse().ok())
            .expect("a time");
        assert_likely!((100.0..400.0).contains(&took), "{screen}");
        terminal.keys(&["/", "computing", "Enter"]);
        terminal.wait("one row", |s| row(s, ["sleeper", "sleeping"]).is_none());
        terminal.keys(&["Enter"]);
        terminal.wait("its stack", |s| {
            let function = s.lines().nth(4).is_some_and(|first| first.contains("ing (/"));
            s.contains("STACK") && function && s.contains("called by") && !s.contains("_run_once")
        });
        terminal.keys(&["Escape"]);
        terminal.wait("the list", |s| s.contains("LONGEST"));
        terminal.keys(&["q"]);
        terminal.wait("shell", |s| s.contains("CODE 0"));
    });
}

#[test]
fn a_command() {
    let _live = live();
    let script = newest_python().script("shares.py");
    let words: Vec<_> = std::iter::once(script.get_program()).chain(script.get_args()).collect();
    let words: Vec<_> = words.into_iter().map(|word| word.to_string_lossy()).collect();
    let set = script.get_envs().filter_map(|(name, value)| {
        Some(format!(
            "export {}='{}'; ",
            name.to_string_lossy(),
            value?.to_string_lossy()
        ))
    });
    let before = format!(
        "{}PROGRAM='{} 3600'; echo BEFORE",
        set.collect::<String>(),
        words.join(" ")
    );
    let terminal = Terminal::start_after(&before, "-- $PROGRAM");
    let screen = terminal.wait("table", |s| s.contains("burn") && s.contains("shares.py:"));
    assert!(!screen.contains("READY"), "{screen}");
    let pid: u32 = screen
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("a PID");
    assert!(nativeprof::sys::procfs::stat_state(pid).is_some());
    terminal.keys(&["q"]);
    terminal.wait("shell", |s| s.contains("CODE 0") && s.contains("icanon"));
    for _ in 0..400 {
        // Its parent may not have reaped it yet.
        if nativeprof::sys::procfs::stat_state(pid).is_none_or(|state| state == 'Z') {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("the command still runs");
}

#[test]
fn signals_are_passed_on_to_a_command() {
    let _live = live();
    let scratch = Scratch::new();
    let (script, file) = (scratch.path("x.sh"), scratch.path("received"));
    let text = format!("trap 'echo > {}' USR1; while :; do sleep 0.05; done", file.display());
    std::fs::write(&script, text).expect("a file");
    let terminal = Terminal::start(&format!("-- sh {}", script.display()));
    terminal.wait("table", |s| s.contains("SELF%"));
    let pid = terminal.profiler();
    let sent = Command::new("kill").args(["-s", "USR1", &pid]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    for _ in 0..400 {
        if file.exists() {
            terminal.keys(&["q"]);
            terminal.wait("shell", |s| s.contains("CODE 0"));
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("no signal: {}", terminal.screen());
}

#[test]
fn ctrl_c_and_the_end_of_the_program() {
    let _live = live();
    let mut program = Program::start(newest_python().script("shares.py"));
    let terminal = Terminal::start(&program.pid().to_string());
    terminal.wait("table", |s| s.contains("run_"));
    program.finish();
    terminal.wait("end", |s| s.contains("[ended]"));
    terminal.keys(&["2"]);
    terminal.wait("stacks of before", |s| s.contains("run_"));
    terminal.keys(&["C-c"]);
    let left = terminal.wait("shell", |s| s.contains("CODE 0") && s.contains("icanon"));
    assert!(left.contains("BEFORE") && !left.contains("SELF%"), "{left}");
}

#[test]
fn it_ends_with_its_terminal() {
    let _live = live();
    let mut program = Program::start(newest_python().script("shares.py"));
    // As with nohup: the signal that reports it is ignored.
    let terminal = Terminal::start_after("trap '' HUP", &program.pid().to_string());
    terminal.wait("table", |s| s.contains("burn"));
    let pid = terminal.profiler();
    drop(terminal);
    for _ in 0..1200 {
        if !std::path::Path::new(&format!("/proc/{pid}/exe")).exists() {
            program.finish();
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let state = |file| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    panic!(
        "its terminal is gone, and it still runs: {} in {} {}",
        state("cmdline"),
        state("wchan"),
        state("status")
    );
}

#[test]
fn a_pipe_is_not_a_terminal() {
    let done = nativeprof(&["top", &std::process::id().to_string()]).output();
    let done = done.expect("nativeprof starts");
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(
        said.contains("needs a terminal") && said.contains("nativeprof record --pid"),
        "{said}"
    );
}

//! What the kernel tells of one thread that is left alone: `/proc/PID/task/TID`.

use std::{fs, io};

use crate::sample::{Pid, Tid};

/// State of a thread and how often it has left a CPU. Equal before and after a look, and not running: it did not run in
/// between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Still {
    /// `R`, `S`, `D`, `T`, `t`, `Z` ... (proc_pid_status(5)).
    pub state: char,
    switches: (u64, u64),
}

impl Still {
    /// `None` if the thread has ended.
    pub fn read(pid: Pid, tid: Tid) -> Option<Still> {
        still(&fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok()?)
    }

    /// It runs, or waits for a CPU.
    pub fn runs(&self) -> bool {
        self.state == 'R'
    }
}

fn still(status: &str) -> Option<Still> {
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        Some(line.strip_prefix(':')?.trim())
    };
    let number = |name| field(name)?.parse().ok();
    Some(Still {
        state: field("State")?.chars().next()?,
        switches: (
            number("voluntary_ctxt_switches")?,
            number("nonvoluntary_ctxt_switches")?,
        ),
    })
}

/// The number of a thread in its own pid namespace.
pub fn own_number(pid: Pid, tid: Tid) -> Option<Tid> {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

/// Where a thread that does not run is blocked, in user space and in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Number of the system call and its arguments; `None`: in none (a page fault, job control).
    pub call: Option<(u64, [u64; 6])>,
    pub sp: u64,
    pub ip: u64,
}

/// `None` if the thread runs.
///
/// # Errors
/// It has ended, or may not be looked at (the right to trace it).
pub fn blocked(pid: Pid, tid: Tid) -> io::Result<Option<Blocked>> {
    Ok(parse_blocked(&fs::read_to_string(format!(
        "/proc/{pid}/task/{tid}/syscall"
    ))?))
}

/// `202 0x7f.. 0x80 ... 0xSP 0xIP`, `-1 0xSP 0xIP`, `running` (proc_pid_syscall(5)).
pub fn parse_blocked(text: &str) -> Option<Blocked> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let hex = |word: &&str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let (first, rest) = words.split_first()?;
    let numbers: Vec<u64> = rest.iter().map(hex).collect::<Option<_>>()?;
    let (call, at) = match first.parse::<i64>().ok()? {
        -1 => (None, &numbers[..]),
        number => {
            let args: [u64; 6] = numbers.get(..6)?.try_into().ok()?;
            (Some((u64::try_from(number).ok()?, args)), &numbers[6..])
        }
    };
    let [sp, ip] = at else { return None };
    Some(Blocked { call, sp: *sp, ip: *ip }).filter(|b| b.ip != 0)
}

/// What a thread does in the kernel, innermost function first; `None` where that may not be seen (CAP_SYS_ADMIN).
pub fn kernel_stack(pid: Pid, tid: Tid) -> Option<Vec<String>> {
    Some(parse_kernel_stack(
        &fs::read_to_string(format!("/proc/{pid}/task/{tid}/stack")).ok()?,
    ))
}

/// `[<0>] futex_wait_queue+0x60/0x90`, a function a line; a module's name may follow in brackets.
fn parse_kernel_stack(text: &str) -> Vec<String> {
    let name = |line: &str| {
        let place = line.split_once("] ")?.1;
        let (name, rest) = place.split_once('+').unwrap_or((place, ""));
        let module = rest.split_once(" [").map_or("", |(_, m)| m.trim_end_matches(']'));
        (!name.is_empty()).then(|| match module {
            "" => name.to_string(),
            m => format!("{name} [{m}]"),
        })
    };
    text.lines().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_threads() {
        let text =
            "Name:\tState: R\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n";
        let seen = still(text).expect("all there");
        assert_eq!((seen.state, seen.switches, seen.runs()), ('S', (12, 3), false));
        assert_eq!(still("State:\tS (sleeping)\n"), None);
    }

    #[test]
    fn places_where_threads_are_blocked() {
        let check = |text: &str, expected: Option<(Option<u64>, u64, u64)>| {
            let got = parse_blocked(text).map(|b| (b.call.map(|c| c.0), b.sp, b.ip));
            assert_eq!(got, expected, "{text}");
        };
        check(
            "202 0x1 0x80 0x0 0x0 0x0 0x0 0x7ffd10 0x7f20\n",
            Some((Some(202), 0x7ffd10, 0x7f20)),
        );
        check("-1 0x7ffd10 0x7f20\n", Some((None, 0x7ffd10, 0x7f20)));
        check("running\n", None);
        check("202 0x1 0x80\n", None);
        check("0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n", None);
        check("", None);
    }

    #[test]
    fn kernel_stacks() {
        let text = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] tun_do_read+0x1/0x2 [tun]\nnonsense\n[<0>] \n";
        assert_eq!(parse_kernel_stack(text), ["futex_wait_queue", "tun_do_read [tun]"]);
    }
}

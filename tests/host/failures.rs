//! What fails around a recording: disks, directories, the recorder and its processes, and hostile targets.

use super::*;

#[test]
fn one_recorder_writes_a_history_and_what_it_wrote_stays() {
    let _live = live();
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let mut busy = program();
    let pid = busy.pid().to_string();
    let words = ["--segment", "0.2s", "--pid", &pid, "-r", "200"];
    let mut before = Vec::new();
    for round in 0..3 {
        let mut running = start(&directory, &words);
        if round == 0 {
            let second = nativeprof(&["host", "--dir"]).arg(&directory).output();
            let second = second.expect("nativeprof runs");
            let said = String::from_utf8_lossy(&second.stderr).into_owned();
            assert!(second.status.code() == Some(2) && said.contains("try:"), "{said}");
        }
        running.read_until("event=segment file=0");
        running.signal("KILL");
        drop(running.finish());
        let after = segments(&directory);
        assert_eq!(before[..], after[..before.len()], "closed segments have changed");
        assert!(after.len() > before.len());
        before = after;
        // As if it had been killed while it wrote.
        for left in [".0000000099-20261128T050041.359Z-4001.otlp.gz.tmp", ".metrics.prom.tmp"] {
            fs::write(directory.join(left), "half").expect("a file");
        }
    }
    stop(start(&directory, &words));
    busy.finish();
    assert_eq!(before[..], segments(&directory)[..before.len()]);
    let names = fs::read_dir(&directory)
        .expect("a history")
        .map(|entry| entry.expect("an entry").file_name());
    let names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{names:?}");
}

/// A file system of 8 MB, gone at the end.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(path: PathBuf) -> SmallDisk {
        fs::create_dir(&path).expect("a directory");
        let disk = SmallDisk(path);
        disk.run("mount", &["-t", "tmpfs", "-o", "size=8m", "tmpfs"]);
        disk
    }

    fn run(&self, program: &str, words: &[&str]) {
        let done = Command::new(program).args(words).arg(&self.0).status();
        assert!(done.is_ok_and(|status| status.success()), "{program} {words:?} fails");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status(); // the test has failed already
    }
}

#[test]
fn a_full_disk_costs_the_segments_of_that_time() {
    let _live = live();
    let scratch = Scratch::new();
    let disk = SmallDisk::new(scratch.path("disk"));
    let directory = disk.0.join("history");
    let mut busy = program();
    let pid = busy.pid().to_string();
    let mut running = start(&directory, &["--segment", "0.2s", "--pid", &pid, "-r", "100"]);
    running.read_until("event=segment file=0");
    let filling = disk.0.join("other files");
    let mut file = fs::File::create(&filling).expect("a file");
    while file.write_all(&[0; 4096]).is_ok() {}
    drop(file);
    running.read_until("event=segment_lost");
    let before = segments(&directory);
    // More are lost in this time, of which nothing is said before a minute is over.
    std::thread::sleep(Duration::from_millis(500));
    fs::remove_file(&filling).expect("removed");
    let next = format!("file={:010}-", before.len() + 1);
    running.read_until(&next);
    let log = stop(running);
    let said = |line: &&str| line.contains("event=segment_lost") && !line.contains("repeated=");
    assert_eq!(log.lines().filter(said).count(), 1, "{log}");
    assert!(
        log.contains("No space left") && log.contains("make room there"),
        "{log}"
    );
    let after = segments(&directory);
    assert_eq!(before[..], after[..before.len()], "closed segments have changed");
    assert!(after.len() > before.len());
    disk.run("mount", &["-o", "remount,ro"]);
    for path in [&directory, &disk.0.join("new")] {
        refused(path, "Read-only file system");
    }
    busy.finish();
}

/// Fails with this reason at the start, and says what to do.
#[track_caller]
fn refused(directory: &Path, why: &str) {
    let done = nativeprof(&["host", "--dir"]).arg(directory).output();
    let done = done.expect("nativeprof runs");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        !done.status.success() && said.contains(why) && said.contains("--dir DIR"),
        "{said}"
    );
}

#[test]
fn directories_of_others_are_refused() {
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    fs::create_dir(&directory).expect("a directory");
    std::os::unix::fs::chown(&directory, Some(65534), Some(65534)).expect("the tests run as root");
    refused(&directory, "Permission denied");
}

/// The process that reads names for another one.
fn names_reader(parent: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.find(|pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"--read-names")
    })
}

fn send(signal: &str, pid: u32) {
    let done = Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
    assert!(
        done.is_ok_and(|status| status.success()),
        "{signal} cannot be sent to {pid}"
    );
}

/// The process that reads names is stopped until more samples are taken than the ring holds; then it is killed.
#[test]
fn samples_wait_for_names() {
    let _live = live();
    let group = Cgroup::new(&[&format!("nativeprof-names-{}", std::process::id())]);
    let mut programs = vec![program()];
    group.add(programs[0].pid());
    let scratch = Scratch::new();
    let directory = scratch.path("history");
    let path = group.0.to_string_lossy().into_owned();
    let mut running = start(&directory, &["--segment", "0.2s", "--cgroup", &path, "-r", "400"]);
    running.read_until("file=0000000001-");
    let recorder = running.child.id();
    let reader = names_reader(recorder).expect("names are read by a child");
    send("STOP", reader);
    // Of this file no names are known.
    let native = Program::start(programs::native(&["bursts"]));
    group.add(native.pid());
    programs.push(native);
    let enough = group.cpu_time() + 2.5;
    while group.cpu_time() < enough {
        std::thread::sleep(Duration::from_millis(10));
    }
    send("CONT", reader);
    running.read_until("file=0000000003-");
    send("KILL", reader);
    let third = Program::start(programs::native(&["handler"]));
    group.add(third.pid());
    programs.push(third);
    running.read_until("file=0000000005-");
    let next = names_reader(recorder);
    assert!(next.is_some_and(|next| next != reader), "{next:?} after {reader}");
    let log = stop(running);
    drop(programs);
    // On a busy machine, ticks may be missing for other reasons.
    let metrics = fs::read_to_string(directory.join("metrics.prom")).expect("metrics");
    let no_room = metrics
        .lines()
        .find(|line| line.contains("samples_lost_total{reason=\"no_room\"}"));
    assert!(no_room.is_none_or(|line| line.ends_with(" 0")), "{no_room:?}\n{log}");
}

/// Peak memory use of a process so far, KB.
fn peak(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    number.expect("its peak memory")
}

/// A target with false data, and one that maps files, starts threads and forks without end, where few files may be open: what
/// they cost is bounded, and the recording goes on.
#[test]
fn hostile_processes_do_not_end_a_recording() {
    let _live = live();
    let scratch = Scratch::new();
    let (directory, files) = (scratch.path("history"), scratch.path("files"));
    fs::create_dir(&files).expect("a directory");
    let mut script = newest_python().script("hostile_host.py");
    let (mut hostile, mut forged) = (
        Program::start({
            script.arg(&files);
            script
        }),
        Program::start(common::programs::malicious_target()),
    );
    let pids = [hostile.pid(), forged.pid()].map(|pid| pid.to_string());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 150; exec \"$0\" host --segment 1s -r 200 \"$@\""]);
    command.arg(nativeprof(&[]).get_program()).arg("--dir").arg(&directory);
    command.args(["--pid", &pids[0], "--pid", &pids[1]]);
    let mut running = Running::start_until(command, "event=started");
    hostile.send("begin");
    hostile.wait_for("DONE");
    running.read_until("event=files_not_opened");
    running.read_until("event=segment file=0");
    let most = peak(running.child.id());
    let log = stop(running);
    hostile.finish();
    forged.finish();
    assert!(most < 256 << 10, "{most} KB");
    assert!(!log.contains("segment_lost") && !log.contains("panicked"), "{log}");
    let quality = exported(&scratch, &directory, &[]).profile.meta.quality;
    let sum = quality.exact + quality.repaired + quality.partial;
    assert!(quality.taken > 20 && sum == quality.taken, "{quality:?}\n{log}");
    let metrics = fs::read_to_string(directory.join("metrics.prom")).expect("metrics");
    let entries = |kind: &str| -> u64 {
        let name = format!("nativeprof_table_entries{{kind=\"{kind}\"}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {metrics}"))
    };
    assert!(entries("processes") < 40 && entries("threads") < 500, "{metrics}");
    assert!(entries("files_not_opened") > 150, "{metrics}");
}

/// The time of day steps by an hour, forward and back: segments keep their length, and their order.
#[test]
fn segments_follow_no_clock() {
    let _live = live();
    let scratch = Scratch::new();
    let (directory, step) = (scratch.path("history"), scratch.path("step"));
    let mut busy = program();
    let mut command = nativeprof(&["host", "--segment", "0.3s", "-r", "200", "--dir"]);
    command.arg(&directory).args(["--pid", &busy.pid().to_string()]);
    command
        .env("LD_PRELOAD", programs::stepped_clock())
        .env("STEP_FILE", &step);
    let mut running = Running::start_until(command, "event=started");
    for (seconds, next) in [
        ("0", "file=0000000002-"),
        ("3600", "file=0000000004-"),
        ("-3600", "file=0000000006-"),
    ] {
        // As a whole, since it may be read at any time.
        let written = scratch.path("next step");
        fs::write(&written, seconds).expect("a file");
        fs::rename(&written, &step).expect("renamed");
        running.read_until(next);
    }
    let log = stop(running);
    busy.finish();
    let names: Vec<SegmentName> = segments(&directory)
        .iter()
        .filter_map(|(path, _)| SegmentName::parse(&path.file_name()?.to_string_lossy()))
        .collect();
    let hours: Vec<i64> = names
        .windows(2)
        .map(|pair| pair[1].start as i64 - pair[0].end() as i64)
        .map(|gap| (gap as f64 / 3_600_000.0).round() as i64)
        .collect();
    let steps: Vec<i64> = hours.into_iter().filter(|hours| *hours != 0).collect();
    assert_eq!(steps, [1, -2], "{names:?}\n{log}");
    assert!(names.iter().all(|name| name.duration < 60_000), "{names:?}");
    // All of it, whatever the times are.
    let quality = exported(&scratch, &directory, &[]).profile.meta.quality;
    let sampled = |line: &str| line.split(" samples=").nth(1)?.split(' ').next()?.parse::<u64>().ok();
    assert_eq!(quality.taken, log.lines().filter_map(sampled).sum::<u64>(), "{log}");
}

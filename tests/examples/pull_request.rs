//! The workflow that compares a pull request: its steps run as GitHub runs them, on a program with one more call in a loop.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use super::common::{Scratch, live, sources};

/// The scripts of the steps with this name.
fn script(workflow: &str, name: &str) -> String {
    let (_, step) = workflow.split_once(&format!("- name: {name}\n")).expect("the step");
    let (_, block) = step.split_once("run: |\n").expect("a script");
    let lines = block.lines().take_while(|line| line.starts_with("          "));
    lines.map(|line| format!("{}\n", line.trim_start())).collect()
}

struct Job {
    scratch: Scratch,
    workflow: String,
}

impl Job {
    /// A checkout of the pull request, and one of its base below it.
    fn new() -> Job {
        let scratch = Scratch::new();
        let example = sources().join("../../examples/pull_request");
        for file in ["base/shop.py", "shop.py"] {
            let path = scratch.path(file);
            fs::create_dir_all(path.parent().expect("a directory")).expect("the directory");
            fs::copy(example.join(file), path).expect("a copy");
        }
        let programs = scratch.path("bin");
        fs::create_dir(&programs).expect("a directory");
        symlink(env!("CARGO_BIN_EXE_nativeprof"), programs.join("nativeprof")).expect("a link");
        let sudo = programs.join("sudo");
        fs::write(&sudo, "#!/bin/sh\nexec \"$@\"\n").expect("a file");
        fs::set_permissions(&sudo, fs::Permissions::from_mode(0o755)).expect("a mode");
        let workflow = fs::read_to_string(example.join("workflow.yml")).expect("the workflow");
        Job { scratch, workflow }
    }

    /// Whether the step succeeds, the summary of the job, and the log.
    fn step(&self, name: &str) -> (bool, String, String) {
        self.run(&script(&self.workflow, name))
    }

    fn run(&self, script: &str) -> (bool, String, String) {
        let summary = self.scratch.path("summary.md");
        let _ = fs::remove_file(&summary);
        let path = std::env::var("PATH").expect("a PATH");
        let programs = self.scratch.path("bin");
        let mut shell = Command::new("bash");
        shell.args(["-e", "-c", script]);
        shell
            .current_dir(self.scratch.directory())
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("GITHUB_WORKSPACE", self.scratch.directory())
            .env("GITHUB_STEP_SUMMARY", &summary)
            .stdin(Stdio::null());
        for name in ["SUDO_UID", "SUDO_GID", "SUDO_USER", "DOAS_USER", "DEBUGINFOD_URLS"] {
            shell.env_remove(name);
        }
        let done = shell.output().expect("a shell");
        let log = String::from_utf8_lossy(&done.stderr).into_owned();
        let summary = fs::read_to_string(&summary).unwrap_or_else(|e| panic!("{e}: {log}"));
        (done.status.success(), summary, log)
    }

    fn is_written(&self, file: &str) -> bool {
        Path::new(&self.scratch.path(file)).is_file()
    }
}

#[test]
fn a_planted_regression_fails_where_it_is() {
    let _alone = live();
    let job = Job::new();
    let program = fs::read_to_string(job.scratch.path("shop.py")).expect("the program");
    let line = |text: &str| 1 + program.lines().position(|line| line.trim() == text).expect("the line");

    let (passed, summary, log) = job.step("Compare calls");
    assert!(
        !passed && summary.starts_with("### nativeprof: failed, "),
        "{summary}{log}"
    );
    assert!(
        summary.contains("| 100 | 200 | **+100** | Python | `stock` | `shop.py:"),
        "{summary}"
    );
    let annotation = format!(
        "::error file=shop.py,line={},title=nativeprof%3A stock grew by ",
        line("def stock(order: int) -> None:")
    );
    assert!(log.contains(&annotation), "{log}");
    assert!(job.is_written("calls.xml"));

    let (passed, summary, log) = job.step("Compare times");
    assert!(
        !passed && summary.starts_with("### nativeprof: failed, "),
        "{summary}{log}"
    );
    assert!(summary.contains("all CPU time grew by "), "{summary}");
    // On a busy machine functions of few runs may be undecided. All samples together are enough for their shares.
    let (_, _, log) = job.run(
        "for side in base head; do nativeprof merge runs/$side/*.json -o $side.json; done\n\
         nativeprof diff --no-native --single-run --fail-above 5 --github base.json head.json > \"$GITHUB_STEP_SUMMARY\"",
    );
    let of_call = line("price(order)") + 1;
    for (line, title) in [(line("use_cpu(1.2)"), "stock"), (of_call, "check_out calls stock")] {
        let annotation = format!("::error file=shop.py,line={line},title=nativeprof%3A {title} grew by ");
        assert!(log.contains(&annotation), "`{annotation}` is not in:\n{summary}{log}");
    }
    assert!(job.is_written("times.xml"));

    // Another comment.
    let base = fs::read_to_string(job.scratch.path("base/shop.py")).expect("the program");
    fs::write(job.scratch.path("shop.py"), format!("# A shop.\n{base}")).expect("a file");
    let (passed, summary, log) = job.step("Compare calls");
    assert!(
        passed && summary.starts_with("### nativeprof: passed\n"),
        "{summary}{log}"
    );
}

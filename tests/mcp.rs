//! `nativeprof mcp`: a conversation with both generations of the protocol's reference client (`.ci/install-mcp-clients`), and
//! by hand what no well-behaved client sends. Needs root.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Program, Scratch, live, mcp_client, nativeprof};
use serde_json::{Value, json};

mod common;

/// A server, and the client's side of its pipes.
struct Server {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    last: i64,
}

impl Server {
    fn start(root: &Path, options: &[&str]) -> Server {
        let mut child = nativeprof(&["mcp"])
            .args(options)
            .arg("--root")
            .arg(root)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("nativeprof starts");
        Server {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().expect("a pipe")),
            child,
            last: 0,
        }
    }

    fn send_line(&mut self, line: &str) {
        let mut input = self.input.as_ref().expect("an open pipe");
        input.write_all(format!("{line}\n").as_bytes()).expect("it reads");
    }

    /// The next message that is no report of progress.
    fn next(&mut self) -> Value {
        loop {
            let mut line = String::new();
            assert!(
                self.output.read_line(&mut line).expect("readable") > 0,
                "the server has ended"
            );
            let message: Value = serde_json::from_str(&line).expect("JSON");
            if message.get("method").is_none() {
                return message;
            }
        }
    }

    /// Sends a request to call a tool; its number.
    fn ask(&mut self, tool: &str, arguments: Value) -> i64 {
        self.last += 1;
        let params = json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": self.last}});
        self.send_line(
            &json!({"jsonrpc": "2.0", "id": self.last, "method": "tools/call", "params": params}).to_string(),
        );
        self.last
    }

    fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let id = self.ask(tool, arguments);
        let answer = self.next();
        assert_eq!(answer["id"], id, "{answer}");
        answer
    }

    /// The error that a tool answers with.
    fn refusal(&mut self, tool: &str, arguments: Value) -> String {
        let answer = self.call(tool, arguments);
        assert_eq!(answer["result"]["isError"], true, "{answer}");
        answer["result"]["content"][0]["text"]
            .as_str()
            .expect("a text")
            .to_string()
    }

    /// Waits until the server has said that a recording goes on.
    fn wait_for_progress(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("readable");
        assert!(line.contains("notifications/progress"), "{line}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.wait();
    }
}

fn sleeper() -> Program {
    let mut python = Command::new(mcp_client("2.3.0"));
    python.args(["-c", "import sys\nprint('READY', flush=True)\nsys.stdin.read()"]);
    Program::start(python)
}

/// Finds the hot function of a live process, its callers and its lines, and compares after a fix.
fn converse(client: &str, revision: &str) {
    let _alone = live();
    let scratch = Scratch::new();
    fs::copy("fixtures/golden/profile.json", scratch.path("hostile.json")).expect("a copy");
    let done = Command::new(mcp_client(client))
        .arg("tests/mcp/conversation.py")
        .arg(env!("CARGO_BIN_EXE_nativeprof"))
        .arg(scratch.directory())
        .arg(revision)
        .output()
        .expect("Python starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_stateless_client() {
    converse("2.3.0", "2026-07-28");
}

#[test]
fn a_client_with_a_handshake() {
    converse("1.30.0", "2025-11-25");
}

#[test]
fn messages_that_are_none() {
    let scratch = Scratch::new();
    let mut server = Server::start(scratch.directory(), &[]);
    let modern = |version: &str| json!({"_meta": {"io.modelcontextprotocol/protocolVersion": version}});
    for (line, code) in [
        ("{".to_string(), -32700),
        ("[]".into(), -32600),
        (r#"{"id":1,"method":"ping"}"#.into(), -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"resources/list"}"#.into(), -32601),
        (
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x"}}"#.into(),
            -32602,
        ),
        (
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[]}"#.into(),
            -32602,
        ),
        (
            json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": modern("2099-01-01")}).to_string(),
            -32022,
        ),
    ] {
        server.send_line(&line);
        assert_eq!(server.next()["error"]["code"], code, "{line}");
    }
    for line in [
        r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":99}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/unknown"}"#,
        r#"{"jsonrpc":"2.0","id":"x","result":{}}"#,
    ] {
        server.send_line(line);
    }
    server.send_line(
        &json!({"jsonrpc": "2.0", "id": "q", "method": "server/discover", "params": modern("2026-07-28")}).to_string(),
    );
    let found = server.next();
    assert_eq!(
        (&found["id"], &found["result"]["resultType"]),
        (&json!("q"), &json!("complete"))
    );
    server.send_line(&"x".repeat(5 << 20));
    assert_eq!(server.next()["error"]["code"], -32600);
    server.send_line(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#);
    assert_eq!(server.next()["result"], json!({}));
}

#[test]
fn what_is_not_permitted_is_refused_with_what_to_type() {
    let scratch = Scratch::new();
    let root = scratch.path("root");
    fs::create_dir(&root).expect("a directory");
    fs::copy("fixtures/golden/profile.json", scratch.path("outside.json")).expect("a copy");
    fs::copy("fixtures/golden/profile.json", root.join("inside.json")).expect("a copy");
    symlink(scratch.path("outside.json"), root.join("link.json")).expect("a link");
    let mut gone = Command::new("true").spawn().expect("a process");
    gone.wait().expect("its end");
    let mut other = Command::new("sleep").arg("1000").uid(65534).spawn().expect("a process");
    let mut server = Server::start(&root, &["--allow-run", "true --x *"]);
    for (tool, arguments, word) in [
        ("report", json!({"profile": "../outside.json"}), "--root"),
        ("report", json!({"profile": scratch.path("outside.json")}), "--root"),
        (
            "report",
            json!({"profile": "link.json"}),
            "a part of the path is a link",
        ),
        ("diff", json!({"before": "inside.json", "after": "link.json"}), "--root"),
        ("report", json!({"profile": "missing.json"}), "cannot read this file"),
        ("report", json!({"profile": "inside.json", "unknown": 1}), "unknown"),
        ("report", json!({}), "`profile`"),
        ("report", json!({"profile": 7}), "`profile`"),
        ("report", json!({"profile": "x".repeat(1 << 20)}), "64 KiB"),
        (
            "report",
            json!({"profile": "inside.json", "max_bytes": 1 << 20}),
            "16384",
        ),
        (
            "report",
            json!({"profile": "inside.json", "filter": "a("}),
            "regular expression",
        ),
        ("attach", json!({"pid": gone.id()}), "no process"),
        ("attach", json!({"pid": other.id()}), "--allow-pid"),
        ("dump", json!({"pid": other.id()}), "--allow-pid"),
        ("doctor", json!({"pid": other.id()}), "--allow-pid"),
        ("attach", json!({"pid": -1}), "`pid`"),
        ("attach", json!({}), "it is missing"),
        ("dump", json!({}), "it is missing"),
        ("record", json!({"command": ["true"]}), "--allow-run"),
        ("record", json!({"command": ["true", "--y"]}), "--allow-run"),
        ("record", json!({"command": []}), "`command`"),
        ("record", json!({"command": "true --x"}), "`command`"),
    ] {
        let said = server.refusal(tool, arguments.clone());
        assert!(
            said.contains(word) && said.len() < 1024,
            "{tool} {}: {said}",
            arguments.to_string().chars().take(200).collect::<String>()
        );
    }
    let allowed = server.call("report", json!({"profile": "inside.json"}));
    assert_eq!(allowed["result"]["isError"], false, "{allowed}");
    drop(server);
    let mut server = Server::start(&root, &["--allow-pid", &other.id().to_string()]);
    let allowed = server.call("dump", json!({"pid": other.id()}));
    assert_eq!(allowed["result"]["isError"], false, "{allowed}");
    other.kill().expect("it runs");
    other.wait().expect("its end");
}

/// Source is quoted only of files below the root that do not look secret, whatever a profile says.
#[test]
fn source_elsewhere_is_not_quoted() {
    let scratch = Scratch::new();
    let root = scratch.path("root");
    fs::create_dir(&root).expect("a directory");
    let mut server = Server::start(&root, &[]);
    for (path, is_shown) in [
        (root.join("code.py"), true),
        (root.join("secrets.py"), false),
        (scratch.path("code.py"), false),
    ] {
        fs::write(&path, "marked = 1\n".repeat(50)).expect("a file");
        let name = path.to_str().expect("UTF-8");
        let frames = json!([{"name": "work", "file": name, "line": 3}]);
        let stacks = json!({"type": "sampled", "name": "x", "unit": "none", "startValue": 0, "endValue": 10, "samples": [[0]], "weights": [10]});
        let schema = "https://www.speedscope.app/file-format-schema.json";
        let profile = json!({"$schema": schema, "shared": {"frames": frames}, "profiles": [stacks]});
        fs::write(root.join("stacks.json"), profile.to_string()).expect("a file");
        let answer = server.call("source", json!({"profile": "stacks.json", "function": name}));
        let text = answer["result"]["content"][0]["text"].as_str().expect("a text");
        assert_eq!(text.contains("marked"), is_shown, "{name}: {text}");
    }
}

#[test]
fn one_recording_at_a_time_is_ended_by_cancellation() {
    let _alone = live();
    let scratch = Scratch::new();
    let target = sleeper();
    let mut server = Server::start(scratch.directory(), &[]);
    let first = server.ask("attach", json!({"pid": target.pid(), "seconds": 600}));
    server.wait_for_progress();
    assert!(
        server
            .refusal("attach", json!({"pid": target.pid()}))
            .contains("a recording is running")
    );
    server.send_line(
        &json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": first}}).to_string(),
    );
    // It has no answer. The next one is refused until it has ended.
    let began = Instant::now();
    let done = loop {
        let answer = server.call("attach", json!({"pid": target.pid(), "seconds": 1}));
        assert!(began.elapsed() < Duration::from_secs(60), "it has not ended: {answer}");
        if answer["result"]["isError"] == false {
            break answer;
        }
    };
    let text = done["result"]["content"][0]["text"].as_str().expect("a text");
    assert!(text.contains("no samples"), "{text}");
    let files = server.call("profiles", json!({}));
    assert_eq!(files["result"]["structuredContent"]["total_rows"], 1, "{files}");
}

#[test]
fn nothing_is_left_of_a_client_that_goes_away() {
    let _alone = live();
    for is_killed in [false, true] {
        let scratch = Scratch::new();
        let script = scratch.path("command.py");
        let text = "import os, subprocess, sys, time\n\
                    child = subprocess.Popen(['sleep', '1000'])\n\
                    open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n\
                    while True: time.sleep(0.01)\n";
        fs::write(&script, text).expect("a file");
        let python = mcp_client("2.3.0");
        let python = python.to_str().expect("UTF-8");
        let mut server = Server::start(scratch.directory(), &["--allow-run", &format!("{python} command.py")]);
        server.ask("record", json!({"command": [python, "command.py"], "seconds": 600}));
        let pids = loop {
            server.wait_for_progress();
            let pids = fs::read_to_string(scratch.path("pids")).unwrap_or_default();
            if pids.contains(' ') {
                break pids;
            }
        };
        let pids: Vec<&str> = pids.split(' ').collect();
        if is_killed {
            server.child.kill().expect("it runs");
        }
        drop(server);
        // What it started ends of its own accord if the server was killed; of that, the command's own children are its own.
        let watched = if is_killed { &pids[..1] } else { &pids[..] };
        for pid in watched {
            let began = Instant::now();
            while is_running(pid) {
                assert!(
                    began.elapsed() < Duration::from_secs(60),
                    "process {pid} is still running"
                );
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        if is_killed {
            let _ = Command::new("kill").arg(pids[1]).status();
        }
        let left: Vec<_> = fs::read_dir(scratch.path(".nativeprof"))
            .expect("a directory")
            .flatten()
            .collect();
        let names: Vec<_> = left.iter().map(|entry| entry.file_name()).collect();
        assert_eq!(names, [".gitignore"]);
    }
}

fn is_running(pid: &str) -> bool {
    let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat).into_owned();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[test]
fn an_allowed_command_is_recorded() {
    let _alone = live();
    let scratch = Scratch::new();
    fs::write(
        scratch.path("bench.py"),
        "import sys\ndef hot():\n    return sum(i * i for i in range(5000))\nfor _ in range(int(sys.argv[1])): hot()\nsys.exit(3)\n",
    )
    .expect("a file");
    let python = mcp_client("2.3.0");
    let python = python.to_str().expect("UTF-8");
    let mut server = Server::start(scratch.directory(), &["--allow-run", &format!("{python} bench.py *")]);
    let answer = server.call("record", json!({"command": [python, "bench.py", "2000"], "rate": 499}));
    let content = &answer["result"]["structuredContent"];
    assert_eq!(content["exit_code"], 3, "{answer}");
    let rows = content["rows"].as_array().expect("rows");
    assert!(
        rows.iter()
            .any(|row| row["name"] == "hot" && row["total_percent"].as_f64() > Some(50.0)),
        "{answer}"
    );
    // It is ended with the recording.
    let answer = server.call(
        "record",
        json!({"command": [python, "bench.py", "999999999"], "seconds": 1}),
    );
    let content = &answer["result"]["structuredContent"];
    assert!(
        content["seconds"].as_f64() >= Some(0.9)
            && content.get("exit_code").is_none()
            && content["note"] == "the command was ended with the recording",
        "{answer}"
    );
}

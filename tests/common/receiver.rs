//! Receivers of profiles, which decode messages by OpenTelemetry's own definitions; what Prometheus would receive.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

use super::{newest_python, viewers};

/// A process that receives profiles, and prints what it got.
pub struct Receiver {
    child: Child,
    events: BufReader<ChildStdout>,
    pub port: u16,
}

impl Receiver {
    /// One that gives these answers first; see `tests/push/receiver.py`.
    pub fn start(answers: &str) -> Receiver {
        Receiver::with_files(answers, &[])
    }

    /// One at this port.
    pub fn at_port(port: u16) -> Receiver {
        let mut python = Command::new(&newest_python().exe);
        python
            .env("PYTHONPATH", viewers("python"))
            .env("RECEIVER_PORT", port.to_string());
        Receiver::run(python, "receiver.py", "", &[])
    }

    /// The same with certificate, key and perhaps the authority of clients.
    pub fn with_files(answers: &str, tls: &[&Path]) -> Receiver {
        let mut python = Command::new(&newest_python().exe);
        python.env("PYTHONPATH", viewers("python"));
        Receiver::run(python, "receiver.py", answers, tls)
    }

    /// The same over gRPC, with statuses for answers; see `tests/push/grpc_receiver.py`.
    pub fn of_grpc(answers: &str, tls: &[&Path]) -> Receiver {
        let mut python = Command::new(viewers("grpc/bin/python"));
        python.env("GRPC_VERBOSITY", "NONE");
        Receiver::run(python, "grpc_receiver.py", answers, tls)
    }

    fn run(mut python: Command, script: &str, answers: &str, tls: &[&Path]) -> Receiver {
        let mut child = python
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/push").join(script))
            .arg(answers)
            .args(tls)
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python starts");
        let mut events = BufReader::new(child.stdout.take().expect("a pipe"));
        let port = next_event(&mut events).expect("a line")["port"]
            .as_u64()
            .expect("a port");
        Receiver {
            child,
            events,
            port: port as u16,
        }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Waits for the next request that it has read.
    pub fn next(&mut self) -> Value {
        next_event(&mut self.events).expect("a line")
    }

    /// Ends it: the requests that were not waited for.
    pub fn end(mut self) -> Vec<Value> {
        self.child.kill().expect("running");
        std::iter::from_fn(|| next_event(&mut self.events)).collect()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn next_event(events: &mut BufReader<ChildStdout>) -> Option<Value> {
    let mut line = String::new();
    events.read_line(&mut line).expect("readable");
    serde_json::from_str(&line).ok()
}

/// Has Prometheus' own tool judge metrics: their format, names, units and texts.
///
/// # Panics
/// It finds something.
pub fn check_metrics(text: &str) {
    let mut tool = Command::new(viewers("promtool"))
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    let mut input = tool.stdin.take().expect("a pipe");
    input.write_all(text.as_bytes()).expect("it reads");
    drop(input);
    let done = tool.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && said.is_empty(), "{said}\n{text}");
}

/// Asks for the metrics that are served at a Unix socket: the head of the answer, and the metrics.
pub fn served_metrics(socket: &Path) -> (String, String) {
    let mut stream = UnixStream::connect(socket).expect("a connection");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.into(), body.into())
}

//! `push` against receivers that work, and ones that do not. The receiver decodes messages by OpenTelemetry's own definitions.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use common::receiver::{Receiver, check_metrics, served_metrics};
use common::{Scratch, nativeprof};

mod common;

/// Samples of a segment.
const SAMPLES: u64 = 407;

/// A segment; the name of a source file in it is its number.
fn segment(number: u64) -> Vec<u8> {
    let mut bytes = include_bytes!("../fixtures/golden/profile.otlp").to_vec();
    let name = b"/srv/app/main.py";
    let at = bytes
        .windows(name.len())
        .position(|part| part == name)
        .expect("a source file");
    bytes[at..at + name.len()].copy_from_slice(format!("/srv/app/{number:04}.py").as_bytes());
    bytes
}

/// The same with its resources so many times.
fn large_segment(number: u64, times: usize) -> Vec<u8> {
    let bytes = segment(number);
    // The first field, whose length has three bytes; repeated fields of messages that follow each other are one list.
    assert!(
        bytes[0] == 0x0a && bytes[1] > 0x7f && bytes[2] < 0x80,
        "{:?}",
        &bytes[..4]
    );
    let length = usize::from(bytes[1] & 0x7f) | usize::from(bytes[2]) << 7;
    let resources = &bytes[..3 + length];
    [&resources.repeat(times - 1), &bytes[..]].concat()
}

fn add_segment(directory: &Path, number: u64, content: &[u8]) {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(content).expect("in memory");
    // As a history does it: complete, then renamed.
    let new = directory.join(".new");
    fs::write(&new, gzip.finish().expect("in memory")).expect("written");
    fs::rename(new, directory.join(segment_name(number))).expect("renamed");
}

fn segment_name(number: u64) -> String {
    format!("{number:010}-20261128T031400.123Z-60000.otlp.gz")
}

fn add_segments(directory: &Path, numbers: impl IntoIterator<Item = u64>) {
    for number in numbers {
        add_segment(directory, number, &segment(number));
    }
}

fn push(directory: &Path, url: &str, words: &[&str]) -> Command {
    let mut command = nativeprof(&["push", "--longest-wait", "5ms", "--to", url]);
    for (name, _) in std::env::vars() {
        if name.starts_with("OTEL_") || name.to_ascii_lowercase().ends_with("_proxy") {
            command.env_remove(name);
        }
    }
    command.args(words).arg(directory);
    command
}

fn once(directory: &Path, url: &str, words: &[&str]) -> Output {
    push(directory, url, words)
        .arg("--once")
        .output()
        .expect("nativeprof starts")
}

fn errors(done: &Output) -> String {
    String::from_utf8_lossy(&done.stderr).into_owned()
}

/// The numbers of the segments in requests that were accepted.
fn accepted(requests: &[Value]) -> Vec<u64> {
    let accepted = requests
        .iter()
        .filter(|request| ["200", "partial"].iter().any(|word| request["answer"] == *word));
    let marks = accepted.flat_map(|request| request["marks"].as_array().cloned().unwrap_or_default());
    marks.map(|mark| mark.as_u64().expect("a number")).collect()
}

#[test]
fn segments_arrive_in_order_and_once() {
    let scratch = Scratch::new();
    add_segments(scratch.directory(), 1..=5);
    let receiver = Receiver::start("");
    let headers = scratch.path("headers");
    fs::write(&headers, "X-Scope-OrgID: one\n").expect("written");
    let words = ["--headers-file", headers.to_str().expect("UTF-8")];
    for _ in 0..2 {
        let done = once(scratch.directory(), &receiver.url(), &words);
        assert!(done.status.success() && done.stderr.is_empty(), "{}", errors(&done));
    }
    let mut requests = receiver.end();
    assert_eq!(accepted(&requests), [1, 2, 3, 4, 5]);
    for request in &requests {
        assert_eq!(request["path"], "/v1development/profiles");
        assert_eq!(request["total"], SAMPLES);
    }
    let headers = requests.remove(0)["headers"].take();
    for (name, value) in [
        ("content-type", "application/x-protobuf"),
        ("content-encoding", "gzip"),
        ("x-scope-orgid", "one"),
    ] {
        assert_eq!(headers[name], value);
    }
}

/// Each failure, and the messages that follow from it.
#[test]
fn failures_of_receivers_lose_and_repeat_nothing() {
    // What the receiver answers, whether segment 1 arrives, the exit code, what is printed.
    for (answers, arrives, code, printed) in [
        ("503,502:0,504,429:0", true, 0, "is tried again in"),
        ("close", true, 0, "connection"),
        ("cut", true, 0, "503"),
        ("hang,hang", true, 0, "timeout"),
        ("slow", true, 0, "timeout"),
        ("400", false, 1, "the receiver answered 400"),
        ("401", false, 1, "the receiver answered 401"),
        ("404", false, 1, "the receiver answered 404"),
        ("413", false, 1, "the receiver answered 413"),
        ("301", false, 1, "the receiver answered 301"),
        ("partial", true, 1, "refused 1 of 2 profiles: 200, one is too old"),
        (
            "503,503,503,503,503",
            false,
            1,
            "did not accept a message in 5 attempts",
        ),
    ] {
        let scratch = Scratch::new();
        add_segments(scratch.directory(), 1..=3);
        let receiver = Receiver::start(answers);
        let timeout = if answers.contains(['h', 'w']) { "300ms" } else { "60s" };
        let words = ["--timeout", timeout];
        let done = once(scratch.directory(), &receiver.url(), &words);
        let said = errors(&done);
        assert_eq!(done.status.code(), Some(code), "{answers}: {said}");
        assert!(said.contains(printed), "{answers}: {said}");
        let is_left = answers.matches("503").count() == 5;
        if is_left {
            let done = once(scratch.directory(), &receiver.url(), &words);
            assert!(done.status.success(), "{}", errors(&done));
        }
        let requests = receiver.end();
        let expected = if arrives || is_left { vec![1, 2, 3] } else { vec![2, 3] };
        assert_eq!(accepted(&requests), expected, "{answers}: {requests:?}");
        if !arrives && !is_left {
            assert_eq!(requests.len(), 3, "{answers}: a refused message was sent again");
        }
    }
}

#[test]
fn an_absent_receiver_is_named() {
    let scratch = Scratch::new();
    add_segments(scratch.directory(), [1]);
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|socket| socket.local_addr())
        .expect("a port")
        .port();
    let url = format!("http://127.0.0.1:{port}");
    let done = once(scratch.directory(), &url, &[]);
    let said = errors(&done);
    assert_eq!(done.status.code(), Some(1));
    assert!(
        said.contains(&format!("{url}/v1development/profiles did not accept")) && said.contains("connection"),
        "{said}"
    );
}

/// A receiver that is away for a while gets what the history still has, each segment once; what it has dropped is counted.
#[test]
fn a_receiver_that_was_away_gets_what_is_left() {
    let scratch = Scratch::new();
    let (history, socket) = (scratch.path("history"), scratch.path("metrics"));
    fs::create_dir(&history).expect("made");
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a port").port();
    let address = format!("unix:{}", socket.display());
    add_segments(&history, 1..=6);
    let mut child = push(&history, &format!("http://127.0.0.1:{port}"), &["--metrics", &address])
        .stderr(Stdio::piped())
        .spawn()
        .expect("nativeprof starts");
    let mut said = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let is_tried = said.any(|line| line.expect("text").contains("is tried again in"));
    assert!(is_tried, "it ended");
    let waiting = served_metrics(&socket).1;
    assert!(waiting.contains("\nnativeprof_push_queue_segments 6\n"), "{waiting}");
    // As the limits of a history drop them. The first one is being sent.
    for number in [1, 2, 3] {
        fs::remove_file(history.join(segment_name(number))).expect("there");
    }
    let mut receiver = Receiver::at_port(port);
    let requests: Vec<Value> = (0..4).map(|_| receiver.next()).collect();
    assert_eq!(accepted(&requests), [1, 4, 5, 6]);
    add_segments(&history, [7]);
    assert_eq!(accepted(&[receiver.next()]), [7]);
    let served = served_metrics(&socket).1;
    for line in [
        "nativeprof_push_dropped_segments_total 2",
        "nativeprof_push_refused_profiles_total 0",
    ] {
        assert!(served.lines().any(|found| found == line), "{line}:\n{served}");
    }
    check_metrics(&served);
    signal(&child, "-TERM");
    assert!(child.wait().expect("ended").success());
    assert!(receiver.end().is_empty());
}

/// Killed at any moment, `push` loses nothing; a segment arrives twice only if its answer was not seen.
#[test]
fn killed_at_any_moment_nothing_is_lost() {
    const SEGMENTS: u64 = 60;
    let scratch = Scratch::new();
    add_segments(scratch.directory(), 1..=SEGMENTS);
    let mut receiver = Receiver::start("");
    let url = receiver.url();
    let mut got = BTreeMap::<u64, u64>::new();
    let mut kills = 0;
    while got.len() < SEGMENTS as usize {
        let mut child = push(scratch.directory(), &url, &[]).spawn().expect("nativeprof starts");
        // The receiver has said what it got and may have answered, or not yet.
        for _ in 0..1 + kills % 4 {
            if got.len() == SEGMENTS as usize {
                break;
            }
            let request = receiver.next();
            for mark in accepted(&[request]) {
                *got.entry(mark).or_default() += 1;
            }
        }
        child.kill().expect("running");
        child.wait().expect("ended");
        kills += 1;
    }
    assert!(kills > 10, "{kills}");
    let done = once(scratch.directory(), &url, &[]);
    assert!(done.status.success(), "{}", errors(&done));
    for mark in accepted(&receiver.end()) {
        *got.entry(mark).or_default() += 1;
    }
    assert!(got.keys().copied().eq(1..=SEGMENTS), "{got:?}");
    let twice: u64 = got.values().map(|times| times - 1).sum();
    // One for each kill at most. A request is printed before it is answered, so the next one may be another.
    assert!(
        twice <= kills && got.values().all(|times| *times <= 1 + kills),
        "{kills} kills: {got:?}"
    );
    let left: Vec<String> = scratch
        .names()
        .into_iter()
        .filter(|name| name.ends_with(".cursor"))
        .collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn segments_are_sent_when_they_are_closed_and_a_signal_ends_it() {
    let scratch = Scratch::new();
    let token = scratch.path("token");
    fs::write(&token, "one").expect("written");
    let mut receiver = Receiver::start("200,401");
    let words = ["--token-file", token.to_str().expect("UTF-8")];
    let mut child = push(scratch.directory(), &receiver.url(), &words)
        .spawn()
        .expect("nativeprof starts");
    add_segments(scratch.directory(), [1]);
    assert_eq!(receiver.next()["headers"]["authorization"], "Bearer one");
    // The token is refused, and read again.
    fs::write(&token, "two").expect("written");
    add_segments(scratch.directory(), [2]);
    let requests = [receiver.next(), receiver.next()];
    let tokens = requests.map(|request| request["headers"]["authorization"].clone());
    assert_eq!(tokens, [json!("Bearer one"), json!("Bearer two")]);
    // A signal does the same before anything is refused.
    fs::write(&token, "three").expect("written");
    signal(&child, "-HUP");
    add_segments(scratch.directory(), [3]);
    assert_eq!(receiver.next()["headers"]["authorization"], "Bearer three");
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("running");
    for row in [
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "NoNewPrivs:\t1",
    ] {
        assert!(status.lines().any(|line| line == row), "{row}: {status}");
    }
    let second = once(scratch.directory(), &receiver.url(), &[]);
    assert!(errors(&second).contains("another process sends"), "{}", errors(&second));
    assert_eq!(second.status.code(), Some(2));
    signal(&child, "-TERM");
    assert!(child.wait().expect("ended").success());
    assert!(receiver.end().is_empty());
}

#[test]
fn metrics_are_served_while_it_sends() {
    let scratch = Scratch::new();
    let socket = scratch.path("metrics");
    let mut receiver = Receiver::start("400");
    let address = format!("unix:{}", socket.display());
    add_segments(scratch.directory(), 1..=2);
    let mut child = push(scratch.directory(), &receiver.url(), &["--metrics", &address])
        .spawn()
        .expect("nativeprof starts");
    // Before the second segment is sent, the first one is counted.
    let _ = (receiver.next(), receiver.next());
    let (head, served) = served_metrics(&socket);
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    check_metrics(&served);
    for line in [
        "nativeprof_push_messages_total{code=\"400\"} 1",
        "# TYPE nativeprof_push_queue_segments gauge",
    ] {
        assert!(served.lines().any(|found| found == line), "{line}:\n{served}");
    }
    // The thread that serves does not take the signal from the one that waits.
    signal(&child, "-TERM");
    assert!(child.wait().expect("it ends").success());
    receiver.end();

    let busy = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = busy.local_addr().expect("an address").to_string();
    let refused = push(scratch.directory(), "http://127.0.0.1:1", &["--metrics", &address])
        .output()
        .expect("nativeprof runs");
    assert!(!refused.status.success());
    assert!(errors(&refused).contains(&format!("cannot serve metrics at {address}")));
}

/// As the recorder starts it without a receiver.
#[test]
fn metrics_of_the_recorder_are_served_without_a_receiver() {
    let scratch = Scratch::new();
    let socket = scratch.path("metrics");
    let address = format!("unix:{}", socket.display());
    let text = "# HELP nativeprof_history_bytes Size of the history.\n# TYPE nativeprof_history_bytes gauge\nnativeprof_history_bytes 7\n";
    fs::write(scratch.path("metrics.prom"), text).expect("written");
    let mut child = nativeprof(&[
        "push",
        "--with-parent",
        "--metrics-only",
        "--log-format",
        "json",
        "--metrics",
        &address,
    ])
    .arg(scratch.directory())
    .stdin(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .expect("nativeprof starts");
    let mut said = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let line = said.next().expect("a line").expect("text");
    let event: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
    assert_eq!(
        (&event["event"], &event["address"]),
        (&json!("metrics"), &json!(address))
    );
    assert_eq!(served_metrics(&socket).1, text);
    drop(child.stdin.take());
    assert!(child.wait().expect("it ends").success());
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(sent.expect("kill").success());
}

/// Runs `openssl` with these words.
fn openssl(directory: &Path, words: &str) {
    let done = Command::new("openssl")
        .args(words.split(' '))
        .current_dir(directory)
        .output();
    let done = done.expect("openssl is installed");
    assert!(done.status.success(), "openssl {words}: {}", errors(&done));
}

/// A certificate for `localhost` and one of a client, by an authority of their own.
fn certificates(directory: &Path) -> [PathBuf; 5] {
    let new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
    openssl(
        directory,
        &format!("{new} -keyout ca.key -out ca.pem -subj /CN=authority"),
    );
    for (name, extension) in [
        ("server", "subjectAltName=DNS:localhost"),
        ("client", "extendedKeyUsage=clientAuth"),
    ] {
        openssl(
            directory,
            &format!(
                "{new} -CA ca.pem -CAkey ca.key -keyout {name}.key -out {name}.pem -subj /CN={name} -addext {extension} -addext basicConstraints=critical,CA:false"
            ),
        );
    }
    ["ca.pem", "server.pem", "server.key", "client.pem", "client.key"].map(|name| directory.join(name))
}

/// Sends by `scheme` to a receiver that knows these certificates, with right and with wrong ones.
fn check_certificates(scheme: &str, start: impl Fn(&[&Path]) -> Receiver) {
    let scratch = Scratch::new();
    let history = scratch.path("history");
    fs::create_dir(&history).expect("made");
    add_segments(&history, 1..=2);
    let [ca, server, server_key, client, client_key] = certificates(scratch.directory());
    let receiver = start(&[&server, &server_key, &ca]);
    let of = |path: &PathBuf| path.to_str().expect("UTF-8").to_string();
    let good = [
        "--ca",
        &of(&ca),
        "--certificate",
        &of(&client),
        "--key",
        &of(&client_key),
    ];
    let url = |host: &str| format!("{scheme}://{host}:{}", receiver.port);
    for (url, words) in [
        (url("127.0.0.1"), &good[..]),  // another name
        (url("localhost"), &good[2..]), // an unknown authority
        (url("localhost"), &good[..2]), // no certificate of ours
    ] {
        let done = once(&history, &url, words);
        assert_eq!(done.status.code(), Some(1), "{}", errors(&done));
        assert!(errors(&done).contains("did not accept"), "{}", errors(&done));
    }
    let done = once(&history, &url("localhost"), &good);
    assert!(done.status.success(), "{}", errors(&done));
    assert_eq!(accepted(&receiver.end()), [1, 2]);
}

#[test]
fn certificates_are_checked_in_both_directions() {
    check_certificates("https", |tls| Receiver::with_files("", tls));
}

#[test]
fn the_environment_names_the_receiver() {
    let scratch = Scratch::new();
    add_segments(scratch.directory(), [1]);
    let receiver = Receiver::start("");
    let mut command = nativeprof(&["push", "--once"]);
    command
        .arg(scratch.directory())
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        .env(
            "OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT",
            format!("{}/api/org/v1/profiles", receiver.url()),
        )
        .env("OTEL_EXPORTER_OTLP_HEADERS", "a=never")
        .env("OTEL_EXPORTER_OTLP_PROFILES_HEADERS", "b=1%202")
        .env("OTEL_EXPORTER_OTLP_COMPRESSION", "none");
    let done = command.output().expect("nativeprof starts");
    assert!(done.status.success(), "{}", errors(&done));
    let requests = receiver.end();
    assert_eq!(accepted(&requests), [1]);
    let request = &requests[0];
    assert_eq!(request["path"], "/api/org/v1/profiles");
    let headers = &request["headers"];
    assert_eq!(
        (&headers["b"], &headers["a"], &headers["content-encoding"]),
        (&json!("1 2"), &Value::Null, &Value::Null)
    );
}

#[test]
fn grpc_is_answered_as_http_is() {
    for (answers, requests, code, printed) in [
        ("", 3, 0, ""),
        (
            "UNAVAILABLE,DEADLINE_EXCEEDED,CANCELLED,DATA_LOSS",
            7,
            0,
            "is tried again in",
        ),
        ("RESOURCE_EXHAUSTED:20", 4, 0, "RESOURCE_EXHAUSTED, as told"),
        ("hang", 4, 0, "timeout"),
        ("RESOURCE_EXHAUSTED", 3, 1, "RESOURCE_EXHAUSTED, as told"),
        (
            "INVALID_ARGUMENT",
            3,
            1,
            "the receiver answered INVALID_ARGUMENT, as told",
        ),
        ("UNAUTHENTICATED", 3, 1, "the receiver answered UNAUTHENTICATED"),
        ("partial", 3, 1, "refused 1 of 2 profiles: OK, one is too old"),
    ] {
        let scratch = Scratch::new();
        add_segments(scratch.directory(), 1..=3);
        let headers = scratch.path("headers");
        fs::write(&headers, "X-Scope-OrgID: one\n").expect("written");
        let receiver = Receiver::of_grpc(answers, &[]);
        let timeout = if answers == "hang" { "1s" } else { "60s" };
        let words = ["--timeout", timeout, "--headers-file", headers.to_str().expect("UTF-8")];
        let url = format!("grpc+{}", receiver.url());
        let done = once(scratch.directory(), &url, &words);
        let said = errors(&done);
        assert_eq!(done.status.code(), Some(code), "{answers}: {said}");
        assert!(said.contains(printed), "{answers}: {said}");
        let got = receiver.end();
        assert_eq!(got.len(), requests, "{answers}: {got:?}");
        let expected = if code == 0 || answers == "partial" {
            vec![1, 2, 3]
        } else {
            vec![2, 3]
        };
        assert_eq!(accepted(&got), expected, "{answers}: {got:?}");
        for request in &got {
            assert_eq!(
                (&request["total"], &request["headers"]["x-scope-orgid"]),
                (&json!(SAMPLES), &json!("one"))
            );
        }
    }
}

/// A server of gRPC refuses large messages before the service sees them.
#[test]
fn messages_of_grpc_are_halved_until_they_are_taken() {
    const TIMES: u64 = 600;
    let scratch = Scratch::new();
    add_segment(scratch.directory(), 1, &large_segment(1, TIMES as usize));
    let receiver = Receiver::of_grpc("", &[]);
    let done = once(scratch.directory(), &format!("grpc+{}", receiver.url()), &[]);
    assert!(done.status.success(), "{}", errors(&done));
    assert!(errors(&done).contains("sending smaller ones"), "{}", errors(&done));
    let got = receiver.end();
    let total: u64 = got
        .iter()
        .map(|request| request["total"].as_u64().expect("a number"))
        .sum();
    assert!(got.len() > 1, "{got:?}");
    assert_eq!(total, TIMES * SAMPLES);
}

#[test]
fn certificates_of_grpc_are_checked_in_both_directions() {
    check_certificates("grpc+https", |tls| Receiver::of_grpc("", tls));
}

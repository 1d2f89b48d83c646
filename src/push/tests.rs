use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io::Write;
use std::path::PathBuf;

use super::*;

/// The golden profile of OTLP, decompressed.
const PROFILE: &[u8] = include_bytes!("../../fixtures/golden/profile.otlp");

/// A directory of segments.
struct History(PathBuf);

impl History {
    fn new(name: &str, sequences: impl IntoIterator<Item = u64>) -> History {
        let directory = std::env::temp_dir().join(format!("nativeprof-push-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory");
        let history = History(directory);
        for sequence in sequences {
            history.add(sequence, PROFILE);
        }
        history
    }

    fn path(&self, sequence: u64) -> PathBuf {
        self.0
            .join(format!("{sequence:010}-20261128T031400.123Z-60000.otlp.gz"))
    }

    fn add(&self, sequence: u64, content: &[u8]) {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(content).expect("in memory");
        fs::write(self.path(sequence), gzip.finish().expect("in memory")).expect("written");
    }
}

impl Drop for History {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A receiver that gives these answers, then accepts everything.
#[derive(Default)]
struct Script {
    answers: VecDeque<Answer>,
    /// Sizes of the messages that it accepted.
    accepted: Vec<usize>,
    sent: usize,
    /// Larger ones are refused.
    max: Option<usize>,
    renewals: VecDeque<bool>,
}

impl Receiver for Script {
    fn send(&mut self, message: &[u8]) -> Answer {
        self.sent += 1;
        if self.max.is_some_and(|max| message.len() > max) {
            return Answer::of_http(413, None, b"");
        }
        let answer = self
            .answers
            .pop_front()
            .unwrap_or_else(|| Answer::of_http(200, None, b""));
        if matches!(answer.verdict, Verdict::Accepted { .. }) {
            self.accepted.push(message.len());
        }
        answer
    }

    fn renew(&mut self) -> Result<bool> {
        Ok(self.renewals.pop_front().unwrap_or(false))
    }
}

struct Outcome {
    result: Result<bool>,
    metrics: PushMetrics,
    printed: Vec<String>,
    waits: Vec<Duration>,
}

fn push(history: &History, receiver: &mut Script, url: &str) -> Outcome {
    let options = PushOptions {
        once: true,
        max_message: 4 << 20,
        backoff: Backoff {
            first: Duration::from_secs(1),
            longest: Duration::from_secs(60),
        },
        poll: Duration::ZERO,
    };
    let metrics = Mutex::default();
    let printed = RefCell::default();
    let waits = RefCell::default();
    // Time passes only in the test's imagination: a wait ends the program instead, which continues at once.
    let skipped = Cell::new(false);
    let endpoint = Endpoint::parse(url).expect("an address");
    let surroundings = Surroundings {
        metrics: &metrics,
        stop: &|| skipped.take(),
        renewals: &|| 0,
        wait: &|wait: Duration| {
            RefCell::<Vec<Duration>>::borrow_mut(&waits).push(wait);
            skipped.set(true);
        },
        print: &|event: &Event<'_>| RefCell::<Vec<String>>::borrow_mut(&printed).push(event.text.to_string()),
    };
    let mut result = run(&history.0, &endpoint, receiver, &options, &surroundings);
    for _ in 0..20 {
        if result.is_err() {
            break;
        }
        let left = surroundings.metrics.lock().expect("not poisoned").queue_segments;
        if left == 0 {
            break;
        }
        result = run(&history.0, &endpoint, receiver, &options, &surroundings);
    }
    Outcome {
        result,
        metrics: metrics.into_inner().expect("not poisoned"),
        printed: printed.into_inner(),
        waits: waits.into_inner(),
    }
}

fn without_waits(once: bool) -> PushOptions {
    PushOptions {
        once,
        max_message: 4 << 20,
        backoff: Backoff {
            first: Duration::ZERO,
            longest: Duration::ZERO,
        },
        poll: Duration::ZERO,
    }
}

/// Accepts everything, and keeps the messages.
struct Keep<'a>(&'a RefCell<Vec<Vec<u8>>>);

impl Receiver for Keep<'_> {
    fn send(&mut self, message: &[u8]) -> Answer {
        self.0.borrow_mut().push(message.to_vec());
        Answer::of_http(200, None, b"")
    }

    fn renew(&mut self) -> Result<bool> {
        Ok(false)
    }
}

const URL: &str = "http://localhost/";

#[test]
fn every_segment_is_sent_once() {
    let history = History::new("once", [3, 4, 5]);
    fs::write(history.0.join("notes.txt"), "foreign").expect("written");
    let mut receiver = Script::default();
    let outcome = push(&history, &mut receiver, URL);
    assert!(outcome.result.expect("sent"), "{:?}", outcome.printed);
    assert_eq!((receiver.accepted.len(), outcome.metrics.segments), (3, 3));
    assert_eq!(outcome.metrics.dropped_segments, 0);
    // Nothing again; what comes later, and what another receiver has not.
    assert!(push(&history, &mut receiver, URL).result.expect("sent"));
    history.add(6, PROFILE);
    assert!(push(&history, &mut receiver, URL).result.expect("sent"));
    assert_eq!(receiver.sent, 4);
    let mut other = Script::default();
    assert!(push(&history, &mut other, "http://other/").result.expect("sent"));
    assert_eq!(other.sent, 4);
}

#[test]
fn answers_that_are_no_refusal_are_tried_again() {
    let history = History::new("again", [1, 2]);
    let answers = [
        Answer::none("connection", "refused"),
        Answer::of_http(503, None, b""),
        Answer::of_http(429, Some("90"), b""),
        Answer::of_http(429, Some("999999999"), b""),
    ];
    let mut receiver = Script {
        answers: answers.into(),
        ..Script::default()
    };
    let outcome = push(&history, &mut receiver, URL);
    assert!(outcome.result.expect("sent"));
    assert_eq!((receiver.sent, receiver.accepted.len()), (6, 2));
    let codes: Vec<_> = outcome.metrics.messages.into_iter().collect();
    let expected = [("200", 2), ("429", 2), ("503", 1), ("connection", 1)].map(|(code, n)| (code.to_string(), n));
    assert_eq!(codes, expected);
    // What the receiver asks for, within an hour.
    assert!(outcome.waits[2] > Duration::from_secs(89), "{:?}", outcome.waits);
    assert!(outcome.waits[3] <= Duration::from_secs(3600), "{:?}", outcome.waits);
}

#[test]
fn waits_grow_and_are_not_all_the_same() {
    let backoff = Backoff {
        first: Duration::from_secs(1),
        longest: Duration::from_secs(60),
    };
    let waits = [1, 2, 3, 6, 7, 40].map(|attempts| backoff.wait(attempts, 1.0).as_secs());
    assert_eq!(waits, [1, 2, 4, 32, 60, 60]);
    assert_eq!(backoff.wait(3, 0.0), Duration::from_secs(2));
    assert!(random() < 1.0 && random() != random());
}

#[test]
fn a_refused_message_is_not_sent_again() {
    for status in [400, 401, 404, 500] {
        let history = History::new(&format!("refused-{status}"), [1, 2]);
        let mut receiver = Script {
            answers: [Answer::of_http(status, None, b"why")].into(),
            ..Script::default()
        };
        let outcome = push(&history, &mut receiver, URL);
        assert!(!outcome.result.expect("ended"));
        assert_eq!((receiver.sent, receiver.accepted.len()), (2, 1));
        assert!(outcome.metrics.refused_profiles > 0);
        let line = format!("the receiver answered {status}, why");
        assert!(
            outcome.printed.iter().any(|text| text.contains(&line)),
            "{:?}",
            outcome.printed
        );
    }
}

#[test]
fn a_message_is_sent_again_with_another_token() {
    let history = History::new("token", [1]);
    let mut receiver = Script {
        answers: [Answer::of_http(401, None, b"")].into(),
        renewals: [true].into(),
        ..Script::default()
    };
    assert!(push(&history, &mut receiver, URL).result.expect("sent"));
    assert_eq!((receiver.sent, receiver.accepted.len()), (2, 1));
}

#[test]
fn partial_success_is_counted() {
    let history = History::new("partial", [1]);
    // One rejected profile, `x`.
    let mut receiver = Script {
        answers: [Answer::of_http(200, None, &[0x0a, 5, 0x08, 1, 0x12, 1, b'x'])].into(),
        ..Script::default()
    };
    let outcome = push(&history, &mut receiver, URL);
    assert!(!outcome.result.expect("sent"));
    assert_eq!((receiver.sent, outcome.metrics.refused_profiles), (1, 1));
}

/// Profile with more than the smallest message: the samples again and again, at other times.
fn large() -> Vec<u8> {
    let mut bytes = PROFILE.to_vec();
    let samples = crate::profile::otlp_parts::OtlpParts::new(bytes.clone()).expect("a file");
    let part = samples
        .part(0, usize::MAX, PartEnd::File)
        .expect("valid")
        .expect("a part");
    // Messages of protocol buffers that follow each other are merged: resources are appended.
    while bytes.len() < 5 * MIN_MESSAGE {
        bytes.extend_from_slice(&resources(&part.message));
    }
    bytes
}

/// The first field of a message: the resources, without the dictionary.
fn resources(message: &[u8]) -> Vec<u8> {
    let (mut length, mut at) = (0, 1);
    for shift in (0..).step_by(7) {
        let byte = message[at];
        length |= usize::from(byte & 0x7f) << shift;
        at += 1;
        if byte < 0x80 {
            break;
        }
    }
    assert_eq!(message[0], 0x0a);
    message[..at + length].to_vec()
}

#[test]
fn messages_are_halved_until_the_receiver_takes_them() {
    let history = History::new("large", []);
    history.add(1, &large());
    history.add(2, &large());
    let mut receiver = Script {
        max: Some(2 * MIN_MESSAGE),
        ..Script::default()
    };
    let outcome = push(&history, &mut receiver, URL);
    assert!(outcome.result.expect("sent"), "{:?}", outcome.printed);
    let refused = receiver.sent - receiver.accepted.len();
    assert!((1..4).contains(&refused), "{refused} of {}", receiver.sent);
    let file = OtlpParts::new(large()).expect("a file");
    assert!(receiver.accepted.len() > 2 && file.samples() > 10);
    // One that takes nothing gets each part once in the smallest size.
    let mut nothing = Script {
        max: Some(10),
        ..Script::default()
    };
    let outcome = push(&history, &mut nothing, "http://nothing/");
    assert!(!outcome.result.expect("ended"));
    assert_eq!(outcome.metrics.segments, 2);
    assert!(nothing.sent < 40, "{}", nothing.sent);
}

#[test]
fn what_the_history_dropped_is_counted_and_damage_is_skipped() {
    let history = History::new("dropped", [1, 2]);
    let mut receiver = Script::default();
    assert!(push(&history, &mut receiver, URL).result.expect("sent"));
    for sequence in [6, 7, 8] {
        history.add(sequence, PROFILE);
    }
    fs::write(history.path(7), "no gzip").expect("written");
    history.add(9, b"\xff\xff");
    let outcome = push(&history, &mut receiver, URL);
    assert!(!outcome.result.expect("sent"));
    assert_eq!(
        (outcome.metrics.dropped_segments, outcome.metrics.damaged_segments),
        (3, 2)
    );
    assert_eq!(receiver.accepted.len(), 4);
    assert!(
        outcome.printed.iter().any(|text| text.contains("0000000007-")),
        "{:?}",
        outcome.printed
    );
}

#[test]
fn a_stop_between_messages_loses_and_repeats_nothing() {
    let history = History::new("stop", []);
    history.add(1, &large());
    let file = OtlpParts::new(large()).expect("a file");
    let size = 2 * MIN_MESSAGE;
    let endpoint = Endpoint::parse(URL).expect("an address");
    let mut receiver = Script::default();
    let options = PushOptions {
        max_message: size,
        ..without_waits(false)
    };
    // Each run is stopped at its second message, whose answer asks to wait.
    let mut runs = 0;
    loop {
        runs += 1;
        assert!(runs < 50);
        let metrics = Mutex::default();
        receiver.answers = [Answer::of_http(200, None, b""), Answer::of_http(503, None, b"")].into();
        let before = receiver.sent;
        let waits = Cell::new(0);
        let surroundings = Surroundings {
            metrics: &metrics,
            stop: &|| waits.get() > 0,
            renewals: &|| 0,
            wait: &|_| waits.set(waits.get() + 1),
            print: &|_| {},
        };
        let _ = run(&history.0, &endpoint, &mut receiver, &options, &surroundings).expect("ended");
        if receiver.sent == before {
            break;
        }
    }
    let mut parts = Vec::new();
    let mut from = 0;
    while let Some(part) = file.part(from, size, PartEnd::File).expect("valid") {
        parts.push(part.message.len());
        from = part.end;
    }
    assert!(parts.len() > 2);
    assert_eq!(receiver.accepted, parts);
}

/// With a full disk everything is sent once, as long as the process lives.
#[test]
fn without_a_cursor_file_sending_goes_on() {
    let history = History::new("full", [1, 2, 3]);
    std::os::unix::fs::symlink("nowhere", history.path(4)).expect("a link");
    let endpoint = Endpoint::parse(URL).expect("an address");
    let cursor = Cursor::open(&history.0, &endpoint.url).expect("a cursor");
    drop(cursor);
    let names = fs::read_dir(&history.0).expect("a directory");
    let name = names.filter_map(std::result::Result::ok).map(|entry| entry.file_name());
    let name = name
        .map(|name| name.to_string_lossy().into_owned())
        .find(|name| name.ends_with(".cursor"));
    // The new file cannot be made.
    let blocked = history.0.join(format!(".{}.tmp", name.expect("a cursor file")));
    fs::create_dir(&blocked).expect("made");
    let mut receiver = Script::default();
    let metrics = Mutex::default();
    let printed = RefCell::<Vec<String>>::default();
    let waits = Cell::new(0);
    let options = without_waits(false);
    let surroundings = Surroundings {
        metrics: &metrics,
        stop: &|| waits.get() > 2,
        renewals: &|| 0,
        wait: &|_| waits.set(waits.get() + 1),
        print: &|event| printed.borrow_mut().push(event.text.to_string()),
    };
    assert!(run(&history.0, &endpoint, &mut receiver, &options, &surroundings).expect("ended"));
    assert_eq!(receiver.accepted.len(), 3);
    assert_eq!(printed.borrow().len(), 1, "{printed:?}");
    assert!(printed.borrow()[0].starts_with("cannot write"), "{printed:?}");
    let once = PushOptions { once: true, ..options };
    waits.set(0);
    let error = run(&history.0, &endpoint, &mut receiver, &once, &surroundings).expect_err("not written");
    assert!(error.what.starts_with("cannot write"), "{error}");
}

#[test]
fn a_signal_ends_a_long_queue() {
    struct Counting<'a>(&'a Cell<usize>);
    impl Receiver for Counting<'_> {
        fn send(&mut self, _: &[u8]) -> Answer {
            self.0.set(self.0.get() + 1);
            Answer::of_http(200, None, b"")
        }
        fn renew(&mut self) -> Result<bool> {
            Ok(false)
        }
    }
    let history = History::new("signal", 1..=9);
    let endpoint = Endpoint::parse(URL).expect("an address");
    let metrics = Mutex::default();
    let sent = Cell::new(0);
    for once in [false, true] {
        let options = without_waits(once);
        let before = sent.get();
        let surroundings = Surroundings {
            metrics: &metrics,
            stop: &|| sent.get() == before + 2,
            renewals: &|| 0,
            wait: &|_| {},
            print: &|event| panic!("{event:?}"),
        };
        let done = run(&history.0, &endpoint, &mut Counting(&sent), &options, &surroundings).expect("ended");
        assert_eq!((sent.get(), done), (before + 2, !once));
        let queue = metrics.lock().expect("not poisoned").queue_segments;
        assert_eq!(queue as usize, 9 - sent.get());
    }
}

/// Nothing ends it or is waited for, and there is nothing to print.
fn undisturbed(metrics: &Mutex<PushMetrics>) -> Surroundings<'_> {
    Surroundings {
        metrics,
        stop: &|| false,
        renewals: &|| 0,
        wait: &|_| {},
        print: &|event| panic!("{event:?}"),
    }
}

#[test]
fn pyroscope_gets_a_profile_for_each_resource() {
    use prost::Message;
    let history = History::new("pyroscope", [1]);
    let metrics = Mutex::default();
    let endpoint = Endpoint::parse("pyroscope+http://localhost").expect("an address");
    let kept = RefCell::default();
    let options = without_waits(true);
    let surroundings = undisturbed(&metrics);
    assert!(run(&history.0, &endpoint, &mut Keep(&kept), &options, &surroundings).expect("sent"));
    let messages = kept.take();
    let [message] = &messages[..] else {
        panic!("{} messages", messages.len());
    };
    let request = pyroscope::PushRequest::decode(&message[..]).expect("a request");
    let [series] = &request.series[..] else {
        panic!("{} series", request.series.len());
    };
    let labels: Vec<_> = series
        .labels
        .iter()
        .map(|label| (label.name.as_str(), label.value.as_str()))
        .collect();
    assert!(labels.contains(&("__name__", "process_cpu")), "{labels:?}");
    let mut pprof = Vec::new();
    let mut gzip = flate2::read::GzDecoder::new(&series.samples[0].raw_profile[..]);
    std::io::Read::read_to_end(&mut gzip, &mut pprof).expect("gzip");
    let read = |bytes: &[u8]| {
        let profile = crate::profile::import::read(bytes).expect("a profile");
        let totals = (0..profile.value_types().len()).map(|value| profile.total_amount(value));
        totals.collect::<Vec<_>>()
    };
    assert_eq!(read(&pprof), read(PROFILE));
}

/// A segment of a host as it is written, with two services: each gets a message with its labels and its samples.
#[test]
fn services_of_a_host_are_profiles_of_their_own() {
    use crate::history::{Limits, Writer};
    use crate::profile::export::otlp::{SegmentInfo, SegmentProcess, encode_segment};
    use prost::Message;
    let golden = include_bytes!("../../fixtures/golden/profile.json");
    let profile = crate::profile::json::read(golden).expect("a profile");
    let samples = profile.timeline.len();
    assert!(samples > 10);
    let resource = |service: &str| {
        [("host.name", "h1"), ("service.name", service)]
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .to_vec()
    };
    let process = |pid: u32, resource: u32| SegmentProcess {
        pid,
        name: "python3".into(),
        resource,
        ..SegmentProcess::default()
    };
    let info = SegmentInfo {
        resources: vec![resource("shop"), resource("search")],
        processes: vec![process(7, 0), process(8, 1)],
        process_of_sample: (0..samples as u32).map(|sample| u32::from(sample % 3 == 0)).collect(),
        ..SegmentInfo::default()
    };
    let history = History::new("services", []);
    let mut writer = Writer::open(&history.0, Limits::default()).expect("a writer");
    let start = UNIX_EPOCH + Duration::from_secs(1_795_835_640);
    let bytes = encode_segment(&profile, &info);
    writer.write(start, Duration::from_secs(60), &bytes).expect("written");
    let metrics = Mutex::default();
    let kept = RefCell::default();
    let options = without_waits(true);
    let surroundings = undisturbed(&metrics);
    let send = |url: &str| {
        let endpoint = Endpoint::parse(url).expect("an address");
        assert!(run(&history.0, &endpoint, &mut Keep(&kept), &options, &surroundings).expect("sent"));
        kept.take()
    };
    let [whole] = &send(URL)[..] else {
        panic!("several messages")
    };
    let total = |bytes: &[u8]| crate::profile::import::read(bytes).expect("a profile").total_amount(0);
    assert_eq!(total(whole), total(&bytes));
    let mut of_services = HashMap::new();
    for message in send("pyroscope+http://localhost") {
        let request = pyroscope::PushRequest::decode(&message[..]).expect("a request");
        for series in request.series {
            let mut labels = series.labels.iter();
            let service = labels.find(|label| label.name == "service_name").expect("a service");
            let mut pprof = Vec::new();
            let mut gzip = flate2::read::GzDecoder::new(&series.samples[0].raw_profile[..]);
            std::io::Read::read_to_end(&mut gzip, &mut pprof).expect("gzip");
            *of_services.entry(service.value.clone()).or_insert(0) += total(&pprof);
        }
    }
    let search = samples.div_ceil(3) as u64;
    assert_eq!(
        (of_services["search"], of_services["shop"]),
        (search, samples as u64 - search)
    );
    let sum: u64 = of_services.values().sum();
    assert_eq!(sum, total(&bytes));
}

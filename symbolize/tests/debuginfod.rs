//! A real server on loopback with a debug file split off here; and misbehaving ones.
#![cfg(feature = "debuginfod")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Scratch, open, ours};
use symbolize::{Debuginfod, Files, Limits, Module};

const SOURCE: &str = r#"
#include <stdlib.h>
static inline __attribute__((always_inline)) int inner(int x) { return rand() * x; }
__attribute__((noinline)) int outer(int x) { return inner(x) + inner(x + 1); }
int main(int argc, char **argv) { (void)argv; return outer(argc); }
"#;

/// A stripped program, its debug file in a separate directory, and the results of the unstripped program for addresses
/// in it.
struct Built {
    scratch: Scratch,
    bare: PathBuf,
    served: PathBuf,
    id: Vec<u8>,
    svmas: Vec<u64>,
    expected: Vec<common::Frames>,
}

fn build(name: &str) -> Built {
    let scratch = Scratch::new(name);
    let full = scratch
        .compile("full", ("a.c", SOURCE), &["gcc", "-O2", "-g", "-Wl,--build-id"])
        .expect("gcc");
    let (bare, served) = (scratch.0.join("bare"), scratch.0.join("served"));
    fs::create_dir(&served).expect("made");
    let run = |command: &mut Command| assert!(command.status().is_ok_and(|s| s.success()), "{command:?}");
    run(Command::new("objcopy")
        .arg("--only-keep-debug")
        .arg(&full)
        .arg(served.join("full.debug")));
    run(Command::new("strip").arg("-o").args([&bare, &full]));
    let mut module = open(&full);
    let (start, size) = module.symbol_named("outer").expect("outer");
    let svmas: Vec<u64> = (start..start + size).collect();
    let expected = ours(&mut module, &svmas);
    assert!(expected.iter().any(|f| f.len() == 2));
    let id = module.build_id().expect("a build id").to_vec();
    Built {
        scratch,
        bare,
        served,
        id,
        svmas,
        expected,
    }
}

/// Files that only a server has.
struct Remote(Arc<Debuginfod>);

impl Files for Remote {
    fn open(&self, _: &Path) -> Option<fs::File> {
        None
    }

    fn fetch(&self, build_id: &[u8]) -> Option<Result<fs::File, String>> {
        Some(self.0.debug_info(build_id, &|| false))
    }
}

fn module(built: &Built, server: &Arc<Debuginfod>) -> Module {
    open(&built.bare).with_files("/bare", Arc::new(Remote(server.clone())))
}

/// Killed at the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|b| format!("{b:02x}")).collect()
}

/// debuginfod with the debug file, and its address.
fn serve(built: &Built) -> (Running, String) {
    let file = fs::read(built.served.join("full.debug")).expect("read");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a port")
            .port();
        let mut command = Command::new("debuginfod");
        command
            .args(["-F", "-d", ":memory:", "-p", &port.to_string()])
            .arg(&built.served)
            .env_remove("DEBUGINFOD_URLS")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut server = Running(command.spawn().expect("debuginfod (.ci/setup installs it)"));
        // Between the two binds another server can take the port: debuginfod exits then, and what is received is not
        // the file. It is requested by hand, with the protocol of debuginfod, until the directory has been scanned.
        while server.0.try_wait().is_ok_and(|exited| exited.is_none()) && start.elapsed() < Duration::from_secs(60) {
            if received(port, &hex(&built.id)).is_some_and(|response| response.ends_with(&file)) {
                return (server, format!("http://127.0.0.1:{port}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    panic!("debuginfod does not find the file it serves");
}

fn received(port: u16, hex: &str) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(stream, "GET /buildid/{hex}/debuginfo HTTP/1.0\r\n\r\n").ok()?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response).ok()?;
    Some(response)
}

#[test]
fn a_real_server() {
    let built = build("debuginfod");
    let (server, url) = serve(&built);
    let hex = hex(&built.id);

    let cache = built.scratch.0.join("cache");
    let client =
        |limits| Arc::new(Debuginfod::new(&format!("ima:enforcing {url}/"), cache.clone(), limits).expect("a server"));
    let kept = cache.join(&hex).join("debuginfo");

    let small = Limits {
        size: 1000,
        ..Limits::default()
    };
    let mut m = module(&built, &client(small));
    let _ = m.lookup(built.svmas[0]);
    assert!(
        m.sources().refused[0].contains("more than 1000 bytes"),
        "{:?}",
        m.sources()
    );
    assert!(!kept.exists());

    let mut m = module(&built, &client(Limits::default()));
    let frames = ours(&mut m, &built.svmas);
    let sources = m.sources();
    assert!(
        sources.fetched && sources.dwarf && sources.symtab && sources.refused.is_empty(),
        "{sources:?}"
    );
    assert_eq!(frames, built.expected);
    assert!(kept.exists());

    // From the cache, without the server.
    drop(server);
    let mut m = module(&built, &client(Limits::default()));
    assert_eq!(ours(&mut m, &built.svmas), built.expected);

    // A wrong file in the cache is not used.
    fs::copy(&built.bare, &kept).expect("copied");
    let mut wrong = fs::read(&kept).expect("read");
    let at = wrong
        .windows(built.id.len())
        .position(|w| w == built.id)
        .expect("the id");
    wrong[at] ^= 1;
    fs::write(&kept, wrong).expect("written");
    let mut m = module(&built, &client(Limits::default()));
    let _ = m.lookup(built.svmas[0]);
    assert!(m.sources().refused[0].contains("does not respond"), "{:?}", m.sources());
}

/// A server that sends the same response to every request, and counts requests.
fn responding(response: Vec<u8>) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let count = Arc::new(AtomicUsize::new(0));
    let requests = count.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            requests.fetch_add(1, Ordering::SeqCst);
            let mut stream = stream;
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(&response);
        }
    });
    (url, count)
}

#[test]
fn bad_servers() {
    let built = build("debuginfod-bad");
    let other = fs::read("/proc/self/exe").expect("read");
    let ok = |body: &[u8]| [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", body].concat();
    let cache = built.scratch.0.join("cache");
    let client = |url: &str| Debuginfod::new(url, cache.clone(), Limits::default()).expect("a server");
    let go_on = || false;
    for (response, words) in [
        (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec(),
            "does not have it",
        ),
        (
            b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec(),
            "returned 500",
        ),
        (
            b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n".to_vec(),
            "does not respond",
        ),
        (ok(b"no ELF file"), "another build ID"),
        (ok(&other), "another build ID"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort".to_vec(),
            "failed during the download",
        ),
        (b"rubbish".to_vec(), "does not respond"),
    ] {
        let (url, requests) = responding(response);
        let client = client(&url);
        let lookup = || {
            let why = client.debug_info(&built.id, &go_on).expect_err("refused");
            assert!(why.contains(words) && why.contains(&url), "{words}: {why}");
            requests.load(Ordering::SeqCst)
        };
        let once = lookup();
        assert!((1..=6).contains(&once), "{words}: redirected {once} times");
        assert_eq!(lookup(), once, "{words}: the response is remembered");
        let left: Vec<_> = fs::read_dir(&cache).map(|d| d.flatten().collect()).unwrap_or_default();
        assert!(left.is_empty(), "{words}: {left:?}");
    }

    // A server that is gone is not used for the next file; a request to stop is obeyed.
    let gone = client("http://127.0.0.1:1");
    let why = |id: u8| gone.debug_info(&[id; 20], &go_on).expect_err("refused");
    assert!(why(1).contains("does not respond: "), "{}", why(1));
    assert!(why(2).ends_with("does not respond"), "{}", why(2));
    let (url, requests) = responding(ok(&other));
    let why = client(&url).debug_info(&built.id, &|| true).expect_err("refused");
    assert!(
        why.contains("interrupted") && requests.load(Ordering::SeqCst) == 0,
        "{why}"
    );

    assert!(Debuginfod::new(" ima:permissive file:///srv ", cache.clone(), Limits::default()).is_none());
    assert!(
        client(&url)
            .debug_info(&[1, 2], &go_on)
            .is_err_and(|e| e.contains("build ID"))
    );
}

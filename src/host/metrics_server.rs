//! A server of metrics: `GET /metrics` of HTTP/1.1 on a TCP port or a Unix socket, one connection after the other.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use crate::sys::threads::block_signals;

/// Maximum number of bytes of a request. Requests of Prometheus have some hundreds.
const MAX_REQUEST: usize = 8 << 10;
/// Maximum time of a connection. Prometheus gives up after 10 s by default, so that it can wait for some others.
const MAX_TIME: Duration = Duration::from_secs(2);
/// The wait after a connection that could not be accepted, such as without free descriptors.
const PAUSE: Duration = Duration::from_secs(1);
/// What an address has before the path of a Unix socket.
const UNIX: &str = "unix:";

/// A socket that waits for connections.
pub struct MetricsListener(Kind);

enum Kind {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl MetricsListener {
    /// Listens at `address`: an address and port (`127.0.0.1:7071`), or `unix:` and the path of a socket. A socket that a process
    /// has left behind at this path is replaced.
    ///
    /// # Errors
    /// The address is not one, belongs to another machine, or is in use; or the user may not listen there.
    pub fn bind(address: &str) -> io::Result<MetricsListener> {
        let kind = match address.strip_prefix(UNIX) {
            Some(path) => Kind::Unix(bind_unix(Path::new(path))?),
            None => Kind::Tcp(TcpListener::bind(address)?),
        };
        Ok(MetricsListener(kind))
    }

    /// Where it listens, with the port that was chosen for port 0.
    ///
    /// # Errors
    /// Those of getsockname(2).
    pub fn address(&self) -> io::Result<String> {
        Ok(match &self.0 {
            Kind::Tcp(listener) => listener.local_addr()?.to_string(),
            Kind::Unix(listener) => {
                let address = listener.local_addr()?;
                format!("{UNIX}{}", address.as_pathname().unwrap_or(Path::new("")).display())
            }
        })
    }

    fn accept(&self) -> io::Result<Box<dyn Connection>> {
        Ok(match &self.0 {
            Kind::Tcp(listener) => Box::new(listener.accept()?.0),
            Kind::Unix(listener) => Box::new(listener.accept()?.0),
        })
    }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
            let refuses = |e: io::Error| e.kind() == io::ErrorKind::ConnectionRefused;
            if !is_socket || !UnixStream::connect(path).is_err_and(refuses) {
                return Err(e);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        result => result,
    }
}

/// Starts a thread that answers requests until the process ends. `text` gives the metrics, in the text format of Prometheus.
///
/// # Errors
/// The thread cannot be started.
pub fn serve(listener: MetricsListener, text: impl Fn() -> String + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name("metrics".into());
    thread.spawn(move || {
        // They have to end the waits of the main thread.
        block_signals();
        loop {
            match listener.accept() {
                // A client that breaks the connection only harms itself.
                Ok(connection) => drop(answer(&mut Bounded::new(connection), &text)),
                Err(_) => thread::sleep(PAUSE),
            }
        }
    })?;
    Ok(())
}

/// Reads a request and answers it.
fn answer(connection: &mut Bounded, text: &dyn Fn() -> String) -> io::Result<()> {
    let mut request = Vec::new();
    let status = loop {
        if let Some(end) = end_of_line(&request) {
            let line = request.get(..end).unwrap_or_default();
            let status = status(line);
            if status != Status::Ok || is_whole(&request) {
                break status;
            }
        }
        if request.len() >= MAX_REQUEST {
            break Status::TooLarge;
        }
        let mut buffer = [0; 1024];
        let length = connection.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        request.extend_from_slice(buffer.get(..length).unwrap_or_default());
    };
    let (body, more) = match status {
        Status::Ok => (text(), "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
        Status::WrongMethod => (format!("{}\n", status.text()), "Allow: GET\r\n"),
        _ => (format!("{}\n", status.text()), "Content-Type: text/plain\r\n"),
    };
    let head = format!(
        "HTTP/1.1 {}\r\n{more}Content-Length: {}\r\nConnection: close\r\n\r\n",
        status.text(),
        body.len()
    );
    connection.write_all(head.as_bytes())?;
    connection.write_all(body.as_bytes())?;
    if status != Status::Ok {
        // If bytes of the request were left when the socket is closed, the client might lose the answer (RFC 9112, 9.6).
        connection.stream.end_of_answer()?;
        let mut rest = [0; 1024];
        for _ in 0..MAX_REQUEST / rest.len() {
            if connection.read(&mut rest)? == 0 {
                break;
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    Ok,
    Malformed,
    NotFound,
    WrongMethod,
    TooLarge,
}

impl Status {
    fn text(self) -> &'static str {
        match self {
            Status::Ok => "200 OK",
            Status::Malformed => "400 Bad Request",
            Status::NotFound => "404 Not Found",
            Status::WrongMethod => "405 Method Not Allowed",
            Status::TooLarge => "431 Request Header Fields Too Large",
        }
    }
}

/// What a request line, `GET /metrics HTTP/1.1`, is answered with.
fn status(line: &[u8]) -> Status {
    let mut parts = line.trim_ascii_end().split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Status::Malformed;
    };
    if !version.starts_with(b"HTTP/1.") {
        return Status::Malformed;
    }
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    match (path, method) {
        (b"/metrics", b"GET") => Status::Ok,
        (b"/metrics", _) => Status::WrongMethod,
        _ => Status::NotFound,
    }
}

fn end_of_line(request: &[u8]) -> Option<usize> {
    request.iter().position(|byte| *byte == b'\n')
}

/// Whether the empty line after the headers was read.
fn is_whole(request: &[u8]) -> bool {
    let has = |end: &[u8]| request.windows(end.len()).any(|window| window == end);
    has(b"\n\r\n") || has(b"\n\n")
}

/// A connection that ends in bounded time, however slow the client is.
struct Bounded {
    stream: Box<dyn Connection>,
    end: Instant,
}

impl Bounded {
    fn new(stream: Box<dyn Connection>) -> Bounded {
        let end = Instant::now() + MAX_TIME;
        Bounded { stream, end }
    }

    /// Lets the next read or write fail when the time is over.
    fn limit(&self) -> io::Result<()> {
        let rest = self.end.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.limit(rest)
    }
}

impl Read for Bounded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.read(buffer)
    }
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

trait Connection: Read + Write {
    /// Sets how long a read or write may take; more than zero.
    fn limit(&self, time: Duration) -> io::Result<()>;

    /// Says to the client that nothing follows.
    fn end_of_answer(&self) -> io::Result<()>;
}

macro_rules! connection {
    ($stream:ty) => {
        impl Connection for $stream {
            fn limit(&self, time: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(time))?;
                self.set_write_timeout(Some(time))
            }

            fn end_of_answer(&self) -> io::Result<()> {
                self.shutdown(std::net::Shutdown::Write)
            }
        }
    };
}

connection!(TcpStream);
connection!(UnixStream);

#[cfg(test)]
mod tests {
    use super::*;

    fn served(address: &str) -> String {
        let listener = MetricsListener::bind(address).expect("a socket");
        let address = listener.address().expect("an address");
        serve(listener, || "nativeprof_up 1\n".into()).expect("a thread");
        address
    }

    /// The answer to these bytes.
    fn asked(mut stream: impl Read + Write, request: &[u8]) -> String {
        stream.write_all(request).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    #[test]
    fn metrics_are_served_over_tcp() {
        let address = served("127.0.0.1:0");
        let connect = || TcpStream::connect(&address).expect("a connection");
        let whole = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: 16\r\n\
                     Connection: close\r\n\r\nnativeprof_up 1\n";
        assert_eq!(asked(connect(), b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), whole);
        // A request that comes in pieces.
        let mut pieces = connect();
        pieces.write_all(b"GET /metr").expect("sent");
        assert_eq!(asked(pieces, b"ics?a=b HTTP/1.0\n\n"), whole);
        let long = [b"GET /metrics HTTP/1.1\r\n".as_slice(), &[b'x'; MAX_REQUEST]].concat();
        let posted = [b"POST /metrics HTTP/1.1\r\n\r\n".as_slice(), &[b'x'; 4000]].concat();
        for (request, status) in [
            (b"GET / HTTP/1.1\r\n\r\n".as_slice(), "404 Not Found\r\n"),
            (b"GET /metrics/a HTTP/1.1\r\n\r\n", "404 Not Found\r\n"),
            (&posted, "405 Method Not Allowed\r\nAllow: GET\r\n"),
            (b"\r\n", "400 Bad Request\r\n"),
            (b"GET  /metrics HTTP/1.1\r\n\r\n", "400 Bad Request\r\n"),
            (b"GET /metrics SPDY/3\r\n\r\n", "400 Bad Request\r\n"),
            (&[0xff; MAX_REQUEST], "431 Request Header Fields Too Large\r\n"),
            (&long, "431 Request Header Fields Too Large\r\n"),
        ] {
            let answer = asked(connect(), request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
        }
    }

    #[test]
    fn a_silent_client_does_not_keep_others_out() {
        let address = served("127.0.0.1:0");
        let mut silent = TcpStream::connect(&address).expect("a connection");
        silent.write_all(b"GET").expect("sent");
        let other = TcpStream::connect(&address).expect("a connection");
        assert!(asked(other, b"GET /metrics HTTP/1.1\r\n\r\n").ends_with("nativeprof_up 1\n"));
        let mut rest = Vec::new();
        silent.read_to_end(&mut rest).expect("the end");
        assert!(rest.is_empty());
    }

    #[test]
    fn metrics_are_served_over_a_socket_that_was_left_behind() {
        let path = std::env::temp_dir().join(format!("nativeprof-metrics-{}", std::process::id()));
        let address = format!("unix:{}", path.display());
        drop(UnixListener::bind(&path).expect("a socket"));
        assert_eq!(served(&address), address);
        let stream = UnixStream::connect(&path).expect("a connection");
        assert!(asked(stream, b"GET /metrics HTTP/1.1\r\n\r\n").ends_with("nativeprof_up 1\n"));
        let second = MetricsListener::bind(&address).err().expect("it is in use");
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        fs::remove_file(&path).expect("a socket");
        fs::write(&path, "file").expect("written");
        assert!(MetricsListener::bind(&address).is_err(), "no other files are removed");
        fs::remove_file(&path).expect("a file");
    }
}

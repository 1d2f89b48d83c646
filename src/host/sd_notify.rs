//! Messages to the service manager: one datagram each, as `sd_notify(3)` of systemd 252 describes them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The connection to the service manager, or nothing where none asked for messages.
pub struct Notifier {
    socket: Option<(UnixDatagram, SocketAddr)>,
}

impl Notifier {
    /// Opens the connection to `address`, the value of `NOTIFY_SOCKET`: a path, or `@` and an abstract name.
    /// Fails if the address is of another kind or no socket can be made.
    pub fn new(address: Option<&OsStr>) -> io::Result<Notifier> {
        let Some(address) = address.filter(|address| !address.is_empty()) else {
            return Ok(Notifier { socket: None });
        };
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(address)?,
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "NOTIFY_SOCKET is neither a path nor an abstract name: start with a service manager, or unset it",
                ));
            }
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that hangs must not stop the sampling.
        socket.set_nonblocking(true)?;
        Ok(Notifier {
            socket: Some((socket, address)),
        })
    }

    /// Says that the start is complete.
    pub fn ready(&self) -> io::Result<()> {
        self.send("READY=1")
    }

    /// Says that the process is alive.
    pub fn watchdog(&self) -> io::Result<()> {
        self.send("WATCHDOG=1")
    }

    /// Says that the process is about to end.
    pub fn stopping(&self) -> io::Result<()> {
        self.send("STOPPING=1")
    }

    /// Shows `text` as the state of the service. Line ends become spaces: a line is an assignment of its own.
    pub fn status(&self, text: &str) -> io::Result<()> {
        self.send(&format!("STATUS={}", text.replace(['\n', '\r', '\0'], " ")))
    }

    fn send(&self, message: &str) -> io::Result<()> {
        let Some((socket, address)) = &self.socket else {
            return Ok(());
        };
        socket.send_to_addr(message.as_bytes(), address).map(drop)
    }
}

/// Time between two messages of the watchdog: half of `WATCHDOG_USEC` (microseconds), or `None` where no manager watches
/// this process. `watched` is `WATCHDOG_PID`, which is another process if the variables were inherited.
pub fn watchdog_interval(microseconds: Option<OsString>, watched: Option<OsString>, own_pid: u32) -> Option<Duration> {
    let number = |text: OsString| text.to_str()?.parse::<u64>().ok();
    if let Some(watched) = watched
        && number(watched) != Some(u64::from(own_pid))
    {
        return None;
    }
    let half = number(microseconds?)? / 2;
    (half > 0).then(|| Duration::from_micros(half))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).expect("a message");
        String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned()
    }

    #[test]
    fn each_message_is_one_datagram_to_an_abstract_socket() {
        let name = format!("nativeprof-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("an address");
        let manager = UnixDatagram::bind_addr(&address).expect("a socket");
        let notifier = Notifier::new(Some(OsStr::new(&format!("@{name}")))).expect("a notifier");
        notifier.ready().expect("sent");
        notifier.status("20 Hz\nREADY=0").expect("sent");
        notifier.watchdog().expect("sent");
        notifier.stopping().expect("sent");
        let all: Vec<String> = (0..4).map(|_| received(&manager)).collect();
        assert_eq!(all, ["READY=1", "STATUS=20 Hz READY=0", "WATCHDOG=1", "STOPPING=1"]);
    }

    #[test]
    fn without_a_manager_nothing_is_sent_and_a_foreign_address_is_refused() {
        assert!(Notifier::new(None).expect("no manager").ready().is_ok());
        assert!(Notifier::new(Some(OsStr::new("vsock:2:1"))).is_err());
    }

    #[test]
    fn the_watchdog_is_told_at_half_its_time() {
        let text = |text: &str| Some(OsString::from(text));
        assert_eq!(
            watchdog_interval(text("3000000"), None, 7),
            Some(Duration::from_millis(1500))
        );
        assert_eq!(
            watchdog_interval(text("3000000"), text("7"), 7),
            Some(Duration::from_millis(1500))
        );
        assert_eq!(watchdog_interval(text("3000000"), text("8"), 7), None);
        for wrong in ["", "0", "1", "-1", "99999999999999999999"] {
            assert_eq!(watchdog_interval(text(wrong), None, 7), None, "{wrong}");
        }
    }
}

//! What the sockets of processes are connected to, for the kinds of waits. Read when a wait is counted, not while threads are
//! sampled; a connection that is closed before that is not named.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::escape;
use crate::event::{Pid, SocketId, WaitKind};
use crate::process::system::System;

/// Different names in one recording, at most; sockets beyond have none.
const MAX_NAMES: usize = 256;
/// Descriptors of a process that are known, at most.
const MAX_DESCRIPTORS: usize = 4096;
/// Sockets of one process's network that are known, at most.
const MAX_SOCKETS: usize = 16384;
/// Shortest time between two readings of the tables of a process; no less than so many times as long as one takes.
const READ_AGAIN: u64 = 100_000_000;
const REST: u64 = 50;
/// Tables of the kernel (proc(5), `/proc/net`) with addresses.
const TABLES: [&str; 4] = ["tcp", "tcp6", "udp", "udp6"];
/// `TCP_LISTEN` of the kernel (include/net/tcp_states.h).
const LISTEN: &str = "0A";
/// `__SO_ACCEPTCON` of the kernel (include/uapi/linux/net.h), among the flags of a Unix socket.
const ACCEPTS: u32 = 1 << 16;

/// Names of sockets, each once.
#[derive(Default)]
pub(super) struct SocketNames {
    all: Vec<String>,
    ids: FxHashMap<String, SocketId>,
}

/// Sockets and descriptors of one process.
#[derive(Default)]
pub(super) struct ProcessSockets {
    table: SocketTable,
    /// What descriptors referred to when a wait was last counted.
    descriptors: FxHashMap<u32, String>,
}

/// The sockets that a process may have, by inode.
#[derive(Default)]
struct SocketTable {
    sockets: FxHashMap<u64, Address>,
    /// Ports of this side on which connections are accepted.
    accepting: FxHashSet<u16>,
    /// When it may be read again.
    next: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Address {
    /// Accepts connections here.
    Listening(SocketAddr),
    Connected {
        local: SocketAddr,
        peer: SocketAddr,
    },
    Unix {
        path: String,
        accepts: bool,
    },
}

impl SocketNames {
    /// Names by their number.
    pub(super) fn all(&self) -> &[String] {
        &self.all
    }

    /// The number of a name; `None` if there is no room for another one.
    fn id(&mut self, name: String) -> Option<SocketId> {
        if let Some(id) = self.ids.get(&name) {
            return Some(*id);
        }
        if self.all.len() >= MAX_NAMES {
            return None;
        }
        let id = SocketId(u16::try_from(self.all.len()).ok()?);
        self.all.push(name.clone());
        self.ids.insert(name, id);
        Some(id)
    }
}

impl ProcessSockets {
    /// What a descriptor of the process refers to: a path, `pipe:[...]`, `socket:[...]`. If it is closed or the process has
    /// ended, what it was like before, without which one: `socket:`.
    pub(super) fn descriptor(&mut self, system: &dyn System, pid: Pid, fd: u32) -> Option<String> {
        let Some(name) = system.descriptor(pid, fd) else {
            let known = self.descriptors.get(&fd)?;
            return known.split('[').next().map(String::from);
        };
        match self.descriptors.get_mut(&fd) {
            Some(known) if *known == name => {}
            Some(known) => known.clone_from(&name),
            None => {
                if self.descriptors.len() >= MAX_DESCRIPTORS {
                    self.descriptors.clear();
                }
                self.descriptors.insert(fd, name.clone());
            }
        }
        Some(name)
    }

    /// The other end of the socket that a thread waits for in a call of this kind, as far as known, and the kind of the wait:
    /// what polls a socket that accepts connections, in order to read, will accept one.
    pub(super) fn named(
        &mut self,
        names: &mut SocketNames,
        system: &dyn System,
        pid: Pid,
        kind: WaitKind,
        inode: u64,
    ) -> Option<(WaitKind, SocketId)> {
        let (table, now) = (&mut self.table, system.now());
        if !table.sockets.contains_key(&inode) && table.next.is_none_or(|next| now >= next) {
            table.read(system, pid);
            let took = system.now().saturating_sub(now);
            table.next = Some(now + took + READ_AGAIN.max(took * REST));
        }
        let kind = match kind {
            WaitKind::Read(_) if table.accepts(inode) => WaitKind::Accept,
            other => other,
        };
        Some((kind, names.id(table.name(kind, inode)?)?))
    }
}

impl SocketTable {
    fn read(&mut self, system: &dyn System, pid: Pid) {
        self.sockets.clear();
        self.accepting.clear();
        for name in TABLES {
            let text = system.network_table(pid, name).unwrap_or_default();
            for (inode, address) in text.lines().filter_map(internet_socket) {
                if let Address::Listening(local) = address {
                    self.accepting.insert(local.port());
                }
                self.add(inode, address);
            }
        }
        let text = system.network_table(pid, "unix").unwrap_or_default();
        for (inode, address) in text.lines().filter_map(unix_socket) {
            self.add(inode, address);
        }
    }

    fn add(&mut self, inode: u64, address: Address) {
        if self.sockets.len() < MAX_SOCKETS {
            self.sockets.insert(inode, address);
        }
    }

    /// Does the socket accept connections?
    fn accepts(&self, inode: u64) -> bool {
        matches!(
            self.sockets.get(&inode),
            Some(Address::Listening(_) | Address::Unix { accepts: true, .. })
        )
    }

    /// `127.0.0.1:5432`. Of an accepted connection, the address alone: each client has another port.
    fn name(&self, kind: WaitKind, inode: u64) -> Option<String> {
        match self.sockets.get(&inode)? {
            Address::Listening(local) if kind == WaitKind::Accept => Some(local.to_string()),
            Address::Connected { local, peer } if self.accepting.contains(&local.port()) => Some(peer.ip().to_string()),
            Address::Connected { peer, .. } => Some(peer.to_string()),
            Address::Unix { path, .. } => Some(path.clone()),
            Address::Listening(_) => None,
        }
    }
}

/// The inode in `socket:[1234]`.
pub(super) fn inode(descriptor: &str) -> Option<u64> {
    descriptor.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// A line of `/proc/net/tcp` and the like; `None` also for a socket without another end.
fn internet_socket(line: &str) -> Option<(u64, Address)> {
    let mut words = line.split_ascii_whitespace();
    let (local, peer) = (address(words.nth(1)?)?, address(words.next()?)?);
    let state = words.next()?;
    let inode = words.nth(5)?.parse().ok()?;
    match (state, peer.port()) {
        (LISTEN, _) => Some((inode, Address::Listening(local))),
        (_, 0) => None,
        _ => Some((inode, Address::Connected { local, peer })),
    }
}

/// `0100007F:1F90`: words of 32 bits as the machine has them in memory, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (i, part) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *part = word(8 * i)?;
            }
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// A line of `/proc/net/unix` with a path, which the socket that accepts connections has and those that it accepted.
fn unix_socket(line: &str) -> Option<(u64, Address)> {
    let mut words = line.split_ascii_whitespace();
    let accepts = u32::from_str_radix(words.nth(3)?, 16).ok()? & ACCEPTS != 0;
    let inode = words.nth(2)?.parse().ok()?;
    let path = escape::line(words.next()?).into_owned();
    Some((inode, Address::Unix { path, accepts }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(line: &str) -> Option<(u64, String)> {
        let (inode, address) = internet_socket(line)?;
        let mut table = SocketTable::default();
        table.accepting.insert(8080);
        table.add(inode, address);
        Some((inode, table.name(WaitKind::Accept, inode)?))
    }

    #[test]
    fn sockets_are_named_by_their_other_end() {
        let rest = "00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000000000000000 100 0 0 10 0";
        let of = |addresses: &str| socket(&format!("   3: {addresses} {rest}"));
        let named = |name: &str| Some((4711, name.to_string()));
        assert_eq!(of("0100007F:D431 0100007F:1538 01"), named("127.0.0.1:5432"));
        assert_eq!(of("0100007F:1F90 0200007F:D431 01"), named("127.0.0.2"));
        assert_eq!(of("00000000:1F90 00000000:0000 0A"), named("0.0.0.0:8080"));
        assert_eq!(of("00000000:1F91 00000000:0000 07"), None);
        let six = "0000000000000000FFFF00000100007F:D431 0000000000000000FFFF00000100007F:1538 01";
        assert_eq!(of(six), named("127.0.0.1:5432"));
        let six = "00000000000000000000000001000000:D431 00000000000000000000000001000000:1538 01";
        assert_eq!(of(six), named("[::1]:5432"));
        for bad in [
            "",
            "0100007F 0100007F:1538 01",
            "éééé:1 0100007F:1538 01",
            "0100007:D431 :1538 01",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert_eq!(socket("  sl  local_address rem_address   st tx_queue"), None);
    }

    #[test]
    fn what_reads_from_a_socket_that_accepts_connections_will_accept_one() {
        let rest = "00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000000000000000 100 0 0 10 0";
        let mut table = SocketTable::default();
        for (line, expected) in [
            ("00000000:1F90 00000000:0000 0A", true),
            ("0100007F:1F90 0100007F:1538 01", false),
        ] {
            let (inode, address) = internet_socket(&format!("0: {line} {rest}")).expect("a socket");
            table.add(inode, address);
            assert_eq!(table.accepts(4711), expected);
        }
        assert!(!table.accepts(1));
    }

    #[test]
    fn unix_sockets_have_their_path() {
        let line = "0000000000000000: 00000003 00000000 00000000 0001 03 4712 /run/a\u{1b}b.sock";
        let address = |accepts| Address::Unix {
            path: "/run/a\\x1bb.sock".into(),
            accepts,
        };
        assert_eq!(unix_socket(line), Some((4712, address(false))));
        let accepting = line.replace("00000000 0001 03", "00010000 0001 01");
        assert_eq!(unix_socket(&accepting), Some((4712, address(true))));
        assert_eq!(
            unix_socket("0000000000000000: 00000003 00000000 00000000 0001 03 4712"),
            None
        );
        assert_eq!((inode("socket:[12]"), inode("pipe:[12]")), (Some(12), None));
    }
}

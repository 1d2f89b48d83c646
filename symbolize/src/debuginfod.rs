//! Debug files by build id from debuginfod servers (elfutils, `debuginfod(8)` and `debuginfod_find_debuginfo(3)`),
//! cached in a directory.

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::elf::Elf;

/// Timeout for a connection, and for the first byte of a response: servers unpack large packages first.
const CONNECT: Duration = Duration::from_secs(5);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Servers, and the directory where their files are cached.
pub struct Debuginfod {
    servers: Vec<String>,
    /// A file is `HEX/debuginfo` in it, as in the cache of elfutils.
    cache: PathBuf,
    limits: Limits,
    agent: ureq::Agent,
    memory: Mutex<FailedRequests>,
}

/// Limits for one file.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes.
    pub size: u64,
    /// From the request to the last byte.
    pub time: Duration,
}

impl Default for Limits {
    /// 1 GiB, two minutes.
    fn default() -> Limits {
        Limits {
            size: 1 << 30,
            time: Duration::from_secs(120),
        }
    }
}

/// Servers and ids that are not requested again.
#[derive(Default)]
struct FailedRequests {
    refused: HashMap<Vec<u8>, String>,
    dead: HashSet<usize>,
}

impl Debuginfod {
    /// `servers` as in `DEBUGINFOD_URLS`: addresses separated by spaces; those that are not http or https are left out.
    /// `None` if none remains. `cache` is created when there is something to store.
    pub fn new(servers: &str, cache: PathBuf, limits: Limits) -> Option<Debuginfod> {
        let http = |url: &&str| url.starts_with("http://") || url.starts_with("https://");
        let words = servers.split_ascii_whitespace().filter(http);
        let servers: Vec<String> = words.map(|url| url.trim_end_matches('/').to_string()).collect();
        let config = ureq::Agent::config_builder()
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(RESPONSE_TIMEOUT))
            .timeout_global(Some(limits.time))
            .max_redirects(5)
            .http_status_as_error(false)
            .user_agent(concat!("symbolize/", env!("CARGO_PKG_VERSION")))
            .build();
        (!servers.is_empty()).then(|| Debuginfod {
            servers,
            cache,
            limits,
            agent: config.into(),
            memory: Mutex::default(),
        })
    }

    /// The debug file with this build id, from the cache or from the first server that has it. Stops when `stop`
    /// returns true.
    ///
    /// # Errors
    /// Why it is not available, as text. The same id is not requested again.
    pub fn debug_info(&self, build_id: &[u8], stop: &dyn Fn() -> bool) -> Result<File, String> {
        if !(8..=64).contains(&build_id.len()) {
            return Err("invalid build ID".into());
        }
        let hex: String = build_id.iter().map(|b| format!("{b:02x}")).collect();
        let kept = self.cache.join(&hex).join("debuginfo");
        if let Some(file) = File::open(&kept).ok().filter(|f| has_id(f, build_id)) {
            return Ok(file);
        }
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = memory.refused.get(build_id) {
            return Err(why.clone());
        }
        let mut why = Vec::new();
        for (i, server) in self.servers.iter().enumerate() {
            if memory.dead.contains(&i) {
                why.push(format!("{server} does not respond"));
                continue;
            }
            match self.request(server, &hex, build_id, &kept, stop) {
                Ok(file) => return Ok(file),
                Err(refusal) => {
                    if refusal.dead {
                        memory.dead.insert(i);
                    }
                    why.push(format!("{server} {}", refusal.why));
                }
            }
        }
        let why = why.join(", ");
        memory.refused.insert(build_id.to_vec(), why.clone());
        Err(why)
    }

    fn request(
        &self,
        server: &str,
        hex: &str,
        build_id: &[u8],
        kept: &Path,
        stop: &dyn Fn() -> bool,
    ) -> Result<File, Refusal> {
        if stop() {
            return Err(Refusal::file("was skipped: interrupted"));
        }
        let url = format!("{server}/buildid/{hex}/debuginfo");
        let response = self.agent.get(&url).call();
        let mut response = response.map_err(|e| Refusal {
            why: format!("does not respond: {e}"),
            dead: true,
        })?;
        match response.status().as_u16() {
            200 => {}
            404 => return Err(Refusal::file("does not have it")),
            status => return Err(Refusal::file(format!("returned {status}"))),
        }
        let mut body = response.body_mut().as_reader();
        self.keep(kept, |out| {
            let mut block = vec![0; 64 << 10];
            let mut total = 0;
            loop {
                let n = body
                    .read(&mut block)
                    .map_err(|e| Refusal::file(format!("failed during the download: {e}")))?;
                if n == 0 {
                    let good = has_id(out, build_id);
                    return good
                        .then_some(())
                        .ok_or_else(|| Refusal::file("sent a file with another build ID"));
                }
                total += n as u64;
                if total > self.limits.size {
                    return Err(Refusal::file(format!("sends more than {} bytes", self.limits.size)));
                }
                if stop() {
                    return Err(Refusal::file("was interrupted"));
                }
                out.write_all(&block[..n])
                    .map_err(|e| Refusal::file(format!("cannot be cached: {e}")))?;
            }
        })
    }

    /// Writes a temporary file and renames it, so that no reader sees a partial file.
    fn keep(&self, path: &Path, write: impl FnOnce(&mut File) -> Result<(), Refusal>) -> Result<File, Refusal> {
        let failed = |e: std::io::Error| Refusal::file(format!("cannot be cached in {}: {e}", self.cache.display()));
        let directory = path.parent().unwrap_or(&self.cache);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(failed)?;
        let new = directory.join(format!(".new-{}", std::process::id()));
        let _ = fs::remove_file(&new); // left by an earlier process with this PID
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .map_err(failed)?;
        let done = write(&mut file).and_then(|()| fs::rename(&new, path).map_err(failed));
        if done.is_err() {
            let _ = fs::remove_file(&new); // the first failure is reported
            let _ = fs::remove_dir(directory); // if it is empty
        }
        done.map(|()| file)
    }
}

struct Refusal {
    why: String,
    /// The server is not used again.
    dead: bool,
}

impl Refusal {
    fn file(why: impl Into<String>) -> Refusal {
        Refusal {
            why: why.into(),
            dead: false,
        }
    }
}

fn has_id(file: &File, build_id: &[u8]) -> bool {
    let elf = file.try_clone().ok().and_then(|f| Elf::from_file(f).ok());
    elf.is_some_and(|elf| elf.build_id.as_deref() == Some(build_id))
}

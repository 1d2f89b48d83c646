//! The process that reads names: answers [`LookUp`]s without privileges, and without opening anything itself.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use symbolize::{Files, Module};

use super::protocol::{self, FileFormat, HEADER, LookUp, MAX_LOOK_UP, ModuleNames};
use crate::privileges::credentials::{self, Caps};
use crate::process::file_content::Content;
use crate::resolve::{jit, symbols};
use crate::sys;

/// Address space: sections of large debug files are read as a whole, each up to 4 GiB of them together.
const ADDRESS_SPACE: u64 = 8 << 30;
/// CPU time of the process in all, seconds. What one module may take is limited by the other process.
const CPU_SECONDS: u64 = 3600;

/// Serves the process that has the other end of standard input, until that closes. `memory`: bytes of address space that it may
/// use, if less than usual.
pub fn main(memory: Option<u64>) -> ExitCode {
    match serve(memory.unwrap_or(ADDRESS_SPACE).min(ADDRESS_SPACE)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(address_space: u64) -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    give_up_privileges(address_space)?;
    let socket = Arc::new(Mutex::new(socket));
    send(&socket, protocol::READY, &[])?;
    let mut modules: HashMap<u32, Result<Module, String>> = HashMap::new();
    while let Some((kind, bytes, file)) = receive(&socket)? {
        let look_up = match kind {
            protocol::LOOK_UP => LookUp::decode(&bytes),
            _ => None,
        };
        let look_up = look_up.ok_or(io::ErrorKind::InvalidData)?;
        let names = match look_up.format {
            FileFormat::Elf | FileFormat::ElfSymbols | FileFormat::ElfVariables => {
                let module = modules
                    .entry(look_up.id)
                    .or_insert_with(|| open(&look_up, file, &socket));
                symbols::look_up(module, look_up.format, &look_up.addresses)
            }
            format => jit_names(format, file, &look_up.addresses),
        };
        send(&socket, protocol::NAMES, &names.encode())?;
    }
    Ok(())
}

/// What is not available on this system (`seccomp` in some containers) is left out: the others are still in place.
fn give_up_privileges(address_space: u64) -> io::Result<()> {
    credentials::keep(Caps::NONE)?;
    credentials::no_new_privileges()?;
    // If memory runs out, this process is the first to be killed.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    sys::sandbox::limit_resources(address_space, CPU_SECONDS)?;
    let _ = sys::sandbox::filter_system_calls();
    Ok(())
}

/// Names in a file of a JIT compiler, which may have grown since the last time. The reason if there are none.
fn jit_names(format: FileFormat, file: Option<File>, avmas: &[u64]) -> ModuleNames {
    let code = file.ok_or("the file was not sent".to_string());
    match code.and_then(|file| jit::read(format, Content::File(Arc::new(file)))) {
        Ok(code) => ModuleNames {
            found: avmas
                .iter()
                .map(|at| jit::named(&code, *at).into_iter().collect())
                .collect(),
            ..ModuleNames::default()
        },
        Err(why) => ModuleNames {
            found: vec![Vec::new(); avmas.len()],
            symbols_missing: why,
            ..ModuleNames::default()
        },
    }
}

fn open(look_up: &LookUp, file: Option<File>, socket: &Arc<Mutex<UnixStream>>) -> Result<Module, String> {
    let module = Module::from_file(file.ok_or("the file was not sent")?).map_err(|e| e.to_string())?;
    let files = RemoteFiles {
        socket: socket.clone(),
        can_fetch: look_up.can_fetch,
    };
    let module = module.with_files(PathBuf::from(OsStr::from_bytes(&look_up.path)), Arc::new(files));
    Ok(match look_up.format {
        FileFormat::ElfSymbols => module.without_dwarf(),
        _ => module,
    })
}

/// Other files, which the other process opens.
struct RemoteFiles {
    socket: Arc<Mutex<UnixStream>>,
    can_fetch: bool,
}

impl Files for RemoteFiles {
    fn open(&self, path: &Path) -> Option<File> {
        send(&self.socket, protocol::OPEN, path.as_os_str().as_bytes()).ok()?;
        receive(&self.socket).ok()??.2
    }

    fn fetch(&self, build_id: &[u8]) -> Option<Result<File, String>> {
        self.can_fetch.then_some(())?;
        send(&self.socket, protocol::FETCH, build_id).ok()?;
        match receive(&self.socket).ok()?? {
            (protocol::FILE, _, Some(file)) => Some(Ok(file)),
            (protocol::REFUSED, why, _) => Some(Err(String::from_utf8_lossy(&why).into_owned())),
            _ => None,
        }
    }
}

fn send(socket: &Mutex<UnixStream>, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let mut socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
    socket.write_all(&protocol::header(kind, bytes.len()))?;
    socket.write_all(bytes)
}

/// The next message, with its file; `None` at the end.
#[allow(clippy::type_complexity)]
fn receive(socket: &Mutex<UnixStream>) -> io::Result<Option<(u8, Vec<u8>, Option<File>)>> {
    let mut socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
    let mut header = [0; HEADER];
    let (n, file) = sys::sockets::receive_with_file(&socket, &mut header)?;
    if n == 0 {
        return Ok(None);
    }
    socket.read_exact(&mut header[n..])?;
    let (kind, length) = protocol::parse_header(header);
    if length > MAX_LOOK_UP {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    Ok(Some((kind, bytes, file)))
}

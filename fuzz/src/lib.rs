//! Shared by the targets: values taken from the input, and memory and files made of it.

use std::sync::Arc;

use nativeprof::error::{Error, ErrorKind, Result};
use nativeprof::cpython_layout::Layout;
use nativeprof::process::file_content::Content;
use nativeprof::process::system::{FileKey, System};
use nativeprof::process::memory::Memory;
use nativeprof::process::modules::{Module, Modules};
use nativeprof::process::root::Root;
use nativeprof::event::{Pid, Tid};

/// The input, taken piece by piece; zeros after its end.
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let (head, tail) = self.0.split_at(N.min(self.0.len()));
        out[..head.len()].copy_from_slice(head);
        self.0 = tail;
        out
    }

    pub fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    /// A length and that many bytes, if available.
    pub fn block(&mut self) -> &'a [u8] {
        let n = usize::from(self.u16()).min(self.0.len());
        let (head, tail) = self.0.split_at(n);
        self.0 = tail;
        head
    }

    /// The layout of one CPython version.
    pub fn layout(&mut self) -> Layout {
        let rows = nativeprof::cpython::versions::ALL;
        rows[usize::from(self.u8()) % rows.len()].layout
    }
}

/// The same bytes repeated over the complete address space: most pointers are readable.
pub struct Mirrors<'a>(pub &'a [u8]);

impl Memory for Mirrors<'_> {
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool {
        let Some(at) = avma.checked_rem(self.0.len() as u64) else {
            return false;
        };
        let found = self.0[at as usize..].get(..buf.len());
        found.is_some_and(|bytes| {
            buf.copy_from_slice(bytes);
            true
        })
    }
}

/// A system with one file.
struct OneFile(Content);

impl System for OneFile {
    fn maps(&self, _: Pid) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::NoSuchProcess, "no process"))
    }

    fn stack_end(&self, _: Pid) -> u64 {
        0
    }

    fn threads(&self, _: Pid) -> Vec<Tid> {
        Vec::new()
    }

    fn thread_name(&self, _: Pid, _: Tid) -> Option<String> {
        None
    }

    fn open(&self, _: Pid, _: u64, _: u64, _: &[u8], _: Option<&Root>) -> Option<(Content, FileKey)> {
        Some((self.0.clone(), (0, 0)))
    }

    fn read_memory(&self, _: Pid, _: u64, _: &mut [u8]) -> usize {
        0
    }

    fn root(&self, _: Pid) -> Option<Root> {
        None
    }

    fn kernel_symbols(&self) -> Option<String> {
        None
    }
}

/// The bytes as a mapped file.
pub fn module(bytes: Vec<u8>) -> Arc<Module> {
    let system = OneFile(Content::Bytes(Arc::new(bytes.into())));
    let mut modules = Modules::default();
    let (id, _) = modules.open(&system, 1, 0, 4096, b"/libpython3.13.so.1.0", None);
    modules.get(id).clone()
}

/// Reads a file of a format, and writes the profile as JSON, which can be read again.
pub fn import(format: &str, bytes: &[u8]) {
    use nativeprof::profile::{import, json};
    let reader = import::READERS.iter().find(|reader| reader.name == format).expect("a format");
    // Whatever the file is, this must not fail.
    let _ = import::read(bytes);
    let Ok(profile) = (reader.read)(bytes) else {
        return;
    };
    let mut out = Vec::new();
    json::write(&profile, &mut out).expect("memory takes everything");
    let again = json::read(&out).expect("what was written can be read");
    assert_eq!(again.nodes[0].count, profile.nodes[0].count);
}

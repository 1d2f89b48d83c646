//! Programs with known stacks, started with a handshake, and nativeprof run on them.
#![allow(dead_code, unused_imports)] // no test uses all of it

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base64::prelude::{BASE64_STANDARD, Engine};
use flate2::read::ZlibDecoder;

pub mod calls;
pub mod chance;
pub mod environments;
pub mod programs;
pub mod pythons;
pub mod receiver;
pub mod recording;

pub use programs::Program;
pub use pythons::{
    Python, each_python, each_python_and_backend, each_third_python, each_third_python_and_backend, newest_python,
    pythons,
};
pub use recording::{Recording, attach, nativeprof, record};

/// One live recording at a time: the machine may have only two CPUs, and shares are checked.
pub fn live() -> MutexGuard<'static, ()> {
    static LIVE: Mutex<()> = Mutex::new(());
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Directory of the programs' sources.
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/programs")
}

/// Directory of the compiled programs.
pub fn built() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("fixtures")
}

/// What `.ci/install-viewers` installed.
pub fn viewers(name: &str) -> PathBuf {
    installed(Path::new("viewers").join(name), ".ci/install-viewers")
}

/// Python with a client of the Model Context Protocol, which `.ci/install-mcp-clients` installed, and with `jsonschema`.
pub fn mcp_client(version: &str) -> PathBuf {
    let path = Path::new("mcp-clients").join(version).join("bin/python");
    installed(path, ".ci/install-mcp-clients")
}

/// What a script installed in the target directory, at this path below it.
fn installed(below: PathBuf, script: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name(below);
    assert!(
        path.exists(),
        "{} is missing; bring it with\n\n    {script}\n",
        path.display()
    );
    path
}

/// Starts the program of further arguments with these capabilities: `-all,+bpf`.
pub fn with_capabilities(set: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args([format!("--bounding-set={set}"), format!("--inh-caps={set}")]);
    command
}

/// The text of the profile in a page of ours.
pub fn packed(page: &str) -> String {
    let profile = page
        .split_once(r#"id="profile">"#)
        .and_then(|(_, rest)| rest.split_once('<'));
    let bytes = BASE64_STANDARD.decode(profile.expect("a profile").0).expect("base64");
    let mut text = Vec::new();
    ZlibDecoder::new(&bytes[..]).read_to_end(&mut text).expect("deflate");
    String::from_utf8_lossy(&text).into_owned()
}

/// A new directory that is removed at the end.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: Mutex<u32> = Mutex::new(0);
        let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
        *next += 1;
        let directory = std::env::temp_dir().join(format!("nativeprof-test-{}-{next}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("a scratch directory can be made");
        Scratch(directory)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// Makes a named pipe in it.
    pub fn pipe(&self, name: &str) -> PathBuf {
        let pipe = self.path(name);
        let made = Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo, of coreutils").success());
        pipe
    }

    /// Names of the files in it.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("the scratch directory can be read");
        let mut names: Vec<_> = entries
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

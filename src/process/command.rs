//! The files that a command maps first, as far as they can be known before it runs.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::modules::Module;

/// Scripts whose interpreter is a script.
const MAX_SCRIPTS: usize = 4;
/// Bytes of a script's first line that the kernel reads (BINPRM_BUF_SIZE, Linux 6.18).
const MAX_LINE: u64 = 256;
/// Directories that are searched for a library, at most.
const MAX_DIRECTORIES: usize = 64;

/// The program that a command runs: found by PATH, for a script the interpreter that its first line names.
pub fn program(name: &str) -> Option<PathBuf> {
    let mut path = search(name)?;
    for _ in 0..MAX_SCRIPTS {
        let mut line = Vec::new();
        File::open(&path).ok()?.take(MAX_LINE).read_to_end(&mut line).ok()?;
        let Some(line) = line.strip_prefix(b"#!") else {
            return path.canonicalize().ok();
        };
        let line = line.split(|c| *c == b'\n').next().unwrap_or_default();
        let words = String::from_utf8_lossy(line);
        let mut words = words.split_ascii_whitespace();
        let first = words.next()?;
        // `#!/usr/bin/env -S python3 -X dev`
        path = match first.rsplit('/').next() {
            Some("env") => search(words.find(|word| !word.starts_with('-') && !word.contains('='))?)?,
            _ => PathBuf::from(first),
        };
    }
    None
}

pub(super) fn search(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(name.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// The file of a library that a program needs, where the dynamic linker mostly finds it (ld.so(8); its cache is not read).
pub fn library(program: &Module, name: &str) -> Option<PathBuf> {
    // musl's C library is the loader, too.
    let loader = program.loader().filter(|_| name.starts_with("libc."));
    if let Some(loader) = loader.filter(|loader| is_musl(loader)) {
        return loader.canonicalize().ok();
    }
    let origin = Path::new(std::ffi::OsStr::from_bytes(&program.path)).parent()?;
    let own = program.library_paths().into_iter().map(|directory| {
        let text = directory.replace("$ORIGIN", "${ORIGIN}");
        PathBuf::from(text.replace("${ORIGIN}", &origin.to_string_lossy()))
    });
    let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let of_system = ["/lib", "/usr/lib", "/usr/local/lib"].map(String::from);
    let of_distribution = ["/lib", "/usr/lib"].map(|l| format!("{l}/{}-linux-gnu", std::env::consts::ARCH));
    let wide = ["/lib64", "/usr/lib64"].map(String::from);
    own.chain(std::env::split_paths(&given))
        .chain(
            of_distribution
                .into_iter()
                .chain(wide)
                .chain(of_system)
                .map(PathBuf::from),
        )
        .take(MAX_DIRECTORIES)
        .filter(|directory| directory.is_absolute())
        .find_map(|directory| directory.join(name).canonicalize().ok())
}

/// Does a loader have the name that musl documents (`ld-musl-x86_64.so.1`)?
fn is_musl(loader: &Path) -> bool {
    loader
        .file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld-musl"))
}

/// A path as mappings have it.
pub fn bytes(path: PathBuf) -> Vec<u8> {
    path.into_os_string().into_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_lead_to_their_interpreters() {
        let directory = std::env::temp_dir().join(format!("nativeprof-command-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let script = |name: &str, text: &str| {
            let path = directory.join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_string()
        };
        let sh = Path::new("/bin/sh").canonicalize().ok();
        assert!(sh.is_some());
        assert_eq!(program("sh"), sh);
        let plain = script("plain", "#! /bin/sh -e\ntrue\n");
        assert_eq!(program(&plain), sh);
        assert_eq!(program(&script("by_env", "#!/usr/bin/env -S A=1 sh -e\n")), sh);
        assert_eq!(program(&script("by_script", &format!("#!{plain}\n"))), sh);
        let ring = script("ring", "");
        std::fs::write(&ring, format!("#!{ring}\n")).unwrap();
        for none in [&ring, "no such command", &script("no_name", "#!\n"), "/no such file"] {
            assert_eq!(program(none), None, "{none}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

//! Compiles small programs and compares with binutils.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory that is removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("symbolize-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a scratch directory");
        Scratch(dir)
    }

    /// Writes `source` and compiles it. `None`, with a message, if the compiler is missing or fails.
    pub fn compile(&self, out: &str, source: (&str, &str), command: &[&str]) -> Option<PathBuf> {
        let (name, text) = source;
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("source written");
        let out = self.0.join(out);
        let mut run = Command::new(command[0]);
        run.args(&command[1..]).arg("-o").arg(&out).arg(&path);
        match run.output() {
            Ok(result) if result.status.success() => Some(out),
            Ok(result) => {
                eprintln!("SKIPPED: {command:?}: {}", String::from_utf8_lossy(&result.stderr));
                None
            }
            Err(error) => {
                eprintln!("SKIPPED: {}: {error}", command[0]);
                None
            }
        }
    }

    /// A copy, changed by a tool that works in place (strip, objcopy).
    pub fn changed(&self, from: &Path, to: &str, command: &[&str]) -> Option<PathBuf> {
        let to = self.0.join(to);
        std::fs::copy(from, &to).expect("copied");
        let done = Command::new(command[0]).args(&command[1..]).arg(&to).status();
        if !done.is_ok_and(|s| s.success()) {
            eprintln!("SKIPPED: {command:?}");
            return None;
        }
        Some(to)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// (function, file, line) of each frame, innermost first; `??` and 0 for what is not known.
pub type Frames = Vec<(String, String, u32)>;

/// The output of binutils. `None` if it is not installed.
pub fn binutils(file: &Path, svmas: &[u64]) -> Option<Vec<Frames>> {
    use std::io::Write;
    let mut child = Command::new("addr2line")
        .args(["-a", "-f", "-i", "-C", "-e"])
        .arg(file)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .inspect_err(|e| eprintln!("SKIPPED: binutils addr2line: {e}"))
        .ok()?;
    let mut stdin = child.stdin.take()?;
    let text: String = svmas.iter().map(|a| format!("{a:#x}\n")).collect();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().ok()?;
    writer.join().ok()?.ok()?;
    let mut all: Vec<Frames> = Vec::new();
    let mut name: Option<String> = None;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        if name.is_none() && line.starts_with("0x") {
            all.push(Vec::new());
        } else if let Some(function) = name.take() {
            let place = line.split(" (discriminator").next().unwrap_or(line);
            let (file, line) = place.rsplit_once(':').unwrap_or((place, "0"));
            all.last_mut()?
                .push((function, file.to_string(), line.parse().unwrap_or(0)));
        } else {
            name = Some(line.to_string());
        }
    }
    assert_eq!(all.len(), svmas.len());
    Some(all)
}

/// Our result, in the same form.
pub fn ours(module: &mut symbolize::Module, svmas: &[u64]) -> Vec<Frames> {
    let plain = |s: symbolize::Symbol| {
        (
            s.name.to_string(),
            s.file.as_deref().unwrap_or("??").to_string(),
            s.line.unwrap_or(0),
        )
    };
    let frames = |r: Result<Vec<symbolize::Symbol>, _>| match r {
        Ok(symbols) => symbols.into_iter().map(plain).collect(),
        Err(_) => vec![("??".to_string(), "??".to_string(), 0)],
    };
    module.lookup_many(svmas).into_iter().map(frames).collect()
}

pub fn open(path: &Path) -> symbolize::Module {
    symbolize::Module::from_file(std::fs::File::open(path).expect("opened")).expect("an ELF file")
}

/// Pythons of pyenv are built with debug information.
pub fn libpythons() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let versions = std::fs::read_dir(home.join(".pyenv/versions"))
        .into_iter()
        .flatten()
        .flatten();
    let mut found: Vec<PathBuf> = versions
        .flat_map(|v| std::fs::read_dir(v.path().join("lib")).into_iter().flatten().flatten())
        .map(|f| f.path())
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("libpython3.1"))
        })
        .filter(|p| p.to_string_lossy().ends_with(".so.1.0"))
        .collect();
    found.sort();
    found
}

/// A generator with a fixed seed, so that failures can be reproduced.
pub struct Lcg(pub u64);

impl Lcg {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % n.max(1)
    }
}

/// Pseudo-random addresses inside functions.
pub fn addresses(module: &mut symbolize::Module, count: usize) -> Vec<u64> {
    let functions: Vec<(u64, u64)> = module.symbols().map(|f| (f.start, f.size)).collect();
    let mut random = Lcg(1);
    (0..count)
        .map(|_| {
            let (start, size) = functions[random.below(functions.len() as u64) as usize];
            start + random.below(size)
        })
        .collect()
}

//! Kernel symbols, from the text of `/proc/kallsyms`.

use std::fmt;

/// Maximum size of a kernel function; addresses further after the last symbol have no name.
const MAX_FUNCTION: u64 = 1 << 20;

/// The symbols of a running kernel, from any source of the text.
pub struct Kernel {
    /// Sorted by address, one entry per address.
    entries: Vec<KernelEntry>,
    /// All names, one after the other; then all module names.
    text: String,
}

struct KernelEntry {
    addr: u64,
    name: u32,
    name_len: u16,
    module_len: u16,
    is_code: bool,
}

/// One kernel function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSymbol<'a> {
    /// Name as the kernel states it.
    pub name: &'a str,
    /// The loadable module it belongs to; `None` for the kernel proper.
    pub module: Option<&'a str>,
    /// Address of its first byte.
    pub start: u64,
}

/// Why there are no kernel symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelError {
    /// All addresses are zero: the kernel hides them (`kernel.kptr_restrict`, or a reader without CAP_SYSLOG).
    Hidden,
    /// There is not one function in the text.
    Empty,
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KernelError::Hidden => {
                "the kernel hides its addresses (all are zero); read them as root with kernel.kptr_restrict set to 0 or 1"
            }
            KernelError::Empty => "no kernel symbols found",
        })
    }
}

impl std::error::Error for KernelError {}

impl Kernel {
    /// Parses lines `ADDRESS TYPE NAME [MODULE]`. Malformed lines are skipped.
    ///
    /// Types `t`, `T`, `w` and `W` are functions (`nm(1)`); everything else only ends the function before it.
    ///
    /// # Errors
    /// [`KernelError::Hidden`] if every function is at address zero, [`KernelError::Empty`] if there is none.
    pub fn parse(kallsyms: &str) -> Result<Kernel, KernelError> {
        let mut lines: Vec<(u64, u8, &str, &str)> = kallsyms.lines().filter_map(parse_line).collect();
        if !lines.iter().any(|l| rank(l.1).is_some()) {
            return Err(KernelError::Empty);
        }
        if lines.iter().all(|l| l.0 == 0 || rank(l.1).is_none()) {
            return Err(KernelError::Hidden);
        }
        // Best alias first: functions before data, global before weak before local, shortest, then alphabetical.
        lines.sort_unstable_by_key(|&(addr, kind, name, _)| (addr, rank(kind).unwrap_or(9), name.len(), name));
        lines.dedup_by_key(|l| l.0);
        let mut kernel = Kernel {
            entries: Vec::with_capacity(lines.len()),
            text: String::new(),
        };
        for (addr, kind, name, module) in lines {
            let is_code = rank(kind).is_some();
            let (name, module) = if is_code { (name, module) } else { ("", "") };
            let (Ok(at), Ok(name_len), Ok(module_len)) = (
                u32::try_from(kernel.text.len()),
                u16::try_from(name.len()),
                u16::try_from(module.len()),
            ) else {
                continue;
            };
            kernel.text.push_str(name);
            kernel.text.push_str(module);
            kernel.entries.push(KernelEntry {
                addr,
                name: at,
                name_len,
                module_len,
                is_code,
            });
        }
        Ok(kernel)
    }

    /// The function that covers a run-time kernel address. A function ends where the next symbol begins.
    pub fn lookup(&self, addr: u64) -> Option<KernelSymbol<'_>> {
        let after = self.entries.partition_point(|e| e.addr <= addr);
        let entry = self.entries.get(after.checked_sub(1)?)?;
        if !entry.is_code || addr - entry.addr >= MAX_FUNCTION {
            return None;
        }
        let at = entry.name as usize;
        let (name_end, end) = (
            at + usize::from(entry.name_len),
            at + usize::from(entry.name_len) + usize::from(entry.module_len),
        );
        Some(KernelSymbol {
            name: self.text.get(at..name_end)?,
            module: self.text.get(name_end..end).filter(|m| !m.is_empty()),
            start: entry.addr,
        })
    }

    /// How many symbols there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Never true for a parsed table.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

fn parse_line(line: &str) -> Option<(u64, u8, &str, &str)> {
    let mut words = line.split_ascii_whitespace();
    let addr = u64::from_str_radix(words.next()?, 16).ok()?;
    let kind = match words.next()?.as_bytes() {
        [kind] => *kind,
        _ => return None,
    };
    let name = words.next()?;
    let module = words
        .next()
        .and_then(|m| m.strip_prefix('[')?.strip_suffix(']'))
        .unwrap_or("");
    Some((addr, kind, name, module))
}

fn rank(kind: u8) -> Option<u8> {
    match kind {
        b'T' => Some(0),
        b'W' | b'w' => Some(1),
        b't' => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000100 t local_one
ffffffff81000100 T __global_alias
ffffffff81000200 W weak_one
ffffffff81000300 D some_data
ffffffffc0000000 t mod_fn\t[ext4]
bogus line
ffffffffc0000100 t bpf_prog_6deef7357e7b4530_x\t[bpf]
";

    #[test]
    fn kallsyms() {
        let kernel = Kernel::parse(TEXT).unwrap();
        let name = |addr| kernel.lookup(addr).map(|s| (s.name, s.module, s.start));
        for (addr, expected) in [
            (0x10, None),
            (0xffffffff80ffffff, None),
            (0xffffffff81000000, Some(("_text", None, 0xffffffff81000000))),
            (0xffffffff810000ff, Some(("_text", None, 0xffffffff81000000))),
            (0xffffffff81000150, Some(("__global_alias", None, 0xffffffff81000100))),
            (0xffffffff81000200, Some(("weak_one", None, 0xffffffff81000200))),
            (0xffffffff81000300, None),
            (0xffffffffc0000010, Some(("mod_fn", Some("ext4"), 0xffffffffc0000000))),
            (
                0xffffffffc0000180,
                Some(("bpf_prog_6deef7357e7b4530_x", Some("bpf"), 0xffffffffc0000100)),
            ),
            (0xffffffffffffffff, None),
        ] {
            assert_eq!(name(addr), expected, "{addr:x}");
        }
    }

    #[test]
    fn reasons() {
        let hidden = "0000000000000000 T _text\n0000000000000000 t x\t[m]\n";
        assert_eq!(Kernel::parse(hidden).err(), Some(KernelError::Hidden));
        assert_eq!(Kernel::parse("").err(), Some(KernelError::Empty));
        assert_eq!(Kernel::parse("ffff A x\n\0\n").err(), Some(KernelError::Empty));
        assert!(KernelError::Hidden.to_string().contains("kptr_restrict"));
    }
}

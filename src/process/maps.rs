//! Parses `/proc/PID/maps` into mappings. Pure; the text may contain anything (file names are any bytes).

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    pub readable: bool,
    pub writable: bool,
    pub executable: bool,
    /// What is written is seen by all that map it.
    pub shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// The file's device, major and minor number.
    pub device: (u32, u32),
    pub inode: u64,
    /// Path with the kernel's `\012` for a newline undone; empty for anonymous memory.
    pub path: Vec<u8>,
}

/// The well-formed lines of the text.
pub fn parse(text: &[u8]) -> Vec<Mapping> {
    text.split(|c| *c == b'\n').filter_map(line).collect()
}

/// The mapping that has this address.
pub fn find(text: &[u8], avma: u64) -> Option<Mapping> {
    let mut lines = text.split(|c| *c == b'\n').filter_map(line);
    lines.find(|m| (m.start..m.end).contains(&avma))
}

/// A line of the file, without its end.
pub(super) fn line(line: &[u8]) -> Option<Mapping> {
    let mut rest = line;
    let mut word = || {
        while let [b' ', tail @ ..] = rest {
            rest = tail;
        }
        let n = rest.iter().position(|c| *c == b' ').unwrap_or(rest.len());
        let (word, tail) = rest.split_at(n);
        rest = tail;
        std::str::from_utf8(word).ok()
    };
    let (start, end) = word()?.split_once('-')?;
    let permissions = word()?.as_bytes();
    let offset = word()?;
    let (major, minor) = word()?.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let inode = word()?.parse().ok()?;
    let path = rest.iter().position(|c| *c != b' ').map_or(&[][..], |n| &rest[n..]);
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    (start < end && permissions.len() >= 4).then_some(())?;
    Some(Mapping {
        start,
        end,
        readable: permissions[0] == b'r',
        writable: permissions[1] == b'w',
        executable: permissions[2] == b'x',
        shared: permissions[3] == b's',
        offset: u64::from_str_radix(offset, 16).ok()?,
        device: (number(major)?, number(minor)?),
        inode,
        path: unescape(path),
    })
}

/// The kernel writes a newline in a path as `\012` (seq_file_path in fs/proc/task_mmu.c), and escapes nothing else.
fn unescape(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((c, tail)) = rest.split_first() {
        if let Some(tail) = rest.strip_prefix(b"\\012") {
            out.push(b'\n');
            rest = tail;
        } else {
            out.push(*c);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<(u64, u64, bool, u64, &str)>) {
        let got = parse(text.as_bytes());
        let got = got.first().map(|m| {
            (
                m.start,
                m.end,
                m.executable,
                m.offset,
                std::str::from_utf8(&m.path).unwrap(),
            )
        });
        assert_eq!(got, expected, "{text}");
    }

    #[test]
    fn lines() {
        check(
            "00400000-0040b000 r-xp 00001000 fd:01 42    /bin/a b",
            Some((0x400000, 0x40b000, true, 0x1000, "/bin/a b")),
        );
        check("7f00-7f10 rw-p 00000000 00:00 0 ", Some((0x7f00, 0x7f10, false, 0, "")));
        check(
            "7f00-7f10 r-xp 0 00:00 0    [vdso]",
            Some((0x7f00, 0x7f10, true, 0, "[vdso]")),
        );
        check(
            "7f00-7f10 r-xp 0 00:00 7    /x\\012y (deleted)",
            Some((0x7f00, 0x7f10, true, 0, "/x\ny (deleted)")),
        );
        for broken in [
            "",
            "x",
            "7f00",
            "7f00-7e00 r-xp 0 00:00 0",
            "7f00-7f10 r",
            "7f00-7f10 r-xp zz 00:00 0",
            "g-h r-xp 0 0 0",
        ] {
            check(broken, None);
        }
    }
}

//! Copies of code objects, taken at the instant of a sample: the objects may be freed before their names are read.

/// [`CodeCopy::fingerprint`] of what is not a code object, which never has it, but the task that a thread runs: `code` is its
/// address, and the one part the beginning of the object that is its name. So is it in the records of sample.bpf.c.
pub const RUNNING_TASK: u32 = 0;

/// The copy of one code object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeCopy {
    /// avma of the code object.
    pub code: u64,
    /// As in [`super::RawPyFrame`].
    pub fingerprint: u32,
    /// The object, its strings and its line table; a missing part was unreadable or too long.
    pub parts: Vec<Part>,
}

/// A piece of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub avma: u64,
    pub bytes: Vec<u8>,
}

/// Copies being made, in buffers that never grow: a signal handler must not allocate.
#[derive(Clone, Debug)]
pub struct Copies {
    /// One entry per copy: its code object, its fingerprint, and the end of its parts in `parts`.
    codes: Vec<(u64, u32, usize)>,
    /// Addresses of parts, and the end of their bytes in `bytes`.
    parts: Vec<(u64, usize)>,
    bytes: Vec<u8>,
    /// A code object could not be copied: it must be read from the process itself, soon.
    pub missed: bool,
}

/// Parts of one copy: the object, three strings and a line table.
const PARTS: usize = 5;

impl Copies {
    /// Capacity for so many code objects, and so many bytes in total.
    pub fn with_capacity(codes: usize, bytes: usize) -> Copies {
        Copies {
            codes: Vec::with_capacity(codes),
            parts: Vec::with_capacity(PARTS * codes),
            bytes: Vec::with_capacity(bytes),
            missed: false,
        }
    }

    pub fn clear(&mut self) {
        self.codes.clear();
        self.parts.clear();
        self.bytes.clear();
        self.missed = false;
    }

    /// Is there no capacity for another code object?
    pub fn is_full(&self) -> bool {
        self.codes.len() == self.codes.capacity()
    }

    /// Appends a part of `len` bytes to the copy being made; `fill` writes its bytes. Returns them, or `None` (and
    /// appends nothing) if the capacity is exceeded or `fill` returns false.
    pub fn part(&mut self, avma: u64, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> Option<&[u8]> {
        let from = self.bytes.len();
        let room = self.bytes.capacity() - from >= len && self.parts.len() < self.parts.capacity();
        room.then_some(())?;
        self.bytes.resize(from + len, 0);
        if !fill(self.bytes.get_mut(from..)?) {
            self.bytes.truncate(from);
            return None;
        }
        self.parts.push((avma, self.bytes.len()));
        self.bytes.get(from..)
    }

    /// Finishes the copy being made.
    pub fn end(&mut self, code: u64, fingerprint: u32) {
        if !self.is_full() {
            self.codes.push((code, fingerprint, self.parts.len()));
        }
    }

    /// Drops the copy being made.
    pub fn undo(&mut self) {
        self.parts.truncate(self.codes.last().map_or(0, |(_, _, end)| *end));
        self.bytes.truncate(self.parts.last().map_or(0, |(_, end)| *end));
    }

    /// The copies. Allocates.
    pub fn list(&self) -> Vec<CodeCopy> {
        let (mut part, mut at) = (0, 0);
        let copies = self.codes.iter().map(|(code, fingerprint, end)| {
            let parts = self.parts.get(part..*end).unwrap_or_default().iter();
            part = *end;
            let parts = parts.map(|(avma, end)| {
                let bytes = self.bytes.get(at..*end).unwrap_or_default().to_vec();
                at = *end;
                Part { avma: *avma, bytes }
            });
            CodeCopy {
                code: *code,
                fingerprint: *fingerprint,
                parts: parts.collect(),
            }
        });
        copies.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_come_out_as_they_went_in() {
        let mut copies = Copies::with_capacity(2, 16);
        let fill = |with: u8| {
            move |bytes: &mut [u8]| {
                bytes.fill(with);
                true
            }
        };
        for _ in 0..2 {
            copies.clear();
            assert_eq!(copies.part(0x10, 4, fill(1)), Some(&[1; 4][..]));
            assert_eq!(copies.part(0x20, 2, |_| false), None);
            assert_eq!(copies.part(0x30, 2, fill(2)), Some(&[2; 2][..]));
            copies.end(0x10, 7);
            copies.part(0x40, 8, fill(3));
            copies.undo();
            assert!(!copies.is_full());
            copies.part(0x50, 10, fill(4));
            assert_eq!(copies.part(0x60, 1, fill(5)), None, "no room");
            copies.end(0x50, 8);
            assert!(copies.is_full());
            let part = |avma, with, len| Part {
                avma,
                bytes: vec![with; len],
            };
            let copy = |code, fingerprint, parts| CodeCopy {
                code,
                fingerprint,
                parts,
            };
            assert_eq!(
                copies.list(),
                [
                    copy(0x10, 7, vec![part(0x10, 1, 4), part(0x30, 2, 2)]),
                    copy(0x50, 8, vec![part(0x50, 4, 10)]),
                ]
            );
        }
    }
}

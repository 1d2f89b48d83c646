//! Memory of a target, read while it runs on.

/// Something with addresses and bytes: a live process or a tape.
pub trait Memory {
    /// Fills `buf` from `avma`; false if not all of it could be read.
    fn read(&self, avma: u64, buf: &mut [u8]) -> bool;

    fn u64(&self, avma: u64) -> Option<u64> {
        let mut b = [0; 8];
        self.read(avma, &mut b).then(|| u64::from_le_bytes(b))
    }

    fn u32(&self, avma: u64) -> Option<u32> {
        let mut b = [0; 4];
        self.read(avma, &mut b).then(|| u32::from_le_bytes(b))
    }
}

//! Encoding of the formats that only nativeprof reads: tapes, and messages of the process that reads names.
//!
//! Numbers are little-endian without alignment; a byte string is a `u32` length and its bytes, a list a `u32` count and
//! its items. The bytes to decode are untrusted: each length is bounded by what is left of them.

/// What is left of the bytes to decode.
pub struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        self.bytes_within(usize::MAX)
    }

    /// A byte string; `None` if it is longer than `max`.
    pub fn bytes_within(&mut self, max: usize) -> Option<&'a [u8]> {
        let n = self.u32()? as usize;
        if n > max {
            return None;
        }
        self.take(n)
    }

    /// A byte string as text; what is not UTF-8 in it is replaced.
    pub fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(self.bytes()?).into_owned())
    }

    /// A flag and a byte string, which is there if the flag is set.
    pub fn option(&mut self) -> Option<Option<&'a [u8]>> {
        let there = self.flag()?;
        let bytes = self.bytes()?;
        Some(there.then_some(bytes))
    }

    /// A list whose items take at least `min_size` bytes each, so that a count cannot allocate more memory than the
    /// input justifies.
    pub fn list<T>(&mut self, min_size: usize, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let n = self.u32()? as usize;
        if n.checked_mul(min_size)? > self.0.len() {
            return None;
        }
        (0..n).map(|_| item(self)).collect()
    }
}

/// Encoded bytes.
#[derive(Default)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    pub fn u8(&mut self, v: u8) {
        self.0.push(v);
    }

    pub fn u16(&mut self, v: u16) {
        self.0.extend(v.to_le_bytes());
    }

    pub fn u32(&mut self, v: u32) {
        self.0.extend(v.to_le_bytes());
    }

    pub fn u64(&mut self, v: u64) {
        self.0.extend(v.to_le_bytes());
    }

    pub fn count(&mut self, n: usize) {
        self.u32(u32::try_from(n).unwrap_or(u32::MAX));
    }

    pub fn bytes(&mut self, b: &[u8]) {
        self.count(b.len());
        self.0.extend(b);
    }

    pub fn option(&mut self, b: Option<&[u8]>) {
        self.u8(b.is_some().into());
        self.bytes(b.unwrap_or_default());
    }

    pub fn words(&mut self, words: &[u64]) {
        self.count(words.len());
        words.iter().for_each(|w| self.u64(*w));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded() -> Vec<u8> {
        let mut out = Encoder::default();
        out.u8(1);
        out.u16(0x0203);
        out.u64(u64::MAX);
        out.bytes(b"text");
        out.option(Some(b"there"));
        out.option(None);
        out.words(&[4, 5]);
        out.0
    }

    fn decoded(bytes: &[u8]) -> Option<()> {
        let mut input = Decoder(bytes);
        assert!(input.flag()?);
        assert_eq!((input.u16()?, input.u64()?), (0x0203, u64::MAX));
        assert_eq!(input.text()?, "text");
        assert_eq!(input.option()?, Some(&b"there"[..]));
        assert_eq!(input.option()?, None);
        assert_eq!(input.list(8, Decoder::u64)?, [4, 5]);
        input.is_empty().then_some(())
    }

    #[test]
    fn what_is_encoded_is_decoded_and_no_part_of_it() {
        let bytes = encoded();
        assert_eq!(decoded(&bytes), Some(()));
        for length in 0..bytes.len() {
            assert_eq!(decoded(&bytes[..length]), None, "{length}");
        }
    }

    #[test]
    fn lengths_are_bounded() {
        let long = u32::MAX.to_le_bytes();
        assert_eq!(Decoder(&long).bytes(), None);
        assert_eq!(Decoder(&long).list(1, Decoder::u8), None);
        assert_eq!(Decoder(&[2]).flag(), None);
        let mut text = Encoder::default();
        text.bytes(b"text");
        assert_eq!(Decoder(&text.0).bytes_within(3), None);
        assert_eq!(Decoder(&text.0).bytes_within(4), Some(&b"text"[..]));
    }
}

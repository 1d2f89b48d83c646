//! `DW_CFA_AARCH64_negate_ra_state_with_pc` (AADWARF64, 2024Q3: 0x2c) in call frame tables: from there on return
//! addresses are signed, or are not, with the address of the signing instruction as a part of the signature. gimli 0.34
//! ends a function's table where it finds one. For unwinding it means nothing, since signatures are removed without a
//! check: it is overwritten.
//!
//! Written for bytes that may be damaged: what cannot be parsed stays as it is.

use gimli::constants as dw;

const NEGATE_RA_STATE_WITH_PC: u8 = 0x2c;

/// A position in bytes.
struct ByteReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl ByteReader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = self.bytes.get(self.at).copied()?;
        self.at += 1;
        Some(byte)
    }

    fn skip(&mut self, n: usize) -> Option<()> {
        self.at = self.at.checked_add(n).filter(|at| *at <= self.bytes.len())?;
        Some(())
    }

    fn leb(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn lebs(&mut self, n: usize) -> Option<()> {
        (0..n).try_for_each(|_| self.leb().map(drop))
    }

    fn block(&mut self) -> Option<()> {
        let len = usize::try_from(self.leb()?).ok()?;
        self.skip(len)
    }
}

/// Size of a pointer of this encoding (LSB 5.0 core, section 10.5.1), bytes; `None`: of variable size, or none.
fn pointer_size(encoding: u8) -> Option<usize> {
    match encoding & 0x0f {
        0x00 | 0x04 | 0x0c => Some(8),
        0x02 | 0x0a => Some(2),
        0x03 | 0x0b => Some(4),
        _ => None,
    }
}

/// Where the instructions of a CIE begin, the encoding of its functions' addresses, and whether its entries have augmentation
/// data. `reader` is after the entry's identifier.
fn cie(reader: &mut ByteReader<'_>) -> Option<(u8, bool)> {
    let version = reader.byte()?;
    let from = reader.at;
    while reader.byte()? != 0 {}
    let augmentation = reader.bytes.get(from..reader.at - 1)?;
    if version >= 4 {
        reader.skip(2)?; // sizes of an address and of a segment
    }
    reader.lebs(if version == 1 { 2 } else { 3 })?; // alignments, return address register
    if version == 1 {
        reader.skip(1)?;
    }
    let (mut encoding, has_data) = (0, augmentation.first() == Some(&b'z'));
    if has_data {
        let len = usize::try_from(reader.leb()?).ok()?;
        let end = reader.at.checked_add(len)?;
        for letter in &augmentation[1..] {
            match letter {
                b'R' => encoding = reader.byte()?,
                b'L' => drop(reader.byte()?),
                b'P' => {
                    let size = pointer_size(reader.byte()?)?;
                    reader.skip(size)?;
                }
                _ => {}
            }
        }
        reader.at = end;
    } else if !augmentation.is_empty() {
        return None;
    }
    Some((encoding, has_data))
}

/// Positions of the marks among the instructions from the reader's position to the end. `encoding`: of addresses.
fn marks(reader: &mut ByteReader<'_>, encoding: u8, out: &mut Vec<usize>) -> Option<()> {
    while reader.at < reader.bytes.len() {
        let at = reader.at;
        let code = reader.byte()?;
        match code >> 6 {
            0b01 | 0b11 => continue,
            0b10 => {
                reader.lebs(1)?;
                continue;
            }
            _ => {}
        }
        match dw::DwCfa(code) {
            dw::DW_CFA_nop | dw::DW_CFA_remember_state | dw::DW_CFA_restore_state => {}
            dw::DW_CFA_AARCH64_negate_ra_state => {}
            dw::DwCfa(NEGATE_RA_STATE_WITH_PC) => out.push(at),
            dw::DW_CFA_set_loc => reader.skip(pointer_size(encoding)?)?,
            dw::DW_CFA_advance_loc1 => reader.skip(1)?,
            dw::DW_CFA_advance_loc2 => reader.skip(2)?,
            dw::DW_CFA_advance_loc4 => reader.skip(4)?,
            dw::DW_CFA_restore_extended
            | dw::DW_CFA_undefined
            | dw::DW_CFA_same_value
            | dw::DW_CFA_def_cfa_register
            | dw::DW_CFA_def_cfa_offset
            | dw::DW_CFA_def_cfa_offset_sf
            | dw::DW_CFA_GNU_args_size => reader.lebs(1)?,
            dw::DW_CFA_offset_extended
            | dw::DW_CFA_register
            | dw::DW_CFA_def_cfa
            | dw::DW_CFA_offset_extended_sf
            | dw::DW_CFA_def_cfa_sf
            | dw::DW_CFA_val_offset
            | dw::DW_CFA_val_offset_sf
            | dw::DW_CFA_GNU_negative_offset_extended => reader.lebs(2)?,
            dw::DW_CFA_def_cfa_expression => reader.block()?,
            dw::DW_CFA_expression | dw::DW_CFA_val_expression => {
                reader.lebs(1)?;
                reader.block()?;
            }
            _ => return None,
        }
    }
    Some(())
}

/// Bytes of the entry at `offset` of an `.eh_frame`, after its length: from, to.
fn entry(bytes: &[u8], offset: usize) -> Option<(usize, usize)> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let len = word(offset)? as usize;
    // 64-bit entries are not used in this section.
    let from = offset.checked_add(4).filter(|_| len != 0 && len < 0xffff_fff0)?;
    Some((from, from.checked_add(len).filter(|to| *to <= bytes.len())?))
}

/// Overwrites the marks in the entry of one function in an `.eh_frame`, and in the CIE that it belongs to. Were there any?
pub fn remove(bytes: &mut [u8], offset: usize) -> bool {
    let mut found = Vec::new();
    let mut find = || {
        let (from, to) = entry(bytes, offset)?;
        let pointer = u32::from_le_bytes(bytes.get(from..from.checked_add(4)?)?.try_into().ok()?);
        let (cie_from, cie_to) = entry(bytes, from.checked_sub(pointer as usize)?)?;
        let mut reader = ByteReader {
            bytes: bytes.get(..cie_to)?,
            at: cie_from.checked_add(4)?,
        };
        let (encoding, has_data) = cie(&mut reader)?;
        marks(&mut reader, encoding, &mut found)?;
        let mut reader = ByteReader {
            bytes: bytes.get(..to)?,
            at: from.checked_add(4)?,
        };
        reader.skip(2 * pointer_size(encoding)?)?;
        if has_data {
            reader.block()?;
        }
        marks(&mut reader, encoding, &mut found)
    };
    let _ = find(); // what was found before the damage counts
    for at in &found {
        if let Some(mark) = bytes.get_mut(*at) {
            *mark = dw::DW_CFA_nop.0;
        }
    }
    !found.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A CIE with addresses of four bytes, and an FDE.
    fn table(instructions: &[u8]) -> (Vec<u8>, usize) {
        let cie = [&[0, 0, 0, 0, 1][..], b"zR\0", &[4, 0x78, 30, 1, 0x1b], &[0x0c, 31, 0]].concat();
        let fde_at = 4 + cie.len();
        let pointer = (fde_at + 4) as u32;
        let fde = [&pointer.to_le_bytes()[..], &[0x2c; 8], &[1, 0x2c], instructions].concat();
        let mut all = Vec::new();
        for entry in [cie, fde] {
            all.extend((entry.len() as u32).to_le_bytes());
            all.extend(entry);
        }
        (all, fde_at)
    }

    #[test]
    fn only_marks_are_overwritten() {
        // advance_loc 4; mark; def_cfa_offset 0x2c; offset x30; expression of register 0x2c with bytes 0x2c; mark
        let instructions = [0x44, 0x2c, 0x0e, 0x2c, 0x9e, 0x2c, 0x10, 0x2c, 2, 0x2c, 0x2c, 0x2c];
        let (mut bytes, at) = table(&instructions);
        let before = bytes.clone();
        assert!(remove(&mut bytes, at));
        let from = bytes.len() - instructions.len();
        assert_eq!(bytes[..from], before[..from]);
        assert_eq!(
            bytes[from..],
            [0x44, 0, 0x0e, 0x2c, 0x9e, 0x2c, 0x10, 0x2c, 2, 0x2c, 0x2c, 0]
        );
        assert!(!remove(&mut bytes, at));
    }

    #[test]
    fn damaged_tables_stay_as_they_are() {
        let (bytes, at) = table(&[0x44, 0x2c, 0x0f, 0x7f]);
        for end in 0..bytes.len() {
            remove(&mut bytes[..end].to_vec(), at);
        }
        for i in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[i] ^= 0xff;
            remove(&mut damaged, at);
            remove(&mut damaged, i);
        }
    }
}

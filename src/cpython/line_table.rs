//! Line tables of code objects: bytecode offset to line number. Pure; tables may hold any bytes.

use crate::cpython_layout::LineTable;

/// Line of the instruction at `offset` (bytes; -1: before the first), or `None` where the table has no line for it.
pub fn line(kind: LineTable, table: &[u8], first_line: u32, offset: i32) -> Option<u32> {
    if offset < 0 {
        return Some(first_line);
    }
    let line = match kind {
        LineTable::Lnotab => Some(lnotab(table, first_line.into(), offset)),
        LineTable::Ranges => ranges(table, first_line.into(), offset),
        LineTable::Locations => locations(table, first_line.into(), offset),
    };
    line.and_then(|n| u32::try_from(n).ok())
}

/// Objects/lnotab_notes.txt (v3.9): pairs of address and signed line increments.
fn lnotab(table: &[u8], mut line: i64, offset: i32) -> i64 {
    let mut at = 0i64;
    for pair in table.chunks_exact(2) {
        at += i64::from(pair[0]);
        if at > i64::from(offset) {
            break;
        }
        line += i64::from(pair[1] as i8);
    }
    line
}

/// Objects/lnotab_notes.txt (v3.10): pairs of range length and signed line delta, -128 for "no line".
fn ranges(table: &[u8], mut line: i64, offset: i32) -> Option<i64> {
    let mut end = 0i64;
    for pair in table.chunks_exact(2) {
        end += i64::from(pair[0]);
        let delta = pair[1] as i8;
        if delta != -128 {
            line += i64::from(delta);
        }
        if end > i64::from(offset) {
            return (delta != -128).then_some(line);
        }
    }
    None
}

/// Objects/locations.md (v3.11).
fn locations(table: &[u8], mut line: i64, offset: i32) -> Option<i64> {
    let mut rest = table;
    let mut end = 0i64;
    while let Some((head, tail)) = rest.split_first() {
        rest = tail;
        end += 2 * (i64::from(head & 7) + 1);
        let mut has_line = true;
        match head >> 3 & 15 {
            0..=9 => skip(&mut rest, 1)?,
            code @ 10..=12 => {
                line += i64::from(code) - 10;
                skip(&mut rest, 2)?;
            }
            13 => line += signed(&mut rest)?,
            14 => {
                line += signed(&mut rest)?;
                for _ in 0..3 {
                    varint(&mut rest)?;
                }
            }
            _ => has_line = false,
        }
        if end > i64::from(offset) {
            return has_line.then_some(line);
        }
    }
    None
}

fn skip(rest: &mut &[u8], n: usize) -> Option<()> {
    *rest = rest.get(n..)?;
    Some(())
}

/// Groups of six bits, least significant first; bit 6: more follow.
fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..36).step_by(6) {
        let (byte, tail) = rest.split_first()?;
        *rest = tail;
        value |= u64::from(byte & 63) << shift;
        if byte & 64 == 0 {
            return Some(value);
        }
    }
    None
}

fn signed(rest: &mut &[u8]) -> Option<i64> {
    let v = varint(rest)?;
    let magnitude = (v >> 1) as i64;
    Some(if v & 1 == 1 { -magnitude } else { magnitude })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(kind: LineTable, table: &[u8], offset: i32, expected: Option<u32>) {
        assert_eq!(
            line(kind, table, 10, offset),
            expected,
            "{kind:?} {table:?} at {offset}"
        );
    }

    #[test]
    fn lnotab_lines() {
        use LineTable::Lnotab as L;
        let t = [6, 1, 50, 2, 0, 100, 4, 0xff]; // the last delta is -1
        for (at, n) in [
            (-1, 10),
            (0, 10),
            (5, 10),
            (6, 11),
            (55, 11),
            (56, 113),
            (59, 113),
            (60, 112),
            (999, 112),
        ] {
            check(L, &t, at, Some(n));
        }
        check(L, &[], 4, Some(10));
        check(L, &[0, 0x80], 0, None); // line below zero
    }

    #[test]
    fn ranges_lines() {
        use LineTable::Ranges as R;
        let t = [4, 1, 2, 0x80, 0, 5, 6, 0xfe]; // 11, no line, (0-length +5), 14
        for (at, n) in [
            (-1, Some(10)),
            (0, Some(11)),
            (3, Some(11)),
            (4, None),
            (6, Some(14)),
            (11, Some(14)),
            (12, None),
        ] {
            check(R, &t, at, n);
        }
    }

    #[test]
    fn locations_lines() {
        use LineTable::Locations as L;
        // short, one unit; line+1 two units; no columns svarint -2; long +5; none
        let t = [
            0x80,
            0x11,
            0x80 | 11 << 3 | 1,
            0,
            4,
            0x80 | 13 << 3,
            5,
            0x80 | 14 << 3,
            10,
            0,
            1,
            1,
            0x80 | 15 << 3,
        ];
        for (at, n) in [
            (0, Some(10)),
            (2, Some(11)),
            (5, Some(11)),
            (6, Some(9)),
            (8, Some(14)),
            (10, None),
            (12, None),
        ] {
            check(L, &t, at, n);
        }
        check(L, &[0x80 | 13 << 3, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f], 0, None); // endless varint
        check(L, &[0x80 | 14 << 3, 2], 0, None); // truncated
    }
}

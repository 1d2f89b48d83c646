//! The encoding of protocol buffers, without copies: fields of a message are found as they are needed.

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// The fields of a message, with their numbers.
#[derive(Clone, Copy)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Field<'a> {
    /// The number; 0 if it is none.
    pub fn number(self) -> u64 {
        match self {
            Field::Number(number) => number,
            Field::Bytes(_) => 0,
        }
    }

    /// The bytes; empty if it has none.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Field::Number(_) => &[],
            Field::Bytes(bytes) => bytes,
        }
    }

    /// The numbers of a repeated field, packed or one of them.
    pub fn numbers(self) -> Numbers<'a> {
        match self {
            Field::Number(number) => Numbers {
                first: Some(number),
                packed: &[],
            },
            Field::Bytes(packed) => Numbers { first: None, packed },
        }
    }
}

/// Numbers of a repeated field.
pub struct Numbers<'a> {
    first: Option<u64>,
    packed: &'a [u8],
}

impl Iterator for Numbers<'_> {
    type Item = Result<u64, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        if self.packed.is_empty() {
            return None;
        }
        let number = varint(&mut self.packed).ok_or(Malformed);
        if number.is_err() {
            self.packed = &[];
        }
        Some(number)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = field(&mut self.0).ok_or(Malformed);
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

fn field<'a>(bytes: &mut &'a [u8]) -> Option<(u64, Field<'a>)> {
    let key = varint(bytes)?;
    let value = match key & 7 {
        0 => Field::Number(varint(bytes)?),
        1 => Field::Number(u64::from_le_bytes(take(bytes, 8)?.try_into().ok()?)),
        2 => {
            let length = usize::try_from(varint(bytes)?).ok()?;
            Field::Bytes(take(bytes, length)?)
        }
        5 => Field::Number(u32::from_le_bytes(take(bytes, 4)?.try_into().ok()?).into()),
        _ => return None,
    };
    (key >> 3 > 0).then_some((key >> 3, value))
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

/// Ten bytes at most, of which the last one has a bit.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for at in 0..10 {
        let [byte] = take(bytes, 1)?.try_into().ok()?;
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_all_types() {
        let bytes = [
            0x08, 0x96, 0x01, 0x12, 0x02, 0x01, 0x02, 0x1d, 1, 0, 0, 0, 0x21, 2, 0, 0, 0, 0, 0, 0, 0,
        ];
        let fields: Vec<_> = Fields(&bytes).collect();
        assert_eq!(
            fields,
            [
                Ok((1, Field::Number(150))),
                Ok((2, Field::Bytes(&[1, 2]))),
                Ok((3, Field::Number(1))),
                Ok((4, Field::Number(2)))
            ]
        );
        let numbers = |field: Field<'_>| field.numbers().collect::<Vec<_>>();
        assert_eq!(numbers(Field::Number(7)), [Ok(7)]);
        assert_eq!(
            numbers(Field::Bytes(&[1, 0x80, 1, 0x80])),
            [Ok(1), Ok(128), Err(Malformed)]
        );
    }

    #[test]
    fn malformed_messages_end() {
        for bytes in [
            &[0x08][..],
            &[0x12, 5, 1],
            &[0x0b],
            &[0x00, 0x01],
            &[0xff; 12],
            &[0x08, 0xff],
        ] {
            let fields: Vec<_> = Fields(bytes).take(3).collect();
            assert_eq!(fields, [Err(Malformed)], "{bytes:?}");
        }
    }
}

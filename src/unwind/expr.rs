//! DWARF expressions as call frame information uses them (DWARF 5, sections 2.5 and 6.4.2), without allocation.

use super::stack_memory::StackMemory;
use crate::arch::Regs;
use crate::truncation::Truncation;
use gimli::{Encoding, EndianSlice, Format, LittleEndian, Operation};

/// Encoded bytes of an expression.
pub type Expr = Box<[u8]>;

const ENCODING: Encoding = Encoding {
    address_size: 8,
    format: Format::Dwarf32,
    version: 5,
};
/// Operations before an expression counts as endless. The longest in glibc's tables has about ten.
const MAX_STEPS: usize = 1000;
const DEPTH: usize = 32;

/// `(register, offset)` if the expression is just a register plus a constant.
pub fn register_offset(bytes: &[u8]) -> Option<(u8, i64)> {
    let mut input = EndianSlice::new(bytes, LittleEndian);
    match Operation::parse(&mut input, ENCODING).ok()? {
        Operation::RegisterOffset {
            register,
            offset,
            base_type,
        } if input.is_empty() && base_type.0 == 0 => Some((u8::try_from(register.0).ok()?, offset)),
        _ => None,
    }
}

/// `(register, offset)` if the expression is the word at a register plus a constant.
pub fn deref_register_offset(bytes: &[u8]) -> Option<(u8, i64)> {
    let (deref, rest) = bytes.split_last()?;
    (*deref == gimli::DW_OP_deref.0)
        .then(|| register_offset(rest))
        .flatten()
}

struct OperandStack {
    words: [u64; DEPTH],
    len: usize,
}

impl OperandStack {
    fn push(&mut self, word: u64) -> Option<()> {
        *self.words.get_mut(self.len)? = word;
        self.len += 1;
        Some(())
    }

    fn pop(&mut self) -> Option<u64> {
        self.len = self.len.checked_sub(1)?;
        Some(self.words[self.len])
    }

    fn pick(&self, index: usize) -> Option<u64> {
        Some(self.words[self.len.checked_sub(index)?.checked_sub(1)?])
    }
}

/// The expression's value; `initial`: initial content of the stack.
pub fn evaluate(bytes: &[u8], initial: Option<u64>, regs: &Regs, memory: &StackMemory) -> Result<u64, Truncation> {
    let mut failed = Truncation::BadUnwindInfo;
    run(bytes, initial, regs, memory, &mut failed).ok_or(failed)
}

fn run(bytes: &[u8], initial: Option<u64>, regs: &Regs, memory: &StackMemory, failed: &mut Truncation) -> Option<u64> {
    let mut stack = OperandStack {
        words: [0; DEPTH],
        len: 0,
    };
    if let Some(word) = initial {
        stack.push(word)?;
    }
    let mut input = EndianSlice::new(bytes, LittleEndian);
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            return stack.pop();
        }
        match Operation::parse(&mut input, ENCODING).ok()? {
            Operation::Deref {
                base_type,
                size,
                space: false,
            } if base_type.0 == 0 => {
                let address = stack.pop()?;
                let word = memory.word(address).map_err(|truncation| *failed = truncation).ok()?;
                stack.push(if size < 8 {
                    word & ((1 << (8 * u32::from(size))) - 1)
                } else {
                    word
                })?;
            }
            Operation::Drop => drop(stack.pop()?),
            Operation::Pick { index } => stack.push(stack.pick(index.into())?)?,
            Operation::Swap => {
                let (b, a) = (stack.pop()?, stack.pop()?);
                stack.push(b)?;
                stack.push(a)?;
            }
            Operation::Rot => {
                let (c, b, a) = (stack.pop()?, stack.pop()?, stack.pop()?);
                stack.push(c)?;
                stack.push(a)?;
                stack.push(b)?;
            }
            Operation::Abs => {
                let a = stack.pop()?;
                stack.push((a as i64).unsigned_abs())?;
            }
            Operation::Neg => {
                let a = stack.pop()?;
                stack.push(a.wrapping_neg())?;
            }
            Operation::Not => {
                let a = stack.pop()?;
                stack.push(!a)?;
            }
            Operation::PlusConstant { value } => {
                let a = stack.pop()?;
                stack.push(a.wrapping_add(value))?;
            }
            Operation::UnsignedConstant { value } | Operation::Address { address: value } => stack.push(value)?,
            Operation::SignedConstant { value } => stack.push(value as u64)?,
            Operation::RegisterOffset {
                register,
                offset,
                base_type,
            } if base_type.0 == 0 => {
                let Some(value) = regs.get(register.0.into()) else {
                    *failed = memory.lost.unwrap_or(Truncation::BadUnwindInfo);
                    return None;
                };
                stack.push(value.wrapping_add(offset as u64))?;
            }
            Operation::Bra { target } => {
                if stack.pop()? != 0 {
                    input = jump(bytes, &input, target)?;
                }
            }
            Operation::Skip { target } => input = jump(bytes, &input, target)?,
            Operation::Nop => {}
            operation => {
                let (b, a) = (stack.pop()?, stack.pop()?);
                stack.push(binary(&operation, a, b)?)?;
            }
        }
    }
    None
}

type ExprReader<'a> = EndianSlice<'a, LittleEndian>;

fn jump<'a>(bytes: &'a [u8], rest: &ExprReader<'a>, by: i16) -> Option<ExprReader<'a>> {
    let at = (bytes.len() - rest.len()).checked_add_signed(by.into())?;
    Some(EndianSlice::new(bytes.get(at..)?, LittleEndian))
}

/// Operations with two operands; comparisons and division are signed (DWARF 5, section 2.5.1.4).
fn binary(operation: &Operation<ExprReader>, a: u64, b: u64) -> Option<u64> {
    let (sa, sb) = (a as i64, b as i64);
    let shift = u32::try_from(b).ok();
    Some(match operation {
        Operation::And => a & b,
        Operation::Or => a | b,
        Operation::Xor => a ^ b,
        Operation::Plus => a.wrapping_add(b),
        Operation::Minus => a.wrapping_sub(b),
        Operation::Mul => a.wrapping_mul(b),
        Operation::Div => sa.checked_div(sb)? as u64,
        Operation::Mod => a.checked_rem(b)?,
        Operation::Shl => shift.and_then(|s| a.checked_shl(s)).unwrap_or(0),
        Operation::Shr => shift.and_then(|s| a.checked_shr(s)).unwrap_or(0),
        Operation::Shra => sa.checked_shr(shift.unwrap_or(63).min(63))? as u64,
        Operation::Eq => u64::from(a == b),
        Operation::Ne => u64::from(a != b),
        Operation::Lt => u64::from(sa < sb),
        Operation::Le => u64::from(sa <= sb),
        Operation::Gt => u64::from(sa > sb),
        Operation::Ge => u64::from(sa >= sb),
        _ => return None,
    })
}

//! CPython 3.15 keeps a thread's own thread state in a thread-local variable that has no symbol in a stripped file. The
//! exported function that returns its value (Python/pystate.c, v3.15.0: `PyGILState_GetThisThreadState`) is a few
//! instructions long and is decoded to find the variable.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::cpython_layout::ThreadStateLocation;
use crate::process::modules::Module;

/// Maximum size of the decoded function in bytes, and in instructions.
const CODE: usize = 64;
const INSTRUCTIONS: usize = 12;

/// Where the variable is; `InterpreterList` if the function does not have a form that compilers generate.
pub fn variable(module: &Module, runtime: u64) -> ThreadStateLocation {
    let found = || {
        // Of aarch64, no such Python was seen.
        if !cfg!(target_arch = "x86_64") {
            return None;
        }
        let at = module.exports("PyGILState_GetThisThreadState")?;
        let own = decode(&module.read_image(at, CODE)?, at)?;
        Some(match own {
            TlsAccess::Offset(offset) => ThreadStateLocation::Offset(offset),
            TlsAccess::Block { pair, offset } => {
                // System V ABI for x86-64, 4.4.6: a pair of words in the global offset table, the number of the library
                // and the offset in its block; the second one is known when the file is linked.
                let more = u64::from_le_bytes(module.read_image(pair.checked_add(8)?, 8)?.try_into().ok()?);
                ThreadStateLocation::Block {
                    id: i32::try_from(pair.wrapping_sub(runtime) as i64).ok()?,
                    offset: u32::try_from(more.checked_add(offset)?).ok()?,
                }
            }
        })
    };
    found().unwrap_or(ThreadStateLocation::InterpreterList)
}

#[derive(Debug, PartialEq, Eq)]
enum TlsAccess {
    Offset(i32),
    Block { pair: u64, offset: u64 },
}

/// Decodes the function up to its return; the returned value is in rax.
fn decode(code: &[u8], at: u64) -> Option<TlsAccess> {
    let (mut pair, mut called, mut found) = (None, false, None);
    for i in Decoder::with_ip(64, code, at, DecoderOptions::NONE)
        .into_iter()
        .take(INSTRUCTIONS)
    {
        let loads = |to: Register| i.op0_kind() == OpKind::Register && i.op0_register() == to;
        match i.mnemonic() {
            Mnemonic::INVALID => return None,
            Mnemonic::Ret => return found,
            Mnemonic::Lea if loads(Register::RDI) && i.is_ip_rel_memory_operand() => {
                pair = Some(i.ip_rel_memory_address());
            }
            Mnemonic::Call => called = true,
            Mnemonic::Mov if loads(Register::RAX) && i.op1_kind() == OpKind::Memory => {
                found = Some(load(&i, pair.filter(|_| called))?);
            }
            _ => {}
        }
    }
    None
}

fn load(i: &Instruction, pair: Option<u64>) -> Option<TlsAccess> {
    if i.segment_prefix() == Register::FS && i.memory_base() == Register::None {
        return i32::try_from(i.memory_displacement64() as i64)
            .ok()
            .map(TlsAccess::Offset);
    }
    (i.memory_base() == Register::RAX && i.memory_index() == Register::None).then_some(())?;
    Some(TlsAccess::Block {
        pair: pair?,
        offset: i.memory_displacement64(),
    })
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[track_caller]
    fn check(code: &[u8], expected: Option<TlsAccess>) {
        assert_eq!(decode(code, 0x1000), expected, "{code:x?}");
    }

    #[test]
    fn forms_of_access() {
        // endbr64; mov %fs:-40,%rax; ret
        let local = b"\xf3\x0f\x1e\xfa\x64\x48\x8b\x04\x25\xd8\xff\xff\xff\xc3";
        check(local, Some(TlsAccess::Offset(-40)));
        // push %rbp; mov %rsp,%rbp; lea 0x100(%rip),%rdi; call; pop %rbp; mov 0x28(%rax),%rax; ret
        let block = b"\x55\x48\x89\xe5\x48\x8d\x3d\0\x01\0\0\xe8\0\0\0\0\x5d\x48\x8b\x80\x28\0\0\0\xc3";
        check(
            block,
            Some(TlsAccess::Block {
                pair: 0x110b,
                offset: 0x28,
            }),
        );
        // the first word of the block: mov (%rax),%rax
        let first = b"\x48\x8d\x3d\0\x01\0\0\xe8\0\0\0\0\x48\x8b\0\xc3";
        check(
            first,
            Some(TlsAccess::Block {
                pair: 0x1107,
                offset: 0,
            }),
        );
        for end in 0..local.len() {
            check(&local[..end], None);
        }
        check(b"\x48\x8b\x05\0\0\0\0\xc3", None); // an ordinary variable
        check(b"\x31\xc0\xc3", None); // always zero
        check(&[0x90; 64], None);
    }
}

//! x86-64, System V ABI.

/// Number of general registers that the unwinder tracks.
pub const GPRS: usize = 16;
/// DWARF number of the frame pointer.
pub const FP: usize = 6;
/// DWARF number of the stack pointer.
pub const SP: usize = 7;
/// DWARF number of the return address column (System V ABI AMD64 1.0, figure 3.36).
pub const RA: usize = 16;
/// Registers that a callee must preserve (rbx, rbp, r12-r15), as a bit set by DWARF number.
pub const CALLEE_SAVED: u32 = 1 << 3 | 1 << 6 | 0xf << 12;
/// Words of `struct pt_regs` (arch/x86/include/asm/ptrace.h, Linux 6.18).
pub const PT_REGS_WORDS: usize = 21;

/// Registers of one frame, by DWARF number; a register whose bit in `known` is clear was lost on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regs {
    pub gpr: [u64; GPRS],
    /// Instruction pointer: the interrupted one in the innermost frame, a return address in its callers.
    pub ip: u64,
    pub known: u32,
}

impl Regs {
    /// All registers of an interrupted thread, from the kernel's `struct pt_regs`
    /// (r15 r14 r13 r12 bp bx r11 r10 r9 r8 ax cx dx si di orig_ax ip cs flags sp ss).
    pub fn from_pt_regs(w: &[u64; PT_REGS_WORDS]) -> Regs {
        let gpr = [
            w[10], w[12], w[11], w[5], w[13], w[14], w[4], w[19], w[9], w[8], w[7], w[6], w[3], w[2], w[1], w[0],
        ];
        Regs {
            gpr,
            ip: w[16],
            known: 0xffff,
        }
    }

    /// Registers of which only these three are known.
    pub fn from_ip_sp_fp(ip: u64, sp: u64, fp: u64) -> Regs {
        let mut gpr = [0; GPRS];
        gpr[SP] = sp;
        gpr[FP] = fp;
        Regs {
            gpr,
            ip,
            known: 1 << SP | 1 << FP,
        }
    }

    /// Value of a register by DWARF number; the return address column reads as the instruction pointer.
    #[inline]
    pub fn get(&self, dwarf: usize) -> Option<u64> {
        match dwarf {
            RA => Some(self.ip),
            r if r < GPRS && self.known & (1 << r) != 0 => Some(self.gpr[r]),
            _ => None,
        }
    }

    #[inline]
    pub fn sp(&self) -> u64 {
        self.gpr[SP]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pt_regs_land_in_their_dwarf_slots() {
        let mut w = [0u64; PT_REGS_WORDS];
        for (i, v) in w.iter_mut().enumerate() {
            *v = 100 + i as u64;
        }
        let r = Regs::from_pt_regs(&w);
        // rax rdx rcx rbx rsi rdi rbp rsp r8 .. r15
        assert_eq!(
            r.gpr,
            [
                110, 112, 111, 105, 113, 114, 104, 119, 109, 108, 107, 106, 103, 102, 101, 100
            ]
        );
        assert_eq!((r.ip, r.sp()), (116, 119));
        assert_eq!(r.get(RA), Some(116));
    }
}

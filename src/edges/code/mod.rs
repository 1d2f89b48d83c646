//! Machine code as the judge reads it: calls that end at an address, and where single instructions lead. Decoded separately from
//! `arch` and `unwind`, which this code is to check.

mod aarch64;
mod x86_64;

/// Bytes of the longest instruction.
pub const MAX_INSTRUCTION: usize = 16;
/// Bytes before a return address in which its call and the constants that it uses are searched for; fewer where code begins.
pub const LOOK_BACK: [usize; 4] = [40, 24, 8, 4];
/// Zeros in a row that are not code: pieces of a pruned file are further apart.
pub const BLANK: usize = 13;

/// A value that is known to be in a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// The number itself.
    Constant(u64),
    /// What memory holds at this address.
    Slot(u64),
}

/// What a call instruction calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callee {
    /// The instruction states the address.
    Direct(u64),
    /// The instruction reads the address from this address.
    Slot(u64),
    /// A register in which the instructions before it put this. Another path may lead to the call with another value.
    Register(Value),
    Unknown,
}

/// Where execution continues after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Next,
    /// At the target or at the next instruction.
    Branch(u64),
    Jump(u64),
    /// At the address that memory holds at this address.
    JumpSlot(u64),
    /// At an address in a register; what the instructions before put there, if known.
    JumpRegister(Option<Value>),
    /// In a function that returns to the next instruction, if it returns; its address if the instruction states it.
    Call(Option<u64>),
    Return,
    /// Nowhere: a trap, or no instruction.
    End,
}

/// One instruction, as far as control flow goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub length: u64,
    pub flow: Flow,
    /// An address of code that it puts on the stack, where execution may go on later: that of an exception handler.
    pub pushed: Option<u64>,
}

/// Registers whose values are known where a sequence of instructions has come to.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    values: [Option<Value>; 32],
    /// The last instruction put a word where `ret` takes its address from.
    pushed: bool,
}

impl Registers {
    fn set(&mut self, register: usize, value: Option<Value>) {
        if let Some(slot) = self.values.get_mut(register) {
            *slot = value;
        }
    }

    fn get(&self, register: usize) -> Option<Value> {
        self.values.get(register).copied().flatten()
    }
}

/// A kind of CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    X86_64,
    Aarch64,
}

impl Machine {
    /// The kind of CPU that this program is for: tapes of others cannot be read.
    pub const NATIVE: Machine = if cfg!(target_arch = "x86_64") {
        Machine::X86_64
    } else {
        Machine::Aarch64
    };

    /// What the calls that may end at `end` call, where `before` are the bytes before it. Several, if the bytes can be read in
    /// several ways; none if no call ends there.
    pub fn calls_before(self, before: &[u8], end: u64) -> Vec<Callee> {
        match self {
            Machine::X86_64 => x86_64::calls_before(before, end),
            Machine::Aarch64 => aarch64::calls_before(before, end),
        }
    }

    /// May an instruction after which execution never goes on at `end` be the last of these bytes?
    pub fn leaves_before(self, before: &[u8], end: u64) -> bool {
        let lengths = match self {
            Machine::X86_64 => 1..=10,
            Machine::Aarch64 => 4..=4,
        };
        lengths.into_iter().any(|length| {
            let Some(start) = before.len().checked_sub(length) else {
                return false;
            };
            let address = end.wrapping_sub(length as u64);
            let i = self.decode(&before[start..], address, &mut Registers::default());
            let is_leaving = matches!(
                i.flow,
                Flow::Jump(_) | Flow::JumpSlot(_) | Flow::JumpRegister(_) | Flow::Return
            );
            i.length == length as u64 && is_leaving
        })
    }

    /// Bytes before a return address that belong to a call which states what it calls; without them nothing is known.
    pub fn call_window(self) -> usize {
        match self {
            Machine::X86_64 => 7,
            Machine::Aarch64 => 4,
        }
    }

    /// The instruction at `address`, of which these are the bytes; keeps `registers` up to date.
    pub fn decode(self, bytes: &[u8], address: u64, registers: &mut Registers) -> Instruction {
        match self {
            Machine::X86_64 => x86_64::decode(bytes, address, registers),
            Machine::Aarch64 => aarch64::decode(bytes, address, registers),
        }
    }

    /// Length of the code that signal handlers return to, if `bytes` begin with it.
    pub fn signal_return(self, bytes: &[u8]) -> Option<u64> {
        let all = match self {
            Machine::X86_64 => x86_64::SIGNAL_RETURNS,
            Machine::Aarch64 => aarch64::SIGNAL_RETURNS,
        };
        let found = all.iter().find(|code| bytes.starts_with(code));
        found.map(|code| code.len() as u64)
    }
}

/// Whether nothing is known of these bytes: a tape leaves them out.
pub fn is_blank(bytes: &[u8]) -> bool {
    let zeros = bytes.iter().take_while(|b| **b == 0).count();
    zeros >= BLANK.min(bytes.len())
}

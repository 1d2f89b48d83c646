//! Where programs have their interpreters, for processes that the BPF program has no layout of.

#![allow(unsafe_code)]

use aya::maps::{HashMap as BpfHash, Map, MapData};

use super::NOTIFY_FAILED;
use super::abi::{self, LAYOUT_SIZE};
use super::errors::bpf_error;
use super::object::LOAD;
use crate::cpython_layout::{InterpreterPlace, TargetLayout};
use crate::error::Result;
use crate::event::ProgramId;

/// Mirrors `struct program_id` of the program.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    inode: u64,
    device: u64,
}

// SAFETY: plain integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for Key {}

/// Mirrors `struct program` of the program.
#[repr(C)]
#[derive(Clone, Copy)]
struct Place {
    layout: [u8; LAYOUT_SIZE],
    library: u64,
    debug: u64,
}

// SAFETY: plain bytes and integers, no padding, any bit pattern is valid.
unsafe impl aya::Pod for Place {}

pub(super) struct ProgramMap(BpfHash<MapData, Key, Place>);

impl ProgramMap {
    pub(super) fn new(map: Map) -> Result<ProgramMap> {
        Ok(ProgramMap(map.try_into().map_err(|e| bpf_error(LOAD, e))?))
    }

    /// Takes note of the program of a process with this layout.
    pub(super) fn set(&mut self, layout: &TargetLayout) -> Result<()> {
        let (Some((id, place)), Some(python)) = (layout.program, layout.python) else {
            return Ok(());
        };
        let ProgramId { inode, device } = id;
        let (runtime, library, debug) = match place {
            InterpreterPlace::Program { runtime } => (runtime, 0, 0),
            InterpreterPlace::Library { runtime, dynamic, list } => (runtime, dynamic, list),
        };
        let relative = TargetLayout {
            python: Some(crate::cpython_layout::Interpreter { runtime, ..python }),
            ..TargetLayout::default()
        };
        let place = Place {
            layout: abi::encode(&relative),
            library,
            debug,
        };
        self.0
            .insert(Key { inode, device }, place, 0)
            .map_err(|e| bpf_error(NOTIFY_FAILED, e))
    }
}

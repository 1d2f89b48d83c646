//! Stacks of suspended tasks, of any kind.

use super::Session;
use crate::cpython::frame_groups;
use crate::cpython::tasks::{self, RawAwaitFrame};
use crate::cpython_layout::Layout;
use crate::event::{Pid, Tid};
use crate::frame::RawFrame;
use crate::process::memory::Memory;

impl Session {
    /// What groups the stacks of a thread.
    pub(super) fn thread_frames(&self, pid: Pid, tid: Tid) -> Vec<RawFrame> {
        let grouping = self.options.grouping;
        let process = grouping.processes.then_some(RawFrame::Process(pid));
        let thread = grouping.threads.then_some(RawFrame::Thread(tid));
        process.into_iter().chain(thread).collect()
    }

    /// Suspended frames, and the qualified names and files of their functions as far as these can be read.
    pub(super) fn await_frames(
        &mut self,
        pid: Pid,
        (memory, layout): (&dyn Memory, &Layout),
        frames: &[RawAwaitFrame],
    ) -> (Vec<RawFrame>, Vec<(String, String)>) {
        let (mut stack, mut functions) = (Vec::new(), Vec::new());
        for raw in frames {
            stack.push(match tasks::code_of(&mut self.codes, pid, memory, layout, raw) {
                Ok(id) => {
                    let code = self.codes.get(id);
                    let name = match code.qualname.is_empty() {
                        true => tasks::frame_name(memory, layout, raw).unwrap_or_else(|| code.name.clone()),
                        false => code.qualname.clone(),
                    };
                    functions.push((name, code.filename.clone()));
                    let instr = frame_groups::instruction(layout, raw.code, raw.instr);
                    RawFrame::Python { code: id, instr }
                }
                Err(why) => RawFrame::Truncated(why),
            });
        }
        (stack, functions)
    }
}

//! A profile as collapsed ("folded") text: one line per distinct stack, root first, `;` between frames, a space, and
//! the samples that ended there.
//!
//! Python `name (path:line)` with the line of the definition, native and inlined `name (module)`, kernel `name_[k]`, a
//! truncated stack `[truncated: REASON]`, an address without name `[unknown] (module+0xOFFSET)` or `[unknown]
//! (0xADDRESS)`, process and thread by name; samples right in one of those end in `[no stack]`. What would break a line
//! is escaped, see [`escape::frame`].

use std::io::{self, BufWriter, Write};

use crate::escape;
use crate::model::{Frame, Profile};
use crate::view::{View, frame_text, is_group};

/// Represents samples without any frame, with only a thread, a process or nothing at all.
pub const NO_STACK: &str = "[no stack]";

/// [`NO_STACK`] as it follows a process or thread. Also keeps a name like `worker 7` from ending a line, where the 7
/// would be taken for a count.
pub const NO_STACK_BELOW: &str = ";[no stack]";

/// Writes the profile as collapsed text.
pub fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let view = View::new(profile);
    let self_counts = view.self_counts();
    let mut out = BufWriter::with_capacity(64 << 10, out);
    if self_counts[0] > 0 {
        writeln!(out, "{NO_STACK} {}", self_counts[0])?;
    }
    // One buffer holds the path from the root; `ends` has its length before each frame was added.
    let mut line = String::new();
    let mut stack: Vec<(u32, usize)> = view.children(0).iter().rev().map(|child| (*child, 0)).collect();
    while let Some((index, base)) = stack.pop() {
        line.truncate(base);
        if base > 0 {
            line.push(';');
        }
        if let Some(frame) = view.frame(index) {
            line.push_str(&field(frame));
        }
        let self_count = self_counts[index as usize];
        if self_count > 0 {
            let no_stack = if view.frame(index).is_some_and(is_group) {
                NO_STACK_BELOW
            } else {
                ""
            };
            writeln!(out, "{line}{no_stack} {self_count}")?;
        }
        let end = line.len();
        stack.extend(view.children(index).iter().rev().map(|child| (*child, end)));
    }
    out.flush()
}

/// A frame as a field of a line.
pub fn field(frame: &Frame) -> String {
    let text = frame_text(frame);
    if is_group(frame) {
        escape::frame(&text)
    } else {
        escape::last_frame(&text)
    }
    .into_owned()
}

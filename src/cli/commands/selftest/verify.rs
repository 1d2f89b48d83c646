//! Checks profiles of the workload against its possible stacks: each of its functions has one caller.

use std::collections::BTreeMap;

use crate::profile::model::{Frame, FrameKind, Profile, Quality};

/// The workload's parts, whose CPU time it measures.
pub const PARTS: &[&str] = &["self_python", "self_sort", "self_callback", "self_power"];
/// File name of code that was passed with `-c`.
const FILE: &str = "<string>";

/// Sums over some profiles.
#[derive(Debug, Default)]
pub struct Findings {
    pub quality: Quality,
    pub samples: u64,
    /// Samples with each part on their stack.
    pub parts: BTreeMap<String, u64>,
    /// Impossible complete stacks, and an example.
    pub torn: u64,
    pub example: String,
    /// Complete stacks in the part that is C alone, and those without a native frame above it.
    pub in_power: u64,
    pub without_native: u64,
    /// Largest median and longest stop, µs.
    pub stopped: Option<(u64, u64)>,
    /// Seconds.
    pub profiler_cpu: f64,
}

impl Findings {
    pub fn add(&mut self, profile: &Profile) {
        let (sum, q) = (&mut self.quality, &profile.meta.quality);
        sum.expected += q.expected;
        sum.taken += q.taken;
        sum.exact += q.exact;
        sum.repaired += q.repaired;
        sum.partial += q.partial;
        sum.lost += q.lost;
        for (reason, count) in &q.reasons {
            *sum.reasons.entry(reason.clone()).or_default() += count;
        }
        if let Some(stopped) = profile.meta.stopped {
            let (median, longest) = self.stopped.unwrap_or_default();
            self.stopped = Some((median.max(stopped.median_us), longest.max(stopped.max_us)));
        }
        self.profiler_cpu += profile.meta.profiler_cpu;
        for (node, self_count) in profile
            .self_counts()
            .into_iter()
            .enumerate()
            .filter(|(_, self_count)| *self_count > 0)
        {
            self.samples += self_count;
            self.stack(&stack(profile, node), self_count);
        }
    }

    /// Checks samples of one stack, outermost frame first.
    fn stack(&mut self, stack: &[&Frame], samples: u64) {
        let ours = stack
            .iter()
            .enumerate()
            .filter(|(_, f)| f.kind == FrameKind::Python && f.filename == FILE);
        let ours: Vec<(usize, &str)> = ours.map(|(at, f)| (at, &*f.name)).collect();
        for part in PARTS.iter().filter(|part| ours.iter().any(|(_, name)| name == *part)) {
            *self.parts.entry(part.to_string()).or_default() += samples;
        }
        // An incomplete stack is reported as such already.
        if stack.iter().any(|f| f.kind == FrameKind::Truncated) {
            return;
        }
        if let Err(why) = check_call_chain(stack, &ours) {
            self.torn += samples;
            self.example = why;
        }
        if let Some((at, "self_power")) = ours.last() {
            self.in_power += samples;
            self.without_native += if stack.len() == at + 1 { samples } else { 0 };
        }
    }
}

/// Whether this call chain is possible.
fn check_call_chain(stack: &[&Frame], ours: &[(usize, &str)]) -> std::result::Result<(), String> {
    let names: Vec<&str> = ours.iter().map(|(_, name)| *name).collect();
    let bad = Err(format!("functions on the stack: {}", names.join(", ")));
    match &names[..] {
        ["<module>"] | ["<module>", "self_main" | "clock"] | ["<module>", "self_main", "clock"] => Ok(()),
        ["<module>", "self_main", part] if PARTS.contains(part) => Ok(()),
        ["<module>", "self_main", "self_callback", "self_key"] => {
            let between = &stack[ours[2].0 + 1..ours[3].0];
            if between.iter().any(|f| f.kind != FrameKind::Python) {
                Ok(())
            } else {
                Err("`sorted` is missing between self_callback and self_key".into())
            }
        }
        _ => bad,
    }
}

fn stack(profile: &Profile, node: usize) -> Vec<&Frame> {
    let mut frames = Vec::new();
    let mut at = node;
    while at > 0 {
        frames.push(&profile.frames[profile.nodes[at].frame as usize]);
        at = profile.nodes[at].parent as usize;
    }
    frames.reverse();
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(name: &str) -> Frame {
        let native = name.starts_with("c_");
        Frame {
            kind: match name {
                "truncated" => FrameKind::Truncated,
                _ if native => FrameKind::Native,
                _ => FrameKind::Python,
            },
            name: name.into(),
            qualname: String::new(),
            filename: if native { "<low-level>" } else { FILE }.into(),
            first_line: 1,
            address: 0,
            module: String::new(),
            source: String::new(),
        }
    }

    #[test]
    fn impossible_stacks_are_seen() {
        for (text, torn) in [
            ("c_start <module> self_main self_python", 0),
            ("c_start <module> self_main self_sort c_sort", 0),
            ("c_start <module> self_main self_callback c_sort self_key", 0),
            ("c_start <module> self_main self_callback c_sort self_key c_neg", 0),
            ("c_start <module> c_read", 0),
            ("truncated self_key", 0),
            ("c_start <module> self_main self_callback self_key", 1),
            ("c_start <module> self_main self_sort c_sort self_key", 1),
            ("c_start <module> self_python", 1),
            ("c_start self_main self_python", 1),
            ("c_start <module> self_main self_sort self_power", 1),
            ("c_start", 1),
            ("", 1),
        ] {
            let frames: Vec<Frame> = text.split_whitespace().map(frame).collect();
            let mut findings = Findings::default();
            findings.stack(&frames.iter().collect::<Vec<_>>(), 1);
            assert_eq!(findings.torn, torn, "{text}");
        }
    }
}

//! Joins the entries of the ring buffer that belong to one sample.

use rustc_hash::FxHashMap;

use super::abi::{
    CODE_COPY, DecodedRecord, FLAGS, FREED, MORE, RANGE, REST, SamplePart, TID, TIME, decode, decode_code,
    decode_freed, decode_part, decode_range,
};
use crate::bytes::{u32_at, u64_at};
use crate::event::{RunningTask, Sample, SpanRecords, Tid};

/// Samples that wait for the rest of their stacks, at most. Rests follow at once, so beyond this number they were lost.
const MAX_OPEN: usize = 64;

/// Joins the records of one thread's samples.
#[derive(Default)]
pub struct StackReassembler {
    /// Samples whose stacks are incomplete.
    open: FxHashMap<Tid, Sample>,
    /// Of samples that have not come yet.
    parts: FxHashMap<Tid, SampleParts>,
}

/// What comes before the sample that it belongs to.
#[derive(Default)]
struct SampleParts {
    time: u64,
    spans: SpanRecords,
    tasks: Vec<RunningTask>,
}

impl StackReassembler {
    /// Adds a ring buffer entry; appends the records that it completes. A truncated entry is dropped.
    pub fn add_entry(&mut self, b: &[u8], out: &mut Vec<DecodedRecord>) {
        let Some(flags) = u32_at(b, FLAGS) else { return };
        if flags & CODE_COPY != 0 {
            if let Some(part) = decode_part(b) {
                self.add_part(b, part);
            } else {
                out.extend(decode_code(b));
            }
            return;
        }
        if flags & RANGE != 0 {
            out.extend(decode_range(b));
            return;
        }
        if flags & FREED != 0 {
            out.extend(decode_freed(b));
            return;
        }
        let Some(mut sample) = decode(b) else { return };
        if let Some(parts) = self.parts.remove(&sample.tid)
            && parts.time == sample.time
        {
            (sample.spans, sample.tasks) = (parts.spans, parts.tasks);
        }
        if flags & REST != 0 {
            let Some(mut first) = self.open.remove(&sample.tid) else {
                return;
            };
            if first.time == sample.time {
                first.stack.append(sample.stack);
            }
            sample = first;
        } else {
            // The rest was lost: the sample is emitted without it.
            out.extend(
                self.open
                    .remove(&sample.tid)
                    .map(|s| DecodedRecord::Sample(Box::new(s))),
            );
        }
        if self.open.len() >= MAX_OPEN {
            self.finish(out);
        }
        if flags & MORE != 0 {
            self.open.insert(sample.tid, sample);
        } else {
            out.push(DecodedRecord::Sample(Box::new(sample)));
        }
    }

    fn add_part(&mut self, b: &[u8], part: SamplePart) {
        let (Some(tid), Some(time)) = (u32_at(b, TID), u64_at(b, TIME)) else {
            return;
        };
        // Samples follow at once, so beyond this number they were lost.
        if self.parts.len() >= MAX_OPEN {
            self.parts.clear();
        }
        let parts = self.parts.entry(tid).or_default();
        if parts.time != time {
            *parts = SampleParts::default();
            parts.time = time;
        }
        match part {
            SamplePart::Span(record) => parts.spans.package = record,
            SamplePart::Context(record) => parts.spans.context = record,
            SamplePart::Task(task, frame, name) => RunningTask::add(&mut parts.tasks, task, frame, name),
        }
    }

    /// Appends the samples whose rests were lost; called at the end.
    pub fn finish(&mut self, out: &mut Vec<DecodedRecord>) {
        out.extend(self.open.drain().map(|(_, s)| DecodedRecord::Sample(Box::new(s))));
    }
}

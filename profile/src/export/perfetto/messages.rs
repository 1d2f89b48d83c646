//! The messages of a Perfetto trace that are written; field names and numbers as in `protos/perfetto/trace` of google/perfetto
//! 0.59 (trace_packet, interned_data, profiling/profile_common, profiling/stack_sample, track_event).

use prost::{Enumeration, Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub struct TracePacket {
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    pub trusted_packet_sequence_id: u32,
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "12")]
    pub interned_data: Option<InternedData>,
    #[prost(uint32, tag = "13")]
    pub sequence_flags: u32,
    #[prost(message, optional, tag = "59")]
    pub trace_packet_defaults: Option<TracePacketDefaults>,
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<TrackDescriptor>,
    #[prost(message, optional, tag = "135")]
    pub stack_sample: Option<StackSample>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TracePacketDefaults {
    #[prost(message, optional, tag = "100")]
    pub stack_sample_defaults: Option<StackSampleDefaults>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StackSampleDefaults {
    #[prost(string, tag = "1")]
    pub source: String,
    #[prost(message, optional, tag = "2")]
    pub primary_descriptor: Option<CounterDescriptor>,
    #[prost(message, repeated, tag = "3")]
    pub follower_descriptors: Vec<CounterDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CounterDescriptor {
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(enumeration = "CounterUnit", tag = "3")]
    pub unit: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
pub enum CounterUnit {
    Unspecified = 0,
    Nanoseconds = 1,
    Bytes = 4,
    Count = 9,
}

#[derive(Clone, PartialEq, Message)]
pub struct StackSample {
    #[prost(uint64, tag = "2")]
    pub task_context_iid: u64,
    #[prost(uint64, tag = "6")]
    pub callstack_iid: u64,
    #[prost(uint64, tag = "11")]
    pub primary_weight: u64,
    #[prost(uint64, repeated, tag = "14")]
    pub follower_weights: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct InternedData {
    #[prost(message, repeated, tag = "5")]
    pub function_names: Vec<InternedString>,
    #[prost(message, repeated, tag = "6")]
    pub frames: Vec<InternedFrame>,
    #[prost(message, repeated, tag = "7")]
    pub callstacks: Vec<Callstack>,
    #[prost(message, repeated, tag = "16")]
    pub build_ids: Vec<InternedString>,
    #[prost(message, repeated, tag = "17")]
    pub mapping_paths: Vec<InternedString>,
    #[prost(message, repeated, tag = "18")]
    pub source_paths: Vec<InternedString>,
    #[prost(message, repeated, tag = "19")]
    pub mappings: Vec<PerfettoMapping>,
    #[prost(message, repeated, tag = "48")]
    pub stack_sample_task_contexts: Vec<TaskContext>,
    #[prost(message, repeated, tag = "51")]
    pub stack_sample_async_context_descriptors: Vec<AsyncContext>,
}

#[derive(Clone, PartialEq, Message)]
pub struct InternedString {
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub str: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct InternedFrame {
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    #[prost(uint64, tag = "2")]
    pub function_name_id: u64,
    #[prost(uint64, tag = "3")]
    pub mapping_id: u64,
    /// There even if it is 0, where there is a mapping.
    #[prost(uint64, optional, tag = "4")]
    pub rel_pc: Option<u64>,
    #[prost(uint64, tag = "5")]
    pub source_path_iid: u64,
    #[prost(uint32, tag = "6")]
    pub line_number: u32,
    #[prost(oneof = "FrameOriginField", tags = "7, 8")]
    pub kind: Option<FrameOriginField>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum FrameOriginField {
    #[prost(enumeration = "FrameOrigin", tag = "7")]
    Known(i32),
    #[prost(string, tag = "8")]
    Other(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
pub enum FrameOrigin {
    Unknown = 0,
    Native = 1,
    Kernel = 2,
    Interpreted = 3,
}

/// Frames are from the outermost on.
#[derive(Clone, PartialEq, Message)]
pub struct Callstack {
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    #[prost(uint64, repeated, packed = "false", tag = "2")]
    pub frame_ids: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PerfettoMapping {
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    #[prost(uint64, tag = "2")]
    pub build_id: u64,
    #[prost(uint64, repeated, packed = "false", tag = "7")]
    pub path_string_ids: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TaskContext {
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    #[prost(uint32, tag = "3")]
    pub tid: u32,
    #[prost(uint64, tag = "4")]
    pub async_id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct AsyncContext {
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub kind: String,
    #[prost(uint64, tag = "4")]
    pub parent_iid: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    pub uuid: u64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(message, optional, tag = "3")]
    pub process: Option<ProcessDescriptor>,
    #[prost(message, optional, tag = "4")]
    pub thread: Option<TrackThread>,
    #[prost(uint64, tag = "5")]
    pub parent_uuid: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct ProcessDescriptor {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    #[prost(string, tag = "6")]
    pub process_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct TrackThread {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    #[prost(int64, tag = "2")]
    pub tid: i64,
    #[prost(string, tag = "5")]
    pub thread_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct TrackEvent {
    #[prost(enumeration = "EventType", tag = "9")]
    pub r#type: i32,
    #[prost(uint64, tag = "11")]
    pub track_uuid: u64,
    #[prost(string, tag = "23")]
    pub name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
pub enum EventType {
    Unspecified = 0,
    SliceBegin = 1,
    SliceEnd = 2,
}

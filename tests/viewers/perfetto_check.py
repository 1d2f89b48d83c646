"""Reads a trace of ours with Perfetto's own message definitions and prints what it holds, in JSON.

Usage: perfetto_check.py FILE
"""

import json
import sys
from collections import defaultdict

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

trace = pb.Trace()
with open(sys.argv[1], "rb") as file:
    trace.ParseFromString(file.read())

tables = defaultdict(dict)
totals = defaultdict(int)
functions = defaultdict(lambda: [0, 0])
threads = defaultdict(lambda: [0, 0])
tasks, states, open_slices, tracks = {}, defaultdict(int), {}, {}
defaults = None


def added(kind, rows):
    """Each number is given once, and never 0."""
    for row in rows:
        assert row.iid != 0 and row.iid not in tables[kind], (kind, row)
        tables[kind][row.iid] = row


def text(kind, iid):
    return tables[kind][iid].str.decode()


for at, packet in enumerate(trace.packet):
    assert packet.trusted_packet_sequence_id == 1
    assert packet.sequence_flags == (1 if at == 0 else 2), at
    if packet.HasField("trace_packet_defaults"):
        defaults = packet.trace_packet_defaults.stack_sample_defaults
    if packet.HasField("interned_data"):
        for field, rows in packet.interned_data.ListFields():
            added(field.name, rows)
    if packet.HasField("track_descriptor"):
        descriptor = packet.track_descriptor
        assert descriptor.uuid not in tracks
        assert not descriptor.parent_uuid or descriptor.parent_uuid in tracks, descriptor
        tracks[descriptor.uuid] = descriptor
    if packet.HasField("track_event"):
        event = packet.track_event
        assert tracks[event.track_uuid].name == "state"
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_slices
            open_slices[event.track_uuid] = (event.name, packet.timestamp)
        else:
            name, start = open_slices.pop(event.track_uuid)
            assert packet.timestamp > start, (name, start)
            states[name] += packet.timestamp - start
    if packet.HasField("stack_sample"):
        sample = packet.stack_sample
        weights = [sample.primary_weight, *sample.follower_weights]
        counters = [defaults.primary_descriptor, *defaults.follower_descriptors]
        assert len(weights) == len(counters)
        for counter, weight in zip(counters, weights):
            totals[counter.name] += weight
        count = next(w for c, w in zip(counters, weights) if c.unit == pb.StackSample.UNIT_COUNT)
        context = tables["stack_sample_task_contexts"][sample.task_context_iid]
        row = threads[context.tid]
        row[0] += count
        row[1] = max(row[1], packet.timestamp)
        if context.async_id:
            task = tables["stack_sample_async_context_descriptors"][context.async_id]
            assert task.parent_iid == 0 or task.parent_iid in tables["stack_sample_async_context_descriptors"]
            tasks[task.name] = tasks.get(task.name, 0) + count
        stack = []
        for iid in tables["callstacks"][sample.callstack_iid].frame_ids:
            frame = tables["frames"][iid]
            stack.append(text("function_names", frame.function_name_id))
            assert frame.WhichOneof("kind_field") or stack[-1].startswith("["), frame
            if frame.source_path_iid:
                assert text("source_paths", frame.source_path_iid)
            if frame.mapping_id:
                assert frame.HasField("rel_pc"), frame
                mapping = tables["mappings"][frame.mapping_id]
                assert text("mapping_paths", mapping.path_string_ids[0])
                assert mapping.build_id == 0 or tables["build_ids"][mapping.build_id].str
        functions[stack[-1]][0] += count
        for name in set(stack):
            functions[name][1] += count

assert not open_slices
print(
    json.dumps(
        {
            "totals": totals,
            "functions": functions,
            "threads": threads,
            "tasks": tasks,
            "states": states,
            "build_ids": [row.str.hex() for row in tables["build_ids"].values()],
        }
    )
)

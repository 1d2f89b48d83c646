"""Reads OTLP profiles of ours with OpenTelemetry's own message definitions, checks the rules of the format, and prints
what the file holds, in JSON.

Usage: otlp_check.py FILE
"""

import gzip
import json
import sys
from collections import defaultdict

from google.protobuf.unknown_fields import UnknownFieldSet
from opentelemetry.proto.profiles.v1development import profiles_pb2 as pb

data = pb.ProfilesData()
with gzip.open(sys.argv[1]) as file:
    data.ParseFromString(file.read())
tables = data.dictionary
used = defaultdict(set)


def known(message):
    """Each field is one of the definitions, at every depth."""
    assert not len(UnknownFieldSet(message)), message
    for field, value in message.ListFields():
        if field.message_type:
            for part in value if field.is_repeated else [value]:
                known(part)


def entry(table, index):
    used[table].add(index)
    assert index >= 0, (table, index)
    return getattr(tables, table + "_table")[index]


def text(index):
    return entry("string", index)


def attributes(message):
    rows = [entry("attribute", index) for index in message.attribute_indices]
    found = {text(row.key_strindex): getattr(row.value, row.value.WhichOneof("value")) for row in rows}
    assert len(found) == len(rows), rows
    assert all(text(row.unit_strindex) is not None for row in rows)
    return found


def line(row):
    """The name of a function."""
    function = entry("function", row.function_index)
    names = [text(index) for index in (function.name_strindex, function.system_name_strindex, function.filename_strindex)]
    assert any(names) and function.start_line >= 0 and row.line >= 0, function
    return names[0]


def location(index):
    """Names of functions, innermost first; of an address without a name, where it is."""
    row = entry("location", index)
    mapping = entry("mapping", row.mapping_index)
    assert mapping.memory_start < mapping.memory_limit or mapping.memory_limit == 0
    file, more = text(mapping.filename_strindex), attributes(mapping)
    if "process.executable.build_id.gnu" in more:
        build_ids.add(more["process.executable.build_id.gnu"])
    kind = attributes(row).get("profile.frame.type")
    names = [line(part) for part in row.lines]
    assert kind or names == ["[no stack]"], row
    place = f"{file.rsplit('/')[-1]}+0x{row.address:x}" if row.mapping_index else f"0x{row.address:x}"
    return names or [f"[unknown] ({place})"]


known(data)
build_ids = set()
totals = defaultdict(int)
functions = defaultdict(lambda: [0, 0])
threads = defaultdict(lambda: [0, 0])
recordings = []
assert len(data.resource_profiles) == 1
resource = data.resource_profiles[0]
assert len({row.key for row in resource.resource.attributes}) == len(resource.resource.attributes)
[scope] = resource.scope_profiles
assert scope.scope.name == "nativeprof"
assert scope.profiles
for at, profile in enumerate(scope.profiles):
    kind = text(profile.sample_type.type_strindex), text(profile.sample_type.unit_strindex)
    if profile.HasField("period_type"):
        period = text(profile.period_type.type_strindex)
        assert text(profile.period_type.unit_strindex) and profile.period > 0
    else:
        period = None
    recordings.append({key: value for key, value in attributes(profile).items() if isinstance(value, (str, int))})
    start, end = profile.time_unix_nano, profile.time_unix_nano + profile.duration_nano
    shapes, identities = set(), set()
    for sample in profile.samples:
        assert sample.values or sample.timestamps_unix_nano
        shapes.add((bool(sample.values), bool(sample.timestamps_unix_nano)))
        assert len(sample.values) in ({0, len(sample.timestamps_unix_nano)} if sample.timestamps_unix_nano else {1})
        assert all(start <= time < end for time in sample.timestamps_unix_nano)
        identity = sample.stack_index, frozenset(sample.attribute_indices), sample.link_index
        assert identity not in identities, identity
        identities.add(identity)
        link = entry("link", sample.link_index)
        assert sample.link_index == 0 or (len(link.trace_id), len(link.span_id)) == (16, 8)
        amount = sum(sample.values) if sample.values else len(sample.timestamps_unix_nano)
        totals[kind[0]] += amount
        if period:
            totals[period] += amount * profile.period
        of = attributes(sample)
        stack = [name for index in entry("stack", sample.stack_index).location_indices for name in location(index)]
        assert stack, sample
        if kind[1] == "count":
            functions[stack[0]][0] += amount
            for name in set(stack):
                functions[name][1] += amount
            if sample.timestamps_unix_nano:
                row = threads[of["thread.id"]]
                row[0] += amount
                row[1] = max(row[1], max(sample.timestamps_unix_nano) - start)
    assert len(shapes) <= 1, shapes

for field, rows in tables.ListFields():
    name = field.name.removesuffix("_table")
    first = rows[0] if name == "string" else rows[0].SerializeToString()
    assert not first, (name, first)
    different = {row if name == "string" else row.SerializeToString(deterministic=True) for row in rows}
    assert len(different) == len(rows), f"an entry of {name} is there twice"
    assert used[name] | {0} == set(range(len(rows))), f"nothing refers to an entry of {name}"
assert {field.name for field, _ in tables.ListFields()} == {field.name for field in tables.DESCRIPTOR.fields}

print(
    json.dumps(
        {
            "totals": totals,
            "functions": functions,
            "threads": threads,
            "build_ids": sorted(build_ids),
            "recording": recordings[0],
        }
    )
)
